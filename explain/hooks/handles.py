"""Handles of hooks, the list of them that a group keeps, and which of them never fired."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.jit import RecursiveScriptModule  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle

from explain._utils.errors import HookError, LayerError
from explain._utils.signals import unsplit
from explain.hooks.attention_parts import NO_ATTENTION
from explain.hooks.full_backward import Gates
from explain.hooks.guard import Nothing, Registered, Site, site_of
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
        self.undo.append(hook.placed(register))

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
