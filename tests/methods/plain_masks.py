"""CAMs whose weights come from running the network again: masked inputs and ablated channels, slowly and plainly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.methods.plain import Layer, enlarge, forward, softmax, weighted


def score_of(layers: list[Layer], x: torch.Tensor, target: int, score: str) -> torch.Tensor:
    """The target's "logit" or its "probability"."""
    logits = forward(layers, x)[-1]
    return softmax(logits)[target] if score == "probability" else logits[target]


def zero_to_one(values: torch.Tensor) -> torch.Tensor:
    """``(v - min) / (max - min)``; all zero where a channel is constant."""
    reach = values.max() - values.min()
    return (values - values.min()) / reach if reach > 0 else torch.zeros_like(values)


def mask_of(channel: torch.Tensor, x: torch.Tensor, enlarge_first: bool = True) -> torch.Tensor:
    """The channel enlarged to the image and then put into [0, 1]; torchcam does the second first."""
    size = tuple(x.shape[1:])
    return zero_to_one(enlarge(channel, size)) if enlarge_first else enlarge(zero_to_one(channel), size)


def masked_cam(
    layers: list[Layer],
    x: torch.Tensor,
    target: int,
    layer: int,
    inputs: Callable[[int, torch.Tensor], list[torch.Tensor]],
    score: str,
    relu: bool,
) -> torch.Tensor:
    """Weights are the softmax over channels of the mean score of ``inputs(k, A_k)`` above that of a black image."""
    activation = forward(layers, x)[layer + 1]
    black = score_of(layers, torch.zeros_like(x), target, score)  # the same for all channels: softmax takes it out
    gains = []
    for k, channel in enumerate(activation):
        scores = [score_of(layers, masked, target, score) - black for masked in inputs(k, channel)]
        gains.append(sum(scores) / len(scores))
    return weighted(list(softmax(torch.stack(gains))), activation, relu=relu)


def scorecam(
    layers: list[Layer],
    x: torch.Tensor,
    target: int,
    layer: int,
    *,
    score: str = "logit",
    enlarge_first: bool = True,
    relu: bool = True,
) -> torch.Tensor:
    """``ReLU(sum_k softmax_k(f(x s(up(A_k))) - f(0)) A_k)`` (Wang 2020)."""

    def inputs(k: int, channel: torch.Tensor) -> list[torch.Tensor]:
        return [x * mask_of(channel, x, enlarge_first)]

    return masked_cam(layers, x, target, layer, inputs, score, relu)


def sscam(
    layers: list[Layer],
    x: torch.Tensor,
    target: int,
    layer: int,
    *,
    noise: Sequence[torch.Tensor],
    kind: int | str = 1,
    score: str = "logit",
    enlarge_first: bool = True,
    relu: bool = True,
) -> torch.Tensor:
    """Score-CAM with the score's mean over noise (Wang 2020, SS-CAM).

    ``kind`` 1: noise on the feature map, tensors like the activation. 2: noise on the masked input, tensors like the
    image, or one such for every channel. "mask" (torchcam): noise on the finished mask, tensors ``(channels, H, W)``.
    """

    def inputs(k: int, channel: torch.Tensor) -> list[torch.Tensor]:
        if kind == 1:
            return [x * mask_of(channel + n[k], x, enlarge_first) for n in noise]
        mask = mask_of(channel, x, enlarge_first)
        if kind == 2:
            return [x * mask + (n[k] if n.ndim == x.ndim + 1 else n) for n in noise]
        return [x * (mask + n[k]) for n in noise]

    return masked_cam(layers, x, target, layer, inputs, score, relu)


def iscam(
    layers: list[Layer],
    x: torch.Tensor,
    target: int,
    layer: int,
    *,
    steps: int = 10,
    scales: Sequence[float] | None = None,
    score: str = "logit",
    enlarge_first: bool = True,
    relu: bool = True,
) -> torch.Tensor:
    """Score-CAM with the score's mean along masks scaled by 1/N, 2/N ... 1 (Naidu 2020); torchcam sums these up."""
    factors = [(i + 1) / steps for i in range(steps)] if scales is None else scales

    def inputs(k: int, channel: torch.Tensor) -> list[torch.Tensor]:
        return [x * mask_of(channel, x, enlarge_first) * factor for factor in factors]

    return masked_cam(layers, x, target, layer, inputs, score, relu)


def ablationcam(
    layers: list[Layer],
    x: torch.Tensor,
    target: int,
    layer: int,
    *,
    divide: str = "score",
    score: str = "logit",
    relu: bool = True,
) -> torch.Tensor:
    """``w_k = (y - y_k) / y``, y_k with channel k at 0 (Desai & Ramaswamy 2020; "norm": over the channel's norm)."""
    activation, head = forward(layers, x)[layer + 1], layers[layer + 1 :]
    full = score_of(head, activation, target, score)
    weights = []
    for k in range(len(activation)):
        ablated = activation.clone()
        ablated[k] = 0
        drop = full - score_of(head, ablated, target, score)
        if divide == "norm":
            norm = (activation[k] ** 2).sum() ** 0.5
            weights.append(drop / norm if norm > 0 else 0.0)
        else:
            weights.append(drop / full if divide == "score" else drop)
    return weighted(weights, activation, relu=relu)
