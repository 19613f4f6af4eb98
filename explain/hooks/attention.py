"""Attention weights of a pass, however a network computes them, and the gradients in them.

The attentions are those of a recording of the pass; the gradient in the weights is what arrives at
the Node that computed them. Nothing in the forward pass is changed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from explain.hooks.group import HookGroup, put_node_pre
from explain.recording import Value
from explain.recording.attention import RecordedAttention, token_numbers


class AttentionRecord:
    """One attention of a pass, or some of its heads: its weights, and their gradient in the next
    backward pass. Shapes count M heads, of all images together."""

    def __init__(
        self,
        attention: RecordedAttention,
        weights: Tensor,
        images: Mapping[Value, Tensor | None],
    ) -> None:
        """Read an attention of a recorded pass, with the tensor of its ``weights`` in the graph and
        the image numbers of values."""
        self.gradient: Tensor | None = None
        self.node: Any = weights.grad_fn
        """Where the weights were computed; None without a graph."""
        self.number = attention.number
        self.predecessors = attention.predecessors
        self._by_head = attention.weights.by_head
        self.weights = self._by_head(weights.detach().clone())
        """``(M, queries, keys)``; ``query`` and ``key`` are ``(M, tokens, d)``."""
        self.query, self.key = (
            factor.by_head(factor.value.tensor.detach())
            for factor in (attention.query, attention.key)
        )
        self.tokens = token_numbers(attention.key)
        """Which tokens the keys are of, ``(M, keys)``; None if they are no tokens."""
        # keys that are broadcast to several heads do not say which row of the weights is theirs
        if self.tokens is not None and len(self.tokens) != len(self.weights):
            self.tokens = None
        self.images = _images(attention, images)
        """Whose image each head is, ``(M,)``; None if that is not known."""
        if attention.weights.value not in images and self.tokens is not None:
            # weights that change with no image: heads on the same tokens count as of one image
            _, self.images = torch.unique(self.tokens, dim=0, return_inverse=True)

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the weights."""
        return self.weights.shape

    def watch(self, group: HookGroup) -> None:
        """Record the gradient in the weights when a backward pass reaches them, while ``group`` is
        alive."""
        self.gradient = None
        if self.node is not None:
            put_node_pre(group, self.node, self._take)

    def _take(self, grad_outputs: tuple[Tensor | None, ...]) -> None:
        """Note the gradient in the attention weights: a prehook of their Node."""
        self.note(grad_outputs[0])

    def note(self, gradient: Tensor | None) -> None:
        """Note the gradient in the attention weights, in their own shape."""
        if gradient is not None:
            self.gradient = self._by_head(gradient.detach().clone())


def joined_heads(records: Sequence[AttentionRecord], maps: Sequence[Tensor], count: int) -> Tensor:
    """Tensors ``(M, …)`` of the records of one attention as one ``(N, heads, …)``; empty if the
    heads look at different tokens of each image (windows, channels), or where that is unknown."""
    stacked = torch.cat(list(maps))
    order = _by_image(records, count)
    if order is None:
        return stacked.new_empty((0, *stacked.shape))
    return torch.unflatten(stacked[order], 0, (count, -1))


def _by_image(records: Sequence[AttentionRecord], count: int) -> Tensor | None:
    """The order in which the heads of records come image by image; None if not each image has the
    same number of heads on the same tokens."""
    images = [record.images for record in records if record.images is not None]
    tokens = [record.tokens for record in records if record.tokens is not None]
    if len(images) < len(records) or len(tokens) < len(records):  # unknown for some
        return None
    image_of_head = torch.cat(images)
    order = image_of_head.argsort(stable=True)
    heads_of_image = image_of_head.bincount(minlength=count)
    has_all_images = len(heads_of_image) == count
    if not has_all_images or bool((heads_of_image * count != len(order)).any()):
        return None
    tokens_by_image = torch.unflatten(torch.cat(tokens)[order], 0, (count, -1))
    are_same = bool((tokens_by_image == tokens_by_image[:, :1]).all())
    return order if are_same else None


def _images(attention: RecordedAttention, images: Mapping[Value, Tensor | None]) -> Tensor | None:
    """The image ``(M,)`` of each head of an attention's weights; None if it is not known, or not
    one."""
    weights = attention.weights
    numbers = images.get(weights.value)
    if numbers is None or bool((numbers < 0).any()):  # -1 stands for no image
        return None
    by_head = weights.by_head(numbers)
    differs_within_head = by_head[0].numel() > 1  # or else it is one number that broadcasts
    return None if differs_within_head else by_head.flatten().long()
