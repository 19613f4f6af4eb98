"""Layers that a model keeps in a list of its own, as Keras does, where torch does not see them: the
same network with its layers registered is explained alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain._utils.modules import modules_of
from explain.hooks import capture, copied, intervene, record
from explain.hooks.interventions import Ablate
from explain.methods import LRP, AblationCAM, DeepLIFT, FullGrad, LayerCAM
from explain.relevance import Composite, Epsilon, When
from tests.conftest import snapshot

EXACT = Composite("exact", ((When(("convolution", "dense", "batchnorm")), Epsilon(0)),))
METHODS = {
    method.name: method
    for method in (LayerCAM(), AblationCAM(), LRP(composite=EXACT), DeepLIFT(), FullGrad())
}


class OfChannelsLast(nn.Module):
    """A layer of torch for maps with their channels last."""

    data_format = "channels_last"

    def __init__(self, layer: nn.Module, name: str) -> None:
        super().__init__()
        self.layer = layer
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class Joined(nn.Module):
    def __init__(self, dim: int, name: str) -> None:
        super().__init__()
        self.dim = dim
        self.name = name

    def forward(self, *maps: Tensor) -> Tensor:
        return torch.cat(maps, self.dim)


def parts() -> dict[str, nn.Module]:
    torch.manual_seed(2)
    return {
        "first": nn.Conv2d(3, 4, 3, padding=1),
        "norm": nn.BatchNorm2d(4),
        "left": nn.Conv2d(4, 3, 3, padding=1),
        "right": nn.Conv2d(4, 5, 1),
        "joined": Joined(1, "joined"),
        "last": nn.Conv2d(8, 6, 3, stride=2),
        "head": nn.Linear(6, 4),
    }


def run(layers: dict[str, nn.Module], x: Tensor, places: tuple[int, int]) -> Tensor:
    x = layers["norm"](layers["first"](x)).relu()
    x = layers["joined"](layers["left"](x), layers["right"](x).relu())
    return layers["head"](layers["last"](x).relu().mean(places))


class Registered(nn.Module):
    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        return run(dict(self.layers.items()), x, (2, 3))


class Keeps(nn.Module):
    """Has its layers in a list, and takes images with their channels last."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self._layers: list[nn.Module] = []
        for name, layer in layers.items():
            if name == "joined":
                self._layers.append(Joined(-1, name))
            elif name == "head":
                layer.name = name
                self._layers.append(layer)
            else:
                self._layers.append(OfChannelsLast(layer, name))

    def forward(self, x: Tensor) -> Tensor:
        return run({str(layer.name): layer for layer in self._layers}, x, (1, 2))


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module, Tensor]:
    """The two networks, and images for the registered one."""
    layers = {name: layer.double().eval() for name, layer in parts().items()}
    registered = Registered(**copy.deepcopy(layers)).eval()
    x = torch.rand(2, 3, 16, 12, dtype=torch.float64)
    return Keeps(**layers).eval(), registered, x


def last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous()


@pytest.mark.parametrize("method", METHODS)
def test_maps_are_those_of_the_network_with_registered_layers(
    method: str, pair: tuple[nn.Module, nn.Module, Tensor]
) -> None:
    keeps, registered, x = pair
    found = explain.attribute(keeps, last(x), METHODS[method], target=1, layout="NHWC")
    expected = explain.attribute(registered, x, METHODS[method], target=1)
    assert_close(found.values, expected.values, rtol=1e-9, atol=1e-12)
    if expected.layer is not None:
        assert found.layer == str(expected.layer).removeprefix("layers.") == "last"


@pytest.mark.parametrize("layer", ["first", "norm", "left", "joined"])
def test_kept_layers_have_names(layer: str, pair: tuple[nn.Module, nn.Module, Tensor]) -> None:
    keeps, registered, x = pair
    expected = explain.attribute(registered, x, "layercam", target=1, layer=f"layers.{layer}")
    module = next(kept for kept in keeps._layers if kept.name == layer)  # type: ignore[union-attr]
    for where in (layer, module):
        found = explain.attribute(keeps, last(x), "layercam", target=1, layer=where, layout="NHWC")
        assert found.layer == layer
        assert_close(found.values, expected.values, rtol=1e-9, atol=1e-12)


def test_kept_layers_come_back_as_they_were(pair: tuple[nn.Module, nn.Module, Tensor]) -> None:
    keeps, _, x = pair
    in_evaluation = explain.attribute(keeps, last(x), "layercam", target=1, layout="NHWC")
    kept = nn.ModuleList(keeps._layers).train()  # type: ignore[arg-type]
    before = snapshot(kept)
    found = explain.attribute(keeps, last(x), "layercam", target=1, layout="NHWC")
    assert snapshot(kept) == before
    assert_close(found.values, in_evaluation.values, rtol=0, atol=0)


def test_a_channel_of_a_kept_layer_is_ablated(pair: tuple[nn.Module, nn.Module, Tensor]) -> None:
    keeps, registered, x = pair
    ablate = Ablate("norm", channels=[2])
    with intervene(keeps, [ablate]), capture(keeps, "norm", gradients=False) as seen:
        scores = keeps(last(x))
    with intervene(registered, [Ablate("layers.norm", channels=[2])]):
        assert_close(scores, registered(x))
    assert not seen.activations["norm"][..., 2].any()


def test_changed_weights_of_kept_layers_are_seen(
    pair: tuple[nn.Module, nn.Module, Tensor],
) -> None:
    keeps, registered, x = pair
    for model, images, layout in ((keeps, last(x), "NHWC"), (registered, x, None)):
        explain.attribute(model, images, "layercam", target=1, layout=layout)
    twin = copied(keeps)
    for head in (keeps._layers[-1], registered.layers["head"]):  # type: ignore[index]
        head.weight.data[1] = torch.linspace(-1, 1, 6)
    expected = explain.attribute(registered, x, "layercam", target=1).values
    changed = explain.attribute(keeps, last(x), "layercam", target=1, layout="NHWC").values
    assert_close(changed, expected)
    unchanged = explain.attribute(twin, last(x), "layercam", target=1, layout="NHWC").values
    assert not torch.allclose(unchanged, expected)


def test_a_recording_names_kept_layers(pair: tuple[nn.Module, nn.Module, Tensor]) -> None:
    keeps, _, x = pair
    recording = record(keeps, last(x))
    of_convolutions = {step.module for step in recording.steps if step.name == "convolution"}
    assert of_convolutions == {f"{name}.layer" for name in ("first", "left", "right", "last")}


class Holder(nn.Module):
    def __init__(self, **kept: Any) -> None:
        super().__init__()
        self.__dict__.update(kept)


def named(name: str) -> nn.Module:
    layer = nn.ReLU()
    layer.name = name  # type: ignore[assignment]
    return layer


def test_each_module_has_one_name_and_those_of_torch_come_first() -> None:
    shared = named("conv")
    inner = Holder(blocks=(nn.Tanh(), named("b"), named("b"), named("a.b")))
    model = Holder(
        hidden=inner, kept=[shared, named("conv")], texts=["a", nn.ReLU()], by={1: inner}
    )
    model.conv = nn.Sequential(shared)
    inner.whole = [model]
    names = list(modules_of(model).values())
    assert names[:3] == [name for name, _ in model.named_modules()] == ["", "conv", "conv.0"]
    of_blocks = ["blocks.0", "b", "blocks.2", "blocks.3"]
    assert names[3:] == ["hidden", "kept.1", *(f"hidden.{name}" for name in of_blocks)]
