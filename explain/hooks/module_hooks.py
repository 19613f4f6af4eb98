"""Hooks on modules, state dicts and optimizers: their handles, and warnings about those that never fired."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.jit import RecursiveScriptModule  # type: ignore[attr-defined]
from torch.nn.modules import module as global_hooks
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from explain._utils.errors import HookError, LayerError
from explain._utils.nested import SwappedInputs, first_tensor
from explain._utils.signals import unsplit
from explain.hooks.attention_parts import NO_ATTENTION, AttentionTracer
from explain.hooks.full_backward import BeforeEvery, Gates
from explain.hooks.guard import Calls, Nothing, Registered, Scope, Site, answered, guarded, site_of
from explain.hooks.layer_names import Where, find_places
from explain.hooks.unwrap import submodule


class Expected:
    """The state when a hook was registered: compared with the state when its group closes, if it never fired."""

    def __init__(self, fn: Any, model: nn.Module | None, gates: Sequence[Gates] = ()) -> None:
        self.code = getattr(fn, "__code__", id(fn))
        self._operations = torch._C._autograd._get_sequence_nr()
        self._leaf = None if model is None else next((p for p in model.parameters() if p.requires_grad), None)
        self._gradient = self._mark()
        self._gates, self._calls = gates, sum(gate.calls for gate in gates)
        self._ran = False

    def had_a_chance(self) -> bool:
        """Whether the model ran, this thread has recorded operations, or a gradient was accumulated since."""
        recorded = self._ran or torch._C._autograd._get_sequence_nr() != self._operations
        return recorded or self._mark() not in (None, self._gradient)

    def note_run(self, *given: Any) -> None:
        """Note that the model, or what the layer is in, has run: where autograd does not tell."""
        self._ran = True

    def reason(self, site: Site) -> str:
        if site.part not in ("", "input"):  # a part of the attention in it
            return f"the layer did not run, or {NO_ATTENTION}"
        if site.direction.startswith("forward"):
            where = "or did so in another thread, or the module that it is in left it out (as nn.MultiheadAttention)"
            return f"the layer did not run after the hook was registered, {where}"
        if self._gates and sum(gate.calls for gate in self._gates) == self._calls:
            return "its layer did not run after it was registered; register it before the forward pass"
        return "no gradient came to it; keep the group open until the backward pass is done"

    def _mark(self) -> Any:
        gradient = None if self._leaf is None else self._leaf.grad
        return None if gradient is None else (id(gradient), gradient._version)


Hook = Callable[..., Any]


class Handle(Nothing):
    """One hook of a group, on one or more places. As PyTorch's handles, it has an ``id``, and ``with`` removes it.

    The ``id`` is the key of the hook in the dictionary of its module; of several modules, in that of the first.

    >>> from explain.hooks import HookGroup
    >>> with HookGroup(nn.Sequential(nn.ReLU(), nn.ReLU())) as group:
    ...     handle = group.forward(nn.ReLU, lambda module, args, output: None)
    ...     print(handle)
    ...     handle.remove()
    ...     print(handle)
    hook '<lambda>' on layer '0' and 1 more (forward)
    hook '<lambda>' on layer '0' and 1 more (forward), removed
    """

    def __init__(self, sites: Sequence[Site], owner: "dict[int, Handle]", expected: Expected | None) -> None:
        self.id: int = RemovableHandle.next_id  # of one series with those of PyTorch
        RemovableHandle.next_id += 1
        self.sites, self.expected, self._owner = sites, expected, owner
        self.undo: list[Callable[[], None]] = []
        owner[id(self)] = self

    def place(self, register: Callable[[Any], Any], hook: Registered) -> None:
        """Register a hook on one of its places."""
        is_first = not self.undo
        self.undo.append(hook.placed(register))
        if is_first:
            self.id = getattr(hook.handle, "id", self.id)

    @property
    def fired(self) -> bool:
        """Whether the hook has been called yet, on any of its places."""
        return any(site.fired for site in self.sites)

    @property
    def removed(self) -> bool:
        """Whether the hook is gone, alone or together with its group."""
        return id(self) not in self._owner

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def take_away(self) -> None:
        """Remove this hook from all its places; calling it again does nothing."""
        while self.undo:
            self.undo[-1]()
            self.undo.pop()
        self._owner.pop(id(self), None)

    remove = unsplit(take_away)

    def kinds(self) -> set[tuple[str, Any]]:
        """Its functions and places: hooks that share one of these count as one for the warning."""
        own = set() if self.expected is None else {(self.sites[0].direction, self.expected.code)}
        return {(site.direction, site.where) for site in self.sites} | own

    def __repr__(self) -> str:
        first, others = self.sites[0], len(self.sites) - 1
        more = f" and {others} more" if others else ""
        ends = [word for word in ("fired", "removed") if getattr(self, word)]
        return ", ".join([f"hook {first.hook!r} on {first.where}{more} ({first.direction})", *ends])


class Hooks:
    """The handles of a group's hooks, and whose calls they act for; the kinds of hooks are in its subclasses."""

    def __init__(self, model: nn.Module | None = None, *, all_threads: bool = False) -> None:
        self._model = model
        self._handles: dict[int, Handle] = {}
        self._thread = None if all_threads else threading.get_ident()
        self._closed = False

    def __len__(self) -> int:
        """The number of places that hooks of the group are on."""
        return sum(len(handle.sites) for handle in self._handles.values())

    def __repr__(self) -> str:
        name = f"HookGroup({'' if self._model is None else type(self._model).__name__})"
        if self._closed:
            return f"{name}, closed"
        return "\n  ".join([f"{name}, {len(self)} hooks", *map(repr, self._handles.values())])

    def _open(self, sites: Sequence[Site], fn: Hook | None = None, gates: Sequence[Gates] = ()) -> Handle:
        """A handle without a hook; ``fn`` is a hook that should fire, unless it is one of this package."""
        if self._closed:
            raise HookError(f"group must be open to take {sites[0]}, but it is closed; make a new HookGroup")
        expected = None if fn is None or sites[0].trusted else Expected(fn, self._model, gates)
        return Handle(sites, self._handles, expected)

    @unsplit
    def _add(
        self, site: Site, register: Callable[[Any], Any], call: Hook, fn: Hook | None = None, **acts: Any
    ) -> Handle:
        """Register a hook, which ``call`` surrounds; ``fn`` as for `_open`, and ``acts`` says for which calls."""
        handle = self._open([site], fn)
        handle.place(register, Registered(call, site, **acts))
        return handle

    def _on_modules(
        self, where: Where, fn: Hook, direction: str, takes: Sequence[str]
    ) -> tuple[list[nn.Module], list[Site]]:
        """Return the selected modules, and the site of a hook on each; a hook that does not fit is refused at once."""
        if self._model is None:
            raise HookError("HookGroup() without a model cannot hook layers; pass the model to hook layers")
        places = find_places(self._model, where)
        known = where if isinstance(where, dict) else {}
        modules = [known.get(place.module) or submodule(self._model, place.module) for place in places.values()]
        first = site_of(fn, f"layer {next(iter(places))!r}", direction, takes)
        named = [(f"layer {name!r}", place) for name, place in places.items()]
        sites = [replace(first, where=where, layer=p.module, part=p.part, call=p.call) for where, p in named]
        for site, module in zip(sites, modules, strict=True):
            if isinstance(module, RecursiveScriptModule):
                raise LayerError(f"{site.where} must be a module that takes hooks, got a scripted one; name another")
        return modules, sites


def unfired_hooks_message(handles: Iterable[Handle]) -> str | None:
    """Name the hooks that should have fired by now, on one line; None if there are none.

    Of several with the same function, or on the same place, it is enough that one has fired: layers that were not used
    are then no surprise.
    """
    found = list(handles)
    fired = {kind for handle in found if handle.fired for kind in handle.kinds()}
    unfired = [(h, h.expected) for h in found if h.expected is not None and not h.fired and not h.kinds() & fired]
    if not unfired or not (fired or any(expected.had_a_chance() for _, expected in unfired)):
        return None
    first, expected = unfired[0]
    more = f"; nor did {len(unfired) - 1} more" if len(unfired) > 1 else ""
    return f"{first} never fired: {expected.reason(first.sites[0])}{more}"


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
    first = first_tensor((args, kwargs))
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
