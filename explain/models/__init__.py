"""Models by name, with the preprocessing and labels that go with them.

classifier   a model and all that belongs to it
network      the bundled network
bundled      its weights
zoo          torchvision by name
timm_zoo     timm by name, and what its configurations say
huggingface  what models of transformers say about themselves
given        a module that somebody gives: what it says, and what is assumed
custom       package.module:factory
weights      state dicts from files, safely
safetensors  the format of that name
"""

from __future__ import annotations

from pathlib import Path

from explain.models.bundled import load_bundled
from explain.models.classifier import CenterCrop, Classifier, class_label
from explain.models.custom import load_custom, with_weights
from explain.models.given import as_classifier, as_preprocess
from explain.models.network import SmallResNet
from explain.models.timm_zoo import TIMM, load_timm
from explain.models.zoo import BUNDLED, list_models, load_torchvision

__all__ = [
    "BUNDLED",
    "TIMM",
    "CenterCrop",
    "Classifier",
    "SmallResNet",
    "as_classifier",
    "as_preprocess",
    "class_label",
    "list_models",
    "load",
]


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
