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
from explain import ExplainError, MetricError, TargetError
from explain.baselines import Zero
from explain.engine import Evidence
from explain.layers.layouts import Grids
from explain.methods import GradCAM, Saliency
from explain.metrics import (
    ROAD,
    Completeness,
    Deletion,
    Faithful,
    Insertion,
    PixelFlipping,
    get_metric,
    list_metrics,
    register,
)
from explain.metrics.base import UNCHANGED, cover_ranks


class Counting(nn.Module):
    """Counts the rows that it is run on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.rows: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.rows += list(x.detach().clone())
        return self.inner(x)


def test_methods_attributions_and_arrays_are_judged_alike(
    model: nn.Module, photos: torch.Tensor
) -> None:
    a = explain.attribute(model, photos, "gradcam", layer="layer1")
    given = {
        "name": "gradcam",
        "object": GradCAM(),
        "ours": a,
        "tensor": a.values,
        "array": a.values.numpy(),
    }
    table = explain.evaluate(model, photos, given, ["deletion", "insertion"], layer="layer1")
    assert list(table) == list(given)
    for name in given:
        for metric in ("deletion", "insertion"):
            torch.testing.assert_close(table[name][metric], table["ours"][metric], msg=name)
    listed = explain.evaluate(model, photos, ["saliency", a], "deletion", layer="layer1")
    assert list(listed) == ["saliency", "gradcam"]
    torch.testing.assert_close(listed["gradcam"]["deletion"], table["ours"]["deletion"])


def test_the_target_is_the_attributions_own(model: nn.Module, photos: torch.Tensor) -> None:
    a = explain.attribute(model, photos, "saliency", target=[3, 1, 0])
    own = explain.evaluate(model, photos, a, "deletion")
    given = explain.evaluate(
        model, photos, {"saliency": a.values.abs().amax(1)}, "deletion", target=[3, 1, 0]
    )
    other = explain.evaluate(model, photos, a, "deletion", target=2)
    torch.testing.assert_close(own["saliency"]["deletion"], given["saliency"]["deletion"])
    assert not torch.allclose(own["saliency"]["deletion"], other["saliency"]["deletion"])
    with pytest.raises(MetricError, match="attributions must"):
        explain.evaluate(
            model, photos, [a, explain.attribute(model, photos, "gradcam", target=2)], "deletion"
        )
    with pytest.raises(MetricError, match="target="):
        explain.evaluate(
            model, photos, explain.attribute(model, photos, "saliency", target=_sum), "deletion"
        )


def _sum(output: torch.Tensor) -> torch.Tensor:
    return output.sum(1)


def test_scores_that_are_no_class_are_read_as_they_are(
    model: nn.Module, photos: torch.Tensor
) -> None:
    table = explain.evaluate(model, photos, "saliency", Deletion(4, score="logit"), target=_sum)
    assert table.curve("saliency", "deletion")[1][:, 0].tolist() == pytest.approx(
        model(photos).sum(1).tolist()
    )
    with pytest.raises(MetricError, match="target must"):
        explain.evaluate(model, photos, "saliency", "deletion", target=_sum)
    with pytest.raises(TargetError, match="classes"):
        explain.evaluate(
            nn.Sequential(model, nn.Linear(5, 1)).double(), photos, "saliency", "deletion", target=0
        )


def test_each_distinct_altered_photo_is_run_once(model: nn.Module, photos: torch.Tensor) -> None:
    """Deletion's and insertion's ends are the photo and the covered photo; flipping in both orders
    meets there."""
    counting = Counting(model)
    maps = {"a": torch.randn(3, 12, 10), "b": torch.randn(3, 12, 10)}
    maps["same as a"] = maps["a"].clone()
    baseline = Zero()
    flipping = [PixelFlipping("morf", 6, baseline), PixelFlipping("lerf", 6, baseline)]
    metrics = [Deletion(6, baseline), Insertion(6, baseline), *flipping, Completeness(baseline)]
    explain.evaluate(counting, photos, maps, metrics, target=0, batch_size=4)
    distinct = {row.numpy().tobytes() for row in counting.rows}
    # the photo, the blank photo, for two distinct maps 5 inner steps from either end, and two rows
    # of a probe
    assert len(distinct) == 3 * (1 + 2 * 2 * 5) + 1 + 2
    # run once each, but for: the photos in the two passes over them, and the four rows of the probe
    assert len(counting.rows) <= 3 * (1 + 2 * 2 * 5) + 3 + 3 + 4


def test_rows_are_built_when_they_are_run_and_never_all_at_once(
    model: nn.Module, photos: torch.Tensor
) -> None:
    ranks = torch.arange(120).reshape(1, 12, 10).expand(3, 12, 10)
    request = cover_ranks(ranks, [0] * 121, list(range(121)), Zero(), "logit")
    assert request.places is not None
    assert request.places[:, 0].tolist() == [UNCHANGED] * 3
    rows = request.of.rows(Evidence(photos, torch.zeros(3), None, "a score", Grids((12, 10))))
    assert len(rows.owners) == 3 * 119
    few = rows.make(torch.tensor([15, 356, 120]))
    assert few.shape == (3, 3, 12, 10)
    assert rows.owners[[15, 356, 120]].tolist() == [0, 2, 0]
    assert (few == 0).sum((1, 2, 3)).tolist() == [3 * 6, 3 * 119, 3 * 41]


def test_metrics_of_the_map_alone_do_not_run_the_model(
    model: nn.Module, photos: torch.Tensor
) -> None:
    counting = Counting(model)
    maps = {"given": torch.randn(3, 12, 10)}
    boxes = [[1, 2, 6, 8]] * 3
    alone = explain.evaluate(counting, photos, maps, ["pointinggame", "sparseness"], boxes=boxes)
    assert counting.rows == []
    together = explain.evaluate(
        model, photos, maps, ["pointinggame", "deletion", "sparseness"], boxes=boxes
    )
    for name in ("pointinggame", "sparseness"):
        assert torch.equal(alone["given"][name], together["given"][name])


def test_what_is_judged_does_not_depend_on_the_batch_size(
    model: nn.Module, photos: torch.Tensor
) -> None:
    metrics = [Deletion(5), ROAD((30,))]
    found = [
        explain.evaluate(
            model, photos, ["gradcam", "saliency"], metrics, batch_size=size, layer="layer1"
        )
        for size in (None, 1, 7)
    ]
    for name in ("gradcam", "saliency"):
        for metric in ("deletion", "road"):
            for other in found[1:]:
                torch.testing.assert_close(found[0][name][metric], other[name][metric])


def test_the_table_prints_itself_and_comes_as_plain_values(
    model: nn.Module, photos: torch.Tensor
) -> None:
    table = explain.evaluate(
        model, photos, ["gradcam", "saliency"], ["deletion", "insertion"], layer="layer1"
    )
    lines = str(table).splitlines()
    assert lines[0].split() == ["deletion", "↓", "insertion", "↑"]
    assert [line.split()[0] for line in lines[1:]] == ["gradcam", "saliency"]
    assert lines[1].split()[1] == f"{table['gradcam']['deletion'].mean().item():.3f}"
    assert repr(table) == str(table)
    plain = json.loads(table.to_json())
    assert plain == table.to_dict()
    assert plain["values"]["saliency"]["insertion"] == pytest.approx(
        table["saliency"]["insertion"].tolist()
    )
    assert plain["metrics"]["deletion"]["better"] == "less"
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert len(rows) == 6
    assert float(rows[4]["deletion"]) == pytest.approx(
        table["saliency"]["deletion"][1].item(), abs=1e-15
    )
    with pytest.raises(KeyError, match="did you mean 'gradcam'"):
        table["gradcan"]
    assert "gradcam" in table
    assert "gradcan" not in table
    with pytest.raises(MetricError, match="did you mean 'deletion'"):
        table.curve("gradcam", "delition")


def test_every_metric_says_what_it_is() -> None:
    assert explain.list_metrics is list_metrics
    for name in list_metrics():
        metric = get_metric(name)
        assert metric.name == name
        assert metric.better in ("more", "less")
        assert len(metric.summary) > 15, name
        assert len(metric.units) > 2, name
        assert any(character.isdigit() for character in metric.paper), name
        text = type(metric).__doc__ or ""
        assert ">>> " in text, name
    with pytest.raises(MetricError, match="registered"):
        register(steps=3)(Deletion)


X = torch.zeros(1, 3, 12, 10).double()
MAP = torch.zeros(1, 12, 10)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"metrics": "delition"}, "did you mean 'deletion'"),
    ({"metrics": Deletion}, r"use Deletion\(\)"),
    ({"metrics": []}, "metrics must"),
    ({"metrics": 3}, "metric must"),
    ({"metrics": [Deletion(3), Deletion(4)]}, "metrics must have different names"),
    ({"methods": []}, "methods must"),
    ({"methods": "gradcan"}, "gradcan"),
    ({"methods": [MAP]}, "maps must"),
    ({"methods": {"m": 3}}, "map 'm' must"),
    ({"metrics": "maxsensitivity"}, "needs a method, got the map 'm'"),
    ({"methods": [Saliency(), Saliency(absolute=False)]}, "methods must have different names"),
    *(
        ({"methods": {"m": wrong}}, "map 'm' must have the shape")
        for wrong in (MAP[0], MAP[:, :0], MAP.expand(2, 12, 10), torch.zeros(1, 3, 6, 5))
    ),
    ({"methods": {"m": torch.full((1, 12, 10), torch.nan)}}, "map 'm' must hold finite"),
    *(
        ({"methods": {"m": wrong}}, "map 'm' must be")
        for wrong in (MAP.to_sparse(), np.array([["a"]]))
    ),
    ({"x": torch.zeros(1, 3, 2, 12, 10).double()}, "x must"),
    *(
        ({"boxes": wrong}, "^boxes must")
        for wrong in (
            torch.zeros(2, 4),
            [[3, 3, 3, 5]],
            [[10, 0, 14, 5]],
            [["a"]],
            [[0, 0, float("nan"), 4]],
            [[]],
            [[0, 0, 0, 0]],
            [[-9, -9, -2, -2]],
            [[6, 7, 2, 3]],
            [None],
            "box",
            7,
        )
    ),
    *(
        ({"masks": wrong}, "^masks must")
        for wrong in (
            torch.zeros(1, 12, 10),
            torch.full((1, 12, 10), 0.3),
            np.ones((1, 12, 10), complex),
            torch.ones(1, 12, 10).to_sparse(),
            torch.ones(1, 6, 5),
            "mask",
            7,
            [["a"]],
            torch.ones(12, 10),
            torch.zeros(1, 12, 10, dtype=torch.bool),
        )
    ),
]


@pytest.mark.parametrize("kind", ["bool", "uint8", "uint16", ">i4", ">f4", "longdouble", "turned"])
def test_masks_maps_and_boxes_may_be_arrays_of_any_numbers_and_layout(
    model: nn.Module, kind: str
) -> None:
    mask = np.zeros((1, 12, 10), bool)
    mask[0, 2:7, 3:] = True
    maps = MAP.double().numpy()
    boxes = np.array([[3, 2, 10, 7]])
    expected = explain.evaluate(model, X, {"m": maps}, ["auc", "deletion"], target=1, masks=mask)[
        "m"
    ]
    if kind == "turned":
        found = [each[:, ::-1].copy()[:, ::-1] for each in (mask, maps, boxes)]
    else:
        found = [
            mask.astype(kind),
            maps if kind in ("bool", "uint8", "uint16", ">i4") else maps.astype(kind),
            boxes if kind == "bool" else boxes.astype(kind),
        ]
    for place in ({"masks": found[0]}, {"boxes": found[2]}):
        given = explain.evaluate(model, X, {"m": found[1]}, ["auc", "deletion"], target=1, **place)[
            "m"
        ]
        for name, value in given.items():
            torch.testing.assert_close(
                value, expected[name], check_dtype=False, rtol=1e-5, atol=1e-6
            )


def test_an_attribution_of_other_photos_is_named_before_its_target(model: nn.Module) -> None:
    two = explain.attribute(model, torch.cat([X, X]), "saliency")
    with pytest.raises(MetricError, match="map 'saliency' must"):
        explain.evaluate(model, X, two, "deletion")
    one, other = (
        explain.attribute(model, X, name, target=i)
        for i, name in enumerate(("saliency", "gradcam"))
    )
    with pytest.raises(MetricError, match="classes"):
        explain.evaluate(model, X, [one, other], "deletion")


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_what_does_not_fit_is_refused_in_one_line(
    model: nn.Module, changed: dict[str, Any], message: str
) -> None:
    given = {"x": X, "methods": {"m": MAP}, "metrics": "deletion", **changed}
    with pytest.raises(ExplainError, match=message) as caught:
        explain.evaluate(model, **given)
    assert "\n" not in str(caught.value)


OPTIONS: list[tuple[Any, str]] = [
    (lambda: Deletion(steps=0), "steps"),
    (lambda: Deletion(score="score"), "score"),  # type: ignore[arg-type]
    (lambda: PixelFlipping("both"), "order"),
    (lambda: ROAD(percentiles=()), "percentiles"),  # type: ignore[arg-type]
    (lambda: ROAD(percentiles=(0, 50)), "percentiles"),
    (lambda: explain.metrics.Sufficiency((100,)), "percentiles"),
    (lambda: explain.metrics.Continuity(()), "pixels"),
    (lambda: explain.metrics.PointingGame(15), "tolerance"),
    (lambda: Faithful(level=2), "level"),
    (lambda: explain.list_metrics(3), "pattern"),  # type: ignore[arg-type]
    (lambda: Deletion(baseline="zeroo"), "zeroo"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "message"), OPTIONS)
def test_options_that_do_not_fit_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ExplainError, match=message):
        make()


def test_fills_go_by_name_too() -> None:
    assert Deletion(baseline="blur") == Deletion(baseline=explain.baselines.Blur())  # type: ignore[arg-type]
