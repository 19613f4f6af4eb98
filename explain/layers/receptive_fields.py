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


def receptive_fields(steps: Iterable[Step], x: Value) -> tuple[dict[Value, Field], list[str]]:
    """Follow where the values of a recording look in a photo ``x`` ``(N, C, H, W)``.

    Returns the field of each value that comes from the photo, and the names of operations without a
    rule, behind which nothing is known.
    """
    height, width = x.shape[-2:]
    rows = (torch.arange(height) + 0.5).reshape(1, 1, height, 1)
    columns = (torch.arange(width) + 0.5).reshape(1, 1, 1, width)
    fields: dict[Value, Field] = {x: (torch.ones(1, 1, 1, 1), rows, columns)}
    unknown: dict[str, None] = {}
    for step in steps:
        if not any(value in fields for value in step.inputs):
            continue
        try:
            fields |= _carried(step, fields)
        except Exception as error:  # operators may take arguments in unknown ways
            if came_by_signal(error):
                raise
            unknown[step.name] = None
    return fields, list(unknown)


def centres(field: Field, shape: Sequence[int]) -> Tensor:
    """Where values of this shape look: ``(2, *shape)``, row and column in pixels.

    Values that look nowhere have NaN.
    """
    mass, *moments = field
    places = [torch.where(mass > 0, moment / mass, torch.nan) for moment in moments]
    return torch.stack([place.expand(tuple(shape)) for place in places])


def _carried(step: Step, fields: Mapping[Value, Field]) -> dict[Value, Field]:
    """The fields of the results of a step."""
    results = [value for value in dict.fromkeys(step.results) if value is not None]
    operation = step.operation
    if is_move(step):
        return _moved(step, results, fields)
    if operation.kind == "convolution":
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
    return {results[0]: _by_value(step, results[0], fields)}


def _moved(
    step: Step, results: Sequence[Value], fields: Mapping[Value, Field]
) -> dict[Value, Field]:
    """The fields of results that are moved: the step is run with each part of the fields."""

    def part_of(axis: int, value: Value) -> Tensor | None:
        """One part of the field of a value; None of a value that does not come from the photo."""
        field = fields.get(value)
        return None if field is None else field[axis]

    parts = [moved(step, partial(part_of, axis)) for axis in range(3)]
    return {result: tuple(part[result] for part in parts) for result in results}  # type: ignore[misc]


def _run_on(step: Step, field: Field) -> Field:
    """A step that is linear in its first argument, run on a field in the place of that."""
    x: Value = step.args[0]
    results = []
    for part in field:
        options = [arg.tensor.float() if isinstance(arg, Value) else arg for arg in step.args[1:]]
        result = step.operator(part.expand(x.shape).contiguous(), *options, **step.kwargs)
        results.append(compact(result))
    return tuple(results)  # type: ignore[return-value]


def _convolved(step: Step, field: Field) -> Field:
    """The field behind a convolution: that of its window, weighted by the squared weights."""
    x: Value = step.args[0]
    squares = step.args[1].tensor.detach().float().square()
    is_transposed = step.args[6]
    kernel = squares.mean(int(is_transposed), keepdim=True).sum(
        int(not is_transposed), keepdim=True
    )
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
        scale = second.tensor.detach().float().square().sum(0).mean()
        return {result: tuple(part.mean(1, keepdim=True) * scale for part in fields[first])}
    squares = first.tensor.detach().float().square()
    return {
        result: tuple(compact(squares @ part.expand(second.shape)) for part in fields[second])  # type: ignore[dict-item]
    }


def _by_value(step: Step, result: Value, fields: Mapping[Value, Field]) -> Field:
    """The field of what is computed value by value: the sum of those of the arguments that have the
    result's shape, times the squared slope."""
    signals = [value for value in dict.fromkeys(step.inputs) if value in fields]
    alike = [value for value in signals if value.shape == result.shape]
    if not alike:
        raise ValueError(step.name)
    slope = _squared_slope(step, alike) if len(signals) == 1 else 1.0
    parts = [sum(fields[value][axis] for value in alike) * slope for axis in range(3)]
    return tuple(parts)  # type: ignore[return-value]


def _squared_slope(step: Step, signals: Sequence[Value]) -> float | Tensor:
    """The mean squared slope of a step that acts on each value, or of a batch normalisation."""
    if step.name == "native_batch_norm" and step.args[1] is not None and not step.args[5]:
        variance = step.args[4].tensor.float() + step.args[7]
        ratios: Tensor = step.args[1].tensor.detach().float().square() / variance
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


_SAMPLED = 2**14
"""How many values of a tensor are looked at for the mean slope of an activation."""
