"""Relevance propagation: a walk back over a recorded pass whose gradient is changed so that value
times gradient is relevance.

At each step, a rule says what takes the place of the gradient. An operation that no rule covers
keeps its derivative, which shares out the relevance in proportion to the inputs, as far as it is
linear. What a rule does not pass on (what biases and stabilisers take, what a softmax loses) is
added up by its cause, for each image.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from explain._utils.device_reads import read_together
from explain._utils.options import CheckedFields
from explain.recording import Step as RecordedStep
from explain.recording import Value
from explain.recording.gradients import Gradients, Rule, derivative
from explain.recording.images import summed
from explain.recording.moves import fits
from explain.relevance.linear_maps import along
from explain.relevance.steps import Step

Sent: TypeAlias = Tensor | Sequence[Tensor | None] | None
"""What leaves a step in the place of its derivative: a tensor for all of its signals, or one for
each of its inputs. None changes nothing."""


@dataclass(eq=False)
class RelevanceFlow:
    """What a walk under a composite leaves behind: what was taken by which cause, and what was
    deposited in the explained inputs (``sources``)."""

    count: int
    sources: Sequence[Value]
    recorded: Sequence[RecordedStep] = ()
    signals: AbstractSet[Value] = frozenset()
    """The values that depend on the explained inputs."""
    images: Tensor | None = None
    """Which image each value belongs to in the step that the flow is for, None where the images
    come first."""
    taken: dict[str, Tensor] = field(default_factory=dict)
    deposits: Gradients = field(default_factory=dict)
    """Relevance that was given to a source itself."""
    watched: dict[str, Tensor] = field(default_factory=dict)
    """How much relevance arrived at operations without a rule, by their names."""
    signed: list[Step] = field(default_factory=list)
    """The steps whose rules ask whether what they are given is negative anywhere."""
    _nonnegative: dict[Step, bool] = field(default_factory=dict)

    def for_step(self, step: Step) -> "RelevanceFlow":
        """This flow with the image numbers of one step's result; it shares ``taken`` and
        ``deposits`` with this one."""
        return self if step.images is None else replace(self, images=step.images)

    def is_nonnegative(self, step: Step) -> bool:
        """Whether the input of a step's linear map has no negative value, as that of a ReLU."""
        if is_rectified(step.linear.x):
            return True
        if step not in self._nonnegative:
            # read from the device once, for all steps
            asked_steps = dict.fromkeys([*self.signed, step])
            unread = [
                map_step
                for map_step in asked_steps
                if map_step not in self._nonnegative and not is_rectified(map_step.linear.x)
            ]
            lowest = read_together(*(map_step.x.tensor.detach().amin() for map_step in unread))
            for map_step, (lowest_value,) in zip(unread, lowest, strict=True):
                self._nonnegative[map_step] = lowest_value >= 0
        return self._nonnegative[step]

    @torch.no_grad()
    def take(self, cause: str, relevance: Tensor, factor: Tensor | float = 1.0) -> None:
        """Add ``relevance * factor``, summed over each image, to what a cause has taken
        ``(count,)``: all relevance that rules do not pass on, such as that of biases."""
        if isinstance(factor, Tensor):
            taken = self.by_image(relevance * factor)
        else:
            taken = self.by_image(relevance) * factor
        earlier = self.taken.get(cause)
        self.taken[cause] = taken if earlier is None else earlier + taken

    def per_value(self, relevance: Tensor, x: Tensor) -> Tensor:
        """The gradient whose product with x is ``relevance``; relevance of zeros in x is taken by
        the cause "zero inputs"."""
        self.take("zero inputs", relevance * (x == 0))
        return torch.where(x == 0, 0, relevance / torch.where(x == 0, 1, x))

    def watch(self, cause: str, relevance: Tensor) -> None:
        """Add the size of the relevance that arrived at an operation without a rule, for each
        image, to ``watched``, which `lost` compares with what the operation took."""
        self.watched[cause] = self.watched.get(cause, 0) + self.by_image(relevance.detach().abs())

    def lost(self, cause: str, share: float) -> bool:
        """Whether an operation without a rule took more than ``share`` of the relevance that
        arrived there, in any image."""
        return bool((self.taken[cause].abs() > share * self.watched[cause]).any())

    def by_image(self, tensor: Tensor) -> Tensor:
        """The sum of a step's tensor over each image ``(count,)``; one that belongs to no image
        (parameters, for one) is divided evenly among them."""
        if self.count == 1:
            return tensor.sum().reshape(1)
        numbers = numbers_of(tensor, self.count, self.images)
        if numbers is None:
            return tensor.sum().expand(self.count) / self.count
        return summed(tensor, numbers, self.count)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of a step's tensor over each image, in a shape that broadcasts to it; one mean
        for all where it is not known which image a value belongs to."""
        numbers = None if self.count == 1 else numbers_of(tensor, self.count, self.images)
        if numbers is None:
            return tensor.mean()
        ones = tensor.new_ones(()).expand_as(tensor)
        sums, counts = (summed(summand, numbers, self.count) for summand in (tensor, ones))
        return (sums / counts)[numbers.long()]

    def images_in(self, tensor: Tensor) -> int | None:
        """The dimension of a step's tensor along which the images lie; None if none, or several,
        do."""
        if self.images is None:
            return 0 if len(tensor) == self.count else None
        varying = [d for d, size in enumerate(self.images.shape) if size > 1]
        return varying[0] if len(varying) == 1 and fits(self.images, tensor.shape) else None

    def deposit(self, source: Value, relevance: Tensor) -> None:
        """Give relevance to an explained input, past the gradient, as rules at the input do: their
        shares are no multiples of it."""
        earlier = self.deposits.get(source)
        self.deposits[source] = relevance if earlier is None else earlier + relevance


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

        The composite tries its next rule if not. This default accepts steps that are no linear
        maps.
        """
        return step.map is None

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


def is_rectified(value: Value) -> bool:
    """Whether a value is a ReLU's result, or is selected from it, as by a pooling."""
    step = value.step
    while step is not None and step.operation.has("selects") and len(step.inputs) == 1:
        step = step.inputs[0].step
    return step is not None and step.name == "relu"


def relevance_of(gradient: Tensor, value: Tensor | float) -> Tensor:
    """Value times gradient, which is the relevance of LRP; the real part of it for complex
    numbers."""
    return (gradient.conj() * value).real if gradient.is_complex() else gradient * value


def plain_gradient(
    step: Step, gradient: Tensor, signals: AbstractSet[Value]
) -> list[Tensor | None]:
    """The gradients in the inputs of a step that are ``signals``, by its own derivative."""
    return list(derivative(step.recorded, {step.output: gradient}, signals))


def walk_rule(step: Step, rule: "RelevanceRule", flow: RelevanceFlow) -> Rule:
    """A relevance rule at one step, as `walk_back` takes it."""
    flow_of_step = flow.for_step(step)

    def back(arrived: Gradients) -> Iterable[tuple[Value, Tensor | None]]:
        """The gradients that leave the step, in the place of those of its derivative."""
        gradient = arrived.get(step.output)
        if gradient is None:  # only another result of the step leads to the score
            return zip(step.inputs, derivative(step.recorded, arrived, flow.signals), strict=True)
        if step.map is not None:  # reshapes behind the map may be merged into it
            gradient = gradient.reshape(step.shape)
        sent = rule.back(step, gradient, flow_of_step)
        if isinstance(sent, Tensor):
            signals = [position for position in step.signals if position not in step.scales]
            return [(step.inputs[position], sent) for position in signals]
        if sent is None:
            sent = plain_gradient(step, gradient, flow.signals)
        return zip(step.inputs, sent, strict=True)

    return back


def walk_with_account(step: Step, flow: RelevanceFlow) -> Rule:
    """The derivative of an operation that no rule knows, and an account, by its name, of the
    relevance that is lost."""

    # What is lost is the results times the gradients that arrive, less what was given times the
    # gradients that leave: nothing, where the operation is linear or a choice among values.
    def back(arrived: Gradients) -> Iterable[tuple[Value, Tensor | None]]:
        """The gradients that leave the step."""
        of_result = flow.for_step(step)
        for value, gradient in arrived.items():
            relevance = relevance_of(gradient, value.tensor)
            of_result.take(step.name, relevance)
            of_result.watch(step.name, relevance)
        plain = derivative(step.recorded, arrived, flow.signals)
        for position, gradient_of_input in enumerate(plain):
            if gradient_of_input is not None:
                of_input = replace(flow, images=step.input_images[position])
                value = step.inputs[position]
                of_input.take(step.name, -relevance_of(gradient_of_input, value.tensor))
        return zip(step.inputs, plain, strict=True)

    return back


def numbers_of(tensor: Tensor, count: int, images: Tensor | None) -> Tensor | None:
    """The image number of each value of a step's tensor: ``images`` where they broadcast to it,
    else by samples, one or several for each of ``count`` images. None where it is not known."""
    if images is not None and fits(images, tensor.shape):
        return images
    if tensor.ndim and len(tensor) and len(tensor) % count == 0:
        return _image_by_image(tensor, count)
    if tensor.ndim > 1 and tensor.shape[1] == count:  # tokens come first: (T, N, C)
        return _image_by_image(tensor[0], count).unsqueeze(0)
    return None


def _image_by_image(tensor: Tensor, count: int) -> Tensor:
    """The numbers of ``count`` images, for a tensor whose samples come image by image:
    ``(len(tensor), 1, ...)``."""
    numbers = torch.arange(count, device=tensor.device, dtype=torch.int32)
    return along(numbers.repeat_interleave(len(tensor) // count), tensor.ndim)
