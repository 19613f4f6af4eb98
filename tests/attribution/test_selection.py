"""Which methods "all" and "everything" are, and what the plan says that each of them costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import explain
from explain.attribution.selection import select
from explain.data.inputs import as_inputs
from explain.layers.costs import cost_after
from tests.conftest import Made, TinyNet, layer_for, settled


def wide(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A layer of many channels, and a head that takes a tenth of the work."""
    return model.head(model.pool(model.first(x).relu()).flatten(1))


PARTS = {"first": nn.Conv2d(3, 300, 3, padding=1), "pool": nn.AdaptiveAvgPool2d(1)}
WIDE = settled(Made(wide, **PARTS, head=nn.Linear(300, 5))).eval()
X = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))


def counted(model: nn.Module, x: torch.Tensor, method: str) -> float:
    """How many images the network was run on, forward alone."""
    rows = []
    with explain.hooks.HookGroup(model) as group:
        group.forward_pre("", lambda module, args: rows.append(len(args[0])))
        layer = layer_for(method, "first")
        explain.attribute(model, x, method, target=1, layer=layer, batch_size=1000)
    return sum(rows)


def test_all_are_those_below_200_passes_and_everything_is_the_rest_too() -> None:
    chosen = select(WIDE, X)
    every = select(WIDE, X, "everything")
    assert every.costly == {}
    assert len(every.notes) == 1  # those for other networks
    unfit, costly = chosen.notes
    assert all(name in unfit for name in chosen.unfit)
    assert "scorecam (302)" in costly
    assert {*chosen.methods, *chosen.costly} == {*every.methods}
    assert {*chosen.unfit, *every.methods} == {*explain.list_methods()}
    assert all(chosen.costs[name] < 200 for name in chosen.methods)
    assert all(cost >= 200 for cost in chosen.costly.values())
    assert {"legrad", "rollout"} <= {*chosen.unfit}


@pytest.mark.parametrize(
    ("method", "forward", "back"),
    [("scorecam", 302, 0), ("gradcam", 1, 1), ("smoothgrad", 26, 25), ("saliency", 1, 1)],
)
def test_costs_are_what_the_network_is_run_on(method: str, forward: int, back: int) -> None:
    cost = select(WIDE, X).costs[method]
    assert cost == forward + back
    # a layer is looked for and batches are proved apart
    counted(WIDE, X[:1], method)
    assert forward <= counted(WIDE, X[:1], method) <= forward + 4


def test_rows_that_begin_at_a_layer_count_for_what_lies_behind_it() -> None:
    # Weights times places: the first layer 8100 x 20, the head 1500; and no two images of a batch
    # cost more than one.
    share = 1500 / (8100 * 20 + 1500)
    assert cost_after(WIDE, as_inputs(X), ["first", "pool", "head", "unknown"]) == {
        "first": pytest.approx(share),
        "pool": pytest.approx(share),
        "head": 0.0,
        "unknown": 1.0,
    }
    cost = select(WIDE, X).costs["ablationcam"]
    assert cost == pytest.approx(1 + 300 * share)
    assert cost < 5


def test_a_layer_and_a_target_decide_what_is_chosen() -> None:
    net = settled(TinyNet()).eval()
    x = torch.randn(1, 3, 12, 10)
    assert "finercam" in select(net, x, layer="layer2").methods
    assert "finercam" in select(net, x, target=lambda output: output[:, 0] - output[:, 1]).unfit
    assert select(net, x, layer="conv1").costs["scorecam"] == 8
    assert select(net, x, layer="layer2").costs["scorecam"] == 10
    labelled = select(net, x, target="b", categories=list("abcde"))
    assert labelled.methods == select(net, x, target=1).methods
