"""Where the cells of feature maps look: moments of their receptive fields, followed through a
recording.

A cell is not in the middle of its share of the photo. In a stack of 3 x 3 convolutions with stride
2 and padding 1, cell i looks at i times the stride. The field of each value is carried along:

    mass             the expected squared gradient of the value in the pixels, summed over these
    mass x row, mass x column    its first moments

so that their quotients are the centre. Convolutions carry it with their weights squared,
normalisations and activations with their squared slopes; sums add it; what moves values moves it,
and zero padding has none. A gate that is broadcast does not move what it scales, and neither does
the mixing of an attention: a token stays where its residual stream is. Channels are taken together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from explain._utils.signals import came_by_signal
from explain.recording import Step, Value
from explain.recording.moves import compact, is_move, moved

aten = torch.ops.aten
Field = tuple[Tensor, Tensor, Tensor]
"""Mass and first moments along rows and columns of the photo, in pixels: each has the dimensions of
the value, of size 1 where it does not change."""


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


def receptive_fields(steps: Iterable[Step], x: Value) -> Looks:
    """Follow where the values of a recording look in a photo ``x`` ``(N, C, H, W)``."""
    height, width = x.shape[-2:]
    device = x.tensor.device
    # the rounding of single precision would show in maps, which are drawn by this
    precise = torch.float32 if device.type == "mps" else torch.float64
    mass = torch.ones(1, 1, 1, 1, device=device, dtype=precise)
    rows = torch.arange(0.5, height, device=device, dtype=precise).reshape(1, 1, height, 1)
    columns = torch.arange(0.5, width, device=device, dtype=precise).reshape(1, 1, 1, width)
    fields: dict[Value, Field] = {x: (mass, rows, columns)}
    unknown: dict[str, None] = {}
    by_photo = False
    for step in steps:
        if not any(value in fields for value in step.inputs):
            continue
        if is_move(step) or step.operation.has("samples"):
            by_photo |= any(value.depends for value in step.inputs if value not in fields)
        try:
            fields |= _carried(step, fields, (height, width))
        except Exception as error:  # operators may take arguments in unknown ways
            if came_by_signal(error):
                raise
            unknown[step.name] = None
    return Looks(fields, list(unknown), by_photo)


def seen_pixels(steps: Iterable[Step], photo: Value, looks: Looks) -> Tensor | None:
    """Which pixels ``(H, W)`` of a photo these steps look at; None for all of them.

    Values that were moved are pixels still; whatever reads them otherwise looks at them, and at
    those between.
    """
    device = photo.tensor.device
    seen = torch.zeros(photo.shape[2:], dtype=torch.bool, device=device)
    pixels = {photo}
    for step in steps:
        for value in pixels.intersection(step.inputs):
            signals = [other for other in step.inputs if other in looks.fields]
            if is_move(step) or (torch.Tag.pointwise in step.operator.tags and len(signals) == 1):
                pixels.update(looks.fields.keys() & set(step.outputs))
                continue
            mass, *moments = (part.expand(value.shape) for part in looks.fields[value])
            read = (mass > 0) & _read(step, value)
            rows, columns = (moment[read].div(mass[read]).long() for moment in moments)
            seen[rows, columns] = True
            if bool(seen.all()):
                return None
    return seen if bool(seen.any()) else None


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


def centres(field: Field, shape: Sequence[int]) -> Tensor:
    """Where values of this shape look: ``(2, *shape)``, row and column in pixels.

    Values that look nowhere have NaN.
    """
    mass, *moments = field
    places = [torch.where(mass > 0, moment / mass, torch.nan) for moment in moments]
    return torch.stack([place.expand(tuple(shape)) for place in places])


def _carried(
    step: Step, fields: Mapping[Value, Field], size: tuple[int, int]
) -> dict[Value, Field]:
    """The fields of the results of a step, on photos of a ``size``."""
    results = step.outputs
    operation = step.operation
    if is_move(step):
        return _moved(step, results, fields)
    if operation.kind == "convolution":
        _must_be_together(fields[step.args[0]], size, step.name)
        return {results[0]: _convolved(step, fields[step.args[0]])}
    if operation.has("pools"):
        return {results[0]: _pooled(step, fields[step.args[0]], results[0])}
    if operation.has("resizes") or operation.has("samples") or step.name in ("sum", "mean"):
        return {results[0]: _run_on(step, fields[step.args[0]])}
    if step.name in ("mm", "addmm"):
        return _of_product(step, results[0], fields)
    if operation.kind == "matrixproduct":
        return {}
    if not operation.has("stays") and torch.Tag.pointwise not in step.operator.tags:
        raise ValueError(step.name)
    return {results[0]: _by_value(step, results[0], fields, size)}


def _moved(
    step: Step, results: Sequence[Value], fields: Mapping[Value, Field]
) -> dict[Value, Field]:
    """The fields of results that are moved: the step is run with each part of the fields."""

    any_mass = next(iter(fields.values()))[0]

    def part_of(axis: int, value: Value) -> Tensor:
        """One part of the field of a value; 0 of a value that does not come from the photo."""
        field = fields.get(value)
        return any_mass.new_zeros([1] * len(value.shape)) if field is None else field[axis]

    parts = [moved(step, partial(part_of, axis)) for axis in range(3)]
    return {result: tuple(part[result] for part in parts) for result in results}  # type: ignore[misc]


def _run_on(step: Step, field: Field) -> Field:
    """A step that is linear in its first argument, run on a field in the place of that."""
    x: Value = step.args[0]
    results = []
    for part in field:
        options = [arg.tensor.to(part) if isinstance(arg, Value) else arg for arg in step.args[1:]]
        result = step.operator(part.expand(x.shape).contiguous(), *options, **step.kwargs)
        results.append(compact(result))
    return tuple(results)  # type: ignore[return-value]


def _convolved(step: Step, field: Field) -> Field:
    """The field behind a convolution: that of its window, weighted by the squared weights."""
    x: Value = step.args[0]
    squares = step.args[1].tensor.detach().to(field[0]).square()
    is_transposed = step.args[6]
    kernel = squares.mean(int(is_transposed), keepdim=True).sum(
        int(not is_transposed), keepdim=True
    )
    if list(kernel.shape[2:]) == list(step.args[3]):  # patches, which are drawn as such
        kernel = kernel.mean((2, 3), keepdim=True).expand_as(kernel)
    options = step.args[3:8]  # stride, padding, dilation, transposed, output padding
    parts = []
    for part in field:
        values = part.mean(1, keepdim=True).expand(len(part), 1, *x.shape[2:])
        parts.append(aten.convolution(values, kernel, None, *options, 1))
    return tuple(parts)


def _pooled(step: Step, field: Field, result: Value) -> Field:
    """The field behind a pooling: the mean of its window, of maxima too, which may be anywhere in
    it."""
    x: Value = step.args[0]
    parts = []
    for part in field:
        values = part.mean(1, keepdim=True).expand(len(part), 1, *x.shape[2:])
        if "adaptive" in step.name:
            pooled = F.adaptive_avg_pool2d(values, (result.shape[2], result.shape[3]))
        else:
            stride = step.args[2] if len(step.args) > 2 and step.args[2] else step.args[1]
            padding = step.args[3] if len(step.args) > 3 else 0
            ceil_at = 5 if step.name.startswith("max") else 4
            ceil_mode = len(step.args) > ceil_at and bool(step.args[ceil_at])
            pooled = F.avg_pool2d(values, step.args[1], stride, padding, ceil_mode)
        if pooled.shape[2:] != tuple(result.shape[2:]):
            raise ValueError(step.name)
        parts.append(pooled)
    return tuple(parts)  # type: ignore[return-value]


def _of_product(step: Step, result: Value, fields: Mapping[Value, Field]) -> dict[Value, Field]:
    """The field of a product of two matrices, of which one is a constant, as in a linear layer; of
    two signals there is none."""
    first, second = step.args[-2:]
    if first in fields and second in fields:
        return {}
    if first in fields:
        scale = second.tensor.detach().to(fields[first][0]).square().sum(0).mean()
        return {result: tuple(part.mean(1, keepdim=True) * scale for part in fields[first])}
    squares = first.tensor.detach().to(fields[second][0]).square()
    return {
        result: tuple(compact(squares @ part.expand(second.shape)) for part in fields[second])  # type: ignore[dict-item]
    }


def _must_be_together(field: Field, size: tuple[int, int], name: str, dim: int = 1) -> None:
    """Refuse to mix what looks at several places of the photo, along a dimension of its values: the
    mean of these is none of them."""
    mass, *moments = field
    for moment, length in zip(moments, size, strict=True):
        if max(moment.shape[dim], mass.shape[dim]) > 1:
            place = torch.where(mass > 0, moment / mass, torch.nan)
            least = place.nan_to_num(torch.inf).amin(dim)
            most = place.nan_to_num(-torch.inf).amax(dim)
            if bool((most - least > _APART * length).any()):
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
    slope = _squared_slope(step, alike, fields[alike[0]][0].dtype) if len(signals) == 1 else 1.0
    if len(alike) > 1:
        shape = torch.Size(result.shape)
        together = [
            torch.stack([fields[value][i].expand(shape) for value in alike]) for i in range(3)
        ]
        _must_be_together(tuple(together), size, step.name, dim=0)  # type: ignore[arg-type]
    parts = [sum(fields[value][axis] for value in alike) * slope for axis in range(3)]
    return tuple(parts)  # type: ignore[return-value]


def _squared_slope(step: Step, signals: Sequence[Value], dtype: torch.dtype) -> float | Tensor:
    """The mean squared slope of a step that acts on each value, or of a batch normalisation, in
    this type."""
    if step.name == "native_batch_norm" and step.args[1] is not None and not step.args[5]:
        variance = step.args[4].tensor.to(dtype) + step.args[7]
        ratios: Tensor = step.args[1].tensor.detach().to(dtype).square() / variance
        return ratios.mean()
    if step.operation.has("biased"):
        return 1.0
    x = signals[0].tensor.detach().float()
    if len(step.inputs) == 1 and x.numel() > _SAMPLED:  # each value by itself: some are enough
        x = x.flatten()[:: x.numel() // _SAMPLED]
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        y = next(iter(step.run(lambda value: x if value is signals[0] else value.tensor).values()))
        if not y.requires_grad:
            return 1.0
        (slope,) = torch.autograd.grad(y.sum(), x)
    mean_square: Tensor = slope.square().mean()
    return mean_square


_APART = 1 / 4
"""Of a photo: what is added up there looks at places that lie less far apart."""
_SAMPLED = 2**14
"""How many values of a tensor are looked at for the mean slope of an activation."""
