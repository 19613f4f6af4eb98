"""`Classifier`: a model with all that belongs to it: preprocessing, labels, and a temperature for its probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from explain._utils.errors import LabelsError, ModelError, either, warn
from explain.data.images import Preprocess
from explain.data.inputs import InputsLike
from explain.engine import forward, validation
from explain.targets.labels import class_label
from explain.targets.outputs import Activation, Outputs, outputs_like


@dataclass(frozen=True, eq=False)
class Classifier:
    """A model, how a photo becomes its input, what its classes are called, and how sharp its probabilities are.

    ``temperature`` divides the logits before the softmax, so that the probabilities shown are calibrated; it never
    changes their order. ``activation`` is what makes probabilities of the model's outputs ("softmax", "sigmoid", or
    "none" where they are probabilities); None leaves an `Explainer` to find it out. ``weights`` says which weights the
    model carries, where that is known. ``assumed`` says in one line what had to be assumed about the preprocessing, if
    anything.
    """

    model: nn.Module
    preprocess: Preprocess
    categories: Sequence[str] | None = None
    name: str = "model"
    temperature: float = 1.0
    weights: str | None = None
    assumed: str | None = None
    activation: Activation | None = None

    def __repr__(self) -> str:
        classes = "no labels" if self.categories is None else f"{len(self.categories)} labels"
        return f"Classifier({self.name!r}, {type(self.model).__name__}, {classes})"

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return calibrated probabilities ``(N, K)`` from logits ``(N, K)``."""
        found = outputs_like(logits, self.activation)
        return replace(found, temperature=self.temperature).probabilities(logits.float())  # type: ignore[return-value]

    def label(self, index: int) -> str:
        """Return the label of a class, or a plain name where it has none."""
        return class_label(self.categories, index)


def on_device(model: nn.Module, device: str | torch.device) -> nn.Module:
    """Move a model to a device.

    Raises:
        ModelError: there is no such device, or it cannot be used.
    """
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        reason = reason if len(reason) < 100 else "torch knows no such device"  # torch lists all that might exist
        raise ModelError(f"device {str(device)!r} cannot be used ({reason}); use 'cpu', or 'cuda' with a GPU") from None


def outputs_for(model: Classifier, x: InputsLike, logits: torch.Tensor, activation: Activation | None) -> Outputs:
    """Say how a classifier's outputs become probabilities, of which ``logits`` ``(N, K)`` are those for ``x``.

    A warning says it where they are found to be probabilities already.
    """
    found = forward.outputs_of(model.model, validation.check_inputs(model.model, x), logits, activation)
    if activation is None and found.activation == "none":
        how = "add up to one" if found.exclusive else "lie between 0 and 1"
        taken = f"so they are taken as they are; {either('pass activation=', 'give --activation')} to say what they are"
        warn(f"model {model.name!r} gives probabilities already (they {how}), {taken}")
    return replace(found, temperature=model.temperature)


def check_labels(categories: Sequence[str] | None, classes: int) -> None:
    """Refuse labels that are more or fewer than the classes.

    Raises:
        LabelsError: they are.
    """
    if categories is not None and len(categories) != classes:
        needed = f"{either('categories', '--labels')} must hold a label for each of the model's {classes} classes"
        raise LabelsError(f"{needed}, got {len(categories)}; give them all, in the order of the classes")
