"""Errors of estimates are honest: a 95 % interval, the value ± 1.96 errors, holds the exact value at every stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import explain
from explain.methods import HSIC, LIME, RISE, KernelSHAP, Method, ShapleySampling, Sobol

SIDE = 3
CELLS = SIDE**2
SEEDS = 50
PHOTO = torch.ones(1, 1, SIDE, SIDE, dtype=torch.float64)
COALITIONS = ((torch.arange(2**CELLS)[:, None] >> torch.arange(CELLS)) & 1).double()


class Game(nn.Module):
    """Scores looked up by which of the nine cells are seen; between seen and not, their multilinear extension."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.scores[None].expand(len(x), -1)
        for cell in reversed(range(CELLS)):
            share = x.flatten(1)[:, cell : cell + 1]
            without, within = found.chunk(2, 1)
            found = torch.lerp(without, within, share)
        return found


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tiny() -> torch.Tensor:
    """The bundled network's score of a photo of which some of nine squares are seen."""
    explainer = explain.Explainer("tiny")
    model, x = explainer.model, numbers(0, 3, 8, 8).float()
    x = nn.functional.interpolate(x[None], size=(32, 32), mode="bilinear")
    labels = explain.methods.Squares(SIDE)(x)[0]
    with torch.no_grad():
        scores = torch.cat([model(x * some[:, labels][:, None].float()) for some in COALITIONS.split(64)])
    return scores[:, int(scores[-1].argmax())].double()


def hidden(z: torch.Tensor) -> torch.Tensor:
    return (z @ numbers(3, CELLS, 8) - 0.5).relu().square().sum(1)


GAMES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "majority": lambda z: (z.sum(1) > CELLS / 2).double(),
    "weighted majority": lambda z: (z @ torch.arange(1.0, CELLS + 1).double() > 22).double(),
    "parity": lambda z: 1 - 2 * (z.sum(1) % 2),
    "parity of five": lambda z: 1 - 2 * (z[:, :5].sum(1) % 2),
    "max": lambda z: (z * torch.arange(1.0, CELLS + 1)).amax(1),
    "unanimity of three": lambda z: z[:, :3].prod(1),
    "unanimity of six": lambda z: z[:, :6].prod(1),
    "unanimity": lambda z: z.prod(1),
    "random": lambda z: numbers(1, len(z)),
    "in twos": lambda z: ((z @ numbers(2, CELLS, CELLS)) * z).sum(1),
    "hidden units": hidden,
    "tiny": lambda z: tiny(),
}
SOME = ("majority", "unanimity of three", "tiny")


def shapley(scores: torch.Tensor) -> torch.Tensor:
    """By definition: over all coalitions without the cell."""
    values = []
    for cell in range(CELLS):
        without = (COALITIONS[:, cell] == 0).nonzero()[:, 0]
        size = COALITIONS[without].sum(1).long().tolist()
        weights = [math.factorial(k) * math.factorial(CELLS - 1 - k) / math.factorial(CELLS) for k in size]
        gains = scores[without | (1 << cell)] - scores[without]
        values.append((torch.tensor(weights, dtype=torch.float64) * gains).sum())
    return torch.stack(values)


def sobol(scores: torch.Tensor) -> torch.Tensor:
    """Total indices of the multilinear extension, by its products of 2 p - 1, whose variances are powers of 1/3."""
    signs = 2 * COALITIONS - 1
    products = torch.stack([signs[:, some.bool()].prod(1) for some in COALITIONS])
    parts = (products @ scores / len(scores)).square() / 3 ** COALITIONS.sum(1)
    return (parts[1:, None] * COALITIONS[1:]).sum(0) / parts[1:].sum()


def covered(game: Game, exact: torch.Tensor, make: Callable[[int], Method]) -> tuple[float, int]:
    """The share of values whose interval holds the exact one, over the seeds with an error; and how many these are."""
    inside = []
    for seed in range(SEEDS):
        found = explain.attribute(game, PHOTO, make(seed), target=0, batch_size=64)
        if found.error is not None and not found.error.isnan().any():
            off = (found.values.flatten() - exact).abs()
            inside.append((off <= 1.96 * found.error.flatten() + 1e-9).double().mean().item())
    return sum(inside) / max(1, len(inside)), len(inside)


STOPS: dict[Any, tuple[int, ...]] = {
    KernelSHAP: (16, 42, 64),
    ShapleySampling: (16, 48),
    Sobol: (132,),
    RISE: (2, 16),
    HSIC: (40, 60),
    LIME: (8, 64),
}
"""Budgets below, at and above the first one that has an error."""


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("kind", "name", "stops"),
    [
        (KernelSHAP, "majority", (42, 64)),
        (ShapleySampling, "majority", (48,)),
        long(KernelSHAP, "majority", (510,)),
        *(long(kind, name, STOPS[kind]) for kind in (KernelSHAP, ShapleySampling) for name in GAMES),
    ],
)
def test_shapley_values_lie_within_their_errors_at_every_stop(
    kind: type[Any], name: str, stops: tuple[int, ...]
) -> None:
    game = Game(GAMES[name](COALITIONS))
    exact = shapley(game.scores)
    for samples in stops:
        share, given = covered(game, exact, lambda seed, samples=samples: kind(samples, SIDE, seed=seed))  # type: ignore[misc]
        assert share >= 0.9 or not given, (samples, share)
    assert given == SEEDS


@pytest.mark.long
@pytest.mark.parametrize("tolerance", [0.5, 0.1])
@pytest.mark.parametrize("name", SOME)
def test_shapley_values_lie_within_their_errors_where_tolerance_stops(name: str, tolerance: float) -> None:
    game = Game(GAMES[name](COALITIONS))
    exact = shapley(game.scores)
    for kind in (KernelSHAP, ShapleySampling):
        share, given = covered(game, exact, lambda seed, kind=kind: kind(500, SIDE, seed=seed, tolerance=tolerance))  # type: ignore[misc]
        assert share >= 0.9
        assert given == SEEDS


def test_tolerance_does_not_stop_before_there_is_an_error() -> None:
    """2 (M - 1) samples fit any score, and make nine equal voters one dictator."""
    found = explain.attribute(
        Game(GAMES["majority"](COALITIONS)), PHOTO, KernelSHAP(500, SIDE, tolerance=0.01), target=0
    )
    assert found.samples == 500
    for kind, samples in ((KernelSHAP, 40), (ShapleySampling, 32), (Sobol, 88), (HSIC, 40), (RISE, 3), (LIME, 11)):
        option = {"grid": SIDE} if kind in (Sobol, HSIC, RISE) else {"regions": SIDE}
        few = explain.attribute(Game(GAMES["random"](COALITIONS)), PHOTO, kind(samples=samples, **option), target=0)
        assert few.error is None, kind.name


def test_orders_that_agree_leave_an_error() -> None:
    game = Game(COALITIONS[:, 2])  # one cell alone decides
    for pairs in (3, 6):
        found = explain.attribute(game, PHOTO, ShapleySampling(16 * pairs, SIDE), target=0)
        torch.testing.assert_close(found.error, torch.full_like(found.error, 1 / pairs))


@pytest.mark.filterwarnings("ignore:rise is zero everywhere")
def test_an_image_without_an_error_yet_has_nan_beside_others() -> None:
    """The same masks, of which one image shows nothing: all its scores are equal."""
    x = torch.cat([PHOTO, PHOTO * 0])
    found = explain.attribute(
        Game(GAMES["max"](COALITIONS)), x, RISE(32, SIDE, tolerance=1e-9, score="logit"), target=0
    )
    assert found.error[0].isfinite().all()
    assert found.error[1].isnan().all()
    assert found.relative_error.isnan().tolist() == [False, True]


@pytest.mark.parametrize("name", ["majority", *map(long, GAMES)])
def test_sobol_indices_lie_within_their_errors_at_every_stop(name: str) -> None:
    game = Game(GAMES[name](COALITIONS))
    exact = sobol(game.scores)
    for some in STOPS[Sobol]:
        share, given = covered(game, exact, lambda seed, some=some: Sobol(some, SIDE, seed=seed))  # type: ignore[misc]
        assert share >= 0.9 or not given, (some, share)
    assert given == SEEDS


@pytest.mark.parametrize(
    ("kind", "name", "samples"),
    [(RISE, "majority", (16,)), *(long(kind, name, STOPS[kind]) for kind in (RISE, HSIC, LIME) for name in SOME)],
)
def test_estimates_lie_within_their_errors_of_a_mean_over_many_seeds(
    kind: type[Any], name: str, samples: tuple[int, ...]
) -> None:
    """What they estimate is what many seeds of as many runs say together: HSIC and ridge regression depend on these."""
    game = Game(GAMES[name](COALITIONS))
    option = {RISE: {"grid": SIDE, "score": "logit"}, HSIC: {"grid": SIDE}, LIME: {"regions": SIDE}}[kind]
    for some in samples:
        found = [
            explain.attribute(game, PHOTO, kind(some, seed=s, **option), target=0, batch_size=64) for s in range(200)
        ]
        mean = torch.stack([each.values for each in found]).mean(0)
        known = [each for each in found[:SEEDS] if each.error is not None]
        inside = [((each.values - mean).abs() <= 1.96 * each.error + 1e-9).double().mean().item() for each in known]
        assert not known or sum(inside) / len(known) >= 0.9, (some, sum(inside) / len(known))
    assert known
