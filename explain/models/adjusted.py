"""A preprocessing with another mean, standard deviation or interpolation."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, get_args

from explain.errors import ModelError, either, option, shown, warn
from explain.images import Preprocess
from explain.models.classifier import CenterCrop, Classifier, Interpolation
from explain.models.crops import CropLike, as_center, cropped

Values = float | Sequence[float] | None


def adjusted(
    preprocess: Preprocess, *, mean: Values = None, std: Values = None, interpolation: Interpolation | None = None
) -> Preprocess:
    """Return a preprocessing with other values; None leaves one as it is.

    Args:
        preprocess: one that cuts out the centre.
        mean: of each channel of the training data, of pixels from 0 to 1; a number stands for all channels.
        std: its standard deviation.
        interpolation: "bilinear" or "bicubic".

    Raises:
        ModelError: a value cannot be meant, or the preprocessing is one that cannot be changed.

    >>> adjusted(CenterCrop(8), mean=0.5, std=(0.2, 0.3, 0.4))
    CenterCrop(side=8, crop=0.875, mean=(0.5, 0.5, 0.5), std=(0.2, 0.3, 0.4), interpolation='bilinear')
    """
    if mean is None and std is None and interpolation is None:
        return preprocess
    if interpolation is not None and interpolation not in get_args(Interpolation):
        known = " or ".join(map(repr, get_args(Interpolation)))
        raise ModelError(f"{option('interpolation')} must be {known}, got {shown(interpolation)}; use 'bilinear'")
    center = as_center(preprocess)
    if center is None:
        raise ModelError(
            f"{option('mean')}, {option('std')} and {option('interpolation')} cannot be changed for "
            f"{type(preprocess).__name__}; "
            f"{either('pass preprocess=', 'leave them out, and set them there')}"
        )
    given: dict[str, Any] = {} if interpolation is None else {"interpolation": interpolation}
    if mean is not None:
        given["mean"] = _three(mean, "mean", 0.0, 1.0)
    if std is not None:
        given["std"] = _three(std, "std", 1e-6, math.inf)
    return replace(center, **given)


def _three(values: Any, name: str, least: float, most: float) -> tuple[float, ...]:
    """A number for each channel."""
    several = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else [values] * 3
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in several)
    if len(several) != 3 or not numbers or not all(math.isfinite(value) for value in several):
        raise ModelError(f"{option(name)} must be a number, or one for each of the three channels, got {shown(values)}")
    if not all(least <= value <= most for value in several):
        wanted = "from 0 to 1" if most == 1 else "above 0"
        remedy = (
            "divide by 255 what was measured on pixels from 0 to 255"
            if max(several) > 1
            else "use 0.5, or leave it out"
        )
        raise ModelError(f"{option(name)} must be {wanted} for pixels from 0 to 1, got {shown(values)}; {remedy}")
    return tuple(float(value) for value in several)


def seen(
    found: Classifier,
    own: Preprocess | None = None,
    *,
    size: int | None = None,
    crop: CropLike = "center",
    mean: Values = None,
    std: Values = None,
    interpolation: Interpolation | None = None,
) -> Preprocess:
    """Return how a classifier's photos become its inputs, with the caller's ``own`` preprocessing or values.

    What is assumed, since neither the model nor the caller says it, is warned of.

    Raises:
        ModelError: the preprocessing is one that cannot be changed in this way.
    """
    preprocess = found.preprocess if own is None else own
    if own is None and found.assumed is not None:
        values = {"size": size, "mean": mean, "std": std}
        known = [name for name, value in values.items() if value is not None]
        told: str | None = found.assumed
        if isinstance(preprocess, CenterCrop) and (mean is not None or std is not None):
            told = what_is_assumed(found.name, preprocess, known)
        if told is not None:
            warn(told)
    preprocess = adjusted(preprocess, mean=mean, std=std, interpolation=interpolation)
    return cropped(preprocess, crop, found.model)


def what_is_assumed(name: str, center: CenterCrop, known: Collection[str] = ()) -> str | None:
    """Say what is assumed of the preprocessing of a model that says nothing, but for what is ``known``.

    >>> what_is_assumed("Net", CenterCrop(32), {"mean"}).split("; ")[1]
    "assumed: a centre crop of 32 pixels, ImageNet's standard deviation"
    >>> what_is_assumed("Net", CenterCrop(32), {"size", "mean", "std"})
    """
    words = [word for option, word in (("mean", "mean"), ("std", "standard deviation")) if option not in known]
    if not words and "size" in known:
        return None
    assumed = [f"a centre crop of {center.side} pixels", *([f"ImageNet's {' and '.join(words)}"] if words else [])]
    return not_known(name, ", ".join(assumed))


def not_known(name: str, assumed: str) -> str:
    """Say that a model says nothing of its preprocessing, what is assumed, and how to tell it."""
    remedy = either(
        "pass preprocess=, or give the model an attribute preprocess",
        "give --size, --mean and --std, or give the model an attribute preprocess",
    )
    return f"preprocess is not known for model {name!r}; assumed: {assumed}; {remedy}"
