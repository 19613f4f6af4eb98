"""A module of the user's: what it says about its preprocessing and labels, and what must be assumed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from explain.errors import ModelError, muted, option
from explain.hooks import unwrapped
from explain.images import Preprocess
from explain.models import huggingface, timm_zoo
from explain.models.adjusted import not_known, what_is_assumed
from explain.models.classifier import CenterCrop, Classifier


def as_classifier(model: nn.Module, *, name: str | None = None, size: int | None = None) -> Classifier:
    """Wrap a bare module, with the preprocessing and the labels that come with it.

    It looks for these, in this order: its attributes ``preprocess`` and ``categories``; for a model of timm, its
    ``pretrained_cfg``; for a model of transformers, its image processor (an attribute ``image_processor``, or the file
    beside the weights) and the ``id2label`` of its configuration. Nothing is downloaded. What is not known is assumed,
    and ``Classifier.assumed`` says so.

    Raises:
        ModelError: ``size`` is given, and the preprocessing has a fixed one.

    >>> as_classifier(nn.Conv2d(3, 5, 1), size=32).assumed.split("; ")[1]
    "assumed: a centre crop of 32 pixels, ImageNet's mean and standard deviation"
    """
    inner = _inside(model)
    name = name or type(inner).__name__
    preprocess, labels, assumed = _brought(model, inner, size)
    told = None if assumed is None else not_known(name, assumed)
    if preprocess is None:
        preprocess = CenterCrop(size or 224)
        told = what_is_assumed(name, preprocess)
    own = _own(model, inner, "categories")
    activation = huggingface.activation(huggingface.config_of(inner))
    return Classifier(model, preprocess, labels if own is None else own, name, assumed=told, activation=activation)


def as_preprocess(given: Any) -> Preprocess:
    """Return what was given for a preprocessing as a function of a photo; image processors of transformers are known.

    Raises:
        ModelError: it cannot be called.
    """
    processed = huggingface.as_processed(given)
    if processed is not None:
        return processed
    if not callable(given):
        raise ModelError(
            f"preprocess must be a function of a PIL image, got {type(given).__name__}; use a transform or a lambda"
        )
    found: Preprocess = given
    return found


def _brought(
    model: nn.Module, inner: nn.Module, size: int | None
) -> tuple[Preprocess | None, Sequence[str] | None, str | None]:
    """Return the preprocessing and the labels that come with a module, and what is assumed of the first."""
    own = _own(model, inner, "preprocess")
    if callable(own) and size is not None:
        raise ModelError(
            f"{option('size')} cannot be changed for a model that brings its own preprocessing; leave it out"
        )
    preprocess: Preprocess | None = own if callable(own) else None
    labels: Sequence[str] | None = None
    assumed: str | None = None
    config = huggingface.config_of(inner)
    if config is not None:
        labels = huggingface.labels(config)
        if preprocess is None and timm_zoo.config_of(inner) is None:
            preprocess, assumed = huggingface.preprocessing(inner, config, size)
    if timm_zoo.config_of(inner) is not None:
        found, named = _from_timm(inner, size)
        preprocess, labels = preprocess or found, labels or named
    return preprocess, labels, assumed


def _from_timm(model: nn.Module, size: int | None) -> tuple[Preprocess | None, Sequence[str] | None]:
    try:
        timm = importlib.import_module("timm")
    except Exception:  # the configuration alone does not make a model one of timm
        return None, None
    return timm_zoo.configured(timm, model, size)


def _own(model: nn.Module, inner: nn.Module, name: str) -> Any:
    """Return an attribute of a model, or of the one that it is wrapped around."""
    own = getattr(model, name, None)
    return getattr(inner, name, None) if own is None else own


def _inside(model: nn.Module) -> nn.Module:
    """Return the module inside of DataParallel and the like, or the given one; scripted ones are refused elsewhere."""
    with muted():
        try:
            return unwrapped(model)
        except ModelError:
            return model
