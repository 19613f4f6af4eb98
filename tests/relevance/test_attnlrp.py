"""AttnLRP on a whole vision transformer: value times gradient of a network that says its rules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import VisionTransformer

import explain
from explain.methods import LRP
from explain.relevance.composites import attn_lrp
from tests.conftest import settled
from tests.relevance.test_relevance import assert_near, half, random


def normalised(norm: nn.LayerNorm, t: Tensor) -> Tensor:
    """The deviation is constant."""
    centred = t - t.mean(-1, keepdim=True)
    deviation = (t.var(-1, correction=0, keepdim=True) + norm.eps).sqrt().detach()
    return norm.weight * centred / deviation + norm.bias


def attended(attention: nn.MultiheadAttention, t: Tensor) -> Tensor:
    """Of the softmax the derivative, and of each product two halves."""
    packed = t @ attention.in_proj_weight.T + attention.in_proj_bias
    size = attention.embed_dim // attention.num_heads
    heads = zip(*(part.split(size, -1) for part in packed.chunk(3, -1)), strict=True)
    mixed = [half((half(q) @ half(k).mT / size**0.5).softmax(-1)) @ half(v) for q, k, v in heads]
    return attention.out_proj(torch.cat(mixed, -1))


def surrogate(model: Any, x: Tensor) -> Tensor:
    """The scores of a network whose gradients are the shares of relevance by the paper."""
    patches = model.conv_proj(x).flatten(2).mT
    token = model.class_token.expand(len(x), -1, -1)
    t = torch.cat([token, patches], 1) + model.encoder.pos_embedding
    for block in model.encoder.layers:
        t = t + attended(block.self_attention, normalised(block.ln_1, t))
        first, _, _, second, _ = block.mlp
        hidden = first(normalised(block.ln_2, t))
        # an activation hands on what arrives
        t = t + second(hidden * (F.gelu(hidden) / hidden).detach())
    return model.heads(normalised(model.encoder.ln, t)[:, 0])


def test_attnlrp_is_its_paper_on_a_vision_transformer() -> None:
    model = VisionTransformer(8, 4, 2, 2, hidden_dim=8, mlp_dim=12, num_classes=3)
    settled(model, 4).double().eval()
    x = random(3, 2, 3, 8, 8)
    a = explain.attribute(model, x, LRP(attn_lrp(epsilon=0)), target=[2, 1])
    stabilised = explain.attribute(model, x, "attnlrp", target=[2, 1])
    x.requires_grad_()
    scores = surrogate(model, x)
    torch.testing.assert_close(scores, model(x))
    (gradient,) = torch.autograd.grad(scores[0, 2] + scores[1, 1], x)
    assert_near(a.values, x.detach() * gradient)
    assert_near(stabilised.values, a.values, 1e-4)
