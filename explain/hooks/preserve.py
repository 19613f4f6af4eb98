"""A model and its caller, left exactly as they were found."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

_lock = threading.Lock()
_users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every submodule in evaluation mode, and give each its own mode back at the end.

    The flags are set one by one rather than with ``model.eval()``: a network that overrides ``train`` to keep some
    part frozen would otherwise not come back as it was. Threads may share modules: a mode comes back when the last of
    those that needed it changed has ended.
    """
    with _lock:
        shared = bool(_users)
        trained = [module for module in model.modules() if module.training or (shared and module in _users)]
        for module in trained:
            module.training = False
            _users[module] = _users.get(module, 0) + 1
    try:
        yield
    finally:
        with _lock:
            for module in trained:
                _users[module] -= 1
                if not _users[module]:
                    del _users[module]
                    module.training = True


@contextmanager
def preserving_rng(devices: list[torch.device]) -> Iterator[None]:
    """Give the random generators of the CPU and of ``devices`` their state back at the end.

    The generators belong to the process: numbers that another thread draws meanwhile are drawn again afterwards.
    """
    cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        yield


@contextmanager
def untouched(model: nn.Module, *, grad: bool = False) -> Iterator[None]:
    """Run a model for inspection: in evaluation mode, gradients as given, outside inference mode; then restore all.

    Parameters, buffers, ``.grad`` and ``requires_grad`` are not restored because nothing here ever writes to them.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(preserving_rng([p.device for p in model.parameters()]))
        stack.enter_context(evaluating(model))
        yield
