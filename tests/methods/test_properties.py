"""What holds for every method: an image is explained as it is alone, in any order and any batch, and
nothing is left behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models import VisionTransformer

import explain
from explain.methods import DeepLIFTSHAP, ExpectedGradients, Method
from explain.methods.base import get_method, options
from tests.conftest import ATTENDING, TinyNet, settled, snapshot

PHOTOS = torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
FEWER = {"samples": 4, "steps": 3, "grid": 3, "step": 3}
FEWER_MASKS = 96
"""Samples of methods that cover regions, whose designs take several for each."""
NOT_HERE = {"drise", "featurepermutation", "cheferbimodal", "refinecam"}
"""They need detected boxes, other images of the batch, another kind of token, several layers."""


def quick(method: Method) -> Method:
    """The method with as little work as it takes."""
    known = options(method)
    fewer: dict[str, Any] = {k: v for k, v in FEWER.items() if k in known}
    if known.get("samples", 0) >= 500:
        fewer["samples"] = FEWER_MASKS
    return replace(method, **fewer)


def vision_transformer() -> nn.Module:
    return VisionTransformer(12, 4, 2, 2, 8, 16, num_classes=5)


NAMES = sorted(set(explain.list_methods()) - NOT_HERE)
CONVOLUTIONAL = [quick(get_method(name)) for name in NAMES if name not in ATTENDING]
CONVOLUTIONAL += [replace(ExpectedGradients(3, PHOTOS[3:])), DeepLIFTSHAP(PHOTOS[4:])]
NETWORKS = {
    "convolutions": (TinyNet, {method.name: method for method in CONVOLUTIONAL}),
    "attention": (
        vision_transformer,
        {name: quick(get_method(name)) for name in NAMES if name in ATTENDING},
    ),
}


def maps_of(model: nn.Module, x: Tensor, methods: Any, target: Any, **more: Any) -> dict[str, Any]:
    return explain.attribute(model, x, list(methods.values()), target=target, **more)


@pytest.mark.filterwarnings("ignore::explain.ExplainWarning")
@pytest.mark.parametrize("network", NETWORKS)
def test_an_image_is_explained_as_alone_in_any_order_and_batch_and_nothing_is_left(
    network: str,
) -> None:
    build, methods = NETWORKS[network]
    model = settled(build()).double().eval()
    x = PHOTOS[:3]
    before = snapshot(model)
    together = maps_of(model, x, methods, [0, 1, 2], batch_size=5)
    turned = maps_of(model, x[[2, 0, 1]], methods, [2, 0, 1])
    assert snapshot(model) == before
    with torch.inference_mode():
        alone = maps_of(model.requires_grad_(False), x[1:2], methods, 1)
    for name, attribution in together.items():
        atol = 1e-10 * float(attribution.values.abs().max())
        exact = {"rtol": 1e-8, "atol": atol, "msg": name}
        assert_close(turned[name].values, attribution.values[[2, 0, 1]], **exact)
        assert_close(alone[name].values, attribution.values[1:2], **exact)
        if attribution.delta is not None:
            assert_close(alone[name].delta, attribution.delta[1:2], rtol=1e-6, atol=1e-10)
        if attribution.samples is not None:
            assert alone[name].samples == attribution[1].samples


@pytest.mark.filterwarnings("ignore::explain.ExplainWarning")
@pytest.mark.parametrize("network", NETWORKS)
def test_several_targets_give_what_each_of_them_gives(network: str) -> None:
    build, methods = NETWORKS[network]
    model = settled(build()).double().eval()
    x = PHOTOS[:1]
    several = explain.attribute(model, x, list(methods.values()), targets=[0, 2])
    for name, attribution in maps_of(model, x, methods, 2).items():
        atol = 1e-10 * float(attribution.values.abs().max())
        assert_close(several[1][name].values, attribution.values, rtol=1e-8, atol=atol, msg=name)
