"""Methods on a GPU next to the CPU: the largest difference of their values, and how often a warm
call waits.

    python examples/benchmarks/gpu.py [--device cuda] [--methods '*cam*']

Values are computed in float64, and their difference is a share of the largest value. A call waits
where the processor needs a number from the GPU, as `torch.cuda.set_sync_debug_mode` says; that of a
forward and a backward pass alone is the first line. Milliseconds are those of a warm call in
float32 on the same network, with the GPU finished.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

import explain
from explain.attribution.selection import select

CALLS = 10


class Network(nn.Module):
    """Convolutions, batch normalisation, an addition, an attention over places, and a linear
    head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.last = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.block(x))
        return self.head(self.last(x).mean((2, 3)))


def network() -> nn.Module:
    torch.manual_seed(0)
    model = Network().eval()
    model.stem[1].running_mean.uniform_(-0.5, 0.5)  # type: ignore[operator]
    model.stem[1].running_var.uniform_(0.5, 2)  # type: ignore[operator]
    return model


def waits(work: Callable[[], object]) -> int:
    """How often a piece of work waits for the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def milliseconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(seconds)


def passes(model: nn.Module, x: torch.Tensor) -> None:
    torch.autograd.grad(model(x)[:, 1].sum(), list(model.parameters()))


def difference(method: str, device: str, x: torch.Tensor) -> float:
    """The largest difference between the values on a device and those on the CPU, as a share of the
    largest value."""

    def values(where: str) -> torch.Tensor:
        attribution: explain.Attribution = explain.attribute(
            network().double().to(where), x.double().to(where), method, target=1
        )
        return attribution.values.cpu()

    on_cpu = values("cpu")
    largest = float(on_cpu.abs().max()) or 1.0
    return float((values(device) - on_cpu).abs().max()) / largest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--methods", default="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    x = torch.rand(1, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    model = network().to(options.device)
    x_there = x.to(options.device)
    print(f"{torch.cuda.get_device_name(options.device)}, torch {torch.__version__}")
    print("| method | largest difference | waits | ms |")
    print("|---|---|---|---|")
    passes(model, x_there)
    alone = waits(lambda: passes(model, x_there))
    print(
        f"| a forward and a backward pass | | {alone} | "
        f"{milliseconds(lambda: passes(model, x_there)):.2f} |"
    )
    fitting = select(network(), x, "everything", target=1).methods
    for method in [name for name in explain.list_methods(options.methods) if name in fitting]:

        def work(name: str = method) -> None:
            explain.attribute(model, x_there, name, target=1)

        try:
            off = difference(method, options.device, x)
            work()
            print(
                f"| `{method}` | {off:.0e} | {waits(work)} | {milliseconds(work):.2f} |", flush=True
            )
        except Exception as error:
            print(f"| `{method}` | {type(error).__name__}: {str(error)[:100]} | | |", flush=True)


if __name__ == "__main__":
    main()
