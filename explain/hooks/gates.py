"""Gates for full-backward hooks, on one module or on every one, in place as long as a hook needs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

from explain.hooks.full_backward import FullBackward
from explain.hooks.registered import Flag, OnEveryModule, OnModule, Plain, Scope


class _Removable(Protocol):
    def remove(self) -> None: ...


class Gates(FullBackward):
    """The gates of one module; of every module of ``scope`` that runs, if no module is given.

    They hold nothing of their group: the graph holds them, and the two would keep each other alive forever.
    """

    def __init__(self, thread: int | None, module: nn.Module | None, scope: Scope | None = None) -> None:
        super().__init__()
        self._thread, self._module, self._scope = thread, module, scope
        self._placed: list[_Removable] = []

    def adding(
        self,
        hooks: list[Any],
        fn: Callable[..., Any],
        *,
        prepend: bool = False,
        is_meant: Callable[[], bool] | None = None,
    ) -> Callable[[], _Removable]:
        """Return what adds a hook to one of the lists of hooks when it is called."""

        def add() -> _Removable:
            if is_meant is not None:
                self.meant[fn] = is_meant
            if not self._placed:
                self._place()
            hooks.insert(0 if prepend else len(hooks), fn)
            return _InList(self, hooks, fn)

        return add

    def _place(self) -> None:
        if self._module is not None:
            enter, leave = OnModule(None, self.enter, self._thread), OnModule(None, self.leave, self._thread)
            enter.handle = self._module.register_forward_pre_hook(enter, with_kwargs=True)
            self._placed.append(enter.handle)
            leave.handle = self._module.register_forward_hook(leave)
            self._placed.append(leave.handle)
            return
        assert self._scope is not None
        self._placed.append(BeforeEvery(OnEveryModule(None, self.enter, self._thread, self._scope)))
        out = OnEveryModule(None, self.leave, self._thread, self._scope)
        self._placed.append(global_hooks.register_module_forward_hook(out))

    def displace(self) -> None:
        """Remove the gates; those that calls have passed already stay open."""
        while self._placed:
            self._placed[-1].remove()
            self._placed.pop()
        self.remove()


class _InList:
    """The handle of a hook in a list of its gates."""

    def __init__(self, gates: Gates, hooks: list[Any], fn: Callable[..., Any]) -> None:
        self._gates, self._hooks, self._fn = gates, hooks, fn

    def remove(self) -> None:
        if self._fn in self._hooks:
            self._hooks.remove(self._fn)
        if not (self._gates.hooks or self._gates.pre_hooks):
            self._gates.displace()


class BeforeEvery:
    """A hook before the forward of every module that receives the keyword arguments too.

    PyTorch passes them only to hooks that are noted in the module, even if the hook is one for every module. So a first
    hook makes a note in the module that is about to run, before PyTorch looks there for the second one.
    """

    def __init__(self, hook: OnEveryModule) -> None:
        self._noted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hook = hook
        self._first: RemovableHandle = global_hooks.register_module_forward_pre_hook(Plain(self._note))
        self._second: RemovableHandle = global_hooks.register_module_forward_pre_hook(hook)

    def _note(self, module: nn.Module, args: Any) -> None:
        wanting = module._forward_pre_hooks_with_kwargs
        if self._second.id not in wanting and self._hook.acts_for(module):
            self._noted.add(module)
            Flag(wanting, self._second.id)

    def remove(self) -> None:
        self._second.remove()
        self._first.remove()
        for module in list(self._noted):
            module._forward_pre_hooks_with_kwargs.pop(self._second.id, None)
