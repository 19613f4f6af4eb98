"""Mixed precision of the caller, and transforms of `torch.func`, inside models and around
explanations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import explain
from explain import ExplainError, MethodError
from tests.conftest import TinyNet, settled

METHODS = [
    "gradcam",
    "saliency",
    "guidedbackprop",
    "fullgrad",
    "integratedgradients",
    "ablationcam",
    "scorecam",
]


@pytest.fixture
def image() -> torch.Tensor:
    return torch.randn(
        2, 3, 12, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )


class Called(nn.Module):
    """Calls a network with its own parameters, doubled and halved."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyNet()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = {name: p * 2 / 2 for name, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, own, (x,))


def test_a_model_that_is_called_with_other_parameters_is_explained_exactly(
    image: torch.Tensor,
) -> None:
    net = settled(Called()).double().eval()
    found = explain.attribute(net, image, METHODS, target=1, layer="net.layer2")
    expected = explain.attribute(net.net, image, METHODS, target=1, layer="layer2")
    for method in METHODS:
        torch.testing.assert_close(
            found[method].values, expected[method].values, rtol=1e-9, atol=1e-13
        )


class Mapped(nn.Module):
    """Runs its head on each image by itself."""

    def __init__(self, through: Callable[..., Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4, 3)
        self.through = through

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(lambda maps: self.fc(maps.clamp(min=0).mean((-2, -1))))(self.conv(x))


def test_a_head_under_vmap_is_explained_exactly_or_refused(image: torch.Tensor) -> None:
    mapped, plain = (
        settled(Mapped(through)).double().eval() for through in (torch.vmap, lambda head: head)
    )
    for method in METHODS:
        if method in ("fullgrad", "guidedbackprop"):
            with pytest.raises(MethodError, match=rf"{method} must see .* outside torch.vmap"):
                explain.attribute(mapped, image, method, target=1)
        else:
            found, expected = (
                explain.attribute(net, image, method, target=1) for net in (mapped, plain)
            )
            torch.testing.assert_close(found.values, expected.values, rtol=1e-9, atol=1e-13)


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda function, x: torch.vmap(function)(x),
    "grad": lambda function, x: torch.func.grad(function)(x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "compile": lambda function, x: torch.compile(function, backend="eager")(x),
}


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:Dynamo does not know")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_an_explanation_inside_a_transform_is_refused_in_one_line(
    transform: Callable[[Any, torch.Tensor], Any], image: torch.Tensor
) -> None:
    net = settled(TinyNet()).double().eval()

    def explained(x: torch.Tensor) -> torch.Tensor:
        x = x if x.ndim == 4 else x[None]
        return explain.attribute(net, x, "saliency", target=1).values.sum()

    with pytest.raises(ExplainError, match="an explanation must"):
        transform(explained, image)
