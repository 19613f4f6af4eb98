"""A model, its caller and torch's settings, left exactly as they were found; compiled code run as it was written."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from explain._utils.errors import HookError, ModelError
from explain._utils.signals import signal_safe
from explain.hooks.modes import evaluating
from explain.hooks.unwrap import parameters_of

DEVICES = ("cpu", "cuda")
_lock = threading.RLock()
_here = threading.local()
_used_threads = False
_generators: dict[torch.device, tuple[int, torch.Tensor]] = {}
_eager_blocks, _stance = 0, None

_REMEDIES = {
    "fork-based multiprocessing": (
        "gradients must be computed in a process that torch can start threads in, but this one was forked after its "
        "parent had computed some; start it with 'spawn' (multiprocessing_context='spawn' for a DataLoader), or name "
        "the layer and use a method without gradients such as scorecam"
    ),
    "autograd.Function with functorch": (
        "layer must run outside torch.vmap and the other transforms of torch.func for gradients to be taken there, but "
        "it runs inside one; name a layer outside, or use a method for pixels such as saliency"
    ),
    "use_reentrant=True": (
        "model must not use re-entrant checkpoints where gradients are computed, which torch allows for .backward() "
        "alone, but it does; turn checkpoints off, which save memory in training only, or use "
        "checkpoint(..., use_reentrant=False)"
    ),
}
"""What to do about errors of torch, by a part of their messages."""


@contextmanager
def _restoring_torch() -> Iterator[None]:
    """Restore gradients, mixed precision and function modes of this thread if an error ends the block."""
    grad, function_modes = torch.is_grad_enabled(), torch._C._len_torch_function_stack()
    nesting, caching = _autocast_nesting(), torch.is_autocast_cache_enabled()
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES]
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(grad)
        while torch._C._len_torch_function_stack() > function_modes:
            torch._C._pop_torch_function_stack()
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(caching)
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
            if not nesting:
                torch.clear_autocast_cache()
        raise


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@signal_safe
def preserving_rng(devices: list[torch.device]) -> Iterator[None]:
    """Give the random generators of the CPU and of ``devices`` their state back at the end.

    The generators belong to the process: numbers that another thread draws meanwhile are drawn again afterwards. Of
    several threads in here, the first one notes the state, and the last one restores it.
    """
    held = [torch.device("cpu"), *sorted({d for d in devices if d.type == "cuda"}, key=str)]
    with _lock:
        for device in held:
            count, state = _generators[device] if device in _generators else (0, _rng_state(device))
            _generators[device] = count + 1, state
    try:
        yield
    finally:
        with _lock:
            for device in held:
                if device not in _generators:  # a forked child has none
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


@signal_safe
def eager() -> Iterator[None]:
    """Let compiled modules and functions run as the Python code that they were made from, and compile nothing.

    Compiled code has no layers to hook and no operations to record. The setting belongs to the process: compiled code
    of other threads runs uncompiled meanwhile, with the same results. The first of several threads sets it, and the
    last one restores it.
    """
    global _eager_blocks, _stance
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled yet, and loading the compiler takes seconds
        yield
        return
    with _lock:
        if not _eager_blocks:
            try:  # not in a function of its own: torch.compile would look into it
                _stance = torch.compiler.set_stance("force_eager")
            except RuntimeError as error:
                if "torch.compile region" not in str(error):
                    raise
                raise ModelError(
                    "an explanation must be started outside code that torch.compile compiles, but it was started "
                    "inside; leave that function uncompiled, or put @torch.compiler.disable on what explains"
                ) from None
        _eager_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _eager_blocks = max(0, _eager_blocks - 1)  # a forked child has none
            if not _eager_blocks:
                _restore_stance()


def _restore_stance() -> None:
    global _stance
    stance: Any = _stance
    if stance is not None:
        stance.__exit__(None, None, None)
    _stance = None


@signal_safe
def untouched(model: nn.Module, *, grad: bool = False) -> Iterator[None]:
    """Run a model for inspection: in evaluation mode, gradients as given, outside inference mode; then restore all.

    Parameters, buffers, ``.grad`` and ``requires_grad`` are not restored because nothing here ever writes to them.

    Raises:
        ModelError: another thread put the model in training mode meanwhile; or torch refuses to compute gradients in
            this process, which was forked from one that had done so.
    """
    global _used_threads
    _used_threads = _used_threads or torch.get_num_threads() > 1
    rng = preserving_rng([p.device for p in parameters_of(model)])
    outer, _here.busy = is_under_way(), True
    try:
        with (
            _restoring_torch(),
            torch.inference_mode(False),
            recording(grad),
            eager(),
            rng,
            evaluating(model) as disturbed,
        ):
            yield
    except (RuntimeError, HookError) as error:
        remedy = next((_REMEDIES[part] for part in _REMEDIES if part in str(error)), None)
        if remedy is None:
            raise
        raise ModelError(remedy) from None
    finally:
        _here.busy = outer
    if disturbed:
        raise ModelError(
            "model must stay in evaluation mode while it is explained, but another thread called its train(); explain "
            "a copy of it: explain.hooks.copied(model)"
        )


@signal_safe
def calculating(device: str) -> Iterator[None]:
    """Compute without a graph, and in the precision of the given tensors, in any mode of the caller.

    Tensors that are made here may be changed in place by a model, outside inference mode.

    >>> with calculating("cpu"):
    ...     torch.is_grad_enabled()
    False
    """
    with _restoring_torch(), torch.inference_mode(False), recording(False), torch.autocast(device, enabled=False):
        yield


@signal_safe
def recording(grad: bool) -> Iterator[None]:
    """Switch gradients on or off; afterwards they are as they were, even if the block raises or is interrupted.

    ``torch.set_grad_enabled`` does the same, but an interrupt while it ends leaves gradients switched.
    """
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(grad)
    try:
        yield
    finally:
        torch.set_grad_enabled(before)


def is_under_way() -> bool:
    """Whether this thread is inside an `untouched` block."""
    return getattr(_here, "busy", False)


def is_transforming() -> bool:
    """Whether this runs inside a transform of `torch.func` (`vmap`, `grad`, `jvp`), where tensors are proxies."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def without_proxy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a transform of `torch.func` shows as a proxy; any other as it is.

    >>> x = torch.ones(2, 3)
    >>> torch.vmap(lambda row: row * without_proxy(row).requires_grad)(x.requires_grad_()).sum().item()
    6.0
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _begin_child() -> None:
    """Be as if nothing were under way, in a process that has just been forked.

    Threads of OpenMP do not survive a fork, and code that then counts on them waits forever; so, if there may have
    been some, the child computes with one thread, as the workers of a DataLoader do.
    """
    global _eager_blocks
    _generators.clear()
    _here.busy, _eager_blocks = False, 0
    _restore_stance()
    _lock.release()
    if _used_threads:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_child)
