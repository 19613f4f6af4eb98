from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from explain import LayerError
from explain.hooks import HookGroup
from explain.hooks.capturing import Capture
from explain.hooks.layer_names import select_places
from tests.conftest import settled


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
