"""A model and its caller, left exactly as they were found; and so is a process that is forked meanwhile.

What is under way in a process does not go on in a child forked from it: the threads that would end it stay behind. So
a child begins with its models' modes as they were found, and without hooks of explanations that others are in.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from explain.errors import ModelError

_lock = threading.RLock()
_users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_generators: dict[torch.device, tuple[int, torch.Tensor]] = {}
_here = threading.local()
_used_threads = False


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
                _users[module] = _users.get(module, 1) - 1  # a forked child has forgotten it
                if not _users[module]:
                    del _users[module]
                    module.training = True


@contextmanager
def preserving_rng(devices: list[torch.device]) -> Iterator[None]:
    """Give the random generators of the CPU and of ``devices`` their state back at the end.

    The generators belong to the process: numbers that another thread draws meanwhile are drawn again afterwards. Of
    several threads in here, the first one finds the state, and the last one gives it back.
    """
    used = [torch.device("cpu"), *sorted({d for d in devices if d.type == "cuda"}, key=str)]
    with _lock:
        for device in used:
            count, state = _generators[device] if device in _generators else (0, _rng_state(device))
            _generators[device] = count + 1, state
    try:
        yield
    finally:
        with _lock:
            for device in used:
                if device not in _generators:  # a forked child has forgotten it
                    continue
                count, state = _generators.pop(device)
                if count > 1:
                    _generators[device] = count - 1, state
                else:
                    _set_rng_state(state, device)


def _rng_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


@contextmanager
def untouched(model: nn.Module, *, grad: bool = False) -> Iterator[None]:
    """Run a model for inspection: in evaluation mode, gradients as given, outside inference mode; then restore all.

    Parameters, buffers, ``.grad`` and ``requires_grad`` are not restored because nothing here ever writes to them.

    Raises:
        ModelError: torch refuses to compute gradients in this process, which was forked from one that had done so on
            a machine with a GPU.
    """
    global _used_threads
    _used_threads = _used_threads or torch.get_num_threads() > 1
    with ExitStack() as stack:
        stack.enter_context(_under_way())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(preserving_rng([p.device for p in model.parameters()]))
        stack.enter_context(evaluating(model))
        yield


@contextmanager
def _under_way() -> Iterator[None]:
    before = is_under_way()
    _here.busy = True
    try:
        yield
    except RuntimeError as error:
        if "fork-based multiprocessing" not in str(error):
            raise
        raise ModelError(
            "gradients must be computed in a process that torch can start threads in, but this one was forked after "
            "its parent had computed some; start it with 'spawn' (multiprocessing_context='spawn' for a DataLoader), "
            "or name the layer and use a method without gradients such as scorecam"
        ) from None
    finally:
        _here.busy = before


def is_under_way() -> bool:
    """Whether this thread is inside an `untouched` block."""
    return getattr(_here, "busy", False)


def _begin_child() -> None:
    """Be as if nothing were under way, in a process that has just been forked.

    Threads of OpenMP do not survive a fork, and code that then counts on them waits for ever; so, if there may have
    been some, the child computes with one thread, as the workers of a DataLoader do.
    """
    for module in list(_users):
        module.training = True
    _users.clear()
    _generators.clear()
    _here.busy = False
    _lock.release()
    if _used_threads:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_child)
