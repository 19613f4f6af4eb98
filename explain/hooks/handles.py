"""Handles of hooks, the list of them that a group keeps, and which of them never fired."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.jit import RecursiveScriptModule  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle

from explain._utils.errors import HookError, LayerError
from explain._utils.signals import unsplit
from explain.hooks.full_backward import FullBackward
from explain.hooks.guard import Nothing, Site, site_of
from explain.hooks.layer_names import LayerPlace, Where, place_of, select, select_places
from explain.hooks.registration import Calls, OnModule


class Expected:
    """What there was when a hook was registered: to be compared with what there is when its group closes."""

    __slots__ = ("_calls", "_gates", "_gradient", "_leaf", "_operations", "around_ran", "code")

    def __init__(self, fn: Any, model: nn.Module | None, gates: Sequence[FullBackward] = ()) -> None:
        self.code = getattr(fn, "__code__", id(fn))
        self._operations = torch._C._autograd._get_sequence_nr()
        self._leaf = None if model is None else next((p for p in model.parameters() if p.requires_grad), None)
        self._gradient = self._mark()
        self._gates = gates
        self.around_ran = False
        """Whether a module that the hook's layer is in has run since: set where it is known."""
        self._calls = sum(gate.calls for gate in gates)

    def in_vain(self) -> bool:
        """Whether a module around it ran, this thread has recorded operations, or a gradient was accumulated since."""
        if self.around_ran or torch._C._autograd._get_sequence_nr() != self._operations:
            return True
        now = self._mark()
        return now is not None and now != self._gradient

    def note_run(self, *given: Any) -> None:
        """Note that a module around the hook's layer runs."""
        self.around_ran = True

    def reason(self, direction: str) -> str:
        if direction.startswith("forward"):
            if self.around_ran:
                return (
                    "the module that it is in ran without this call of it (as nn.MultiheadAttention, which reads the "
                    "weights of out_proj itself); hook that module"
                )
            return "the layer did not run after the hook was registered, or did so in another thread"
        if self._gates and sum(gate.calls for gate in self._gates) == self._calls:
            return "its layer did not run after it was registered; register it before the forward pass"
        return "no gradient came to it; keep the group open until the backward pass is done"

    def _mark(self) -> Any:
        gradient = None if self._leaf is None else self._leaf.grad
        return None if gradient is None else (id(gradient), gradient._version)


Hook = Callable[..., Any]


class Removable(Protocol):
    """What PyTorch returns for a registered hook."""

    def remove(self) -> None: ...


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

    __slots__ = ("_owner", "expected", "id", "sites", "undo")

    def __init__(self, sites: Sequence[Site], owner: dict[int, Handle], expected: Expected | None) -> None:
        self.id: int = RemovableHandle.next_id  # of one series with those of PyTorch
        RemovableHandle.next_id += 1
        self.sites = sites
        self.expected = expected
        self.undo: list[Removable] = []
        self._owner = owner
        owner[id(self)] = self

    @property
    def fired(self) -> bool:
        """Whether the hook has been called yet, on any of its places."""
        return any(site.fired for site in self.sites)

    @property
    def removed(self) -> bool:
        """Whether the hook is gone, alone or together with its group."""
        return id(self) not in self._owner

    @unsplit
    def remove(self) -> None:
        """Remove this hook from all its places; calling it again does nothing."""
        self.take_away()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def take_away(self) -> None:
        """Remove it as part of something that no signal splits."""
        while self.undo:
            self.undo[-1].remove()
            self.undo.pop()
        self._owner.pop(id(self), None)

    def kinds(self) -> set[tuple[str, Any]]:
        """What it has in common with hooks of the same function, or on the same place."""
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

    def _open(self, sites: Sequence[Site], expected: Expected | None) -> Handle:
        if self._closed:
            raise HookError(f"group must be open to take {sites[0]}, but it is closed; make a new HookGroup")
        return Handle(sites, self._handles, expected)

    @unsplit
    def _add(
        self, sites: Sequence[Site], registers: Iterable[Callable[[], Removable]], expected: Expected | None = None
    ) -> Handle:
        """Register a hook by calling ``registers``, one for each of its places."""
        handle = self._open(sites, expected)
        for register in registers:
            handle.undo.append(register())
        return handle

    @unsplit
    def _add_on(
        self,
        sites: Sequence[Site],
        registers: Iterable[Callable[..., RemovableHandle]],
        fn: Hook,
        expected: Expected | None = None,
        calls: Sequence[Calls | None] = (),
        **options: Any,
    ) -> Handle:
        """Register a hook that acts for calls of this group's thread, with the method of each module that does it."""
        handle = self._open(sites, expected)
        for site, register, only in zip(sites, registers, calls or [None] * len(sites), strict=True):
            hook = OnModule(site, fn, self._thread, only)
            hook.handle = register(hook, **options)
            handle.undo.append(hook.handle)
        return handle

    def _expect(self, site: Site, fn: Hook, gates: Sequence[FullBackward] = ()) -> Expected | None:
        """Note the present state, to decide later whether a hook should have fired; None for hooks of this package."""
        return None if site.trusted else Expected(fn, self._model, gates)

    def _on_modules(
        self, where: Where, fn: Hook, direction: str, takes: Sequence[str], *, places: bool = False
    ) -> tuple[list[nn.Module], list[Site]]:
        """Return the selected modules, and the site of a hook on each; whether it fits is looked at once.

        With ``places``, names may have the suffixes of `explain.hooks.layer_names`.
        """
        if self._model is None:
            raise HookError(
                "HookGroup() without a model can hook only tensors and Nodes, optimizers, and every module; pass the "
                "model to hook layers"
            )
        modules = self._at_places(self._model, where) if places else select(self._model, where)
        closed = next((name for name, module in modules.items() if isinstance(module, RecursiveScriptModule)), None)
        if closed is not None:
            raise LayerError(
                f"layer {closed!r} must be a module that takes hooks, got a scripted one; put the module that it was "
                "made from in its place, or name another layer"
            )
        first = site_of(fn, f"layer {next(iter(modules))!r}", direction, takes)
        rest = [Site(first.hook, f"layer {name!r}", direction, trusted=first.trusted) for name in list(modules)[1:]]
        for site, name in zip([first, *rest], modules, strict=True):
            place = place_of(name, self._model) if places and _has_suffix(name) else LayerPlace(name)
            site.layer, site.of_input, site.call = place
        return list(modules.values()), [first, *rest]

    @staticmethod
    def _at_places(model: nn.Module, where: Where) -> dict[str, nn.Module]:
        """Select modules by names that may have suffixes, and keep these in the names."""
        if isinstance(where, Iterable) and not isinstance(where, (str, nn.Module, type, dict)):
            where = list(where)
        several = where if isinstance(where, list) else [where]
        if not any(isinstance(each, str) and _has_suffix(each) for each in several):
            return select(model, where)
        return {name: model.get_submodule(place_of(name, model).module) for name in select_places(model, where)}


def _has_suffix(name: str) -> bool:
    return "@" in name or ":" in name


def silent(handles: Iterable[Handle]) -> str | None:
    """Name the hooks that should have fired by now, on one line; None if there are none.

    Of several with the same function, or on the same place, it is enough that one has fired: layers that were not used
    are then no surprise.
    """
    found = list(handles)
    heard = {kind for handle in found if handle.fired for kind in handle.kinds()}
    quiet = [(h, h.expected) for h in found if h.expected is not None and not h.fired and not h.kinds() & heard]
    if not quiet or not (heard or any(expected.in_vain() for _, expected in quiet)):
        return None
    first, expected = quiet[0]
    more = f"; nor did {len(quiet) - 1} more" if len(quiet) > 1 else ""
    return f"{first} never fired: {expected.reason(first.sites[0].direction)}{more}"
