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
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from explain.hooks.graph import Reach
from explain.hooks.preserve import detached

Edge = tuple[Node, int]
"""A Node, and which of its outputs."""
Values = dict[Edge, Tensor]
_SAME = ("_Gate", "_Entrance", "BackwardHookFunction", "CloneBackward")
"""What gives what it is given: copies, and what hooks put into the graph."""
_NORMALISATIONS = (
    "NativeLayerNorm",
    "NativeGroupNorm",
    "NativeBatchNorm",
    "CudnnBatchNorm",
    "MiopenBatchNorm",
)


class _Unknown(Exception):  # noqa: N818 (no error: it is answered by another way)
    """An operation that cannot be followed."""


@dataclass(eq=False)
class _Operation:
    """One Node, and those of its inputs that lead to the sources.

    ``slopes`` are the derivatives of inputs that it changes place by place. ``sizes`` are the sizes
    of these, as the first call of `forward` computes them from the weights that arrive there.
    """

    node: Node
    edges: Mapping[int, Edge]
    slopes: dict[int, Tensor] = field(default_factory=dict)
    sizes: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Compute the derivative in each input of this Node (on the way from the photo to the first
        linear map) that acts place by place.

        Inputs that are constants beside a signal are dropped: means and deviations that are spread
        over it.
        """
        slopes = {place: self._slope(place, edge) for place, edge in self.edges.items()}
        self.slopes = {place: slope for place, slope in slopes.items() if slope is not None}
        signals = [place for place in self.slopes if not self._is_spread(place)]
        # an input that was spread over the picture counts as a constant beside a signal
        if len(self.edges) > 1 and signals:
            self.edges = {
                place: edge
                for place, edge in self.edges.items()
                if place in signals or place not in self.slopes
            }

    def _slope(self, place: int, edge: Edge) -> Tensor | None:
        """The derivative of this Node, between photo and first linear map, in one input, if each
        value of the result depends on the value in its place alone; else None.

        It is tested with two gradients, since the derivative of another operation would mix their
        places. Normalisations count as the identity: their statistics are constants.
        """
        ones = _ones((self.node, 0))
        slope_if_mixed = ones if self.node.name().startswith(_NORMALISATIONS) else None
        if len(self.node._input_metadata) != 1:
            return slope_if_mixed
        generator = torch.Generator().manual_seed(0)
        numbers = (torch.rand(ones.shape, generator=generator, dtype=torch.float64) + 0.5).to(ones)
        slope, scaled = (self._back([gradient])[place] for gradient in (ones, numbers))
        if slope is None or scaled is None or slope.shape != ones.shape:
            return slope_if_mixed
        expected = slope * numbers
        return (
            slope
            if bool(((scaled - expected).abs() <= _rounding(expected)).all())
            else slope_if_mixed
        )

    def _is_spread(self, place: int) -> bool:
        """Whether an input of this Node was enlarged to the result's shape (broadcast), as a mean
        or deviation is."""
        edge = self.edges[place]
        return _shape(edge) != _shape((self.node, 0)) or edge[0].name().startswith("Expand")

    def _back(self, arrived: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients in all inputs of this Node, from those in its outputs ``arrived``: the
        Node's own backward, called by hand."""
        gradients = self.node(*arrived)  # type: ignore[operator]
        return gradients if isinstance(gradients, tuple) else (gradients,)

    def forward(self, values: Values, *, sizes: bool) -> Iterator[tuple[Edge, Tensor]]:
        """Pass values through the derivative of this Node, from its inputs to its outputs: pairs of
        output edge and tensor.

        For the way from the explained inputs to the first linear map. ``values`` must have all
        input edges. With ``sizes``, slopes count by their absolute value.

        Raises:
            _Unknown: the operation has no second derivative, or its weights cancel out.
        """
        total = [
            torch.zeros_like(_ones((self.node, i))) for i in range(len(self.node._input_metadata))
        ]
        for place, edge in self.edges.items():
            value = values[edge]
            if place in self.slopes:
                total[0] = (
                    total[0] + (self._size(place, value) if sizes else self.slopes[place]) * value
                )
                continue
            # The gradient is linear in `arriving`: its derivative is that of the operation itself.
            with torch.enable_grad():
                arriving = [torch.zeros_like(t).requires_grad_() for t in total]
                gradient = self._back(arriving)[place]
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
        return (((self.node, i), t) for i, t in enumerate(total))

    def back(self, arrived: Values) -> Iterator[tuple[Edge, Tensor]]:
        """The relevance of each input of this Node, as pairs of edge and tensor, from what arrived
        at its outputs.

        It is the transpose of `forward` with ``sizes``, which must have run before: that fills
        ``self.sizes``.
        """
        outputs = [arrived.get((self.node, i)) for i in range(len(self.node._input_metadata))]
        if all(gradient is None for gradient in outputs):
            return
        mixed = self._back(outputs) if len(self.slopes) < len(self.edges) else ()
        for place, edge in self.edges.items():
            by_place = place in self.slopes and outputs[0] is not None
            share = self.sizes[place] * outputs[0] if by_place else mixed[place]  # type: ignore[operator]
            if share is not None:
                yield edge, share.sum_to_size(_shape(edge))

    def _size(self, place: int, weights: Tensor) -> Tensor:
        """The absolute slope in an input, computed from ``weights`` at the first call and kept.

        That of a lone input is never quite zero, so that what a clamp has cut off keeps its place.
        Of ``weights``, it leaves at least a small part of the largest: one clamp after another
        would otherwise leave weights that cannot be told from rounding errors.
        """
        if place not in self.sizes:
            size = self.slopes[place].abs()
            if len(self.edges) == 1:
                weights_after = size * weights
                is_zero = weights == 0
                weights_after = weights_after.clamp(
                    min=torch.finfo(size.dtype).eps ** 0.5 * weights_after.amax()
                )
                size = torch.where(is_zero, size, weights_after / torch.where(is_zero, 1, weights))
            self.sizes[place] = size
        return self.sizes[place]


class Prefix:
    """What lies between the explained inputs and what a map is given, ``node`` being where the
    gradient leaves it.

    >>> x = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    >>> y = (2 * x.flip(1))[:, :2] - 1
    >>> y.clone().sum().grad_fn.next_functions[0][0].name()
    'CloneBackward0'
    >>> prefix = Prefix.to(y.clone().grad_fn, [x])
    >>> [found.tolist() for found in prefix.back(torch.tensor([[5.0, 7.0]])).values()]
    [[[0.0, 7.0, 5.0]]]
    """

    def __init__(
        self, end: Edge, sources: Mapping[Edge, int], operations: Sequence[_Operation]
    ) -> None:
        """Measure the way from the explained inputs to the first linear map, for LRP rules at the
        input.

        Ones are run forward, which gives the weight of each value and fills the operations' sizes.
        ``operations`` must be in the order of the forward pass; ``sources`` are the edges of the
        explained inputs, with their index.
        """
        self._end = end
        self._sources = sources
        self._operations = operations
        self._weights = self._forward({edge: _ones(edge) for edge in sources}, sizes=True)
        self.outside = self._weights == 0
        """Which values that the map is given are made of no pixel, but of constants: padding, for
        one."""

    @classmethod
    def to(cls, node: Node | None, sources: Sequence[Tensor]) -> "Prefix | None":
        """The way (prefix) from the explained inputs to the input of the first linear map, whose
        entrance is ``node``.

        None where it cannot be followed, as through functions written by hand; LRP rules at the
        input then fall back to the gradient.
        """
        if node is None:
            return None
        try:
            reach = Reach(sources)
            end = _through(node.next_functions[0], reach)
            if not reach.of(end[0]):
                return None
            operations = list(_operations(end, reach))
            edges = [end, *(edge for operation in operations for edge in operation.edges.values())]
            places = {edge: _place(edge[0], sources) for edge in edges}
            return cls(end, {edge: i for edge, i in places.items() if i is not None}, operations)
        # such as an operation without a second derivative
        except (_Unknown, RuntimeError, NotImplementedError):
            return None

    def back(self, relevance: Tensor) -> dict[int, Tensor]:
        """The relevance of the explained inputs, by their index in ``sources``, from that of the
        first linear map's input.

        ``relevance`` has the shape of that input; values outside (of padding) send nothing. For LRP
        rules at the input.
        """
        share = torch.where(
            self.outside, 0, relevance / torch.where(self.outside, 1, self._weights)
        )
        arrived: Values = {self._end: share}
        for operation in reversed(self._operations):
            for edge, relevance_of_edge in operation.back(arrived):
                arrived[edge] = (
                    arrived[edge] + relevance_of_edge if edge in arrived else relevance_of_edge
                )
        return {place: arrived[edge] for edge, place in self._sources.items() if edge in arrived}

    def range(
        self, x: Tensor, sources: Sequence[Tensor], ends: Sequence[Sequence[Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """The least and largest value that each element of the first linear map's input can have,
        in the shape of ``x``.

        ``x`` is that input as it was, ``ends`` the least and largest values of each of the
        ``sources``. Used by the z^B rule of LRP.
        """
        middle_by_edge = {
            edge: (ends[i][0] + ends[i][1]) / 2 - detached(sources[i])
            for edge, i in self._sources.items()
        }
        half_by_edge = {edge: (ends[i][1] - ends[i][0]) / 2 for edge, i in self._sources.items()}
        middle_of_x = detached(x) + self._forward(middle_by_edge, sizes=False)
        half_of_x = self._forward(half_by_edge, sizes=True)
        return middle_of_x - half_of_x, middle_of_x + half_of_x

    def _forward(self, values: Values, *, sizes: bool) -> Tensor:
        """Bring values of the explained inputs forward to the input of the first linear map, by the
        derivatives on the way.

        With ``sizes``, by the absolute derivatives, which `back` needs: `__init__` makes the first
        such call.
        """
        values_by_edge = dict(values)
        for operation in self._operations:
            values_by_edge.update(operation.forward(values_by_edge, sizes=sizes))
        return values_by_edge[self._end]


def _through(edge: tuple[Node | None, int], reach: Reach) -> Edge:
    """The edge of the operation that computed a value, behind copies and hooks, which return their
    input unchanged.

    It stops at a source (an explained input), even where that is a copy itself.
    """
    node, output = edge
    while (
        node is not None
        and node.name().startswith(_SAME)
        and reach.of(node.next_functions[output][0])
    ):
        node, output = node.next_functions[output]
    if node is None:
        raise _Unknown
    return node, output


def _place(node: Node, sources: Sequence[Tensor]) -> int | None:
    """The index in ``sources`` of the explained input that a Node belongs to; None for other
    Nodes."""
    variable = getattr(node, "variable", None)
    return next(
        (i for i, source in enumerate(sources) if source is variable or source.grad_fn is node),
        None,
    )


def _operations(end: Edge, reach: Reach) -> Iterator[_Operation]:
    """The operations on the way from the explained inputs to an edge, in the order of the forward
    pass: each after those that it reads.

    Raises:
        _Unknown: a function written by hand, or complex numbers, are on the way.
    """
    seen: set[Node] = set()
    waiting: list[tuple[Node, _Operation | None]] = [(end[0], None)]
    while waiting:
        node, operation = waiting.pop()
        if operation is not None:
            yield operation
        elif node not in seen and node.next_functions:
            seen.add(node)
            if isinstance(node, BackwardCFunction) or any(
                o.dtype.is_complex for o in node._input_metadata
            ):
                raise _Unknown
            operation_of_node = _Operation(
                node,
                {
                    i: _through(n, reach)
                    for i, n in enumerate(node.next_functions)
                    if reach.of(n[0])
                },
            )
            if operation_of_node.edges:  # a computed source has no edges to other sources
                waiting.append((node, operation_of_node))
            waiting += [(parent, None) for parent, _ in operation_of_node.edges.values()]


def _shape(edge: Edge) -> torch.Size:
    """The shape of the tensor at an edge of the autograd graph."""
    return torch.Size(edge[0]._input_metadata[edge[1]].shape)


def _ones(edge: Edge) -> Tensor:
    """Ones in the shape, type and device of the tensor at an edge of the autograd graph."""
    metadata = edge[0]._input_metadata[edge[1]]
    return torch.ones(torch.Size(metadata.shape), dtype=metadata.dtype, device=metadata.device)


def _rounding(values: Tensor) -> Tensor:
    """The largest size that rounding errors of a sum of such values may have: one number, to tell
    zeros from them."""
    return 64 * torch.finfo(values.dtype).eps * values.abs().amax()
