"""Mixed precision of the caller, and transforms of `torch.func`, inside models and around
explanations."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import explain
from explain import ExplainError, MethodError, ModelError
from explain.methods import AblationCAM
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


def test_ablation_runs_in_the_callers_mixed_precision() -> None:
    net = settled(TinyNet()).eval()
    x = torch.randn(1, 3, 12, 10, generator=torch.Generator().manual_seed(3))
    kinds: list[torch.dtype] = []
    handle = net.fc.register_forward_hook(lambda module, args, output: kinds.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = explain.attribute(
            net, x, AblationCAM(relu=False), target=1, layer="layer2", batch_size=1
        )
        handle.remove()
        with torch.no_grad():
            maps = net.layer2(settled_input(net, x)).float()
            score = net(x)[0, 1].float()
            weights = [(score - without(net, x, k)) / score for k in range(maps.shape[1])]
    assert set(kinds) == {torch.bfloat16}
    assert len(kinds) > maps.shape[1]
    expected = (torch.stack(weights)[None, :, None, None] * maps).sum(1)
    torch.testing.assert_close(found.values, expected, rtol=1e-5, atol=1e-6)


def settled_input(net: Any, x: torch.Tensor) -> torch.Tensor:
    """What the second layer is given."""
    given: list[torch.Tensor] = []
    with net.layer2.register_forward_pre_hook(lambda module, args: given.append(args[0].clone())):
        net(x)
    return given[0]


def without(net: Any, x: torch.Tensor, channel: int) -> torch.Tensor:
    """The score when a channel of the second layer is zero."""

    def ablate(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, channel] = 0
        return output

    with net.layer2.register_forward_hook(ablate):
        return net(x)[0, 1].float()


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
        self.conv, self.fc, self.through = nn.Conv2d(3, 4, 3), nn.Linear(4, 3), through

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


def test_a_layer_inside_vmap_has_no_gradients_to_take() -> None:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = {"weight": torch.stack([self.conv.weight, -self.conv.weight])}
            maps = torch.vmap(lambda w: torch.func.functional_call(self.conv, w, (x,)))(weights)
            return maps.relu().mean((0, 3, 4))

    message = "layer must run outside torch.vmap and the other transforms of torch.func"
    with pytest.raises(ModelError, match=re.escape(message)):
        explain.attribute(Ensemble(), torch.randn(1, 3, 8, 8), target=1, layer="conv")


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:Dynamo does not know")
@pytest.mark.parametrize("through", ["vmap", "grad", "jvp", "compile"])
def test_an_explanation_inside_a_transform_is_refused_in_one_line(
    through: str, image: torch.Tensor
) -> None:
    net = settled(TinyNet()).double().eval()

    def explained(x: torch.Tensor) -> torch.Tensor:
        x = x if x.ndim == 4 else x[None]
        return explain.attribute(net, x, "saliency", target=1).values.sum()

    with pytest.raises(ExplainError, match="an explanation must"):
        if through == "vmap":
            torch.vmap(explained)(image)
        elif through == "grad":
            torch.func.grad(explained)(image)
        elif through == "jvp":
            torch.func.jvp(explained, (image,), (image,))
        else:
            torch.compile(explained, backend="eager")(image)


def test_a_relu_under_vmap_follows_the_rule(image: torch.Tensor) -> None:
    class Relu(Mapped):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.through(lambda maps: self.fc((maps.relu() * 1.5).mean((-2, -1))))(
                self.conv(x)
            )

    mapped, plain = (
        settled(Relu(through)).double().eval() for through in (torch.vmap, lambda head: head)
    )
    found, expected = (
        explain.attribute(net, image, "guidedbackprop", target=1) for net in (mapped, plain)
    )
    torch.testing.assert_close(found.values, expected.values, rtol=1e-9, atol=1e-13)
    assert found.coverage == expected.coverage
