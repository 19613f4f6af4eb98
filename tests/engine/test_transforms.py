"""Transforms of `torch.func`, inside models and around explanations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ExplainError, MethodError
from tests.conftest import Made, settled

X = torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LOOKING = ["guidedbackprop", "fullgrad"]
METHODS = ["gradcam", "saliency", "integratedgradients", "ablationcam", "scorecam"]


def network(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    parts = {"conv": nn.Conv2d(3, 4, 3), "fc": nn.Linear(4, 3)}
    return settled(Made(forward, **parts)).double().eval()


def head(net: Any, maps: Tensor) -> Tensor:
    return net.fc(maps.clamp(min=0).mean((-2, -1)))


def plain(net: Any, x: Tensor) -> Tensor:
    return head(net, net.conv(x))


def with_other_parameters(net: Any, x: Tensor) -> Tensor:
    doubled = {name: p * 2 / 2 for name, p in net.conv.named_parameters()}
    return head(net, torch.func.functional_call(net.conv, doubled, (x,)))


def with_a_head_under_vmap(net: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda maps: head(net, maps))(net.conv(x))


def test_a_model_that_is_called_with_other_parameters_is_explained_exactly() -> None:
    methods = [*METHODS, *LOOKING]
    expected = explain.attribute(network(plain), X, methods, target=1)
    for name, a in explain.attribute(network(with_other_parameters), X, methods, target=1).items():
        assert_close(a.values, expected[name].values, rtol=1e-9, atol=1e-13)


def test_a_head_under_vmap_is_explained_exactly_or_refused() -> None:
    mapped = network(with_a_head_under_vmap)
    for method in LOOKING:
        with pytest.raises(MethodError, match=rf"{method} must see .* outside torch.vmap"):
            explain.attribute(mapped, X, method, target=1)
    expected = explain.attribute(network(plain), X, METHODS, target=1)
    for name, a in explain.attribute(mapped, X, METHODS, target=1).items():
        assert_close(a.values, expected[name].values, rtol=1e-9, atol=1e-13)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda function: torch.vmap(function)(X),
    "grad": lambda function: torch.func.grad(function)(X),
    "jvp": lambda function: torch.func.jvp(function, (X,), (X,)),
    "compile": lambda function: torch.compile(function, backend="eager")(X),
}


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:Dynamo does not know")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_an_explanation_inside_a_transform_is_refused_in_one_line(
    transform: Callable[[Any], Any],
) -> None:
    model = network(plain)

    def explained(x: Tensor) -> Tensor:
        x = x if x.ndim == 4 else x[None]
        return explain.attribute(model, x, "saliency", target=1).values.sum()

    with pytest.raises(ExplainError, match="an explanation must"):
        transform(explained)
