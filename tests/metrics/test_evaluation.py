"""`evaluate`: what it takes and refuses, what it runs, the table that it returns, and that nothing
is left changed."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import ExplainError, MetricError
from explain.baselines import Blur, Zero
from explain.methods import Saliency
from explain.metrics import (
    Completeness,
    Deletion,
    Insertion,
    MeanInterval,
    PixelFlipping,
    PointingGame,
    get_metric,
    plan_evaluation,
    register,
)
from tests.metrics.conftest import Counting


def test_methods_attributions_and_arrays_are_judged_alike(
    model: nn.Module, photos: torch.Tensor
) -> None:
    attribution = explain.attribute(model, photos, "gradcam", layer="layer1", placement="even")
    array = attribution.values.numpy()
    sources = {"name": "gradcam", "attribution": attribution, "array": array}
    table = explain.evaluate(model, photos, sources, "deletion", layer="layer1", placement="even")
    assert list(table) == list(sources)
    for name in sources:
        torch.testing.assert_close(table[name]["deletion"], table["name"]["deletion"])


def test_the_target_is_that_of_the_attributions(model: nn.Module, photos: torch.Tensor) -> None:
    attribution = explain.attribute(model, photos, "saliency", target=[3, 1, 0])
    expected = explain.evaluate(model, photos, "saliency", "deletion", target=[3, 1, 0])
    table = explain.evaluate(model, photos, attribution, "deletion")
    assert table.to_dict()["values"] == expected.to_dict()["values"]
    other = explain.attribute(model, photos, "gradcam", target=2)
    with pytest.raises(MetricError, match="attributions must"):
        explain.evaluate(model, photos, [attribution, other], "deletion")


def test_scores_that_are_no_class_are_read_as_they_are(
    model: nn.Module, photos: torch.Tensor
) -> None:
    def total(output: torch.Tensor) -> torch.Tensor:
        return output.sum(1)

    table = explain.evaluate(model, photos, "saliency", Deletion(4, score="logit"), target=total)
    first = table.curve("saliency", "deletion")[1][:, 0]
    torch.testing.assert_close(first, model(photos).sum(1).detach())
    with pytest.raises(MetricError, match="target must"):
        explain.evaluate(model, photos, "saliency", "deletion", target=total)
    attribution = explain.attribute(model, photos, "saliency", target=total)
    with pytest.raises(MetricError, match="target="):
        explain.evaluate(model, photos, attribution, "deletion")


def test_given_maps_are_evaluated_by_what_the_model_says_now(
    model: nn.Module, photos: torch.Tensor
) -> None:
    now = explain.attribute(model, photos, "saliency", target=1)
    older = replace(now, score=now.score + 100)
    for metric in ("averagedrop", "completeness", "deletion"):
        tables = [explain.evaluate(model, photos, {"map": a}, metric) for a in (now, older)]
        values = [table["map"][metric] for table in tables]
        torch.testing.assert_close(*values, equal_nan=True)


def test_distinct_perturbed_photos_are_run_once(model: nn.Module, photos: torch.Tensor) -> None:
    """The ends of deletion and insertion are the photo and the covered photo; flipping in both
    orders meets there."""
    counting = Counting(model)
    one, other = torch.randn(2, 3, 12, 10)
    zero = Zero()
    flipping = [PixelFlipping(order, 6, zero) for order in ("morf", "lerf")]
    metrics = [Deletion(6, zero), Insertion(6, zero), *flipping, Completeness(zero)]
    maps = {"one": one, "two": other, "again": one.clone()}
    explain.evaluate(counting, photos, maps, metrics, target=0, batch_size=4)
    # the photo, the blank photo, for two distinct maps 5 inner steps from either end, and two rows
    # of a probe
    assert counting.distinct == 3 * (1 + 2 * 2 * 5) + 1 + 2
    # run once, but for: the photos in the two passes over them, and the four rows of the probe
    # before the work and after it
    assert len(counting.rows) <= 3 * (1 + 2 * 2 * 5) + 3 + 3 + 2 * 4


def test_the_table_prints_itself_and_comes_as_plain_values(
    model: nn.Module, photos: torch.Tensor
) -> None:
    maps = {"one": photos[:, 0], "two": photos[:, 1]}
    table = explain.evaluate(model, photos, maps, ["deletion", "insertion"])
    values = table["two"]["deletion"].tolist()
    head, _, second, difference = str(table).splitlines()
    assert head.split()[-4:] == ["deletion", "↓", "insertion", "↑"]
    half = 4.302653 * torch.tensor(values).std() / 3**0.5  # Student's t of 2 degrees of freedom
    assert second.split()[:4] == ["two", f"{sum(values) / 3:.3f}", "±", f"{half:.3f}"]
    apart = table["two"]["deletion"] - table["one"]["deletion"]
    assert difference.split()[:4] == ["two", "less", "one", f"{apart.mean():.3f}"]
    assert table.difference("two", "one", "deletion").half == pytest.approx(
        float(4.302653 * apart.std() / 3**0.5), rel=1e-6
    )
    assert json.loads(table.to_json())["values"]["two"]["deletion"] == values
    rows = [*csv.DictReader(io.StringIO(table.to_csv()))]
    assert [float(row["deletion"]) for row in rows[3:]] == pytest.approx(values, abs=1e-15)
    with pytest.raises(KeyError, match="did you mean 'one'"):
        table["ons"]
    with pytest.raises(MetricError, match="did you mean 'deletion'"):
        table.curve("one", "delition")


def test_every_metric_says_what_it_is() -> None:
    for name in explain.list_metrics():
        metric = get_metric(name)
        assert (metric.name, metric.better in ("more", "less")) == (name, True)
        assert metric.summary
        assert metric.units
        assert any(character.isdigit() for character in metric.paper), name
        assert ">>> " in (type(metric).__doc__ or ""), name
    with pytest.raises(MetricError, match="registered"):
        register(steps=3)(Deletion)
    assert Deletion(baseline="blur") == Deletion(baseline=Blur())  # type: ignore[arg-type]


MAP = torch.zeros(1, 12, 10)


@pytest.mark.parametrize("kind", ["bool", "uint16", ">f4", "longdouble"])
def test_masks_maps_and_boxes_may_be_arrays_of_any_numbers_and_layout(kind: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(360, 2))
    x = torch.zeros(1, 3, 12, 10)
    mask = np.zeros((1, 12, 10), kind)
    mask[0, 2:7, 3:] = True
    boxes = np.array([[3, 2, 10, 7]], "int64" if kind == "bool" else kind)
    for place in ({"masks": mask[:, ::-1].copy()[:, ::-1]}, {"boxes": boxes}):
        assert explain.evaluate(model, x, {"m": mask}, "auc", **place)["m"]["auc"].item() == 1


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"metrics": "delition"}, "did you mean 'deletion'"),
    ({"metrics": Deletion}, r"must be a name .*list_metrics\(\)"),
    ({"metrics": [Deletion(3), Deletion(4)]}, "metrics must have different names"),
    ({"metrics": []}, "metrics must"),
    ({"methods": []}, "methods must"),
    ({"metrics": "auc"}, "'auc' needs to"),
    ({"metrics": "maxboxaccv2", "masks": torch.ones(1, 12, 10)}, "'maxboxaccv2' needs the"),
    ({"metrics": "maxsensitivity"}, "needs a method, got the map 'm'"),
    ({"methods": [MAP]}, "methods must have names"),
    ({"methods": [Saliency(), Saliency(absolute=False)]}, "methods must have different names"),
    ({"methods": {"m": MAP.expand(2, 12, 10)}}, "map 'm' must have the shape"),
    ({"methods": {"m": torch.full((1, 12, 10), torch.nan)}}, "map 'm' must hold finite"),
    ({"x": torch.zeros(1, 3, 2, 12, 10)}, "map .m. must have the shape"),
    ({"boxes": [[10, 0, 14, 5]]}, "^boxes must"),
    ({"boxes": "box"}, "^boxes must"),
    ({"boxes": torch.tensor(3)}, "^boxes must"),
    ({"masks": MAP}, "^masks must"),
    ({"masks": torch.ones(1, 6, 5)}, "^masks must"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_what_does_not_fit_is_refused_in_one_line(changed: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(360, 2))
    arguments = {"x": torch.zeros(1, 3, 12, 10), "methods": {"m": MAP}, "metrics": "deletion"}
    with pytest.raises(ExplainError, match=message) as error:
        explain.evaluate(model, **arguments | changed)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("deletion(steps=0)", "steps"),
        ("pixelflipping(order=both)", "order"),
        ("road(percentiles=(100,))", "percentiles"),
        ("pointinggame(tolerance=15)", "tolerance"),
    ],
)
def test_an_option_out_of_its_range_is_refused(text: str, option: str) -> None:
    with pytest.raises(ExplainError, match=option):
        get_metric(text)


def test_a_table_is_written_for_a_paper(
    model: nn.Module, photos: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = {"one_map": photos[:, 0], "two": photos[:, 1]}
    table = explain.evaluate(model, photos, maps, ["deletion", "covering-edges"])
    assert table.to_csv(tmp_path / "table.csv") == (tmp_path / "table.csv").read_text("utf-8")
    lines = table.to_latex().splitlines()
    assert lines[0] == r"\begin{tabular}{lrr}"
    assert [line.count("&") for line in lines[2:3] + lines[4:7]] == [2] * 4
    assert lines[4].startswith(r"one\_map & ")
    frame = pytest.importorskip("pandas") and table.to_frame()
    assert frame.loc[("two", 1), "deletion"] == table["two"]["deletion"][1].item()
    assert frame.shape == (6, 2)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(explain.MetricError, match="pandas"):
        table.to_frame()


@pytest.mark.parametrize(
    ("figures", "mean", "half"),
    [
        ([1.0, 2.0], 1.5, 12.706 * 0.5),
        ([1.0, 2.0, 3.0, math.nan], 2.0, 4.303 / 3**0.5),
        ([float(n) for n in range(10)], 4.5, 2.262 * 3.02765 / 10**0.5),
        ([float(n) for n in range(100)], 49.5, 1.984 * 29.01149 / 10),
        ([2.0], 2.0, math.nan),
        ([], math.nan, math.nan),
    ],
)
def test_intervals_are_those_of_students_t(figures: list[float], mean: float, half: float) -> None:
    interval = MeanInterval.of(torch.tensor(figures))
    assert interval.mean == pytest.approx(mean, nan_ok=True)
    assert interval.half == pytest.approx(half, rel=2e-4, nan_ok=True)


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (0.2, 0.248, "0.200 ± 0.248"),
        (9.458e-05, 0.0002, "0.0001 ± 0.0002"),
        (0.131, 7e-05, "0.13100 ± 0.00007"),
    ],
)
def test_a_mean_has_the_decimals_of_its_interval(mean: float, half: float, text: str) -> None:
    assert str(MeanInterval(mean, half, 10)) == text


def test_metrics_have_options_in_their_names(model: nn.Module, photos: torch.Tensor) -> None:
    assert get_metric("pointinggame(tolerance=0)") == PointingGame(0)
    assert get_metric(" LERF(steps=3, baseline=blur)") == replace(
        get_metric("lerf"), steps=3, baseline=Blur()
    )
    table = explain.evaluate(model, photos, photos[:, 0], "deletion(steps=3)")
    assert table.curve("map", "deletion")[0].shape == (4,)
    for text, word in (
        ("deletion(stebs=3)", "stebs"),
        ("deletion(3)", "name"),
        ("delete(", "write"),
    ):
        with pytest.raises(explain.MetricError, match=word):
            get_metric(text)


def test_the_maps_of_attributions_and_pairs_are_made_again(
    model: nn.Module, photos: torch.Tensor
) -> None:
    """By the method that an attribution says, or that is given; the maps themselves are not."""
    metrics: Any = ["mprt-upper", "maxsensitivity"]
    attribution = explain.attribute(model, photos, "saliency", target=1)
    sources = {"it": "saliency", "made": attribution, "pair": (Saliency(), attribution)}
    table = explain.evaluate(model, photos, sources, metrics, target=1)
    for metric in metrics:
        for name in ("made", "pair"):
            torch.testing.assert_close(table[name][metric], table["it"][metric])


def test_the_plan_of_an_evaluation_is_what_it_runs(
    model: nn.Module, photos: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    counting = Counting(model)
    metrics: Any = ["deletion(steps=5)", "covering(placements=3)", "maxsensitivity(samples=2)"]
    maps = explain.attribute(counting, photos, "inputxgradient", target=1)
    plan = plan_evaluation(counting, photos, ["inputxgradient"], metrics, target=1)
    # 4 steps are partly covered; two baselines, the marked part, and three others
    assert plan.perturbed == 3 * (4 + 2 * (1 + 3))
    assert plan.maps == 3 * 2  # forward and back
    assert plan.again == 3 * 2 * 2
    assert plan.seconds > 0
    given = plan_evaluation(counting, photos, {"map": maps.values}, metrics[:2], target=1)
    assert (given.maps, given.perturbed, given.again) == (0, plan.perturbed, 0)
    counting.rows.clear()
    explain.evaluate(counting, photos, maps.values, metrics[:2], target=1)
    # the photos as they are, those that are covered entirely, and some that are tried are run beside
    assert plan.perturbed <= len(counting.rows) <= 2 * plan.perturbed
    explain.evaluate(counting, photos, "inputxgradient", metrics, target=1, progress=True)
    assert str(plan).split(",")[0] in capsys.readouterr().err
