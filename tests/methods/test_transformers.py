"""Attention weighted by gradients or relevance, against plain matrices."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ExplainWarning, MethodError
from explain.hooks import Ablate, intervene
from explain.methods import CheferBimodal
from tests.conftest import Made, settled, snapshot
from tests.methods import plain_transformer as plain
from tests.relevance.test_relevance import random


def transformer(*, fused: bool) -> plain.Transformer:
    torch.manual_seed(0)
    return plain.Transformer(fused=fused).double()


def attention_of(seen: list[Tensor], score: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    gradients = torch.autograd.grad(score, seen, materialize_grads=True)
    return [weights[0].detach() for weights in seen], [gradient[0] for gradient in gradients]


NUMBERS = torch.tensor([[1.0], [3.0], [-2.0], [0.5]], dtype=torch.float64)


def weighed(logits: Tensor) -> Tensor:
    """Numbers weighed by probabilities: this softmax and product are no attention."""
    return (logits[:, None].softmax(-1) @ NUMBERS)[:, 0, 0]


FORMULAS = {
    "cheferattribution": plain.cheferattribution,
    "gradeclip": plain.gradeclip,
    "gradeclip(blocks=2)": partial(plain.gradeclip, blocks=2),
    "gradientrollout": plain.gradientrollout,
    "legrad": plain.legrad,
    "legrad(blocks=1)": partial(plain.legrad, blocks=1),
    "rollout": plain.rollout,
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("method", FORMULAS)
def test_a_method_is_its_formula(method: str, fused: bool) -> None:
    model = transformer(fused=fused)
    x = random(0, 2, 3, 6, 6)
    before = snapshot(model)
    for target in (0, 3, weighed) if method == "gradientrollout" else (0, 3):
        values = explain.attribute(model, x, method, target=target).values
        for of_image, image in zip(values, x, strict=True):
            expected = FORMULAS[method](transformer(fused=False), image, target)
            assert_close(of_image.flatten(), expected, rtol=1e-5, atol=1e-9)
    assert snapshot(model) == before


class AttentionByHead(plain.AttentionBlock):
    """The same attention, one head after the other."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, self.qkv(self.one(x)).chunk(3, -1))
        heads = []
        for head in range(self.heads):
            weights = (q[:, head] @ k[:, head].mT * q.shape[-1] ** -0.5).softmax(-1)
            heads.append(weights @ v[:, head])
        middle = x + self.out(torch.cat(heads, -1))
        return middle + self.down(F.gelu(self.up(self.two(middle))))


@pytest.mark.parametrize("method", FORMULAS)
def test_heads_that_are_computed_one_by_one_are_one_attention(method: str) -> None:
    model = transformer(fused=False)
    for block in model.blocks:
        block.__class__ = AttentionByHead
    x = random(0, 2, 3, 6, 6)
    values = explain.attribute(model, x, method, target=3).values
    for of_image, image in zip(values, x, strict=True):
        expected = FORMULAS[method](transformer(fused=False), image, 3)
        assert_close(of_image.flatten(), expected, rtol=1e-5, atol=1e-9)


class Layer(plain.AttentionBlock):
    """The same block, under a name that does not tell what it is."""


class Gate(nn.Module):
    """Scales each channel by what all tokens have of it."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * tokens.mean(1, keepdim=True).sigmoid()


class GateAttention(Gate):
    """What some call attention: no token looks at another."""


@pytest.mark.parametrize("method", ["legrad", "vitcx"])
def test_blocks_are_what_computes_an_attention_whatever_it_is_called(method: str) -> None:
    x = random(0, 2, 3, 6, 6)
    values = []
    for block_kind, gate_kind in ((plain.AttentionBlock, Gate), (Layer, GateAttention)):
        model = transformer(fused=True)
        for block in model.blocks:
            block.__class__ = block_kind
        model.blocks = nn.Sequential(gate_kind(), *model.blocks)
        values.append(explain.attribute(model, x, method, target=3).values)
    assert_close(values[0], values[1], rtol=0, atol=0)
    assert values[0].any()


class Added(nn.Module):
    """What an attention, or two linear layers, of a block add to its tokens."""

    def __init__(self, block: plain.AttentionBlock, added: str) -> None:
        super().__init__()
        self.added = added
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        step = self.block.walk(x)
        if self.added == "attention":
            return step["added"]
        return self.block.down(F.gelu(self.block.up(self.block.two(x))))


class AttentionOf(Added):
    """The attention of a block, without its shortcut."""


class InOneLoop(nn.Module):
    """The same blocks as pairs of modules in a list, whose shortcuts are written in the loop."""

    def __init__(self, blocks: nn.Sequential, *more: nn.Module) -> None:
        super().__init__()
        pairs = ([AttentionOf(block, "attention"), Added(block, "more")] for block in blocks)
        self.layers = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)
        self.more = nn.ModuleList(more)

    def forward(self, x: Tensor) -> Tensor:
        for attention, linear in self.layers:
            x = attention(x) + x
            x = linear(x) + x
        for module in self.more:
            x = module(x)
        return x


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_block_may_be_a_list_of_modules(frozen: bool, fused: bool, normalises: bool) -> None:
    model = transformer(fused=fused).requires_grad_(not frozen)
    model.blocks = InOneLoop(model.blocks, *([model.norm] if normalises else []))
    if normalises:
        model.norm = nn.Identity()
    x = random(0, 2, 3, 6, 6)
    values = explain.attribute(model, x, "legrad", target=3).values
    for of_image, image in zip(values, x, strict=True):
        expected = plain.legrad(transformer(fused=False), image, 3)
        assert_close(of_image.flatten(), expected, rtol=1e-5, atol=1e-9)


class TokensFirst(nn.Module):
    """A block for tokens ``(L, N, D)``."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("count", [2, 3])
def test_blocks_may_have_their_tokens_before_the_images(count: int) -> None:
    model = transformer(fused=True)
    turned = Made(lambda net, x: x.transpose(0, 1))
    model.blocks = nn.Sequential(turned, *map(TokensFirst, model.blocks), turned)
    x = random(0, count, 3, 6, 6)
    values = explain.attribute(model, x, "legrad", target=3).values
    for of_image, image in zip(values, x, strict=True):
        expected = plain.legrad(transformer(fused=False), image, 3)
        assert_close(of_image.flatten(), expected, rtol=1e-5, atol=1e-9)


class SideBySide(nn.Module):
    """Blocks of which none sees what another gives."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


def test_blocks_beside_each_other_are_refused() -> None:
    model = transformer(fused=True)
    model.blocks = SideBySide(model.blocks)
    with pytest.raises(MethodError, match="legrad must"):
        explain.attribute(model, random(0, 1, 3, 6, 6), "legrad", target=3)


class OfOneBatch(nn.Module):
    """A layer that takes as many images as the network."""

    def __init__(self, images: int, error: type[Exception] | None) -> None:
        super().__init__()
        self.images = images
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None and len(x) != self.images:
            raise self.error("another number of images")
        return x[: self.images]


@pytest.mark.parametrize("error", [ValueError, None])
def test_layers_behind_the_blocks_take_a_batch_of_any_size(error: type[Exception] | None) -> None:
    model = transformer(fused=True)
    model.head = nn.Sequential(OfOneBatch(1, error), model.head)
    with pytest.raises(MethodError, match="a batch of any size"):
        explain.attribute(model, random(0, 1, 3, 6, 6), "legrad", target=3)


class WithFeatures(plain.Transformer):
    """A head that adds to the class token what a convolution sees of the photo."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.patches(x).mean((2, 3))
        return self.head(self.norm(self.blocks(self.tokens(x)))[:, 0] + features)


def test_a_head_that_adds_features_of_each_photo_is_refused() -> None:
    model = WithFeatures(fused=True).double()
    with pytest.raises(MethodError, match="legrad must"):
        explain.attribute(model, random(0, 3, 3, 6, 6), "legrad", target=3)


class AttentionWithHeadsFirst(plain.AttentionBlock):
    """The same attention, whose products have all photos of the first head first."""

    def forward(self, x: Tensor) -> Tensor:
        parts = map(self.split, self.qkv(self.one(x)).chunk(3, -1))
        q, k, v = (part.transpose(0, 1).flatten(0, 1) for part in parts)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        mixed = (weights @ v).unflatten(0, (self.heads, -1)).transpose(0, 1)
        middle = x + self.out(plain.joined(mixed))
        return middle + self.down(F.gelu(self.up(self.two(middle))))


def heads_before_photos() -> plain.Transformer:
    model = transformer(fused=False)
    for block in model.blocks:
        block.__class__ = AttentionWithHeadsFirst
    return model


@pytest.mark.parametrize("photos", [1, 2, 3])  # 2 is the number of heads
@pytest.mark.parametrize("method", FORMULAS)
def test_heads_may_come_before_the_photos(method: str, photos: int) -> None:
    x = random(7, photos, 3, 6, 6)
    values = explain.attribute(heads_before_photos(), x, method, target=3).values
    for of_image, image in zip(values, x, strict=True):
        expected = FORMULAS[method](transformer(fused=False), image, 3)
        assert_close(of_image.flatten(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("photos", [1, 2, 3])
def test_a_head_is_ablated_in_each_photo_where_heads_come_first(photos: int) -> None:
    x = random(0, photos, 3, 6, 6)
    ablated = []
    for model in (heads_before_photos(), transformer(fused=False)):
        with torch.no_grad(), intervene(model, Ablate("blocks.0:heads", heads=[1])):
            ablated.append(model(x))
    assert_close(ablated[0], ablated[1])


class ClassAttention(nn.Module):
    """A class token that looks at itself and at all others, as in the last layers of CaiT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        token = self.token.expand(len(tokens), -1, -1)
        all_tokens = torch.cat([token, tokens], 1)
        return token + self.attention(token, all_tokens, all_tokens, need_weights=False)[0]


class ChannelAttention(nn.Module):
    """Attention among channels instead of tokens, as in XCiT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (part.mT[:, None] for part in self.qkv(tokens).chunk(3, -1))
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).softmax(-1)
        return tokens + (weights @ v)[:, 0].mT


def mixed_attention(kind: type[nn.Module], width: int) -> nn.Module:
    """A network of 9 patches, with attention of another kind before a class attention."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        tokens = model.patches(x).flatten(2).mT
        return model.head(model.last(model.first(tokens))[:, 0])

    first = plain.AttentionBlock(width, 1, fused=False) if kind is ClassAttention else kind(width)
    parts = {
        "patches": nn.Conv2d(3, width, 2, 2),
        "first": first,
        "last": ClassAttention(width),
        "head": nn.Linear(width, 5),
    }
    return settled(Made(forward, **parts)).double().eval()


AMONG_TOKENS = ["rollout", "gradientrollout", "cheferattribution", "gradeclip"]


@pytest.mark.parametrize("method", AMONG_TOKENS)
@pytest.mark.parametrize(
    ("kind", "width"),
    [
        (ClassAttention, 6),
        (ChannelAttention, 6),
        (ChannelAttention, 9),  # as many channels as patches
        (ChannelAttention, 10),  # as many channels as tokens
    ],
)
def test_attention_that_is_not_among_the_same_tokens_is_refused(
    method: str, kind: type[nn.Module], width: int
) -> None:
    with pytest.raises(MethodError, match="among all tokens"):
        explain.attribute(mixed_attention(kind, width), random(0, 2, 3, 6, 6), method, target=3)


class AttentionInOneProduct(plain.AttentionBlock):
    """The same attention, whose scores come from an operation that no rule of relevance covers."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part).flatten(0, 1) for part in self.qkv(self.one(x)).chunk(3, -1))
        zeros = x.new_zeros(len(q), q.shape[1], k.shape[1])
        scores = torch.baddbmm(zeros, q, k.mT, beta=0, alpha=q.shape[-1] ** -0.5)
        mixed = (scores.softmax(-1) @ v).unflatten(0, (len(x), -1))
        middle = x + self.out(plain.joined(mixed))
        return middle + self.down(F.gelu(self.up(self.two(middle))))


def test_an_operation_without_a_rule_is_named() -> None:
    model = transformer(fused=False)
    for block in model.blocks:
        block.__class__ = AttentionInOneProduct
    with pytest.warns(ExplainWarning, match="2 x baddbmm"):
        explain.attribute(model, random(0, 2, 3, 6, 6), "cheferattribution", target=3)


def test_a_second_derivative_is_taken_through_fused_attention() -> None:
    x = random(0, 2, 3, 6, 6)
    fused, plain_values = (
        explain.attribute(
            transformer(fused=fused), x, "shapleycam", target=3, layer="blocks.0"
        ).values
        for fused in (True, False)
    )
    assert plain_values.any()
    assert_close(fused, plain_values)


@pytest.mark.parametrize("frozen", [False, True])
def test_tokens_that_meet_are_followed_rule_by_rule(frozen: bool) -> None:
    model = settled(plain.Meeting()).double()
    x = random(0, 1, 3, 6, 6)
    words = random(1, 1, 5, 6)
    score = model(x, words)[0, 1]
    expected = plain.cheferbimodal(*attention_of(model.seen, score), photo=9)[0]
    model.requires_grad_(not frozen)
    values = explain.attribute(model, (x, words), "cheferbimodal", target=1).values
    assert_close(values.flatten(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("in_the_model", [False, True])
def test_queries_that_look_at_a_photo_are_followed_rule_by_rule(in_the_model: bool) -> None:
    """The score is a probability of one query, as of a detection."""
    queries = plain.Queries().double()
    model: nn.Module = queries
    if in_the_model:
        model = Made(lambda net, x: net.queries(x)[:, None].softmax(-1), queries=queries)

    def score_of(output: Tensor) -> Tensor:
        return output[:, 0, 1] if in_the_model else output[:, None].softmax(-1)[:, 0, 1]

    x = random(0, 1, 3, 6, 6)
    score = score_of(model(x))[0]
    expected = plain.cheferbimodal(*attention_of(queries.meeting.seen, score), photo=9)[2]
    values = explain.attribute(model, x, CheferBimodal(token=2), target=score_of).values
    assert_close(values.flatten(), expected, rtol=1e-9, atol=1e-12)


def test_networks_without_the_kind_of_attention_are_refused() -> None:
    x = random(0, 1, 3, 6, 6)
    with pytest.raises(MethodError, match="cheferbimodal must"):
        explain.attribute(transformer(fused=True), x, "cheferbimodal", target=0)
    with pytest.raises(MethodError, match="token of cheferbimodal must"):
        explain.attribute(plain.Queries().double(), x, CheferBimodal(9), target=0)
