"""Methods that cover photos: against plain loops, their identities, and when they stop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ExplainError, MethodError
from explain.baselines import Blur, Mean, Noise
from explain.engine import Evidence
from explain.layers.layouts import Grids
from explain.methods import (
    DRISE,
    HSIC,
    LIME,
    RISE,
    FeatureAblation,
    FeaturePermutation,
    KernelSHAP,
    Method,
    Occlusion,
    PartitionSHAP,
    Quadtree,
    ShapleySampling,
    Sobol,
    Squares,
    Superpixels,
)
from explain.methods import shapley as pair_regression
from explain.methods.estimates import RegionMethod
from explain.methods.occlusion import BLOCK, SmoothGridMethod
from explain.methods.regions import GivenRegions
from explain.methods.shapley import drawn_pairs
from tests.conftest import Made, settled, snapshot
from tests.methods import plain_runs

SIZE = (6, 5)
LABELS = torch.tensor([[0, 0, 1, 1, 1]] * 2 + [[2, 2, 2, 3, 3]] * 2 + [[4, 4, 4, 4, 4]] * 2)
EXACT = {"rtol": 1e-8, "atol": 1e-10}


class Curved(nn.Module):
    """A convolution with a smooth bend, so that regions act together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(4, 3)
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.fc(nn.functional.softplus(self.conv(x)).square().mean((2, 3)))


@pytest.fixture
def curved() -> Curved:
    return settled(Curved()).double().eval()


def photos(count: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, *SIZE, generator=generator, dtype=torch.float64)


def score_of(model: nn.Module, target: int = 1, kind: str = "logit") -> Callable[[Tensor], float]:
    def score(x: Tensor) -> float:
        with torch.no_grad():
            logits = model(x[None])[0]
        return float((logits.softmax(0) if kind == "probability" else logits)[target])

    return score


def assert_is(
    method: Method, model: nn.Module, plainly: Callable[[Tensor], Tensor]
) -> explain.Attribution:
    """Compare the values of two photos with a plain computation of each."""
    attribution = explain.attribute(model, photos(2), method, target=1)
    for values, x in zip(attribution.values, photos(2), strict=True):
        assert_close(values, plainly(x), **EXACT)
    return attribution


def linear() -> tuple[nn.Module, Tensor]:
    """A linear model, and its weights ``(3, H, W)`` of class 1."""
    model = settled(nn.Sequential(nn.Flatten(), nn.Linear(3 * math.prod(SIZE), 3))).double()
    return model, model[1].weight.detach()[1].reshape(3, *SIZE)


def coalitions(method: RegionMethod, regions: int) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in method.design.rows(regions)]


def masks_of(method: SmoothGridMethod, x: Tensor) -> Tensor:
    """The masks ``(P, H, W)``."""
    evidence = Evidence(x, torch.zeros(len(x)), None, "", Grids(tuple(x.shape[2:])))
    numbers = torch.arange(method.samples)
    build = method.perturbation.masks(evidence).build
    return build(torch.zeros_like(numbers), numbers)[:, 0]


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (3, 2), (4, 3), (5, 5)])
def test_occlusion_is_the_mean_drop_over_windows(window: int, stride: int, curved: Curved) -> None:
    score = score_of(curved)
    method = Occlusion(window, stride)
    assert_is(method, curved, lambda x: plain_runs.occlusion(score, x, window, stride))


def test_feature_ablation_is_the_drop_without_each_region(curved: Curved) -> None:
    score = score_of(curved)
    method = FeatureAblation(regions=LABELS)
    attribution = assert_is(method, curved, lambda x: plain_runs.ablation(score, x, LABELS))
    assert attribution.samples == 5
    assert attribution.error is None


def error_of_a_mean(terms: Tensor, farthest: float) -> Tensor:
    """Of 70 masks: no variance is below the mean; one more mask may have the farthest score, or the
    photo's."""
    variance = terms.var(0)
    variance = torch.maximum(variance, variance.mean()) + farthest**2 / 70
    # Student's t with 69 degrees of freedom
    return (variance / 70).sqrt() * 1.994945415107 / 1.959963984540


def test_rise_is_the_mean_of_masks_times_scores(curved: Curved) -> None:
    x = photos()
    score = score_of(curved, kind="probability")
    masks = masks_of(RISE(samples=70, grid=3, probability=0.4), x)
    scores = torch.tensor([score(x[0] * mask) for mask in masks], dtype=torch.float64)
    whole = torch.tensor([score(x[0])], dtype=torch.float64)
    expected = plain_runs.rise(score, x[0], list(masks), 0.4)
    for centred, level in ((False, 0.0), (True, float(scores.mean()))):
        method = RISE(samples=70, grid=3, probability=0.4, centred=centred)
        attribution = explain.attribute(curved, x, method, target=1)
        assert_close(attribution.values[0], expected - level * masks.mean(0) / 0.4, **EXACT)
        terms = (scores - level)[:, None, None] * masks / 0.4
        farthest = float((torch.cat([scores, whole]) - level).abs().max()) / 0.4
        assert_close(attribution.error[0], error_of_a_mean(terms, farthest), **EXACT)


def test_a_mask_of_rise_is_a_piece_of_its_grid_enlarged_bilinearly() -> None:
    mask = masks_of(RISE(4, grid=4, seed=9), torch.zeros(1, 3, 20, 15, dtype=torch.float64))[3]
    generator = torch.Generator().manual_seed(9 * 1_000_003)
    cells = (torch.rand(BLOCK, 4, 4, generator=generator) < 0.5).double()[3]
    # a cell is 5 high and 4 wide
    down = int(torch.randint(5, (BLOCK,), generator=generator)[3])
    right = int(torch.randint(4, (BLOCK,), generator=generator)[3])
    large = nn.functional.interpolate(cells[None, None], size=(25, 20), mode="bilinear")[0, 0]
    assert_close(mask, large[down : down + 20, right : right + 15], **EXACT)


def test_lime_is_weighted_ridge_regression(curved: Curved) -> None:
    method = LIME(samples=40, regions=LABELS, width=0.4, ridge=0.3, seed=4)
    shown = coalitions(method, 5)
    score = score_of(curved)
    assert_is(method, curved, lambda x: plain_runs.lime(score, x, LABELS, shown, 0.4, 0.3)[0])
    attribution = explain.attribute(curved, photos(), method, target=1)
    r2 = plain_runs.lime(score, photos()[0], LABELS, shown, 0.4, 0.3)[1]
    assert attribution.r2.item() == pytest.approx(r2, rel=1e-8)


VARIANCES = list(itertools.product(pair_regression.THREES, pair_regression.REST))


@pytest.mark.parametrize("samples", [6, 12, 40, 42])
def test_kernelshap_is_the_best_linear_estimate_from_its_pairs(
    samples: int, curved: Curved
) -> None:
    """21 pairs, and that of the photo and the blank one, test the fit of 7 by 15."""
    labels = torch.arange(30).reshape(SIZE) % 7
    x = photos()
    shown = [row.nonzero()[:, 0].tolist() for row in drawn_pairs(7, samples // 2, 2)]
    values, errors, _ = plain_runs.pair_regression(score_of(curved), x[0], labels, shown, VARIANCES)
    method = KernelSHAP(samples=samples, regions=labels, seed=2)
    attribution = explain.attribute(curved, x, method, target=1)
    assert_close(attribution.values[0], plain_runs.on_pixels(labels, values), **EXACT)
    if samples < 40:
        assert attribution.error is None
    else:  # the table has six digits
        expected = plain_runs.on_pixels(labels, errors)
        assert_close(attribution.error[0], expected, rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize(
    "method", [KernelSHAP(regions=LABELS), ShapleySampling(samples=600, regions=LABELS)]
)
def test_all_coalitions_and_many_orders_give_shapley_values(method: Any, curved: Curved) -> None:
    attribution = explain.attribute(curved, photos(2), method, target=1)
    assert attribution.delta.abs().max() < 1e-9
    for i, x in enumerate(photos(2)):
        expected = plain_runs.shapley(score_of(curved), x, LABELS)
        if isinstance(method, KernelSHAP):
            assert_close(attribution.values[i], expected, **EXACT)
            assert attribution.error[i].abs().max() == 0
        else:
            off = (attribution.values[i] - expected).abs()
            assert (off <= 4.5 * attribution.error[i] + 1e-12).all()


def test_shapley_sampling_is_the_mean_gain_over_its_orders(curved: Curved) -> None:
    method = ShapleySampling(samples=40, regions=LABELS, seed=1)
    orders = []
    for shown in method.design.rows(5).reshape(-1, 4, 5):
        steps = torch.cat([torch.zeros(1, 5), shown.float(), torch.ones(1, 5)]).diff(dim=0)
        orders.append(steps.argmax(1).tolist())
    assert [order[::-1] for order in orders[::2]] == orders[1::2]
    score = score_of(curved)
    assert_is(method, curved, lambda x: plain_runs.permutations(score, x, LABELS, orders))


@pytest.mark.parametrize(
    "method",
    [KernelSHAP(regions=LABELS), ShapleySampling(16, LABELS), LIME(64, LABELS, ridge=0)],
    ids=lambda method: method.name,
)
def test_of_a_linear_model_each_region_gets_what_it_gives(method: Method) -> None:
    model, weight = linear()
    pixels = (weight * photos()[0]).sum(0)
    of_regions = [float(pixels[region == LABELS].sum()) for region in range(5)]
    values = explain.attribute(model, photos(), method, target=1).values[0]
    assert_close(values, plain_runs.on_pixels(LABELS, of_regions), rtol=1e-8, atol=1e-6)


class Product(nn.Module):
    """The product of the means of the two halves of the photo; what is below them does nothing."""

    def forward(self, x: Tensor) -> Tensor:
        left = x[:, :, :2, :2].mean((1, 2, 3))
        right = x[:, :, :2, 3:].mean((1, 2, 3))
        return torch.stack([left * right, left + right, 2 * left * right + 3 * (left + right)], 1)


def test_symmetry_dummy_and_linearity_of_shapley_values() -> None:
    labels = torch.tensor([[0, 0, 0, 1, 1]] * 2 + [[2, 2, 3, 3, 3]] * 4)
    x = photos()
    half = Product()(x)[0, 0] / 2
    for method in (KernelSHAP(regions=labels), ShapleySampling(samples=24, regions=labels)):
        maps = explain.attribute(Product(), x, method, targets=[0, 1, 2])
        product, total, both = (attribution.values[0] for attribution in maps)
        assert_close(product[0, 0], half)  # each has half of what they do together
        assert_close(product[0, 4], half)
        assert product[3:].abs().max() < 1e-12  # these do nothing
        assert_close(both, 2 * product + 3 * total)


@pytest.mark.parametrize("baseline", ["zero", Mean(), Blur(), Noise(seed=3), "neighbours"])
def test_occlusion_of_one_pixel_is_its_weight_times_the_distance_to_the_fill(
    baseline: Any,
) -> None:
    model, weight = linear()
    method = Occlusion(1, 1, baseline)
    expected = []
    for place in range(math.prod(SIZE)):
        keep = torch.ones(1, 1, *SIZE, dtype=torch.float64)
        keep.view(-1)[place] = 0
        expected.append((weight * (photos() - method.baseline(photos(), keep))[0]).sum())
    values = explain.attribute(model, photos(), method, target=1).values[0]
    assert_close(values, torch.stack(expected).reshape(SIZE), **EXACT)


@pytest.mark.parametrize(
    "method",
    [RISE(2000, 3), LIME(2000, 4), KernelSHAP(2000, 4), ShapleySampling(2000, 4), Sobol(2000, 3)],
    ids=lambda method: method.name,
)
def test_estimates_stop_at_the_same_run_whatever_the_batch_size(
    method: Method, curved: Curved
) -> None:
    few, many = (
        explain.attribute(curved, photos(2), method, target=1, tolerance=0.3, batch_size=size)
        for size in (5, 64)
    )
    assert torch.equal(few.spent, many.spent)
    assert_close(few.values, many.values, rtol=1e-10, atol=1e-12)
    assert 0 < few.samples < 2000
    assert (few.relative_error <= 0.3).all()


def test_a_budget_in_seconds_ends_with_what_there_is(
    curved: Curved, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def tick(done: int, total: int) -> None:
        clock[0] += 1

    options: dict[str, Any] = {"target": 1, "progress": tick}
    attribution = explain.attribute(
        curved, photos(), RISE(4000, 3), max_seconds=3.5, batch_size=10, **options
    )
    assert attribution.samples == 40
    same = explain.attribute(curved, photos(), RISE(40, 3), target=1)
    assert_close(attribution.values, same.values, rtol=1e-10, atol=1e-12)
    clock[0] = 0
    shared = explain.attribute(curved, photos(2), PartitionSHAP(400), max_seconds=8.0, **options)
    assert 8 <= clock[0] <= 10  # the photo and the blank one are told too
    assert ((shared.spent >= 8) & (shared.spent < 100)).all()
    assert shared.finished.all()


def test_progress_gets_maps_that_sharpen(curved: Curved) -> None:
    maps: list[Tensor] = []

    def note(done: int, total: int, so_far: dict[str, Tensor]) -> None:
        maps.extend(so_far.values())

    options: dict[str, Any] = {"target": 1, "batch_size": 16, "progress": note}
    values = explain.attribute(curved, photos(), RISE(64, 3), **options).values
    assert len(maps) == 4
    assert torch.equal(maps[-1], values)
    assert not torch.equal(maps[0], values)


def interrupt_after(rows: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done >= rows:
            raise KeyboardInterrupt

    return progress


def test_an_interrupt_leaves_nothing_or_what_there_is_as_asked(curved: Curved) -> None:
    before = snapshot(curved)
    options: dict[str, Any] = {"target": 1, "batch_size": 16, "progress": interrupt_after(64)}
    with pytest.raises(KeyboardInterrupt):
        explain.attribute(curved, photos(), RISE(640, 3), **options)
    several = [RISE(640, 3), LIME(50, 3), "saliency"]
    maps = explain.attribute(curved, photos(), several, keep_partial=True, **options)
    assert list(maps) == ["rise", "saliency"]  # lime had not begun
    assert maps["rise"].samples == 64
    assert not maps["rise"].finished.any()
    same = explain.attribute(curved, photos(), RISE(64, 3), target=1)
    assert_close(maps["rise"].values, same.values, rtol=1e-10, atol=1e-12)
    assert snapshot(curved) == before


def test_regions_cut_a_photo_into_parts() -> None:
    x = photos(2)
    for regions in (Squares(3), Quadtree(9), GivenRegions(LABELS)):
        for labels in regions(x):
            count = int(labels.max()) + 1
            assert labels.shape == SIZE
            assert labels.unique().tolist() == list(range(count))
            assert 5 <= count <= regions.most(SIZE)
    assert Squares(9)(x).max() == 6 * 5 - 1
    assert GivenRegions(LABELS) == GivenRegions(LABELS.numpy()) != GivenRegions(LABELS + LABELS % 2)
    assert KernelSHAP(regions=LABELS) == KernelSHAP(regions=LABELS.tolist())


def test_superpixels_follow_colours() -> None:
    pytest.importorskip("skimage", reason="scikit-image comes with the extra 'superpixels'")
    x = torch.zeros(1, 3, 24, 24)
    x[..., 9:] = 1.0
    labels = Superpixels(6)(x)[0]
    assert 2 <= int(labels.max()) + 1 <= 9
    assert not set(labels[:, :9].unique().tolist()) & set(labels[:, 9:].unique().tolist())


def owen(
    score: Any, x: Tensor, cell: Any, seen: list[Any], without: float, within: float
) -> Tensor:
    """Owen values along halves, by the recursion that defines them; a square is cut across its
    height."""
    (top, bottom), (left, right) = cell
    values = torch.zeros(x.shape[1:], dtype=torch.float64)
    if bottom - top == right - left == 1:
        values[top, left] = within - without
        return values
    if right - left > bottom - top:
        middle = (left + right) // 2
        one = ((top, bottom), (left, middle))
        other = ((top, bottom), (middle, right))
    else:
        middle = (top + bottom) // 2
        one = ((top, middle), (left, right))
        other = ((middle, bottom), (left, right))

    def shown(cells: list[Any]) -> float:
        keep = torch.zeros_like(x[0])
        for (a, b), (c, d) in cells:
            keep[a:b, c:d] = 1
        return score(x * keep)

    for half, rest in ((one, other), (other, one)):
        values += owen(score, x, half, seen, without, shown([*seen, half])) / 2
        values += owen(score, x, half, [*seen, rest], shown([*seen, rest]), within) / 2
    return values


@pytest.mark.parametrize(("height", "width"), [(2, 3), (4, 4)])
def test_partitionshap_gives_owen_values(height: int, width: int, curved: Curved) -> None:
    x = photos()[:, :, :height, :width]
    score = score_of(curved)
    expected = owen(score, x[0], ((0, height), (0, width)), [], score(x[0] * 0), score(x[0]))
    attribution = explain.attribute(curved, x, PartitionSHAP(100_000), target=1)
    assert_close(attribution.values[0], expected, **EXACT)
    for samples in (2, 3, 20):
        few = explain.attribute(curved, x, PartitionSHAP(samples), target=1)
        assert few.delta.abs().max() < 1e-9
        assert samples - 2 < few.samples <= samples


@pytest.mark.parametrize(
    ("target", "expected"), [(0, [9 / 14, 4 / 14, 1 / 14, 0]), (1, [4 / 7, 4 / 7, 0, 0])]
)
def test_sobol_finds_the_indices_of_a_sum_and_of_a_product(
    target: int, expected: list[float]
) -> None:
    weights = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64)

    def scores(net: Any, x: Tensor) -> Tensor:
        quarters = x.flatten(1)
        return torch.stack([quarters @ weights, quarters[:, 0] * quarters[:, 1]], 1)

    x = torch.ones(1, 1, 2, 2, dtype=torch.float64)
    attribution = explain.attribute(Made(scores), x, Sobol(720, 2), target=target)
    off = (attribution.values.flatten() - torch.tensor(expected, dtype=torch.float64)).abs()
    assert (off <= 4 * attribution.error.flatten() + 1e-9).all()
    assert off.max() < 0.15
    assert attribution.values[0, 1, 1].abs() < 1e-12


def test_sobol_is_jansens_estimator_over_its_designs(curved: Curved) -> None:
    method = Sobol(72, 2, seed=3)
    x = photos()[0]
    labels = Squares(2)(photos())[0]
    rows = method.design.rows(4)
    scores = [score_of(curved)(x * row[labels]) for row in rows]
    halves = [0.0] * 4
    ends = []
    for start in range(0, 72, 6):  # A, B, and A with each coordinate taken from B
        ends += scores[start : start + 2]
        for cell in range(4):
            mixed = rows[start].clone()
            mixed[cell] = rows[start + 1, cell]
            assert torch.equal(rows[start + 2 + cell], mixed)
            halves[cell] += (scores[start] - scores[start + 2 + cell]) ** 2 / (2 * 12)
    variance = torch.tensor(ends, dtype=torch.float64).var()
    attribution = explain.attribute(curved, photos(), method, target=1)
    expected = torch.tensor(halves, dtype=torch.float64) / variance
    assert_close(attribution.values.flatten(), expected, **EXACT)
    assert attribution.error.min() > 0  # of three sequences


def test_hsic_is_the_trace_of_the_centred_kernels(curved: Curved) -> None:
    method = HSIC(40, 2)
    rows = method.design.rows(4).double()
    x = photos()[0]
    labels = Squares(2)(photos())[0]
    score = score_of(curved)
    scores = torch.tensor([score(x * row[labels]) for row in rows], dtype=torch.float64)
    apart = (scores[:, None] - scores).abs()
    kernel = torch.exp(-(apart**2) / (2 * apart[apart > 1e-6 * apart.max()].median() ** 2))
    centre = torch.eye(40, dtype=torch.float64) - 1 / 40
    expected = []
    for row in rows.T:
        alike = (row[:, None] == row).double()
        expected.append(torch.trace(alike @ centre @ kernel @ centre) / 40**2)
    values = explain.attribute(curved, photos(), method, target=1).values
    assert_close(values.flatten(), torch.stack(expected), **EXACT)
    assert (rows[:20].sum(0) == 10).all()


def test_feature_permutation_exchanges_regions_between_images(curved: Curved) -> None:
    method = FeaturePermutation(regions=LABELS, seed=1)
    values = explain.attribute(curved, photos(3), method, target=1).values
    givers = method.baseline.givers(3)
    assert sorted(givers.tolist()) == [0, 1, 2]
    assert (givers != torch.arange(3)).all()
    for i, x in enumerate(photos(3)):
        drops = []
        for region in range(5):
            mixed = torch.where(region == LABELS, photos(3)[givers[i]], x)
            drops.append(score_of(curved)(x) - score_of(curved)(mixed))
        assert_close(values[i], plain_runs.on_pixels(LABELS, drops), **EXACT)
    with pytest.raises(MethodError, match="featurepermutation must"):
        explain.attribute(curved, photos(), method, target=1)


class Detector(nn.Module):
    """Finds boxes, whose scores and edges depend on what is seen in them; none where there is
    little to see."""

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        detections = []
        for image in x:
            boxes = torch.tensor([[0.0, 0, 3, 3], [2, 3, 5, 6], [0, 0, 2, 3]], dtype=x.dtype)
            boxes[0, 2] += image[0, 0, 0].sigmoid()
            parts = [image[:, :3, :3], image[:, 3:6, 2:5], image[:, :3, :2]]
            scores = torch.stack([part.mean() for part in parts]).sigmoid()
            kept = scores > 0.45
            labels = torch.tensor([1, 2, 1])[kept]
            detections.append({"boxes": boxes[kept], "labels": labels, "scores": scores[kept]})
        return detections


def overlap(one: Tensor, other: Tensor) -> float:
    """Intersection over union of two boxes."""
    low = torch.maximum(one[:2], other[:2])
    high = torch.minimum(one[2:], other[2:])
    both = float((high - low).clamp(min=0).prod())
    areas = [float((box[2:] - box[:2]).prod()) for box in (one, other)]
    return both / (sum(areas) - both)


def test_drise_weighs_masks_by_the_most_similar_detection() -> None:
    x = photos() + 0.2
    method = DRISE(samples=40, grid=3)
    target = explain.targets.Detections(1)
    values = explain.attribute(Detector(), x, method, target=target).values
    whole = Detector()(x)[0]
    best = int(torch.where(whole["labels"] == 1, whole["scores"], -1.0).argmax())
    total = torch.zeros(SIZE, dtype=torch.float64)
    missed = 0
    for mask in masks_of(method, x):
        (seen,) = Detector()(x * mask)
        alike = [0.0]
        for box, label, score in zip(seen["boxes"], seen["labels"], seen["scores"], strict=True):
            alike.append(overlap(box, whole["boxes"][best]) * float(score) * float(label == 1))
        missed += max(alike) == 0
        total += max(alike) * mask
    assert missed < 40
    # overlaps are in float32
    assert_close(values[0], total / (40 * 0.5), rtol=1e-6, atol=1e-7)
    with pytest.raises(ExplainError, match="target must"):
        explain.attribute(linear()[0], photos(), method, target=1)


def test_videos_are_covered_in_time_too() -> None:
    def scores(net: Any, x: Tensor) -> Tensor:
        return torch.stack([x[:, :, 1, 2:4, 2:4].sum((1, 2, 3)), x.sum((1, 2, 3, 4))], 1)

    clip = Made(scores)
    x = torch.rand(1, 3, 4, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counted = torch.zeros(4, 6, 6, dtype=torch.bool)
    counted[1, 2:4, 2:4] = True
    for method in (Occlusion((1, 1, 1), (1, 1, 1)), FeatureAblation(6)):
        values = explain.attribute(clip, x, method, target=0).values
        assert_close(values[0], x[0].sum(0) * counted, **EXACT)
    for method in (Occlusion(), KernelSHAP(60, 2), RISE(40, 3)):
        assert explain.attribute(clip, x, method, target=0).values.shape == (1, 4, 6, 6)
    assert explain.attribute(clip, x, PartitionSHAP(60), target=0).delta.abs().max() < 1e-9
    assert explain.attribute(clip, x, Sobol(120, 2), target=0).values.shape == (1, 2, 2, 2)
