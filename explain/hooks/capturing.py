"""`Capture`: the outputs or inputs of layers in one forward pass, and the gradients that came back to them.

A plain hook that keeps a tensor goes wrong in three ways; this one does not. The recorded activation is a copy, taken
before a following in-place operation can overwrite it. The gradient counts every use of the tensor that the layer
returned, no matter how it left the layer (a second output, a list, an attribute, an older name), and what overwrites it
later. And where autograd records nothing, the graph begins at the layer: the pass below it runs like plain inference.

One case is special: a layer that returns its input unaltered, as dropout does in evaluation mode. The gradient is that
of what leaves the layer; paths around it do not belong to the layer. The same holds for a layer's input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from explain._utils import nested
from explain._utils.errors import HookError, LayerError
from explain._utils.nested import Lent
from explain._utils.signals import signal_safe
from explain._utils.spelling import did_you_mean
from explain.hooks.graph import alias, copy_with_history, is_alias, mark
from explain.hooks.graph_start import GraphStart, lend
from explain.hooks.group import HookGroup
from explain.hooks.layer_names import LayerPlace, Where, place_of, select_places
from explain.hooks.records import Record, Recorded, Source, TensorRecord

Ways: TypeAlias = "tuple[list[Source], list[Source]]"
"""The sources whose gradients add up to that in a tensor, and those that must be requested together with them."""
Given: TypeAlias = "dict[int, tuple[torch.Tensor, int]]"
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
        self.records: list[Record] = []
        if group._model is None:
            raise HookError("group of a capture must have a model, got HookGroup(); pass it the model")
        self._model = group._model
        self._names = list(layers)
        wanted = (self._names if gradients else ()) if isinstance(gradients, bool) else gradients
        self._wanted: dict[str, set[int | None]] = {}
        """For each layer, the calls whose gradients are recorded; None is all of them."""
        for place in (place_of(name, self._model) for name in wanted):
            self._wanted.setdefault(place.layer, set()).add(place.call)
        self._every = every
        self._cut = cut
        self._may_be_cut = cut and not torch.is_grad_enabled()
        self._beginning = GraphStart(cut=self._may_be_cut)
        self._missing: list[str] = []
        self._sources: dict[Record, list[Source]] = {}
        self._beyond: dict[Record, list[Source]] = {}
        self._out_of_sight: set[Record] = set()
        self._paused: list[bool] = []  # shared with hooks in the graph, which must not hold the capture itself
        group.lending("", self._begin_pass, self._end_pass)
        for place in {place.layer: place for place in (place_of(n, self._model) for n in self._names)}.values():
            (self._watch_input if place.of_input else self._watch_output)(group, place)

    def sources_of(self, record: Record) -> list[Source]:
        """What to differentiate with respect to, all in one call, for the gradient that `joined` makes of the results.

        Raises:
            LayerError: parts of the gradient may be missing.
        """
        self._must_be_whole()
        return [*self._sources[record], *self._beyond.get(record, ()), *self._beginning.starts]

    def joined(self, record: Record, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the gradient in a record's first tensor, from those with respect to its `sources_of`."""
        found = [gradient for gradient in gradients[: len(self._sources[record])] if gradient is not None]
        return torch.stack(found).sum(0) if len(found) > 1 else found[0] if found else None

    @property
    def misses(self) -> bool:
        """Whether parts of gradients may be missing, since something the layer made has no history in this pass."""
        return bool(self._missing or self._beginning.missing)

    @property
    def activations(self) -> Mapping[str, torch.Tensor]:
        """A copy of the output of each layer that ran, by name: of its last call, unless the name says which call."""
        return Recorded({name: record.activation for name, record in self._found()}, self._why_missing)

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """The gradient of each output that the last backward pass reached, by layer.

        Raises:
            LayerError: parts of them may be missing.
        """
        self._must_be_whole()
        found = {name: record.gradient for name, record in self._found() if record.gradient is not None}
        return Recorded(found, self._why_missing)

    def of(self, name: str) -> Record | None:
        """Return the record that a name such as ``conv``, ``conv@0`` or ``conv:input`` stands for."""
        place = place_of(name, self._model)
        return self.of_call(place.layer, place.call)

    def of_call(self, layer: str, number: int | None = None) -> Record | None:
        """Return the record of a layer's call, counted from 0, or of its last call if no number is given."""
        calls = [record for record in self.records if record.layer == layer]
        if number is None:
            return calls[-1] if calls else None
        return calls[number] if number < len(calls) else None

    def backward(
        self,
        score: torch.Tensor,
        also: tuple[Source, ...] = (),
        *,
        retain_graph: bool = False,
        roughly: bool = False,
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
        graph = (*self._sources.values(), *self._beyond.values(), self._beginning.starts)
        wanted = [*also, *(source for sources in graph for source in sources)]
        if not wanted or not score.requires_grad:
            return (None,) * len(also)
        found = torch.autograd.grad(score, wanted, retain_graph=retain_graph, allow_unused=True)
        return found[: len(also)]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients pass without recording them: backward may run for other reasons as well."""
        self._paused.append(True)
        try:
            yield
        finally:
            self._paused.pop()

    def _found(self) -> Iterator[tuple[str, Record]]:
        return ((name, record) for name in self._names if (record := self.of(name)) is not None)

    def _why_missing(self, name: str) -> str:
        if name not in self._names:
            return f"layer {name!r} was not captured; {did_you_mean(name, self._names)}"
        layer = place_of(name, self._model).layer
        calls = sum(record.layer == layer for record in self.records)
        if not calls:
            return f"layer {name!r} was not called inside the block; capture one that the model uses for this input"
        if self.of(name) is None:
            return f"layer {name!r} must name one of its calls, 0 to {calls - 1}, got one that never came"
        return f"layer {name!r} has no gradient: none came back to it; run backward from a score that depends on it"

    def _must_be_whole(self) -> None:
        if self.misses:
            names = ", ".join(map(repr, dict.fromkeys(self._missing + self._beginning.missing)))
            raise LayerError(
                f"layer {names} must have the graph of all that it gives for its gradient to be whole, but some of it "
                "has none here; run with gradients on and an input that requires one, or choose another layer"
            )

    def _begin_pass(self, module: nn.Module, args: Any, kwargs: Any) -> Lent | None:
        """See whether gradients are off: if they are off only later, the network itself has turned them off."""
        self._beginning.cut = self._may_be_cut = self._cut and not torch.is_grad_enabled()
        if self._cut or not self._wanted or not torch.is_grad_enabled():
            return None
        given = (tensor for _, tensor in nested.paths((args, kwargs)))
        # Weights that require no gradient would leave what is below the layer without a history.
        return None if any(tensor.requires_grad for tensor in given) else lend((args, kwargs))

    def _end_pass(self, lent: Lent | None, output: Any) -> None:
        """See whether a graph that began while gradients were off goes on to the end of the pass.

        A model that switches gradients itself gives back the mode that it found, which was off.
        """
        if self._may_be_cut and self._sources and not torch.is_grad_enabled():
            self._missing += [record.layer for record in self._sources]

    def _is_wanted(self, layer: str) -> bool:
        calls: Collection[int | None] = self._wanted.get(layer, ())
        return None in calls or sum(record.layer == layer for record in self.records) in calls

    def _watch_output(self, group: HookGroup, place: LayerPlace) -> None:
        running: list[Given] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = (tensor for _, tensor in nested.paths((args, kwargs)) if not tensor.is_inference())
            running.append({id(tensor): (tensor, tensor._version) for tensor in given})

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return self._leave(place.layer, running.pop() if running else {}, output)

        group.forward_pre(place.module, enter, with_kwargs=True)
        if place.layer in self._wanted:
            module = self._model.get_submodule(place.module)
            self._beginning.watch(group, place.layer, module, lambda: bool(running) and self._is_wanted(place.layer))
        group.forward(place.module, leave)

    def _watch_input(self, group: HookGroup, place: LayerPlace) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Lent | None:
            found = nested.find((args, kwargs))
            if found is None:
                raise LayerError(f"layer {place.layer!r} must be given a tensor, got none; choose another layer")
            wanted, record = self._is_wanted(place.layer), self._recorded(place.layer, found[1])
            if record is None or not wanted:
                return None
            self._must_be_floating(record, found[1])
            self._beginning.begin(module, args, kwargs)
            if not torch.is_grad_enabled():
                self._is_out_of_sight(record)
                return None
            lent = Lent((args, kwargs), lambda tensor: alias(tensor) if tensor is found[1] else tensor)
            self._sources[record], self._beyond[record] = self._follow(record, lent.pairs[0][1])
            return lent

        group.lending(place.module, enter, lambda lent, output: self._beginning.settled(place.layer, lent, output))

    def _leave(self, layer: str, given: Given, output: Any) -> Any:
        found = nested.find(output)
        if found is None:
            raise LayerError(f"layer {layer!r} must return a tensor, got {type(output).__name__}; choose another layer")
        wanted, first = self._is_wanted(layer), found[1]
        record = self._recorded(layer, first)
        if record is None:
            return None
        seen = self._all_seen(record, first, output)
        if not wanted:
            return None
        self._must_be_floating(record, first)
        if not torch.is_grad_enabled():
            if not self._beginning.begin(nn.Identity()):
                return self._is_out_of_sight(record)
            self._missing.append(layer)  # it has not begun before: what the layer made of its output has no history
        return self._attach_all(record, seen, given, output)

    def _recorded(self, layer: str, tensor: torch.Tensor) -> Record | None:
        """Make a record of a call; None if backward repeats one (a checkpoint) whose gradient is recorded already."""
        if torch._C._current_graph_task_id() != -1:
            alike = [r for r in self.records if r.layer == layer and torch.equal(r.activation, tensor.detach())]
            if alike:
                return next((record for record in alike if record in self._out_of_sight), None)
        record = Record(tensor.detach().clone(), layer=layer, call=sum(r.layer == layer for r in self.records))
        self.records.append(record)
        return record

    def _all_seen(self, record: Record, first: torch.Tensor, output: Any) -> list[tuple[TensorRecord, torch.Tensor]]:
        """What is to be recorded of an output: its first tensor, or all of them, each once."""
        seen: dict[int, tuple[TensorRecord, torch.Tensor]] = {id(first): (record, first)}
        if self._every:
            for path, tensor in nested.paths(output):
                if id(tensor) not in seen:
                    seen[id(tensor)] = TensorRecord(tensor.detach().clone()), tensor
                record.tensors[path[0] if len(path) == 1 else path] = seen[id(tensor)][0]
        return list(seen.values())

    def _attach_all(
        self, record: Record, seen: list[tuple[TensorRecord, torch.Tensor]], given: Given, output: Any
    ) -> Any:
        first = seen[0][1]
        if not first.requires_grad:
            others = (t for _, t in nested.paths(output) if t is not first and not _is_handed_on(t, given))
            if self._beginning.was_cut or any(t.is_floating_point() and not t.requires_grad for t in others):
                self._missing.append(record.layer)
        new: dict[int, torch.Tensor] = {}
        for each, tensor in seen:
            if not tensor.is_floating_point():
                continue
            (sources, beyond), other = self._attach(record.layer, each, tensor, given)
            new |= {} if other is None else {id(tensor): other}
            if each is record:
                self._sources[record], self._beyond[record] = sources, beyond
            else:
                self._beyond[record] += sources + beyond
        self._out_of_sight.discard(record)
        return nested.edit(output, lambda path, t: new.get(id(t), t)) if new else None

    def _attach(
        self, layer: str, seen: TensorRecord, tensor: torch.Tensor, given: Given
    ) -> tuple[Ways, torch.Tensor | None]:
        """Let the gradient of a tensor arrive; return its sources, and what replaces the tensor, if anything does."""
        if _is_handed_on(tensor, given):
            copy = copy_with_history(tensor)
            return self._follow(seen, copy), copy
        if tensor.requires_grad:
            return self._follow(seen, tensor), None
        leaf = mark(tensor)
        if leaf is None:
            self._missing.append(layer)  # only its replacement has a history
            copy = copy_with_history(tensor)
            return self._follow(seen, copy), copy
        return ([self._collect(seen, leaf)], []), None

    def _follow(self, seen: TensorRecord, tensor: torch.Tensor) -> Ways:
        """Collect the gradient of every use of a tensor of the graph.

        All uses meet at its Node, except those of a view that is overwritten later: these continue from its base. A
        mark put into that base's history has these, and the view's Node has what the layer made of the view before.
        Autograd takes the two for one Node, unless the base is requested as well.
        """
        source, base = self._collect(seen, tensor), tensor._base
        if base is None or not base.requires_grad:
            return [source], []
        behind = get_gradient_edge(base)
        leaf = mark(tensor)
        return ([source], []) if leaf is None else ([self._collect(seen, leaf), source], [behind])

    def _collect(self, seen: TensorRecord, tensor: torch.Tensor) -> Source:
        paused = self._paused

        def collect(gradient: torch.Tensor | None) -> None:
            if gradient is not None and not paused:  # where there is no derivative, this is None
                seen.take_gradient(gradient)

        tensor.register_hook(collect)  # type: ignore[no-untyped-call]
        return tensor if tensor.is_leaf else get_gradient_edge(tensor)

    def _is_out_of_sight(self, record: Record) -> None:
        """The network itself has turned gradients off: none comes back, unless backward runs this again."""
        self._sources[record] = [record.activation.detach().requires_grad_()]
        self._out_of_sight.add(record)

    def _must_be_floating(self, record: Record, tensor: torch.Tensor) -> None:
        if not tensor.is_floating_point():
            verb = "be given" if place_of(record.layer, self._model).of_input else "return"
            raise LayerError(
                f"layer {record.layer!r} must {verb} floating-point values, got {tensor.dtype}; choose another"
            )
        if tensor.is_inference():
            raise LayerError(
                f"layer {record.layer!r} must run outside torch.inference_mode() for its gradient to exist, got a "
                "tensor made inside it; use torch.no_grad() instead"
            )


def _is_handed_on(tensor: torch.Tensor, given: Given) -> bool:
    """Whether a module has returned its input, unaltered, or a tensor that is no module's output."""
    known = given.get(id(tensor))
    if known is not None:
        return known[1] == tensor._version
    return is_alias(tensor) or (tensor.is_leaf and tensor.requires_grad)


@signal_safe
def capture(model: nn.Module, layers: Where, *, gradients: bool = True) -> Iterator[Capture]:
    """Record what the layers give inside the block, and the gradients that come back to them, inside it or later.

    Args:
        model: any module.
        layers: names, patterns, modules or classes; see `select`. A name such as ``conv@0`` is one call of a layer that
            runs several times (without it, the last), and ``conv:input`` the first tensor that it is given.
        gradients: also record gradients. Where nothing is being recorded by autograd, the graph begins at the layer.

    Raises:
        LayerError: a layer is not in the model, or gives no tensor; or, when gradients are read, parts of them may be
            missing.

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
    before = torch.is_grad_enabled()
    try:
        with HookGroup(model) as group:
            yield Capture(group, select_places(model, layers), gradients=gradients, every=True)
    finally:
        torch.set_grad_enabled(before)
