"""The attentions of a pass, however they are written, against plain matrices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from explain.data.inputs import Inputs
from explain.engine.recorded_pass import RecordedPass
from explain.hooks import HookGroup
from explain.hooks.attention import AttentionRecord, joined_heads
from explain.recording.attention import heads_together
from tests.relevance.test_relevance import random

HEADS = 2
Parts = tuple[Tensor, Tensor, Tensor]
Spelling = Callable[[Tensor, Tensor, Tensor], Tensor]
SPELLINGS: dict[str, Spelling] = {}
"""From queries, keys and values (N, heads, tokens, 3) to what attention gives of them."""
SCALE = 3**-0.5
MASK = torch.ones(5, 5, dtype=torch.bool).tril()
LOGITS = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~MASK, -torch.inf)


def spelling(function: Spelling) -> Spelling:
    SPELLINGS[function.__name__] = function
    return function


@spelling
def matrices(q, k, v):
    return (q @ k.mT * SCALE).softmax(-1) @ v


@spelling
def transposed(q, k, v):
    weights = (k @ q.mT * SCALE).softmax(-2)
    return (v.mT @ weights).mT


@spelling
def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@spelling
def fused_for_each_head(q, k, v):
    parts = zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)
    return torch.stack([F.scaled_dot_product_attention(*part) for part in parts], 1)


@spelling
def einsum(q, k, v):
    weights = (torch.einsum("nhqd,nhkd->nhqk", q, k) * SCALE).softmax(-1)
    return torch.einsum("nhqk,nhkd->nhqd", weights, v)


@spelling
def einsum_with_heads_last(q, k, v):
    weights = (torch.einsum("nhqd,nhkd->qknh", q, k) * SCALE).softmax(1)
    return torch.einsum("qknh,nhkd->nhqd", weights, v)


@spelling
def merged(q, k, v):
    q, k, v = (part.flatten(0, 1) for part in (q, k, v))
    scores = torch.baddbmm(q.new_zeros(len(q), 5, 5), q, k.mT, beta=0, alpha=SCALE)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (-1, HEADS))


@spelling
def merged_with_heads_first(q, k, v):
    q, k, v = (part.transpose(0, 1).flatten(0, 1) for part in (q, k, v))
    mixed = torch.bmm((q * SCALE @ k.mT).softmax(-1), v)
    return mixed.unflatten(0, (HEADS, -1)).transpose(0, 1)


@spelling
def heads_first(q, k, v):
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    return ((q * SCALE @ k.mT).softmax(-1) @ v).transpose(0, 1)


@spelling
def one_by_one(q, k, v):
    rows = []
    for image in range(len(q)):
        heads = []
        for head in range(HEADS):
            weights = (q[image, head] @ k[image, head].T * SCALE).softmax(1)
            heads.append(weights @ v[image, head])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@spelling
def products_by_hand(q, k, v):
    scores = (q[:, :, :, None] * k[:, :, None]).sum(-1) * SCALE
    return (scores.softmax(-1)[..., None] * v[:, :, None]).sum(3)


@spelling
def softmax_by_hand(q, k, v):
    scores = q @ k.mT * SCALE
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return (powers / powers.sum(-1, keepdim=True)) @ v


@spelling
def softmax_by_its_logarithm(q, k, v):
    scores = q @ k.mT * SCALE
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


@spelling
def softmax_by_a_reciprocal(q, k, v):
    powers = (q @ k.mT * SCALE).exp()
    return (powers * powers.sum(-1)[..., None].reciprocal()) @ v


@spelling
def masked(q, k, v):
    scores = (q @ k.mT * SCALE).masked_fill(~MASK, -torch.inf)
    return F.dropout(scores.softmax(-1), 0.5, training=False) @ v


@spelling
def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@spelling
def with_added_mask(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=LOGITS)


@spelling
def with_numbers_of_places(q, k, v):
    q, k = (torch.view_as_complex(F.pad(part, (0, 1)).unflatten(-1, (2, 2))) for part in (q, k))
    turns = torch.polar(torch.ones(5, 2), torch.zeros(5, 2)).to(q.dtype)
    q, k = (torch.view_as_real(part * turns).flatten(-2) for part in (q, k))
    return (q @ k.mT * SCALE).softmax(-1) @ v


MASKED = ("masked", "causal", "with_added_mask")


class Attention(nn.Module):
    def __init__(self, function: Spelling) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.qkv = nn.Linear(4, 3 * HEADS * 3)
        self.out = nn.Linear(HEADS * 3, 4)

    def parts(self, x: Tensor) -> Parts:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, 3)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.function(*self.parts(x)).transpose(1, 2).flatten(2)).sin()


def expected(model: Attention, x: Tensor, *, mask: bool) -> tuple[Tensor, Tensor]:
    """The weights (N, heads, queries, keys), and the gradient of the sum of the output in them."""
    q, k, v = model.parts(x)
    scores = q @ k.mT * SCALE
    weights = (scores.masked_fill(~MASK, -torch.inf) if mask else scores).softmax(-1)
    output = model.out((weights @ v).transpose(1, 2).flatten(2)).sin()
    return weights.detach(), torch.autograd.grad(output.sum(), weights)[0]


def recorded(model: nn.Module, x: Tensor) -> tuple[Tensor, list[AttentionRecord]]:
    """The output, and the attentions of a pass."""
    inputs = Inputs((x,))
    with ExitStack() as stack, HookGroup(model) as group:
        whole = RecordedPass.begin(stack, group, model, inputs, {inputs.path: x})
        output = model(x)
    whole.finish(output, attention=True)
    return output, list(whole.attention)


@pytest.mark.parametrize("count", [1, 2, 3])  # 2 is the number of heads
@pytest.mark.parametrize("name", SPELLINGS)
def test_an_attention_is_found_however_it_is_written(name: str, count: int) -> None:
    model = Attention(SPELLINGS[name]).double()
    x = random(0, count, 5, 4)
    output, found = recorded(model, x)
    with HookGroup() as group:
        (records,) = heads_together(found)
        for record in found:
            record.watch(group)
        output.sum().backward()
    weights, gradient = expected(model, x, mask=name in MASKED)
    assert_close(joined_heads(records, [record.weights for record in records], count), weights)
    arrived = [record.gradient for record in records if record.gradient is not None]
    assert_close(joined_heads(records, arrived, count), gradient)
    q, k, _ = model.parts(x)
    for name_of_part, part in (("query", q), ("key", k)):
        tensors = [getattr(record, name_of_part) for record in records]
        of_heads = joined_heads(records, tensors, count)
        cosines = F.cosine_similarity(of_heads[..., :3], part, dim=-1)
        assert_close(cosines, torch.ones_like(cosines))


seen: list[Tensor] = []
"""The weights that these have computed."""


def kept(weights: Tensor) -> Tensor:
    seen.append(weights)
    return weights


def talking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads are mixed before and after the softmax (CaiT)."""
    mix = torch.tensor([[0.7, 0.3], [0.2, 0.8]], dtype=q.dtype)
    scores = F.linear((q @ k.mT * SCALE).permute(0, 2, 3, 1), mix).permute(0, 3, 1, 2)
    return torch.einsum("nhqk,hg->ngqk", kept(scores.softmax(-1)), mix) @ v


def mixed_by_a_convolution(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by a convolution and a normalisation (DeepViT)."""
    mix = torch.tensor([[0.7, 0.3], [0.2, 0.8]], dtype=q.dtype)[..., None, None]
    scores = F.conv2d(kept((q @ k.mT * SCALE).softmax(-1)), mix)
    return F.batch_norm(scores, torch.zeros(2).double(), torch.ones(2).double()) @ v


def added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores of places are added, which are products themselves."""
    table = torch.linspace(0, 1, 15, dtype=q.dtype).view(5, 3)
    return kept((torch.einsum("nhqd,kd->nhqk", q, table) + q @ k.mT).softmax(-1)) @ v


@pytest.mark.parametrize("function", [talking, mixed_by_a_convolution, added])
def test_scores_may_be_mixed_and_added(function: Spelling) -> None:
    model = Attention(function).double()
    x = random(0, 3, 5, 4)
    seen.clear()
    output, (record,) = recorded(model, x)
    with HookGroup() as group:
        record.watch(group)
        gradient, _ = torch.autograd.grad(output.sum(), [*seen, model.qkv.weight])
    assert record.gradient is not None
    assert_close(joined_heads([record], [record.weights], 3), seen[0].detach())
    assert_close(joined_heads([record], [record.gradient], 3), gradient)


def in_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (F.pad(part, (0, 0, 0, 1)).unflatten(2, (2, 3)) for part in (q, k, v))
    return matrices(q, k, v).flatten(2, 3)[:, :, :5]


def in_merged_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (F.pad(part, (0, 0, 0, 1)).view(-1, 3, 3) for part in (q, k, v))
    return matrices(q, k, v).view(-1, HEADS, 6, 3)[:, :, :5]


def among_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.mT for part in (q, k, v))
    return matrices(q, k, v).mT


@pytest.mark.parametrize("function", [in_windows, in_merged_windows, among_channels])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_attention_in_windows_or_among_channels_has_no_map(function: Spelling, count: int) -> None:
    model = Attention(function).double()
    x = random(0, count, 5, 4)
    records = recorded(model, x)[1]
    assert len(records) == 1
    assert len(joined_heads(records, [records[0].weights], count)) == 0


def gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Channels are weighed by a softmax: a gate, no attention."""
    return v * v.mean(2, keepdim=True).softmax(-1)


def pooled_by_a_layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A table of constants is read: no values."""
    return (q @ k.mT).softmax(-1) @ torch.ones(5, 3, dtype=q.dtype)


@pytest.mark.parametrize("function", [gated, pooled_by_a_layer])
def test_what_is_no_attention_is_not_taken_for_one(function: Spelling) -> None:
    model = Attention(function).double()
    x = random(0, 2, 5, 4)
    assert recorded(model, x)[1] == []
