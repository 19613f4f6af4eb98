"""Hooks on modules, before and after their forward and backward; on state dicts, and on the steps of optimizers."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from explain._utils import nested
from explain._utils.errors import HookError, LayerError
from explain._utils.nested import SwappedInputs
from explain._utils.signals import unsplit
from explain.hooks.attention_parts import AttentionTracer
from explain.hooks.full_backward import BeforeEvery, Gates
from explain.hooks.guard import Calls, Registered, Scope, Site, answered, guarded, site_of
from explain.hooks.handles import Handle, Hook, Hooks
from explain.hooks.layer_names import Where
from explain.hooks.unwrap import submodule

_EVERY = "every module"
Leave = Callable[[SwappedInputs | None, Any], Any]


class ModuleHooks(Hooks):
    """The kinds of hooks on chosen modules, and on every module that runs.

    Names may say which call of a layer is meant, counted in each call of the model: ``"conv@1"`` is the second. Every
    module means those of the group's model, those made during its forward pass included; without a model, all modules.
    """

    def __init__(self, model: nn.Module | None = None, *, all_threads: bool = False) -> None:
        super().__init__(model, all_threads=all_threads)
        self._gates: dict[nn.Module, Gates] = {}
        self._every: Gates | None = None

    def forward_pre(self, where: Where, fn: Hook, *, with_kwargs: bool = False, prepend: bool = False) -> Handle:
        """Call ``fn(module, args)`` before each selected module; what it returns replaces its inputs.

        ``with_kwargs`` makes it ``fn(module, args, kwargs)``, which returns a pair of both; ``prepend`` puts it before
        all other hooks of this kind on the module.
        """
        return self._on_calls(where, fn, "forward_pre", with_kwargs=with_kwargs, prepend=prepend)

    def forward(
        self, where: Where, fn: Hook, *, with_kwargs: bool = False, always: bool = False, prepend: bool = False
    ) -> Handle:
        """Call ``fn(module, args, output)`` after each selected module; what it returns replaces ``output``.

        ``with_kwargs`` makes it ``fn(module, args, kwargs, output)``; with ``always`` it is called even if the module
        raised, with ``output=None``; ``prepend`` puts it before all other hooks of this kind on the module.

        Of a name such as ``"conv:input"``, the output is the first tensor that the layer is given: the hook is called
        before the layer, and may return another tensor in its place. ``"attn:q"``, ``:k``, ``:v``, ``:pattern`` and
        ``:heads`` are the parts of the attention that is computed inside the layer, by a module, a function or a fused
        kernel: queries, keys, values, attention weights, and the result of each head.
        """
        return self._on_calls(where, fn, "forward", with_kwargs=with_kwargs, always_call=always, prepend=prepend)

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
    def _on_calls(self, where: Where, fn: Hook, kind: str, **options: Any) -> Handle:
        """Register a hook on modules, or on the first tensor that they are given."""
        modules, sites = self._on_modules(where, fn, kind.replace("_", "-"), _takes(kind, options["with_kwargs"]))
        handle = self._open(sites, fn)
        for module, site in zip(modules, sites, strict=True):
            only = _only(site)
            if site.part == "input":
                enter = partial(_replace_first, site, fn, options["with_kwargs"])
                self._swap(handle, module, enter, site=site, calls=only, prepend=options["prepend"])
            elif site.part:
                self._on_attention(handle, module, site, fn, only)
            else:
                register = partial(getattr(module, f"register_{kind}_hook"), **options)
                handle.place(register, Registered(partial(answered, site, fn), site, self._thread, only))
            self._count(handle, module, only)
        if handle.expected is not None:
            note = handle.expected.note_run
            for around in self._watched(sites[0]):
                handle.place(around.register_forward_pre_hook, Registered(note, thread=self._thread))
        return handle

    def _watched(self, site: Site) -> list[nn.Module]:
        """The modules whose calls tell that a hook should have fired, where autograd does not: it records nothing.

        `nn.MultiheadAttention` calls none of its modules on its fast path, which it takes without gradients.
        """
        assert self._model is not None
        parent = submodule(self._model, site.layer.rpartition(".")[0]) if site.layer else None
        found = [] if torch.is_grad_enabled() or not site.layer else [self._model]
        return [*found, parent] if isinstance(parent, nn.MultiheadAttention) else found

    def _on_attention(self, handle: Handle, module: nn.Module, site: Site, fn: Hook, only: Calls | None) -> None:
        """Register a hook on a part of the attention inside a module."""
        running = ExitStack()

        def begin(module: nn.Module, args: Any) -> None:
            running.close()  # of a call that was broken off
            running.enter_context(AttentionTracer(module, {site.part: partial(answered, site, fn, module, args)}))

        end = Registered(lambda *given: running.close(), thread=self._thread)
        handle.place(module.register_forward_pre_hook, Registered(begin, site, self._thread, only))
        handle.place(partial(module.register_forward_hook, always_call=True), end)
        handle.undo.append(running.close)

    @unsplit
    def _on_gradients(self, where: Where, fn: Hook, direction: str, takes: tuple[str, ...], prepend: bool) -> Handle:
        """Register a hook on gradients, at the gates of modules; each has one pair, so that hooks fire in order."""
        modules, sites = self._on_modules(where, fn, direction, takes)
        if any(site.part for site in sites):
            raise HookError(f"{sites[0]} must be on a layer's output, got another part; hook the layer, and grad_input")
        gates = [self._gates.setdefault(module, Gates(self._thread, module)) for module in modules]
        handle = self._open(sites, fn, gates)
        for module, gate, site in zip(modules, gates, sites, strict=True):
            only = _only(site)
            hooks = gate.hooks if direction == "backward" else gate.pre_hooks
            handle.undo.append(gate.add(hooks, guarded(site, fn), first=prepend, only=only))
            self._count(handle, module, only)
        return handle

    def _count(self, handle: Handle, module: nn.Module, calls: Calls | None) -> None:
        """Count the calls of a module, before all other hooks on it; a call of the model begins again."""
        if calls is None:
            return
        assert self._model is not None
        counts = {module: calls.begin} if self._model is module else {module: calls.begin, self._model: calls.restart}
        for place, count in counts.items():
            handle.place(partial(place.register_forward_pre_hook, prepend=True), Registered(count, thread=self._thread))

    @unsplit
    def swap_inputs(self, where: Where, enter: Callable[..., SwappedInputs | None], leave: Leave) -> Handle:
        """Replace tensors in a module's inputs until its call ends, as ``enter(module, args, kwargs)`` says.

        What ``leave(swapped, output)`` returns replaces ``output``.
        """
        modules, sites = self._on_modules(where, enter, "forward", ("module", "args", "kwargs"))
        handle = self._open(sites)
        for module in modules:
            self._swap(handle, module, enter, leave)
        return handle

    def _swap(
        self, handle: Handle, module: nn.Module, enter: Callable[..., SwappedInputs | None],
        leave: Leave = lambda swapped, output: None, *, prepend: bool = False, **acts: Any,
    ) -> None:  # fmt: skip
        running: list[SwappedInputs | None] = []

        def begin(*given: Any) -> Any:
            running.append(enter(*given))
            return None if running[-1] is None else running[-1].inputs

        def end() -> SwappedInputs | None:
            swapped = running.pop() if running else None
            if swapped is not None:
                swapped.restore()
            return swapped

        def end_all() -> None:  # of calls that raised, too
            while running:
                end()

        before = Registered(begin, thread=self._thread, **acts)
        handle.place(partial(module.register_forward_pre_hook, with_kwargs=True, prepend=prepend), before)
        handle.undo.append(end_all)
        after = Registered(lambda module, args, output: leave(end(), output), thread=self._thread)
        handle.place(module.register_forward_hook, after)

    def every_forward_pre(self, fn: Hook, *, with_kwargs: bool = False) -> Handle:
        """Call ``fn(module, args)`` before every module that runs; what it returns replaces its inputs.

        ``with_kwargs`` makes it ``fn(module, args, kwargs)``, which returns a pair of both.
        """
        site = site_of(fn, _EVERY, "forward-pre", _takes("forward_pre", with_kwargs))
        register: Any = BeforeEvery if with_kwargs else global_hooks.register_module_forward_pre_hook
        return self._on_every(site, register, fn)

    def every_forward(self, fn: Hook, *, with_kwargs: bool = False, always: bool = False) -> Handle:
        """Call ``fn(module, args, output)`` after every module that runs; what it returns replaces ``output``.

        ``with_kwargs`` makes it ``fn(module, args, kwargs, output)``; with ``always`` it is called even if the module
        raised, with ``output=None``.

        Raises:
            HookError: both are requested. PyTorch does not say which keyword arguments a call had that raised.
        """
        if with_kwargs and always:
            raise HookError("every_forward() must have with_kwargs or always, got both; use forward(nn.Module, ...)")
        site = site_of(fn, _EVERY, "forward", _takes("forward", with_kwargs))

        def register(hook: Hook) -> Any:
            handle = global_hooks.register_module_forward_hook(hook, with_kwargs=with_kwargs, always_call=always)
            if with_kwargs:  # PyTorch leaves this flag behind, and warns of it when a model is compiled later
                flags = weakref.ref(global_hooks._global_forward_hooks_with_kwargs)
                handle.extra_dict_ref = (*handle.extra_dict_ref, flags)
            return handle

        return self._on_every(site, register, fn)

    def every_backward_pre(self, fn: Hook) -> Handle:
        """Call ``fn(module, grad_output)`` before the backward of every module that ran; it may return a new one."""
        return self._on_every_gradient(fn, "backward-pre", "module", "grad_output")

    def every_backward(self, fn: Hook) -> Handle:
        """Call ``fn(module, grad_input, grad_output)`` for every module that ran, as backward passes it."""
        return self._on_every_gradient(fn, "backward", "module", "grad_input", "grad_output")

    @unsplit
    def _on_every_gradient(self, fn: Hook, direction: str, *takes: str) -> Handle:
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
        return self._on_every(site, register, fn, is_expected=False)

    def _on_every(self, site: Site, register: Any, fn: Hook, *, is_expected: bool = True) -> Handle:
        acts = {"thread": self._thread, "scope": Scope(self._model)}
        return self._add(site, register, partial(answered, site, fn), fn if is_expected else None, **acts)


def _takes(kind: str, with_kwargs: bool) -> tuple[str, ...]:
    return ("module", "args", *["kwargs"] * with_kwargs, *["output"] * (kind == "forward"))


def _only(site: Site) -> Calls | None:
    return None if site.call is None else Calls(site.call, site.where)


def _replace_first(
    site: Site, fn: Hook, with_kwargs: bool, module: nn.Module, args: Any, kwargs: Any
) -> SwappedInputs | None:
    """Call a hook on the first tensor that a module is given; give the module what it returns."""
    first = nested.first_tensor((args, kwargs))
    if first is None:
        raise LayerError(f"{site.where} must be given a tensor, got none; choose another layer")
    made = answered(site, fn, module, args, *((kwargs,) if with_kwargs else ()), first)
    if made is not None and not isinstance(made, torch.Tensor):
        raise HookError(f"{site} must return a tensor or None, got {type(made).__name__}")
    return None if made is None else SwappedInputs((args, kwargs), lambda tensor: made if tensor is first else tensor)


_STEP = ("optimizer", "args", "kwargs")


class StateHooks(Hooks):
    """The kinds of hooks on state dicts, of modules and optimizers, and on optimizers' steps.

    Like those on modules, they let the calls of other threads pass.
    """

    def state_dict_pre(self, where: Where | Optimizer, fn: Hook) -> Handle:
        """Call ``fn(module, prefix, keep_vars)`` before a module writes its state; of an optimizer, ``fn(optimizer)``.

        A module writes its own part of a state dict, and its submodules write theirs: ``""`` is the whole model.
        """
        return self._on_state(where, fn, "state_dict_pre", ("module", "prefix", "keep_vars"), ("optimizer",))

    def state_dict(self, where: Where | Optimizer, fn: Hook) -> Handle:
        """Call ``fn(module, state_dict, prefix, local_metadata)`` when a module has written its state.

        It may edit the state dict, and returns None. Of an optimizer, it is ``fn(optimizer, state_dict)``, and what it
        returns replaces the state dict.
        """
        takes = ("module", "state_dict", "prefix", "local_metadata")
        return self._on_state(where, fn, "state_dict_post", takes, ("optimizer", "state_dict"))

    def load_state_dict_pre(self, where: Where | Optimizer, fn: Hook) -> Handle:
        """Call ``fn`` before a module reads its state, which it may edit.

        It takes ``(module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)``. Of
        an optimizer, it is ``fn(optimizer, state_dict)``, and what it returns replaces the state dict.
        """
        keys = ("missing_keys", "unexpected_keys", "error_msgs")
        takes = ("module", "state_dict", "prefix", "local_metadata", "strict", *keys)
        return self._on_state(where, fn, "load_state_dict_pre", takes, ("optimizer", "state_dict"))

    def load_state_dict(self, where: Where | Optimizer, fn: Hook) -> Handle:
        """Call ``fn(module, incompatible_keys)`` when a module has read its state; of an optimizer, ``fn(optimizer)``.

        It may edit the lists ``incompatible_keys.missing_keys`` and ``.unexpected_keys``.
        """
        return self._on_state(where, fn, "load_state_dict_post", ("module", "incompatible_keys"), ("optimizer",))

    def step_pre(self, optimizer: Optimizer, fn: Hook) -> Handle:
        """Call ``fn(optimizer, args, kwargs)`` before each step; a pair that it returns replaces both."""
        return self._on_optimizer(optimizer, fn, "step_pre", _STEP)

    def step(self, optimizer: Optimizer, fn: Hook) -> Handle:
        """Call ``fn(optimizer, args, kwargs)`` after each step."""
        return self._on_optimizer(optimizer, fn, "step_post", _STEP)

    def every_step_pre(self, fn: Hook) -> Handle:
        """Call ``fn(optimizer, args, kwargs)`` before each step of every optimizer; a pair replaces both."""
        site = site_of(fn, "every optimizer", "before every step", _STEP)
        return self._at_once([site], [optimizers.register_optimizer_step_pre_hook], fn)

    def every_step(self, fn: Hook) -> Handle:
        """Call ``fn(optimizer, args, kwargs)`` after each step of every optimizer."""
        site = site_of(fn, "every optimizer", "after every step", _STEP)
        return self._at_once([site], [optimizers.register_optimizer_step_post_hook], fn)

    def _on_state(
        self, where: Where | Optimizer, fn: Hook, kind: str, of_module: tuple[str, ...], of_optimizer: tuple[str, ...]
    ) -> Handle:
        if isinstance(where, Optimizer):
            return self._on_optimizer(where, fn, kind, of_optimizer)
        modules, sites = self._on_modules(where, fn, _plain(kind), of_module)
        return self._at_once(sites, [getattr(module, f"register_{kind}_hook") for module in modules], fn)

    def _on_optimizer(self, optimizer: Optimizer, fn: Hook, kind: str, takes: tuple[str, ...]) -> Handle:
        if not isinstance(optimizer, Optimizer):
            raise HookError(f"optimizer must be an Optimizer, got {type(optimizer).__name__}; every_step() is for all")
        site = site_of(fn, type(optimizer).__name__, _plain(kind), takes)
        return self._at_once([site], [getattr(optimizer, f"register_{kind}_hook")], fn)

    @unsplit
    def _at_once(self, sites: list[Site], registers: list[Any], fn: Hook) -> Handle:
        handle = self._open(sites)
        for site, register in zip(sites, registers, strict=True):
            handle.place(register, Registered(partial(answered, site, fn), site, self._thread))
        return handle


def _plain(kind: str) -> str:
    return kind.removesuffix("_post").replace("_", " ").replace(" pre", "-pre")
