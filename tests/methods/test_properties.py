"""What holds for every method: an image is explained as it is alone, in any order and any batch, and
nothing is left behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torchvision.models import VisionTransformer

import explain
from explain.methods import DeepLIFTSHAP, ExpectedGradients, Method
from explain.methods.base import get_method, options
from tests.conftest import ATTENDING, TinyNet, settled, snapshot
from tests.peers.common import random

PHOTOS = random(1, 6, 3, 12, 12)
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


NAMES = sorted(set(explain.list_methods()) - NOT_HERE)
CONVOLUTIONAL = [quick(get_method(name)) for name in NAMES if name not in ATTENDING]
CONVOLUTIONAL += [ExpectedGradients(3, PHOTOS[3:]), DeepLIFTSHAP(PHOTOS[4:])]
NETWORKS: dict[str, tuple[nn.Module, list[Method]]] = {
    "convolutions": (TinyNet(), list({method.name: method for method in CONVOLUTIONAL}.values())),
    "attention": (
        VisionTransformer(12, 4, 2, 2, 8, 16, num_classes=5),
        [quick(get_method(name)) for name in NAMES if name in ATTENDING],
    ),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::explain.ExplainWarning")
@pytest.mark.parametrize("network", NETWORKS)
def test_an_image_is_explained_as_alone_in_any_order_and_batch_and_nothing_is_left(
    network: str,
) -> None:
    """Several targets give what each of them gives."""
    kind, methods = NETWORKS[network]
    model = settled(kind).double().eval()
    x = PHOTOS[:3]
    before = snapshot(model)
    together = explain.attribute(model, x, methods, target=[0, 1, 2], batch_size=5)
    turned = explain.attribute(model, x[[2, 0, 1]], methods, target=[2, 0, 1])
    of_targets = explain.attribute(model, x[1:2], methods, targets=[3, 1])
    assert snapshot(model) == before
    with torch.inference_mode():
        model.requires_grad_(False)
        alone = explain.attribute(model, x[1:2], methods, target=1)
    for name, attribution in together.items():
        atol = 1e-10 * float(attribution.values.abs().max())
        exact = {"rtol": 1e-8, "atol": atol, "msg": name}
        assert_close(turned[name].values, attribution.values[[2, 0, 1]], **exact)
        for one in (alone[name], of_targets[1][name]):
            assert_close(one.values, attribution.values[1:2], **exact)
        if attribution.delta is not None:
            assert_close(alone[name].delta, attribution.delta[1:2], rtol=1e-6, atol=1e-10)
        if attribution.samples is not None:
            assert alone[name].samples == attribution[1].samples
