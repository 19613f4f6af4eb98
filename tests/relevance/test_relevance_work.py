"""What relevance need not run or keep: what is known of values behind rectifiers, and of weights in
normalisations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain.methods import LRP
from tests.conftest import settled
from tests.methods import plain_relevance as plain
from tests.relevance.test_relevance import RULES, SHAPE, Then, assert_near, everywhere, random


class Turning(nn.Module):
    """A convolution whose normalisation turns one channel around and leaves one out."""

    def __init__(self, rectifier: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.rectifier = rectifier
        settled(self, 3)
        self.norm.weight.data[:2] = torch.tensor([-1.3, 0.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x))
        return x if isinstance(self.rectifier, nn.Identity) else self.rectifier(x)


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
    how = (
        {"rectified": True}
        if rectifier != "as it is" and rule in ("epsilon", "gamma", "gamma 10")
        else {}
    )
    layer = Turning(RECTIFIED[rectifier]).double().eval()
    x = random(1, *SHAPE)
    w, b = plain.matrix(lambda t: layer.norm(layer.conv(t)), SHAPE)
    head = random(2, len(b))
    z = w @ x.flatten().clamp(min=0) + b
    z = z if rectifier == "as it is" else z.clamp(min=0)
    mine, formula = RULES[rule]
    model = nn.Sequential(nn.ReLU(), Then(layer, head))
    found = explain.attribute(model, x[None], everywhere(mine), target=lambda output: output[:, 0])
    expected = formula(w, b, x.flatten().clamp(min=0), head * z, **how).reshape(SHAPE)
    assert_near(found.values[0], expected)
    scale = found.values.abs().sum() + sum(t.abs().sum() for t in found.coverage.taken.values())
    assert found.delta.abs().max() <= 1e-9 * scale


def test_what_was_rectified_and_then_changed_may_be_negative() -> None:
    """A value that a view of it has overwritten is not what the rectifier made."""

    class Net(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, bias=False)
            self.in_place = in_place
            settled(self, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.avg_pool2d(F.relu(x), 1)
            if self.in_place:
                x.view(-1).sub_(0.7)
            else:
                x = x - 0.7
            return self.conv(x).sum((2, 3))

    x = random(6, 2, 3, 5, 5)
    for composite in ("EpsilonPlus", "EpsilonAlpha2Beta1", "ExcitationBackprop"):
        pair = [
            explain.attribute(Net(b).double(), x, LRP(composite), target=1).values
            for b in (False, True)
        ]
        assert torch.allclose(*pair, rtol=1e-9, atol=1e-12)
        assert pair[0].any()
