"""Rules for rectifiers: what a backward pass may do to a gradient where the network has a ReLU or a relative of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from explain.hooks import HookGroup, graph

Gradients = tuple[torch.Tensor | None, ...]


def _guided(grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
    """Springenberg et al., 2014: what comes back through a rectifier keeps only its positive part."""
    first = grad_inputs[0]
    return (None if first is None else first.clamp(min=0), *grad_inputs[1:])


def _deconvnet(grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients:
    """Zeiler and Fergus, 2014: the positive part of what arrives goes on, whatever the rectifier let through before."""
    arrived = grad_outputs[0]
    return (None if arrived is None or grad_inputs[0] is None else arrived.clamp(min=0), *grad_inputs[1:])


RULES: dict[str, Callable[[Gradients, Gradients], Gradients]] = {"guided": _guided, "deconvnet": _deconvnet}

# The Nodes that rectifiers leave in the graph, whether a module, a function or an in-place method put them there. Their
# names end in "Backward" and a number: 0, or 1 for some of the in-place variants.
RECTIFIERS = frozenset(
    f"{name}Backward"
    for name in [
        "Relu",
        "Threshold",
        "Hardtanh",
        "LeakyRelu",
        "Prelu",
        "PreluKernel",
        "RreluWithNoise",
        "Elu",
        "Celu",
        "Silu",
        "Gelu",
        "Hardswish",
        "Mish",
        "Softplus",
    ]
)


def apply_rule(rule: str, group: HookGroup, score: torch.Tensor) -> int:
    """Make the next backward pass from ``score`` follow a rule; return the number of rectifiers found."""
    nodes = [node for node in graph(score) if node.name().rstrip("0123456789") in RECTIFIERS]
    for node in nodes:
        group.node(node, RULES[rule])
    return len(nodes)


class InSight(TorchFunctionMode):
    """Lets a rectifier that overwrites a view leave its Node in the graph.

    Autograd hides what happens to a view inside a Node of its base, where no hook reaches it. Here the rectifier makes
    a new tensor, which is then copied into the view: the network sees the same, and the graph shows it.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(iter(args), None)
        rectify = _out_of_place(func, args, kwargs)
        if rectify is None or not isinstance(first, torch.Tensor) or not first._is_view():
            return func(*args, **kwargs)
        # A clone, since what a rectifier keeps of its input must not be overwritten by its output.
        return first.copy_(rectify(first.clone()))


def _out_of_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., torch.Tensor] | None:
    """What an in-place rectifier, called with these arguments, computes; None if it is none."""
    names: tuple[str, ...] = getattr(getattr(func, "__code__", None), "co_varnames", ())
    given = {**dict(zip(names, args, strict=False)), **kwargs} if args and "inplace" in names else {}
    if given.get("inplace"):
        return lambda x: func(**{**given, names[0]: x, "inplace": False})
    name = getattr(func, "__name__", "")
    known = {"selu", "rrelu", *(node.removesuffix("Backward").lower() for node in RECTIFIERS)}
    if not args or not name.endswith("_") or name.replace("_", "") not in known:
        return None
    plain = getattr(torch, name[:-1], None) or getattr(F, name[:-1])
    return lambda x: plain(x, *args[1:], **kwargs)
