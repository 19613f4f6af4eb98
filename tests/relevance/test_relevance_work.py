"""What relevance need not run or keep: what is known of values behind rectifiers, and of weights in
normalisations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain.methods import LRP
from tests.conftest import Made, settled
from tests.methods import plain_relevance as plain
from tests.relevance.test_relevance import RULES, SHAPE, Then, assert_near, everywhere, random

RECTIFIED = {
    "as it is": nn.Identity(),
    "rectified": nn.ReLU(),
    "overwritten": nn.ReLU(inplace=True),
}


@pytest.mark.parametrize("rectifier", RECTIFIED)
@pytest.mark.parametrize("rule", RULES)
# one of 0.01 takes more than a hundredth of some scores
@pytest.mark.filterwarnings("ignore:.*epsilon")
def test_rules_know_what_normalisations_turn_around_and_rectifiers_make(
    rule: str, rectifier: str
) -> None:
    """A convolution whose normalisation turns one channel around and leaves one out."""
    linear = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4))
    settled(linear, 3).double().eval()
    linear[1].weight.data[:2] = torch.tensor([-1.3, 0.0])
    layer = linear if rectifier == "as it is" else nn.Sequential(*linear, RECTIFIED[rectifier])
    x = random(1, *SHAPE)
    rectified = x.flatten().clamp(min=0)
    w, b = plain.matrix(linear, SHAPE)
    head = random(2, len(b))
    z = w @ rectified + b
    used, formula = RULES[rule]
    if rectifier != "as it is":
        z = z.clamp(min=0)
        knows = rule in ("epsilon", "gamma", "gamma 10")
        formula = partial(formula, rectified=True) if knows else formula
    model = nn.Sequential(nn.ReLU(), Then(layer, head))
    a = explain.attribute(model, x[None], everywhere(used), target=0)
    assert_near(a.values[0], formula(w, b, rectified, head * z).reshape(SHAPE))
    scale = a.values.abs().sum() + sum(t.abs().sum() for t in a.coverage.taken.values())
    assert a.delta.abs().max() <= 1e-9 * scale


@pytest.mark.parametrize("composite", ["EpsilonPlus", "EpsilonAlpha2Beta1", "ExcitationBackprop"])
def test_what_was_rectified_and_then_changed_may_be_negative(composite: str) -> None:
    """A value that a view of it has overwritten is not what the rectifier made."""

    def in_place(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool2d(F.relu(x), 1)
        x.view(-1).sub_(0.7)
        return net.conv(x).sum((2, 3))

    def plainly(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.conv(F.avg_pool2d(F.relu(x), 1) - 0.7).sum((2, 3))

    conv = settled(nn.Conv2d(3, 4, 3, bias=False), 8).double()
    values, expected = (
        explain.attribute(
            Made(forward, conv=conv), random(6, 2, 3, 5, 5), LRP(composite), target=1
        ).values
        for forward in (in_place, plainly)
    )
    assert torch.allclose(values, expected, rtol=1e-9, atol=1e-12)
    assert values.any()
