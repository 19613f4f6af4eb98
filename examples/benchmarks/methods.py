"""What every method costs, in bare forward passes of the model: assets/tables/methods.md.

The documentation's table of all methods takes its costs from there.

    python examples/benchmarks/methods.py [--rounds 5] [--model resnet18] [--methods "*cam"]
    [--quick]

One 224 px image, two CPU threads unless told. Each method runs in turn with a bare pass in
inference mode, and its figure is the median over the rounds of its time by that of the bare pass;
one that takes over 100 runs once. Those for transformers alone run on a ViT. Weights are random:
what a method costs hardly depends on them.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
import torchvision
from tables import Table, line
from timing import interleaved, ratio
from torch import nn

import explain
from explain.methods import Method, list_methods
from explain.methods.base import get_method


def table() -> Table:
    rows = tuple((f"`{name}`",) for name in list_methods())
    return Table("methods", ("name", "cost"), rows)


class AsDetector(nn.Module):
    """A classifier that says of its best class that it is seen everywhere."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        scores, labels = self.model(x).softmax(1).max(1)
        box = torch.tensor([[0.0, 0.0, x.shape[3], x.shape[2]]])
        found = zip(labels, scores, strict=True)
        return [
            {"boxes": box, "labels": label[None], "scores": score[None]} for label, score in found
        ]


class WithQueries(nn.Module):
    """A transformer whose answer is read by ten queries that look at a photo's tokens, as in a
    detector."""

    def __init__(self, encoder: torchvision.models.VisionTransformer) -> None:
        super().__init__()
        width = encoder.hidden_dim
        layer = nn.TransformerDecoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True)
        self.patches, self.decoder = encoder.conv_proj, nn.TransformerDecoder(layer, 6)
        self.queries = nn.Parameter(torch.randn(1, 10, width))
        self.head = encoder.heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        found: torch.Tensor = self.head(
            self.decoder(self.queries.expand(len(x), -1, -1), tokens)[:, 0]
        )
        return found


def cost(
    model: nn.Module, x: torch.Tensor, method: Method, rounds: int, target: Any = None
) -> float:
    """The time of a method by that of a bare pass of all images."""

    def bare() -> object:
        with torch.inference_mode():
            return model(x)

    def run() -> object:
        return explain.attribute(model, x, method, target=target)

    passes = statistics.median(interleaved({"bare": bare}, 5)["bare"])
    start = time.perf_counter()
    run()
    once = (time.perf_counter() - start) / passes
    return (
        once
        if once > 100
        else ratio(interleaved({"bare": bare, "method": run}, rounds), "method", "bare")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--model",
        default="resnet18",
        help="any of torchvision's that ends in a pool and a linear layer",
    )
    parser.add_argument("--methods", default="*", help="a glob pattern of names")
    parser.add_argument("--quick", action="store_true", help="small and quick, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # a network of random weights may have nothing to say
    warnings.simplefilter("ignore", explain.ExplainWarning)
    side, rounds = (64, 1) if options.quick else (224, options.rounds)
    model = torchvision.models.get_model(options.model).eval()
    x = torch.randn(1, 3, side, side)
    transformer = torchvision.models.VisionTransformer(side, 16, 6, 6, 384, 1536).eval()
    torch.nn.init.normal_(transformer.heads.head.weight, std=0.1)
    queries = WithQueries(transformer).eval()
    print(table().head())
    for method in map(get_method, list_methods(options.methods)):
        only_for = method.only_for
        if "detected boxes" in only_for:
            figure = cost(AsDetector(model), x, method, rounds, target=explain.targets.Detections())
        else:
            suited = (
                queries
                if "other tokens" in only_for
                else transformer
                if "transformers" in only_for
                else model
            )
            figure = cost(
                suited, x.repeat(2, 1, 1, 1) if "batches" in only_for else x, method, rounds
            )
        shown = f"{figure:.0f}" if figure > 20 else f"{figure:.1f}"
        print(line([f"`{method.name}`", shown]), flush=True)


if __name__ == "__main__":
    main()
