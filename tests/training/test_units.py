from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from explain.training import DeadUnits
from tests.conftest import Made


def functional(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Rectifiers as functions, in place, and a layer that is not used."""
    hidden = F.relu_(model.second(F.relu(model.first(x))))
    return model.last(hidden.mean((2, 3)))


def test_dead_units_are_those_whose_activations_are_never_above_zero() -> None:
    parts = {"first": nn.Conv2d(3, 4, 3), "second": nn.Conv2d(4, 5, 3), "unused": nn.Linear(2, 2)}
    model = Made(functional, **parts, last=nn.Linear(5, 2))
    with torch.no_grad():
        model.first.bias.fill_(3.0)
        model.second.bias.fill_(3.0)
        model.first.bias[[0, 2]] = -100.0
        model.second.bias[3] = -100.0
    with DeadUnits(model) as units:
        for _ in range(3):
            model(torch.rand(2, 3, 8, 8)).sum().backward()
    assert units.dead() == {"first": [0, 2], "second": [3], "last": []}
    assert units.counts() == {"first": 4, "second": 5, "last": 2}
    assert repr(units) == "DeadUnits(3 of 11 units get no gradient)"
    assert not model.first.weight._backward_hooks


@pytest.mark.parametrize("groups", [1, 2])
def test_units_of_transposed_convolutions_are_output_channels(groups: int) -> None:
    layer = nn.ConvTranspose2d(4, 6, 2, groups=groups)
    with DeadUnits(layer) as units:
        layer(torch.rand(1, 4, 3, 3))[:, [0, 2, 5]].sum().backward()
    assert units.dead() == {"": [1, 3, 4]}
