"""The rectifiers of a forward pass, as they happen: what each one is, in which module, and the Node
that it left.

A recorder sees every functional call that modules make, in-place methods included. Where a call
overwrites a view, autograd would hide its Node in one of the base, so the recorder makes the call
out of place. Operations that only the graph shows are added when it is walked.

Which calls rectify is seen by their name, or by their arguments: ``clamp(x, min=0)``, ``maximum(x,
0)``, ``where(x > 0, x, ...)``, ``x * (x > 0)``, ``x[x < 0] = 0`` and ``x - min(x, 0)`` rectify. The
three with a mask are recognised by where the mask comes from: it must be the sign of what is kept,
so a mask of tokens does not count, even if it happens to agree with the sign. ``minimum(x, 0)`` is
a negated rectifier, -relu(-x).
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdKeyDictionary

from explain.hooks.graph import is_of_hooks
from explain.hooks.preserve import is_transforming
from explain.hooks.tracer import ModuleTracker, Tracer
from explain.relevance.calls import Call, inside_transform
from explain.relevance.table import (
    RECTIFIER_NODES,
    TABLE,
    info,
    is_opaque,
    operation_name,
    operator_of_node,
)


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation: its kind in the words of `torch.nn.functional`, the module that it ran in, and
    its Node.

    ``rectifies`` says whether it is a rectifier, and ``inputs`` which of the Node's inputs are what
    is rectified. One that is ``negated`` keeps the negative part: -relu(-x). One ``by_parts`` takes
    the negative part from a value: x - min(x, 0).
    """

    kind: str
    node: Node
    module: str | None = None
    rectifies: bool = False
    inputs: tuple[int, ...] = (0,)
    negated: bool = False
    by_parts: bool = False


def operations_of(nodes: Iterable[Node], noted: Mapping[Node, Operation]) -> list[Operation]:
    """The operations to report or replace among the Nodes of a graph: rectifiers, and those that
    cannot be inspected.

    The latter are functions that somebody wrote by hand, operators that a library has registered
    and the table does not know, and scripted code. ``noted`` is what an `OperationRecorder` saw;
    other Nodes are judged by their names.
    """
    operations = dict[Operation, None]()  # an operation with several results has several Nodes
    for node in nodes:
        operation = noted.get(node) or _operation_of(node)
        if operation is not None:
            operations[operation] = None
    return list(operations)


def _operation_of(node: Node) -> Operation | None:
    """The `Operation` that left a Node, by the Node's name; None where it need not be reported."""
    name = node.name()
    kind, rectifies = _kind_of_node(name)
    if kind is not None:
        return (
            Operation(kind, node, rectifies=rectifies) if rectifies or kind not in TABLE else None
        )
    by_hand = isinstance(node, torch.autograd.function.BackwardCFunction)
    # Functions that hooks put into the graph are not the model's.
    if not by_hand or is_of_hooks(node) or name.startswith("BackwardHookFunction"):
        return None
    return Operation(name.rstrip("0123456789").removesuffix("Backward"), node)


@functools.lru_cache(1024)
def _kind_of_node(name: str) -> tuple[str | None, bool]:
    """The operation that left Nodes of this name, and whether it is a rectifier.

    The operation is None unless it is a rectifier, scripted, or registered by a library.
    """
    name = name.rstrip("0123456789")
    if name in RECTIFIER_NODES:
        return RECTIFIER_NODES[name], True
    scripted = name.removesuffix("Backward") if "DifferentiableGraph" in name else None
    return operator_of_node(name) or scripted, False


class OperationRecorder(Tracer):
    """Notes the operations that this thread's functional calls make, until it is left, by the Nodes
    that they left.

    These are operations that nobody can look into, and ``rectifiers``.

    >>> x = torch.randn(3, requires_grad=True)
    >>> with OperationRecorder(nn.Identity()) as recorder:
    ...     y = torch.where(x > 0, x, 0.1 * x).clamp(min=0) + torch.ones(3)
    >>> [(operation.kind, operation.rectifies) for operation in recorder.noted.values()]
    [('where', True), ('clamp', True)]
    """

    opens = False

    def __init__(self, model: nn.Module, *, rectifiers: bool = True) -> None:
        """Prepare to note the operations of a forward pass of ``model``, with ``rectifiers`` or
        without."""
        self.noted: dict[Node, Operation] = {}
        self._running = ModuleTracker(model)
        self._rectifiers = Rectifiers() if rectifiers else None

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of the forward pass, and note the rectifier or opaque operation that it is.

        `Tracer` calls this in place of every PyTorch function. A rectifier that overwrites a view
        runs out of place, since its Node would be hidden.
        """
        name = operation_name(func)
        if is_opaque(name):
            return self._note_opaque(Call(func, name, args, kwargs))
        if self._rectifiers is None or not (name in _BOUNDS or info(name).traits & _TRAITS):
            return func(*args, **kwargs)
        call = Call(func, name, args, kwargs)
        rectified = self._rectifiers.find(call)
        if rectified is None:
            result = call.make()
            self._rectifiers.seen(call, result)  # it may make a mask
            return result
        if not call.info.has("rectifies") and is_transforming():
            must = "guidedbackprop must see rectifiers"
            module = self._running()[0]
            raise inside_transform(must, f"{name}()", module, "use relu() there, or saliency")
        first_argument = call.flat[0]
        out_of_place_call = (
            call.out_of_place() if call.in_place and first_argument._is_view() else None
        )
        # A clone: the result is copied into `first`, and autograd may have saved its input.
        result = (
            call.make()
            if out_of_place_call is None
            else out_of_place_call.make({0: first_argument.clone()})
        )
        node = _copied_from((first_argument if result is None else result).grad_fn)
        if node is not None:
            module = self._running()[0]
            self.noted[node] = Operation(
                name, node, module, True, rectified.inputs, rectified.negated, rectified.by_parts
            )
        return result if out_of_place_call is None else first_argument.copy_(result)

    def _note_opaque(self, call: Call) -> Any:
        """Make a call that nobody can look into, and note it at the Nodes of its results."""
        result = call.make()
        nodes = [tensor.grad_fn for tensor in call.results(result) if tensor.grad_fn is not None]
        if nodes:
            self.noted |= dict.fromkeys(nodes, Operation(call.name, nodes[0], self._running()[0]))
        return result


def _copied_from(node: Node | None) -> Node | None:
    """The Node of the value that was copied, if ``node`` is a copy's; else ``node`` itself.

    `StepRecorder`, which may run inside, computes in-place calls out of place and copies the
    result: the rectifier's Node is the one before.
    """
    is_copy = node is not None and node.name().endswith("CopyBackwards")
    return node.next_functions[1][0] if is_copy else node  # type: ignore[union-attr]


_TRAITS = frozenset(["rectifies", "masks", "adds", "greater", "less", "casts", "negates"])
"""The traits of operations that rectify, or make or change a mask."""
_STEPS = 16
"""From how many Nodes ago a value counts as computed from another."""


@dataclass(frozen=True)
class Rectified:
    """Which of a Node's inputs are rectified, the one that is kept first; whether its negative part
    is kept, or taken from it as another input."""

    inputs: tuple[int, ...] = (0,)
    negated: bool = False
    by_parts: bool = False


class _Sign(NamedTuple):
    """A mask says where ``of`` is positive; where it is negative, if ``side`` is -1."""

    of: Tensor
    side: int


class _Selection(NamedTuple):
    """A value that is kept where a mask is true, or with ``side`` -1 where it is false; and what
    stands elsewhere.

    ``inputs`` are the Node's inputs that these two are.
    """

    kept: Any
    mask: Any
    side: int
    inputs: tuple[int, ...]
    elsewhere: Any = 0


def _selections(call: Call) -> list[_Selection]:
    """The values that a call keeps where a mask says so, for each way to read it: x * mask,
    `torch.where`, `masked_fill`, x[mask] = value.

    Empty for other calls. Whether the mask is a sign is not checked here.
    """
    values = call.flat
    if call.name == "mul" and len(values) == 2:
        first, second = values
        return [_Selection(first, second, 1, (0,)), _Selection(second, first, 1, (1,))]
    if call.name == "where" and len(values) == 3:
        options = call.named
        first = options.get("input", options.get("self"))
        second = options["other"]
        mask = options["condition"]
        return [
            _Selection(first, mask, 1, (0, 1), second),
            _Selection(second, mask, -1, (1, 0), first),
        ]
    if call.name in ("masked_fill", "setitem") and len(values) == 3:
        return [_Selection(values[0], values[1], -1, (0,), values[2])]
    return []


class Rectifiers:
    """Tells which calls of a forward pass rectify. It has to see the calls that make masks, too."""

    def __init__(self) -> None:
        self._signs: Any = WeakIdKeyDictionary()

    def find(self, call: Call) -> Rectified | None:
        """The rectifier that a call is, told from its arguments before it is made; None where it is
        none."""
        if call.info.has("rectifies"):
            return Rectified()
        if call.name in _BOUNDS:
            return _bounded(call)
        if call.info.has("adds"):
            return _without_negative_part(call)
        for selection in _selections(call):
            side = self._side(selection)
            if side is None:
                continue
            if _is_zero(selection.elsewhere):
                return Rectified(selection.inputs, negated=side != selection.side)
            if side == selection.side and _comes_from(selection.elsewhere, selection.kept):
                return Rectified(selection.inputs)
        return None

    def seen(self, call: Call, result: Any) -> None:
        """Remember the mask that a call has made, if it is the sign of a tensor (``x > 0``, its
        cast or its negation)."""
        if not isinstance(result, Tensor) or not call.flat:
            return
        row = call.info
        if row.has("greater") or row.has("less"):
            first, second = call.flat[:2]
            side = 1 if row.has("greater") else -1
            if _is_zero(first) and isinstance(second, Tensor):
                self._signs[result] = _Sign(second.detach(), -side)
            if _is_zero(second) and isinstance(first, Tensor):
                self._signs[result] = _Sign(first.detach(), side)
        elif row.has("casts") or row.has("negates"):
            sign = self._sign(call.flat[0])
            if sign is not None:
                self._signs[result] = _Sign(
                    sign.of, -sign.side if row.has("negates") else sign.side
                )

    def _sign(self, mask: Any) -> _Sign | None:
        """What is known of a mask: of which tensor it is the sign, and which side; None for a mask
        that was not seen."""
        return (
            self._signs.get(mask) if isinstance(mask, Tensor) and not mask.requires_grad else None
        )

    def _side(self, selection: _Selection) -> int | None:
        """1 if the mask is true where the kept value is positive, -1 if where it is negative, None
        if it is not the sign of that value."""
        kept = selection.kept
        mask = selection.mask
        sign = self._sign(mask)
        if (
            sign is None
            or not isinstance(kept, Tensor)
            or not kept.shape == mask.shape == sign.of.shape
        ):
            return None
        if is_transforming():
            return sign.side  # values cannot be compared here; the caller refuses the call
        kept = kept.detach()
        if not torch.equal(kept, sign.of) and not torch.equal(kept.clamp(min=0), sign.of):
            return None
        is_kept = mask.bool() if sign.side > 0 else ~mask.bool()
        agrees = bool(((is_kept == (kept > 0)) | (kept == 0)).all())
        return sign.side if agrees else None


_BOUNDS = frozenset(["clamp", "clamp_max", "maximum", "minimum"])
"""The operations that rectify if one of their bounds is zero."""


def _bounded(call: Call) -> Rectified | None:
    """The rectifier that a clamp, maximum or minimum is, if one of its bounds is zero; None
    otherwise."""
    if call.name in ("maximum", "minimum"):
        if len(call.flat) != 2 or len(call.tensors) != 2:
            return None
        for place, tensor in enumerate(call.tensors):
            if tensor.requires_grad and _is_zero(call.tensors[1 - place]):
                return Rectified((place,), negated=call.name == "minimum")
        return None
    least = call.named.get("min")
    most = call.named.get("max")
    if _is_zero(least):
        return Rectified()
    return Rectified(negated=True) if least is None and _is_zero(most) else None


def _without_negative_part(call: Call) -> Rectified | None:
    """The rectifier that a sum of a value and its negated negative part is, x - min(x, 0) or x +
    relu(-x); None for other sums."""
    if len(call.flat) != 2 or len(call.tensors) != 2 or is_transforming():
        return None
    subtracts = "sub" in call.name
    for place in (0,) if subtracts else (0, 1):
        x = call.tensors[place]
        other = call.tensors[1 - place]
        is_of_x = x.requires_grad and other.requires_grad and x.shape == other.shape
        if not is_of_x or not _comes_from(other, x):
            continue
        negative_part = x.detach().clamp(max=0)
        expected = negative_part if subtracts else -negative_part
        if torch.equal(other.detach(), expected) and bool(negative_part.any()):
            return Rectified((place, 1 - place), by_parts=True)
    return None


def _is_zero(value: Any) -> bool:
    """Whether a value is a constant zero: a number, or a tensor of zeros without a gradient."""
    if isinstance(value, Tensor):
        return not value.requires_grad and not is_transforming() and not bool(value.any())
    return isinstance(value, (int, float)) and value == 0


def _comes_from(value: Any, source: Any) -> bool:
    """Whether ``value`` has no gradient, or was computed from ``source`` at most `_STEPS` Nodes
    ago.

    Then ``where(x > 0, x, 0.1 * x)`` is a leaky ReLU.
    """
    if not isinstance(value, Tensor) or not value.requires_grad:
        return True
    waiting = [] if value.grad_fn is None else [value.grad_fn]
    for _ in range(_STEPS):
        if not waiting:
            return False
        node = waiting.pop(0)
        if node is source.grad_fn or getattr(node, "variable", None) is source:
            return True
        waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return False
