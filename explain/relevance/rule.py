"""What all rules for relevance are: frozen values that say which steps they fit, and what gradient leaves those."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from numbers import Real
from typing import Any, ClassVar

import torch

from explain._utils.errors import MethodError, shown
from explain.relevance.propagation import LinearNode, RelevanceFlow
from explain.tracing.steps import Step

Gradients = torch.Tensor | Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class RelevanceRule:
    """How a step shares out relevance among what it was given.

    Relevance is value times gradient. A rule writes ``back``, which turns the gradient in the step's result into the
    gradient in its input; or ``attach``, where that is not enough. ``fits`` refuses steps that the rule cannot act on.
    Options are checked: truth values are, and numbers are finite and at least what ``least`` says.
    """

    acts_on: ClassVar[type] = Step
    """`Step`, or `LinearNode` for rules of linear maps."""
    least: ClassVar[Mapping[str, float]] = {}

    @property
    def name(self) -> str:
        """What coverage calls it; most rules have a class attribute instead."""
        return type(self).__name__.lower()

    def __post_init__(self) -> None:
        for field in fields(self):
            value, of = getattr(self, field.name), f"{field.name} of {type(self).__name__}"
            if field.type in ("bool", bool) and not isinstance(value, bool):
                raise MethodError(f"{of} must be True or False, got {shown(value)}; leave it out")
            low = self.least.get(field.name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if low is not None and not (number and low <= float(value) < math.inf):
                raise MethodError(f"{of} must be a finite number of at least {low:g}, got {shown(value)}")

    def fits(self, step: Any) -> bool:
        """Whether the rule can act on a step for which a composite names it."""
        return True

    def attach(self, step: Any, flow: RelevanceFlow) -> None:
        """Make the next backward pass follow the rule at a step."""
        flow.replace_gradient(step, partial(self.back, step, flow=flow))

    def back(self, step: Any, gradient: torch.Tensor, flow: RelevanceFlow) -> Gradients:
        """The gradient in what the step was given, from that in its result; for several inputs, by their places."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearRule(RelevanceRule):
    """A rule for linear maps z = W x + b: ``step.linear``, with ``step.x`` and ``step.result`` as they were.

    >>> @dataclass(frozen=True)
    ... class Squares(LinearRule):
    ...     def back(self, step, gradient, flow):
    ...         linear, x = step.linear, step.x.tensor
    ...         weight = linear.weight.square()
    ...         share = gradient * step.result.tensor / linear.run(x.abs(), weight, None)
    ...         return linear.backward(share, x, weight) * x.sign()
    >>> Squares().name
    'squares'
    """

    acts_on: ClassVar[type] = LinearNode
    least: ClassVar[Mapping[str, float]] = {"epsilon": 0, "alpha": 1, "beta": 0, "gamma": 0}
