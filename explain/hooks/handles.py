"""Handles of hooks, the list of them that a group keeps, and which of them never fired."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.jit import RecursiveScriptModule  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle

from explain._utils.errors import HookError, LayerError
from explain._utils.signals import unsplit
from explain.hooks.full_backward import Gates, Removable
from explain.hooks.guard import Nothing, Site, site_of
from explain.hooks.layer_names import Where, find_places
from explain.hooks.registration import Registered


class Expected:
    """The state when a hook was registered: compared with the state when its group closes, if it never fired."""

    __slots__ = ("_calls", "_gates", "_gradient", "_leaf", "_operations", "code", "model_ran")

    def __init__(self, fn: Any, model: nn.Module | None, gates: Sequence[Gates] = ()) -> None:
        self.code = getattr(fn, "__code__", id(fn))
        self._operations = torch._C._autograd._get_sequence_nr()
        self._leaf = None if model is None else next((p for p in model.parameters() if p.requires_grad), None)
        self._gradient = self._mark()
        self._gates, self._calls = gates, sum(gate.calls for gate in gates)
        self.model_ran = False
        """Whether the model, or what the layer is in, has run since: where autograd does not tell."""

    def in_vain(self) -> bool:
        """Whether the model ran, this thread has recorded operations, or a gradient was accumulated since."""
        if self.model_ran or torch._C._autograd._get_sequence_nr() != self._operations:
            return True
        now = self._mark()
        return now is not None and now != self._gradient

    def note_run(self, *given: Any) -> None:
        self.model_ran = True

    def reason(self, direction: str) -> str:
        if direction.startswith("forward"):
            return (
                "the layer did not run after the hook was registered, or did so in another thread, or the module that "
                "it is in left it out (as nn.MultiheadAttention, which reads the weights of out_proj itself)"
            )
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

    __slots__ = ("_owner", "expected", "id", "sites", "undo")

    def __init__(self, sites: Sequence[Site], owner: dict[int, Handle], expected: Expected | None) -> None:
        self.id: int = RemovableHandle.next_id  # of one series with those of PyTorch
        RemovableHandle.next_id += 1
        self.sites = sites
        self.expected = expected
        self.undo: list[Removable] = []
        self._owner = owner
        owner[id(self)] = self

    def place(self, register: Callable[[Any], Removable], hook: Any) -> None:
        """Register a hook on one of its places."""
        made = register(hook)
        if isinstance(hook, Registered):
            hook.handle = made  # type: ignore[assignment]
        self.undo.append(made)

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

    def _open(self, sites: Sequence[Site], fn: Hook | None = None, gates: Sequence[Gates] = ()) -> Handle:
        """A handle without a hook; ``fn`` is a hook that should fire, unless it is one of this package."""
        if self._closed:
            raise HookError(f"group must be open to take {sites[0]}, but it is closed; make a new HookGroup")
        expected = None if fn is None or sites[0].trusted else Expected(fn, self._model, gates)
        return Handle(sites, self._handles, expected)

    @unsplit
    def _add(self, site: Site, register: Callable[[Any], Removable], hook: Any, fn: Hook | None = None) -> Handle:
        """Register a hook on one place."""
        handle = self._open([site], fn)
        handle.place(register, hook)
        return handle

    def _on_modules(
        self, where: Where, fn: Hook, direction: str, takes: Sequence[str]
    ) -> tuple[list[nn.Module], list[Site]]:
        """Return the selected modules, and the site of a hook on each; a hook that does not fit is refused at once."""
        if self._model is None:
            raise HookError(
                "HookGroup() without a model can hook only tensors and Nodes, optimizers, and every module; pass the "
                "model to hook layers"
            )
        places = find_places(self._model, where)
        modules = [self._model.get_submodule(place.module) for place in places.values()]
        first = site_of(fn, f"layer {next(iter(places))!r}", direction, takes)
        sites = [first, *(Site(first.hook, f"layer {name!r}", direction, first.trusted) for name in [*places][1:])]
        for site, place, module in zip(sites, places.values(), modules, strict=True):
            site.layer, site.of_input, site.call = place
            if isinstance(module, RecursiveScriptModule):
                raise LayerError(
                    f"{site.where} must be a module that takes hooks, got a scripted one; put the module that it was "
                    "made from in its place, or name another layer"
                )
        return modules, sites


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
