"""`Capture`: what a layer gave in one forward pass, and the gradient that came back to it.

Three things make this exact where a plain hook is not. The recorded activation is a copy, taken before a following
in-place operation can overwrite it. The gradient is taken by a full-backward hook on a `Tap`, so the same in-place
operation cannot break it. And when nothing below the layer is being recorded by autograd, the layer's output becomes
the start of the graph: the pass below it runs like plain inference, and backward covers the head alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from explain.errors import HookError, LayerError
from explain.hooks.group import HookGroup, Tap


@dataclass
class Record:
    """One call of one layer: which call of the pass it was, a copy of the output, and the output's gradient."""

    layer: str
    call: int
    activation: torch.Tensor
    source: torch.Tensor | None = field(default=None, repr=False)
    gradient: torch.Tensor | None = None

    def take_gradient(self, gradient: torch.Tensor) -> None:
        # A copy: the tensor that autograd passes may be shared with another branch, and may be reused by it.
        self.gradient = gradient.detach().clone()


class Capture:
    """Records the calls of the named layers while ``group`` is alive; ``records`` has them in the order they happened.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True))
    >>> with torch.no_grad(), HookGroup(model) as group:
    ...     capture = Capture(group, ["0"], gradients=True)
    ...     score = model(torch.ones(1, 1, 4, 4)).sum()
    >>> _ = capture.backward(score)
    >>> capture.records[0].gradient.shape
    torch.Size([1, 2, 2, 2])
    """

    def __init__(self, group: HookGroup, layers: Iterable[str], *, gradients: bool) -> None:
        self.records: list[Record] = []
        self._gradients = gradients
        self._collecting = False
        for name in layers:
            group.forward(name, self._recorder(name))

    @property
    def sources(self) -> list[torch.Tensor]:
        """The graph's side of each record: what to differentiate with respect to, to make the gradients arrive."""
        return [record.source for record in self.records if record.source is not None]

    def backward(
        self, score: torch.Tensor, also: tuple[torch.Tensor, ...] = (), *, retain_graph: bool = False
    ) -> tuple[torch.Tensor | None, ...]:
        """Run backward from a scalar to the captured layers, filling their records; return the gradients of ``also``.

        Nothing is accumulated anywhere: no parameter's ``.grad`` is read or written. A record that the score does not
        depend on keeps ``gradient=None``.
        """
        for record in self.records:
            record.gradient = None
        wanted = [*also, *self.sources]
        if not wanted or not score.requires_grad:
            return (None,) * len(also)
        self._collecting = True
        try:
            found = torch.autograd.grad(score, wanted, retain_graph=retain_graph, allow_unused=True)
        finally:
            self._collecting = False
        return found[: len(also)]

    def release(self) -> None:
        """Drop the graph; activations and gradients stay."""
        for record in self.records:
            record.source = None

    def _recorder(self, name: str) -> Any:
        def record_call(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            call = sum(record.layer == name for record in self.records)
            tensor = first_tensor(output)
            if tensor is None:
                raise LayerError(
                    f"layer {name!r} must return a tensor, got {type(output).__name__}; choose another layer"
                )
            record = Record(name, call, tensor.detach().clone())
            self.records.append(record)
            if not self._gradients:
                return None
            if not tensor.is_floating_point():
                raise LayerError(f"layer {name!r} must return floating-point values, got {tensor.dtype}")
            return replace_first(output, self._tapped(record, tensor))

        return record_call

    def _tapped(self, record: Record, tensor: torch.Tensor) -> torch.Tensor:
        def collect(gradient: torch.Tensor) -> None:
            # The graph may be walked for other reasons as well, under another rule for rectifiers, say.
            if self._collecting:
                record.take_gradient(gradient)

        if torch.is_grad_enabled() and tensor.requires_grad:
            record.source = tensor
        else:
            record.source = record.activation.detach().requires_grad_()
            torch.set_grad_enabled(True)  # the caller's mode comes back when `untouched` ends
        return Tap(collect).through(record.source)


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first tensor of a module's output: the output itself, or the first in a tuple, list or dict."""
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return next((value for value in values if isinstance(value, torch.Tensor)), None)


def replace_first(output: Any, new: torch.Tensor) -> Any:
    """Return ``output`` with its first tensor replaced by ``new``; containers are copied, never edited.

    >>> replace_first((torch.zeros(1), "state"), torch.ones(1))
    (tensor([1.]), 'state')
    """
    if isinstance(output, torch.Tensor):
        return new
    if isinstance(output, dict):
        key = next(key for key, value in output.items() if isinstance(value, torch.Tensor))
        copy = output.copy()
        copy[key] = new
        return copy
    if not isinstance(output, (tuple, list)):
        raise HookError(f"a module's output must be a tensor or hold one, got {type(output).__name__}")
    position = next(i for i, value in enumerate(output) if isinstance(value, torch.Tensor))
    items = [new if i == position else value for i, value in enumerate(output)]
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
