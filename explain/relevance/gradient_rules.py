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
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from explain.hooks.graph import Reach
from explain.hooks.preserve import without_proxy
from explain.hooks.tracer import Tracer
from explain.recording import Step, Value
from explain.recording.gradients import (
    Gradients,
    Rule,
    derivative,
    leading_to,
    reached_from,
    walk_back,
)
from explain.relevance.calls import Call
from explain.relevance.rectifiers import Operation, operations_of
from explain.relevance.table import operation_name

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


def walk_by_rule(
    rule: GradientRule,
    steps: Sequence[Step],
    gradients: Gradients,
    sources: Iterable[Value],
    wanted: AbstractSet[Value],
) -> tuple[Gradients, Coverage]:
    """The gradients in ``wanted`` values under a rule such as guided backpropagation, and how many
    operations of each kind it covers and misses.

    ``gradients`` are those of the score in the values of the output, ``sources`` the explained
    inputs.
    """
    signals = reached_from(steps, sources)
    covered = Counter[str]()
    missed = Counter[str]()
    rules: dict[Step, Rule] = {}
    for operation in operations_of(steps, signals, leading_to(steps, gradients)):
        if rule.covers(operation):
            rules[operation.step] = _walk_rule(rule, operation, signals)
            covered[operation.kind] += 1
        else:
            missed[operation.kind] += 1
    found = walk_back(steps, gradients, wanted, signals, rules)
    return found, Coverage(dict(covered), dict(missed))


def _walk_rule(rule: GradientRule, operation: Operation, signals: AbstractSet[Value]) -> Rule:
    """A rule for gradients at one operation, as `walk_back` takes it."""
    step = operation.step

    def back(arrived: Gradients) -> Iterable[tuple[Value, Tensor | None]]:
        """The gradients that leave the operation."""
        plain = derivative(step, arrived, signals)
        of_results = tuple(None if value is None else arrived.get(value) for value in step.results)
        sent = rule.backward(operation, tuple(plain), of_results)
        return zip(step.inputs, sent, strict=True)

    return back


class Dependence:
    """Tells what depends on the explained inputs from what is made of parameters, numbers and other
    inputs.

    A gradient leads from the one to the inputs. From the other it leads to parameters at most,
    whether they are trained or not, and whether or not the model has registered them: what is
    computed from a detached tensor, or looked up by an index, depends on the input in no way that a
    gradient could follow.

    >>> layer, x = torch.nn.Linear(3, 3), torch.ones(1, 3, requires_grad=True)
    >>> dependence = Dependence([x])
    >>> [dependence.of(made) for made in (layer(x), layer.weight.T * 2, layer(x.detach()))]
    [True, False, False]
    """

    def __init__(self, sources: Sequence[Tensor]) -> None:
        """Start a forward pass with the explained inputs; Nodes of earlier passes do not count."""
        self._sources = {id(tensor): tensor for tensor in sources}
        self._reach = Reach(sources, since=torch._C._autograd._get_sequence_nr())

    def of(self, tensor: Tensor) -> bool:
        """Whether a gradient leads from a tensor of this forward pass back to an explained
        input."""
        tensor = without_proxy(tensor)
        if not tensor.requires_grad:
            return False
        node = tensor.grad_fn
        return id(tensor) in self._sources if node is None else self._reach.of(node)


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
