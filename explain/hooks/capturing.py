"""`Capture`: the outputs or inputs of layers in one forward pass, and the gradients that came back
to them.

A plain hook that keeps a tensor goes wrong in three ways; this one does not. The recorded
activation is a copy, taken before a following in-place operation can overwrite it. The gradient
counts every use of the tensor that the layer returned, no matter how it left the layer (a second
output, a list, an attribute, an older name), and what overwrites it later. And where autograd
records nothing, the graph begins at the layer: the pass below it runs like plain inference.

The graph begins at the input of what computes the layer's output. One that starts at the output
would be too late: what the layer itself computes from its output (a pooled second output, a tensor
stored as an attribute) would have no history. So the last module that runs in a layer gets aliases
of its inputs that start a graph. In a container other than `nn.Sequential`, that module is unknown,
and the container itself gets them. Backward stops at the layer's output and never reaches the
aliases.

One case is special: a layer that returns its input unaltered, as dropout does in evaluation mode.
The gradient is that of what leaves the layer; paths around it do not belong to the layer. The same
holds for a layer's input.
"""

from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from explain._utils import nested
from explain._utils.errors import HookError, LayerError, NotRecordedError, note, shown
from explain._utils.modules import submodule
from explain._utils.signals import deferring_signals, signal_safe
from explain._utils.spelling import did_you_mean
from explain.hooks import attention_parts, preserve
from explain.hooks.graph import (
    alias,
    copy_with_history,
    differentiate,
    is_alias,
    mark,
    try_continue_from,
)
from explain.hooks.group import HookGroup, InputSwap, module_of, put, put_swap
from explain.hooks.layer_names import LayerPlace, Where, place_of, select_places
from explain.hooks.unwrap import runs_in_order

T = TypeVar("T")
Source: TypeAlias = Any
"""The graph's side of a tensor, to differentiate with respect to: a tensor or a `GradientEdge`.

The type hints of `torch.autograd.grad` know lists of the one or of the other, but not of both,
which it takes.
"""


@dataclass(eq=False)
class TensorRecord:
    """A copy of one tensor, and the gradient that came back to it."""

    # It holds nothing of the graph: a hook in the graph holds it, and the two would keep each other
    # alive forever, since the garbage collector does not see through autograd.
    activation: torch.Tensor
    gradient: torch.Tensor | None = None
    task: int = field(default=-1, repr=False)
    """The backward pass that the gradient is of."""


@dataclass(eq=False)
class LayerCall(TensorRecord):
    """One call of one layer: its first tensor and the gradient of that, and which call of the pass
    it was."""

    layer: str = ""
    call: int = 0
    tensors: dict[Any, TensorRecord] = field(default_factory=dict)
    """All tensors of the output, if requested, by position, key or field, or by the whole path to
    them."""


class Recorded(UserDict[str, torch.Tensor]):
    """What was recorded of layers, by name; reading gives a copy, which a hook may return.
    ``missing`` says of another name why nothing is recorded under it."""

    def __init__(self, tensors: dict[str, torch.Tensor], missing: Callable[[str], str]) -> None:
        self.data = tensors
        self._missing = missing

    def __getitem__(self, name: str) -> torch.Tensor:
        """A copy of the activation or gradient that was recorded under a layer's name."""
        if name not in self.data:
            raise NotRecordedError(self._missing(name))
        return self.data[name].clone()


Versions: TypeAlias = dict[int, tuple[torch.Tensor, int]]
"""The tensors that a module was given, by id, with their versions."""


class GradientSources(NamedTuple):
    """What to differentiate with respect to, for the gradient in one tensor."""

    summed: list[Source]
    """Those whose gradients add up to the tensor's."""
    requested_with: list[Source]
    """Those that must be requested in the same call; their gradients are not used."""


class Capture:
    """Records the calls of the named layers while ``group`` is alive; ``records`` has them in the
    order they happened."""

    @deferring_signals
    def __init__(
        self,
        group: HookGroup,
        layers: Iterable[str],
        *,
        gradients: bool | Collection[str],
        cut: bool = True,
        every: bool = False,
        once: bool = False,
    ) -> None:
        """Register the hooks. ``gradients`` says whether gradients are recorded too, or for which
        layers; with ``every``, all tensors of an output are recorded instead of the first."""
        if group._model is None:
            raise HookError(
                "group of a capture must have a model, got HookGroup(); pass it the model"
            )
        self._model = group._model
        self._cut = cut
        """Whether the first of the layers that runs while gradients are off begins the graph;
        others then get no gradient."""
        self._every = every
        self._once = once
        """Whether there is one pass, in the present mode of gradients, whose caller runs backward
        itself (`sources_of`, `joined`, `end_pass`), instead of any number of passes."""
        self._may_be_cut = cut and not torch.is_grad_enabled()
        """Whether the graph may begin at a layer: gradients were off when the pass began."""
        self._was_cut = False
        """Whether it has begun so in this pass, and gradients are on since; it happens once."""
        self.records: list[LayerCall] = []
        self._calls: dict[str, list[LayerCall]] = {}
        """The records of each layer."""
        self._places: dict[str, LayerPlace] = {}
        """For each name, the layer and the call that it stands for."""
        self._wanted: dict[str, set[int | None]] = {}
        """For each layer, the calls whose gradients are recorded; None is all of them."""
        self._sources: dict[LayerCall, GradientSources] = {}
        self._without_graph: set[LayerCall] = set()
        """Calls for which the network itself has turned gradients off; a checkpoint repeats them
        with a graph."""
        self._lost: list[str] = []
        """Layers of which parts of the gradient are missing."""
        self._overwritable: list[tuple[str, torch.Tensor, int]] = []
        """Tensors without a history whose memory may yet be overwritten through a view that has
        one: the layer, the tensor, and its version before."""
        # hooks are registered once for a layer, whichever of its calls are named
        place_by_layer: dict[str, LayerPlace] = {}
        for name in layers:
            place = place_of(name, self._model)
            layer = place.layer
            self._places[name] = place
            place_by_layer[layer] = place
            self._calls[layer] = []
            if gradients is True or (gradients and name in gradients):
                # with `once`, the caller chooses among all calls by `sources_of`
                self._wanted.setdefault(layer, set()).add(None if once else place.call)
        # with `once`, a pass needs no beginning, but for the inputs that `cut=False` replaces
        if self._wanted and (not once or not cut):
            put_swap(group, self._model, InputSwap(self._begin_pass, self.end_pass))
        for layer, place in place_by_layer.items():
            if place.of_attention:
                group.forward(layer, partial(self._leave_attention, layer))
            elif place.part:
                self._watch_input(group, layer, module_of(self._model, place))
            else:
                self._watch_output(group, layer, module_of(self._model, place))

    # What was recorded

    @property
    def missing(self) -> list[str]:
        """The layers whose gradients may be incomplete: something that they made has no history in
        this pass. If there are any, `backward` and `gradients` raise."""
        if not self._overwritable:
            return self._lost
        # overwritten through another reference than the one with a history
        return self._lost + [
            layer for layer, tensor, version in self._overwritable if tensor._version != version
        ]

    @property
    def activations(self) -> Mapping[str, torch.Tensor]:
        """A copy of the output of each layer that ran, by name: of its last call, unless the name
        says which call."""
        return self._by_name("activation")

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """The gradient of each output that the last backward pass reached, by layer."""
        self._must_be_whole()
        return self._by_name("gradient")

    def _by_name(self, field_name: Literal["activation", "gradient"]) -> Mapping[str, torch.Tensor]:
        """The captured activations or gradients (``field_name`` of the records), by the names that
        the caller used for the layers."""
        tensors: dict[str, torch.Tensor] = {}
        for name in self._places:
            tensor = getattr(self.of(name), field_name, None)
            if tensor is not None:
                tensors[name] = tensor
        return Recorded(tensors, self.why_missing)

    def of(self, name: str) -> LayerCall | None:
        """Return the record of the call that a name such as ``conv``, ``conv@0`` or ``conv:input``
        means; None if there is none. A name without a call means the last one."""
        if name not in self._places:
            self._places[name] = place_of(name, self._model)
        place = self._places[name]
        calls = self._calls.get(place.layer, [])
        number = len(calls) - 1 if place.call is None else place.call
        return calls[number] if 0 <= number < len(calls) else None

    def why_missing(self, name: str) -> str:
        """Say in one line why no output, or no gradient, is recorded under a layer's name."""
        if name not in self._places:
            return f"layer {name!r} was not captured; {did_you_mean(name, self._places)}"
        if self.of(name) is None:
            calls = self._calls[self._places[name].layer]
            return why_not_called(self._model, name, len(calls))
        return (
            f"layer {name!r} has no gradient: none came back to it; run backward from a score "
            "that depends on it"
        )

    def _must_be_whole(self) -> None:
        """Refuse to give gradients of layers if some may be incomplete; called before each use of
        them."""
        missing = self.missing
        if missing:
            names = ", ".join(map(repr, dict.fromkeys(missing)))
            raise LayerError(
                f"layer {names} must give tensors with a graph, but some have none; run with "
                "gradients on"
            )

    # Backward

    def backward(
        self, score: torch.Tensor, *, retain_graph: bool = False, roughly: bool = False
    ) -> None:
        """Run backward from a scalar and fill the records' gradients (None where it does not depend
        on one), never a ``.grad``. ``roughly`` allows gradients of which parts are missing."""
        if not roughly:
            self._must_be_whole()
        for record in self.records:
            for tensor_record in (record, *record.tensors.values()):
                tensor_record.gradient = None
        wanted: list[Source] = []
        for sources in self._sources.values():
            wanted += sources.summed + sources.requested_with
        if wanted and score.requires_grad:
            differentiate(score, wanted, retain_graph=retain_graph)

    def sources_of(self, record: LayerCall) -> list[Source]:
        """What to differentiate with respect to for the gradient in a record's first tensor:
        request all in one `torch.autograd.grad`, and give the results in this order to `joined`."""
        self._must_be_whole()
        sources = self._sources[record]
        return sources.summed + sources.requested_with

    def joined(
        self, record: LayerCall, gradients: Sequence[torch.Tensor | None]
    ) -> torch.Tensor | None:
        """The gradient in a record's first tensor: the sum of ``gradients`` with respect to its
        `sources_of`, in their order. None if the score does not depend on it."""
        total = None
        # `sources_of` puts behind these the ones that are only requested with them
        for gradient in gradients[: len(self._sources[record].summed)]:
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total

    # Where the graph begins

    def _begin_pass(self, module: nn.Module, args: Any, kwargs: Any) -> nested.SwappedInputs | None:
        """Begin a pass of the model: note whether the graph may begin at a layer, since gradients
        are off. Without ``cut``, the inputs are replaced by aliases with a graph."""
        self._may_be_cut = self._cut and not torch.is_grad_enabled()
        self._was_cut = False
        if self._cut or not torch.is_grad_enabled() or _some_require_gradients(args, kwargs):
            return None
        # With frozen weights, what runs before the layer would otherwise have no history.
        return nested.SwappedInputs((args, kwargs), _aliased)

    def end_pass(self, *arguments: Any) -> None:
        """Count all gradients as missing if the model itself turned gradients off after the graph
        began. With ``once``, call this after the pass; else it is a hook."""
        # a model that switches gradients itself gives back the mode that it found, which was off
        if self._may_be_cut and self._sources and not torch.is_grad_enabled():
            self._lost += [record.layer for record in self._sources]

    def _begin_graph(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether the graph begins at this call of a layer, since nothing before it is recorded.
        Turns gradients on where they are off and the pass allows it."""
        if not torch.is_grad_enabled():
            return self._turn_on()
        if _some_require_gradients(args, kwargs):
            return False
        return not any(parameter.requires_grad for parameter in module.parameters())

    def _turn_on(self) -> bool:
        """Turn gradients on, at most once in a pass; False if the network itself has turned them
        off here. A block around the pass gives the caller's mode back."""
        if self._was_cut or not self._may_be_cut:
            return False  # the network itself has turned gradients off here
        self._was_cut = True
        torch.set_grad_enabled(True)  # the caller's mode comes back when `untouched` ends
        return True

    def _continue_from_aliases(
        self, layer: str, swapped: nested.SwappedInputs | None, output: Any
    ) -> Any:
        """Hand the history of overwritten aliases to the tensors themselves. Returns ``output``
        with the tensors in the places of their aliases, or None if nothing was overwritten."""
        if swapped is None:
            return None
        continued = {}
        for tensor, aliased in swapped.pairs:
            for _, view in nested.paths(output):
                # who overwrites this view changes the tensor's memory, but not its history
                if view._base is aliased:
                    self._overwritable.append((layer, tensor, tensor._version))
            if is_alias(aliased):  # nothing has overwritten it
                continue
            if try_continue_from(tensor, aliased):
                continued[id(aliased)] = tensor
            else:
                self._lost.append(layer)
        return nested.edit(output, lambda path, t: continued.get(id(t), t)) if continued else None

    # What is recorded of each call

    def _is_wanted(self, layer: str) -> bool:
        """Whether the gradient of the next call of a captured layer is recorded: the caller may
        have named one call."""
        calls = self._wanted.get(layer)
        return calls is not None and (None in calls or len(self._calls[layer]) in calls)

    def _watch_output(self, group: HookGroup, layer: str, module: nn.Module) -> None:
        """Register the hooks that record a module's outputs and their gradients. The graph begins
        at the module's last part if nothing has been recorded before it."""
        running: list[Versions] = []
        """The inputs of the calls that have begun. A module may call itself: only when a call ends
        is it known which one it is."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            """Note the inputs of a call that begins, to tell an output that is the input itself."""
            running.append(_versions_of((args, kwargs)))

        def begin(module: nn.Module, args: Any, kwargs: Any) -> nested.SwappedInputs | None:
            """Replace the inputs of the module's last part by aliases with a graph, if the graph
            begins there."""
            is_inside = bool(running)  # a last part may also be called from elsewhere
            is_wanted = is_inside and self._is_wanted(layer)
            if not is_wanted or not self._begin_graph(module, args, kwargs):
                return None
            return nested.SwappedInputs((args, kwargs), _aliased)

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            """Record the output of a call that ends; what is returned replaces the output."""
            # a call that began before the hooks were registered is not in `running`
            inputs = running.pop() if running else {}
            return self._leave(layer, inputs if self._is_wanted(layer) else None, output)

        if layer in self._wanted:
            put(group, partial(module.register_forward_pre_hook, with_kwargs=True), enter)
            swap = InputSwap(begin, partial(self._continue_from_aliases, layer))
            put_swap(group, _last_in(module), swap)
        put(group, module.register_forward_hook, leave)

    def _watch_input(self, group: HookGroup, layer: str, module: nn.Module) -> None:
        """Register the hook that records a module's first input tensor and its gradient. The module
        gets an alias of the tensor, so that only its own use of it counts."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> nested.SwappedInputs | None:
            """Record the input of a call that begins, and replace it by an alias with a graph."""
            first_input = nested.first_tensor((args, kwargs))
            if first_input is None:
                raise LayerError(
                    f"layer {layer!r} must be given a tensor, got none; choose another layer"
                )
            is_wanted = self._is_wanted(layer)  # of the next call, which the record counts
            record = self._recorded(layer, first_input)
            if record is None or not is_wanted:
                return None
            if not self._turn_on_for(record, first_input):
                return None
            aliased = alias(first_input)
            self._sources[record] = self._attach(record, aliased)
            return nested.SwappedInputs(
                (args, kwargs), lambda tensor: aliased if tensor is first_input else tensor
            )

        put_swap(group, module, InputSwap(enter, partial(self._continue_from_aliases, layer)))

    def _leave_attention(
        self, layer: str, module: nn.Module, args: Any, output: torch.Tensor
    ) -> Any:
        """Record a part of an attention, such as its weights, and let gradients arrive at it. The
        part counts as passed on, so that a copy of it replaces it in the network."""
        return self._leave(layer, _versions_of(output) if self._is_wanted(layer) else None, output)

    def _leave(self, layer: str, inputs: Versions | None, output: Any) -> Any:
        """Record the output of one call of a layer; return the output with replacements, or None.
        ``inputs`` are the call's tensors with their versions, None if no gradient is wanted."""
        first_output = nested.first_tensor(output)
        if first_output is None or first_output.is_nested:
            kind = type(output).__name__ if first_output is None else "a nested tensor"
            raise LayerError(
                f"layer {layer!r} must return a tensor, got {kind}; choose another layer"
            )
        record = self._recorded(layer, first_output)
        if record is None:
            return None
        # each tensor once, also if it is in the output twice
        tensors: dict[int, tuple[TensorRecord, torch.Tensor]] = {
            id(first_output): (record, first_output)
        }
        for path, tensor in nested.paths(output) if self._every else ():
            if id(tensor) not in tensors:
                tensors[id(tensor)] = TensorRecord(tensor.detach().clone()), tensor
            tensor_record, _ = tensors[id(tensor)]
            record.tensors[path[0] if len(path) == 1 else path] = tensor_record
        # the graph begins at the output, not at the aliases of its last part's inputs: what else
        # the layer computed has no history
        begins_late = not torch.is_grad_enabled()
        if inputs is None or not self._turn_on_for(record, first_output):
            return None
        if begins_late:
            self._lost.append(layer)
        if not first_output.requires_grad:
            self._must_have_histories(layer, first_output, inputs, output)
        replacements = self._attach_all(record, tensors.values(), inputs)
        if not replacements:
            return None
        return nested.edit(output, lambda path, t: replacements.get(id(t), t))

    def _attach_all(
        self,
        record: LayerCall,
        tensors: Iterable[tuple[TensorRecord, torch.Tensor]],
        inputs: Versions,
    ) -> dict[int, torch.Tensor]:
        """Collect the gradients of the tensors of one output, given with their records, the first
        the record's own; return the tensors that must replace others, by the ids of these."""
        sources = GradientSources([], [])
        replacements: dict[int, torch.Tensor] = {}
        for tensor_record, tensor in tensors:
            if not tensor.is_floating_point():
                continue
            # paths around the layer, by a tensor that it only passes on, are not its own
            tensor_in_use = (
                copy_with_history(tensor) if _is_passed_through(tensor, inputs) else tensor
            )
            attached = self._attach(tensor_record, tensor_in_use)
            if not attached.summed:
                # Autograd allows no mark on the tensor: its copy gets the history.
                self._lost.append(record.layer)
                tensor_in_use = copy_with_history(tensor)
                attached = self._attach(tensor_record, tensor_in_use)
            if tensor_in_use is not tensor:
                replacements[id(tensor)] = tensor_in_use
            sources_of_tensor = (
                sources.summed if tensor_record is record else sources.requested_with
            )
            sources_of_tensor.extend(attached.summed)
            sources.requested_with.extend(attached.requested_with)
        self._sources[record] = sources
        self._without_graph.discard(record)
        return replacements

    def _recorded(self, layer: str, tensor: torch.Tensor) -> LayerCall | None:
        """Add a record with a copy of ``tensor`` for the call of ``layer`` that runs; None if the
        call needs none."""
        calls = self._calls[layer]
        # a checkpoint repeats calls in the backward pass: these need a record only if the first run
        # had no graph
        if torch._C._current_graph_task_id() != -1:
            same_calls = [
                record for record in calls if torch.equal(record.activation, tensor.detach())
            ]
            if same_calls:
                return next(
                    (record for record in same_calls if record in self._without_graph), None
                )
        record = LayerCall(preserve.detached(tensor).clone(), layer=layer, call=len(calls))
        self.records.append(record)
        calls.append(record)
        return record

    def _turn_on_for(self, record: LayerCall, tensor: torch.Tensor) -> bool:
        """Turn gradients on if they may be, so that autograd records the uses of ``tensor``, and
        return whether they are on."""
        name = record.layer
        if not tensor.is_floating_point():
            verb = "be given" if place_of(name, self._model).part else "return"
            raise LayerError(
                f"layer {name!r} must {verb} floating-point values, got {tensor.dtype}; choose "
                "another"
            )
        if tensor.is_inference():
            raise LayerError(
                f"layer {name!r} must run outside torch.inference_mode() for gradients; use "
                "no_grad()"
            )
        if torch.is_grad_enabled() or self._turn_on():
            return True
        # a stand-in, which no score depends on, so that the record can be asked for its sources
        source = record.activation.detach().requires_grad_()
        self._sources[record] = GradientSources([source], [])
        self._without_graph.add(record)
        return False

    def _must_have_histories(
        self, layer: str, first_output: torch.Tensor, inputs: Versions, output: Any
    ) -> None:
        """Mark the gradient of a layer whose first output has no history as incomplete, if the
        layer computed other outputs without one from its ``inputs``."""
        computed = [
            tensor
            for _, tensor in nested.paths(output)
            if tensor is not first_output and not _is_passed_through(tensor, inputs)
        ]
        without_history = [t for t in computed if t.is_floating_point() and not t.requires_grad]
        if self._was_cut or without_history:
            self._lost.append(layer)

    def _attach(self, record: TensorRecord, tensor: torch.Tensor) -> GradientSources:
        """Collect the gradient of every use of a tensor into ``record``; return what to
        differentiate with respect to, empty where autograd allows no mark on the tensor."""
        # All uses meet at the tensor's Node. Later uses alone meet at a mark put into its history:
        # where it has no Node, and where it is a view, whose later uses go by its base once it has
        # been overwritten. Autograd takes that mark and the view's Node for one, unless the base is
        # requested as well.
        at_node: list[Source] = []
        bases: list[Source] = []
        if tensor.requires_grad:
            at_node.append(self._collect(record, tensor))
            base = tensor._base
            if base is None or not base.requires_grad:
                return GradientSources(at_node, requested_with=[])
            bases.append(get_gradient_edge(base))
        leaf = mark(tensor)
        if leaf is None:
            return GradientSources(at_node, requested_with=[])
        at_mark = self._collect(record, leaf)
        return GradientSources([*at_node, at_mark], requested_with=bases)

    def _collect(self, record: TensorRecord, tensor: torch.Tensor) -> Source:
        """Store a tensor's gradient in ``record`` in any backward pass (with ``once``, the caller
        does); return what to differentiate with respect to."""

        def collect(gradient: torch.Tensor | None) -> None:
            """Store a copy of the gradient; within one backward pass, add to it."""
            if gradient is None:  # there is no derivative
                return
            # A copy: the tensor that autograd passes may be shared with another branch, and may be
            # reused by it.
            copy = gradient.detach().clone()
            task = torch._C._current_graph_task_id()
            # Gradients that arrive on several paths of one pass add up.
            if record.gradient is not None and task == record.task:
                copy += record.gradient
            record.gradient = copy
            record.task = task

        if not self._once:
            tensor.register_hook(collect)  # type: ignore[no-untyped-call]
        return tensor if tensor.is_leaf else get_gradient_edge(tensor)


_PASSING_ON = (nn.Identity, nn.modules.dropout._DropoutNd)
"""Modules that give what they are given, unless they are in training mode."""


def _last_in(module: nn.Module) -> nn.Module:
    """The module whose result is the output of ``module``: the last part of nested `nn.Sequential`
    that does anything. It is ``module`` itself where that is not certain."""
    while runs_in_order(module):
        children = [child for child in module._modules.values() if child is not None]
        last = next(
            (c for c in reversed(children) if c.training or not isinstance(c, _PASSING_ON)), None
        )
        if last is None:
            return module
        module = last
    return module


def _some_require_gradients(args: Any, kwargs: Any) -> bool:
    """Whether a tensor among a call's arguments is part of a graph."""
    return any(tensor.requires_grad for _, tensor in nested.paths((args, kwargs)))


def _aliased(tensor: torch.Tensor) -> torch.Tensor:
    """An alias of a tensor that starts a graph; the tensor itself if it can have no gradient."""
    return alias(tensor) if tensor.is_floating_point() and not tensor.is_inference() else tensor


def _versions_of(values: Any) -> Versions:
    """The tensors inside ``values``, by id, with their present version counters."""
    versions: Versions = {}
    for _, tensor in nested.paths(values):
        if not tensor.is_inference():  # inference tensors count no versions
            versions[id(tensor)] = (tensor, tensor._version)
    return versions


def _is_passed_through(tensor: torch.Tensor, inputs: Versions) -> bool:
    """Whether a layer's output tensor is its input, unaltered, or a tensor that no module computed
    (a parameter, an alias)."""
    entry = inputs.get(id(tensor))
    if entry is not None:
        return entry[1] == tensor._version
    return is_alias(tensor) or (tensor.is_leaf and tensor.requires_grad)


@signal_safe
def capture(model: nn.Module, layers: Where, *, gradients: bool = True) -> Iterator[Capture]:
    """Record the outputs of layers inside the block, and their gradients, inside it or later.

    Args:
        model: any module.
        layers: names, patterns, modules or classes; see `find_places`. A name such as ``conv@0`` is
            one call of a layer that runs several times (without it, the last), and ``conv:input``
            the first tensor that it is given.
        gradients: also record gradients. Where nothing is being recorded by autograd, the graph
            begins at the layer.

    Raises:
        HookError: ``gradients`` is neither True nor False.
        LayerError: a layer is not in the model, or gives no tensor; or, when gradients are read,
            parts of them may be missing.

    The record of a call has the other tensors of a tuple, mapping or dataclass too, by position,
    key or field.

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
    if not isinstance(gradients, bool):
        raise HookError(
            f"gradients of capture must be True or False, got {shown(gradients)}; "
            "HookGroup.backward takes those of full-backward hooks"
        )
    with preserve.recording(torch.is_grad_enabled()), HookGroup(model) as group:
        yield Capture(group, select_places(model, layers), gradients=gradients, every=True)


def read_outputs(
    group: HookGroup, layers: Iterable[str], read: Callable[[torch.Tensor], T]
) -> dict[str, list[T]]:
    """Call ``read`` on the first tensor of each call of the layers while the group is alive. The
    lists of results, by layer, fill during the forward pass."""
    values: dict[str, list[T]] = {}

    def note(layer: str, module: nn.Module, args: Any, output: Any) -> None:
        tensor = nested.first_tensor(output)
        if tensor is not None:
            values[layer].append(read(tensor))

    for layer in layers:
        values[layer] = []
        group.forward(layer, partial(note, layer))
    return values


def why_not_called(model: nn.Module, name: str, calls: int) -> str:
    """The message for a layer, or one of its calls, that did not run in a pass with ``calls`` calls
    of the layer."""
    if calls:
        return f"layer {name!r} must name one of its {calls} calls, counted from 0"
    place = place_of(name, model)
    if place.of_attention:
        return (
            f"layer {name!r} gave nothing: the layer did not run, or {attention_parts.NO_ATTENTION}"
        )
    module = place.module
    parent, _, _ = module.rpartition(".")
    if module and isinstance(submodule(model, parent), nn.MultiheadAttention):
        return (
            f"layer {name!r} was not called: nn.MultiheadAttention reads its weights itself; "
            "choose the attention"
        )
    return (
        f"layer {name!r} was not called in the forward pass; choose one that the model uses for "
        "this input"
    )


def cut_where_allowed(run: Callable[[bool], T]) -> T:
    """Run a forward pass with the graph cut off below the layer, ``run(True)``; if autograd forbids
    that, run all of it with a graph, ``run(False)``, and note that for the user."""
    try:
        return run(True)
    except RuntimeError as error:
        # Autograd refuses to overwrite, with gradients on, a view that was made while they were
        # off.
        if "view was created in no_grad mode" not in str(error):
            raise
    note(
        "the pass is recorded from the input on: the model overwrites a view that was made without "
        "gradients"
    )
    return run(False)
