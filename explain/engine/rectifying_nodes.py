"""Rules for gradients as hooks on autograd's Nodes, for passes that are not recorded.

A Node has the name of the operator that it differentiates. Where all Nodes between the input and
the score are of operators of the table that are rectifiers, or have nothing to do with them, their
names say all; whether a product, a clamp or a difference rectifies is asked of a recording.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from typing import TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from explain.hooks import HookGroup
from explain.hooks.graph import Reach, graph
from explain.recording.operations import TABLE, KnownOperation
from explain.relevance.gradient_rules import Coverage, GradientRule, GradientTuple, coverage_of
from explain.relevance.rectifiers import Operation

_NEVER_RECTIFYING = {
    "convolution",
    "matrixproduct",
    "batchnorm",
    "deviation",
    "average",
    "maximum",
    "softmax",
}
"""Kinds of operations that are no part of a rectifier, in whatever words."""
_OPERATIONS = {name.replace("_", ""): operation for name, operation in TABLE.items()}
"""The table by names as Nodes have them: in lower case, without underscores."""


Rectifiers: TypeAlias = Mapping[Node, Operation]
"""The Nodes of rectifiers, in the order of the pass, and what they differentiate."""


def rectifying_nodes(outputs: Iterable[Tensor], sources: Iterable[Tensor]) -> Rectifiers | None:
    """The Nodes of rectifiers through which a gradient comes from ``outputs`` to ``sources``; None
    if others may rectify too."""
    reach = Reach(sources)
    rectifiers = {}
    for node in dict.fromkeys(chain.from_iterable(map(graph, outputs))):
        if not reach.of(node):  # as of weights, which no gradient is taken in
            continue
        operation = _operation(node)
        if operation is not None and operation.has("rectifies"):
            rectifiers[node] = Operation(operation.name, rectifies=True)
        elif not _never_rectifies(node, operation):
            return None
    # autograd counts Nodes as they are made
    in_order = sorted(rectifiers, key=lambda node: node._sequence_nr())
    return {node: rectifiers[node] for node in in_order}


def hook_rectifiers(rule: GradientRule, rectifiers: Rectifiers, group: HookGroup) -> Coverage:
    """Let a rule replace the gradients of Nodes by hooks of ``group``; returns which it covers and
    misses."""
    for node, rectifier in rectifiers.items():
        if rule.covers(rectifier):
            group.node(node, partial(_replaced, rule, rectifier))
    return coverage_of(rule, rectifiers.values())


def _replaced(
    rule: GradientRule,
    rectifier: Operation,
    grad_inputs: GradientTuple,
    grad_outputs: GradientTuple,
) -> GradientTuple:
    """The hook of a rectifier's Node: the ``grad_inputs`` that a rule makes of autograd's."""
    return rule.backward(rectifier, grad_inputs, grad_outputs)


def _operation(node: Node) -> KnownOperation | None:
    """The operation that a Node differentiates, if the table lists it: ``NativeBatchNormBackward0``
    is that of ``native_batch_norm``."""
    name = re.sub(r"Backward\d*$", "", node.name())
    return _OPERATIONS.get(name.lower())


def _never_rectifies(node: Node, operation: KnownOperation | None) -> bool:
    """Whether what a Node differentiates is no part of a rectifier, in whatever words. A wrong yes
    would leave a rectifier out, a wrong no costs a recording."""
    if operation is None:
        return hasattr(node, "variable")  # a leaf, which no operation made
    if operation.name in ("add", "mul"):
        # of two signals; with a constant, as in x * (x > 0), one of the Nodes before is None
        return all(parent is not None for parent, _ in node.next_functions)
    if operation.kind is None:
        return not operation.traits.isdisjoint({"moves", "permutes", "resizes"})
    is_other_kind = operation.kind in _NEVER_RECTIFYING
    return is_other_kind or operation.has("gates") or operation.name == "cat"
