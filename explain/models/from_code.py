"""Models of the user's code: ``package.module:factory`` or ``./file.py:factory``."""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from explain._utils.errors import ModelError, did_you_mean
from explain.models.attached import _fixed_size, as_classifier
from explain.models.classifier import Classifier
from explain.models.weights import with_weights


def load_custom(name: str, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Import ``module`` (the current folder counts) or a file, call its factory, and load weights into the model.

    The factory returns an ``nn.Module``, or a `Classifier` that brings preprocessing and labels along. What a module
    says about them itself is taken; see `as_classifier`.

    Raises:
        ModelError: there is no such module or factory, or it does not give a model. What the factory itself raises
            comes through.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ModelError(f"model must be given as package.module:factory or ./file.py:factory, got {name!r}")
    is_file = where.endswith(".py")
    folder = Path(where).resolve().parent if is_file else Path.cwd()
    if is_file and not Path(where).is_file():
        raise ModelError(f"model {name!r} must name a file, but there is no {where!r}; check the path")
    if str(folder) not in sys.path and (is_file or "" not in sys.path):
        sys.path.insert(0, str(folder))
    try:
        module = _module_of_file(Path(where).resolve()) if is_file else importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(error.name + ".")):
            raise  # the user's module exists, and misses an import of its own
        raise ModelError(f"model {name!r}: no module named {error.name!r}; run from its folder or install it") from None
    if not hasattr(module, attribute):
        known = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ModelError(f"model {name!r}: {where} has no {attribute!r}; {did_you_mean(attribute, known)}")
    found = getattr(module, attribute)
    if callable(found) and not isinstance(found, (nn.Module, Classifier)):
        found = found()
    if isinstance(found, nn.Module):
        found = as_classifier(found, name=name, size=size)
    elif size is not None and isinstance(found, Classifier):
        raise _fixed_size(name)
    if not isinstance(found, Classifier):
        raise ModelError(f"model {name!r} must be or return an nn.Module, got {type(found).__name__}")
    return found if weights is None else with_weights(found, weights)


def _module_of_file(path: Path) -> ModuleType:
    """Import a file, under a name of its own: another module may have the same file name."""
    name = f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    if name not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
