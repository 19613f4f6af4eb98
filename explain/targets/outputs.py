"""How the outputs of a model become probabilities: decided here, and used by predictions, methods and metrics alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch

from explain._utils.errors import ModelError, option, shown

Activation: TypeAlias = Literal["softmax", "sigmoid", "none"]
"""What turns a model's outputs into probabilities; "none" where they are probabilities already."""

THRESHOLD = 0.5
"""From which probability on a label counts as predicted, where several may be true of one photo."""
ROUNDING = 1e-4
"""By how much the sum of probabilities may miss one."""
COARSE = 2e-2
"""The same for outputs that came from a softmax in half precision."""


class Prediction(NamedTuple):
    """A label, its probability, and its class; None for the answer "no" of a model with one output.

    ``box`` is where a detection is: x0 y0 x1 y1 in pixels of the photo.
    """

    label: str
    probability: float
    category: int | None
    box: tuple[float, float, float, float] | None = None


@dataclass(frozen=True)
class Outputs:
    """How the outputs ``(N, K)`` of a model become probabilities ``(N, K)``.

    ``exclusive`` says that they add up to one: one class is true of a photo. Otherwise each class is true or not on its
    own. ``temperature`` divides scores first, so that the probabilities are calibrated.

    >>> Outputs("sigmoid", exclusive=False).probabilities(torch.tensor([[0.0, 9.0]])).round(decimals=2)
    tensor([[0.5000, 1.0000]])
    """

    activation: Activation = "softmax"
    exclusive: bool = True
    temperature: float = 1.0

    def probabilities(self, outputs: torch.Tensor) -> torch.Tensor | None:
        """Return the probabilities of all classes; None where outputs that should be some leave [0, 1]."""
        if self.activation == "none" and not _within(outputs, ROUNDING):
            return None
        return self._applied(outputs, self.temperature)

    def of_classes(self, outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Return the probability ``(N,)`` of one class ``(N,)`` for each row, without a temperature."""
        return self._applied(outputs, 1.0).gather(1, classes[:, None].to(outputs.device))[:, 0]

    def predicted(self, probabilities: torch.Tensor, categories: Sequence[str] | None, most: int) -> list[Prediction]:
        """Return what is predicted of a photo with these probabilities ``(K,)``, the most probable first.

        Of classes that exclude each other, that is the best few; otherwise all that are more probable than not. A model
        with one output says yes or no.

        >>> Outputs("sigmoid", exclusive=False).predicted(torch.tensor([0.25]), ["cat"], 5)[0]
        Prediction(label='not cat', probability=0.75, category=None, box=None)
        """
        if len(probabilities) == 1:
            yes = float(probabilities[0])
            label = self.label(categories, 0, classes=1)
            both = [Prediction(label, yes, 0), Prediction(label_of_no(categories), 1 - yes, None)]
            return both if yes >= THRESHOLD else both[::-1]
        best = probabilities.topk(min(most, len(probabilities)) if self.exclusive else len(probabilities))
        found = [
            Prediction(self.label(categories, i), p, i)
            for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        return found if self.exclusive else [each for each in found if each.probability >= THRESHOLD]

    def label(self, categories: Sequence[str] | None, index: int, classes: int | None = None) -> str:
        """Return the label of a class, or a plain name where it has none; that of one output alone is yes.

        >>> Outputs().label(["cat", "dog"], 1), Outputs().label(None, 1), Outputs().label(None, 0, classes=1)
        ('dog', 'class 1', 'yes')
        """
        if categories is not None and index < len(categories):
            return categories[index]
        return "yes" if classes == 1 else f"class {index}"

    def _applied(self, outputs: torch.Tensor, temperature: float) -> torch.Tensor:
        values = outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
        if self.activation == "none":
            return values
        values = values / temperature
        return values.softmax(1) if self.activation == "softmax" else values.sigmoid()


def label_of_no(categories: Sequence[str] | None) -> str:
    """Return how a model with one output says no.

    >>> label_of_no(None), label_of_no(["pneumonia"])
    ('no', 'not pneumonia')
    """
    return "no" if categories is None else f"not {categories[0]}"


def check_activation(given: object) -> None:
    """Refuse what is no activation.

    Raises:
        ModelError: it is neither one of their names nor None.
    """
    if given is not None and given not in get_args(Activation):
        known, got = "'softmax', 'sigmoid' or 'none'", shown(given)
        raise ModelError(f"{option('activation')} must be {known}, got {got}; leave it out to detect it")


def outputs_like(
    outputs: torch.Tensor, activation: Activation | None = None, squashed: Callable[[], bool] = lambda: False
) -> Outputs:
    """Say how outputs ``(N, K)`` like these become probabilities.

    Args:
        outputs: what the model gave for some photos.
        activation: what the caller says; None finds it out. Values in [0, 1] that add up to one are probabilities, and
            so are others in [0, 1] that the network got from a softmax or sigmoid. Else, several are scores for a
            softmax, and one alone is a score for a sigmoid.
        squashed: whether the network got them so; called where this decides.

    Raises:
        ModelError: a softmax is wanted of a single output, which would always be certain.

    >>> outputs_like(torch.tensor([[0.25, 0.75]])), outputs_like(torch.tensor([[-3.0, 2.0]])).activation
    (Outputs(activation='none', exclusive=True, temperature=1.0), 'softmax')
    """
    several = outputs.shape[1] > 1
    off = (outputs.double().sum(1) - 1).abs()
    if activation is None:
        if _within(outputs) and ((several and bool((off < ROUNDING).all())) or squashed()):
            activation = "none"
        else:
            activation = "softmax" if several else "sigmoid"
    if activation == "softmax" and not several:
        name = option("activation")
        raise ModelError(f"{name} must be 'sigmoid' or 'none' for a model with one output, got 'softmax'; leave it out")
    exclusive = activation == "softmax" or (activation == "none" and several and bool((off < COARSE).all()))
    return Outputs(activation, exclusive)


def _within(outputs: torch.Tensor, slack: float = 0.0) -> bool:
    return bool(((outputs >= -slack) & (outputs <= 1 + slack)).all())
