"""What an attribution costs that keeps its graph, with the backward pass through it: a step of
training on it.

    python examples/benchmarks/graphs.py [--rounds 5] [--threads 1] [--quick]

ResNet-18 on four images. Each figure is the median over the rounds of the time of
``attribute(create_graph=True)`` and ``values.square().sum().backward()``, divided by that of the
detached attribution, and by that of the same double backward pass in plain torch where a formula is
short. In brackets: the peak of memory, in the same way.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
import torchvision
from tables import Table, line, shown
from timing import interleaved, peak_bytes, ratio
from torch import nn

import explain
from explain.methods import IntegratedGradients

METHODS = ("saliency", "integratedgradients(steps=4)", "gradcam", "guidedbackprop", "lrp")


def table() -> Table:
    columns = ("training on maps of ResNet-18", "by the detached map", "by plain torch")
    return Table("graphs", columns, tuple((f"`{name}`",) for name in METHODS))


def saliency(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x)[:, 1].sum(), x, create_graph=True)[0].abs()


def integrated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows = torch.cat([x * (step + 0.5) / 4 for step in range(4)]).requires_grad_()
    gradients = torch.autograd.grad(model(rows)[:, 1].sum(), rows, create_graph=True)[0]
    return x * gradients.reshape(4, *x.shape).mean(0)


def gradcam(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    maps = []
    handle = model.layer4.register_forward_hook(lambda module, args, output: maps.append(output))  # type: ignore[union-attr,operator]
    score = model(x)[:, 1].sum()
    handle.remove()
    gradients = torch.autograd.grad(score, maps[0], create_graph=True)[0]
    return (gradients.mean((2, 3), keepdim=True) * maps[0]).sum(1).relu()


PLAIN = {"saliency": saliency, "integratedgradients(steps=4)": integrated, "gradcam": gradcam}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small and quick, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", explain.ExplainWarning)
    model = torchvision.models.resnet18().eval()
    x = torch.randn(4, 3, *[32 if options.quick else 112] * 2)

    def trained(values: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def work() -> None:
            values().square().sum().backward()
            model.zero_grad()

        return work

    def detached(method: object) -> Callable[[], object]:
        return lambda: explain.attribute(model, x, method, target=1)

    def attached(method: object) -> Callable[[], torch.Tensor]:
        return lambda: explain.attribute(model, x, method, target=1, create_graph=True).values

    def by_hand(
        plain: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    ) -> Callable[[], torch.Tensor]:
        return lambda: plain(model, x)

    print(table().head())
    for name in METHODS:
        method = (
            IntegratedGradients(steps=4, rule="midpoint") if name.startswith("integrated") else name
        )
        works = {"detached": detached(method), "graph": trained(attached(method))}
        if name in PLAIN:
            works["plain"] = trained(by_hand(PLAIN[name]))
        took = interleaved(works, 1 if options.quick else options.rounds)
        peaks = {each: peak_bytes(work) for each, work in works.items()}
        cells = [
            f"{shown(ratio(took, 'graph', other))} ({shown(peaks['graph'] / peaks[other])})"
            if other in works
            else "–"
            for other in ("detached", "plain")
        ]
        print(line([f"`{name}`", *cells]), flush=True)


if __name__ == "__main__":
    main()
