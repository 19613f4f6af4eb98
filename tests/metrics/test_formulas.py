"""Each metric of maps and of scores by its formula: plain loops over one photo at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import box_iou, masks_to_boxes

import explain
from explain import metrics as m
from explain.baselines import Blur, Mean, Neighbours, Noise, Zero
from explain.baselines.base import Baseline
from explain.metrics.faithfulness import superpixels

HEIGHT = 12
WIDTH = 10
PIXELS = HEIGHT * WIDTH
BOXES = [[2, 3, 7, 9], [0, 0, 3, 4], [5, 6, 10, 12]]
CLASSES = [4, 0, 2]
ZERO = Zero()

Array = np.ndarray[Any, Any]
Places = Sequence[int] | Array
"""Numbers of pixels, from 0 to 119."""


class Photo:
    """One photo, its map, its class and its box."""

    def __init__(self, model: nn.Module, x: torch.Tensor, values: torch.Tensor, number: int):
        self.model = model
        self.x = x
        self.map = values
        self.values = values.flatten().numpy()
        self.order = order_of(self.values)
        self.target = CLASSES[number]
        self.box = BOXES[number]
        self.object = inside(self.box).flatten().numpy()

    def covered(self, places: Places, baseline: Baseline) -> torch.Tensor:
        keep = torch.ones(PIXELS, dtype=torch.float64)
        keep[torch.as_tensor(np.array(places, int))] = 0
        return baseline(self.x[None], keep.reshape(1, 1, HEIGHT, WIDTH))[0]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model(x[None])[0]

    def logit(self, places: Places = (), baseline: Baseline = ZERO) -> float:
        return float(self.logits(self.covered(places, baseline))[self.target])

    def probability(self, places: Places = (), baseline: Baseline = ZERO) -> float:
        return self.probability_of(self.covered(places, baseline))

    def probability_of(self, x: torch.Tensor) -> float:
        powers = self.logits(x).exp()
        return float(powers[self.target] / powers.sum())

    def drop(self, places: Places, baseline: Baseline = ZERO) -> float:
        return self.logit() - self.logit(places, baseline)


def inside(box: Sequence[int]) -> torch.Tensor:
    left, top, right, bottom = box
    pixels = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    pixels[top:bottom, left:right] = True
    return pixels


def order_of(values: Array, seed: int = 0) -> Array:
    """The places of a map, largest value first; equal values as a shuffle with a seed has them."""
    shuffle = torch.randperm(PIXELS, generator=torch.Generator().manual_seed(seed)).numpy()
    return shuffle[np.argsort(-values[shuffle], kind="stable")]


def area(curve: Iterable[float], at: Sequence[float]) -> float:
    """The area under straight lines between points, each at its own place."""
    return float(torch.trapezoid(torch.tensor([*curve], dtype=torch.float64), torch.tensor(at)))


def correlation(one: Any, other: Any) -> float:
    return float(np.corrcoef(one, other)[0, 1])


def steps(count: int, total: int = PIXELS) -> list[int]:
    return [round(total * step / count) for step in range(count + 1)]


def regions_of(labels: Array) -> list[Array]:
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def squares(side: int) -> list[Array]:
    """The places in each square, row by row."""
    rows, columns = np.divmod(np.arange(PIXELS), WIDTH)
    return regions_of(rows // side * WIDTH + columns // side)


def covering(ordered: list[Array], counts: Iterable[int]) -> list[Array]:
    """The places in the first regions."""
    return [np.concatenate([np.array([], int), *ordered[:count]]) for count in counts]


# Curves


def flipped(photo: Photo, order: Array, baseline: Baseline) -> float:
    counts = steps(7)
    return area([photo.probability(order[:n], baseline) for n in counts], counts) / PIXELS


def road(photo: Photo) -> float:
    baseline = Neighbours(noise=0.3, seed=4)
    halves = []
    for count in (24, 60, 108):
        of_least = photo.probability(photo.order[-count:], baseline)
        halves.append((of_least - photo.probability(photo.order[:count], baseline)) / 2)
    return sum(halves) / 3


def comprehensiveness(photo: Photo) -> float:
    lost = [photo.probability() - photo.probability(photo.order[:n], Mean()) for n in (6, 36)]
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
    ordered = sorted(squares(4), key=lambda places: -photo.values[places].sum())
    curve = [photo.probability(places, Noise(seed=2)) for places in covering(ordered, range(6))]
    return curve[0] - sum(curve) / 6


def selectivity(photo: Photo) -> float:
    """Six squares in four steps, which cover 2, 3 and 4 of them: to the nearest square."""
    ordered = sorted(squares(5), key=lambda places: -photo.values[places].sum())
    counts = steps(4, 6)
    return area(map(photo.logit, covering(ordered, counts)), counts) / 6


def irof(photo: Photo) -> float:
    pieces = regions_of(superpixels(photo.x[None], 8).flatten().numpy())
    ordered = sorted(pieces, key=lambda places: -photo.values[places].mean())
    counts = [*range(len(ordered) + 1)]
    curve = [photo.probability(places, Mean()) for places in covering(ordered, counts)]
    return 1 - area(curve, counts) / len(ordered) / curve[0]


# Sums and scores


def by_subsets(photo: Photo, seed: int, samples: int, pixels: int) -> float:
    subsets = []
    for sample in range(samples):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + sample)
        subsets.append(torch.randperm(PIXELS, generator=generator)[:pixels].numpy())
    return correlation([photo.values[s].sum() for s in subsets], [*map(photo.drop, subsets)])


def sensitivityn(photo: Photo) -> float:
    return (by_subsets(photo, 5, 8, 12) + by_subsets(photo, 5, 8, 48)) / 2


def faithfulnessestimate(photo: Photo) -> float:
    groups = [photo.order[start:end] for start, end in pairwise(steps(7))]
    return correlation([photo.values[g].sum() for g in groups], [*map(photo.drop, groups)])


def monotonicitycorrelation(photo: Photo) -> float:
    groups = order_of(abs(photo.values), seed=2).reshape(6, 20)
    sizes = abs(photo.values[groups].sum(1))
    losses = [[photo.drop(g, Noise(seed)) for seed in (2, 3, 4)] for g in groups]
    changes = np.square(losses).mean(1)
    ranks = np.argsort(np.argsort([sizes, changes], 1), 1)  # no ties here
    return correlation(*ranks)


def monotonicity(photo: Photo) -> float:
    curve = [photo.logit(photo.order[: PIXELS - count]) for count in steps(5)]
    return float(curve == sorted(curve))


def nonsensitivity(photo: Photo) -> float:
    sums = np.array([abs(photo.values[places]).sum() for places in squares(3)])
    changes = np.array([abs(photo.drop(places)) for places in squares(3)])
    of_map = sums <= 0.3 * sums.max()
    return float((of_map != (changes <= 0.3 * changes.max())).mean())


def infidelity(photo: Photo) -> float:
    predicted = []
    losses = []
    for sample in range(9):
        generator = torch.Generator().manual_seed(1_000_003 + sample)
        noise = 0.3 * torch.randn(HEIGHT, WIDTH, generator=generator).double()
        predicted.append(float((noise * photo.map).sum()))
        losses.append(photo.logit() - float(photo.logits(photo.x - noise)[photo.target]))
    factor = np.dot(predicted, losses) / np.dot(predicted, predicted)
    return float(np.mean((factor * np.array(predicted) - losses) ** 2))


def completeness(photo: Photo) -> float:
    return abs(photo.values.sum() - photo.drop(range(PIXELS)))


# Places


def pointinggame(photo: Photo) -> float:
    left, top, right, bottom = photo.box
    rows, columns = np.divmod(np.flatnonzero(photo.values == photo.values.max()), WIDTH)
    down = np.maximum(0, np.maximum(top - rows, rows - bottom + 1))
    across = np.maximum(0, np.maximum(left - columns, columns - right + 1))
    return float((np.hypot(down, across) <= 0.2 * HEIGHT).mean())


def share_on_object(photo: Photo, values: Array) -> float:
    return float(values[photo.object].sum() / values.sum())


def energypointinggame(photo: Photo) -> float:
    return share_on_object(photo, np.maximum(photo.values, 0))


def attributionlocalisation(photo: Photo) -> float:
    return energypointinggame(photo) / photo.object.mean()


def relevancemass(photo: Photo) -> float:
    return share_on_object(photo, np.maximum(photo.values, 0) ** 2)


def relevancerank(photo: Photo) -> float:
    order = order_of(np.maximum(photo.values, 0) ** 2)
    return float(photo.object[order[: photo.object.sum()]].mean())


def topkintersection(photo: Photo) -> float:
    return float(photo.object[photo.order[:12]].mean())


def auc(photo: Photo) -> float:
    differences = photo.values[photo.object][:, None] - photo.values[~photo.object]
    return float((1 + np.sign(differences)).mean() / 2)


def iou(photo: Photo) -> float:
    levels = [photo.values >= threshold for threshold in photo.values]
    return max((above & photo.object).sum() / (above | photo.object).sum() for above in levels)


# Complexity


def sparseness(photo: Photo) -> float:
    sizes = abs(photo.values)
    between = abs(sizes[:, None] - sizes).sum()
    return float(between / (2 * PIXELS * sizes.sum()))


def complexity(photo: Photo) -> float:
    sizes = abs(photo.values[photo.values != 0])
    shares = sizes / sizes.sum()
    return float(-(shares * np.log(shares)).sum())


def effectivecomplexity(photo: Photo) -> float:
    sizes = abs(photo.values)
    return float((sizes > 0.3 * sizes.max()).mean())


FORMULAS: list[tuple[m.Metric, Callable[[Photo], float]]] = [
    (m.Deletion(7), lambda photo: flipped(photo, photo.order, ZERO)),
    (m.Insertion(7, Blur(5, 2.0)), lambda photo: flipped(photo, photo.order[::-1], Blur(5, 2.0))),
    (m.PixelFlipping(steps=7), lambda photo: flipped(photo, photo.order, Mean())),
    (m.PixelFlipping("lerf", steps=7), lambda photo: flipped(photo, photo.order[::-1], Mean())),
    (m.ROAD((20, 50, 90), Neighbours(noise=0.3, seed=4)), road),
    (m.Comprehensiveness((5, 30), Mean()), comprehensiveness),
    (m.Sufficiency((5, 30)), sufficiency),
    (m.AverageDrop(Mean()), averagedrop),
    (m.IncreaseInConfidence(Zero()), increase),
    (m.RegionPerturbation(4, 5, Noise(seed=2)), regionperturbation),
    (m.Selectivity(5, 4, score="logit"), selectivity),
    (m.IROF(8), irof),
    (m.FaithfulnessCorrelation(12, 10, seed=3), lambda photo: by_subsets(photo, 3, 12, 12)),
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


def parts_of(above: torch.Tensor) -> torch.Tensor:
    """The tightest box around each connected part, corners too."""
    labels = above * torch.arange(1, PIXELS + 1).reshape(above.shape).double()
    for _ in range(PIXELS):  # each pixel takes the largest number nearby
        labels = above * F.max_pool2d(labels[None], 3, 1, 1)[0]
    boxes = masks_to_boxes(labels == labels[above].unique()[:, None, None])
    return boxes + torch.tensor([0, 0, 1, 1])


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
        parts = [parts_of(level >= step / 8) for step in range(8)]
        expected = [float(box_iou(p, torch.tensor(boxes[number])).max()) for p in parts]
        assert overlaps[number].tolist() == pytest.approx(expected)
        share = (max(expected) >= degrees).double().mean()
        assert table["map"]["maxboxaccv2"][number].item() == pytest.approx(share.item())
    best = (overlaps[..., None] >= degrees).double().mean(0).amax(0)
    assert metric.of_data_set(overlaps) == pytest.approx(best.mean().item())


def test_masks_and_several_boxes_and_boxes_across_the_edge_are_the_object(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    mask = inside([2, 3, 7, 9]) | inside([8, 0, 10, 2])
    metrics = ["pointinggame", "energypointinggame", "auc", "iou", "relevancerank"]
    by_boxes, by_masks = (
        explain.evaluate(model, photos[:1], maps[:1], metrics, **objects)["map"]
        for objects in ({"boxes": [[[2, 3, 7, 9], [8, -3, 99, 2]]]}, {"masks": mask[None].numpy()})
    )
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


def slic(photo: Array, count: int, compactness: float) -> Array:
    """Superpixels of a photo ``(C, H, W)``, pixel by pixel."""
    _, height, width = photo.shape
    side = max(1.0, (height * width / count) ** 0.5)
    down = max(1, round(height / side))
    across = max(1, round(width / side))
    centred = photo - photo.mean((1, 2), keepdims=True)
    colours = (centred / np.sqrt((centred**2).mean())).reshape(len(photo), -1)
    places = np.indices((height, width)).reshape(2, -1)
    features = np.concatenate([colours, places * compactness / side]).T
    cells = np.array([places[0] * down // height, places[1] * across // width]).T
    numbers = first = cells @ [across, 1]
    for _ in range(5):
        pieces = np.unique(numbers)
        centres = np.array([features[numbers == piece].mean(0) for piece in pieces])
        numbers = np.empty_like(first)
        for pixel, cell in enumerate(cells):
            near = abs(np.array(np.divmod(pieces, across)).T - cell).max(1) < 2
            apart = np.where(near, ((features[pixel] - centres) ** 2).sum(1), np.inf)
            numbers[pixel] = pieces[apart.argmin()]
    return np.unique(numbers, return_inverse=True)[1].reshape(height, width)


@pytest.mark.parametrize(("size", "compactness"), [((9, 11), 0.5), ((2, 30), 1.0), ((30, 2), 1.0)])
def test_superpixels_are_those_of_a_plain_loop(size: tuple[int, int], compactness: float) -> None:
    photo = torch.randn(1, 3, *size)
    expected = slic(photo[0].double().numpy(), 6, compactness)
    assert superpixels(photo, 6, compactness)[0].tolist() == expected.tolist()


def test_the_channels_of_a_map_are_pooled_by_their_squares(
    model: nn.Module, photos: torch.Tensor
) -> None:
    """Positive and negative channels do not cancel out."""
    metrics = [m.RelevanceMass(), m.RelevanceRank()]
    values = torch.randn_like(photos)
    maps = {"channels": values, "pooled": values.square().sum(1).sqrt()}
    table = explain.evaluate(model, photos, maps, metrics, boxes=BOXES)
    for metric in metrics:
        pooled = table["pooled"][metric.name]
        torch.testing.assert_close(table["channels"][metric.name], pooled)
