"""The operations of a forward pass, as they happen: what each one is, in which module, and the Node that it left.

A recorder sees every functional call that modules make, in-place methods included. It notes rectifiers and added
constants. Where a call overwrites a view, autograd would hide its Node in one of the base, so the recorder makes the
call out of place. Operations that only the graph shows are added when it is walked.

Which calls rectify is seen by their name, or by their arguments: ``clamp(x, min=0)``, ``maximum(x, 0)``, ``where(x > 0,
x, ...)``, ``x * (x > 0)`` and ``x[x < 0] = 0`` rectify. The last three are recognised by where their mask comes from:
it must be the sign of what is kept, so a mask of tokens does not count, even if it happens to agree with the sign.
``minimum(x, 0)`` is a negated rectifier, -relu(-x).

`Dependence` tells what depends on the explained inputs, and `ConstantRecorder` notes what a network adds that does not:
biases, shifts, constants.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from explain.hooks.graph import Reach, graph, is_of_hooks
from explain.hooks.preserve import detached, is_transforming, without_proxy
from explain.hooks.tracer import ModuleTracker, Tracer
from explain.relevance.calls import Call, inside_transform, storage_of
from explain.relevance.table import (
    RECTIFIER_NODES,
    SCORE_NODES,
    TABLE,
    info,
    is_registered,
    operation_name,
    operator_of_node,
)


class Dependence:
    """Tells what depends on the explained inputs from what is made of parameters, numbers and other inputs.

    A gradient leads from the one to the inputs. From the other it leads to parameters at most, whether they are trained
    or not, and whether or not the model has registered them: what is computed from a detached tensor, or looked up by
    an index, depends on the input in no way that a gradient could follow.

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

    def rest_of_base(self, view: Tensor) -> Tensor | None:
        """The rest of the constant that a view belongs to, after the view was overwritten.

        The constant has become something that depends on the input in this part of it. None where it did so before, or
        where all the rest is zero.
        """
        base = view._base
        if base is None or base.grad_fn is None or not base.grad_fn.name().endswith("CopySlices"):
            return None
        before = base.grad_fn.next_functions[0][0]
        if self._reach.of(before):
            return None
        found = base.detach().clone()
        if found.stride() != base.stride():
            return None
        found.as_strided(view.shape, view.stride(), view.storage_offset() - base.storage_offset()).zero_()
        return found if bool(found.any()) else None


_NAMED = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
"""Modules that do one thing: what their output is laid out as, the bias is too."""
_SCORE_STEPS = 12


@dataclass(frozen=True, eq=False)
class AddedConstant:
    """A constant, and where it is added: the Node, by its output; the module, by name and call if it does no more.

    ``lies_on_input`` is False for numbers, and for what is added to scores of attention: they are no maps. The channels
    of linear functions come last.
    """

    value: Tensor | float
    edge: GradientEdge
    module: str | None = None
    call: int = 0
    lies_on_input: bool = True
    channels_last: bool = False


@dataclass(eq=False)
class ConstantRecorder:
    """Notes what is added in a forward pass, all of which it has to see."""

    model: nn.Module
    sources: Sequence[Tensor] = ()
    found: list[AddedConstant] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = [*self.model.parameters(), *self.model.buffers()]
        self._themselves = {id(tensor): tensor for tensor in own}
        self._own = {storage for tensor in own if (storage := storage_of(tensor))}
        self._made: Any = WeakIdKeyDictionary()
        self._calls: Counter[str] = Counter()
        self._of_attention: set[Any] = set()
        self._begun, self._running = torch._C._autograd._get_sequence_nr(), ModuleTracker(self.model)

    def settled(self) -> list[AddedConstant]:
        """What has been found, when the forward pass is over."""
        return [replace(c, lies_on_input=False) if c.edge.node in self._of_attention else c for c in self.found]

    def seen(self, call: Call, result: Any) -> Any:
        """Note what a call adds; return its result, in the graph."""
        info = call.info
        args = call.args
        if not isinstance(result, Tensor) or not (result.is_floating_point() or result.is_complex()):
            return self.derive(call, result)
        if info.has("biased"):
            code = getattr(call.function, "__code__", None)  # functions written in Python have an order of their own
            names = info.arguments if code is None else code.co_varnames[: code.co_argcount]
            given = {**dict(zip(names, args, strict=False)), **call.kwargs}
            if not self.is_constant(given["input"]):
                return self._note_bias(info.channels, given, result)
        elif info.has("adds") and len(args) == 2:
            self._note_sum(call, result)
        elif info.has("adds to first") and args and self.is_constant(args[0]):
            if not all(map(self.is_constant, args[1:])):
                self._note(call.kwargs.get("beta", 1) * args[0], result)
        elif call.name == "softmax":  # what is added in the last steps before it is added to scores
            node = (args[0] if args else call.kwargs["input"]).grad_fn
            for _ in range(_SCORE_STEPS):
                if node is None or not node.name().startswith(SCORE_NODES):
                    break
                self._of_attention.add(node)
                node = next((before for before, _ in node.next_functions if before is not None), None)
        return self.derive(call, result)

    def is_constant(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            if any(value is source for source in self.sources):
                return False
            made = id(value) in self._themselves or value in self._made or storage_of(value) in self._own
            # One made before the pass began, of weights, is kept by the model, with its graph.
            return made or (value.grad_fn is not None and value.grad_fn._sequence_nr() < self._begun)
        return isinstance(value, (int, float))

    def derive(self, call: Call, result: Any) -> Any:
        """Note whether a result, or what was written into, is made of constants alone."""
        tensors = call.tensors
        read = tensors[1:] if call.info.has("fills") else tensors[:1] if call.info.has("fits second") else tensors
        constant = all(map(self.is_constant, read))
        made = call.args[0] if call.name == "setitem" else result
        for each in made if isinstance(made, (list, tuple)) else (made,):
            if isinstance(each, Tensor):
                if constant:
                    self._made[each] = True
                else:  # what is written into a view is in its base
                    self._made.pop(each, None)
                    self._made.pop(each if each._base is None else each._base, None)
        return result

    def _note_bias(self, channels: int | None, given: Mapping[str, Any], result: Tensor) -> Tensor:
        name, module = self._running()
        named = name if isinstance(module, _NAMED) else None
        call = self._calls[named] if named else 0
        if named:
            self._calls[named] += 1
        bias = _bias(given)
        if bias is None:
            return result
        if is_transforming():
            raise inside_transform("fullgrad must see what is added", "a bias", name, "use integratedgradients")
        if not result.requires_grad and torch.is_grad_enabled():
            result = result.detach().requires_grad_().clone()  # of another image: its graph begins here
        elif result._is_view():
            result = result.clone()  # what overwrites a view hides its Node (instance normalisation gives one)
        if channels is not None:
            bias = bias.reshape(-1, *[1] * (result.ndim - 1 - channels % result.ndim))
        if result.requires_grad:  # the bias of a single channel is one number, but lies where the channel does
            last = channels is None and bias.ndim == 1
            self.found.append(AddedConstant(bias, get_gradient_edge(result), named, call, channels_last=last))
        return result

    def _note_sum(self, call: Call, result: Tensor) -> None:
        """``a + alpha b``, ``a - alpha b`` or ``b - alpha a``, one of which is constant."""
        args = call.args
        which = [place for place, value in enumerate(args) if self.is_constant(value)]
        if len(which) != 1:
            return
        second = which[0] == (0 if call.name == "rsub" else 1)
        sign = -1 if second and "sub" in call.name else 1
        self._note(sign * (call.kwargs.get("alpha", 1) if second else 1) * args[which[0]], result)

    def _note(self, value: Tensor | float, result: Tensor) -> None:
        if result.requires_grad:
            # Complex numbers are of frequencies, and not of places.
            lies = isinstance(value, Tensor) and value.numel() > 1 and not result.is_complex()
            value = detached(value) if isinstance(value, Tensor) else value
            self.found.append(AddedConstant(value, get_gradient_edge(result), lies_on_input=lies))


def _bias(given: Mapping[str, Any]) -> Tensor | None:
    """The constant ``(C,)`` that a call adds to what is otherwise linear in its input.

    For a normalisation by running statistics it is ``beta - gamma mean / sqrt(var + eps)``: the shift by the running
    mean counts, which the bias alone leaves out.
    """
    bias = given.get("bias")
    mean = given.get("running_mean")
    variance = given.get("running_var")
    bias = None if bias is None else detached(bias)
    batch = given.get("training", False) or given.get("use_input_stats", "training" not in given)
    if mean is None or variance is None or batch:
        return bias
    shift = mean.detach() * (variance.detach() + given.get("eps", 1e-5)).rsqrt()
    weight = given.get("weight")
    shift = shift if weight is None else shift * detached(weight)
    return -shift if bias is None else bias - shift  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation: its kind in the words of `torch.nn.functional`, the module that it ran in, and its Node.

    ``rectifies`` says whether it is a rectifier, and ``inputs`` which of the Node's inputs are what is rectified. One
    that is ``negated`` keeps the negative part: -relu(-x).
    """

    kind: str
    node: Node
    module: str | None = None
    rectifies: bool = False
    inputs: tuple[int, ...] = (0,)
    negated: bool = False


@dataclass
class Operations:
    """The operations noted in a forward pass, by the Nodes that they left; and what was added on the way."""

    noted: dict[Node, Operation] = field(default_factory=dict)
    constants: list[AddedConstant] = field(default_factory=list)

    def of_graph(self, score: Tensor) -> Iterator[Operation]:
        """Yield the known operations of a score's graph: rectifiers, and functions that cannot be inspected.

        These are functions that somebody wrote by hand, operators that a library has registered and the table does not
        know, and scripted code.
        """
        yielded = set()
        for node in graph(score):
            name = node.name().rstrip("0123456789")
            noted = self.noted.get(node)
            if noted is not None:
                if noted not in yielded:  # one with several results has left several Nodes
                    yielded.add(noted)
                    yield noted
            elif name in RECTIFIER_NODES:
                yield Operation(RECTIFIER_NODES[name], node, rectifies=True)
            elif (operator := operator_of_node(name)) is not None:
                if operator not in TABLE:
                    yield Operation(operator, node)
            elif isinstance(node, torch.autograd.function.BackwardCFunction):
                # What hooks put into the graph is no function of the model's.
                if not is_of_hooks(node) and not name.startswith("BackwardHookFunction"):
                    yield Operation(name.removesuffix("Backward"), node)
            elif "DifferentiableGraph" in name:  # scripted code
                yield Operation(name.removesuffix("Backward"), node)


class OperationRecorder(Tracer):
    """Notes the operations that this thread's functional calls make, until it is left.

    Args:
        model: the model whose modules they are made in.
        rectifiers: note what rectifies.
        constants: note what is added.
        sources: what is explained, and no constant, whatever graph it has.

    >>> x = torch.randn(3, requires_grad=True)
    >>> with OperationRecorder(nn.Identity(), rectifiers=True, constants=True) as recorder:
    ...     y = torch.where(x > 0, x, 0.1 * x).clamp(min=0) + torch.ones(3)
    >>> [(found.kind, found.rectifies) for found in recorder.operations.noted.values()]
    [('where', True), ('clamp', True)]
    >>> [constant.value for constant in recorder.operations.constants]
    [tensor([1., 1., 1.])]
    """

    opens = False

    def __init__(self, model: nn.Module, *, rectifiers: bool, constants: bool, sources: Sequence[Tensor] = ()) -> None:
        self._running = ModuleTracker(model)
        self._noted: dict[Node, Operation] = {}
        self._rectifiers = Rectifiers() if rectifiers else None
        self._constants = ConstantRecorder(model, sources) if constants else None

    @property
    def operations(self) -> Operations:
        """What has been noted so far."""
        return Operations(self._noted, [] if self._constants is None else self._constants.settled())

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = operation_name(func)
        if is_registered(name) and name not in TABLE:
            return self._note_operator(Call(func, name, args, kwargs))
        relevant = name in _OTHERS or bool(info(name).traits & _TRAITS)
        rectifiers = self._rectifiers if relevant else None  # also of what makes a mask
        if rectifiers is None and self._constants is None:
            return func(*args, **kwargs)
        call = Call(func, name, args, kwargs)
        rectified = None if rectifiers is None else rectifiers.find(call)
        if rectified is not None and not call.info.has("rectifies") and is_transforming():
            must = "guidedbackprop must see rectifiers"
            module = self._running()[0]
            raise inside_transform(must, f"{name}()", module, "use relu() there, or saliency")
        noted = rectified is not None or (self._constants is not None and call.info.has("adds"))
        first = args[0] if args else None
        apart = None
        if noted and call.in_place and isinstance(first, Tensor):
            constant = self._constants is not None and self._constants.is_constant(first)
            apart = call.out_of_place() if constant or first._is_view() else None
        # A clone, since what a rectifier keeps of its input must not be overwritten by its output.
        result = call.made() if apart is None else apart.made({0: args[0].clone()})
        if rectified is not None:
            made = first if result is None else result
            node = made.grad_fn if isinstance(made, Tensor) else None
            if node is not None:
                given = True, rectified.inputs, rectified.negated
                self._noted[node] = Operation(name, node, self._running()[0], *given)
        elif rectifiers is not None:
            rectifiers.seen(call, result)
        if self._constants is not None:
            result = self._constants.seen(call, result)
        if apart is None or first is None:
            return result
        first.copy_(result)
        if self._constants is not None:
            self._constants.derive(Call(torch.clone, "copy", (result,), {}), first)
        return first

    def _note_operator(self, call: Call) -> Any:
        """Make a call of an operator that nothing is known of, and note it by the Nodes that it left."""
        result = call.made()
        nodes = [tensor.grad_fn for tensor in call.results(result) if tensor.grad_fn is not None]
        if nodes:
            self._noted |= dict.fromkeys(nodes, Operation(call.name, nodes[0], self._running()[0]))
        if self._constants is not None:
            self._constants.derive(call, call.results(result))
        return result


_OTHERS = frozenset(["clamp", "clamp_max", "maximum", "minimum"])
_TRAITS = frozenset(["rectifies", "masks", "greater", "less", "casts", "negates"])
_STEPS = 16


@dataclass(frozen=True)
class Rectified:
    """Which of a Node's inputs are rectified, the one that is kept first, and whether its negative part is kept."""

    inputs: tuple[int, ...] = (0,)
    negated: bool = False


class _Sign(NamedTuple):
    """A mask says where ``of`` is positive; where it is negative, if ``side`` is -1."""

    of: Tensor
    side: int


class Rectifiers:
    """Tells which calls of a forward pass rectify. It has to see the calls that make masks, too."""

    def __init__(self) -> None:
        self._signs: Any = WeakIdKeyDictionary()

    def find(self, call: Call) -> Rectified | None:
        """What a call rectifies, before it is made; None where it is no rectifier."""
        name = call.name
        args = call.args
        kwargs = call.kwargs
        if call.info.has("rectifies"):
            return Rectified()
        values = [*args, *kwargs.values()]
        if name == "clamp":
            least = kwargs.get("min", args[1] if len(args) > 1 else None)
            most = kwargs.get("max", args[2] if len(args) > 2 else None)
            if _is_zero(least):
                return Rectified()
            return Rectified(negated=True) if least is None and _is_zero(most) else None
        if name == "clamp_max":
            return Rectified(negated=True) if _is_zero(values[1]) else None
        if name in ("maximum", "minimum"):
            return _masked(values, lambda value, other: (name == "minimum") if _is_zero(other) else None)
        if name == "mul":
            return _masked(values, self._keeps_negative)
        if name == "where" and len(values) == 3:
            return self._where(call)
        if name in ("masked_fill", "setitem") and len(values) == 3 and _is_zero(values[2]):
            negated = self._keeps_negative(values[0], values[1])
            return None if negated is None else Rectified(negated=not negated)
        return None

    def seen(self, call: Call, result: Any) -> None:
        """Record the mask that a call has made, if it is one."""
        if not isinstance(result, Tensor) or not call.args:
            return
        row = call.info
        if row.has("greater") or row.has("less"):
            values = [*call.args, *call.kwargs.values()]
            side = 1 if row.has("greater") else -1
            for value, other, its in ((values[1], values[0], -side), (values[0], values[1], side)):
                if _is_zero(other) and isinstance(value, Tensor):
                    self._signs[result] = _Sign(value.detach(), its)
        elif (row.has("casts") or row.has("negates")) and (sign := self._sign(call.args[0])) is not None:
            self._signs[result] = _Sign(sign.of, -sign.side if row.has("negates") else sign.side)

    def _sign(self, mask: Any) -> _Sign | None:
        return self._signs.get(mask) if isinstance(mask, Tensor) else None

    def _where(self, call: Call) -> Rectified | None:
        given = {{"self": "input"}.get(name, name): value for name, value in call.named.items()}
        sign = self._sign(given.get("condition"))
        if sign is None:
            return None
        order = (0, 1)[:: sign.side]
        kept, other = (given["input"], given["other"])[:: sign.side]
        if (_is_zero(other) or _comes_from(other, kept)) and self._keeps_negative(kept, given["condition"]) is not None:
            return Rectified(order)
        if _is_zero(kept) and self._keeps_negative(other, given["condition"]) is not None:
            return Rectified(order[::-1], negated=True)
        return None

    def _keeps_negative(self, value: Tensor, mask: Any) -> bool | None:
        """Whether a mask keeps the negative part of ``value``, and not the positive one; None if it is another mask."""
        sign = self._sign(mask)
        if sign is None or not isinstance(value, Tensor) or not value.shape == mask.shape == sign.of.shape:
            return None
        if is_transforming():
            return sign.side < 0  # there are no values to look at; the caller refuses it
        value = value.detach()
        if not torch.equal(value, sign.of) and not torch.equal(value.clamp(min=0), sign.of):
            return None
        rows = mask.detach().bool() if sign.side > 0 else ~mask.detach().bool()
        agrees = bool(((rows == (value > 0)) | (value == 0)).all())
        return sign.side < 0 if agrees else None


def _masked(values: list[Any], keeps_negative: Callable[[Tensor, Any], bool | None]) -> Rectified | None:
    """Which of two values has a gradient and is rectified by the other, a constant."""
    if len(values) != 2:
        return None
    for own, other in ((0, 1), (1, 0)):
        value = values[own]
        mask = values[other]
        known = isinstance(mask, Tensor) and not mask.requires_grad
        if isinstance(value, Tensor) and value.requires_grad and known:
            found = keeps_negative(value, mask)
            if found is not None:
                return Rectified((own,), found)
    return None


def _is_zero(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.requires_grad and not is_transforming() and not bool(value.any())
    return isinstance(value, (int, float)) and value == 0


def _comes_from(value: Any, source: Any) -> bool:
    """Whether ``value`` has no history, or was computed from ``source`` a few steps ago."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return True
    waiting = [] if value.grad_fn is None else [value.grad_fn]
    for _ in range(_STEPS):
        if not waiting:
            return False
        node = waiting.pop(0)
        if node is source.grad_fn or getattr(node, "variable", None) is source:
            return True
        waiting += [before for before, _ in node.next_functions if before is not None]
    return False
