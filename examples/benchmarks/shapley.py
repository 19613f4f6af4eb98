"""Shapley values by how many passes: ours and those of shap and shapiq, against the exact ones.

    python examples/benchmarks/shapley.py run FILE PHOTOS... --networks tiny tiny-transformer
    python examples/benchmarks/shapley.py run FILE 0 1 2 ... --networks planted --regions 7x7
    python examples/benchmarks/shapley.py table FILE FILE...

``run`` asks every estimator for the values of regions (rows x columns) of each photo by few passes,
with several seeds, and keeps the answers in FILE, where it goes on next time; photos of the network
"planted" are the numbers of synthetic ones with a mark in them. What is true of at most sixteen
regions follows from all coalitions; of more, from two long runs (``--long`` passes each) of random
orders and their reverses, whose mean is the truth. ``table`` prints the mean squared error over the
mean square of the true values, with 95 % intervals over photos, and how often the stated 95 %
intervals hold the true value. Of long runs, the square is the product of what is missing to one and
to the other: they miss the truth independently, so that their own errors cancel out on average.
Stated intervals are widened by the error of the runs' mean, which has a row of its own.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import explain
from explain.methods.shapley import (
    Pairs,
    Permutations,
    ShapleySampling,
    coefficients,
    regress_pairs,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))
import manipulation

PASSES = {12: (60, 120, 240), 49: (250, 500, 1000), 196: (1000, 2000, 4000)}
FEW = 16  # regions, of which all coalitions are run
LONG_SEEDS = (10_001, 10_002)  # no estimator that is compared has these
CHUNK = 16


class Game:
    """The logit of the top class by which squares of a photo are seen; each coalition of squares is
    run once."""

    def __init__(self, model: nn.Module, x: Tensor, rows: int, columns: int) -> None:
        height, width = x.shape[2:]
        across = torch.arange(width) * columns // width
        self.regions = rows * columns
        self._model = model
        self._x = x
        self._labels = torch.arange(height)[:, None] * rows // height * columns + across
        self._scores: dict[bytes, float] = {}
        with torch.no_grad():
            self._category = int(model(x).argmax())
        ends = torch.tensor([False, True])[:, None].expand(2, self.regions)
        self.blank, self.whole = self(ends).tolist()

    def __call__(self, seen: Tensor) -> Tensor:
        """The scores ``(P,)`` of coalitions ``(P, M)``, true for a region that is seen."""
        keys = [row.tobytes() for row in seen.numpy()]
        unknown = {key: row for key, row in zip(keys, seen, strict=True) if key not in self._scores}
        with torch.no_grad():
            for chunk in torch.split(torch.stack([*unknown.values()]), CHUNK) if unknown else ():
                masks = chunk[:, self._labels][:, None].to(self._x)
                scores = self._model(self._x * masks)[:, self._category].tolist()
                found = zip(chunk.numpy(), scores, strict=True)
                self._scores.update((row.tobytes(), score) for row, score in found)
        return torch.tensor([self._scores[key] for key in keys], dtype=torch.float64)

    def of_arrays(self, seen: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The same for shap and shapiq."""
        return self(torch.as_tensor(np.atleast_2d(seen) > 0.5)).numpy()


@lru_cache
def planted() -> nn.Module:
    return manipulation.trained(500, 0.0)


def game_of(network: str, photo: str, rows: int, columns: int) -> Game:
    if network == "planted":
        return Game(planted(), manipulation.photos(1, int(photo))[0], rows, columns)
    explainer = explain.Explainer(network)
    return Game(explainer.model, explainer.as_input(photo)[0][None], rows, columns)


def truths(game: Game, long: int) -> tuple[Tensor, Tensor]:
    """The values of regions ``(M,)``, twice: independent of each other if they are not exact."""
    if game.regions > FEW:
        first, second = (ours_by_orders(game, long, seed)[0] for seed in LONG_SEEDS)
        return first, second
    numbers = torch.arange(1, 2**game.regions, 2)  # one of each pair of opposites
    half = numbers[:, None] >> torch.arange(game.regions) & 1 == 1
    exact = (game(half) - game(~half)) / 2 @ coefficients(2 * half.double() - 1)
    return exact, exact


Answer = tuple[Tensor, Tensor | None]
Estimator = Callable[[Game, int, int], Answer]


def ours(game: Game, passes: int, seed: int) -> Answer:
    seen = Pairs(passes, seed).rows(game.regions)
    solved = regress_pairs(seen.double(), game(seen), game.whole, game.blank)
    return solved.values, solved.error


def ours_by_orders(game: Game, passes: int, seed: int) -> Answer:
    seen = Permutations(passes, seed).rows(game.regions)
    solved = ShapleySampling().solve(seen.double(), game(seen), game.whole, game.blank)
    return solved.values, solved.error


def leverage(game: Game, passes: int, seed: int) -> Answer:
    """Leverage SHAP (Musco and Witter, ICLR 2025): sizes evenly, in pairs, none twice."""
    generator = torch.Generator().manual_seed(seed)
    regions = game.regions
    gain = game.whole - game.blank
    rows: dict[bytes, Tensor] = {}
    while len(rows) < passes // 2:
        size = int(torch.randint(1, regions, (1,), generator=generator))
        seen = torch.randperm(regions, generator=generator) < size
        seen = seen if bool(seen[0]) else ~seen
        rows.setdefault(seen.numpy().tobytes(), seen)
    half = torch.stack([*rows.values()])
    both = torch.cat([half, ~half])
    sizes = both.sum(1).double()
    # the kernel over the chance of being drawn, which is 1 / C(M, s)
    root = (1 / (sizes * (regions - sizes))).sqrt()[:, None]
    centred = both.double() - sizes[:, None] / regions
    values = game(both) - game.blank - sizes / regions * gain
    solved = torch.linalg.lstsq(root * centred, root * values[:, None]).solution[:, 0]
    return solved - solved.mean() + gain / regions, None


def shap_estimators() -> dict[str, Estimator]:
    try:
        import shap
    except ImportError:
        return {}

    def kernel(game: Game, passes: int, seed: int) -> Answer:
        np.random.seed(seed)
        explainer = shap.KernelExplainer(game.of_arrays, np.zeros((1, game.regions)))
        values = explainer.shap_values(
            np.ones((1, game.regions)), nsamples=passes, l1_reg=False, silent=True
        )
        return torch.as_tensor(np.asarray(values)).reshape(-1), None

    def permutation(game: Game, passes: int, seed: int) -> Answer:
        blank = np.zeros((1, game.regions))
        explainer = shap.PermutationExplainer(game.of_arrays, blank, seed=seed)
        solved = explainer(np.ones((1, game.regions)), max_evals=passes + 1, silent=True)
        return torch.as_tensor(np.asarray(solved.values)).reshape(-1), None

    return {"KernelExplainer of shap": kernel, "PermutationExplainer of shap": permutation}


def shapiq_estimators() -> dict[str, Estimator]:
    try:
        import shapiq
    except ImportError:
        return {}

    def of(make: Any, **options: Any) -> Estimator:
        def estimate(game: Game, passes: int, seed: int) -> Answer:
            approximator = make(n=game.regions, random_state=seed, **options)
            answer = approximator.approximate(budget=passes + 2, game=game.of_arrays)
            by_region = answer.dict_values
            return torch.tensor([by_region.get((i,), 0.0) for i in range(game.regions)]), None

        return estimate

    return {
        "KernelSHAP of shapiq, paired": of(shapiq.KernelSHAP, pairing_trick=True),
        "SVARM of shapiq": of(shapiq.SVARM),
        "UnbiasedKernelSHAP of shapiq": of(shapiq.UnbiasedKernelSHAP),
        "PermutationSamplingSV of shapiq": of(shapiq.PermutationSamplingSV),
        "StratifiedSamplingSV of shapiq": of(shapiq.StratifiedSamplingSV),
    }


def estimators() -> dict[str, Estimator]:
    return {
        "**`kernelshap`**": ours,
        "`shapleysampling`": ours_by_orders,
        "Leverage SHAP, from the paper": leverage,
        **shap_estimators(),
        **shapiq_estimators(),
    }


Question = tuple[str, int, int]  # the estimator, how many passes, and the seed
Answers = dict[Question, Answer]
Kept = dict[tuple[str, int, str], tuple[tuple[Tensor, Tensor], Answers]]
"""By network, regions and photo: the truth, twice, and the answers."""


def run(options: argparse.Namespace) -> None:
    kept: Kept = torch.load(options.file) if options.file.exists() else {}
    rows, columns = (int(side) for side in options.regions.split("x"))
    all_passes = options.passes or PASSES[rows * columns]
    asked = {
        name: estimate
        for name, estimate in estimators().items()
        if not any(part in name for part in options.without)
    }
    for photo in options.photos:
        for network in options.networks:
            game = game_of(network, photo, rows, columns)
            key = (network, game.regions, Path(photo).name)
            if key not in kept:
                kept[key] = truths(game, options.long), {}
            _, answers = kept[key]
            for name, estimate in asked.items():
                for passes in all_passes:
                    for seed in range(options.seeds):
                        if (name, passes, seed) not in answers:
                            answers[name, passes, seed] = estimate(game, passes, seed)
                torch.save(kept, options.file)
            print(*key, flush=True)


def interval(values: Iterable[float]) -> str:
    figures = [*values]
    spread = 1.96 * stdev(figures) / math.sqrt(len(figures)) if len(figures) > 1 else math.nan
    return f"{mean(figures):.4f} ± {spread:.4f}"


def table(kept: Kept) -> Iterator[str]:
    """A row for each network, number of regions and estimator, and one for the long runs."""
    for network, regions in sorted({key[:2] for key in kept}):
        photos = [photo for key, photo in kept.items() if key[:2] == (network, regions)]
        start = f"| {network} | {regions} |"
        if regions > FEW:
            own = interval(
                float((first - second).square().sum() / 4 / (first @ second))
                for (first, second), _ in photos
            )
            yield f"{start} the long runs' mean | {own} |"
        for name in dict.fromkeys(name for _, answers in photos for name, _, _ in answers):
            cells = []
            for passes in sorted({asked[1] for _, answers in photos for asked in answers}):
                errors = []
                held = []
                for (first, second), answers in photos:
                    spread = (first - second).square().mean() / 4
                    of_photo = []
                    for (by, runs, _), (values, error) in answers.items():
                        if (by, runs) != (name, passes):
                            continue
                        off = (values - first) @ (values - second) / (first @ second)
                        of_photo.append(float(off))
                        if error is not None:
                            missed = (values - (first + second) / 2).abs()
                            within = missed <= 1.96 * (error.square() + spread).sqrt()
                            held.append(float(within.double().mean()))
                    errors += [mean(of_photo)] if of_photo else []
                shown = interval(errors) if errors else ""
                cells.append(shown + (f" ({mean(held):.1%})" if held else ""))
            yield f"{start} {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = parser.add_subparsers(required=True, dest="task")
    runs = tasks.add_parser("run", help="ask the estimators, and keep their answers")
    runs.add_argument("file", type=Path)
    runs.add_argument("photos", nargs="+")
    runs.add_argument("--networks", nargs="+", default=["tiny", "tiny-transformer"])
    runs.add_argument("--regions", default="3x4", help="rows x columns")
    runs.add_argument("--passes", nargs="+", type=int, help="by which the values are asked for")
    runs.add_argument("--seeds", type=int, default=8)
    runs.add_argument("--long", type=int, default=20_000, help="passes of each long run")
    runs.add_argument("--without", nargs="+", default=[], help="estimators, by parts of names")
    tables = tasks.add_parser("table", help="print the errors, as Markdown")
    tables.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.task == "run":
        run(options)
        return
    kept: Kept = {}
    for file in options.files:
        kept |= torch.load(file)
    for row in table(kept):
        print(row, flush=True)


if __name__ == "__main__":
    main()
