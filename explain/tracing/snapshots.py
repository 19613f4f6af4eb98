"""What a forward pass keeps of its tensors as they were, and what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from explain.tracing.calls import Call, TensorMap, storage_of


class Snapshot:
    """A tensor as it was when it was noted, and whether something has used it.

    A result that a rectifier has overwritten at once is ``rectified``: known where it was positive, and no gradient
    comes back elsewhere. One that can be computed ``again`` is recomputed after it has been overwritten.
    ``unsigned`` says that a rectifier has made it, so that no value is negative, and that no gradient passes where one
    is zero.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        *,
        is_result: bool = False,
        unsigned: bool = False,
        again: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self._tensor: torch.Tensor | None = tensor
        self.is_result, self.unsigned, self.again = is_result, unsigned, again
        self.used = self.rectified = False

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            assert self.again is not None
            return self.again()
        return self._tensor

    @property
    def shape(self) -> torch.Size | None:
        return None if self._tensor is None else self._tensor.shape

    def overwriting(self) -> None:
        """Prepare for the tensor to be overwritten."""
        self._tensor = None if self.again is not None or self._tensor is None else self._tensor.clone()


class Snapshots:
    """Keeps tensors, and copies those that are about to be overwritten."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Snapshot]] = {}

    def keep(self, tensor: torch.Tensor, **more: Any) -> Snapshot:
        kept = Snapshot(tensor.detach(), **more)
        self._kept.setdefault(storage_of(tensor), []).append(kept)
        return kept

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            for kept in self._kept.get(storage_of(tensor), ()):
                kept.used = True

    def overwriting(self, tensor: torch.Tensor, kind: str) -> None:
        """Take copies of what is about to be overwritten; a result that is rectified at once is left alone."""
        where, left = storage_of(tensor), []
        for kept in self._kept.pop(where, ()):
            if kind == "relu" and kept.is_result and not kept.used and kept.shape == tensor.shape:
                kept.rectified = True
                left.append(kept)
            else:
                kept.overwriting()
        if left:
            self._kept[where] = left


class NonNegative:
    """The tensors that rectifiers have made, also where they were pooled, joined, added or laid out in another shape.

    None of their values is negative; and where one is zero, the rectifiers let no gradient back.
    """

    def __init__(self) -> None:
        self._versions = TensorMap[int]()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self._versions.get(tensor) == tensor._version

    def see(self, call: Call, result: Any) -> None:
        """Note what a call has made."""
        if not isinstance(result, torch.Tensor) or not (call.name == "relu" or call.info.has("keeps sign")):
            return
        if call.name == "relu" or all(tensor in self for tensor in call.tensors):
            self._versions[result] = result._version
