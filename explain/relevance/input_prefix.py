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
from dataclasses import dataclass, field

import torch
from torch import Tensor

from explain.recording import Step, Value

Values = dict[Value, Tensor]


class _Unknown(Exception):  # noqa: N818 (no error: it is answered otherwise)
    """An operation that cannot be followed."""


@dataclass(eq=False)
class _Operation:
    """One step, and the ``positions`` of those of its inputs that lead to the sources."""

    step: Step
    positions: list[int]
    slopes: dict[int, Tensor] = field(default_factory=dict)
    """The derivatives in inputs that it changes value by value."""
    sizes: dict[int, Tensor] = field(default_factory=dict)
    """Their absolute values, once `forward` has found them."""

    def __post_init__(self) -> None:
        """Compute the derivative in each input that it changes value by value. Constants beside a
        signal, such as means and deviations that are spread over it, are dropped."""
        self._differentiated = list(self.positions)
        self.results = self.step.outputs
        inputs = self.step.inputs
        with torch.enable_grad():
            self._given = [
                inputs[position].tensor.detach().requires_grad_() for position in self.positions
            ]
            by_position = dict(zip(self.positions, self._given, strict=True))
            arguments = iter(
                [by_position.get(position, v.tensor) for position, v in enumerate(inputs)]
            )
            computed = self.step.run(lambda _: next(arguments))
        self._computed = [computed[value] for value in self.results]
        slopes = {position: self._slope(position) for position in self.positions}
        self.slopes = {position: slope for position, slope in slopes.items() if slope is not None}
        signals = [position for position in self.slopes if not self._is_spread(position)]
        # an input that was spread over the picture counts as a constant beside a signal
        if len(self.positions) > 1 and signals:
            is_pointwise = torch.Tag.pointwise in getattr(self.step.operator, "tags", ())
            kept: list[int] = []
            for position in self.positions:
                is_by_place = position in self.slopes or is_pointwise
                if position in signals or not (is_by_place and self._is_spread(position)):
                    kept.append(position)
            self.positions = kept

    def _slope(self, position: int) -> Tensor | None:
        """The derivative of this step in one input, if each value of the result depends on the
        value in its place alone; else None."""
        ones = _ones(self.results[0])
        if self.step.operation.has("copies"):
            return ones
        # statistics of a normalisation are constants: it counts as the identity
        slope_if_mixed = ones if "_norm" in self.step.name else None
        if len(self.results) != 1:
            return slope_if_mixed
        generator = torch.Generator().manual_seed(0)
        numbers = (torch.rand(ones.shape, generator=generator, dtype=torch.float64) + 0.5).to(ones)
        # a test with two gradients: the derivative of another operation would mix their places
        slope = self._back([ones])[position]
        scaled = self._back([numbers])[position]
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
        return value.shape != self.results[0].shape or is_expanded

    def _back(self, arrived: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
        """The gradients in the inputs of this step by their places, from those in its results."""
        pairs = [
            (result, gradient)
            for result, gradient in zip(self._computed, arrived, strict=True)
            if gradient is not None and result.requires_grad
        ]
        if not pairs:
            return dict.fromkeys(self._differentiated)
        gradients = torch.autograd.grad(
            [result for result, _ in pairs],
            self._given,
            [gradient for _, gradient in pairs],
            retain_graph=True,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        return dict(zip(self._differentiated, gradients, strict=True))

    def forward(self, values: Values, *, sizes: bool) -> Iterator[tuple[Value, Tensor]]:
        """Pass values through the derivative of this step, from its inputs to its results; with
        ``sizes``, by absolute slopes. Raises _Unknown without a second derivative."""
        total = [torch.zeros_like(_ones(value)) for value in self.results]
        for position in self.positions:
            value = values[self.step.inputs[position]]
            if position in self.slopes:
                slope = self._size(position, value) if sizes else self.slopes[position]
                total[0] = total[0] + slope * value
                continue
            # The gradient is linear in `arriving`: its derivative is that of the operation itself.
            with torch.enable_grad():
                arriving = [torch.zeros_like(t).requires_grad_() for t in total]
                gradient = self._back(arriving)[position]
            if gradient is None or not gradient.requires_grad:
                raise _Unknown
            direction = value.expand_as(gradient).to(gradient.dtype)
            products = torch.autograd.grad(gradient, arriving, direction, materialize_grads=True)
            rounding_error = _rounding(value)
            if sizes and any(
                bool(((f != 0) & (f.abs() <= rounding_error)).any()) for f in products
            ):
                raise _Unknown  # weights of both signs cancel out, as those of a softmax
            total = [t + f for t, f in zip(total, products, strict=True)]
        return zip(self.results, total, strict=True)

    def back(self, arrived: Values) -> Iterator[tuple[Value, Tensor]]:
        """The relevance of each input, from what arrived at the results: the transpose of `forward`
        with ``sizes``, which must have run before."""
        of_results = [arrived.get(value) for value in self.results]
        if all(gradient is None for gradient in of_results):
            return
        needs_derivative = len(self.slopes) < len(self.positions)
        mixed = self._back(of_results) if needs_derivative else {}
        for position in self.positions:
            value = self.step.inputs[position]
            share = mixed.get(position)
            if position in self.slopes and of_results[0] is not None:
                share = self.sizes[position] * of_results[0]
            if share is not None:
                yield value, share.sum_to_size(value.shape)

    def _size(self, position: int, weights: Tensor) -> Tensor:
        """The absolute slope in an input, kept from the first call on. That of a lone input is
        never quite zero."""
        if position not in self.sizes:
            size = self.slopes[position].abs()
            # so that what a clamp has cut off keeps its position, and is told from rounding errors
            if len(self.positions) == 1:
                weights_after = size * weights
                is_zero = weights == 0
                weights_after = weights_after.clamp(
                    min=torch.finfo(size.dtype).eps ** 0.5 * weights_after.amax()
                )
                size = torch.where(is_zero, size, weights_after / torch.where(is_zero, 1, weights))
            self.sizes[position] = size
        return self.sizes[position]


class Prefix:
    """What lies between the explained inputs and what a map is given."""

    def __init__(
        self, end: Value, sources: Sequence[Value], operations: Sequence[_Operation]
    ) -> None:
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

    def back(self, relevance: Tensor) -> Values:
        """The relevance of the explained inputs, from that of the first linear map's input, in its
        shape; values outside (of padding) send nothing."""
        share = torch.where(
            self.outside, 0, relevance / torch.where(self.outside, 1, self._weights)
        )
        arrived: Values = {self._end: share}
        for operation in reversed(self._operations):
            for value, share_of_value in operation.back(arrived):
                earlier = arrived.get(value)
                arrived[value] = share_of_value if earlier is None else earlier + share_of_value
        return {source: arrived[source] for source in self._sources if source in arrived}

    def range(self, x: Tensor, ends: Mapping[Value, Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
        """The least and largest value that each element of the first linear map's input ``x`` can
        have; ``ends`` are those of each explained input."""
        middles: Values = {}
        halves: Values = {}
        for source in self._sources:
            low, high = ends[source]
            middles[source] = (low + high) / 2 - source.tensor.detach()
            halves[source] = (high - low) / 2
        middle_of_x = x.detach() + self._forward(middles, sizes=False)
        half_of_x = self._forward(halves, sizes=True)
        return middle_of_x - half_of_x, middle_of_x + half_of_x

    def _forward(self, values: Values, *, sizes: bool) -> Tensor:
        """Bring values of the explained inputs forward to the first linear map's input by the
        derivatives on the path, or by their sizes."""
        by_value = dict(values)
        for operation in self._operations:
            by_value.update(operation.forward(by_value, sizes=sizes))
        return by_value[self._end]


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
        if isinstance(step.operator, type) or any(value.dtype.is_complex for value in values):
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
