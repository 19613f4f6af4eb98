"""Containers that modules write into stay the caller's: what hooks put in them is taken back when
the call ends."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from explain.hooks import capture


def test_the_callers_containers_have_their_own_tensors_again_when_a_layer_returns() -> None:
    class Adds(nn.Module):
        def forward(
            self, features: OrderedDict[str, torch.Tensor], *, more: list[Any]
        ) -> torch.Tensor:
            more.append({"of": features["b"]})
            features["c"] = features["a"] * 2 + features.pop("b")
            features["a"].relu_()
            return features["c"]

    a = torch.tensor([-1.0, 2.0])
    b = torch.tensor([3.0, 4.0])
    features = OrderedDict(a=a, b=b)
    more = []
    net = nn.ModuleDict({"adds": Adds()})
    with torch.no_grad(), capture(net, "adds") as seen:
        out = net["adds"](features, more=more)
        score = (out * features["c"]).sum() + features["a"].sum()
    assert features["a"] is a
    assert list(features) == ["a", "c"]
    assert features["c"] is out
    assert more[0]["of"] is b
    assert not b.requires_grad
    score.backward()
    assert torch.equal(seen.gradients["adds"], 2 * torch.tensor([1.0, 8.0]))


def test_the_input_of_a_layer_that_takes_a_container_is_captured_within_it() -> None:
    class Sums(nn.Module):
        def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
            given.append(given[0] * 3)
            return given[0] ** 2

    net = nn.ModuleDict({"sums": Sums()})
    x = torch.tensor([1.0, 2.0])
    given = [x]
    with torch.no_grad(), capture(net, "sums:input") as seen:
        out = net["sums"](given)
        (out.sum() + given[1].sum() + given[0].sum()).backward()
    assert given[0] is x
    assert torch.equal(seen.gradients["sums:input"], 2 * x + 3)
