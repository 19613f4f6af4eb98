"""Errors of estimates are honest: a 95 % interval, the value ± 1.96 errors, holds the exact value
at every stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import explain
from explain.attribution.result import Attribution
from explain.methods import HSIC, LIME, RISE, KernelSHAP, Method, ShapleySampling, Sobol

SIDE = 3
CELLS = SIDE**2
SEEDS = 50
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


def hidden(z: Tensor) -> Tensor:
    return (z @ numbers(3, CELLS, 8) - 0.5).relu().square().sum(1)


GAMES: dict[str, Callable[[Tensor], Tensor]] = {
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
    "one cell alone": lambda z: z[:, 2],
    "tiny": lambda z: tiny(),
}
QUICK = ("majority", "random", "tiny")
FEWER_SEEDS = 12


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


def covered(
    games: Games, exact: Sequence[Tensor], make: Callable[[int], Method], seeds: int = SEEDS
) -> list[tuple[float, int]]:
    """Of each game, the share of values whose interval holds the exact one, and how many seeds have
    an error at all."""
    inside: list[list[float]] = [[] for _ in exact]
    for seed in range(seeds):
        for found, values, kept in zip(explained(games, make(seed)), exact, inside, strict=True):
            if found.error is not None:
                off = (found.values.flatten() - values).abs()
                kept.append((off <= 1.96 * found.error.flatten() + 1e-9).double().mean().item())
    return [(sum(each) / max(1, len(each)), len(each)) for each in inside]


STOPS = {
    KernelSHAP: (8, 16, 18, 24, 32, 40, 42, 44, 48, 64, 96, 128, 192, 256, 400, 510),
    ShapleySampling: (16, 32, 48, 64, 80, 112, 160, 320),
    Sobol: (44, 88, 132, 176, 440),
    RISE: (2, 4, 8, 16, 32, 64, 200),
    HSIC: (20, 40, 60, 80, 100, 200, 500),
    LIME: (2, 8, 10, 12, 16, 32, 64, 200),
}
FEW = {KernelSHAP: (42,), ShapleySampling: (48,), RISE: (16,), LIME: (12,)}
MORE = {
    KernelSHAP: (44, 96),
    ShapleySampling: (48,),
    Sobol: (132,),
    RISE: (4,),
    HSIC: (60,),
    LIME: (16,),
}
"""``STOPS`` has all that examples/benchmarks/coverage.py prints; these are those of the long
tests."""


def at_stops(*kinds: type[Any]) -> Any:
    """A few games and stops, and, as long tests, all of them."""
    return pytest.mark.parametrize(
        ("kind", "names", "stops"),
        [
            *(
                pytest.param(kind, QUICK, FEW[kind], id=f"{kind.name}-few")
                for kind in kinds
                if kind in FEW
            ),
            *(
                pytest.param(
                    kind, tuple(GAMES), (stop,), id=f"{kind.name}-{stop}", marks=pytest.mark.long
                )
                for kind in kinds
                for stop in MORE[kind]
            ),
        ],
    )


@at_stops(KernelSHAP, ShapleySampling, Sobol)
def test_values_lie_within_errors_at_every_stop(
    kind: type[Any], names: Sequence[str], stops: Sequence[int]
) -> None:
    games = Games(names)
    seeds = FEWER_SEEDS if names == QUICK else SEEDS
    exact = [(sobol if kind is Sobol else shapley)(scores) for scores in games.scores.T]
    for stop in stops:
        found = covered(games, exact, lambda seed, stop=stop: kind(stop, SIDE, seed=seed), seeds)
        for name, (share, given) in zip(names, found, strict=True):
            assert share >= 0.9 or not given, (stop, name, share)
            assert given in (0, seeds) or kind is Sobol, (stop, name, given)


# where no mask shows what unanimity takes
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
@at_stops(RISE, HSIC, LIME)
def test_values_lie_within_errors_of_many_seeds(
    kind: type[Any], names: Sequence[str], stops: Sequence[int]
) -> None:
    """That is what they estimate: the means of HSIC and of ridge regression depend on the number of
    runs."""
    games = Games(names)
    option = {
        RISE: {"grid": SIDE, "score": "logit"},
        HSIC: {"grid": SIDE},
        LIME: {"regions": SIDE},
    }[kind]
    for stop in stops:
        count = 2 * (FEWER_SEEDS if names == QUICK else SEEDS)
        seeds = [explained(games, kind(stop, seed=seed, **option)) for seed in range(count)]
        for name, found in zip(names, zip(*seeds, strict=True), strict=True):
            mean = torch.stack([each.values for each in found]).mean(0)
            known = [each for each in found if each.error is not None]
            inside = [
                ((each.values - mean).abs() <= 1.96 * each.error + 1e-9).double().mean().item()
                for each in known
            ]
            assert not known or sum(inside) / len(known) >= 0.9, (
                stop,
                name,
                sum(inside) / len(known),
            )


def test_until_does_not_stop_before_there_is_an_error() -> None:
    """2 (M - 1) runs fit any score; nine equal voters are one dictator to them."""
    found = explain.attribute(
        Games(["majority"]), PHOTO, KernelSHAP(500, SIDE, tolerance=0.01), target=0
    )
    assert found.samples == 500
    for kind, samples in (
        (KernelSHAP, 40),
        (ShapleySampling, 32),
        (Sobol, 88),
        (HSIC, 40),
        (RISE, 3),
        (LIME, 11),
    ):
        option = {"grid": SIDE} if kind in (Sobol, HSIC, RISE) else {"regions": SIDE}
        few = explain.attribute(Games(["random"]), PHOTO, kind(samples=samples, **option), target=0)
        assert few.error is None, kind.name


def test_an_image_without_an_error_yet_has_nan_beside_others() -> None:
    """The same masks, of which one image shows nothing: all its scores are equal."""
    x = torch.cat([PHOTO, PHOTO * 0])
    game = Games(["max"])
    game.scores = game.scores + 1
    found = explain.attribute(game, x, RISE(32, SIDE, tolerance=1e-9, score="logit"), target=0)
    assert found.error[0].isfinite().all()
    assert found.error[1].isnan().all()
    assert found.relative_error.isnan().tolist() == [False, True]
