"""Attention weighted by gradients or relevance, against plain matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import MethodError
from explain.methods import CheferBimodal, LeGrad
from tests.conftest import Made, settled, snapshot
from tests.methods import plain_transformer as plain
from tests.relevance.test_relevance import random


def transformer(*, fused: bool) -> plain.Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return plain.Transformer(fused=fused).double().eval()


def attention_of(model: nn.Module, seen: list[Tensor], score: Tensor) -> tuple[list[Tensor], ...]:
    gradients = torch.autograd.grad(score, seen, allow_unused=True)
    pairs = zip(seen, gradients, strict=True)
    both = [
        (each[0].detach(), torch.zeros_like(each[0]) if g is None else g[0]) for each, g in pairs
    ]
    return [each for each, _ in both], [g for _, g in both]


FORMULAS = {
    "cheferattribution": plain.cheferattribution,
    "gradeclip": plain.gradeclip,
    "gradeclip(blocks=2)": partial(plain.gradeclip, blocks=2),
    "rollout": plain.rollout,
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("method", FORMULAS)
def test_a_method_is_its_formula(method: str, fused: bool) -> None:
    model = transformer(fused=fused)
    x = random(0, 2, 3, 6, 6)
    before = snapshot(model)
    for target in (0, 3):
        found = explain.attribute(model, x, method, target=target)
        for i in range(2):
            expected = FORMULAS[method](model, x[i], target)
            assert_close(found.values[i].flatten(), expected, rtol=1e-5, atol=1e-9)
    assert snapshot(model) == before


@pytest.mark.parametrize("blocks", [None, 1])
def test_legrad_is_its_formula(blocks: int | None) -> None:
    torch.manual_seed(0)
    vit = torchvision.models.VisionTransformer(12, 4, 2, 2, 8, 12, num_classes=5).double().eval()
    settled(vit)
    x = random(1, 2, 3, 12, 12)
    values = explain.attribute(vit, x, LeGrad(blocks=blocks), target=2).values
    for image, of_image in zip(x, values, strict=True):
        expected = plain.legrad(vit, image, 2, blocks or 0)
        assert_close(of_image.flatten(), expected, rtol=1e-8, atol=1e-12)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "logit": lambda logits: logits[:, 2],
    "probability": lambda logits: logits[:, None].softmax(-1)[:, 0, 2],
    "probabilities that weigh numbers": lambda logits: (
        logits[:, None].softmax(-1).bmm(NUMBERS)[:, 0, 0]
    ),
}
NUMBERS = torch.tensor([[[1.0], [3.0], [-2.0], [0.5]]], dtype=torch.float64)


@pytest.mark.parametrize("score_of", SCORES.values(), ids=SCORES.keys())
def test_gradient_rollout_is_its_formula(score_of: Callable[[Tensor], Tensor]) -> None:
    """A softmax over classes, which a target may take, is no attention."""
    model = transformer(fused=False)
    x = random(0, 1, 3, 6, 6)
    kept: list[Tensor] = []
    attended = plain.Block.attended

    def watched(block: plain.Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append((q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1))
        return kept[-1] @ v

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain.Block, "attended", watched)
        score = score_of(model(x))[0]
    assert plain.Block.attended is attended
    expected = plain.gradientrollout(*attention_of(model, kept, score))
    found = explain.attribute(model, x, "gradientrollout", target=score_of).values
    assert_close(found.flatten(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
def test_tokens_that_meet_are_followed_rule_by_rule(frozen: bool) -> None:
    model = settled(plain.Meeting()).double()
    x = random(0, 1, 3, 6, 6)
    words = random(1, 1, 5, 6)
    score = model(x, words)[0, 1]
    expected = plain.cheferbimodal(*attention_of(model, model.seen, score), photo=9)[0]
    model.requires_grad_(not frozen)
    values = explain.attribute(model, (x, words), "cheferbimodal", target=1).values
    assert_close(values.flatten(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("in_the_model", [False, True])
def test_queries_that_look_at_a_photo_are_followed_rule_by_rule(in_the_model: bool) -> None:
    """The score is a probability of one query, as of a detection."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        queries = plain.Queries().double().eval()
    model: nn.Module = queries
    if in_the_model:
        model = Made(lambda net, x: net.queries(x)[:, None].softmax(-1), queries=queries)

    def score_of(output: Tensor) -> Tensor:
        return output[:, 0, 1] if in_the_model else output[:, None].softmax(-1)[:, 0, 1]

    x = random(0, 1, 3, 6, 6)
    score = score_of(model(x))[0]
    expected = plain.cheferbimodal(*attention_of(model, queries.meeting.seen, score), photo=9)[2]
    values = explain.attribute(model, x, CheferBimodal(token=2), target=score_of).values
    assert_close(values.flatten(), expected, rtol=1e-9, atol=1e-12)


def test_networks_without_the_kind_of_attention_are_refused() -> None:
    x = random(0, 1, 3, 12, 12)
    vit = torchvision.models.VisionTransformer(12, 4, 2, 2, 8, 12, num_classes=5).double()
    with pytest.raises(MethodError, match="cheferbimodal must"):
        explain.attribute(vit, x, "cheferbimodal", target=0)
    with pytest.raises(MethodError, match="token of cheferbimodal must"):
        explain.attribute(
            plain.Queries().double(), random(0, 1, 3, 6, 6), CheferBimodal(9), target=0
        )
