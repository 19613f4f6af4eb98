"""What it costs to record a pass: seconds by a pass with gradients, and memory by what autograd
keeps.

    python examples/benchmarks/recording.py [--networks resnet50 swin_t] [--rounds 9]

Random weights, one photo of 224 x 224, one thread. "replay" is the largest difference between a
recording replayed on another photo and the network itself, with the same kernels.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from explain._utils.html import aligned
from explain.hooks import record
from explain.recording import Recording

sys.path.insert(0, str(Path(__file__).parent))

from timing import interleaved, ratio

NETWORKS = ["resnet18", "resnet50", "mobilenet_v3_small", "efficientnet_b0", "densenet121"]
NETWORKS += ["convnext_tiny", "vit_b_32", "swin_t"]


def kept_by_autograd(model: nn.Module, x: Tensor) -> int:
    """Return the bytes that the graph of a pass keeps, without the model's own tensors."""
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x.clone().requires_grad_())
    del output
    for tensor in [*model.parameters(), *model.buffers()]:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def kept_by_recording(model: nn.Module, recording: Recording) -> int:
    """Return the bytes that a recording keeps, without the model's own tensors."""
    sizes = {}
    for step in recording.steps:
        for value in step.results:
            if value is not None and value.kept is not None:
                storage = value.kept.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    for tensor in [*model.parameters(), *model.buffers()]:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        ("network", "operations", "time by bare", "time by grad", "ms each", "memory", "replay")
    ]
    for name in options.networks:
        torch.manual_seed(0)
        model = torchvision.models.get_model(name, weights=None).eval()
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1)  # a head of zeros would hide everything
        x, other = torch.rand(1, 3, 224, 224), torch.rand(1, 3, 224, 224)

        def bare(model: nn.Module = model, x: Tensor = x) -> Tensor:
            with torch.no_grad():
                return model(x)

        def with_graph(model: nn.Module = model, x: Tensor = x) -> Tensor:
            return model(x.clone().requires_grad_())

        def recorded(model: nn.Module = model, x: Tensor = x) -> Recording:
            return record(model, x)

        works = {"bare": bare, "grad": with_graph, "record": recorded}
        seconds = interleaved(works, options.rounds)
        recording = recorded()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            off = float((recording.replay(other) - model(other)).abs().max())
        extra = min(seconds["record"]) - min(seconds["grad"])
        memory = kept_by_recording(model, recording) / kept_by_autograd(model, x)
        rows.append(
            (
                name,
                str(len(recording)),
                f"{ratio(seconds, 'record', 'bare'):.2f}",
                f"{ratio(seconds, 'record', 'grad'):.2f}",
                f"{1000 * extra / len(recording):.3f}",
                f"{memory:.2f}",
                f"{off:.1e}",
            )
        )
    print("\n".join(aligned(rows, to_the_right=range(1, 7))))


if __name__ == "__main__":
    main()
