"""CAMs from eigenvectors and thresholds, and factorised activations: slowly and plainly, without LAPACK."""

from __future__ import annotations

import itertools
import math

import torch

from tests.methods.plain import Layer, forward, look, mean_of


def eigen(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues, largest first, and eigenvectors, as columns, of a symmetric matrix by Jacobi's rotations."""
    size = len(matrix)
    a: list[list[float]] = matrix.tolist()
    vectors: list[list[float]] = torch.eye(size).tolist()
    for _ in range(100):
        if max(abs(a[p][q]) for p in range(size) for q in range(size) if p != q) <= 1e-17 * float(matrix.abs().max()):
            break
        for p, q in itertools.combinations(range(size), 2):
            if a[p][q] == 0:
                continue
            ratio = (a[q][q] - a[p][p]) / (2 * a[p][q])
            tangent = math.copysign(1, ratio) / (abs(ratio) + math.hypot(ratio, 1))
            cosine = 1 / math.hypot(tangent, 1)
            sine = tangent * cosine
            for row in (*a, *vectors):
                row[p], row[q] = cosine * row[p] - sine * row[q], sine * row[p] + cosine * row[q]
            first, second = a[p], a[q]
            a[p] = [cosine * u - sine * v for u, v in zip(first, second, strict=True)]
            a[q] = [sine * u + cosine * v for u, v in zip(first, second, strict=True)]
    order = sorted(range(size), key=lambda i: -a[i][i])
    values = torch.tensor([a[i][i] for i in order], dtype=matrix.dtype)
    return values, torch.tensor(vectors, dtype=matrix.dtype)[:, order]


def oriented(values: torch.Tensor, rule: str, like: torch.Tensor | None = None) -> torch.Tensor:
    """Fix the free sign: "sum" of the map positive, its "peak" positive, or positive along ``like``."""
    if rule == "peak":
        sign = values.flatten()[values.abs().argmax()]
    else:
        sign = values.sum() if rule == "sum" else (values * like).sum()
    return -values if sign < 0 else values


def first_component(channels: torch.Tensor, *, centred: bool, sign: str) -> torch.Tensor:
    """Project positions on the first right singular vector of the matrix positions x channels."""
    if centred:
        channels = torch.stack([channel - mean_of(channel) for channel in channels])
    count = len(channels)
    gram = torch.zeros(count, count, dtype=channels.dtype)
    for k in range(count):
        for m in range(count):
            gram[k, m] = (channels[k] * channels[m]).sum()
    vector = eigen(gram)[1][:, 0]
    projection = sum(vector[k] * channels[k] for k in range(count))
    return oriented(projection, sign, channels.sum(dim=0))


def eigencam(
    layers: list[Layer], x: torch.Tensor, target: int, layer: int, *, centred: bool = False, sign: str = "channels"
) -> torch.Tensor:
    """``A V_1`` of ``A = U S V'``, not centred and not rectified (Muhammad & Yeasin 2020).

    The paper leaves the sign free. "channels": the map agrees with the sum over channels (for A >= 0 the map is then
    positive everywhere, and "sum" says the same); pytorch-grad-cam centres and leaves the sign to LAPACK.
    """
    return first_component(forward(layers, x)[layer + 1], centred=centred, sign=sign)


def eigengradcam(
    layers: list[Layer], x: torch.Tensor, target: int, layer: int, *, centred: bool = False, sign: str = "channels"
) -> torch.Tensor:
    """Eigen-CAM of ``G A`` position by position; "channels" then means: it agrees with HiResCAM (pytorch-grad-cam)."""
    activation, gradient = look(layers, x, target, layer)
    return first_component(activation * gradient, centred=centred, sign=sign)


def kernel_of(a: torch.Tensor, b: torch.Tensor, kernel: str, gamma: float, coef0: float, degree: int) -> torch.Tensor:
    product = (a * b).sum()
    return {
        "linear": lambda: product,
        "sigmoid": lambda: torch.tanh(gamma * product + coef0),
        "poly": lambda: (gamma * product + coef0) ** degree,
        "rbf": lambda: torch.exp(-gamma * ((a - b) ** 2).sum()),
        "cosine": lambda: product / ((a * a).sum() * (b * b).sum()) ** 0.5,
    }[kernel]()


def kpcacam(
    layers: list[Layer],
    x: torch.Tensor,
    target: int,
    layer: int,
    *,
    kernel: str = "sigmoid",
    gamma: float | str | None = "scale",
    coef0: float = 1.0,
    degree: int = 3,
    centred: bool = True,
    sign: str = "peak",
) -> torch.Tensor:
    """``sqrt(l_1) a_1`` of the centred kernel between positions (Karmani 2024).

    As its authors programmed it (scikit-learn's KernelPCA) with gamma None, 1 / channels: channels centred over
    positions before the kernel. With "scale", gamma is 1 / (channels * variance), as in scikit-learn's SVC.
    """
    activation = forward(layers, x)[layer + 1]
    if centred:
        activation = torch.stack([channel - mean_of(channel) for channel in activation])
    samples = activation.flatten(1).T
    if gamma == "scale":
        gamma = 1 / (samples.shape[1] * float((samples * samples).sum()) / samples.numel())
    gamma = 1 / samples.shape[1] if gamma is None else float(gamma)
    gram = x.new_zeros(len(samples), len(samples))
    for i, a in enumerate(samples):
        for j, b in enumerate(samples[: i + 1]):
            gram[i, j] = gram[j, i] = kernel_of(a, b, kernel, gamma, coef0, degree)
    rows, everything = gram.mean(dim=1), gram.mean()
    centred_gram = gram - rows[:, None] - rows[None, :] + everything
    values, vectors = eigen(centred_gram)
    scores = vectors[:, 0] * max(float(values[0]), 0.0) ** 0.5
    return oriented(scores.reshape(activation.shape[1:]), sign, activation.sum(dim=0))


def fem(layers: list[Layer], x: torch.Tensor, target: int, layer: int, *, k: float = 2.0) -> torch.Tensor:
    """``sum_k mean(A_k) [A_k > mean(A_k) + k std(A_k)]``: binary maps, standard deviation over all (Fuad 2020)."""
    out = torch.zeros(forward(layers, x)[layer + 1].shape[1:], dtype=x.dtype)
    for channel in forward(layers, x)[layer + 1]:
        mean = mean_of(channel)
        deviation = mean_of((channel - mean) ** 2) ** 0.5
        for i in range(channel.shape[0]):
            for j in range(channel.shape[1]):
                if channel[i, j] > mean + k * deviation:
                    out[i, j] += mean
    return out


def nmf(
    v: torch.Tensor, w: torch.Tensor, h: torch.Tensor, steps: int, epsilon: float = 1e-7
) -> tuple[torch.Tensor, torch.Tensor]:
    """``V ~ W H`` by multiplicative updates, W before H, ``epsilon`` in place of a denominator 0 (Lee & Seung 2001)."""
    for _ in range(steps):
        below = w @ h @ h.T
        w = w * (v @ h.T) / torch.where(below == 0, epsilon, below)
        below = w.T @ w @ h
        h = h * (w.T @ v) / torch.where(below == 0, epsilon, below)
    return w, h


def factorise(
    layers: list[Layer], images: torch.Tensor, layer: int, *, w: torch.Tensor, h: torch.Tensor, steps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Concept maps ``(N, k, h, w)``, concepts ``(k, C)`` and their logits by the head (Collins 2018).

    V holds one row for every position of every image. The head sees a concept as an activation with one position.
    """
    activations = torch.stack([forward(layers, image)[layer + 1] for image in images])
    n, channels, height, width = activations.shape
    v = torch.stack([a[:, i, j] for a in activations for i in range(height) for j in range(width)])
    assert v.min() >= 0
    assert v.shape == (n * height * width, channels)
    w, h = nmf(v, w, h, steps)
    maps = torch.stack([row.reshape(n, height, width) for row in w.T], dim=1)
    evidence = torch.stack([forward(layers[layer + 1 :], concept[:, None, None])[-1] for concept in h])
    return maps, h, evidence
