"""Incremental inference: an accelerator for perturbed samples that the engine can do without.

The engine asks `IncrementalInference.faster_call` for a function that takes the place of
``inputs.call(model)``. It gets None where a trial finds the function wrong or slow. How a pass
leaves out what the perturbation cannot change is in `incremental_maps`.
"""

import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from explain.data.inputs import Inputs
from explain.engine.incremental_maps import (
    BoxMaps,
    ChangedBox,
    ImagePass,
    changed_box,
    channels_last,
)
from explain.engine.settings import raise_unless_of_network

_is_faster: weakref.WeakKeyDictionary[nn.Module, dict[Any, bool]] = weakref.WeakKeyDictionary()
"""Of networks, by the kind of samples, whether incremental inference is right and faster."""
FEW = 4
"""Samples that are run as a whole in a trial."""
WORTH_A_TRIAL = 12 * FEW
"""Samples from which on a trial costs little."""


class IncrementalInference:
    """Runs perturbed samples of the images ``x`` incrementally; what is computed of the images is
    kept."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        """Begin for all batches of a stream on the images ``x``; what operators give for the images
        is kept here, and whether it is faster with the model."""
        self._model = model
        self._is_faster = _is_faster.setdefault(model, {})
        """Whether a kind of samples is run right and faster so, as trials of this model have
        shown."""
        self._images = channels_last(x)
        """The unperturbed images ``(N, C, H, W)``."""
        self._results: list[Any] = []
        """What each operator gave for the images, in the order of the network."""

    def faster_call(
        self, owners: Tensor, inputs: Inputs, agree: Callable[[Any, Any], bool]
    ) -> Callable[[Tensor, Inputs], Any] | None:
        """A function of samples' images ``(B,)`` and samples like ``inputs`` that gives the
        network's output faster, or None. A new kind of samples is tried: its output for all must
        ``agree`` with that of a whole pass for the first few."""
        box = changed_box(self._images, owners, inputs.x)
        if box is None:
            return None
        kind = _kind(box)
        if kind not in self._is_faster:
            self._is_faster[kind] = self._try(owners, box, inputs, agree)
        return self._call if self._is_faster[kind] else None

    def _call(self, owners: Tensor, inputs: Inputs) -> Any:
        """The network's output for perturbed samples, computed incrementally where that is faster
        for such samples, else as a whole."""
        box = changed_box(self._images, owners, inputs.x)
        output = None
        if box is not None and self._is_faster.get(_kind(box)):
            output = self._incremental_output(box, inputs)
        return inputs.call(self._model) if output is None else output

    def _try(
        self, owners: Tensor, box: ChangedBox, inputs: Inputs, agree: Callable[[Any, Any], bool]
    ) -> bool:
        """Whether incremental inference takes less time for each sample than a whole pass, and
        gives the right output for the first few, which alone are also run as a whole."""
        count = min(FEW, len(owners))
        first_samples = inputs.rows(torch.arange(count))
        box_of_first = changed_box(self._images, owners[:count], first_samples.x)
        # the first pass also computes the images' results, which are kept, so it is not timed
        if box_of_first is None or self._incremental_output(box_of_first, first_samples) is None:
            return False
        start = time.perf_counter()
        output = self._incremental_output(box, inputs)
        end_of_incremental = time.perf_counter()
        output_of_first = first_samples.call(self._model)
        end_of_whole = time.perf_counter()
        time_incremental = (end_of_incremental - start) / len(owners)
        time_whole = (end_of_whole - end_of_incremental) / count
        is_faster = time_incremental < time_whole  # for one sample
        return is_faster and output is not None and agree(output, output_of_first)

    def _incremental_output(self, box: ChangedBox, inputs: Inputs) -> Any:
        """The network's output for perturbed samples, computed incrementally; None if the network
        fails on such tensors. Feature maps are laid out in memory as the inputs are."""
        is_contiguous = inputs.x.ndim != 4 or inputs.x.is_contiguous()
        layout = torch.contiguous_format if is_contiguous else torch.channels_last
        perturbed = BoxMaps(box, ImagePass(self._results, layout))
        try:
            return inputs.replaced(perturbed).call(self._model)
        except Exception as error:
            raise_unless_of_network(error)
            return None


def _kind(box: ChangedBox) -> Any:
    """What decides how long perturbed samples take: the images' size and type, the number of
    threads, and the share of an image that changed in eighths."""
    share = math.prod(box.sides) / math.prod(box.map_sides)
    return (
        box.image_maps.shape[1:],
        box.image_maps.dtype,
        torch.get_num_threads(),
        math.ceil(8 * share),
    )
