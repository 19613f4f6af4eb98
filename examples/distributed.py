"""Train a small network in two processes, and see what each way of exchanging gradients costs and
changes.

    python examples/distributed.py                    two processes on this machine, 20 steps, a few
                                                      seconds
    python examples/distributed.py --processes 4

Each process learns from images of its own; DistributedDataParallel averages their gradients, and
`communicate` chooses how they travel. The same training is run with torch's own ways, with two
codecs, and with a hook in PyTorch's form. The last codec fails in one process on purpose: all of
them end with its message, and none waits for ever.

The table has, for each way, the size of the gradients, what a codec made of it, the loss of the
last step, and how far the weights are from those of the plain all-reduce. It is printed; nothing is
written.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

from explain import HookError
from explain.distributed.communication import Codec, Recorder, communicate

SIDE = 8
BATCH = 16
CLASSES = 4


def half(bucket: torch.Tensor) -> torch.Tensor:
    return bucket.half()


def single(sent: torch.Tensor) -> torch.Tensor:
    return sent.float()


def one_byte(bucket: torch.Tensor) -> torch.Tensor:
    """One byte for each value: gradients here are small, and beyond 1/2 in magnitude they are cut
    off."""
    return (bucket * 256).round().clamp(-127, 127).char()


def fails_in_the_last(bucket: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("this process cannot encode")
    return bucket


def in_double(state: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook in PyTorch's own form: it averages in double precision, and counts its calls."""
    state["calls"] += 1
    share = bucket.buffer().double() / dist.get_world_size()
    future = dist.all_reduce(share, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].float())


WAYS: dict[str, Any] = {
    "allreduce": "allreduce",
    "fp16": "fp16",
    "bf16": "bf16",
    "codec: halves, gathered": Codec(half, single),
    "codec: halves, all-reduced": Codec(half, single, all_reduce=True),
    "codec: one byte a value": Codec(one_byte, lambda sent: sent.float() / 256),
    "hook (state, bucket)": in_double,
    "codec that fails": Codec(fails_in_the_last, single),
}


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise with one bright quarter, to be told by which quarter it is."""
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    pixels = torch.randn(BATCH, 1, SIDE, SIDE, generator=generator)
    edge = SIDE // 2
    for image, label in zip(pixels, labels.tolist(), strict=True):
        top = edge * (label // 2)
        left = edge * (label % 2)
        image[:, top : top + edge, left : left + edge] += 1
    return pixels, labels


def train(how: Any, steps: int) -> tuple[torch.Tensor, float, Recorder]:
    """Train in this process, together with the others; return the weights, the last loss and what
    was sent."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * (SIDE - 2) ** 2, CLASSES)
    )
    parallel = DistributedDataParallel(model)
    recorder = communicate(parallel, how, state={"calls": 0} if how is in_double else None)
    solver = torch.optim.SGD(parallel.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x, y = batch(generator)
        solver.zero_grad()
        loss = F.cross_entropy(parallel(x), y)
        loss.backward()
        solver.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), loss.item(), recorder


def work(rank: int, processes: int, steps: int, folder: str) -> None:
    """Train in every way, as one process of several; the first one writes down what came of it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=Path(folder, "meeting").as_uri(), rank=rank, world_size=processes
    )
    plain, _, _ = train("allreduce", steps)
    rows = []
    for name, how in WAYS.items():
        try:
            weights, loss, recorder = train(how, steps)
        except HookError as error:
            rows.append(f"{name:<28} {error}")
            continue
        sent = [one.bytes_sent for one in recorder.buckets]
        told = f"{sum(sent) / 1e3:9.1f}" if None not in sent else f"{'-':>9}"
        size = sum(one.bytes for one in recorder.buckets) / 1e3
        change = ((weights - plain).norm() / plain.norm()).item()
        rows.append(f"{name:<28} {size:9.1f} {told} {loss:9.3f} {change:9.1e}")
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows), "utf-8")
    dist.barrier()  # a process that leaves early takes its connections with it
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.processes < 1 or options.steps < 1:
        parser.error("--processes and --steps must be at least 1")
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (options.processes, options.steps, folder), options.processes)
        rows = json.loads(Path(folder, "rows.json").read_text("utf-8"))
    print(
        f"{options.processes} processes, {options.steps} steps; kB of gradients of each process, "
        "and of what it sent"
    )
    print(f"{'':<28} {'gradients':>9} {'encoded':>9} {'loss':>9} {'change':>9}")
    print("\n".join(rows))


if __name__ == "__main__":
    try:
        main()
    except (OSError, ProcessRaisedException, ProcessExitedException) as error:
        sys.exit(f"distributed.py: {str(error).strip().splitlines()[-1]}")
