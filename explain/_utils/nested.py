"""Finds and replaces tensors in containers of every kind, and names them by their place."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch

from explain._utils.errors import HookError

Path: TypeAlias = tuple[Any, ...]
"""The path to a tensor: positions, keys and names of fields, from the outermost container on."""
Change: TypeAlias = Callable[[Path, torch.Tensor], torch.Tensor]


def items(value: Any) -> list[tuple[Any, Any]]:
    """The items of a mapping, list, tuple or dataclass as pairs of key, position or field name, and
    value, one level deep; empty for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if _is_data(value):
        return [
            (part.name, getattr(value, part.name))
            for part in fields(value)
            if hasattr(value, part.name)
        ]
    return []


def paths(value: Any, start: Path = ()) -> list[tuple[Path, torch.Tensor]]:
    """Return every tensor with the path to it, such as ``('b', 1)``, depth first; ``start`` is the
    path to the value, and so to one that is a tensor itself."""
    if isinstance(value, torch.Tensor):
        return [(start, value)]
    tensors: list[tuple[Path, torch.Tensor]] = []
    for key, inner in items(value):
        if isinstance(inner, torch.Tensor):  # as the next call would, which takes longer
            tensors.append(((*start, key), inner))
        else:
            tensors += paths(inner, (*start, key))
    return tensors


def constants(value: Any) -> Iterator[Any]:
    """Yield everything in nested inputs but tensors and containers: switches, sizes, names and
    keys.
    """
    if not (isinstance(value, (torch.Tensor, Mapping, tuple, list)) or _is_data(value)):
        yield value
    for key, inner in items(value):
        yield key
        yield from constants(inner)


def find(value: Any) -> tuple[Path, torch.Tensor] | None:
    """Return the first tensor with the path to it, preferring those in the fewest containers; None
    if there is none."""
    if isinstance(value, torch.Tensor):
        return (), value
    return min(paths(value), key=lambda tensor: len(tensor[0]), default=None)


def replace(value: Any, change: Change) -> Any:
    """Return a value with each tensor replaced by ``change(path, tensor)``; containers are copied,
    never edited."""
    return _changed(value, (), change, in_place=False, done={})


def edit(value: Any, change: Change) -> Any:
    """Put ``change(path, tensor)`` in the place of each tensor. Lists, mappings and dataclasses
    stay the same objects, as others may hold them; tuples are made again."""
    return _changed(value, (), change, in_place=True, done={})


def with_items(container: Any, values: Iterable[Any]) -> Any:
    """Return a container like this one, with these values instead of its own; raises HookError if
    it cannot be made."""
    if type(container) is tuple:
        return tuple(values)
    try:
        return _made(container, list(values))
    except Exception as error:
        kind = type(container).__name__
        raise HookError(
            f"container of tensors must be a list, dict or dataclass, got {kind}: {error}"
        ) from error


def _changed(
    value: Any, path: Path, change: Change, in_place: bool, done: dict[int, tuple[Any, Any]]
) -> Any:
    """Do `replace` (a copy) or `edit` (``in_place``) for a value at ``path``. ``done`` has each
    finished container by `id` (kept, so that no id is reused): one that occurs twice stays one.
    """
    if isinstance(value, torch.Tensor):
        return change(path, value)
    contents = items(value)
    writable = isinstance(value, (list, MutableMapping))
    if not contents and not writable:
        return value
    if id(value) in done:  # a container that is there twice stays one
        _, result = done[id(value)]
        return result
    values = []
    is_same = True
    for key, inner in contents:
        if isinstance(inner, torch.Tensor):  # as the next call would, which takes longer
            new = change((*path, key), inner)
        else:
            new = _changed(inner, (*path, key), change, in_place, done)
        is_same = is_same and new is inner
        values.append(new)
    if is_same:
        # Of what holds no tensor, lists and mappings are copied too: the receiver may write into
        # these.
        result = copy.copy(value) if writable and not in_place else value
    elif in_place and not isinstance(value, tuple):
        result = _written(value, values)
    else:
        result = with_items(value, values)
    done[id(value)] = value, result
    return result


def _written(container: Any, values: list[Any]) -> Any:
    """Write new values into a container, in the order of `items`, and return it; where it cannot be
    written into, return a new container like it."""
    try:
        for (key, old), new in zip(items(container), values, strict=True):
            if new is old:
                continue
            if isinstance(container, (list, Mapping)):
                container[key] = new  # type: ignore[index]
            else:
                setattr(container, key, new)
    except Exception:  # whatever its class says of that
        return with_items(container, values)
    return container


def _made(original: Any, values: list[Any]) -> Any:
    """A container of the class of ``original``, which stays, with new values in the order of
    `items`. Mappings and dataclasses are copied, since they may have more: attributes, a default.
    """
    if isinstance(original, (tuple, list)):
        # a named tuple, which has fields, takes its values one by one
        return type(original)(*values) if hasattr(original, "_fields") else type(original)(values)
    container = copy.copy(original)
    old_items = items(original)
    content = {key: value for (key, _), value in zip(old_items, values, strict=True)}
    if not isinstance(original, Mapping):
        for name, value in content.items():
            object.__setattr__(container, name, value)  # a frozen one too
        return container
    try:
        for key, value in content.items():
            container[key] = value
    except TypeError:  # a read-only mapping
        return content
    # the shallow copy shares its memory with the original: put the old values back, and make a new
    # one
    if any(original[key] is not value for key, value in old_items):
        for key, value in old_items:
            container[key] = value
        return type(original)(content)  # type: ignore[call-arg]
    return container


def _is_data(value: Any) -> bool:
    """Whether a value is an instance of a dataclass."""
    return is_dataclass(value) and not isinstance(value, type)


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first tensor of a module's output, as `find` does, without its path; None if there
    is none. Hooks take it as the module's activation."""
    return output if isinstance(output, torch.Tensor) else (find(output) or ((), None))[1]


def replace_first(output: Any, new: torch.Tensor) -> Any:
    """Return ``output`` with its first tensor replaced by ``new``, wherever it is; containers stay
    the same objects."""
    old = first_tensor(output)
    if old is None:
        raise HookError(
            f"a module's output must be a tensor or hold one, got {type(output).__name__}"
        )
    return edit(output, lambda path, tensor: new if tensor is old else tensor)


class SwappedInputs:
    """Tensors replaced in a module's inputs for one call; ``pairs`` has each old and new one.
    Containers stay those of the caller, since the module may write into them."""

    def __init__(self, inputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each tensor in ``inputs`` (arguments and keyword arguments) by one call of
        ``change``; lists, mappings and dataclasses are edited until `restore`.
        """
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        args, kwargs = inputs
        # the common case, one tensor alone, needs no walk: there is no container of the caller's
        self._is_one_tensor = not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor)
        if self._is_one_tensor:
            old = args[0]
            new = change(old)
            if new is not old:
                self.pairs.append((old, new))
            self.inputs: Any = (new,), {}
            return
        replacements: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def replaced(path: Path, tensor: torch.Tensor) -> torch.Tensor:
            """Return what takes the place of a tensor: the same for each place where it occurs."""
            if id(tensor) not in replacements:
                replacements[id(tensor)] = tensor, change(tensor)
            _, new = replacements[id(tensor)]
            return new

        self.inputs = edit(inputs, replaced)
        self.pairs = [(old, new) for old, new in replacements.values() if new is not old]

    def restore(self) -> None:
        """Put the old tensors back into the caller's containers, wherever the module has left the
        new ones."""
        if self._is_one_tensor:
            return
        old_by_new_id = {id(new): old for old, new in self.pairs}
        edit(self.inputs, lambda path, tensor: old_by_new_id.get(id(tensor), tensor))


def as_sources(inputs: Iterable[Any]) -> list[Any]:
    """Return a model's inputs with each floating-point tensor replaced by a detached copy that
    requires a gradient: the leaves to which gradients of the input are computed."""
    return [
        x.detach().clone().requires_grad_()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for x in inputs
    ]
