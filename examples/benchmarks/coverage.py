"""Print how often 95 % intervals of estimates hold the exact value, at every number of samples,
over 50 seeds.

    python examples/benchmarks/coverage.py kernelshap shapleysampling sobol

The games are those of tests/methods/test_errors.py: scores with known Shapley values and Sobol
indices, from a majority vote to random scores. It takes some minutes for each method.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from explain.methods import HSIC, LIME, RISE, KernelSHAP, ShapleySampling, Sobol

STOPS = {
    KernelSHAP: (8, 16, 18, 24, 32, 40, 42, 44, 48, 64, 96, 128, 192, 256, 400, 510),
    ShapleySampling: (16, 32, 48, 64, 80, 112, 160, 320),
    Sobol: (44, 88, 132, 176, 440),
    RISE: (2, 4, 8, 16, 32, 64, 200),
    HSIC: (20, 40, 60, 80, 100, 200, 500),
    LIME: (2, 8, 10, 12, 16, 32, 64, 200),
}


def main() -> None:
    """Print a line for each method, number of samples and game."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", default=["kernelshap", "shapleysampling", "sobol"])
    chosen = parser.parse_args().methods

    from tests.methods import test_errors as games

    for kind, stops in STOPS.items():
        if kind.name not in chosen:
            continue
        of = games.Games(tuple(games.GAMES))
        exact = [
            (games.sobol if kind.name == "sobol" else games.shapley)(scores)
            for scores in of.scores.T
        ]
        for stop in stops:
            found = games.covered(
                of, exact, lambda seed, kind=kind, stop=stop: kind(stop, games.SIDE, seed=seed), 50
            )
            for name, (share, given) in zip(games.GAMES, found, strict=True):
                told = f"{share:.2f} of the intervals of {given} seeds" if given else "no error yet"
                print(f"{kind.name:16} {stop:4} samples  {name:24} {told}", flush=True)


if __name__ == "__main__":
    main()
