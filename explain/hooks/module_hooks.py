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
from explain.hooks.guard import Site, guarded, site_of
from explain.hooks.handles import Handle, Hook, Hooks
from explain.hooks.layer_names import Where
from explain.hooks.registration import Calls, OnEveryModule, OnModule, Scope, answered


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
        return self._on_calls(where, fn, "forward_pre", takes, with_kwargs=with_kwargs, prepend=prepend)

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
        options = {"with_kwargs": with_kwargs, "always_call": always, "prepend": prepend}
        return self._on_calls(where, fn, "forward", takes, **options)

    def backward_pre(self, where: Where, fn: Hook, *, prepend: bool = False) -> Handle:
        """Call ``fn(module, grad_output)`` before the backward of each selected module; it may return a new one.

        ``prepend`` puts it before the group's other hooks of this kind on the module.
        """
        return self._on_gradients(where, fn, "backward-pre", ("module", "grad_output"), prepend)

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
        return self._on_gradients(where, fn, "backward", ("module", "grad_input", "grad_output"), prepend)

    @unsplit
    def _on_calls(self, where: Where, fn: Hook, kind: str, takes: tuple[str, ...], **options: Any) -> Handle:
        """Register a hook on modules, or on the first tensor that they are given."""
        modules, sites = self._on_modules(where, fn, kind.replace("_", "-"), takes)
        handle = self._open(sites, fn)
        for module, site in zip(modules, sites, strict=True):
            only = None if site.call is None else Calls(site.call, site.where)
            if site.of_input:
                self._on_input(handle, module, site, fn, only, options)
            else:
                register = partial(getattr(module, f"register_{kind}_hook"), **options)
                handle.place(register, OnModule(site, fn, self._thread, only))
            self._count(handle, module, only)
        expected = handle.expected
        if expected is not None:
            for around in self._watched(sites[0]):
                handle.place(around.register_forward_pre_hook, OnModule(None, expected.note_run, self._thread))
        return handle

    def _watched(self, site: Site) -> list[nn.Module]:
        """The modules whose calls tell that a hook should have fired, where autograd does not: it records nothing.

        `nn.MultiheadAttention` calls none of its modules on its fast path, which it takes without gradients.
        """
        assert self._model is not None
        parent = self._model.get_submodule(site.layer.rpartition(".")[0]) if site.layer else None
        found = [] if torch.is_grad_enabled() or not site.layer else [self._model]
        return [*found, parent] if isinstance(parent, nn.MultiheadAttention) else found

    def _on_input(
        self, handle: Handle, module: nn.Module, site: Site, fn: Hook, only: Calls | None, options: dict[str, Any]
    ) -> None:
        """Register a hook on the first tensor that a module is given."""
        loans = Loans()

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            first = nested.first_tensor((args, kwargs))
            if first is None:
                raise LayerError(f"{site.where} must be given a tensor, got none; choose another layer")
            more = (kwargs,) if options["with_kwargs"] else ()
            made = answered(site, fn, module, args, *more, first)
            if made is not None and not isinstance(made, torch.Tensor):
                raise HookError(f"{site} must return a tensor or None, got {type(made).__name__}")
            return loans.begin(None if made is None else Lent((args, kwargs), lambda t: made if t is first else t))

        before.site = site  # type: ignore[attr-defined]
        register = partial(module.register_forward_pre_hook, with_kwargs=True, prepend=options["prepend"])
        handle.place(register, OnModule(None, before, self._thread, only))
        handle.undo.append(loans)
        after = OnModule(None, lambda module, args, output: loans.end() and None, self._thread)
        handle.place(module.register_forward_hook, after)

    @unsplit
    def _on_gradients(self, where: Where, fn: Hook, direction: str, takes: tuple[str, ...], prepend: bool) -> Handle:
        """Register a hook on gradients, at the gates of modules; each has one pair, so that hooks fire in order."""
        modules, sites = self._on_modules(where, fn, direction, takes)
        if any(site.of_input for site in sites):
            raise HookError(
                f"{sites[0]} must be on a layer, got its input; hook the layer's backward, whose grad_input it is"
            )
        gates = [self._gates.setdefault(module, Gates(self._thread, module)) for module in modules]
        handle = self._open(sites, fn, gates)
        for module, gate, site in zip(modules, gates, sites, strict=True):
            only = None if site.call is None else Calls(site.call, site.where)
            hooks = gate.hooks if direction == "backward" else gate.pre_hooks
            handle.undo.append(gate.add(hooks, guarded(site, fn), first=prepend, only=only))
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
            handle.place(partial(place.register_forward_pre_hook, prepend=True), OnModule(None, count, self._thread))

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
        register: Any = BeforeEvery if with_kwargs else global_hooks.register_module_forward_pre_hook
        return self._add(site, register, self._bound(site, fn), fn)

    def every_forward(self, fn: Hook, *, with_kwargs: bool = False, always: bool = False) -> Handle:
        """Call ``fn(module, args, output)`` after every module that runs; what it returns replaces ``output``.

        ``with_kwargs`` makes it ``fn(module, args, kwargs, output)``; with ``always`` it is called even if the module
        raised, with ``output=None``.

        Raises:
            HookError: both are requested. PyTorch does not say which keyword arguments a call had that raised.
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

        return self._add(site, register, self._bound(site, fn), fn)

    def every_backward_pre(self, fn: Hook) -> Handle:
        """Call ``fn(module, grad_output)`` before the backward of every module that ran; it may return a new one."""
        return self._on_every_gradient(fn, "backward-pre", ("module", "grad_output"))

    def every_backward(self, fn: Hook) -> Handle:
        """Call ``fn(module, grad_input, grad_output)`` for every module that ran, as backward passes it."""
        return self._on_every_gradient(fn, "backward", ("module", "grad_input", "grad_output"))

    @unsplit
    def _on_every_gradient(self, fn: Hook, direction: str, takes: tuple[str, ...]) -> Handle:
        site = site_of(fn, _EVERY, direction, takes)
        gates = self._every = self._every or Gates(self._thread, None, Scope(self._model))
        handle = self._open([site], fn, [gates])
        hooks = gates.hooks if direction == "backward" else gates.pre_hooks
        handle.undo.append(gates.add(hooks, guarded(site, fn)))
        return handle

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
        return self._add(site, register, self._bound(site, fn))

    def _bound(self, site: Site, fn: Hook) -> OnEveryModule:
        return OnEveryModule(site, fn, self._thread, Scope(self._model))
