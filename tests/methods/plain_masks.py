"""CAMs whose weights come from running the network again: masked inputs and ablated channels,
slowly and plainly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.methods.plain import Layers, enlarge, forward, unit, weighted


def mask_of(channel: Tensor, x: Tensor, enlarge_first: bool = True) -> Tensor:
    """The channel enlarged to the image and then put into [0, 1]; torchcam does the second
    first."""
    size = tuple(x.shape[1:])
    if enlarge_first:
        return unit(enlarge(channel, size), shift=True)
    return enlarge(unit(channel, shift=True), size)


Inputs = Callable[[int, Tensor], list[Tensor]]


def masked_cam(layers: Layers, x: Tensor, target: int, layer: int, inputs: Inputs) -> Tensor:
    """Weights are the softmax over channels of the mean score of ``inputs(k, A_k)`` above that of a
    black image."""
    activation = forward(layers, x)[layer + 1]
    # the same for all channels: softmax takes it out
    black = forward(layers, torch.zeros_like(x))[-1][target]
    gains = []
    for k, channel in enumerate(activation):
        scores = [forward(layers, masked)[-1][target] - black for masked in inputs(k, channel)]
        gains.append(sum(scores) / len(scores))
    return weighted(list(torch.stack(gains).softmax(0)), activation, relu=True)


def scorecam(
    layers: Layers, x: Tensor, target: int, layer: int, *, enlarge_first: bool = True
) -> Tensor:
    """``ReLU(sum_k softmax_k(f(x s(up(A_k))) - f(0)) A_k)`` (Wang 2020)."""
    return masked_cam(
        layers, x, target, layer, lambda k, channel: [x * mask_of(channel, x, enlarge_first)]
    )


def sscam(
    layers: Layers,
    x: Tensor,
    target: int,
    layer: int,
    *,
    noise: Sequence[Tensor],
    kind: int | str = 1,
    enlarge_first: bool = True,
) -> Tensor:
    """Score-CAM with the score's mean over noise (Wang 2020, SS-CAM).

    ``kind`` 1: noise on the feature map, tensors like the activation. 2: noise on the masked input,
    tensors like the image, or one such for every channel. "mask" (torchcam): noise on the finished
    mask, tensors ``(channels, H, W)``.
    """

    def inputs(k: int, channel: Tensor) -> list[Tensor]:
        if kind == 1:
            return [x * mask_of(channel + n[k], x, enlarge_first) for n in noise]
        mask = mask_of(channel, x, enlarge_first)
        if kind == 2:
            return [x * mask + (n[k] if n.ndim == x.ndim + 1 else n) for n in noise]
        return [x * (mask + n[k]) for n in noise]

    return masked_cam(layers, x, target, layer, inputs)


def iscam(
    layers: Layers,
    x: Tensor,
    target: int,
    layer: int,
    *,
    steps: int = 10,
    scales: Sequence[float] | None = None,
    enlarge_first: bool = True,
) -> Tensor:
    """Score-CAM with the score's mean along masks scaled by 1/N, 2/N ... 1 (Naidu 2020); torchcam
    sums these up."""
    factors = [(i + 1) / steps for i in range(steps)] if scales is None else scales

    def inputs(k: int, channel: Tensor) -> list[Tensor]:
        return [x * mask_of(channel, x, enlarge_first) * factor for factor in factors]

    return masked_cam(layers, x, target, layer, inputs)


def ablationcam(layers: Layers, x: Tensor, target: int, layer: int, *, relu: bool = True) -> Tensor:
    """``w_k = (y - y_k) / y``, y_k with channel k at 0 (Desai & Ramaswamy 2020)."""
    activation = forward(layers, x)[layer + 1]
    head = layers[layer + 1 :]
    full = forward(head, activation)[-1][target]
    weights = []
    for k in range(len(activation)):
        ablated = activation.clone()
        ablated[k] = 0
        weights.append((full - forward(head, ablated)[-1][target]) / full)
    return weighted(weights, activation, relu=relu)
