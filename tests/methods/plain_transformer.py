"""Transformers as plain matrices, and what their attention has of the score: slowly, relevance as
itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import VisionTransformer


class Block(nn.Module):
    """Attention and two linear layers, each behind a normalisation and beside a shortcut."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads = heads
        self.fused = fused
        self.one = nn.LayerNorm(width)
        self.two = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        found = self.attended(self.split(self.q(y)), self.split(self.k(y)), self.split(self.v(y)))
        x = x + self.out(found.transpose(-3, -2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.two(x))))


class Transformer(nn.Module):
    """A vision transformer on patches of 2 x 2 pixels, with a class token."""

    def __init__(self, *, fused: bool, width: int = 6, depth: int = 2, places: int = 9) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, 2)
        self.head = nn.Linear(width, 4)
        self.norm = nn.LayerNorm(width)
        self.start = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, places + 1, width))
        self.blocks = nn.Sequential(*(Block(width, 2, fused=fused) for _ in range(depth)))

    def tokens(self, x: Tensor) -> Tensor:
        found = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat([self.start.expand(len(x), -1, -1), found], 1) + self.places

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x)))[:, 0])


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, 0, a / torch.where(b == 0, 1, b))


def of_linear(layer: nn.Linear, x: Tensor, relevance: Tensor) -> Tensor:
    """By positive contributions, row by row."""
    found = torch.zeros_like(x)
    for i, row in enumerate(x):
        parts = (layer.weight * row).clamp(min=0)  # (out, in)
        found[i] = (parts * _quotient(relevance[i], parts.sum(1))[:, None]).sum(0)
    return found


def of_sum(x: Tensor, y: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """In proportion to what each adds; then scaled so that both keep what came, by the magnitudes
    of their sums."""
    a = x * _quotient(relevance, x + y)
    b = y * _quotient(relevance, x + y)
    sizes = a.sum().abs() + b.sum().abs()
    a_whole, b_whole = (each.sum().abs() / sizes * relevance.sum() for each in (a, b))
    return a * (a_whole / a.sum()), b * (b_whole / b.sum())


def of_product(x: Tensor, y: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """Half to each factor, in proportion to the terms."""
    share = _quotient(relevance, x @ y)
    return x * (share @ y.transpose(-2, -1)) / 2, y * (x.transpose(-2, -1) @ share) / 2


def walked(model: Transformer, x: Tensor) -> list[dict[str, Tensor]]:
    """What each block computes of one photo ``(3, H, W)``; ``end`` is what it hands on."""
    kept: list[dict[str, Tensor]] = []
    now = model.tokens(x[None])[0]
    for block in model.blocks:
        y = block.one(now)
        q, k, v = (block.split(layer(y)) for layer in (block.q, block.k, block.v))
        a = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        mixed = (a @ v).transpose(-3, -2).flatten(-2)
        added = block.out(mixed)
        middle = now + added
        z = block.two(middle)
        up = block.up(z)
        more = block.down(F.gelu(up))
        of_block = {
            "x": now,
            "y": y,
            "q": q,
            "k": k,
            "v": v,
            "a": a,
            "mixed": mixed,
            "added": added,
        }
        of_block |= {"middle": middle, "z": z, "up": up, "more": more, "end": middle + more}
        kept.append(of_block)
        now = middle + more
    return kept


def rollout(model: Transformer, x: Tensor, target: int) -> Tensor:
    """The class token's row of the product of ``0.5 A + 0.5 I``, last block first; rows are divided
    by their sum (Abnar & Zuidema 2020)."""
    kept = walked(model, x)
    same = torch.eye(len(kept[0]["x"]), dtype=x.dtype)
    joint = same
    for each in kept:
        mixed = each["a"].mean(0) + same
        joint = mixed / mixed.sum(-1, keepdim=True) @ joint
    return joint[0, 1:].detach()


def legrad(vit: VisionTransformer, x: Tensor, target: int, blocks: int = 0) -> Tensor:
    """The mean over blocks, heads and queries of ``ReLU(ds/dA)``, where s is the score of that
    block's own tokens, averaged (Bousselham 2024)."""
    tokens = torch.cat([vit.class_token, vit._process_input(x[None])], 1)
    tokens = tokens + vit.encoder.pos_embedding
    rows = []
    for block in vit.encoder.layers:
        attention = block.self_attention
        joined = F.linear(block.ln_1(tokens), attention.in_proj_weight, attention.in_proj_bias)
        heads = joined.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads
        a = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        middle = tokens + attention.out_proj((a @ v).transpose(1, 2).flatten(2))
        tokens = middle + block.mlp(block.ln_2(middle))
        score = vit.heads(vit.encoder.ln(tokens.mean(1)))[0, target]
        (gradient,) = torch.autograd.grad(score, a, retain_graph=True)
        rows.append(gradient[0].clamp(min=0).mean((0, 1)))
    return torch.stack(rows[-blocks:]).mean(0)[1:]


def cheferattribution(model: Transformer, x: Tensor, target: int) -> Tensor:
    """The map ``(h * w)`` of one photo ``(3, H, W)`` (Chefer et al., CVPR 2021)."""
    kept = walked(model, x)
    end = kept[-1]["end"]
    read = model.norm(end)
    logit = model.head(read[0])[target]
    gradients = torch.autograd.grad(logit, [each["a"] for each in kept])
    with torch.no_grad():
        relevance = torch.zeros_like(end)
        start = torch.zeros(1, 4, dtype=x.dtype)
        start[0, target] = 1
        relevance[:1] = of_linear(model.head, read[:1], start)
        same = torch.eye(len(end), dtype=x.dtype)
        joint = same
        found = []
        for block, each in zip(list(model.blocks)[::-1], kept[::-1], strict=True):
            relevance, of_block = _handed_back(block, each, relevance)
            found.append(of_block)
        for a, gradient in zip(found[::-1], gradients, strict=True):
            joint = (same + (a * gradient).clamp(min=0).mean(0)) @ joint
    return joint[0, 1:]


def _handed_back(block: Block, kept: dict[str, Tensor], relevance: Tensor) -> tuple[Tensor, Tensor]:
    """The relevance of what a block was given, and of its attention."""
    shortcut, more = of_sum(kept["middle"], kept["more"], relevance)
    of_up = of_linear(block.down, F.gelu(kept["up"]), more)
    relevance = shortcut + of_linear(block.up, kept["z"], of_up)
    shortcut, added = of_sum(kept["x"], kept["added"], relevance)
    of_mixed = block.split(of_linear(block.out, kept["mixed"], added))
    of_a, of_v = of_product(kept["a"], kept["v"], of_mixed)
    of_q, of_k = of_product(kept["q"], kept["k"].transpose(-2, -1), of_a)
    parts = ((block.q, of_q), (block.k, of_k.transpose(-2, -1)), (block.v, of_v))
    joined = [
        of_linear(layer, kept["y"], part.transpose(-3, -2).flatten(-2)) for layer, part in parts
    ]
    return shortcut + torch.stack(joined).sum(0), of_a


def gradientrollout(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """The map of one photo from attention ``(heads, T, T)`` and its gradients (Gildenblat 2020)."""
    tokens = weights[0].shape[-1]
    joint = torch.eye(tokens, dtype=weights[0].dtype)
    for a, g in zip(weights, gradients, strict=True):
        mean = torch.zeros_like(a[0])
        for head in range(len(a)):
            mean += torch.where(a[head] * g[head] > 0, a[head] * g[head], 0) / len(a)
        mixed = mean + torch.eye(tokens, dtype=a.dtype)
        joint = torch.stack([row / row.sum() for row in mixed]) @ joint
    return joint[0, 1:]


def gradeclip(model: Transformer, x: Tensor, target: int, blocks: int = 1) -> Tensor:
    """The map ``(h * w)`` of one photo ``(3, H, W)``: gradient of what attention gives, times
    values (Zhao 2024)."""
    kept = walked(model, x)
    logit = model.head(model.norm(kept[-1]["end"])[0])[target]
    found = torch.zeros(len(kept[0]["x"]) - 1, dtype=x.dtype)
    for each in kept[-blocks:]:
        q, k, v = (each[name].transpose(-3, -2).flatten(-2) for name in "qkv")
        (gradient,) = torch.autograd.grad(logit, each["mixed"], retain_graph=True)
        cosines = torch.stack([q[0] @ k[i] / (q[0].norm() * k[i].norm()) for i in range(1, len(k))])
        for i, cosine in enumerate(cosines):
            loosened = (cosine - cosines.min()) / (cosines.max() - cosines.min())
            found[i] += (loosened * (gradient[0] * v[i + 1]).sum()).detach()
    return found.clamp(min=0)


class Meeting(nn.Module):
    """A photo's tokens and words: attention within each, then each looks at the other at once,
    twice over."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, 2)
        self.head = nn.Linear(width, 3)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(8))
        self.seen: list[Tensor] = []

    def attend(self, number: int, to: Tensor, of: Tensor) -> Tensor:
        q = self.layers[number](to).chunk(3, -1)[0]
        _, k, v = self.layers[number](of).chunk(3, -1)
        weights = (
            q.unflatten(-1, (2, -1)).transpose(1, 2) @ k.unflatten(-1, (2, -1)).permute(0, 2, 3, 1)
        ).softmax(-1)
        self.seen.append(weights)
        return to + (weights @ v.unflatten(-1, (2, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        self.seen.clear()
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        for i in (0, 4):
            words = self.attend(i, words, words)
            tokens = self.attend(i + 1, tokens, tokens)
            words, tokens = self.attend(i + 2, words, tokens), self.attend(i + 3, tokens, words)
        return self.head(words[:, 0])


class Queries(nn.Module):
    """Learned queries that look at a photo's tokens, and at each other, as detectors have them."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.meeting = Meeting(width)
        self.queries = nn.Parameter(torch.randn(1, 4, width))

    def forward(self, x: Tensor) -> Tensor:
        attend = self.meeting.attend
        self.meeting.seen.clear()
        tokens = self.meeting.patches(x).flatten(2).transpose(1, 2)
        tokens = attend(0, tokens, tokens)
        queries = attend(1, self.queries.expand(len(x), -1, -1), tokens)
        queries = attend(2, attend(3, queries, queries), tokens)
        return self.meeting.head(queries[:, 2])


def cheferbimodal(weights: Sequence[Tensor], gradients: Sequence[Tensor], photo: int) -> Tensor:
    """What the others' tokens have of the photo's, ``(others, photo)``: rule by rule (Chefer et
    al., ICCV 2021).

    Attentions are of one photo, ``(heads, queries, keys)``; two that look at each other come one
    behind the other.
    """
    other = next(size for each in weights for size in each.shape[1:] if size != photo)
    kind = {"s": other, "q": photo}
    r = {a + b: torch.zeros(kind[a], kind[b], dtype=weights[0].dtype) for a in "sq" for b in "sq"}
    for name in ("ss", "qq"):
        r[name] += torch.eye(len(r[name]), dtype=weights[0].dtype)
    old = r
    last = ""
    for a, g in zip(weights, gradients, strict=True):
        bar = sum((a[h] * g[h]).clamp(min=0) for h in range(len(a))) / len(a)
        rows, columns = ("q" if size == photo else "s" for size in bar.shape)
        old = old if rows != columns and last == columns + rows else dict(r)
        if rows == columns:
            other_kind = "q" if rows == "s" else "s"
            r[rows * 2] = r[rows * 2] + bar @ old[rows * 2]
            r[rows + other_kind] = r[rows + other_kind] + bar @ old[rows + other_kind]
            last = ""
            continue
        r[rows + columns] = r[rows + columns] + _alike(old[rows * 2]).T @ bar @ _alike(
            old[columns * 2]
        )
        r[rows * 2] = r[rows * 2] + bar @ old[columns + rows]
        last = "" if last else rows + columns
    return r["sq"]


def _alike(relevance: Tensor) -> Tensor:
    rest = relevance - torch.eye(len(relevance), dtype=relevance.dtype)
    rows = [row / row.sum() if row.sum() else row for row in rest]
    return torch.stack(rows) + torch.eye(len(relevance), dtype=relevance.dtype)
