"""Hooks as PyTorch is given them: for their own thread and model, and absent from copies of a model.

A model that is copied or pickled takes the hooks registered on it along, and nothing would ever remove those of a copy.
So ours leave a copy as soon as it is complete; in a pickle, a function that does nothing takes their place, one that
every Python knows, so that what is written does not depend on this package.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from explain._utils import nested
from explain._utils.errors import HookError
from explain.hooks.guard import Site, call

_CALL = nn.Module._call_impl.__code__
_does_nothing = contextlib.nullcontext().__exit__  # takes whatever it is given, and returns None


class Registered:
    """A function that PyTorch calls, as a thing that copies and pickles leave behind.

    ``handle`` is what PyTorch returned for it. PyTorch's warning that pickled tensors lose their hooks is not for ours.
    """

    __slots__ = ("_from_public_api", "handle")  # PyTorch marks hooks on state dicts
    __torch_unserializable__ = True

    handle: RemovableHandle

    def __call__(self, *given: Any) -> Any:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        handle = getattr(self, "handle", None)
        if handle is None:  # another thread is just registering it
            return _does_nothing
        _leave_copy(memo, handle.hooks_dict_ref(), handle.id)
        for reference in handle.extra_dict_ref:
            flags = reference()
            if id(flags) not in memo:  # it is copied later than the hooks that it is about
                memo[id(flags)] = copy.copy(flags)
            memo[id(flags)].pop(handle.id, None)
        return _does_nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class Flag:
    """A true value that leaves copies as hooks do: ``flags[number]`` of a hook on every module."""

    def __init__(self, flags: dict[int, Any], number: int) -> None:
        self._flags, self._number = flags, number
        flags[number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> bool:
        _leave_copy(memo, self._flags, self._number)
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (True,)


class _Leaving:
    """Takes the place of a hook out of a copy when it is dropped itself: together with the memo of the copying."""

    def __init__(self, hooks: dict[int, Any], number: int) -> None:
        self._hooks, self._number = hooks, number

    def __del__(self) -> None:
        self._hooks.pop(self._number, None)


def _leave_copy(memo: dict[int, Any], hooks: Any, number: int) -> None:
    """Let a hook go from the copy of ``hooks`` that is being made, as soon as it is complete."""
    if id(hooks) in memo:
        leaving = _Leaving(memo[id(hooks)], number)
        memo[id(leaving)] = leaving


class Plain(Registered):
    """Calls ``fn`` with whatever it is given."""

    __slots__ = ("fn",)

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *given: Any) -> Any:
        return self.fn(*given)


class Acting(threading.local):
    """How many hooks of groups this thread is in: what is called now, the model may not have called."""

    depth = 0


acting = Acting()


class Calls(threading.local):
    """Counts the calls of a module from 0 in each call of its model, and says whether the one that is meant runs."""

    def __init__(self, number: int, where: str) -> None:
        self._number, self._where = number, where
        self._running = -1

    def begin(self, *given: Any) -> None:
        self._running += 1

    def restart(self, *given: Any) -> None:
        self._running = -1

    def is_meant(self) -> bool:
        if torch._C._current_graph_task_id() != -1:
            raise HookError(
                f"hook on {self._where} must be on a layer whose calls run once and in order, but backward runs them "
                "again (a checkpoint); hook all its calls, or leave the checkpoint out"
            )
        return self._running == self._number


class OnModule(Registered):
    """A hook on a module; calls of other threads than ``thread`` pass through untouched, of none if it is None.

    With ``calls``, it acts for one of the module's calls alone.
    """

    __slots__ = ("calls", "fn", "site", "thread")

    def __init__(
        self, site: Site | None, fn: Callable[..., Any], thread: int | None, calls: Calls | None = None
    ) -> None:
        self.site, self.fn, self.thread, self.calls = site, fn, thread, calls

    def __call__(self, *given: Any) -> Any:
        if self.thread is not None and self.thread != threading.get_ident():
            return None
        if self.calls is not None and not self.calls.is_meant():
            return None
        depth = acting.depth
        try:
            acting.depth = depth + 1
            return self.fn(*given) if self.site is None else answered(self.site, self.fn, *given)
        finally:
            acting.depth = depth

    def sites(self) -> list[Site]:
        """The hooks that act here: several where it is a gate for those on gradients."""
        if self.site is not None:
            return [self.site]
        gates = getattr(self.fn, "__self__", self.fn)
        if hasattr(gates, "site"):
            return [gates.site]
        return [hook.site for hook in (*getattr(gates, "pre_hooks", ()), *getattr(gates, "hooks", ()))]

    def __repr__(self) -> str:
        return f"<{', '.join(map(str, self.sites())) or 'hook of explain'}>"


def answered(site: Site, fn: Callable[..., Any], *given: Any) -> Any:
    """Call a hook; copy those of its own tensors that it returns to a forward pass, which may overwrite them."""
    made = call(site, fn, *given)
    if made is None or site.trusted or not site.direction.startswith("forward"):
        return made
    known = {id(tensor) for _, tensor in nested.paths(given)}
    change = nested.edit if any(made is each for each in given) else nested.replace
    return change(made, lambda path, tensor: tensor if id(tensor) in known else tensor.clone())


class Scope:
    """The modules of a model, and all modules that run inside its call; without a model, all modules."""

    def __init__(self, model: nn.Module | None) -> None:
        self._own = None if model is None else set(model.modules())

    def __contains__(self, module: object) -> bool:
        return self._own is None or module in self._own or self._runs_inside(sys._getframe(1))

    def _runs_inside(self, frame: FrameType | None) -> bool:
        """Whether one of the calls that led here is one of the model's: then it made the module itself.

        The calls are read from Python's stack: a count kept by hooks would be wrong after a call that was broken off.
        """
        assert self._own is not None
        while frame is not None:
            if frame.f_code is _CALL and frame.f_locals["self"] in self._own:
                return True
            frame = frame.f_back
        return False


class OnEveryModule(OnModule):
    """A hook on every module of ``scope`` that runs."""

    __slots__ = ("scope",)

    def __init__(self, site: Site | None, fn: Callable[..., Any], thread: int | None, scope: Scope) -> None:
        super().__init__(site, fn, thread)
        self.scope = scope

    def acts_for(self, module: nn.Module) -> bool:
        """Whether a call of this module, in this thread, is one that the hook was made for."""
        return self.thread in (None, threading.get_ident()) and module in self.scope

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        return super().__call__(module, *given) if self.acts_for(module) else None
