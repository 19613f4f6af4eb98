"""Hooks on every module that runs, and on what modules register: submodules, parameters, buffers."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

from explain.errors import HookError
from explain.hooks.gates import BeforeEvery, Gates
from explain.hooks.guard import Site, guarded_full, guarded_pre, site_of
from explain.hooks.handles import Handle, Hook, Hooks, Removable
from explain.hooks.registered import OnEveryModule, Scope, registering

_EVERY = "every module"


class OnEvery(Hooks):
    """The kinds of hooks on every module: of the group's model, those made during its forward pass included.

    Without a model, they are on all modules that run, in any model.
    """

    def __init__(self, model: nn.Module | None = None, *, all_threads: bool = False) -> None:
        super().__init__(model, all_threads=all_threads)
        self._every: Gates | None = None

    def every_forward_pre(self, fn: Hook, *, with_kwargs: bool = False) -> Handle:
        """Call ``fn(module, args)`` before every module that runs; what it returns replaces its inputs.

        ``with_kwargs`` makes it ``fn(module, args, kwargs)``, which returns a pair of both.
        """
        site = site_of(fn, _EVERY, "forward-pre", ("module", "args", "kwargs") if with_kwargs else ("module", "args"))
        hook = self._bound(site, fn)

        def register() -> Removable:
            return BeforeEvery(hook)

        plainly = registering(global_hooks.register_module_forward_pre_hook, hook)
        return self._add([site], [register if with_kwargs else plainly], self._expect(site, fn))

    def every_forward(self, fn: Hook, *, with_kwargs: bool = False, always: bool = False) -> Handle:
        """Call ``fn(module, args, output)`` after every module that runs; what it returns replaces ``output``.

        ``with_kwargs`` makes it ``fn(module, args, kwargs, output)``; with ``always`` it is called even if the module
        raised, with ``output=None``.

        Raises:
            HookError: both are asked for. PyTorch does not say which keyword arguments a call had that raised.
        """
        if with_kwargs and always:
            raise HookError(
                "every_forward() must be called with with_kwargs or always, got both, which PyTorch cannot give; use "
                "forward(nn.Module, ...) for the modules of a model"
            )
        takes = ("module", "args", "kwargs", "output") if with_kwargs else ("module", "args", "output")
        site = site_of(fn, _EVERY, "forward", takes)

        def register(hook: Hook) -> RemovableHandle:
            handle = global_hooks.register_module_forward_hook(hook, with_kwargs=with_kwargs, always_call=always)
            if with_kwargs:  # PyTorch leaves this flag behind, and warns of it when a model is compiled later
                flags = weakref.ref(global_hooks._global_forward_hooks_with_kwargs)
                handle.extra_dict_ref = (*handle.extra_dict_ref, flags)
            return handle

        place = registering(register, self._bound(site, fn))
        return self._add([site], [place], self._expect(site, fn))

    def every_backward_pre(self, fn: Hook) -> Handle:
        """Call ``fn(module, grad_output)`` before the backward of every module that ran; it may return a new one."""
        site = site_of(fn, _EVERY, "backward-pre", ("module", "grad_output"))
        gates = self._every_gates()
        return self._add(
            [site], [gates.adding(gates.pre_hooks, guarded_pre(site, fn))], self._expect(site, fn, [gates])
        )

    def every_backward(self, fn: Hook) -> Handle:
        """Call ``fn(module, grad_input, grad_output)`` for every module that ran, as backward passes it."""
        site = site_of(fn, _EVERY, "backward", ("module", "grad_input", "grad_output"))
        gates = self._every_gates()
        return self._add([site], [gates.adding(gates.hooks, guarded_full(site, fn))], self._expect(site, fn, [gates]))

    def every_submodule(self, fn: Hook) -> Handle:
        """Call ``fn(module, name, submodule)`` when a module is given a submodule; what it returns takes its place."""
        return self._on_registration("submodule", fn, global_hooks.register_module_module_registration_hook)

    def every_parameter(self, fn: Hook) -> Handle:
        """Call ``fn(module, name, parameter)`` when a module is given one; what it returns takes its place."""
        return self._on_registration("parameter", fn, global_hooks.register_module_parameter_registration_hook)

    def every_buffer(self, fn: Hook) -> Handle:
        """Call ``fn(module, name, buffer)`` when a module is given one; what it returns takes its place."""
        return self._on_registration("buffer", fn, global_hooks.register_module_buffer_registration_hook)

    def _on_registration(self, what: str, fn: Hook, register: Any) -> Handle:
        site = site_of(fn, _EVERY, f"new {what}", ("module", "name", what))
        return self._add([site], [registering(register, self._bound(site, fn))])

    def _bound(self, site: Site, fn: Hook) -> OnEveryModule:
        return OnEveryModule(site, fn, self._thread, Scope(self._model))

    def _every_gates(self) -> Gates:
        if self._every is None:
            self._every = Gates(self._thread, None, Scope(self._model))
        return self._every
