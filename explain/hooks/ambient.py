"""The settings of torch that belong to a thread: noted, and restored after a block that was interrupted.

A block that ends normally has restored its own settings. One that is interrupted may have skipped this: between the
last line of a context's beginning and the first line inside it, for one.
"""

from __future__ import annotations

from types import TracebackType

import torch

DEVICES = ("cpu", "cuda")


class Ambient:
    """Gradients, inference mode, mixed precision and function modes of this thread, as they are now.

    >>> before = Ambient()
    >>> _ = torch.set_grad_enabled(False)
    >>> _ = before.give_back(KeyboardInterrupt)
    >>> torch.is_grad_enabled()
    True
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._function_modes = torch._C._len_torch_function_stack()
        self._nesting = _autocast_nesting()
        self._caching = torch.is_autocast_cache_enabled()
        self._autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES]

    def give_back(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Restore everything if an error ended the block; takes the arguments of ``__exit__``."""
        if kind is None:
            return
        torch.set_grad_enabled(self._grad)
        while torch._C._len_torch_function_stack() > self._function_modes:
            torch._C._pop_torch_function_stack()
        for device, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._caching)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
            if not self._nesting:
                torch.clear_autocast_cache()


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
