"""What lies before a layer, run once, recorded and replayed: for work that alters only what the layer returns."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from explain._utils.nested import first_tensor
from explain.hooks import HookGroup
from explain.hooks.layer_names import place_of
from explain.hooks.records import Overwriting
from explain.hooks.registration import acting

# What cannot change after it was returned, containers apart.
_FIXED: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, type(None), type(...), type, torch.Size, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip
# Ways to a tensor's memory on which autograd does not see that it is overwritten.
_UNSEEN = {"data", "numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "set_", "data_ptr"}


class ReplayError(RuntimeError):
    """The network does something else than when the tape was made."""


class Tape(TorchFunctionMode):
    """Notes what functional calls of this thread return, until `stop`.

    >>> x = torch.ones(2)
    >>> with Tape() as tape:
    ...     y = x + 1
    >>> tape.stop()
    >>> with Replay(tape):
    ...     x + 1 is y
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []
        self.stopped = False
        self.fits = True
        self._thread = threading.get_ident()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.stopped or acting.depth or threading.get_ident() != self._thread:
            return result
        if isinstance(result, Iterator):
            items = list(result)
            self.calls.append((func, _Items([_weakly(item) for item in items])))
            return iter(items)
        self.fits = self.fits and _can_be_kept(result)
        self.calls.append((func, _weakly(result)))
        return result

    def stop(self) -> None:
        """Keep from now on what is still referred to, and only the shapes of the rest."""
        self.stopped = True
        self.calls = [(func, _kept(result)) for func, result in self.calls]
        found: dict[int, torch.Tensor] = {}
        for _, result in self.calls:
            found.update((id(tensor), tensor) for tensor in _tensors_of(result) if not tensor.is_inference())
        self._versions = [(tensor, tensor._version) for tensor in found.values()]

    def is_intact(self) -> bool:
        """Whether nothing that the tape keeps has been overwritten."""
        return all(tensor._version == version for tensor, version in self._versions)


class Replay(TorchFunctionMode):
    """Returns what a tape noted, in its order, until it is made ``live``.

    Raises:
        ReplayError: another function is called than the one that was noted.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.live = False
        self.leaves_intact = True
        """Whether nothing went past autograd to a tensor's memory, which the tape may keep, behind the layer."""
        self._calls = tape.calls
        self._next = 0
        self._thread = threading.get_ident()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if self.live or threading.get_ident() != self._thread:
            self.leaves_intact = self.leaves_intact and _name(func) not in _UNSEEN
            return func(*args, **(kwargs or {}))
        if acting.depth:
            return func(*args, **(kwargs or {}))
        if self._next >= len(self._calls) or self._calls[self._next][0] != func:
            raise ReplayError(f"another function is called than before: {getattr(func, '__name__', func)}")
        self._next += 1
        return _handed_out(self._calls[self._next - 1][1])


def _name(func: Any) -> str:
    """The name of a function; of a property, the one that it is read by."""
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", "") if getattr(func, "__name__", "") == "__get__" else func.__name__)


def _can_be_kept(result: Any) -> bool:
    if isinstance(result, (tuple, list)):
        return all(map(_can_be_kept, result))
    return isinstance(result, (torch.Tensor, *_FIXED))


def _tensors_of(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors_of(item)


class _Items(list[Any]):
    """What an iterator gave."""


def _handed_out(result: Any) -> Any:
    """A result as a call returns it: lists are new ones, since the network may change them."""
    if isinstance(result, _Items):
        return iter(list(result))
    return list(result) if type(result) is list else result


class _Weak:
    """A tensor that may no longer be needed, and what stands for it then."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._like = tensor.shape, tensor.dtype, tensor.device

    def kept(self) -> torch.Tensor:
        tensor = self._tensor()
        if tensor is not None:
            return tensor
        shape, dtype, device = self._like
        return torch.zeros((), dtype=dtype, device=device).expand(shape)


class _Several:
    """A tuple or list of results; named tuples stay what they are."""

    def __init__(self, results: Any) -> None:
        self._like = type(results)
        self._named = hasattr(results, "_fields") or type(results).__module__ == "torch.return_types"
        self._values = [_weakly(value) for value in results]

    def kept(self) -> Any:
        values = [_kept(value) for value in self._values]
        if self._like.__module__ == "torch.return_types":
            return self._like(values)
        return self._like(*values) if self._named else self._like(values)


def _weakly(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return _Weak(result)
    if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
        return _Several(result)
    return result


def _kept(result: Any) -> Any:
    if isinstance(result, _Items):
        return _Items([_kept(item) for item in result])
    return result.kept() if isinstance(result, (_Weak, _Several)) else result


class ReachedError(BaseException):
    """Ends a forward pass at the layer; no ``except Exception`` of the model catches it."""


class PrefixRecorder:
    """Notes on ``tape`` what happens in a forward pass up to a call of a layer, while the group is alive.

    The pass has to run inside ``with taping.tape``. It ends at the layer, by `ReachedError`, if ``ends`` says so.

    >>> import torch
    >>> model, x = nn.Sequential(nn.ReLU(), nn.Sigmoid()), torch.ones(1)
    >>> with HookGroup(model) as group:
    ...     taping = PrefixRecorder(group, model, "0")
    ...     with taping.tape:
    ...         output = model(x)
    >>> [getattr(func, "__name__", "") for func, _ in taping.tape.calls], taping.made(0) is taping.tape
    (['relu'], True)
    """

    def __init__(self, group: HookGroup, model: nn.Module, layer: str, *, ends: bool = False) -> None:
        self.layer, self.tape = layer, Tape()
        place = place_of(layer, model)
        self._name, self._call, self._ends = place.layer, place.call or 0, ends
        self._calls = 0
        self._overwrites = False
        self._overwriting = Overwriting()
        self._overwriting.watch(group, self._name)
        group.forward(self._name, self._reach)

    def made(self, call: int) -> Tape | None:
        """The tape up to this call of the layer; None where it was not reached, or cannot be replayed.

        Buffers that the network changed have to be as they were found by now; the tape knows them changed.
        """
        fits = self.tape.stopped and self.tape.fits and self.tape.is_intact() and not self._overwrites
        return self.tape if fits and call == self._call else None

    def _reach(self, module: nn.Module, args: Any, output: Any) -> None:
        tensor = first_tensor(output)
        overwrites = tensor is not None and self._overwriting.is_by(self._name, tensor)
        if self._calls == self._call:
            self.tape.stop()
            self._overwrites = overwrites
            if self._ends:
                raise ReachedError
        self._calls += 1
