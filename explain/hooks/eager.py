"""Compiled code, run as it was written: compiled code has no layers to hook and no operations to see."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from explain._utils.errors import ModelError
from explain._utils.signals import SignalSafe

_lock = threading.RLock()
_blocks, _setting = 0, None


class _Eager(SignalSafe[None]):
    _counted = False

    def begin(self) -> None:
        global _blocks, _setting
        if "torch._dynamo" not in sys.modules:
            return  # nothing has been compiled yet, and loading the compiler takes seconds
        with _lock:
            if not _blocks:
                try:
                    _setting = torch.compiler.set_stance("force_eager")
                except RuntimeError as error:
                    if "torch.compile region" not in str(error):
                        raise
                    raise ModelError(
                        "an explanation must be started outside code that torch.compile compiles, but it was started "
                        "inside; leave that function uncompiled, or put @torch.compiler.disable on what explains"
                    ) from None
            _blocks += 1
            self._counted = True

    def end(self, error: BaseException | None) -> None:
        global _blocks
        with _lock:
            if self._counted and _blocks:  # a forked child has none
                _blocks -= 1
                if not _blocks:
                    _give_back()
            self._counted = False


def is_transforming() -> bool:
    """Whether this runs inside a transform of `torch.func` (`vmap`, `grad`, `jvp`), where tensors are proxies."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def behind_proxy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a transform of `torch.func` shows as a proxy; any other as it is.

    >>> x = torch.ones(2, 3)
    >>> torch.vmap(lambda row: row * behind_proxy(row).requires_grad)(x.requires_grad_()).sum().item()
    6.0
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def eager() -> AbstractContextManager[None]:
    """Let compiled modules and functions run as the Python code that they were made from, and compile nothing.

    The setting belongs to the process: compiled code of other threads runs uncompiled meanwhile, with the same results.
    The first of several threads sets it, and the last one gives back what was set before.
    """
    return _Eager()


def _give_back() -> None:
    global _setting
    setting: Any = _setting
    if setting is not None:
        setting.__exit__(None, None, None)
    _setting = None


def _begin_child() -> None:
    global _blocks
    _blocks = 0
    _give_back()
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_child)
