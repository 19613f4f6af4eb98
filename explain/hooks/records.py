"""`Capture`: what a layer gave in one forward pass, and the gradient that came back to it.

Three things make this exact where a plain hook is not. The recorded activation is a copy, taken before a following
in-place operation can overwrite it. The gradient is taken by a full-backward hook on a `Tap`, so the same in-place
operation cannot break it. And when nothing below the layer is being recorded by autograd, the layer's output becomes
the start of the graph: the pass below it runs like plain inference, and backward covers the head alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.hooks import BackwardHook

from explain.errors import LayerError
from explain.hooks.group import HookGroup
from explain.hooks.select import Where, select
from explain.hooks.structure import first_tensor, replace_first
from explain.interrupts import Unsplit

T = TypeVar("T")


class Tap(nn.Module):
    """A pass-through module that carries a full-backward hook in place of the layer whose output it is given.

    PyTorch's full-backward hooks turn the tensors that they watch into views, and an in-place operation on such a view
    is an error. A hook on the layer itself would therefore break every network whose next step is
    ``ReLU(inplace=True)`` or ``x += shortcut``. The tap takes the hook, and hands on a copy that may be overwritten.
    """

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()

        def full_backward(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
            changed = None if grad_output[0] is None else fn(grad_output[0])
            return None if changed is None else (changed,)

        self.register_full_backward_hook(full_backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def through(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``x``, laid out as it is, whose gradient passes through the hook on its way back.

        The hook is set up as a call of the module would do it, but nothing is called: hooks that the user has
        registered for every module are for the user's modules, and this is none of them.
        """
        hook: Any = BackwardHook(self, list(self._backward_hooks.values()), [])
        (watched,) = hook.setup_input_hook((x,))
        # Not clone(): the hook makes a view, whose strides may differ from those of ``x`` where a dimension has size 1,
        # and some backward kernels (batch normalisation, channels last) go by them.
        return torch.empty_like(x).copy_(hook.setup_output_hook(watched))


@dataclass(eq=False)
class Record:
    """One call of one layer: which call of the pass it was, a copy of the output, and the output's gradient.

    It holds nothing of the graph: a hook in the graph holds it, and the two would keep each other alive for ever, since
    the garbage collector does not see through autograd.
    """

    layer: str
    call: int
    activation: torch.Tensor
    gradient: torch.Tensor | None = None

    def take_gradient(self, gradient: torch.Tensor) -> None:
        # A copy: the tensor that autograd passes may be shared with another branch, and may be reused by it.
        self.gradient = gradient.detach().clone()


class Capture:
    """Records the calls of the named layers while ``group`` is alive; ``records`` has them in the order they happened.

    ``gradients`` says whether gradients are recorded too, or names the layers that they are recorded for. With ``cut``,
    the first of these that runs while gradients are off begins the graph; to others, none comes back.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True))
    >>> with torch.no_grad(), HookGroup(model) as group:
    ...     capture = Capture(group, ["0"], gradients=True)
    ...     score = model(torch.ones(1, 1, 4, 4)).sum()
    >>> _ = capture.backward(score)
    >>> capture.records[0].gradient.shape
    torch.Size([1, 2, 2, 2])
    """

    def __init__(
        self, group: HookGroup, layers: Iterable[str], *, gradients: bool | Collection[str], cut: bool = True
    ) -> None:
        self.records: list[Record] = []
        self.misses = False
        """Whether gradients may be missing: those that come to a layer by an older name of what it overwrote, and those
        of what the model did after it turned gradients off again that the graph had begun with."""
        self._cut = cut
        self.sources: list[torch.Tensor] = []
        """The graph's side of each record with gradients: differentiating with respect to them makes these arrive."""
        names = list(layers)
        self._differentiated = frozenset((names if gradients else ()) if isinstance(gradients, bool) else gradients)
        self._paused: list[bool] = []  # shared with hooks in the graph, which must not hold the capture itself
        self._overwriting = Overwriting()
        if self._differentiated and cut and not torch.is_grad_enabled():
            group.forward("", self._end_pass)
        for name in names:
            self._overwriting.watch(group, name)
            group.forward(name, self._recorder(name))

    @property
    def activations(self) -> dict[str, torch.Tensor]:
        """The output of each layer that ran, by name; of the last call, if it ran several times."""
        return {record.layer: record.activation for record in self.records}

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradient of each output that the last backward pass reached, by layer."""
        return {record.layer: record.gradient for record in self.records if record.gradient is not None}

    def of_call(self, layer: str, number: int | None = None) -> Record | None:
        """Return the record of a layer's call, counted from 0; of its last, if no number is given."""
        calls = [record for record in self.records if record.layer == layer]
        if number is None:
            return calls[-1] if calls else None
        return calls[number] if number < len(calls) else None

    def source_of(self, record: Record) -> torch.Tensor:
        """The graph's side of a record with gradients."""
        with_gradients = [each for each in self.records if each.layer in self._differentiated]
        return self.sources[with_gradients.index(record)]

    def backward(
        self, score: torch.Tensor, also: tuple[torch.Tensor, ...] = (), *, retain_graph: bool = False
    ) -> tuple[torch.Tensor | None, ...]:
        """Run backward from a scalar to the captured layers, filling their records; return the gradients of ``also``.

        Nothing is accumulated anywhere: no parameter's ``.grad`` is read or written. A record that the score does not
        depend on keeps ``gradient=None``.
        """
        for record in self.records:
            record.gradient = None
        wanted = [*also, *self.sources]
        if not wanted or not score.requires_grad:
            return (None,) * len(also)
        found = torch.autograd.grad(score, wanted, retain_graph=retain_graph, allow_unused=True)
        return found[: len(also)]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients pass without recording them: the graph may be walked for other reasons as well."""
        self._paused.append(True)
        try:
            yield
        finally:
            self._paused.pop()

    def _end_pass(self, module: nn.Module, args: Any, output: Any) -> None:
        """See whether the graph that a layer has begun goes on to the end: a model that switches gradients itself gives
        the mode back that it found, which was off."""
        self.misses |= bool(self.sources) and not torch.is_grad_enabled()

    def _recorder(self, name: str) -> Any:
        def record_call(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            call = sum(record.layer == name for record in self.records)
            tensor = first_tensor(output)
            if tensor is None:
                raise LayerError(
                    f"layer {name!r} must return a tensor, got {type(output).__name__}; choose another layer"
                )
            record = Record(name, call, tensor.detach().clone())
            self.records.append(record)
            if name not in self._differentiated:
                return None
            if not tensor.is_floating_point():
                raise LayerError(
                    f"layer {name!r} must return floating-point values, got {tensor.dtype}; choose another"
                )
            overwritten = self._overwriting.is_by(name, tensor)
            tapped = self._tapped(record, tensor.clone() if overwritten else tensor)
            if overwritten and _put_into(tensor, tapped):
                return None
            self.misses |= overwritten
            return replace_first(output, tapped)

        return record_call

    def _tapped(self, record: Record, tensor: torch.Tensor) -> torch.Tensor:
        paused = self._paused

        def collect(gradient: torch.Tensor) -> None:
            if not paused:
                record.take_gradient(gradient)

        if torch.is_grad_enabled() and tensor.requires_grad:
            self.sources.append(tensor)
            return Tap(collect).through(tensor)
        self.sources.append(record.activation.detach().requires_grad_())
        if not torch.is_grad_enabled():
            if not self._cut:
                return tensor  # the network itself has turned gradients off here: none comes back
            self._cut = False  # a graph begins but once
            torch.set_grad_enabled(True)  # the caller's mode comes back when `untouched` ends
        return Tap(collect).through(self.sources[-1])


class Overwriting:
    """Tells whether a module overwrote its input, so that what it gives goes by an older name too."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[torch.Tensor, int]] = {}

    def watch(self, group: HookGroup, name: str) -> None:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            if first is not None and not first.is_inference():
                self._given[name] = first, first._version

        group.forward_pre(name, note, with_kwargs=True)

    def is_by(self, name: str, output: torch.Tensor) -> bool:
        """Whether this output of a module is its input, overwritten; asked once, when it has returned."""
        given, version = self._given.pop(name, (None, 0))
        return given is output and output._version != version


def cut_where_allowed(run: Callable[[bool], T]) -> T:
    """Run a forward pass with ``cut=True``, and where autograd forbids that, once more without."""
    try:
        return run(True)
    except RuntimeError as error:
        if not forbids_cut(error):
            raise
    return run(False)


def forbids_cut(error: RuntimeError) -> bool:
    """Whether a forward pass failed because gradients were off at its start and on at its end.

    Autograd refuses to overwrite, with gradients on, a view that was made while they were off.
    """
    return "view was created in no_grad mode" in str(error)


def _put_into(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """Give a tensor the history of ``values``, which are its own; whether autograd lets it have one."""
    try:
        with _unsafe_preserve_version_counter(tensor):  # nothing is lost for those who saved it
            tensor.copy_(values)
    except RuntimeError as error:
        if not forbids_cut(error):
            raise
        return False
    return True


class _Capturing(Unsplit[Capture]):
    def __init__(self, model: nn.Module, layers: Where, gradients: bool) -> None:
        self._model, self._layers, self._gradients = model, layers, gradients
        self._group, self._mode = HookGroup(model), torch.is_grad_enabled()

    def begin(self) -> Capture:
        self._mode = torch.is_grad_enabled()
        self._group.begin()
        return Capture(self._group, select(self._model, self._layers), gradients=self._gradients)

    def end(self, error: BaseException | None) -> None:
        self._group.end(error)
        torch.set_grad_enabled(self._mode)


def capture(model: nn.Module, layers: Where, *, gradients: bool = True) -> AbstractContextManager[Capture]:
    """Record what the layers give inside the block, and the gradients that come back to them, inside it or later.

    Args:
        model: any module.
        layers: names, patterns, modules or classes; see `select`.
        gradients: also record gradients. Where nothing is being recorded by autograd, the graph begins at the layer.

    Raises:
        LayerError: a layer is not in the model, or gives no tensor.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    >>> with capture(model, nn.ReLU) as seen:
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> seen.activations["1"].shape, seen.gradients["1"].shape
    (torch.Size([1, 3]), torch.Size([1, 3]))
    """
    return _Capturing(model, layers, gradients)
