"""Gradients exchanged between processes: one function for every DDP communication hook, and a
record of what was sent.

Encoded buckets are gathered from all ranks, and every rank decodes and averages them; or they are
averaged by an all-reduce, and decoded once. An error on one rank is reported to all before the next
collective call, so that each ends with the same message and none waits forever.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from explain._utils.errors import HookError, did_you_mean, raised
from explain.hooks import guard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    Future: TypeAlias = torch.futures.Future[torch.Tensor]
    Hook: TypeAlias = Callable[[Any, GradBucket], Future]
    Exchange: TypeAlias = Callable[[Any, GradBucket], tuple[Future, int | None]]
    """Starts the exchange of a bucket; returns the future of what takes its place, and the bytes
    sent, if known."""

Ready = Literal["allreduce", "fp16", "bf16", "powersgd"]
READY: tuple[Ready, ...] = get_args(Ready)


@dataclass(frozen=True)
class Codec:
    """How to send gradients: ``encode`` a flat bucket ``(n,)`` into a tensor of any type, and
    ``decode`` it again.

    The encoded tensor must have the same shape and type on every rank. By default, those of all
    ranks are gathered, and each is decoded. With ``all_reduce``, they are averaged on their way,
    and their mean is decoded once: less is sent and done, and the result is the same for codecs
    that are linear, as a smaller type or a projection is. Only floating-point and complex tensors
    have a mean.

    >>> Codec(encode=lambda bucket: bucket.half(), decode=lambda sent: sent.float()).encode(
    ...     torch.ones(2)
    ... ).dtype
    torch.float16
    """

    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]
    all_reduce: bool = False


How: TypeAlias = "Ready | Codec | Hook"


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
        """The number of buckets of gradients that this rank exchanged, their size before encoding,
        and the seconds that all took together, as text."""
        total = sum(sent.bytes for sent in self.buckets)
        seconds = sum(sent.seconds for sent in self.buckets)
        return f"{len(self.buckets)} buckets, {total / 1e6:.2f} MB of gradients, {seconds:.3f} s"


def communicate(
    model: DistributedDataParallel, how: How = "allreduce", *, state: Any = None, **options: Any
) -> Recorder:
    """Choose how a DDP model exchanges its gradients, and record what it sends; call it once,
    before training.

    Args:
        model: a model wrapped in ``DistributedDataParallel``.
        how: "allreduce" (plain), "fp16", "bf16" or "powersgd" (torch's own hooks), a `Codec`, or a
            hook in PyTorch's form, ``hook(state, bucket) -> Future``: it starts the exchange of
            ``bucket.buffer()`` and returns a future of what takes its place.
        state: what such a hook is given first; None has torch's own hooks use the default process
            group.
        options: for "powersgd", those of ``PowerSGDState``, such as ``matrix_approximation_rank``.

    Raises:
        HookError: the model is not wrapped, the name is unknown, ``how`` is something else,
            ``state`` or ``options`` come with what takes none, or a hook was already chosen. During
            backward: a codec failed on some rank; every rank raises, with the rank and the reason.
            A hook in PyTorch's own form that raises, or returns no future, is named on its own
            rank; the others wait for its messages until their process group's timeout, as ever.

    PowerSGD: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression", 2019.

    >>> communicate(torch.nn.Linear(1, 1))
    Traceback (most recent call last):
    explain.HookError: model must be wrapped in DistributedDataParallel, got Linear
    """
    if not isinstance(model, DistributedDataParallel):
        raise HookError(
            f"model must be wrapped in DistributedDataParallel, got {type(model).__name__}"
        )
    title = repr(how) if isinstance(how, str) else getattr(how, "__name__", type(how).__name__)
    if options and how != "powersgd":
        raise HookError(
            f"options are for 'powersgd' only, got {sorted(options)}; leave them out for {title}"
        )
    if state is not None and isinstance(how, (str, Codec)):
        raise HookError(
            f"state must be for hooks (state, bucket) -> Future, got one for {title}; leave it out"
        )
    group = model.process_group
    if isinstance(how, Codec):
        exchange = _of_codec(how, group)
    elif isinstance(how, str):
        state, exchange = _of_torch(how, options, group)
    elif callable(how):
        exchange = _of_caller(how, group)
    else:
        raise HookError(
            f"how must be one of {', '.join(READY)}, a Codec or a hook (state, bucket), got {how!r}"
        )
    recorder = Recorder()
    hook = _recorded(exchange, recorder)
    # DDP checks these annotations, and knows the types by no other names.
    hook.__annotations__ = {
        "bucket": dist.GradBucket,  # type: ignore[attr-defined]
        "return": torch.futures.Future[torch.Tensor],
    }
    try:
        model.register_comm_hook(state, hook)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise HookError(
            f"communicate() must be called once for a model, before training ({reason})"
        ) from None
    return recorder


def _recorded(exchange: "Exchange", recorder: Recorder) -> "Hook":
    """A DDP communication hook that exchanges a full bucket in backward, and records it as `Sent`
    when its average is there. Some of torch's give it in a list.
    """

    def hook(state: Any, bucket: "GradBucket") -> "Future":
        """Start the exchange of a full bucket, and return the future of its average."""
        start = time.perf_counter()
        buffer = bucket.buffer()
        norm = torch.linalg.vector_norm(buffer, dtype=torch.float64).item()
        future, bytes_sent = exchange(state, bucket)

        def note(finished: "Future") -> torch.Tensor:
            """Record the exchange that has finished, and return the tensor of the averaged
            bucket."""
            seconds = time.perf_counter() - start
            recorder.buckets.append(Sent(bucket.index(), buffer.nbytes, bytes_sent, seconds, norm))
            value: Any = finished.value()
            return cast(torch.Tensor, value[0] if isinstance(value, (tuple, list)) else value)

        return cast("Future", future.then(note))

    return hook


def _of_torch(
    name: str, options: dict[str, Any], group: dist.ProcessGroup
) -> "tuple[Any, Exchange]":
    """The state (a process group, or PowerSGD's object made with ``options``) and the exchange of
    torch's own hook `READY` [name]. The bytes that it sends are unknown.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name not in READY:
        raise HookError(f"how {name!r} is unknown; {did_you_mean(name, READY)}")
    state: Any = group
    torch_hook: Any
    if name == "powersgd":
        torch_hook = powerSGD_hook.powerSGD_hook
        state = powerSGD_hook.PowerSGDState(process_group=group, **options)
    elif name == "allreduce":
        torch_hook = default_hooks.allreduce_hook
    else:
        torch_hook = getattr(default_hooks, f"{name}_compress_hook")
    # PowerSGD's callbacks wait for further messages on the threads that deliver them. Gloo has two:
    # with two buckets under way nothing is left to deliver it, and all ranks wait forever. So there
    # is one bucket under way at a time.
    one_by_one = name == "powersgd" and dist.get_backend(group) == "gloo"

    def exchange(state: Any, bucket: "GradBucket") -> "tuple[Future, None]":
        """Start torch's own hook for a bucket; the bytes that it sends are not known."""
        future = torch_hook(state, bucket)
        if one_by_one:
            future.wait()
        return future, None

    return state, exchange


def _of_caller(fn: "Hook", group: dist.ProcessGroup) -> "Exchange":
    """Return the exchange of a communication hook of the user's; errors name the function and this
    rank.
    """
    guarded = guard.Hook(fn, f"rank {group.rank()} of {group.size()}", "communication")
    guarded.must_take(["state", "bucket"])

    def exchange(state: Any, bucket: "GradBucket") -> "tuple[Future, None]":
        """Call the user's hook for a bucket, and refuse a result that is no future of torch."""
        future = guarded(state, bucket)
        if not isinstance(future, torch._C.Future):
            raise HookError(
                f"{guarded} must return a torch.futures.Future, got {type(future).__name__}"
            )
        return cast("Future", future), None

    return exchange


def _of_codec(codec: Codec, group: dist.ProcessGroup) -> "Exchange":
    """A codec's exchange: encode a copy of the bucket, send it to all, decode and average; done
    when the future is returned, so that an error is raised on all (`_together`).
    """

    def exchange(state: Any, bucket: "GradBucket") -> "tuple[Future, int]":
        """Encode, exchange, decode and average a bucket; return a future that is done, and the
        bytes that this rank sent."""
        buffer = bucket.buffer()
        # of a copy: the codec may write into what it gets
        encoded = _together(group, "encode", lambda: _tensor(codec.encode(buffer.clone())))
        exchanged = _exchange(group, codec, encoded)
        future: Future = torch.futures.Future()
        future.set_result(_together(group, "decode", lambda: _average(exchanged, codec, buffer)))
        return future, encoded.nbytes

    return exchange


def _exchange(group: dist.ProcessGroup, codec: Codec, encoded: torch.Tensor) -> list[torch.Tensor]:
    """Send this rank's encoded bucket, and return those of all ranks in their order, or with
    ``all_reduce`` a list with their mean alone. A collective call: every rank must make it."""
    if not codec.all_reduce:
        gathered = [torch.empty_like(encoded) for _ in range(group.size())]
        dist.all_gather(gathered, encoded, group=group)
        return gathered
    if not (encoded.is_floating_point() or encoded.is_complex()):
        kind = str(encoded.dtype).removeprefix("torch.")
        raise HookError(
            f"encode must give floats or complex numbers for all_reduce=True, got {kind}; leave it "
            "False"
        )
    share = encoded / group.size()  # before the sum, which a small type might not hold
    dist.all_reduce(share, group=group)
    return [share]


def _average(exchanged: list[torch.Tensor], codec: Codec, bucket: torch.Tensor) -> torch.Tensor:
    """Decode the buckets that were exchanged, and return their mean as a flat tensor ``(n,)`` of
    the type and length of ``bucket``, this rank's own.
    """
    total = torch.zeros_like(bucket)
    for encoded in exchanged:
        decoded = _tensor(codec.decode(encoded))
        if decoded.numel() != bucket.numel():
            raise ValueError(
                f"the bucket has {bucket.numel()} values, but {decoded.numel()} came back"
            )
        total += decoded.reshape(-1).to(bucket.dtype) / len(exchanged)
    return total


def _tensor(value: Any) -> torch.Tensor:
    """Return what a codec's function gave as a contiguous tensor, which collectives need; a
    TypeError for anything else, which `_together` tells all ranks."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a tensor must be returned, got {type(value).__name__}")
    return value.contiguous()


def _together(
    group: dist.ProcessGroup, name: str, work: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Do a codec's step ``work`` ("encode" or "decode": ``name``) on every rank; outcomes are
    compared, and a failure raised on all, as others would wait for a rank that failed alone.
    """
    result = torch.empty(0)  # never returned: where ``work`` raises, all raise
    try:
        result = work()
        failed = False
        outcome = f"{tuple(result.shape)} {result.dtype}"
    except Exception as error:
        failed = True
        outcome = f"{name} {raised(error)}"
    outcomes: list[Any] = [None] * group.size()
    dist.all_gather_object(outcomes, (failed, outcome), group=group)
    for rank, (has_failed, outcome_text) in enumerate(outcomes):
        if has_failed:
            raise HookError(
                f"communication hook failed on rank {rank} of {group.size()}: {outcome_text}"
            )
    if len(set(outcomes)) > 1:
        listed = ", ".join(
            f"{shape_and_type} on rank {rank}" for rank, (_, shape_and_type) in enumerate(outcomes)
        )
        raise HookError(f"{name} must give the same shape and type on every rank, got {listed}")
    return result
