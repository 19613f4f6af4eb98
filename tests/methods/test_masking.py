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
    Occlusion,
    PartitionSHAP,
    Quadtree,
    ShapleySampling,
    Sobol,
    Squares,
    Superpixels,
)
from explain.methods import occlusion as masking
from explain.methods import shapley as pair_regression
from explain.methods.estimates import RegionMethod
from explain.methods.regions import GivenRegions
from explain.methods.shapley import drawn_pairs
from tests.conftest import Made, settled, snapshot
from tests.methods import plain_runs

SIZE = (6, 5)
LABELS = torch.tensor(
    [
        [0, 0, 1, 1, 1],
        [0, 0, 1, 1, 1],
        [2, 2, 2, 3, 3],
        [2, 2, 2, 3, 3],
        [4, 4, 4, 4, 4],
        [4, 4, 4, 4, 4],
    ]
)
EXACT = {"rtol": 1e-8, "atol": 1e-10}


class Curved(nn.Module):
    """A convolution with a smooth bend, so that regions act together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.fc(nn.functional.softplus(self.conv(x)).square().mean((2, 3)))


@pytest.fixture
def curved() -> Curved:
    return settled(Curved()).double().eval()


def photos(count: int = 1) -> Tensor:
    return torch.randn(
        count, 3, *SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )


def score_of(model: nn.Module, target: int = 1, kind: str = "logit") -> Callable[[Tensor], float]:
    def score(x: Tensor) -> float:
        with torch.no_grad():
            logits = model(x[None])[0]
        return float((logits.softmax(0) if kind == "probability" else logits)[target])

    return score


def linear() -> tuple[nn.Module, Tensor]:
    """A linear model, and what each pixel of the photo gives to the score of class 1."""
    model = settled(nn.Sequential(nn.Flatten(), nn.Linear(3 * math.prod(SIZE), 3))).double()
    weight = model[1].weight.detach()[1].reshape(3, *SIZE)
    return model, (weight * photos()[0]).sum(0)


def drawn(method: RegionMethod, regions: int) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in method.design.rows(regions)]


def evidence_of(x: Tensor) -> Evidence:
    return Evidence(x, torch.zeros(len(x)), None, "", Grids(tuple(x.shape[2:])))


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 5)])
def test_occlusion_is_the_mean_drop_over_windows(window: int, stride: int, curved: Curved) -> None:
    found = explain.attribute(curved, photos(2), Occlusion(window, stride), target=1)
    for values, x in zip(found.values, photos(2), strict=True):
        assert_close(values, plain_runs.occlusion(score_of(curved), x, window, stride), **EXACT)


def test_feature_ablation_is_the_drop_without_each_region(curved: Curved) -> None:
    found = explain.attribute(curved, photos(2), FeatureAblation(regions=LABELS), target=1)
    for values, x in zip(found.values, photos(2), strict=True):
        assert_close(values, plain_runs.ablation(score_of(curved), x, LABELS), **EXACT)
    assert found.samples == 5
    assert found.error is None


def error_of_a_mean(each: Tensor, farthest: float) -> Tensor:
    """Of 70 masks: no variance is below the mean; one more mask may have the farthest score, or the
    photo's."""
    variance = each.var(0)
    variance = torch.maximum(variance, variance.mean()) + farthest**2 / 70
    # Student's t with 69 degrees of freedom
    return (variance / 70).sqrt() * 1.994945415107 / 1.959963984540


def test_rise_is_the_mean_of_masks_times_scores(curved: Curved) -> None:
    method = RISE(samples=70, grid=3, probability=0.4)
    x = photos()
    numbers = torch.arange(70)
    masks = method.perturbation.masks(evidence_of(x)).build(torch.zeros_like(numbers), numbers)[
        :, 0
    ]
    found = explain.attribute(curved, x, method, target=1)
    expected = plain_runs.rise(score_of(curved, kind="probability"), x[0], list(masks), 0.4)
    assert_close(found.values[0], expected, **EXACT)
    scores = [score_of(curved, kind="probability")(x[0] * mask) for mask in masks]
    whole = score_of(curved, kind="probability")(x[0])
    each = torch.stack([score * mask for score, mask in zip(scores, masks, strict=True)]) / 0.4
    assert_close(
        found.error[0], error_of_a_mean(each, max(map(abs, [*scores, whole])) / 0.4), **EXACT
    )
    centred = explain.attribute(
        curved, x, RISE(samples=70, grid=3, probability=0.4, centred=True), target=1
    )
    level = sum(scores) / 70
    assert_close(centred.values[0], expected - level * masks.mean(0) / 0.4, **EXACT)
    each = (
        torch.stack([(score - level) * mask for score, mask in zip(scores, masks, strict=True)])
        / 0.4
    )
    farthest = max(abs(score - level) for score in [*scores, whole]) / 0.4
    assert_close(centred.error[0], error_of_a_mean(each, farthest), **EXACT)


def test_a_mask_of_rise_is_a_piece_of_its_grid_enlarged_bilinearly() -> None:
    x = torch.zeros(1, 3, 20, 15, dtype=torch.float64)
    drawn = RISE(grid=4, seed=9).perturbation.masks(evidence_of(x))
    mask = drawn.build(torch.zeros(1).long(), torch.tensor([3]))[0, 0]
    generator = torch.Generator().manual_seed(9 * 1_000_003)
    cells = (torch.rand(masking.BLOCK, 4, 4, generator=generator) < 0.5).double()[3]
    # a cell is 5 high and 4 wide
    down = int(torch.randint(5, (masking.BLOCK,), generator=generator)[3])
    right = int(torch.randint(4, (masking.BLOCK,), generator=generator)[3])
    large = nn.functional.interpolate(
        cells[None, None], size=(25, 20), mode="bilinear", align_corners=False
    )[0, 0]
    assert_close(mask, large[down : down + 20, right : right + 15], **EXACT)


def test_lime_is_weighted_ridge_regression(curved: Curved) -> None:
    method = LIME(samples=40, regions=LABELS, width=0.4, ridge=0.3, seed=4)
    found = explain.attribute(curved, photos(2), method, target=1)
    for i, x in enumerate(photos(2)):
        values, r2 = plain_runs.lime(score_of(curved), x, LABELS, drawn(method, 5), 0.4, 0.3)
        assert_close(found.values[i], values, **EXACT)
        assert found.r2[i].item() == pytest.approx(r2, rel=1e-8)


def test_kernelshap_is_the_best_linear_estimate_from_its_pairs(curved: Curved) -> None:
    labels = torch.arange(30).reshape(SIZE) % 7
    x = photos()
    # 21 pairs, and that of the photo and the blank one, test the fit of 7 by 15
    for samples in (6, 12, 40, 42):
        coalitions = [row.nonzero()[:, 0].tolist() for row in drawn_pairs(7, samples // 2, 2)]
        variances = list(itertools.product(pair_regression.THREES, pair_regression.REST))
        values, errors, _ = plain_runs.pair_regression(
            score_of(curved), x[0], labels, coalitions, variances
        )
        found = explain.attribute(
            curved, x, KernelSHAP(samples=samples, regions=labels, seed=2), target=1
        )
        assert_close(found.values[0], plain_runs.on_pixels(labels, values), **EXACT)
        if samples < 40:
            assert found.error is None
            continue
        expected = plain_runs.on_pixels(labels, errors)
        assert_close(found.error[0], expected, rtol=1e-5, atol=1e-10)  # the table has six digits
        assert found.samples == samples


def test_variances_are_those_of_the_first_pairs(
    curved: Curved, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = torch.arange(30).reshape(SIZE) % 6
    x = photos()
    score = score_of(curved)
    coalitions = [row.nonzero()[:, 0].tolist() for row in drawn_pairs(6, 20, 2)]
    few = explain.attribute(curved, x, KernelSHAP(10, labels, seed=2), target=1).values[0]
    fit = [
        pair
        for pair in itertools.product(pair_regression.THREES, pair_regression.REST)
        for values in [plain_runs.pair_regression(score, x[0], labels, coalitions[:5], [pair])[0]]
        if torch.allclose(plain_runs.on_pixels(labels, values), few, rtol=1e-8)
    ]
    assert len(fit) == 1
    every = list(itertools.product(pair_regression.THREES, pair_regression.REST))
    plausible = plain_runs.pair_regression(score, x[0], labels, coalitions[:5], every)[2]
    values, errors, _ = plain_runs.pair_regression(score, x[0], labels, coalitions, fit, plausible)
    # the whole photo with the blank one, and five more
    monkeypatch.setattr(pair_regression, "ENOUGH", 6)
    found = explain.attribute(curved, x, KernelSHAP(40, labels, seed=2), target=1)
    assert_close(found.values[0], plain_runs.on_pixels(labels, values), **EXACT)
    assert_close(found.error[0], plain_runs.on_pixels(labels, errors), rtol=1e-5, atol=1e-10)


def test_pairs_are_those_of_an_order_first_and_none_comes_twice() -> None:
    half = drawn_pairs(9, 60, 1)
    keys = {tuple((row ^ row[0]).tolist()) for row in half}
    assert len(keys) == len(half) == 60
    first = half[:8][half[:8].sum(1).argsort()]
    assert first.sum(1).tolist() == list(range(1, 9))
    assert (first[:-1] <= first[1:]).all()
    assert torch.equal(drawn_pairs(9, 30, 1), half[:30])
    assert drawn_pairs(9, 0, 1).shape == (0, 9)


@pytest.mark.parametrize(
    "method", [KernelSHAP(regions=LABELS), ShapleySampling(samples=600, regions=LABELS)]
)
def test_all_coalitions_and_many_orders_give_shapley_values(method: Any, curved: Curved) -> None:
    found = explain.attribute(curved, photos(2), method, target=1)
    for i, x in enumerate(photos(2)):
        expected = plain_runs.shapley(score_of(curved), x, LABELS)
        if isinstance(method, KernelSHAP):
            assert_close(found.values[i], expected, **EXACT)
            assert found.error[i].abs().max() == 0
            assert found.samples == 2**5 - 2
        else:
            assert ((found.values[i] - expected).abs() <= 4.5 * found.error[i] + 1e-12).all()


def test_shapley_sampling_is_the_mean_gain_over_its_orders(curved: Curved) -> None:
    method = ShapleySampling(samples=40, regions=LABELS, seed=1)
    rows = method.design.rows(5).reshape(-1, 4, 5)
    orders = []
    for each in rows:
        steps = torch.cat([torch.zeros(1, 5), each.float(), torch.ones(1, 5)]).diff(dim=0)
        orders.append(steps.argmax(1).tolist())
    assert [order[::-1] for order in orders[::2]] == orders[1::2]
    found = explain.attribute(curved, photos(), method, target=1)
    expected = plain_runs.permutations(score_of(curved), photos()[0], LABELS, orders)
    assert_close(found.values[0], expected, **EXACT)
    assert found.samples == 40


@pytest.mark.parametrize(
    "method",
    [
        KernelSHAP(12, LABELS),
        KernelSHAP(500, LABELS),
        ShapleySampling(16, LABELS),
        KernelSHAP(9, 3),
        KernelSHAP(9, 1),
    ],
)
def test_shapley_values_add_up_to_the_difference_of_the_scores(method: Any, curved: Curved) -> None:
    found = explain.attribute(curved, photos(2), method, target=1)
    labels = method.regions(photos(2))
    for i, x in enumerate(photos(2)):
        first = [(labels[i] == k).nonzero()[0] for k in range(int(labels.max()) + 1)]
        total = sum(float(found.values[i][tuple(place)]) for place in first)
        assert total == pytest.approx(score_of(curved)(x) - score_of(curved)(x * 0), rel=1e-9)
    assert found.delta.abs().max() < 1e-9


SHAPLEY = [
    KernelSHAP(12, LABELS),
    KernelSHAP(24, LABELS),
    ShapleySampling(16, LABELS),
    LIME(64, LABELS, ridge=0),
]


@pytest.mark.parametrize("method", [*SHAPLEY, FeatureAblation(LABELS), Occlusion(1, 1)])
def test_of_a_linear_model_each_pixel_gets_what_it_gives(method: Any) -> None:
    model, pixels = linear()
    found = explain.attribute(model, photos(), method, target=1).values[0]
    if not isinstance(method, Occlusion):
        pixels = plain_runs.on_pixels(LABELS, [float(pixels[k == LABELS].sum()) for k in range(5)])
    # so few that values are drawn towards each other
    if isinstance(method, KernelSHAP) and method.samples == 12:
        assert float((found - pixels).norm() / pixels.norm()) < 0.5
    else:
        assert_close(
            found, pixels, rtol=0.1 if method == KernelSHAP(24, LABELS) else 1e-8, atol=1e-6
        )


class Product(nn.Module):
    """The product of the means of the two halves of the photo; what is below them does nothing."""

    def forward(self, x: Tensor) -> Tensor:
        left = x[:, :, :2, :2].mean((1, 2, 3))
        right = x[:, :, :2, 3:].mean((1, 2, 3))
        return torch.stack([left * right, left + right], 1)


def test_symmetry_dummy_and_linearity_of_shapley_values() -> None:
    labels = torch.zeros(SIZE, dtype=torch.long)
    labels[:2, 3:] = 1
    labels[2:, :2] = 2
    labels[2:, 2:] = 3
    x = photos()
    for method in (KernelSHAP(regions=labels), ShapleySampling(samples=24, regions=labels)):
        value = {}
        for name, target in {
            "product": 0,
            "sum": 1,
            "both": lambda y: 2 * y[:, 0] + 3 * y[:, 1],
        }.items():
            value[name] = explain.attribute(Product(), x, method, target=target).values[0]
        half = Product()(x)[0, 0] / 2
        assert_close(value["product"][0, 0], half)  # each has half of what they do together
        assert_close(value["product"][0, 4], half)
        assert value["product"][3:].abs().max() < 1e-12  # these do nothing
        assert value["sum"][3:].abs().max() < 1e-12
        assert_close(value["both"], 2 * value["product"] + 3 * value["sum"])


def test_occlusion_of_one_pixel_is_its_weight_times_the_distance_to_the_fill() -> None:
    model, _ = linear()
    weight = model[1].weight.detach()[1].reshape(3, *SIZE)
    for baseline in ("zero", Mean(), Blur(), Noise(seed=3), "neighbours"):
        method = Occlusion(1, 1, baseline)
        expected = []
        for place in range(math.prod(SIZE)):
            keep = torch.ones(1, 1, *SIZE, dtype=torch.float64)
            keep.view(-1)[place] = 0
            expected.append((weight * (photos() - method.baseline(photos(), keep))[0]).sum())
        found = explain.attribute(model, photos(), method, target=1).values[0]
        assert_close(found, torch.stack(expected).reshape(SIZE), **EXACT)


METHODS = [
    Occlusion(3, 2),
    FeatureAblation(3),
    RISE(50, 3),
    LIME(50, 3),
    KernelSHAP(60, 3),
    ShapleySampling(40, 3),
    Sobol(200, 2),
    HSIC(60, 2),
    PartitionSHAP(20),
]
NAMED = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


@NAMED
def test_a_batch_equals_its_images_whatever_the_batch_size(method: Any, curved: Curved) -> None:
    together = explain.attribute(curved, photos(3), method, target=[0, 1, 2], batch_size=7)
    for i in range(3):
        alone = explain.attribute(curved, photos(3)[i : i + 1], method, target=i, batch_size=32)
        assert_close(together.values[i : i + 1], alone.values, rtol=1e-10, atol=1e-12)
        if alone.error is not None:
            assert_close(together.error[i : i + 1], alone.error, rtol=1e-6, atol=1e-10)
        assert together[i].samples == alone.samples


@NAMED
def test_several_targets_cost_one_and_nothing_is_left_behind(method: Any, curved: Curved) -> None:
    explain.attribute(curved, photos(), method, target=0)
    curved.rows.clear()
    explain.attribute(curved, photos(), method, target=0)
    once = sum(curved.rows)
    curved.rows.clear()
    before = snapshot(curved)
    state = torch.get_rng_state()
    found = explain.attribute(curved, photos(), [method], targets=[0, 1, lambda y: y[:, 2]])
    if method.name != "partitionshap":  # which goes where the score of each target leads
        # a callable has to show that its scores follow their rows
        assert sum(curved.rows) <= once + 1
    assert snapshot(curved) == before
    assert torch.equal(torch.get_rng_state(), state)
    for target, each in zip([0, 1, 2], found, strict=True):
        alone = explain.attribute(curved, photos(), method, target=target, batch_size=3)
        if not (target == 2 and method.score == "probability"):
            assert_close(each[method.name].values, alone.values, rtol=1e-10, atol=1e-12)


def test_the_photo_the_blank_and_equal_masks_are_run_once(curved: Curved) -> None:
    explain.attribute(curved, photos(), "kernelshap", target=0, samples=20)
    curved.rows.clear()
    methods = [KernelSHAP(20, 3), ShapleySampling(32, 3), FeatureAblation(3), LIME(20, 3)]
    explain.attribute(curved, photos(), methods, target=0)
    masked = 20 + 32 + 9 + 20
    # the photo, the blank, a row beside each plan, and one alone
    assert sum(curved.rows) <= 1 + 1 + masked + 4 + 1


@pytest.mark.parametrize("method", METHODS[2:-2], ids=lambda method: method.name)
def test_estimates_stop_at_the_same_run_whatever_the_batch_size(
    method: Any, curved: Curved
) -> None:
    class_of = type(method)
    much = class_of(
        samples=2000, **({"grid": 3} if method.name in ("rise", "sobol") else {"regions": 4})
    )
    found = [
        explain.attribute(curved, photos(2), much, target=1, tolerance=0.3, batch_size=size)
        for size in (5, 64)
    ]
    assert torch.equal(found[0].spent, found[1].spent)
    assert_close(found[0].values, found[1].values, rtol=1e-10, atol=1e-12)
    assert 0 < found[0].samples < 2000
    assert (found[0].relative_error <= 0.3).all()
    assert found[0].finished.all()
    assert found[0].options["tolerance"] == 0.3


def test_images_that_are_exact_enough_are_not_run_any_more(curved: Curved) -> None:
    x = torch.cat([photos(), photos() * 0.01])
    found = explain.attribute(
        curved, x, KernelSHAP(4000, 4), target=1, tolerance=0.01, batch_size=32
    )
    assert found.spent[0] != found.spent[1]
    few = int(found.spent.min()) + int(found.spent.max())
    assert sum(curved.rows) < few + 90


def test_a_budget_in_seconds_ends_with_what_there_is(
    curved: Curved, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def tick(done: int, total: int) -> None:
        clock[0] += 1

    found = explain.attribute(
        curved, photos(), RISE(4000, 3), target=1, max_seconds=3.5, batch_size=10, progress=tick
    )
    assert found.samples == 40
    same = explain.attribute(curved, photos(), RISE(40, 3), target=1)
    assert_close(found.values, same.values, rtol=1e-10, atol=1e-12)
    assert found.finished.all()
    clock[0] = 0
    shared = explain.attribute(
        curved, photos(2), PartitionSHAP(400), target=1, max_seconds=8.0, progress=tick
    )
    assert 8 <= clock[0] <= 10  # the photo and the blank one are told too
    assert ((shared.spent >= 8) & (shared.spent < 100)).all()
    assert shared.finished.all()


def test_progress_gets_maps_that_sharpen(curved: Curved) -> None:
    seen: list[Any] = []
    options: dict[str, Any] = {
        "batch_size": 16,
        "progress": lambda done, total, maps: seen.append((done, total, maps)),
    }
    found = explain.attribute(
        curved, photos(), [RISE(64, 3), KernelSHAP(60, 3)], target=1, **options
    )
    of_rise = [maps["rise"] for _, _, maps in seen if "rise" in maps]
    assert len(of_rise) == 4
    assert torch.equal(of_rise[-1], found["rise"].values)
    assert not torch.equal(of_rise[0], of_rise[-1])
    assert any("kernelshap" in maps for _, _, maps in seen)


def test_partitionshap_tells_how_far_it_is_and_shows_its_maps(curved: Curved) -> None:
    own: list[tuple[int, int, Tensor]] = []

    def note(done: int, total: int, maps: Any) -> None:
        own.extend((done, total, each) for each in maps.values())

    found = explain.attribute(curved, photos(2), PartitionSHAP(40), target=1, progress=note)
    assert [done for done, _, _ in own] == sorted({done for done, _, _ in own})
    assert {total for _, total, _ in own} == {80}
    assert torch.equal(own[-1][2], found.values)
    halfway = next(maps for done, _, maps in own if done == 40)
    assert torch.equal(halfway[0], found.values[0])
    assert not halfway[1].any()
    half = explain.attribute(curved, photos(2)[:1], PartitionSHAP(own[0][0]), target=1)
    # in batches of another size, which round differently
    assert_close(own[0][2][0], half.values[0])


def interrupt_after(rows: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done >= rows:
            raise KeyboardInterrupt

    return progress


def test_an_interrupt_leaves_nothing_or_what_there_is_as_asked(curved: Curved) -> None:
    before = snapshot(curved)
    options: dict[str, Any] = {"target": 1, "batch_size": 16}
    with pytest.raises(KeyboardInterrupt):
        explain.attribute(curved, photos(), RISE(640, 3), progress=interrupt_after(64), **options)
    found = explain.attribute(
        curved, photos(), RISE(640, 3), progress=interrupt_after(64), keep_partial=True, **options
    )
    assert found.samples == 64
    assert not found.finished.any()
    same = explain.attribute(curved, photos(), RISE(64, 3), target=1)
    assert_close(found.values, same.values, rtol=1e-10, atol=1e-12)
    options |= {"keep_partial": True}
    several = [RISE(640, 3), LIME(50, 3), "saliency"]
    both = explain.attribute(curved, photos(), several, progress=interrupt_after(64), **options)
    assert list(both) == ["rise", "saliency"]  # lime had not begun
    with pytest.raises(KeyboardInterrupt):
        explain.attribute(
            curved, photos(), "scorecam", progress=interrupt_after(1), layer="conv", **options
        )
    assert snapshot(curved) == before


def test_an_interrupt_ends_all_photos_of_partitionshap(curved: Curved) -> None:
    """The one at work keeps what it has, those before theirs; of those behind it nothing is known
    but the ends."""
    options: dict[str, Any] = {"progress": interrupt_after(60), "keep_partial": True}
    found = explain.attribute(curved, photos(3), PartitionSHAP(40), target=1, **options)
    assert found.finished.tolist() == [True, False, False]
    first, second, third = found.spent.tolist()
    assert (first, third) == (40, 0)
    assert 20 <= second < 40
    assert found.delta.abs().max() < 1e-9
    whole = explain.attribute(curved, photos(3), PartitionSHAP(40), target=1)
    assert_close(found.values[0], whole.values[0], rtol=1e-10, atol=1e-12)
    assert found.values[2].unique().numel() == 1


def test_regions_cut_a_photo_into_parts() -> None:
    x = photos(2)
    for regions in (Squares(3), Quadtree(9), GivenRegions(LABELS)):
        labels = regions(x)
        assert labels.shape == (2, *SIZE)
        for each in labels:
            assert each.unique().tolist() == list(range(int(each.max()) + 1))
            assert int(each.max()) + 1 <= regions.most(SIZE)
    assert Squares(3)(x).max() == 8
    assert Squares(9)(x).max() == 6 * 5 - 1
    assert len(Quadtree(9)(x)[0].unique()) in (7, 8, 9)
    assert GivenRegions(LABELS) == GivenRegions(LABELS.numpy()) != GivenRegions(LABELS + LABELS % 2)
    assert hash(GivenRegions(LABELS)) == hash(GivenRegions(LABELS.clone()))
    assert KernelSHAP(regions=LABELS) == KernelSHAP(regions=LABELS.tolist())


def test_budgets_are_for_methods_that_estimate(curved: Curved) -> None:
    with pytest.raises(MethodError, match="tolerance must"):
        explain.attribute(curved, photos(), "gradcam", tolerance=0.1)
    both = explain.attribute(curved, photos(), ["saliency", "rise"], target=0, samples=20)
    assert both["rise"].samples == 20
    assert both["saliency"].samples is None


def test_superpixels_follow_colours() -> None:
    pytest.importorskip("skimage", reason="scikit-image comes with the extra 'superpixels'")
    x = torch.zeros(1, 3, 24, 24)
    x[..., 9:] = 1.0
    labels = Superpixels(6)(x)[0]
    assert 2 <= int(labels.max()) + 1 <= Superpixels(6).count + 3
    assert not set(labels[:, :9].unique().tolist()) & set(labels[:, 9:].unique().tolist())


def owen(
    score: Any, x: Tensor, cell: Any, seen: list[Any], without: float, within: float
) -> Tensor:
    """Owen values along halves, by the recursion that defines them."""
    (top, bottom), (left, right) = cell
    found = torch.zeros(x.shape[1:], dtype=torch.float64)
    if bottom - top == right - left == 1:
        found[top, left] = within - without
        return found
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
        found += owen(score, x, half, seen, without, shown([*seen, half])) / 2
        found += owen(score, x, half, [*seen, rest], shown([*seen, rest]), within) / 2
    return found


def test_partitionshap_gives_owen_values_and_adds_up_at_any_run(curved: Curved) -> None:
    x = photos()[:, :, :2, :3]
    score = score_of(curved)
    expected = owen(score, x[0], ((0, 2), (0, 3)), [], score(x[0] * 0), score(x[0]))
    found = explain.attribute(curved, x, PartitionSHAP(500), target=1)
    assert_close(found.values[0], expected, **EXACT)
    for samples in (2, 3, 10, 40):
        few = explain.attribute(curved, photos(2), PartitionSHAP(samples), target=1)
        assert few.delta.abs().max() < 1e-9
        assert samples - 2 < few.samples <= samples
    assert found.samples < 64


def test_partitionshap_cuts_a_square_across_its_height_first_as_shap_does(curved: Curved) -> None:
    x = photos()[:, :, :4, :4]
    score = score_of(curved)
    upper = x[0].clone()
    lower = x[0].clone()
    upper[:, 2:] = 0
    lower[:, :2] = 0
    # by the two orders of the halves
    gain = (score(upper) - score(x[0] * 0) + score(x[0]) - score(lower)) / 2
    found = explain.attribute(curved, x, PartitionSHAP(2), target=1).values[0]
    assert float(found[:2].sum()) == pytest.approx(gain, rel=1e-9)
    expected = owen(score, x[0], ((0, 4), (0, 4)), [], score(x[0] * 0), score(x[0]))
    whole = explain.attribute(curved, x, PartitionSHAP(100_000), target=1).values[0]
    assert_close(whole, expected, **EXACT)


def test_sobol_finds_the_indices_of_functions_that_are_known() -> None:
    class Known(nn.Module):
        """A sum and a product of the four quarters of the photo."""

        def forward(self, x: Tensor) -> Tensor:
            quarters = torch.stack([x[:, 0, i, j] for i in (0, 1) for j in (0, 1)], 1)
            weights = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=x.dtype)
            return torch.stack([quarters @ weights, quarters[:, 0] * quarters[:, 1]], 1)

    x = torch.ones(1, 1, 2, 2, dtype=torch.float64)
    for target, expected in ((0, [9 / 14, 4 / 14, 1 / 14, 0]), (1, [4 / 7, 4 / 7, 0, 0])):
        found = explain.attribute(Known(), x, Sobol(720, 2), target=target)
        off = (found.values.flatten() - torch.tensor(expected, dtype=torch.float64)).abs()
        assert (off <= 4 * found.error.flatten() + 1e-9).all()
        assert off.max() < 0.15
        assert found.values[0, 1, 1].abs() < 1e-12


def test_sobol_is_jansens_estimator_over_its_designs(curved: Curved) -> None:
    method = Sobol(72, 2, seed=3)
    x = photos()[0]
    labels = Squares(2)(photos())[0]
    rows = method.design.rows(4)
    scores = [score_of(curved)(x * row[labels]) for row in rows]
    halves = [0.0] * 4
    ends = []
    for start in range(0, 72, 6):  # A, B, and A with each coordinate taken from B
        a = rows[start]
        b = rows[start + 1]
        ends += scores[start : start + 2]
        for cell in range(4):
            mixed = a.clone()
            mixed[cell] = b[cell]
            assert torch.equal(rows[start + 2 + cell], mixed)
            halves[cell] += (scores[start] - scores[start + 2 + cell]) ** 2 / (2 * 12)
    mean = sum(ends) / 24
    variance = sum((score - mean) ** 2 for score in ends) / 23
    found = explain.attribute(curved, photos(), method, target=1)
    expected = torch.tensor(halves, dtype=torch.float64) / variance
    assert_close(found.values.flatten(), expected, **EXACT)
    assert found.error.min() > 0  # of three sequences


def test_hsic_is_the_trace_of_the_centred_kernels(curved: Curved) -> None:
    method = HSIC(40, 2)
    rows = method.design.rows(4).double()
    labels = Squares(2)(photos())[0]
    scores = torch.tensor(
        [
            score_of(curved)(plain_runs.seen(photos()[0], labels, row.nonzero()[:, 0].tolist()))
            for row in rows
        ],
        dtype=torch.float64,
    )
    apart = (scores[:, None] - scores).abs()
    kernel = torch.exp(-(apart**2) / (2 * apart[apart > 1e-6 * apart.max()].median() ** 2))
    centre = torch.eye(40, dtype=torch.float64) - 1 / 40
    expected = [
        torch.trace((row[:, None] == row).double() @ centre @ kernel @ centre) / 40**2
        for row in rows.T
    ]
    found = explain.attribute(curved, photos(), method, target=1)
    assert_close(found.values.flatten(), torch.stack(expected), **EXACT)
    assert (rows[:20].sum(0) == 10).all()


def test_feature_permutation_exchanges_regions_between_images(curved: Curved) -> None:
    method = FeaturePermutation(regions=LABELS, seed=1)
    found = explain.attribute(curved, photos(3), method, target=1)
    givers = method.perturbation.others(3)  # type: ignore[attr-defined]
    assert sorted(givers.tolist()) == [0, 1, 2]
    assert (givers != torch.arange(3)).all()
    for i, x in enumerate(photos(3)):
        drops = []
        for region in range(5):
            other = torch.where(region == LABELS, photos(3)[givers[i]], x)
            drops.append(score_of(curved)(x) - score_of(curved)(other))
        assert_close(found.values[i], plain_runs.on_pixels(LABELS, drops), **EXACT)
    with pytest.raises(MethodError, match="featurepermutation must"):
        explain.attribute(curved, photos(), method, target=1)
    assert "featurepermutation" in explain.applicable_methods(curved, photos(2))
    assert "featurepermutation" not in explain.applicable_methods(curved, photos())


class Detector(nn.Module):
    """Finds two boxes, whose scores and edges depend on what is seen in them; none where there is
    little to see."""

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        found = []
        for each in x:
            boxes = torch.tensor([[0.0, 0, 3, 3], [2, 3, 5, 6], [0, 0, 2, 3]], dtype=x.dtype)
            boxes[0, 2] += each[0, 0, 0].sigmoid()
            seen = torch.stack(
                [each[:, :3, :3].mean(), each[:, 3:6, 2:5].mean(), each[:, :3, :2].mean()]
            ).sigmoid()
            kept = seen > 0.45
            found.append(
                {
                    "boxes": boxes[kept],
                    "labels": torch.tensor([1, 2, 1])[kept],
                    "scores": seen[kept],
                }
            )
        return found


def test_drise_weighs_masks_by_the_most_similar_detection() -> None:
    x = photos() + 0.2
    method = DRISE(samples=40, grid=3)
    found = explain.attribute(Detector(), x, method, target=explain.targets.Detections(1))
    numbers = torch.arange(40)
    masks = method.perturbation.masks(evidence_of(x)).build(torch.zeros_like(numbers), numbers)[
        :, 0
    ]
    first = Detector()(x)[0]
    best = int(torch.where(first["labels"] == 1, first["scores"], -1.0).argmax())
    total = torch.zeros(SIZE, dtype=torch.float64)
    missed = 0
    for mask in masks:
        (seen,) = Detector()(x * mask)
        alike = [0.0]
        for box, label, score in zip(seen["boxes"], seen["labels"], seen["scores"], strict=True):
            width = max(
                0.0,
                float(min(box[2], first["boxes"][best][2]) - max(box[0], first["boxes"][best][0])),
            )
            height = max(
                0.0,
                float(min(box[3], first["boxes"][best][3]) - max(box[1], first["boxes"][best][1])),
            )
            areas = [float((b[2] - b[0]) * (b[3] - b[1])) for b in (box, first["boxes"][best])]
            alike.append(
                width * height / (sum(areas) - width * height) * float(score) * float(label == 1)
            )
        missed += max(alike) == 0
        total += max(alike) * mask
    assert missed < 40
    # overlaps are in float32
    assert_close(found.values[0], total / (40 * 0.5), rtol=1e-6, atol=1e-7)
    with pytest.raises(ExplainError, match="target must"):
        explain.attribute(linear()[0], photos(), method, target=1)


def test_a_function_is_covered_behind_the_forward_of_a_module() -> None:
    weight = photos()[0].numpy()

    def scores(x: Any) -> Any:
        # of arrays, of which torch knows nothing
        return (x * weight).sum((1, 2, 3))[:, None].repeat(2, 1)

    behind = Made(lambda net, x: torch.from_numpy(scores(x.numpy())))
    for method in (
        Occlusion(1, 1),
        FeatureAblation(6),
        KernelSHAP(28, LABELS),
        PartitionSHAP(60),
        RISE(30, 3),
    ):
        found = explain.attribute(behind, photos(), method, target=1)
        if method.name in ("occlusion", "featureablation"):
            assert_close(found.values[0], photos()[0].square().sum(0), **EXACT)
    with pytest.raises(ExplainError, match="function"):
        explain.attribute(scores, photos(), "rise", target=1)  # type: ignore[arg-type]


def test_videos_are_covered_in_time_too() -> None:
    clip = Made(
        lambda net, x: torch.stack([x[:, :, 1, 2:4, 2:4].sum((1, 2, 3)), x.sum((1, 2, 3, 4))], 1)
    )
    x = torch.rand(1, 3, 4, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = torch.zeros(4, 6, 6, dtype=torch.bool)
    given[1, 2:4, 2:4] = True
    for method in (
        Occlusion((1, 1, 1), (1, 1, 1)),
        FeatureAblation(6),
        Occlusion(),
        KernelSHAP(60, 2),
        RISE(40, 3),
    ):
        found = explain.attribute(clip, x, method, target=0).values
        assert found.shape == (1, 4, 6, 6)
        if method in (Occlusion((1, 1, 1), (1, 1, 1)), FeatureAblation(6)):
            assert_close(found[0], x[0].sum(0) * given, **EXACT)
    assert explain.attribute(clip, x, PartitionSHAP(60), target=0).delta.abs().max() < 1e-9
    assert explain.attribute(clip, x, Sobol(120, 2), target=0).values.shape == (1, 2, 2, 2)


def test_photos_are_filled_with_the_black_of_the_explainer_and_records_tell_the_runs() -> None:
    from PIL import Image

    explainer = explain.Explainer("tiny")
    photo = Image.effect_noise((40, 40), 90).convert("RGB")
    explanation = explainer(
        photo, ["kernelshap", Occlusion(20, 20, "black")], samples=30, max_seconds=100.0
    )
    estimate = explanation.record("kernelshap")["estimate"]
    assert estimate["samples"] == 30
    assert estimate["error"] is None  # 30 runs of 49 regions do not tell
    assert (estimate["finished"], estimate["r2"]) == (True, None)
    baseline = explanation.attributions["occlusion"].options["baseline"]
    black = explainer.preprocess(Image.new("RGB", (80, 80)))[:, 0, 0]
    assert_close(baseline.replacement(torch.zeros(1, 3, 2, 2))[0, :, 0, 0], black)
    assert explanation.record("occlusion")["options"]["baseline"]["class"] == "Black"
    assert explainer(photo, "saliency").record()["estimate"] is None
