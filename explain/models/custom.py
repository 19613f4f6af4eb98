"""The user's own model: a module, or ``package.module:factory``; its preprocessing and labels, known or assumed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from explain._utils.errors import ModelError, muted, option
from explain._utils.spelling import did_you_mean
from explain.data.images import Preprocess
from explain.hooks.unwrap import unwrapped
from explain.models import huggingface
from explain.models import timm_models as timm_zoo
from explain.models.classifier import CenterCrop, Classifier
from explain.models.preprocessing import not_known, what_is_assumed
from explain.models.weights import describe_weights, fit_weights, read_weights


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


def load_custom(name: str, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Import ``module`` (the current folder counts), call ``factory()``, and load weights into what it returns.

    The factory returns an ``nn.Module``, or a `Classifier` that brings preprocessing and labels along. What a module
    says about them itself is taken; see `as_classifier`.

    Raises:
        ModelError: there is no such module or factory, or it does not give a model. What the factory itself raises
            comes through.
    """
    where, _, attribute = name.partition(":")
    if not where or not attribute:
        raise ModelError(f"model must be given as package.module:factory, got {name!r}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(error.name + ".")):
            raise  # the user's module exists, and misses an import of its own
        raise ModelError(
            f"model {name!r}: no module named {error.name!r}; run from its folder, or install it"
        ) from None
    if not hasattr(module, attribute):
        known = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == where]
        raise ModelError(f"model {name!r}: {where} has no {attribute!r}; {did_you_mean(attribute, known)}")
    found = getattr(module, attribute)
    if not isinstance(found, (nn.Module, Classifier)):
        if not callable(found):
            raise ModelError(f"model {name!r} must be callable or an nn.Module, got {type(found).__name__}")
        found = found()
    if isinstance(found, nn.Module):
        found = as_classifier(found, name=name, size=size)
    elif size is not None and isinstance(found, Classifier):
        raise ModelError(
            f"{option('size')} cannot be changed for model {name!r}, which brings its own preprocessing; leave it out"
        )
    if not isinstance(found, Classifier):
        raise ModelError(f"model {name!r} must return an nn.Module, got {type(found).__name__}")
    return found if weights is None else with_weights(found, weights)


def with_weights(classifier: Classifier, path: str | Path) -> Classifier:
    """Load a state dict into a classifier's model, and say so in the classifier."""
    fit_weights(classifier.model, read_weights(path), path)
    return replace(classifier, weights=describe_weights(path))
