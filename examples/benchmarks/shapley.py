"""Shapley values by how many passes: ours and those of shap and shapiq, against the exact ones.

    python examples/benchmarks/shapley.py tables FILE PHOTOS... --networks tiny tiny-transformer
    python examples/benchmarks/shapley.py tables FILE 0 1 2 ... --networks planted
    python examples/benchmarks/shapley.py compare FILE

``tables`` runs all 4,096 coalitions of twelve regions of each photo and keeps their scores; photos
of the network "planted" are the numbers of synthetic ones with a mark in them.
``compare`` then asks every estimator for the values by 60, 120 and 240 coalitions, with several
seeds, and prints the mean squared error over the mean square of the exact values, with 95 %
intervals over photos, and how often the stated 95 % intervals hold the exact value.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
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

ROWS = 3
COLUMNS = 4
REGIONS = ROWS * COLUMNS
PASSES = (60, 120, 240)
SEEDS = 8
CHUNK = 64
POWERS = 2 ** torch.arange(REGIONS)


def all_coalitions() -> Tensor:
    return torch.arange(2**REGIONS)[:, None] >> torch.arange(REGIONS) & 1 == 1


@lru_cache
def planted() -> nn.Module:
    return manipulation.trained(500, 0.0)


def scores_of(network: str, photo: str) -> Tensor:
    """The logit of the top class for each coalition of seen regions ``(4096,)``."""
    if network == "planted":
        model = planted()
        x, _ = manipulation.photos(1, int(photo))
    else:
        explainer = explain.Explainer(network)
        model = explainer.model
        x = explainer.as_input(photo)[0][None]
    height, width = x.shape[2:]
    rows = torch.arange(height) * ROWS // height
    columns = torch.arange(width) * COLUMNS // width
    labels = rows[:, None] * COLUMNS + columns
    scores = []
    with torch.no_grad():
        category = int(model(x).argmax())
        for seen in torch.split(all_coalitions(), CHUNK):
            masks = seen[:, labels][:, None].to(x)
            scores.append(model(x * masks)[:, category])
    return torch.cat(scores).double()


def exact(scores: Tensor) -> Tensor:
    """The Shapley values ``(12,)`` by their definition, from the scores of all coalitions."""
    half = all_coalitions()[1::2]  # one of each pair of opposites
    signs = 2 * half.double() - 1
    numbers = (half * POWERS).sum(1)
    opposite = 2**REGIONS - 1 - numbers
    return (scores[numbers] - scores[opposite]) / 2 @ coefficients(signs)


Answer = tuple[Tensor, Tensor | None]
Estimator = Callable[[Tensor, int, int], Answer]


def looked_up(scores: Tensor, seen: Tensor) -> Tensor:
    return scores[(seen.long() * POWERS).sum(1)]


def ours(scores: Tensor, passes: int, seed: int) -> Answer:
    seen = Pairs(passes, seed).rows(REGIONS)
    solved = regress_pairs(
        seen.double(), looked_up(scores, seen), float(scores[-1]), float(scores[0])
    )
    return solved.values, solved.error


def ours_by_orders(scores: Tensor, passes: int, seed: int) -> Answer:
    seen = Permutations(passes, seed).rows(REGIONS)
    solved = ShapleySampling().solve(
        seen.double(), looked_up(scores, seen), float(scores[-1]), float(scores[0])
    )
    return solved.values, solved.error


def leverage(scores: Tensor, passes: int, seed: int) -> Answer:
    """Leverage SHAP (Musco and Witter, ICLR 2025): sizes evenly, in pairs, none twice."""
    generator = torch.Generator().manual_seed(seed)
    blank = float(scores[0])
    gain = float(scores[-1]) - blank
    rows: dict[int, Tensor] = {}
    while len(rows) < passes // 2:
        size = int(torch.randint(1, REGIONS, (1,), generator=generator))
        seen = torch.randperm(REGIONS, generator=generator) < size
        seen = seen if bool(seen[0]) else ~seen
        rows.setdefault(int((seen * POWERS).sum()), seen)
    half = torch.stack([*rows.values()])
    seen = torch.cat([half, ~half]).double()
    sizes = seen.sum(1)
    # the kernel over the chance of being drawn, which is 1 / C(M, s)
    weights = 1 / (sizes * (REGIONS - sizes))
    centred = seen - sizes[:, None] / REGIONS
    values = looked_up(scores, seen.bool()) - blank - sizes / REGIONS * gain
    root = weights.sqrt()[:, None]
    solved = torch.linalg.lstsq(root * centred, root * values[:, None]).solution[:, 0]
    return solved - solved.mean() + gain / REGIONS, None


def as_game(scores: Tensor) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    table = scores.numpy()
    powers = POWERS.numpy()
    return lambda seen: table[(np.atleast_2d(seen).astype(int) * powers).sum(1)]


def shap_estimators() -> dict[str, Estimator]:
    import shap

    def kernel(scores: Tensor, passes: int, seed: int) -> Answer:
        np.random.seed(seed)
        explainer = shap.KernelExplainer(as_game(scores), np.zeros((1, REGIONS)))
        values = explainer.shap_values(
            np.ones((1, REGIONS)), nsamples=passes, l1_reg=False, silent=True
        )
        return torch.as_tensor(np.asarray(values)).reshape(-1), None

    def permutation(scores: Tensor, passes: int, seed: int) -> Answer:
        explainer = shap.PermutationExplainer(as_game(scores), np.zeros((1, REGIONS)), seed=seed)
        solved = explainer(np.ones((1, REGIONS)), max_evals=passes + 1, silent=True)
        return torch.as_tensor(np.asarray(solved.values)).reshape(-1), None

    return {"shap KernelExplainer": kernel, "shap PermutationExplainer": permutation}


def shapiq_estimators() -> dict[str, Estimator]:
    try:
        import shapiq
    except ImportError:
        return {}

    def of(make: Any, **options: Any) -> Estimator:
        def estimate(scores: Tensor, passes: int, seed: int) -> Answer:
            approximator = make(n=REGIONS, random_state=seed, **options)
            answer = approximator.approximate(budget=passes + 2, game=as_game(scores))
            by_region = answer.dict_values
            return torch.tensor([by_region.get((i,), 0.0) for i in range(REGIONS)]), None

        return estimate

    return {
        "shapiq KernelSHAP": of(shapiq.KernelSHAP, pairing_trick=True),
        "shapiq SVARM": of(shapiq.SVARM),
        "shapiq UnbiasedKernelSHAP": of(shapiq.UnbiasedKernelSHAP),
        "shapiq PermutationSamplingSV": of(shapiq.PermutationSamplingSV),
        "shapiq StratifiedSamplingSV": of(shapiq.StratifiedSamplingSV),
    }


def interval(values: list[float]) -> str:
    spread = 1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{mean(values):.4f} ± {spread:.4f}"


def compared(tables: dict[str, dict[str, Tensor]]) -> Iterator[str]:
    estimators: dict[str, Estimator] = {
        "KernelSHAP (ours)": ours,
        "ShapleySampling (ours)": ours_by_orders,
        "Leverage SHAP (from the paper)": leverage,
        **shap_estimators(),
        **shapiq_estimators(),
    }
    for network, photos in tables.items():
        for name, estimate in estimators.items():
            cells = [network, name]
            for passes in PASSES:
                errors = []
                held = []
                for scores in photos.values():
                    truth = exact(scores)
                    of_photo = []
                    for seed in range(SEEDS):
                        values, error = estimate(scores, passes, seed)
                        off = values.double() - truth
                        of_photo.append(float(off.square().sum() / truth.square().sum()))
                        if error is not None:
                            held.append(float((off.abs() <= 1.96 * error).double().mean()))
                    errors.append(mean(of_photo))
                cells.append(interval(errors) + (f" ({mean(held):.1%})" if held else ""))
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("tables", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("photos", nargs="*")
    parser.add_argument("--networks", nargs="+", default=["tiny", "tiny-transformer"])
    options = parser.parse_args()
    tables = torch.load(options.file) if options.file.exists() else {}
    if options.task == "tables":
        for photo in options.photos:
            for network in options.networks:
                scores = scores_of(network, photo)
                tables.setdefault(network, {})[Path(photo).name] = scores
                torch.save(tables, options.file)
                print(network, photo, flush=True)
        return
    for row in compared(tables):
        print(row, flush=True)


if __name__ == "__main__":
    main()
