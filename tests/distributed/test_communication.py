"""DDP communication hooks with real processes, over gloo on the loopback device."""

from __future__ import annotations

import importlib
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from explain import HookError
from explain.distributed.communication import Codec, Recorder, communicate


def encode_fails_on_the_last_rank(bucket: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ZeroDivisionError("divided by nothing\nand more")
    return bucket


def own_hook(state: Any, bucket: Any) -> Any:
    state["calls"] += 1
    wide = bucket.buffer().double() / state["world"]
    work = dist.all_reduce(wide, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].float())


class Boom:
    def __call__(self, state: Any, bucket: Any) -> Any:
        raise ZeroDivisionError("divided by nothing")


HOWS: dict[str, Any] = {
    "own": own_hook,
    "torch's": allreduce_hook,
    "own fails": Boom(),
    "own gives no future": lambda state, bucket: bucket.buffer(),
    "own takes one": lambda bucket: None,
    "reduced": Codec(lambda bucket: bucket, lambda sent: sent, all_reduce=True),
    "codes reduced": Codec(
        lambda bucket: bucket.char(), lambda sent: sent.float(), all_reduce=True
    ),
    "number": 3,
    "identity": Codec(lambda bucket: bucket, lambda sent: sent),
    "half": Codec(lambda bucket: bucket.half(), lambda sent: sent.float()),
    "encode fails": Codec(encode_fails_on_the_last_rank, lambda sent: sent),
    "decode fails": Codec(
        lambda bucket: bucket, lambda sent: "no tensor" if dist.get_rank() == 0 else sent
    ),
    "shapes differ": Codec(lambda bucket: bucket[dist.get_rank() :], lambda sent: sent),
}


def train(how: str) -> tuple[torch.Tensor, Recorder]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 36, 5)]
    parallel = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.001)
    low_rank = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}
    options = low_rank if how == "powersgd" else {}
    state = {"calls": 0, "world": dist.get_world_size()}
    if how in ("own", "state for a codec"):
        options = {"state": state}
    recorder = communicate(parallel, HOWS.get(how, how), **options)
    solver = torch.optim.SGD(parallel.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        x = torch.randn(8, 3, 8, 8, generator=generator)
        y = torch.randint(5, (8,), generator=generator)
        solver.zero_grad()
        nn.functional.cross_entropy(parallel(x), y).backward()
        solver.step()
    assert how != "own" or state["calls"] == len(recorder.buckets)
    return nn.utils.parameters_to_vector(parallel.parameters()).detach(), recorder


def begin(rank: int, world: int, folder: Path) -> None:
    """Join the other ranks, over the loopback device."""
    warnings.simplefilter("ignore")  # of what torch calls deprecated
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )


def work(rank: int, world: int, folder: Path, hows: tuple[str, ...]) -> list[dict[str, Any]]:
    """What one rank does: it trains in every way, and tells what came of each."""
    begin(rank, world, folder)
    plain, _ = train("allreduce")
    lines = []
    for how in hows:
        try:
            trained, recorder = train(how)
        except Exception as problem:
            lines.append({"how": how, "problem": f"{type(problem).__name__}: {problem}"})
            continue
        sizes = [(sent.bytes, sent.bytes_sent) for sent in recorder.buckets]
        sane = all(sent.norm > 0 and sent.seconds >= 0 for sent in recorder.buckets)
        error = ((trained - plain).norm() / plain.norm()).item()
        lines.append({"how": how, "error": error, "sizes": sizes, "sane": sane})
    dist.barrier()
    dist.destroy_process_group()
    return lines


pytestmark = [
    pytest.mark.xdist_group("ranks"),  # one process is enough to wait for them
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system"),
    pytest.mark.filterwarnings("ignore:This process .*is multi-threaded:DeprecationWarning"),
]
Said = dict[str, list[dict[str, Any]]]


def of_ranks(world: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` returns in each rank: processes forked from this one, where the slow imports
    are done."""
    importlib.import_module("torch._dynamo")  # which DistributedDataParallel imports
    with multiprocessing.get_context("fork").Pool(world) as pool:
        return pool.map_async(work, range(world), chunksize=1).get(120)


FAILURES = {
    "encode fails": "HookError: communication hook failed on rank 1 of 2: encode raised "
    "ZeroDivisionError: "
    "divided by nothing",
    "decode fails": "HookError: communication hook failed on rank 0 of 2: decode raised TypeError: "
    "a tensor must be returned, got str",
    "shapes differ": "HookError: encode must give the same shape and type on every rank, got "
    "(837,) torch.float32 on "
    "rank 0, (836,) torch.float32 on rank 1",
    "codes reduced": (
        "HookError: encode must give floats or complex numbers for all_reduce=True, got int8"
    ),
    "own fails": (
        "HookError: hook 'Boom' on rank {rank} of 2 (communication) raised "
        "ZeroDivisionError: divided"
    ),
    "own gives no future": "(communication) must return a torch.futures.Future, got Tensor",
    "own takes one": (
        "(communication) must take (state, bucket), but its signature is (bucket); change it"
    ),
    "number": (
        "HookError: how must be one of allreduce, fp16, bf16, powersgd, a Codec or a hook "
        "(state, bucket), got 3"
    ),
    "state for a codec": (
        "HookError: state must be for hooks (state, bucket) -> Future, got one for 'state for"
    ),
    "fp32": "HookError: how 'fp32' is unknown; known: allreduce, fp16, bf16, powersgd",
}
TOLERANCES = {
    **{"identity": 1e-6, "half": 1e-3, "reduced": 1e-6},
    **{"fp16": 1e-3, "bf16": 1e-2, "powersgd": 0.3, "own": 1e-6, "torch's": 0},
}


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What two ranks said, in one run for all tests."""
    hows = (*FAILURES, *TOLERANCES)
    run = partial(work, world=2, folder=tmp_path_factory.mktemp("two"), hows=hows)
    lines = [line for lines in of_ranks(2, run) for line in lines]
    return {how: [line for line in lines if line["how"] == how] for how in hows}


@pytest.mark.parametrize("how", TOLERANCES)
def test_training_equals_the_uncompressed_run(how: str, two_ranks: Said) -> None:
    assert len(two_ranks[how]) == 2
    for line in two_ranks[how]:
        assert "problem" not in line, line
        assert line["error"] <= TOLERANCES[how]
        assert line["sane"]
        assert len(line["sizes"]) > 2  # more than one bucket in two steps
        scale = {"identity": 1, "half": 2, "reduced": 1}.get(how)
        assert all(sent == (size // scale if scale else None) for size, sent in line["sizes"])


@pytest.mark.parametrize("how", FAILURES)
def test_an_error_on_one_rank_ends_all_of_them_with_its_message(how: str, two_ranks: Said) -> None:
    assert len(two_ranks[how]) == 2
    for rank, line in enumerate(two_ranks[how]):
        assert FAILURES[how].replace("{rank}", str(rank)) in line["problem"]


def test_a_model_that_is_not_distributed_is_refused() -> None:
    with pytest.raises(HookError, match="DistributedDataParallel"):
        communicate(nn.Linear(1, 1))  # type: ignore[arg-type]
