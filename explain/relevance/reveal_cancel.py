"""DeepLIFT's second rule, reveal-cancel: positive and negative parts of each difference, followed apart.

The network is run once on three rows for each image: the reference, the reference with what is added, and the
reference with what is taken away. At a function of one number, each part changes the result by the mean of what it does
alone and what it does beside the other; at a linear map, positive weights keep the parts and negative ones exchange
them. Each change over the part that made it is a constant multiplier, so that autograd hands the score back through
them. What cannot be followed is refused; and where all is followed, the last rows add up to the photo's own score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from explain._utils import nested
from explain._utils.errors import MethodError
from explain.tracing.calls import Call
from explain.tracing.linear_maps import linear_map
from explain.tracing.table import operation_name
from explain.tracing.tracer import ModuleTracker, Tracer

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _parts(rows: torch.Tensor) -> Parts:
    """The reference, what is added to it, and what is taken away."""
    base, more, less = rows.chunk(3)
    return base.detach(), more - base.detach(), less - base.detach()


def _rows(base: torch.Tensor, more: torch.Tensor, less: torch.Tensor) -> torch.Tensor:
    return torch.cat([base, base + more, base + less])


class RevealCancelTracer(Tracer):
    """Follows the three rows of each image through the functions that a network calls."""

    def __init__(self, model: nn.Module) -> None:
        self._running = ModuleTracker(model)
        self._followed: Any = WeakIdKeyDictionary()

    def begin(self, reference: torch.Tensor, more: torch.Tensor, less: torch.Tensor) -> torch.Tensor:
        """The rows that the network is given."""
        found = _rows(reference, more, less)
        self._followed[found] = True
        return found

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(func, operation_name(func), args, kwargs)
        if call.info.has("query"):
            return call.made()
        places = [i for i, value in enumerate(call.flat) if isinstance(value, torch.Tensor) and value in self._followed]
        if not places:
            return func(*args, **kwargs)
        plain = call.out_of_place() if call.in_place else call
        made = self._refuse(call.name) if plain is None else self._made(plain, places)
        found = call.flat[0].copy_(made) if call.in_place else made
        nested.replace(found, lambda path, tensor: self._noted(tensor))
        return found

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        self._followed[tensor] = True
        return tensor

    def _made(self, call: Call, places: Sequence[int]) -> Any:
        linear = linear_map(call, places)
        if linear is not None:
            run = linear.run
            return _linear(linear.weight, lambda x, w: run(x, w, None), linear.bias, call.flat[linear.place])
        if call.info.kind in ("rectifier", "activation") and places == [0]:
            return _revealed(lambda x: call.made({0: x}), call.flat[0])
        if call.name in ("sub", "rsub", "subtract", "isub", "neg"):
            return _difference(call, places)
        if call.name in ("mul", "div", "divide", "true_divide", "truediv", "imul", "itruediv") and len(places) == 1:
            return self._scaled(call, places[0])
        if call.info.has("monotone") and call.kwargs.get("alpha", 1) >= 0:
            return call.made()
        if call.name == "interpolate" and call.kwargs.get("mode", "nearest") != "bicubic":
            return call.made()
        return self._refuse(call.name)

    def _scaled(self, call: Call, place: int) -> torch.Tensor:
        """By a constant: its sign says whether the parts change places."""
        if place == 1 and call.name not in ("mul", "imul"):
            self._refuse(call.name)
        factor = torch.as_tensor(call.flat[1 - place]).to(call.flat[place]).detach()
        factor = factor if call.name in ("mul", "imul") else 1 / factor
        if factor.ndim and factor.shape[0] == len(call.flat[place]) and factor.ndim == call.flat[place].ndim:
            self._refuse(call.name)  # something of each row
        return _linear(factor, torch.mul, None, call.flat[place])

    def _refuse(self, name: str) -> NoReturn:
        raise MethodError(
            "rule of deeplift must be rescale for this network: reveal-cancel follows linear maps, functions of one "
            f"number, sums and averages, and {name}() in layer {self._running()[0] or 'model'!r} is none of these"
        )


def _linear(
    weight: torch.Tensor,
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    bias: torch.Tensor | None,
    rows: torch.Tensor,
) -> torch.Tensor:
    base, more, less = _parts(rows)
    up, down = weight.clamp(min=0), weight.clamp(max=0)
    start = run(base, weight) if bias is None else run(base, weight) + bias
    return _rows(start, run(more, up) + run(less, down), run(less, up) + run(more, down))


def _difference(call: Call, places: Sequence[int]) -> torch.Tensor:
    """What is subtracted adds what it takes away."""
    made: torch.Tensor = call.made()
    subtracted = 0 if call.name in ("rsub", "neg") else 1
    count = len(made) // 3
    more, less = torch.zeros_like(made[:count]), torch.zeros_like(made[:count])
    for place in places:
        _, up, down = _parts(call.flat[place])
        more, less = (more - down, less - up) if place == subtracted else (more + up, less + down)
    return _rows(made[:count].detach(), more, less)


def _revealed(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """A function of one number: each part's effect alone, and beside the other, on average."""
    base, more, less = _parts(rows)
    with torch.no_grad():
        start, with_more, with_less = function(base), function(base + more), function(base + less)
        both = function(base + more + less)
        rise = (with_more - start + both - with_less) / 2
        fall = (with_less - start + both - with_more) / 2
    with torch.enable_grad():
        point = base.clone().requires_grad_()
        slope = torch.autograd.grad(function(point).sum(), point)[0]
    return _rows(start, more * _over(rise, more, base, slope), less * _over(fall, less, base, slope))


def _over(change: torch.Tensor, part: torch.Tensor, base: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """The change of a result over what made it; the slope where that is as good as nothing."""
    part = part.detach()
    near = part.abs() <= 1e-7 * base.abs()
    return torch.where(near, slope, change / torch.where(near, 1, part))


def joined(output: Any, rows: int) -> Any:
    """What the network gave for the photos themselves, from what it gave for three rows of each."""

    def join(path: object, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or len(tensor) != rows:
            return tensor
        base, more, less = _parts(tensor)
        return base + more + less

    return nested.replace(output, join)
