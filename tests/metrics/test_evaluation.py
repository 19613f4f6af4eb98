"""`evaluate`: what it takes and refuses, what it runs, the table that it returns, and that nothing
is left changed."""

from __future__ import annotations

import csv
import io
import json
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
    ROAD,
    Completeness,
    Deletion,
    Insertion,
    PixelFlipping,
    PointingGame,
    get_metric,
    register,
)
from tests.metrics.conftest import Counting


def _sum(output: torch.Tensor) -> torch.Tensor:
    return output.sum(1)


def test_metrics_of_the_map_alone_do_not_run_the_model(
    model: nn.Module, photos: torch.Tensor
) -> None:
    counting = Counting(model)
    maps = {"map": torch.randn(3, 12, 10)}
    boxes = [[1, 2, 6, 8]] * 3
    alone = explain.evaluate(counting, photos, maps, ["pointinggame", "sparseness"], boxes=boxes)
    assert counting.rows == []
    together = explain.evaluate(
        model, photos, maps, ["pointinggame", "deletion", "sparseness"], boxes=boxes
    )
    for name in ("pointinggame", "sparseness"):
        assert torch.equal(alone["map"][name], together["map"][name])


def test_methods_attributions_and_arrays_are_judged_alike(
    model: nn.Module, photos: torch.Tensor
) -> None:
    attribution = explain.attribute(model, photos, "gradcam", layer="layer1")
    sources = {
        "name": "gradcam",
        "attribution": attribution,
        "array": attribution.values.numpy(),
    }
    table = explain.evaluate(model, photos, sources, "deletion", layer="layer1")
    assert list(table) == list(sources)
    for name in sources:
        torch.testing.assert_close(table[name]["deletion"], table["name"]["deletion"])
    listed = explain.evaluate(model, photos, ["saliency", attribution], "deletion", layer="layer1")
    assert list(listed) == ["saliency", "gradcam"]


def test_the_target_is_that_of_the_attributions(model: nn.Module, photos: torch.Tensor) -> None:
    attribution = explain.attribute(model, photos, "saliency", target=[3, 1, 0])
    maps = attribution.values.abs().amax(1)
    expected = explain.evaluate(model, photos, maps, "deletion", target=[3, 1, 0])["map"]
    table = explain.evaluate(model, photos, attribution, "deletion")["saliency"]
    torch.testing.assert_close(table["deletion"], expected["deletion"])
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


def test_each_distinct_perturbed_photo_is_run_once(model: nn.Module, photos: torch.Tensor) -> None:
    """The ends of deletion and insertion are the photo and the covered photo; flipping in both
    orders meets there."""
    counting = Counting(model)
    maps = {"one": torch.randn(3, 12, 10), "two": torch.randn(3, 12, 10)}
    maps["again"] = maps["one"].clone()
    zero = Zero()
    flipping = [PixelFlipping("morf", 6, zero), PixelFlipping("lerf", 6, zero)]
    metrics = [Deletion(6, zero), Insertion(6, zero), *flipping, Completeness(zero)]
    explain.evaluate(counting, photos, maps, metrics, target=0, batch_size=4)
    # the photo, the blank photo, for two distinct maps 5 inner steps from either end, and two rows
    # of a probe
    assert counting.distinct == 3 * (1 + 2 * 2 * 5) + 1 + 2
    # run once each, but for: the photos in the two passes over them, and the four rows of the probe
    assert len(counting.rows) <= 3 * (1 + 2 * 2 * 5) + 3 + 3 + 4


def test_the_table_prints_itself_and_comes_as_plain_values(
    model: nn.Module, photos: torch.Tensor
) -> None:
    maps = {"one": torch.randn(3, 12, 10), "two": torch.randn(3, 12, 10)}
    table = explain.evaluate(model, photos, maps, ["deletion", "insertion"])
    head, first, second = str(table).splitlines()
    assert head.split() == ["deletion", "↓", "insertion", "↑"]
    assert first.split()[:2] == ["one", f"{table['one']['deletion'].mean().item():.3f}"]
    assert second.split()[0] == "two"
    values = json.loads(table.to_json())["values"]["two"]["insertion"]
    assert values == pytest.approx(table["two"]["insertion"].tolist())
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    column = [float(row["deletion"]) for row in rows if row["method"] == "two"]
    assert column == pytest.approx(table["two"]["deletion"].tolist(), abs=1e-15)
    with pytest.raises(KeyError, match="did you mean 'one'"):
        table["ons"]
    with pytest.raises(MetricError, match="did you mean 'deletion'"):
        table.curve("one", "delition")


def test_every_metric_says_what_it_is() -> None:
    for name in explain.list_metrics():
        metric = get_metric(name)
        assert metric.name == name
        assert metric.better in ("more", "less")
        assert len(metric.summary) > 15, name
        assert len(metric.units) > 2, name
        assert any(character.isdigit() for character in metric.paper), name
        assert ">>> " in (type(metric).__doc__ or ""), name
    with pytest.raises(MetricError, match="registered"):
        register(steps=3)(Deletion)
    assert Deletion(baseline="blur") == Deletion(baseline=Blur())  # type: ignore[arg-type]


MAP = torch.zeros(1, 12, 10)


@pytest.mark.parametrize("kind", ["bool", "uint16", ">i4", ">f4", "longdouble", "reversed"])
def test_masks_maps_and_boxes_may_be_arrays_of_any_numbers_and_layout(kind: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(360, 2))
    x = torch.zeros(1, 3, 12, 10)
    mask = np.zeros((1, 12, 10), bool)
    mask[0, 2:7, 3:] = True
    arrays = [mask, mask, np.array([[3, 2, 10, 7]])]
    expected = explain.evaluate(model, x, {"m": mask}, "auc", masks=mask)["m"]["auc"]
    if kind == "reversed":
        arrays = [array[:, ::-1].copy()[:, ::-1] for array in arrays]
    else:
        boxes_kind = "int64" if kind == "bool" else kind
        arrays = [mask.astype(kind), mask.astype(kind), arrays[2].astype(boxes_kind)]
    for place in ({"masks": arrays[0]}, {"boxes": arrays[2]}):
        value = explain.evaluate(model, x, {"m": arrays[1]}, "auc", **place)["m"]["auc"]
        torch.testing.assert_close(value, expected, check_dtype=False)


def boxes(*wrong: Any) -> list[tuple[dict[str, Any], str]]:
    return [({"boxes": value}, "^boxes must") for value in wrong]


def masks(*wrong: Any) -> list[tuple[dict[str, Any], str]]:
    return [({"masks": value}, "^masks must") for value in wrong]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"metrics": "delition"}, "did you mean 'deletion'"),
    ({"metrics": Deletion}, r"use Deletion\(\)"),
    ({"metrics": []}, "metrics must"),
    ({"metrics": 3}, "metric must"),
    ({"metrics": [Deletion(3), Deletion(4)]}, "metrics must have different names"),
    ({"metrics": "auc"}, "'auc' needs to"),
    ({"metrics": "maxboxaccv2", "masks": torch.ones(1, 12, 10)}, "'maxboxaccv2' needs the"),
    ({"metrics": "maxsensitivity"}, "needs a method, got the map 'm'"),
    ({"methods": []}, "methods must"),
    ({"methods": "gradcan"}, "gradcan"),
    ({"methods": [MAP]}, "maps must"),
    ({"methods": {"m": 3}}, "map 'm' must"),
    ({"methods": [Saliency(), Saliency(absolute=False)]}, "methods must have different names"),
    ({"methods": {"m": MAP.expand(2, 12, 10)}}, "map 'm' must have the shape"),
    ({"methods": {"m": torch.full((1, 12, 10), torch.nan)}}, "map 'm' must hold finite"),
    ({"methods": {"m": np.array([["a"]])}}, "map 'm' must be"),
    ({"x": torch.zeros(1, 3, 2, 12, 10)}, "x must"),
    *boxes([[3, 3, 3, 5]], [[10, 0, 14, 5]], [["a"]], [[0, 0, float("nan"), 4]], [[]], "box", 7),
    *masks(MAP, MAP + 0.3, MAP.to_sparse(), torch.ones(1, 6, 5), "mask", [["a"]]),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_what_does_not_fit_is_refused_in_one_line(changed: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(360, 2))
    arguments = {"x": torch.zeros(1, 3, 12, 10), "methods": {"m": MAP}, "metrics": "deletion"}
    with pytest.raises(ExplainError, match=message) as error:
        explain.evaluate(model, **arguments | changed)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("metric", "options", "message"),
    [
        (Deletion, {"steps": 0}, "steps"),
        (PixelFlipping, {"order": "both"}, "order"),
        (ROAD, {"percentiles": ()}, "percentiles"),
        (ROAD, {"percentiles": (100,)}, "percentiles"),
        (PointingGame, {"tolerance": 15}, "tolerance"),
        (Deletion, {"baseline": "zeroo"}, "zeroo"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    metric: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExplainError, match=message):
        metric(**options)
