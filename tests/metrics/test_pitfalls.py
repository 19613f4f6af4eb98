"""Mistakes that metrics elsewhere make, each tested here, or in the file that its docstring names.

Equal values by their place, and probability against score: test_curves. Shares of next to nothing:
test_regions. Empty masks and boxes: test_evaluation.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import ExplainError, ExplainWarning, MetricError, TargetError
from explain.baselines import Blur, Mean, Zero
from explain.baselines.base import Baseline
from explain.engine import Evidence, Need
from explain.methods import Method
from explain.methods.base import Style, get_method
from explain.metrics import (
    IROF,
    ROAD,
    AverageDrop,
    Deletion,
    Faithful,
    FaithfulnessCorrelation,
    FaithfulnessEstimate,
    Insertion,
    NonSensitivity,
    ReattributionMetric,
    SensitivityN,
    Sparseness,
    get_metric,
    list_metrics,
)
from explain.metrics.maps import ranks_of
from explain.metrics.verdict import check_maps
from explain.targets import as_target
from tests.conftest import ROOT, snapshot

BOXES = [[1, 2, 6, 7], [0, 0, 4, 4], [5, 5, 10, 12]]
FEW: dict[str, Any] = {
    "steps": 3,
    "runs": 4,
    "groups": 3,
    "samples": 2,
    "percentiles": (20, 60),
    "shares": (20,),
}


def fewer(name: str) -> Any:
    """A metric with few samples, to be quick."""
    metric = get_metric(name)
    options = {key: value for key, value in FEW.items() if getattr(metric, key, None)}
    return type(metric)(
        **{key: getattr(metric, key) for key in ("order", "of", "by") if hasattr(metric, key)}
        | options
    )


ALL = [fewer(name) for name in list_metrics()]


@dataclass(frozen=True)
class Nothing(Method):
    """A method that says nothing."""

    name: ClassVar[str] = "nothing"
    summary: ClassVar[str] = "zeros"
    style: ClassVar[Style] = "signed"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return torch.zeros_like(evidence.inputs[:, 0])


def test_no_metric_looks_at_the_other_images_of_a_batch(
    model: nn.Module, photos: torch.Tensor
) -> None:
    """Normalised over the batch, a figure would depend on who shares it."""
    model.train()
    before = snapshot(model)
    given = photos.clone()
    state = torch.get_rng_state()
    together, turned = (
        explain.evaluate(
            model, photos[rows], "inputxgradient", ALL, target=1, boxes=[BOXES[row] for row in rows]
        )
        for rows in ([0, 1, 2], [2, 1])
    )
    assert [metric.name for metric in ALL] == list(together["inputxgradient"])
    for name, values in together["inputxgradient"].items():
        torch.testing.assert_close(
            values[[2, 1]], turned["inputxgradient"][name], equal_nan=True, msg=name
        )
    assert snapshot(model) == before
    assert torch.equal(photos, given)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_map_of_zeros_has_the_figure_that_the_guide_says(
    model: nn.Module, photos: torch.Tensor
) -> None:
    x = photos[:1]
    zeros = torch.zeros(1, 12, 10, dtype=torch.float64)
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    ordered, placeless, hiding = (
        [name for name in re.findall(r"`(\w+)`", part) if name in list_metrics()]
        for part in text.split("## Maps that are zero everywhere")[1].split("\n- ")[1:4]
    )
    found: dict[str, float] = {}
    said = []
    for metric in ALL:
        given: Any = {"it": Nothing() if isinstance(metric, ReattributionMetric) else zeros}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ExplainWarning)
            found[metric.name] = explain.evaluate(
                model, x, given, metric, target=1, boxes=BOXES[:1]
            )["it"][metric.name].item()
        said += [
            metric.name
            for each in caught
            if f"{metric.name} of it is not defined" in str(each.message)
        ]
    assert {name for name, value in found.items() if np.isnan(value)} == set(said)
    assert set(said) == set(list_metrics()) - {*ordered, *placeless, *hiding}
    shuffled = {"it": -ranks_of(zeros).double()}
    for name in set(ordered) - {"irof", "regionperturbation", "selectivity", "relevancerank"}:
        other = explain.evaluate(model, x, shuffled, fewer(name), target=1, boxes=BOXES[:1])["it"][
            name
        ].item()
        assert found[name] == pytest.approx(other), name
    with torch.no_grad():
        photo, blank = (model(each)[0].softmax(0)[1].item() for each in (x, x * 0))
        lost = (model(x) - model(x * 0))[0, 1].abs().item()
    assert found["averagedrop"] == pytest.approx(max(0, photo - blank) / photo)
    assert found["increase"] == float(blank > photo)
    assert found["completeness"] == pytest.approx(lost)
    assert found["auc"] == 0.5
    assert found["iou"] == pytest.approx(25 / 120)


def test_values_of_any_size_are_judged_alike(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    """Sums and squares of single precision would be infinite, or nothing."""
    names = [
        "sparseness",
        "complexity",
        "effectivecomplexity",
        "relevancemass",
        "relevancerank",
        "energypointinggame",
        "attributionlocalisation",
        "infidelity",
        "faithfulnesscorrelation",
        "sensitivityn",
        "nonsensitivity",
        "faithfulnessestimate",
        "monotonicitycorrelation",
        "averagedrop",
        "iou",
    ]
    given = {str(scale): (maps * scale).float() for scale in (1, 2.0**120, 2.0**-120)}
    table = explain.evaluate(
        model, photos, given, [fewer(name) for name in names], target=1, boxes=BOXES
    )
    for name in names:
        for scaled in list(table)[1:]:
            torch.testing.assert_close(
                table[scaled][name], table["1"][name], rtol=1e-5, atol=1e-6, msg=name
            )
        assert table["1"][name].isfinite().all(), name


def test_channels_whose_sum_is_beyond_single_precision_are_added_up(
    model: nn.Module, photos: torch.Tensor
) -> None:
    maps = torch.rand(3, 3, 12, 10, dtype=torch.float64)
    given = {"small": maps, "huge": (maps * 3e38).float()}
    table = explain.evaluate(
        model, photos, given, ["sparseness", "averagedrop", "maxboxaccv2"], target=1, boxes=BOXES
    )
    for name in table["small"]:
        torch.testing.assert_close(
            table["huge"][name], table["small"][name], rtol=1e-5, atol=1e-6, check_dtype=False
        )


@pytest.mark.parametrize("baseline", [Mean(), Blur()], ids=str)
def test_rounding_errors_decide_nothing(baseline: Baseline) -> None:
    """A photo of one colour is not altered by its mean colour: all that changes are the last bits
    of the scores."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 5)
    ).eval()
    x = torch.tensor([0.4, -0.7, 0.2]).reshape(1, 3, 1, 1).expand(1, 3, 32, 32).contiguous()
    metrics = [
        FaithfulnessCorrelation(baseline=baseline),
        FaithfulnessEstimate(baseline=baseline),
        SensitivityN(baseline=baseline),
        Faithful(),
    ]
    with pytest.warns(ExplainWarning, match="vary|does not change the score"):
        table = explain.evaluate(model, x, ["gradcam", "inputxgradient"], metrics, target=1)
    for name in table:
        assert all(bool(value.isnan()) for value in table[name].values())
    everywhere = explain.evaluate(
        model, x, {"map": torch.ones(1, 32, 32)}, NonSensitivity(baseline=baseline), target=1
    )
    # no square is anything to the model, and all are to the map
    assert everywhere["map"]["nonsensitivity"].item() == 1
    found = explain.attribute(model, x, "inputxgradient", target=1)
    verdict = check_maps(model, x, [(get_method("inputxgradient"), found)], as_target(1), "it")
    assert verdict["inputxgradient"].faithful.passed is None
    assert "does not change the score" in verdict["inputxgradient"].faithful.reason


def test_a_negative_score_has_no_shares(photos: torch.Tensor) -> None:
    """What falls from -2 to -10 would have risen fivefold by (y - o) / y."""
    linear = nn.Sequential(nn.Flatten(), nn.Linear(360, 2)).double()
    with torch.no_grad():
        linear[1].weight[0] = 1e-3
        linear[1].bias[0] = -2
    metrics = [AverageDrop(score="logit"), IROF(score="logit")]
    with pytest.warns(ExplainWarning, match="the original score is be"):
        table = explain.evaluate(linear, photos, "inputxgradient", metrics, target=0)
    assert all(bool(value.isnan().all()) for value in table["inputxgradient"].values())


def test_shares_that_round_to_no_pixel_cover_one(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    """A share that covers nothing would compare the photo with itself."""
    parts = explain.evaluate(model, photos, {"it": maps}, ROAD((0.01, 99.99)), target=1).parts(
        "it", "road"
    )
    with torch.no_grad():
        as_it_is = model(photos).softmax(1)[:, 1]
    assert (parts["morf"] != as_it_is[:, None]).all()
    assert (parts["morf"] != parts["lerf"]).all()


def test_signed_and_absolute_values_are_a_choice(model: nn.Module, photos: torch.Tensor) -> None:
    values = torch.zeros(3, 3, 12, 10, dtype=torch.float64)
    values[:, 0, 3, 3] = -5
    values[:, 0, 6, 6] = 1
    ends = {}
    for sign in ("signed", "absolute"):
        one: Any = sign
        curve = explain.evaluate(
            model, photos, {"it": values}, Deletion(120, sign=one), target=1
        ).curve("it", "deletion")
        ends[sign] = curve[1][:, 1]
    for sign, place in (("signed", 6), ("absolute", 3)):
        covered = photos.clone()
        covered[:, :, place, place] = 0
        with torch.no_grad():
            torch.testing.assert_close(ends[sign], model(covered).softmax(1)[:, 1])


def test_a_fill_that_the_model_takes_for_the_class_is_told() -> None:
    """Of a black class, black pixels take nothing away."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].weight[0] = 1.0
        model[1].bias.copy_(torch.tensor([0.0, 3.0, 0.0]))
    photos = torch.ones(2, 1, 4, 4, dtype=torch.float64)
    maps = torch.rand(2, 4, 4, dtype=torch.float64)
    table = explain.evaluate(
        model, photos, {"it": maps}, [Deletion(4), Insertion(4, Zero())], target=1
    )
    (note,) = table.notes
    assert note.startswith(
        "image 0, 1 keeps its class with a probability of 0.91 or more where the baseline 'zero' "
        "covers"
    )
    assert str(table).splitlines()[-1] == f"note: {note}"
    assert table.to_dict()["notes"] == [note]
    # black is not its class
    other = explain.evaluate(model, photos, {"it": maps}, Deletion(4), target=0)
    score = explain.evaluate(model, photos, {"it": maps}, Deletion(4, score="logit"), target=1)
    assert other.notes == score.notes == ()


# What a stranger may bring


def reads_classes(name: str) -> bool:
    """Whether a metric needs several classes."""
    return (
        name in ("adcc", "randomlogit") or getattr(get_metric(name), "score", "") == "probability"
    )


def test_photos_of_one_channel_and_maps_of_truth_values(photos: torch.Tensor) -> None:
    grey = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 4)
    ).double()
    x = photos[:, :1]
    mask = x[:, 0] > 0
    metrics = ["deletion", "road", "irof", "infidelity", "sparseness", "pointinggame"]
    table = explain.evaluate(
        grey, x, {"mask": mask, "same": mask.double().numpy()}, metrics, boxes=BOXES
    )
    for name in metrics:
        torch.testing.assert_close(table["mask"][name].double(), table["same"][name].double())
        assert table["mask"][name].isfinite().all()
    again = explain.evaluate(grey, x, "saliency", ["mprt", "maxsensitivity", "randomlogit"])[
        "saliency"
    ]
    assert all(values.isfinite().all() for values in again.values())


def test_a_model_of_one_class_is_asked_for_its_score(photos: torch.Tensor) -> None:
    one = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(160, 1)).double()
    refused = []
    for name in list_metrics():
        with contextlib.suppress(TargetError, MetricError):
            found = explain.evaluate(one, photos, "inputxgradient", fewer(name), boxes=BOXES)[
                "inputxgradient"
            ][name]
            assert found.shape == (3,)
            continue
        refused.append(name)
    assert set(refused) == {name for name in list_metrics() if reads_classes(name)}
    for name, message in (
        ("deletion", "must be one of several classes"),
        ("adcc", "must be one of several classes .*; leave adcc out"),
        ("randomlogit", "no other"),
    ):
        with pytest.raises(ExplainError, match=message):
            explain.evaluate(one, photos, "inputxgradient", fewer(name))
    scores = explain.evaluate(
        one, photos, "inputxgradient", [Deletion(3, score="logit"), Sparseness()]
    )
    assert scores["inputxgradient"]["deletion"].isfinite().all()
