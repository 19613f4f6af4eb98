"""What a model's output is: decided once, for predictions, targets, methods, metrics and checks.

It may hold scores or probabilities, of classes of which one is true or of labels of which several
may be, or numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from explain._utils.errors import ModelError, option_name, shown
from explain.targets.labels import class_label

Activation: TypeAlias = Literal["softmax", "sigmoid", "none"]
"""What turns outputs into probabilities; "none" where they are probabilities already, or are
none."""
Kind: TypeAlias = Literal["classes", "labels", "numbers"]
"""What outputs stand for: classes of which one is true, labels of which several may be, numbers."""

THRESHOLD = 0.5
"""From which probability on a label counts as predicted, where several may be true of one photo."""
ROUNDING = 1e-4
"""By how much the sum of probabilities may miss one."""
COARSE = 2e-2
"""The same for outputs that were computed in half precision."""


class Prediction(NamedTuple):
    """What a model says of a photo: a label with its probability, or a number with its unit.
    ``category`` is None for "no"; ``box`` is x0 y0 x1 y1 in pixels of the photo."""

    label: str
    probability: float | None
    category: int | None
    box: tuple[float, float, float, float] | None = None
    number: float | None = None
    unit: str = ""

    @property
    def value(self) -> float:
        """The probability of the prediction, or the number; NaN if it has neither."""
        value = self.number if self.probability is None else self.probability
        return float("nan") if value is None else value

    @property
    def amount(self) -> str:
        """The probability ("87 %") or the number with its unit ("56.23 years"); empty without
        either."""
        if self.probability is not None:
            return percent(self.probability)
        if self.number is None:
            return ""
        rounded = f"{self.number:.4g}" if abs(self.number) < 10_000 else f"{self.number:.0f}"
        return f"{rounded} {self.unit}".rstrip()


def percent(probability: float) -> str:
    """Return a probability in whole per cent ("87 %"), below ten with a digit ("4.2 %")."""
    share = 100 * probability
    if share < 0.1:
        return "<0.1 %"
    return f"{share:.0f} %" if share >= 9.95 else f"{share:.1f} %"


@dataclass(frozen=True)
class Outputs:
    """What the outputs ``(N, K)`` of a model are, and how they become probabilities ``(N, K)``.
    ``temperature`` divides scores first, so that the probabilities are calibrated. ``logs`` says
    that the outputs are logarithms of the probabilities of labels. ``unit`` is that of numbers.

    >>> Outputs("sigmoid", "labels").probabilities(torch.tensor([[0.0, 9.0]])).round(decimals=2)
    tensor([[0.5000, 1.0000]])
    """

    activation: Activation = "softmax"
    kind: Kind = "classes"
    temperature: float = 1.0
    logs: bool = False
    unit: str = ""

    def probabilities(self, outputs: torch.Tensor) -> torch.Tensor | None:
        """Return the probabilities of a model's outputs, in their shape; None of numbers, and of
        outputs outside of [0, 1] that should be probabilities."""
        if self.kind == "numbers" or (
            self.activation == "none" and not may_be_probabilities(outputs)
        ):
            return None
        return self._applied(outputs, self.temperature)

    def of_classes(self, outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Return the probability ``(N,)`` of one class ``(N,)`` for each sample of outputs, without
        temperature; of numbers, the number."""
        return self._applied(outputs, 1.0).gather(1, classes[:, None].to(outputs.device))[:, 0]

    @property
    def threshold(self) -> float:
        """The least output with which a label is predicted: that of a probability of
        `THRESHOLD`."""
        if self.logs:
            return math.log(THRESHOLD)
        return THRESHOLD if self.activation == "none" else 0.0

    def predicted(
        self, values: torch.Tensor, categories: Sequence[str] | None, most: int
    ) -> list[Prediction]:
        """Return the predictions for one photo, best first, from probabilities or numbers ``(K,)``:
        the ``most`` best classes, labels from one half on, yes and no, or the only number."""
        if self.kind == "numbers":
            return [self.number(values, categories, 0)] if len(values) == 1 else []
        if len(values) == 1:
            yes = float(values[0])
            positive = Prediction(self.label(categories, 0, classes=1), yes, category=0)
            negative = Prediction(label_of_no(categories), 1 - yes, category=None)
            return [positive, negative] if yes >= THRESHOLD else [negative, positive]
        if self.kind == "classes":
            return self.best(values, categories, most)
        all_labels = self.best(values, categories, len(values))
        return [label for label in all_labels if label.value >= THRESHOLD]

    def best(
        self, probabilities: torch.Tensor, categories: Sequence[str] | None, most: int
    ) -> list[Prediction]:
        """Return the ``most`` classes with the largest probabilities ``(K,)``, however small these
        are, best first."""
        largest = probabilities.topk(min(most, len(probabilities)))
        pairs = zip(largest.values.tolist(), largest.indices.tolist(), strict=True)
        return [Prediction(self.label(categories, index), value, index) for value, index in pairs]

    def answer(self, values: torch.Tensor, categories: Sequence[str] | None) -> Prediction | None:
        """Return the one best prediction from ``values`` ``(K,)`` (probabilities or numbers): a
        class, yes or no, or the number. None where the model gives several numbers.
        """
        if self.kind == "numbers" or len(values) == 1:
            return next(iter(self.predicted(values, categories, 1)), None)
        return self.best(values, categories, 1)[0]

    def number(
        self, numbers: torch.Tensor, categories: Sequence[str] | None, index: int
    ) -> Prediction:
        """Return one of a model's numbers ``(K,)`` as a `Prediction` with its name and unit."""
        name = self.label(categories, index, classes=len(numbers))
        return Prediction(name, None, index, number=float(numbers[index]), unit=self.unit)

    def label(
        self, categories: Sequence[str] | None, index: int, classes: int | None = None
    ) -> str:
        """Return the label of the class ``index``; without labels "class 1" or "number 1", and
        "yes" or "number" for the only output."""
        is_known = categories is not None and index < len(categories)
        if self.kind == "numbers" and not is_known:
            return "number" if classes == 1 else f"number {index}"
        return "yes" if classes == 1 and not is_known else class_label(categories, index)

    def _applied(self, outputs: torch.Tensor, temperature: float) -> torch.Tensor:
        """The outputs as probabilities, in single precision or more: scores are divided by
        ``temperature`` and activated; probabilities and numbers stay as they are."""
        exact = outputs.dtype in (torch.float32, torch.float64)
        values = outputs if exact else outputs.float()
        # behind the network's own activation there are no scores for temperature to divide
        if self.logs:
            return values.exp()
        if self.activation == "none":
            return values
        values = values / temperature
        return values.softmax(1) if self.activation == "softmax" else values.sigmoid()


def label_of_no(categories: Sequence[str] | None) -> str:
    """Return the "no" of a model with one output, such as "not pneumonia"."""
    return "no" if categories is None else f"not {categories[0]}"


def check_activation(activation: object) -> None:
    """Refuse a value for ``activation`` that is neither one of the names nor None."""
    if activation is not None and activation not in get_args(Activation):
        raise ModelError(
            f"{option_name('activation')} must be 'softmax', 'sigmoid' or 'none', got "
            f"{shown(activation)}; leave it out to detect it"
        )


def configured_activation(model: Any) -> Activation | None:
    """Return the activation that a transformers configuration of the model implies; None where it
    says nothing."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if problem == "multi_label_classification":
        return "sigmoid"
    return "none" if problem == "regression" else None


class FinalActivation(NamedTuple):
    """The softmax or sigmoid at a network's end: ``classes`` is over how many classes probabilities
    add up to one, 0 for a sigmoid. With ``logs``, the outputs are their logarithms."""

    classes: int = 0
    logs: bool = False


def outputs_like(
    outputs: torch.Tensor,
    activation: Activation | None = None,
    seen: Callable[[], FinalActivation | None] = lambda: None,
) -> Outputs:
    """Return what a model's outputs ``(N, K, ...)`` are, by ``activation``, or by what ``seen()``
    finds at the network's end; else scores for a softmax, or a number if K is 1."""
    classes = outputs.shape[1]
    if activation == "softmax" and classes == 1:  # it would always be certain
        name = option_name("activation")
        raise ModelError(
            f"{name} must be 'sigmoid' or 'none' for a model with one output, got 'softmax'; leave "
            "it out"
        )
    scores = outputs_of_scores(activation, classes)
    # these photos' outputs can only exclude probabilities, not show them
    may_be_shares = may_be_probabilities(outputs)
    may_be_logs = activation != "none" and bool((outputs <= ROUNDING).all())
    final = seen() if may_be_shares or may_be_logs else None
    if final is None:
        return scores
    is_excluded = not may_be_logs if final.logs else not may_be_shares
    if is_excluded:
        return scores
    kind: Kind = "classes" if 1 < classes <= final.classes else "labels"
    if activation in ("softmax", "sigmoid") and kind != scores.kind:
        return scores  # the caller knows better
    if final.logs:  # the softmax of its logarithms is itself
        return Outputs("sigmoid", kind, logs=True) if kind == "labels" else Outputs()
    return Outputs("none", kind)


def outputs_of_scores(activation: Activation | None, classes: int) -> Outputs:
    """What ``classes`` outputs are by what the caller says of them, if no softmax or sigmoid ends
    the network."""
    if activation == "sigmoid":
        return Outputs("sigmoid", "labels")
    if activation == "none" or (activation is None and classes == 1):
        return Outputs("none", "numbers")
    return Outputs()


def adds_up(outputs: torch.Tensor) -> bool:
    """Whether outputs ``(N, K, ...)`` are probabilities that add up to one over K, as those of a
    softmax. Those of whole numbers may be scores or votes as well; see `is_fractional`.
    """
    if outputs.ndim < 2 or outputs.shape[1] < 2 or not may_be_probabilities(outputs):
        return False
    is_exact = outputs.dtype in (torch.float32, torch.float64)
    rounding = ROUNDING if is_exact else COARSE
    deviations = (outputs.double().sum(1) - 1).abs()
    return bool((deviations < rounding).all())


def is_fractional(outputs: torch.Tensor) -> bool:
    """Whether some outputs are not whole numbers, so that they cannot be votes."""
    return outputs.is_floating_point() and bool((outputs != outputs.round()).any())


def may_be_probabilities(outputs: torch.Tensor) -> bool:
    """Whether all outputs lie in [0, 1], up to rounding."""
    return bool(((outputs >= -ROUNDING) & (outputs <= 1 + ROUNDING)).all())
