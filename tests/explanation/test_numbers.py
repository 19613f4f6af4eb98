"""A model that gives a number: it is predicted, explained, checked, drawn and recorded as a
number."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.methods import Occlusion, Sufficient
from explain.models import CenterCrop

PLAIN = CenterCrop(8, 1.0, (0.0,) * 3, (1.0,) * 3)
PHOTO = Image.effect_noise((8, 8), 90).convert("RGB")


class Age(nn.Module):
    """58 years, and more or less, as ``(N, 1)`` or flat ``(N,)``."""

    def __init__(self, *, flat: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 1)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        numbers: Tensor = 58 + 20 * self.head(self.conv(x).relu().mean((2, 3)))
        return numbers[:, 0] if self.flat else numbers


def by_hand(x: Tensor) -> Tensor:
    """The number, in double precision."""
    return Age().double()(x.double()).detach()[0, 0]


@pytest.mark.parametrize(("activation", "flat"), [(None, True), ("none", False)])
def test_one_number_is_predicted_as_a_number(activation: Any, flat: bool) -> None:
    model = Age(flat=flat).eval()
    years = float(by_hand(PLAIN(PHOTO)[None]))
    plain = explain.Explainer(model, preprocess=PLAIN, activation=activation)(PHOTO, "saliency")
    assert plain.predictions == [("number", pytest.approx(years))]
    assert plain.targets == ["number"]
    explainer = explain.Explainer(model, ["age"], PLAIN, activation=activation, unit="years")
    named = explainer(PHOTO, "saliency", "age")
    assert named.predictions == [("age", pytest.approx(years))]
    assert named.layout().title == f"age, {years:.4g} years"
    record = named.record()
    assert (record["number"], record["unit"]) == (pytest.approx(years), "years")
    assert record["probability"] is None is named.probabilities


def test_methods_explain_the_number_itself() -> None:
    x = PLAIN(PHOTO)[None]
    occlusion = Occlusion(window=4, stride=4, baseline="zero", score="probability")
    maps = explain.attribute(Age().eval(), x, ["saliency(absolute=False)", occlusion])
    leaf = x.double().requires_grad_()
    (gradient,) = torch.autograd.grad(Age().double()(leaf).sum(), leaf)
    assert_close(maps["saliency"].values.double(), gradient, rtol=1e-4, atol=1e-4)
    covered = x.clone()
    covered[..., :4, 4:] = 0
    change = float(by_hand(x) - by_hand(covered))
    assert float(maps["occlusion"].values[0, 0, 4]) == pytest.approx(change, rel=1e-4, abs=1e-4)


def test_the_smallest_evidence_of_a_number_keeps_nine_tenths_of_it() -> None:
    model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(12, 1, bias=False)).eval()
    weights = torch.tensor([50.0, 30.0, 15.0, 5.0])  # of the quarters of a white photo, 100 in all
    model[2].weight.data.copy_((weights / 3).repeat(3)[None])
    (smallest,) = explain.attribute(model, torch.ones(1, 3, 8, 8), Sufficient(2, "zero")).sets[0]
    best = min(
        (keep for keep in product([False, True], repeat=4) if weights[list(keep)].sum() >= 90),
        key=sum,
    )
    assert smallest.mask[::4, ::4].flatten().tolist() == list(best)
    assert (smallest.alone, smallest.without) == (pytest.approx(95.0), pytest.approx(5.0))


@pytest.mark.parametrize(
    ("yes", "no", "labels"), [("yes", "no", None), ("old", "not old", ["old"])]
)
def test_who_asks_for_yes_or_no_says_that_the_number_is_a_score_of_yes(
    yes: str, no: str, labels: list[str] | None
) -> None:
    model = Age().eval()
    x = PLAIN(PHOTO)[None]
    model.head.bias.data -= by_hand(x).float() / 20  # near zero, where a sigmoid changes
    explainer = explain.Explainer(model, labels, PLAIN)
    assert len(explainer(PHOTO, "saliency").predictions) == 1  # until then
    with torch.no_grad():
        share = float(model(x).double().sigmoid())
        covered = float(model(torch.zeros_like(x)).double().sigmoid())
    predictions = dict(explainer(PHOTO, "saliency", no).predictions)
    assert predictions == pytest.approx({yes: share, no: 1 - share}, abs=1e-6)
    occlusion = Occlusion(8, 8, "zero", score="probability")
    change = float(explainer(PHOTO, occlusion, yes).values[0, 0])
    assert change == pytest.approx(share - covered, abs=1e-6)
