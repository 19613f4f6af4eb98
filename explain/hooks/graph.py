"""The autograd graph of a tensor: its Nodes, and histories given to tensors.

Other code may hold a tensor as well: in a list, as an attribute, as a second output. It sees a new
history only if the object itself has it, so the object is not replaced here where that can be
avoided.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import Node, get_gradient_edge

from explain._utils.errors import HookError


def graph(start: torch.Tensor | Node | None) -> list[Node]:
    """Return every autograd Node of the graph of a tensor, or of a Node, once, nearest first.

    >>> x = torch.ones(2, requires_grad=True)
    >>> [node.name() for node in graph(x.relu().sum())]
    ['SumBackward0', 'ReluBackward0', 'torch::autograd::AccumulateGrad']
    """
    first_node = start.grad_fn if isinstance(start, torch.Tensor) else start
    nodes = [] if first_node is None else [first_node]
    seen = set(nodes)
    for node in nodes:  # which grows meanwhile
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                nodes.append(parent)
    return nodes


Gradients: TypeAlias = tuple[torch.Tensor | None, ...]
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The layout with the channels last, by the number of dimensions."""


def differentiate(
    score: torch.Tensor,
    sources: Sequence[Any],
    gradient: torch.Tensor | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    nodes: Iterable[Node] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad`, also right for batch normalisations of a single sample; None where the
    score depends on no source. ``nodes`` are those of the score, if they are at hand."""
    # On a CPU, PyTorch (2.13, 2.14) takes a gradient with the channels last for one with the
    # channels first there, or the other way round: of one sample, two of its checks of the layout
    # disagree. Instance normalisations are among them: they make one sample of all images. So the
    # gradient is laid out as the normalisation's input.
    handles = []
    for node in graph(score) if nodes is None else nodes:
        if "BatchNorm" in node.name() and hasattr(node, "_raw_saved_input"):
            saved = node._raw_saved_input
            handles.append(node.register_prehook(partial(_laid_out_as_input, saved)))
    try:
        return torch.autograd.grad(
            score,
            sources,
            gradient,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
    finally:
        # later derivatives through the same graph need them too
        for handle in handles if not create_graph else ():
            handle.remove()


def normalises_over_batch(nodes: Iterable[Node]) -> bool:
    """Whether a batch normalisation among the Nodes is in training mode, with statistics over
    several samples. Then gradients of different images cannot be computed together."""
    norms = [node for node in nodes if getattr(node, "_saved_training", False)]
    return any(
        "BatchNorm" in norm.name() and norm._input_metadata[0].shape[0] > 1 for norm in norms
    )


def _laid_out_as_input(saved: Any, gradients: Gradients) -> Gradients | None:
    """The gradients that arrive at a batch normalisation of one sample, the first in the memory
    layout of the input, which ``saved`` holds; None leaves them as they are."""
    first_gradient, *of_other_outputs = gradients
    if first_gradient is None or len(first_gradient) > 1:
        return None
    layout = _CHANNELS_LAST.get(first_gradient.ndim)
    if layout is None:
        return None
    is_last = first_gradient.is_contiguous(memory_format=layout)
    # A checkpoint packs saved tensors and returns them only once; PyTorch 2.6 cannot unpack them.
    is_packed = getattr(saved, "unpack_hook", None) is not None
    if is_packed or not hasattr(saved, "unpack"):
        if not is_packed and not is_last:
            return None
        # A copy that both checks find to have the channels last is right for any input, but slower.
        return first_gradient.clone(memory_format=layout), *of_other_outputs
    x = saved.unpack()
    if x.is_contiguous(memory_format=layout) == is_last:
        return None
    return torch.empty_like(x).copy_(first_gradient), *of_other_outputs


class Reach:
    """Whether a gradient leads from a Node to one of some leaves, or to a Node of ``ends``; each
    Node is visited once."""

    def __init__(self, leaves: Iterable[torch.Tensor], ends: Iterable[Node] = ()) -> None:
        """Start with the leaves and Nodes to be reached; a leaf with a history of its own counts by
        its Node."""
        self._leaves: dict[int, torch.Tensor] = {}
        self._reaches = dict.fromkeys(ends, True)
        for leaf in leaves:
            self._leaves[id(leaf)] = leaf
            if leaf.grad_fn is not None:  # a leaf may be part of the caller's graph
                self._reaches[leaf.grad_fn] = True

    def of(self, node: Node | None) -> bool:
        """Whether a gradient leads from a Node to one of the leaves or ends; the answer is
        remembered for each Node."""
        if node is None:
            return False
        reaches = self._reaches
        waiting = [node]
        while waiting:  # without recursion, since networks are deep
            last = waiting[-1]
            if last in reaches:
                waiting.pop()
                continue
            parents = [parent for parent, _ in last.next_functions if parent is not None]
            unknown_parents = [parent for parent in parents if parent not in reaches]
            if unknown_parents:  # the Node waits below them, and comes again when they are known
                waiting += unknown_parents
                continue
            # what the Node is for, if it is one that accumulates a leaf's gradient
            accumulated = getattr(last, "variable", None)
            is_leaf = id(accumulated) in self._leaves
            reaches[last] = is_leaf or any(reaches[parent] for parent in parents)
        return reaches[node]


def accumulator(leaf: torch.Tensor) -> Node:
    """Return the Node that adds a leaf's gradient into ``leaf.grad``."""
    if not (leaf.is_leaf and leaf.requires_grad):
        raise HookError(
            "leaf must be a leaf that requires a gradient, such as a parameter, for it to be "
            "accumulated"
        )
    return get_gradient_edge(leaf).node


class _Alias(torch.autograd.Function):
    """The same memory and version counter, in the graph. Autograd does not treat it as a view, so
    it may be overwritten."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
        """Return the same memory under a new history; ``start`` only makes autograd record it."""
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        """Pass the gradient to the tensor, and none to ``start``."""
        return gradient, None


with torch.inference_mode(False):
    _START = torch.empty(0, device="cpu", requires_grad=True)
    """What lets an alias be in the graph; no gradient reaches it."""


class _Continued(torch.autograd.Function):
    """A tensor whose history goes on from ``other``: the gradient passes to that, with ``both`` to
    its own as well."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, other: torch.Tensor, both: bool) -> torch.Tensor:
        """Return the tensor itself, as if it had been overwritten, so that it gets a new
        history."""
        ctx.both = both
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Pass the gradient to ``other``, with ``both`` to the tensor's earlier history as well."""
        return gradient if ctx.both else None, gradient, None


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory and a graph of its own, even if the tensor has none."""
    return _Alias.apply(tensor, _START)  # type: ignore[no-any-return]


def is_alias(tensor: torch.Tensor) -> bool:
    """Whether a tensor was returned by `alias` and has not been overwritten since."""
    return tensor.grad_fn is not None and tensor.grad_fn.name() == "_AliasBackward"


def copy_with_history(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in the same memory layout and in its graph; if it has none, the graph
    begins at a leaf."""
    start = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
    return torch.empty_like(start).copy_(start)


def mark(tensor: torch.Tensor) -> torch.Tensor | None:
    """Begin a new part of a tensor's history here; return a leaf whose gradient is that of all
    later uses of the tensor, or None where autograd does not allow that."""
    leaf = tensor.detach().requires_grad_()
    # refused if nothing may overwrite the tensor, or (a view made without gradients) not with
    # gradients
    return leaf if try_continue_from(tensor, leaf, both=True) else None


def try_continue_from(tensor: torch.Tensor, other: torch.Tensor, *, both: bool = False) -> bool:
    """Do as `continue_from`; return False instead of raising if autograd does not allow it."""
    try:
        with torch.enable_grad():
            continue_from(tensor, other, both=both)
    except RuntimeError:
        return False
    return True


def continue_from(tensor: torch.Tensor, other: torch.Tensor, *, both: bool = False) -> None:
    """Change a tensor's history in place: later uses, by any holder of the tensor, count as uses of
    ``other``, with ``both`` of its old history too. The values stay."""
    # The version counter is kept, since the values stay as they are for whoever has saved them. No
    # tracer may look at the history of a view meanwhile: autograd holds its lock.
    with _unsafe_preserve_version_counter(tensor), torch._C.DisableTorchFunction():
        _Continued.apply(tensor, other, both)
