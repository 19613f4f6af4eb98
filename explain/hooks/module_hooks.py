"""Hooks on chosen modules and on every module that runs: before and after their forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

from explain._utils import nested
from explain._utils.errors import HookError, LayerError
from explain._utils.nested import Lent, Loans
from explain._utils.signals import unsplit
from explain.hooks.full_backward import BeforeEvery, Gates
from explain.hooks.guard import Site, guarded_full, guarded_pre, site_of
from explain.hooks.handles import Handle, Hook, Hooks, Removable
from explain.hooks.layer_names import Where
from explain.hooks.registration import Calls, OnEveryModule, OnModule, Scope, answered, registering


class ModuleHooks(Hooks):
    """The kinds of hooks on chosen modules.

    Names may say which call of a layer is meant, counted in each call of the model: ``"conv@1"`` is the second.
    """

    def __init__(self, model: nn.Module | None = None, *, all_threads: bool = False) -> None:
        super().__init__(model, all_threads=all_threads)
        self._gates: dict[nn.Module, Gates] = {}

    def forward_pre(self, where: Where, fn: Hook, *, with_kwargs: bool = False, prepend: bool = False) -> Handle:
        """Call ``fn(module, args)`` before each selected module; what it returns replaces its inputs.

        ``with_kwargs`` makes it ``fn(module, args, kwargs)``, which returns a pair of both; ``prepend`` puts it before
        all other hooks of this kind on the module.
        """
        takes = ("module", "args", "kwargs") if with_kwargs else ("module", "args")
        modules, sites = self._on_modules(where, fn, "forward-pre", takes, places=True)
        registers = [module.register_forward_pre_hook for module in modules]
        return self._watched(modules, sites, registers, fn, with_kwargs=with_kwargs, prepend=prepend)

    def forward(
        self, where: Where, fn: Hook, *, with_kwargs: bool = False, always: bool = False, prepend: bool = False
    ) -> Handle:
        """Call ``fn(module, args, output)`` after each selected module; what it returns replaces ``output``.

        ``with_kwargs`` makes it ``fn(module, args, kwargs, output)``; with ``always`` it is called even if the module
        raised, with ``output=None``; ``prepend`` puts it before all other hooks of this kind on the module.

        Of a name such as ``"conv:input"``, the output is the first tensor that the layer is given: the hook is called
        before the layer, and may return another tensor in its place.
        """
        takes = ("module", "args", "kwargs", "output") if with_kwargs else ("module", "args", "output")
        modules, sites = self._on_modules(where, fn, "forward", takes, places=True)
        options = {"with_kwargs": with_kwargs, "always_call": always, "prepend": prepend}
        return self._watched(modules, sites, [module.register_forward_hook for module in modules], fn, **options)

    def backward_pre(self, where: Where, fn: Hook, *, prepend: bool = False) -> Handle:
        """Call ``fn(module, grad_output)`` before the backward of each selected module; it may return a new one.

        ``prepend`` puts it before the group's other hooks of this kind on the module.
        """
        modules, sites = self._on_modules(where, fn, "backward-pre", ("module", "grad_output"), places=True)
        return self._gated(modules, sites, fn, guarded_pre, lambda gates: gates.pre_hooks, prepend)

    def backward(self, where: Where, fn: Hook, *, prepend: bool = False) -> Handle:
        """Call ``fn(module, grad_input, grad_output)`` when a selected module's gradients are known.

        Both are tuples with a gradient or None for each argument and each output; what is returned replaces
        ``grad_input``. Behind the positional arguments come those keyword arguments that are tensors, in the order of
        the call; behind the outputs, the tensors in containers inside the output. Inputs that require no gradient are
        None. In-place operations inside the module or behind it do no harm. ``prepend`` puts the hook before the
        group's other hooks of this kind on the module.

        An output that the module also passes on in another way, in a list or an attribute, has all its gradients in
        ``grad_output``. Where the output is a view of another tensor, only those come that arrive by what was returned.
        """
        modules, sites = self._on_modules(where, fn, "backward", ("module", "grad_input", "grad_output"), places=True)
        return self._gated(modules, sites, fn, guarded_full, lambda gates: gates.hooks, prepend)

    @unsplit
    def _watched(
        self, modules: list[nn.Module], sites: list[Site], registers: list[Any], fn: Hook, **options: Any
    ) -> Handle:
        """Register a hook on modules or what they are given, and note whether what these are in runs without them."""
        expected = self._expect(sites[0], fn)
        calls = [None if site.call is None else Calls(site.call, site.where) for site in sites]
        if not any(site.of_input for site in sites):
            handle = self._add_on(sites, registers, fn, expected, calls, **options)
        else:
            handle = self._open(sites, expected)
            for module, site, register, only in zip(modules, sites, registers, calls, strict=True):
                if site.of_input:
                    self._put_before(handle, module, site, fn, only, options)
                else:
                    handle.undo.append(
                        registering(partial(register, **options), OnModule(site, fn, self._thread, only))()
                    )
        for module, only in zip(modules, calls, strict=True):
            self._count(handle, module, only)
        if expected is not None:
            for around in self._around(sites[0]):
                note = OnModule(None, expected.note_run, self._thread)
                handle.undo.append(registering(around.register_forward_pre_hook, note)())
        return handle

    def _put_before(
        self, handle: Handle, module: nn.Module, site: Site, fn: Hook, calls: Calls | None, options: dict[str, Any]
    ) -> None:
        """Register a hook on the first tensor that a module is given."""
        loans = Loans()

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            found = nested.find((args, kwargs))
            if found is None:
                raise LayerError(f"{site.where} must be given a tensor, got none; choose another layer")
            first = found[1]
            more = (kwargs,) if options["with_kwargs"] else ()
            made = answered(site, fn, module, args, *more, first)
            if made is not None and not isinstance(made, torch.Tensor):
                raise HookError(f"{site} must return a tensor or None, got {type(made).__name__}")
            return loans.begin(None if made is None else Lent((args, kwargs), lambda t: made if t is first else t))

        before.site = site  # type: ignore[attr-defined]
        hook = OnModule(None, before, self._thread, calls)
        register = partial(module.register_forward_pre_hook, with_kwargs=True, prepend=options["prepend"])
        handle.undo.append(registering(register, hook)())
        handle.undo.append(loans)
        after = OnModule(None, lambda module, args, output: loans.end() and None, self._thread)
        handle.undo.append(registering(module.register_forward_hook, after)())

    @unsplit
    def _gated(
        self,
        modules: list[nn.Module],
        sites: list[Site],
        fn: Hook,
        guarded: Callable[[Site, Hook], Hook],
        hooks: Callable[[Gates], list[Any]],
        prepend: bool,
    ) -> Handle:
        """Register a hook on gradients, at the gates of modules."""
        if any(site.of_input for site in sites):
            raise HookError(
                f"{sites[0]} must be on a layer, got its input; hook the layer's backward, whose grad_input it is"
            )
        gates = [self._gates_of(module) for module in modules]
        calls = [None if site.call is None else Calls(site.call, site.where) for site in sites]
        places = (
            gate.adding(
                hooks(gate), guarded(site, fn), prepend=prepend, is_meant=None if only is None else only.is_meant
            )
            for gate, site, only in zip(gates, sites, calls, strict=True)
        )
        handle = self._add(sites, places, self._expect(sites[0], fn, gates))
        for module, only in zip(modules, calls, strict=True):
            self._count(handle, module, only)
        return handle

    def _count(self, handle: Handle, module: nn.Module, calls: Calls | None) -> None:
        """Count the calls of a module, before all other hooks on it; a call of the model begins again."""
        if calls is None:
            return
        counts = [(module, calls.begin)]
        if self._model is not None and self._model is not module:
            counts.append((self._model, calls.restart))
        for place, count in counts:
            register = partial(place.register_forward_pre_hook, prepend=True)
            handle.undo.append(registering(register, OnModule(None, count, self._thread))())

    def _around(self, site: Site) -> list[nn.Module]:
        """The modules that a layer is in, where only they tell that it was left out.

        Elsewhere autograd tells that something ran. It does not while gradients are off, as where
        `nn.MultiheadAttention` takes its fast path, which calls none of its modules.
        """
        assert self._model is not None
        parts = site.layer.split(".") if site.layer else []
        around = [self._model.get_submodule(".".join(parts[:i])) for i in range(len(parts))]
        if torch.is_grad_enabled() and not isinstance(around[-1] if around else None, nn.MultiheadAttention):
            return []
        return list(dict.fromkeys(around))

    @unsplit
    def lending(
        self,
        where: Where,
        enter: Callable[[nn.Module, Any, Any], Lent | None],
        leave: Callable[[Lent | None, Any], Any] = lambda lent, output: None,
    ) -> Handle:
        """Give a module what ``enter(module, args, kwargs)`` lends it, until its call ends.

        What ``leave(lent, output)`` returns then replaces ``output``.
        """
        loans = Loans()
        handle = self.forward_pre(where, lambda *given: loans.begin(enter(*given)), with_kwargs=True)
        handle.undo.append(loans)
        after = self.forward(where, lambda module, args, output: leave(loans.end(), output))
        handle.undo.append(after)
        return handle

    def _gates_of(self, module: nn.Module) -> Gates:
        """Return the module's one pair of gates, so that all hooks on it fire in the order of their registration."""
        if module not in self._gates:
            self._gates[module] = Gates(self._thread, module)
        return self._gates[module]


_EVERY = "every module"


class EveryModuleHooks(Hooks):
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
