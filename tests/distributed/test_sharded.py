"""Models that FSDP shards: every method is right, or refused before anything runs."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import explain
from explain.methods import Smooth

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system"),
    pytest.mark.filterwarnings("ignore:This process .*is multi-threaded:DeprecationWarning"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()


def sharded_twice(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[3], model[7]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_flat(model: Any) -> Any:
    policy = ModuleWrapPolicy({nn.Conv2d, nn.Linear})
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=policy)


def outcome(call: Callable[[], Any]) -> str:
    try:
        return "right" if call() else "WRONG"
    except explain.ExplainError:
        return "refused"


def work(rank: int, size: int, folder: Path) -> None:
    """What one rank does: it explains models that are sharded in two ways, and writes what came of
    it."""
    warnings.simplefilter("ignore")  # FullyShardedDataParallel is deprecated
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    plain = network()
    x = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    late = ["lrp", "cam", Smooth("lrp", samples=2)]

    def same(model: Any, method: Any, **options: Any) -> bool:
        found = explain.attribute(model, x, method, **options).values
        expected = explain.attribute(plain, x, method, **options).values
        return torch.allclose(found, expected, rtol=1e-4, atol=1e-7)

    def same_for_two(model: Any) -> bool:
        return same(model, "gradcam", target=1) and same(model, "guidedgradcam", target=1)

    outcomes = []
    for shard in (sharded_twice, sharded_flat):
        found = []
        for method in ["gradcam", "guidedbackprop", "deeplift", "scorecam", *late]:
            model = shard(network())
            found.append(outcome(partial(same, model, method, target=1)))
        model = shard(network())
        found.append(outcome(partial(same_for_two, model)))
        derivative = partial(explain.attribute, model, x, "saliency", target=1, create_graph=True)
        found.append(outcome(derivative))
        found.append(outcome(partial(explain.evaluate, model, x, "saliency", "mprt")))
        found.append(outcome(partial(same, model, "saliency", target=1)))
        outcomes.append(found)
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_methods_on_sharded_models_are_right_or_refused(size: int, tmp_path: Path) -> None:
    importlib.import_module("torch._dynamo")  # which is slow, and needed in every rank
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=work, args=(rank, size, tmp_path)) for rank in range(size)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(120)
    finally:
        for process in ranks:
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * size
    of_sharded, of_flat = json.loads((tmp_path / "0.json").read_text())
    right = ["right"]
    refused = ["refused"]
    assert of_sharded == [*right * 4, *refused * 3, *right, *refused * 2, *right]
    assert of_flat == (
        [*right * 9, *refused, *right] if size == 1 else [*right * 4, *refused * 6, *right]
    )
