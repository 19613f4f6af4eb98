"""What comes with a model of transformers: its labels, and the image processor that belongs to
it."""

import importlib
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

import torch
from PIL import Image
from torch import nn

from explain._utils.errors import ModelError, option_name, python_or_command, quiet
from explain.models.preprocessing import (
    CenterCrop,
    Interpolation,
    Side,
    StretchedPhoto,
    sides_of,
)
from explain.targets.tokenizer import beside_weights

SHOWN = ("size", "crop_size", "crop_pct", "image_mean", "image_std", "resample")
"""The values of an image processor that its text shows."""


@dataclass(frozen=True, eq=False, repr=False)
class Processed:
    """An image processor of transformers as a preprocessing: a photo in, ``(C, H, W)`` out.
    ``options`` take the place of the processor's own values.
    """

    processor: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    origin: ClassVar[str] = "the usual image processor of its kind"

    def __call__(self, image: Image.Image) -> torch.Tensor:
        processed = self.processor(images=image.convert("RGB"), return_tensors="pt", **self.options)
        return processed["pixel_values"][0]

    def with_values(self, values: Mapping[str, Any]) -> "Processed":
        """Return this preprocessing with other values: `adjusted` passes "side", "mean", "std" and
        "interpolation" by these names, those that change."""
        side = values.get("side")
        processed = self if side is None else self.resized(*sides_of(side))
        options = dict(processed.options)
        for name in ("mean", "std"):
            if name in values:
                options[f"image_{name}"] = list(values[name])
        if "interpolation" in values:
            options["resample"] = Image.Resampling[values["interpolation"].upper()]
        return Processed(self.processor, options)

    def as_plain(self) -> CenterCrop | StretchedPhoto | None:
        """Return the `CenterCrop` or `StretchedPhoto` that the image processor amounts to, or None
        where it does anything else, such as another scale or a size that is no square."""
        # as the plain ones do
        divides_by_255 = math.isclose(self._value("rescale_factor") or 1.0, 1 / 255)
        divides_by_255 = divides_by_255 and bool(self._value("do_rescale"))
        if not divides_by_255 or not self._value("do_resize"):
            return None
        is_normalized = self._value("do_normalize")
        resample = self._value("resample")
        if resample is None:  # not 0, which is nearest
            resample = Image.Resampling.BILINEAR
        values: dict[str, Any] = {
            "mean": tuple(self._value("image_mean")) if is_normalized else (0.0,) * 3,
            "std": tuple(self._value("image_std")) if is_normalized else (1.0,) * 3,
            "interpolation": Image.Resampling(int(resample)).name.lower(),
        }
        size = self._sides("size")
        crop = self._crop
        sides = crop or size
        is_square = "height" in sides and sides["height"] == sides.get("width")
        if not is_square or values["interpolation"] not in get_args(Interpolation):
            return None
        side = sides["height"]
        if not crop:
            return StretchedPhoto(side, **values)
        shorter = size.get("shortest_edge")
        return None if shorter is None else CenterCrop(side, min(1.0, side / shorter), **values)

    def resized(self, height: int, width: int) -> "Processed":
        """Return the same for images of another size, cut from as large a share of the photo as
        before.
        """
        size = self._sides("size")
        crop = self._crop
        sides = {"height": height, "width": width}
        options = dict(self.options)
        if crop:
            share = height / crop["height"]
            options["size"] = {name: max(1, round(side * share)) for name, side in size.items()}
            options["crop_size"] = sides
        elif "height" in size:
            options["size"] = sides
        elif "shortest_edge" in size:
            edges = {"shortest_edge": height, "longest_edge": max(height, width)}
            options["size"] = {name: edges[name] for name in size}
        else:
            name = type(self.processor).__name__
            remedy = python_or_command("set it there, and pass it as preprocess=", "set it there")
            raise ModelError(
                f"{option_name('size')} cannot be changed for {name}, whose size is {size}; "
                f"{remedy}"
            )
        return Processed(self.processor, options)

    @property
    def _crop(self) -> dict[str, int]:
        """The sides of what is cut out in the end; empty where nothing is."""
        return self._sides("crop_size") if self._value("do_center_crop") else {}

    def _sides(self, name: str) -> dict[str, int]:
        """The processor's "size" or "crop_size" in pixels, by edge ("height", "shortest_edge",
        ...), without edges that are None."""
        sides = dict(self._value(name) or {})
        return {edge: side for edge, side in sides.items() if side is not None}

    def _value(self, name: str) -> Any:
        """The value that the processor will use for an option: from ``options``, else its own, or
        None."""
        return self.options.get(name, getattr(self.processor, name, None))

    def __repr__(self) -> str:
        """The processor with its main values; warnings about assumed preprocessing show this
        text."""
        values: dict[str, Any] = {}
        for name in SHOWN:
            values[name] = self._sides(name) if name.endswith("size") else self._value(name)
        shown = ", ".join(f"{name}={value!s}" for name, value in values.items() if value)
        return f"{type(self.processor).__name__}({shown})"


def as_processed(processor: Any) -> Processed | None:
    """An image processor of transformers (or that inside a processor of images and texts) as a
    preprocessing; None for anything else. Known by its methods: nothing is imported.
    """
    inner = getattr(processor, "image_processor", processor)
    can_preprocess = callable(getattr(inner, "preprocess", None))
    if can_preprocess and hasattr(inner, "model_input_names"):
        return Processed(inner)
    return None


def config_of(model: nn.Module) -> Any:
    """Return the configuration of a model of transformers, or None."""
    config = getattr(model, "config", None)
    named = None if isinstance(config, Mapping) else getattr(config, "model_type", None)
    return config if isinstance(named, str) else None


def labels(config: Any) -> list[str] | None:
    """Return the class labels of a transformers configuration in the order of the classes; None
    where they say no more than LABEL_0, LABEL_1, ..."""
    by_index = getattr(config, "id2label", None)
    if not isinstance(by_index, dict) or set(by_index) != set(range(len(by_index))):
        return None
    names = [str(by_index[i]) for i in range(len(by_index))]
    return None if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else names


def preprocessing(
    model: nn.Module, config: Any, size: Side | None
) -> tuple[Processed | None, bool]:
    """A transformers model's image processor, and whether it is known to be its own: it comes
    along, lies beside the weights, or is the family's usual one. Nothing is downloaded.
    """
    processed = as_processed(getattr(model, "image_processor", None))
    processed = processed or as_processed(getattr(model, "processor", None))
    processed = processed or as_processed(beside_weights(config, "AutoImageProcessor"))
    is_own = processed is not None
    processed = processed or _usual(config)
    if size is None and not is_own:  # the family's processor does not know this model's size
        size = getattr(config, "image_size", None)
    # a configuration may say no size, or in a form that nothing is known of
    if processed is None or not isinstance(size, (int, list, tuple)):
        return processed, is_own
    height, width = (size, size) if isinstance(size, int) else size
    return processed.resized(height, width), is_own


def _usual(config: Any) -> Processed | None:
    """Return the image processor that transformers has for the family of a configuration, with its
    default values; None where there is none."""
    # a family without one, or a release of transformers that keeps them elsewhere
    with suppress(Exception), quiet():
        auto = importlib.import_module("transformers.models.auto.image_processing_auto")
        # classes by backend, a pair of a slow and a fast one, or one: it depends on the release
        kinds = auto.IMAGE_PROCESSOR_MAPPING[type(config)]
        if isinstance(kinds, dict):
            kinds = (kinds.get("torchvision"), kinds.get("pil"))
        if not isinstance(kinds, tuple):
            kinds = (kinds,)
        return Processed(next(kind for kind in kinds if kind is not None)())
    return None
