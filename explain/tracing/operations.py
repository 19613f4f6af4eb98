"""The operations of a forward pass, as they happen: what each one is, in which module, and the Node that it left.

A recorder sees every functional call that modules make, in-place methods included. It notes rectifiers and added
constants. Where a call overwrites a view, autograd would hide its Node in one of the base, so the recorder makes the
call out of place. Operations that only the graph shows are added when it is walked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from explain._utils.errors import MethodError
from explain.hooks import graph
from explain.hooks.preserve import is_transforming
from explain.tracing.calls import Call
from explain.tracing.dependence import AddedConstant, ConstantRecorder
from explain.tracing.rectifiers import Rectified, Rectifiers, may_rectify
from explain.tracing.table import RECTIFIER_NODES, operation_name
from explain.tracing.tracer import ModuleTracker, Tracer

# What hooks put into the graph, and operators that libraries register.
_KNOWN = ("_Gate", "_OwnGate", "_Entrance", "Overwritten", "BackwardHookFunction", "GeneratedBackwardFor_")


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation: its kind in the words of `torch.nn.functional`, the module that it ran in, and its Node.

    ``rectifies`` says whether it is a rectifier, and ``inputs`` which of the Node's inputs are what is rectified. One
    that is ``turned`` round keeps the negative part: -relu(-x).
    """

    kind: str
    node: Node
    module: str | None = None
    rectifies: bool = False
    inputs: tuple[int, ...] = (0,)
    turned: bool = False


@dataclass
class Operations:
    """The operations noted in a forward pass, by the Nodes that they left; and what was added on the way."""

    noted: dict[Node, Operation] = field(default_factory=dict)
    constants: list[AddedConstant] = field(default_factory=list)

    def of_graph(self, score: torch.Tensor) -> Iterator[Operation]:
        """Yield the known operations of a score's graph: rectifiers, and functions that cannot be inspected."""
        for node in graph(score):
            name = node.name().rstrip("0123456789")
            if node in self.noted:
                yield self.noted[node]
            elif name in RECTIFIER_NODES:
                yield Operation(RECTIFIER_NODES[name], node, rectifies=True)
            elif _is_custom(node):
                yield Operation(name.removesuffix("Backward"), node)


def _is_custom(node: Node) -> bool:
    """Whether a Node belongs to a custom function in Python, or to scripted code."""
    name = node.name()
    written = isinstance(node, torch.autograd.function.BackwardCFunction) and not name.startswith(_KNOWN)
    return written or "DifferentiableGraph" in name


class Recorder(Tracer):
    """Notes the operations that this thread's functional calls make, until it is left.

    Args:
        model: the model whose modules they are made in.
        rectifiers: note what rectifies.
        constants: note what is added.

    >>> x = torch.randn(3, requires_grad=True)
    >>> with Recorder(nn.Identity(), rectifiers=True, constants=True) as recorder:
    ...     y = torch.where(x > 0, x, 0.1 * x).clamp(min=0) + torch.ones(3)
    >>> [(found.kind, found.rectifies) for found in recorder.operations.noted.values()]
    [('where', True), ('clamp', True)]
    >>> [constant.value for constant in recorder.operations.constants]
    [tensor([1., 1., 1.])]
    """

    opens = False

    def __init__(self, model: nn.Module, *, rectifiers: bool, constants: bool) -> None:
        self._running = ModuleTracker(model)
        self._noted: dict[Node, Operation] = {}
        self._rectifiers = Rectifiers() if rectifiers else None
        self._constants = ConstantRecorder(model) if constants else None

    @property
    def operations(self) -> Operations:
        """What has been noted so far."""
        return Operations(self._noted, [] if self._constants is None else self._constants.settled())

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = operation_name(func)
        rectifiers = self._rectifiers if may_rectify(name) else None
        if rectifiers is None and self._constants is None:
            return func(*args, **kwargs)
        call = Call(func, name, args, kwargs)
        rectified = None if rectifiers is None else rectifiers.find(call)
        if rectified is not None and not call.info.has("rectifies") and is_transforming():
            raise MethodError(
                f"guidedbackprop must see rectifiers outside torch.vmap and the other transforms of torch.func, but "
                f"{name}() in layer {self._running()[0] or 'model'!r} runs inside one; use relu() there, or saliency"
            )
        noted = rectified is not None or (self._constants is not None and call.info.has("adds"))
        first = args[0] if args else None
        apart = None
        if (
            noted
            and isinstance(first, torch.Tensor)
            and (first._is_view() or (self._constants is not None and self._constants.is_constant(first)))
        ):
            apart = call.out_of_place() if call.in_place else None
        # A clone, since what a rectifier keeps of its input must not be overwritten by its output.
        result = call.made() if apart is None else apart.made({0: args[0].clone()})
        if rectified is not None:
            self._note(name, first if result is None else result, rectified)
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

    def _note(self, kind: str, result: Any, found: Rectified) -> None:
        node = result.grad_fn if isinstance(result, torch.Tensor) else None
        if node is not None:
            self._noted[node] = Operation(kind, node, self._running()[0], True, found.inputs, found.turned)
