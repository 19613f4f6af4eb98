"""Errors of estimates are honest: a 95 % interval, the value ± 1.96 errors, holds the exact value
at every stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import explain
from explain.methods import HSIC, LIME, RISE, KernelSHAP, Method, ShapleySampling, Sobol
from explain.methods.surrogate import left_out_error
from tests.methods import plain_runs

SIDE = 3
CELLS = SIDE**2
SEEDS = 8
PHOTO = torch.ones(1, 1, SIDE, SIDE, dtype=torch.float64)
COALITIONS = plain_runs.shown_in_each(CELLS)


class Games(nn.Module):
    """Scores looked up by which of the nine cells are seen; between seen and not, their multilinear
    extensions."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.scores = torch.stack([GAMES[name](COALITIONS) for name in names], 1)

    def forward(self, x: Tensor) -> Tensor:
        share = x.flatten(1)
        chance = torch.ones(len(x), 1, dtype=x.dtype)
        for cell in range(CELLS):
            seen = share[:, cell, None]
            chance = torch.cat([chance * (1 - seen), chance * seen], 1)
        return chance @ self.scores


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


GAMES: dict[str, Callable[[Tensor], Tensor]] = {
    "majority": lambda z: (z.sum(1) > CELLS / 2).double(),
    "max": lambda z: (z * torch.arange(1.0, CELLS + 1)).amax(1),
    "random": lambda z: numbers(1, len(z)),
}


def shapley(scores: Tensor) -> Tensor:
    return plain_runs.shapley_weights(CELLS) @ scores


def sobol(scores: Tensor) -> Tensor:
    """Total indices of the multilinear extension, by its products of 2 p - 1, whose variances are
    powers of 1/3."""
    signs = 2 * COALITIONS - 1
    products = torch.stack([signs[:, some.bool()].prod(1) for some in COALITIONS])
    parts = (products @ scores / len(scores)).square() / 3 ** COALITIONS.sum(1)
    return (parts[1:, None] * COALITIONS[1:]).sum(0) / parts[1:].sum()


def covered(
    games: Games,
    exact: Sequence[Tensor] | None,
    make: Callable[[int], Method],
    seeds: int = SEEDS,
) -> list[tuple[float, int]]:
    """For each game, the share of intervals that hold the exact value, or else the mean of all
    seeds, and how many seeds have an error."""
    targets = list(range(games.scores.shape[1]))
    runs = [
        explain.attribute(games, PHOTO, make(seed), targets=targets, batch_size=64)
        for seed in range(seeds)
    ]
    shares = []
    for game, attributions in enumerate(zip(*runs, strict=True)):
        values = torch.stack([one.values.flatten() for one in attributions])
        right = values.mean(0) if exact is None else exact[game]
        within = [
            (of_seed - right).abs() <= 1.96 * one.error.flatten() + 1e-9
            for of_seed, one in zip(values, attributions, strict=True)
            if one.error is not None
        ]
        share = float(torch.stack(within).double().mean()) if within else math.nan
        shares.append((share, len(within)))
    return shares


# the means of HSIC, of ridge regression and of masks depend on the number of runs
@pytest.mark.parametrize(
    ("method", "exact_of"),
    [
        (KernelSHAP(42, SIDE), shapley),
        (ShapleySampling(48, SIDE), shapley),
        (Sobol(132, SIDE), sobol),
        (RISE(16, SIDE, score="logit"), None),
        (HSIC(60, SIDE), None),
        (LIME(12, SIDE), None),
    ],
    ids=lambda case: getattr(case, "name", ""),
)
def test_values_lie_within_errors(method: Any, exact_of: Any) -> None:
    games = Games([*GAMES])
    exact = [exact_of(scores) for scores in games.scores.T] if exact_of else None
    for share, seeds in covered(games, exact, lambda seed: replace(method, seed=seed)):
        assert share >= 0.9
        assert seeds >= SEEDS - 1


@pytest.mark.parametrize(
    "method",
    [
        KernelSHAP(40, SIDE),
        ShapleySampling(32, SIDE),
        Sobol(88, SIDE),
        HSIC(40, SIDE),
        RISE(3, SIDE),
        LIME(11, SIDE),
    ],
    ids=lambda method: method.name,
)
def test_few_runs_give_no_error(method: Method) -> None:
    assert explain.attribute(Games(["random"]), PHOTO, method, target=0).error is None


def test_until_does_not_stop_before_there_is_an_error() -> None:
    """2 (M - 1) runs fit any score; nine equal voters are one dictator to them."""
    method = KernelSHAP(100, SIDE, tolerance=0.01)
    assert explain.attribute(Games(["majority"]), PHOTO, method, target=0).samples == 100


def test_an_image_without_an_error_yet_has_nan_beside_others() -> None:
    """The same masks, of which one image shows nothing: all its scores are equal."""
    x = torch.cat([PHOTO, PHOTO * 0])
    game = Games(["max"])
    game.scores = game.scores + 1
    found = explain.attribute(game, x, RISE(32, SIDE, tolerance=1e-9, score="logit"), target=0)
    assert found.error[0].isfinite().all()
    assert found.error[1].isnan().all()
    assert found.relative_error.isnan().tolist() == [False, True]


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    """Of five numbers, with the factor of Student's t for four degrees of freedom."""
    numbers = torch.tensor([[1.0], [4.0], [2.0], [8.0], [5.0]], dtype=torch.float64)
    means = [torch.cat([numbers[:i], numbers[i + 1 :]]).mean(0) for i in range(5)]
    expected = numbers.std(0) / math.sqrt(5) * 2.776445 / 1.959964
    torch.testing.assert_close(left_out_error(means), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("samples", [42, 60])
def test_nineteen_of_twenty_intervals_of_kernelshap_hold_the_exact_value(samples: int) -> None:
    """In scores of what cells do alone, in pairs, in threes and all together, of random sizes."""
    orders = COALITIONS.sum(1)
    subsets = orders == COALITIONS @ COALITIONS.T  # which sets each coalition has: (512, 512)
    games = Games(["max"])
    columns = []
    for game in range(24):
        sizes = torch.tensor([0, 1, 0.5, 0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]).double()
        adds = numbers(game, len(COALITIONS)) * sizes[orders.long()]
        columns.append(subsets.double() @ adds)
    games.scores = torch.stack(columns, 1)
    exact = [shapley(scores) for scores in games.scores.T]
    found = covered(games, exact, lambda seed: KernelSHAP(samples, SIDE, seed=seed))
    share = sum(share for share, _ in found) / len(found)
    assert 0.93 < share < 0.97


def test_the_errors_of_lime_are_those_of_fits_that_leave_out_each_run() -> None:
    """Robust errors (HC3) take, for each run, what a fit without this run misses of it."""
    generator = torch.Generator().manual_seed(0)
    seen = (torch.rand(30, 4, generator=generator) < 0.5).double()
    scores = torch.rand(30, generator=generator, dtype=torch.float64)
    found = LIME(30, SIDE, ridge=0, width=0.8).solve(seen, scores, 1.3, 0.0)
    a = torch.cat([torch.ones(31, 1), torch.cat([torch.ones(1, 4), seen])], 1).double()
    y = torch.cat([torch.tensor([1.3]).double(), scores])
    w = torch.exp(-(((1 - a[:, 1:].mean(1).sqrt()) / 0.8) ** 2))

    def fitted(runs: torch.Tensor) -> torch.Tensor:
        weighted = a[runs] * w[runs, None]
        return torch.linalg.solve(weighted.T @ a[runs], weighted.T @ y[runs])

    everything = torch.arange(31)
    missed = [y[i] - a[i] @ fitted(everything[everything != i]) for i in range(31)]
    inverse = torch.linalg.inv(a.T @ (w[:, None] * a))
    influences = a * (w * torch.stack(missed))[:, None]
    variance = (inverse @ influences.T @ influences @ inverse).diagonal()[1:]
    torch.testing.assert_close(found.values, fitted(everything)[1:])
    assert found.error is not None
    error = variance.clamp(min=variance.mean()).sqrt()
    torch.testing.assert_close(found.error / found.error[0], error / error[0])
    widened = found.error / error  # by the few degrees of freedom
    assert 1 < widened[0] < 1.1
