"""Gradients are the derivative of each photo's own score, or a warning says that they are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from tests.conftest import Made

STEP = 1e-6


def slope(model: nn.Module, x: Tensor, along: Tensor, target: int = 1) -> Tensor:
    """The derivative of each photo's score in a direction, by differences."""
    with torch.no_grad():
        return (model(x + STEP * along) - model(x - STEP * along))[:, target] / (2 * STEP)


def functional(channels: int) -> nn.Module:
    return Made(lambda net, x: F.batch_norm(x, torch.arange(8.0).to(x), torch.arange(1.0, 9.0).to(x)))


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "BatchNorm2d": nn.BatchNorm2d, "InstanceNorm2d": nn.InstanceNorm2d, "BatchNorm3d": nn.BatchNorm3d,
    "InstanceNorm3d": nn.InstanceNorm3d, "F.batch_norm": functional,
}  # fmt: skip
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x, "GELU": F.gelu, "SiLU": F.silu, "dropout": nn.Dropout(), "skip": lambda x: x + x.sin()
}  # fmt: skip


class Tokens(nn.Module):
    """A norm whose result becomes tokens behind a class token; or whose input was tokens with the sequence first."""

    def __init__(self, norm: str, between: str, *, sequence: bool) -> None:
        super().__init__()
        kind = nn.Conv3d if "3d" in norm else nn.Conv2d
        self.conv, self.norm, self.after = kind(3, 8, 3, 2, 1), NORMS[norm](8), kind(8, 8, 3, 1, 1)
        self.head, self.between, self.sequence = nn.Linear(8, 3), BETWEEN[between], sequence

    def forward(self, x: Tensor) -> Tensor:
        maps = F.leaky_relu(self.conv(x))
        if self.sequence:
            maps = maps.flatten(2).permute(2, 0, 1).contiguous().permute(1, 2, 0).reshape(maps.shape)
            return self.head(self.after(self.norm(maps)).tanh().flatten(2).mean(2))
        tokens = self.between(self.norm(maps)).flatten(2).transpose(1, 2)
        return self.head(torch.cat([tokens.new_zeros(len(x), 1, 8), tokens], 1).tanh().mean(1))


@pytest.mark.parametrize("norm", NORMS)
def test_of_one_photo_gradients_through_a_norm_are_the_derivative(norm: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, *[8] * (3 if "3d" in norm else 2), generator=g, dtype=torch.float64)
    methods = ["guidedbackprop", "fullgrad", "deeplift", "lrp", "layercam", "integratedgradients(steps=3)"]
    for between, sequence in [*((each, False) for each in BETWEEN), ("nothing", True)]:
        torch.manual_seed(1)
        model = Tokens(norm, between, sequence=sequence).double().eval()
        for photos in (x[:1], x):
            along = torch.randn(photos.shape, generator=g, dtype=torch.float64)
            values = explain.attribute(model, photos, "saliency(absolute=False)", target=1).values
            assert_close((values * along).flatten(1).sum(1), slope(model, photos, along), rtol=1e-6, atol=1e-9)
        if between != "GELU" and not sequence:
            continue
        kinds = {"target": 1, "layer": "conv", "batch_size": 2}  # the last point of a path is run alone
        alone, both = (explain.attribute(model, photos, methods, **kinds) for photos in (x[:1], x))
        for name in methods:
            name = name.partition("(")[0]
            assert_close(alone[name].values[0], both[name].values[0], rtol=1e-9, atol=1e-12, msg=f"{name} {between}")
