"""AttnLRP on a whole vision transformer, against the formulas of its paper, one after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import VisionTransformer

import explain
from explain.methods import LRP
from tests.conftest import settled
from tests.relevance.test_relevance import assert_near, random

EPSILON = 1e-6


def linear(
    weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, r: torch.Tensor
) -> torch.Tensor:
    """R_i = sum_j x_i w_ji / (z_j + e sign(z_j)) R_j, where e is epsilon times the mean size of all
    z."""
    z = x @ weight.T + bias
    e = EPSILON * z.abs().mean()
    share = r / torch.where(z >= 0, z + e, z - e)
    return x * torch.stack([(weight * row[:, None]).sum(0) for row in share])


def normalised(norm: nn.LayerNorm, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """The deviation is constant: y_k = sum_i a_ki x_i + b_k, and R_i = sum_k a_ki x_i / y_k R_k."""
    count = x.shape[-1]
    centring = torch.eye(count).double() - 1 / count
    rows = []
    for row, arrived in zip(x, r, strict=True):
        deviation = (row.var(correction=0) + norm.eps).sqrt()
        a = norm.weight[:, None] * centring / deviation
        rows.append(row * (a * (arrived / (a @ row + norm.bias))[:, None]).sum(0))
    return torch.stack(rows)


def attended(attention: nn.MultiheadAttention, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Halves for each factor of the two products, the softmax by R_i = x_i (R_i - s_i sum_j
    R_j)."""
    weight = attention.in_proj_weight
    bias = attention.in_proj_bias
    width = attention.embed_dim
    heads = attention.num_heads
    size = width // heads
    packed = x @ weight.T + bias
    q, k, v = packed.split(width, 1)
    parts = []
    outputs = []
    for h in range(heads):
        a, b, c = (each[:, h * size : (h + 1) * size] for each in (q, k, v))
        scores = a @ b.T / size**0.5
        weights = scores.softmax(1)
        parts.append((a, b, c, scores, weights))
        outputs.append(weights @ c)
    r = linear(attention.out_proj.weight, attention.out_proj.bias, torch.cat(outputs, 1), r)
    of_q = []
    of_k = []
    of_v = []
    for h, (a, b, c, scores, weights) in enumerate(parts):
        share = r[:, h * size : (h + 1) * size] / outputs[h] / 2
        of_v.append(c * (weights.T @ share))
        of_weights = weights * (share @ c.T)
        of_scores = scores * (of_weights - weights * of_weights.sum(1, keepdim=True))
        share = of_scores / scores / 2 / size**0.5
        of_q.append(a * (share @ b))
        of_k.append(b * (share.T @ a))
    return linear(
        weight, bias, x, torch.cat([torch.cat(each, 1) for each in (of_q, of_k, of_v)], 1)
    )


def shared(
    one: torch.Tensor, other: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return one / (one + other) * r, other / (one + other) * r


def relevance(model: VisionTransformer, x: torch.Tensor, target: int) -> torch.Tensor:
    """The relevance of an image ``(C, H, W)``."""
    conv = model.conv_proj
    patch = model.patch_size
    patches = F.unfold(x[None], patch, stride=patch)[0].T
    kernel = conv.weight.flatten(1)
    before = torch.cat([model.class_token[0], patches @ kernel.T + conv.bias])
    t = before + model.encoder.pos_embedding[0]
    kept = []
    for block in model.encoder.layers:
        given = block.ln_1(t)
        middle = (
            block.self_attention(given[None], given[None], given[None], need_weights=False)[0][0]
            + t
        )
        hidden = block.mlp[0](block.ln_2(middle))
        kept.append((block, t, given, middle, hidden))
        t = block.mlp(block.ln_2(middle)) + middle
    last = model.encoder.ln(t)
    head = model.heads[-1]
    scores = last[:1] @ head.weight.T + head.bias
    r = torch.zeros_like(scores)
    r[0, target] = scores[0, target]
    r = torch.cat([linear(head.weight, head.bias, last[:1], r), torch.zeros_like(last[1:])])
    r = normalised(model.encoder.ln, t, r)
    for block, start, given, middle, hidden in reversed(kept):
        first, _, _, second, _ = block.mlp
        r_mlp, r_past = shared(block.mlp(block.ln_2(middle)), middle, r)
        # and the identity through the activation
        r_mlp = linear(second.weight, second.bias, F.gelu(hidden), r_mlp)
        r_mlp = linear(first.weight, first.bias, block.ln_2(middle), r_mlp)
        r = normalised(block.ln_2, middle, r_mlp) + r_past
        r_attended, r_past = shared(middle - start, start, r)
        r = (
            normalised(block.ln_1, start, attended(block.self_attention, given, r_attended))
            + r_past
        )
    r = (before / (before + model.encoder.pos_embedding[0]) * r)[1:]
    found = linear(kernel, conv.bias, patches, r)
    return F.fold(found.T[None], x.shape[1:], patch, stride=patch)[0]


def test_attnlrp_is_its_paper_on_a_vision_transformer() -> None:
    model = VisionTransformer(
        8, 4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=12, num_classes=3
    )
    settled(model, 4).double().eval()
    x = random(3, 2, 3, 8, 8)
    found = explain.attribute(model, x, LRP("AttnLRP"), target=[2, 1])
    with torch.no_grad():
        expected = torch.stack(
            [relevance(model, image, target) for image, target in zip(x, (2, 1), strict=True)]
        )
    assert_near(found.values, expected)
