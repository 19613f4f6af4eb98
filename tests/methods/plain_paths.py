"""Integrals, noise, views and biases: what is summed over many gradients, slowly and plainly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tests.methods.plain import Layers, backward, enlarge, forward, unit


def quadrature(rule: str, steps: int) -> tuple[list[float], list[float]]:
    """Points in [0, 1] and weights that sum to one: "left", "right", "midpoint", "trapezoid" or
    "gausslegendre"."""
    if rule == "trapezoid":
        ends = [0.5 if i in (0, steps - 1) else 1.0 for i in range(steps)]
        return [i / (steps - 1) for i in range(steps)], [end / (steps - 1) for end in ends]
    if rule != "gausslegendre":
        offset = {"left": 0.0, "midpoint": 0.5, "right": 1.0}[rule]
        return [(i + offset) / steps for i in range(steps)], [1 / steps] * steps
    points, weights = np.polynomial.legendre.leggauss(steps)
    return ((points + 1) / 2).tolist(), (weights / 2).tolist()


def integratedgradients(
    layers: Layers,
    x: Tensor,
    target: int,
    *,
    baseline: Tensor,
    points: Sequence[float],
    weights: Sequence[float],
) -> Tensor:
    """``(x - b) sum_i w_i grad f(b + a_i (x - b))`` (Sundararajan 2017)."""
    total = torch.zeros_like(x)
    for point, weight in zip(points, weights, strict=True):
        between = baseline + point * (x - baseline)
        total += weight * backward(layers, forward(layers, between), target)[0]
    return (x - baseline) * total


def smooth(
    method: Callable[[Tensor], Tensor], x: Tensor, *, noise: Sequence[Tensor], kind: str = "mean"
) -> Tensor:
    """The "mean" (SmoothGrad, Smilkov 2017), mean "squared" (Hooker 2019) or "variance" (VarGrad,
    Adebayo 2018) of ``method(x + noise)``; the variance is over all samples, divided by their
    number.
    """
    maps = [method(x + shift) for shift in noise]
    if kind == "squared":
        maps = [m * m for m in maps]
    mean = sum(maps) / len(maps)
    return sum((m - mean) ** 2 for m in maps) / len(maps) if kind == "variance" else mean


def fullgrad_terms(layers: Layers, x: Tensor, target: int) -> list[Tensor]:
    """Input times gradient, then for every layer with a bias its bias times the gradient in its
    output, position by position; a batch normalisation's implicit bias is ``bias - mean * slope``.
    All of it sums to the logit, exactly.
    """
    if not isinstance(layers, list):
        return layers.terms(x, target)
    gradients = backward(layers, forward(layers, x), target)
    terms = [x * gradients[0]]
    for layer, gradient in zip(layers, gradients[1:], strict=True):
        if isinstance(layer, nn.Conv2d):
            terms.append(layer.bias.detach()[:, None, None] * gradient)
        elif isinstance(layer, nn.BatchNorm2d):
            slope = layer.weight / (layer.running_var + layer.eps) ** 0.5
            bias = (layer.bias - slope * layer.running_mean).detach()
            terms.append(bias[:, None, None] * gradient)
        elif isinstance(layer, nn.Linear):
            terms.append(layer.bias.detach() * gradient)
    return terms


def fullgrad(layers: Layers, x: Tensor, target: int, *, rescale: str = "layer") -> Tensor:
    """``psi(x grad) + sum over layers and channels of psi(b grad)``, psi = enlarge(rescale(abs))
    (Srinivas 2019).

    ``rescale`` "layer" as its authors programmed it, "channel" as the formula may be read (and
    pytorch-grad-cam does).
    """
    total = torch.zeros(x.shape[1:], dtype=x.dtype)
    for term in fullgrad_terms(layers, x, target):
        if term.ndim != 3:
            continue  # a linear layer's bias has no place in the picture
        term = unit(term.abs(), shift=True) if rescale == "layer" else term.abs()
        for channel in term:
            scaled = unit(channel, shift=True) if rescale == "channel" else channel
            total += enlarge(scaled, tuple(x.shape[1:]))
    return total
