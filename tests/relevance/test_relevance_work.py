"""What relevance need not run or keep: what is known of values behind rectifiers, and of weights in
normalisations."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import explain
from tests.conftest import settled
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
