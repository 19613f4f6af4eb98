"""What gradient methods cost by the same gradients in a plain loop of torch, with one thread.

    python examples/benchmarks/gradients.py [--models resnet18] [--rounds 5] [--side 128] [--quick]

Everything runs in turn in one process; a figure is the median over the rounds of the ratio of
processor times, with their range. The plain loop has frozen weights, as many photos in a batch and
the memory layout as are fastest there; it adds up gradients, and computes neither points nor
weights, nor the score of the photo and of the baseline. Nor does it check that the photos of a
batch do not depend on each other, for which explain runs one photo alone and another one beside the
first batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from tables import Table, line
from timing import interleaved

import explain
from explain.methods import ExpectedGradients, IntegratedGradients, Saliency, Smooth

MODELS = ("resnet18",)
BATCHES = (4, 8, 16)
METHODS = ("saliency", "guidedbackprop")
LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}


def work_of(model: str, method: str) -> str:
    return f"{model}, `{method}`"


def table() -> Table:
    names = (*METHODS, "integratedgradients", "smoothgrad", "expectedgradients")
    head = ("gradients", "by plain torch", "each pass, by one photo of the batched forward pass")
    return Table(
        "gradients", head, tuple((work_of(model, name),) for model in MODELS for name in names)
    )


def by_hand(
    model: torch.nn.Module, x: torch.Tensor, rows: int, batch: int, layout: str
) -> Callable[[], torch.Tensor]:
    """The sum of the gradients in the pixels of so many rows."""

    def work() -> torch.Tensor:
        found = torch.zeros_like(x)
        for start in range(0, rows, batch):
            size = min(batch, rows - start)
            pixels = (
                x.repeat(size, 1, 1, 1).contiguous(memory_format=LAYOUTS[layout]).requires_grad_()
            )
            found += torch.autograd.grad(model(pixels)[:, 1].sum(), pixels)[0].sum(0, keepdim=True)
        return found

    return work


def forward(
    model: torch.nn.Module, x: torch.Tensor, batch: int, layout: str
) -> Callable[[], object]:
    rows = x.repeat(batch, 1, 1, 1).contiguous(memory_format=LAYOUTS[layout])

    def work() -> object:
        with torch.inference_mode():
            return model(rows)

    return work


def fastest(
    works: dict[tuple[int, str], Callable[[], object]],
    per: Callable[[int], float] = lambda batch: 1,
) -> tuple[int, str]:
    """The batch size and layout with the least time for each photo; ``per`` is how many photos a
    batch size runs."""
    named = {f"{batch} {layout}": work for (batch, layout), work in works.items()}
    seconds = dict(zip(works, interleaved(named, 2, time.process_time).values(), strict=True))
    return min(seconds, key=lambda key: min(seconds[key]) / per(key[0]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=128, help="of the photos in pixels")
    parser.add_argument(
        "--quick", action="store_true", help="small and quick, to see that everything runs"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    side, rows, rounds = (64, 4, 1) if options.quick else (options.side, 50, options.rounds)
    print(table().head())
    for name in options.models:
        torch.manual_seed(0)
        model = torchvision.models.get_model(name, weights=None).eval()
        frozen = torchvision.models.get_model(name, weights=None).eval().requires_grad_(False)
        frozen.load_state_dict(model.state_dict())
        x = torch.randn(1, 3, side, side)
        best = fastest({(b, w): by_hand(frozen, x, rows, b, w) for b in BATCHES for w in LAYOUTS})
        passes = {(b, w): forward(frozen, x, b, w) for b in BATCHES for w in LAYOUTS}
        quick = fastest(passes, float)
        loops: dict[str, Any] = {
            "integratedgradients": IntegratedGradients(rows),
            "smoothgrad": Smooth(Saliency(absolute=False), samples=rows),
            "expectedgradients": ExpectedGradients(samples=rows),
        }
        works: dict[str, Callable[[], object]] = {
            "pass": passes[quick],
            "one": by_hand(model, x, 1, 1, "channels first"),
        }
        works |= {each: partial(explain.attribute, model, x, each, target=1) for each in METHODS}
        works |= {"loop": by_hand(frozen, x, rows, *best)}
        works |= {
            key: partial(explain.attribute, model, x, each, target=1) for key, each in loops.items()
        }
        for _ in range(2):  # until batch sizes are found
            for key in loops:
                works[key]()
        seconds = interleaved(works, rounds, time.process_time)
        for key in (*METHODS, *loops):
            count, plain = (1, "one") if key in METHODS else (rows, "loop")
            ratios = [a / b for a, b in zip(seconds[key], seconds[plain], strict=True)]
            per = [
                quick[0] * a / b / count for a, b in zip(seconds[key], seconds["pass"], strict=True)
            ]
            told = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(line([work_of(name, key), told, f"{statistics.median(per):.2f}"]), flush=True)
        per = [
            quick[0] * a / b / rows for a, b in zip(seconds["loop"], seconds["pass"], strict=True)
        ]
        print(
            f"the loop: {best[0]} photos, {best[1]}, each {statistics.median(per):.2f} of the "
            "pass; "
            f"the pass: {quick[0]} photos, {quick[1]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
