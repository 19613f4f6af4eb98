"""What a layer says of a batch: its feature maps, and what each channel does for a score."""

from __future__ import annotations

import torch
from torch import nn

from explain.engine import Activations, LayerGradients, Work, gather, plan_of
from explain.errors import LayerError
from explain.hooks import FeatureExtractor, Where
from explain.inputs import as_inputs
from explain.layers import default_layer, find_layers
from explain.random_numbers import normal
from explain.targets import Target, TopClass

DRAWS = 8  # inputs by which a receptive field is found


def one_layer(model: nn.Module, x: torch.Tensor, layer: Where | None) -> str:
    """The name of a layer; None finds the last feature map.

    Raises:
        LayerError: there is no such layer, or these are several.
    """
    inputs = as_inputs(x)
    names = [default_layer(model, inputs)] if layer is None else find_layers(model, inputs, layer)
    if len(names) != 1:
        raise LayerError(f"layer must name one layer, got {len(names)}; choose one of {', '.join(names)}")
    return names[0]


def feature_maps(model: nn.Module, x: torch.Tensor, layer: str) -> torch.Tensor:
    """The feature maps ``(N, C, h, w)`` of a layer."""
    (found,) = gather(model, as_inputs(x), plan_of([Activations()], [layer]), [TopClass()], Work(None))
    return found(layer).activations


def with_gradients(model: nn.Module, x: torch.Tensor, layer: str, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """The feature maps of a layer, and the gradients of a score in them; both ``(N, C, h, w)``."""
    needs = [Activations(), LayerGradients()]
    (found,) = gather(model, as_inputs(x), plan_of(needs, [layer]), [target], Work(None))
    evidence = found(layer)
    return evidence.activations, evidence.gradients


def receptive_field(model: nn.Module, x: torch.Tensor, layer: str, seed: int = 0) -> tuple[int, int, int, int]:
    """The part of an input that the middle of a layer's feature maps can see: left, top, right, bottom; ends exclusive.

    It is found by the gradients of that place in some inputs of noise, so that it holds for any network. Layers that
    are not ``(N, C, h, w)``, such as those of transformers, are taken to see all of the input.

    Args:
        model: the network.
        x: an input ``(1, C, H, W)``, whose size and range count.
        layer: a layer.
        seed: of the noise.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(2, 2, 3, padding=1))
    >>> receptive_field(model, torch.rand(1, 1, 32, 32), "2")
    (13, 13, 21, 21)
    """
    height, width = x.shape[-2:]
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = normal((DRAWS, *x.shape[1:]), generator).to(x)
    drawn = (x[:1].mean() + x[:1].std() * noise).requires_grad_()
    with torch.enable_grad():
        features = FeatureExtractor(model, layer, graph=True)(drawn)[layer]
        if not isinstance(features, torch.Tensor) or features.ndim != 4:
            return 0, 0, width, height
        middle = features[:, :, features.shape[2] // 2, features.shape[3] // 2]
        signs = normal(middle.shape, generator).to(middle)  # so that channels do not cancel
        (gradient,) = torch.autograd.grad((middle * signs).sum(), drawn)
    seen = gradient.abs().amax((0, 1)) > 0
    if not seen.any():
        return 0, 0, width, height
    rows, columns = seen.any(1).nonzero().flatten().tolist(), seen.any(0).nonzero().flatten().tolist()
    return columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
