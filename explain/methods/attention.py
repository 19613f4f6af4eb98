"""Methods for vision transformers: attention, rollout, LeGrad, and attention weighted by gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from explain._utils.errors import MethodError
from explain.engine import Evidence, Need
from explain.engine.needs import Attention, AttentionMap, AttentionRelevance, BlockAttention
from explain.layers.layouts import Grid
from explain.methods.base import ATTENTION, Method, over_all
from explain.methods.bibliography import cited
from explain.methods.registry import register
from explain.relevance.composites import transformer_attribution


@register
@dataclass(frozen=True)
class AttentionRollout(Method):
    r"""Follow attention through all blocks: :math:`\prod_l \bigl(\tfrac12 \bar A_l + \tfrac12 I\bigr)`, heads averaged.

    The map is the row of the class token, or the mean of all rows where there is none. No class is asked for.

    Returns:
        ``(N, h, w)``, one value for each patch: its share in the last class token; they add up to at most one.

    Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020.

    >>> import explain, torch
    >>> from torchvision.models import VisionTransformer
    >>> model = VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=3)
    >>> explain.attribute(model, torch.rand(1, 3, 16, 16), AttentionRollout()).values.shape
    torch.Size([1, 4, 4])
    """

    name = "rollout"
    about = "attention combined over all blocks"
    source = cited("abnar2020rollout")
    family = ATTENTION
    only_for = "vision transformers"
    needs = frozenset({Attention()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        maps = evidence[Attention()]
        grid = token_grid(self.name, [each.weights for each in maps], evidence)
        joint = torch.eye(maps[0].weights.shape[-1]).to(maps[0].weights)
        for each in maps:
            mixed = 0.5 * each.weights.mean(1) + 0.5 * torch.eye(joint.shape[-1]).to(joint)
            joint = mixed / mixed.sum(-1, keepdim=True) @ joint
        read = joint[:, 0] if grid.skip else joint.mean(1)
        return read[:, grid.skip :].reshape(-1, *grid.size)


@register
@dataclass(frozen=True)
class LeGrad(Method):
    r"""Sum over blocks how the score read off each block depends on its attention.

    For block l, the mean of its output tokens goes through the network's last normalisation and head; of the gradient
    of that score in the attention, the positive part is averaged over heads and queries. The class token's column is
    left out, and the blocks are averaged.

    Args:
        blocks: how many of the last blocks take part; None for all, as published.

    Returns:
        ``(N, h, w)``, one value for each patch, never negative.

    Bousselham et al., "LeGrad: An Explainability Method for Vision Transformers via Feature Formation Sensitivity",
    ICCV 2025 (arXiv:2404.03214).

    >>> import explain, torch
    >>> from torchvision.models import VisionTransformer
    >>> model = VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=3)
    >>> torch.nn.init.normal_(model.heads.head.weight)[0, 0].isfinite()
    tensor(True)
    >>> explain.attribute(model, torch.rand(1, 3, 16, 16), LeGrad(), target=1).values.shape
    torch.Size([1, 4, 4])
    """

    blocks: int | None = None

    name = "legrad"
    about = "sensitivity of the score to the attention of every block"
    source = cited("bousselham2025legrad")
    family = ATTENTION
    minimums: ClassVar[Mapping[str, float]] = {"blocks": 1}
    only_for = "vision transformers"
    needs = frozenset({BlockAttention()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        gradients = evidence[BlockAttention()]
        grid = token_grid(self.name, gradients, evidence)
        used = gradients if self.blocks is None else gradients[-self.blocks :]
        of_keys = torch.stack([gradient.clamp(min=0).mean((1, 2)) for gradient in used]).mean(0)
        return of_keys[:, grid.skip :].reshape(-1, *grid.size)


def token_grid(method: str, maps: list[torch.Tensor], evidence: Evidence) -> Grid:
    """The grid of tokens that all attention is about.

    Raises:
        MethodError: the model has no attention, or only within windows.
    """
    shapes = {tuple(each.shape[-2:]) for each in maps}
    tokens = next(iter(shapes), (0, 0))
    grid = evidence.grids.grid((len(evidence.inputs), tokens[1], 1)) if tokens[1] else None
    if len(shapes) != 1 or tokens[0] != tokens[1] or grid is None or any(len(m) != len(evidence.inputs) for m in maps):
        found = "none" if not shapes else "of shapes " + ", ".join(str(shape) for shape in sorted(shapes)[:4])
        raise MethodError(
            f"{method} must have attention among all tokens of the photo in every block, got {found}; use it for "
            "vision transformers (ViT, DeiT), and gradcam or layercam otherwise"
        )
    return grid


_GRADIENTS = Attention(gradients=True)
_EVERYWHERE = Attention(gradients=True, beside=True)


def weighted(weights: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """The mean over heads of what is positive of attention times gradient: ``(N, queries, keys)``."""
    if gradient is None:
        return torch.zeros_like(weights).mean(1)
    return (weights * gradient).clamp(min=0).mean(1)


def _read(method: str, joint: torch.Tensor, evidence: Evidence) -> torch.Tensor:
    """The map in the row of the class token, or in the mean of all rows where there is none."""
    grid = token_grid(method, [joint[:, None]], evidence)
    row = joint[:, 0] if grid.skip else joint.mean(1)
    return row[:, grid.skip :].reshape(-1, *grid.size)


@register
@dataclass(frozen=True)
class GradientRollout(Method):
    r"""Follow attention through all blocks, weighted by how the score depends on it.

    :math:`\prod_l \bigl(\tfrac12 E_h (\nabla A_l \odot A_l)^+ + \tfrac12 I\bigr)` with rows that add up to one: rollout
    in which heads and places count as far as more attention there would raise the score, so that it knows of classes.

    Returns:
        ``(N, h, w)``, one value for each patch, never negative.

    Gildenblat, "Exploring Explainability for Vision Transformers", 2020.

    >>> import explain
    >>> from torchvision.models import VisionTransformer
    >>> model = VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=3)
    >>> torch.nn.init.normal_(model.heads.head.weight)[0, 0].isfinite()
    tensor(True)
    >>> explain.attribute(model, torch.rand(1, 3, 16, 16), GradientRollout(), target=1).values.shape
    torch.Size([1, 4, 4])
    """

    name = "gradientrollout"
    about = "attention combined over all blocks, weighted by its gradient"
    source = cited("gildenblat2020explainability")
    family = ATTENTION
    only_for = "vision transformers"
    needs = frozenset({_GRADIENTS})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        maps = evidence[_GRADIENTS]
        token_grid(self.name, [each.weights for each in maps], evidence)
        joint = eye = torch.eye(maps[0].weights.shape[-1]).to(maps[0].weights).expand(len(evidence.inputs), -1, -1)
        for each in maps:
            mixed = (weighted(each.weights, each.gradient) + eye) / 2
            joint = mixed / mixed.sum(-1, keepdim=True) @ joint
        return _read(self.name, joint, evidence)


@register
@dataclass(frozen=True)
class CheferAttribution(Method):
    r"""Follow what attention has of the score through all blocks: relevance times gradient.

    :math:`\prod_l \bigl(I + E_h (\nabla A_l \odot R_l)^+\bigr)`, where :math:`\nabla A_l` is the gradient of the score
    in the attention of block l, and :math:`R_l` the attention's relevance. Relevance starts with 1 at the score. Linear
    maps share it out by positive contributions; activations, normalisations and softmaxes pass it on; the factors of a
    product get half each; and where a shortcut is added, both signals keep it by the magnitudes of their sums.

    Returns:
        ``(N, h, w)``, one value for each patch, never negative.

    Chefer, Gur and Wolf, "Transformer Interpretability Beyond Attention Visualization", CVPR 2021.

    >>> import explain
    >>> from torchvision.models import VisionTransformer
    >>> model = VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=3)
    >>> torch.nn.init.normal_(model.heads.head.weight)[0, 0].isfinite()
    tensor(True)
    >>> explain.attribute(model, torch.rand(1, 3, 16, 16), CheferAttribution(), target=1).values.shape
    torch.Size([1, 4, 4])
    """

    name = "cheferattribution"
    about = "relevance times gradient of attention, combined over all blocks"
    source = cited("chefer2021transformer")
    family = ATTENTION
    only_for = "vision transformers"

    @property
    def _relevance(self) -> AttentionRelevance:
        return AttentionRelevance(transformer_attribution())

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({_GRADIENTS, self._relevance})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        maps, relevance = evidence[_GRADIENTS], evidence[self._relevance]
        token_grid(self.name, [each.weights for each in maps], evidence)
        joint = eye = torch.eye(maps[0].weights.shape[-1]).to(maps[0].weights).expand(len(evidence.inputs), -1, -1)
        score = torch.where(evidence.score == 0, 1, evidence.score)
        for plain, changed in zip(maps, relevance, strict=True):
            if changed.gradient is not None:
                of_one = changed.weights * changed.gradient / over_all(score, changed.weights)
                joint = (eye + weighted(of_one, plain.gradient)) @ joint
        return _read(self.name, joint, evidence)


@register
@dataclass(frozen=True)
class CheferBimodal(Method):
    r"""Follow attention between a photo and something else (words, queries): what of the photo a token looked at.

    With :math:`\bar A = E_h (\nabla A \odot A)^+`, attention within s changes :math:`R^{ss}` and :math:`R^{sq}` by
    :math:`\bar A R`; attention from s to q changes :math:`R^{sq}` by
    :math:`(\bar R^{ss})^\top \bar A \bar R^{qq}` and :math:`R^{ss}` by :math:`\bar A R^{qs}`, where :math:`\bar R` is
    I plus the rest with rows that add up to one. Two attentions in a row that look at each other change at once. The
    photo's tokens are known by their number; they must be as many as a grid has places, and others not as many.

    Args:
        token: which of the others' tokens the score belongs to: that of the class, or the query of a detected box.

    Returns:
        ``(N, h, w)``, one value for each patch.

    Chefer, Gur and Wolf, "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder
    Transformers", ICCV 2021.

    >>> import explain
    >>> from torch import nn
    >>> class Queries(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.patches, self.queries = nn.Conv2d(3, 4, 4, 4), nn.Parameter(torch.randn(1, 3, 4))
    ...         self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 5)
    ...     def forward(self, x):
    ...         tokens = self.patches(x).flatten(2).transpose(1, 2)
    ...         found, _ = self.attention(self.queries.expand(len(x), -1, -1), tokens, tokens)
    ...         return self.head(found[:, 1])
    >>> explain.attribute(Queries(), torch.rand(1, 3, 16, 16), CheferBimodal(token=1), target=3).values.shape
    torch.Size([1, 4, 4])
    """

    token: int = 0

    name = "cheferbimodal"
    about = "attention between a photo and other tokens, weighted by its gradient"
    source = cited("chefer2021generic")
    family = ATTENTION
    minimums: ClassVar[Mapping[str, float]] = {"token": 0}
    only_for = "transformers with attention between a photo and other tokens"
    needs = frozenset({_EVERYWHERE})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        maps = evidence[_EVERYWHERE]
        photo, other = self._sizes(maps, evidence)
        if self.token >= other:
            raise MethodError(
                f"token of {self.name} must be one of the {other} tokens beside the photo's, got {self.token}; count "
                "from 0"
            )
        row = _followed(maps, photo, other)[other, photo][:, self.token]
        grid = evidence.grids.grid((len(evidence.inputs), photo, 1))
        assert grid is not None
        return row[:, grid.skip :].reshape(-1, *grid.size)

    def _sizes(self, maps: Sequence[AttentionMap], evidence: Evidence) -> tuple[int, int]:
        """How many tokens the photo has, and how many the other side."""
        count = len(evidence.inputs)
        shapes = [tuple(each.weights.shape[-2:]) for each in maps]
        between = [shape for shape in shapes if shape[0] != shape[1]]
        sizes = {size for shape in shapes for size in shape}
        grids = [size for size in sizes if evidence.grids.grid((count, size, 1)) is not None]
        ours = max(grids, default=0)
        if not between or len(sizes) != 2 or not ours or any(len(each.weights) != count for each in maps):
            found = ", ".join(str(shape) for shape in dict.fromkeys(shapes)) or "none"
            raise MethodError(
                f"{self.name} must have attention between a photo's tokens and others, and no third kind, got "
                f"attention of shapes {found}; use cheferattribution for vision transformers"
            )
        return ours, next(size for size in sizes if size != ours)


Relevances = dict[tuple[int, int], torch.Tensor]


def _followed(maps: Sequence[AttentionMap], *sizes: int) -> Relevances:
    """What each kind of token has of each, by their numbers, after all attentions."""
    first = maps[0].weights
    found = {(a, b): (torch.eye(a, b) * (a == b)).to(first).expand(len(first), a, b) for a in sizes for b in sizes}
    steps = [weighted(each.weights, each.gradient) for each in maps]
    i = 0
    while i < len(steps):
        both = i + 1 < len(steps) and steps[i].shape[1:] == steps[i + 1].shape[:0:-1] and _between(steps[i])
        now = steps[i : i + 1 + both]
        changes = [change for step in now for change in _changes(step, found, sizes)]
        for key, change in changes:
            found[key] = found[key] + change
        i += len(now)
    return found


def _between(step: torch.Tensor) -> bool:
    return step.shape[1] != step.shape[2]


def _changes(step: torch.Tensor, found: Relevances, sizes: Sequence[int]) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """What one attention adds to the relevances."""
    s, q = step.shape[1:]
    if s == q:
        return [((s, other), step @ found[s, other]) for other in sizes]
    across = _normalised(found[s, s]).transpose(1, 2) @ step @ _normalised(found[q, q])
    return [((s, q), across), ((s, s), step @ found[q, s])]


def _normalised(relevance: torch.Tensor) -> torch.Tensor:
    """The identity, and what there is besides with rows that add up to one."""
    eye = torch.eye(relevance.shape[-1]).to(relevance)
    rest = relevance - eye
    total = rest.sum(-1, keepdim=True)
    return eye + torch.where(total == 0, 0, rest / torch.where(total == 0, 1, total))
