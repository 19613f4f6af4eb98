"""Relevance propagation: a backward pass whose gradient is changed so that value times gradient is
relevance.

At each step, a rule says what takes the place of the gradient. An operation that no rule covers
keeps autograd's, which shares out the relevance in proportion to the inputs, as far as it is
linear. What a rule does not pass on (what biases and stabilisers take, what a softmax loses) is
added up by its cause, for each image.

A normalisation by known statistics that a linear map's result is given to, and nothing else, is one
map with it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from explain._utils.device_reads import read_together
from explain._utils.options import CheckedFields
from explain.hooks import HookGroup
from explain.hooks.graph import Entrance, Reach
from explain.recording.moves import fits
from explain.recording.rows import summed
from explain.relevance.batch_layout import numbers_of
from explain.relevance.calls import along
from explain.relevance.steps import Step

Gradients = tuple[Tensor | None, ...]
Answer: TypeAlias = Callable[[Tensor], Tensor | None]
Sent: TypeAlias = Tensor | Mapping[Any, Tensor | Answer] | None
"""What leaves a step in the place of autograd's gradients, by the places of what it was given: a
tensor, or a function of autograd's. Places that are not named keep autograd's. With None for a
place, it says what autograd differentiates with in the place of what arrived. A tensor alone is for
all signals, and spares autograd the work; None alone changes nothing."""


@dataclass(eq=False)
class RelevanceFlow:
    """What a backward pass under a composite leaves behind: what was taken by which cause, and what
    was deposited.

    ``count`` is the number of images; ``sources`` are the explained inputs.
    """

    group: HookGroup
    count: int
    sources: Sequence[Tensor]
    images: Tensor | None = None
    """Which image each value belongs to in the step that the flow is for, as `BatchLayout` tells
    it."""
    taken: dict[str, Tensor] = field(default_factory=dict)
    deposits: dict[int, Tensor] = field(default_factory=dict)
    """Relevance that was given to a source itself, by its place among them."""
    watched: dict[str, Tensor] = field(default_factory=dict)
    """How much relevance arrived at operations without a rule, by their names."""
    signed: list[Step] = field(default_factory=list)
    """The steps whose rules ask whether what they are given is negative anywhere."""
    _nonnegative: dict[Step, bool] = field(default_factory=dict)
    _entrances: list[Entrance] = field(default_factory=list)

    def for_step(self, step: Step) -> "RelevanceFlow":
        """This flow with the image numbers of one step's result, to pass to the rule of that step.

        It shares ``taken`` and ``deposits`` with this one.
        """
        return self if step.images is None else replace(self, images=step.images)

    def attach(self, step: Step, back: Callable[[Tensor], Sent]) -> None:
        """Hook a rule (of LRP or DeepLIFT) onto a step's Node, so that it replaces autograd's
        gradients in the backward pass.

        ``back`` gets the gradient in the step's result, and returns the gradients for its inputs
        (see `Sent`). They are handed to the step's entrances, which autograd reaches right after
        the Node.
        """

        def arrive(gradients: Gradients) -> Gradients | None:
            """Run the rule before the Node's own backward, and change the gradients that the Node
            receives."""
            arrived = gradients[step.output]
            sent = None if arrived is None else back(arrived)
            if arrived is None or sent is None:
                return None
            sent_by_place: dict[Any, Any] = {None: arrived}
            if isinstance(sent, Tensor):
                sent_by_place = {None: None, **dict.fromkeys(step.entrances, sent)}
                sent_by_place |= dict.fromkeys(step.scales, send_nothing)
            else:
                sent_by_place |= sent
            for place, entrance in step.entrances.items():
                if place in sent_by_place:
                    entrance.answer = partial(_answer, sent_by_place[place])
                    self._entrances.append(entrance)
            for_autograd = sent_by_place[None]
            changed = list(gradients)
            changed[step.output] = None if for_autograd is None else for_autograd.to(arrived.dtype)
            return tuple(changed)

        self.group.put_node(step.node, arrive, pre=True)

    def is_nonnegative(self, step: Step) -> bool:
        """Whether the input of a step's linear map has no negative value.

        Read from the device once, for all ``signed`` steps together.
        """
        if step not in self._nonnegative:
            asked_steps = dict.fromkeys([*self.signed, step])
            unread = [map_step for map_step in asked_steps if map_step not in self._nonnegative]
            lowest = read_together(*(map_step.x.tensor.detach().amin() for map_step in unread))
            for map_step, (lowest_value,) in zip(unread, lowest, strict=True):
                self._nonnegative[map_step] = lowest_value >= 0
        return self._nonnegative[step]

    def close(self) -> None:
        """Reset the entrances that the backward pass did not reach, so that none keeps a rule's
        answer for a later pass."""
        for entrance in self._entrances:
            entrance.answer = None
        self._entrances.clear()

    @torch.no_grad()
    def take(self, cause: str, relevance: Tensor, factor: Tensor | float = 1.0) -> None:
        """Add ``relevance * factor``, summed over each image, to what a cause has taken:
        ``taken[cause]`` ``(count,)``.

        LRP rules call this for all relevance that they do not pass on, such as that of biases.
        Coverage shows the causes, and diagnostics read "stabiliser" and "softmax". ``factor`` is a
        number, or a tensor that broadcasts to ``relevance``; the special cases spare a product of
        their full size.
        """
        by_rows = (
            relevance.ndim > 0
            and len(relevance) == self.count
            and self.images is None
            and relevance.is_contiguous()
        )
        if not isinstance(factor, Tensor):
            taken = self.by_image(relevance) * factor
        elif factor.shape == relevance.shape and factor.dtype == relevance.dtype and by_rows:
            rows = relevance.reshape(self.count, 1, -1)
            columns = factor.reshape(self.count, -1, 1)
            taken = (rows @ columns).reshape(self.count)
        elif (
            factor.shape == relevance.shape[-1:]
            and relevance.ndim > 1
            and factor.dtype == relevance.dtype
        ):
            taken = self.by_image((relevance @ factor).unsqueeze(-1))
        else:
            taken = self.by_image(relevance * factor)
        self.taken[cause] = self.taken.get(cause, 0) + taken

    def per_value(self, relevance: Tensor, x: Tensor) -> Tensor:
        """The gradient whose product with x is ``relevance``; relevance of zeros in x is taken by
        the cause "zero inputs"."""
        self.take("zero inputs", relevance * (x == 0))
        return torch.where(x == 0, 0, relevance / torch.where(x == 0, 1, x))

    def watch(self, cause: str, relevance: Tensor) -> None:
        """Add the size of the relevance that arrived at an operation without a rule to ``watched``,
        for each image.

        `lost` compares what the operation took with it.
        """
        self.watched[cause] = self.watched.get(cause, 0) + self.by_image(relevance.detach().abs())

    def lost(self, cause: str, share: float) -> bool:
        """Whether an operation without a rule took more than ``share`` of the relevance that
        arrived there, in any image."""
        return bool((self.taken[cause].abs() > share * self.watched[cause]).any())

    def by_image(self, tensor: Tensor) -> Tensor:
        """The sum of a step's tensor over each image: ``(count,)``.

        A tensor that belongs to no image (parameters, for one) is divided evenly among them.
        """
        if self.images is None and tensor.ndim and len(tensor) % self.count == 0:
            return tensor.reshape(self.count, -1).sum(1)
        numbers = numbers_of(tensor, self.count, self.images)
        if numbers is None:
            return tensor.sum().expand(self.count) / self.count
        return summed(tensor, numbers, self.count)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of a step's tensor over each image, in a shape that broadcasts to the tensor.

        It is one mean for all where it is not known which image a value belongs to.
        """
        if self.images is None and tensor.ndim and len(tensor) and len(tensor) % self.count == 0:
            means = tensor.reshape(self.count, -1).mean(1)
            if len(tensor) != self.count:
                means = means.repeat_interleave(len(tensor) // self.count)
            return along(means, tensor.ndim)
        numbers = numbers_of(tensor, self.count, self.images)
        if numbers is None:
            return tensor.mean()
        sums, counts = (
            summed(summand, numbers, self.count) for summand in (tensor, torch.ones_like(tensor))
        )
        return (sums / counts)[numbers.long()]

    def images_in(self, tensor: Tensor) -> int | None:
        """The dimension of a step's tensor along which the images lie; None if none, or several,
        do."""
        if self.images is None:
            return 0 if len(tensor) == self.count else None
        varying = [d for d, size in enumerate(self.images.shape) if size > 1]
        return varying[0] if len(varying) == 1 and fits(self.images, tensor.shape) else None

    def deposit(self, place: int, relevance: Tensor) -> None:
        """Give relevance to the explained input at ``place`` of ``sources``, past the gradient.

        Rules at the input do so: their shares are no multiples of the input. The engine adds the
        deposits to value times gradient.
        """
        self.deposits[place] = self.deposits.get(place, 0) + relevance


@dataclass(frozen=True)
class RelevanceRule(CheckedFields):
    """How a step shares out relevance among what it was given.

    Relevance is value times gradient. A rule writes ``back``, which turns the gradient in the
    step's result into the gradient in its input. ``fits`` refuses steps that the rule cannot act
    on. Options are checked against the types of their fields, and against ``minimums``.
    """

    @property
    def name(self) -> str:
        """What ``coverage`` calls the rule in results and records: the class name in lower case,
        unless a class attribute overrides it."""
        return type(self).__name__.lower()

    def fits(self, step: Step) -> bool:
        """Whether the rule can act on a step whose kind and module its condition accepts.

        The composite tries its next rule if not. This default accepts steps with entrances that are
        no linear maps.
        """
        return bool(step.entrances) and step.map is None

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        """The gradients that leave the step, from the gradient in its result (of the result's
        shape).

        Called in the backward pass, once for each step that the rule covers. Relevance that is not
        sent on must be given to ``flow.take``.
        """
        raise NotImplementedError


class LinearRule(RelevanceRule):
    """A rule for linear maps z = W x + b: ``step.linear``, with ``step.x`` and ``step.result`` as
    they were.

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

    minimums = {"epsilon": 0, "alpha": 1, "beta": 0, "gamma": 0}
    by_sign: ClassVar[bool] = False
    """Whether ``back`` asks the flow if what the map is given is negative anywhere."""

    def fits(self, step: Step) -> bool:
        return step.map is not None


def relevance_of(gradient: Tensor, value: Tensor | float) -> Tensor:
    """Value times gradient, which is the relevance of LRP; the real part of it for complex
    numbers."""
    return (gradient.conj() * value).real if gradient.is_complex() else gradient * value


def send_nothing(plain: Tensor) -> Tensor:
    """Zeros in place of autograd's gradient: what an LRP rule sends through an entrance by which no
    relevance leaves."""
    return torch.zeros_like(plain)


def _answer(answer: Tensor | Answer, plain: Tensor | None) -> Tensor | None:
    """The gradient that leaves by an entrance: the rule's tensor, or the rule's function of
    autograd's gradient ``plain``.

    None where the rule needs autograd's gradient and there is none.
    """
    if isinstance(answer, Tensor):
        return answer
    return None if plain is None else answer(plain)


def pass_channels(
    group: HookGroup, node: Node, output: int, channels: Sequence[int], dim: int
) -> None:
    """Set the gradient that arrives at a Node to zero, except in some channels of one of its
    outputs.

    For relevance of a concept: ``output`` is the Node's output that holds the layer's map,
    ``channels`` the indices kept along its dimension ``dim``. Other outputs get zeros.
    """

    def keep_channels(grad_outputs: Gradients) -> Gradients | None:
        """The gradients that arrive at the Node, with zeros everywhere but in the kept channels: a
        prehook."""
        arrived = grad_outputs[output]
        changed = [None if g is None else torch.zeros_like(g) for g in grad_outputs]
        if arrived is not None:
            kept = torch.tensor(channels, device=arrived.device)
            changed[output] = torch.zeros_like(arrived).index_copy(
                dim, kept, arrived.index_select(dim, kept)
            )
        return tuple(changed)

    group.put_node(node, keep_channels, pre=True)


def stop_other_paths(group: HookGroup, node: Node, after: Mapping[Node, Sequence[Node]]) -> None:
    """Zero the gradient on all paths of the graph that do not lead to ``node``.

    For relevance of a concept, which flows through one layer alone. ``after`` is the graph as
    `consumers` gives it: for each Node, those that read its result. Hooks run in the order in which
    they are put: call this after the rules are attached, which need a step's whole gradient.
    """
    leading_nodes = {node}
    waiting = [node]
    while waiting:
        new_readers = [reader for reader in after[waiting.pop()] if reader not in leading_nodes]
        leading_nodes.update(new_readers)
        waiting += new_readers

    def stop(other_inputs: set[int], grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
        """The gradients that leave a Node, with zeros for inputs that do not lead to the concept's
        Node."""
        return tuple(
            torch.zeros_like(g) if i in other_inputs and g is not None else g
            for i, g in enumerate(grad_inputs)
        )

    for reader in leading_nodes - {node}:
        other_inputs = {
            i
            for i, (parent, _) in enumerate(reader.next_functions)
            if parent and parent not in leading_nodes
        }
        if other_inputs:
            group.put_node(reader, partial(stop, other_inputs))


def with_merged_maps(
    steps: Sequence[Step], nodes: Mapping[Node, Sequence[Node]], do_not_merge: Collection[Node]
) -> list[Step]:
    """The steps of a pass with each batch normalisation merged into the linear map before it: first
    the linear maps, in the order of the pass, then all other steps.

    Merged are maps whose result only the normalisation reads. ``nodes`` is the graph as `consumers`
    gives it. Those whose Nodes are in ``do_not_merge`` stay apart, since their own results are
    asked for. Sets ``rectified`` and ``nearest`` of the linear maps, which rules and composites
    read.
    """
    map_steps: list[Step] = []
    merged: set[Step] = set()
    for step in reversed([step for step in steps if step.map is not None]):
        if step in merged:
            continue
        receivers = _behind_entrances(step.node, nodes)
        rectified = bool(receivers) and all(
            node.name().startswith("ReluBackward") for node in receivers
        )
        merged_step = step
        preceding = step.preceding
        if (
            preceding is not None
            and len(nodes[preceding.node]) == 1
            and preceding.node not in do_not_merge
        ):
            merged_map = preceding.linear.then(step.linear.weight, step.linear.bias)
            if merged_map is not None:
                merged.add(preceding)
                merged_step = replace(
                    preceding,
                    node=step.node,
                    output=step.output,
                    kept_result=step.kept_result,
                    map=merged_map,
                )
                merged_step.images = step.images
        merged_step.rectified = rectified
        map_steps.append(merged_step)
    map_steps.reverse()
    reach = Reach((), {step.node for step in map_steps if step.kind != "batchnorm"})
    for step in map_steps:
        inputs = [step.entrances[place] for place in step.dependent if place not in step.scales]
        step.nearest = not any(reach.of(entrance) for entrance in inputs)
    return [*map_steps, *(step for step in steps if step.map is None)]


def _behind_entrances(node: Node, nodes: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """The Nodes that read a Node's result, looking through the entrances that this package has put
    between them."""
    receivers: list[Node] = []
    for reader in nodes[node]:
        receivers += (
            _behind_entrances(reader, nodes) if reader.name() == "_EntranceBackward" else [reader]
        )
    return receivers
