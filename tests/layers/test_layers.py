from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from explain import LayerError
from explain.attribution.api import attribute
from explain.data.inputs import as_inputs
from explain.hooks import HookGroup
from explain.layers import default_layer, list_layers
from explain.layers.recording import executed_modules
from explain.layers.summary import summary_is_current
from explain.methods import FullGrad, GradCAM, HiResCAM, list_methods
from explain.methods.base import get_method, uses_layer
from tests.conftest import Made, TinyNet, settled


@pytest.mark.parametrize(
    ("builder", "expected"),
    [
        ("mobilenet_v3_small", "features"),
        ("shufflenet_v2_x0_5", "conv5"),
        ("swin_t", "permute"),
        pytest.param("vit_b_32", "encoder.layers.encoder_layer_11.ln_1", marks=pytest.mark.long),
    ],
)
def test_the_default_layer_is_the_last_feature_map_before_pooling(
    builder: str, expected: str
) -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model(builder).eval()
    model = model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.zero_()
    size = 224 if builder == "vit_b_32" else 64
    assert default_layer(model, torch.zeros(1, 3, size, size)) == expected


def test_the_default_layer_is_remembered_only_while_the_model_is_the_same(
    net: TinyNet, x: torch.Tensor
) -> None:
    calls: list[int] = []
    net.register_forward_hook(lambda *_: calls.append(1))
    # it passes on what a functional ReLU made
    assert default_layer(net, x) == default_layer(net, x) == "dropout"
    assert len(calls) == 1  # its graph shows what the scores depend on
    net.dropout = nn.Flatten(2, 2)
    net.avgpool = nn.AdaptiveAvgPool2d(1)
    assert default_layer(net, x) == "dropout"
    assert len(calls) == 2


def exits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Bright inputs, and all while ``shallow`` is set, leave behind the first convolution."""
    maps = model.one(x).tanh()
    if not model.shallow and x.mean() <= 0.5:
        maps = model.two(maps)
    return model.head(maps.mean((2, 3)))


def exiting() -> nn.Module:
    parts = {"one": nn.Conv2d(3, 4, 3), "two": nn.Conv2d(4, 4, 3), "head": nn.Linear(4, 5)}
    return Made(exits, **parts, shallow=False).eval()


def followed(model: nn.Module, x: torch.Tensor) -> tuple[bool, str]:
    """Whether a look followed the way of an input, and the layer that is chosen then."""
    with torch.no_grad(), HookGroup(model) as group:
        ran = executed_modules(group, model)
        model(x)
    return summary_is_current(model, as_inputs(x), ran), default_layer(model, x)


@pytest.mark.parametrize("first", ["bright", "dark"])
def test_the_default_layer_does_not_depend_on_which_input_came_first(first: str) -> None:
    model = exiting()
    noise = torch.randn(2, 3, 8, 8)
    given = {"bright": (noise + 2, "one"), "dark": (noise - 2, "two")}
    assert default_layer(model, given[first][0]) == given[first][1]
    for name in ["bright", "dark", "dark", "bright"]:
        follows, layer = followed(model, given[name][0])
        assert layer == given[name][1]
        assert follows == (name == first)
        first = name
    model.shallow = True
    assert followed(model, given["dark"][0]) == (True, "one")
    assert followed(model, given["dark"][0]) == (True, "one")
    model.shallow = False
    assert followed(model, given["dark"][0]) == (False, "two")


def test_a_batch_that_goes_another_way_than_its_first_image_is_looked_at_whole() -> None:
    model = exiting()
    x = torch.stack([torch.full((3, 8, 8), 0.9), torch.full((3, 8, 8), -2.0)])
    # the first image alone leaves early, both together do not
    assert default_layer(model, x) == "one"
    assert followed(model, x) == (False, "two")
    assert followed(model, x) == (True, "two")


def test_a_model_without_maps_must_be_told_its_layer() -> None:
    with pytest.raises(LayerError, match="none of its layers gives a"):
        default_layer(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), torch.zeros(1, 3, 2, 2))


def crops(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The mean over each photo and its mirror image, in one batch."""
    scores = model.net(torch.cat([x, x.flip(3)]))
    return scores.unflatten(0, (2, len(x))).mean(0)


class Predicts(nn.Module):
    """Answers without running its own modules, as an object that keeps another copy of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = nn.Sequential(model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


@pytest.mark.parametrize(
    ("made", "remedy"),
    [
        (lambda net, x: Made(crops, net=nn.Sequential(net)), r"model\.net"),
        (lambda net, x: Predicts(net), r"model\.model"),
    ],
)
def test_what_hides_its_layers_is_told_what_to_give(
    made: Any, remedy: str, net: TinyNet, x: torch.Tensor
) -> None:
    model = made(net, x)
    with pytest.raises(LayerError, match=remedy) as caught:
        attribute(model, x, "gradcam", target=1)
    assert "\n" not in str(caught.value)


def test_a_layer_that_sees_several_crops_of_a_photo_is_refused_as_such(
    net: TinyNet, x: torch.Tensor
) -> None:
    model = Made(crops, net=net)
    with pytest.raises(LayerError, match="for each of"):
        attribute(model, x, "eigencam", target=1, layer="net.layer2")


def spectral(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    spectrum = model.spectrum(torch.fft.fft2(model.conv(x)))
    return model.fc(torch.fft.ifft2(spectrum).real.square().mean((2, 3)))


@pytest.mark.filterwarnings("error")
def test_a_spectrum_lies_nowhere() -> None:
    parts = {"conv": nn.Conv2d(3, 4, 3), "spectrum": nn.Identity(), "fc": nn.Linear(4, 5)}
    model = settled(Made(spectral, **parts)).double().eval()
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    for name in list_methods():
        if not uses_layer(get_method(name).in_layer()) or name in ("vitcx",):
            continue
        with pytest.raises(LayerError, match="complex"):
            attribute(model, x, name, target=1, layer="spectrum")
    assert default_layer(model, x) == "conv"
    assert [call.grid is None for call in list_layers(model, x)][:2] == [False, True]


@pytest.mark.parametrize("channels", [2, 4, 5])
def test_a_convolutions_map_has_its_channels_first_whatever_its_shape_looks_like(
    channels: int,
) -> None:
    """On 8 x 5 pixels, four maps of 2 x 2 look like a map of 4 x 2 with two channels."""
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, 2, 1),
        nn.Dropout(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 3),
    )
    x = torch.randn(2, 1, 8, 5)
    for layer, size in [("0", (4, 3)), ("1", (4, 3)), ("2", (2, 2)), ("3", (2, 2))]:
        found = attribute(model.eval(), x, GradCAM(relu=False), target=0, layer=layer)
        assert found.values.shape == (2, *size)
    assert attribute(model, x, FullGrad(), target=0).delta.abs().max() < 1e-5


def two_resolutions(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two maps, of which the finer one comes last, and scores of its cells."""
    model.passes += 1
    fine = model.fine(x).relu()
    coarse = F.interpolate(model.coarse(fine), fine.shape[-2:])
    return {"cells": model.head(model.mixed(fine + coarse))}


def test_a_single_cell_is_explained_at_the_coarsest_map_and_a_region_at_the_last_one() -> None:
    parts = {
        "fine": nn.Conv2d(3, 4, 3, padding=1),
        "coarse": nn.Conv2d(4, 4, 3, 4, padding=1),
        "mixed": nn.Conv2d(4, 4, 3, padding=1),
    }
    model = Made(two_resolutions, **parts, head=nn.Conv2d(4, 2, 1), passes=0).eval()
    x = torch.randn(2, 3, 16, 16)
    methods = [GradCAM(relu=False), HiResCAM()]
    for target, layer in (
        (lambda output: output["cells"][:, 1, 4, 4], "coarse"),
        (lambda output: output["cells"][:, 1, 2:12, 3:9].mean((1, 2)), "mixed"),
    ):
        alone = attribute(model, x, methods[0], target=target)
        passes = model.passes
        model.passes = 0
        both = attribute(model, x, methods, target=target)
        assert {each.layer for each in (alone, *both.values())} == {layer}
        assert model.passes <= passes  # it is looked for once
        model.passes = 0


def test_a_linear_layer_along_the_width_of_a_map_leaves_the_channels_first() -> None:
    mixer = nn.Sequential(
        nn.Conv2d(3, 16, 4, 4), nn.Linear(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    found = attribute(
        mixer.eval(), torch.randn(2, 3, 32, 32), GradCAM(relu=False), target=0, layer="1"
    )
    assert found.values.shape == (2, 8, 8)
