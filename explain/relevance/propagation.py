"""Relevance propagation: a backward pass whose gradient is changed so that value times gradient is relevance.

At each step, a rule says what takes the place of the gradient. An operation that no rule covers keeps autograd's, which
shares out the relevance in proportion to the inputs, as far as it is linear. What a rule does not pass on (what biases
and stabilisers take, what a softmax loses) is added up by its cause, for each image.

A normalisation by known statistics that a linear map's result is given to, and nothing else, is one map with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import Node

from explain._utils.nested import first_tensor
from explain.hooks import HookGroup, graph
from explain.hooks.graph import Answer, Entrance
from explain.hooks.records import Source
from explain.tracing.batch_layout import fits, numbers_of, summed
from explain.tracing.linear_maps import LinearMap
from explain.tracing.snapshots import Snapshot
from explain.tracing.steps import Step

Gradients = tuple[torch.Tensor | None, ...]
Change = Callable[[torch.Tensor], "torch.Tensor | None"]
Back = Callable[[torch.Tensor], "torch.Tensor | Mapping[int, torch.Tensor]"]


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
    entrance: Entrance | None
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
        return self.exit.node if self.entrance is None else self.entrance.node

    rectified: bool = False
    """Whether only rectifiers are given its result, so that a gradient arrives only where it is positive."""
    rectifier: Node | None = None
    """The one that has overwritten its result, so that the map's relevance is computed from what arrives there."""


@dataclass(eq=False)
class RelevanceFlow:
    """What a backward pass under a composite leaves behind: what was taken by which cause, and what was deposited.

    ``count`` is the number of images; ``sources`` are the explained inputs.
    """

    group: HookGroup
    count: int
    sources: Sequence[torch.Tensor]
    images: torch.Tensor | None = None
    """Which image each value belongs to in the step that the flow is for, as `BatchLayout` tells it."""
    taken: dict[str, torch.Tensor] = field(default_factory=dict)
    deposits: dict[int, torch.Tensor] = field(default_factory=dict)
    """Relevance that was given to a source itself, by its place among them."""
    watched: dict[str, torch.Tensor] = field(default_factory=dict)
    """How much relevance arrived at operations without a rule, by their names."""
    _entrances: list[Entrance] = field(default_factory=list)

    def for_step(self, step: Step) -> RelevanceFlow:
        """The same flow for the rule of one step: what it takes is added up by that step's images."""
        return replace(self, images=step.images)

    def at(self, step: Step, change: Callable[[Gradients, Gradients], Gradients | None]) -> None:
        """Change the gradients that leave a step's Node, which are given with those that arrive at it."""
        self.group.node(step.node, change)

    def arriving(self, step: Step, change: Change) -> None:
        """Change the gradient that arrives at a step's result; None stops it there."""
        self._arriving(step.node, step.output, change)

    def _arriving(self, node: Node, output: int, change: Change) -> None:
        def arrive(grad_outputs: Gradients) -> Gradients | None:
            arrived = grad_outputs[output]
            if arrived is None:
                return None
            changed = list(grad_outputs)
            changed[output] = change(arrived)
            return tuple(changed)

        self.group.node_pre(node, arrive)

    def give(self, entrance: Entrance, answer: Answer) -> None:
        """Say what is to leave by an entrance in the place of the gradient."""
        entrance.give(answer)
        self._entrances.append(entrance)

    def replace_gradient(self, step: Step | LinearNode, back: Back) -> None:
        """Replace autograd's gradient in what a step was given by ``back`` of the gradient that arrives at its result.

        Where a rectifier has overwritten the result, it is the gradient that arrives there, and passes where the
        result is positive. A step without entrances has one input, the first of its Node.
        """
        entrances: Mapping[int, Entrance]
        if isinstance(step, LinearNode):
            exit, entrances = step.exit, {} if step.entrance is None else {0: step.entrance}
            node, output = (exit.node, exit.output) if step.rectifier is None else (step.rectifier, 0)
        else:
            exit, entrances, node, output = step, step.entrances, step.node, step.output

        def arrived(gradient: torch.Tensor) -> None:
            found = back(gradient)
            for place, entrance in entrances.items():
                sent = found if isinstance(found, torch.Tensor) else found.get(place)
                if sent is not None:
                    self.give(entrance, partial(_constant, sent.to(gradient.dtype)))

        def after(grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
            gradient = grad_outputs[exit.output]
            if gradient is None or grad_inputs[0] is None:
                return grad_inputs
            found = back(gradient)
            sent = found if isinstance(found, torch.Tensor) else found[0]
            return (sent.to(gradient.dtype), *grad_inputs[1:])

        if entrances:
            self._arriving(node, output, arrived)
        else:
            self.at(exit, after)

    def close(self) -> None:
        """Reset the entrances that the pass did not come by."""
        for entrance in self._entrances:
            entrance.give(None)
        self._entrances.clear()

    def take(self, cause: str, part: torch.Tensor, factor: torch.Tensor | float = 1.0) -> None:
        """Add to what a cause has taken, from a tensor with rows for the images, times factors that meet it."""
        by_rows = part.ndim > 0 and len(part) == self.count and self.images is None and part.is_contiguous()
        if not isinstance(factor, torch.Tensor):
            found = self.by_image(part.detach()) * factor
        elif factor.shape == part.shape and factor.dtype == part.dtype and by_rows:
            rows, others = part.reshape(self.count, 1, -1), factor.reshape(self.count, -1, 1)
            found = (rows @ others).reshape(self.count)
        elif factor.shape == part.shape[-1:] and part.ndim > 1 and factor.dtype == part.dtype:
            found = self.by_image((part @ factor).unsqueeze(-1))
        else:
            found = self.by_image(part * factor)
        self.taken[cause] = self.taken[cause] + found if cause in self.taken else found

    def watch(self, cause: str, part: torch.Tensor) -> None:
        """Note how much relevance arrives at an operation without a rule."""
        size = self.by_image(part.detach().abs())
        self.watched[cause] = self.watched[cause] + size if cause in self.watched else size

    def lost(self, cause: str, share: float) -> bool:
        """Whether an operation without a rule has taken more than a share of what arrived there, of some image."""
        return bool((self.taken[cause].abs() > share * self.watched[cause]).any())

    def by_image(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over each image's part of what the step has."""
        return per_image(tensor, self.count, self.images)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean of each image's part of a tensor, in a shape that meets it."""
        if self.images is None and tensor.ndim and len(tensor) and len(tensor) % self.count == 0:
            means = tensor.reshape(self.count, -1).mean(1).repeat_interleave(len(tensor) // self.count)
            return means.reshape(-1, *[1] * (tensor.ndim - 1))
        numbers = numbers_of(tensor, self.count, self.images)
        if numbers is None:
            return tensor.mean()
        sums, counts = (summed(each, numbers, self.count) for each in (tensor, torch.ones_like(tensor)))
        return (sums / counts)[numbers.long()]

    def images_in(self, tensor: torch.Tensor) -> int | None:
        """The dimension of a tensor along which the images lie; None where it is not known."""
        if self.images is None:
            return 0 if len(tensor) == self.count else None
        apart = [d for d, size in enumerate(self.images.shape) if size > 1]
        return apart[0] if len(apart) == 1 and fits(self.images, tensor.shape) else None

    def deposit(self, place: int, relevance: torch.Tensor) -> None:
        """Give relevance to a source itself."""
        known = self.deposits.get(place)
        self.deposits[place] = relevance if known is None else known + relevance


def _constant(sent: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    return sent


def per_image(tensor: torch.Tensor, count: int, images: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over what belongs to each image; what is of the batch as a whole is shared evenly.

    >>> per_image(torch.ones(4, 3), 2), per_image(torch.ones(5, 2, 3), 2, torch.tensor([[[0], [1]]]))
    (tensor([6., 6.]), tensor([15., 15.]))
    """
    if images is None and tensor.ndim and len(tensor) % count == 0:
        return tensor.reshape(count, -1).sum(1)
    numbers = numbers_of(tensor, count, images)
    return tensor.sum().expand(count) / count if numbers is None else summed(tensor, numbers, count)


@dataclass(eq=False)
class Marks:
    """Where the results of some layers leave them, call by call: the Node, its output, and the tensor's shape."""

    found: dict[str, list[tuple[Node, int, torch.Size]]] = field(default_factory=dict)

    def watch(self, group: HookGroup, layer: str) -> None:
        calls = self.found.setdefault(layer, [])

        def note(module: nn.Module, args: object, output: object) -> None:
            tensor = first_tensor(output)
            if tensor is not None and tensor.grad_fn is not None:
                calls.append((tensor.grad_fn, tensor.output_nr, tensor.shape))

        group.forward(layer, note)


def node_of(source: Source) -> Node | None:
    """The Node that a tensor, or an edge of the graph, came from."""
    node: Node | None = source.grad_fn if isinstance(source, torch.Tensor) else source.node
    return node


def hold_back(group: HookGroup, node: Node, output: int, channels: Sequence[int], dim: int) -> None:
    """Let the gradient of some channels alone arrive at a Node, and of its outputs at one alone."""

    def arrive(grad_outputs: Gradients) -> Gradients | None:
        arrived = grad_outputs[output]
        changed = [None if g is None else torch.zeros_like(g) for g in grad_outputs]
        if arrived is not None:
            kept = torch.zeros(arrived.shape[dim], device=arrived.device, dtype=arrived.dtype)
            kept[list(channels)] = 1
            shape = [1] * arrived.ndim
            shape[dim] = -1
            changed[output] = arrived * kept.reshape(shape)
        return tuple(changed)

    group.node_pre(node, arrive)


def hold_back_beside(group: HookGroup, node: Node, after: Mapping[Node, Sequence[Node]]) -> None:
    """Stop the gradient wherever it would leave the ways to a Node. ``after`` says which Nodes lead to each one.

    Hooks run in their order: this comes after those of the rules, which see the whole gradient of a step.
    """
    leading, waiting = {node}, [node]
    while waiting:
        new = [each for each in after[waiting.pop()] if each not in leading]
        leading.update(new)
        waiting += new
    for each in leading - {node}:
        beside = [
            i for i, (before, _) in enumerate(each.next_functions) if before is not None and before not in leading
        ]
        if beside:
            group.node(each, partial(_stopped, beside))


def _stopped(places: Sequence[int], grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
    return tuple(torch.zeros_like(g) if i in places and g is not None else g for i, g in enumerate(grad_inputs))


def maps_in(steps: Sequence[Step], nodes: Mapping[Node, Sequence[Node]], apart: Collection[Node]) -> list[LinearNode]:
    """The linear maps among some steps, normalisations taken together with what they normalise.

    ``nodes`` says which Nodes lead to each one in the graph; those ``apart`` are not taken together with others.
    """
    found: list[LinearNode] = []
    within: set[int] = set()
    for step in reversed(steps):
        if not step.is_map or id(step) in within:
            continue
        assert step.linear is not None
        linear, first = step.linear, step
        preceding = step.preceding
        # Without an entrance of its own, as of a second normalisation, the two cannot be answered for as one.
        if step.kind == "batchnorm" and preceding is not None and preceding.linear is not None and preceding.entrances:
            alone = len(nodes.get(preceding.node, ())) == 1 and preceding.node not in apart
            joined = preceding.linear.then(linear.weight, linear.bias) if alone else None
            if joined is not None:
                linear, first = joined, preceding
                within.add(id(preceding))
        assert step.result is not None
        after = nodes[step.node]
        rectified = bool(after) and all(node.name().startswith("ReluBackward") for node in after)
        over = rectified and step.result.rectified and len(after) == 1 and step.node not in apart
        rectifier = after[0] if over else None
        entrance, x = first.entrance if first.entrances else None, first.values[0]
        found.append(
            LinearNode(first.kind, first.module, linear, x, step.result, entrance, step, False, rectified, rectifier)
        )
    found.reverse()
    exits, clean = {m.exit.node for m in found if m.kind != "batchnorm"}, set[Node]()
    for each in found:
        each.nearest = each.node is not None and _is_clean(each.node, exits, clean)
    return found


def _is_clean(start: Node, exits: set[Node], clean: set[Node]) -> bool:
    """Whether a Node's graph has none of the exits."""
    seen, waiting = {start}, [start]
    while waiting:
        for before, _ in waiting.pop().next_functions:
            if before is None or before in seen or before in clean:
                continue
            if before in exits:
                return False
            seen.add(before)
            waiting.append(before)
    clean |= seen
    return True


def consumers(score: torch.Tensor) -> dict[Node, list[Node]]:
    """For each Node of a score's graph, the Nodes that lead to it, as often as they do."""
    found: dict[Node, list[Node]] = {}
    for node in graph(score):
        found.setdefault(node, [])
        for before, _ in node.next_functions:
            if before is not None:
                found.setdefault(before, []).append(node)
    return found


def sources_behind(node: Node | None, sources: Sequence[torch.Tensor]) -> Iterator[int]:
    """The places of the sources that a Node leads back to."""
    if node is None:
        return
    seen, waiting = {node}, [node]
    while waiting:
        current = waiting.pop()
        variable = getattr(current, "variable", None)
        yield from (i for i, source in enumerate(sources) if source is variable)
        for before, _ in current.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
