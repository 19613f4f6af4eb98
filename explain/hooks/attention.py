"""Attention weights read from the autograd graph, whether a module, a function or a fused kernel
computed them.

A softmax leaves its result in its Node, and the gradient that arrives there is the gradient in the
weights; the product before it leaves query and key. A fused kernel leaves query, key and value: the
weights are softmax(q k' scale + mask), and since its output is weights times values, the gradient
in the weights is the gradient that arrives times v'. Nothing in the forward pass is changed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from explain.hooks.attention_parts import fused_scores, spread
from explain.hooks.graph import Reach, consumers, is_of_hooks
from explain.hooks.group import HookGroup

_FUSED = "ScaledDotProduct"


class AttentionRecord:
    """One attention in the graph of an output: its ``weights``, and their ``gradient`` in the next
    backward pass.

    The weights are ``(N, heads, queries, keys)``, or have N and heads in one dimension, as
    ``query`` and ``key`` have then. The gradient is recorded while ``group`` is alive.
    """

    def __init__(self, node: Any, group: HookGroup) -> None:
        """Read the weights, and query and key if they are saved, from a softmax's or fused
        attention's Node.

        The gradient of the weights is recorded when a backward pass reaches the Node.
        """
        self.node = node
        self.gradient: torch.Tensor | None = None
        self.query: torch.Tensor | None
        self.key: torch.Tensor | None
        self.fused = node.name().startswith(_FUSED)
        if self.fused:
            masks = [getattr(node, f"_saved_attn_{name}", None) for name in ("mask", "bias")]
            mask = next((mask.detach() for mask in masks if mask is not None), None)
            causal = getattr(node, "_saved_is_causal", False)
            scale = getattr(node, "_saved_scale", None)
            query: torch.Tensor = node._saved_query.detach()
            key = spread(node._saved_key.detach(), query.shape[1])
            self.query = query
            self.key = key
            self.weights = fused_scores(query, key, mask, causal, scale).softmax(-1)
        else:
            self.query, self.key = _multiplied(node)
            self.weights = node._saved_result.detach().clone()
        group.put_node(node, self._take, pre=True)

    def _take(self, grad_outputs: tuple[torch.Tensor | None, ...]) -> None:
        """Note the gradient in the attention weights: a prehook of the attention's Node."""
        if grad_outputs[0] is None:
            return
        arrived = grad_outputs[0].detach()
        if self.fused:
            value = spread(self.node._saved_value.detach(), arrived.shape[1])
            self.gradient = arrived @ value.transpose(-2, -1)
        else:
            self.gradient = arrived.clone()


def attention(
    output: torch.Tensor, group: HookGroup, until: int | None = None
) -> list[AttentionRecord]:
    """Find every attention in the autograd graph of ``output``, in the order of the forward pass,
    and record its gradient.

    With ``until``, Nodes from this sequence number on do not count: a score may take a softmax over
    classes itself.

    >>> layer = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    >>> x = torch.rand(1, 3, 4, requires_grad=True)
    >>> with HookGroup() as group:
    ...     found = attention(layer(x, x, x, need_weights=False)[0].sum(), group)
    >>> [tuple(record.weights.shape) for record in found]
    [(1, 2, 3, 3)]
    """
    readers: Mapping[Any, Sequence[Any]] = consumers(output)
    earlier = [node for node in readers if until is None or node._sequence_nr() < until]
    return [
        AttentionRecord(node, group)
        for node in sorted(earlier, key=lambda node: node._sequence_nr())
        if node.name().startswith(_FUSED)
        or (_is_softmax_of_keys(node) and _weighs_values(node, readers))
    ]


def heads_together(records: Sequence[AttentionRecord]) -> list[list[AttentionRecord]]:
    """The records of each attention, in the order of the forward pass: several where a network
    computes its heads one by one.

    Heads of one attention follow each other, have weights of the same shape, and none of them
    depends on another; all of them depend on the attention before.

    >>> heads = torch.nn.ModuleList(torch.nn.MultiheadAttention(4, 1) for _ in range(2))
    >>> x = torch.rand(3, 1, 4, requires_grad=True)
    >>> with HookGroup() as group:
    ...     output = sum(head(x, x, x, need_weights=False)[0] for head in heads)
    ...     [len(records) for records in heads_together(attention(output.sum(), group))]
    [2]
    """
    attentions: list[list[AttentionRecord]] = []
    for record in records:
        is_head = (
            bool(attentions)
            and attentions[-1][0].weights.shape == record.weights.shape
            and not _depends_on(record, attentions[-1])
            and (len(attentions) == 1 or _depends_on(record, attentions[-2]))
        )
        if is_head:
            attentions[-1].append(record)
        else:
            attentions.append([record])
    return attentions


def _depends_on(record: AttentionRecord, earlier: Sequence[AttentionRecord]) -> bool:
    """Whether an attention is computed from what an earlier one gave."""
    nodes = [head.node for head in earlier]
    reach = Reach([], nodes, since=min(node._sequence_nr() for node in nodes))
    return reach.of(record.node)


def joined_heads(maps: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Attention maps of the heads of one attention, as `heads_together` groups them, as one tensor
    ``(N, heads, queries, keys)`` of ``count`` images."""
    return torch.cat([by_image(of_head, count) for of_head in maps], 1)


def by_image(maps: torch.Tensor, count: int) -> torch.Tensor:
    """Attention maps ``(N * heads, queries, keys)`` of ``count`` images as ``(N, heads, queries,
    keys)``; maps of four dimensions as they are.

    >>> by_image(torch.zeros(6, 4, 4), 2).shape
    torch.Size([2, 3, 4, 4])
    """
    if maps.ndim == 4:
        return maps
    return torch.unflatten(maps, 0, (count, -1)) if len(maps) % count == 0 else maps[:, None]


def _multiplied(node: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Query and key ``(N * heads, tokens, d)`` of an attention, from the product in the graph
    before its softmax's Node.

    (None, None) if autograd has not saved them.
    """
    weights = node._saved_result.shape
    while node is not None and "bmmbackward" not in node.name().lower():
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    saved = [getattr(node, f"_saved_{name}", None) for name in ("self", "mat2", "batch1", "batch2")]
    factors = [tensor.detach() for tensor in saved if isinstance(tensor, torch.Tensor)]
    if len(factors) < 2 or (factors[0].shape[-2], factors[1].shape[-1]) != weights[-2:]:
        return None, None
    return factors[0], factors[1].transpose(-2, -1)


def _is_softmax_of_keys(node: Any) -> bool:
    """Whether a Node is a softmax over the last of three or four dimensions, as that of attention
    weights."""
    if "SoftmaxBackward" not in node.name() or "Log" in node.name():
        return False
    dimensions = node._saved_result.ndim
    dim = node._saved_dim if "_saved_dim" in dir(node) else -1
    return dimensions in (3, 4) and (dim if dim < 2**62 else dim - 2**64) in (-1, dimensions - 1)


_PASSED_ON = (
    "View",
    "UnsafeView",
    "Reshape",
    "Expand",
    "Transpose",
    "Permute",
    "Clone",
    "Unsqueeze",
    "Squeeze",
    "Slice",
    "Select",
    "Split",
    "Unbind",
    "T",
    "ToCopy",
    "Alias",
    "Cat",
    "Mul",
    "Div",
    "Add",
    "Sub",
    "MaskedFill",
    "Where",
    "NativeDropout",
    "Mm",
    "Convolution",
    "NativeBatchNorm",
    "CudnnBatchNorm",
    "NativeLayerNorm",
)
"""Nodes of what is done to weights before values are multiplied by them; heads may be mixed."""


def _weighs_values(softmax: Any, readers: Mapping[Any, Sequence[Any]]) -> bool:
    """Whether the result of a softmax is multiplied with values later in the graph, as attention
    weights are.

    A softmax over classes is read, or multiplied by a mask of the same size. ``readers`` are the
    Nodes that read each Node's result.
    """
    size = _numel(softmax)
    seen = {softmax}
    waiting = [softmax]
    while waiting:
        for consumer in readers[waiting.pop()]:
            name = consumer.name()
            has_more = _numel(consumer) > size
            if "bmm" in name.lower() or (name.startswith("Mul") and has_more):
                return True
            passes_on = name.startswith(_PASSED_ON) or is_of_hooks(consumer)
            if passes_on and not has_more and consumer not in seen:
                seen.add(consumer)
                waiting.append(consumer)
    return False


def _numel(node: Any) -> int:
    """The number of values in the result of an autograd Node."""
    return math.prod(node._input_metadata[0].shape)
