"""Methods for vision transformers: where attention comes from, and which of it the score depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from explain.engine import Attention, BlockAttention, Evidence, Need
from explain.errors import MethodError
from explain.layers import Grid
from explain.methods import sources
from explain.methods.base import Style
from explain.methods.checks import check_options
from explain.methods.sources import Source


@dataclass(frozen=True)
class AttentionRollout:
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

    name: ClassVar[str] = "rollout"
    about: ClassVar[str] = "attention followed through all blocks"
    paper: ClassVar[str] = "Abnar and Zuidema, ACL 2020"
    source: ClassVar[Source] = sources.ROLLOUT
    style: ClassVar[Style] = "heat"
    only_for: ClassVar[str] = "vision transformers"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset({Attention()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        maps = evidence[Attention()]
        grid = token_grid(self.name, [each.weights for each in maps], evidence)
        joint = torch.eye(maps[0].weights.shape[-1]).to(maps[0].weights)
        for each in maps:
            mixed = 0.5 * each.weights.mean(1) + 0.5 * torch.eye(joint.shape[-1]).to(joint)
            joint = mixed / mixed.sum(-1, keepdim=True) @ joint
        read = joint[:, 0] if grid.skip else joint.mean(1)
        return read[:, grid.skip :].reshape(-1, *grid.size)


@dataclass(frozen=True)
class LeGrad:
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

    name: ClassVar[str] = "legrad"
    about: ClassVar[str] = "sensitivity of the score to the attention of every block"
    paper: ClassVar[str] = "Bousselham et al., ICCV 2025"
    source: ClassVar[Source] = sources.LEGRAD
    style: ClassVar[Style] = "heat"
    only_for: ClassVar[str] = "vision transformers"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset({BlockAttention()})

    def __post_init__(self) -> None:
        check_options(self, blocks=1)

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
