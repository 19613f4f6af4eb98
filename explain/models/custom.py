"""The user's own model, named as ``package.module:factory``."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

from torch import nn

from explain.errors import ModelError, did_you_mean, option
from explain.models.classifier import Classifier
from explain.models.given import as_classifier
from explain.models.weights import describe_weights, fit_weights, read_weights


def load_custom(name: str, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Import ``module`` (the current folder counts), call ``factory()``, and load weights into what it returns.

    The factory returns an ``nn.Module``, or a `Classifier` that brings preprocessing and labels along. What a module
    says about them itself is taken; see `explain.models.as_classifier`.

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
