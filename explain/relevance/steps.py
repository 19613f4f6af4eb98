"""The steps of a forward pass that relevance rules act on: what each computes, from what, and the Node that it left.

A `StepRecorder` sees every call of a function, also those that functions of `torch.nn.functional` written in Python
make. Of a step it keeps what a rule needs, as it was: what is overwritten later is copied just before. Linear maps,
normalisations and products are given their inputs through an entrance, so that a rule can take autograd's place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdKeyDictionary

from explain.hooks.graph import Entrance, entrance
from explain.hooks.preserve import detached, is_transforming
from explain.hooks.tracer import ModuleTracker, Tracer
from explain.relevance import batch_layout, calls, operations
from explain.relevance.calls import Call, LinearMap
from explain.relevance.table import LAYOUT_NODES, LINEAR, SCALE_NODES, info, is_registered, operation_name

_ENTERED = {*LINEAR, "deviation", "product", "quotient", "sampling", "attention"}
_POSITIONS = {"offset": "position", "rois": "position", "grid": "position", "mask": "gate"}
"""What the arguments of deformed convolutions and sampling are that are no signal."""
_WITH_VALUES = {"rectifier", "activation", "product", "quotient", "matrixproduct", "softmax", "attention", "deviation",
                "maximum"}  # fmt: skip


@dataclass(eq=False)
class Snapshot:
    """A tensor as it was when it was noted, and whether something has used it.

    A result that a rectifier has overwritten at once is known where it was positive, and no gradient comes back
    elsewhere. One that can be computed ``again`` is recomputed after it has been overwritten.
    """

    kept: Tensor | None
    is_result: bool = False
    again: "tuple[LinearMap, Snapshot] | None" = None
    used: bool = False

    @property
    def tensor(self) -> Tensor:
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
        kept = Snapshot(detached(tensor), **more)
        self._kept.setdefault(calls.storage_of(tensor), []).append(kept)
        return kept

    def use(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            for kept in self._kept.get(calls.storage_of(tensor), ()):
                kept.used = True

    def overwriting(self, tensor: Tensor, kind: str) -> None:
        """Take copies of what is about to be overwritten; a result that is rectified at once is left alone."""
        where = calls.storage_of(tensor)
        for each in self._kept.pop(where, ()):
            if each.kept is None:
                continue
            if kind == "relu" and each.is_result and not each.used and each.kept.shape == tensor.shape:
                self._kept.setdefault(where, []).append(each)
            else:
                each.kept = None if each.again is not None else each.kept.clone()


@dataclass(eq=False)
class Step:
    """One step: its kind in the words of the table, its function, the module that it ran in, and the Node that it left.

    ``options`` are the arguments by name that a rule needs, ``shapes`` the constants among all arguments, and the
    shapes of the others. ``dependent`` are the places of the arguments that a gradient leads to, ``entrances`` how it
    leaves the step there. ``result`` is what it gave, ``linear`` the map where it is one, ``preceding`` the step whose
    result a normalisation was given, ``scales`` the arguments that are no signal, by their place: a "gate", a
    "denominator", the "weights" of a softmax, or a "position" where something is read. An activation has the
    ``values`` that it was given and gave; where it overwrote them, the ``slope`` of the line from its ``offset`` at
    zero.
    """

    kind: str
    function: str
    module: str | None
    dependent: Sequence[int]
    node: Node
    output: int = 0
    in_place: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    shapes: Sequence[Any] = ()
    entrances: Mapping[int, Entrance] = field(default_factory=dict)
    values: Mapping[int, Snapshot] = field(default_factory=dict)
    result: Snapshot | None = None
    linear: LinearMap | None = None
    preceding: "Step | None" = None
    scales: Mapping[int, str] = field(default_factory=dict)
    slope: Tensor | None = None
    offset: Tensor | None = None
    images: Tensor | None = None
    """Which image each value of the result belongs to, as `BatchLayout` tells it; None where the images come first."""

    @property
    def is_map(self) -> bool:
        """Whether it is a linear map that a rule can act on."""
        return self.linear is not None and (bool(self.entrances) or self.kind == "batchnorm")


class StepRecorder(Tracer):
    """Notes the steps of this thread's forward pass, until it is left.

    With ``values``, it keeps what functions and products are given and give, for `differences`. ``sources`` are the
    explained inputs: what no gradient leads from to them is a constant. ``images`` is how many there are in the batch.

    >>> x, F = torch.randn(2, 3, requires_grad=True), torch.nn.functional
    >>> layer = nn.Linear(3, 3)
    >>> with StepRecorder(layer, [x]) as recorder:
    ...     y = F.softmax(layer(x).relu_(), -1) * x
    >>> [step.kind for step in recorder.steps]
    ['dense', 'rectifier', 'softmax', 'product']
    """

    def __init__(
        self, model: nn.Module, sources: list[Tensor], *, values: bool = False, summands: bool = False, images: int = 1
    ) -> None:
        self._values = values
        self._summands = summands
        self._entered = _ENTERED | (_WITH_VALUES - {"rectifier", "activation"}) if values else _ENTERED
        self.steps: list[Step] = []
        self._running = ModuleTracker(model)
        self._dependence = operations.Dependence(sources)
        self._keeper = Snapshots()
        self._made_by: Any = WeakIdKeyDictionary()
        self._layout = batch_layout.BatchLayout(images)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = operation_name(func)
        if name == "iter":  # of a tensor, which gives its rows
            return iter(self.called(torch.Tensor.unbind, args, {}))
        if info(name).has("query"):
            found = func(*args, **kwargs)
            if name == "get" and isinstance(found, Tensor) and found.requires_grad:
                self._layout.see(Call(func, func.__self__.__name__, args, {}), [0], found)
            return found
        call = calls.plain(Call(func, name, args, kwargs))
        for tensor in call.overwritten if call.in_place or is_registered(name) else ():
            self._keeper.overwriting(tensor, name)
        dependent = calls.places(call, self._dependence.of)
        if is_transforming() and call.info.kind is not None and any(map(self._dependence.of, call.tensors)):
            # Tensors are proxies of those that the gradient leads to.
            must = "relevance must be propagated"
            module = self._running()[0]
            raise calls.inside_transform(must, f"{name}()", module, "use integratedgradients")
        if not dependent or not torch.is_grad_enabled():
            result = call.made()
        elif self._has_rule(call, dependent):
            result = self._record(call, dependent)
        else:
            other = calls.is_watched(call) and not self._values
            result = self._record_other(call, dependent) if other else self._made(call, dependent)
        self._keeper.use(call.tensors)
        return result

    def _made(self, call: Call, dependent: Sequence[int], replaced: Mapping[int, Tensor] | None = None) -> Any:
        """Make a call, and follow which image the values of its result belong to."""
        result = call.made(replaced)
        self._layout.see(call, dependent, result)
        return result

    def _record_other(self, call: Call, dependent: Sequence[int]) -> Any:
        """Make a call that no rule knows; each of its results is a step, the first of which has the entrances."""
        if is_registered(call.name) and call.overwritten:
            return self._record_name(call, dependent)
        first = call.flat[0]
        run = call
        given = {i: call.flat[i] for i in dependent}
        if call.in_place:
            run = call.out_of_place() or call
            given = {i: tensor.clone() if tensor is first else tensor for i, tensor in given.items()}
        entered = {i: entrance(tensor) for i, tensor in given.items()}
        entrances = {i: tensor.grad_fn for i, tensor in entered.items()}
        made = self._made(run, dependent, entered)
        own = {calls.storage_of(tensor) for tensor in call.tensors}
        several = isinstance(made, (list, tuple))
        results = [t for t in (made if several else (made,)) if isinstance(t, Tensor)]
        if any(calls.storage_of(result) in own for result in results):
            # What is written into a view has to be seen in what it is a view of.
            return self._record_name(call, dependent) if is_registered(call.name) else call.made()
        if len({result.grad_fn for result in results if result.grad_fn is not None}) > 1:
            # One may be made of another, as an LSTM's output of its state: apart, each gets its own relevance.
            made = type(made)(t.clone() if isinstance(t, Tensor) else t for t in made)
        values = {i: self._keeper.keep(tensor) for i, tensor in given.items()}
        for result in made if several else (made,):
            if isinstance(result, Tensor) and result.grad_fn is not None:
                kept = {"entrances": entrances, "values": values, "result": self._keeper.keep(result)}
                self._add("other", call.name, dependent, result, **kept)
        return self._written(first, made) if call.in_place else made

    def _record_name(self, call: Call, dependent: Sequence[int]) -> Any:
        """Make a call of an operator of which the name is all to note: it overwrites its input, or gives a view."""
        result = self._made(call, dependent)
        entrances: dict[int, Entrance] = {}
        for tensor in call.results(result):
            if tensor.grad_fn is not None:
                self._add("other", call.name, dependent, tensor, entrances=entrances)
        return result

    def _add(self, kind: str, function: str, dependent: Sequence[int], gave: Tensor, **noted: Any) -> Step:
        """Add the step that gave a result, which has a Node."""
        images = self._layout.of(gave)
        node = gave.grad_fn
        assert node is not None
        step = Step(kind, function, self._running()[0], dependent, node, gave.output_nr, images=images, **noted)
        self.steps.append(step)
        return step

    def _written(self, first: Tensor, made: Tensor) -> Tensor:
        """Write a result where it belongs; the rest of a constant that it is written into counts as added."""
        first.copy_(made)
        beside = self._dependence.rest_of_base(first)
        base = first._base
        if beside is not None and base is not None and base.grad_fn is not None:
            self._add("sum", "iadd", [0], base, shapes=[base.shape, beside])
        return first

    def _record(self, call: Call, dependent: Sequence[int]) -> Any:
        """Make a call, and note it as a step."""
        kind = call.info.kind
        assert kind is not None
        first = call.flat[0] if call.in_place else None
        hidden = first is not None and (first._is_view() or kind in ("product", "quotient"))
        apart = call.out_of_place() if hidden else None  # in its base, a view hides the Node
        before = self._before(kind, call, dependent)
        replaced: dict[int, Tensor] = {} if apart is None else {0: call.flat[0].clone()}
        run = call if apart is None else apart
        entrances = {}
        if kind in self._entered and not run.in_place and not (kind == "batchnorm" and "linear" in before):
            replaced |= {i: entrance(replaced.get(i, call.flat[i])) for i in dependent}
            entrances = {i: replaced[i].grad_fn for i in dependent}
        made = self._made(run, dependent, replaced)
        result = made[0] if isinstance(made, tuple) else made
        if isinstance(result, Tensor) and result.grad_fn is not None:
            noted = {"in_place": call.in_place, "entrances": entrances, **before}
            step = self._add(kind, call.name, dependent, result, **noted)
            self._after(step, call, result)
            self._made_by[result] = step, result._version
        return made if first is None or apart is None else self._written(first, made)

    def _before(self, kind: str, call: Call, dependent: Sequence[int]) -> dict[str, Any]:
        """What is noted of a step before it is made."""
        if self._values and kind in _WITH_VALUES and not (kind == "matrixproduct" and len(dependent) < 2):
            return {"values": self._given(call), "options": call.named}
        if kind in LINEAR:
            scales = _positions(call, dependent)
            linear = calls.linear_map(call, [place for place in dependent if place not in scales])
            if linear is not None:
                x = call.flat[linear.place]
                preceding = None
                if kind == "batchnorm":  # what gave x, unless something has been done to it in place
                    step, version = self._made_by.get(x) or (None, 0)
                    preceding = step if step and step.node is x.grad_fn and version == x._version else None
                values = {0: self._keeper.keep(x)}
                return {"linear": linear, "values": values, "preceding": preceding, "scales": scales}
        if kind in ("deviation", "batchnorm"):
            options = {name: value for name, value in call.named.items() if name != "input"}
            return {"values": {0: self._keeper.keep(call.flat[0])}, "options": options}
        if kind == "activation":
            x = call.flat[0]
            return {"values": {0: Snapshot(detached(x).clone()) if call.in_place else self._keeper.keep(x)}}
        if kind == "attention":
            options = {name: call.named.get(name) for name in ("attn_mask", "is_causal", "scale")}
            return {"values": {i: self._keeper.keep(call.flat[i]) for i in dependent if i < 3}, "options": options}
        if kind in ("product", "quotient", "matrixproduct"):
            return {"scales": _scales(kind, call, dependent)}
        if kind in ("convolution", "sampling"):
            return {"scales": _positions(call, dependent)}
        if kind in ("sum", "join", "choice"):
            named = {name: call.named[name] for name in ("dim", "alpha", "condition", "mask") if name in call.named}
            # All arguments that may be added: constants as they are, and the shapes of what a gradient leads to.
            shapes = [value.shape if i in dependent else calls.detach(value) for i, value in enumerate(call.flat)]
            if call.in_place and 0 not in dependent:
                shapes[0] = shapes[0].clone()  # the result will be in its place
            kept = {"options": {name: calls.detach(value) for name, value in named.items()}, "shapes": shapes}
            return {**kept, **self._summed(call, dependent)} if kind == "sum" else kept
        if kind == "softmax":
            return {"options": {"dim": call.named.get("dim", -1)}, **self._summed(call, dependent)}
        return {}

    def _summed(self, call: Call, dependent: Sequence[int]) -> dict[str, Any]:
        """The inputs of a sum or softmax, if ``summands`` are recorded."""
        given = self._given(call) if self._summands else {}
        return {"values": {i: value for i, value in given.items() if i in dependent}}

    def _given(self, call: Call) -> dict[int, Snapshot]:
        """The arguments that are tensors or numbers."""
        found = {}
        for i, value in enumerate(call.flat[:3]):
            if isinstance(value, Tensor):
                found[i] = Snapshot(detached(value).clone()) if call.in_place and i == 0 else self._keeper.keep(value)
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                found[i] = Snapshot(torch.tensor(value).to(call.tensors[0]))
        return found

    def _after(self, step: Step, call: Call, result: Tensor) -> None:
        """What is noted of a step when it is made."""
        if self._values:
            step.result = self._keeper.keep(result)
            return
        if step.linear is not None or step.kind in ("attention", "softmax"):
            again = (step.linear, step.values[0]) if step.kind == "batchnorm" and step.linear else None
            step.result = self._keeper.keep(result, is_result=True, again=again)
        if step.kind == "activation":
            x = step.values[0].tensor
            y = detached(result)
            step.offset = _at_zero(call, x)
            if call.in_place:
                with torch._C.DisableTorchFunction():  # with a graph, another recorder would take it for the model's
                    step.slope = slope(x, y, step.offset)
                step.values = {}
            else:
                step.values = {0: step.values[0], 1: self._keeper.keep(y)}

    def _has_rule(self, call: Call, dependent: Sequence[int]) -> bool:
        """Whether a rule can do something with a call: with ``values``, of maxima with those over places alone."""
        kind = call.info.kind
        if kind is None:
            return False
        if kind in LINEAR:  # no rule takes apart what adds something to a product of two signals
            if call.name in ("addmm", "baddbmm") and (call.name == "baddbmm" or tuple(dependent) != (1,)):
                return False
            if "mask" in call.info.arguments and bool((call.named["mask"] < 0).any()):
                return False  # signs of weights would not be those of contributions
            if len(dependent) - len(_positions(call, dependent)) > 1 and call.named.get("bias") is not None:
                return False
        if not self._values and any(tensor.is_complex() for tensor in call.tensors):
            return False
        if kind == "activation":
            return tuple(dependent) == (0,)  # and not a number to the power of a signal
        if call.name == "addcmul" and {1, 2} <= set(dependent):
            return False  # a product of signals, added
        if not self._values:  # of quotients, not a constant over a signal
            return kind != "quotient" or _scales(kind, call, dependent).keys() != set(dependent)
        if kind == "matrixproduct" and len(dependent) > 1:
            return call.name in ("matmul", "mm", "bmm") and all(tensor.ndim > 1 for tensor in call.tensors)
        return kind != "maximum" or call.name.startswith(("max_pool", "adaptive_max_pool", "amax"))


def slope(x: Tensor, y: Tensor, offset: Tensor | None) -> Tensor:
    """The slope of the line from (0, offset) to (x, y), where the offset is 0 if none is given; NaN at zero."""
    return torch.where(x == 0, torch.nan, (y if offset is None else y - offset) / torch.where(x == 0, 1, x))


def _at_zero(call: Call, x: Tensor) -> Tensor | None:
    """What an activation makes of zero, in a shape that meets its result, and 0 where it is not finite; None for 0."""
    apart = call.out_of_place() if call.in_place else call
    if apart is None:
        return None
    found = detached(apart.made({0: x.new_zeros([1] * min(x.ndim, 1))})).nan_to_num(0, 0, 0)
    return found if bool(found.any()) else None


def _scales(kind: str, call: Call, dependent: Sequence[int]) -> dict[int, str]:
    """The factors that are no signal. Of factors that all are none, each is one."""
    if kind == "quotient":
        below = 0 if call.name.startswith("r") else 1
        return {i: "denominator" for i in dependent if i == below}
    found = {i: scale for i in dependent if (scale := _scale(call.flat[i])) is not None}
    return found if len(found) < len(dependent) else {}


def _positions(call: Call, dependent: Sequence[int]) -> dict[int, str]:
    """The arguments that say where something is read, or how much of it; they are no signal either."""
    if not any(name in _POSITIONS for name in call.info.arguments):
        return {}
    names = [*call.info.arguments[: len(call.args)], *call.kwargs]
    return {i: _POSITIONS[names[i]] for i in dependent if names[i] in _POSITIONS}


def _scale(tensor: Tensor) -> str | None:
    """What a factor is that a sigmoid, softmax or inverse root gave, perhaps in another shape; None if it is none."""
    node = tensor.grad_fn
    while node is not None:
        name = node.name()
        if name.startswith(SCALE_NODES):
            return "weights" if name.startswith("Softmax") else "gate"
        if not name.startswith(LAYOUT_NODES) or len(node.next_functions) != 1:
            return None
        node = node.next_functions[0][0]
    return None
