"""Every method again, slowly and plainly: explicit forward and backward, no hooks, no autograd.

The network is a list of layers, each a tuple: ("conv", weight, bias), ("relu",), ("mean",) over positions,
("linear", weight, bias). `forward` keeps every value; `backward` walks back by hand.
"""

from __future__ import annotations

import torch
from torch import nn

Layer = tuple[object, ...]


def module_of(layers: list[Layer]) -> nn.Sequential:
    """Build the same network out of torch's modules, with in-place ReLUs."""
    parts: list[nn.Module] = []
    for kind, *values in layers:
        if kind == "conv":
            weight, bias = values
            conv = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2:], padding=1).double()
            conv.weight.data, conv.bias.data = weight.clone(), bias.clone()
            parts.append(conv)
        elif kind == "relu":
            parts.append(nn.ReLU(inplace=True))
        elif kind == "mean":
            parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        elif kind == "linear":
            weight, bias = values
            linear = nn.Linear(weight.shape[1], weight.shape[0]).double()
            linear.weight.data, linear.bias.data = weight.clone(), bias.clone()
            parts.append(linear)
    return nn.Sequential(*parts).eval()


def conv_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A 3x3 convolution with one pixel of padding, one output at a time; ``x`` is ``(C, H, W)``."""
    _, height, width = x.shape
    padded = torch.zeros(x.shape[0], height + 2, width + 2, dtype=x.dtype)
    padded[:, 1:-1, 1:-1] = x
    out = torch.zeros(weight.shape[0], height, width, dtype=x.dtype)
    for k in range(weight.shape[0]):
        for i in range(height):
            for j in range(width):
                out[k, i, j] = (padded[:, i : i + 3, j : j + 3] * weight[k]).sum() + bias[k]
    return out


def conv_backward(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of `conv_forward` in its input: each output hands its gradient to the window that it read."""
    outputs, height, width = gradient.shape
    padded = torch.zeros(weight.shape[1], height + 2, width + 2, dtype=gradient.dtype)
    for k in range(outputs):
        for i in range(height):
            for j in range(width):
                padded[:, i : i + 3, j : j + 3] += gradient[k, i, j] * weight[k]
    return padded[:, 1:-1, 1:-1]


def forward(layers: list[Layer], x: torch.Tensor) -> list[torch.Tensor]:
    """Return the input ``(C, H, W)`` and the output of every layer."""
    values = [x]
    for kind, *parameters in layers:
        now = values[-1]
        if kind == "conv":
            values.append(conv_forward(now, *parameters))
        elif kind == "relu":
            values.append(torch.where(now > 0, now, torch.zeros_like(now)))
        elif kind == "mean":
            values.append(torch.stack([channel.sum() / channel.numel() for channel in now]))
        elif kind == "linear":
            weight, bias = parameters
            values.append(torch.stack([(row * now).sum() + b for row, b in zip(weight, bias, strict=True)]))
    return values


def backward(layers: list[Layer], values: list[torch.Tensor], target: int, rule: str = "plain") -> list[torch.Tensor]:
    """Return the gradient of the target's score in the input and in the output of every layer."""
    gradient = torch.zeros_like(values[-1])
    gradient[target] = 1
    gradients = [gradient]
    for (kind, *parameters), before in zip(reversed(layers), reversed(values[:-1]), strict=True):
        if kind == "conv":
            gradient = conv_backward(gradient, parameters[0])
        elif kind == "relu":
            gradient = torch.where(before > 0, gradient, torch.zeros_like(gradient))
            if rule == "guided":
                gradient = torch.where(gradient > 0, gradient, torch.zeros_like(gradient))
        elif kind == "mean":
            gradient = (gradient / before[0].numel())[:, None, None].expand_as(before)
        elif kind == "linear":
            weight = parameters[0]
            gradient = sum(weight[row] * gradient[row] for row in range(len(weight)))
        gradients.insert(0, gradient)
    return gradients


def enlarge(values: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Bilinear interpolation between the centres of cells, one pixel at a time; the border values go on outside."""
    height, width = values.shape
    out = torch.zeros(size, dtype=values.dtype)
    for i in range(size[0]):
        for j in range(size[1]):
            y = min(max((i + 0.5) * height / size[0] - 0.5, 0), height - 1)
            x = min(max((j + 0.5) * width / size[1] - 0.5, 0), width - 1)
            top, left = int(y), int(x)
            bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
            upper = values[top, left] * (1 - (x - left)) + values[top, right] * (x - left)
            lower = values[bottom, left] * (1 - (x - left)) + values[bottom, right] * (x - left)
            out[i, j] = upper * (1 - (y - top)) + lower * (y - top)
    return out


def gradcam(layers: list[Layer], x: torch.Tensor, target: int, layer: int, *, relu: bool = True) -> torch.Tensor:
    values = forward(layers, x)
    activation, gradient = values[layer + 1], backward(layers, values, target)[layer + 1]
    cam = torch.zeros(activation.shape[1:], dtype=x.dtype)
    for k in range(len(activation)):
        cam += gradient[k].sum() / gradient[k].numel() * activation[k]
    return torch.where(cam > 0, cam, torch.zeros_like(cam)) if relu else cam


def saliency(layers: list[Layer], x: torch.Tensor, target: int) -> torch.Tensor:
    return backward(layers, forward(layers, x), target)[0].abs()


def inputxgradient(layers: list[Layer], x: torch.Tensor, target: int) -> torch.Tensor:
    return backward(layers, forward(layers, x), target)[0] * x


def guidedbackprop(layers: list[Layer], x: torch.Tensor, target: int) -> torch.Tensor:
    return backward(layers, forward(layers, x), target, "guided")[0]


def guidedgradcam(layers: list[Layer], x: torch.Tensor, target: int, layer: int) -> torch.Tensor:
    return guidedbackprop(layers, x, target) * enlarge(gradcam(layers, x, target, layer), tuple(x.shape[1:]))
