"""CAMs of other scores than a logit, and of several layers: slowly and plainly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.methods import plain
from tests.methods.plain import Layers


def nearest_classes(logits: Tensor, target: int, count: int) -> list[int]:
    """The classes whose logits are nearest to the target's, without the target."""
    others = [j for j in range(len(logits)) if j != target]
    return sorted(others, key=lambda j: abs(float(logits[j] - logits[target])))[:count]


def finer_slope(
    logits: Tensor, target: int, references: Sequence[int], objective: str, alpha: float
) -> Tensor:
    """The gradient in the logits of ``sum_t w_t (y_c - alpha y_t)``: w_t = 1/T ("mean") or p_t /
    sum p ("weighted")."""
    count = len(references)
    shares = (
        logits[list(references)].softmax(0).tolist()
        if objective == "weighted"
        else [1 / count] * count
    )
    margins = [logits[target] - alpha * logits[t] for t in references]
    score = sum(share * margin for share, margin in zip(shares, margins, strict=True))
    out = plain.one_hot(target, logits)
    for share, margin, t in zip(shares, margins, references, strict=True):
        out[t] -= alpha * share
        if objective == "weighted":
            out[t] += share * (margin - score)  # the weights depend on the logits as well
    return out


def finercam(
    layers: Layers,
    x: Tensor,
    target: int,
    layer: int,
    *,
    objective: str = "mean",
    alpha: float = 0.6,
    references: int = 3,
    base: plain.Map = plain.gradcam_map,
) -> Tensor:
    """A CAM of ``y_c - alpha y_d``, over the classes d most like c by their logits (Zhang 2025)."""
    logits = plain.forward(layers, x)[-1]
    others = nearest_classes(logits, target, references)
    return base(
        *plain.look(layers, x, finer_slope(logits, target, others, objective, alpha), layer)
    )


def fuse(maps: Sequence[Tensor], how: str) -> Tensor:
    """Maps of several layers, each divided by its maximum, enlarged to the largest: their mean,
    maximum or product."""
    size = max((tuple(m.shape) for m in maps), key=lambda shape: shape[0] * shape[1])
    out = None
    for m in maps:
        now = plain.enlarge(plain.unit(m), size)
        if out is None:
            out = now
        elif how == "mean":
            out = out + now
        elif how == "max":
            out = torch.where(now > out, now, out)
        elif how == "product":
            out = out * now
    return out / len(maps) if how == "mean" else out


def refinecam(layers: Layers, x: Tensor, target: int, layer: Sequence[int]) -> Tensor:
    """The product over layers of Grad-CAM++ maps, each divided by its maximum (Domeniconi 2026)."""
    return fuse([plain.gradcampp(layers, x, target, index) for index in layer], "product")
