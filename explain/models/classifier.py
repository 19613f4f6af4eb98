"""`Classifier`: a model with all that belongs to it: preprocessing, labels, and a temperature for
its probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from explain._utils.errors import LabelsError, ModelError, note, python_or_command, reason_of, warn
from explain.data.boxes import Preprocess
from explain.data.inputs import InputsLike
from explain.engine import validation
from explain.engine.output_kinds import outputs_of
from explain.targets.labels import class_label
from explain.targets.outputs import Activation, Outputs, outputs_like


@dataclass(frozen=True, eq=False)
class Classifier:
    """A model, how a photo becomes its input, what its classes are called, and how sharp its
    probabilities are.

    ``temperature`` divides the logits before the softmax, so that the probabilities shown are
    calibrated; it never changes their order. ``activation`` is what makes probabilities of the
    model's outputs ("softmax", "sigmoid", or "none" where they are some already, or numbers); None
    leaves an `Explainer` to find it out. ``weights`` says which weights the model carries, where
    that is known. ``assumed`` says in one line what had to be assumed about the preprocessing, if
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
        """Return calibrated probabilities ``(N, K)`` from the model's logits ``(N, K)``: divided by
        the classifier's temperature, then a softmax or what its ``activation`` says."""
        outputs = outputs_like(logits, self.activation)
        return replace(outputs, temperature=self.temperature).probabilities(logits.float())  # type: ignore[return-value]

    def label(self, index: int) -> str:
        """Return the label of a class, or a plain name where it has none."""
        return class_label(self.categories, index)


def on_device(model: nn.Module, device: str | torch.device) -> nn.Module:
    """Move a model to a device."""
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise ModelError(
            f"device {str(device)!r} cannot be used ({reason_of(error)}); use 'cpu', or 'cuda' "
            "with a GPU"
        ) from None


def outputs_for(
    model: Classifier, x: InputsLike, logits: torch.Tensor, activation: Activation | None
) -> Outputs:
    """What the outputs ``logits`` ``(N, K)`` for ``x`` are (classes, labels or numbers; logits or
    probabilities), by ``activation`` if given. Warns where they are probabilities already.
    """
    inputs = validation.check_inputs(model.model, x)
    outputs = outputs_of(model.model, inputs, logits, activation, model.categories)
    remedy = python_or_command("pass activation=", "give --activation")
    if activation is None and outputs.activation == "none" and outputs.kind != "numbers":
        how = "of a softmax" if outputs.kind == "classes" else "of a sigmoid"
        warn(
            f"model {model.name!r} gives probabilities already ({how}), so they are taken as "
            f"they are; {remedy} to say what they are"
        )
    if activation is None and outputs.kind == "numbers":
        remedy = python_or_command('pass activation="sigmoid"', "give --activation sigmoid")
        note(f"model {model.name!r} gives one number; {remedy} if it is the score of a yes")
    return replace(outputs, temperature=model.temperature)


def check_labels(categories: Sequence[str] | None, classes: int) -> None:
    """Refuse labels that are more or fewer than the classes."""
    if categories is not None and len(categories) != classes:
        name = python_or_command("categories", "--labels")
        raise LabelsError(
            f"{name} must hold a label for each of the model's {classes} classes, got "
            f"{len(categories)}; give them all, in the order of the classes"
        )
