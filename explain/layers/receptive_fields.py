"""Where the cells of feature maps look: moments of their receptive fields, followed through a
recording.

A cell is not in the middle of its share of the photo. In a stack of 3 x 3 convolutions with stride
2 and padding 1, cell i looks at i times the stride. The field of each value is carried along, once
along the rows of the photo and once along its columns:

    mass           the expected squared gradient of the value in the pixels, summed over these
    mass x place   its first moment

so that their quotient is the centre. Convolutions carry it with their weights squared,
normalisations and activations with their squared slopes, each channel by itself; sums add it, and
what moves values moves it. A gate that is broadcast does not move what it scales, and neither does
the mixing of an attention: a token stays where its residual stream is.

The border of the photo cuts fields: what is left of them is further inwards. Where values are
drawn, it must not: an object that is moved by a stride moves the map by a cell, at the border too.
So zero padding is taken for more of the photo there, and for nothing where fields are ``cut``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from explain._utils.signals import came_by_signal
from explain.recording import Step, Value
from explain.recording.moves import compact, is_move, moved

aten = torch.ops.aten
Field = tuple[Tensor, Tensor]
"""Mass and first moment in pixels, along the rows of the photo and along its columns, ``(2,
*shape)`` each: with the dimensions of the value, of size 1 where it does not change."""


@dataclass(frozen=True, eq=False)
class Looks:
    """Where the values of a recorded pass look in a photo."""

    fields: Mapping[Value, Field]
    """The field of each value that comes from the photo."""
    unknown: Sequence[str]
    """The operations without a rule, behind which nothing is known."""
    by_photo: bool
    """Whether the photo itself decides where some values are taken from."""


def leading_to(value: Value) -> list[Step]:
    """The steps that a value of a recording was computed by, in their order."""
    steps: dict[Step, int] = {}
    waiting = [value]
    while waiting:
        step = waiting.pop().step
        if step is not None and step not in steps:
            steps[step] = max(result.number for result in step.outputs)
            waiting += step.inputs
    return sorted(steps, key=lambda step: steps[step])


def receptive_fields(
    steps: Iterable[Step],
    x: Value,
    stays: Mapping[Value, Value] = MappingProxyType({}),
    *,
    cut: bool = False,
) -> Looks:
    """Follow where the values of a recording look in a photo ``x`` ``(N, C, H, W)``; ``cut``, with
    no more than the photo to look at. What ``stays`` looks where its source does, by its last
    dimension together."""
    device = x.tensor.device
    # the rounding of single precision would show in maps, which are drawn by this
    precise = torch.float32 if device.type == "mps" else torch.float64
    lines = []
    for dim, length in enumerate(x.shape[2:], start=2):
        places = torch.arange(0.5, length, device=device, dtype=precise)
        line = torch.stack([torch.ones_like(places), places])
        lines.append(line.reshape([2, *(length if d == dim else 1 for d in range(4))]))
    fields: dict[Value, Field] = {x: (lines[0], lines[1])}
    unknown: dict[str, None] = {}
    by_photo = False
    size = (x.shape[2], x.shape[3])
    for step in steps:
        staying = stays.keys() & set(step.outputs)
        for result in staying:
            if stays[result] in fields:
                rows, columns = (along.mean(-1, keepdim=True) for along in fields[stays[result]])
                fields[result] = rows, columns
        if staying or not any(value in fields for value in step.inputs):
            continue
        if is_move(step) or step.operation.has("samples"):
            by_photo |= any(value.depends for value in step.inputs if value not in fields)
        try:
            fields |= _carried(step, fields, size, cut=cut)
        except Exception as error:  # operators may take arguments in unknown ways
            if came_by_signal(error):
                raise
            unknown[step.name] = None
    return Looks(fields, list(unknown), by_photo)


def copy_of(steps: Iterable[Step], photo: Value) -> Value:
    """The moved copy of a photo, such as a crop, that all of these steps read; the photo itself if
    there is none."""
    copy = value = photo
    readers: dict[Value, list[Step]] = {}
    for step in steps:
        for read in step.inputs:
            readers.setdefault(read, []).append(step)
    while len(readers.get(value, [])) == 1:
        (step,) = readers[value]
        is_copied = is_move(step) or _is_by_value(step)
        signals = [read for read in step.inputs if read.depends]
        if not is_copied or signals != [value] or len(step.outputs) != 1:
            break
        value = step.output
        is_photo = value.tensor.is_floating_point() and len(value.shape) == 4
        if is_photo and value.shape[0] == photo.shape[0]:
            copy = value
    return copy


def seen_pixels(steps: Iterable[Step], photo: Value, looks: Looks) -> Tensor | None:
    """Which pixels ``(H, W)`` of a photo these steps look at; None for all of them. Values that
    were moved, or resized, are pixels still; whatever reads them otherwise looks at them, and at
    those between.
    """
    device = photo.tensor.device
    seen = torch.zeros(photo.shape[2:], dtype=torch.bool, device=device)
    pixels = {photo}
    for step in steps:
        for value in pixels.intersection(step.inputs):
            signals = [other for other in step.inputs if other in looks.fields]
            is_shifted = is_move(step) or step.operation.has("resizes")
            if is_shifted or (_is_by_value(step) and len(signals) == 1):
                pixels.update(looks.fields.keys() & set(step.outputs))
                continue
            rows, columns = centres(looks.fields[value], value.shape)
            on_photo = [
                (places >= 0) & (places < length)
                for places, length in zip((rows, columns), seen.shape, strict=True)
            ]
            read = on_photo[0] & on_photo[1] & _read(step, value)
            seen_here = torch.zeros_like(seen)
            seen_here[rows[read].long(), columns[read].long()] = True
            seen |= _grown(seen_here, rows, columns)
            if bool(seen.all()):
                return None
    return seen if bool(seen.any()) else None


def _is_by_value(step: Step) -> bool:
    """Whether a step computes value by value; functions that are no operators do not say."""
    return torch.Tag.pointwise in getattr(step.operator, "tags", ())


def _grown(seen: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixels that are seen, with those between them where the photo was made smaller, by where its
    values ``(..., h, w)`` came from then."""
    gaps = [places.diff(dim=dim).abs() for places in (rows, columns) for dim in (-2, -1)]
    gap = max(float(of_dim.nanmedian()) for of_dim in gaps if of_dim.numel())
    beside = math.floor(gap / 2)
    wide = F.max_pool2d(seen[None, None].float(), 2 * beside + 1, 1, beside)
    return wide[0, 0].bool()


def _read(step: Step, value: Value) -> Tensor:
    """What a step reads of a map ``(N, C, h, w)``, all that lies between included: truth values
    that broadcast to it."""
    device = value.tensor.device
    read = torch.ones([1] * len(value.shape), dtype=torch.bool, device=device)
    if step.args[0] is not value or len(value.shape) != 4:
        return read
    lines = []
    if step.operation.kind == "convolution" and not step.args[6]:
        stride, padding, dilation = [[*part] * 2 for part in step.args[3:6]]  # or one for both
        outputs = step.output.shape[2:]
        for axis, kernel in enumerate(step.args[1].shape[2:]):
            last = (outputs[axis] - 1) * stride[axis] + dilation[axis] * (kernel - 1)
            lines.append(torch.arange(value.shape[axis + 2], device=device) <= last - padding[axis])
    elif step.operation.has("samples"):
        grid = step.args[1].tensor.detach().float()
        ones = torch.ones((len(grid), 1, *value.shape[2:]), requires_grad=True, device=device)
        with torch.enable_grad():
            taken = step.operator(ones, grid, *step.args[2:], **step.kwargs)
            (weights,) = torch.autograd.grad(taken.sum(), ones)
        taken_from = (weights > 0).any(0)[0]
        for axis in (0, 1):
            places = taken_from.any(1 - axis).nonzero()
            numbers = torch.arange(value.shape[axis + 2], device=device)
            lines.append((numbers >= places.min()) & (numbers <= places.max()))
    return lines[0][:, None] & lines[1] if lines else read


def centres(field: Field, shape: Sequence[int] | None = None) -> Tensor:
    """Where values of this shape look: ``(2, *shape)``, row and column in pixels. Values that look
    nowhere have NaN."""
    rows, columns = (_places(along) for along in field)
    if shape is not None:
        rows, columns = rows.expand(tuple(shape)), columns.expand(tuple(shape))
    # what is nowhere along one axis is nowhere
    return torch.stack([rows + 0 * columns, columns + 0 * rows])


def _stacked(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Stack tensors that broadcast to each other."""
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    return torch.stack([part.expand(shape) for part in parts], dim)


def _places(along: Tensor) -> Tensor:
    """The centres of fields along one axis of the photo; NaN of what looks nowhere."""
    mass, moment = along
    return torch.where(mass > 0, moment / mass, torch.nan)


def _carried(
    step: Step, fields: Mapping[Value, Field], size: tuple[int, int], *, cut: bool
) -> dict[Value, Field]:
    """The fields of the results of a step, on photos of a ``size``."""
    results = step.outputs
    operation = step.operation
    if step.name == "constant_pad_nd":
        return {results[0]: _padded(step, fields[step.args[0]], cut=cut)}
    if is_move(step):
        return _moved(step, results, fields)
    if operation.kind == "convolution":
        _must_be_together(fields[step.args[0]], size, step.name)
        return {results[0]: _convolved(step, fields[step.args[0]], cut=cut)}
    if operation.has("pools"):
        return {results[0]: _pooled(step, fields[step.args[0]], results[0], cut=cut)}
    if operation.has("resizes") or operation.has("samples") or step.name in ("sum", "mean"):
        return {results[0]: _run_on(step, fields[step.args[0]])}
    if step.name in ("mm", "addmm"):
        return _of_product(step, results[0], fields)
    if operation.kind == "matrixproduct":
        return {}
    if not operation.has("stays") and not _is_by_value(step):
        raise ValueError(step.name)
    return {results[0]: _by_value(step, results[0], fields, size)}


def _moved(
    step: Step, results: Sequence[Value], fields: Mapping[Value, Field]
) -> dict[Value, Field]:
    """The fields of results that are moved: the step is run with each part of the fields."""
    any_part = next(iter(fields.values()))[0][0]

    def part_of(axis: int, part: int, value: Value) -> Tensor:
        """One part of the field of a value; 0 of a value that does not come from the photo."""
        field = fields.get(value)
        if field is None:
            return any_part.new_zeros([1] * len(value.shape))
        return field[axis][part].clone()  # what strides are taken of has memory of its own

    parts = [[moved(step, partial(part_of, axis, part)) for part in (0, 1)] for axis in (0, 1)]
    return {
        result: tuple(  # type: ignore[misc]
            _stacked([mass[result], moment[result]]) for mass, moment in parts
        )
        for result in results
    }


def _padded(step: Step, field: Field, *, cut: bool) -> Field:
    """The field behind a padding with a constant, along the dimensions in which it changes."""
    ends = step.args[1]
    rows, columns = field
    for i in range(len(ends) // 2):
        dim = len(step.args[0].shape) - 1 - i
        rows, columns = (
            _extended(along, dim, ends[2 * i], ends[2 * i + 1], cut=cut)
            for along in (rows, columns)
        )
    return rows, columns


def _extended(along: Tensor, dim: int, left: int, right: int, *, cut: bool) -> Tensor:
    """A field with so many values more at both ends of a dimension, or fewer: they look further
    out, as every second value does; nowhere, if fields are ``cut``."""
    length = along.shape[dim + 1]
    if length == 1:
        return along
    period = min(2, length - 1)  # transposed convolutions have two kinds of values in turn
    numbers = torch.arange(-left, length + right, device=along.device)
    below = (-numbers).clamp(min=0).add(period - 1).div(period, rounding_mode="floor")
    above = (numbers - length + 1).clamp(min=0).add(period - 1).div(period, rounding_mode="floor")
    mass, moment = along.index_select(dim + 1, numbers + period * (below - above))
    shape = [-1 if d == dim else 1 for d in range(mass.ndim)]
    below, above = below.reshape(shape), above.reshape(shape)
    if cut:
        is_own = (below + above) == 0
        return torch.stack([mass * is_own, moment * is_own])
    ends = (0, period, length - 1 - period, length - 1)
    first, third, third_last, last = (_places(along.narrow(dim + 1, place, 1)) for place in ends)
    further = above * (last - third_last) - below * (third - first)
    return torch.stack([mass, moment + mass * further.nan_to_num()])


def _run_on(step: Step, field: Field) -> Field:
    """A step that is linear in its first argument, run on a field in the place of that."""
    x: Value = step.args[0]
    results = []
    for along in field:
        parts = []
        if step.operation.has("samples"):  # everywhere
            along = along.mean(2, keepdim=True)
        for part in along:
            options = [
                arg.tensor.to(part) if isinstance(arg, Value) else arg for arg in step.args[1:]
            ]
            if step.name not in ("sum", "mean"):
                part = part.expand(len(part), part.shape[1], *x.shape[2:]).contiguous()
            parts.append(step.operator(part, *options, **step.kwargs))
        results.append(compact(torch.stack(parts), first=1))
    return tuple(results)  # type: ignore[return-value]


def _convolved(step: Step, field: Field, *, cut: bool) -> Field:
    """The field behind a convolution: that of its window, weighted by the squared weights."""
    x: Value = step.args[0]
    squares = step.args[1].tensor.detach().square()
    sides = squares.shape[2:]
    stride, padding, dilation = ([*part] * (len(sides) // len(part)) for part in step.args[3:6])
    is_transposed, output_padding, groups = step.args[6:9]
    if list(sides) == stride:  # patches, which are drawn as such
        squares = squares.mean(tuple(range(2, squares.ndim)), keepdim=True).expand_as(squares)
    lattices = [lattice for lattice in map(_lattice, field) if lattice is not None]
    if len(lattices) == 2 and not (cut or is_transposed):
        return _convolved_lattices(step, squares, lattices, stride, padding, dilation)
    results = []
    for along in field:
        kernel = squares
        options: list[list[int]] = [[], [], [], []]
        for i, side in enumerate(sides):
            if along.shape[i + 3] == 1:  # the same everywhere
                kernel = sum(kernel.split(1, i + 2))  # faster than its own sum
                values = (1, 0, 1, 0)
            elif is_transposed:
                more = dilation[i] * (side - 1) // stride[i] + 1
                along = _extended(along, i + 2, more, more, cut=cut)
                taken_off = padding[i] + stride[i] * more
                values = (stride[i], taken_off, dilation[i], output_padding[i])
            else:
                along = _extended(along, i + 2, padding[i], padding[i], cut=cut)
                values = (stride[i], 0, dilation[i], 0)
            for option, value in zip(options, values, strict=True):
                option.append(value)
        lengths = along.shape[3:]
        if max(lengths) < math.prod(lengths):  # on no grid: its channels together
            along = along.mean(2, keepdim=True)
            kernel = kernel.mean(int(is_transposed), keepdim=True)
            kernel = kernel.sum(int(not is_transposed), keepdim=True)
            groups = 1
        else:
            along = along.expand(-1, -1, x.shape[1], *lengths)
        along = along.flatten(0, 1)
        kernel = kernel.to(along)
        options_of_step = (*options[:3], is_transposed, options[3], groups)
        outputs = aten.convolution(along, kernel, None, *options_of_step)
        results.append(outputs.reshape(2, -1, *outputs.shape[1:]))
    return tuple(results)


class _Lattice(NamedTuple):
    """Fields that are the same but for being a step apart along one dimension: mass and first
    moment of the first one, the latter from an origin on, so that single precision is enough."""

    dim: int
    origin: float
    gap: float
    mass: Tensor
    moment: Tensor


def _lattice(along: Tensor) -> _Lattice | None:
    """The regular fields of maps ``(2, N, C, h, w)`` along one axis of the photo; None for
    others."""
    changing = [dim for dim, length in enumerate(along.shape[1:]) if length > 1 and dim > 1]
    if len(changing) != 1:
        return None
    (dim,) = changing
    mass, moment = along
    first = mass.narrow(dim, 0, 1)
    places = _places(along)
    gaps = places.diff(dim=dim)
    gap = float(gaps.nanmean())
    off = (gaps - gap).abs().nan_to_num()  # channels without a part in it look nowhere
    if not bool((mass == first).all()) or not bool((off <= _SAME * abs(gap)).all()):
        return None
    origin = float(places.narrow(dim, 0, 1).nanmean())
    return _Lattice(dim, origin, gap, first, moment.narrow(dim, 0, 1) - first * origin)


def _convolved_lattices(
    step: Step,
    squares: Tensor,
    lattices: Sequence[_Lattice],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Field:
    """The fields behind a convolution of regular ones: one window tells all of them."""
    x: Value = step.args[0]
    count = squares.ndim - 2
    images = max(len(lattice.mass) for lattice in lattices)
    windows = squares.new_empty((2 * len(lattices), images, x.shape[1], *squares.shape[2:]))
    for i, lattice in enumerate(lattices):  # what the window of the first output looks at
        dim = lattice.dim - 2
        taps = torch.arange(squares.shape[lattice.dim], device=squares.device)
        beside = (taps * dilation[dim] - padding[dim]) * lattice.gap
        beside = beside.reshape([-1 if d == dim else 1 for d in range(count)])
        windows[2 * i] = lattice.mass
        windows[2 * i + 1] = lattice.moment + lattice.mass * beside
    groups = step.args[8]
    weights = squares.reshape(groups, -1, squares[0].numel())
    of_windows = windows.reshape(*windows.shape[:2], groups, -1).movedim(0, -1)  # (n, g, i * k, 4)
    outputs = (weights @ of_windows).flatten(1, 2).to(lattices[0].mass)
    results = []
    for i, lattice in enumerate(lattices):
        mass, moment = (
            outputs[..., column].reshape(*outputs.shape[:2], *[1] * count)
            for column in (2 * i, 2 * i + 1)
        )
        length = step.results[0].shape[lattice.dim]  # type: ignore[union-attr]
        numbers = torch.arange(length, device=mass.device, dtype=mass.dtype)
        places = lattice.origin + lattice.gap * stride[lattice.dim - 2] * numbers
        places = places.reshape([-1 if d == lattice.dim else 1 for d in range(count + 2)])
        results.append(_stacked([mass, moment + mass * places]))
    return tuple(results)  # type: ignore[return-value]


def _pooled(step: Step, field: Field, result: Value, *, cut: bool) -> Field:
    """The field behind a pooling: the mean of its window, of maxima too, which may be anywhere in
    it."""
    if "adaptive" in step.name:
        sides = [
            [output if along.shape[dim + 1] > 1 else 1 for dim, output in enumerate(result.shape)]
            for along in field
        ]
        pooled = [
            F.adaptive_avg_pool2d(along.flatten(0, 1), (side[2], side[3]))
            for along, side in zip(field, sides, strict=True)
        ]
        rows, columns = (along.reshape(2, -1, *along.shape[1:]) for along in pooled)
        return rows, columns
    dims = range(2, len(result.shape))
    defaults = [[1], step.args[1], [0], [1]][: 3 if step.operation.kind == "average" else 4]
    options = [
        [*(step.args[i] if len(step.args) > i and step.args[i] else default)] * len(dims)
        for i, default in enumerate(defaults, start=1)
    ]
    kernel, stride, padding = options[:3]
    dilation = options[3] if len(options) > 3 else [1] * len(dims)
    results = []
    for along in field:
        for i, dim in enumerate(dims):
            length = along.shape[dim + 1]
            if length == 1:
                continue
            span = dilation[i] * (kernel[i] - 1) + 1
            needed = (result.shape[dim] - 1) * stride[i] + span
            along = _extended(along, dim, padding[i], needed - length - padding[i], cut=cut)
            along = along.unfold(dim + 1, span, stride[i])[..., :: dilation[i]].mean(-1)
        results.append(along)
    return tuple(results)  # type: ignore[return-value]


def _of_product(step: Step, result: Value, fields: Mapping[Value, Field]) -> dict[Value, Field]:
    """The field of a product of two matrices, of which one is a constant, as in a linear layer; of
    two signals there is none."""
    first, second = step.args[-2:]
    if first in fields and second in fields:
        return {}
    if first in fields:
        scale = second.tensor.detach().to(fields[first][0]).square().sum(0).mean()
        rows, columns = (along.mean(2, keepdim=True) * scale for along in fields[first])
        return {result: (rows, columns)}
    squares = first.tensor.detach().to(fields[second][0]).square()
    rows, columns = (
        compact(squares @ along.expand(2, *second.shape), first=1) for along in fields[second]
    )
    return {result: (rows, columns)}


def _must_be_together(field: Field, size: tuple[int, int], name: str, dim: int = 1) -> None:
    """Refuse to mix what looks at several places of the photo, along a dimension of its values: the
    mean of these is none of them."""
    for along, length in zip(field, size, strict=True):
        if along.shape[dim + 1] > 1:
            places = _places(along)
            least = places.nan_to_num(torch.inf).amin(dim)
            most = places.nan_to_num(-torch.inf).amax(dim)
            cells = max(along.shape[dim + 2 :])
            if bool((most - least > _APART * length + length / cells).any()):
                raise ValueError(name)


def _by_value(
    step: Step, result: Value, fields: Mapping[Value, Field], size: tuple[int, int]
) -> Field:
    """The field of what is computed value by value: the sum of those of the arguments that have the
    result's shape, times the squared slope."""
    signals = [value for value in dict.fromkeys(step.inputs) if value in fields]
    alike = [value for value in signals if value.shape == result.shape]
    if not alike:
        raise ValueError(step.name)
    if len(signals) == 1:
        slope = _squared_slope(step, alike[0], fields[alike[0]])
        rows, columns = (along * slope for along in fields[alike[0]])
        return rows, columns
    parts = [fields[value] for value in alike]
    stacked = [_stacked([part[axis] for part in parts], 1) for axis in (0, 1)]
    if len(alike) > 1:
        _must_be_together((stacked[0], stacked[1]), size, step.name, dim=0)
    rows, columns = (along.sum(1) for along in stacked)
    return rows, columns


def _squared_slope(step: Step, signal: Value, field: Field) -> float | Tensor:
    """The mean squared slope of a step that acts on each value, or of a batch normalisation, for
    each channel if it is clear which dimension has these."""
    like = field[0]
    statistics = step.args[4:6] if step.operation.kind == "batchnorm" else (None, None)
    if isinstance(statistics[0], Value) and step.args[1] and statistics[1] is not True:
        variance = statistics[0].tensor.to(like) + step.args[-1]
        ratios: Tensor = step.args[1].tensor.detach().to(like).square() / variance
        return ratios.reshape(-1, *[1] * (len(signal.shape) - 2))
    if step.operation.has("biased"):
        return 1.0
    x = signal.tensor.detach().float()
    changing = [{d for d, n in enumerate(along.shape[1:]) if n > 1} for along in field]
    channels = changing[0] & changing[1]
    averaged = [d for d in range(x.ndim) if channels != {d}]
    if len(step.inputs) == 1:  # each value by itself: some are enough
        some = max(1, round((x.numel() / _SAMPLED) ** (1 / max(len(averaged), 1))))
        x = x[tuple(slice(None, None, some if d in averaged else 1) for d in range(x.ndim))]
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        y = next(iter(step.run(lambda value: x if value is signal else value.tensor).values()))
        if not y.requires_grad:
            return 1.0
        (slope,) = torch.autograd.grad(y.sum(), x)
    # what lets nothing pass of noise may let photos pass
    mean_square = slope.to(like).square().mean(averaged, keepdim=True).clamp(min=_LEAST)
    return mean_square if len(averaged) < x.ndim else mean_square.reshape(())


_APART = 1 / 4
"""Of a photo: what is added up there looks at places that lie less far apart."""
_SAME = 1e-6  # of a gap: how far regular fields lie beside their lattice, by rounding
_LEAST = 1e-6
"""The least squared slope of an activation."""
_SAMPLED = 2**15
"""How many values of a tensor are looked at for the mean slope of an activation."""
