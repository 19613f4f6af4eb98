"""What two methods cost together, by the sum of what they cost alone: what they share is done once.

    python examples/benchmarks/pairs.py [--rounds 5] [--threads 2] [--quick]

ResNet-18 on one 224 px image. In each round, both run alone and together, in turn; a figure is the
median over the rounds of the time together by the sum. The goal is at most 1.05 for every pair.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable

import torch
import torchvision
from tables import Table, line, shown
from timing import interleaved

import explain

GOAL = 1.05
PAIRS = (
    ("gradcam", "eigencam"),
    ("gradcam", "saliency"),
    ("gradcam", "ablationcam"),
    ("shapleycam", "refinecam"),
    ("shapleycam", "saliency"),
    ("saliency", "guidedbackprop"),
    ("guidedbackprop", "deconvnet"),
    ("fullgrad", "inputxgradient"),
    ("smoothgrad", "vargrad"),
    ("smoothgrad", "integratedgradients"),
    ("smoothgrad", "smoothgradcam++"),
    ("scorecam", "ablationcam"),
)


def label(pair: tuple[str, str]) -> str:
    return " + ".join(f"`{name}`" for name in pair)


def table() -> Table:
    columns = (
        "two methods, on ResNet-18",
        "together, by the sum of both",
        "the first",
        "the second",
        "together",
    )
    return Table("pairs", columns, tuple((label(pair),) for pair in PAIRS))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="small and quick, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    # a network of random weights may have nothing to say
    warnings.simplefilter("ignore", explain.ExplainWarning)
    model = torchvision.models.resnet18().eval()
    x = torch.randn(1, 3, *[32 if options.quick else 224] * 2)

    def bare() -> object:
        with torch.inference_mode():
            return model(x)

    def work(*names: str) -> Callable[[], object]:
        return lambda: explain.attribute(model, x, list(names), target=1)

    print(table().head())
    for pair in PAIRS:
        works = {
            "bare": bare,
            "first": work(pair[0]),
            "second": work(pair[1]),
            "together": work(*pair),
        }
        took = interleaved(works, 1 if options.quick else options.rounds)
        rounds = zip(took["together"], took["first"], took["second"], strict=True)
        figure = statistics.median(
            together / (first + second) for together, first, second in rounds
        )
        passes = [
            statistics.median(took[name]) / statistics.median(took["bare"])
            for name in works
            if name != "bare"
        ]
        print(line([label(pair), shown(figure), *map(shown, passes)]), flush=True)
        if figure > GOAL:
            print(f"over the goal of {GOAL}: {label(pair)}", file=sys.stderr)


if __name__ == "__main__":
    main()
