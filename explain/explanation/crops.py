"""Several crops of one photo, explained as one: the mean of their scores, and one map of the whole photo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from explain._utils.errors import TargetError, either
from explain._utils.nested import first_tensor
from explain.attribution.result import Attribution
from explain.data.images import Box
from explain.hooks.preserve import untouched
from explain.layers.feature_maps import enlarge


def joined(found: Attribution, boxes: Sequence[Box], size: tuple[int, int]) -> Attribution:
    """Lay the attributions of crops where the crops lie in their photo.

    Args:
        found: the attribution of P crops of one photo, for one class.
        boxes: where each crop lies.
        size: the photo's (width, height).

    Returns:
        The attribution of one image, at the resolution of the crops. Its score and logits are the means over the crops.
        Values for pixels ``(1, C, H, W)`` are those of the mean score: the crops' values added up and divided by P, so
        that they still add up to what they did. Values of a layer become ``(1, H, W)``: at each place the mean over the
        crops that show it. Where no crop lies, they are zero.

    >>> crops = Attribution("m", torch.ones(2, 1, 2, 2), "score", torch.tensor([1.0, 3.0]), None, (2, 2))
    >>> one = joined(crops, [Box(0, 0, 2, 2), Box(1, 0, 3, 2)], (3, 2))
    >>> one.values[0, 0].tolist(), one.score
    ([[0.5, 1.0, 0.5], [0.5, 1.0, 0.5]], tensor([2.]))
    """
    pixels = found.values.ndim == len(found.size) + 2
    return replace(
        found,
        values=_laid(found.values, found.size, boxes, size),
        target=found.target if isinstance(found.target, str) else found.target[:1],
        score=found.score.mean(0, keepdim=True),
        size=_canvas(found.size, boxes[0], size),
        maps={name: _laid(values, found.size, boxes, size) for name, values in found.maps.items()},
        logits=None if found.logits is None else found.logits.mean(0, keepdim=True),
        delta=None if found.delta is None or not pixels else found.delta.mean(0, keepdim=True),
        error=None,  # the crops were covered by the same masks, so that their errors are not independent
        spent=None if found.spent is None else found.spent.sum(0, keepdim=True),
        planned=None if found.planned is None else found.planned.sum(0, keepdim=True),
        finished=None if found.finished is None else found.finished.all(0, keepdim=True),
        r2=None if found.r2 is None else found.r2.mean(0, keepdim=True),
        neutral=None if found.neutral is None else found.neutral.mean(0, keepdim=True),
    )


def best_of_mean(model: nn.Module, x: torch.Tensor, count: int) -> list[int]:
    """Return the best classes by the mean of the logits of several crops ``x`` ``(P, C, H, W)``.

    Raises:
        TargetError: the model gives no class scores.
    """
    with untouched(model), torch.no_grad():
        logits = first_tensor(model(x))
    if logits is None or logits.ndim != 2:
        remedy = either("give target=, or use crop 'whole'", "give --target, or use --crop whole")
        raise TargetError(
            f"target must be given for crop 'five' and a model without class scores (N, K), got None; {remedy}"
        )
    return [int(index) for index in logits.mean(0).topk(min(count, logits.shape[1])).indices]


def _laid(values: torch.Tensor, side: tuple[int, ...], boxes: Sequence[Box], size: tuple[int, int]) -> torch.Tensor:
    pixels = values.ndim == len(side) + 2
    parts = values if pixels else enlarge(values[:, None], side)
    height, width = _canvas(side, boxes[0], size)
    total = parts.new_zeros(1, parts.shape[1], height, width)
    count = parts.new_zeros(height, width)
    for part, box in zip(parts, boxes, strict=True):
        top = min(round(box.top * side[0] / box.height), height - side[0])
        left = min(round(box.left * side[1] / box.width), width - side[1])
        total[0, :, top : top + side[0], left : left + side[1]] += part
        count[top : top + side[0], left : left + side[1]] += 1
    return total / len(boxes) if pixels else (total / count.clamp(min=1))[:, 0]


def _canvas(side: tuple[int, ...], box: Box, size: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of the whole photo at the resolution of its crops."""
    height, width = round(size[1] * side[0] / box.height), round(size[0] * side[1] / box.width)
    return max(height, side[0]), max(width, side[1])
