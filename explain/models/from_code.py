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
from explain.models.attached import as_classifier, fixed_size
from explain.models.classifier import Classifier
from explain.models.preprocessing import Side
from explain.models.weights import with_weights


def load_custom(
    name: str, weights: str | Path | None = None, size: Side | None = None
) -> Classifier:
    """The model of ``package.module:factory`` or ``./file.py:factory``, with weights: the factory
    gives an ``nn.Module`` (`as_classifier`) or a `Classifier`. Its errors come through.
    """
    model = made_by_code(name)
    if isinstance(model, nn.Module):
        model = as_classifier(model, name=name, size=size)
    elif size is not None and isinstance(model, Classifier):
        raise fixed_size(name)
    if not isinstance(model, Classifier):
        raise ModelError(
            f"model {name!r} must be or return an nn.Module, got {type(model).__name__}"
        )
    return model if weights is None else with_weights(model, weights)


def made_by_code(name: str) -> Any:
    """What ``package.module:factory`` or ``./file.py:factory`` is, or what it returns if it is a
    function."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ModelError(
            f"model must be given as package.module:factory or ./file.py:factory, got {name!r}"
        )
    module = _module_of_file(name, Path(where)) if where.endswith(".py") else _module(name, where)
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, [key for key in vars(module) if key[0] != "_"])
        raise ModelError(f"model {name!r}: {where} has no {attribute!r}; {hint}")
    model = getattr(module, attribute)
    if callable(model) and not isinstance(model, (nn.Module, Classifier)):
        return model()
    return model


def _module(name: str, where: str) -> ModuleType:
    """Import the module with the dotted name ``where``, for the model called ``name``; the current
    folder is put on ``sys.path``."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        # the module itself, or a package that it is in
        is_missing = error.name is not None and f"{where}.".startswith(f"{error.name}.")
        if not is_missing:
            raise  # the user's module exists, and misses an import of its own
        raise ModelError(
            f"model {name!r}: no module named {error.name!r}; run from its folder or install it"
        ) from None


def _module_of_file(name: str, path: Path) -> ModuleType:
    """Import a Python file once, for the model ``name``, with its folder on ``sys.path``; in
    ``sys.modules`` under a hash of the path, as another may have the same file name.
    """
    if not path.is_file():
        raise ModelError(
            f"model {name!r} must name a file, but there is no {str(path)!r}; check the path"
        )
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module_name = f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    if module_name not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:  # an interrupt too must not leave half a module behind
            del sys.modules[module_name]
            raise
    return sys.modules[module_name]
