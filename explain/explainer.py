"""`Explainer`: a photo and a model in, an `Explanation` out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from explain import render
from explain.attribution import Attribution, attribute_targets
from explain.concepts import Concepts, find_concepts, name_concepts
from explain.engine import Precision, Progress, check_inputs
from explain.errors import ImageError, ModelError, TargetError, warn
from explain.explanation import Explanation
from explain.hooks import Inspection, Where, inspect, unwrapped
from explain.images import ImageLike, Preprocess, load_image, locate
from explain.methods import Fusion, MethodLike
from explain.models import BUNDLED, Classifier, as_classifier, as_preprocess, load
from explain.targets import TargetLike, check_categories


class Explainer:
    """Explains photos with one model.

    Args:
        model: any ``nn.Module`` that classifies images, a name ("resnet50", "package.module:factory"), or None for the
            bundled model. A module is put on ``device`` if one is given, and otherwise left alone.
        categories: the labels of the classes, in order; those that come with the model by default.
        preprocess: ``PIL.Image -> (C, H, W)`` float tensor, or an image processor of transformers. By default what
            comes with the model (as an attribute, in timm's or Hugging Face's configuration, or with its name); where
            nothing is known, a centre crop and ImageNet's values, with a warning.
        weights: a file with a state dict, for a model given by name.
        size: the side of the model's input in pixels, instead of its own.
        device: where to run, as for ``torch.device``.

    Raises:
        ExplainError: the model, its weights or the device are not to be had.

    >>> explainer = Explainer()
    >>> explainer.categories[66], explainer.preprocess(Image.new("RGB", (30, 20))).ndim
    ('tabby cat', 3)
    """

    def __init__(
        self,
        model: nn.Module | Classifier | str | None = None,
        categories: Sequence[str] | None = None,
        preprocess: Preprocess | None = None,
        *,
        weights: str | Path | None = None,
        size: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        found = _classifier(model, weights, size)
        self.model = found.model if device is None else _on_device(found.model, device)
        if preprocess is None and found.assumed is not None:
            warn(found.assumed)
        self.preprocess: Preprocess = found.preprocess if preprocess is None else as_preprocess(preprocess)
        given = check_categories(categories)
        self.categories = found.categories if given is None else list(given)
        self.name = found.name
        self._classifier = Classifier(
            self.model, self.preprocess, self.categories, found.name, found.temperature, found.weights
        )

    def __repr__(self) -> str:
        return f"Explainer({self.name!r}, {type(self.model).__name__})"

    def __call__(
        self,
        image: ImageLike,
        methods: MethodLike | Iterable[MethodLike] = "gradcam",
        target: TargetLike | Sequence[TargetLike] = None,
        *,
        layer: Where | None = None,
        top_k: int | None = None,
        fuse: Fusion | None = None,
        batch_size: int | None = None,
        progress: Progress | None = None,
        precision: Precision = "full",
    ) -> Explanation:
        """Explain one photo.

        Args:
            image: a path, the bytes of a file, a PIL image or an array; see `explain.images.load_image`.
            methods: a name or method object, several, or "all".
            target: a class index, label or callable, several of these, or None for the top prediction.
            top_k: explain the k best classes, instead of ``target``.
            layer, fuse, batch_size, progress, precision: see `explain.attribute`.

        Raises:
            ExplainError: one line that says what does not fit.
        """
        if top_k is not None and target is not None:
            raise TargetError("target and top_k cannot both be given; leave one out")
        targets = top_k if top_k is not None else _target_list(target)
        photo = load_image(image)
        x = self.as_input(photo)
        found = attribute_targets(
            self.model, x, methods, targets, layer=layer, fuse=fuse, categories=self.categories,
            batch_size=batch_size, progress=progress, precision=precision,
        )  # fmt: skip
        self._check_categories(next(iter(found[0].values())))
        return Explanation(
            photo=photo,
            source=_source(image),
            classifier=self._classifier,
            box=locate(self.preprocess, photo.size),
            results=tuple(found),
            input_size=(int(x.shape[-2]), int(x.shape[-1])),
        )

    def concepts(self, image: ImageLike, count: int = 4, *, layer: Where | None = None) -> tuple[Image.Image, Concepts]:
        """Find the concepts that a layer sees in one photo; see `explain.find_concepts`.

        Returns:
            A picture of where they are, with the classes that each speaks for in a legend, and the `Concepts`.

        >>> picture, found = Explainer().concepts(Image.new("RGB", (60, 40), "orange"), 2)
        >>> len(found), picture.width
        (2, 260)
        """
        photo = load_image(image)
        found = find_concepts(self.model, self.as_input(photo), count, layer=layer)
        heatmaps = found.heatmaps[0].cpu().numpy()
        labels = name_concepts(found, self.categories)
        return render.concepts(photo, heatmaps, locate(self.preprocess, photo.size), labels), found

    def inspect(self, image: ImageLike) -> Inspection:
        """Run the model on one photo and list what every layer did; see `explain.hooks.inspect`."""
        x = self.as_input(image)
        check_inputs(self.model, x)
        return inspect(unwrapped(self.model), x)

    def _check_categories(self, attribution: Attribution) -> None:
        if self.categories is None or attribution.logits is None:
            return
        classes = attribution.logits.shape[1]
        if len(self.categories) != classes:
            raise ModelError(
                f"categories must hold a label for each of the model's {classes} classes, got {len(self.categories)}; "
                "give them all, in the order of the classes"
            )

    def as_input(self, image: ImageLike) -> torch.Tensor:
        """Turn a photo into what the model is given: ``(1, C, H, W)``, on its device and in its precision.

        >>> Explainer().as_input(Image.new("RGB", (30, 20))).shape
        torch.Size([1, 3, 80, 80])
        """
        x = self.preprocess(load_image(image))
        if not isinstance(x, torch.Tensor) or x.ndim != 3:
            got = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            remedy = (
                "leave the batch dimension out" if isinstance(x, torch.Tensor) else "use torch.from_numpy or the like"
            )
            raise ImageError(f"preprocess must return a tensor (C, H, W), got {got}; {remedy}")
        parameter = next((p for p in self.model.parameters() if p.is_floating_point()), None)
        return x[None] if parameter is None else x[None].to(parameter.device, parameter.dtype)


def explain(image: ImageLike, methods: MethodLike | Iterable[MethodLike] = "gradcam", **options: Any) -> Explanation:
    """Explain a photo with the bundled model; options as for calling an `Explainer`.

    >>> from PIL import Image
    >>> explanation = explain(Image.new("RGB", (32, 24), "orange"))
    >>> explanation.overlay("gradcam").size
    (32, 24)
    """
    return Explainer()(image, methods, **options)


def _classifier(model: Any, weights: str | Path | None, size: int | None) -> Classifier:
    if model is None or isinstance(model, str):
        return load(model or BUNDLED, weights=weights, size=size)
    if weights is not None:
        raise ModelError("weights can be given for a model by name only; load them into your module yourself")
    if isinstance(model, Classifier):
        if size is not None:
            raise ModelError("size cannot be changed for a classifier that brings its preprocessing; leave it out")
        return model
    if isinstance(model, nn.Module):
        return as_classifier(model, size=size)
    raise ModelError(f"model must be an nn.Module, a name or None for the bundled model, got {type(model).__name__}")


def _on_device(model: nn.Module, device: str | torch.device) -> nn.Module:
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        reason = reason if len(reason) < 100 else "torch knows no such device"  # it lists all that there might be
        raise ModelError(f"device {str(device)!r} cannot be used ({reason}); use 'cpu', or 'cuda' with a GPU") from None


def _target_list(target: Any) -> list[TargetLike]:
    if isinstance(target, torch.Tensor | np.ndarray):
        target = target.reshape(-1).tolist()
    return list(target) if isinstance(target, list | tuple) else [target]


def _source(image: ImageLike) -> str | None:
    if isinstance(image, (str, os.PathLike)):
        return str(image)
    return str(getattr(image, "filename", "")) or None
