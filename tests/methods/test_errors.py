"""Errors of estimates are honest: a 95 % interval, the value ± 1.96 errors, holds the exact value
at every stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import explain
from explain.attribution.result import Attribution
from explain.methods import HSIC, LIME, RISE, KernelSHAP, Method, ShapleySampling, Sobol
from explain.methods.surrogate import left_out_error

SIDE = 3
CELLS = SIDE**2
SEEDS = 8
PHOTO = torch.ones(1, 1, SIDE, SIDE, dtype=torch.float64)
COALITIONS = ((torch.arange(2**CELLS)[:, None] >> torch.arange(CELLS)) & 1).double()


class Games(nn.Module):
    """Scores looked up by which of the nine cells are seen; between seen and not, their multilinear
    extensions."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.scores = torch.stack([GAMES[name](COALITIONS) for name in names], 1)

    def forward(self, x: Tensor) -> Tensor:
        share = x.flatten(1)
        if ((share == 0) | (share == 1)).all():
            return self.scores[(share.long() << torch.arange(CELLS)).sum(1)]
        chance = torch.ones(len(x), 1, dtype=x.dtype)
        for cell in range(CELLS):
            chance = torch.cat(
                [chance * (1 - share[:, cell, None]), chance * share[:, cell, None]], 1
            )
        return chance @ self.scores


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@cache
def tiny() -> Tensor:
    """The bundled network's score of a photo of which some of nine squares are seen."""
    explainer = explain.Explainer("tiny")
    model = explainer.model
    x = numbers(0, 3, 8, 8).float()
    x = nn.functional.interpolate(x[None], size=(32, 32), mode="bilinear")
    labels = explain.methods.Squares(SIDE)(x)[0]
    with torch.no_grad():
        scores = torch.cat(
            [model(x * some[:, labels][:, None].float()) for some in COALITIONS.split(64)]
        )
    return scores[:, int(scores[-1].argmax())].double()


GAMES: dict[str, Callable[[Tensor], Tensor]] = {
    "majority": lambda z: (z.sum(1) > CELLS / 2).double(),
    "max": lambda z: (z * torch.arange(1.0, CELLS + 1)).amax(1),
    "random": lambda z: numbers(1, len(z)),
    "tiny": lambda z: tiny(),
}
PLAYED = ("majority", "random", "tiny")


def shapley(scores: Tensor) -> Tensor:
    """By definition: over all coalitions without the cell."""
    values = []
    for cell in range(CELLS):
        without = (COALITIONS[:, cell] == 0).nonzero()[:, 0]
        size = COALITIONS[without].sum(1).long().tolist()
        weights = [
            math.factorial(k) * math.factorial(CELLS - 1 - k) / math.factorial(CELLS) for k in size
        ]
        gains = scores[without | (1 << cell)] - scores[without]
        values.append((torch.tensor(weights, dtype=torch.float64) * gains).sum())
    return torch.stack(values)


def sobol(scores: Tensor) -> Tensor:
    """Total indices of the multilinear extension, by its products of 2 p - 1, whose variances are
    powers of 1/3."""
    signs = 2 * COALITIONS - 1
    products = torch.stack([signs[:, some.bool()].prod(1) for some in COALITIONS])
    parts = (products @ scores / len(scores)).square() / 3 ** COALITIONS.sum(1)
    return (parts[1:, None] * COALITIONS[1:]).sum(0) / parts[1:].sum()


def explained(games: Games, method: Method) -> list[Attribution]:
    targets = range(games.scores.shape[1])
    return explain.attribute(games, PHOTO, method, targets=list(targets), batch_size=64)


@pytest.mark.parametrize(("kind", "stop"), [(KernelSHAP, 42), (ShapleySampling, 48), (Sobol, 132)])
def test_values_lie_within_errors(kind: type[Any], stop: int) -> None:
    games = Games(PLAYED)
    runs = [explained(games, kind(stop, SIDE, seed=seed)) for seed in range(SEEDS)]
    for name, scores, of_seeds in zip(PLAYED, games.scores.T, zip(*runs, strict=True), strict=True):
        exact = sobol(scores) if kind is Sobol else shapley(scores)
        with_error = [one for one in of_seeds if one.error is not None]
        assert len(with_error) == SEEDS or (kind is Sobol and with_error), name
        within = [
            (one.values.flatten() - exact).abs() <= 1.96 * one.error.flatten() + 1e-9
            for one in with_error
        ]
        assert torch.stack(within).double().mean() >= 0.9, name


@pytest.mark.parametrize(
    "method",
    [RISE(16, SIDE, score="logit"), HSIC(60, SIDE), LIME(12, SIDE)],
    ids=lambda method: method.name,
)
def test_values_lie_within_errors_of_many_seeds(method: Any) -> None:
    """That is what they estimate: the means of HSIC and of ridge regression depend on the number of
    runs."""
    games = Games(PLAYED)
    runs = [explained(games, replace(method, seed=seed)) for seed in range(2 * SEEDS)]
    for attributions in zip(*runs, strict=True):
        values = torch.stack([attribution.values for attribution in attributions])
        errors = torch.stack([attribution.error for attribution in attributions])
        off = (values - values.mean(0)).abs()
        assert (off <= 1.96 * errors + 1e-9).double().mean() >= 0.9


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
    method = KernelSHAP(500, SIDE, tolerance=0.01)
    assert explain.attribute(Games(["majority"]), PHOTO, method, target=0).samples == 500


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
