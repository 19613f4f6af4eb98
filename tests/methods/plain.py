"""Every method again, slowly and plainly: layer by layer, no hooks, no graph of the whole network.

The network is a list of layers. `forward` keeps every value; `backward` walks back through one
layer after the other. A network may also be an object that does both itself.

A method is ``name(layers, x, target, layer, **options)`` for one image ``(C, H, W)``; ``layer`` is
the index of the layer whose output is looked at. Here: back-propagation and the maps made of
activations and gradients. Elsewhere: `plain_scores` (other scores, several layers), `plain_factors`
(eigenvectors, k-sigma, factorisation), `plain_masks` (masked inputs, ablation), `plain_paths`
(integrals, noise, FullGrad) and `plain_transformer` (attention).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import settled

Layer = nn.Module
Layers = list[Layer]
Map = Callable[[Tensor, Tensor], Tensor]  # activation, gradient -> map


def layers_of(*layers: Layer, seed: int) -> Layers:
    """A network with random weights and the given layers, behind which all positions are
    averaged, and a linear one for six classes."""
    average = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = nn.Sequential(*layers, average, nn.Linear(5, 6))
    return list(settled(network, seed).double().eval())


def module_of(layers: Layers) -> nn.Sequential:
    """A copy of the network, with in-place ReLUs."""
    network = deepcopy(nn.Sequential(*layers))
    for layer in network:
        if isinstance(layer, nn.ReLU):
            layer.inplace = True
    return network


def forward(layers: Layers, x: Tensor) -> list[Tensor]:
    """Return the input ``(C, H, W)`` and the output of every layer."""
    if not isinstance(layers, list):
        return layers.forward(x)
    values = [x]
    for layer in layers:
        values.append(layer(values[-1][None])[0].detach())
    return values


def backward(
    layers: Layers, values: list[Tensor], target: int | Tensor, rule: str = "plain"
) -> list[Tensor]:
    """Return the gradient of the score in the input and in the output of every layer.

    ``target`` is a class, whose logit is the score, or the score's gradient in the logits. ``rule``
    says what a ReLU
    does: "plain" hands on where its input was positive, "deconv" where the gradient is, "guided"
    where both are.
    """
    if not isinstance(layers, list):
        return layers.backward(values, target, rule)
    gradient = target if isinstance(target, Tensor) else one_hot(target, values[-1])
    gradients = [gradient]
    for layer, before in zip(reversed(layers), reversed(values[:-1]), strict=True):
        rectifies = isinstance(layer, nn.ReLU)
        if rule != "deconv" or not rectifies:
            with torch.enable_grad():
                start = before.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(layer(start[None])[0], start, gradient)
        if rule != "plain" and rectifies:
            gradient = rectified(gradient)
        gradients.insert(0, gradient)
    return gradients


def one_hot(target: int, like: Tensor) -> Tensor:
    out = torch.zeros_like(like)
    out[target] = 1
    return out


def rectified(values: Tensor) -> Tensor:
    return values.clamp(min=0)


def mean_of(values: Tensor) -> Tensor:
    return values.mean()


def unit(values: Tensor, *, shift: bool = False) -> Tensor:
    """Divide by the maximum, if positive; with ``shift`` take the minimum away before."""
    values = values - values.min() if shift else values
    return values / values.max() if values.max() > 0 else values


def enlarge(values: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear interpolation between the centres of cells; the border values go on outside."""
    return F.interpolate(values[None, None], size, mode="bilinear")[0, 0]


def saliency(layers: Layers, x: Tensor, target: int) -> Tensor:
    return backward(layers, forward(layers, x), target)[0].abs()


def inputxgradient(layers: Layers, x: Tensor, target: int) -> Tensor:
    return backward(layers, forward(layers, x), target)[0] * x


def guidedbackprop(layers: Layers, x: Tensor, target: int) -> Tensor:
    return backward(layers, forward(layers, x), target, "guided")[0]


def deconvnet(layers: Layers, x: Tensor, target: int) -> Tensor:
    """The gradient where every ReLU rectifies the gradient itself, whatever its input was (Zeiler &
    Fergus 2014)."""
    return backward(layers, forward(layers, x), target, "deconv")[0]


def weighted(weights: Sequence[Tensor | float], activation: Tensor, *, relu: bool) -> Tensor:
    """``sum_k w_k A_k``, rectified where asked; a weight is a number, or a map to multiply position
    by position."""
    out = sum(weight * channel for weight, channel in zip(weights, activation, strict=True))
    return rectified(out) if relu else out


def look(layers: Layers, x: Tensor, target: int | Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """The layer's output and the gradient of the score in it."""
    values = forward(layers, x)
    return values[layer + 1], backward(layers, values, target)[layer + 1]


def gradcam_map(activation: Tensor, gradient: Tensor, *, relu: bool = True) -> Tensor:
    return weighted([mean_of(g) for g in gradient], activation, relu=relu)


def gradcampp_map(activation: Tensor, gradient: Tensor, *, relu: bool = True) -> Tensor:
    weights = []
    for a, g in zip(activation, gradient, strict=True):
        slopes = g[g > 0]
        weights.append(
            (slopes / (2 + a.sum() * slopes)).sum()
        )  # alpha = g^2 / (2 g^2 + sum(A) g^3)
    return weighted(weights, activation, relu=relu)


def layercam_map(activation: Tensor, gradient: Tensor) -> Tensor:
    return weighted([rectified(g) for g in gradient], activation, relu=True)


def gradcam(layers: Layers, x: Tensor, target: int, layer: int, *, relu: bool = True) -> Tensor:
    """``ReLU(sum_k mean(G_k) A_k)`` (Selvaraju 2017)."""
    return gradcam_map(*look(layers, x, target, layer), relu=relu)


def gradcampp(layers: Layers, x: Tensor, target: int, layer: int, *, relu: bool = True) -> Tensor:
    """``w_k = sum_ij ReLU(G) G^2 / (2 G^2 + sum(A_k) G^3)`` (Chattopadhay 2018, equation 19, less a
    factor exp(y))."""
    return gradcampp_map(*look(layers, x, target, layer), relu=relu)


def smoothgradcampp(
    layers: Layers, x: Tensor, target: int, layer: int, *, noise: Sequence[Tensor]
) -> Tensor:
    """Grad-CAM++ with the mean over noisy inputs of G, G^2 and G^3, and the clean activation
    (Omeiza 2019).

    The paper prints the mean of G as the numerator of alpha, where Grad-CAM++, and this, has that
    of G^2.
    """
    activation = forward(layers, x)[layer + 1]
    gradients = [look(layers, x + shift, target, layer)[1] for shift in noise]
    first, second, third = (
        torch.stack([g**power for g in gradients]).mean(0) for power in (1, 2, 3)
    )
    below = 2 * second + activation.sum((1, 2), keepdim=True) * third
    alpha = torch.where(below != 0, second / below, 0)
    return weighted(list((alpha * rectified(first)).sum((1, 2))), activation, relu=True)


def xgradcam(layers: Layers, x: Tensor, target: int, layer: int, *, relu: bool = True) -> Tensor:
    """``w_k = sum_ij A G / sum_ij A``, 0 where the channel sums to 0 (Fu 2020)."""
    activation, gradient = look(layers, x, target, layer)
    weights = [
        (g * a).sum() / a.sum() if a.sum() != 0 else 0.0
        for a, g in zip(activation, gradient, strict=True)
    ]
    return weighted(weights, activation, relu=relu)


def hirescam(layers: Layers, x: Tensor, target: int, layer: int, *, relu: bool = False) -> Tensor:
    """``sum_k G_k A_k`` position by position, not rectified (Draelos & Carin 2020)."""
    activation, gradient = look(layers, x, target, layer)
    return weighted(list(gradient), activation, relu=relu)


def elementwisecam(layers: Layers, x: Tensor, target: int, layer: int) -> Tensor:
    """``sum_k ReLU(G_k A_k)`` (pytorch-grad-cam's GradCAMElementWise)."""
    return sum(rectified(g * a) for a, g in zip(*look(layers, x, target, layer), strict=True))


def layercam(layers: Layers, x: Tensor, target: int, layer: int) -> Tensor:
    """``ReLU(sum_k ReLU(G_k) A_k)`` (Jiang 2021)."""
    return layercam_map(*look(layers, x, target, layer))


def randomcam(layers: Layers, x: Tensor, target: int, layer: int, *, weights: Tensor) -> Tensor:
    """``ReLU(sum_k w_k A_k)`` with weights drawn from [-1, 1] (pytorch-grad-cam's null
    hypothesis)."""
    return weighted(list(weights), forward(layers, x)[layer + 1], relu=True)


def guidedgradcam(layers: Layers, x: Tensor, target: int, layer: int) -> Tensor:
    return guidedbackprop(layers, x, target) * enlarge(
        gradcam(layers, x, target, layer), tuple(x.shape[1:])
    )
