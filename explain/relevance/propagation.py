"""Relevance propagation: a backward pass whose gradient is changed so that value times gradient is relevance.

At each step, a rule says what takes the place of the gradient. An operation that no rule covers keeps autograd's, which
shares out the relevance in proportion to the inputs, as far as it is linear. What a rule does not pass on (what biases
and stabilisers take, what a softmax loses) is added up by its cause, for each image.

A normalisation by known statistics that a linear map's result is given to, and nothing else, is one map with it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

from explain._utils.options import Options
from explain.hooks import HookGroup, graph
from explain.hooks.graph import Answer, Entrance, Reach
from explain.relevance.batch_layout import fits, numbers_of, summed
from explain.relevance.calls import LinearMap
from explain.relevance.steps import Snapshot, Step

Gradients = tuple[Tensor | None, ...]
Change = Callable[[Tensor], Tensor | None]
Back = Callable[[Tensor], Tensor | Mapping[int, Tensor]]


@dataclass(eq=False)
class LinearNode:
    """A linear map in the graph: where its input is, where its result leaves, and what both were.

    Without an entrance, it is one Node, whose first input is the map's.
    """

    kind: str
    module: str | None
    linear: LinearMap
    x: Snapshot
    result: Snapshot
    entrances: Mapping[int, Entrance]
    exit: Step
    nearest: bool = False
    """Whether no other linear map, but for normalisations, lies between it and the input."""

    @property
    def first(self) -> bool:
        """Whether the input meets this map first: a convolution, a linear layer or a product, no normalisation."""
        return self.nearest and self.kind != "batchnorm"

    @property
    def node(self) -> Node | None:
        """The Node through which the gradient leaves the map."""
        return next(iter(self.entrances.values()), self.exit.node)

    constants: Sequence[Entrance] = ()
    """Where what is no signal enters: where a deformed convolution reads, and how much of it."""
    rectified: bool = False
    """Whether only rectifiers are given its result, so that a gradient arrives only where it is positive."""


@dataclass(eq=False)
class RelevanceFlow:
    """What a backward pass under a composite leaves behind: what was taken by which cause, and what was deposited.

    ``count`` is the number of images; ``sources`` are the explained inputs.
    """

    group: HookGroup
    count: int
    sources: Sequence[Tensor]
    images: Tensor | None = None
    """Which image each value belongs to in the step that the flow is for, as `BatchLayout` tells it."""
    taken: dict[str, Tensor] = field(default_factory=dict)
    deposits: dict[int, Tensor] = field(default_factory=dict)
    """Relevance that was given to a source itself, by its place among them."""
    watched: dict[str, Tensor] = field(default_factory=dict)
    """How much relevance arrived at operations without a rule, by their names."""
    _entrances: list[Entrance] = field(default_factory=list)

    def for_step(self, step: Step) -> "RelevanceFlow":
        """The same flow for the rule of one step: what it takes is added up by that step's images."""
        return replace(self, images=step.images)

    def replacing(self, step: Step, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Replace the gradient in a step's first input, from the one that arrives and the one that autograd sends."""

        def after(grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
            arrived = grad_outputs[step.output]
            plain = grad_inputs[0]
            if arrived is None or plain is None:
                return grad_inputs
            return (change(arrived, plain).to(plain.dtype), *grad_inputs[1:])

        self.group.node(step.node, after)

    def arriving(self, step: Step, change: Change) -> None:
        """Change the gradient that arrives at a step's result; where ``change`` gives None, it goes no further."""

        def arrive(gradients: Gradients) -> Gradients:
            changed = list(gradients)
            arrived = gradients[step.output]
            if arrived is not None:
                sent = change(arrived)
                changed[step.output] = None if sent is None else sent.to(arrived.dtype)
            return tuple(changed)

        self.group.node_pre(step.node, arrive)

    def give(self, entrance: Entrance, answer: Answer) -> None:
        """Say what is to leave by an entrance in the place of the gradient."""
        entrance.answer = answer
        self._entrances.append(entrance)

    def replace_gradient(self, step: Step | LinearNode, back: Back) -> None:
        """Replace autograd's gradient in what a step was given by ``back`` of the gradient that arrives at its result.

        A step without entrances has one input, the first of its Node.
        """
        exit = step.exit if isinstance(step, LinearNode) else step

        def arrived(gradient: Tensor) -> None:
            found = back(gradient)
            for place, entrance in step.entrances.items():
                sent = found if isinstance(found, Tensor) else found.get(place)
                if sent is not None:
                    self.give(entrance, partial(send_always, sent))

        def after(gradient: Tensor, plain: Tensor) -> Tensor:
            found = back(gradient)
            return found if isinstance(found, Tensor) else found[0]

        if step.entrances:
            self.arriving(exit, arrived)
        else:
            self.replacing(exit, after)

    def close(self) -> None:
        """Reset the entrances that the pass did not come by."""
        for entrance in self._entrances:
            entrance.answer = None
        self._entrances.clear()

    @torch.no_grad()
    def take(self, cause: str, part: Tensor, factor: Tensor | float = 1.0) -> None:
        """Add to what a cause has taken, from a tensor with rows for the images, times factors that meet it."""
        by_rows = part.ndim > 0 and len(part) == self.count and self.images is None and part.is_contiguous()
        if not isinstance(factor, Tensor):
            found = self.by_image(part) * factor
        elif factor.shape == part.shape and factor.dtype == part.dtype and by_rows:
            rows = part.reshape(self.count, 1, -1)
            others = factor.reshape(self.count, -1, 1)
            found = (rows @ others).reshape(self.count)
        elif factor.shape == part.shape[-1:] and part.ndim > 1 and factor.dtype == part.dtype:
            found = self.by_image((part @ factor).unsqueeze(-1))
        else:
            found = self.by_image(part * factor)
        self.taken[cause] = self.taken.get(cause, 0) + found

    def per_value(self, relevance: Tensor, x: Tensor) -> Tensor:
        """The gradient with which x has this relevance; what falls to zeros is taken."""
        self.take("zero inputs", relevance * (x == 0))
        return torch.where(x == 0, 0, relevance / torch.where(x == 0, 1, x))

    def watch(self, cause: str, part: Tensor) -> None:
        """Note how much relevance arrives at an operation without a rule."""
        self.watched[cause] = self.watched.get(cause, 0) + self.by_image(part.detach().abs())

    def lost(self, cause: str, share: float) -> bool:
        """Whether an operation without a rule has taken more than a share of what arrived there, of some image."""
        return bool((self.taken[cause].abs() > share * self.watched[cause]).any())

    def by_image(self, tensor: Tensor) -> Tensor:
        """The sum over each image's part of what the step has; what is of the batch as a whole is shared evenly."""
        if self.images is None and tensor.ndim and len(tensor) % self.count == 0:
            return tensor.reshape(self.count, -1).sum(1)
        numbers = numbers_of(tensor, self.count, self.images)
        if numbers is None:
            return tensor.sum().expand(self.count) / self.count
        return summed(tensor, numbers, self.count)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of each image's part of a tensor, in a shape that meets it."""
        if self.images is None and tensor.ndim and len(tensor) and len(tensor) % self.count == 0:
            means = tensor.reshape(self.count, -1).mean(1).repeat_interleave(len(tensor) // self.count)
            return means.reshape(-1, *[1] * (tensor.ndim - 1))
        numbers = numbers_of(tensor, self.count, self.images)
        if numbers is None:
            return tensor.mean()
        sums, counts = (summed(each, numbers, self.count) for each in (tensor, torch.ones_like(tensor)))
        return (sums / counts)[numbers.long()]

    def images_in(self, tensor: Tensor) -> int | None:
        """The dimension of a tensor along which the images lie; None where it is not known."""
        if self.images is None:
            return 0 if len(tensor) == self.count else None
        varying = [d for d, size in enumerate(self.images.shape) if size > 1]
        return varying[0] if len(varying) == 1 and fits(self.images, tensor.shape) else None

    def deposit(self, place: int, relevance: Tensor) -> None:
        """Give relevance to a source itself."""
        self.deposits[place] = self.deposits.get(place, 0) + relevance


@dataclass(frozen=True)
class RelevanceRule(Options):
    """How a step shares out relevance among what it was given.

    Relevance is value times gradient. A rule writes ``back``, which turns the gradient in the step's result into the
    gradient in its input; or ``attach``, where that is not enough. ``fits`` refuses steps that the rule cannot act on.
    Options are checked against the types of their fields, and against ``minimums``.
    """

    acts_on: ClassVar[type] = Step
    """`Step`, or `LinearNode` for rules of linear maps."""

    @property
    def name(self) -> str:
        """What coverage calls it; most rules have a class attribute instead."""
        return type(self).__name__.lower()

    def fits(self, step: Any) -> bool:
        """Whether the rule can act on a step for which a composite names it."""
        return True

    def attach(self, step: Any, flow: RelevanceFlow) -> None:
        """Make the next backward pass follow the rule at a step."""
        flow.replace_gradient(step, partial(self.back, step, flow=flow))

    def back(self, step: Any, gradient: Tensor, flow: RelevanceFlow) -> Tensor | Mapping[int, Tensor]:
        """The gradient in what the step was given, from that in its result; for several inputs, by their places."""
        raise NotImplementedError


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
    minimums = {"epsilon": 0, "alpha": 1, "beta": 0, "gamma": 0}


def relevance_of(gradient: Tensor, value: Tensor | float) -> Tensor:
    """Value times gradient, of complex numbers too."""
    return (gradient.conj() * value).real if gradient.is_complex() else gradient * value


def send_nothing(gradient: Tensor | None) -> Tensor | None:
    """An answer of an entrance by which no relevance leaves."""
    return None if gradient is None else torch.zeros_like(gradient)


def send_always(sent: Tensor, gradient: Tensor | None) -> Tensor:
    """An answer of an entrance that ignores the gradient which arrives."""
    return sent


def pass_channels(group: HookGroup, node: Node, output: int, channels: Sequence[int], dim: int) -> None:
    """Set the gradient that arrives at a Node to zero, except in some channels of one of its outputs."""

    def arrive(grad_outputs: Gradients) -> Gradients | None:
        arrived = grad_outputs[output]
        changed = [None if g is None else torch.zeros_like(g) for g in grad_outputs]
        if arrived is not None:
            kept = torch.tensor(channels, device=arrived.device)
            changed[output] = torch.zeros_like(arrived).index_copy(dim, kept, arrived.index_select(dim, kept))
        return tuple(changed)

    group.node_pre(node, arrive)


def stop_other_paths(group: HookGroup, node: Node, after: Mapping[Node, Sequence[Node]]) -> None:
    """Stop the gradient on all paths that do not lead to a Node. ``after`` says which Nodes lead to each one.

    Hooks run in their order: this comes after those of the rules, which see the whole gradient of a step.
    """
    leading = {node}
    waiting = [node]
    while waiting:
        new = [each for each in after[waiting.pop()] if each not in leading]
        leading.update(new)
        waiting += new

    def stop(others: set[int], grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
        return tuple(torch.zeros_like(g) if i in others and g is not None else g for i, g in enumerate(grad_inputs))

    for each in leading - {node}:
        others = {i for i, (before, _) in enumerate(each.next_functions) if before and before not in leading}
        if others:
            group.node(each, partial(stop, others))


def maps_in(
    steps: Sequence[Step], nodes: Mapping[Node, Sequence[Node]], do_not_merge: Collection[Node]
) -> list[LinearNode]:
    """The linear maps among some steps, normalisations taken together with what they normalise.

    ``nodes`` says which Nodes lead to each one in the graph; those in ``do_not_merge`` are not merged with others.
    """
    found: list[LinearNode] = []
    within: set[int] = set()
    for step in reversed(steps):
        if not step.is_map or id(step) in within:
            continue
        assert step.linear is not None
        assert step.result is not None
        linear = step.linear
        first = step
        preceding = step.preceding
        # Without an entrance of its own, as of a second normalisation, the two cannot be answered for as one.
        if step.kind == "batchnorm" and preceding is not None and preceding.linear is not None and preceding.entrances:
            alone = len(nodes.get(preceding.node, ())) == 1 and preceding.node not in do_not_merge
            joined = preceding.linear.then(linear.weight, linear.bias) if alone else None
            if joined is not None:
                linear = joined
                first = preceding
                within.add(id(preceding))
        after = nodes[step.node]
        rectified = bool(after) and all(node.name().startswith("ReluBackward") for node in after)
        entrances = {place: entrance for place, entrance in first.entrances.items() if place not in first.scales}
        constants = [first.entrances[place] for place in first.scales]
        found.append(
            LinearNode(
                first.kind, first.module, linear, first.values[0], step.result, entrances, step,
                constants=constants, rectified=rectified,
            )
        )  # fmt: skip
    found.reverse()
    behind = Reach((), {each.exit.node for each in found if each.kind != "batchnorm"})
    for each in found:
        each.nearest = each.node is not None and not any(behind.of(node) for node, _ in each.node.next_functions)
    return found


def consumers(score: Tensor) -> dict[Node, list[Node]]:
    """For each Node of a score's graph, the Nodes that lead to it, as often as they do."""
    found: dict[Node, list[Node]] = {node: [] for node in graph(score)}
    for node in found:
        for before, _ in node.next_functions:
            if before is not None:
                found[before].append(node)
    return found
