"""Metrics of volumes and videos: against the same network on other layouts of the same numbers, and
by plain loops over voxels."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import metrics as m
from explain.baselines import Blur, Mean, Zero
from explain.metrics.covering import edges_of, middle_of
from explain.metrics.faithfulness import superpixels
from tests.conftest import Made, settled

SIZE = (4, 9, 7)
PLACES = list(itertools.product(*map(range, SIZE)))
VOLUMES = torch.randn(2, 2, *SIZE, generator=torch.Generator().manual_seed(3)).double()
MAPS = torch.randint(-5, 20, (2, *SIZE), generator=torch.Generator().manual_seed(4)).double()
BOXES = [[1, 2, 1, 5, 8, 3], [0, 0, 0, 4, 4, 4]]  # x0 y0 z0 x1 y1 z1
CLASSES = [2, 0]
ZERO = Zero()


def network() -> nn.Module:
    """Convolutions in three dimensions, and 3 classes."""
    parts = {
        "first": nn.Conv3d(2, 4, 3, padding=1),
        "second": nn.Conv3d(4, 5, 3, stride=(1, 2, 2), padding=1),
        "head": nn.Linear(5, 3),
    }

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        maps = net.second(net.first(x).relu()).relu()
        scores: torch.Tensor = net.head(maps.mean((2, 3, 4)))
        return 3 * scores

    return settled(Made(forward, **parts)).double().eval()


def as_photos(net: nn.Module, size: tuple[int, ...]) -> nn.Module:
    """The network on photos whose pixels are those of volumes of this size."""
    return Made(lambda wrapper, x: wrapper.net(x.reshape(len(x), 2, *size)), net=net).eval()


def probability(net: nn.Module, x: torch.Tensor, target: int) -> float:
    with torch.no_grad():
        return float(net(x)[0].softmax(0)[target])


WITHOUT_SHAPE = [
    m.Deletion(steps=9),
    m.Insertion(steps=9, baseline=ZERO),
    m.PixelFlipping(steps=9),
    m.ROAD(baseline=ZERO),
    m.Comprehensiveness(),
    m.Sufficiency(),
    m.AverageDrop(),
    m.Monotonicity(steps=5),
    m.FaithfulnessCorrelation(samples=9),
    m.SensitivityN(samples=5),
    m.FaithfulnessEstimate(groups=9),
    m.MonotonicityCorrelation(groups=6, samples=2),
    m.Infidelity(samples=5),
    m.Completeness(),
    m.Sparseness(),
    m.Complexity(),
    m.EffectiveComplexity(),
    m.EnergyPointingGame(),
    m.RelevanceMass(),
    m.RelevanceRank(),
    m.AttributionLocalisation(),
    m.TopKIntersection(share=5),
    m.AUC(),
    m.IoU(),
    m.Sensitivity(samples=3),
    m.MPRT(steps=2),
    m.EfficientMPRT(),
    m.RandomLogit(samples=2),
    m.InputInvariance(),
    m.ADCC(),
]


def test_metrics_without_neighbours_are_those_of_the_voxels_laid_side_by_side() -> None:
    net = network()
    regions = m.localisation.in_boxes(torch.tensor(BOXES)[:, None], SIZE)
    wide = (SIZE[0] * SIZE[1], SIZE[2])
    table = explain.evaluate(
        net, VOLUMES, "inputxgradient", WITHOUT_SHAPE, target=CLASSES, masks=regions
    )
    other = explain.evaluate(
        as_photos(net, SIZE),
        VOLUMES.reshape(2, 2, *wide),
        "inputxgradient",
        WITHOUT_SHAPE,
        target=CLASSES,
        masks=regions.reshape(2, *wide),
    )
    for name, values in table["inputxgradient"].items():
        torch.testing.assert_close(values, other["inputxgradient"][name], rtol=1e-9, atol=1e-9)
    for name, values in explain.evaluate(net, VOLUMES, {"map": MAPS}, "deletion")["map"].items():
        flat = {"map": MAPS.reshape(2, *wide)}
        photos = VOLUMES.reshape(2, 2, *wide)
        one = explain.evaluate(as_photos(net, SIZE), photos, flat, name)["map"][name]
        torch.testing.assert_close(values, one, rtol=1e-9, atol=1e-9)


OF_ONE_SLICE = [
    m.PointingGame(tolerance=0.2),
    m.RegionPerturbation(side=3, steps=5),
    m.Selectivity(side=2, steps=5),
    m.NonSensitivity(side=2),
    m.Covering(against="edges"),
    m.Covering(against="middle"),
    m.Continuity(pixels=(1, 2)),
    m.Insertion(steps=5),
    m.ROAD(percentiles=(20, 60)),
]


def test_a_volume_of_one_slice_is_measured_as_a_photo() -> None:
    net = network()
    x = VOLUMES[:, :, :1]
    methods = ["inputxgradient", "gradcam"]
    similarities: list[Any] = ["spearman", "pearson", "ssim", "hog"]
    metrics = {f"mprt {how}": m.MPRT(steps=1, similarity=how) for how in similarities}
    flat = as_photos(net, (1, *SIZE[1:]))
    for metric in (*OF_ONE_SLICE, *metrics.values()):
        volume = explain.evaluate(
            net,
            x,
            methods,
            metric,
            target=CLASSES,
            layer="second",
            boxes=[[1, 2, 0, 5, 8, 1], [0, 0, 0, 4, 4, 1]],
        )
        photo = explain.evaluate(
            flat,
            x[:, :, 0],
            methods[:1],
            metric,
            target=CLASSES,
            boxes=[[1, 2, 5, 8], [0, 0, 4, 4]],
        )
        for name, values in photo["inputxgradient"].items():
            torch.testing.assert_close(volume["inputxgradient"][name], values, rtol=1e-9, atol=1e-9)
        assert volume["gradcam"][metric.name].shape == (2,)


def test_the_marked_fifth_is_compared_with_the_same_parts_elsewhere_in_the_volume() -> None:
    net = network()
    covering = m.Covering(placements=3)
    table = explain.evaluate(net, VOLUMES, {"map": MAPS}, covering, target=CLASSES)
    blur = Blur(2 * (7 // 8) + 1, max(1.0, 7 / 12))
    draws = torch.rand(3, 3, generator=torch.Generator().manual_seed(0))
    shuffle = torch.randperm(len(PLACES), generator=torch.Generator().manual_seed(0)).numpy()
    for number, target in enumerate(CLASSES):
        x = VOLUMES[number : number + 1]
        values = MAPS[number].flatten().numpy()
        order = shuffle[np.argsort(-values[shuffle], kind="stable")]
        marked = [PLACES[place] for place in order[: round(len(PLACES) / 5)]]

        def mean_of(places: Any, x: torch.Tensor = x, target: int = target) -> float:
            keep = torch.ones(1, 1, *SIZE).double()
            for place in places:
                keep[(0, 0, *place)] = 0
            return sum(probability(net, b(x, keep), target) for b in (Mean(), blur)) / 2

        others = []
        for placement, draw in enumerate(draws.tolist()):
            moved = []
            for z, y, column in marked:
                place = (z, y, SIZE[2] - 1 - column) if placement % 2 else (z, y, column)
                steps = [int(share * length) for share, length in zip(draw, SIZE, strict=True)]
                moved.append(tuple((p + s) % n for p, s, n in zip(place, steps, SIZE, strict=True)))
            others.append(mean_of(moved))
        expected = sum(others) / 3 - mean_of(marked)
        assert float(table["map"]["covering"][number]) == pytest.approx(expected, abs=1e-12)
        parts = table.parts("map", "covering")
        assert parts["others"][number].tolist() == pytest.approx(others, abs=1e-12)


def test_edges_and_the_middle_of_a_volume_are_in_three_dimensions() -> None:
    steps = torch.zeros(1, *SIZE).double()
    x = VOLUMES[:1].numpy()[0]
    for place in PLACES:
        for axis in range(3):
            following = list(place)
            following[axis] += 1
            if following[axis] < SIZE[axis]:
                there = (slice(None), *following)
                steps[(0, *place)] += np.abs(x[there] - x[(slice(None), *place)]).sum()
    found = edges_of(VOLUMES[:1])
    sigma = 7 / 16
    rows, columns = (np.subtract.outer(np.arange(n), np.arange(n)) for n in SIZE[1:])
    down = np.exp(-0.5 * (rows / sigma) ** 2)
    across = np.exp(-0.5 * (columns / sigma) ** 2)
    down /= down.sum(1, keepdims=True)
    across /= across.sum(1, keepdims=True)
    torch.testing.assert_close(found, torch.from_numpy(down @ steps.numpy() @ across.T))
    middle = middle_of(VOLUMES[:1])[0]
    assert middle.flatten().argmax() in [PLACES.index((z, 4, 3)) for z in (1, 2)]
    assert middle[0, 0, 0] == pytest.approx(float(middle.min())) == float(middle[3, 8, 6])


def test_boxes_and_points_of_volumes() -> None:
    net = network()
    region = torch.zeros(2, *SIZE, dtype=torch.bool)
    for number, (x0, y0, z0, x1, y1, z1) in enumerate(BOXES):
        for z, y, x in PLACES:
            region[number, z, y, x] = z0 <= z < z1 and y0 <= y < y1 and x0 <= x < x1
    metrics = ["auc", "relevancerank", m.PointingGame(tolerance=0.2)]
    by_boxes = explain.evaluate(net, VOLUMES, {"map": MAPS}, metrics, boxes=BOXES)
    by_masks = explain.evaluate(net, VOLUMES, {"map": MAPS}, metrics, masks=region)
    assert by_boxes.to_dict() == by_masks.to_dict()
    reach = 0.2 * 9
    for number in range(2):
        inside = np.argwhere(region[number].numpy())
        near = [np.linalg.norm(inside - place, axis=1).min() <= reach for place in PLACES]
        values = MAPS[number].flatten().numpy()
        expected = np.mean(np.array(near)[values == values.max()])
        assert float(by_masks["map"]["pointinggame"][number]) == pytest.approx(expected)
        parts = by_masks.parts("map", "pointinggame")
        assert float(parts["random"][number]) == pytest.approx(np.mean(near))
        middle = [near[PLACES.index((z, 4, 3))] for z in (1, 2)]
        assert float(parts["centre"][number]) == pytest.approx(np.mean(middle))
    for metric, message in (("maxboxaccv2", "photos"), ("auc", "z1")):
        boxes = BOXES if metric == "maxboxaccv2" else [[0, 0, 4, 4]] * 2
        with pytest.raises(explain.ExplainError, match=message) as error:
            explain.evaluate(net, VOLUMES, {"map": MAPS}, metric, boxes=boxes)
        assert "\n" not in str(error.value)


def test_cubes_of_a_volume_are_covered_by_their_sums() -> None:
    net = network()
    metric = m.RegionPerturbation(side=3, steps=4, baseline=ZERO)
    maps = VOLUMES[:, 0]
    table = explain.evaluate(net, VOLUMES, {"map": maps}, metric, target=CLASSES)
    cubes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for place in PLACES:
        cubes.setdefault(tuple(p // 3 for p in place), []).append(place)
    assert len(cubes) == 2 * 3 * 3
    for number, target in enumerate(CLASSES):
        sums = {cube: sum(maps[(number, *p)] for p in places) for cube, places in cubes.items()}
        x = VOLUMES[number : number + 1].clone()
        scores = [probability(net, x, target)]
        for cube in sorted(sums, key=lambda cube: -float(sums[cube]))[:4]:
            for place in cubes[cube]:
                x[(0, slice(None), *place)] = 0
            scores.append(probability(net, x, target))
        expected = np.mean([scores[0] - score for score in scores])
        assert float(table["map"]["regionperturbation"][number]) == pytest.approx(expected)


def test_superpixels_of_a_volume_follow_its_colours() -> None:
    x = torch.zeros(1, 1, 4, 4, 4)
    x[:, :, 2:] = 1.0
    regions = superpixels(x, 8)[0]
    assert len(regions.unique()) == 8
    assert regions.shape == (4, 4, 4)
    assert set(regions[:2].flatten().tolist()).isdisjoint(regions[2:].flatten().tolist())


def test_frames_before_channels_have_the_figures_of_channels_before_frames() -> None:
    net = network()
    turned = Made(lambda wrapper, x: wrapper.net(x.transpose(1, 2)), net=net).eval()
    metrics = [m.Deletion(steps=5), m.Covering(placements=2), m.Sensitivity(samples=2), "mprt"]
    options: dict[str, Any] = {"target": CLASSES}
    one = explain.evaluate(net, VOLUMES, ["inputxgradient", "saliency"], metrics, **options)
    other = explain.evaluate(
        turned,
        VOLUMES.transpose(1, 2),
        ["inputxgradient", "saliency"],
        metrics,
        layout="NTCHW",
        **options,
    )
    for name, columns in one.items():
        for metric in ("deletion", "covering", "mprt"):
            torch.testing.assert_close(columns[metric], other[name][metric], rtol=1e-9, atol=1e-9)
        assert other[name]["maxsensitivity"].isfinite().all()
    planned = [
        m.plan_evaluation(model, x, "saliency", metrics, layout=layout, **options).passes
        for model, x, layout in (
            (net, VOLUMES, None),
            (turned, VOLUMES.transpose(1, 2), "NTCHW"),
        )
    ]
    assert planned[0] == planned[1]
