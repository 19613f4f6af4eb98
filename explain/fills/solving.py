"""Covered pixels as weighted means of their neighbours: one linear system for each mask, many of them at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

DIRECT, DIAGONAL = 1 / 6, 1 / 12


def interpolated(images: torch.Tensor, covered: torch.Tensor) -> torch.Tensor:
    """Replace covered pixels by the weighted means of their neighbours, all of them at once.

    Args:
        images: ``(b, C, H, W)`` in single or double precision.
        covered: ``(b, 1, H, W)``, truth values. Where all is covered, the result is the image's mean.

    Returns:
        ``(b, C, H, W)``; the pixels that are not covered are as they were.
    """
    known = (~covered).to(images)
    unknown = 1 - known
    count = known.sum((2, 3), keepdim=True)
    of_known = (images * known).sum((2, 3), keepdim=True) / count.clamp(min=1)
    mean = torch.where(count > 0, of_known, images.mean((2, 3), keepdim=True))
    centred = (images - mean) * known  # a solution about 0, which is right where nothing is known
    right = unknown * _around(centred)
    weight = _around(torch.ones_like(images[:1, :1]))
    found = _conjugate_gradients(right, unknown, weight)
    return torch.where(covered, mean + found, images)


def _around(maps: torch.Tensor) -> torch.Tensor:
    """The weighted sum over the eight neighbours of each pixel; there is nothing outside."""
    kernel = maps.new_full((1, 1, 3, 3), DIAGONAL)
    kernel[..., 1, :], kernel[..., :, 1] = DIRECT, DIRECT
    kernel[..., 1, 1] = 0
    return F.conv2d(maps.flatten(0, 1)[:, None], kernel, padding=1).reshape(maps.shape)


def _conjugate_gradients(right: torch.Tensor, unknown: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Solve for each image and channel at once; the matrix is symmetric, and positive where anything is known."""
    found, residue = torch.zeros_like(right), right
    direction = residue / weight
    now = _dot(residue, direction)
    rounding = torch.finfo(right.dtype).eps
    enough = (8 * rounding) ** 2 * now
    for _ in range(10 * max(right.shape[2:]) + 100):
        open_ = now > enough
        if not bool(open_.any()):
            break
        applied = unknown * (weight * direction - _around(direction))
        step = torch.where(open_, now / _dot(direction, applied), 0)
        found = found + step * direction
        residue = residue - step * applied
        scaled = residue / weight
        then = _dot(residue, scaled)
        direction = scaled + torch.where(open_, then / now, 0) * direction
        now = then
    return found


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one * other).sum((2, 3), keepdim=True)
