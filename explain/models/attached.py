"""What comes with a module: its preprocessing and labels; what is not known is assumed, and said."""

import importlib
import importlib.util
from collections.abc import Collection
from contextlib import suppress
from typing import Any, cast

from torch import nn

from explain._utils.errors import ModelError, either, muted, option, warn
from explain.data.images import Preprocess
from explain.hooks.unwrap import unwrapped
from explain.models import huggingface
from explain.models.classifier import Classifier
from explain.models.files import BlackBox
from explain.models.from_timm import timm_config, timm_transform_and_labels
from explain.models.preprocessing import CenterCrop, CropLike, Interpolation, Values, adjusted, cropped
from explain.targets.outputs import configured


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
    inner = inside(model)
    name = name or type(inner).__name__
    preprocess, labels = (_own(model, inner, attribute) for attribute in ("preprocess", "categories"))
    preprocess = preprocess if callable(preprocess) else None
    if preprocess is not None and size is not None:
        raise _fixed_size(name)
    known = True  # whether anything says what the preprocessing is
    config, of_timm = huggingface.config_of(inner), timm_config(inner)
    if config is not None:
        labels = huggingface.labels(config) if labels is None else labels
        if preprocess is None and of_timm is None:
            preprocess, known = huggingface.preprocessing(inner, config, size)
    if of_timm is not None:
        with suppress(Exception):  # the configuration alone does not make a model one of timm
            transform, named = timm_transform_and_labels(importlib.import_module("timm"), inner, size)
            preprocess, labels = preprocess or transform, labels or named
    if preprocess is None:
        kinds = (nn.Conv2d, nn.Conv3d)
        channels = next((module.in_channels for module in inner.modules() if isinstance(module, kinds)), None)
        shape = inner.shape if isinstance(inner, BlackBox) else (None, channels, None, None)
        preprocess = adjusted(CenterCrop(size or shape[2] or 224), channels=1 if shape[1] == 1 else None)
        known = False
    assumed = None if known else _what_is_assumed(name, preprocess)
    return Classifier(model, preprocess, labels, name, assumed=assumed, activation=configured(inner))


def _own(model: nn.Module, inner: nn.Module, name: str) -> Any:
    """Return an attribute of a model, or of the one that it is wrapped around."""
    own = getattr(model, name, None)
    return getattr(inner, name, None) if own is None else own


def _fixed_size(name: str) -> ModelError:
    told = "cannot be changed for a model that brings its own preprocessing"
    return ModelError(f"{option('size')} {told}, got {name!r}; leave it out")


def inside(model: nn.Module) -> nn.Module:
    """Return the module inside of DataParallel and the like, or the given one; scripted ones are refused elsewhere."""
    with muted(), suppress(ModelError):
        return unwrapped(model)
    return model


def as_preprocess(given: Any) -> Preprocess:
    """Return what was given for a preprocessing as a function of a photo; image processors of transformers are known.

    Raises:
        ModelError: it cannot be called.
    """
    if (processed := huggingface.as_processed(given)) is not None:
        return processed
    if not callable(given):
        got = type(given).__name__
        raise ModelError(f"preprocess must be a function of a PIL image, got {got}; use a transform or a lambda")
    return cast("Preprocess", given)


def resolve_preprocessing(
    found: Classifier, own: Preprocess | None = None, *, size: int | None = None, crop: CropLike = "center",
    channels: int | None = None, mean: Values = None, std: Values = None, interpolation: Interpolation | None = None,
) -> Preprocess:  # fmt: skip
    """Return how a classifier's photos become its inputs, with the caller's ``own`` preprocessing or values.

    What is assumed, since neither the model nor the caller says it, is warned of.

    Raises:
        ModelError: the preprocessing is one that cannot be changed in this way.
    """
    preprocess = found.preprocess if own is None else own
    assumed = found.assumed if own is None else None
    side = found.model.shape[2] if isinstance(found.model, BlackBox) else None
    known = [name for name, value in (("size", size or side), ("mean", mean), ("std", std)) if value is not None]
    if isinstance(preprocess, huggingface.Processed):
        preprocess, mean, std = preprocess.with_values(mean, std), None, None
    preprocess = adjusted(preprocess, channels=channels, mean=mean, std=std, interpolation=interpolation)
    if assumed is not None and (told := _what_is_assumed(found.name, preprocess, known)) is not None:
        warn(told)
    return cropped(preprocess, crop, found.model)


def _what_is_assumed(name: str, preprocess: Preprocess, known: Collection[str] = ()) -> str | None:
    """Say what is assumed of the preprocessing of a model that says nothing, but for what is ``known``.

    >>> _what_is_assumed("Net", CenterCrop(32), {"mean"}).split("; ")[1]
    "assumed: a centre crop of 32 pixels, ImageNet's standard deviation"
    >>> _what_is_assumed("Net", CenterCrop(32), {"size", "mean", "std"})
    """
    words = [word for each, word in (("mean", "mean"), ("std", "standard deviation")) if each not in known]
    if not words and "size" in known:
        return None
    if isinstance(preprocess, CenterCrop):
        assumed = f"a centre crop of {preprocess.side} pixels{' in grey' if len(preprocess.mean) == 1 else ''}"
        assumed += f", ImageNet's {' and '.join(words)}" if words else ""
    else:
        assumed = f"the usual image processor of its kind, {preprocess}"
    flags = ", ".join(f"--{each}" for each in ("size", "mean", "std") if each not in known)
    remedy = f"{either('pass preprocess=', f'give {flags}')}, or give the model an attribute preprocess"
    return f"preprocess is not known for model {name!r}; assumed: {assumed}; {remedy}"
