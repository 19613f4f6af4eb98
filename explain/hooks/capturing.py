"""`Capture`: the outputs or inputs of layers in one forward pass, and the gradients that came back to them.

A plain hook that keeps a tensor goes wrong in three ways; this one does not. The recorded activation is a copy, taken
before a following in-place operation can overwrite it. The gradient counts every use of the tensor that the layer
returned, no matter how it left the layer (a second output, a list, an attribute, an older name), and what overwrites it
later. And where autograd records nothing, the graph begins at the layer: the pass below it runs like plain inference.

One case is special: a layer that returns its input unaltered, as dropout does in evaluation mode. The gradient is that
of what leaves the layer; paths around it do not belong to the layer. The same holds for a layer's input.
"""

from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from explain._utils import nested
from explain._utils.errors import HookError, LayerError, NotRecordedError, note
from explain._utils.signals import signal_safe
from explain._utils.spelling import did_you_mean
from explain.hooks import attention_parts, graph_start, preserve, unwrap
from explain.hooks.call_hooks import INSTEAD, FullBackwardHook, hook_calls, refusing_in_place
from explain.hooks.graph import alias, copy_with_history, differentiate, is_alias, mark
from explain.hooks.group import HookGroup
from explain.hooks.layer_names import LayerPlace, Where, place_of, select_places

T = TypeVar("T")
Source: TypeAlias = Any
"""The graph's side of a tensor, to differentiate with respect to: a tensor or a `GradientEdge`.

The type hints of `torch.autograd.grad` know lists of the one or of the other, but not of both, which it takes.
"""


@dataclass(eq=False)
class TensorRecord:
    """A copy of one tensor, and the gradient that came back to it.

    It holds nothing of the graph: a hook in the graph holds it, and the two would keep each other alive forever, since
    the garbage collector does not see through autograd.
    """

    activation: torch.Tensor
    gradient: torch.Tensor | None = None
    task: int = field(default=-1, repr=False)
    """The backward pass that the gradient is of."""


@dataclass(eq=False)
class Record(TensorRecord):
    """One call of one layer: its first tensor and the gradient of that, and which call of the pass it was.

    Where all tensors were requested, ``tensors`` has them by position, key or field; by the whole way to them where
    they are in containers in containers.
    """

    layer: str = ""
    call: int = 0
    tensors: dict[Any, TensorRecord] = field(default_factory=dict)


class Recorded(UserDict[str, torch.Tensor]):
    """What was recorded of layers, by name. What is read is a copy: a hook may return it, and the model overwrite it.

    ``missing`` says of another name why nothing is recorded under it.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], missing: Callable[[str], str]) -> None:
        self.data = tensors
        self._missing = missing

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.data:
            raise NotRecordedError(self._missing(name))
        return self.data[name].clone()


GradientSources: TypeAlias = tuple[list[Source], list[Source]]
"""The sources whose gradients add up to that in a tensor, and those that must be requested together with them."""
Given: TypeAlias = dict[int, tuple[torch.Tensor, int]]
"""The tensors that a module was given, by id, with their versions."""


class Capture:
    """Records the calls of the named layers while ``group`` is alive; ``records`` has them in the order they happened.

    ``gradients`` says whether gradients are recorded too, or names the layers that they are recorded for. With ``cut``,
    the first of these that runs while gradients are off begins the graph; others then get no gradient. With ``every``,
    all tensors of the layers' outputs are recorded, instead of the first.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True))
    >>> with torch.no_grad(), HookGroup(model) as group:
    ...     capture = Capture(group, ["0"], gradients=True)
    ...     score = model(torch.ones(1, 1, 4, 4)).sum()
    >>> _ = capture.backward(score)
    >>> capture.records[0].gradient.shape
    torch.Size([1, 2, 2, 2])
    """

    def __init__(
        self,
        group: HookGroup,
        layers: Iterable[str],
        *,
        gradients: bool | Collection[str],
        cut: bool = True,
        every: bool = False,
    ) -> None:
        if group._model is None:
            raise HookError("group of a capture must have a model, got HookGroup(); pass it the model")
        self._model = group._model
        self._places = {name: place_of(name, self._model) for name in layers}
        self.records: list[Record] = []
        self.hooks = 0
        """How many hooks on tensors it has registered."""
        names = (self._places if gradients else ()) if isinstance(gradients, bool) else gradients
        self._wanted: dict[str, set[int | None]] = {}
        """For each layer, the calls whose gradients are recorded; None is all of them."""
        for name in names:
            place = place_of(name, self._model)
            self._wanted.setdefault(place.layer, set()).add(place.call)
        self._every = every
        self._cut = cut
        self._may_be_cut = cut and not torch.is_grad_enabled()
        self._graph_start = graph_start.GraphStart(cut=self._may_be_cut)
        self._missing: list[str] = []
        self._sources: dict[Record, list[Source]] = {}
        self._requested_with: dict[Record, list[Source]] = {}
        self._without_graph: set[Record] = set()
        self._paused: list[bool] = []  # shared with hooks in the graph, which must not hold the capture itself
        group.swap_inputs("", self._begin_pass, self._end_pass)
        for place in {place.layer: place for place in self._places.values()}.values():
            if place.of_attention:
                self._watch_attention(group, place)
            elif place.part:
                self._watch_input(group, place)
            else:
                self._watch_output(group, place)

    def sources_of(self, record: Record) -> list[Source]:
        """What to differentiate with respect to, all in one call, for the gradient that `joined` makes of the results.

        Raises:
            LayerError: parts of the gradient may be missing.
        """
        self._must_be_whole()
        return [*self._sources[record], *self._requested_with.get(record, ()), *self._graph_start.starts]

    def nodes_of(self, record: Record) -> list[Node]:
        """The Nodes of the graph that the gradient in a record's first tensor comes from."""
        edges = (s if isinstance(s, GradientEdge) else get_gradient_edge(s) for s in self._sources.get(record, ()))
        return [edge.node for edge in edges]

    def joined(self, record: Record, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the gradient in a record's first tensor, from those with respect to its `sources_of`."""
        parts = [gradient for gradient in gradients[: len(self._sources[record])] if gradient is not None]
        if len(parts) > 1:
            return torch.stack(parts).sum(0)
        return parts[0] if parts else None

    @property
    def misses(self) -> bool:
        """Whether parts of gradients may be missing, since something the layer made has no history in this pass."""
        return bool(self._missing or self._graph_start.missing)

    @property
    def activations(self) -> Mapping[str, torch.Tensor]:
        """A copy of the output of each layer that ran, by name: of its last call, unless the name says which call."""
        records = self._by_name()
        return Recorded({name: record.activation for name, record in records.items()}, self._why_missing)

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """The gradient of each output that the last backward pass reached, by layer.

        Raises:
            LayerError: parts of them may be missing.
        """
        self._must_be_whole()
        gradients = {name: record.gradient for name, record in self._by_name().items()}
        return Recorded({name: each for name, each in gradients.items() if each is not None}, self._why_missing)

    def of(self, name: str) -> Record | None:
        """Return the record that a name such as ``conv``, ``conv@0`` or ``conv:input`` stands for."""
        place = place_of(name, self._model)
        calls = self._calls_of(place.layer)
        number = len(calls) - 1 if place.call is None else place.call
        return calls[number] if 0 <= number < len(calls) else None

    def _calls_of(self, layer: str) -> list[Record]:
        return [record for record in self.records if record.layer == layer]

    def backward(
        self, score: torch.Tensor, also: tuple[Source, ...] = (), *, retain_graph: bool = False, roughly: bool = False
    ) -> tuple[torch.Tensor | None, ...]:
        """Run backward from a scalar to the captured layers, filling their records; return the gradients of ``also``.

        Nothing is accumulated anywhere: no parameter's ``.grad`` is read or written. A record that the score does not
        depend on keeps ``gradient=None``.

        Raises:
            LayerError: parts of the gradients may be missing, and they are not asked for ``roughly``.
        """
        if not roughly:
            self._must_be_whole()
        for record in self.records:
            for seen in (record, *record.tensors.values()):
                seen.gradient = None
        graph = (*self._sources.values(), *self._requested_with.values(), self._graph_start.starts)
        wanted = [*also, *(source for sources in graph for source in sources)]
        if not wanted or not score.requires_grad:
            return (None,) * len(also)
        return differentiate(score, wanted, retain_graph=retain_graph)[: len(also)]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record gradients inside the block, where backward runs for another purpose."""
        self._paused.append(True)
        try:
            yield
        finally:
            self._paused.pop()

    def _by_name(self) -> dict[str, Record]:
        records = {name: self.of(name) for name in self._places}
        return {name: record for name, record in records.items() if record is not None}

    def _why_missing(self, name: str) -> str:
        if name not in self._places:
            return f"layer {name!r} was not captured; {did_you_mean(name, self._places)}"
        if self.of(name) is None:
            return why_not_called(self._model, name, len(self._calls_of(self._places[name].layer)))
        return f"layer {name!r} has no gradient: none came back to it; run backward from a score that depends on it"

    def _must_be_whole(self) -> None:
        if self.misses:
            names = ", ".join(map(repr, dict.fromkeys(self._missing + self._graph_start.missing)))
            raise LayerError(f"layer {names} must give tensors with a graph, but some have none; run with gradients on")

    def _begin_pass(self, module: nn.Module, args: Any, kwargs: Any) -> nested.SwappedInputs | None:
        """See whether gradients are off: if they are off only later, the network itself has turned them off."""
        self._graph_start.cut = self._may_be_cut = self._cut and not torch.is_grad_enabled()
        if self._cut or not self._wanted or not torch.is_grad_enabled():
            return None
        given = (tensor for _, tensor in nested.paths((args, kwargs)))
        # Weights that require no gradient would leave what is below the layer without a history.
        return None if any(tensor.requires_grad for tensor in given) else graph_start.aliased_inputs((args, kwargs))

    def _end_pass(self, swapped: nested.SwappedInputs | None, output: Any) -> None:
        """See whether a graph that began while gradients were off goes on to the end of the pass.

        A model that switches gradients itself gives back the mode that it found, which was off.
        """
        if self._may_be_cut and self._sources and not torch.is_grad_enabled():
            self._missing += [record.layer for record in self._sources]

    def _is_wanted(self, layer: str) -> bool:
        calls: Collection[int | None] = self._wanted.get(layer, ())
        return None in calls or len(self._calls_of(layer)) in calls

    def _watch_output(self, group: HookGroup, place: LayerPlace) -> None:
        running: list[Given] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            running.append(_as_given((args, kwargs)))

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return self._leave(place.layer, running.pop() if running else {}, output)

        group.forward_pre(place.module, enter, with_kwargs=True)
        if place.layer in self._wanted:
            module = unwrap.submodule(self._model, place.module)
            self._graph_start.watch(group, place.layer, module, lambda: bool(running) and self._is_wanted(place.layer))
        group.forward(place.module, leave)

    def _watch_input(self, group: HookGroup, place: LayerPlace) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> nested.SwappedInputs | None:
            first = nested.first_tensor((args, kwargs))
            if first is None:
                raise LayerError(f"layer {place.layer!r} must be given a tensor, got none; choose another layer")
            wanted = self._is_wanted(place.layer)
            record = self._recorded(place.layer, first)
            if record is None or not wanted:
                return None
            self._must_be_floating(record, first)
            self._graph_start.begin(module, args, kwargs)
            if not torch.is_grad_enabled():
                self._mark_without_graph(record)
                return None
            swapped = nested.SwappedInputs((args, kwargs), lambda tensor: alias(tensor) if tensor is first else tensor)
            self._sources[record], self._requested_with[record] = self._follow(record, swapped.pairs[0][1])
            return swapped

        group.swap_inputs(place.module, enter, partial(self._graph_start.follow_overwritten, place.layer))

    def _watch_attention(self, group: HookGroup, place: LayerPlace) -> None:
        def leave(module: nn.Module, args: Any, output: torch.Tensor) -> Any:
            return self._leave(place.layer, _as_given(output), output)

        group.forward(place.layer, leave)

    def _leave(self, layer: str, given: Given, output: Any) -> Any:
        first = _first_output(layer, output)
        wanted = self._is_wanted(layer)
        record = self._recorded(layer, first)
        if record is None:
            return None
        seen: dict[int, tuple[TensorRecord, torch.Tensor]] = {id(first): (record, first)}  # each tensor once
        for path, tensor in nested.paths(output) if self._every else ():
            if id(tensor) not in seen:
                seen[id(tensor)] = TensorRecord(tensor.detach().clone()), tensor
            record.tensors[path[0] if len(path) == 1 else path] = seen[id(tensor)][0]
        if not wanted:
            return None
        self._must_be_floating(record, first)
        if not torch.is_grad_enabled():
            if not self._graph_start.begin(nn.Identity()):
                return self._mark_without_graph(record)
            self._missing.append(layer)  # it has not begun before: what the layer made of its output has no history
        return self._attach_all(record, list(seen.values()), given, output)

    def _recorded(self, layer: str, tensor: torch.Tensor) -> Record | None:
        """Make a record of a call; None if backward repeats it (a checkpoint) and its gradient is recorded already."""
        calls = self._calls_of(layer)
        if torch._C._current_graph_task_id() != -1:
            alike = [record for record in calls if torch.equal(record.activation, tensor.detach())]
            if alike:
                return next((record for record in alike if record in self._without_graph), None)
        record = Record(preserve.detached(tensor).clone(), layer=layer, call=len(calls))
        self.records.append(record)
        return record

    def _attach_all(
        self, record: Record, seen: list[tuple[TensorRecord, torch.Tensor]], given: Given, output: Any
    ) -> Any:
        first = seen[0][1]
        if not first.requires_grad:
            others = (t for _, t in nested.paths(output) if t is not first and not _is_passed_through(t, given))
            if self._graph_start.was_cut or any(t.is_floating_point() and not t.requires_grad for t in others):
                self._missing.append(record.layer)
        new: dict[int, torch.Tensor] = {}
        for each, tensor in seen:
            if not tensor.is_floating_point():
                continue
            (sources, requested_with), used = self._attach(record.layer, each, tensor, given)
            if used is not tensor:
                new[id(tensor)] = used
            if each is record:
                self._sources[record] = sources
                self._requested_with[record] = requested_with
            else:
                self._requested_with[record] += sources + requested_with
        self._without_graph.discard(record)
        return nested.edit(output, lambda path, t: new.get(id(t), t)) if new else None

    def _attach(
        self, layer: str, seen: TensorRecord, tensor: torch.Tensor, given: Given
    ) -> tuple[GradientSources, torch.Tensor]:
        """Let the gradient of a tensor arrive; return its sources, and the tensor or what replaces it."""
        passed = _is_passed_through(tensor, given)
        if not passed and not tensor.requires_grad:
            leaf = mark(tensor)
            if leaf is not None:
                return ([self._collect(seen, leaf)], []), tensor
            self._missing.append(layer)  # only its replacement has a history
        used = tensor if tensor.requires_grad and not passed else copy_with_history(tensor)
        return self._follow(seen, used), used

    def _follow(self, seen: TensorRecord, tensor: torch.Tensor) -> GradientSources:
        """Collect the gradient of every use of a tensor of the graph.

        All uses meet at its Node, except those of a view that is overwritten later: these continue from its base. A
        mark put into that base's history has these, and the view's Node has what the layer made of the view before.
        Autograd takes the two for one Node, unless the base is requested as well.
        """
        source = self._collect(seen, tensor)
        base = tensor._base
        if base is None or not base.requires_grad:
            return [source], []
        behind = get_gradient_edge(base)
        leaf = mark(tensor)
        return ([source], []) if leaf is None else ([self._collect(seen, leaf), source], [behind])

    def _collect(self, seen: TensorRecord, tensor: torch.Tensor) -> Source:
        paused = self._paused

        def collect(gradient: torch.Tensor | None) -> None:
            if gradient is None or paused:  # the former where there is no derivative
                return
            # A copy: the tensor that autograd passes may be shared with another branch, and may be reused by it.
            copy = gradient.detach().clone()
            task = torch._C._current_graph_task_id()
            # Gradients that arrive on several paths of one pass add up.
            seen.gradient = copy if seen.gradient is None or task != seen.task else seen.gradient + copy
            seen.task = task

        if not seen.activation.requires_grad:  # a record with a graph would be kept alive by it
            tensor.register_hook(collect)  # type: ignore[no-untyped-call]
            self.hooks += 1
        return _source(tensor)

    def _mark_without_graph(self, record: Record) -> None:
        """Note that the network itself has turned gradients off, unless a checkpoint runs this again."""
        self._sources[record] = [record.activation.detach().requires_grad_()]
        self._without_graph.add(record)

    def _must_be_floating(self, record: Record, tensor: torch.Tensor) -> None:
        name = record.layer
        if not tensor.is_floating_point():
            verb = "be given" if place_of(name, self._model).part else "return"
            raise LayerError(f"layer {name!r} must {verb} floating-point values, got {tensor.dtype}; choose another")
        if tensor.is_inference():
            raise LayerError(f"layer {name!r} must run outside torch.inference_mode() for gradients; use no_grad()")


class FullBackwardCapture(Capture):
    """A capture whose gradients PyTorch's own full-backward hooks bring: see `explain.hooks.call_hooks`."""

    def __init__(self, group: HookGroup, layers: Iterable[str]) -> None:
        super().__init__(group, layers, gradients=False, cut=False)

    def _watch_output(self, group: HookGroup, place: LayerPlace) -> None:
        hook_calls(group, place.module, partial(self._hook_of_call, place.layer))

    def _watch_input(self, group: HookGroup, place: LayerPlace) -> None:
        name = place.layer
        raise LayerError(f"layer {name!r} must be a module for full-backward hooks, got a part; name the module")

    _watch_attention = _watch_input

    def _hook_of_call(
        self, layer: str, module: nn.Module, output: Any, below: Sequence[torch.Tensor]
    ) -> FullBackwardHook | None:
        """Record a call of a layer; return the hook that brings the gradient."""
        first = _first_output(layer, output)
        record = self._recorded(layer, first)
        if record is None:
            return None
        self._must_be_floating(record, first)
        outputs = output if isinstance(output, tuple) else (output,)
        number = next((i for i, each in enumerate(outputs) if each is first), None)
        if number is None:
            must = f"return a tensor, or several, for full-backward hooks, got {type(output).__name__}"
            raise LayerError(f"layer {layer!r} must {must}; {INSTEAD}")
        if not torch.is_grad_enabled():
            self._without_graph.add(record)
            return None
        self._without_graph.discard(record)
        self._sources[record] = [_source(tensor) for tensor in below]
        paused = self._paused

        def take(module: nn.Module, grad_input: Any, grad_output: tuple[torch.Tensor | None, ...]) -> None:
            gradient = grad_output[number]
            if not paused:
                record.gradient = None if gradient is None else gradient.detach().clone()

        return take


def _first_output(layer: str, output: Any) -> torch.Tensor:
    """The first tensor that a layer returns.

    Raises:
        LayerError: there is none.
    """
    first = nested.first_tensor(output)
    if first is None:
        raise LayerError(f"layer {layer!r} must return a tensor, got {type(output).__name__}; choose another layer")
    return first


def _source(tensor: torch.Tensor) -> Source:
    return tensor if tensor.is_leaf else get_gradient_edge(tensor)


def _as_given(values: Any) -> Given:
    given = (tensor for _, tensor in nested.paths(values) if not tensor.is_inference())  # which count no versions
    return {id(tensor): (tensor, tensor._version) for tensor in given}


def _is_passed_through(tensor: torch.Tensor, given: Given) -> bool:
    """Whether a module has returned its input, unaltered, or a tensor that is no module's output."""
    known = given.get(id(tensor))
    if known is not None:
        return known[1] == tensor._version
    return is_alias(tensor) or (tensor.is_leaf and tensor.requires_grad)


@signal_safe
def capture(model: nn.Module, layers: Where, *, gradients: bool | Literal["full_backward"] = True) -> Iterator[Capture]:
    """Record the outputs of layers inside the block, and their gradients, inside it or later.

    Args:
        model: any module.
        layers: names, patterns, modules or classes; see `select`. A name such as ``conv@0`` is one call of a layer that
            runs several times (without it, the last), and ``conv:input`` the first tensor that it is given.
        gradients: also record gradients. Where nothing is being recorded by autograd, the graph begins at the layer.
            "full_backward" takes them from PyTorch's own full-backward hooks instead, which need a graph, know the
            first tensor of each output alone, and forbid in-place operations on it.

    Raises:
        LayerError: a layer is not in the model, or gives no tensor; or, when gradients are read, parts of them may be
            missing; or a full-backward hook does not go with the network.

    The record of a call has the other tensors of a tuple, mapping or dataclass too, by position, key or field.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    >>> with capture(model, nn.ReLU) as seen:
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> seen.activations["1"].shape, seen.gradients["1"].shape
    (torch.Size([1, 3]), torch.Size([1, 3]))
    >>> lstm = nn.LSTM(2, 3)
    >>> with capture(nn.ModuleDict({"lstm": lstm}), "lstm") as seen:
    ...     lstm(torch.ones(4, 2))[1][0].sum().backward()
    >>> seen.of("lstm").tensors[1, 0].gradient
    tensor([[1., 1., 1.]])
    """
    with preserve.recording(torch.is_grad_enabled()), HookGroup(model) as group:
        names = select_places(model, layers)
        if gradients != "full_backward":
            yield Capture(group, names, gradients=gradients, every=True)
            return
        with refusing_in_place(names):
            yield FullBackwardCapture(group, names)


def read_outputs(group: HookGroup, layers: Iterable[str], read: Callable[[torch.Tensor], T]) -> dict[str, list[T]]:
    """What ``read`` gives of the first tensor that each call of these layers returns while the group is alive."""
    found: dict[str, list[T]] = {layer: [] for layer in layers}

    def note(layer: str, module: nn.Module, args: Any, output: Any) -> None:
        tensor = nested.first_tensor(output)
        found[layer] += [] if tensor is None else [read(tensor)]

    for layer in found:
        group.forward(layer, partial(note, layer))
    return found


def why_not_called(model: nn.Module, name: str, calls: int) -> str:
    """Say why a layer, or one of its calls, was not recorded in a pass that made ``calls`` calls of it."""
    if calls:
        return f"layer {name!r} must name one of its {calls} calls, counted from 0"
    place = place_of(name, model)
    if place.of_attention:
        return f"layer {name!r} gave nothing: the layer did not run, or {attention_parts.NO_ATTENTION}"
    module = place.module
    if module and isinstance(model.get_submodule(module.rpartition(".")[0]), nn.MultiheadAttention):
        return f"layer {name!r} was not called: nn.MultiheadAttention reads its weights itself; choose the attention"
    return f"layer {name!r} was not called in the forward pass; choose one that the model uses for this input"


def cut_where_allowed(run: Callable[[bool], T]) -> T:
    """Run a forward pass whose graph begins at the layer (``cut``); where autograd forbids that, record all of it."""
    try:
        return run(True)
    except RuntimeError as error:
        # Autograd refuses to overwrite, with gradients on, a view that was made while they were off.
        if "view was created in no_grad mode" not in str(error):
            raise
    note("the pass is recorded from the input on: the model overwrites a view that was made without gradients")
    return run(False)
