"""Which calls rectify, however they are written: by their name, or by their arguments.

``clamp(x, min=0)``, ``maximum(x, 0)``, ``where(x > 0, x, ...)``, ``x * (x > 0)`` and ``x[x < 0] = 0`` rectify. The last
three are recognised by where their mask comes from: it must be the sign of what is kept, so a mask of tokens does not
count, even if it happens to agree with the sign. ``minimum(x, 0)`` is a rectifier turned round, -relu(-x).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from explain.hooks.preserve import is_transforming
from explain.tracing.calls import Call
from explain.tracing.table import info

_OTHERS = frozenset(["clamp", "clamp_max", "maximum", "minimum"])
_TRAITS = frozenset(["rectifies", "masks", "greater", "less", "casts", "negates"])
_STEPS = 16


def may_rectify(name: str) -> bool:
    """Whether a call of an operation may rectify, or make the mask for one that does."""
    return name in _OTHERS or bool(info(name).traits & _TRAITS)


@dataclass(frozen=True)
class Rectified:
    """Which of a Node's inputs are rectified, what is kept first, and whether that is the negative part."""

    inputs: tuple[int, ...] = (0,)
    turned: bool = False


@dataclass(frozen=True)
class _Sign:
    """A mask says where ``of`` is positive; where it is negative, if ``side`` is -1."""

    of: torch.Tensor
    side: int


class Rectifiers:
    """Tells which calls of a forward pass rectify. It has to see the calls that make masks, too."""

    def __init__(self) -> None:
        self._signs: Any = WeakIdKeyDictionary()

    def find(self, call: Call) -> Rectified | None:
        """What a call rectifies, before it is made; None where it is no rectifier."""
        name, args, kwargs = call.name, call.args, call.kwargs
        if call.info.has("rectifies"):
            return Rectified()
        values = [*args, *kwargs.values()]
        if name == "clamp":
            least = kwargs.get("min", args[1] if len(args) > 1 else None)
            most = kwargs.get("max", args[2] if len(args) > 2 else None)
            return (
                Rectified() if _is_zero(least) else Rectified(turned=True) if least is None and _is_zero(most) else None
            )
        if name == "clamp_max":
            return Rectified(turned=True) if _is_zero(values[1]) else None
        if name in ("maximum", "minimum"):
            return _beside(values, lambda value, other: (name == "minimum") if _is_zero(other) else None)
        if name == "mul":
            return _beside(values, self._turned_by)
        if name == "where" and len(values) == 3:
            return self._where(call)
        if name in ("masked_fill", "setitem") and len(values) == 3 and _is_zero(values[2]):
            turned = self._turned_by(values[0], values[1])
            return None if turned is None else Rectified(turned=not turned)
        return None

    def seen(self, call: Call, result: Any) -> None:
        """Note a mask that a call has made."""
        if not isinstance(result, torch.Tensor) or not call.args:
            return
        row = call.info
        if row.has("greater") or row.has("less"):
            values = [*call.args, *call.kwargs.values()]
            side = 1 if row.has("greater") else -1
            if _is_zero(values[1]) and isinstance(values[0], torch.Tensor):
                self._signs[result] = _Sign(values[0].detach(), side)
            elif _is_zero(values[0]) and isinstance(values[1], torch.Tensor):
                self._signs[result] = _Sign(values[1].detach(), -side)
        elif (row.has("casts") or row.has("negates")) and (sign := self._sign(call.args[0])) is not None:
            self._signs[result] = _Sign(sign.of, -sign.side if row.has("negates") else sign.side)

    def _sign(self, mask: Any) -> _Sign | None:
        known: _Sign | None = self._signs.get(mask) if isinstance(mask, torch.Tensor) else None
        return known

    def _where(self, call: Call) -> Rectified | None:
        given = {{"self": "input"}.get(name, name): value for name, value in call.named.items()}
        sign = self._sign(given.get("condition"))
        if sign is None:
            return None
        order = (0, 1)[:: sign.side]
        kept, other = (given["input"], given["other"])[:: sign.side]
        if (_is_zero(other) or _comes_from(other, kept)) and self._turned_by(kept, given["condition"]) is not None:
            return Rectified(order)
        if _is_zero(kept) and self._turned_by(other, given["condition"]) is not None:
            return Rectified(order[::-1], turned=True)
        return None

    def _turned_by(self, value: torch.Tensor, mask: Any) -> bool | None:
        """Whether a mask keeps the negative part of ``value``, and not the positive one; None if it is another mask."""
        sign = self._sign(mask)
        if sign is None or not isinstance(value, torch.Tensor) or not value.shape == mask.shape == sign.of.shape:
            return None
        if is_transforming():
            return sign.side < 0  # there are no values to look at; the caller refuses it
        value = value.detach()
        if not torch.equal(value, sign.of) and not torch.equal(value.clamp(min=0), sign.of):
            return None
        rows = mask.detach().bool() if sign.side > 0 else ~mask.detach().bool()
        agrees = bool(((rows == (value > 0)) | (value == 0)).all())
        return sign.side < 0 if agrees else None


def _beside(values: list[Any], turned: Callable[[torch.Tensor, Any], bool | None]) -> Rectified | None:
    """The one of two values that a graph leads to, where the other one makes a rectifier of it."""
    if len(values) != 2:
        return None
    for own, other in ((0, 1), (1, 0)):
        value, beside = values[own], values[other]
        known = isinstance(beside, torch.Tensor) and not beside.requires_grad
        if isinstance(value, torch.Tensor) and value.requires_grad and known:
            found = turned(value, beside)
            if found is not None:
                return Rectified((own,), found)
    return None


def _is_zero(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.requires_grad and not is_transforming() and not bool(value.any())
    return isinstance(value, (int, float)) and value == 0


def _comes_from(value: Any, source: Any) -> bool:
    """Whether ``value`` has no history, or was computed from ``source`` a few steps ago."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return True
    waiting = [] if value.grad_fn is None else [value.grad_fn]
    for _ in range(_STEPS):
        if not waiting:
            return False
        node = waiting.pop(0)
        if node is source.grad_fn or getattr(node, "variable", None) is source:
            return True
        waiting += [before for before, _ in node.next_functions if before is not None]
    return False
