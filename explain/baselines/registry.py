"""Baselines by name."""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from typing import TypeAlias

import torch

from explain._utils.errors import ArgumentError, BaselineError, shown
from explain._utils.specs import MethodSpec, SpecError, read_written
from explain._utils.spelling import did_you_mean
from explain.baselines.base import Baseline, Preprocess, known
from explain.baselines.replacements import Black, Constant, OtherPhoto, Zero

BaselineLike: TypeAlias = "str | float | torch.Tensor | Baseline"


def list_baselines(pattern: str = "*") -> list[str]:
    """Return the names of the baselines that match a glob pattern, in alphabetical order.

    >>> list_baselines()
    ['black', 'blur', 'defocus', 'mean', 'neighbours', 'noise', 'zero']
    """
    return sorted(name for name in known if fnmatch.fnmatchcase(name, pattern))


def get_baseline(baseline: BaselineLike, preprocess: Preprocess | None = None) -> Baseline:
    """Return what stands for "absent": a baseline for a name, a number or a tensor.

    Args:
        baseline: a name from `list_baselines`, also with options; a number for all pixels, in the units of the model; a
            tensor ``(C, H, W)``, which is another photo; or a baseline, which is returned as it is.
        preprocess: what makes a photo the model's input, for the baseline "black", which must know it.

    Raises:
        BaselineError: the name is unknown, or the object is no baseline.

    >>> get_baseline("blur"), get_baseline("blur(sigma=3)")
    (Blur(kernel=11, sigma=5.0), Blur(kernel=11, sigma=3.0))
    >>> get_baseline(0), get_baseline(0.5)
    (Zero(), Constant(value=0.5))
    """
    if isinstance(baseline, (int, float)) and not isinstance(baseline, bool):
        return Zero() if baseline == 0 else Constant(baseline)
    if isinstance(baseline, torch.Tensor):
        return OtherPhoto(baseline)
    if isinstance(baseline, str):
        baseline = _by_text(baseline)
    if isinstance(baseline, type):
        raise BaselineError(
            f"baseline must be a name or an object, got the class {baseline.__name__}; use {baseline.__name__}()"
        )
    if not isinstance(baseline, Baseline):
        raise BaselineError(f"baseline must be a name or a baseline, got {shown(baseline)}; use 'blur'")
    return Black.of(preprocess) if preprocess is not None and baseline == Black() else baseline


def _by_text(text: str) -> Baseline:
    """The baseline of a name, which may have options."""
    try:
        spec = read_written(text) if "(" in text else MethodSpec(text.strip().lower())
        if spec.name == "photo":
            raise BaselineError("baseline 'photo' must be given as an object; use explain.baselines.OtherPhoto(tensor)")
        if spec.name not in known:
            raise BaselineError(f"baseline {shown(text)} is unknown; {did_you_mean(spec.name, list_baselines())}")
        if spec.values:
            raise BaselineError(f"baseline {spec.name} must be given options by name, got {shown(spec.values[0])}")
        return replace(known[spec.name], **spec.options)
    except SpecError as error:
        raise BaselineError(f"baseline {error}; write it like blur(sigma=3)") from None
    except ArgumentError as error:
        raise BaselineError(f"baseline {error}") from None
