"""Networks of Keras, on PyTorch: as the same network in plain PyTorch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.methods import DeepLIFT, GradCAM, IntegratedGradients, LayerCAM, Saliency

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="Keras comes with the extra 'peers'")

METHODS = {
    method.name: method
    for method in (
        GradCAM(relu=False),
        LayerCAM(),
        Saliency(),
        IntegratedGradients(),
        DeepLIFT(),
    )
}


def of_keras() -> Any:
    keras.utils.set_random_seed(3)
    double: dict[str, Any] = {"dtype": "float64", "bias_initializer": "random_normal"}
    convolution = keras.layers.Conv2D
    image = keras.Input((24, 20, 3), dtype="float64")
    first = convolution(4, 3, padding="same", activation="relu", name="first", **double)(image)
    side = convolution(4, 1, name="side", **double)(first)
    added = keras.layers.Add(name="added", dtype="float64")([first, side])
    joined = keras.layers.Concatenate(name="joined", dtype="float64")([added, first])
    block = keras.Sequential(
        [
            convolution(6, 3, strides=2, name="inner", **double),
            keras.layers.ReLU(name="relu", dtype="float64"),
        ],
        name="block",
    )
    pooled = keras.layers.GlobalAveragePooling2D(dtype="float64")(block(joined))
    return keras.Model(image, keras.layers.Dense(4, name="head", **double)(pooled))


class Plain(nn.Module):
    """The same network with the channels first, and the layers whose maps are looked at."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.weights = [variable.value.detach() for variable in model.weights]
        self.added = nn.Identity()
        self.joined = nn.Identity()
        self.relu = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        weights = iter(self.weights)

        def convolved(x: Tensor, **options: int) -> Tensor:
            return F.conv2d(x, next(weights).permute(3, 2, 0, 1), next(weights), **options)

        first = convolved(x, padding=1).relu()
        added = self.added(first + convolved(first))
        joined = self.joined(torch.cat([added, first], 1))
        last = self.relu(convolved(joined, stride=2).relu())
        return last.mean((2, 3)) @ next(weights) + next(weights)


@pytest.mark.parametrize("method", METHODS)
def test_a_network_of_keras_is_explained_as_one_of_pytorch(method: str) -> None:
    model = of_keras()
    plain = Plain(model)
    x = torch.rand(2, 3, 24, 20, dtype=torch.float64)
    last = x.permute(0, 2, 3, 1).contiguous()
    assert_close(model(last), plain(x))
    layers = [(None, None)]
    if "cam" in method:
        layers = [(None, "relu"), ("block.relu", "relu"), ("added", "added"), ("joined", "joined")]
    for name, name_in_plain in layers:
        found = explain.attribute(model, last, METHODS[method], target=1, layer=name, layout="NHWC")
        expected = explain.attribute(plain, x, METHODS[method], target=1, layer=name_in_plain)
        assert_close(found.values, expected.values, rtol=1e-5, atol=1e-9)
        if name_in_plain is not None:
            assert found.layer == (name or "block")
