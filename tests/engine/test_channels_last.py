"""Images and videos with their channels last: as those with the channels first are explained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.testing import assert_close

import explain
from explain.methods.base import get_method
from tests.conftest import ATTENDING, Made, TinyNet, settled
from tests.methods.test_properties import quick

SIZE = (24, 20)
OFTEN = {"gradcam", "saliency", "occlusion", "lrp"}
SEARCHING = {"sufficient", "necessary", "featurepermutation", "drise", "refinecam"}


def channels_last(network: nn.Module) -> nn.Module:
    """The same network for inputs with the channels last."""
    return Made(lambda net, x: net.network(x.movedim(-1, 1)), network=network).eval()


def photos(channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(2, channels, *SIZE, generator=generator, dtype=torch.float64)


@pytest.fixture
def network() -> nn.Module:
    return settled(TinyNet()).double().eval()


def behind(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).contiguous()


@pytest.mark.filterwarnings("ignore:.* is zero everywhere", "ignore:.*ablationcam divides by")
@pytest.mark.parametrize(
    "method", sorted(set(explain.list_methods()) - ATTENDING - SEARCHING - {"cam"})
)
def test_every_method_explains_channels_last_as_it_explains_channels_first(
    method: str, network: nn.Module
) -> None:
    x = photos()
    few = quick(get_method(method))
    expected = explain.attribute(network, x, few, target=[1, 3])
    # None: the first convolution shows it, so that nothing is said
    for layout in ("NHWC", None) if method in OFTEN else ("NHWC",):
        found = explain.attribute(
            channels_last(network), behind(x), few, target=[1, 3], layout=layout
        )
        assert found.heatmap.shape == (2, *SIZE)
        assert_close(found.values, expected.values, rtol=1e-9, atol=1e-12)
        assert_close(found.heatmap, expected.heatmap, rtol=1e-9, atol=1e-12)
        assert (found.layer is None) or found.layer == f"network.{expected.layer}"


def test_a_gradient_is_that_of_plain_autograd(network: nn.Module) -> None:
    x = behind(photos()).requires_grad_()
    model = channels_last(network)
    (gradient,) = torch.autograd.grad(model(x)[:, 1].sum(), x)
    method = "saliency(absolute=False)"
    found = explain.attribute(model, explain.Inputs((x,), layout="NHWC"), method, target=1)
    assert_close(found.values, gradient.movedim(-1, 1))


@pytest.mark.parametrize("method", sorted(OFTEN))
def test_videos_may_have_their_channels_last_too(method: str) -> None:
    layers = [nn.Conv3d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten()]
    network = settled(nn.Sequential(*layers, nn.Linear(4, 5))).double().eval()
    x = torch.rand(2, 3, 6, 12, 10, dtype=torch.float64)
    expected = explain.attribute(network, x, method, target=1, layout="NCTHW")
    for layout in ("NTHWC", None):
        model = channels_last(network)
        found = explain.attribute(model, behind(x), method, target=1, layout=layout)
        assert_close(found.values, expected.values)


def of_functions(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A network whose convolution no module shows."""
    maps = F.conv2d(x.movedim(-1, 1), net.network[0].weight)
    return net.network[1:](maps)


def test_what_is_assumed_is_said_once() -> None:
    layers = [nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    network = settled(nn.Sequential(*layers, nn.Linear(4, 5))).double().eval()
    x = photos()
    expected = explain.attribute(network, x, "saliency", target=1)
    model = Made(of_functions, network=network).eval()
    with pytest.warns(explain.ExplainWarning, match="NHWC"):
        found = explain.attribute(model, behind(x), "saliency", target=1)
    assert_close(found.values, expected.values)
    explain.attribute(model, behind(x), "saliency", target=1)  # a warning would be an error here
    other = Made(of_functions, network=network).eval()
    explain.attribute(other, behind(x), "saliency", target=1, layout="NHWC")
    as_rows = explain.attribute(other, behind(x), "saliency", target=1, layout="NCHW")
    assert_close(as_rows.values, expected.values.movedim(1, -1))


def test_narrow_images_of_many_channels_stay_as_they_are() -> None:
    layers = [nn.Conv2d(8, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    network = settled(nn.Sequential(*layers, nn.Linear(4, 5))).double().eval()
    x = torch.rand(2, 8, 9, 3, dtype=torch.float64)
    assert explain.attribute(network, x, "saliency", target=1).heatmap.shape == (2, 9, 3)


def test_photos_with_channels_last_for_a_network_with_channels_first_are_refused(
    network: nn.Module,
) -> None:
    with pytest.raises(explain.ImageError, match="movedim"):
        explain.attribute(network, behind(photos()), "saliency", target=1)
    with pytest.raises(explain.ImageError, match="NHWC"):
        explain.attribute(network, photos()[:, :, None], "saliency", target=1, layout="NHWC")


def test_metrics_and_layers_are_the_same(network: nn.Module) -> None:
    x = photos()
    model = channels_last(network)
    metrics = ["deletion", "insertion", "infidelity", "averagedrop", "maxsensitivity"]
    methods = ["gradcam", "saliency"]
    expected = explain.evaluate(network, x, methods, metrics, target=1)
    found = explain.evaluate(model, behind(x), methods, metrics, target=1, layout="NHWC")
    for method in methods:
        for metric in metrics:
            assert_close(found[method][metric], expected[method][metric])
    grids = [call.grid for call in explain.list_layers(network, x)]
    found_grids = [call.grid for call in explain.list_layers(model, behind(x))]
    assert found_grids[: len(grids)] == grids


def test_an_explainer_gives_photos_as_the_model_takes_them(network: nn.Module) -> None:
    def preprocess(image: Image.Image) -> torch.Tensor:
        values = torch.from_numpy(np.array(image.resize(SIZE[::-1])))
        return values.permute(2, 0, 1).double() / 128 - 1

    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    photo = Image.fromarray(pixels)
    methods = ["gradcam", "occlusion(window=6)", "saliency"]
    expected = explain.Explainer(network, preprocess=preprocess)(photo, methods)
    explainer = explain.Explainer(channels_last(network), preprocess=preprocess, layout="NHWC")
    found = explainer(photo, methods)
    assert found.predictions == expected.predictions
    for name in expected:
        assert_close(found[name].values, expected[name].values)
        assert np.array_equal(found.overlay(name), expected.overlay(name))
    assert len(explainer([photo, photo], "gradcam")) == 2
    assert_close(found.record("gradcam")["input_size"], expected.record("gradcam")["input_size"])
