"""The kinds of hooks on modules, and warnings about those that never fired."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.jit import RecursiveScriptModule  # type: ignore[attr-defined]

from explain._utils.errors import HookError, LayerError
from explain._utils.nested import SwappedInputs, first_tensor
from explain._utils.signals import unsplit
from explain.hooks.attention_parts import NO_ATTENTION, AttentionTracer
from explain.hooks.full_backward import Gates
from explain.hooks.guard import GradientHook, call_forward, site_of
from explain.hooks.handles import CallCounter, Handle, Hook, Registered, Site
from explain.hooks.layer_names import Where, find_places
from explain.hooks.unwrap import submodule

Enter = Callable[..., SwappedInputs | None]
Leave = Callable[[SwappedInputs | None, Any], Any]


class Hooks:
    """The handles of a group's hooks, and whose calls they act for; the kinds of hooks are in its subclasses."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._handles: dict[Handle, None] = {}
        self._thread = threading.get_ident()
        self._closed = False
        self._signs_at_first_hook: Any = None
        """See `_signs_of_work`; None as long as no hook has been registered that should fire."""

    def __len__(self) -> int:
        """The number of places that hooks of the group are on."""
        return sum(len(handle.sites) for handle in self._handles)

    def __repr__(self) -> str:
        name = f"HookGroup({'' if self._model is None else type(self._model).__name__})"
        if self._closed:
            return f"{name}, closed"
        return "\n  ".join([f"{name}, {len(self)} hooks", *map(repr, self._handles)])

    def _open(self, sites: Sequence[Site]) -> Handle:
        """A handle without a hook."""
        if self._closed:
            raise HookError(f"group must be open to take {sites[0]}, but it is closed; make a new HookGroup")
        if self._signs_at_first_hook is None and not sites[0].trusted:
            self._signs_at_first_hook = self._signs_of_work()
        return Handle(sites, self._handles)

    @unsplit
    def _add(self, site: Site, register: Callable[[Any], Any], fn: Hook) -> Handle:
        handle = self._open([site])
        handle.place(register, Registered(fn, [site]))
        return handle

    def _signs_of_work(self) -> Any:
        """What changes when this thread records operations, or when a gradient of the model is accumulated."""
        parameters = () if self._model is None else self._model.parameters()
        leaf = next((parameter for parameter in parameters if parameter.requires_grad), None)
        gradient = None if leaf is None else leaf.grad
        version = None if gradient is None else (id(gradient), gradient._version)
        return torch._C._autograd._get_sequence_nr(), version

    def unfired_hooks_message(self) -> str | None:
        """Name the hooks that should have fired by now, on one line; None if there are none, or nothing has run.

        Of several with the same function, or on the same place, it is enough that one has fired: layers that were not
        used are then no surprise.
        """
        expected = [handle for handle in self._handles if not handle.sites[0].trusted]
        fired = {kind for handle in self._handles if handle.fired for kind in _kinds(handle)}
        unfired = [handle for handle in expected if not handle.fired and not _kinds(handle) & fired]
        if not unfired or not (fired or self._signs_of_work() != self._signs_at_first_hook):
            return None
        more = f"; nor did {len(unfired) - 1} more" if len(unfired) > 1 else ""
        return f"{unfired[0]} never fired: {self._reason(unfired[0].sites[0])}{more}"

    def _reason(self, site: Site) -> str:
        return "no gradient came to it; keep the group open until the backward pass is done"


def _kinds(handle: Handle) -> set[tuple[str, Any]]:
    """A hook's places and function: hooks that share one of these count as one for the warning."""
    first = handle.sites[0]
    return {(site.direction, site.where) for site in handle.sites} | {(first.direction, first.code)}


class ModuleHooks(Hooks):
    """The kinds of hooks on modules.

    Names may say which call of a layer is meant, counted in each call of the model: ``"conv@1"`` is the second.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(model)
        self._gates: dict[nn.Module, Gates] = {}

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
    def swap_inputs(self, where: Where, enter: Enter, leave: Leave) -> Handle:
        """Replace tensors in a module's inputs until its call ends, as ``enter(module, args, kwargs)`` says.

        What ``leave(swapped, output)`` returns replaces ``output``.
        """
        modules, sites = self._select(where, enter, "forward", ("module", "args", "kwargs"))
        handle = self._open(sites)
        for module in modules:
            self._swap(handle, module, enter, leave)
        return handle

    def _select(
        self, where: Where, fn: Hook, direction: str, takes: Sequence[str]
    ) -> tuple[list[nn.Module], list[Site]]:
        """Return the selected modules, and the site of a hook on each; a hook that does not fit is refused at once."""
        if self._model is None:
            raise HookError("HookGroup() without a model cannot hook layers; pass the model to hook layers")
        places = find_places(self._model, where)
        selected = where if isinstance(where, dict) else {}
        first = site_of(fn, f"layer {next(iter(places))!r}", direction, takes)
        modules: list[nn.Module] = []
        sites: list[Site] = []
        for name, place in places.items():
            module = selected.get(place.module) or submodule(self._model, place.module)
            if isinstance(module, RecursiveScriptModule):
                raise LayerError(f"layer {name!r} must be a module that takes hooks, got a scripted one; name another")
            modules.append(module)
            here = f"layer {name!r}"
            sites.append(replace(first, where=here, layer=place.module, part=place.part, call=place.call))
        return modules, sites

    @unsplit
    def _on_calls(self, where: Where, fn: Hook, kind: str, *, with_kwargs: bool, **options: Any) -> Handle:
        """Register a hook on modules, on the first tensor that they are given, or on the attention inside them."""
        takes = ["module", "args"]
        if with_kwargs:
            takes.append("kwargs")
        if kind == "forward":
            takes.append("output")
        modules, sites = self._select(where, fn, kind.replace("_", "-"), takes)
        handle = self._open(sites)
        for module, site in zip(modules, sites, strict=True):
            counter = None if site.call is None else CallCounter(site.call, site.where)
            if site.part == "input":
                enter = partial(_replace_first, site, fn, with_kwargs)
                self._swap(handle, module, enter, site=site, counter=counter, prepend=options["prepend"])
            elif site.part:
                self._on_attention(handle, module, site, fn, counter)
            else:
                register = partial(getattr(module, f"register_{kind}_hook"), with_kwargs=with_kwargs, **options)
                handle.place(register, Registered(partial(call_forward, site, fn), [site], self._thread, counter))
            self._count(handle, module, counter)
        return handle

    def _on_attention(
        self, handle: Handle, module: nn.Module, site: Site, fn: Hook, counter: CallCounter | None
    ) -> None:
        """Register a hook on a part of the attention inside a module."""
        running = ExitStack()

        def begin(module: nn.Module, args: Any) -> None:
            running.close()  # of a call that was broken off
            edit = partial(call_forward, site, fn, module, args)
            running.enter_context(AttentionTracer(module, {site.part: edit}))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            running.close()

        handle.place(module.register_forward_pre_hook, Registered(begin, [site], self._thread, counter))
        register = partial(module.register_forward_hook, always_call=True)
        handle.place(register, Registered(end, (), self._thread))
        handle.undo.append(running.close)

    @unsplit
    def _on_gradients(self, where: Where, fn: Hook, direction: str, takes: tuple[str, ...], prepend: bool) -> Handle:
        """Register a hook on gradients, at the gates of modules; each has one pair, so that hooks fire in order."""
        modules, sites = self._select(where, fn, direction, takes)
        if any(site.part for site in sites):
            raise HookError(f"{sites[0]} must be on a layer's output, got another part; hook the layer, and grad_input")
        handle = self._open(sites)
        for module, site in zip(modules, sites, strict=True):
            gates = self._gates.setdefault(module, Gates(self._thread, module))
            counter = None if site.call is None else CallCounter(site.call, site.where)
            handle.undo.append(gates.add(GradientHook(site, fn, counter), direction, first=prepend))
            self._count(handle, module, counter)
        return handle

    def _count(self, handle: Handle, module: nn.Module, counter: CallCounter | None) -> None:
        """Count the calls of a module, before all other hooks on it; a call of the model begins again."""
        if counter is None or self._model is None:
            return
        first = partial(module.register_forward_pre_hook, prepend=True)
        handle.place(first, Registered(counter.begin, (), self._thread))
        if module is not self._model:
            first = partial(self._model.register_forward_pre_hook, prepend=True)
            handle.place(first, Registered(counter.restart, (), self._thread))

    def _swap(
        self,
        handle: Handle,
        module: nn.Module,
        enter: Enter,
        leave: Leave = lambda swapped, output: None,
        *,
        site: Site | None = None,
        counter: CallCounter | None = None,
        prepend: bool = False,
    ) -> None:
        running: list[SwappedInputs | None] = []

        def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
            swapped = enter(module, args, kwargs)
            running.append(swapped)
            return None if swapped is None else swapped.inputs

        def end() -> SwappedInputs | None:
            swapped = running.pop() if running else None
            if swapped is not None:
                swapped.restore()
            return swapped

        def end_all() -> None:  # of calls that raised, too
            while running:
                end()

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return leave(end(), output)

        register = partial(module.register_forward_pre_hook, with_kwargs=True, prepend=prepend)
        handle.place(register, Registered(begin, () if site is None else [site], self._thread, counter))
        handle.undo.append(end_all)
        handle.place(module.register_forward_hook, Registered(after, (), self._thread))

    def _reason(self, site: Site) -> str:
        if site.part not in ("", "input"):
            return f"the layer did not run, or {NO_ATTENTION}"
        if site.direction.startswith("forward"):
            where = "or did so in another thread, or the module that it is in left it out (as nn.MultiheadAttention)"
            return f"the layer did not run after the hook was registered, {where}"
        if self._model is not None and site.direction.startswith("backward"):
            gates = self._gates[submodule(self._model, site.layer)]
            if not gates.calls:
                return "its layer did not run after it was registered; register it before the forward pass"
        return super()._reason(site)


def _replace_first(
    site: Site, fn: Hook, with_kwargs: bool, module: nn.Module, args: Any, kwargs: Any
) -> SwappedInputs | None:
    """Call a hook on the first tensor that a module is given; give the module what it returns."""
    first = first_tensor((args, kwargs))
    if first is None:
        raise LayerError(f"{site.where} must be given a tensor, got none; choose another layer")
    arguments = (module, args, kwargs, first) if with_kwargs else (module, args, first)
    new = call_forward(site, fn, *arguments)
    if new is None:
        return None
    if not isinstance(new, torch.Tensor):
        raise HookError(f"{site} must return a tensor or None, got {type(new).__name__}")
    return SwappedInputs((args, kwargs), lambda tensor: new if tensor is first else tensor)
