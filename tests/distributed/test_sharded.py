"""Models that FSDP shards: every method is right, or refused before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import os, sys, warnings
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
import explain
from explain.methods import Smooth

folder, size = sys.argv[1], int(sys.argv[2])
child = os.fork() if size > 1 else 0
torch.set_num_threads(1)
warnings.simplefilter("ignore")  # FullyShardedDataParallel is deprecated
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=1 if child else 0, world_size=size)

def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()

def sharded_twice(model):
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model[0], model[3], model[7]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def sharded_flat(model):
    policy = ModuleWrapPolicy({nn.Conv2d, nn.Linear})
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=policy)

def same(model, plain, method, x, **options):
    found = explain.attribute(model, x, method, **options).values
    expected = explain.attribute(plain, x, method, **options).values
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-7)

def outcome(call):
    try:
        return "right" if call() else "WRONG"
    except explain.ExplainError:
        return "refused"

plain, x = network(), torch.rand(2, 3, 16, 16)
LATE = ["lrp", "cam", Smooth("lrp", samples=2)]
lines = []
for shard in (sharded_twice, sharded_flat):
    for method in ["gradcam", "guidedbackprop", "deeplift", "scorecam", *LATE]:
        model = shard(network())
        lines.append(outcome(lambda: same(model, plain, method, x, target=1)))
    model = shard(network())
    lines.append(outcome(lambda: same(model, plain, "gradcam", x, target=1) and same(
        model, plain, "guidedgradcam", x, target=1)))
    lines.append(outcome(lambda: explain.attribute(model, x, "saliency", target=1, create_graph=True)))
    lines.append(outcome(lambda: explain.evaluate(model, x, "saliency", "mprt")))
    lines.append(outcome(lambda: same(model, plain, "saliency", x, target=1)))
    lines.append("-")
if not child:
    print(" ".join(lines))
dist.destroy_process_group()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_methods_on_sharded_models_are_right_or_refused(size: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKER, str(tmp_path), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    of_sharded, of_flat, _ = done.stdout.split("-")
    right, refused = ["right"], ["refused"]
    assert of_sharded.split() == [*right * 4, *refused * 3, *right, *refused * 2, *right]
    flat = [*right * 9, *refused, *right] if size == 1 else [*right * 4, *refused * 6, *right]  # one holds all of it
    assert of_flat.split() == flat
