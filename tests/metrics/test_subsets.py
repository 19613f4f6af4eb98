"""Sums of values against what the score loses: correlations, sensitivity-n, monotonicity,
infidelity."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain.baselines import Noise
from explain.methods import InputXGradient, Saliency
from explain.metrics import (
    FaithfulnessCorrelation,
    FaithfulnessEstimate,
    Infidelity,
    Monotonicity,
    MonotonicityCorrelation,
    NonSensitivity,
    SensitivityN,
)
from tests.metrics import plain
from tests.metrics.test_regions import squares

ZERO = plain.constant([0, 0, 0])


def subset(seed: int, run: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + run)
    return torch.randperm(120, generator=generator)[:count].tolist()


def drop(read: Any, photo: torch.Tensor, places: list[int]) -> float:
    """What the score loses when these places are zero."""
    return float(read(photo) - read(ZERO(photo, set(places))))


def pearson(one: list[float], other: list[float]) -> float:
    return float(np.corrcoef(one, other)[0, 1])


def test_random_subsets_by_the_formula(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    metrics = [FaithfulnessCorrelation(12, 10, seed=3), SensitivityN((10, 40), 8, seed=5)]
    table = explain.evaluate(model, photos, {"map": maps}, metrics, target=2)
    for i, photo in enumerate(photos):
        read = plain.logit(model, 2)
        flat = maps[i].flatten()

        drop_of = partial(drop, read, photo)

        def correlated(
            seed: int, samples: int, count: int, flat: torch.Tensor = flat, drop_of: Any = drop_of
        ) -> float:
            subsets = [subset(seed, run, count) for run in range(samples)]
            sums = [flat[places].sum().item() for places in subsets]
            return pearson(sums, [drop_of(places) for places in subsets])

        assert table["map"]["faithfulnesscorrelation"][i].item() == pytest.approx(
            correlated(3, 12, 12), abs=1e-8
        )
        both = [correlated(5, 8, 12), correlated(5, 8, 48)]
        assert table["map"]["sensitivityn"][i].item() == pytest.approx(sum(both) / 2, abs=1e-8)
        assert table.curve("map", "sensitivityn")[1][i].tolist() == pytest.approx(both, abs=1e-8)


def test_groups_in_the_maps_order_by_the_formula(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    metrics = [
        FaithfulnessEstimate(7),
        MonotonicityCorrelation(6, 3, seed=2),
        Monotonicity(5, score="logit"),
    ]
    table = explain.evaluate(model, photos, {"map": maps}, metrics, target=2)
    for i, photo in enumerate(photos):
        read = plain.logit(model, 2)
        flat = maps[i].flatten()
        order = plain.order_of(maps[i])
        ends = [round(120 * k / 7) for k in range(8)]
        groups = [order[start:end] for start, end in pairwise(ends)]
        lost = [read(photo) - read(ZERO(photo, set(places))) for places in groups]
        expected = pearson([flat[places].sum().item() for places in groups], lost)
        assert table["map"]["faithfulnessestimate"][i].item() == pytest.approx(expected, abs=1e-8)

        order = plain.order_of(maps[i].abs(), seed=2)
        groups = [order[20 * k : 20 * k + 20] for k in range(6)]
        noises = [plain.by_photo(Noise(seed).replacement(photo[None])[0]) for seed in (2, 3, 4)]
        change = [
            np.mean([(read(photo) - read(n(photo, set(g)))) ** 2 for n in noises]) for g in groups
        ]
        sizes = [abs(flat[places].sum().item()) for places in groups]
        ranks = [np.argsort(np.argsort(each)) for each in (sizes, change)]  # no ties here
        expected = pearson(ranks[0].tolist(), ranks[1].tolist())
        assert table["map"]["monotonicitycorrelation"][i].item() == pytest.approx(
            expected, abs=1e-8
        )

        order = plain.order_of(maps[i])
        curve = [read(ZERO(photo, set(order[: 120 - 24 * k]))) for k in range(6)]
        rises = [after >= before for before, after in pairwise(curve)]
        assert table.curve("map", "monotonicity")[1][i].tolist() == pytest.approx(curve, abs=1e-8)
        assert table["map"]["monotonicity"][i].item() == float(all(rises))
        assert table.parts("map", "monotonicity")["share"][i].item() == pytest.approx(
            sum(rises) / 5
        )


def test_monotonicity_is_one_where_all_that_is_shown_speaks_for_the_class() -> None:
    """Of a linear model, the score rises with every pixel that contributes, and falls with one that
    speaks against."""
    linear = nn.Sequential(nn.Flatten(), nn.Linear(30, 2)).double()
    x = torch.rand(2, 1, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        linear[1].weight.copy_(linear[1].weight.abs())
    found = [
        explain.evaluate(linear, x, "inputxgradient", Monotonicity(30, score="logit"), target=1)
    ]
    with torch.no_grad():
        linear[1].weight[1, 7] *= -1
    found += [
        explain.evaluate(linear, x, "inputxgradient", Monotonicity(30, score="logit"), target=1)
    ]
    assert [each["inputxgradient"]["monotonicity"].tolist() for each in found] == [[1, 1], [0, 0]]
    assert found[1].parts("inputxgradient", "monotonicity")["share"].tolist() == pytest.approx(
        [29 / 30] * 2
    )


def test_squares_that_are_nothing_to_one_of_map_and_model(photos: torch.Tensor) -> None:
    class UpperHalf(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x[:, :, :6].sum((1, 2, 3)), x[:, 0, 0, 0] * 0], 1)

    maps = torch.zeros(3, 12, 10, dtype=torch.float64)
    maps[:, 3:6] = 1  # of the two quarters that matter, one is missed
    found = explain.evaluate(UpperHalf(), photos, {"map": maps}, NonSensitivity(3), target=0)[
        "map"
    ]["nonsensitivity"]
    count = len(squares(12, 10, 3))
    assert found.tolist() == pytest.approx([4 / count] * 3)


@pytest.mark.parametrize(
    ("reads", "shows"), [("nothing", "some"), ("some", "nothing"), ("nothing", "nothing")]
)
def test_where_map_or_model_say_nothing_squares_of_the_other_are_counted(
    photos: torch.Tensor, reads: str, shows: str
) -> None:
    """The symmetric difference of the features without attribution and of those that the model does
    not depend on."""

    class Some(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            own = x[:, :, :6].sum((1, 2, 3)) if reads == "some" else x[:, 0, 0, 0] * 0 + 1
            return torch.stack([own, x[:, 0, 0, 0] * 0], 1)

    maps = torch.zeros(3, 12, 10, dtype=torch.float64)
    if shows == "some":
        maps[:, 3:9, :4] = torch.tensor([1.0, -1.0, 2.0, 3.0], dtype=torch.float64)
    found = explain.evaluate(Some(), photos, {"map": maps}, NonSensitivity(3), target=0)["map"][
        "nonsensitivity"
    ]
    for i, photo in enumerate(photos):
        read = plain.logit(Some(), 0)
        cover = plain.constant([0, 0, 0])
        of = squares(12, 10, 3)
        without = {k for k, each in enumerate(of) if not maps[i].flatten()[each].any()}
        still = {
            k
            for k, each in enumerate(of)
            if abs(read(photo) - read(cover(photo, set(each)))) < 1e-9
        }
        assert found[i].item() == pytest.approx(len(without ^ still) / len(of))


def test_infidelity_by_the_formula(model: nn.Module, photos: torch.Tensor) -> None:
    values = torch.randn(
        3, 3, 12, 10, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    metrics = {scaled: Infidelity(9, 0.3, scaled=scaled, seed=1) for scaled in (True, False)}
    tables = {
        s: explain.evaluate(model, photos, {"map": values}, m, target=2) for s, m in metrics.items()
    }
    for i, photo in enumerate(photos):
        read = plain.logit(model, 2)
        told = []
        lost = []
        for sample in range(9):
            generator = torch.Generator().manual_seed(1_000_003 + sample)
            noise = 0.3 * torch.randn(12, 10, generator=generator).double().expand(3, 12, 10)
            told.append(float((noise * values[i]).sum()))
            lost.append(read(photo) - read(photo - noise))
        off = np.mean([(t - f) ** 2 for t, f in zip(told, lost, strict=True)])
        beta = np.mean(np.multiply(told, lost)) / np.mean(np.square(told))
        scaled = np.mean([(beta * t - f) ** 2 for t, f in zip(told, lost, strict=True)])
        assert tables[False]["map"]["infidelity"][i].item() == pytest.approx(off, abs=1e-8)
        assert tables[True]["map"]["infidelity"][i].item() == pytest.approx(scaled, abs=1e-8)


def test_a_linear_model_is_explained_perfectly_by_its_contributions(photos: torch.Tensor) -> None:
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(360, 4)).double()
    metrics = [FaithfulnessCorrelation(9, 20), FaithfulnessEstimate(8), SensitivityN((5, 30), 6)]
    table = explain.evaluate(linear, photos, InputXGradient(), metrics)
    for metric in metrics:
        torch.testing.assert_close(
            table["inputxgradient"][metric.name], torch.ones(3).double(), msg=metric.name
        )
    gradient = explain.evaluate(
        linear, photos, Saliency(absolute=False), Infidelity(5, scaled=False)
    )
    assert gradient["saliency"]["infidelity"].abs().max() < 1e-20


def test_subsets_are_the_same_for_every_method_and_run_once(
    photos: torch.Tensor, maps: torch.Tensor
) -> None:
    from tests.metrics.test_evaluation import Counting

    linear = nn.Sequential(nn.Flatten(), nn.Linear(360, 4)).double()
    counting = Counting(linear)
    given = {str(k): maps + k for k in range(4)}
    metrics = [FaithfulnessCorrelation(11), Infidelity(7), NonSensitivity(6)]
    explain.evaluate(counting, photos, given, metrics, target=0, batch_size=5)
    # and those of a probe
    assert len({row.numpy().tobytes() for row in counting.rows}) == 3 * (1 + 11 + 7 + 4) + 2
    # and four in a trial of incremental inference
    assert len(counting.rows) <= 3 * (1 + 11 + 7 + 4) + 3 + 4 + 4
