"""Tensors in containers of every kind: found, replaced, and named by their place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch

from explain._utils.errors import HookError

Path: TypeAlias = "tuple[Any, ...]"
"""The way to a tensor: positions, keys and names of fields, from the outermost container on."""


def items(value: Any) -> list[tuple[Any, Any]]:
    """Return the items of a container by position, key or field, one level deep; an empty list for anything else.

    >>> items({"a": 1}), items((2, 3)), items(4)
    ([('a', 1)], [(0, 2), (1, 3)], [])
    """
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if _is_data(value):
        return [(each.name, getattr(value, each.name)) for each in fields(value) if hasattr(value, each.name)]
    return []


def paths(value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield every tensor with the way to it; ``()`` is the way to a value that is a tensor itself.

    >>> [path for path, tensor in paths({"a": torch.ones(1), "b": (0, torch.ones(1))})]
    [('a',), ('b', 1)]
    """
    return ((path, leaf) for path, leaf in _leaves(value, ()) if isinstance(leaf, torch.Tensor))


def constants(value: Any) -> Iterator[Any]:
    """Yield everything but tensors and containers: switches, sizes, names, and the keys of containers."""
    if not (isinstance(value, (torch.Tensor, Mapping, tuple, list)) or _is_data(value)):
        yield value
    for key, inner in items(value):
        yield key
        yield from constants(inner)


def find(value: Any) -> tuple[Path, torch.Tensor] | None:
    """Return the first tensor with the way to it, preferring those in the fewest containers; None if there is none.

    >>> find([(torch.ones(2),), "text", torch.ones(3)])
    ((2,), tensor([1., 1., 1.]))
    """
    return min(paths(value), key=lambda found: len(found[0]), default=None)


def replace(value: Any, change: Callable[[Path, torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with each tensor replaced by ``change(path, tensor)``; containers are copied, never edited.

    Raises:
        HookError: a container of a class of its own cannot be made with other contents.

    >>> replace({"a": (torch.ones(1), "text")}, lambda path, tensor: tensor + 1)
    {'a': (tensor([2.]), 'text')}
    """
    return _changed(value, (), change, False, {})


def edit(value: Any, change: Callable[[Path, torch.Tensor], torch.Tensor]) -> Any:
    """Put ``change(path, tensor)`` in the place of each tensor, and return the value.

    Lists, mappings and dataclasses stay the same objects, for others may hold them and write into them. Only those that
    cannot be written into, such as tuples, are made again.

    Raises:
        HookError: a container of a class of its own cannot be made with other contents.

    >>> given = [torch.ones(1), "text"]
    >>> edit(given, lambda path, tensor: tensor + 1) is given, given
    (True, [tensor([2.]), 'text'])
    """
    return _changed(value, (), change, True, {})


def with_items(like: Any, values: Iterable[Any]) -> Any:
    """Return a container like ``like``, with these values instead of its own.

    Raises:
        HookError: its class cannot be made with other contents.

    >>> with_items({"a": 1, "b": 2}, [3, 4])
    {'a': 3, 'b': 4}
    """
    try:
        return _with_items(like, list(values))
    except Exception as error:
        raise HookError(
            f"a container of tensors must be one that can be copied with others in it, got {type(like).__name__} "
            f"({type(error).__name__}: {error}); use a tuple, list, dict or dataclass"
        ) from error


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    inside = items(value)
    if not inside:
        yield path, value
    for key, inner in inside:
        yield from _leaves(inner, (*path, key))


def _changed(
    value: Any,
    path: Path,
    change: Callable[[Path, torch.Tensor], torch.Tensor],
    in_place: bool,
    done: dict[int, tuple[Any, Any]],
) -> Any:
    if isinstance(value, torch.Tensor):
        return change(path, value)
    inside = items(value)
    writable = isinstance(value, (list, MutableMapping))
    if not inside and not writable:
        return value
    if id(value) not in done:  # a container that is there twice stays one
        made = [_changed(inner, (*path, key), change, in_place, done) for key, inner in inside]
        kept = all(new is old for new, (_, old) in zip(made, inside, strict=True))
        # Of what holds no tensor, lists and mappings are copied too: the receiver may write into these.
        if kept:
            result = copy.copy(value) if writable and not in_place else value
        else:
            result = _written(value, made) if in_place else with_items(value, made)
        done[id(value)] = value, result
    return done[id(value)][1]


def _written(into: Any, values: list[Any]) -> Any:
    """Write other values into a container; return another one where it cannot be written into."""
    try:
        for (key, old), new in zip(items(into), values, strict=True):
            if new is old:
                continue
            if isinstance(into, (list, Mapping)):
                into[key] = new  # type: ignore[index]
            else:
                setattr(into, key, new)
    except Exception:  # whatever its class says of that
        return with_items(into, values)
    return into


def _with_items(like: Any, values: list[Any]) -> Any:
    if isinstance(like, Mapping):
        return _mapping(like, dict(zip(like, values, strict=True)))
    if isinstance(like, (tuple, list)):
        return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)
    made = copy.copy(like)
    for (name, _), value in zip(items(like), values, strict=True):
        object.__setattr__(made, name, value)  # a frozen one too
    return made


def _mapping(like: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    """Put new content into a copy, which keeps what else the mapping has: attributes, a default, an order."""
    if type(like) is dict:
        return content
    before = {key: like[key] for key in content}
    try:
        made: Any = copy.copy(like)
        for key, value in content.items():
            made[key] = value
    except TypeError:  # one that does not change
        return content
    if any(like[key] is not value for key, value in before.items()):  # the copy writes into the same memory
        for key, value in before.items():
            made[key] = value
        return type(like)(content)  # type: ignore[call-arg]
    return made


def _is_data(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first tensor of a module's output: the output itself, or the first in its containers."""
    found = find(output)
    return None if found is None else found[1]


def replace_first(output: Any, new: torch.Tensor) -> Any:
    """Return ``output`` with its first tensor replaced by ``new``, wherever it is; containers stay the same objects.

    >>> replace_first((torch.zeros(1), "state"), torch.ones(1))
    (tensor([1.]), 'state')
    """
    old = first_tensor(output)
    if old is None:
        raise HookError(f"a module's output must be a tensor or hold one, got {type(output).__name__}")
    return edit(output, lambda path, tensor: new if tensor is old else tensor)


class Lent:
    """Other tensors in what a module is given, for as long as its call lasts; ``pairs`` has the old ones and the new.

    Containers stay those of the caller, who may see there what the module has put in. `give_back` puts the old tensors
    back, wherever in these the module has left the new ones.

    >>> skips = [torch.zeros(1)]
    >>> lent = Lent((skips,), lambda tensor: tensor + 1)
    >>> lent.inputs[0].append("more")
    >>> print(skips)
    [tensor([1.]), 'more']
    >>> lent.give_back()
    >>> print(skips)
    [tensor([0.]), 'more']
    """

    def __init__(self, inputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def lent(path: Path, tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = tensor, change(tensor)
            return made[id(tensor)][1]

        self.inputs = edit(inputs, lent)
        self.pairs = [(old, new) for old, new in made.values() if new is not old]

    def give_back(self) -> None:
        old = {id(new): old for old, new in self.pairs}
        edit(self.inputs, lambda path, tensor: old.get(id(tensor), tensor))


class Loans:
    """What is lent to the calls of a module that are running, the last one last."""

    def __init__(self) -> None:
        self._running: list[Lent | None] = []

    def begin(self, lent: Lent | None) -> Any:
        """Return what the module is to be given instead of its inputs."""
        self._running.append(lent)
        return None if lent is None else lent.inputs

    def end(self) -> Lent | None:
        """Take back what was lent to the call that has just ended, and return it."""
        lent = self._running.pop() if self._running else None
        if lent is not None:
            lent.give_back()
        return lent

    def remove(self) -> None:
        """Take back what was lent to calls that raised, when the hooks go."""
        while self._running:
            self.end()


def as_sources(inputs: Iterable[Any]) -> list[Any]:
    """Return inputs with each floating-point tensor replaced by a leaf that requires a gradient."""
    leaves = []
    for x in inputs:
        source = isinstance(x, torch.Tensor) and x.is_floating_point()
        leaves.append(x.detach().clone().requires_grad_() if source else x)
    return leaves
