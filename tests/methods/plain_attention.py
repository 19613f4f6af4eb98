"""Vision transformers slowly and plainly: a forward pass by hand, attention rollout and LeGrad.

`legrad` and `rollout` take attention matrices (or gradients in them), one tensor ``(heads, queries, keys)`` for every
block. `ViT` walks through a torchvision ``VisionTransformer`` by its parameters alone, so that an attention can
be replaced or differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tests.methods.plain import one_hot


def on_grid(tokens: torch.Tensor, grid: tuple[int, int], skip: int) -> torch.Tensor:
    """Leave out the first ``skip`` tokens (class, registers) and put the others row by row on the grid."""
    out = torch.zeros(grid, dtype=tokens.dtype)
    for i in range(grid[0]):
        for j in range(grid[1]):
            out[i, j] = tokens[skip + i * grid[1] + j]
    return out


def legrad_of_one(gradient: torch.Tensor) -> torch.Tensor:
    """The mean over heads and queries, the class token's too, of ``ReLU(ds/dA)``: one number for every key."""
    heads, queries, keys = gradient.shape
    out = torch.zeros(keys, dtype=gradient.dtype)
    for head in range(heads):
        for query in range(queries):
            for key in range(keys):
                out[key] += max(float(gradient[head, query, key]), 0.0) / (heads * queries)
    return out


def legrad(gradients: Sequence[torch.Tensor], grid: tuple[int, int], *, skip: int = 1) -> torch.Tensor:
    """The mean over blocks of `legrad_of_one`, each of the gradient of that block's own score (Bousselham 2024)."""
    return on_grid(sum(legrad_of_one(gradient) for gradient in gradients) / len(gradients), grid, skip)


def rollout(
    attentions: Sequence[torch.Tensor],
    grid: tuple[int, int],
    *,
    skip: int = 1,
    heads: str = "mean",
    residual: float = 0.5,
) -> torch.Tensor:
    """The class token's row of the product over blocks of ``0.5 A + 0.5 I``, last block first (Abnar & Zuidema 2020).

    Rows are divided by their sum. Without tokens to skip: the mean of all rows.
    """
    count = attentions[0].shape[-1]
    product = torch.eye(count, dtype=attentions[0].dtype)
    for attention in attentions:
        joined = {
            "mean": lambda a: sum(a) / len(a),
            "max": lambda a: a.max(dim=0).values,
            "min": lambda a: a.min(dim=0).values,
        }[heads](attention)
        mixed = (1 - residual) * joined + residual * torch.eye(count, dtype=joined.dtype)
        mixed = torch.stack([row / row.sum() for row in mixed])
        product = mixed @ product
    return on_grid(product[0] if skip else product.mean(dim=0), grid, skip)


class ViT:
    """A torchvision ``VisionTransformer`` by its parameters: ``heads`` attention heads, patches of ``patch`` pixels."""

    def __init__(self, parameters: dict[str, torch.Tensor], heads: int, patch: int, epsilon: float = 1e-6) -> None:
        self.of = {name: value.detach() for name, value in parameters.items()}
        self.heads, self.patch, self.epsilon = heads, patch, epsilon
        self.blocks = len({name.split(".")[2] for name in self.of if name.startswith("encoder.layers.")})

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.of[f"{name}.weight"].T + self.of[f"{name}.bias"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        away = x - x.mean(dim=-1, keepdim=True)
        variance = (away * away).mean(dim=-1, keepdim=True)
        return away / (variance + self.epsilon) ** 0.5 * self.of[f"{name}.weight"] + self.of[f"{name}.bias"]

    def embed(self, image: torch.Tensor) -> torch.Tensor:
        """Cut into patches, multiply, put the class token first, add positions: ``(tokens, width)``."""
        size, weight = self.patch, self.of["conv_proj.weight"]
        tokens = [self.of["class_token"][0, 0]]
        for i in range(image.shape[1] // size):
            for j in range(image.shape[2] // size):
                patch = image[:, i * size : (i + 1) * size, j * size : (j + 1) * size]
                tokens.append((weight * patch).sum(dim=(1, 2, 3)) + self.of["conv_proj.bias"])
        return torch.stack(tokens) + self.of["encoder.pos_embedding"][0]

    def attention(self, tokens: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A block's attention ``(heads, queries, keys)`` and values ``(heads, keys, width / heads)``."""
        name = f"encoder.layers.encoder_layer_{block}"
        x = self.norm(tokens, f"{name}.ln_1")
        weight = self.of[f"{name}.self_attention.in_proj_weight"]
        everything = x @ weight.T + self.of[f"{name}.self_attention.in_proj_bias"]
        query, key, value = everything.split(x.shape[1], dim=1)
        width = x.shape[1] // self.heads
        attentions, values = [], []
        for head in range(self.heads):
            part = slice(head * width, (head + 1) * width)
            powers = (query[:, part] @ key[:, part].T / math.sqrt(width)).exp()
            attentions.append(powers / powers.sum(dim=1, keepdim=True))
            values.append(value[:, part])
        return torch.stack(attentions), torch.stack(values)

    def block(
        self, tokens: torch.Tensor, block: int, attention: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens after a block and its attention, or what follows from the ``attention`` given."""
        name = f"encoder.layers.encoder_layer_{block}"
        own, values = self.attention(tokens, block)
        attention = own if attention is None else attention
        mixed = torch.cat([a @ v for a, v in zip(attention, values, strict=True)], dim=1)
        tokens = tokens + self.linear(mixed, f"{name}.self_attention.out_proj")
        hidden = self.linear(self.norm(tokens, f"{name}.ln_2"), f"{name}.mlp.0")
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2  # GELU
        return tokens + self.linear(hidden, f"{name}.mlp.3"), attention

    def logits(self, tokens: torch.Tensor, pool: str = "class") -> torch.Tensor:
        """The classifier on the class token after the norm, or ("mean") on the normed mean of all tokens."""
        token = tokens.mean(dim=0) if pool == "mean" else tokens[0]
        return self.linear(self.norm(token, "encoder.ln"), "heads.head")

    def forward(self, image: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """The tokens before the first and after every block, the attentions, and the logits."""
        tokens, attentions = [self.embed(image)], []
        for block in range(self.blocks):
            now, attention = self.block(tokens[-1], block)
            tokens.append(now)
            attentions.append(attention)
        return tokens, attentions, self.logits(tokens[-1])

    def attention_gradients(
        self, image: torch.Tensor, target: int, *, blocks: Sequence[int] | None = None, pool: str = "mean"
    ) -> list[torch.Tensor]:
        """LeGrad's: the gradient of each block's own logit, of its tokens pooled, in that block's own attention."""
        tokens, attentions, _ = self.forward(image)
        out = []
        for block in range(self.blocks) if blocks is None else blocks:
            attention = attentions[block].clone().requires_grad_()
            score = self.logits(self.block(tokens[block], block, attention)[0], pool)
            out.append(torch.autograd.grad(score, attention, one_hot(target, score.detach()))[0])
        return out

    def last_gradients(self, image: torch.Tensor, target: int) -> list[torch.Tensor]:
        """The gradient of the network's logit in every block's attention, through all the blocks above it."""
        tokens, attentions, _ = self.forward(image)
        out = []
        for start in range(self.blocks):
            attention = attentions[start].clone().requires_grad_()
            now = self.block(tokens[start], start, attention)[0]
            for block in range(start + 1, self.blocks):
                now = self.block(now, block)[0]
            score = self.logits(now)
            out.append(torch.autograd.grad(score, attention, one_hot(target, score.detach()))[0])
        return out
