"""Class activation maps of which nothing but rounding errors would be left are zero, and say so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import explain
from explain import ExplainWarning
from explain.methods import GradCAM, XGradCAM
from tests.conftest import Made, settled

CHANNELS = 16


def normalised(norm: nn.Module) -> Made:
    """A map, a normalisation, and the means of what is positive."""
    return Made(
        lambda net, x: net.head(net.norm(net.maps(x)).relu().mean((2, 3))),
        maps=nn.Conv2d(3, CHANNELS, 3, padding=1),
        norm=norm,
        head=nn.Linear(CHANNELS, 5),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "method", ["gradcam", "gradcam(relu=False)", "shapleycam", "finercam", "guidedgradcam"]
)
def test_a_mean_gradient_of_rounding_errors_gives_an_empty_map(
    method: str, dtype: torch.dtype
) -> None:
    model = settled(normalised(nn.InstanceNorm2d(CHANNELS, affine=True))).to(dtype).eval()
    x = torch.rand(2, 3, 64, 64, dtype=dtype)
    with pytest.warns(ExplainWarning, match="gradients of layer maps add up to rounding errors"):
        values = explain.attribute(model, x, method, target=1, layer="maps").values
    assert not values.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_maps_that_add_up_to_nothing_have_no_weight_in_xgradcam(dtype: torch.dtype) -> None:
    model = settled(normalised(nn.InstanceNorm2d(CHANNELS))).to(dtype).eval()
    x = torch.rand(2, 3, 32, 32, dtype=dtype)
    with pytest.warns(ExplainWarning, match="maps of layer norm add up to rounding errors"):
        values = explain.attribute(model, x, XGradCAM(relu=False), target=1, layer="norm").values
    assert not values.any()


def test_a_map_is_as_it_was_where_the_gradients_of_some_channels_cancel() -> None:
    """Half of the channels are normalised (IBN-Net)."""

    def normalise_half(net: Made, maps: torch.Tensor) -> torch.Tensor:
        return torch.cat([net.norm(maps[:, : CHANNELS // 2]), maps[:, CHANNELS // 2 :]], 1)

    half = Made(normalise_half, norm=nn.InstanceNorm2d(CHANNELS // 2))
    model = settled(normalised(half))
    x = torch.rand(2, 3, 16, 16)
    maps = model.maps(x)
    scores = model.head(half(maps).relu().mean((2, 3)))
    (gradients,) = torch.autograd.grad(scores[:, 1].sum(), maps)
    expected = torch.einsum("nk,nkhw->nhw", gradients.mean((2, 3)), maps)
    values = explain.attribute(model, x, GradCAM(relu=False), target=1, layer="maps").values
    torch.testing.assert_close(values, expected.detach(), rtol=1e-5, atol=1e-7)


# Scores that do not depend on the photo


def pooled(head: nn.Module, answer: Callable[[torch.Tensor], torch.Tensor]) -> Made:
    """A layer, its mean over all places, and what a function makes of the scores of a head."""
    return Made(
        lambda net, x: answer(net.head(net.maps(x).relu().mean((2, 3)))),
        maps=nn.Conv2d(3, 6, 3, padding=1),
        head=head,
    )


def of_normalised(bias: bool) -> Made:
    """The mean of a normalised map is zero, whatever the photo."""
    return Made(
        lambda net, x: net.head(net.norm(net.maps(x)).mean((2, 3))),
        maps=nn.Conv2d(3, 6, 3, padding=1),
        norm=nn.InstanceNorm2d(6),
        head=nn.Linear(6, 4, bias=bias),
    )


def summed(scores: torch.Tensor) -> torch.Tensor:
    """Probabilities add up to one."""
    return scores.log_softmax(1).exp().sum(1, keepdim=True).expand(-1, 2)


OF_SCORES = ["occlusion(window=4)", "kernelshap(samples=40)", "lime(samples=40)"]
OF_GRADIENTS = ["saliency", "inputxgradient", "integratedgradients(steps=8)"]
CONSTANTS: dict[str, tuple[Callable[[], Made], list[str]]] = {
    "normalised": (lambda: of_normalised(True), [*OF_SCORES, *OF_GRADIENTS]),
    "normalised, no bias": (lambda: of_normalised(False), [*OF_SCORES, *OF_GRADIENTS]),
    "softmax, summed": (lambda: pooled(nn.Linear(6, 4), summed), OF_SCORES),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for name in CONSTANTS for method in CONSTANTS[name][1]]
)
def test_a_score_that_does_not_depend_on_the_photo_has_a_map_of_zeros(
    name: str, method: str, dtype: torch.dtype
) -> None:
    model = settled(CONSTANTS[name][0]()).to(dtype).eval()
    x = torch.rand(2, 3, 12, 12, dtype=dtype)
    with pytest.warns(ExplainWarning, match="rounding errors"):
        a = explain.attribute(model, x, method, target=1)
    assert not a.values.any()


def with_weights_times(share: float, *, bias: bool) -> nn.Module:
    """A network with so small weights that its scores are smaller than rounding errors of one."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=bias), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 2)
    )
    for weights in model.parameters():
        nn.init.uniform_(weights, -share, share)
    return model


def vanishing() -> nn.Module:
    """Saturated functions, one behind the other."""
    deep = [part for _ in range(12) for part in (nn.Linear(8, 8), nn.Sigmoid())]
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), *deep, nn.Linear(8, 2))


def saturated() -> nn.Module:
    """Probabilities of which float32 has one bit left."""
    head = nn.Linear(6, 2)
    nn.init.constant_(head.bias, 15.5)
    return pooled(head, torch.sigmoid)


REAL = {
    "small weights": lambda: with_weights_times(1e-6, bias=True),
    "small weights, no bias": lambda: with_weights_times(1e-6, bias=False),
    "vanishing": vanishing,
    "saturated": saturated,
}
LIT = {
    "noise": lambda x: x,
    "half of it black": lambda x: x * (torch.arange(x.shape[-1]) < 4),
    "one grey": torch.ones_like,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("photo", LIT)
@pytest.mark.parametrize("name", REAL)
def test_real_gradients_stay_however_small(name: str, photo: str, dtype: torch.dtype) -> None:
    model = settled(REAL[name]()) if name == "vanishing" else REAL[name]()
    model = model.to(dtype).eval()
    x = LIT[photo](torch.rand(2, 3, 8, 8)).to(dtype).requires_grad_()
    (expected,) = torch.autograd.grad(model(x)[:, 1].sum(), x)
    size = expected.abs().amax()
    assert 0 < size < 1e-3
    for method, times in (("inputxgradient", x.detach()), ("saliency", expected.sign())):
        a = explain.attribute(model, x.detach(), method, target=1)
        torch.testing.assert_close(a.values / size, expected * times / size)


@pytest.mark.parametrize("photo", LIT)
def test_real_changes_of_the_score_stay_however_small(photo: str) -> None:
    model = with_weights_times(1e-6, bias=True).double()
    x = LIT[photo](torch.rand(1, 3, 8, 8)).double()
    covered = x.repeat(4, 1, 1, 1)
    for number, (row, column) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)]):
        covered[number, :, row : row + 4, column : column + 4] = 0
    with torch.no_grad():
        drops = (model(x) - model(covered))[:, 1].reshape(2, 2)
    a = explain.attribute(model, x, "occlusion(window=4, stride=4)", target=1)
    size = drops.abs().amax()
    assert 0 < size < 1e-9
    expected = drops.repeat_interleave(4, 0).repeat_interleave(4, 1)
    torch.testing.assert_close(a.values[0] / size, expected / size, rtol=1e-5, atol=1e-5)
