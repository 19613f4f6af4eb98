"""The steps of a forward pass that relevance rules act on: what each computes, from what, and the
Node that it left.

A `StepRecorder` sees every call of a function, also those that functions of `torch.nn.functional`
written in Python make. Of a step it keeps what a rule needs, as it was: what is overwritten later
is copied just before. Steps that a rule may replace the gradients of are given their inputs through
entrances.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

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
        self._sources = {id(tensor): tensor for tensor in sources}
        self._reach = Reach(sources, since=torch._C._autograd._get_sequence_nr())

    def of(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the explained inputs."""
        tensor = without_proxy(tensor)
        if not tensor.requires_grad:
            return False
        node = tensor.grad_fn
        return id(tensor) in self._sources if node is None else self._reach.of(node)

    def see(self, call: Call, result: Any) -> None:
        """Follow a call that has been made; here, the graph does so."""

    def rest_of_base(self, view: Tensor) -> Tensor | None:
        """The rest of the constant that a view belongs to, after the view was overwritten.

        The constant has become something that depends on the input in this part of it. None where
        it did so before, or where all the rest is zero.
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
        """The tensor as it was, computed again where it was overwritten."""
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
        """Keep a tensor as it is now."""
        kept = Snapshot(detached(tensor), **more)
        self._kept.setdefault(calls.storage_of(tensor), []).append(kept)
        return kept

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Note that something is computed from tensors."""
        for tensor in tensors:
            for kept in self._kept.get(calls.storage_of(tensor), ()):
                kept.used = True

    def overwriting(self, tensor: Tensor, kind: str) -> None:
        """Take copies of what is about to be overwritten; a result that is rectified at once is
        left alone."""
        where = calls.storage_of(tensor)
        for snapshot in self._kept.pop(where, ()):
            if snapshot.kept is None:
                continue
            if (
                kind == "relu"
                and snapshot.is_result
                and not snapshot.used
                and snapshot.kept.shape == tensor.shape
            ):
                self._kept.setdefault(where, []).append(snapshot)
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
        """The name of the operation."""
        return self.call.name

    @property
    def options(self) -> Mapping[str, Any]:
        """The arguments by name, where the names are known."""
        return self.call.options

    @property
    def linear(self) -> LinearMap:
        """The linear map that it is."""
        assert self.map is not None
        return self.map

    @property
    def x(self) -> Snapshot:
        """What a step of one signal was given; of several, the first."""
        return self.values[self.dependent[0] if self.map is None else self.linear.place]

    @property
    def result(self) -> Snapshot:
        """The result of a step with entrances."""
        assert self.kept_result is not None
        return self.kept_result

    @property
    def first(self) -> bool:
        """Whether the input meets this map first: a convolution, a linear layer or a product, no
        normalisation."""
        return self.nearest and self.kind != "batchnorm"

    @property
    def constants(self) -> Mapping[int, Any]:
        """The tensors and numbers among the arguments that do not depend on the input, by their
        place, as they were."""
        values = {
            i: self.values[i].tensor if i in self.values else value
            for i, value in enumerate(self.call.flat)
        }
        constants = {i: value for i, value in values.items() if i not in self.dependent}
        return {
            i: calls.detach(v) for i, v in constants.items() if isinstance(v, (int, float, Tensor))
        }


class StepRecorder(Tracer):
    """Notes the steps of this thread's forward pass, until it is left.

    Steps of some ``kinds`` are given their inputs through entrances, and what they are given and
    give is kept; of `COMPARED` kinds, constants too. ``dependence`` tells constants from what
    depends on the input. ``images`` is how many there are in the batch.

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
        images: int = 1,
    ) -> None:
        self._kinds = kinds
        self._compares = kinds is COMPARED
        self.steps: list[Step] = []
        self._running = ModuleTracker(model)
        self._dependence = dependence
        self._keeper = Snapshots()
        self._maps: dict[Node, tuple[Step, int]] = {}
        self._layout = batch_layout.BatchLayout(images)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = operation_name(func)
        if name == "iter":  # of a tensor, which gives its rows
            return iter(self.called(torch.Tensor.unbind, args, {}))
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
            # Tensors are proxies of those that the gradient leads to.
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
        """The kind of step that a call is; "other", if no rule can act on it; None, if nothing is
        noted of it."""
        kind = call.info.kind
        if kind is not None and (not self._kinds or self._has_rule(call, dependent)):
            return kind
        return "other" if "other" in self._kinds and calls.is_watched(call) else None

    def _follow(self, call: Call, dependent: Sequence[int]) -> Any:
        """Make a call, and follow which image the values of its result belong to."""
        result = call.make()
        self._layout.see(call, dependent, result)
        return result

    def _record(self, kind: str, call: Call, dependent: Sequence[int]) -> Any:
        """Make a call, and note it as a step; out of place, where autograd would hide its Node or
        its input."""
        if kind == "other" and is_library_operator(call.name) and call.overwritten:
            return self._record_name(call, dependent)
        first = call.flat[0]
        run = call
        if call.in_place and (kind in self._kinds or first._is_view()):
            run = call.out_of_place() or call
        apart = run is not call
        replaced = {
            i: first.clone() for i, value in enumerate(call.flat) if apart and value is first
        }
        values: dict[int, Snapshot] = {}
        entrances: dict[int, Entrance] = {}
        if kind in self._kinds and not run.in_place:
            values = self._values(kind, call, dependent, replaced)
            replaced |= {i: entrance(replaced.get(i, call.flat[i])) for i in dependent}
            entrances = {i: replaced[i].grad_fn for i in dependent}
        elif call.in_place and 0 not in dependent:  # the result will be in its place
            values = {0: Snapshot(detached(first).clone())}
        scales = _scales(kind, call, dependent) if entrances else {}
        output = run.make(replaced)
        if kind != "other":
            output = self._with_node(run, output)
        self._layout.see(run, dependent, output)
        if kind == "other":
            if _shares_memory(call, output):
                # What is written into a view has to be seen in what it is a view of.
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
        return self._written(first, output) if apart else output

    def _with_node(self, run: Call, output: Any) -> Any:
        """The output of a call that has a rule, with a Node that nothing hides and that has a
        graph."""
        if isinstance(output, Tensor) and output._is_view() and not run.in_place:
            # what overwrites a view would hide its Node; instance normalisation gives one
            output = output.clone()
        if not self._kinds and run.info.has("biased") and not output.requires_grad:
            # of another image: its graph begins here
            output = output.detach().requires_grad_().clone()
        return output

    def _values(
        self, kind: str, call: Call, dependent: Sequence[int], replaced: Mapping[int, Tensor]
    ) -> dict[int, Snapshot]:
        """What a step is given; of one that is compared, constants too."""
        values = {}
        for i in range(min(3, len(call.flat))) if self._compares else dependent:
            value = replaced.get(i, call.flat[i])
            if isinstance(value, Tensor) and (i < 3 or kind != "attention"):
                values[i] = self._keeper.keep(value)
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                values[i] = Snapshot(torch.tensor(value).to(call.tensors[0]))
        return values

    def _keep_result(self, step: Step, result: Tensor) -> None:
        """Keep what a step with entrances gave, and the linear map that it is."""
        if step.kind in LINEAR and not self._compares:
            positions = _positions(step.call, step.dependent)
            step.map = calls.linear_map(
                step.call, [i for i in step.dependent if i not in positions]
            )
        again = None
        if step.map is not None:
            # what gave x, unless something has been done to it in place
            if step.kind == "batchnorm":
                x = step.call.flat[step.linear.place]
                preceding, version = self._maps.get(x.grad_fn, (None, 0))
                step.preceding = preceding if version == x._version else None
                again = step.linear, step.x
            else:
                self._maps[step.node] = step, result._version
        step.kept_result = self._keeper.keep(result, is_result=not self._compares, again=again)

    def _record_name(self, call: Call, dependent: Sequence[int]) -> Any:
        """Make a call of an operator of which the name is all to note: it overwrites its input, or
        gives a view."""
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
        """Add the step that gave a result, which has a Node; ``by_place`` are fields of it."""
        node = result.grad_fn
        assert node is not None
        module = self._running()[0]
        images = self._layout.of(result)
        of_arguments = {i: self._layout.of(call.flat[i]) for i in dependent}
        step = Step(
            kind,
            call,
            module,
            dependent,
            node,
            result.output_nr,
            images=images,
            argument_images=of_arguments,
            **by_place,
        )
        self.steps.append(step)
        return step

    def _written(self, first: Tensor, result: Tensor) -> Tensor:
        """Write a result where it belongs; the rest of a constant that it is written into counts as
        added."""
        first.copy_(result)
        rest = self._dependence.rest_of_base(first)
        base = first._base
        if rest is not None and base is not None and base.grad_fn is not None:
            self._add("sum", Call(torch.add, "add", (base, rest), {}), [0], base)
        return first

    def _has_rule(self, call: Call, dependent: Sequence[int]) -> bool:
        """Whether a rule can do something with a call; of maxima, compared ones alone, with those
        over places."""
        kind = call.info.kind
        if kind in LINEAR:  # no rule takes apart what adds something to a product of two signals
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
            return tuple(dependent) == (0,)  # and not a number to the power of a signal
        if call.name == "addcmul" and {1, 2} <= set(dependent):
            return False  # a product of signals, added
        if not self._compares:  # of quotients, not a constant over a signal
            return kind != "quotient" or _scales("quotient", call, dependent).keys() != set(
                dependent
            )
        if kind == "matrixproduct":  # with a constant, it is linear
            of_matrices = call.name in ("matmul", "mm", "bmm") and all(
                tensor.ndim > 1 for tensor in call.tensors
            )
            return of_matrices and len(dependent) > 1
        return kind != "maximum" or call.name.startswith(("max_pool", "adaptive_max_pool", "amax"))


def _tensors_in(output: Any) -> list[Tensor]:
    """The tensors that a call returned, alone or several in a list or tuple."""
    results = output if isinstance(output, (list, tuple)) else (output,)
    return [result for result in results if isinstance(result, Tensor)]


def _shares_memory(call: Call, output: Any) -> bool:
    """Whether a result lies in the memory of an argument: a view, or what was overwritten."""
    storages = {calls.storage_of(tensor) for tensor in call.tensors}
    return any(calls.storage_of(result) in storages for result in _tensors_in(output))


def _apart(output: Any) -> Any:
    """Results of several Nodes as copies: one may be made of another, as an LSTM's output of its
    state, and each gets its own relevance."""
    nodes = {result.grad_fn for result in _tensors_in(output) if result.grad_fn is not None}
    if len(nodes) < 2:
        return output
    return type(output)(t.clone() if isinstance(t, Tensor) else t for t in output)


def _scales(kind: str, call: Call, dependent: Sequence[int]) -> dict[int, str]:
    """The arguments that are no signal. Of factors that all are none, each is one."""
    if kind == "quotient":
        below = 0 if call.name.startswith("r") else 1
        return {i: "denominator" for i in dependent if i == below}
    if kind not in ("product", "matrixproduct"):
        return _positions(call, dependent)
    scales = {i: scale for i in dependent if (scale := _scale(call.flat[i])) is not None}
    return scales if len(scales) < len(dependent) else {}


def _positions(call: Call, dependent: Sequence[int]) -> dict[int, str]:
    """The arguments that say where something is read, or how much of it; they are no signal
    either."""
    if _POSITIONS.keys().isdisjoint(call.info.arguments):
        return {}
    names = [*call.info.arguments[: len(call.args)], *call.kwargs]
    return {i: _POSITIONS[names[i]] for i in dependent if names[i] in _POSITIONS}


def _scale(tensor: Tensor) -> str | None:
    """What a factor is that a sigmoid, softmax or inverse root gave, perhaps in another shape; None
    if it is none."""
    node = tensor.grad_fn
    while node is not None:
        name = node.name()
        if name.startswith(SCALE_NODES):
            return "weights" if name.startswith("Softmax") else "gate"
        if not name.startswith(LAYOUT_NODES) or len(node.next_functions) != 1:
            return None
        node = node.next_functions[0][0]
    return None
