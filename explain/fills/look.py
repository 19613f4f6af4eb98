"""A picture of a fill, and what a preprocessing does to colours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image

from explain.errors import FillError, shown

Preprocess: TypeAlias = Callable[[Image.Image], torch.Tensor]


def scale_of(preprocess: Preprocess) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what black becomes ``(C,)``, and by how much white lies above it ``(C,)``, in the model's units.

    Raises:
        FillError: the preprocessing does more to a colour than to scale and shift it.

    >>> from explain.models import CenterCrop
    >>> black, range_ = scale_of(CenterCrop(8, mean=(0.5,) * 3, std=(0.25,) * 3))
    >>> black.tolist(), range_.tolist()
    ([-2.0, -2.0, -2.0], [4.0, 4.0, 4.0])
    """
    black, grey, white = (_became(preprocess, level) for level in (0, 51, 255))
    if not torch.allclose(grey, torch.lerp(black, white, 0.2), atol=1e-3 * float((white - black).abs().max())):
        raise FillError(
            "preprocess must do no more to colours than to scale and shift each channel for a fill to know black, but "
            "does; give Black(mean=..., std=...)"
        )
    return black, white - black


def range_of(preprocess: Preprocess) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the least and largest values that a preprocessing makes; None where it does more than scale and shift.

    >>> from explain.models import CenterCrop
    >>> range_of(CenterCrop(8, mean=(0.5,) * 3, std=(0.25,) * 3))
    ((-2.0, -2.0, -2.0), (2.0, 2.0, 2.0))
    """
    try:
        black, span = scale_of(preprocess)
    except FillError:
        return None
    ends = torch.stack([black, black + span])
    return tuple(ends.amin(0).tolist()), tuple(ends.amax(0).tolist())


def _became(preprocess: Preprocess, level: int) -> torch.Tensor:
    x = preprocess(Image.new("RGB", (256, 256), (level, level, level)))
    if not isinstance(x, torch.Tensor) or x.ndim != 3:
        raise FillError(f"preprocess must return a tensor (C, H, W), got {shown(x)}; leave the batch dimension out")
    return x[:, x.shape[1] // 2, x.shape[2] // 2].float()


def looked_at(
    fill: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    photo: Image.Image,
    preprocess: Preprocess | None,
    keep: torch.Tensor | None,
) -> Image.Image:
    """Cover a photo with a fill, and turn the result back into a picture."""
    to_input = preprocess or _pixels
    black, span = scale_of(to_input)
    x = to_input(photo.convert("RGB"))[None].float()
    mask = _middle(x) if keep is None else keep.reshape(1, 1, *keep.shape[-2:])
    levels = (fill(x, mask)[0].cpu() - black.view(-1, 1, 1)) / span.view(-1, 1, 1)
    pixels: np.ndarray[Any, Any] = (levels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


def _pixels(photo: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(photo)).permute(2, 0, 1).float() / 255


def _middle(x: torch.Tensor) -> torch.Tensor:
    """Cover the middle: half of the height and half of the width."""
    keep = x.new_ones(1, 1, *x.shape[2:])
    height, width = x.shape[2:]
    keep[..., height // 4 : height - height // 4, width // 4 : width - width // 4] = 0
    return keep
