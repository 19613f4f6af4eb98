"""Records the operations before a layer and replays their results, for work that alters only what
the layer returns."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from explain._utils.nested import first_tensor
from explain.hooks import HookGroup, handles, layer_names
from explain.hooks.tracer import Tracer

PAST_AUTOGRAD = {
    "data",
    "numpy",
    "__array__",
    "__dlpack__",
    "untyped_storage",
    "storage",
    "set_",
    "data_ptr",
}
"""Ways to a tensor's memory on which autograd does not see that it is overwritten."""


def accessed_name(func: Any) -> str:
    """The name of a torch function that a network called; for the getter or setter of an attribute,
    the attribute's name.

    Tapes compare it with `PAST_AUTOGRAD`, the ways on which memory is overwritten unseen.
    """
    name = str(getattr(func, "__name__", ""))
    if name not in ("__get__", "__set__"):
        return name
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


class ReplayError(RuntimeError):
    """The network does something else than when the tape was made."""


class Tape(Tracer):
    """Records what functional calls of this thread return, until `stop`.

    >>> x = torch.ones(2)
    >>> with Tape() as tape:
    ...     y = x + 1
    >>> tape.stop()
    >>> with Replay(tape):
    ...     x + 1 is y
    True
    """

    opens = False

    def __init__(self) -> None:
        """Begin an empty tape of a network's operations; functions of torch are recorded within its
        ``with`` block.

        ``calls`` is in the order of the pass, on which `Replay` relies; ``fits`` turns false at a
        function that a replay cannot stand for.
        """
        super().__init__()
        self.calls: list[tuple[Any, Any, bool]] = []
        """Each function, what it returned, and whether that was an iterator."""
        self.stopped = False
        self.fits = True
        """Whether the calls can be replayed: none is past autograd."""

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one function of torch for the network, and record its result until the tape is
        stopped.

        Calls inside hooks are left out, since a replay has its own. An iterator is recorded as a
        list and handed on as a new iterator. Tensors are held by weak references until `stop`, so
        recording keeps no memory.
        """
        result = func(*args, **kwargs)
        if self.stopped or handles.acting.depth:
            return result
        is_iterator = isinstance(result, Iterator)
        items = list(result) if is_iterator else result
        self.fits = self.fits and accessed_name(func) not in PAST_AUTOGRAD
        self.calls.append((func, tree_map_only(Tensor, _Weak, items), is_iterator))
        return iter(items) if is_iterator else items

    def stop(self) -> None:
        """End the recording; keep the results that something still refers to, and only the shapes
        of all others.

        So the tape holds no more memory than the network needs behind the layer.
        """
        self.stopped = True
        self.calls = [
            (func, tree_map_only(_Weak, _Weak.kept, result), it) for func, result, it in self.calls
        ]
        leaves = {id(leaf): leaf for leaf in tree_leaves([result for _, result, _ in self.calls])}
        tensors = [
            leaf for leaf in leaves.values() if isinstance(leaf, Tensor) and not leaf.is_inference()
        ]
        self._versions = [(tensor, tensor._version) for tensor in tensors]

    def is_intact(self) -> bool:
        """Whether no tensor that the tape keeps has been overwritten since `stop`, by the versions
        of autograd."""
        return all(tensor._version == version for tensor, version in self._versions)


class Replay(Tracer):
    """Returns what a tape recorded, in its order, until it is made ``live``: then functions run.

    Raises:
        ReplayError: another function is called than the one that was recorded.
    """

    opens = False

    def __init__(self, tape: Tape) -> None:
        """Begin at the start of a stopped tape of a network's operations; they are replayed within
        the ``with`` block.

        ``live`` is set to true by the hook of the layer whose output is replaced: from then on
        functions run.
        """
        super().__init__()
        self.live = False
        self._tape = tape
        self._stays_in_autograd = True
        """Whether the network has reached memory only on ways that autograd sees."""
        self._calls = iter(tape.calls)

    def is_intact(self) -> bool:
        """Whether this replay's results can be trusted: no kept tensor was overwritten, as far as
        autograd sees.

        False also if the network reached memory past autograd behind the layer.
        """
        return self._tape.is_intact() and self._stays_in_autograd

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the recorded result of the network's next function instead of running it; run it
        once the replay is ``live``.

        A replay must ask for the same functions in the same order as the tape; arguments are not
        compared. Lists are copied, since the network may change them.
        """
        if self.live and accessed_name(func) in PAST_AUTOGRAD:
            self._stays_in_autograd = False
        if self.live or handles.acting.depth:
            return func(*args, **kwargs)
        recorded_function, result, is_iterator = next(self._calls, (None, None, False))
        if recorded_function is None or recorded_function != func:
            raise ReplayError(
                f"another function is called than before: {getattr(func, '__name__', func)}"
            )
        # lists are copied, as the network may change them
        result = tree_map_only(Tensor, lambda tensor: tensor, result)
        return iter(result) if is_iterator else result


class _Weak:
    """A weak reference to a tensor, and its shape, for when nothing else refers to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._like = tensor.shape, tensor.dtype, tensor.device

    def kept(self) -> Tensor:
        """The tensor while it exists; then zeros of its shape without memory of their own, since
        only the shape is asked for.

        Such zeros must not be read for values: only code before the layer sees them, and its
        results are on the tape.
        """
        tensor = self._tensor()
        if tensor is not None:
            return tensor
        shape, dtype, device = self._like
        return torch.zeros((), dtype=dtype, device=device).expand(shape)


class ReachedError(BaseException):
    """Ends a forward pass at the layer; no ``except Exception`` of the model catches it."""


def at_call(group: HookGroup, layer: str, call: int, act: Callable[[Any, bool], Any]) -> None:
    """Hook one call of a layer so that ``act(output, overwrote)`` replaces what the call returned.

    ``overwrote`` says whether the layer has overwritten its input in place, so that the input is
    the output too. ``act`` returns None to leave the output. For tapes, which stop at the layer,
    and for reruns, which put perturbed feature maps there. The hooks end with the group.
    """
    assert group._model is not None
    name = layer_names.name_of_call(layer, call, group._model)
    inputs: list[tuple[Tensor, int]] = []

    def note_versions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-hook: note how often the layer's first input tensor has been overwritten before the
        call."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        inputs[:] = [
            (tensor, tensor._version) for tensor in tensors[:1] if not tensor.is_inference()
        ]

    def returned(module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: tell by the input's version whether the layer overwrote it, and hand its
        output to ``act``."""
        tensor = first_tensor(output)
        overwrote = any(
            tensor_before is tensor and tensor._version != version
            for tensor_before, version in inputs
        )
        inputs.clear()
        return act(output, overwrote)

    # a part of an attention cannot have overwritten the input
    if not layer_names.place_of(layer, group._model).part:
        group.forward_pre(name, note_versions, with_kwargs=True)
    group.forward(name, returned)


class PrefixRecorder:
    """Records a forward pass on ``tape`` up to a call of a layer, while the group is alive.

    The pass has to run inside ``with recorder.tape``. It ends at the layer, by `ReachedError`, if
    ``ends`` says so.

    >>> model, x = nn.Sequential(nn.ReLU(), nn.Sigmoid()), torch.ones(1)
    >>> with HookGroup(model) as group:
    ...     recorder = PrefixRecorder(group, model, "0")
    ...     with recorder.tape:
    ...         output = model(x)
    >>> [function.__name__ for function, *_ in recorder.tape.calls]
    ['relu']
    >>> recorder.tape_at(0) is recorder.tape
    True
    """

    def __init__(
        self, group: HookGroup, model: nn.Module, layer: str, *, ends: bool = False
    ) -> None:
        """Hook the layer's call, so that the tape stops there; the pass is run by the caller."""
        self.layer = layer
        self.tape = Tape()
        place = layer_names.place_of(layer, model)
        self._call = place.call or 0
        self._ends = ends
        self._overwrites = False
        """Whether the layer overwrites its input: then nothing can be replayed."""
        at_call(group, place.layer, self._call, self._reach)

    def tape_at(self, call: int) -> Tape | None:
        """The tape of the operations up to this call of the layer; None if it was not reached or
        cannot be replayed.

        Buffers that the network changed in the pass have to be put back by now: the tape has them
        as they were changed.
        """
        can_be_replayed = (
            self.tape.stopped and self.tape.fits and self.tape.is_intact() and not self._overwrites
        )
        return self.tape if can_be_replayed and call == self._call else None

    def _reach(self, output: Any, overwrites: bool) -> None:
        """Called with the layer's output: stop the tape, and end the forward pass if ``ends`` was
        asked for.

        Returns nothing, so the output stays.
        """
        self.tape.stop()
        self._overwrites = overwrites
        if self._ends:
            raise ReachedError
