"""Containers that modules write into stay the caller's: what hooks put in them is taken back when
the call ends."""

from __future__ import annotations

import torch
from torch import nn

from explain.hooks import capture


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
