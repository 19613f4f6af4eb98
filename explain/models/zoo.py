"""Classifiers of torchvision and timm by name, with their own published weights, transforms and labels."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from explain.errors import ModelError, did_you_mean
from explain.models.classifier import CenterCrop, Classifier
from explain.models.weights import describe_weights, fit_weights, read_weights

BUNDLED = "bundled"
TIMM = "timm:"


def torchvision_models() -> ModuleType:
    """Import ``torchvision.models``.

    Raises:
        ModelError: it is missing, or its compiled part was built for another torch.
    """
    try:
        return importlib.import_module("torchvision.models")
    except _UNUSABLE as error:
        raise _no_torchvision(error) from None


_UNUSABLE = (ImportError, RuntimeError, OSError, AttributeError)  # what a package raises that fits no other's release


def _no_torchvision(error: Exception) -> ModelError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ModelError(
        f"torchvision cannot be used with torch {torch.__version__} ({reason}); install a matching pair with "
        "'pip install --upgrade torch torchvision'. The bundled model and your own models work without it"
    )


def list_models() -> list[str]:
    """Return the names that `load` takes: the bundled model first, then torchvision's classifiers."""
    models = torchvision_models()
    return [BUNDLED, *models.list_models(module=models)]


def load_torchvision(name: str, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Load a torchvision classifier with its published weights, or with those in a file of one's own.

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
    classes = len([tensor for tensor in state.values() if tensor.ndim][-1])
    # These two rescale the input when they carry published weights; weights tuned from those expect the same.
    extra = {"init_weights": False, "transform_input": True} if name in ("googlenet", "inception_v3") else {}
    model = models.get_model(name, weights=None, num_classes=classes, **extra)
    fit_weights(model, state, weights)
    same = categories if len(categories) == classes else None
    return Classifier(model.eval(), preprocess, same, name, 1.0, describe_weights(weights))


def load_timm(name: str, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Load one of timm's classifiers, named like ``timm:convnext_tiny``, with its published weights or those in a file.

    Raises:
        ModelError: timm is not installed, the name is unknown, or the weights cannot be downloaded.
    """
    try:
        timm = importlib.import_module("timm")
    except _UNUSABLE as error:
        if "torchvision" in str(error):  # which timm imports
            raise _no_torchvision(error) from None
        raise ModelError(
            f"model {name!r} needs timm, which cannot be imported ({error}); run pip install 'explain[timm]'"
        ) from None
    plain = name.removeprefix(TIMM)
    if not timm.is_model(plain):
        raise ModelError(f"model {name!r} is unknown to timm; {did_you_mean(plain, timm.list_models())}")
    state = None if weights is None else read_weights(weights)
    options: dict[str, Any] = {}
    published = timm.get_pretrained_cfg(plain)
    if state is not None:
        head = published.classifier[0] if isinstance(published.classifier, tuple) else published.classifier
        options["num_classes"] = len(state.get(f"{head}.bias", state.get(f"{head}.weight", range(1000))))
    if size is not None and published.fixed_input_size:
        options["img_size"] = size
    try:
        model: nn.Module = timm.create_model(plain, pretrained=state is None, **options)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ModelError(
            f"model {name!r} needs its published weights, and they could not be downloaded ({reason}); go online once, "
            "give your own with --weights, or use the bundled model"
        ) from None
    if state is not None and weights is not None:
        fit_weights(model, state, weights)
    given = {} if size is None else {"input_size": (3, size, size)}
    config = timm.data.resolve_data_config(given, model=model)
    told = str(published.tag and f"{plain}.{published.tag}") if weights is None else describe_weights(weights)
    return Classifier(model.eval(), timm.data.create_transform(**config), _labels(timm, model), name, 1.0, told)


def _labels(timm: ModuleType, model: nn.Module) -> list[str] | None:
    """The labels of ImageNet, where the model has as many classes."""
    info = timm.data.ImageNetInfo()
    names = [info.index_to_description(i) for i in range(info.num_classes())]
    return names if getattr(model, "num_classes", None) == len(names) else None


def _pretrained(models: ModuleType, name: str, published: Any) -> nn.Module:
    """Build a model with its published weights as torchvision does: some builders set more than parameters by them."""
    cached = Path(torch.hub.get_dir()) / "checkpoints" / published.url.rsplit("/", 1)[1]
    try:
        model: nn.Module = models.get_model(name, weights=published)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())[:100]
        raise ModelError(
            f"model {name!r} needs its weights at {str(cached)!r}, and they could not be downloaded ({reason}); go "
            "online once, copy the file there, give your own with --weights, or use the bundled model"
        ) from None
    return model


def _renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bring the names of published DenseNets, which are older than their modules, up to date."""
    old = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)")
    return {old.sub(r"\1\2", name): tensor for name, tensor in state.items()}


def _transforms(published: Any, size: int | None) -> Any:
    preprocess = published.transforms()
    if size is None:
        return preprocess
    if size < 1:
        raise ModelError(f"size must be at least 1 pixel, got {size}")
    crop, resize = preprocess.crop_size[0], preprocess.resize_size[0]
    return CenterCrop(size, crop / max(crop, resize), tuple(preprocess.mean), tuple(preprocess.std))
