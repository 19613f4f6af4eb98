"""Localisation and complexity: against slow plain versions, closed forms, and maps that say
nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import ExplainWarning, MetricError
from explain.metrics import (
    AUC,
    AttributionLocalisation,
    Complexity,
    EffectiveComplexity,
    EnergyPointingGame,
    IoU,
    MaxBoxAccV2,
    PointingGame,
    RelevanceMass,
    RelevanceRank,
    Sparseness,
    TopKIntersection,
)
from tests.metrics import plain

BOXES = [[2, 3, 7, 9], [0, 0, 3, 4], [5, 6, 10, 12]]


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(360, 2)).double()


def inside(box: list[int], y: int, x: int) -> bool:
    return box[0] <= x < box[2] and box[1] <= y < box[3]


def far(box: list[int], y: int, x: int) -> float:
    """How far a pixel is from the nearest one in a box."""
    return min(
        math.hypot(y - v, x - u) for v in range(box[1], box[3]) for u in range(box[0], box[2])
    )


PLACES = [(y, x) for y in range(12) for x in range(10)]


@pytest.mark.parametrize(
    ("box", "share"), [([2, 3, 3, 4], 1), ([2, 2, 3, 3], 0), ([1, 3, 2, 4], 0)]
)
def test_the_centre_of_a_photo_with_odd_sides_is_one_pixel(box: list[int], share: float) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(105, 2))
    x = torch.rand(1, 3, 7, 5)
    table = explain.evaluate(model, x, {"map": torch.rand(1, 7, 5)}, PointingGame(0), boxes=[box])
    assert table.parts("map", "pointinggame")["centre"].item() == share


def test_every_localisation_by_its_formula(
    network: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    metrics = [
        PointingGame(0.2),
        EnergyPointingGame(),
        AttributionLocalisation(),
        RelevanceMass(),
        RelevanceRank(),
        TopKIntersection(10),
        AUC(),
        IoU(),
    ]
    table = explain.evaluate(network, photos, {"map": maps}, metrics, boxes=BOXES)["map"]
    parts = explain.evaluate(
        network, photos, {"map": maps}, PointingGame(0.2), boxes=torch.tensor(BOXES)
    )
    for i, box in enumerate(BOXES):
        v = {place: maps[i][place].item() for place in PLACES}
        within = [place for place in PLACES if inside(box, *place)]
        without = [place for place in PLACES if not inside(box, *place)]
        tops = [place for place in PLACES if v[place] == max(v.values())]
        near = [place for place in PLACES if far(box, *place) <= 0.2 * 12]
        assert table["pointinggame"][i].item() == pytest.approx(
            len(set(tops) & set(near)) / len(tops)
        )
        found = parts.parts("map", "pointinggame")
        assert found["random"][i].item() == pytest.approx(len(near) / 120)
        centre = [(5, 4), (5, 5), (6, 4), (6, 5)]
        assert found["centre"][i].item() == pytest.approx(len(set(centre) & set(near)) / 4)
        positive = sum(max(0, each) for each in v.values())
        share = sum(max(0, v[place]) for place in within) / positive
        assert table["energypointinggame"][i].item() == pytest.approx(share, abs=1e-8)
        assert table["attributionlocalisation"][i].item() == pytest.approx(
            share * 120 / len(within), abs=1e-8
        )
        squares = {place: max(0, value) ** 2 for place, value in v.items()}
        mass = sum(squares[place] for place in within) / sum(squares.values())
        assert table["relevancemass"][i].item() == pytest.approx(mass, abs=1e-8)
        order = plain.order_of(maps[i].clamp(min=0).square())[: len(within)]
        hits = sum(inside(box, *divmod(place, 10)) for place in order)
        assert table["relevancerank"][i].item() == pytest.approx(hits / len(within))
        hits = sum(inside(box, *divmod(place, 10)) for place in plain.order_of(maps[i])[:12])
        assert table["topkintersection"][i].item() == pytest.approx(hits / 12)
        wins = [
            1.0 if v[a] > v[b] else 0.5 if v[a] == v[b] else 0.0 for a in within for b in without
        ]
        assert table["auc"][i].item() == pytest.approx(sum(wins) / len(wins), abs=1e-8)
        best = 0.0
        for threshold in v.values():
            above = {place for place in PLACES if v[place] >= threshold}
            best = max(best, len(above & set(within)) / len(above | set(within)))
        assert table["iou"][i].item() == pytest.approx(best, abs=1e-8)


def test_masks_say_the_same_as_boxes_and_several_boxes_are_all_the_object(
    network: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    several = [[BOXES[0], [8, 0, 10, 2]], [BOXES[1]], [BOXES[2]]]
    masks = torch.zeros(3, 12, 10, dtype=torch.bool)
    for i, boxes in enumerate(several):
        for box in boxes:
            masks[i, box[1] : box[3], box[0] : box[2]] = True
    metrics = ["pointinggame", "energypointinggame", "auc", "iou", "relevancerank"]
    by_boxes = explain.evaluate(network, photos, {"map": maps}, metrics, boxes=several)["map"]
    by_masks = explain.evaluate(network, photos, {"map": maps}, metrics, masks=masks.numpy())["map"]
    for metric in metrics:
        torch.testing.assert_close(by_boxes[metric], by_masks[metric])
    cut = explain.evaluate(
        network, photos, {"map": maps}, "iou", boxes=[[-5, 3, 7, 9], [0, -2, 3, 4], [5, 6, 99, 99]]
    )
    whole = explain.evaluate(
        network, photos, {"map": maps}, "iou", boxes=[[0, 3, 7, 9], [0, 0, 3, 4], [5, 6, 10, 12]]
    )
    assert torch.equal(cut["map"]["iou"], whole["map"]["iou"])


def flood(above: set[tuple[int, int]]) -> list[list[int]]:
    """The tightest box around each part that hangs together, corners too."""
    boxes = []
    left = set(above)
    while left:
        part = set()
        waiting = [left.pop()]
        while waiting:
            y, x = waiting.pop()
            part.add((y, x))
            beside = {(y + v, x + u) for v in (-1, 0, 1) for u in (-1, 0, 1)} & left
            left -= beside
            waiting += beside
        ys = [y for y, _ in part]
        xs = [x for _, x in part]
        boxes.append([min(xs), min(ys), max(xs) + 1, max(ys) + 1])
    return boxes


def iou(a: list[int], b: list[int]) -> float:
    one, other = ({place for place in PLACES if inside(box, *place)} for box in (a, b))
    return len(one & other) / len(one | other)


def test_maxboxacc_draws_a_box_around_each_part(
    network: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    metric = MaxBoxAccV2(thresholds=8)
    several = [[BOXES[0], [8, 0, 10, 2]], [BOXES[1]], [BOXES[2]]]
    table = explain.evaluate(network, photos, {"map": maps}, metric, boxes=several)
    overlaps = table.parts("map", "maxboxaccv2")["overlaps"]
    expected = []
    for i, boxes in enumerate(several):
        level = (maps[i] - maps[i].min()) / (maps[i].max() - maps[i].min())
        row = []
        for t in range(8):
            parts = flood({place for place in PLACES if level[place] >= t / 8})
            row.append(max(iou(part, box) for part in parts for box in boxes))
        expected.append(row)
        assert overlaps[i].tolist() == pytest.approx(row)
        alone = sum(max(row) >= degree for degree in (0.3, 0.5, 0.7)) / 3
        assert table["map"]["maxboxaccv2"][i].item() == pytest.approx(alone)
    published = np.mean(
        [np.max(np.mean(np.array(expected) >= degree, 0)) for degree in (0.3, 0.5, 0.7)]
    )
    assert metric.of_data_set(overlaps) == pytest.approx(published)


def test_the_tolerance_goes_with_the_size_of_the_photo() -> None:
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    for size in (20, 80):
        photos = torch.zeros(1, 3, size, size)
        model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
        near = torch.zeros(1, size, size)
        near[0, size // 2, size // 2 + size // 10] = 1
        box = [[size // 2 - 1, size // 2 - 1, size // 2 + 1, size // 2 + 1]]
        hits = [
            explain.evaluate(model, photos, near, PointingGame(t), boxes=box)["map"][
                "pointinggame"
            ].item()
            for t in (0.0, 0.05, 0.1)
        ]
        assert hits == [0, 0, 1]


def test_complexities_by_their_formulas(
    network: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    metrics = [Sparseness(), Complexity(), EffectiveComplexity(0.3)]
    table = explain.evaluate(network, photos, {"map": maps}, metrics)["map"]
    for i in range(3):
        sizes = sorted(maps[i].abs().flatten().tolist())
        # the index by its definition
        between = sum(abs(a - b) for a in sizes for b in sizes) / (2 * 120 * sum(sizes))
        assert table["sparseness"][i].item() == pytest.approx(between, abs=1e-8)
        entropy = -sum(s / sum(sizes) * math.log(s / sum(sizes)) for s in sizes if s)
        assert table["complexity"][i].item() == pytest.approx(entropy, abs=1e-8)
        assert table["effectivecomplexity"][i].item() == pytest.approx(
            sum(s > 0.3 * sizes[-1] for s in sizes) / 120
        )
    one = torch.zeros(3, 12, 10).double()
    one[:, 4, 4] = -3
    found = explain.evaluate(network, photos, {"one": one, "all": one * 0 + 2}, metrics)
    assert found["one"]["sparseness"].tolist() == pytest.approx([1 - 1 / 120] * 3)
    assert found["one"]["complexity"].tolist() == [0] * 3
    assert found["all"]["complexity"].tolist() == pytest.approx([math.log(120)] * 3)
    assert found["all"]["sparseness"].tolist() == pytest.approx([0] * 3)


def test_maps_that_say_the_same_everywhere(network: nn.Module, photos: torch.Tensor) -> None:
    """A value that a random map would have, or none at all: never a silent 0 or 1."""
    same = torch.zeros(3, 12, 10, dtype=torch.float64)
    area = [(b[2] - b[0]) * (b[3] - b[1]) / 120 for b in BOXES]

    def judge(metric: Any) -> list[float]:
        return explain.evaluate(network, photos, {"map": same}, metric, boxes=BOXES)["map"][
            metric.name
        ].tolist()

    assert judge(PointingGame(0)) == pytest.approx(area)
    assert judge(AUC()) == [0.5] * 3
    assert judge(IoU()) == pytest.approx(area)
    whole = [iou([0, 0, 10, 12], box) for box in BOXES]
    assert judge(MaxBoxAccV2()) == pytest.approx(
        [sum(w >= d for d in (0.3, 0.5, 0.7)) / 3 for w in whole]
    )
    for metric in (
        EnergyPointingGame(),
        AttributionLocalisation(),
        RelevanceMass(),
        Sparseness(),
        Complexity(),
        EffectiveComplexity(),
    ):
        with pytest.warns(
            ExplainWarning, match=f"{metric.name} of map is not defined for image 0, 1, 2: its map"
        ):
            assert all(math.isnan(value) for value in judge(metric))
    with pytest.warns(ExplainWarning, match="the object takes the"):
        found = explain.evaluate(network, photos, {"map": same}, AUC(), masks=torch.ones(3, 12, 10))
    assert found["map"]["auc"].isnan().all()


def test_localisation_needs_to_know_where_the_object_is(
    network: nn.Module, photos: torch.Tensor
) -> None:
    with pytest.raises(MetricError, match="'auc' needs to"):
        explain.evaluate(network, photos, "saliency", "auc")
    with pytest.raises(MetricError, match="'maxboxaccv2' needs the"):
        explain.evaluate(network, photos, "saliency", "maxboxaccv2", masks=torch.ones(3, 12, 10))
