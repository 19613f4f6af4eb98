"""The preprocessing and labels that come with a module; what is not known is assumed, and a warning
says so."""

import importlib
import importlib.util
from collections.abc import Collection
from contextlib import suppress
from typing import Any, cast

import torch
from torch import nn

from explain._utils.errors import ModelError, muted, option_name, python_or_command, warn
from explain._utils.modules import parameters_of
from explain.data.boxes import Preprocess
from explain.data.inputs import first_convolution
from explain.hooks.preserve import untouched
from explain.hooks.programs import OpenProgram
from explain.hooks.unwrap import unwrapped
from explain.models import from_ultralytics, huggingface
from explain.models.classifier import Classifier
from explain.models.files import BlackBox
from explain.models.from_timm import has_configured_classes, timm_config, timm_transform_and_labels
from explain.models.preprocessing import (
    CenterCrop,
    CropLike,
    Interpolation,
    Side,
    Values,
    adjusted,
    as_plain,
    checked_side,
    cropped,
    sides_of,
)
from explain.targets.outputs import configured_activation


def as_classifier(
    model: nn.Module, *, name: str | None = None, size: Side | None = None
) -> Classifier:
    """A module with its own ``preprocess`` and ``categories``, else what timm, transformers or
    ultralytics keep in it; else ``assumed`` says what is assumed. Nothing is downloaded."""
    inner = model
    # what cannot be unwrapped, such as a scripted module, is taken as it is
    with muted(), suppress(ModelError):
        inner = unwrapped(model)
    name = name or type(inner).__name__
    preprocess = _attribute(model, inner, "preprocess")
    labels = _attribute(model, inner, "categories")
    is_known = callable(preprocess)  # whether anything says what the preprocessing is
    if not is_known:
        preprocess = None
    elif size is not None:
        raise fixed_size(name)
    config = huggingface.config_of(inner)
    if labels is None and config is not None:
        labels = huggingface.labels(config)
    if timm_config(inner) is not None:
        with suppress(Exception):  # the configuration alone does not make a model one of timm
            timm = importlib.import_module("timm")
            transform, timm_labels = timm_transform_and_labels(timm, inner, size)
            preprocess = preprocess or transform
            labels = labels or timm_labels
            is_known = is_known or has_configured_classes(inner)
    elif config is not None and not is_known:
        preprocess, is_known = huggingface.preprocessing(inner, config, size)
    elif from_ultralytics.is_network(inner):
        labels = labels or from_ultralytics.class_names(inner)
        preprocess = preprocess or from_ultralytics.preprocess_of(inner, size)
        is_known = True
    if preprocess is None:
        preprocess = _usual(inner, size)
        is_known = False
    elif hasattr(preprocess, "with_values"):  # of timm or transformers: for three channels
        channels = _channels_of_photos(inner, size)
        if channels != 3:
            preprocess = adjusted(preprocess, channels=channels)
            is_known = False
    assumed = None if is_known else _what_is_assumed(name, preprocess)
    activation = configured_activation(inner)
    if from_ultralytics.is_network(inner):
        activation = "none"  # scores of boxes, and of classes, are probabilities
    return Classifier(model, preprocess, labels, name, assumed=assumed, activation=activation)


def _usual(model: nn.Module, size: Side | None) -> Preprocess:
    """The preprocessing assumed without any: a centre crop of ``size`` pixels (224), with as many
    channels as the model takes, and ImageNet's values unless it takes whole levels."""
    values: dict[str, Any] = {}
    if isinstance(model, (BlackBox, OpenProgram)):
        height, width = model.shape[2:4]  # None where the file leaves a side open
        if size is None:
            # a square where only the width is open; the usual side where the height is
            size = checked_side((height, width)) if height and width else height
        if isinstance(model, BlackBox) and model.takes_levels:
            values = {"mean": 0, "std": 1}
    plain = CenterCrop(size or 224)
    return adjusted(plain, channels=_channels_of_photos(model, plain.side), **values)


def _channels_of_photos(model: nn.Module, size: Side | None) -> int:
    """The number of channels of a model's photos: that of its first convolution if it is 1 or the
    model runs with it, else 3 (it may rearrange photos first)."""
    if isinstance(model, (BlackBox, OpenProgram)):
        return model.shape[1] or 3
    _, convolution = first_convolution(model)
    channels = 3 if convolution is None else convolution.in_channels
    if channels in (1, 3):  # those of photos, which need no trial
        return channels
    parameter = parameters_of(model)[0]  # there is one: the convolution's
    x = torch.zeros(1, channels, *sides_of(size or 224), dtype=parameter.dtype)
    try:
        with untouched(model), torch.no_grad():
            model(x.to(parameter.device))
    except Exception:  # whatever a model raises of inputs that are none of its own
        return 3
    return channels


def _attribute(model: nn.Module, inner: nn.Module, name: str) -> Any:
    """Return an attribute of a model or, if that has none, of the model ``inner`` that it is
    wrapped around; None where neither has it."""
    value = getattr(model, name, None)
    return getattr(inner, name, None) if value is None else value


def fixed_size(name: str) -> ModelError:
    """Return (not raise) the error for a ``size`` that is given for the model called ``name``,
    whose own preprocessing fixes it."""
    return ModelError(
        f"{option_name('size')} cannot be changed for a model that brings its own "
        f"preprocessing, got {name!r}; leave it out"
    )


def as_preprocess(preprocess: Any) -> Preprocess:
    """Return a caller's ``preprocess`` as a function from a PIL image to ``(C, H, W)``; an image
    processor of transformers is wrapped.
    """
    if (processed := huggingface.as_processed(preprocess)) is not None:
        return processed
    if not callable(preprocess):
        got = type(preprocess).__name__
        raise ModelError(
            f"preprocess must be a function of a PIL image, got {got}; use a transform or a lambda"
        )
    return cast("Preprocess", preprocess)


def resolve_preprocessing(
    classifier: Classifier,
    preprocess: Preprocess | None = None,
    *,
    size: Side | None = None,
    crop: CropLike = "center",
    channels: int | None = None,
    mean: Values = None,
    std: Values = None,
    interpolation: Interpolation | None = None,
) -> Preprocess:
    """How photos become inputs: the classifier's own preprocessing or the caller's, with the
    caller's values and crop. Warns of what is assumed; refuses what cannot be changed.
    """
    is_callers = preprocess is not None
    preprocess = adjusted(
        preprocess or classifier.preprocess,
        size=size if is_callers else None,  # a model's own preprocessing has the size already
        channels=channels,
        mean=mean,
        std=std,
        interpolation=interpolation,
    )
    preprocess = cropped(preprocess, crop, classifier.model)
    if not is_callers and classifier.assumed is not None:
        if size is None and isinstance(classifier.model, (BlackBox, OpenProgram)):
            size = classifier.model.shape[2]  # None, or what the file says: then it is not assumed
        values = {"size": size, "mean": mean, "std": std}
        said = [name for name, value in values.items() if value is not None]
        warning = _what_is_assumed(classifier.name, preprocess, said)
        if warning is not None:
            warn(warning)
    return preprocess


def _what_is_assumed(name: str, preprocess: Preprocess, said: Collection[str] = ()) -> str | None:
    """Return the sentence for a warning that says which of a preprocessing's size, mean and std are
    assumed, and how to give them; None where the caller has ``said`` them all."""
    missing = [option for option in ("size", "mean", "std") if option not in said]
    if not missing:
        return None
    origin = getattr(preprocess, "origin", None)  # those of timm and transformers have one
    if origin is None:
        # a function of the caller's, which has no plain form, is shown as it is
        with suppress(ModelError):
            preprocess = as_plain(preprocess, wanted="it")
    assumed = str(preprocess) if origin is None else f"{origin}, {preprocess}"
    arguments = ", ".join(f"{option}=" for option in missing)
    flags = ", ".join(f"--{option}" for option in missing)
    remedy = python_or_command(f"pass {arguments} or preprocess=", f"give {flags}")
    return (
        f"preprocess is not known for model {name!r}; assumed: {assumed}; {remedy}, or give the "
        "model an attribute preprocess"
    )
