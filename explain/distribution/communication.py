"""Gradients exchanged between processes: one function for every DDP communication hook, and a record of what was sent.

Encoded buckets are gathered from all ranks, and every rank decodes and averages them. What went wrong on one rank is
told to all before the next collective call, so that each ends with the same message and none waits for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from explain.errors import HookError, did_you_mean

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    Future: TypeAlias = torch.futures.Future[torch.Tensor]
    Hook: TypeAlias = Callable[[Any, GradBucket], Future]

Ready = Literal["allreduce", "fp16", "bf16", "powersgd"]
READY = ("allreduce", "fp16", "bf16", "powersgd")
T = TypeVar("T")


@dataclass(frozen=True)
class Codec:
    """How to send gradients: ``encode`` a flat bucket ``(n,)`` into a tensor of any type, and ``decode`` it again.

    The encoded tensor must have the same shape and type on every rank.

    >>> Codec(encode=lambda bucket: bucket.half(), decode=lambda sent: sent.float()).encode(torch.ones(2)).dtype
    torch.float16
    """

    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]


How: TypeAlias = Ready | Codec


@dataclass(frozen=True)
class Sent:
    """One bucket of gradients that this rank communicated.

    Attributes:
        index: which bucket of the model it is.
        bytes: the size of its gradients.
        bytes_sent: what a `Codec` made of it; None where torch's own hook encodes.
        seconds: from the bucket being full to its average being there.
        norm: the Euclidean norm of this rank's gradients, before they were averaged.
    """

    index: int
    bytes: int
    bytes_sent: int | None
    seconds: float
    norm: float


@dataclass
class Recorder:
    """What this rank has sent since `communicate`, bucket by bucket."""

    buckets: list[Sent] = field(default_factory=list)

    def __str__(self) -> str:
        total = sum(sent.bytes for sent in self.buckets)
        seconds = sum(sent.seconds for sent in self.buckets)
        return f"{len(self.buckets)} buckets, {total / 1e6:.2f} MB of gradients, {seconds:.3f} s"


def communicate(model: DistributedDataParallel, how: How = "allreduce", **options: Any) -> Recorder:
    """Choose how a DDP model exchanges its gradients, and record what it sends; call it once, before training.

    Args:
        model: a model wrapped in ``DistributedDataParallel``.
        how: "allreduce" (plain), "fp16", "bf16" or "powersgd" (torch's own hooks), or a `Codec`.
        options: for "powersgd", those of ``PowerSGDState``, such as ``matrix_approximation_rank``.

    Raises:
        HookError: the model is not wrapped, the name is unknown, or a hook was already chosen. During backward: a codec
            failed on some rank; every rank raises, with the rank and the reason.

    PowerSGD: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression", 2019.

    >>> communicate(torch.nn.Linear(1, 1))
    Traceback (most recent call last):
    explain.errors.HookError: model must be wrapped in DistributedDataParallel, got Linear
    """
    if not isinstance(model, DistributedDataParallel):
        raise HookError(f"model must be wrapped in DistributedDataParallel, got {type(model).__name__}")
    if options and how != "powersgd":
        raise HookError(f"options are for 'powersgd' only, got {sorted(options)}; leave them out for {how!r}")
    recorder = Recorder()
    state, hook = _coded(how, model, recorder) if isinstance(how, Codec) else _ready(how, options, model, recorder)
    # DDP checks these annotations, and knows the types by no other names.
    hook.__annotations__ = {"bucket": getattr(dist, "GradBucket"), "return": torch.futures.Future[torch.Tensor]}  # noqa: B009
    try:
        model.register_comm_hook(state, hook)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise HookError(f"communicate() must be called once for a model, before training ({reason})") from None
    return recorder


def _ready(name: str, options: dict[str, Any], model: DistributedDataParallel, recorder: Recorder) -> tuple[Any, Hook]:
    """One of torch's own hooks, and the state that it keeps."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hooks: dict[str, Callable[..., Any]] = {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "powersgd": powerSGD_hook.powerSGD_hook,
    }
    if name not in hooks:
        raise HookError(f"how {name!r} is unknown; {did_you_mean(name, READY)}")
    state: Any = model.process_group
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(process_group=model.process_group, **options)
    # PowerSGD's callbacks wait for further messages on the threads that deliver them. Gloo has two: with two buckets
    # under way nobody is left to deliver, and all ranks wait for ever. So there is one bucket under way at a time.
    one_by_one = name == "powersgd" and dist.get_backend(model.process_group) == "gloo"

    def hook(state: Any, bucket: GradBucket) -> Future:
        done = _recording(recorder, bucket)
        future = hooks[name](state, bucket)
        if one_by_one:
            future.wait()
        return cast("Future", future.then(lambda finished: done(finished.value())))

    return state, hook


def _coded(codec: Codec, model: DistributedDataParallel, recorder: Recorder) -> tuple[None, Hook]:
    """A hook that gathers what the codec encoded, and averages what it decodes."""
    group = model.process_group

    def hook(state: Any, bucket: GradBucket) -> Future:
        done, buffer = _recording(recorder, bucket), bucket.buffer()
        encoded = _together(group, "encode", lambda: _tensor(codec.encode(buffer.clone())))
        _same_everywhere(group, encoded)
        gathered = [torch.empty_like(encoded) for _ in range(group.size())]
        dist.all_gather(gathered, encoded, group=group)
        average = _together(group, "decode", lambda: _average(gathered, codec, buffer))
        future: Future = torch.futures.Future()
        future.set_result(done(average, encoded.numel() * encoded.element_size()))
        return future

    return None, hook


def _average(gathered: list[torch.Tensor], codec: Codec, like: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(like)
    for encoded in gathered:
        decoded = _tensor(codec.decode(encoded))
        if decoded.numel() != like.numel():
            raise ValueError(f"the bucket has {like.numel()} values, but {decoded.numel()} came back")
        total += decoded.reshape(-1).to(like.dtype) / len(gathered)
    return total


def _recording(recorder: Recorder, bucket: GradBucket) -> Callable[..., torch.Tensor]:
    """A function that passes the finished bucket on, and notes what it took since now."""
    start, index, buffer = time.perf_counter(), bucket.index(), bucket.buffer()
    norm = torch.linalg.vector_norm(buffer, dtype=torch.float64).item()

    def done(value: Any, bytes_sent: int | None = None) -> torch.Tensor:
        size = buffer.numel() * buffer.element_size()
        recorder.buckets.append(Sent(index, size, bytes_sent, time.perf_counter() - start, norm))
        return cast(torch.Tensor, value[0] if isinstance(value, (tuple, list)) else value)

    return done


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a tensor must be returned, got {type(value).__name__}")
    return value.contiguous()


def _told_by_all(group: dist.ProcessGroup, value: T) -> list[T]:
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, value, group=group)
    return told


def _together(group: dist.ProcessGroup, name: str, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Do some work on every rank, and raise on all of them if it failed on one."""
    result, problem = torch.empty(0), None
    try:
        result = work()
    except Exception as error:
        problem = f"{name} raised {type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    for rank, told in enumerate(_told_by_all(group, problem)):
        if told is not None:
            raise HookError(f"communication hook failed on rank {rank} of {group.size()}: {told}")
    return result


def _same_everywhere(group: dist.ProcessGroup, encoded: torch.Tensor) -> None:
    kinds = _told_by_all(group, f"{tuple(encoded.shape)} {encoded.dtype}")
    if len(set(kinds)) > 1:
        listed = ", ".join(f"{kind} on rank {rank}" for rank, kind in enumerate(kinds))
        raise HookError(f"encode must give the same shape and type on every rank, got {listed}")
