"""Attention weights of a pass, however a network computes them, and the gradients in them.

The pass is recorded, and `attentions_in` finds its attentions; the gradient in the weights is what
arrives at the Node that computed them. Nothing in the forward pass is changed.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from explain.hooks.graph import Reach
from explain.hooks.group import HookGroup, put_node
from explain.hooks.preserve import without_proxy
from explain.hooks.tracer import Tracer
from explain.recording import PassRecorder, Value
from explain.recording.attention import RecordedAttention, attentions_in, token_numbers
from explain.recording.record import record_until
from explain.recording.rows import image_numbers


class AttentionRecord:
    """One attention of a pass, or some of its heads: its ``weights``, and their ``gradient`` in the
    next backward pass.

    They are ``(M, queries, keys)``, ``query`` and ``key`` ``(M, tokens, d)``, for M heads of all
    images. ``images`` ``(M,)`` says whose they are, None if that is not known; ``tokens``
    ``(M, keys)`` which tokens the keys are of, None if they are no tokens.
    """

    def __init__(
        self, attention: RecordedAttention, weights: Tensor, rows: Mapping[Value, Tensor | None]
    ) -> None:
        """Read an attention of a recorded pass, with the tensor of its ``weights`` in the graph and
        the image numbers of values."""
        self.gradient: Tensor | None = None
        self.node: Any = weights.grad_fn
        """Where the weights were computed; None without a graph."""
        self._dims = (attention.queries, attention.keys)
        self.weights = _by_head(weights.detach().clone(), *self._dims)
        query = attention.query
        key = attention.key
        self.query = _by_head(query.value.tensor.detach(), query.tokens, query.channels)
        self.key = _by_head(key.value.tensor.detach(), key.tokens, key.channels)
        numbers = token_numbers(key)
        self.tokens: Tensor | None = None
        if numbers is not None and len(self.key) == len(self.weights):
            self.tokens = _by_head(numbers, key.tokens, key.channels)[..., 0]
        self.images = _images(attention, rows)
        if attention.weights not in rows and self.tokens is not None:
            self.images = torch.unique(self.tokens, dim=0, return_inverse=True)[1]

    def watch(self, group: HookGroup) -> None:
        """Record the gradient in the weights when a backward pass reaches them, while ``group`` is
        alive."""
        self.gradient = None
        if self.node is not None:
            put_node(group, self.node, self._take, pre=True)

    def _take(self, grad_outputs: tuple[Tensor | None, ...]) -> None:
        """Note the gradient in the attention weights: a prehook of their Node."""
        self.note(grad_outputs[0])

    def note(self, gradient: Tensor | None) -> None:
        """Note the gradient in the attention weights, in their own shape."""
        if gradient is not None:
            self.gradient = _by_head(gradient.detach().clone(), *self._dims)


class AttentionRecorder:
    """Records a forward pass until a stack closes, to find its attentions.

    ``images`` are the inputs that have the images first, ``shared`` those that have none.

    >>> layer = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    >>> x = torch.rand(3, 5, 4)
    >>> with ExitStack() as stack:
    ...     recorder = AttentionRecorder(stack, layer, [x])
    ...     output = layer(x, x, x, need_weights=False)[0]
    >>> with HookGroup() as group:
    ...     (record,) = recorder.watch(group)
    ...     output.sum().backward()
    >>> joined_heads([record], [record.weights], 3).shape, record.gradient.shape
    (torch.Size([3, 2, 5, 5]), torch.Size([6, 5, 5]))
    """

    def __init__(
        self,
        stack: ExitStack,
        model: nn.Module,
        images: Iterable[Tensor],
        shared: Iterable[Tensor] = (),
    ) -> None:
        self._recorder = PassRecorder(model)
        self._images = [self._recorder.add_input(tensor) for tensor in images]
        for tensor in shared:
            self._recorder.add_input(tensor)
        record_until(stack, self._recorder)

    @cached_property
    def _records(self) -> list[AttentionRecord]:
        """The attentions of the pass, which has ended."""
        recorder = self._recorder
        attentions = attentions_in(recorder.steps)
        rows: Mapping[Value, Tensor | None] = {}
        if attentions:
            rows = image_numbers(recorder.steps, self._images, self._images[0].shape[0])
        tensors = recorder.tensors
        records = []
        for attention in attentions:
            weights = tensors.get(attention.weights, attention.weights.tensor)
            records.append(AttentionRecord(attention, weights, rows))
        recorder.close()
        recorder.release()
        return records

    def watch(self, group: HookGroup) -> list[AttentionRecord]:
        """The attentions of the pass in their order; their gradients are recorded while ``group``
        is alive."""
        for record in self._records:
            record.watch(group)
        return list(self._records)


def heads_together(records: Sequence[AttentionRecord]) -> list[list[AttentionRecord]]:
    """The records of each attention, in the order of the forward pass: several where a network
    computes its heads, or images, one by one.

    They follow each other, have weights of the same shape, and none of them depends on another; all
    of them depend on the attention before.

    >>> heads = torch.nn.ModuleList(torch.nn.MultiheadAttention(4, 1) for _ in range(2))
    >>> x = torch.rand(3, 1, 4, requires_grad=True)
    >>> with ExitStack() as stack:
    ...     recorder = AttentionRecorder(stack, heads, [x])
    ...     output = sum(head(x, x, x, need_weights=False)[0] for head in heads)
    >>> [len(records) for records in heads_together(recorder.watch(HookGroup()))]
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
    nodes = [head.node for head in earlier if head.node is not None]
    if not nodes:
        return False
    reach = Reach([], nodes, since=min(node._sequence_nr() for node in nodes))
    return reach.of(record.node)


def joined_heads(records: Sequence[AttentionRecord], maps: Sequence[Tensor], count: int) -> Tensor:
    """Tensors ``(M, …)`` of the records of one attention, as `heads_together` groups them, as one
    tensor ``(N, heads, …)`` of ``count`` images.

    It is empty, ``(0, heads, …)``, if the heads do not look at the same tokens of each image: in
    windows, among channels, or where it is not known.
    """
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
    if len(images) < len(records) or len(tokens) < len(records):
        return None
    image_of = torch.cat(images)
    order = image_of.argsort(stable=True)
    heads = image_of.bincount(minlength=count)
    if len(heads) != count or bool((heads * count != len(order)).any()):
        return None
    by_image = torch.unflatten(torch.cat(tokens)[order], 0, (count, -1))
    return order if bool((by_image == by_image[:, :1]).all()) else None


def _by_head(tensor: Tensor, first: int | None, last: int) -> Tensor:
    """A tensor ``(M, first, last)``: two of its dimensions last, and all others in one; without a
    dimension for the first, that has size 1."""
    if first is None:
        first = tensor.ndim
        tensor = tensor.unsqueeze(first)
    moved = tensor.movedim((first, last), (-2, -1))
    return moved.reshape(-1, *moved.shape[-2:])


def _images(attention: RecordedAttention, rows: Mapping[Value, Tensor | None]) -> Tensor | None:
    """The image ``(M,)`` of each head of an attention's weights; None if it is not known, or not
    one."""
    weights = attention.weights
    numbers = rows.get(weights)
    dims = [dim for dim in (attention.queries, attention.keys) if dim is not None]
    if numbers is None or any(numbers.shape[dim] > 1 for dim in dims) or bool((numbers < 0).any()):
        return None
    sizes = [1 if dim in dims else size for dim, size in enumerate(weights.shape)]
    return numbers.expand(sizes).flatten().long()


class ZeroLeaves(Tracer):
    """Zero leaves at attention that the explained input does not reach, so that a backward pass
    can.

    Words attend to each other before they meet a photo. A backward pass to the photo does not reach
    that attention, and with frozen weights there is not even a graph. So zeros that require a
    gradient are added to the input of such an attention: a pass that goes to them as well finds the
    gradient there.

    It adds zeros to what softmaxes and attentions are given that ``sources`` do not reach;
    ``leaves`` has them.

    >>> photo, words = torch.zeros(2, requires_grad=True), torch.zeros(2)
    >>> with ZeroLeaves([photo]) as recorder:
    ...     total = ((photo + words.softmax(0)) * photo.softmax(0)).sum()
    >>> [tuple(found.shape) for found in torch.autograd.grad(total, recorder.leaves)]
    [(2,)]
    """

    def __init__(self, sources: Sequence[Tensor]) -> None:
        """Start a forward pass with the explained inputs; Nodes of earlier passes do not count."""
        self.leaves: list[Tensor] = []
        self._sources = {id(tensor): tensor for tensor in sources}
        self._reach = Reach(sources, since=torch._C._autograd._get_sequence_nr())

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of the forward pass; add a zero leaf to the input of a softmax or attention
        that no explained input reaches."""
        name = getattr(func, "__name__", "")
        is_attention = name in ("softmax", "scaled_dot_product_attention")
        if not is_attention or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        arguments = [*args, *kwargs.values()]
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        if not tensors or any(map(self._is_reached, tensors)):
            return func(*args, **kwargs)
        leaf = torch.zeros_like(tensors[0], requires_grad=True)
        self.leaves.append(leaf)
        changed = [value + leaf if value is tensors[0] else value for value in arguments]
        named = dict(zip(kwargs, changed[len(args) :], strict=True))
        return func(*changed[: len(args)], **named)

    def _is_reached(self, tensor: Tensor) -> bool:
        """Whether a gradient leads from a tensor of this forward pass back to an explained
        input."""
        tensor = without_proxy(tensor)
        if not tensor.requires_grad:
            return False
        node = tensor.grad_fn
        return id(tensor) in self._sources if node is None else self._reach.of(node)
