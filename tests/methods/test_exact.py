"""Each method against its slow, plain computation in float64, and against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import explain
from explain.methods import GradCAM, InputXGradient, Saliency
from tests.conftest import TinyNet, settled
from tests.methods import plain


def random_network(seed: int) -> list[plain.Layer]:
    g = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * 0.5

    return [
        ("conv", values(4, 3, 3, 3), values(4)),
        ("relu",),
        ("conv", values(5, 4, 3, 3), values(5)),
        ("relu",),
        ("mean",),
        ("linear", values(6, 5), values(6)),
    ]


def photo(seed: int, shape: tuple[int, ...] = (2, 3, 6, 5)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PLAIN: dict[str, Callable[..., torch.Tensor]] = {
    "saliency": plain.saliency,
    "inputxgradient": plain.inputxgradient,
    "guidedbackprop": plain.guidedbackprop,
    "gradcam": lambda layers, x, target: plain.gradcam(layers, x, target, 3),
    "guidedgradcam": lambda layers, x, target: plain.guidedgradcam(layers, x, target, 3),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", explain.list_methods())
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")  # a random network may have nothing to say for a class
def test_a_method_equals_its_plain_computation(method: str, seed: int) -> None:
    layers, x = random_network(seed), photo(seed + 10)
    model = plain.module_of(layers)
    for target in (0, 4):
        found = explain.attribute(model, x, method, target=target, layer="3")
        for i in range(len(x)):
            expected = PLAIN[method](layers, x[i], target)
            torch.testing.assert_close(found.values[i], expected, rtol=1e-8, atol=1e-12)
            assert found.score[i].item() == pytest.approx(plain.forward(layers, x[i])[-1][target].item(), rel=1e-10)


@pytest.mark.parametrize("layer", ["0", "1", "2", "3"])
def test_gradcam_is_exact_at_every_layer_with_and_without_rectification(layer: str) -> None:
    layers, x = random_network(7), photo(8)
    for relu in (True, False):
        found = explain.attribute(plain.module_of(layers), x, GradCAM(relu=relu), target=2, layer=layer)
        for i in range(len(x)):
            expected = plain.gradcam(layers, x[i], 2, int(layer), relu=relu)
            torch.testing.assert_close(found.values[i], expected, rtol=1e-8, atol=1e-12)


def test_the_gradient_is_what_finite_differences_say(net: TinyNet) -> None:
    x = photo(3, (1, 3, 8, 8))
    found = explain.attribute(net, x, Saliency(absolute=False), target=1).values
    step = 1e-6
    for position in [(0, 0, 0), (1, 3, 4), (2, 7, 7), (0, 5, 2)]:
        shift = torch.zeros_like(x)
        shift[0][position] = step
        slope = (net(x + shift)[0, 1] - net(x - shift)[0, 1]).item() / (2 * step)
        assert found[0][position].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


class GuidedFunction(torch.autograd.Function):
    """A ReLU whose backward is the guided rule, to put in the place of every ReLU of a network."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient.clamp(min=0) * (x > 0)


@pytest.mark.parametrize(
    "builder", ["alexnet", "resnet18", "densenet121", "googlenet", "inception_v3", "shufflenet_v2_x0_5"]
)
def test_guided_backprop_misses_no_relu_of_torchvision(builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules and functions alike: the reference replaces what they all end in."""
    extra = {"init_weights": False} if builder in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(builder, num_classes=3, **extra)
    model = settled(model).double().eval()
    side = {"inception_v3": 75, "alexnet": 63}.get(builder, 32)
    x = photo(5, (1, 3, side, side))
    found = explain.attribute(model, x, "guidedbackprop", target=1).values

    def guided(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        return GuidedFunction.apply(x)

    monkeypatch.setattr(F, "relu", guided)
    monkeypatch.setattr(torch, "relu", guided)
    source = x.clone().requires_grad_()
    expected = torch.autograd.grad(model(source)[0, 1], source)[0]
    assert expected.abs().max() > 0
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-10)


def test_heatmaps_are_divided_by_their_maximum_and_never_shifted() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    nn.init.constant_(model[0].weight, 2.0)
    constant = explain.attribute(model, torch.ones(1, 1, 4, 6), "gradcam", target=0, layer="0")
    assert torch.equal(constant.heatmap, torch.ones(1, 4, 6))
    ramp = torch.linspace(1, 2, 24).reshape(1, 1, 4, 6)
    assert explain.attribute(model, ramp, "gradcam", target=0, layer="0").heatmap.min().item() == pytest.approx(0.5)
    signed = explain.attribute(model, ramp - 1.5, GradCAM(relu=False), target=0, layer="0")
    assert signed.values.min() < 0
    assert signed.heatmap.min() == 0
    assert signed.signed.min().item() == pytest.approx(-1)


def test_heatmaps_of_pixel_methods_take_the_largest_channel_or_the_sum() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 2, 1, bias=False))
    model[1].weight.data = torch.tensor([[1.0, 0.0, -4.0, 1.0, 2.0, 1.0]])
    x = torch.ones(1, 3, 1, 2)
    assert explain.attribute(model, x, "saliency", target=0).heatmap.tolist() == [[[1.0, 0.25]]]
    assert explain.attribute(model, x, InputXGradient(), target=0).heatmap.tolist() == [[[0.5, 1.0]]]


def test_several_layers_are_fused_and_each_map_is_kept(net: TinyNet, x: torch.Tensor) -> None:
    both = explain.attribute(net, x, "gradcam", target=1, layer=["layer1", "layer2"])
    assert both.layer == ("layer1", "layer2")
    assert both.values.shape == (3, 12, 10)
    total = torch.zeros(3, 12, 10, dtype=torch.float64)
    for name in both.layer:
        alone = explain.attribute(net, x, "gradcam", target=1, layer=name).values
        torch.testing.assert_close(both.maps[name], alone, rtol=1e-12, atol=1e-14)
        for i in range(3):
            total[i] += plain.enlarge(alone[i] / alone[i].max(), (12, 10)) / 2
    torch.testing.assert_close(both.values, total, rtol=1e-9, atol=1e-12)
    assert explain.attribute(net, x, "saliency", layer=["layer1", "layer2"]).layer is None
