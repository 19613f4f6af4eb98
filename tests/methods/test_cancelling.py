"""Class activation maps of which nothing but rounding errors would be left are zero, and say so."""

from __future__ import annotations

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


@pytest.mark.xfail(strict=True, reason="needs the recording: which scores are constants")
@pytest.mark.parametrize("method", ["saliency", "occlusion(window=4)", "kernelshap(samples=40)"])
def test_a_score_that_does_not_depend_on_the_photo_has_a_map_of_zeros(method: str) -> None:
    """The mean of a normalised map is zero, whatever the photo."""
    model = Made(
        lambda net, x: net.head(net.norm(net.maps(x)).mean((2, 3))),
        maps=nn.Conv2d(3, 6, 3, padding=1),
        norm=nn.InstanceNorm2d(6),
        head=nn.Linear(6, 4),
    )
    x = torch.rand(2, 3, 12, 12, dtype=torch.float64)
    a = explain.attribute(settled(model).double().eval(), x, method, target=1)
    assert not a.values.any()
