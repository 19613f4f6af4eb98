"""Copies with random weights: which weights, and in which order: that of the forward pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import explain
from explain import MetricError
from explain.data.inputs import as_inputs
from explain.metrics import MPRT
from explain.metrics.randomised import Randomised
from tests.conftest import Made, TinyNet, registered_backwards, snapshot


@pytest.fixture
def x(photos: torch.Tensor) -> torch.Tensor:
    return photos[:2]


def test_the_order_of_registration_decides_nothing(model: TinyNet, x: torch.Tensor) -> None:
    turned = registered_backwards(copy.deepcopy(model))
    assert [*turned.state_dict()] != [*model.state_dict()]
    names = Randomised(model, as_inputs(x)).layers
    assert Randomised(turned, as_inputs(x)).layers == names
    assert (names[0], names[-1]) == ("conv1", "fc")
    one, other = (explain.evaluate(net, x, "saliency", MPRT(steps=3)) for net in (model, turned))
    assert torch.equal(one["saliency"]["mprt"], other["saliency"]["mprt"])


def test_layers_are_initialised_on_one_copy_as_their_classes_do_it() -> None:
    """The copy in one of several states is what a new copy in this state is."""
    token = Made(lambda self, x: x * self.token, token=nn.Parameter(torch.arange(16.0)))
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.LayerNorm(16), token).eval()
    model[1].running_mean.fill_(5.0)
    model[2].bias = model[0].bias  # one tensor of two layers
    x = as_inputs(torch.rand(2, 3, 4, 4))
    original = snapshot(model)
    randomised = Randomised(model, x)
    assert randomised.layers == ["0", "2", "1", "4", "5"]
    for names in (["0", "1", "5"], ["2"], [], ["0", "1", "2", "4", "5"], ["1"]):
        values = randomised.of(names, 3).state_dict()
        alone = Randomised(model, x).of(names, 3).state_dict()
        torch.testing.assert_close(values, alone, rtol=0, atol=0)
    weights = randomised.of(["0", "1", "5"], 3)
    assert torch.equal(weights[1].running_mean, torch.zeros(4))
    assert sorted(weights[5].token.tolist()) == [*range(16)] != weights[5].token.tolist()
    assert torch.equal(weights[2].weight, model[2].weight)
    assert snapshot(model) == original
    torch.manual_seed(3 * 1_000_003)
    assert torch.equal(weights[0].weight, nn.Conv2d(3, 4, 3).weight)


def network(norm: Any = None) -> Any:
    """Two convolutions and a row of scores; ``norm`` makes another layer of each."""
    torch.manual_seed(0)
    layers = {"one": nn.Conv2d(3, 4, 3), "two": nn.Conv2d(4, 4, 3), "head": nn.Linear(4, 3)}
    for name, layer in layers.items():
        layers[name] = norm(layer.double()) if norm else layer.double()
    scores = lambda net, x: net.head(F.relu(net.two(F.relu(net.one(x)))).mean((2, 3)))  # noqa: E731
    return Made(scores, **layers).eval()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, nn.utils.weight_norm])
def test_under_weight_norm_the_weights_are_those_without_it(norm: Any, x: torch.Tensor) -> None:
    plain = network()
    model = network(norm)
    original = snapshot(model)
    random = Randomised(model, as_inputs(x)).of(["one", "two"], 4)
    expected = Randomised(plain, as_inputs(x)).of(["one", "two"], 4)
    torch.testing.assert_close(random(x), expected(x), rtol=1e-12, atol=1e-12)
    assert torch.equal(random.head.weight, model.head.weight)
    assert snapshot(model) == original


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_under_spectral_norm_weights_are_divided_by_their_norm(norm: Any, x: torch.Tensor) -> None:
    plain = network()
    model = network(norm)
    for _ in range(30):
        model.train()(x)  # by which its trained weights have their norm
    original = snapshot(model.eval())
    randomised = Randomised(model, as_inputs(x))
    random = randomised.of(["one", "two"], 4)
    random(x)  # hooks compute their weights here
    weight = random.two.weight.detach().flatten(1)
    expected = Randomised(plain, as_inputs(x)).of(["one", "two"], 4).two.weight.detach()
    ratio = weight / expected.flatten(1)
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio))
    assert torch.linalg.matrix_norm(weight, 2).item() == pytest.approx(1, abs=0.05)
    assert torch.equal(randomised.of([])(x), model(x))
    assert snapshot(model) == original


def with_hidden_layers() -> Made:
    """Layers in a plain list, one that is used twice, and a parameter of no module."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.alias(self.two(x) * self.loose["scale"])
        return self.head(F.relu(x).mean((2, 3)))

    norm = nn.BatchNorm2d(4, affine=False).eval()
    norm.running_var.fill_(3)
    two = nn.Conv2d(4, 4, 3).double()
    model = Made(forward, two=two, head=nn.Linear(4, 3).double(), alias=two)
    model.blocks = [nn.Conv2d(3, 4, 3).double(), norm.double()]
    model.loose = {"scale": nn.Parameter(torch.rand(4, 1, 1, dtype=torch.float64))}
    return model


def test_layers_outside_of_modules_are_those_that_run(x: torch.Tensor) -> None:
    model: Any = with_hidden_layers()
    outputs = model(x)
    scales = model.loose["scale"].clone()
    randomised = Randomised(model, as_inputs(x))
    conv, norm, two, scale, head = randomised.layers
    assert (two, head) == ("two", "head")
    random: Any = randomised.of([conv])
    assert not torch.isclose(random.blocks[0].weight, model.blocks[0].weight).any()
    assert torch.equal(random.loose["scale"], scales)
    random = randomised.of([norm, scale])
    assert torch.equal(random.blocks[0].weight, model.blocks[0].weight)
    assert (random.blocks[1].running_var == 1).all()
    assert sorted(random.loose["scale"].flatten()) == sorted(scales.flatten())
    assert torch.equal(model(x), outputs)


def test_layers_that_cannot_be_randomised_are_named(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(layer: nn.Linear) -> None:
        nn.init.zeros_(layer.weight)
        raise RuntimeError("no")

    model = nn.Sequential(nn.Flatten(), nn.Linear(360, 2)).double()
    randomised = Randomised(model, as_inputs(x))
    monkeypatch.setattr(nn.Linear, "reset_parameters", refuse)
    with pytest.raises(MetricError, match="layer '1' must"):
        randomised.of(["1"])
    assert torch.equal(randomised.of([])(x), model(x))
    outside = nn.Conv2d(3, 3, 3).double()
    closed = Made(lambda self, x: outside(x).mean((2, 3)))
    with pytest.raises(MetricError, match="attribute"):
        explain.evaluate(closed, x, "saliency", "mprt", target=0)
