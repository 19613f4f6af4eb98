"""Rules for gradients: what a backward pass does at an operation such as a ReLU, instead of what
autograd would do.

A rule is a frozen value that says which operations it covers and what replaces their gradients.
`apply_rule` puts it on the Nodes of the graph, so it acts on modules, functions and in-place
methods alike, and no module is touched. Which Nodes are rectifiers is found in the forward pass, by
`explain.relevance.operations`.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from explain.hooks import HookGroup
from explain.hooks.graph import graph
from explain.hooks.tracer import Tracer
from explain.relevance.calls import Call
from explain.relevance.operations import Operation, operations_of
from explain.relevance.steps import Dependence
from explain.relevance.table import operation_name

Gradients = tuple[Tensor | None, ...]


class GradientRule(Hashable, Protocol):
    """What replaces the gradients of some operations."""

    @property
    def name(self) -> str: ...

    def covers(self, operation: Operation) -> bool: ...

    def backward(
        self, operation: Operation, grad_inputs: Gradients, grad_outputs: Gradients
    ) -> Gradients:
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
        self, operation: Operation, grad_inputs: Gradients, grad_outputs: Gradients
    ) -> Gradients:
        """Guided backpropagation: the positive part of autograd's gradient in the rectified inputs,
        the rest unchanged."""
        if operation.by_parts and grad_outputs[0] is not None:
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
        self, operation: Operation, grad_inputs: Gradients, grad_outputs: Gradients
    ) -> Gradients:
        """Deconvnet: the positive part of the gradient that arrives, in place of autograd's in the
        rectified input."""
        sent = list(grad_inputs)
        positive = _positive(operation, grad_outputs[0])
        for i in operation.inputs:
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
    """How many operations of each kind a rule acted on, and how many it could not inspect.

    Under a ``composite``, ``by_rule`` has the operations by the rule that covered them, and
    ``taken`` ``(N,)`` what was taken out of each image's relevance on its way, by its cause.
    """

    covered: Mapping[str, int] = field(default_factory=dict)
    missed: Mapping[str, int] = field(default_factory=dict)
    by_rule: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    taken: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    composite: str | None = None

    def __str__(self) -> str:
        """The covered operations as text, by rule if there are rules."""
        if not self.by_rule:
            return _counted(self.covered) or "none"
        return "; ".join(f"{rule}: {_counted(kinds)}" for rule, kinds in self.by_rule.items())


def _counted(kinds: Mapping[str, int]) -> str:
    """Operations counted by kind as text, for captions: "2 x relu, 1 x clamp"."""
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def apply_rule(
    rule: GradientRule, group: HookGroup, score: Tensor, noted: Mapping[Node, Operation]
) -> Coverage:
    """Attach a gradient rule (guided backpropagation, deconvnet) to the rectifiers in the graph of
    ``score``, so that its next backward pass follows it.

    The engine calls this before it differentiates; the hooks last as long as ``group``. ``noted``
    is what an `OperationRecorder` saw in the forward pass. Returns how many operations of each kind
    the rule covers, and how many it misses.
    """
    covered = Counter[str]()
    missed = Counter[str]()
    for operation in operations_of(graph(score), noted):
        if rule.covers(operation):
            group.put_node(operation.node, partial(rule.backward, operation))
            covered[operation.kind] += 1
        else:
            missed[operation.kind] += 1
    return Coverage(dict(covered), dict(missed))


def uninspected(score: Tensor, noted: Mapping[Node, Operation]) -> Coverage:
    """The operations of a score's graph that cannot be inspected, such as hand-written functions,
    counted by kind as ``missed``."""
    operations = operations_of(graph(score), noted)
    return Coverage(
        missed=dict(Counter(operation.kind for operation in operations if not operation.rectifies))
    )


class ZeroLeaves(Tracer):
    """Zero leaves at attention that the explained input does not reach, so that a backward pass
    can.

    Words attend to each other before they meet a photo. A backward pass to the photo does not reach
    that attention, and with frozen weights there is not even a graph. So zeros that require a
    gradient are added to the input of such an attention: a pass that goes to them as well finds the
    gradient there.

    It adds zeros to what softmaxes and attentions are given that ``sources`` do not reach;
    ``leaves`` has them.

    >>> photo, words = torch.zeros(2, requires_grad=True), torch.zeros(2)
    >>> with ZeroLeaves([photo]) as recorder:
    ...     total = ((photo + words.softmax(0)) * photo.softmax(0)).sum()
    >>> [tuple(found.shape) for found in torch.autograd.grad(total, recorder.leaves)]
    [(2,)]
    """

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self.leaves: list[Tensor] = []
        self._dependence = Dependence(sources)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of the forward pass; add a zero leaf to the input of a softmax or attention
        that no explained input reaches.

        `Tracer` calls this in place of every PyTorch function. The values stay the same.
        """
        name = operation_name(func)
        is_attention = name in ("softmax", "scaled_dot_product_attention")
        if is_attention and torch.is_grad_enabled():
            call = Call(func, name, args, kwargs)
            if not any(map(self._dependence.of, call.tensors)):
                first = call.tensors[0]
                leaf = torch.zeros_like(first, requires_grad=True)
                self.leaves.append(leaf)
                return call.make({call.tensor_places[0]: first + leaf})
        return func(*args, **kwargs)
