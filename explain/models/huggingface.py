"""What comes with a model of transformers: its labels, and the image processor that belongs to it."""

import importlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import nn

from explain._utils.errors import ModelError, either, option, quiet
from explain.models.preprocessing import Values, of_channels

KEPT = ("size", "crop_size", "crop_pct", "image_mean", "image_std", "resample")  # what decides how a photo is seen


@dataclass(frozen=True, eq=False, repr=False)
class Processed:
    """An image processor of transformers as a preprocessing: a photo in, ``(C, H, W)`` out."""

    processor: Any

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return self.processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]

    def with_values(self, mean: Values, std: Values) -> "Processed":
        """Return the same with another mean and standard deviation of the channels; None leaves one as it is."""
        if mean is None and std is None:
            return self
        own = _copied(self.processor)
        for name, values in (("mean", mean), ("std", std)):
            if values is not None:
                setattr(own, f"image_{name}", list(of_channels(values, name)))
        return Processed(own)

    def __repr__(self) -> str:
        values = {name: getattr(self.processor, name, None) for name in KEPT}
        plain = {name: _sides(value) if name.endswith("size") else value for name, value in values.items()}
        told = ", ".join(f"{name}={value!s}" for name, value in plain.items() if value)
        return f"{type(self.processor).__name__}({told})"


def _copied(processor: Any) -> Any:
    """Return a copy to change: the caller's own stays as it is."""
    return type(processor).from_dict(processor.to_dict())


def _sides(value: Any) -> dict[str, int]:
    """Return a size of an image processor as a plain dictionary of what is set in it."""
    return {key: side for key, side in dict(value or {}).items() if side is not None}


def as_processed(thing: Any) -> Processed | None:
    """Return an image processor, or the one in a processor of several kinds, as a preprocessing; None for others."""
    inner = getattr(thing, "image_processor", thing)
    is_processor = callable(getattr(inner, "preprocess", None)) and hasattr(inner, "model_input_names")
    return Processed(inner) if is_processor else None


def config_of(model: nn.Module) -> Any:
    """Return the configuration of a model of transformers, or None."""
    config = getattr(model, "config", None)
    named = None if isinstance(config, Mapping) else getattr(config, "model_type", None)
    return config if isinstance(named, str) else None


def labels(config: Any) -> list[str] | None:
    """Return the labels of a configuration in the order of the classes, if they say more than LABEL_0, LABEL_1, ..."""
    given = getattr(config, "id2label", None)
    if not isinstance(given, dict) or set(given) != set(range(len(given))):
        return None
    names = [str(given[i]) for i in range(len(given))]
    return None if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else names


def preprocessing(model: nn.Module, config: Any, size: int | None) -> tuple[Processed | None, bool]:
    """Return the image processor of a model of transformers, and whether it is known to be its own.

    It is the one that comes along with the model, or the one that lies where the model was loaded from, or, assumed,
    the usual one of the model's family at the size that the configuration names. Nothing is downloaded.
    """
    own = as_processed(getattr(model, "image_processor", None)) or as_processed(getattr(model, "processor", None))
    source = getattr(config, "_name_or_path", None)
    if own is None and source:
        with suppress(Exception), quiet():  # it may not be here; a file of others may be wrong in any way
            auto = importlib.import_module("transformers").AutoImageProcessor
            own = Processed(auto.from_pretrained(source, local_files_only=True, trust_remote_code=False))
    if own is not None:
        return _resized(own, size), True
    named = getattr(config, "image_size", None)
    if isinstance(named, (list, tuple)) and len(named) == 2:
        named = (int(named[0]), int(named[1]))
    usual = _usual(config)
    return usual and _resized(usual, size or (named if isinstance(named, (int, tuple)) else None)), False


def _usual(config: Any) -> Processed | None:
    """Return the image processor that transformers has for the model's family, with its own values."""
    with suppress(Exception), quiet():  # a family without one, or a release of transformers that keeps them elsewhere
        auto = importlib.import_module("transformers.models.auto.image_processing_auto")
        known = auto.IMAGE_PROCESSOR_MAPPING[type(config)]
        if isinstance(known, dict):
            known = (known.get("torchvision"), known.get("pil"))
        kinds = known if isinstance(known, tuple) else (known,)
        return Processed(next(kind for kind in kinds if kind is not None)())
    return None


def _resized(processed: Processed, size: int | tuple[int, int] | None) -> Processed:
    """Return an image processor whose images have another size, cut from as large a share of the photo as before."""
    if size is None:
        return processed
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < 1:
        raise ModelError(f"size must be at least 1 pixel, got {min(height, width)}")
    own = processed.processor
    given, crop = _sides(getattr(own, "size", None)), _sides(getattr(own, "crop_size", None))
    cut = crop if getattr(own, "do_center_crop", False) else {}
    if not {"shortest_edge", "height"} & set(given):
        raise ModelError(
            f"{option('size')} cannot be changed for {type(own).__name__}, whose size is {given}; "
            f"{either('set it there, and pass it as preprocess=', 'set it there')}"
        )
    share = height / (cut.get("height") or given.get("height") or given["shortest_edge"])
    values = {"height": height, "width": width, "shortest_edge": height, "longest_edge": max(height, width)}
    own = _copied(own)
    own.size = {key: max(1, round(v * share)) if cut else values.get(key, v) for key, v in given.items()}
    if cut:
        own.crop_size = {"height": height, "width": width}
    return Processed(own)
