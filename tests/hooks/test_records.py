from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchvision.models.densenet import DenseNet
from torchvision.models.mobilenetv2 import MobileNetV2
from torchvision.models.resnet import BasicBlock, ResNet

from explain import LayerError
from explain.hooks import HookGroup
from explain.hooks.capturing import Capture
from explain.hooks.layer_names import select_places
from tests.conftest import TinyNet, settled


def reference(
    model: nn.Module, x: torch.Tensor, layers: list[str], target: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Activation and gradient of each layer's last call, without hooks: nothing in place, plain
    autograd."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if getattr(module, "inplace", False):
            module.inplace = False
    kept: dict[str, torch.Tensor] = {}

    def keeping(name: str, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(*args: torch.Tensor) -> torch.Tensor:
            kept[name] = original(*args) * 1
            return kept[name].clone()

        return forward

    for name in layers:
        module = plain.get_submodule(name)
        module.forward = keeping(name, module.forward)  # type: ignore[method-assign]
    score = plain(x)[:, target].sum()
    gradients = torch.autograd.grad(score, [kept[name] for name in layers])
    return {
        name: (kept[name].detach(), gradient)
        for name, gradient in zip(layers, gradients, strict=True)
    }


def captured(
    model: nn.Module, x: torch.Tensor, layer: str, target: int, *, grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.set_grad_enabled(grad), HookGroup(model) as group:
        capture = Capture(group, select_places(model, layer), gradients=True)
        score = model(x.clone())[:, target].sum()
    capture.backward(score)
    record = capture.records[-1]
    assert record.gradient is not None
    return record.activation, record.gradient


@pytest.mark.parametrize("grad", [False, True], ids=["cut at the layer", "whole graph"])
def test_every_layer_of_a_network_full_of_in_place_operations_is_exact(grad: bool) -> None:
    model = settled(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4)).double().eval()
    x = torch.randn(1, 3, 17, 17, dtype=torch.float64)
    layers = [
        name for name, module in model.named_modules() if name and not list(module.children())
    ]
    expected = reference(model, x, layers, 1)
    for layer in layers[grad::2]:  # the others in the other pass
        activation, gradient = captured(model, x, layer, 1, grad=grad)
        expected_activation, expected_gradient = expected[layer]
        torch.testing.assert_close(activation, expected_activation, rtol=0, atol=0, msg=layer)
        scale = expected_gradient.abs().max()
        torch.testing.assert_close(
            gradient / scale, expected_gradient / scale, rtol=0, atol=1e-10, msg=layer
        )


FAMILIES = {
    "dense": (
        lambda: DenseNet(4, (2, 3), 8, num_classes=3),
        [
            "features.conv0",
            "features.norm0",
            "features.denseblock2.denselayer3.norm2",
            "features.norm5",
        ],
    ),
    "inverted": (
        lambda: MobileNetV2(3, width_mult=0.25),
        ["features.0.0", "features.3.conv.1.1", "features.17", "features.18.1"],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_other_families_are_exact(family: str) -> None:
    build, layers = FAMILIES[family]
    model = settled(build()).double().eval()
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    for layer, (expected_activation, expected_gradient) in reference(model, x, layers, 0).items():
        activation, gradient = captured(model, x, layer, 0, grad=False)
        assert torch.equal(activation, expected_activation), layer
        torch.testing.assert_close(
            gradient, expected_gradient, rtol=1e-9, atol=1e-9 * expected_gradient.abs().max().item()
        )


def test_branches_that_never_meet_below_are_both_captured() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a(x) * 2 + self.b(x) * 3).sum((2, 3))

    for frozen in (False, True):
        model = Branches().requires_grad_(not frozen)
        with torch.no_grad(), HookGroup(model) as group:
            capture = Capture(group, ["a", "b"], gradients=True)
            score = model(torch.ones(1, 1, 2, 2)).sum()
        capture.backward(score)
        gradients = {record.layer: record.gradient for record in capture.records}
        assert torch.equal(gradients["a"], torch.full((1, 1, 2, 2), 2.0))
        assert torch.equal(gradients["b"], torch.full((1, 1, 2, 2), 3.0))


def test_gradients_may_be_recorded_for_some_of_the_layers_which_begin_the_graph(
    net: TinyNet, x: torch.Tensor
) -> None:
    below: list[bool] = []
    with torch.no_grad(), HookGroup(net) as group:
        capture = Capture(group, ["conv1", "layer1", "layer2"], gradients=["layer2"])
        group.forward("layer1", lambda module, args, output: below.append(output.requires_grad))
        score = net(x)[:, 1].sum()
    assert [record.layer for record in capture.records] == ["conv1", "layer1", "layer2"]
    assert below == [False]
    capture.backward(score, retain_graph=True)
    assert [record.gradient is None for record in capture.records] == [True, True, False]
    gradient = reference(net, x, ["layer2"], 1)["layer2"][1]
    record = capture.records[-1]
    torch.testing.assert_close(record.gradient, gradient)
    direct = torch.autograd.grad(score, capture.sources_of(record), retain_graph=True)
    torch.testing.assert_close(capture.joined(record, direct), gradient)


def test_a_second_backward_gives_the_same_and_a_layer_out_of_reach_gives_none(
    net: TinyNet, x: torch.Tensor
) -> None:
    with torch.no_grad(), HookGroup(net) as group:
        capture = Capture(group, select_places(net, ["layer1", "layer2"]), gradients=True)
        output = net(x)
        early = capture.records[0]
    capture.backward(output[:, 0].sum(), retain_graph=True)
    first = early.gradient
    capture.backward(output[:, 1].sum(), retain_graph=True)
    second = early.gradient
    capture.backward(output[:, 0].sum(), retain_graph=True)
    assert first is not None
    assert second is not None
    assert torch.equal(first, early.gradient)
    assert not torch.equal(first, second)
    with torch.enable_grad():
        elsewhere = (net.fc.weight * 1).sum()
    capture.backward(elsewhere)
    assert early.gradient is None


def test_layers_without_usable_output_are_refused() -> None:
    class Odd(nn.Module):
        def __init__(self, result: object) -> None:
            super().__init__()
            self.result = result

        def forward(self, x: torch.Tensor) -> object:
            return self.result

    for result, message in (
        ("text", "must return a tensor, got str"),
        (torch.ones(1).long(), "floating-point"),
    ):
        model = nn.Sequential(Odd(result))
        with pytest.raises(LayerError, match=message), HookGroup(model) as group:
            Capture(group, ["0"], gradients=True)
            model(torch.ones(1))
