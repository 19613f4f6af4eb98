"""What interventions cost on resnet18: one of them by a plain hook, and a trace by forward passes
of as many photos.

    python examples/benchmarks/interventions.py [--rounds 5] [--side 224] [--threads 1] [--quick]

Each figure is the median of the ratios to the baseline that runs next to it. The baseline of an
intervention is a hook of PyTorch that makes the same change. That of a trace is what its patches
would cost as photos: as many passes, in batches of the size that is fastest of 4 to 32. The trace
also runs the clean photo, and both photos for the estimate.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torchvision
from tables import Table, line
from timing import interleaved, ratio
from torch import nn

from explain import trace
from explain.hooks import Ablate, Intervention, Steer, intervene

GOALS = {
    "an ablated channel, by a plain hook": 1.02,
    "a layer with a direction added, by a plain hook": 1.02,
    "trace of the 256 channels of layer3, each patch by one of the batched pass": 1.2,
}


def table() -> Table:
    return Table(
        "interventions", ("interventions on ResNet-18", "time"), tuple((what,) for what in GOALS)
    )


def hooked(
    model: nn.Module, x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], object]:
    """A forward pass under a plain hook, which is registered before and removed after it."""

    @torch.inference_mode()
    def work() -> None:
        handle = model.layer3.register_forward_hook(lambda module, args, output: change(output))
        model(x)
        handle.remove()

    return work


def intervened(model: nn.Module, x: torch.Tensor, what: Intervention) -> Callable[[], object]:
    @torch.inference_mode()
    def work() -> None:
        with intervene(model, [what]):
            model(x)

    return work


def without_channel(output: torch.Tensor) -> torch.Tensor:
    found = output.clone()
    found[:, 5] = 0
    return found


def fastest_batch(model: nn.Module, x: torch.Tensor, most: int) -> int:
    """The batch size with the shortest time for each photo."""
    sizes = [size for size in (4, 8, 16, 32) if size <= most]
    works = {
        str(size): torch.inference_mode()(lambda size=size: model(x.expand(size, -1, -1, -1)))
        for size in sizes
    }
    seconds = interleaved(works, 3)
    return min(sizes, key=lambda size: statistics.median(seconds[str(size)]) / size)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--quick", action="store_true", help="on tiny images, one round: does it run at all?"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    rounds, side = (1, 32) if options.quick else (options.rounds, options.side)
    model = torchvision.models.resnet18().eval()
    x, other = torch.randn(2, 1, 3, side, side)
    direction = torch.randn(256)
    works = [
        (hooked(model, x, without_channel), intervened(model, x, Ablate("layer3", channels=[5]))),
        (
            hooked(model, x, lambda output: output + direction[:, None, None]),
            intervened(model, x, Steer("layer3", direction)),
        ),
    ]
    found = [
        ratio(interleaved({"plain": plain, "ours": ours}, 12 * rounds), "ours", "plain")
        for plain, ours in works
    ]

    size = fastest_batch(model, x, 4 if options.quick else 32)

    @torch.inference_mode()
    def passes() -> None:
        for _ in range(256 // size):
            model(x.expand(size, -1, -1, -1).clone())

    traced = {
        "passes": passes,
        "trace": lambda: trace(model, x, other, "channels", layers="layer3", target=1),
    }
    found.append(ratio(interleaved(traced, rounds), "trace", "passes"))
    print(f"{table().head()}")
    for (what, goal), time in zip(GOALS.items(), found, strict=True):
        print(line([what, f"{time:.2f}"]))
        if time > goal and not options.quick:
            print(f"(over the goal of {goal})")


if __name__ == "__main__":
    main()
