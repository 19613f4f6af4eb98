"""Runtime settings: precision, the number of rows in a batch, and how progress is reported."""

import inspect
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from explain._utils.nested import first_tensor
from explain._utils.options import Options
from explain._utils.progress import show_progress
from explain._utils.signals import came_by_signal
from explain.hooks import HookGroup
from explain.hooks.unwrap import leaves
from explain.targets.outputs import Activation

Precision: TypeAlias = Literal["full", "bf16", "bfloat16"]
Progress = Callable[..., Any] | bool
"""Called with the number of perturbed rows done and their total; if it takes three arguments, also with the maps so
far, by method. True prints a line."""

MEMORY = 512 * 2**20
"""Bytes that a batch of perturbed rows may take on a CPU; on other devices, half of what is free."""
TRIED = (16, 8, 4, 32)  # batch sizes that are tried on a CPU, where larger ones are often slower
TRIED_ELSEWHERE = (64, 128, 256, 32)
CACHE = 8 * 2**20
"""Bytes that the largest tensor of a batch may take to stay in a CPU's cache from one layer to the next."""
BatchSizes = tuple[int, ...] | None
WORTH_IT = 1.0  # seconds of work from which on the fastest batch size is looked for


@dataclass(frozen=True)
class RuntimeSettings(Options):
    """How rows are run.

    Args:
        batch_size: the number of rows in a batch; None takes what fits into memory and was fastest in a short trial.
        progress: called with ``(done, total)`` after each batch.
        precision: "bf16" runs perturbed rows in bfloat16 where only their scores are needed.
        keep_partial: an interrupt ends the work early, and the result is what there is by then.
        activation: what makes probabilities of the model's outputs; None finds it out.
        create_graph: evidence keeps its graph.
    """

    batch_size: int | None = None
    progress: Progress | None = None
    precision: Precision = "full"
    keep_partial: bool = False
    activation: Activation | None = None
    create_graph: bool = False

    name: ClassVar[str] = "attribute"
    minimums = {"batch_size": 1}


def takes_maps(progress: Callable[..., Any]) -> bool:
    """Whether a progress callback takes the maps so far as well.

    >>> takes_maps(lambda done, total: None), takes_maps(lambda done, total, maps: None)
    (False, True)
    """
    try:
        signature = inspect.signature(progress)
        signature.bind(0, 0)
    except (ValueError, TypeError) as error:
        return isinstance(error, TypeError)  # two arguments are not enough; of what is written in C, it is unknown
    return any(each.kind == each.VAR_POSITIONAL or each.name == "maps" for each in signature.parameters.values())


def report_progress(
    progress: Progress | None, done: int, total: int, maps: Callable[[], Mapping[str, Tensor]] = dict
) -> None:
    """Call a progress callback, with the ``maps`` so far if it takes them; they are made only then."""
    if progress is True:
        show_progress(done, total)
    elif progress:
        if takes_maps(progress):
            progress(done, total, maps())
        else:
            progress(done, total)


def autocast(inputs: Tensor, precision: Precision) -> AbstractContextManager[None]:
    """Compute in bfloat16, or as the model and the caller would."""
    return nullcontext() if precision == "full" else torch.autocast(inputs.device.type, torch.bfloat16)


def mixed_precision_now(device: torch.device) -> torch.autocast:
    """The caller's mixed precision, to be entered again where `calculating` has switched it off."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type), enabled=enabled)


_HALF = (torch.float16, torch.bfloat16)


def agree(
    one: Tensor,
    other: Tensor,
    inputs: Tensor,
    settings: RuntimeSettings,
    scale: float,
    coarse: float = 1e-5,
    *,
    half: bool = False,
) -> bool:
    """Whether scores are the same, up to the rounding that differs between batch sizes.

    ``scale`` is the magnitude of the numbers that rounding errors are made of, such as the largest class score; 0 where
    scores are right to so many digits however small they are. ``coarse`` is what counts as nothing in half precision;
    ``half`` says that a part of the network computes in that.
    """
    rounding = torch.finfo(inputs.dtype).eps
    if settings.precision != "full" or half or rounding > 1e-4:
        return torch.allclose(one, other, rtol=0.1, atol=coarse)
    relative, absolute = (1e-3, 1e-4) if rounding > 1e-10 else (1e-5, 1e-8)
    if not scale:
        return torch.allclose(one, other, rtol=10 * relative, atol=0)
    return torch.allclose(one, other, rtol=relative, atol=absolute * scale)


@dataclass
class Footprint:
    """The bytes that the modules of a network gave for each image, in the order in which they returned.

    ``half`` says whether one of them gave values in half precision, as under mixed precision inside the network.
    """

    outputs: list[tuple[str, int]] = field(default_factory=list)
    half: bool = False

    def watch(self, group: HookGroup, model: nn.Module, count: int) -> None:
        def measure(name: str, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is not None:
                self.outputs.append((name, tensor.numel() * tensor.element_size() // count))
                self.half = self.half or tensor.dtype in _HALF

        group.note_runs(leaves(model), measure)

    def most(self, device: torch.device, *, graph: bool, after: str | None = None) -> int:
        """How many rows fit into memory: with a graph all outputs stay, without only the largest few."""
        names = [name for name, _ in self.outputs]
        inside = [i for i, name in enumerate(names) if after and f"{name}.".startswith(f"{after}.")]
        sizes = [size for _, size in self.outputs[max(inside, default=0) :]] or [MEMORY]
        needed = sum(sizes) if graph else 4 * max(sizes)
        free = int(torch.cuda.mem_get_info(device)[0]) // 2 if device.type == "cuda" else MEMORY
        return max(1, free // max(1, needed))


def sizes_in_cache(most: int, device: torch.device) -> BatchSizes:
    """Batch sizes to try where little is left to compute, so that the fixed cost of a batch counts.

    ``most`` is how many fit into memory without a graph, four times over.

    >>> sizes_in_cache(1000, torch.device("cpu"))
    (62, 124, 31, 15)
    """
    if device.type != "cpu":
        return None
    first = min(128, max(TRIED[0], most * 4 * CACHE // MEMORY))
    return first, 2 * first, max(1, first // 2), max(1, first // 4)


_fastest: weakref.WeakKeyDictionary[nn.Module, dict[Any, int]] = weakref.WeakKeyDictionary()


class BatchSizeTuner:
    """Chooses how many rows to run next: as many as are ``given``, or else what is fastest.

    Each size is tried twice, and the second time is what counts: the first one prepares kernels and memory. The fastest
    is remembered for the network and this ``kind`` of work, and so is how many rows fit into memory. Short work is done
    without trials.
    """

    def __init__(
        self, model: nn.Module, kind: Any, most: int, device: torch.device, given: int | None, sizes: BatchSizes
    ) -> None:
        tried = sizes or (TRIED if device.type == "cpu" else TRIED_ELSEWHERE)
        self._known = _fastest.setdefault(model, {})
        self._kind = (kind, str(device))
        self._device = device
        self._given = given
        self._most = min(most, self._known.get(("fit", self._kind), most))
        self._sizes = list(dict.fromkeys(min(size, self._most) for size in tried))
        self._seconds: dict[int, list[float]] = {}
        self.size = min(self._most, self._known.get(self._kind, self._sizes[0]))

    def rows(self, left: int) -> int:
        """How many rows to run next: a few that would be left over go with them, since a small piece is slow."""
        if self._given is not None:
            return self._given
        return left if left <= min(self._most, self.size + self.size // 4) else self.size

    def now(self) -> float:
        """The time in seconds, once the device has finished what was started."""
        if self._device.type == "cuda" and self._kind not in self._known:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def note(self, rows: int, seconds: float, left: int) -> None:
        """Take how long a batch took, and choose the next size."""
        if self._given is not None or self._kind in self._known:
            return
        if rows == self.size:
            self._seconds.setdefault(rows, []).append(seconds / rows)
        trial = next((size for size in self._sizes if len(self._seconds.get(size, ())) < 2), None)
        if trial is not None and (len(self._seconds) > 1 or left * seconds / rows > WORTH_IT):
            self.size = trial if trial <= left else self.size
        elif trial is None:
            self.size = min(self._sizes, key=lambda size: self._seconds[size][-1])
            self._known[self._kind] = self.size

    def fit(self, most: int) -> None:
        """Run no more rows than these from now on: more did not fit into memory."""
        self._given = self._given and min(most, self._given)
        self.size = self._most = min(most, self.size)
        self._sizes = list(dict.fromkeys(min(size, most) for size in self._sizes))
        self._known["fit", self._kind] = most


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    said = any(words in str(error) for words in ("not enough memory", "out of memory"))
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (isinstance(error, RuntimeError) and said)


def raise_unless_of_network(error: BaseException) -> None:
    """Raise an error that says nothing of how a network takes its input: memory ran out, or a signal came."""
    if lacks_memory(error) or came_by_signal(error):
        raise error
