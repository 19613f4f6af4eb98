"""Classifiers of torchvision, with their published weights, transforms and labels."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import torch

from explain._utils.errors import ModelError, did_you_mean, reason_of
from explain.models.bundled import LOADERS
from explain.models.classifier import Classifier
from explain.models.preprocessing import Side, adjusted
from explain.models.weights import describe_weights, fit_weights, read_weights

UNUSABLE = (ImportError, RuntimeError, OSError, AttributeError)
"""What importing a package raises that was built for another release of torch."""
RESCALING = ("googlenet", "inception_v3")
"""Networks that rescale their input where they carry published weights; weights tuned from those
expect the same."""
OLD_DENSENET = r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)"
"""Names in old files of DenseNets' weights, which had a dot more: "norm.1" for "norm1"."""


def torchvision_models() -> ModuleType:
    """Import ``torchvision.models``."""
    try:
        return importlib.import_module("torchvision.models")
    except UNUSABLE as error:
        raise no_torchvision(error) from None


def no_torchvision(error: Exception) -> ModelError:
    """Return (not raise) the error that says why torchvision cannot be used, from the error of its
    import."""
    return ModelError(
        f"torchvision cannot be used with torch {torch.__version__} ({reason_of(error)}); run 'pip "
        "install --upgrade torch torchvision', or use a model that comes along or your own"
    )


def list_models() -> list[str]:
    """Return the names that `load` takes: the models of this package, the default first, then
    torchvision's."""
    models = torchvision_models()
    return [*LOADERS, *models.list_models(module=models)]


def load_torchvision(
    name: str, weights: str | Path | None = None, size: Side | None = None
) -> Classifier:
    """Load a torchvision classifier with its published weights, or those in a file of yours."""
    models = torchvision_models()
    names = list_models()
    if name not in names:
        raise ModelError(
            f"model {name!r} is unknown (your own is given as package.module:factory, or "
            f"./file.py:factory); {did_you_mean(name, names)}"
        )
    published = models.get_model_weights(name).DEFAULT
    categories = published.meta["categories"]
    preprocess = adjusted(published.transforms(), size=size)
    if weights is None:
        # as torchvision does: some builders set more than parameters by their published weights
        try:
            model = models.get_model(name, weights=published)
        except (OSError, RuntimeError) as error:
            cached = Path(torch.hub.get_dir()) / "checkpoints" / published.url.rsplit("/", 1)[1]
            where = f" at {str(cached)!r}"
            raise not_downloaded(name, where=where, error=error) from None
        return Classifier(model.eval(), preprocess, categories, name, weights=str(published))
    # as torchvision reads them: a new network has the names without that dot
    state = {
        re.sub(OLD_DENSENET, r"\1\2", key): tensor for key, tensor in read_weights(weights).items()
    }
    # Without their initial weights, which take long to draw and are replaced at once. And with the
    # rescaling of inputs that these have with published weights, as tuned ones expect the same.
    options = {"init_weights": False, "transform_input": True} if name in RESCALING else {}
    model = models.get_model(name, weights=None, **options)
    head_bias = list(model.state_dict())[-1]  # of the last layer, one number for each class
    assumed = None
    if head_bias in state and len(state[head_bias]) != len(categories):
        classes = len(state[head_bias])
        model = models.get_model(name, weights=None, num_classes=classes, **options)
        categories = None
        # such weights were trained by others, with a preprocessing that the file does not say
        assumed = "that of the published weights"
    fit_weights(model, state, weights)
    origin = describe_weights(weights)
    return Classifier(model.eval(), preprocess, categories, name, weights=origin, assumed=assumed)


def not_downloaded(name: str, where: str, error: Exception) -> ModelError:
    """Return (not raise) the error that says why the weights of the model called ``name`` could not
    be downloaded; ``where`` says where they would lie, or is empty."""
    reason = reason_of(getattr(error, "reason", error))
    return ModelError(
        f"model {name!r} needs its weights{where}, which could not be downloaded ({reason}); "
        "go online once, copy the file there, give your own with --weights, or use the model "
        "'tiny'"
    )
