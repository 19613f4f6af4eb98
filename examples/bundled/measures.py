"""Accuracy and calibration of a classifier on image files."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from explain.data.images import load_image
from explain.models import Classifier


@torch.inference_mode()
def logits_of(classifier: Classifier, paths: list[Path], batch: int = 250) -> torch.Tensor:
    """Return the logits ``(N, K)`` of image files."""
    found = []
    for start in range(0, len(paths), batch):
        x = torch.stack(
            [classifier.preprocess(load_image(path)) for path in paths[start : start + batch]]
        )
        found.append(classifier.model(x))
    return torch.cat(found)


def top(logits: torch.Tensor, labels: torch.Tensor, k: int) -> float:
    """Return the share of images whose label is among the k best."""
    return (logits.topk(k, dim=1).indices == labels[:, None]).any(1).float().mean().item()


def calibration_error(probabilities: torch.Tensor, labels: torch.Tensor, bins: int = 15) -> float:
    """Return the expected calibration error (Guo et al., 2017): confidence against accuracy, in
    bins."""
    confidence, predicted = probabilities.max(1)
    right = (predicted == labels).float()
    which = (confidence * bins).long().clamp(max=bins - 1)
    error = 0.0
    for b in range(bins):
        inside = which == b
        if inside.any():
            error += (
                inside.float().mean().item()
                * abs(confidence[inside].mean() - right[inside].mean()).item()
            )
    return error


def fit_temperature(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the temperature with the least negative log-likelihood (Guo et al., 2017)."""
    candidates = torch.linspace(0.3, 3.0, 541)
    losses = torch.stack([F.cross_entropy(logits / t, targets) for t in candidates])
    return float(candidates[losses.argmin()])
