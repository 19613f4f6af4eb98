"""By how much Shapley values of twelve regions are off after a few runs, here, in Captum and in
shap.

    python examples/benchmarks/accuracy.py [--rows tiny] [--seeds 50] [--quick]

A photo is cut into three rows of four rectangles. The scores of all 4,096 coalitions give the exact
values; then every method is asked again with few runs, of the very same scores, with many seeds. A
figure is the mean over the seeds of the distance to the exact values, by their norm. Nothing here
depends on how fast the machine is.

shap's KernelExplainer gets as many coalitions besides the empty and the full one, as KernelSHAP
does. By default it keeps ten features only; here it keeps all (``l1_reg=False``), which is closer
to the exact values.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from covering import version
from tables import Table, line, shown
from torch import nn

import explain
from explain.baselines.replacements import get_baseline
from explain.methods import KernelSHAP, Method, ShapleySampling

ASSETS = Path(__file__).resolve().parents[2] / "assets"
ROWS = 3
COLUMNS = 4
REGIONS = ROWS * COLUMNS
RUNS = (25, 100)
GOALS = {"tiny, chelsea, zero, logit": {25: 0.30, 100: 0.12}}
TOGETHER = 16


@dataclass(frozen=True)
class Setting:
    """Whose score of which photo, covered with what."""

    model: str
    photo: str
    baseline: str = "zero"
    score: str = "logit"

    def __str__(self) -> str:
        return f"{self.model}, {self.photo}, {self.baseline}, {self.score}"


SETTINGS = (
    Setting("tiny", "chelsea"),
    Setting("tiny", "chelsea", score="probability"),
    Setting("tiny", "astronaut", "blur"),
    Setting("tiny-transformer", "coffee"),
    Setting("efficientnet-lite0", "chelsea"),
)


class Known(nn.Module):
    """Scores that are known: looked up by which of the twelve pixels are seen."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = (x[:, 0].flatten(1) > 0.5).long()
        return self.scores[(seen << torch.arange(REGIONS)).sum(1)][:, None]


def known(setting: Setting) -> Known:
    """Score a photo in all coalitions of its regions."""
    explainer = explain.Explainer(setting.model)
    x = explainer.as_input(ASSETS / f"{setting.photo}.png")
    down, across = (
        torch.arange(side) * parts // side
        for side, parts in zip(x.shape[2:], (ROWS, COLUMNS), strict=True)
    )
    labels = down[:, None] * COLUMNS + across
    coalitions = (torch.arange(2**REGIONS)[:, None] >> torch.arange(REGIONS)) & 1
    cover = get_baseline(setting.baseline).covering(x)
    found = []
    with torch.inference_mode():
        target = int(explainer.model(x)[0].argmax())
        for some in coalitions.split(TOGETHER):
            photos = cover(
                torch.zeros(len(some), dtype=torch.long), some[:, labels][:, None].float()
            )
            scores = explainer.model(photos).double()
            found.append(
                (scores.softmax(1) if setting.score == "probability" else scores)[:, target]
            )
    return Known(torch.cat(found))


PHOTO = torch.ones(1, 1, ROWS, COLUMNS, dtype=torch.float64)


def values(model: Known, method: Method) -> torch.Tensor:
    return explain.attribute(model, PHOTO, method, target=0).values.flatten()


def captum(model: Known, samples: int, seed: int) -> torch.Tensor:
    from captum.attr import KernelShap

    torch.manual_seed(seed)
    mask = torch.arange(REGIONS).reshape(1, 1, ROWS, COLUMNS)
    found: torch.Tensor = KernelShap(model).attribute(
        PHOTO, target=0, feature_mask=mask, n_samples=samples, perturbations_per_eval=TOGETHER
    )
    return found.flatten().double()


def shap(model: Known, samples: int, seed: int) -> torch.Tensor:
    sys.modules.setdefault("coverage", None)  # type: ignore[arg-type]  # numba would take coverage.py of this folder
    from shap import KernelExplainer

    def scores(seen: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = model(
            torch.from_numpy(seen).reshape(-1, 1, ROWS, COLUMNS)
        ).numpy()[:, 0]
        return found

    np.random.seed(seed)
    explainer = KernelExplainer(scores, np.zeros((1, REGIONS)))
    found = explainer.shap_values(
        np.ones((1, REGIONS)), nsamples=samples, l1_reg=False, silent=True
    )
    return torch.from_numpy(found).flatten()


ESTIMATES: dict[str, Callable[[Known, int, int], torch.Tensor]] = {
    "kernelshap": lambda model, samples, seed: values(
        model, KernelSHAP(samples, COLUMNS, seed=seed)
    ),
    "shapleysampling": lambda model, samples, seed: values(
        model, ShapleySampling(samples, COLUMNS, seed=seed)
    ),
    "Captum's KernelShap": captum,
    "shap's KernelExplainer": shap,
}
PEERS = {"Captum's KernelShap": "captum", "shap's KernelExplainer": "shap"}


def off(model: Known, exact: torch.Tensor, name: str, samples: int, seeds: int) -> float:
    """The mean distance to the exact values, by their norm."""
    found = [ESTIMATES[name](model, samples, seed) for seed in range(seeds)]
    return statistics.mean(float((each - exact).norm() / exact.norm()) for each in found)


def table() -> Table:
    heads = (f"{name}, {samples} runs" for samples in RUNS for name in ESTIMATES)
    return Table(
        "accuracy",
        ("model, photo, baseline, score", *heads),
        tuple((str(setting),) for setting in SETTINGS),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", help="a part of the names of the rows to run")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="captum")
    missing = {name for name, package in PEERS.items() if version(package) is None}
    print(table().head())
    for setting in SETTINGS[:1] if options.quick else SETTINGS:
        if options.rows not in str(setting):
            continue
        model = known(setting)
        cells = []
        exact = values(model, KernelSHAP(2**REGIONS, COLUMNS))
        for samples in RUNS:
            for name in ESTIMATES:
                if name in missing:
                    cells.append("not installed")
                    continue
                figure = off(model, exact, name, samples, 2 if options.quick else options.seeds)
                cells.append(shown(figure))
                goal = GOALS.get(str(setting), {}).get(samples)
                if (
                    name == "kernelshap"
                    and goal is not None
                    and figure > goal
                    and not options.quick
                ):
                    print(f"over the goal of {goal}: {setting}, {samples} runs", file=sys.stderr)
        print(line([str(setting), *cells]), flush=True)


if __name__ == "__main__":
    main()
