"""Vision transformers slowly and plainly: a forward pass by hand, attention rollout and LeGrad.

`legrad` and `rollout` take attention matrices (or gradients in them), one tensor ``(heads, queries,
keys)`` for every block. `ViT` walks through a torchvision ``VisionTransformer`` by its parameters
alone, so that an attention can be replaced or differentiated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.methods.plain import one_hot


def on_grid(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Leave out the class token and put the others row by row on the grid."""
    return torch.stack([tokens[1 + i] for i in range(grid[0] * grid[1])]).reshape(grid)


def legrad_of_one(gradient: Tensor) -> Tensor:
    """The mean over heads and queries, the class token's too, of ``ReLU(ds/dA)``: one number for
    every key."""
    heads, queries, keys = gradient.shape
    out = torch.zeros(keys, dtype=gradient.dtype)
    for head, query, key in itertools.product(range(heads), range(queries), range(keys)):
        out[key] += max(float(gradient[head, query, key]), 0.0) / (heads * queries)
    return out


def legrad(gradients: Sequence[Tensor], grid: tuple[int, int]) -> Tensor:
    """The mean over blocks of `legrad_of_one`, each of the gradient of that block's own score
    (Bousselham 2024)."""
    return on_grid(sum(legrad_of_one(gradient) for gradient in gradients) / len(gradients), grid)


def rollout(attentions: Sequence[Tensor], grid: tuple[int, int]) -> Tensor:
    """The class token's row of the product over blocks of ``0.5 A + 0.5 I``, last block first
    (Abnar & Zuidema 2020).

    Rows are divided by their sum.
    """
    product = same = torch.eye(attentions[0].shape[-1], dtype=attentions[0].dtype)
    for attention in attentions:
        mixed = (sum(attention) / len(attention) + same) / 2
        product = torch.stack([row / row.sum() for row in mixed]) @ product
    return on_grid(product[0], grid)


class ViT:
    """A torchvision ``VisionTransformer`` by its parameters: ``heads`` attention heads, patches of
    ``patch`` pixels."""

    def __init__(
        self, parameters: dict[str, Tensor], heads: int, patch: int, epsilon: float = 1e-6
    ) -> None:
        self.of = {name: value.detach() for name, value in parameters.items()}
        self.heads = heads
        self.patch = patch
        self.epsilon = epsilon
        self.blocks = len(
            {name.split(".")[2] for name in self.of if name.startswith("encoder.layers.")}
        )

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.of[f"{name}.weight"].T + self.of[f"{name}.bias"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        away = x - x.mean(dim=-1, keepdim=True)
        variance = (away * away).mean(dim=-1, keepdim=True)
        return (
            away / (variance + self.epsilon) ** 0.5 * self.of[f"{name}.weight"]
            + self.of[f"{name}.bias"]
        )

    def embed(self, image: Tensor) -> Tensor:
        """Cut into patches, multiply, put the class token first, add positions: ``(tokens,
        width)``."""
        size = self.patch
        weight = self.of["conv_proj.weight"]
        tokens = [self.of["class_token"][0, 0]]
        for i in range(image.shape[1] // size):
            for j in range(image.shape[2] // size):
                patch = image[:, i * size : (i + 1) * size, j * size : (j + 1) * size]
                tokens.append((weight * patch).sum(dim=(1, 2, 3)) + self.of["conv_proj.bias"])
        return torch.stack(tokens) + self.of["encoder.pos_embedding"][0]

    def attention(self, tokens: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """A block's attention ``(heads, queries, keys)`` and values ``(heads, keys, width /
        heads)``."""
        name = f"encoder.layers.encoder_layer_{block}"
        x = self.norm(tokens, f"{name}.ln_1")
        weight = self.of[f"{name}.self_attention.in_proj_weight"]
        everything = x @ weight.T + self.of[f"{name}.self_attention.in_proj_bias"]
        query, key, value = everything.split(x.shape[1], dim=1)
        width = x.shape[1] // self.heads
        attentions = []
        values = []
        for head in range(self.heads):
            part = slice(head * width, (head + 1) * width)
            powers = (query[:, part] @ key[:, part].T / math.sqrt(width)).exp()
            attentions.append(powers / powers.sum(dim=1, keepdim=True))
            values.append(value[:, part])
        return torch.stack(attentions), torch.stack(values)

    def block(
        self, tokens: Tensor, block: int, attention: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The tokens after a block and its attention, or what follows from the ``attention``
        given."""
        name = f"encoder.layers.encoder_layer_{block}"
        own, values = self.attention(tokens, block)
        attention = own if attention is None else attention
        mixed = torch.cat([a @ v for a, v in zip(attention, values, strict=True)], dim=1)
        tokens = tokens + self.linear(mixed, f"{name}.self_attention.out_proj")
        hidden = self.linear(self.norm(tokens, f"{name}.ln_2"), f"{name}.mlp.0")
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2  # GELU
        return tokens + self.linear(hidden, f"{name}.mlp.3"), attention

    def logits(self, token: Tensor) -> Tensor:
        """The classifier on the class token, or the mean of all tokens, after the norm."""
        return self.linear(self.norm(token, "encoder.ln"), "heads.head")

    def forward(self, image: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """The tokens before the first and after every block, the attentions, and the logits."""
        tokens = [self.embed(image)]
        attentions = []
        for block in range(self.blocks):
            now, attention = self.block(tokens[-1], block)
            tokens.append(now)
            attentions.append(attention)
        return tokens, attentions, self.logits(tokens[-1][0])

    def attention_gradients(self, image: Tensor, target: int) -> list[Tensor]:
        """LeGrad's: the gradient of each block's own logit, of its tokens' mean, in that block's
        own attention."""
        tokens, attentions, _ = self.forward(image)
        out = []
        for block in range(self.blocks):
            attention = attentions[block].clone().requires_grad_()
            score = self.logits(self.block(tokens[block], block, attention)[0].mean(dim=0))
            out.append(torch.autograd.grad(score, attention, one_hot(target, score.detach()))[0])
        return out
