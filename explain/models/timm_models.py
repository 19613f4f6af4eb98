"""timm's classifiers: by name, or as a module that brings its configuration along."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from explain._utils.errors import ModelError
from explain._utils.spelling import did_you_mean
from explain.data.images import Preprocess
from explain.models.classifier import Classifier
from explain.models.torchvision_models import UNUSABLE, no_torchvision
from explain.models.weights import describe_weights, fit_weights, read_weights

TIMM = "timm:"


def load_timm(name: str, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Load one of timm's classifiers, named like ``timm:convnext_tiny``, with its published weights or those in a file.

    Raises:
        ModelError: timm is not installed, the name is unknown, or the weights cannot be downloaded.
    """
    try:
        timm = importlib.import_module("timm")
    except UNUSABLE as error:
        if "torchvision" in str(error):  # which timm imports
            raise no_torchvision(error) from None
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
        options["num_classes"] = _count_classes(published.classifier, state) or published.num_classes
    if size is not None and published.fixed_input_size:
        options["img_size"] = size
    try:
        model: nn.Module = timm.create_model(plain, pretrained=state is None, **options)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ModelError(
            f"model {name!r} needs its published weights, and they could not be downloaded ({reason}); go online once, "
            "give your own with --weights, or use the model 'tiny'"
        ) from None
    if state is not None and weights is not None:
        fit_weights(model, state, weights)
    preprocess, labels = configured(timm, model, size)
    told = str(published.tag and f"{plain}.{published.tag}") if weights is None else describe_weights(weights)
    return Classifier(model.eval(), preprocess, labels, name, 1.0, told)


def config_of(model: nn.Module) -> Mapping[str, Any] | None:
    """Return the configuration that comes with a model of timm, or None.

    Models of transformers that wrap one of timm have it inside their own configuration.
    """
    for holder in (model, getattr(model, "config", None)):
        config = None if isinstance(holder, Mapping) else getattr(holder, "pretrained_cfg", None)
        if isinstance(config, Mapping) and "mean" in config and "input_size" in config:
            return config
    return None


def configured(timm: ModuleType, model: nn.Module, size: int | None = None) -> tuple[Preprocess, Sequence[str] | None]:
    """Return the preprocessing and the labels that a model's configuration names, as timm itself makes them."""
    given: dict[str, Any] = {} if size is None else {"input_size": (3, size, size)}
    built_for = getattr(getattr(model, "patch_embed", None), "img_size", None)  # where the caller chose another size
    if size is None and isinstance(built_for, Sequence) and len(built_for) == 2:
        given["input_size"] = (3, *built_for)
    found = config_of(model)
    config = timm.data.resolve_data_config(given, pretrained_cfg=None if found is None else dict(found), model=model)
    return timm.data.create_transform(**config), _labels(timm, model, found or {})


def _count_classes(heads: str | Sequence[str] | None, state: Mapping[str, torch.Tensor]) -> int | None:
    """Return how many classes a state dict has, read from the head that a configuration names; or None."""
    named = [heads] if isinstance(heads, str) else list(heads or ())
    tensors = [state[key] for head in named for key in (f"{head}.weight", f"{head}.bias") if key in state]
    return next((len(tensor) for tensor in tensors if tensor.ndim), None)


def _labels(timm: ModuleType, model: nn.Module, config: Mapping[str, Any]) -> list[str] | None:
    """The labels in the configuration, or those of ImageNet where the model has as many classes as one of its sets."""
    classes = getattr(model, "num_classes", None)
    names, descriptions = config.get("label_names"), config.get("label_descriptions") or {}
    if names is not None and len(names) == classes:
        return [str(descriptions.get(name, name)) for name in names]
    subset = timm.data.infer_imagenet_subset({"num_classes": classes})
    if subset is None:
        return None
    info = timm.data.ImageNetInfo(subset)
    return [info.index_to_description(i) for i in range(info.num_classes())]
