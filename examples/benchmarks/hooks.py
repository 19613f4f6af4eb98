"""What hooks cost on resnet50: on every module, forward and backward, and a model cut off behind a
layer.

    python examples/benchmarks/hooks.py [--rounds 15] [--batches 1 8] [--threads 2] [--json file]
    [--quick]

Each figure is the median of the ratios to the bare run next to it, in the same process, of the same
weights; memory is the peak of what torch allocates, by that of the bare run. The hooks do nothing,
so what is seen is the cost of the layer. Forward passes are in inference mode or without gradients;
a step of training is forward, loss and backward.

PyTorch's own full-backward hooks refuse a network that works in place: they are timed on a copy
whose rectifiers do not, and not on the layers to whose output the shortcuts are added in place.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from tables import Table, line
from timing import interleaved, peak_bytes, ratio
from torch import nn

from explain import hooks

FORWARD = 1.05
BACKWARD = 1.15
FEATURES = 1.05


# What is published of the rows, for the batches that are run unless told otherwise.
PUBLISHED = (
    "forward hooks on all modules",
    "full-backward hooks on all modules",
    "FeatureExtractor up to layer2, by those layers alone",
)
BATCHES = [1, 8]


def table() -> Table:
    heads = (f"{batch} image{'s' if batch > 1 else ''}" for batch in BATCHES)
    return Table("hooks", ("hooks on ResNet-50", *heads), tuple((what,) for what in PUBLISHED))


@dataclass(frozen=True)
class Row:
    what: str
    batch: int
    bare_ms: float
    time: float
    memory: float
    goal: float | None = None

    def __str__(self) -> str:
        verdict = (
            ""
            if self.goal is None
            else f"{self.goal:>6.2f}  {'ok' if self.time <= self.goal else 'over'}"
        )
        line = (
            f"{self.what:<58} {self.batch:>5} {self.bare_ms:>8.1f} {self.time:>6.3f} "
            f"{self.memory:>7.2f} {verdict}"
        )
        return line.rstrip()


@dataclass(frozen=True)
class Bench:
    """Measures works against the bare one among them."""

    batch: int
    rounds: int

    def rows(
        self, bare: Callable[[], object], works: dict[str, Callable[[], object]], goal: float | None
    ) -> list[Row]:
        seconds = interleaved({"bare": bare} | works, self.rounds)
        plain = 1e3 * statistics.median(seconds["bare"])
        memory = peak_bytes(bare)
        return [
            Row(
                what,
                self.batch,
                plain,
                ratio(seconds, what, "bare"),
                peak_bytes(work) / memory,
                goal,
            )
            for what, work in works.items()
        ]


def twin(model: nn.Module) -> nn.Module:
    """Return a copy of the modules that shares the parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def forward(bench: Bench, model: nn.Module, x: torch.Tensor) -> list[Row]:
    hooked = twin(model.eval())
    hooks.HookGroup(hooked).forward(nn.Module, lambda module, args, output: None)

    @torch.inference_mode()
    def registering() -> None:
        with hooks.HookGroup(model) as group:
            group.forward(nn.Module, lambda module, args, output: None)
            model(x)

    works: dict[str, Callable[[], object]] = {
        "forward hooks on all modules": torch.inference_mode()(lambda: hooked(x)),
        "forward hooks, registered and removed in each pass": registering,
    }
    return bench.rows(torch.inference_mode()(lambda: model(x)), works, FORWARD)


def step(model: nn.Module, x: torch.Tensor) -> None:
    loss = F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))
    torch.autograd.grad(loss, list(model.parameters()))


def backward(bench: Bench, model: nn.Module, x: torch.Tensor) -> list[Row]:
    hooked = twin(model.train())
    hooks.HookGroup(hooked).backward(nn.Module, lambda module, grad_input, grad_output: None)

    def registering() -> None:
        with hooks.HookGroup(model) as group:
            group.backward(nn.Module, lambda module, grad_input, grad_output: None)
            step(model, x)

    works: dict[str, Callable[[], object]] = {
        "full-backward hooks on all modules": lambda: step(hooked, x),
        "full-backward hooks, registered and removed in each step": registering,
    }
    return bench.rows(lambda: step(model, x), works, BACKWARD)


def backward_of_torch(bench: Bench, model: nn.Module, x: torch.Tensor) -> list[Row]:
    """Time PyTorch's own full-backward hooks where they can be."""
    # for the pixels, which need no gradient
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    plain = twin(model.train())
    for module in plain.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    hooked = twin(plain)
    ours = twin(plain)
    chosen = [name for name, _ in plain.named_modules() if not name.endswith("bn3")]
    for name in chosen:
        hooked.get_submodule(name).register_full_backward_hook(
            lambda module, grad_input, grad_output: None
        )
    hooks.HookGroup(ours).backward(chosen, lambda module, grad_input, grad_output: None)
    works: dict[str, Callable[[], object]] = {
        "not in place, without bn3: PyTorch's own full-backward": lambda: step(hooked, x),
        "not in place, without bn3: full-backward hooks": lambda: step(ours, x),
    }
    return bench.rows(lambda: step(plain, x), works, None)


def refusal_of_torch(model: nn.Module, x: torch.Tensor) -> str:
    """Return what PyTorch's own full-backward hooks say of the network as it is."""
    hooked = twin(model.train())
    for module in hooked.modules():
        module.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    try:
        step(hooked, x)
    except RuntimeError as error:
        return str(error).split(". ")[0]
    return "works"


def features(bench: Bench, model: nn.Module, x: torch.Tensor) -> list[Row]:
    model.eval()
    extractor = hooks.FeatureExtractor(model, "layer2")
    children = dict(model.named_children())
    first = [children[name] for name in ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2")]

    @torch.no_grad()
    def by_hand() -> torch.Tensor:
        y = x
        for module in first:
            y = module(y)
        return y

    return bench.rows(
        by_hand,
        {"FeatureExtractor up to layer2, by those layers alone": lambda: extractor(x)},
        FEATURES,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--quick", action="store_true", help="on tiny images, three rounds: does it run at all?"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    model = torchvision.models.resnet50()
    rounds, side = (3, 64) if options.quick else (options.rounds, 224)
    print(
        "PyTorch's own full-backward hooks on all modules: "
        f"{refusal_of_torch(model, torch.randn(2, 3, side, side))}\n"
    )
    print(f"{'':<58} {'batch':>5} {'bare ms':>8} {'time':>6} {'memory':>7} {'goal':>6}")
    found: list[Row] = []
    for batch in options.batches:
        x = torch.randn(batch, 3, side, side)
        # A forward pass is short: it is run more often, so that one disturbance less matters.
        for measure, times in ((forward, 3), (features, 3), (backward, 1), (backward_of_torch, 1)):
            rows = measure(Bench(batch, times * rounds), model, x)
            found += rows
            print(*rows, sep="\n", flush=True)
    if options.batches == BATCHES:
        print(f"\n{table().head()}")
        times = {(row.what, row.batch): f"{row.time:.2f}" for row in found}
        for what in PUBLISHED:
            print(line([what, *(times[what, batch] for batch in BATCHES)]))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
