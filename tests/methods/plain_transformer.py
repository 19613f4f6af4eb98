"""Transformers as plain matrices, and what their attention has of the score: slowly, relevance as
itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = dict[str, Tensor]
Target = int | Callable[[Tensor], Tensor]


def joined(heads: Tensor) -> Tensor:
    return heads.transpose(-3, -2).flatten(-2)


class AttentionBlock(nn.Module):
    """Attention and two linear layers, each behind a normalisation and beside a shortcut."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads = heads
        self.fused = fused
        self.one = nn.LayerNorm(width)
        self.two = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def walk(self, x: Tensor) -> Step:
        """All that is computed; the attention ``a`` is not there if it is fused."""
        step = {"x": x, "y": self.one(x)}
        q, k, v = map(self.split, self.qkv(step["y"]).chunk(3, -1))
        step |= {"q": q, "k": k, "v": v}
        if self.fused:
            step["mixed"] = joined(F.scaled_dot_product_attention(q, k, v))
        else:
            step["a"] = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
            step["mixed"] = joined(step["a"] @ v)
        step["added"] = self.out(step["mixed"])
        step["middle"] = x + step["added"]
        step["z"] = self.two(step["middle"])
        step["active"] = F.gelu(self.up(step["z"]))
        step["more"] = self.down(step["active"])
        step["end"] = step["middle"] + step["more"]
        return step

    def forward(self, x: Tensor) -> Tensor:
        return self.walk(x)["end"]


class Transformer(nn.Module):
    """A vision transformer on patches of 2 x 2 pixels, with a class token."""

    def __init__(self, *, fused: bool, width: int = 6, places: int = 9) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, 2)
        self.head = nn.Linear(width, 4)
        self.norm = nn.LayerNorm(width)
        self.start = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, places + 1, width))
        self.blocks = nn.Sequential(
            AttentionBlock(width, 2, fused=fused), AttentionBlock(width, 2, fused=fused)
        )

    def tokens(self, x: Tensor) -> Tensor:
        of_photo = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat([self.start.expand(len(x), -1, -1), of_photo], 1) + self.places

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x)))[:, 0])


def walked(model: Transformer, x: Tensor) -> list[Step]:
    """What each block computes of one photo ``(3, H, W)``."""
    steps: list[Step] = []
    now = model.tokens(x[None])[0]
    for block in model.blocks:
        steps.append(block.walk(now))
        now = steps[-1]["end"]
    return steps


def gradients_of(model: Transformer, steps: list[Step], target: Target, name: str) -> list[Tensor]:
    """The gradients of the score in what each block computes under a name."""
    logits = model.head(model.norm(steps[-1]["end"])[:1])
    score = target(logits)[0] if callable(target) else logits[0, target]
    return list(torch.autograd.grad(score, [step[name] for step in steps], retain_graph=True))


def rolled(attentions: Sequence[Tensor]) -> Tensor:
    """The class token's row of the product of ``A + I``, last block first; rows are divided by
    their sum."""
    joint = same = torch.eye(len(attentions[0]), dtype=attentions[0].dtype)
    for a in attentions:
        joint = (a + same) / (a + same).sum(-1, keepdim=True) @ joint
    return joint[0, 1:].detach()


def rollout(model: Transformer, x: Tensor, target: Target) -> Tensor:
    """Abnar & Zuidema 2020."""
    return rolled([step["a"].mean(0) for step in walked(model, x)])


def gradientrollout(model: Transformer, x: Tensor, target: Target) -> Tensor:
    """Gildenblat 2020."""
    steps = walked(model, x)
    pairs = zip(steps, gradients_of(model, steps, target, "a"), strict=True)
    return rolled([(step["a"] * gradient).clamp(min=0).mean(0) for step, gradient in pairs])


def legrad(model: Transformer, x: Tensor, target: int, blocks: int = 0) -> Tensor:
    """The mean over blocks, heads and queries of ``ReLU(ds/dA)``, where s is the score of that
    block's own tokens, averaged (Bousselham 2024)."""
    rows = []
    for step in walked(model, x):
        score = model.head(model.norm(step["end"].mean(0)))[target]
        (gradient,) = torch.autograd.grad(score, step["a"], retain_graph=True)
        rows.append(gradient.clamp(min=0).mean((0, 1)))
    return torch.stack(rows[-blocks:]).mean(0)[1:]


def gradeclip(model: Transformer, x: Tensor, target: int, blocks: int = 1) -> Tensor:
    """Gradient of what attention gives, times values (Zhao 2024)."""
    steps = walked(model, x)
    gradients = gradients_of(model, steps, target, "mixed")
    total = torch.zeros(len(steps[0]["x"]) - 1, dtype=x.dtype)
    for step, gradient in zip(steps[-blocks:], gradients[-blocks:], strict=True):
        q, k, v = (joined(step[name]) for name in "qkv")
        cosines = F.cosine_similarity(q[:1], k[1:])
        loosened = (cosines - cosines.min()) / (cosines.max() - cosines.min())
        total += loosened * (v[1:] @ gradient[0])
    return total.clamp(min=0).detach()


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, 0, a / torch.where(b == 0, 1, b))


def of_linear(layer: nn.Linear, x: Tensor, relevance: Tensor) -> Tensor:
    """By positive contributions."""
    parts = (layer.weight * x[:, None]).clamp(min=0)  # (tokens, out, in)
    return (parts * _quotient(relevance, parts.sum(2))[..., None]).sum(1)


def of_sum(x: Tensor, y: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """In proportion to what each adds; then scaled so that both keep what came, by the magnitudes
    of their sums."""
    a = x * _quotient(relevance, x + y)
    b = y * _quotient(relevance, x + y)
    whole = relevance.sum() / (a.sum().abs() + b.sum().abs())
    return a * whole * a.sum().sign(), b * whole * b.sum().sign()


def of_product(x: Tensor, y: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """Half to each factor, in proportion to the terms."""
    share = _quotient(relevance, x @ y)
    return x * (share @ y.mT) / 2, y * (x.mT @ share) / 2


def cheferattribution(model: Transformer, x: Tensor, target: int) -> Tensor:
    """The map ``(h * w)`` of one photo ``(3, H, W)`` (Chefer et al., CVPR 2021)."""
    steps = walked(model, x)
    gradients = gradients_of(model, steps, target, "a")
    end = steps[-1]["end"]
    start = torch.eye(4, dtype=x.dtype)[target, None]
    relevance = torch.zeros_like(end)
    relevance[:1] = of_linear(model.head, model.norm(end)[:1], start)
    matrices = []
    for block, step, gradient in zip(model.blocks[::-1], steps[::-1], gradients[::-1], strict=True):
        relevance, of_a = _handed_back(block, step, relevance)
        matrices.insert(0, (of_a * gradient).clamp(min=0).mean(0))
    joint = same = torch.eye(len(end), dtype=x.dtype)
    for matrix in matrices:
        joint = (same + matrix) @ joint
    return joint[0, 1:].detach()


def _handed_back(block: AttentionBlock, step: Step, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """The relevance of what a block was given, and of its attention."""
    shortcut, more = of_sum(step["middle"], step["more"], relevance)
    of_active = of_linear(block.down, step["active"], more)
    relevance = shortcut + of_linear(block.up, step["z"], of_active)
    shortcut, added = of_sum(step["x"], step["added"], relevance)
    of_mixed = block.split(of_linear(block.out, step["mixed"], added))
    of_a, of_v = of_product(step["a"], step["v"], of_mixed)
    of_q, of_k = of_product(step["q"], step["k"].mT, of_a)
    of_qkv = torch.cat([joined(part) for part in (of_q, of_k.mT, of_v)], -1)
    return shortcut + of_linear(block.qkv, step["y"], of_qkv), of_a


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
        q = self.layers[number](to).chunk(3, -1)[0].unflatten(-1, (2, -1)).transpose(1, 2)
        kv = self.layers[number](of).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        self.seen.append((q @ kv[1].mT).softmax(-1))
        return to + joined(self.seen[-1] @ kv[2])

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
    others = next(size for each in weights for size in each.shape[1:] if size != photo)
    sizes = (others, photo)
    r = {(a, b): torch.zeros(a, b, dtype=weights[0].dtype) for a in sizes for b in sizes}
    for size in sizes:
        r[size, size] += torch.eye(size)
    old = r
    last: tuple[int, ...] = ()
    for a, g in zip(weights, gradients, strict=True):
        bar = (a * g).clamp(min=0).mean(0)
        rows, columns = bar.shape
        if last != (columns, rows):
            old = dict(r)
        if rows == columns:
            for size in sizes:
                r[rows, size] = r[rows, size] + bar @ old[rows, size]
            last = ()
            continue
        of_both = _alike(old[rows, rows]).T @ bar @ _alike(old[columns, columns])
        r[rows, columns] = r[rows, columns] + of_both
        r[rows, rows] = r[rows, rows] + bar @ old[columns, rows]
        last = () if last else (rows, columns)
    return r[others, photo]


def _alike(relevance: Tensor) -> Tensor:
    same = torch.eye(len(relevance), dtype=relevance.dtype)
    rest = relevance - same
    return _quotient(rest, rest.sum(1, keepdim=True)) + same
