"""Whether a hook has edited a gradient in place, even in ways that autograd does not see.

Autograd counts the edits of a tensor, except those through ``tensor.data`` and through memory that is shared with NumPy
or another library. A hook that asks for one of these is noticed while it runs, and only then the gradients are copied,
to be compared when it is done. A hook that does not costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# What gives access to a tensor's memory without autograd's counter.
_UNCOUNTED = frozenset(
    {
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.data.__set__,  # type: ignore[attr-defined]
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.data_ptr,
        torch.Tensor.storage,
        torch.Tensor.untyped_storage,
    }
)


class Edits(TorchFunctionMode):
    """Watches gradients for as long as a block lasts.

    >>> gradient = torch.ones(2)
    >>> with Edits([gradient]) as edits:
    ...     _ = gradient.data.mul_(3)
    >>> edits.any()
    True
    """

    def __init__(self, gradients: Sequence[Any]) -> None:
        super().__init__()
        self._tensors = [gradient for gradient in gradients if isinstance(gradient, torch.Tensor)]
        self._versions = [tensor._version for tensor in self._tensors]
        self._before: list[torch.Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if self._before is None and func in _UNCOUNTED and self._is_of_a_gradient(args[0]):
            self._before = [tensor.detach().clone() for tensor in self._tensors]
        return func(*args, **(kwargs or {}))

    def any(self) -> bool:
        """Whether one of the gradients has changed."""
        if [tensor._version for tensor in self._tensors] != self._versions:
            return True
        return self._before is not None and not all(map(_same, self._tensors, self._before))

    def _is_of_a_gradient(self, tensor: torch.Tensor) -> bool:
        return any(tensor is gradient or _share_memory(tensor, gradient) for gradient in self._tensors)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or b.layout != torch.strided:
        return False
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _same(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN included."""
    if now.layout != torch.strided:
        return True  # sparse: only edits that autograd counts are known
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    return bool(((now == before) | ((now != now) & (before != before))).all())
