"""What happens to the input before the first map: flips, crops, zooms, normalisations, read from
the autograd graph.

Rules at the input give relevance to the values that the first map is given. Each of these goes back
to the pixels that it was made of: all of it to one pixel, where values were only moved, or scaled
and shifted in place; where values were mixed (by interpolation, or grey made of three colours), in
proportion to the size of the weights. The range of the input is brought forward in the same way.

What is computed from the whole of a picture and spread over it (its mean, its deviation) is a
constant, as in other rules. With the derivative J of an operation, relevance R goes back as w |J|'
(R / |J| w), where w is what was brought forward from ones. That needs no operation to be known by
its name.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from explain.recording import Step, Value
from explain.recording.gradients import Gradients, derivative, walk_back


class _Unknown(Exception):  # noqa: N818 (no error: it is answered otherwise)
    """An operation that cannot be followed."""


class _Operation:
    """One step, and the ``positions`` of those of its inputs that lead to the sources."""

    def __init__(self, step: Step, positions: list[int]) -> None:
        """Compute the derivative in each input that it changes value by value. Constants beside a
        signal, such as means and deviations that are spread over it, are dropped."""
        self.step = step
        slopes = {position: self._slope(position) for position in positions}
        self.slopes = {position: slope for position, slope in slopes.items() if slope is not None}
        """The derivatives in inputs that it changes value by value."""
        self.sizes: dict[int, Tensor] = {}
        """Their absolute values, once `forward` has found them."""
        has_signal = any(not self._is_spread(position) for position in self.slopes)
        if len(positions) > 1 and has_signal:
            # a pointwise step reads all inputs so; one that is broadcast only has no slope, since
            # gradients in it are sums
            by_place = set(positions if step.is_pointwise else self.slopes)
            positions = [
                position
                for position in positions
                if position not in by_place or not self._is_spread(position)
            ]
        self.positions = positions

    def _slope(self, position: int) -> Tensor | None:
        """The derivative of this step in one input, if each value of the result depends on the
        value in its place alone; else None."""
        result = self.step.output
        ones = _ones(result)
        if self.step.operation.has("copies"):
            return ones
        # statistics of a normalisation are constants: it counts as the identity
        slope_if_mixed = ones if "_norm" in self.step.name else None
        if len(self.step.outputs) != 1:
            return slope_if_mixed
        # from each value alone, a gradient of other numbers gives the same slopes times these; from
        # mixed values, it does not
        generator = torch.Generator().manual_seed(0)
        numbers = (torch.rand(ones.shape, generator=generator, dtype=torch.float64) + 0.5).to(ones)
        slope = self._derivative({result: ones}, position)
        scaled = self._derivative({result: numbers}, position)
        if slope is None or scaled is None or slope.shape != ones.shape:
            return slope_if_mixed
        expected = slope * numbers
        is_by_place = bool(((scaled - expected).abs() <= _rounding(expected)).all())
        return slope if is_by_place else slope_if_mixed

    def _is_spread(self, position: int) -> bool:
        """Whether an input of this step was enlarged to the result's shape (broadcast), as a mean
        or deviation is."""
        value = self.step.inputs[position]
        is_expanded = value.step is not None and value.step.name == "expand"
        return value.shape != self.step.output.shape or is_expanded

    def _derivative(self, arrived: Gradients, position: int) -> Tensor | None:
        """The gradient in one input of this step, from those in its results."""
        return derivative(self.step, arrived, {self.step.inputs[position]})[position]

    def forward(self, values: Gradients, *, sizes: bool) -> Gradients:
        """Pass values through the derivative of this step, from its inputs to its results; with
        ``sizes``, by absolute slopes. Raises _Unknown without a second derivative."""
        total = {value: torch.zeros_like(_ones(value)) for value in self.step.outputs}
        for position in self.positions:
            value = values[self.step.inputs[position]]
            if position in self.slopes:
                slope = self._size(position, value) if sizes else self.slopes[position]
                total[self.step.output] = total[self.step.output] + slope * value
                continue
            # Forward by two derivatives backward: the gradient is linear in `arriving`, and its
            # derivative in that, times a direction, is that of the operation, times the direction.
            with torch.enable_grad():
                arriving = {v: torch.zeros_like(t).requires_grad_() for v, t in total.items()}
                gradient = self._derivative(arriving, position)
            if gradient is None or not gradient.requires_grad:
                raise _Unknown
            direction = value.expand_as(gradient).to(gradient.dtype)
            products = torch.autograd.grad(
                gradient, list(arriving.values()), direction, materialize_grads=True
            )
            rounding_error = _rounding(value)
            for result, product in zip(arriving, products, strict=True):
                cancels_out = (product != 0) & (product.abs() <= rounding_error)
                if sizes and bool(cancels_out.any()):
                    raise _Unknown  # weights of both signs, as those of a softmax
                total[result] = total[result] + product
        return total

    def back(self, arrived: Gradients) -> Iterator[tuple[Value, Tensor | None]]:
        """The relevance of each input, from what arrived at the results: the transpose of `forward`
        with ``sizes``, which must have run before."""
        for position in self.positions:
            value = self.step.inputs[position]
            if position not in self.slopes:
                yield value, self._derivative(arrived, position)
            elif self.step.output in arrived:
                share = self.sizes[position] * arrived[self.step.output]
                yield value, share.sum_to_size(value.shape)

    def _size(self, position: int, weights: Tensor) -> Tensor:
        """The absolute slope in an input, kept from the first call on. That of a lone input is
        never quite zero."""
        if position not in self.sizes:
            size = self.slopes[position].abs()
            # What a clamp has cut off keeps its position, by a weight that is small, but above
            # rounding errors.
            if len(self.positions) == 1:
                weights_after = size * weights
                least = torch.finfo(size.dtype).eps ** 0.5 * weights_after.amax()
                is_zero = weights == 0
                enlarged = weights_after.clamp(min=least) / torch.where(is_zero, 1, weights)
                size = torch.where(is_zero, size, enlarged)
            self.sizes[position] = size
        return self.sizes[position]


class Prefix:
    """What lies between the explained inputs and what a map is given."""

    def __init__(self, end: Value, sources: Sequence[Value], operations: list[_Operation]) -> None:
        """Measure the prefix by running ones forward, which gives the weight of each value and
        fills the operations' sizes. ``operations`` are in the order of the forward pass."""
        self._end = end
        self._sources = sources
        self._operations = operations
        self._weights = self._forward({source: _ones(source) for source in sources}, sizes=True)
        self.outside = self._weights == 0
        """Which values that the map is given are made of no pixel, but of constants: padding, for
        one."""

    @classmethod
    def to(
        cls,
        end: Value,
        steps: Sequence[Step],
        sources: Sequence[Value],
        signals: AbstractSet[Value],
    ) -> "Prefix | None":
        """The prefix from the explained inputs to the input of the first linear map; None where it
        cannot be followed, as through functions written by hand."""
        try:
            return cls(end, sources, operations_between(steps, end, signals))
        # such as an operation without a second derivative
        except (_Unknown, RuntimeError, NotImplementedError):
            return None

    def back(self, relevance: Tensor) -> Gradients:
        """The relevance of the explained inputs, from that of the first linear map's input, in its
        shape; values outside (of padding) send nothing."""
        share = torch.where(
            self.outside, 0, relevance / torch.where(self.outside, 1, self._weights)
        )
        rules = {operation.step: operation.back for operation in self._operations}
        on_the_way = {value for step in rules for value in step.inputs}
        return walk_back([*rules], {self._end: share}, set(self._sources), on_the_way, rules)

    def range(self, x: Tensor, ends: Mapping[Value, Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
        """The least and largest value that each element of the first linear map's input ``x`` can
        have; ``ends`` are those of each explained input."""
        # by the derivatives at the present values: the middle moves with their signs, and each side
        # of it by their sizes
        to_middle: Gradients = {}
        halves: Gradients = {}
        for source in self._sources:
            low, high = ends[source]
            to_middle[source] = (low + high) / 2 - source.tensor.detach()
            halves[source] = (high - low) / 2
        middle_of_x = x.detach() + self._forward(to_middle, sizes=False)
        half_of_x = self._forward(halves, sizes=True)
        return middle_of_x - half_of_x, middle_of_x + half_of_x

    def _forward(self, values: Gradients, *, sizes: bool) -> Tensor:
        """Bring values of the explained inputs forward to the first linear map's input by the
        derivatives on the path, or by their sizes."""
        for operation in self._operations:
            values = values | operation.forward(values, sizes=sizes)
        return values[self._end]


def operations_between(
    steps: Sequence[Step], end: Value, signals: AbstractSet[Value]
) -> list[_Operation]:
    """The operations on the path from the explained inputs to a value, in the order of the pass.
    Raises _Unknown for functions written by hand and complex numbers."""
    needed = {end}
    between: list[_Operation] = []
    for step in reversed(steps):
        positions = [position for position, value in enumerate(step.inputs) if value in signals]
        if not positions or needed.isdisjoint(step.results):
            continue
        values = [*step.inputs, *step.outputs]
        is_by_hand = isinstance(step.operator, type)  # a subclass of `autograd.Function`
        if is_by_hand or any(value.dtype.is_complex for value in values):
            raise _Unknown
        operation = _Operation(step, positions)
        needed.update(step.inputs[position] for position in operation.positions)
        between.append(operation)
    between.reverse()
    return between


def _ones(value: Value) -> Tensor:
    """Ones in the shape, type and device of a value."""
    return torch.ones_like(value.tensor, requires_grad=False)


def _rounding(values: Tensor) -> Tensor:
    """The largest size that rounding errors of a sum of such values may have: one number, to tell
    zeros from them."""
    return 64 * torch.finfo(values.dtype).eps * values.abs().amax()
