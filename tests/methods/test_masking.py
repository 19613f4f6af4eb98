"""Methods that cover photos: against plain loops, their identities, and when they stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.ops import box_iou

import explain
from explain import ExplainError, MethodError
from explain.baselines import Neighbours, Noise
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
from explain.methods.coalitions import RegionMethod
from explain.methods.estimates import Estimator
from explain.methods.occlusion import BLOCK, SmoothGridMethod
from explain.methods.regions import GivenRegions
from explain.methods.shapley import drawn_pairs
from tests.conftest import Made, settled
from tests.methods import plain_runs

SIZE = (6, 5)
LABELS = torch.tensor([[0, 0, 1, 1, 1]] * 2 + [[2, 2, 2, 3, 3]] * 2 + [[4, 4, 4, 4, 4]] * 2)
EXACT = {"rtol": 1e-8, "atol": 1e-10}


SAMPLED = ShapleySampling(samples=40, regions=LABELS, seed=1)


def orders() -> list[list[int]]:
    """The orders in which the sampled regions are uncovered: each with its reverse."""
    visible = SAMPLED.design.rows(5).reshape(-1, 4, 5).double()
    since = nn.functional.pad(visible, (0, 0, 1, 1)) + torch.eye(6)[5, :, None]
    drawn = since.diff(dim=1).argmax(2).tolist()
    assert [order[::-1] for order in drawn[::2]] == drawn[1::2]
    return drawn


@pytest.fixture
def curved() -> nn.Module:
    """A convolution with a smooth bend, so that regions act together."""
    net = Made(
        lambda net, x: net.fc(nn.functional.softplus(net.conv(x)).square().mean((2, 3))),
        conv=nn.Conv2d(3, 4, 3, padding=1),
        fc=nn.Linear(4, 3),
    )
    return settled(net).double()


def photos(count: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, *SIZE, generator=generator, dtype=torch.float64)


def score_of(model: nn.Module, target: int = 1, kind: str = "logit") -> Callable[[Tensor], float]:
    def score(x: Tensor) -> float:
        with torch.no_grad():
            logits = model(x[None])[0]
        return float((logits.softmax(0) if kind == "probability" else logits)[target])

    return score


def explained(
    model: nn.Module, method: Any, images: int = 1, **options: Any
) -> explain.Attribution:
    return explain.attribute(model, photos(images), method, target=1, **options)


def coalitions(method: RegionMethod, regions: int) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in method.design.rows(regions)]


def masks_of(method: SmoothGridMethod, x: Tensor) -> Tensor:
    """The masks ``(P, H, W)``."""
    evidence = Evidence(x, torch.zeros(len(x)), None, "", Grids(tuple(x.shape[2:])))
    numbers = torch.arange(method.samples)
    build = method.perturbation.masks(evidence).build
    return build(torch.zeros_like(numbers), numbers)[:, 0]


@pytest.mark.parametrize(
    ("method", "plainly"),
    [
        (Occlusion(3, 2), lambda score, x: plain_runs.occlusion(score, x, 3, 2)),
        (
            Occlusion(1, 1, Noise(seed=3)),
            lambda score, x: plain_runs.occlusion(score, x, 1, 1, Noise(seed=3)),
        ),
        (
            Occlusion(2, 2, "neighbours"),
            lambda score, x: plain_runs.occlusion(score, x, 2, 2, Neighbours()),
        ),
        (FeatureAblation(LABELS), lambda score, x: plain_runs.ablation(score, x, LABELS)),
        (KernelSHAP(regions=LABELS), lambda score, x: plain_runs.shapley(score, x, LABELS)),
        (SAMPLED, lambda score, x: plain_runs.permutations(score, x, LABELS, orders())),
    ],
    ids=lambda case: str(case) if isinstance(case, Method) else "",
)
def test_values_are_those_of_plain_loops(method: Method, plainly: Any, curved: nn.Module) -> None:
    attribution = explained(curved, method, 2)
    for values, x in zip(attribution.values, photos(2), strict=True):
        assert_close(values, plainly(score_of(curved), x), **EXACT)
    assert attribution.delta is None or attribution.delta.abs().max() < 1e-9


def error_of_a_mean(terms: Tensor, farthest: float) -> Tensor:
    """Of 70 masks: no variance is below the mean; one more mask may have the farthest score, or the
    photo's."""
    variance = terms.var(0)
    variance = torch.maximum(variance, variance.mean()) + farthest**2 / 70
    # Student's t with 69 degrees of freedom
    return (variance / 70).sqrt() * 1.994945415107 / 1.959963984540


def test_rise_is_the_mean_of_masks_times_scores(curved: nn.Module) -> None:
    x = photos()
    score = score_of(curved, kind="probability")
    masks = masks_of(RISE(samples=70, grid=3, probability=0.4), x)
    scores = torch.tensor([score(x[0] * mask) for mask in masks], dtype=torch.float64)
    whole = torch.tensor([score(x[0])], dtype=torch.float64)
    expected = plain_runs.rise(score, x[0], list(masks), 0.4)
    for centred, level in ((False, 0.0), (True, float(scores.mean()))):
        method = RISE(samples=70, grid=3, probability=0.4, centred=centred)
        attribution = explained(curved, method)
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


def test_lime_is_weighted_ridge_regression(curved: nn.Module) -> None:
    method = LIME(samples=40, regions=LABELS, width=0.4, ridge=0.3, seed=4)
    shown = coalitions(method, 5)
    score = score_of(curved)
    attribution = explained(curved, method)
    values, r2 = plain_runs.lime(score, photos()[0], LABELS, shown, 0.4, 0.3)
    assert_close(attribution.values[0], values, **EXACT)
    assert attribution.r2.item() == pytest.approx(r2, rel=1e-8)


@pytest.mark.parametrize("samples", [6, 12, 40, 42])
def test_kernelshap_is_the_best_linear_estimate_from_its_pairs(
    samples: int, curved: nn.Module
) -> None:
    """21 pairs, and that of the photo and the blank one, test the fit of 7 by 15."""
    labels = torch.arange(30).reshape(SIZE) % 7
    shown = [row.nonzero()[:, 0].tolist() for row in drawn_pairs(7, samples // 2, 2)]
    score = score_of(curved)
    values, errors = plain_runs.pair_regression(
        score, photos()[0], labels, shown, pair_regression.CHOICES
    )
    attribution = explained(curved, KernelSHAP(samples=samples, regions=labels, seed=2))
    assert_close(attribution.values[0], plain_runs.on_pixels(labels, values), **EXACT)
    if samples < 40:
        assert attribution.error is None
    else:  # the table has six digits
        expected = plain_runs.on_pixels(labels, errors)
        assert_close(attribution.error[0], expected, rtol=1e-5, atol=1e-10)


def test_sizes_of_coalitions_are_spread_evenly_between_few_and_half() -> None:
    """An order of 30 regions has each of its sizes once; 60 pairs have no order."""
    sizes = drawn_pairs(30, 59, 3)[:29].sum(1)
    assert sorted(sizes.tolist()) == list(range(1, 30))
    drawn = drawn_pairs(30, 60, 3)
    smaller = torch.minimum(drawn.sum(1), (~drawn).sum(1))
    shares = {k: (2 if k < 15 else 1) / math.sqrt(k * (30 - k)) for k in range(1, 16)}
    for most in range(3, 15):
        wanted = 60 * sum(shares[k] for k in range(1, most + 1)) / sum(shares.values())
        assert abs(int((smaller <= most).sum()) - wanted) < 3
    assert not any((drawn[i] == drawn[j]).all() for i in range(60) for j in range(i))


@pytest.mark.parametrize(
    "method",
    [RISE(2000, 3), ShapleySampling(2000, 4), Sobol(2000, 3)],
    ids=lambda method: method.name,
)
def test_estimates_stop_at_the_same_run_whatever_the_batch_size(
    method: Method, curved: nn.Module
) -> None:
    few, many = (explained(curved, method, 2, tolerance=0.3, batch_size=size) for size in (5, 64))
    assert torch.equal(few.spent, many.spent)
    assert_close(few.values, many.values, rtol=1e-10, atol=1e-12)
    assert 0 < few.samples < 2000
    assert (few.relative_error <= 0.3).all()


def test_what_stops_early_keeps_what_there_is_and_shows_it_on_the_way(
    curved: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    maps: list[Tensor] = []

    def tick(done: int, total: int, so_far: dict[str, Tensor]) -> None:
        clock[0] += 1
        maps.extend(so_far.values())

    attribution = explained(curved, RISE(4000, 3), max_seconds=3.5, progress=tick, batch_size=10)
    assert attribution.samples == 40
    assert torch.equal(maps[-1], attribution.values)
    assert not torch.equal(maps[0], maps[-1])
    same = explained(curved, RISE(40, 3))
    assert_close(attribution.values, same.values, rtol=1e-10, atol=1e-12)


def test_an_interrupt_leaves_nothing_or_what_there_is_as_asked(curved: nn.Module) -> None:
    def interrupt(done: int, total: int) -> None:
        if done >= 64:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"batch_size": 16, "progress": interrupt}
    with pytest.raises(KeyboardInterrupt):
        explained(curved, RISE(640, 3), **options)
    several = [RISE(640, 3), LIME(50, 3), "saliency"]
    maps = explain.attribute(curved, photos(), several, target=1, keep_partial=True, **options)
    assert list(maps) == ["rise", "saliency"]  # lime had not begun
    assert not maps["rise"].finished.any()
    same = explained(curved, RISE(64, 3))
    assert_close(maps["rise"].values, same.values, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("regions", [Squares(3), Quadtree(9), GivenRegions(LABELS)])
def test_regions_cut_a_photo_into_parts(regions: Any) -> None:
    for labels in regions(photos(2)):
        count = int(labels.max()) + 1
        assert labels.unique().tolist() == list(range(count))
        assert 5 <= count <= regions.most(SIZE)
    assert GivenRegions(LABELS) == GivenRegions(LABELS.numpy()) != GivenRegions(LABELS * 2)


def test_superpixels_follow_colours() -> None:
    pytest.importorskip("skimage", reason="scikit-image comes with the extra 'superpixels'")
    x = torch.zeros(1, 3, 24, 24)
    x[..., 9:] = 1.0
    labels = Superpixels(6)(x)[0]
    assert 2 <= int(labels.max()) + 1 <= 9
    assert not set(labels[:, :9].unique().tolist()) & set(labels[:, 9:].unique().tolist())


def owen(
    score: Any, x: Tensor, places: Tensor, seen: list[int], without: float, within: float
) -> Tensor:
    """Owen values ``(H * W,)`` along halves, by the recursion that defines them; a square is cut
    across its height."""
    labels = torch.arange(x[0].numel()).reshape(x[0].shape)
    values = torch.zeros(labels.numel(), dtype=torch.float64)
    if places.numel() == 1:
        values[places] = within - without
        return values
    axis = int(places.shape[1] > places.shape[0])
    middle = places.shape[axis] // 2
    halves = places.split([middle, places.shape[axis] - middle], axis)
    for half, rest in (halves, halves[::-1]):
        with_half = [*seen, *half.flatten().tolist()]
        with_rest = [*seen, *rest.flatten().tolist()]
        first = score(plain_runs.seen(x, labels, with_half))
        last = score(plain_runs.seen(x, labels, with_rest))
        values += owen(score, x, half, seen, without, first) / 2
        values += owen(score, x, half, with_rest, last, within) / 2
    return values


@pytest.mark.parametrize(("height", "width"), [(2, 3), (4, 4)])
def test_partitionshap_gives_owen_values(height: int, width: int, curved: nn.Module) -> None:
    x = photos()[:, :, :height, :width]
    score = score_of(curved)
    places = torch.arange(height * width).reshape(height, width)
    expected = owen(score, x[0], places, [], score(x[0] * 0), score(x[0]))
    attribution = explain.attribute(curved, x, PartitionSHAP(100_000), target=1)
    assert_close(attribution.values[0].flatten(), expected, **EXACT)
    for samples in (2, 3, 20):
        few = explain.attribute(curved, x, PartitionSHAP(samples), target=1)
        assert few.delta.abs().max() < 1e-9
        assert samples - 2 < few.samples <= samples


def scores_of_rows(rows: Tensor, model: nn.Module) -> Tensor:
    """The scores of the photo with each row's squares, of two by two."""
    labels = Squares(2)(photos())[0]
    scores = [score_of(model)(photos()[0] * row[labels]) for row in rows]
    return torch.tensor(scores, dtype=torch.float64)


def test_sobol_is_jansens_estimator_over_its_designs(curved: nn.Module) -> None:
    method = Sobol(72, 2, seed=3)
    rows = method.design.rows(4)
    one, other, *mixed = rows.reshape(12, 6, 4).unbind(1)
    for cell, taken in enumerate(mixed):  # the first, with each coordinate of the other
        assert torch.equal(taken, torch.where(torch.arange(4) == cell, other, one))
    scores = scores_of_rows(rows, curved).reshape(12, 6)
    halves = (scores[:, :1] - scores[:, 2:]).square().mean(0) / 2
    attribution = explained(curved, method)
    assert_close(attribution.values.flatten(), halves / scores[:, :2].var(), **EXACT)
    assert attribution.error.min() > 0  # of three sequences


def test_hsic_is_the_trace_of_the_centred_kernels(curved: nn.Module) -> None:
    method = HSIC(40, 2)
    rows = method.design.rows(4).double()
    scores = scores_of_rows(rows, curved)
    apart = (scores[:, None] - scores).abs()
    kernel = torch.exp(-(apart**2) / (2 * apart[apart > 1e-6 * apart.max()].median() ** 2))
    centre = torch.eye(40, dtype=torch.float64) - 1 / 40
    alike = (rows[:, None] == rows).double()
    expected = torch.einsum("ijk,ij->k", alike, centre @ kernel @ centre) / 40**2
    values = explained(curved, method).values
    assert_close(values.flatten(), expected, **EXACT)
    assert (rows[:20].sum(0) == 10).all()


def test_feature_permutation_exchanges_regions_between_images(curved: nn.Module) -> None:
    method = FeaturePermutation(regions=LABELS, seed=1)
    values = explained(curved, method, 3).values
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
        explained(curved, method)


def detected(net: Any, x: Tensor) -> list[dict[str, Tensor]]:
    """Boxes, whose scores and edges depend on what is seen in them; none where there is little to
    see."""
    detections = []
    for image in x:
        boxes = torch.tensor([[0.0, 0, 3, 3], [2, 3, 5, 6], [0, 0, 2, 3]], dtype=x.dtype)
        boxes[0, 2] += image[0, 0, 0].sigmoid()
        parts = [image[:, :3, :3], image[:, 3:6, 2:5], image[:, :3, :2]]
        scores = torch.stack([part.mean() for part in parts]).sigmoid()
        found = {"boxes": boxes, "labels": torch.tensor([1, 2, 1]), "scores": scores}
        detections.append({name: values[scores > 0.45] for name, values in found.items()})
    return detections


def test_drise_weighs_masks_by_the_most_similar_detection(curved: nn.Module) -> None:
    x = photos() + 0.2
    model = Made(detected)
    method = DRISE(samples=40, grid=3)
    target = explain.targets.Detections(1)
    values = explain.attribute(model, x, method, target=target).values
    whole = model(x)[0]
    best = int(torch.where(whole["labels"] == 1, whole["scores"], -1.0).argmax())
    total = torch.zeros(SIZE, dtype=torch.float64)
    missed = 0
    for mask in masks_of(method, x):
        (seen,) = model(x * mask)
        overlaps = box_iou(seen["boxes"], whole["boxes"][[best]])[:, 0]
        alike = max([0.0, *(overlaps * seen["scores"] * (seen["labels"] == 1)).tolist()])
        missed += alike == 0
        total += alike * mask
    assert missed < 40
    # overlaps are in float32
    assert_close(values[0], total / (40 * 0.5), rtol=1e-6, atol=1e-7)
    with pytest.raises(ExplainError, match="target must"):
        explained(curved, method)


@pytest.mark.parametrize("method", [Occlusion((1, 1, 1), (1, 1, 1)), FeatureAblation(6)], ids=str)
def test_videos_are_covered_in_time_too(method: Method) -> None:
    clip = Made(lambda net, x: x[:, :, 1, 2:4, 2:4].sum((1, 2, 3))[:, None])
    x = torch.rand(1, 3, 4, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.zeros(4, 6, 6, dtype=torch.float64)
    expected[1, 2:4, 2:4] = x[0, :, 1, 2:4, 2:4].sum(0)
    values = explain.attribute(clip, x, method, target=0).values
    assert_close(values[0], expected, **EXACT)


@dataclass(frozen=True)
class CountedRISE(RISE):
    """RISE that notes how many of its masks are worked on at once."""

    lengths: ClassVar[list[int]] = []

    def estimators(self, evidence: Evidence) -> list[Estimator]:
        estimators = super().estimators(evidence)
        for estimator in estimators:
            take = estimator.take

            def noted(
                first: int, scores: Tensor, take: Callable[[int, Tensor], None] = take
            ) -> None:
                self.lengths.append(len(scores))
                take(first, scores)

            estimator.take = noted  # type: ignore[method-assign]
        return estimators


def test_masks_of_one_batch_at_most_are_in_memory_at_once() -> None:
    x = torch.rand(2, 3, 8, 8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    explain.attribute(model, x, CountedRISE(samples=50, grid=3), target=1, batch_size=8)
    assert sum(CountedRISE.lengths) == 2 * 50
    assert max(CountedRISE.lengths) <= 8
