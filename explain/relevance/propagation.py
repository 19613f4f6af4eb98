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
from explain.relevance.batch_layout import fits, numbers_of, summed
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
        """The same flow for the rule of one step: what it takes is added up by that step's
        images."""
        return self if step.images is None else replace(self, images=step.images)

    def attach(self, step: Step, back: Callable[[Tensor], Sent]) -> None:
        """Let ``back``, of the gradient that arrives at a step's result, say what leaves the
        step."""

        def arrive(gradients: Gradients) -> Gradients | None:
            arrived = gradients[step.output]
            sent = None if arrived is None else back(arrived)
            if arrived is None or sent is None:
                return None
            answers: dict[Any, Any] = {None: arrived}
            if isinstance(sent, Tensor):
                answers = {None: None, **dict.fromkeys(step.entrances, sent)}
                answers |= dict.fromkeys(step.scales, send_nothing)
            else:
                answers |= sent
            for place, entrance in step.entrances.items():
                if place in answers:
                    entrance.answer = partial(_answer, answers[place])
                    self._entrances.append(entrance)
            for_autograd = answers[None]
            changed = list(gradients)
            changed[step.output] = None if for_autograd is None else for_autograd.to(arrived.dtype)
            return tuple(changed)

        self.group.put_node(step.node, arrive, pre=True)

    def is_nonnegative(self, step: Step) -> bool:
        """Whether a map is given nothing negative; read for all ``signed`` steps together."""
        if step not in self._nonnegative:
            signed = dict.fromkeys([*self.signed, step])
            unread = [other for other in signed if other not in self._nonnegative]
            lowest = read_together(*(other.x.tensor.detach().amin() for other in unread))
            for other, (least,) in zip(unread, lowest, strict=True):
                self._nonnegative[other] = least >= 0
        return self._nonnegative[step]

    def close(self) -> None:
        """Reset the entrances that the pass did not come by."""
        for entrance in self._entrances:
            entrance.answer = None
        self._entrances.clear()

    @torch.no_grad()
    def take(self, cause: str, part: Tensor, factor: Tensor | float = 1.0) -> None:
        """Add to what a cause has taken, from a tensor with rows for the images, times factors that
        meet it."""
        by_rows = (
            part.ndim > 0
            and len(part) == self.count
            and self.images is None
            and part.is_contiguous()
        )
        if not isinstance(factor, Tensor):
            taken = self.by_image(part) * factor
        elif factor.shape == part.shape and factor.dtype == part.dtype and by_rows:
            rows = part.reshape(self.count, 1, -1)
            columns = factor.reshape(self.count, -1, 1)
            taken = (rows @ columns).reshape(self.count)
        elif factor.shape == part.shape[-1:] and part.ndim > 1 and factor.dtype == part.dtype:
            taken = self.by_image((part @ factor).unsqueeze(-1))
        else:
            taken = self.by_image(part * factor)
        self.taken[cause] = self.taken.get(cause, 0) + taken

    def per_value(self, relevance: Tensor, x: Tensor) -> Tensor:
        """The gradient with which x has this relevance; what falls to zeros is taken."""
        self.take("zero inputs", relevance * (x == 0))
        return torch.where(x == 0, 0, relevance / torch.where(x == 0, 1, x))

    def watch(self, cause: str, part: Tensor) -> None:
        """Note how much relevance arrives at an operation without a rule."""
        self.watched[cause] = self.watched.get(cause, 0) + self.by_image(part.detach().abs())

    def lost(self, cause: str, share: float) -> bool:
        """Whether an operation without a rule has taken more than a share of what arrived there, of
        some image."""
        return bool((self.taken[cause].abs() > share * self.watched[cause]).any())

    def by_image(self, tensor: Tensor) -> Tensor:
        """The sum over each image's part of what the step has; what is of the batch as a whole is
        shared evenly."""
        if self.images is None and tensor.ndim and len(tensor) % self.count == 0:
            return tensor.reshape(self.count, -1).sum(1)
        numbers = numbers_of(tensor, self.count, self.images)
        if numbers is None:
            return tensor.sum().expand(self.count) / self.count
        return summed(tensor, numbers, self.count)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of each image's part of a tensor, in a shape that meets it."""
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
        """The dimension of a tensor along which the images lie; None where it is not known."""
        if self.images is None:
            return 0 if len(tensor) == self.count else None
        varying = [d for d, size in enumerate(self.images.shape) if size > 1]
        return varying[0] if len(varying) == 1 and fits(self.images, tensor.shape) else None

    def deposit(self, place: int, relevance: Tensor) -> None:
        """Give relevance to a source itself."""
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
        """What coverage calls it; most rules have a class attribute instead."""
        return type(self).__name__.lower()

    def fits(self, step: Step) -> bool:
        """Whether the rule can act on a step for which a composite names it."""
        return bool(step.entrances) and step.map is None

    def back(self, step: Step, gradient: Tensor, flow: RelevanceFlow) -> Sent:
        """What leaves the step, from the gradient in its result."""
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
    """Value times gradient, of complex numbers too."""
    return (gradient.conj() * value).real if gradient.is_complex() else gradient * value


def send_nothing(plain: Tensor) -> Tensor:
    """An answer of an entrance by which no relevance leaves."""
    return torch.zeros_like(plain)


def _answer(answer: Tensor | Answer, plain: Tensor | None) -> Tensor | None:
    """What leaves by an entrance: a tensor, or what a function makes of autograd's gradient, where
    that is known."""
    if isinstance(answer, Tensor):
        return answer
    return None if plain is None else answer(plain)


def pass_channels(
    group: HookGroup, node: Node, output: int, channels: Sequence[int], dim: int
) -> None:
    """Set the gradient that arrives at a Node to zero, except in some channels of one of its
    outputs."""

    def arrive(grad_outputs: Gradients) -> Gradients | None:
        arrived = grad_outputs[output]
        changed = [None if g is None else torch.zeros_like(g) for g in grad_outputs]
        if arrived is not None:
            kept = torch.tensor(channels, device=arrived.device)
            changed[output] = torch.zeros_like(arrived).index_copy(
                dim, kept, arrived.index_select(dim, kept)
            )
        return tuple(changed)

    group.put_node(node, arrive, pre=True)


def stop_other_paths(group: HookGroup, node: Node, after: Mapping[Node, Sequence[Node]]) -> None:
    """Stop the gradient on all paths that do not lead to a Node. ``after`` says which Nodes lead to
    each one.

    Hooks run in their order: this comes after those of the rules, which see the whole gradient of a
    step.
    """
    leading = {node}
    waiting = [node]
    while waiting:
        new = [reader for reader in after[waiting.pop()] if reader not in leading]
        leading.update(new)
        waiting += new

    def stop(other_inputs: set[int], grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
        return tuple(
            torch.zeros_like(g) if i in other_inputs and g is not None else g
            for i, g in enumerate(grad_inputs)
        )

    for reader in leading - {node}:
        other_inputs = {
            i
            for i, (parent, _) in enumerate(reader.next_functions)
            if parent and parent not in leading
        }
        if other_inputs:
            group.put_node(reader, partial(stop, other_inputs))


def with_merged_maps(
    steps: Sequence[Step], nodes: Mapping[Node, Sequence[Node]], do_not_merge: Collection[Node]
) -> list[Step]:
    """The linear maps among some steps, normalisations merged with the map that they alone are
    given, then the others.

    ``nodes`` says which Nodes lead to each one in the graph; those in ``do_not_merge`` are not
    merged with others.
    """
    maps: list[Step] = []
    merged: set[Step] = set()
    for step in reversed([step for step in steps if step.map is not None]):
        if step in merged:
            continue
        after = _behind_entrances(step.node, nodes)
        rectified = bool(after) and all(node.name().startswith("ReluBackward") for node in after)
        first = step
        preceding = step.preceding
        if (
            preceding is not None
            and len(nodes[preceding.node]) == 1
            and preceding.node not in do_not_merge
        ):
            both = preceding.linear.then(step.linear.weight, step.linear.bias)
            if both is not None:
                merged.add(preceding)
                first = replace(
                    preceding,
                    node=step.node,
                    output=step.output,
                    kept_result=step.kept_result,
                    map=both,
                )
                first.images = step.images
        first.rectified = rectified
        maps.append(first)
    maps.reverse()
    reach = Reach((), {step.node for step in maps if step.kind != "batchnorm"})
    for step in maps:
        inputs = [step.entrances[place] for place in step.dependent if place not in step.scales]
        step.nearest = not any(reach.of(entrance) for entrance in inputs)
    return [*maps, *(step for step in steps if step.map is None)]


def _behind_entrances(node: Node, nodes: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """The Nodes that a Node's result is given to."""
    receivers: list[Node] = []
    for after in nodes[node]:
        receivers += (
            _behind_entrances(after, nodes) if after.name() == "_EntranceBackward" else [after]
        )
    return receivers
