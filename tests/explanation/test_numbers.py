"""A model that gives a number: it is predicted, explained, checked, drawn and recorded as a
number."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import explain
from explain.methods import Occlusion, Sufficient
from explain.models import CenterCrop
from explain.targets import BinaryLogit
from explain.targets.outputs import label_of_no

PLAIN = CenterCrop(8, 1.0, (0.0,) * 3, (1.0,) * 3)
PHOTO = Image.effect_noise((8, 8), 90).convert("RGB")


class Age(nn.Module):
    """58 years, and more or less; ``width`` is how many such numbers, and ``flat`` gives one as
    ``(N,)``."""

    def __init__(self, width: int = 1, *, flat: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, width)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        numbers: Tensor = 58 + 20 * self.head(self.conv(x).relu().mean((2, 3)))
        return numbers[:, 0] if self.flat else numbers


def age() -> nn.Module:
    model = Age().eval()
    model.preprocess = PLAIN  # type: ignore[assignment]
    return model


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
    named = explain.Explainer(model, ["age"], PLAIN, activation=activation, unit="years")(
        PHOTO, "saliency", "age"
    )
    assert named.predictions == [("age", pytest.approx(years))]
    assert named.predicted[0].amount == f"{years:.4g} years"
    assert named.layout().title == f"age, {years:.4g} years"
    assert named.probabilities is None
    record = named.record()
    assert (record["number"], record["unit"], record["probability"]) == (
        pytest.approx(years),
        "years",
        None,
    )


def test_methods_explain_the_number_itself() -> None:
    model = Age().eval()
    x = PLAIN(PHOTO)[None]
    methods = [
        "saliency(absolute=False)",
        Occlusion(window=4, stride=4, baseline="zero", score="probability"),
    ]
    maps = explain.attribute(model, x, methods)
    leaf = x.double().requires_grad_()
    (gradient,) = torch.autograd.grad(Age().double()(leaf).sum(), leaf)
    torch.testing.assert_close(maps["saliency"].values.double(), gradient, rtol=1e-4, atol=1e-4)
    for row, column in product((0, 4), (0, 4)):
        covered = x.clone()
        covered[..., row : row + 4, column : column + 4] = 0
        change = by_hand(x) - by_hand(covered)
        of_window = maps["occlusion"].values[0, row, column].double()
        torch.testing.assert_close(of_window, change, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("target", ["no", "yes", "not old"])
def test_who_asks_for_yes_or_no_says_that_the_number_is_a_score_of_yes(target: str) -> None:
    model = Age().eval()
    x = PLAIN(PHOTO)[None]
    model.head.bias.data -= by_hand(x).float() / 20  # near zero, where a sigmoid changes
    labels = ["old"] if target == "not old" else None
    explainer = explain.Explainer(model, labels, PLAIN)
    assert len(explainer(PHOTO, "saliency").predictions) == 1  # until then
    yes = float(model(x).detach().double().sigmoid())
    predictions = dict(explainer(PHOTO, "saliency", target).predictions)
    assert predictions["yes" if labels is None else "old"] == pytest.approx(yes, abs=1e-6)
    assert predictions[label_of_no(labels)] == pytest.approx(1 - yes, abs=1e-6)
    a = explain.attribute(
        model, x, Occlusion(8, 8, "zero", score="probability"), target=BinaryLogit()
    )
    covered = model(torch.zeros_like(x)).detach().double().sigmoid()
    torch.testing.assert_close(a.values[0, 0, 0].double(), yes - covered[0, 0], rtol=0, atol=1e-6)


def test_a_unit_that_is_no_text_is_refused() -> None:
    with pytest.raises(explain.ArgumentError, match="unit"):
        explain.Explainer(Age(), unit=["years"])  # type: ignore[arg-type]
