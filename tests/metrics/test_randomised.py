"""Which weights randomisation reaches, and in which order: that of the forward pass, whatever was
registered where."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import explain
from explain import MetricError
from explain.data.inputs import as_inputs
from explain.metrics import MPRT, EfficientMPRT
from explain.metrics.randomised import Randomised
from explain.metrics.sanity import DependsOnModel
from explain.metrics.verdict import check_maps
from explain.targets import ClassTarget
from tests.conftest import TinyNet, registered_backwards, snapshot

METRICS = [
    *(MPRT(order=order, steps=3) for order in ("top", "bottom", "independent")),
    EfficientMPRT(),
    DependsOnModel(),
]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(
        2, 3, 12, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def judged(model: nn.Module, x: torch.Tensor, metrics: Any = METRICS) -> dict[str, list[float]]:
    table = explain.evaluate(model, x, ["inputxgradient", "guidedbackprop"], metrics, target=[1, 0])
    return {f"{row} {name}": value.tolist() for row in table for name, value in table[row].items()}


def test_the_order_of_registration_decides_nothing(model: TinyNet, x: torch.Tensor) -> None:
    turned = registered_backwards(copy.deepcopy(model))
    assert [*turned.state_dict()] != [*model.state_dict()]
    assert torch.equal(turned(x), model(x))
    assert judged(turned, x) == judged(model, x)
    names = Randomised(model, as_inputs(x)).layers
    assert Randomised(turned, as_inputs(x)).layers == names
    assert names[0] == "conv1"
    assert names[-1] == "fc"
    verdicts = []
    for each in (model, turned):
        found = explain.attribute(each, x[:1], "guidedbackprop", target=1)
        method = explain.methods.base.get_method("guidedbackprop")
        verdicts.append(
            check_maps(each, x[:1], [(method, found)], ClassTarget((1,)), "it").to_dict()
        )
    assert verdicts[0] == verdicts[1]


class Net(nn.Module):
    """Two convolutions and a row of scores; ``norm`` makes another layer of each."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)
        self.double().eval()
        for name in ("one", "two", "head"):
            setattr(self, name, norm(getattr(self, name)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(F.relu(self.two(F.relu(self.one(x)))).mean((2, 3)))
        return scores


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    "norm", [parametrizations.weight_norm, nn.utils.weight_norm], ids=["parametrization", "hook"]
)
def test_under_weight_norm_the_same_weights_are_drawn_as_without_it(
    norm: Any, x: torch.Tensor
) -> None:
    plain = Net()
    other = Net(norm)
    before = snapshot(other)
    drawn, expected = (
        Randomised(net, as_inputs(x)).of(["one", "two"], 4).eval() for net in (other, plain)
    )
    torch.testing.assert_close(drawn(x), expected(x), rtol=1e-12, atol=1e-12)
    for layer in ("one", "two", "head"):
        torch.testing.assert_close(
            getattr(drawn, layer).weight, getattr(expected, layer).weight, rtol=1e-12, atol=0
        )
        assert torch.equal(getattr(drawn, layer).weight, getattr(other, layer).weight) == (
            layer == "head"
        )
    found = judged(other, x)
    wanted = judged(plain, x)
    assert all(found[name] == pytest.approx(wanted[name], abs=1e-9) for name in wanted)
    assert snapshot(other) == before


@pytest.mark.parametrize(
    "norm",
    [parametrizations.spectral_norm, nn.utils.spectral_norm],
    ids=["parametrization", "hook"],
)
def test_under_spectral_norm_weights_are_drawn_and_divided_by_their_own_norm(
    norm: Any, x: torch.Tensor
) -> None:
    plain = Net()
    other = Net(norm)
    for _ in range(30):
        other.train()(x)  # by which its trained weights have their norm
    before = snapshot(other.eval())
    copied = Randomised(other, as_inputs(x))
    drawn = copied.of(["one", "two"], 4)
    expected = Randomised(plain, as_inputs(x)).of(["one", "two"], 4)
    drawn(x)  # hooks compute their weights here
    for layer in ("one", "two"):
        weight, own = (getattr(net, layer).weight.detach() for net in (expected, drawn))
        assert torch.corrcoef(torch.stack([weight.flatten(), own.flatten()]))[0, 1] > 1 - 1e-12
        assert torch.linalg.matrix_norm(own.flatten(1), 2).item() == pytest.approx(1, abs=0.05)
    as_it_was = copied.of([])
    assert torch.equal(as_it_was(x), other(x))
    assert snapshot(other) == before


def test_parametrizations_without_an_inverse_and_pruned_weights_are_random_too(
    x: torch.Tensor,
) -> None:
    class Symmetric(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w + w.mT

    def both(layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.Linear):
            prune.random_unstructured(layer, "weight", 0.5)
            return layer
        parametrize.register_parametrization(layer, "weight", Symmetric())
        return layer

    torch.manual_seed(0)
    model = Net(both)
    drawn = Randomised(model, as_inputs(x)).of(Randomised(model, as_inputs(x)).layers)
    drawn(x)
    for layer in ("one", "two"):
        own = getattr(drawn, layer).weight
        trained = getattr(model, layer).weight
        assert torch.equal(own, own.mT)
        assert not torch.isclose(own, trained).any()
    pruned = model.head.weight_mask == 0
    assert (drawn.head.weight[pruned] == 0).all()
    assert not torch.isclose(drawn.head.weight[~pruned], model.head.weight[~pruned]).any()


class Hidden(nn.Module):
    """Layers in a plain list, a layer that is used twice, and parameters of no module; all in
    another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3)
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.blocks = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)]
        self.loose = {"scale": nn.Parameter(torch.rand(4, 1, 1))}
        self.alias = self.twice
        self.unused = nn.Linear(2, 2)
        for module in (self, *self.blocks):
            module.double().eval()
        self.loose["scale"].data = self.loose["scale"].double()
        self.blocks[1].running_var.fill_(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.head.weight.dtype, self.head.weight.shape  # says nothing of when it is used
        for block in self.blocks:
            x = block(x.to(early[0]))
        x = self.alias(self.twice(x) * self.loose["scale"])
        scores: torch.Tensor = self.head(F.relu(x).mean((2, 3)))
        return scores


def test_layers_outside_of_modules_are_found_when_they_run(x: torch.Tensor) -> None:
    model = Hidden()
    before = (
        snapshot(model),
        [copy.deepcopy(each.state_dict()) for each in model.blocks],
        model.loose["scale"].clone(),
    )
    copied = Randomised(model, as_inputs(x))
    conv, norm, twice, scale, head = copied.layers
    assert (twice, head) == ("twice", "head")
    drawn: Any = copied.of([conv])
    assert not torch.isclose(drawn.blocks[0].weight, model.blocks[0].weight).any()
    assert torch.equal(drawn.loose["scale"], model.loose["scale"])
    drawn = copied.of([norm, scale])
    assert torch.equal(drawn.blocks[0].weight, model.blocks[0].weight)
    assert (drawn.blocks[1].running_var == 1).all()
    assert sorted(drawn.loose["scale"].flatten().tolist()) == sorted(
        model.loose["scale"].flatten().tolist()
    )
    assert not torch.equal(drawn.loose["scale"], model.loose["scale"])
    drawn = copied.of([])
    assert torch.equal(drawn(x), model(x))
    judged(model, x)
    assert snapshot(model) == before[0]
    for block, state in zip(model.blocks, before[1], strict=True):
        assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())
    assert torch.equal(model.loose["scale"], before[2])


def test_weights_that_a_copy_would_share_with_the_model_are_refused(x: torch.Tensor) -> None:
    outside = nn.Conv2d(3, 3, 3).double()

    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(outside(x).mean((2, 3)))
            return scores

    before = outside.weight.clone()
    model = Closed()
    with pytest.raises(MetricError, match="attribute"):
        explain.evaluate(model, x, "saliency", "mprt", target=0)
    assert torch.equal(outside.weight, before)


def test_a_layer_that_initialises_its_parts_leaves_them_alone_where_they_are_not_meant(
    x: torch.Tensor,
) -> None:
    """`nn.MultiheadAttention` sets the bias of its projection, too."""
    torch.manual_seed(0)

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = x.reshape(len(x), -1, 12)
            found: torch.Tensor = self.attention(tokens, tokens, tokens)[0].mean(1)
            return found

    model = Attending().double().eval()
    nn.init.normal_(model.attention.out_proj.bias)
    copied = Randomised(model, as_inputs(x))
    assert copied.layers == ["attention", "attention.out_proj"]
    drawn: Any = copied.of(["attention"])
    assert torch.equal(drawn.attention.out_proj.bias, model.attention.out_proj.bias)
    assert not torch.isclose(drawn.attention.in_proj_weight, model.attention.in_proj_weight).any()
    assert torch.equal(copied.of([])(x), model(x))


def test_all_parameters_in_one_storage_keep_their_order(x: torch.Tensor) -> None:
    model = Net()
    expected = judged(model, x)
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()).detach(), model.parameters()
    )
    assert judged(model, x) == expected
