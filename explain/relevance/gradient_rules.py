"""Rules for gradients: what a backward pass does at an operation such as a ReLU, instead of what
autograd would do.

A rule is a frozen value that says which operations it covers and what replaces their gradients.
`walk_by_rule` follows it on the way back over a recorded pass, so it acts on modules, functions and
in-place methods alike, and no module is touched. What rectifies is found by
`explain.relevance.rectifiers`.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from explain.recording import Step, Value
from explain.recording.gradients import Gradients, Rule, derivative, paths_to, walk_back
from explain.relevance.rectifiers import Operation, operations_of

GradientTuple = tuple[Tensor | None, ...]


class GradientRule(Hashable, Protocol):
    """What replaces the gradients of some operations."""

    @property
    def name(self) -> str: ...

    def covers(self, operation: Operation) -> bool: ...

    def backward(
        self, operation: Operation, grad_inputs: GradientTuple, grad_outputs: GradientTuple
    ) -> GradientTuple:
        """Return the new input gradients of an operation, from autograd's and from the gradients of
        its outputs."""
        ...


@dataclass(frozen=True)
class GuidedRule:
    """Springenberg et al., 2014: only the positive part of the gradient passes back through a
    rectifier."""

    name: ClassVar[str] = "guided"

    def covers(self, operation: Operation) -> bool:
        """Whether the rule replaces the gradient of an operation: of rectifiers alone."""
        return operation.rectifies

    def backward(
        self, operation: Operation, grad_inputs: GradientTuple, grad_outputs: GradientTuple
    ) -> GradientTuple:
        """Guided backpropagation: the positive part of autograd's gradient in the rectified inputs,
        the rest unchanged."""
        if operation.by_parts and grad_outputs[0] is not None:
            # the gradients in both terms add up, so both go by the sign of what arrives
            is_positive = grad_outputs[0] > 0
            return tuple(None if g is None else g.where(is_positive, 0) for g in grad_inputs)
        return tuple(
            _positive(operation, g) if i in operation.inputs else g
            for i, g in enumerate(grad_inputs)
        )


class DeconvnetRule(GuidedRule):
    """Zeiler and Fergus, 2014: the positive part of the gradient passes back, whatever the
    rectifier's input."""

    name: ClassVar[str] = "deconvnet"

    def backward(
        self, operation: Operation, grad_inputs: GradientTuple, grad_outputs: GradientTuple
    ) -> GradientTuple:
        """Deconvnet: the positive part of the gradient that arrives, in place of autograd's in the
        rectified input."""
        sent = list(grad_inputs)
        positive = _positive(operation, grad_outputs[0])
        for i in operation.inputs:
            # a number, as what `where` gives elsewhere, is no input
            gradient = sent[i] if i < len(sent) else None
            if gradient is not None:
                # where two inputs are the same rectified signal, only the first gets the gradient
                sent[i] = torch.zeros_like(gradient) if positive is None else positive
                positive = None
        return tuple(sent)


def _positive(operation: Operation, gradient: Tensor | None) -> Tensor | None:
    """The part of a gradient that a rectifier's rule passes: positive values, or negative ones at a
    negated rectifier."""
    if gradient is None:
        return None
    return gradient.clamp(max=0) if operation.negated else gradient.clamp(min=0)


@dataclass(frozen=True)
class Coverage:
    """How many operations of each kind a rule acted on, and how many it could not inspect."""

    covered: Mapping[str, int] = field(default_factory=dict)
    missed: Mapping[str, int] = field(default_factory=dict)
    by_rule: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Under a composite, the operations by the rule that covered them."""
    taken: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """What was taken out of each image's relevance on its way, ``(N,)``, by its cause."""
    composite: str | None = None

    def __str__(self) -> str:
        """The covered operations as text, by rule if there are rules."""
        if not self.by_rule:
            return _counted(self.covered) or "none"
        return "; ".join(f"{rule}: {_counted(kinds)}" for rule, kinds in self.by_rule.items())


def _counted(kinds: Mapping[str, int]) -> str:
    """Operations counted by kind as text, for captions: "2 x relu, 1 x clamp"."""
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def walk_by_rule(
    rule: GradientRule,
    steps: Sequence[Step],
    gradients: Gradients,
    signals: AbstractSet[Value],
    wanted: AbstractSet[Value],
) -> tuple[Gradients, Coverage]:
    """The gradients in ``wanted`` values under a rule such as guided backpropagation, and which
    operations it covers and misses. ``signals`` lead to the explained inputs."""
    operations = dict(operations_of(steps, signals, paths_to(gradients)))
    rules: dict[Step, Rule] = {}
    for step, operation in operations.items():
        if rule.covers(operation):
            rules[step] = _walk_rule(rule, step, operation, signals)
    of_wanted = walk_back(steps, gradients, wanted, signals, rules)
    return of_wanted, coverage_of(rule, operations.values())


def coverage_of(rule: GradientRule, operations: Iterable[Operation]) -> Coverage:
    """Which of some operations a rule covers and misses, counted by their kinds."""
    covered = Counter[str]()
    missed = Counter[str]()
    for operation in operations:
        counts = covered if rule.covers(operation) else missed
        counts[operation.kind] += 1
    return Coverage(dict(covered), dict(missed))


def _walk_rule(
    rule: GradientRule, step: Step, operation: Operation, signals: AbstractSet[Value]
) -> Rule:
    """A rule for gradients at one step, as `walk_back` takes it."""

    def back(arrived: Gradients) -> Iterable[tuple[Value, Tensor | None]]:
        """The gradients that leave the operation."""
        plain = derivative(step, arrived, signals)
        of_results = tuple(None if value is None else arrived.get(value) for value in step.results)
        sent = rule.backward(operation, tuple(plain), of_results)
        return zip(step.inputs, sent, strict=True)

    return back
