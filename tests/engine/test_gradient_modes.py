"""Models that switch gradients on or off themselves: exact, or refused where their own scores have
no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import UnusedLayerError
from explain.methods import GradCAM
from tests.conftest import Made, settled

X = torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SIGNED = GradCAM(relu=False)


def network(first: Callable[[bool], Any], second: Callable[[bool], Any]) -> nn.Module:
    """Two convolutions and a head; gradients are switched as said for each convolution."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with first(net.training):
            maps = net.one(x).tanh()
        with second(net.training):
            maps = net.two(maps).tanh()
        return net.fc(maps.mean((2, 3)))

    parts = {"one": nn.Conv2d(3, 4, 3), "two": nn.Conv2d(4, 6, 3), "fc": nn.Linear(6, 5)}
    return settled(Made(forward, **parts)).double().eval()


def as_it_is(training: bool) -> Any:
    return torch.set_grad_enabled(torch.is_grad_enabled())


def on(training: bool) -> Any:
    return torch.enable_grad()


@torch.enable_grad()
def plain_gradcam(model: nn.Module, layer: str) -> Tensor:
    maps: list[Tensor] = []
    with model.get_submodule(layer).register_forward_hook(lambda *call: maps.append(call[-1])):
        score = model(X)[:, 2].sum()
    (gradient,) = torch.autograd.grad(score, maps)
    return (gradient.mean((2, 3), keepdim=True) * maps[0]).sum(1).detach()


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("layer", ["one", "two"])
@pytest.mark.parametrize("switches", [(on, on), (on, as_it_is), (as_it_is, on)])
def test_a_model_that_switches_gradients_is_explained_as_autograd_sees_it(
    switches: Any, layer: str, frozen: bool
) -> None:
    model = network(*switches)
    expected = plain_gradcam(model, layer)
    model.requires_grad_(not frozen)
    for caller in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with caller():
            a = explain.attribute(model, X, SIGNED, target=2, layer=layer)
            assert torch.is_grad_enabled() == (caller is torch.enable_grad)
        assert_close(a.values, expected)


def test_a_layer_whose_gradient_the_model_itself_cuts_off_is_refused() -> None:
    model = network(torch.set_grad_enabled, as_it_is)
    with pytest.raises(UnusedLayerError, match="without no_grad"):
        explain.attribute(model, X, SIGNED, target=2, layer="one")
    values = explain.attribute(model, X, SIGNED, target=2, layer="two").values
    assert_close(values, plain_gradcam(model, "two"))
