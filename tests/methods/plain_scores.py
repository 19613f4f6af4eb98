"""CAMs of other scores than a logit, and of several layers: slowly and plainly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.methods.plain import (
    Layer,
    Map,
    backward,
    enlarge,
    forward,
    gradcam_map,
    gradcampp_map,
    look,
    mean_of,
    one_hot,
    softmax,
    tangent,
    weighted,
)


def score_slope(logits: torch.Tensor, target: int, score: str) -> torch.Tensor:
    """The gradient in the logits of "logit" ``y_c``, "rest" ``y_c + log p_c`` or "probability" ``p_c``."""
    chosen, p = one_hot(target, logits), softmax(logits)
    return {"logit": chosen, "rest": 2 * chosen - p, "probability": p[target] * (chosen - p)}[score]


def score_curvature(logits: torch.Tensor, target: int, score: str, direction: torch.Tensor) -> torch.Tensor:
    """The product of the same score's Hessian in the logits with ``direction``."""
    away, p = one_hot(target, logits) - softmax(logits), softmax(logits)
    spread = p * (direction - (p * direction).sum())  # (diag(p) - p p') direction, the Hessian of log-sum-exp
    return {
        "logit": torch.zeros_like(p),
        "rest": -spread,
        "probability": p[target] * (away * (away * direction).sum() - spread),
    }[score]


def shapleycam(
    layers: list[Layer],
    x: torch.Tensor,
    target: int,
    layer: int,
    *,
    score: str = "rest",
    elementwise: bool = False,
    relu: bool = True,
) -> torch.Tensor:
    """``w = G - H A / 2``, its mean over positions, with the score ``y_c + log p_c`` named ReST (Cai 2025).

    The head is piecewise linear, so the Hessian is exactly ``J' S J``: the logits' Jacobian around the score's Hessian
    in the logits, which is 0 for a logit (Grad-CAM again). ``elementwise`` leaves the mean out (their ShapleyCAM-H).
    """
    values = forward(layers, x)
    head, activation, logits = layers[layer + 1 :], values[layer + 1], values[-1]
    gradient = backward(head, values[layer + 1 :], score_slope(logits, target, score))[0]
    bend = score_curvature(logits, target, score, tangent(head, values[layer + 1 :], activation))
    product = backward(head, values[layer + 1 :], bend)[0]
    weights = [g - h / 2 for g, h in zip(gradient, product, strict=True)]
    return weighted(weights if elementwise else [mean_of(w) for w in weights], activation, relu=relu)


def nearest_classes(logits: torch.Tensor, target: int, count: int) -> list[int]:
    """The classes whose logits are nearest to the target's, without the target."""
    others = [j for j in range(len(logits)) if j != target]
    return sorted(others, key=lambda j: abs(float(logits[j] - logits[target])))[:count]


def finer_slope(
    logits: torch.Tensor, target: int, references: Sequence[int], objective: str, alpha: float
) -> torch.Tensor:
    """The gradient in the logits of ``sum_t w_t (y_c - alpha y_t)``: w_t = 1/T ("mean") or p_t / sum p ("weighted")."""
    count = len(references)
    shares = softmax(logits[list(references)]).tolist() if objective == "weighted" else [1 / count] * count
    margins = [logits[target] - alpha * logits[t] for t in references]
    score = sum(share * margin for share, margin in zip(shares, margins, strict=True))
    out = one_hot(target, logits)
    for share, margin, t in zip(shares, margins, references, strict=True):
        out[t] -= alpha * share
        if objective == "weighted":
            out[t] += share * (margin - score)  # the weights depend on the logits as well
    return out


def finercam(
    layers: list[Layer],
    x: torch.Tensor,
    target: int,
    layer: int,
    *,
    objective: str = "mean",
    alpha: float = 0.6,
    references: int | Sequence[int] = 3,
    base: Map = gradcam_map,
) -> torch.Tensor:
    """A CAM of ``y_c - alpha y_d``, over the classes d most like c by their logits (Zhang 2025)."""
    logits = forward(layers, x)[-1]
    others = nearest_classes(logits, target, references) if isinstance(references, int) else references
    return base(*look(layers, x, finer_slope(logits, target, others, objective, alpha), layer))


def unit(values: torch.Tensor, *, shift: bool = False) -> torch.Tensor:
    """Divide by the maximum, if positive; with ``shift`` take the minimum away before."""
    values = values - values.min() if shift else values
    return values / values.max() if values.max() > 0 else values


def fuse(maps: Sequence[torch.Tensor], how: str = "mean", *, shift: bool = False) -> torch.Tensor:
    """Maps of several layers, each divided by its maximum, enlarged to the largest: their mean, maximum or product."""
    size = max((tuple(m.shape) for m in maps), key=lambda shape: shape[0] * shape[1])
    out = None
    for m in maps:
        now = enlarge(unit(m, shift=shift), size)
        if out is None:
            out = now
        elif how == "mean":
            out = out + now
        elif how == "max":
            out = torch.where(now > out, now, out)
        elif how == "product":
            out = out * now
    return out / len(maps) if how == "mean" else out


def refinecam(
    layers: list[Layer],
    x: torch.Tensor,
    target: int,
    layer: Sequence[int],
    *,
    base: Map = gradcampp_map,
    shift: bool = False,
) -> torch.Tensor:
    """The product over layers of Grad-CAM++ maps, each divided by its maximum (Domeniconi 2026: ``shift``ed first)."""
    return fuse([base(*look(layers, x, target, index)) for index in layer], "product", shift=shift)
