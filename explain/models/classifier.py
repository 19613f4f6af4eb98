"""`Classifier`: a model with all that belongs to it: preprocessing, labels, and a temperature for its probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import nn

from explain._utils.errors import LabelsError, ModelError, either, option, shown, warn
from explain.data.images import Box, Preprocess
from explain.engine.output_activation import outputs_of
from explain.engine.validation import check_inputs
from explain.targets.outputs import Activation, Outputs, outputs_like

Interpolation: TypeAlias = Literal["bilinear", "bicubic"]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def check_size(size: object) -> None:
    """Refuse what cannot be the side of an input in pixels.

    Raises:
        ModelError: it is no whole number from 1.
    """
    if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
        raise ModelError(
            f"{option('size')} must be a whole number of pixels from 1, got {shown(size)}; leave it out to take the "
            "model's own"
        )


@dataclass(frozen=True)
class CenterCrop:
    """Cut out the central square of a photo, scale it to ``side`` pixels and normalise each channel.

    ``crop`` is the square's share of the photo's shorter side. Cutting and scaling are one antialiased operation, with
    "bilinear" or "bicubic" ``interpolation``.

    >>> CenterCrop(side=8)(Image.new("RGB", (40, 30))).shape
    torch.Size([3, 8, 8])
    """

    side: int = 224
    crop: float = 0.875
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        check_size(self.side)

    def box(self, size: tuple[int, int]) -> Box:
        """Return the square that is cut out of a photo of ``size`` (width, height)."""
        half = min(size) * self.crop / 2
        x, y = size[0] / 2, size[1] / 2
        return Box(x - half, y - half, x + half, y + half)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return self.cut(image, self.box(image.size))

    def cut(self, image: Image.Image, box: Box) -> torch.Tensor:
        """Cut a square out of a photo, scale and normalise it: ``(3, side, side)``."""
        edges = (box.left, box.top, box.right, box.bottom)
        small = image.convert("RGB").resize(
            (self.side, self.side), Image.Resampling[self.interpolation.upper()], box=edges
        )
        return normalised(small, self.mean, self.std)


def normalised(image: Image.Image, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """Return the pixels of an RGB picture, each channel less its mean and divided by its standard deviation."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    means, deviations = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return (pixels - means) / deviations


@dataclass(frozen=True, eq=False)
class Classifier:
    """A model, how a photo becomes its input, what its classes are called, and how sharp its probabilities are.

    ``temperature`` divides the logits before the softmax, so that the probabilities shown are calibrated; it never
    changes their order. ``activation`` is what makes probabilities of the model's outputs ("softmax", "sigmoid", or
    "none" where they are probabilities); None leaves an `Explainer` to find it out. ``weights`` says which weights the
    model carries, where that is known. ``assumed`` says in one line what had to be assumed about the preprocessing, if
    anything.
    """

    model: nn.Module
    preprocess: Preprocess
    categories: Sequence[str] | None = None
    name: str = "model"
    temperature: float = 1.0
    weights: str | None = None
    assumed: str | None = None
    activation: Activation | None = None

    def __repr__(self) -> str:
        classes = "no labels" if self.categories is None else f"{len(self.categories)} labels"
        return f"Classifier({self.name!r}, {type(self.model).__name__}, {classes})"

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return calibrated probabilities ``(N, K)`` from logits ``(N, K)``."""
        found = outputs_like(logits, self.activation)
        return replace(found, temperature=self.temperature).probabilities(logits.float())  # type: ignore[return-value]

    def label(self, index: int) -> str:
        """Return the label of a class, or a plain name where it has none."""
        return class_label(self.categories, index)


def class_label(categories: Sequence[str] | None, index: int) -> str:
    """Return the label of a class, or a plain name where it has none.

    >>> class_label(["cat", "dog"], 1), class_label(None, 1)
    ('dog', 'class 1')
    """
    return categories[index] if categories is not None and index < len(categories) else f"class {index}"


def on_device(model: nn.Module, device: str | torch.device) -> nn.Module:
    """Move a model to a device.

    Raises:
        ModelError: there is no such device, or it cannot be used.
    """
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        reason = reason if len(reason) < 100 else "torch knows no such device"  # torch lists all that might exist
        raise ModelError(f"device {str(device)!r} cannot be used ({reason}); use 'cpu', or 'cuda' with a GPU") from None


def outputs_for(
    classifier: Classifier, x: torch.Tensor, logits: torch.Tensor, activation: Activation | None
) -> Outputs:
    """Say how a classifier's outputs become probabilities, of which ``logits`` ``(N, K)`` are those for ``x``.

    A warning says it where they are found to be probabilities already.
    """
    found = outputs_of(classifier.model, check_inputs(classifier.model, x), logits, activation)
    if activation is None and found.activation == "none":
        how = "add up to one" if found.exclusive else "lie between 0 and 1"
        warn(
            f"model {classifier.name!r} gives probabilities already (they {how}), so they are taken as they are; "
            f"{either('pass activation=', 'give --activation')} to say what they are"
        )
    return replace(found, temperature=classifier.temperature)


def check_labels(categories: Sequence[str] | None, classes: int) -> None:
    """Refuse labels that are more or fewer than the classes.

    Raises:
        LabelsError: they are.
    """
    if categories is not None and len(categories) != classes:
        raise LabelsError(
            f"{either('categories', '--labels')} must hold a label for each of the model's {classes} classes, got "
            f"{len(categories)}; give them all, in the order of the classes"
        )
