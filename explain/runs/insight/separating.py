"""Planes between two groups of points: logistic regression, for many pairs of groups at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

DECAY = 0.01
"""By how much the length of a normal counts against it, as a share of the loss."""
STEPS, HALVINGS = 60, 8
TOLERANCE = 1e-9
LEAST = 1e-12  # curvature of the loss at a point that is far on its side


def normals(examples: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The normals ``(B, C)`` of the planes between groups ``(B, n, C)`` and ``(B, m, C)``, towards the first ones.

    They have the smallest mean logistic loss and 0.01 times their squared length. It is found by Newton's method for
    the weights of the points, of which there are fewer than channels as a rule.

    >>> found = normals(torch.tensor([[[2.0, 0.0], [3.0, 1.0]]]), torch.tensor([[[-2.0, 0.0], [-3.0, 1.0]]]))[0]
    >>> bool(found[0] > 0), bool(found[1].abs() < 1e-6)
    (True, True)
    """
    points = torch.cat([examples, others], 1).double()
    count = points.shape[1]
    signs = torch.cat([torch.ones(examples.shape[1]), -torch.ones(others.shape[1])]).to(points)
    gram, ridge = points @ points.mT, 2 * DECAY * count
    found = points.new_zeros(len(points), count + 1)  # the weights of the points, and the offset
    for _ in range(STEPS):
        margins = signs * _heights(gram, found)
        pull = signs * torch.sigmoid(-margins)
        if (found[:, :-1] - pull / ridge).abs().max() * ridge < TOLERANCE:
            break
        found = _stepped(gram, signs, found, _newton(gram, signs, margins, ridge) - found)
    return (found[:, None, :-1] @ points)[:, 0].to(examples)


def _heights(gram: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """How far each point lies above the plane, ``(B, n)``."""
    return (gram @ found[:, :-1, None])[..., 0] + found[:, -1:]


def _newton(gram: torch.Tensor, signs: torch.Tensor, margins: torch.Tensor, ridge: float) -> torch.Tensor:
    """Where the quadratic approximation of the loss is smallest: ridge regression with a weight for each point."""
    near = torch.sigmoid(margins)
    curvature = (near * (1 - near)).clamp(min=LEAST)
    wanted = signs * (margins + (1 - near) / curvature)
    # By Cholesky, as of every symmetric matrix: LU of several at once fails or hangs in some builds with two threads.
    factor = torch.linalg.cholesky(gram + torch.diag_embed(ridge / curvature))
    free, ones = torch.cholesky_solve(torch.stack([wanted, torch.ones_like(wanted)], 2), factor).unbind(2)
    height = free.sum(1, keepdim=True) / ones.sum(1, keepdim=True)  # with it, the weights add up to 0
    return torch.cat([free - height * ones, height], 1)


def _stepped(gram: torch.Tensor, signs: torch.Tensor, found: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Go as far as the loss falls: half of the step, and half of that, where all of it goes too far."""
    before = _loss(gram, signs, found)
    for _ in range(HALVINGS):
        too_far = _loss(gram, signs, found + step) > before
        if not too_far.any():
            break
        step = torch.where(too_far[:, None], step / 2, step)
    return found + step


def _loss(gram: torch.Tensor, signs: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The loss of each plane ``(B,)``."""
    heights = _heights(gram, found)
    length = (found[:, :-1] * (heights - found[:, -1:])).sum(1)
    return F.softplus(-signs * heights).mean(1) + DECAY * length
