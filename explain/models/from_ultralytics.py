"""Networks of ultralytics (YOLO, RT-DETR): those in models and checkpoints, how they take a photo,
and their labels."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import nn

from explain._utils.errors import ModelError, optional
from explain.models.preprocessing import CenterCrop, Side, StretchedPhoto, WholePhoto, sides_of

SIDE = 640  # pixels, where neither the caller nor the training says it


@dataclass(frozen=True)
class Letterbox(WholePhoto):
    """The whole photo on a grey square, with values from 0 to 1, as ultralytics shows it."""

    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    fill: ClassVar[float] = 114 / 255


def network_in(model: Any) -> Any:
    """The network in a ``YOLO``, ``RTDETR`` or another model of ultralytics; else the model as it
    is."""
    engine = sys.modules.get("ultralytics.engine.model")
    if engine is None or not isinstance(model, engine.Model):
        return model
    network = model.model
    if isinstance(network, nn.Module):
        return network
    raise ModelError(
        f"model must be a network of PyTorch, got {type(model).__name__} of the file {network!r}; "
        "give the .pt file that it was exported from, or an ONNX file by its name"
    )


def is_network(network: nn.Module) -> bool:
    """Whether a module is a network of ultralytics."""
    tasks = sys.modules.get("ultralytics.nn.tasks")
    base = getattr(tasks, "BaseModel", None)
    return base is not None and isinstance(network, base)


def preprocess_of(network: nn.Module, size: Side | None) -> WholePhoto | CenterCrop:
    """How a network of ultralytics takes a photo: on a letterbox, stretched for RT-DETR, or cut out
    for a classifier, with sides that its strides divide."""
    tasks: Any = sys.modules["ultralytics.nn.tasks"]
    arguments = getattr(network, "args", None) or {}  # of the training
    arguments = arguments if isinstance(arguments, Mapping) else vars(arguments)
    trained_side = arguments.get("imgsz", SIDE)
    if isinstance(trained_side, Sequence):
        trained_side = max(trained_side)
    stride = int(max(getattr(network, "stride", [32])))  # of its coarsest map
    sides = sides_of(size or int(trained_side))
    height, width = (-(-length // stride) * stride for length in sides)  # rounded up
    side: Side = height if height == width else (height, width)
    if isinstance(network, tasks.ClassificationModel):
        return CenterCrop(side, crop=1.0, mean=Letterbox.mean, std=Letterbox.std)
    if isinstance(network, tasks.RTDETRDetectionModel):
        return StretchedPhoto(side, mean=Letterbox.mean, std=Letterbox.std)
    return Letterbox(side)


def class_names(network: nn.Module) -> list[str] | None:
    """The labels of a network of ultralytics, in the order of its classes; None where it has only
    numbers."""
    names: Mapping[int, str] = getattr(network, "names", None) or {}
    in_order = [names.get(index) for index in range(len(names))]
    if None in in_order or all(str(name).isdecimal() for name in in_order):
        return None
    return list(map(str, in_order))


def load_checkpoint(path: Path, names: Sequence[str]) -> nn.Module | None:
    """The network in a checkpoint of ultralytics, in which ``names`` of classes are; None if others
    than modules of torch and ultralytics are among them. No code of the file is run."""
    # the import replaces PIL's function, and NumPy's options for printing: both are put back
    image_open = Image.open
    with np.printoptions():
        optional("ultralytics.nn.tasks", f"for the model {str(path)!r}", "ultralytics", ModelError)
    Image.open = image_open
    classes: list[Any] = []
    for name in names:
        package, _, attribute = name.rpartition(".")
        is_known = package.startswith(("torch.nn.", "ultralytics."))
        module = getattr(importlib.import_module(package), attribute, None) if is_known else None
        if not isinstance(module, type) or not issubclass(module, nn.Module):
            return None
        classes.append(module)
    with torch.serialization.safe_globals(classes):
        content = torch.load(path, map_location="cpu", weights_only=True)
    # "ema" has the averaged weights, which ultralytics prefers too; saved in half precision
    network = content.get("ema") or content.get("model") if isinstance(content, dict) else None
    return network.float().eval() if isinstance(network, nn.Module) else None
