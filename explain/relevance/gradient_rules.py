"""Rules: what a backward pass does to the gradient at an operation, instead of what autograd would do.

A rule is a frozen value that says which operations it covers and what replaces their gradients. It is put on
the Nodes of the graph, so it acts on modules, functions and in-place methods alike, and no module is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol

import torch

from explain.hooks import HookGroup
from explain.tracing.operations import Operation, Operations

Gradients = tuple[torch.Tensor | None, ...]


class Rule(Hashable, Protocol):
    """What replaces the gradients of some operations."""

    @property
    def name(self) -> str: ...

    def covers(self, operation: Operation) -> bool: ...

    def backward(self, operation: Operation, grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
        """Turn the gradients that left an operation and those that came to it into what is passed on."""
        ...


@dataclass(frozen=True)
class Guided:
    """Springenberg et al., 2014: what comes back through a rectifier keeps only its positive part."""

    name: ClassVar[str] = "guided"

    def covers(self, operation: Operation) -> bool:
        return operation.rectifies

    def backward(self, operation: Operation, grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
        kept = (g if i not in operation.inputs else _positive(operation, g) for i, g in enumerate(grad_inputs))
        return tuple(kept)


@dataclass(frozen=True)
class Deconvnet:
    """Zeiler and Fergus, 2014: the positive part of what arrives passes on, whatever was let through before."""

    name: ClassVar[str] = "deconvnet"

    def covers(self, operation: Operation) -> bool:
        return operation.rectifies

    def backward(self, operation: Operation, grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
        arrived, sent = grad_outputs[0], list(grad_inputs)
        waiting = _positive(operation, arrived)
        for i in operation.inputs:
            gradient = grad_inputs[i] if i < len(sent) else None
            if gradient is not None:  # two inputs that both are what is rectified get it once
                sent[i], waiting = (torch.zeros_like(gradient), None) if waiting is None else (waiting, None)
        return tuple(sent)


def _positive(operation: Operation, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The part of a gradient that is positive, as a rectifier sees it."""
    if gradient is None:
        return None
    return gradient.clamp(max=0) if operation.turned else gradient.clamp(min=0)


@dataclass(frozen=True)
class Coverage:
    """How many operations of each kind a rule acted on, and how many it could not inspect.

    Under a ``composite``, ``by_rule`` has the operations by the rule that covered them, and ``taken`` ``(N,)`` what
    was taken out of each image's relevance on its way, by its cause.
    """

    covered: Mapping[str, int] = field(default_factory=dict)
    missed: Mapping[str, int] = field(default_factory=dict)
    by_rule: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    taken: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    composite: str | None = None

    def __str__(self) -> str:
        if not self.by_rule:
            return _counted(self.covered) or "none"
        return "; ".join(f"{rule}: {_counted(kinds)}" for rule, kinds in self.by_rule.items())


def _counted(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def apply_rule(rule: Rule, group: HookGroup, score: torch.Tensor, operations: Operations) -> Coverage:
    """Make the next backward pass from ``score`` follow a rule, for as long as ``group`` lasts."""
    covered, missed = Counter[str](), Counter[str]()
    for operation in operations.of_graph(score):
        if rule.covers(operation):
            covered[operation.kind] += 1
            group.node(operation.node, partial(rule.backward, operation))
        else:
            missed[operation.kind] += 1
    return Coverage(dict(covered), dict(missed))
