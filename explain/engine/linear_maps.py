"""Linear maps among the calls of a forward pass: what is mapped, by which weights, and what is added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from explain.engine.calls import Call

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Linear:
    """``run(x, weight) + bias``; ``place`` is that of x among the call's arguments.

    ``scaled`` makes of the weights those of the map followed by a factor for each of its output channels, ``(K,)``,
    which run along dimension ``channels`` of the result; None where that is not known.
    """

    place: int
    run: Run
    weight: torch.Tensor
    bias: torch.Tensor | None
    channels: int
    scaled: Callable[[torch.Tensor], torch.Tensor] | None = None

    def then(self, factor: torch.Tensor, shift: torch.Tensor | None) -> Linear | None:
        """This map, and behind it a normalisation that multiplies each channel and adds to it: one map.

        ``factor`` and ``shift`` have the shape that meets the result.
        """
        if self.scaled is None:
            return None
        weight = self.scaled(factor.flatten())
        bias = shift if self.bias is None else self.bias * factor + (0 if shift is None else shift)
        return replace(self, weight=weight, bias=bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found = self.run(x, self.weight)
        return found if self.bias is None else found + self.bias


def linear_map(call: Call, places: Sequence[int]) -> Linear | None:
    """The linear map that a call is, in the one argument that a gradient leads to; None where it is none."""
    if len(places) != 1:
        return None
    place, kind = places[0], call.kind
    if kind == "batch_norm":
        return _batch_norm(call, place)
    if kind.startswith("conv"):
        return _convolution(call, place)
    if kind == "linear" and place == 0:
        given = call.named
        weight = given["weight"].detach()
        return Linear(0, _dense, weight, _detached(given.get("bias")), -1, lambda s: weight * s[:, None])
    if kind == "addmm" and place == 1:
        return _addmm(call)
    if kind in ("matmul", "rmatmul", "mm", "bmm", "mv", "einsum"):
        return _product(call, place)
    return None


def _dense(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()


def _convolution(call: Call, place: int) -> Linear | None:
    given = call.named
    if place != 0 or "weight" not in given:
        return None
    weight, bias = given["weight"].detach(), _detached(given.get("bias"))
    rest = {name: value for name, value in given.items() if name not in ("input", "weight", "bias")}
    transposed = "transpose" in call.kind
    spatial = weight.ndim - 2

    function, groups = call.function, rest.get("groups", 1)

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = function(x, w, None, **rest)
        return found

    def scaled(factor: torch.Tensor) -> torch.Tensor:
        parts = weight.reshape(groups, -1, *weight.shape[1:]) if transposed else weight
        shape = (groups, 1, -1, *[1] * spatial) if transposed else (-1, *[1] * (spatial + 1))
        found: torch.Tensor = (parts * factor.reshape(shape)).reshape(weight.shape)
        return found

    shaped = None if bias is None else bias.reshape(-1, *[1] * spatial)
    return Linear(0, run, weight, shaped, -spatial - 1, scaled)


def _batch_norm(call: Call, place: int) -> Linear | None:
    given = call.named
    mean, variance = given.get("running_mean"), given.get("running_var")
    if given.get("training", False) or mean is None or variance is None or place != 0:
        return None
    shape = (-1, *[1] * (given["input"].ndim - 2))
    factor = (variance.detach() + given.get("eps", 1e-5)).rsqrt()
    if given.get("weight") is not None:
        factor = factor * given["weight"].detach()
    shift = -mean.detach() * factor
    if given.get("bias") is not None:
        shift = shift + given["bias"].detach()
    weight = factor.reshape(shape)
    return Linear(0, torch.mul, weight, shift.reshape(shape), -len(shape), lambda s: weight * s.reshape(shape))


def _addmm(call: Call) -> Linear:
    given = call.named
    scale, weight = given.get("alpha", 1), given["mat2"].detach()
    bias = given["input"].detach() * given.get("beta", 1)
    return Linear(1, lambda x, w: scale * (x @ w), weight, bias, -1)


def _product(call: Call, place: int) -> Linear | None:
    others = [i for i, value in enumerate(call.flat) if isinstance(value, torch.Tensor) and i != place]
    if len(others) != 1:
        return None
    other = others[0]
    return Linear(place, lambda x, w: call.made({place: x, other: w}), call.flat[other].detach(), None, -1)
