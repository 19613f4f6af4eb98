"""The steps of a forward pass that relevance rules act on: what each computes, from what, and the
Node that it left.

A `StepRecorder` sees every call of a function, also those that functions of `torch.nn.functional`
written in Python make. Of a step it keeps what a rule needs, as it was: what is overwritten later
is copied just before. Steps that a rule may replace the gradients of are given their inputs through
entrances.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from explain._utils import nested
from explain.hooks.graph import Entrance, Reach, entrance
from explain.hooks.preserve import detached, is_transforming, without_proxy
from explain.hooks.tracer import ModuleTracker, Tracer
from explain.relevance import batch_layout, calls
from explain.relevance.calls import Call, LinearMap
from explain.relevance.table import (
    LAYOUT_NODES,
    LINEAR,
    SCALE_NODES,
    info,
    is_library_operator,
    operation_name,
)

ENTERED = frozenset(
    [
        *LINEAR,
        "deviation",
        "product",
        "quotient",
        "sampling",
        "attention",
        "activation",
        "softmax",
        "other",
    ]
)
"""The kinds of steps that relevance rules replace the gradients of; "other" has no rule, and is
accounted for."""
COMPARED = frozenset(
    [
        "rectifier",
        "activation",
        "product",
        "quotient",
        "matrixproduct",
        "softmax",
        "attention",
        "deviation",
        "maximum",
    ]
)
"""The kinds of steps that differences from a reference are shared out at."""
_POSITIONS = {"offset": "position", "rois": "position", "grid": "position", "mask": "gate"}
"""What the arguments of deformed convolutions and sampling are that are no signal."""


class Dependence:
    """Tells what depends on the explained inputs from what is made of parameters, numbers and other
    inputs.

    A gradient leads from the one to the inputs. From the other it leads to parameters at most,
    whether they are trained or not, and whether or not the model has registered them: what is
    computed from a detached tensor, or looked up by an index, depends on the input in no way that a
    gradient could follow.

    >>> layer, x = torch.nn.Linear(3, 3), torch.ones(1, 3, requires_grad=True)
    >>> dependence = Dependence([x])
    >>> [dependence.of(made) for made in (layer(x), layer.weight.T * 2, layer(x.detach()))]
    [True, False, False]
    """

    def __init__(self, sources: Sequence[Tensor]) -> None:
        """Start a forward pass with the explained inputs; Nodes of earlier passes do not count."""
        self._sources = {id(tensor): tensor for tensor in sources}
        self._reach = Reach(sources, since=torch._C._autograd._get_sequence_nr())

    def of(self, tensor: Tensor) -> bool:
        """Whether a gradient leads from a tensor of this forward pass back to an explained
        input."""
        tensor = without_proxy(tensor)
        if not tensor.requires_grad:
            return False
        node = tensor.grad_fn
        return id(tensor) in self._sources if node is None else self._reach.of(node)

    def see(self, call: Call, result: Any) -> None:
        """Do nothing: the autograd graph already tells the dependence of a call's result.

        `StepRecorder` calls this after each call; `Influence` overrides it.
        """

    def rest_of_base(self, view: Tensor) -> Tensor | None:
        """The values of the constant that ``view`` is a part of, with zeros where the view is.

        `StepRecorder` asks after it has written a signal into ``view``: what the constant holds
        besides counts as added to the signal. None where ``view`` has no base, where the base
        depended on the input before, or where all the rest is zero.
        """
        base = view._base
        if base is None or base.grad_fn is None or not base.grad_fn.name().endswith("CopySlices"):
            return None
        overwritten = base.grad_fn.next_functions[0][0]
        if self._reach.of(overwritten):
            return None
        rest = base.detach().clone()
        if rest.stride() != base.stride():
            return None
        rest.as_strided(
            view.shape, view.stride(), view.storage_offset() - base.storage_offset()
        ).zero_()
        return rest if bool(rest.any()) else None


@dataclass(eq=False)
class Snapshot:
    """A tensor as it was when it was noted, and whether something has used it.

    A result that a rectifier has overwritten at once is known where it was positive, and no
    gradient comes back elsewhere. One that can be computed ``again`` is recomputed after it has
    been overwritten.
    """

    kept: Tensor | None
    is_result: bool = False
    again: "tuple[LinearMap, Snapshot] | None" = None
    used: bool = False

    @property
    def tensor(self) -> Tensor:
        """The tensor's values at the time of the snapshot, recomputed if the original was
        overwritten."""
        if self.kept is None and self.again is not None:
            linear, x = self.again
            return linear.run(x.tensor, linear.weight, linear.bias)
        assert self.kept is not None
        return self.kept


class Snapshots:
    """Keeps tensors, and copies those that are about to be overwritten."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Snapshot]] = {}

    def keep(self, tensor: Tensor, **more: Any) -> Snapshot:
        """Take a snapshot of a tensor of the forward pass: no copy yet, only when `overwriting` is
        told of its memory.

        ``more`` are fields of `Snapshot`.
        """
        snapshot = Snapshot(detached(tensor), **more)
        self._kept.setdefault(calls.storage_of(tensor), []).append(snapshot)
        return snapshot

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Mark the snapshots that share memory with ``tensors`` as used: something was computed
        from them.

        The recorder calls this after each call. A used result is copied even if a ReLU overwrites
        it.
        """
        for tensor in tensors:
            for snapshot in self._kept.get(calls.storage_of(tensor), ()):
                snapshot.used = True

    def overwriting(self, tensor: Tensor, kind: str) -> None:
        """Copy the snapshots in a tensor's memory, just before the operation ``kind`` overwrites
        it.

        A result that nothing has used is not copied before an in-place ReLU of the same shape: no
        gradient comes back from where it was negative. One that can be recomputed drops its values
        instead.
        """
        storage = calls.storage_of(tensor)
        for snapshot in self._kept.pop(storage, ()):
            if snapshot.kept is None:
                continue
            if (
                kind == "relu"
                and snapshot.is_result
                and not snapshot.used
                and snapshot.kept.shape == tensor.shape
            ):
                self._kept.setdefault(storage, []).append(snapshot)
            else:
                snapshot.kept = None if snapshot.again is not None else snapshot.kept.clone()


@dataclass(eq=False)
class Step:
    """One step: its kind in the words of the table, the call, the module that it ran in, and the
    Node that it left.

    ``dependent`` are the places of the arguments that a gradient leads to, ``entrances`` how it
    leaves the step there, and ``values`` the arguments there. ``output`` says which of its Node's
    outputs its result is, and ``kept_result`` is the result as it was. ``map`` is the linear map,
    where it is one, and ``preceding`` the map whose result a normalisation was given. ``scales``
    are the arguments that are no signal: a "gate", a "denominator", the "weights" of a softmax, or
    a "position" where something is read. No rule replaces the gradients of a step without
    entrances.
    """

    kind: str
    call: Call
    module: str | None
    dependent: Sequence[int]
    node: Node
    output: int = 0
    entrances: Mapping[int, Entrance] = field(default_factory=dict)
    values: Mapping[int, Snapshot] = field(default_factory=dict)
    kept_result: Snapshot | None = None
    map: LinearMap | None = None
    preceding: "Step | None" = None
    scales: Mapping[int, str] = field(default_factory=dict)
    images: Tensor | None = None
    """Which image each value of the result belongs to, as `BatchLayout` tells it; None where the
    images come first."""
    argument_images: Mapping[int, Tensor | None] = field(default_factory=dict)
    """The same for the arguments that a gradient leads to, by their places."""
    nearest: bool = False
    """Of a map, whether no other, but for normalisations, lies between it and the input."""
    rectified: bool = False
    """Of a map, whether only rectifiers are given its result, so that a gradient arrives only where
    it is positive."""

    @property
    def function(self) -> str:
        """The name of the operation, as in `operation_name`: ``"softmax"``, ``"add"``."""
        return self.call.name

    @property
    def options(self) -> Mapping[str, Any]:
        """The arguments of the call by name (tensors without their graphs), where the names are
        known."""
        return self.call.options

    @property
    def linear(self) -> LinearMap:
        """The linear map z = W x + b that this step computes; only for steps that have a
        ``map``."""
        assert self.map is not None
        return self.map

    @property
    def x(self) -> Snapshot:
        """The signal that entered the step: a linear map's input, else its first dependent
        argument."""
        return self.values[self.dependent[0] if self.map is None else self.linear.place]

    @property
    def result(self) -> Snapshot:
        """The result of the step as it was computed; only for steps with entrances."""
        assert self.kept_result is not None
        return self.kept_result

    @property
    def first(self) -> bool:
        """Whether this is the first map that the input meets: a convolution, a linear layer or a
        product, no normalisation.

        Composites ask this for ``When(first=True)``; it holds only after `with_merged_maps` set
        ``nearest``.
        """
        return self.nearest and self.kind != "batchnorm"

    @property
    def constants(self) -> Mapping[int, Any]:
        """The numbers and tensors (without graphs) among the arguments that do not depend on the
        input, as they were at the call, by their place."""
        values = {
            i: self.values[i].tensor if i in self.values else value
            for i, value in enumerate(self.call.flat)
        }
        constants = {i: value for i, value in values.items() if i not in self.dependent}
        return {
            i: calls.detach(v)
            for i, v in constants.items()
            if isinstance(v, (int, float, complex, Tensor))
        }


class StepRecorder(Tracer):
    """Notes the steps of this thread's forward pass, until it is left.

    Steps of some ``kinds`` are given their inputs through entrances, and what they are given and
    give is kept; of `COMPARED` kinds, constants too. ``dependence`` tells constants from what
    depends on the input, and ``layout`` follows the images of the batch.

    >>> x, F = torch.randn(2, 3, requires_grad=True), torch.nn.functional
    >>> layer = nn.Linear(3, 3)
    >>> with StepRecorder(layer, Dependence([x])) as recorder:
    ...     y = F.softmax(layer(x).relu_(), -1) * x
    >>> [step.kind for step in recorder.steps]
    ['dense', 'rectifier', 'softmax', 'product']
    """

    def __init__(
        self,
        model: nn.Module,
        dependence: Dependence,
        *,
        kinds: Collection[str] = ENTERED,
        layout: batch_layout.BatchLayout | None = None,
    ) -> None:
        """Prepare to record the steps of a forward pass of ``model``, for LRP, DeepLIFT
        (``kinds=COMPARED``) or FullGrad (no kinds).

        ``dependence`` tells what depends on the explained inputs, ``layout`` which image a value
        belongs to; recorders of one pass share it.
        """
        self._kinds = kinds
        self._compares = kinds is COMPARED
        self.steps: list[Step] = []
        self._running = ModuleTracker(model)
        self._dependence = dependence
        self._keeper = Snapshots()
        self._maps: dict[Node, tuple[Step, int]] = {}
        self._layout = layout or batch_layout.BatchLayout(1)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of the forward pass, and note it as a step where a rule needs it.

        `Tracer` calls this in place of every PyTorch function. The order matters: snapshots are
        taken before the call overwrites anything; uses and dependence are noted after it.
        """
        name = operation_name(func)
        if name == "iter":  # iterating over a tensor gives its rows
            return iter(self.called(torch.Tensor.unbind, args, {}))
        if name in ("linalg_multi_dot", "chain_matmul"):
            matrices = [tensor for _, tensor in nested.paths(args)]
            return functools.reduce(lambda a, b: self.called(torch.matmul, (a, b), {}), matrices)
        if info(name).has("query"):
            result = func(*args, **kwargs)
            if name == "get" and isinstance(result, Tensor) and result.requires_grad:
                self._layout.see(Call(func, func.__self__.__name__, args, {}), [0], result)
            return result
        call = calls.as_batch_norm(Call(func, name, args, kwargs))
        for tensor in call.overwritten:
            self._keeper.overwriting(tensor, name)
        dependent = [i for i in call.tensor_places if self._dependence.of(call.flat[i])]
        if (
            is_transforming()
            and call.info.kind is not None
            and any(map(self._dependence.of, call.tensors))
        ):
            # Inside a transform, tensors are only proxies of those that have the graph.
            must = (
                "relevance must be propagated" if self._kinds else "fullgrad must see what is added"
            )
            module = self._running()[0]
            raise calls.inside_transform(must, f"{name}()", module, "use integratedgradients")
        if not dependent or not torch.is_grad_enabled():
            result = call.make()
        else:
            kind = self._kind(call, dependent)
            result = (
                self._follow(call, dependent)
                if kind is None
                else self._record(kind, call, dependent)
            )
        self._keeper.use(call.tensors)
        self._dependence.see(call, result)
        return result

    def _kind(self, call: Call, dependent: Sequence[int]) -> str | None:
        """The kind of step that a call is noted as: the table's kind if a rule can act on it,
        "other" if it may lose relevance but has no rule, None if it is not noted."""
        kind = call.info.kind
        if kind is not None and (not self._kinds or self._has_rule(call, dependent)):
            return kind
        return "other" if "other" in self._kinds and calls.is_watched(call) else None

    def _follow(self, call: Call, dependent: Sequence[int]) -> Any:
        """Make a call that is no step, and follow which image each value of its result belongs
        to."""
        result = call.make()
        self._layout.see(call, dependent, result)
        return result

    def _record(self, kind: str, call: Call, dependent: Sequence[int]) -> Any:
        """Make a call, and add it to ``steps``; return what the model gets as the call's result.

        In-place calls, and calls on views, run out of place where autograd would hide their Node or
        lose their input; the result is then written where the model expects it. Dependent arguments
        are replaced by entrances, at which a rule can replace the gradient that leaves.
        """
        has_no_copy = is_library_operator(call.name) and call.overwritten
        if kind == "other" and (has_no_copy or call.name == "grad"):
            return self._record_name(call, dependent)
        first_argument = call.flat[0]
        call_to_run = call
        if call.in_place and (kind in self._kinds or first_argument._is_view()):
            call_to_run = call.out_of_place() or call
        is_out_of_place = call_to_run is not call
        replaced = {
            i: first_argument.clone()
            for i, value in enumerate(call.flat)
            if is_out_of_place and value is first_argument
        }
        values: dict[int, Snapshot] = {}
        entrances: dict[int, Entrance] = {}
        if kind in self._kinds and not call_to_run.in_place:
            values = self._values(kind, call, dependent, replaced)
            replaced |= {i: entrance(replaced.get(i, call.flat[i])) for i in dependent}
            entrances = {i: replaced[i].grad_fn for i in dependent}
            for i in dependent:  # for other recorders, which are shown the entrances
                self._layout.note_same(call.flat[i], replaced[i])
        elif call.in_place and 0 not in dependent:  # the result will overwrite it
            values = {0: Snapshot(detached(first_argument).clone())}
        scales = _scales(kind, call, dependent) if entrances else {}
        output = call_to_run.make(replaced)
        if kind != "other":
            output = self._with_node(call_to_run, output)
        self._layout.see(call_to_run, dependent, output)
        if kind == "other":
            if _shares_memory(call, output):
                # A copy of a view would hide later writes from its base, so the call runs as it is.
                return (
                    self._record_name(call, dependent)
                    if is_library_operator(call.name)
                    else call.make()
                )
            output = _apart(output)
        results = _tensors_in(output)
        for result in results if kind == "other" else results[:1]:
            if result.grad_fn is not None:
                step = self._add(
                    kind,
                    call,
                    dependent,
                    result,
                    entrances=entrances,
                    values=values,
                    scales=scales,
                )
                if entrances:
                    self._keep_result(step, result)
        return self._written(first_argument, output) if is_out_of_place else output

    def _with_node(self, call: Call, output: Any) -> Any:
        """The output of a call that has a rule, cloned where its Node might be hidden or it has no
        graph."""
        if isinstance(output, Tensor) and output._is_view() and not call.in_place:
            # overwriting a view would hide its Node; instance normalisation returns one
            output = output.clone()
        if not self._kinds and call.info.has("biased") and not output.requires_grad:
            # computed from inputs without a graph (another image): a graph begins here
            output = output.detach().requires_grad_().clone()
        return output

    def _values(
        self, kind: str, call: Call, dependent: Sequence[int], replaced: Mapping[int, Tensor]
    ) -> dict[int, Snapshot]:
        """Snapshots of a step's arguments, by their place, as rules read them in the backward pass.

        These are the dependent arguments; if steps are compared with a reference (DeepLIFT), the
        first three arguments, constants and numbers too. ``replaced`` has the tensors that the call
        gets instead.
        """
        values = {}
        for i in range(min(3, len(call.flat))) if self._compares else dependent:
            value = replaced.get(i, call.flat[i])
            if isinstance(value, Tensor) and (i < 3 or kind != "attention"):
                values[i] = self._keeper.keep(value)
            elif isinstance(value, (int, float, complex)) and not isinstance(value, bool):
                dtype = torch.result_type(call.tensors[0], value)
                values[i] = Snapshot(call.tensors[0].new_tensor(value, dtype=dtype))
        return values

    def _keep_result(self, step: Step, result: Tensor) -> None:
        """Set ``kept_result`` of a step with entrances, and ``map`` and ``preceding`` if it is a
        linear map.

        ``preceding`` is the linear map whose unchanged result a batch normalisation was given, so
        that `with_merged_maps` can merge the two.
        """
        if step.kind in LINEAR and not self._compares:
            positions = _positions(step.call, step.dependent)
            step.map = calls.linear_map(
                step.call, [i for i in step.dependent if i not in positions]
            )
        recomputation = None
        if step.map is not None:
            # the map that gave x, unless x was overwritten since
            if step.kind == "batchnorm":
                x = step.call.flat[step.linear.place]
                preceding, version = self._maps.get(x.grad_fn, (None, 0))
                step.preceding = preceding if version == x._version else None
                recomputation = step.linear, step.x
            else:
                self._maps[step.node] = step, result._version
        step.kept_result = self._keeper.keep(
            result, is_result=not self._compares, again=recomputation
        )

    def _record_name(self, call: Call, dependent: Sequence[int]) -> Any:
        """Make a call that cannot be given other inputs, and note its name alone, as a step without
        entrances.

        These are operators of libraries that overwrite their input or return a view, and gradients
        that the model itself takes.
        """
        result = self._follow(call, dependent)
        for tensor in call.results(result):
            if tensor.grad_fn is not None:
                self._add("other", call, dependent, tensor)
        return result

    def _add(
        self,
        kind: str,
        call: Call,
        dependent: Sequence[int],
        result: Tensor,
        **by_place: Any,
    ) -> Step:
        """Append the `Step` that left the Node of ``result``; ``by_place`` are further fields of
        it."""
        node = result.grad_fn
        assert node is not None
        module = self._running()[0]
        images = self._layout.of(result)
        argument_images = {i: self._layout.of(call.flat[i]) for i in dependent}
        step = Step(
            kind,
            call,
            module,
            dependent,
            node,
            result.output_nr,
            images=images,
            argument_images=argument_images,
            **by_place,
        )
        self.steps.append(step)
        return step

    def _written(self, destination: Tensor, result: Tensor) -> Tensor:
        """Write a result that was computed out of place into ``destination``, as the in-place call
        would have done.

        If that is a view of a constant, the rest of the constant is noted as a step "sum": it adds
        to the signal.
        """
        destination.copy_(result)
        rest_of_constant = self._dependence.rest_of_base(destination)
        base = destination._base
        if rest_of_constant is not None and base is not None and base.grad_fn is not None:
            self._add("sum", Call(torch.add, "add", (base, rest_of_constant), {}), [0], base)
        return destination

    def _has_rule(self, call: Call, dependent: Sequence[int]) -> bool:
        """Whether a relevance rule can act on a call whose operation the table gives a kind.

        Each exception is a case in which the rule of that kind would give wrong shares. For
        comparison (DeepLIFT), products of two signals and maxima over places are steps; for LRP,
        products with a constant are linear maps.
        """
        kind = call.info.kind
        if kind in LINEAR:  # no rule separates what is added to a product of two signals
            if call.info.has("adds to first") and (
                call.name != "addmm" or tuple(dependent) != (1,)
            ):
                return False
            if "mask" in call.info.arguments and bool((call.named["mask"] < 0).any()):
                return False  # signs of weights would not be those of contributions
            if (
                len(dependent) - len(_positions(call, dependent)) > 1
                and call.named.get("bias") is not None
            ):
                return False
        if not self._compares and any(tensor.is_complex() for tensor in call.tensors):
            return False
        if kind == "activation":
            return tuple(dependent) == (0,)  # not, for example, a number to the power of a signal
        if call.name == "addcmul" and {1, 2} <= set(dependent):
            return False  # adds a product of two signals
        if not self._compares:  # LRP has no rule for a constant divided by a signal
            return kind != "quotient" or _scales("quotient", call, dependent).keys() != set(
                dependent
            )
        if kind == "matrixproduct":  # a product with a constant is linear and needs no rule
            of_matrices = call.name in ("matmul", "linalg_matmul", "mm", "bmm") and all(
                tensor.ndim > 1 for tensor in call.tensors
            )
            return of_matrices and len(dependent) > 1
        return kind != "maximum" or call.name.startswith(("max_pool", "adaptive_max_pool", "amax"))


def _tensors_in(output: Any) -> list[Tensor]:
    """The tensors that a call of the forward pass returned, alone or in a list or tuple."""
    results = output if isinstance(output, (list, tuple)) else (output,)
    return [result for result in results if isinstance(result, Tensor)]


def _shares_memory(call: Call, output: Any) -> bool:
    """Whether a call's result shares memory with an argument: a view, or a tensor that was
    overwritten.

    Such a result cannot be copied without hiding later writes.
    """
    storages = {calls.storage_of(tensor) for tensor in call.tensors}
    return any(calls.storage_of(result) in storages for result in _tensors_in(output))


def _apart(output: Any) -> Any:
    """Clone the results of a call if they have several Nodes, so that each gets its own relevance.

    One result may be made of another: the output of an LSTM of its state.
    """
    nodes = {result.grad_fn for result in _tensors_in(output) if result.grad_fn is not None}
    if len(nodes) < 2:
        return output
    return type(output)(t.clone() if isinstance(t, Tensor) else t for t in output)


def _scales(kind: str, call: Call, dependent: Sequence[int]) -> dict[int, str]:
    """The dependent arguments of a call that are no signal, by place, with what they are instead.

    That is a "denominator", a "gate", the "weights" of an attention, or a "position". Rules send no
    relevance there. Where all factors of a product are such, each counts as a signal: ``{}``.
    """
    if kind == "quotient":
        below = 0 if call.name.startswith("r") else 1
        return {i: "denominator" for i in dependent if i == below}
    if kind not in ("product", "matrixproduct"):
        return _positions(call, dependent)
    scales = {i: scale for i in dependent if (scale := _scale(call.flat[i])) is not None}
    return scales if len(scales) < len(dependent) else {}


def _positions(call: Call, dependent: Sequence[int]) -> dict[int, str]:
    """The dependent arguments that say where or how much of a signal is read, by place ("position"
    or "gate"): offsets and masks of deformed convolutions, boxes and grids of sampling."""
    if _POSITIONS.keys().isdisjoint(call.info.arguments):
        return {}
    names = [*call.info.arguments[: len(call.args)], *call.kwargs]
    return {i: _POSITIONS[names[i]] for i in dependent if names[i] in _POSITIONS}


def _scale(tensor: Tensor) -> str | None:
    """What kind of scale a factor of a product is: "weights" behind a softmax, "gate" behind a
    sigmoid or an inverse root, None for a signal.

    It is read from the autograd graph; operations that only change the layout are looked through.
    """
    node = tensor.grad_fn
    while node is not None:
        name = node.name()
        if name.startswith(SCALE_NODES):
            return "weights" if name.startswith("Softmax") else "gate"
        if not name.startswith(LAYOUT_NODES) or len(node.next_functions) != 1:
            return None
        node = node.next_functions[0][0]
    return None
