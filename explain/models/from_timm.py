"""Classifiers of timm, with their published weights, transforms and labels."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, get_args

import torch
from PIL import Image
from torch import nn

from explain._utils.errors import ModelError, did_you_mean, reason_of
from explain.models.classifier import Classifier
from explain.models.files import TIMM
from explain.models.from_torchvision import UNUSABLE, no_torchvision, not_downloaded
from explain.models.preprocessing import (
    CenterCrop,
    Interpolation,
    Side,
    StretchedPhoto,
    WholePhoto,
    sides_of,
)
from explain.models.weights import describe_weights, fit_weights, read_weights


@dataclass(frozen=True, eq=False, repr=False)
class TimmTransform:
    """The transform that timm makes of a configuration: a photo in, ``(C, H, W)`` out."""

    config: Mapping[str, Any]

    origin: ClassVar[str] = "what timm has for published weights with other classes"

    @cached_property
    def transform(self) -> Any:
        return importlib.import_module("timm.data").create_transform(**self.config)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return self.transform(image)

    def with_values(self, values: Mapping[str, Any]) -> "TimmTransform":
        """Return this transform with other values: `adjusted` passes "side", "mean", "std" and
        "interpolation" by these names, those that change."""
        config = {**self.config, **values}
        side = config.pop("side", None)
        if side is not None:
            config["input_size"] = (3, *sides_of(side))
        return TimmTransform(config)

    def as_plain(self) -> CenterCrop | WholePhoto | None:
        """Return the `CenterCrop`, `StretchedPhoto` or `WholePhoto` that the transform amounts to,
        or None."""
        _, height, width = self.config["input_size"]
        mode = self.config["crop_mode"]
        share = self.config["crop_pct"]
        interpolation = self.config["interpolation"]
        if height != width or interpolation not in get_args(Interpolation):
            return None
        values = {
            "side": height,
            "mean": tuple(self.config["mean"]),
            "std": tuple(self.config["std"]),
            "interpolation": interpolation,
        }
        if mode == "center":
            return CenterCrop(crop=share, **values)
        if share != 1:  # the plain ones that scale the whole photo cut nothing off
            return None
        # the third mode, "border", keeps the proportions and pads, as a whole photo does
        return StretchedPhoto(**values) if mode == "squash" else WholePhoto(**values)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.config.items())
        return f"TimmTransform({values})"


def load_timm(name: str, weights: str | Path | None = None, size: Side | None = None) -> Classifier:
    """Load one of timm's classifiers, named like ``timm:convnext_tiny``, with its published weights
    or those in a file.
    """
    try:
        timm: ModuleType = importlib.import_module("timm")
    except UNUSABLE as error:
        if "torchvision" in str(error):  # which timm imports
            raise no_torchvision(error) from None
        raise ModelError(
            f"timm must be installed for the model {name!r}, but cannot be imported "
            f"({reason_of(error)}); run pip install 'explain-hooks[timm]'"
        ) from None
    plain = name.removeprefix(TIMM)
    architecture, _, tag = plain.partition(".")  # such as "resnet18" and "a1_in1k"
    # without the names that timm has given up, for which it has no configuration
    names = timm.list_models(include_tags=bool(tag))
    if plain not in names:
        raise ModelError(f"model {name!r} is unknown to timm; {did_you_mean(plain, names)}")
    published = timm.get_pretrained_cfg(plain)
    options: dict[str, Any] = {}
    if size is not None and published.fixed_input_size:
        options["img_size"] = size  # such a network is built for its size
    if weights is None:
        try:
            model: nn.Module = timm.create_model(plain, pretrained=True, **options)
        except (OSError, RuntimeError) as error:
            # timm keeps what it downloads in one of several places: none is named
            raise not_downloaded(name, where="", error=error) from None
        origin = f"{architecture}.{published.tag}" if published.tag else ""
    else:
        state = read_weights(weights)
        head_name = published.classifier
        if isinstance(head_name, (tuple, list)) and head_name:  # distilled networks have several
            head_name = head_name[0]
        head_weight = state.get(f"{head_name}.weight")  # (classes, features)
        classes = published.num_classes if head_weight is None else len(head_weight)
        model = timm.create_model(plain, pretrained=False, num_classes=classes, **options)
        fit_weights(model, state, weights)
        origin = describe_weights(weights)
    preprocess, labels = timm_transform_and_labels(timm, model, size)
    # weights for other classes than published were trained by others, who may have transformed
    # photos in another way: then what is assumed is said
    assumed = None if has_configured_classes(model) else preprocess.origin
    return Classifier(model.eval(), preprocess, labels, name, weights=origin, assumed=assumed)


def timm_config(model: nn.Module) -> Mapping[str, Any] | None:
    """Return the ``pretrained_cfg`` of a model of timm, or None for another model.
    Models of transformers that wrap one of timm have it inside their own configuration.
    """
    for holder in (model, getattr(model, "config", None)):
        config = None if isinstance(holder, Mapping) else getattr(holder, "pretrained_cfg", None)
        if isinstance(config, Mapping) and "mean" in config and "input_size" in config:
            return config
    return None


def has_configured_classes(model: nn.Module) -> bool:
    """Whether a model of timm has as many classes as its configuration says.
    One that was made with another ``num_classes=``, to be trained, has not.
    """
    classes = (timm_config(model) or {}).get("num_classes")
    # where either says nothing, nothing is known to differ
    return classes is None or classes == getattr(model, "num_classes", classes)


def timm_transform_and_labels(
    timm: ModuleType, model: nn.Module, size: Side | None = None
) -> tuple[TimmTransform, Sequence[str] | None]:
    """The preprocessing (``size`` is another side of the input) and the labels of a timm model's
    configuration, as timm makes them; labels are None where unknown.
    """
    # a model that was made with another size has it here
    sides = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is not None:
        sides = sides_of(size)
    options = {"input_size": (3, *sides)} if isinstance(sides, Sequence) and len(sides) == 2 else {}
    published = dict(timm_config(model) or {})
    config = timm.data.resolve_data_config(options, pretrained_cfg=published, model=model)
    return TimmTransform(config), _labels(timm, model, published)


def _labels(timm: ModuleType, model: nn.Module, config: Mapping[str, Any]) -> list[str] | None:
    """The labels of a timm model: those in its configuration, or those of the set of ImageNet that
    has as many classes; None where neither fits."""
    classes = getattr(model, "num_classes", None)
    names = config.get("label_names")
    if names is not None and len(names) == classes:
        descriptions = config.get("label_descriptions") or {}
        return [str(descriptions.get(name, name)) for name in names]
    subset = timm.data.infer_imagenet_subset({"num_classes": classes})
    if subset is None:
        return None
    info = timm.data.ImageNetInfo(subset)
    return [info.index_to_description(i) for i in range(info.num_classes())]
