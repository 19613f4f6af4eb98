"""Runtime settings: the number of samples in a batch, and how progress is reported."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from explain._utils.nested import first_tensor
from explain._utils.options import CheckedFields
from explain._utils.progress import show_progress
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs
from explain.hooks import HookGroup
from explain.hooks.group import note_runs
from explain.hooks.preserve import findings_of
from explain.hooks.unwrap import leaves
from explain.layers.placement import PlacementMode
from explain.targets.outputs import Activation

Progress = Callable[..., Any] | bool
"""Called with the number of perturbed samples done and their total; if it takes three arguments,
also with the maps so far, by method. True prints a line."""

MEMORY = 512 * 2**20
"""Bytes that a batch of perturbed samples may take on a CPU; on other devices, half of what is
free."""
CACHE = 24 * 2**20
"""Bytes of the largest tensor of a batch up to which a CPU mostly finds it in its cache from one
layer to the next."""
LARGEST_BATCH = 64
"""Samples in a batch from which on more are not faster on a CPU; elsewhere, and behind a layer,
twice as many."""


@dataclass(frozen=True)
class RuntimeSettings(CheckedFields):
    """How samples are run."""

    batch_size: int | None = None
    """The number of samples in a batch; None takes what is fast and fits into memory."""
    progress: Progress | None = None
    """Called with ``(done, total)`` after each batch."""
    keep_partial: bool = False
    """Whether an interrupt ends the work early, with what there is by then as the result."""
    activation: Activation | None = None
    """What makes probabilities of the model's outputs; None finds it out."""
    create_graph: bool = False
    """Whether evidence keeps its graph."""
    placement: PlacementMode = "cells"
    """Where the cells of a layer's map lie, for methods that draw it on the image."""

    name: ClassVar[str] = "attribute"
    minimums = {"batch_size": 1}


def takes_maps(progress: Callable[..., Any]) -> bool:
    """Whether a progress callback takes the maps so far, by its signature: a third argument that is
    needed, one called ``maps``, or any number. Functions in C without one take none."""
    try:
        signature = inspect.signature(progress)
        signature.bind(0, 0)
    except (ValueError, TypeError) as error:
        # a TypeError: two arguments are not enough; a ValueError: a function in C has no signature
        return isinstance(error, TypeError)
    return any(
        parameter.kind == parameter.VAR_POSITIONAL or parameter.name == "maps"
        for parameter in signature.parameters.values()
    )


def report_progress(
    progress: Progress | None,
    done: int,
    total: int,
    maps: Callable[[], Mapping[str, Tensor]] = dict,
) -> None:
    """Call a user's progress callback after a batch, with the ``maps`` so far if it takes them.
    ``maps`` is called only then. True prints a line."""
    if progress is True:
        show_progress(done, total)
    elif progress:
        if takes_maps(progress):
            progress(done, total, maps())
        else:
            progress(done, total)


def mixed_precision_now(device: torch.device) -> AbstractContextManager[Any]:
    """The caller's mixed precision (autocast), as a block for perturbed samples. Between them,
    `calculating` switches it off: methods compute in the precision of their tensors."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type))


@dataclass
class Footprint:
    """How much memory the outputs of a network's modules take; it bounds the samples in a batch."""

    outputs: list[tuple[str, int]] = field(default_factory=list)
    """The names of modules and the bytes of their output for an image, in the order in which they
    returned."""
    half: bool = False
    """Whether an output is in half precision, as under mixed precision inside the network."""
    is_complete: bool = False
    """Whether the pass that measures it has ended."""

    @classmethod
    def of(cls, group: HookGroup, model: nn.Module, inputs: Inputs) -> "Footprint":
        """That of an earlier pass of such inputs; else one that the next pass is to complete, for
        which modules are hooked."""
        x = inputs.x
        mixed = torch.is_autocast_enabled(x.device.type)
        findings = findings_of(model)
        key = (cls, inputs.sizes, x.dtype, mixed)
        footprint: Footprint | None = findings.get(key)
        if footprint is None or not footprint.is_complete:
            footprint = findings[key] = cls()
            footprint.watch(group, model, len(inputs))
        return footprint

    def watch(self, group: HookGroup, model: nn.Module, count: int) -> None:
        """Hook the model's modules to note the size of each output, in the order of a pass of
        ``count`` images, while the group is alive."""

        def measure(name: str, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is not None:
                self.outputs.append((name, tensor.numel() * tensor.element_size() // count))
                self.half = self.half or tensor.dtype in (torch.float16, torch.bfloat16)

        note_runs(group, leaves(model), measure)

    @property
    def whole(self) -> int:
        """The bytes that the outputs of all modules take for one image, as a graph keeps them."""
        return sum(size for _, size in self.outputs)

    def samples_at_once(
        self, device: torch.device, *, graph: bool, after: str | None = None
    ) -> int:
        """The number of perturbed samples that make a fast batch and fit into memory. Only outputs
        from the layer ``after`` on count, if only these are run for samples."""
        calls_in_layer = [
            number
            for number, (name, _) in enumerate(self.outputs)
            if after and f"{name}.".startswith(f"{after}.")
        ]
        first_call = max(calls_in_layer, default=0)  # the last one inside gives the layer's output
        sizes = [size for _, size in self.outputs[first_call:]] or [MEMORY]  # nothing was seen
        largest = max(1, max(sizes))
        free_bytes = (
            int(torch.cuda.mem_get_info(device)[0]) // 2 if device.type == "cuda" else MEMORY
        )
        # with a graph all outputs stay in memory, without one only the largest few
        fitting_count = free_bytes // (sum(sizes) if graph else 4 * largest)
        fast_count = LARGEST_BATCH
        if device.type != "cpu" or after is not None:
            fast_count *= 2
        if device.type == "cpu":
            fast_count = min(fast_count, max(4, CACHE // largest))
        return max(1, min(fitting_count, fast_count))


def lacks_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on any device, so that smaller batches may help.
    By type, or by the words that PyTorch's allocators use."""
    says_so = any(words in str(error) for words in ("not enough memory", "out of memory"))
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and says_so
    )


def raise_unless_of_network(error: BaseException) -> None:
    """Raise an error again if it says nothing about the network: memory ran out, or a signal
    (Ctrl-C) came."""
    if lacks_memory(error) or came_by_signal(error):
        raise error
