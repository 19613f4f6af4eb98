"""The operations of a forward pass, as they happen: what each one is, in which module, and the Node that it left.

A recorder sees every functional call that modules make, in-place methods included. It tells rectifiers in whatever
words they were written, and keeps those visible that overwrite a view, whose Node autograd would hide in one of its
base. Operations that only the graph shows are added when it is walked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from explain.hooks import HookGroup, graph

# The Nodes that rectifiers leave in the graph; their names end in "Backward" and a number.
_NODES = {
    f"{name}Backward": kind
    for name, kind in {
        "Relu": "relu",
        "Threshold": "threshold",
        "Hardtanh": "hardtanh",
        "LeakyRelu": "leaky_relu",
        "Prelu": "prelu",
        "PreluKernel": "prelu",
        "RreluWithNoise": "rrelu",
        "Elu": "elu",
        "Celu": "celu",
        "Silu": "silu",
        "Gelu": "gelu",
        "Hardswish": "hardswish",
        "Mish": "mish",
        "Softplus": "softplus",
    }.items()
}
RECTIFIERS = frozenset(_NODES.values()) | {"selu", "relu6"}
# What hooks put into the graph, and operators that libraries register.
_KNOWN = ("_Gate", "_Overwritten", "BackwardHookFunction", "GeneratedBackwardFor_")


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation: its kind in the words of `torch.nn.functional`, the module that it ran in, and its Node.

    ``rectifies`` says whether it is a rectifier, and ``inputs`` which of the Node's inputs are what is rectified.
    """

    kind: str
    node: Node
    module: str | None = None
    rectifies: bool = False
    inputs: tuple[int, ...] = (0,)


@dataclass
class Operations:
    """The operations noted in a forward pass, by the Nodes that they left."""

    noted: dict[Node, Operation] = field(default_factory=dict)

    def behind(self, score: torch.Tensor) -> Iterator[Operation]:
        """Yield what is known of the graph behind a score: rectifiers, and functions that nobody can look into."""
        for node in graph(score):
            name = node.name().rstrip("0123456789")
            if node in self.noted:
                yield self.noted[node]
            elif name in _NODES:
                yield Operation(_NODES[name], node, rectifies=True)
            elif _is_custom(node):
                yield Operation(name.removesuffix("Backward"), node)


def _is_custom(node: Node) -> bool:
    """Whether a Node belongs to a function that somebody wrote in Python, or to scripted code."""
    name = node.name()
    written = isinstance(node, torch.autograd.function.BackwardCFunction) and not name.startswith(_KNOWN)
    return written or "DifferentiableGraph" in name


class Recorder(TorchFunctionMode):
    """Notes the operations that this thread's functional calls make, until it is left.

    >>> x = torch.randn(3, requires_grad=True)
    >>> with HookGroup() as group, Recorder(group) as recorder:
    ...     y = torch.where(x > 0, x, 0.1 * x).clamp(min=0)
    >>> [(found.kind, found.rectifies) for found in recorder.operations.noted.values()]
    [('where', True), ('clamp', True)]
    """

    def __init__(self, group: HookGroup, model: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.operations = Operations()
        self._thread = threading.get_ident()
        self._modules: list[str] = []
        if model is not None:
            for name, _ in model.named_modules():
                group.forward_pre(name, self._entering(name))
                group.forward(name, self._leaving)

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda module, args: self._modules.append(name)

    def _leaving(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        inputs = _rectified(kind, args, kwargs) if kind in _LOOKED_AT else None
        if inputs is None or threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first._is_view() and (apart := _out_of_place(func, args, kwargs)):
            # A clone, since what a rectifier keeps of its input must not be overwritten by its output.
            result = apart(first.clone())
            self._note(kind, result, inputs)
            return first.copy_(result)
        result = func(*args, **kwargs)
        self._note(kind, result, inputs)
        return result

    def _note(self, kind: str, result: Any, inputs: tuple[int, ...]) -> None:
        node = result.grad_fn if isinstance(result, torch.Tensor) else None
        if node is not None:
            module = self._modules[-1] if self._modules else None
            self.operations.noted[node] = Operation(kind, node, module, rectifies=True, inputs=inputs)


_ALIASES = {"clip": "clamp", "clamp_min": "clamp", "max": "maximum", "multiply": "mul", "rmul": "mul", "imul": "mul"}
_LOOKED_AT = RECTIFIERS | {"clamp", "maximum", "where", "mul"}


def kind_of(func: Any) -> str:
    """Name the operation that a function does, however it is spelt.

    >>> kind_of(F.relu), kind_of(torch.Tensor.relu_), kind_of(torch.clip), kind_of(torch.Tensor.__mul__)
    ('relu', 'relu', 'clamp', 'mul')
    """
    name = str(getattr(func, "__name__", "")).strip("_")
    return _ALIASES.get(name, name)


def _rectified(kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Which inputs of a call are rectified; None where it is no rectifier.

    Told by their values: ``clamp(x, min=0)``, ``maximum(x, 0)``, ``where(x > 0, x, ...)`` and ``x * (x > 0)``.
    """
    if kind in RECTIFIERS:
        return (0,)
    if kind == "clamp":
        least = kwargs.get("min", args[1] if len(args) > 1 else None)
        return (0,) if _is_zero(least) else None
    values = [*args, *kwargs.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if kind == "maximum":
        return _beside(values, _is_zero)
    if kind == "mul" and len(tensors) == 2 and not all(t.requires_grad for t in tensors):
        return _beside(values, lambda other: _is_mask(other, next((t for t in tensors if t is not other), None)))
    if kind == "where" and len(values) == 3 and len(tensors) >= 2:
        mask, kept = values[:2] if values[0].dtype == torch.bool else values[1::-1]  # the method has them turned round
        return (0, 1) if _is_mask(mask, kept) else None
    return None


def _beside(values: list[Any], fits: Callable[[Any], bool]) -> tuple[int, ...] | None:
    """The position of the one of two values that a graph leads to, where the other one fits."""
    if len(values) != 2:
        return None
    for own, other in ((0, 1), (1, 0)):
        value, beside = values[own], values[other]
        known = isinstance(beside, torch.Tensor) and not beside.requires_grad
        if isinstance(value, torch.Tensor) and value.requires_grad and known and fits(beside):
            return (own,)
    return None


def _is_zero(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.requires_grad and not bool(value.any())
    return value is not None and value == 0


def _is_mask(mask: Any, of: Any) -> bool:
    """Whether ``mask`` is where ``of`` is positive, as truth values or as ones and zeros."""
    if not isinstance(mask, torch.Tensor) or not isinstance(of, torch.Tensor) or mask.shape != of.shape:
        return False
    mask, positive = mask.detach(), of.detach() > 0
    if mask.dtype == torch.bool:
        return bool((mask == (positive | (mask & (of.detach() == 0)))).all())
    return torch.equal(mask, positive.to(mask.dtype))


def _out_of_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., torch.Tensor] | None:
    """What an in-place rectifier, called with these arguments, computes; None if it is not in place."""
    names: tuple[str, ...] = getattr(getattr(func, "__code__", None), "co_varnames", ())
    given = {**dict(zip(names, args, strict=False)), **kwargs} if args and "inplace" in names else {}
    if given.get("inplace"):
        return lambda x: func(**{**given, names[0]: x, "inplace": False})
    name = str(getattr(func, "__name__", ""))
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__imul__"
    if not in_place:
        return None
    kind = name.strip("_").removeprefix("i") if name == "__imul__" else name[:-1]
    plain = getattr(torch, kind, None) or getattr(F, kind)
    return lambda x: plain(x, *args[1:], **kwargs)
