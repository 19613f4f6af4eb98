"""Rules for rectifiers: what a backward pass may do to a gradient where the network has a ReLU or a relative of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

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
