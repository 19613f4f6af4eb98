"""Guided backpropagation by hooks on Nodes, beside the walk over a recording."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import explain


class Branches(nn.Module):
    """Sums, products and joins of branches, with most kinds of rectifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8).eval()
        self.slopes = nn.PReLU(8)
        self.gate = nn.Linear(8, 8)
        self.second = nn.Conv2d(16, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.norm(self.first(x)).relu_()
        gate = F.hardsigmoid(self.gate(F.silu(maps.mean((2, 3)))))
        maps = self.slopes(maps * gate[:, :, None, None] + maps)
        maps = torch.cat([F.max_pool2d(maps, 3, 1, 1), F.leaky_relu(maps)], 1)
        return self.head(F.gelu(self.second(maps)).mean((2, 3)))


class Disguised(Branches):
    """The same network with one rectifier in other words."""

    rectify: Callable[[Tensor], Tensor] = torch.relu
    passes: list[str] = []
    """One entry for each pass, of all networks."""

    def forward(self, x: Tensor) -> Tensor:
        self.passes.append("")
        return self.head(
            F.relu(self.second(type(self).rectify(self.first(x)).repeat(1, 2, 1, 1))).mean((2, 3))
        )


def disguised(name: str) -> type[Branches]:
    """A network with a rectifier in the words of this name."""
    return type(name, (Disguised,), {"rectify": staticmethod(WORDS[name])})


WORDS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x * (x > 0),
    "clamp": lambda x: x.clamp(min=0),
    "where": lambda x: x.where(x > 0, 0.1 * x),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0),
    "difference": lambda x: x - x.clamp(max=0),
    "sum": lambda x: x + (0 - x).relu(),
    "sum_with_size": lambda x: (x + x.abs()) / 2,
}


def build(kind: type[Branches]) -> Branches:
    torch.manual_seed(0)
    network = kind().double()
    for parameter in network.parameters():
        nn.init.uniform_(parameter, -0.1, 0.9)
    return network


KINDS = {"Branches": Branches} | {name: disguised(name) for name in WORDS}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("method", ["guidedbackprop", "deconvnet"])
def test_hooks_on_nodes_give_what_a_recorded_walk_gives(name: str, method: str) -> None:
    kind = KINDS[name]
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    by_nodes = explain.attribute(build(kind), x, method, target=1)
    # a graph of the map is made by a walk over the recording
    walked = explain.attribute(build(kind), x, method, target=1, create_graph=True)
    torch.testing.assert_close(by_nodes.values, walked.values.detach())
    assert by_nodes.values.any()
    assert str(by_nodes.coverage) == str(walked.coverage)


def test_several_targets_share_the_nodes_of_one_pass() -> None:
    network = build(Branches)
    x = torch.randn(1, 3, 6, 6, dtype=torch.float64)
    together = explain.attribute(network, x, ["guidedbackprop", "saliency"], targets=[0, 2])
    for of_target, target in zip(together, (0, 2), strict=True):
        alone = explain.attribute(network, x, "guidedbackprop", target=target)
        torch.testing.assert_close(of_target["guidedbackprop"].values, alone.values)


def test_a_pass_is_recorded_at_once_where_nodes_did_not_say_what_rectifies() -> None:
    network = build(KINDS["product"])
    assert isinstance(network, Disguised)
    x = torch.randn(1, 3, 6, 6, dtype=torch.float64)
    explain.attribute(network, x, "guidedbackprop", target=1)
    network.passes.clear()
    explain.attribute(network, x, "guidedbackprop", target=1)
    assert len(network.passes) == 1
