"""Models that FSDP shards: every method is right, or refused before anything runs."""

from __future__ import annotations

import os
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
from torch.testing import assert_close

import explain
from explain.methods import Smooth
from tests.distributed.test_communication import begin, of_ranks

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


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except explain.ExplainError:
        return "refused"
    return "right"


METHODS = [
    "gradcam",
    "guidedbackprop",
    "deeplift",
    "scorecam",
    "lrp",
    "cam",
    Smooth("lrp", samples=2),
]


def work(rank: int, size: int, folder: Path) -> list[list[str]]:
    """What came of explaining models that are sharded in two ways, in one rank."""
    begin(rank, size, folder)
    plain = network()
    x = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def same(model: Any, *methods: Any) -> None:
        for method in methods:
            # where cells look is not known of weights that are there during the pass alone
            sharded, expected = (
                explain.attribute(net, x, method, target=1, placement="even").values
                for net in (model, plain)
            )
            assert_close(sharded, expected, rtol=1e-4, atol=1e-7)

    with pytest.warns(explain.ExplainWarning, match="evenly"):
        explain.attribute(sharded_twice(network()), x, target=1)
    outcomes = []
    for shard in (sharded_twice, sharded_flat):
        of_model = [outcome(partial(same, shard(network()), method)) for method in METHODS]
        model = shard(network())
        of_model += [
            outcome(partial(same, model, "gradcam", "guidedgradcam")),
            outcome(partial(explain.attribute, model, x, "saliency", target=1, create_graph=True)),
            outcome(partial(explain.evaluate, model, x, "saliency", "mprt")),
            outcome(partial(same, model, "saliency")),
        ]
        outcomes.append(of_model)
    dist.destroy_process_group()
    return outcomes


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_methods_on_sharded_models_are_right_or_refused(size: int, tmp_path: Path) -> None:
    of_sharded, of_flat = of_ranks(size, partial(work, size=size, folder=tmp_path))[0]
    right = ["right"]
    refused = ["refused"]
    walking_back = [*refused * 2]  # over the recording, which reads weights after the pass
    assert of_sharded == [*right, *walking_back, *right, *refused * 6, *right]
    assert of_flat == (
        [*right * 9, *refused, *right]
        if size == 1
        else [*right, *walking_back, *right, *refused * 6, *right]
    )
