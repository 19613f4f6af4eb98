"""Classifiers of torchvision by name, with their own published weights, transforms and labels."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from explain._utils.errors import ModelError
from explain._utils.spelling import did_you_mean
from explain.models.classifier import CenterCrop, Classifier
from explain.models.imagenet import NAME
from explain.models.tiny import TINY, TRANSFORMER
from explain.models.weights import describe_weights, fit_weights, read_weights

DEFAULT = NAME


def torchvision_models() -> ModuleType:
    """Import ``torchvision.models``.

    Raises:
        ModelError: it is missing, or its compiled part was built for another torch.
    """
    try:
        return importlib.import_module("torchvision.models")
    except UNUSABLE as error:
        raise no_torchvision(error) from None


UNUSABLE = (ImportError, RuntimeError, OSError, AttributeError)  # what a package raises that fits no other's release


def no_torchvision(error: Exception) -> ModelError:
    """Return the error that says why torchvision cannot be used."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ModelError(
        f"torchvision cannot be used with torch {torch.__version__} ({reason}); install a matching pair with "
        "'pip install --upgrade torch torchvision'. The models that come along and your own models work without it"
    )


def list_models() -> list[str]:
    """Return the names that `load` takes: the models of this package, the default first, then torchvision's."""
    models = torchvision_models()
    return [DEFAULT, TINY, TRANSFORMER, *models.list_models(module=models)]


def load_torchvision(name: str, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Load a torchvision classifier with its published weights, or with those in a file of yours.

    Raises:
        ModelError: unknown name, or weights that are not here and cannot be downloaded.
    """
    models = torchvision_models()
    known = list_models()
    if name not in known:
        raise ModelError(
            f"model {name!r} is unknown (your own is given as package.module:factory); {did_you_mean(name, known)}"
        )
    published = models.get_model_weights(name).DEFAULT
    preprocess, categories = _transforms(published, size), published.meta["categories"]
    if weights is None:
        return Classifier(
            _pretrained(models, name, published).eval(), preprocess, categories, name, 1.0, str(published)
        )
    state = _renamed(read_weights(weights))
    # These two rescale the input when they carry published weights; weights tuned from those expect the same.
    extra = {"init_weights": False, "transform_input": True} if name in ("googlenet", "inception_v3") else {}
    classes = _count_classes(models, name, extra, state) or len(categories)
    model = models.get_model(name, weights=None, num_classes=classes, **extra)
    fit_weights(model, state, weights)
    same = categories if len(categories) == classes else None
    return Classifier(model.eval(), preprocess, same, name, 1.0, describe_weights(weights))


def _pretrained(models: ModuleType, name: str, published: Any) -> nn.Module:
    """Build a model with its published weights as torchvision does: some builders set more than parameters by them."""
    cached = Path(torch.hub.get_dir()) / "checkpoints" / published.url.rsplit("/", 1)[1]
    try:
        model: nn.Module = models.get_model(name, weights=published)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())[:100]
        raise ModelError(
            f"model {name!r} needs its weights at {str(cached)!r}, and they could not be downloaded ({reason}); go "
            "online once, copy the file there, give your own with --weights, or use the model 'tiny'"
        ) from None
    return model


def _count_classes(models: ModuleType, name: str, extra: dict[str, bool], state: dict[str, torch.Tensor]) -> int | None:
    """Return how many classes a state dict has, read from the tensors that the number of classes changes; or None."""
    marker = 9_973  # no torchvision model has a layer of this width by itself
    try:
        with torch.device("meta"):  # without memory or initial values
            model = models.get_model(name, weights=None, num_classes=marker, **extra)
    except NotImplementedError:  # some builders compute with tensors
        model = models.get_model(name, weights=None, num_classes=marker, **extra)
    heads = [key for key, tensor in model.state_dict().items() if tensor.ndim and len(tensor) == marker]
    return next((len(state[key]) for key in reversed(heads) if key in state and state[key].ndim), None)


def _renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bring the names of published DenseNets, which are older than their modules, up to date."""
    old = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)")
    return {old.sub(r"\1\2", name): tensor for name, tensor in state.items()}


def _transforms(published: Any, size: int | None) -> Any:
    preprocess = published.transforms()
    if size is None:
        return preprocess
    crop, resize = preprocess.crop_size[0], preprocess.resize_size[0]
    return CenterCrop(size, crop / max(crop, resize), tuple(preprocess.mean), tuple(preprocess.std))
