"""CAMs from eigenvectors and thresholds, and factorised activations: slowly and plainly."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from tests.methods.plain import Layers, forward, look, mean_of


def first_eigenvector(matrix: Tensor) -> tuple[float, Tensor]:
    """The largest eigenvalue of a symmetric matrix, and its eigenvector."""
    values, vectors = np.linalg.eigh(matrix.numpy())
    return float(values[-1]), torch.from_numpy(vectors[:, -1].copy())


def first_component(channels: Tensor) -> Tensor:
    """Project positions on the first right singular vector of the matrix positions x channels."""
    count = len(channels)
    gram = torch.zeros(count, count, dtype=channels.dtype)
    for k, m in itertools.product(range(count), repeat=2):
        gram[k, m] = (channels[k] * channels[m]).sum()
    _, vector = first_eigenvector(gram)
    projection = sum(vector[k] * channels[k] for k in range(count))
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


def kernel_of(a: Tensor, b: Tensor, kernel: str, gamma: float) -> Tensor:
    product = (a * b).sum()
    return {
        "linear": lambda: product,
        "sigmoid": lambda: torch.tanh(gamma * product + 1),
        "poly": lambda: (gamma * product + 1) ** 3,
        "rbf": lambda: torch.exp(-gamma * ((a - b) ** 2).sum()),
    }[kernel]()


def kpcacam(
    layers: Layers, x: Tensor, target: int, layer: int, *, kernel: str = "sigmoid"
) -> Tensor:
    """``sqrt(l_1) a_1`` of the centred kernel between positions (Karmani 2024).

    As its authors programmed it (scikit-learn's KernelPCA), channels are centred over positions
    before the kernel, and the largest value is positive. Gamma is 1 / (channels * variance), as in
    scikit-learn's SVC.
    """
    activation = forward(layers, x)[layer + 1]
    activation = torch.stack([channel - mean_of(channel) for channel in activation])
    samples = activation.flatten(1).T
    gamma = 1 / (samples.shape[1] * float((samples * samples).sum()) / samples.numel())
    gram = x.new_zeros(len(samples), len(samples))
    for i, a in enumerate(samples):
        for j, b in enumerate(samples[: i + 1]):
            gram[i, j] = gram[j, i] = kernel_of(a, b, kernel, gamma)
    rows = gram.mean(dim=1)
    everything = gram.mean()
    centred_gram = gram - rows[:, None] - rows[None, :] + everything
    value, vector = first_eigenvector(centred_gram)
    scores = vector * max(value, 0.0) ** 0.5
    return (-scores if scores[scores.abs().argmax()] < 0 else scores).reshape(activation.shape[1:])


def fem(layers: Layers, x: Tensor, target: int, layer: int, *, k: float = 2.0) -> Tensor:
    """``sum_k mean(A_k) [A_k > mean(A_k) + k std(A_k)]``: binary maps, standard deviation over all
    (Fuad 2020)."""
    out = torch.zeros(forward(layers, x)[layer + 1].shape[1:], dtype=x.dtype)
    for channel in forward(layers, x)[layer + 1]:
        mean = mean_of(channel)
        deviation = mean_of((channel - mean) ** 2) ** 0.5
        for place in itertools.product(*map(range, channel.shape)):
            if channel[place] > mean + k * deviation:
                out[place] += mean
    return out


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
