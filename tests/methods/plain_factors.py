"""CAMs from eigenvectors and thresholds, and factorised activations: slowly and plainly."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.methods.plain import Layers, forward, look


def first_component(channels: Tensor) -> Tensor:
    """Project positions on the first eigenvector of the products of channels."""
    flat = channels.flatten(1)
    _, vectors = np.linalg.eigh((flat @ flat.T).numpy())
    projection = torch.einsum("k,khw->hw", torch.from_numpy(vectors[:, -1].copy()), channels)
    return -projection if (projection * channels.sum(dim=0)).sum() < 0 else projection


def eigencam(layers: Layers, x: Tensor, target: int, layer: int) -> Tensor:
    """``A V_1`` of ``A = U S V'``, not centred and not rectified (Muhammad & Yeasin 2020).

    The paper leaves the sign free: the map agrees with the sum over channels (for A >= 0 the map is
    then positive everywhere); pytorch-grad-cam centres and leaves the sign to LAPACK.
    """
    return first_component(forward(layers, x)[layer + 1])


def eigengradcam(layers: Layers, x: Tensor, target: int, layer: int) -> Tensor:
    """Eigen-CAM of ``G A`` position by position, which agrees with HiResCAM (pytorch-grad-cam)."""
    activation, gradient = look(layers, x, target, layer)
    return first_component(activation * gradient)


def kpcacam(
    layers: Layers, x: Tensor, target: int, layer: int, *, kernel: str = "sigmoid"
) -> Tensor:
    """``sqrt(l_1) a_1`` of the centred kernel between positions (Karmani 2024).

    As its authors programmed it (scikit-learn's KernelPCA), channels are centred over positions
    before the kernel, and the largest value is positive. Gamma is 1 / (channels * variance), as in
    scikit-learn's SVC.
    """
    activation = forward(layers, x)[layer + 1]
    samples = activation.flatten(1).T
    samples = samples - samples.mean(0)
    gamma = 1 / (samples.shape[1] * float((samples * samples).mean()))
    products = samples @ samples.T
    gram = {
        "linear": lambda: products,
        "sigmoid": lambda: torch.tanh(gamma * products + 1),
        "poly": lambda: (gamma * products + 1) ** 3,
        "rbf": lambda: torch.exp(-gamma * torch.cdist(samples, samples) ** 2),
    }[kernel]()
    centre = torch.eye(len(gram), dtype=gram.dtype) - 1 / len(gram)
    values, vectors = np.linalg.eigh((centre @ gram @ centre).numpy())
    scores = torch.from_numpy(vectors[:, -1].copy()) * max(values[-1], 0.0) ** 0.5
    return (-scores if scores[scores.abs().argmax()] < 0 else scores).reshape(activation.shape[1:])


def fem(layers: Layers, x: Tensor, target: int, layer: int, *, k: float = 2.0) -> Tensor:
    """``sum_k mean(A_k) [A_k > mean(A_k) + k std(A_k)]``: binary maps, standard deviation over all
    (Fuad 2020)."""
    activation = forward(layers, x)[layer + 1]
    mean = activation.mean((1, 2), keepdim=True)
    deviation = activation.std((1, 2), correction=0, keepdim=True)
    return torch.where(activation > mean + k * deviation, mean, 0).sum(0)


def lafam(layers: Layers, x: Tensor, target: int, layer: int) -> Tensor:
    """``sum_k |A_k| / C`` (Karjauv & Albayrak 2024)."""
    channels = forward(layers, x)[layer + 1]
    total = torch.zeros_like(channels[0])
    for channel in channels:
        total += torch.where(channel < 0, -channel, channel)
    return total / len(channels)


def nmf(
    v: Tensor, w: Tensor, h: Tensor, steps: int, epsilon: float = 1e-7
) -> tuple[Tensor, Tensor]:
    """``V ~ W H`` by multiplicative updates, W before H, ``epsilon`` in place of a denominator 0
    (Lee & Seung 2001)."""
    for _ in range(steps):
        below = w @ h @ h.T
        w = w * (v @ h.T) / torch.where(below == 0, epsilon, below)
        below = w.T @ w @ h
        h = h * (w.T @ v) / torch.where(below == 0, epsilon, below)
    return w, h
