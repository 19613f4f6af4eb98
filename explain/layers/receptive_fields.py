"""Where the cells of feature maps look: moments of their receptive fields, followed through a
recording.

A cell is not in the middle of its share of the image. In a stack of 3 x 3 convolutions with stride
2 and padding 1, cell i looks at i times the stride. The field of each value is carried along, once
along the rows of the image and once along its columns:

    mass           the expected squared gradient of the value in the pixels, summed over these
    mass x place   its first moment

so that their quotient is the centre. Convolutions carry it with their weights squared,
normalisations and activations with their squared slopes, each channel by itself; sums add it, and
what moves values moves it. A gate that is broadcast does not move what it scales, and neither does
the mixing of an attention: a token stays where its residual stream is.

The border of the image cuts fields: what is left of them is further inwards. Where values are
drawn, it must not: an object that is moved by a stride moves the map by a cell, at the border too.
So zero padding is taken for more of the image there, and for nothing where fields are ``cut``.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from explain._utils.signals import came_by_signal
from explain.recording import Step, Value
from explain.recording.moves import compact, is_move, moved

aten = torch.ops.aten


class Along(NamedTuple):
    """What each value of a tensor looks at, along one axis of the image; with the dimensions of the
    tensor, of size 1 where it does not change."""

    mass: Tensor
    beside: Tensor
    """The first moment of the mass in pixels, counted from ``at``."""
    at: Tensor
    """A place near what is looked at. In a regular map, this alone is different for each cell."""

    @property
    def moment(self) -> Tensor:
        """The first moment of the mass in pixels."""
        return self.beside + self.mass * self.at

    @property
    def centres(self) -> Tensor:
        """The centres in pixels; NaN of what looks nowhere."""
        return torch.where(self.mass > 0, self.beside / self.mass, torch.nan) + self.at

    @property
    def shape(self) -> list[int]:
        """The sizes of the dimensions, of which no part has more."""
        return [max(sizes) for sizes in zip(*(part.shape for part in self), strict=True)]

    def summed(self, add: Callable[[Tensor], Tensor]) -> "Along":
        """What sums of these values look at; ``add`` gives the sums of a part."""
        mass, moment = (compact(add(part.expand(self.shape))) for part in (self.mass, self.moment))
        return Along.counted(mass, moment)

    @classmethod
    def counted(cls, mass: Tensor, moment: Tensor) -> "Along":
        """What has a first moment that is counted from the border of the image."""
        return cls(mass, moment, mass.new_zeros([1] * mass.ndim))


Field: TypeAlias = tuple[Along, Along]
"""What values look at, along the rows of the image and along its columns."""


def _along_both(field: Field, change: Callable[[Along], Along]) -> Field:
    """A field that is changed along the rows of the image, and along its columns."""
    rows, columns = field
    return change(rows), change(columns)


@dataclass(frozen=True, eq=False)
class Looks:
    """Where the values of a recorded pass look in an image."""

    fields: Mapping[Value, Field]
    """The field of each value that comes from the image."""
    unknown: Sequence[str]
    """The operations without a rule, behind which nothing is known."""
    by_photo: bool
    """Whether the image itself decides where some values are taken from."""


def leading_to(value: Value) -> list[Step]:
    """The steps that a value of a recording was computed by, in their order; but those of gates,
    which are broadcast."""
    steps: dict[Step, int] = {}
    """The steps, with numbers that grow in their order."""
    waiting = [value]
    while waiting:
        step = waiting.pop().step
        if step is None or step in steps:
            continue
        steps[step] = max(result.number for result in step.outputs)
        alike = [read for read in step.inputs if read.shape == step.outputs[0].shape]
        has_gates = step.is_pointwise and any(read.depends for read in alike)
        waiting += alike if has_gates else step.inputs
    return sorted(steps, key=lambda step: steps[step])


def receptive_fields(
    steps: Iterable[Step],
    x: Value,
    stays: Mapping[Value, Value] = MappingProxyType({}),
    *,
    cut: bool = False,
) -> Looks:
    """Follow where the values of a recording look in an image ``x`` ``(N, C, H, W)``; ``cut``, with
    nothing beyond it. What ``stays`` looks where its source does, over its last dimension."""
    device = x.tensor.device
    # the rounding of single precision would show in maps, drawn by this; mps has no double
    precise = torch.float32 if device.type == "mps" else torch.float64
    one = torch.ones([1] * 4, device=device, dtype=precise)
    pixels = [
        _line(torch.arange(0.5, length, device=device, dtype=precise), dim, dims=4)
        for dim, length in enumerate(x.shape[2:], start=2)
    ]
    rows, columns = (Along(mass=one, beside=0 * one, at=middles) for middles in pixels)
    fields: dict[Value, Field] = {x: (rows, columns)}
    unknown: dict[str, None] = {}
    by_photo = False
    size = (x.shape[2], x.shape[3])
    for step in steps:
        staying = stays.keys() & set(step.outputs)
        for result in staying:  # each state of a recurrent layer belongs to the place of its input
            if stays[result] in fields:
                fields[result] = _along_both(
                    fields[stays[result]],
                    lambda along: along.summed(lambda part: part.mean(-1, keepdim=True)),
                )
        if staying or not any(value in fields for value in step.inputs):
            continue
        if is_move(step) or step.operation.has("samples"):
            # indices and places that are computed from the image have no field
            by_photo |= any(value.depends for value in step.inputs if value not in fields)
        try:
            fields |= _carried(step, fields, size, cut=cut)
        except Exception as error:  # operators may take arguments in unknown ways
            if came_by_signal(error):
                raise
            unknown[step.name] = None
    return Looks(fields, list(unknown), by_photo)


def centres(field: Field) -> Tensor:
    """Where values look, ``(2, ...)``: row and column in pixels; NaN of values that look
    nowhere."""
    rows, columns = (along.centres for along in field)
    # what is nowhere along one axis is nowhere
    return torch.stack([rows + 0 * columns, columns + 0 * rows])


def _carried(
    step: Step, fields: Mapping[Value, Field], size: tuple[int, int], *, cut: bool
) -> dict[Value, Field]:
    """The fields of the results of a step, on images of a ``size``."""
    operation = step.operation
    result = step.outputs[0]
    if step.name == "constant_pad_nd":
        return {result: _padded(step, fields[step.args[0]], cut=cut)}
    if is_move(step):
        return _moved(step, fields)
    # the windows of an adaptive pooling are not all alike: it is run on the field, below
    if operation.kind == "convolution" or (operation.has("pools") and "adaptive" not in step.name):
        return {result: _of_windows(step, fields[step.args[0]], size, cut=cut)}
    if step.name in ("mm", "addmm"):  # products of two matrices, of which one may be constant
        return _of_product(step, result, fields)
    if operation.kind == "matrixproduct":  # as of an attention: what it mixes stays where it is
        return {}
    resamples = any(operation.has(trait) for trait in ("pools", "resizes", "samples"))
    if resamples or step.name in ("sum", "mean"):
        return {result: _along_both(fields[step.args[0]], partial(_run_on, step))}
    if not operation.has("stays") and not step.is_pointwise:
        raise ValueError(step.name)  # an operation without a rule
    return {result: _by_value(step, result, fields, size)}


def _moved(step: Step, fields: Mapping[Value, Field]) -> dict[Value, Field]:
    """The fields of results that are moved: the step is run with each part of the fields."""
    any_rows, _ = next(iter(fields.values()))
    zero = any_rows.mass.new_zeros([])  # all fields have its precision and its device

    def part_of(axis: int, part: int, value: Value) -> Tensor:
        """One part of the field of a value; 0 of a value that does not come from the image."""
        if value not in fields:
            return zero.reshape([1] * len(value.shape))
        # a copy: `as_strided` takes all memory below a tensor, where a view has other values too
        return fields[value][axis][part].clone()

    rows, columns = (
        [
            moved(step, partial(part_of, axis, part), device=zero.device)
            for part in range(len(Along._fields))
        ]
        for axis in (0, 1)
    )
    return {
        result: (
            Along._make(part[result] for part in rows),
            Along._make(part[result] for part in columns),
        )
        for result in step.outputs
    }


def _padded(step: Step, field: Field, *, cut: bool) -> Field:
    """The field behind a padding with a constant. A dimension in which it does not change (of size
    1) stays, as `_extended` leaves it."""
    ends = step.args[1]  # a pair for each dimension, from the last one on
    for i in range(len(ends) // 2):
        dim = len(step.args[0].shape) - 1 - i
        left, right = ends[2 * i : 2 * i + 2]
        extended = partial(_extended, dim=dim, left=left, right=right, cut=cut)
        field = _along_both(field, extended)
    return field


def _extended(along: Along, dim: int, left: int, right: int, *, cut: bool) -> Along:
    """A field with so many values more at both ends of a dimension, or fewer: they look further
    out, as every second value does; nowhere, if fields are ``cut``."""
    length = along.shape[dim]
    if length == 1:  # the same everywhere: beyond the ends, too
        return along
    period = min(2, length - 1)  # transposed convolutions have two kinds of values in turn
    numbers = torch.arange(-left, length + right, device=along.mass.device)
    beyond = numbers - numbers.clamp(0, length - 1)
    periods = (beyond.abs() + period - 1).div(period, rounding_mode="floor") * beyond.sign()
    source = numbers - period * periods  # the value that each one is like, some periods further in
    in_line = partial(_line, dim=dim, dims=along.mass.ndim)
    mass, beside, at = (
        part.index_select(dim, source) if part.shape[dim] > 1 else part for part in along
    )
    if cut:
        is_own = in_line(beyond == 0)
        return Along(mass * is_own, beside * is_own, at)
    # of a regular map, only the places `at` change from cell to cell
    looks_at = along.at if mass.shape[dim] == beside.shape[dim] == 1 else along.centres
    first, second, second_last, last = (  # a period apart
        looks_at.narrow(dim, place, 1) for place in (0, period, -1 - period, -1)
    )
    below = in_line(periods.clamp(max=0)) * (second - first)
    above = in_line(periods.clamp(min=0)) * (last - second_last)
    # values that look nowhere have no distance to others
    return Along(mass, beside, at + (below + above).nan_to_num())


def _run_on(step: Step, along: Along) -> Along:
    """A step that is linear in its first argument, run on a field in the place of that."""
    x: Value = step.args[0]
    # of an adaptive maximum too, which may be anywhere in a window
    run: Any = F.adaptive_avg_pool2d if "adaptive" in step.name else step.operator

    def summed(part: Tensor) -> Tensor:
        """What the step makes of a part of the field."""
        options = [arg.tensor.to(part) if isinstance(arg, Value) else arg for arg in step.args[1:]]
        if step.operation.has("samples"):  # all channels at the same places
            part = part.mean(1, keepdim=True)
        if step.name not in ("sum", "mean"):  # the others need the real height and width
            part = part.expand(-1, -1, *x.shape[2:]).contiguous()
        sums: Tensor = run(part, *options, **step.kwargs)
        return sums

    return along.summed(summed)


class _Windows(NamedTuple):
    """The windows of a convolution, or of a pooling: their weights, squared, and its options."""

    squares: Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    is_transposed: bool
    output_padding: Sequence[int]
    groups: int

    @classmethod
    def of(cls, step: Step) -> "_Windows":
        """Those of a step. A pooling has the mean of each; of maxima too, which may be anywhere in
        it."""
        options = step.options
        if step.operation.kind == "convolution":
            weight = step.args[1].tensor.detach()
            squares = weight.to(torch.promote_types(weight.dtype, torch.float32)).square()
        else:
            channels = step.args[0].shape[1]
            kernel = options["kernel_size"]
            kernel = [*kernel] * (2 // len(kernel))  # one number for both sides
            squares = step.args[0].tensor.new_ones((channels, 1, *kernel)) / math.prod(kernel)
            # what a pooling has no option for
            options = {"dilation": [1], "transposed": False, "output_padding": [0], **options}
            options["stride"] = options["stride"] or kernel  # as poolings do without a stride
            options["groups"] = channels
        sides = squares.shape[2:]
        stride, padding, dilation, output_padding = (
            [*options[name]] * (len(sides) // len(options[name]))
            for name in ("stride", "padding", "dilation", "output_padding")
        )
        if list(sides) == stride:  # patches are drawn in their middle: all weights count alike
            squares = squares.mean(tuple(range(2, squares.ndim)), keepdim=True).expand_as(squares)
        is_transposed = options["transposed"]
        groups = options["groups"]
        return cls(squares, stride, padding, dilation, is_transposed, output_padding, groups)


def _of_windows(step: Step, field: Field, size: tuple[int, int], *, cut: bool) -> Field:
    """The field behind a convolution or a pooling, on images of a ``size``: that of its window,
    weighted by the squared weights."""
    windows = _Windows.of(step)
    lengths = step.outputs[0].shape[2:]

    def of_axis(along: Along, length: int) -> Along:
        """What the windows look at along an axis of this length."""
        gap = _gap(along)  # None, if it is no regular map
        # all windows of a regular map are alike, unless the border cuts some or they're transposed
        if gap is not None and not (cut or windows.is_transposed):
            return _of_first_window(windows, along, gap, lengths)
        # a convolution adds its channels up, a pooling does not
        if step.operation.kind == "convolution" and along.shape[1] > 1:
            _refuse_places_apart(along, length, step.name)
        return _of_all_windows(windows, along, lengths, cut=cut)

    rows, columns = field
    height, width = size
    return of_axis(rows, height), of_axis(columns, width)


def _gap(along: Along) -> float | None:
    """How far the cells of a regular map are apart, which look at the same but for where that is;
    None for other values."""
    line = along.at.flatten()
    dims = along.at.ndim - 2
    if any(part.shape[2:] != (1,) * dims for part in (along.mass, along.beside)):
        return None
    if len(line) != max(along.at.shape[2:]):  # places change along more than one dimension
        return None
    gaps = line.diff()
    gap = float(gaps[0]) if len(gaps) else 0.0
    # all gaps are the first one
    return gap if bool(((gaps - gap).abs() <= _SAME * abs(gap)).all()) else None


def _of_first_window(windows: _Windows, along: Along, gap: float, lengths: Sequence[int]) -> Along:
    """What the windows of a regular map look at along one axis of the image: the first one tells
    all of them."""
    dims = len(lengths)
    dim = max(range(dims), key=along.at.shape[2:].__getitem__)  # where places change
    # places are counted from that of the first cell
    numbers = windows.dilation[dim] * torch.arange(windows.squares.shape[dim + 2])
    taps = _line(gap * (numbers - windows.padding[dim]).to(along.at), dim, dims)
    first = windows._replace(stride=[1] * dims, padding=[0] * dims, dilation=[1] * dims)
    window = _of_all_windows(first, along._replace(at=taps[None, None]), [1] * dims)
    cells = torch.arange(lengths[dim]).to(along.at)
    at = along.at.flatten()[0] + gap * windows.stride[dim] * cells
    return window._replace(at=_line(at, dim, dims)[None, None])


def _line(numbers: Tensor, dim: int, dims: int) -> Tensor:
    """Numbers along one of so many dimensions."""
    return numbers.reshape([-1 if d == dim else 1 for d in range(dims)])


def _of_all_windows(
    windows: _Windows, along: Along, lengths: Sequence[int], *, cut: bool = False
) -> Along:
    """What the windows of any map look at along one axis of the image."""
    squares, stride, padding, dilation, is_transposed, output_padding, groups = windows
    kernel = squares
    # of the map that is read
    channels = squares.shape[0] if is_transposed else squares.shape[1] * groups
    # the padding is taken for more of the image: the map is extended by it, and not padded
    options_of_sides: list[tuple[int, int, int, int]] = []
    """Stride, padding, dilation and output padding along each side."""
    for i, side in enumerate(squares.shape[2:]):
        length = along.shape[i + 2]
        if length == 1:  # the same everywhere
            kernel = _sum(torch.split(kernel, 1, i + 2))  # faster than its own sum
            options_of_sides.append((1, 0, 1, 0))
        elif is_transposed:
            # how many cells beyond the border have windows that reach inside
            beyond = dilation[i] * (side - 1) // stride[i] + 1
            along = _extended(along, i + 2, left=beyond, right=beyond, cut=cut)
            cropped = padding[i] + stride[i] * beyond
            options_of_sides.append((stride[i], cropped, dilation[i], output_padding[i]))
        else:
            needed = (lengths[i] - 1) * stride[i] + dilation[i] * (side - 1) + 1
            right = needed - length - padding[i]
            along = _extended(along, i + 2, left=padding[i], right=right, cut=cut)
            options_of_sides.append((stride[i], 0, dilation[i], 0))
    strides, paddings, dilations, output_paddings = map(list, zip(*options_of_sides, strict=True))
    sides = along.shape[2:]
    if max(sides) < math.prod(sides):  # on no grid, it changes along both: its channels together
        along = along.summed(lambda part: part.mean(1, keepdim=True))
        # results have one field, the mean of theirs; what is read adds up
        dim_of_results, dim_of_read = (1, 0) if is_transposed else (0, 1)
        kernel = kernel.mean(dim_of_results, keepdim=True).sum(dim_of_read, keepdim=True)
        channels = groups = 1
    kernel = kernel.to(along.mass)

    def summed(part: Tensor) -> Tensor:
        """The sums of a part of the field over the windows."""
        sums: Tensor = aten.convolution(
            part.expand(-1, channels, *sides),
            kernel,
            None,  # no bias
            strides,
            paddings,
            dilations,
            is_transposed,
            output_paddings,
            groups,
        )
        return sums

    return along.summed(summed)


def _of_product(step: Step, result: Value, fields: Mapping[Value, Field]) -> dict[Value, Field]:
    """The field of a product of two matrices, of which one is a constant, as in a linear layer; of
    two signals there is none."""
    first, second = step.args[-2:]  # behind what is added to the product, if anything is
    if first in fields and second in fields:
        return {}
    if first in fields:  # a row of features, which count alike
        scale = second.tensor.detach().square().sum(0).mean().to(fields[first][0].mass)
        mean = _along_both(
            fields[first],
            lambda along: along.summed(lambda part: part.mean(1, keepdim=True) * scale),
        )
        return {result: mean}
    squares = first.tensor.detach().square().to(fields[second][0].mass)
    sums = _along_both(
        fields[second],
        lambda along: along.summed(lambda part: squares @ part.expand(second.shape)),
    )
    return {result: sums}


def _by_value(
    step: Step, result: Value, fields: Mapping[Value, Field], size: tuple[int, int]
) -> Field:
    """The field of what is computed value by value: the sum of those of the arguments that have the
    result's shape, times the squared slope."""
    signals = [value for value in dict.fromkeys(step.inputs) if value in fields]
    alike = [value for value in signals if value.shape == result.shape]
    if not alike:  # no rule says which value is computed from which
        raise ValueError(step.name)
    if len(alike) > 1:
        rows, columns = zip(*(fields[value] for value in alike), strict=True)
        height, width = size
        return _added(rows, height, step.name), _added(columns, width, step.name)
    slope = _squared_slope(step, alike[0], fields[alike[0]])
    return _along_both(
        fields[alike[0]],
        lambda along: along._replace(mass=along.mass * slope, beside=along.beside * slope),
    )


def _added(parts: Sequence[Along], length: int, name: str) -> Along:
    """What sums of values look at along one axis of an image of this ``length``."""
    at = parts[0].at
    if all(torch.equal(part.at, at) for part in parts):
        return Along(_sum(part.mass for part in parts), _sum(part.beside for part in parts), at)
    # where places `at` differ, moments do not add up: all are counted from the border instead
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    masses = torch.stack([part.mass.expand(shape) for part in parts], 1)
    moments = torch.stack([part.moment.expand(shape) for part in parts], 1)
    _refuse_places_apart(Along.counted(masses, moments), length, name)
    return Along.counted(masses.sum(1), moments.sum(1))


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of tensors that broadcast to each other."""
    return reduce(torch.add, tensors)


def _refuse_places_apart(along: Along, length: int, name: str) -> None:
    """Raise `ValueError`, with a step's ``name``, for values to be added up along their second
    dimension that look at places far apart in an image of this ``length``: no mean is at them."""
    mass = along.mass.expand(along.shape)
    shares = mass / mass.sum(1, keepdim=True)
    centres = along.centres
    mean = (shares * centres.nan_to_num()).sum(1, keepdim=True)
    variance = (shares * (centres - mean).square()).nansum(1)
    half_a_cell = length / max(along.shape[2:]) / 2
    if bool((variance.sqrt() > _APART * length + half_a_cell).any()):
        raise ValueError(name)


def _squared_slope(step: Step, signal: Value, field: Field) -> float | Tensor:
    """The mean squared slope of a step that acts on each value, or of a batch normalisation, for
    each channel if it is clear which dimension has these."""
    like = field[0].mass
    if step.operation.kind == "batchnorm":
        _, scale, _, mean, variance, is_training, *_, epsilon = step.args
        if isinstance(mean, Value) and scale and is_training is not True:  # kept statistics
            ratios: Tensor = scale.tensor.detach().to(like).square() / (
                variance.tensor.to(like) + epsilon
            )
            return ratios.reshape(-1, *[1] * (len(signal.shape) - 2))
    if step.operation.has("biased"):  # other normalisations count as scaling all values alike
        return 1.0
    x = signal.tensor.detach().float()
    row_dims, column_dims = ({d for d, n in enumerate(along.shape) if n > 1} for along in field)
    # the channels are where both fields change, if each has a dimension of its own for places
    channel_dims = row_dims & column_dims
    # all dimensions but that of the channels; all, if it is not clear which that is
    averaged_dims = [d for d in range(x.ndim) if channel_dims != {d}]
    sampled = [slice(None)] * x.ndim
    if step.is_pointwise:  # some values are enough: every few along each dimension
        long_dims = sum(x.shape[d] > 1 for d in averaged_dims)
        every = max(1, round((x.numel() / _SAMPLED) ** (1 / max(long_dims, 1))))
        sampled = [slice(None, None, every if d in averaged_dims else 1) for d in range(x.ndim)]
    x = x[tuple(sampled)].clone().requires_grad_()

    def tensor_of(value: Value) -> Tensor:
        """An argument of the step, which broadcasts to the signal."""
        tensor = value.tensor.detach()
        return x if value is signal else tensor[tuple(sampled[x.ndim - tensor.ndim :])]

    with torch.enable_grad():
        y = next(iter(step.run(tensor_of).values()))
        if not y.requires_grad:
            return 1.0
        (slope,) = torch.autograd.grad(y.sum(), x)
    # what lets nothing pass of noise may let images pass
    mean_square = slope.square().mean(averaged_dims, keepdim=True).to(like).clamp(min=_LEAST)
    return mean_square if len(averaged_dims) < x.ndim else mean_square.reshape(())


_APART = 1 / 8
"""Of an image: what is added up there looks at places that lie less far beside their mean."""
_SAME = 1e-6  # of a gap: how far regular fields lie beside their lattice, by rounding
_LEAST = 1e-6
"""The least squared slope of an activation."""
_SAMPLED = 2**14
"""How many values of a tensor are looked at for the mean slope of an activation."""
