"""Mistakes that metrics elsewhere make, each tested here, or in the file that its docstring names.

Equal values by their place, and probability against score: test_formulas. Empty masks and boxes:
test_evaluation.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import explain
from explain import ExplainError, ExplainWarning
from explain.baselines import Mean, Zero
from explain.engine import Evidence, Need
from explain.methods import Method
from explain.methods.base import Style
from explain.metrics import (
    ROAD,
    Deletion,
    FaithfulnessCorrelation,
    FaithfulnessEstimate,
    Insertion,
    NonSensitivity,
    ReattributionMetric,
    get_metric,
    list_metrics,
)
from tests.conftest import ROOT, Made, snapshot

BOXES = [[1, 2, 6, 7], [0, 0, 4, 4], [5, 5, 10, 12]]
FEW: dict[str, Any] = {
    "steps": 3,
    "groups": 3,
    "samples": 2,
    "percentiles": (20, 60),
    "shares": (20,),
}


def with_few_samples(name: str) -> Any:
    """A metric with few samples, to be quick."""
    metric: Any = get_metric(name)
    return replace(metric, **{key: few for key, few in FEW.items() if getattr(metric, key, None)})


ALL = [with_few_samples(name) for name in list_metrics()]


@dataclass(frozen=True)
class Nothing(Method):
    """A method whose maps are zero."""

    name: ClassVar[str] = "nothing"
    style: ClassVar[Style] = "signed"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return torch.zeros_like(evidence.inputs[:, 0])


def test_no_metric_looks_at_the_other_images_of_a_batch(
    model: nn.Module, photos: torch.Tensor
) -> None:
    """Normalised over the batch, a figure would depend on who shares it."""
    model.train()
    original = snapshot(model)
    x = photos.clone()
    table, other = (
        explain.evaluate(
            model, x[rows], "inputxgradient", ALL, target=1, boxes=[BOXES[row] for row in rows]
        )["inputxgradient"]
        for rows in ([0, 1, 2], [2, 1])
    )
    for name, values in table.items():
        torch.testing.assert_close(values[[2, 1]], other[name], equal_nan=True, msg=name)
    assert snapshot(model) == original
    assert torch.equal(photos, x)


@pytest.mark.long
def test_a_map_of_zeros_has_the_figure_that_the_guide_says(
    model: nn.Module, photos: torch.Tensor
) -> None:
    zeros = torch.zeros(1, 12, 10, dtype=torch.float64)
    section = (ROOT / "docs" / "metrics.md").read_text("utf-8").split("## Maps that are zero")[1]
    listed = [re.findall(r"`([\w-]+)`", part) for part in section.split("\n- ")[1:4]]
    figures: dict[str, torch.Tensor] = {}
    undefined = set()

    for metric in ALL:
        maps: Any = Nothing() if isinstance(metric, ReattributionMetric) else zeros
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always", ExplainWarning)
            table = explain.evaluate(
                model, photos[:1], {"it": maps}, metric, target=1, boxes=BOXES[:1]
            )
        figures[metric.name] = table["it"][metric.name]
        if any(f"{metric.name} of it is not defined" in str(w.message) for w in messages):
            undefined.add(metric.name)
    assert {name for name, value in figures.items() if value.isnan()} == undefined
    assert undefined == set(list_metrics()) - {name for names in listed for name in names}
    assert figures["auc"] == 0.5
    assert figures["iou"].item() == pytest.approx(25 / 120)


def test_values_of_any_size_are_judged_alike(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    """Sums and squares of single precision would be infinite, or nothing."""
    metrics: Any = [
        "sparseness",
        "complexity",
        "effectivecomplexity",
        "relevancemass",
        "relevancerank",
        "iou",
        "averagedrop",
        "attributionlocalisation",
        "infidelity",
        "faithfulnesscorrelation",
        "nonsensitivity",
        "faithfulnessestimate",
        "monotonicitycorrelation",
    ]
    scaled = {str(scale): (maps * scale).float() for scale in (1, 2.0**120, 2.0**-120)}
    channels = (maps / 60)[:, None].expand(-1, 3, -1, -1)
    scaled |= {"channels": channels, "sums beyond float32": (channels * 1e39).float()}
    table = explain.evaluate(model, photos, scaled, metrics, target=1, boxes=BOXES)
    pairs = [("1", str(2.0**120), metrics), ("1", str(2.0**-120), metrics)]
    pairs.append(("channels", "sums beyond float32", ["sparseness", "averagedrop"]))
    for one, other, names in pairs:
        for name in names:
            values = table[one][name]
            actual = table[other][name].to(values.dtype)
            torch.testing.assert_close(actual, values, rtol=1e-5, atol=1e-6, msg=name)


def test_rounding_errors_decide_nothing() -> None:
    """A photo of one colour is not altered by its mean colour: all that changes are the last bits
    of the scores."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 5))
    x = torch.tensor([0.4, -0.7, 0.2])[None, :, None, None].expand(1, 3, 32, 32).contiguous()
    metrics: Any = [FaithfulnessCorrelation(baseline=Mean()), FaithfulnessEstimate(baseline=Mean())]
    with pytest.warns(ExplainWarning, match="vary|does not change the score"):
        table = explain.evaluate(model, x, "inputxgradient", metrics, target=1)
    assert all(value.isnan() for value in table["inputxgradient"].values())
    ones = torch.ones(1, 32, 32)
    table = explain.evaluate(model, x, ones, NonSensitivity(baseline=Mean()), target=1)
    # no square is anything to the model, and all are to the map
    assert table["map"]["nonsensitivity"].item() == 1


def test_negative_scores_and_tiny_probabilities_have_no_shares(photos: torch.Tensor) -> None:
    """What falls from -2 to -10 would have risen fivefold by (y - o) / y."""
    bias = torch.tensor([-2.0, 50.0])
    linear = Made(lambda net, x: 1e-3 * x.sum((1, 2, 3))[:, None] + bias)
    for score in ("logit", "probability"):
        metrics: Any = [type(get_metric(n))(score=score) for n in ("averagedrop", "irof")]
        with pytest.warns(ExplainWarning, match="the original score is be"):
            table = explain.evaluate(linear, photos, "inputxgradient", metrics, target=0)
        assert all(bool(values.isnan().all()) for values in table["inputxgradient"].values())
        assert table.to_dict()["values"]["inputxgradient"]["irof"] == [None] * 3
        assert str(table).splitlines()[1].split() == ["inputxgradient", "–", "–"]


def test_shares_that_round_to_no_pixel_cover_one(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    """A share that covers nothing would compare the photo with itself."""
    table = explain.evaluate(model, photos, maps, ROAD((0.01, 99.99)), target=1)
    parts = table.parts("map", "road")
    assert (parts["morf"] != model(photos).softmax(1)[:, 1:2]).all()
    assert (parts["morf"] != parts["lerf"]).all()


@pytest.mark.parametrize(("sign", "place"), [("signed", 6), ("absolute", 3)])
def test_signed_and_absolute_values_are_a_choice(
    model: nn.Module, photos: torch.Tensor, sign: Any, place: int
) -> None:
    values = torch.zeros_like(photos)
    values[:, 0, 3, 3] = -5
    values[:, 0, 6, 6] = 1
    table = explain.evaluate(model, photos, values, Deletion(120, sign=sign), target=1)
    covered = photos.clone()
    covered[:, :, place, place] = 0
    expected = model(covered).softmax(1)[:, 1].detach()
    torch.testing.assert_close(table.curve("map", "deletion")[1][:, 1], expected)


def test_a_baseline_that_the_model_takes_for_the_class_is_told() -> None:
    """Of a black class, black pixels take nothing away."""
    weight = torch.tensor([1.0, 0.0, 0.0])
    bias = torch.tensor([0.0, 3.0, 0.0])
    model = Made(lambda net, x: x.sum((1, 2, 3))[:, None] * weight + bias)
    x = torch.ones(2, 1, 4, 4, dtype=torch.float64)
    maps = torch.rand(2, 4, 4, dtype=torch.float64)
    table = explain.evaluate(model, x, maps, [Deletion(4), Insertion(4, Zero())], target=1)
    (note,) = table.notes
    assert note.startswith("image 0, 1 keeps its class with a probability of 0.91 or more where")
    assert str(table).splitlines()[-1] == f"note: {note}"
    assert table.to_dict()["notes"] == [note]
    # black is not its class
    assert explain.evaluate(model, x, maps, Deletion(4), target=0).notes == ()


def of_classes(share: float) -> torch.Tensor:
    """Probabilities of four classes, of which the second has ``share``."""
    others = (1 - share) / 3
    return torch.tensor([others, share, others, others])


def of_labels(share: float) -> torch.Tensor:
    """Probabilities of four labels, each true or not."""
    return torch.full((4,), share)


@pytest.mark.parametrize(
    ("outputs", "share", "is_told"),
    [
        (of_classes, 0.6, False),
        (of_classes, 0.65, True),
        (of_labels, 0.7, False),
        (of_labels, 0.8, True),
    ],
)
def test_a_baseline_keeps_the_class_from_half_way_to_certainty_on(
    outputs: Callable[[float], torch.Tensor], share: float, is_told: bool
) -> None:
    """Of four classes, from (1 + 1/4) / 2 on, whatever the original has; of labels, from 3/4."""
    probabilities = outputs(share)
    is_of_labels = outputs is of_labels
    scores = probabilities.logit() if is_of_labels else probabilities.log()

    def answer(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        given = scores + 0 * x.sum((1, 2, 3))[:, None]
        return given.sigmoid() if is_of_labels else given

    x = torch.ones(2, 1, 4, 4, dtype=torch.float64)
    maps = torch.rand(2, 4, 4)
    table = explain.evaluate(Made(answer), x, maps, Deletion(4), target=1)
    assert bool(table.notes) == is_told


def test_a_model_of_one_class_has_a_score_and_no_probability(photos: torch.Tensor) -> None:
    single = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(160, 1)).double()
    refused = set()
    for metric in ALL:
        with contextlib.suppress(ExplainError):
            table = explain.evaluate(single, photos, "inputxgradient", metric, boxes=BOXES)
            assert table["inputxgradient"][metric.name].shape == (3,)
            continue
        refused.add(metric.name)
    reads_classes = {"adcc", "randomlogit"}
    reads_classes |= {m.name for m in ALL if getattr(m, "score", "") == "probability"}
    assert refused == reads_classes
