"""Models that switch gradients on or off themselves: exact, or refused where their own scores have
no gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import explain
from explain import UnusedLayerError
from explain.methods import GradCAM
from tests.conftest import settled

X = torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SIGNED = GradCAM(relu=False)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 4, 3)
        self.two = nn.Conv2d(4, 6, 3)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.two(self.one(x).tanh()).tanh().mean((2, 3)))


class Flag(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(True):
            return super().forward(x)


class Begins(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            maps = self.one(x).tanh()
        return self.fc(self.two(maps).tanh().mean((2, 3)))


class Ends(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = self.one(x).tanh()
        with torch.enable_grad():
            maps = self.two(maps).tanh()
        return self.fc(maps.mean((2, 3)))


class InBlock(Plain):
    """Gradients are switched inside a module, as a decorated block does it."""

    def __init__(self) -> None:
        super().__init__()
        self.two = Enabled()


class Enabled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(4, 6, 3))

    @torch.enable_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def plain_gradcam(model: nn.Module, layer: str, target: int) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    with torch.enable_grad():
        with model.get_submodule(layer).register_forward_hook(
            lambda module, args, output: seen.append(output)
        ):
            score = model(X)[:, target].sum()
        gradient = torch.autograd.grad(score, seen[-1])[0]
    return (gradient.mean((2, 3), keepdim=True) * seen[-1]).sum(1).detach()


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("layer", ["one", "two"])
@pytest.mark.parametrize("kind", [Flag, Begins, Ends, InBlock])
def test_a_model_that_switches_gradients_is_explained_as_autograd_sees_it(
    kind: Callable[[], nn.Module], layer: str, frozen: bool
) -> None:
    model = settled(kind()).double().eval()
    expected = plain_gradcam(model, layer, 2)
    model.requires_grad_(not frozen)
    for caller in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with caller():
            found = explain.attribute(model, X, SIGNED, target=2, layer=layer)
            assert torch.is_grad_enabled() == (caller is torch.enable_grad)
        torch.testing.assert_close(found.values, expected)


def test_a_layer_whose_gradient_the_model_itself_cuts_off_is_refused() -> None:
    class Frozen(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(self.training):
                maps = self.one(x).tanh()
            return self.fc(self.two(maps).tanh().mean((2, 3)))

    model = settled(Frozen()).double().eval()
    with pytest.raises(UnusedLayerError, match="without no_grad"):
        explain.attribute(model, X, SIGNED, target=2, layer="one")
    found = explain.attribute(model, X, SIGNED, target=2, layer="two")
    torch.testing.assert_close(found.values, plain_gradcam(model, "two", 2))
