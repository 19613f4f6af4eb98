"""torchvision's classifiers by name, with their own published weights, transforms and labels."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from explain.errors import ModelError, did_you_mean
from explain.models.classifier import CenterCrop, Classifier
from explain.models.weights import fit_weights, read_weights

BUNDLED = "bundled"


def torchvision_models() -> ModuleType:
    """Import ``torchvision.models``.

    Raises:
        ModelError: it is missing, or its compiled part was built for another torch.
    """
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"torchvision cannot be used with torch {torch.__version__} ({reason}); install a matching pair with "
            "'pip install --upgrade torch torchvision'. The bundled model and your own models work without it"
        ) from None


def list_models() -> list[str]:
    """Return the names that `load` takes: the bundled model first, then torchvision's classifiers."""
    models = torchvision_models()
    return [BUNDLED, *models.list_models(module=models)]


def load_torchvision(name: str, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Load a torchvision classifier with its published weights, or with those in a file of one's own.

    Raises:
        ModelError: unknown name, or weights that are not here and cannot be downloaded.
    """
    models = torchvision_models()
    known = list_models()
    if name not in known:
        raise ModelError(
            f"model {name!r} is unknown; {did_you_mean(name, known)} Your own is given as package.module:factory"
        )
    published = models.get_model_weights(name).DEFAULT
    preprocess = _transforms(published, size)
    if weights is not None:
        state = read_weights(weights)
        model = models.get_model(name, weights=None, num_classes=len(next(reversed(state.values()))), **_quiet(name))
        fit_weights(model, state, weights)
        same = len(published.meta["categories"]) == len(next(reversed(state.values())))
        return Classifier(model.eval(), preprocess, published.meta["categories"] if same else None, name)
    model = models.get_model(name, weights=None, **_quiet(name))
    model.load_state_dict(_fetch(name, published))
    return Classifier(model.eval(), preprocess, published.meta["categories"], f"{name} ({published})")


def _quiet(name: str) -> dict[str, Any]:
    # These two warn about their slow initialisation unless told what to do; the values are replaced anyway.
    return {"init_weights": False} if name in ("googlenet", "inception_v3") else {}


def _transforms(published: Any, size: int | None) -> Any:
    preprocess = published.transforms()
    if size is None:
        return preprocess
    if size < 1:
        raise ModelError(f"size must be at least 1 pixel, got {size}")
    crop, resize = preprocess.crop_size[0], preprocess.resize_size[0]
    return CenterCrop(size, crop / max(crop, resize), tuple(preprocess.mean), tuple(preprocess.std))


def _fetch(name: str, published: Any) -> Any:
    cached = Path(torch.hub.get_dir()) / "checkpoints" / published.url.rsplit("/", 1)[1]
    try:
        return published.get_state_dict(progress=True, check_hash=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())[:100]
        raise ModelError(
            f"model {name!r} needs its weights at {str(cached)!r}, and they could not be downloaded ({reason}); go "
            "online once, copy the file there, give your own with --weights, or use the bundled model"
        ) from None
