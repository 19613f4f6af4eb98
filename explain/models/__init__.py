"""Models by name, with the preprocessing and labels that go with them.

classifier   a model and all that belongs to it
network      the bundled network
bundled      its weights
zoo          torchvision and timm by name
custom       package.module:factory
weights      state dicts from files, safely
"""

from __future__ import annotations

from pathlib import Path

from explain.models.bundled import load_bundled
from explain.models.classifier import CenterCrop, Classifier
from explain.models.custom import as_classifier, load_custom, with_weights
from explain.models.network import SmallResNet
from explain.models.zoo import BUNDLED, TIMM, list_models, load_timm, load_torchvision

__all__ = ["BUNDLED", "CenterCrop", "Classifier", "SmallResNet", "as_classifier", "list_models", "load"]


def load(name: str = BUNDLED, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Load a model by name: "bundled", one of torchvision's, "timm:..." or "package.module:factory".

    Args:
        name: see `list_models`.
        weights: a file with a state dict to use instead of the published weights.
        size: the side of the input in pixels, instead of the model's own.

    Raises:
        ModelError: one line that says what is missing.
    """
    if name == BUNDLED:
        found = load_bundled(size)
        return found if weights is None else with_weights(found, weights)
    if name.startswith(TIMM):
        return load_timm(name, weights, size)
    if ":" in name:
        return load_custom(name, weights, size)
    return load_torchvision(name, weights, size)
