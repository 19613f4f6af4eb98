"""A model, its caller and torch's settings, left exactly as they were found."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

import torch
from torch import nn

from explain._utils.errors import HookError, ModelError
from explain._utils.signals import SignalSafe
from explain.hooks import modes
from explain.hooks.eager import eager
from explain.hooks.unwrap import parameters_of

DEVICES = ("cpu", "cuda")


class TorchState:
    """Gradients, inference mode, mixed precision and function modes of this thread, as they are now.

    >>> before = TorchState()
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


_lock = threading.RLock()
_generators: dict[torch.device, tuple[int, torch.Tensor]] = {}
_here = threading.local()
_used_threads = False


class _PreservingRng(SignalSafe[None]):
    def __init__(self, devices: list[torch.device]) -> None:
        self._devices = [torch.device("cpu"), *sorted({d for d in devices if d.type == "cuda"}, key=str)]
        self._held: list[torch.device] = []

    def begin(self) -> None:
        with _lock:
            for device in self._devices:
                count, state = _generators[device] if device in _generators else (0, _rng_state(device))
                _generators[device] = count + 1, state
                self._held.append(device)

    def end(self, error: BaseException | None) -> None:
        with _lock:
            while self._held:
                device = self._held.pop()
                if device not in _generators:  # a forked child has forgotten it
                    continue
                count, state = _generators.pop(device)
                if count > 1:
                    _generators[device] = count - 1, state
                else:
                    _set_rng_state(state, device)


def preserving_rng(devices: list[torch.device]) -> AbstractContextManager[None]:
    """Give the random generators of the CPU and of ``devices`` their state back at the end.

    The generators belong to the process: numbers that another thread draws meanwhile are drawn again afterwards. Of
    several threads in here, the first one finds the state, and the last one gives it back.
    """
    return _PreservingRng(devices)


def _rng_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


class _Untouched(SignalSafe[None]):
    def __init__(self, model: nn.Module, grad: bool) -> None:
        self._model, self._grad = model, grad
        self._stack, self._modes = ExitStack(), modes.Evaluating(model)

    def begin(self) -> None:
        global _used_threads
        _used_threads = _used_threads or torch.get_num_threads() > 1
        self._stack.callback(setattr, _here, "busy", is_under_way())
        _here.busy = True
        self._stack.push(TorchState().give_back)
        self._stack.enter_context(torch.inference_mode(False))
        self._stack.enter_context(torch.set_grad_enabled(self._grad))
        self._stack.enter_context(eager())
        self._stack.enter_context(preserving_rng([p.device for p in parameters_of(self._model)]))
        self._stack.enter_context(self._modes)

    def end(self, error: BaseException | None) -> None:
        self._stack.__exit__(type(error) if error else None, error, None)
        if isinstance(error, RuntimeError) and "fork-based multiprocessing" in str(error):
            raise ModelError(
                "gradients must be computed in a process that torch can start threads in, but this one was forked "
                "after its parent had computed some; start it with 'spawn' (multiprocessing_context='spawn' for a "
                "DataLoader), or name the layer and use a method without gradients such as scorecam"
            ) from None
        if isinstance(error, HookError) and "autograd.Function with functorch" in str(error):
            raise ModelError(
                "layer must run outside torch.vmap and the other transforms of torch.func for gradients to be taken "
                "there, but it runs inside one; name a layer outside, or use a method for pixels such as saliency"
            ) from None
        if isinstance(error, RuntimeError) and "use_reentrant=True" in str(error):
            raise ModelError(
                "model must not use re-entrant checkpoints where gradients are asked for, which torch allows for "
                ".backward() alone, but it does; turn checkpoints off, which save memory in training only, or use "
                "checkpoint(..., use_reentrant=False)"
            ) from None
        if error is None and self._modes.disturbed:
            raise ModelError(
                "model must stay in evaluation mode while it is explained, but another thread called its train(); "
                "explain a copy of it: explain.hooks.copied(model)"
            )


def untouched(model: nn.Module, *, grad: bool = False) -> AbstractContextManager[None]:
    """Run a model for inspection: in evaluation mode, gradients as given, outside inference mode; then restore all.

    Parameters, buffers, ``.grad`` and ``requires_grad`` are not restored because nothing here ever writes to them.

    Raises:
        ModelError: another thread put the model in training mode meanwhile; or torch refuses to compute gradients in
            this process, which was forked from one that had done so.
    """
    return _Untouched(model, grad)


class _Calculating(SignalSafe[None]):
    def __init__(self, device: str) -> None:
        self._device, self._stack = device, ExitStack()

    def begin(self) -> None:
        self._stack.push(TorchState().give_back)
        self._stack.enter_context(torch.inference_mode(False))
        self._stack.enter_context(torch.no_grad())
        self._stack.enter_context(torch.autocast(self._device, enabled=False))

    def end(self, error: BaseException | None) -> None:
        self._stack.__exit__(type(error) if error else None, error, None)


def calculating(device: str) -> AbstractContextManager[None]:
    """Compute without a graph, and in the precision of the given tensors, in any mode of the caller.

    Tensors that are made here may be changed in place by a model, outside inference mode.

    >>> with calculating("cpu"):
    ...     torch.is_grad_enabled()
    False
    """
    return _Calculating(device)


class _Recording(SignalSafe[None]):
    def __init__(self, grad: bool) -> None:
        self._grad, self._before = grad, torch.is_grad_enabled()

    def begin(self) -> None:
        self._before = torch.is_grad_enabled()
        torch.set_grad_enabled(self._grad)

    def end(self, error: BaseException | None) -> None:
        torch.set_grad_enabled(self._before)


def recording(grad: bool) -> AbstractContextManager[None]:
    """Switch gradients on or off; afterwards they are as they were, even if the block raises or is interrupted.

    ``torch.set_grad_enabled`` does the same, but an interrupt while it ends leaves gradients switched.
    """
    return _Recording(grad)


def is_under_way() -> bool:
    """Whether this thread is inside an `untouched` block."""
    return getattr(_here, "busy", False)


def _begin_child() -> None:
    """Be as if nothing were under way, in a process that has just been forked.

    Threads of OpenMP do not survive a fork, and code that then counts on them waits forever; so, if there may have
    been some, the child computes with one thread, as the workers of a DataLoader do.
    """
    _generators.clear()
    _here.busy = False
    _lock.release()
    if _used_threads:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_child)
