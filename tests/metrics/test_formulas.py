"""Each metric of maps and of scores by its formula: plain loops over one photo at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import metrics as m
from explain.baselines import Blur, Mean, Neighbours, Noise, Zero
from explain.metrics.faithfulness import superpixels
from explain.metrics.masked_scores import Rolled
from explain.metrics.sanity import CoverResult

HEIGHT = 12
WIDTH = 10
PIXELS = HEIGHT * WIDTH
PLACES = [(row, column) for row in range(HEIGHT) for column in range(WIDTH)]
BOXES = [[2, 3, 7, 9], [0, 0, 3, 4], [5, 6, 10, 12]]
CLASSES = [4, 0, 2]


class Photo:
    """One photo, its map, its class and its box; pixels are places from 0 to 119."""

    def __init__(self, model: nn.Module, x: torch.Tensor, values: torch.Tensor, number: int):
        self.model = model
        self.x = x
        self.map = values
        self.values = values.flatten().tolist()
        self.order = order_of(self.values)
        self.target = CLASSES[number]
        self.box = BOXES[number]
        self.object = [k for k, place in enumerate(PLACES) if lies_in(self.box, *place)]
        self.background = [k for k in range(PIXELS) if k not in self.object]

    def covered(self, places: Sequence[int], by: torch.Tensor | None = None) -> torch.Tensor:
        """The photo with these places of another one, or of zeros."""
        covered = self.x.flatten(1).clone()
        other = torch.zeros_like(covered) if by is None else by.expand_as(self.x).flatten(1)
        covered[:, places] = other[:, places]
        return covered.reshape(self.x.shape)

    def logit(self, places: Sequence[int] = (), by: torch.Tensor | None = None) -> float:
        with torch.no_grad():
            return float(self.model(self.covered(list(places), by)[None])[0, self.target])

    def probability(self, places: Sequence[int] = (), by: torch.Tensor | None = None) -> float:
        return self.probability_of(self.covered(list(places), by))

    def probability_of(self, x: torch.Tensor) -> float:
        with torch.no_grad():
            powers = [math.exp(score) for score in self.model(x[None])[0].tolist()]
        return powers[self.target] / sum(powers)

    def fill(self, baseline: explain.baselines.base.Baseline) -> torch.Tensor:
        return baseline.replacement(self.x[None])[0]

    def drop(self, places: Sequence[int]) -> float:
        return self.logit() - self.logit(places)

    def sum_over(self, places: Sequence[int]) -> float:
        return sum(self.values[place] for place in places)

    def by_sum(self, regions: list[list[int]]) -> list[list[int]]:
        return sorted(regions, key=lambda places: -self.sum_over(places))


def order_of(values: list[float], seed: int = 0) -> list[int]:
    """The places of a map, largest value first; equal values as a shuffle with a seed has them."""
    shuffle = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(shuffle, key=lambda place: -values[place])


def lies_in(box: Sequence[int], row: int, column: int) -> bool:
    return box[0] <= column < box[2] and box[1] <= row < box[3]


def area(curve: Sequence[float], at: Sequence[float]) -> float:
    """The area under straight lines between points, each at its own place."""
    pairs = pairwise(zip(at, curve, strict=True))
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairs)


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    return float(np.corrcoef(one, other)[0, 1])


def steps(count: int, total: int = PIXELS) -> list[int]:
    return [round(total * step / count) for step in range(count + 1)]


def squares(side: int) -> list[list[int]]:
    """The places in each square, row by row."""
    numbers: dict[tuple[int, int], list[int]] = {}
    for place, (row, column) in enumerate(PLACES):
        numbers.setdefault((row // side, column // side), []).append(place)
    return [numbers[key] for key in sorted(numbers)]


# Curves


def deletion(photo: Photo) -> float:
    counts = steps(7)
    curve = [photo.probability(photo.order[:count]) for count in counts]
    return area(curve, counts) / PIXELS


def insertion(photo: Photo) -> float:
    counts = steps(7)
    blurred = photo.fill(Blur(5, 2.0))
    curve = [photo.probability(photo.order[count:], blurred) for count in counts]
    return area(curve, counts) / PIXELS


def morf(photo: Photo) -> float:
    counts = steps(7)
    curve = [photo.probability(photo.order[:count], photo.fill(Mean())) for count in counts]
    return area(curve, counts) / PIXELS


def lerf(photo: Photo) -> float:
    counts = steps(7)
    order = photo.order[::-1]
    curve = [photo.probability(order[:count], photo.fill(Mean())) for count in counts]
    return area(curve, counts) / PIXELS


def road(photo: Photo) -> float:
    baseline = Neighbours(noise=0.3, seed=4)
    halves = []
    for count in (24, 60, 108):
        scores = []
        for places in (photo.order[-count:], photo.order[:count]):
            keep = torch.ones(PIXELS, dtype=torch.float64)
            keep[places] = 0
            shown = baseline(photo.x[None], keep.reshape(1, 1, HEIGHT, WIDTH))[0]
            scores.append(photo.probability_of(shown))
        halves.append((scores[0] - scores[1]) / 2)
    return sum(halves) / 3


def comprehensiveness(photo: Photo) -> float:
    mean = photo.fill(Mean())
    lost = [photo.probability() - photo.probability(photo.order[:n], mean) for n in (6, 36)]
    return sum(lost) / 2


def sufficiency(photo: Photo) -> float:
    lost = [photo.probability() - photo.probability(photo.order[n:]) for n in (6, 36)]
    return sum(lost) / 2


def behind_heatmap(photo: Photo, by: torch.Tensor) -> float:
    mask = (photo.map / photo.map.max()).clamp(min=0)
    return photo.probability_of(mask * photo.x + (1 - mask) * by)


def averagedrop(photo: Photo) -> float:
    kept = behind_heatmap(photo, photo.x.mean((1, 2), keepdim=True))
    return max(0.0, photo.probability() - kept) / photo.probability()


def increase(photo: Photo) -> float:
    return float(behind_heatmap(photo, torch.zeros(())) > photo.probability())


def regionperturbation(photo: Photo) -> float:
    noise = photo.fill(Noise(seed=2))
    ordered = photo.by_sum(squares(4))
    curve = [photo.probability([*chain(*ordered[:k])], noise) for k in range(6)]
    return sum(curve[0] - value for value in curve) / 6


def selectivity(photo: Photo) -> float:
    """Six squares in four steps, which cover 2, 3 and 4 of them: to the nearest square."""
    ordered = photo.by_sum(squares(5))
    counts = steps(4, 6)
    curve = [photo.logit([*chain(*ordered[:count])]) for count in counts]
    return area(curve, counts) / 6


def irof(photo: Photo) -> float:
    labels = superpixels(photo.x[None], 8).flatten().tolist()
    pieces = [[k for k in range(PIXELS) if labels[k] == label] for label in set(labels)]
    ordered = sorted(pieces, key=lambda places: -photo.sum_over(places) / len(places))
    mean = photo.fill(Mean())
    count = len(ordered)
    curve = [photo.probability([*chain(*ordered[:k])], mean) for k in range(count + 1)]
    return 1 - area(curve, range(count + 1)) / count / curve[0]


# Sums and scores


def by_subsets(photo: Photo, seed: int, samples: int, pixels: int) -> float:
    sums = []
    drops = []
    for sample in range(samples):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + sample)
        places = torch.randperm(PIXELS, generator=generator)[:pixels].tolist()
        sums.append(photo.sum_over(places))
        drops.append(photo.drop(places))
    return correlation(sums, drops)


def faithfulnesscorrelation(photo: Photo) -> float:
    return by_subsets(photo, 3, 12, 12)


def sensitivityn(photo: Photo) -> float:
    return (by_subsets(photo, 5, 8, 12) + by_subsets(photo, 5, 8, 48)) / 2


def faithfulnessestimate(photo: Photo) -> float:
    groups = [photo.order[start:end] for start, end in pairwise(steps(7))]
    sums = [photo.sum_over(places) for places in groups]
    return correlation(sums, [photo.drop(places) for places in groups])


def monotonicitycorrelation(photo: Photo) -> float:
    order = order_of([abs(value) for value in photo.values], seed=2)
    noises = [photo.fill(Noise(seed)) for seed in (2, 3, 4)]
    sizes = []
    changes = []
    for k in range(6):
        places = order[20 * k : 20 * k + 20]
        sizes.append(abs(photo.sum_over(places)))
        losses = [photo.logit() - photo.logit(places, noise) for noise in noises]
        changes.append(np.mean(np.square(losses)))
    ranks = np.argsort(np.argsort([sizes, changes], 1), 1)  # no ties here
    return correlation(ranks[0].tolist(), ranks[1].tolist())


def monotonicity(photo: Photo) -> float:
    curve = [photo.logit(photo.order[: PIXELS - count]) for count in steps(5)]
    return float(all(later >= earlier for earlier, later in pairwise(curve)))


def nonsensitivity(photo: Photo) -> float:
    regions = squares(3)
    sums = [sum(abs(photo.values[place]) for place in places) for places in regions]
    changes = [abs(photo.drop(places)) for places in regions]
    wrong = 0
    for of_map, of_model in zip(sums, changes, strict=True):
        wrong += (of_map <= 0.3 * max(sums)) != (of_model <= 0.3 * max(changes))
    return wrong / len(regions)


def infidelity(photo: Photo) -> float:
    predicted = []
    losses = []
    for sample in range(9):
        generator = torch.Generator().manual_seed(1_000_003 + sample)
        noise = 0.3 * torch.randn(HEIGHT, WIDTH, generator=generator).double()
        predicted.append(float((noise * photo.map).sum()))
        losses.append(photo.logit() - photo.logit(range(PIXELS), photo.x - noise))
    factor = np.dot(predicted, losses) / np.dot(predicted, predicted)
    return float(np.mean((factor * np.array(predicted) - losses) ** 2))


def completeness(photo: Photo) -> float:
    return abs(sum(photo.values) - photo.drop(range(PIXELS)))


# Places


def pointinggame(photo: Photo) -> float:
    box = photo.box
    tops = [k for k in range(PIXELS) if photo.values[k] == max(photo.values)]
    hits = 0
    for top in tops:
        row, column = PLACES[top]
        down = max(box[1] - row, 0, row - box[3] + 1)
        across = max(box[0] - column, 0, column - box[2] + 1)
        hits += math.hypot(down, across) <= 0.2 * HEIGHT
    return hits / len(tops)


def energypointinggame(photo: Photo) -> float:
    positive = [max(0.0, value) for value in photo.values]
    return sum(positive[k] for k in photo.object) / sum(positive)


def attributionlocalisation(photo: Photo) -> float:
    return energypointinggame(photo) * PIXELS / len(photo.object)


def relevancemass(photo: Photo) -> float:
    squared = [max(0.0, value) ** 2 for value in photo.values]
    return sum(squared[k] for k in photo.object) / sum(squared)


def relevancerank(photo: Photo) -> float:
    size = len(photo.object)
    top = order_of([max(0.0, value) ** 2 for value in photo.values])[:size]
    return len({*top} & {*photo.object}) / size


def topkintersection(photo: Photo) -> float:
    return len({*photo.order[:12]} & {*photo.object}) / 12


def auc(photo: Photo) -> float:
    wins = 0.0
    for one in photo.object:
        for other in photo.background:
            wins += (1 + np.sign(photo.values[one] - photo.values[other])) / 2
    return wins / len(photo.object) / len(photo.background)


def iou(photo: Photo) -> float:
    best = 0.0
    for threshold in photo.values:
        above = {k for k in range(PIXELS) if photo.values[k] >= threshold}
        best = max(best, len(above & {*photo.object}) / len(above | {*photo.object}))
    return best


# Complexity


def sparseness(photo: Photo) -> float:
    sizes = [abs(value) for value in photo.values]
    between = sum(abs(a - b) for a in sizes for b in sizes)
    return between / (2 * PIXELS * sum(sizes))


def complexity(photo: Photo) -> float:
    total = sum(abs(value) for value in photo.values)
    shares = [abs(value) / total for value in photo.values if value]
    return -sum(share * math.log(share) for share in shares)


def effectivecomplexity(photo: Photo) -> float:
    sizes = [abs(value) for value in photo.values]
    return sum(size > 0.3 * max(sizes) for size in sizes) / PIXELS


FORMULAS: list[tuple[m.Metric, Callable[[Photo], float]]] = [
    (m.Deletion(7), deletion),
    (m.Insertion(7, Blur(5, 2.0)), insertion),
    (m.PixelFlipping(steps=7), morf),
    (m.PixelFlipping("lerf", steps=7), lerf),
    (m.ROAD((20, 50, 90), Neighbours(noise=0.3, seed=4)), road),
    (m.Comprehensiveness((5, 30), Mean()), comprehensiveness),
    (m.Sufficiency((5, 30)), sufficiency),
    (m.AverageDrop(Mean()), averagedrop),
    (m.IncreaseInConfidence(Zero()), increase),
    (m.RegionPerturbation(4, 5, Noise(seed=2)), regionperturbation),
    (m.Selectivity(5, 4, score="logit"), selectivity),
    (m.IROF(8), irof),
    (m.FaithfulnessCorrelation(12, 10, seed=3), faithfulnesscorrelation),
    (m.SensitivityN((10, 40), 8, seed=5), sensitivityn),
    (m.FaithfulnessEstimate(7), faithfulnessestimate),
    (m.MonotonicityCorrelation(6, 3, seed=2), monotonicitycorrelation),
    (m.Monotonicity(5, score="logit"), monotonicity),
    (m.NonSensitivity(3, 0.3), nonsensitivity),
    (m.Infidelity(9, 0.3, seed=1), infidelity),
    (m.Completeness(), completeness),
    (m.PointingGame(0.2), pointinggame),
    (m.EnergyPointingGame(), energypointinggame),
    (m.AttributionLocalisation(), attributionlocalisation),
    (m.RelevanceMass(), relevancemass),
    (m.RelevanceRank(), relevancerank),
    (m.TopKIntersection(10), topkintersection),
    (m.AUC(), auc),
    (m.IoU(), iou),
    (m.Sparseness(), sparseness),
    (m.Complexity(), complexity),
    (m.EffectiveComplexity(0.3), effectivecomplexity),
]


def test_every_metric_equals_its_formula(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    metrics = [metric for metric, _ in FORMULAS]
    table = explain.evaluate(model, photos, maps, metrics, target=CLASSES, boxes=BOXES)
    for number in range(3):
        photo = Photo(model, photos[number], maps[number], number)
        for metric, formula in FORMULAS:
            value = table["map"][metric.name][number].item()
            assert value == pytest.approx(formula(photo), rel=1e-6, abs=1e-8), metric.name


def parts_of(above: set[tuple[int, int]]) -> list[list[int]]:
    """The tightest box around each connected part, corners too."""
    boxes = []
    left = set(above)
    while left:
        part = set()
        waiting = [left.pop()]
        while waiting:
            row, column = waiting.pop()
            part.add((row, column))
            nearby = {(row + v, column + u) for v in (-1, 0, 1) for u in (-1, 0, 1)} & left
            left -= nearby
            waiting += nearby
        rows = [row for row, _ in part]
        columns = [column for _, column in part]
        boxes.append([min(columns), min(rows), max(columns) + 1, max(rows) + 1])
    return boxes


def overlap(one: Sequence[int], other: Sequence[int]) -> float:
    first = {place for place in PLACES if lies_in(one, *place)}
    second = {place for place in PLACES if lies_in(other, *place)}
    return len(first & second) / len(first | second)


def test_maxboxacc_has_a_box_around_each_part(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    metric = m.MaxBoxAccV2(thresholds=8)
    boxes = [[BOXES[0], [8, 0, 10, 2]], [BOXES[1]], [BOXES[2]]]
    table = explain.evaluate(model, photos, maps, metric, boxes=boxes)
    overlaps = table.parts("map", "maxboxaccv2")["overlaps"]
    degrees = torch.tensor([0.3, 0.5, 0.7])
    for number, values in enumerate(maps):
        level = (values - values.min()) / (values.max() - values.min())
        expected = []
        for step in range(8):
            parts = parts_of({place for place in PLACES if level[place] >= step / 8})
            expected.append(max(overlap(part, box) for part in parts for box in boxes[number]))
        assert overlaps[number].tolist() == pytest.approx(expected)
        share = (max(expected) >= degrees).double().mean()
        assert table["map"]["maxboxaccv2"][number].item() == pytest.approx(share.item())
    hits = overlaps[..., None] >= degrees
    best = hits.double().mean(0).amax(0)
    assert metric.of_data_set(overlaps) == pytest.approx(best.mean().item())


def test_masks_and_several_boxes_and_boxes_across_the_edge_are_the_object(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    boxes = [[2, 3, 7, 9], [8, -3, 99, 2]]
    mask = torch.zeros(1, HEIGHT, WIDTH, dtype=torch.bool)
    mask[0, 3:9, 2:7] = True
    mask[0, :2, 8:] = True
    metrics = ["pointinggame", "energypointinggame", "auc", "iou", "relevancerank"]
    arguments = (model, photos[:1], maps[:1], metrics)
    by_boxes = explain.evaluate(*arguments, boxes=[boxes])["map"]
    by_masks = explain.evaluate(*arguments, masks=mask.numpy())["map"]
    for metric in metrics:
        torch.testing.assert_close(by_boxes[metric], by_masks[metric])


def test_the_centre_of_a_photo_with_odd_sides_is_one_pixel() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(105, 2))
    x = torch.rand(3, 3, 7, 5)
    boxes = [[2, 3, 3, 4], [2, 2, 3, 3], [1, 3, 2, 4]]
    table = explain.evaluate(model, x, x.sum(1), m.PointingGame(0), boxes=boxes)
    parts = table.parts("map", "pointinggame")
    assert parts["centre"].flatten().tolist() == [1, 0, 0]
    assert parts["random"].flatten().tolist() == pytest.approx([1 / 35] * 3)


def test_superpixels_follow_colours_and_have_no_gaps() -> None:
    photo = 0.05 * torch.randn(1, 3, 24, 32, generator=torch.Generator().manual_seed(0))
    bright = torch.zeros(24, 32, dtype=torch.bool)
    bright[5:14, 9:20] = True
    labels = superpixels(photo + 2 * bright, 24, compactness=0.3)[0]
    assert labels.unique().tolist() == [*range(int(labels.max()) + 1)]
    of_square = labels[bright].bincount(minlength=24)
    of_rest = labels[~bright].bincount(minlength=24)
    assert torch.minimum(of_square, of_rest).sum() < 0.05 * 24 * 32


def slic(photo: np.ndarray[Any, Any], count: int, compactness: float) -> np.ndarray[Any, Any]:
    """Superpixels of a photo ``(C, H, W)``, pixel by pixel."""
    _, height, width = photo.shape
    side = max(1.0, (height * width / count) ** 0.5)
    down = max(1, round(height / side))
    across = max(1, round(width / side))
    centred = photo - photo.mean((1, 2), keepdims=True)
    colours = centred / np.sqrt((centred**2).mean())
    pixels = [(i, j) for i in range(height) for j in range(width)]
    at = {
        (i, j): np.append(colours[:, i, j], np.array([i, j]) * compactness / side)
        for i, j in pixels
    }
    labels = {(i, j): (i * down // height, j * across // width) for i, j in pixels}
    first = dict(labels)
    for _ in range(5):
        centres = {}
        for piece in set(labels.values()):
            centres[piece] = np.mean([at[p] for p in pixels if labels[p] == piece], 0)
        for pixel in pixels:
            row, column = first[pixel]
            near = [p for p in centres if abs(p[0] - row) < 2 and abs(p[1] - column) < 2]
            labels[pixel] = min(near, key=lambda p: ((at[pixel] - centres[p]) ** 2).sum())
    return np.array([labels[p][0] * across + labels[p][1] for p in pixels]).reshape(height, width)


@pytest.mark.parametrize("size", [(9, 11), (2, 30), (30, 2)])
def test_superpixels_are_those_of_a_plain_loop(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    photo = torch.randn(1, 3, *size, generator=generator)
    labels = superpixels(photo, 6)[0]
    expected = slic(photo[0].double().numpy(), 6, 1.0)
    assert torch.equal(labels, torch.from_numpy(np.unique(expected, return_inverse=True)[1]))


def test_a_photo_that_is_rolled_is_mirrored_and_moved_by_half() -> None:
    photo = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(2))
    rolled = Rolled().replacement(photo)
    for row, column in product(range(5), range(4)):
        assert torch.equal(
            rolled[0, :, (row + 2) % 5, (column + 2) % 4], photo[0, :, row, 3 - column]
        )


def test_a_map_is_typical_if_half_of_the_photos_own_maps_do_as_well() -> None:
    assert [CoverResult(controls=n, of_controls=10).is_typical for n in (4, 5)] == [False, True]


def test_the_channels_of_a_map_are_pooled_by_their_squares() -> None:
    """Against a float64 loop; positive and negative channels do not cancel out."""
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(108, 2)).double()
    x = torch.rand(2, 3, 6, 6, generator=generator, dtype=torch.float64)
    boxes = torch.tensor([[0, 0, 3, 3], [2, 1, 5, 6]])
    metrics = [m.RelevanceMass(), m.RelevanceRank()]
    table = explain.evaluate(model, x, {"map": maps}, metrics, boxes=boxes)["map"]

    for image, (x0, y0, x1, y1) in enumerate(boxes.tolist()):
        sizes = {
            (row, column): sum(float(maps[image, c, row, column]) ** 2 for c in range(3))
            for row in range(6)
            for column in range(6)
        }
        on_object = [(row, column) for row in range(y0, y1) for column in range(x0, x1)]
        share = sum(sizes[place] for place in on_object) / sum(sizes.values())
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[: len(on_object)]
        hits = len(set(largest) & set(on_object)) / len(on_object)
        assert float(table["relevancemass"][image]) == pytest.approx(share)
        assert float(table["relevancerank"][image]) == pytest.approx(hits)
