"""Gradients are the derivative of each photo's own score, or a warning says that they are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ExplainWarning
from tests.conftest import Made

STEP = 1e-6


def slope(model: nn.Module, x: Tensor, along: Tensor, target: int = 1) -> Tensor:
    """The derivative of each photo's score in a direction, by differences."""
    with torch.no_grad():
        return (model(x + STEP * along) - model(x - STEP * along))[:, target] / (2 * STEP)


def functional(channels: int) -> nn.Module:
    return Made(
        lambda net, x: F.batch_norm(x, torch.arange(8.0).to(x), torch.arange(1.0, 9.0).to(x))
    )


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "BatchNorm2d": nn.BatchNorm2d,
    "InstanceNorm2d": nn.InstanceNorm2d,
    "BatchNorm3d": nn.BatchNorm3d,
    "InstanceNorm3d": nn.InstanceNorm3d,
    "F.batch_norm": functional,
}
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "GELU": F.gelu,
    "dropout": nn.Dropout(),
    "skip": lambda x: x + x.sin(),
}


class Tokens(nn.Module):
    """A norm whose result becomes tokens behind a class token; or whose input was tokens with the
    sequence first."""

    def __init__(self, norm: str, between: str, *, sequence: bool) -> None:
        super().__init__()
        kind = nn.Conv3d if "3d" in norm else nn.Conv2d
        self.conv = kind(3, 8, 3, 2, 1)
        self.norm = NORMS[norm](8)
        self.after = kind(8, 8, 3, 1, 1)
        self.head = nn.Linear(8, 3)
        self.between = BETWEEN[between]
        self.sequence = sequence

    def forward(self, x: Tensor) -> Tensor:
        maps = F.leaky_relu(self.conv(x))
        if self.sequence:
            maps = (
                maps.flatten(2).permute(2, 0, 1).contiguous().permute(1, 2, 0).reshape(maps.shape)
            )
            return self.head(self.after(self.norm(maps)).tanh().flatten(2).mean(2))
        tokens = self.between(self.norm(maps)).flatten(2).transpose(1, 2)
        return self.head(torch.cat([tokens.new_zeros(len(x), 1, 8), tokens], 1).tanh().mean(1))


@pytest.mark.parametrize("norm", NORMS)
def test_of_one_photo_gradients_through_a_norm_are_the_derivative(norm: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, *[8] * (3 if "3d" in norm else 2), generator=g, dtype=torch.float64)
    methods = ["guidedbackprop", "fullgrad", "lrp", "layercam", "integratedgradients(steps=3)"]
    for between, sequence in [*((each, False) for each in BETWEEN), ("nothing", True)]:
        torch.manual_seed(1)
        model = Tokens(norm, between, sequence=sequence).double().eval()
        for photos in (x[:1], x):
            along = torch.randn(photos.shape, generator=g, dtype=torch.float64)
            values = explain.attribute(model, photos, "saliency(absolute=False)", target=1).values
            assert_close(
                (values * along).flatten(1).sum(1),
                slope(model, photos, along),
                rtol=1e-6,
                atol=1e-9,
            )
        if between != "GELU" and not sequence:
            continue
        # the last point of a path is run alone
        kinds = {"target": 1, "layer": "conv", "batch_size": 2}
        alone, both = (explain.attribute(model, photos, methods, **kinds) for photos in (x[:1], x))
        for name in methods:
            name = name.partition("(")[0]
            assert_close(
                alone[name].values[0],
                both[name].values[0],
                rtol=1e-9,
                atol=1e-12,
                msg=f"{name} {between}",
            )


class Coupled(nn.Module):
    """A network that normalises over the photos of the batch, whose scores depend on each other
    so."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6, track_running_stats=False)
        self.after = nn.Conv2d(6, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.conv(x))

    def behind(self, maps: Tensor) -> Tensor:
        return self.head(self.after(F.softplus(self.norm(maps))).relu().mean((2, 3)))


def test_of_a_batch_with_statistics_of_its_own_each_photo_has_its_own_gradient() -> None:
    torch.manual_seed(0)
    model = Coupled().double().eval()
    x = torch.rand(3, 3, 8, 8).double()
    targets = [1, 0, 2]
    methods = ["saliency(absolute=False)", "gradcam(relu=False)", "layercam", "occlusion(window=8)"]
    found = explain.attribute(
        model, x, [*methods, "integratedgradients(steps=1)"], target=targets, layer="conv"
    )
    for i, target in enumerate(targets):
        own = (torch.arange(3) == i)[:, None, None, None]
        maps = model.conv(x).detach().requires_grad_()
        half, z = (torch.where(own, share * x, x).requires_grad_() for share in (0.5, 1))
        (of_maps,) = torch.autograd.grad(model.behind(maps)[i, target], maps)
        of_pixels, at_half = (
            torch.autograd.grad(model(at)[i, target], at)[0][i] for at in (z, half)
        )
        drop = (model(x) - model(torch.where(own, 0, x)))[i, target].detach()
        expected = {
            "saliency": of_pixels,
            "gradcam": (of_maps.mean((2, 3), keepdim=True) * maps).sum(1)[i],
            "layercam": (of_maps.clamp(min=0) * maps).sum(1)[i].clamp(min=0),
            "integratedgradients": x[i] * at_half,
            "occlusion": drop.expand(8, 8),
        }
        for name, values in expected.items():
            assert_close(found[name].values[i], values.detach(), msg=f"{name} of photo {i}")


class Reversed(torch.autograd.Function):
    """As in domain adaptation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Swish(torch.autograd.Function):
    """A function of its own whose backward is its derivative, as in networks that save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.sigmoid() * (1 + x * (1 - x.sigmoid()))


def scaled(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: 0.1 * gradient)
    return x


def kept(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: None)
    return x


def through(function: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 6, 3), "head": nn.Linear(6, 3)}
    return (
        Made(
            lambda net, x: net.head(function(F.relu(net.conv(x)) + 0).mean((2, 3)).tanh()), **parts
        )
        .double()
        .eval()
    )


GRADIENTS = ["gradcam", "saliency", "inputxgradient"]


@pytest.mark.filterwarnings("ignore:gradcam is zero everywhere")
@pytest.mark.parametrize(
    "function", [Reversed.apply, Rounded.apply, scaled], ids=["reversal", "rounding", "hook"]
)
def test_a_backward_that_is_not_the_derivative_is_named(
    function: Callable[[Tensor], Tensor],
) -> None:
    x = torch.rand(2, 3, 8, 8).double()
    for name in [*GRADIENTS, "integratedgradients(steps=64)"]:
        with pytest.warns(ExplainWarning, match="derivative"):
            explain.attribute(through(function), x, name, target=1, layer="conv")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        explain.attribute(through(function), x, "deeplift", target=1)
    assert not any("integratedgradients" in str(each.message) for each in given)


@pytest.mark.filterwarnings("ignore:gradcam is zero everywhere")
@pytest.mark.parametrize("function", [Swish.apply, kept, F.silu], ids=["function", "hook", "plain"])
def test_a_backward_that_is_the_derivative_is_not_warned_of(
    function: Callable[[Tensor], Tensor],
) -> None:
    x = torch.rand(2, 3, 8, 8).double()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for name in [*GRADIENTS, "integratedgradients(steps=2)"]:
            explain.attribute(through(function), x, name, target=1, layer="conv")
            explain.attribute(through(function).float(), x.float(), name, target=1, layer="conv")
    assert not [each for each in given if "zero everywhere" not in str(each.message)]


def test_what_a_model_decouples_is_seen_by_integrated_gradients() -> None:
    x = torch.rand(2, 3, 8, 8).double()
    with pytest.warns(ExplainWarning, match="derivative"):
        explain.attribute(
            through(lambda h: h * (3 * h).sigmoid().detach()), x, "integratedgradients", target=1
        )
