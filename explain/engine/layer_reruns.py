"""Perturbed feature maps: the network before the layer is run once for each image, the rest of it for every map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from explain._utils.errors import note, raised
from explain._utils.nested import first_tensor, replace_first
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs
from explain.engine.batching import Add, ProgressCallback, Readers, run_in_batches
from explain.engine.perturbations import PerturbedRows
from explain.engine.plan import Stream
from explain.engine.replay import PrefixRecorder, ReachedError, Replay, Tape
from explain.engine.rerun_context import DependentRowsError, RerunContext, check_rows, check_width, scores_of
from explain.engine.settings import is_out_of_memory, sizes_in_cache
from explain.hooks import HookGroup
from explain.hooks.preserve import calculating
from explain.hooks.records import Overwriting
from explain.hooks.unwrap import has_hooks
from explain.targets.base import find_logits


def run_from_layer(
    stream: Stream, rows: PerturbedRows, readers: Sequence[Readers], context: RerunContext, progress: ProgressCallback
) -> None:
    """Run up to the layer once for each image, and from there on for all of its perturbed feature maps."""
    assert stream.layer is not None
    device = context.inputs.x.device
    rerun = _LayerRerun(context, stream.layer, readers)
    most = context.footprint.most(device, graph=False, after=stream.layer)
    tuner = context.tuner(stream.layer, most, sizes_in_cache(most, device))
    for image in range(len(context.inputs)):
        mine = (rows.owners == image).nonzero()[:, 0]
        if len(mine):
            rerun.begin(image)
            run_in_batches(mine, partial(rerun.run, rows), readers, context, progress, tuner)


class _LayerRerun:
    """Runs a network with other feature maps of a layer, in the fastest of three ways that works:

    1. the operations before the layer are replayed from a tape;
    2. the network before the layer is run for the image, and behind it for several maps;
    3. the network is run whole for every map, as where something leads past the layer and takes no more rows behind it.
    """

    def __init__(self, context: RerunContext, layer: str, readers: Sequence[Readers]) -> None:
        self._context, self._layer, self._readers = context, layer, readers
        self._choices = [reader.choice for reader in readers]
        self._record = context.forward.record(layer)
        self._runs_whole = context.one_at_a_time
        self._may_replay = not self._runs_whole and not has_hooks(context.model)  # others' hooks would see a replay
        self._tape: Tape | None = None
        self._tape_is_checked = False

    def begin(self, image: int) -> None:
        """Go on to the maps of an image."""
        self._image = torch.tensor([image], device=self._context.inputs.x.device)
        known = self._context.tapes.pop(self._layer, None)  # of the forward pass of all, which has one image then
        self._tape = (known or self._record_prefix()) if self._may_replay else None
        self._tape_is_checked = False

    def run(self, rows: PerturbedRows, numbers: torch.Tensor, check: bool) -> list[Add]:
        """Run these perturbed maps of the image."""
        unperturbed = len(self._context.inputs) - len(numbers) if self._context.fixed else int(check)

        def make() -> torch.Tensor:
            with calculating(self._context.inputs.x.device.type):
                maps = rows.make(numbers)
                return torch.cat([maps, *[self._own_maps().to(maps)] * unperturbed]) if unperturbed else maps

        if self._tape is not None and not check and not self._tape_is_checked:
            self._check_tape()
        images = torch.cat([rows.owners[numbers], self._image.repeat(unperturbed)])
        output = self._output(images, make, check)
        return [
            reader.read_scores(images[: len(numbers)], numbers, scores_of(reader.choice, images, output), output)
            for reader in self._readers
        ]

    def _output(self, images: torch.Tensor, make: Callable[[], torch.Tensor], check: bool) -> Any:
        """The network's output for maps, run in the next slower way if one fails."""
        while True:
            maps = make()  # new ones each time, since the network may overwrite them
            first = maps[:1].clone()
            try:
                output = self._run_maps(images, images if self._runs_whole else self._image, maps)
                if not self._runs_whole:
                    self._check_output(output, images)
                if check:
                    scores = [(choice, scores_of(choice, images, output)) for choice in self._choices]
                    run_first = partial(self._run_maps, self._image, self._image, first)
                    check_rows(self._context, self._layer, images, scores, run_first)
                    self._tape_is_checked = True  # by the last row
                return output
            except Exception as error:  # whatever the network says of more rows than it began with
                if is_out_of_memory(error) or came_by_signal(error) or self._runs_whole:
                    raise
                way = "is not replayed" if self._tape is not None else "runs again for every map"
                note(f"what lies before layer {self._layer} {way}: {raised(error)}")
            self._runs_whole, self._may_replay, self._tape = self._tape is None, False, None

    def _check_tape(self) -> None:
        """Replay the tape for the unperturbed maps; if the score differs, do without it for this image."""
        try:
            output = self._run_maps(self._image, self._image, self._own_maps())
            agrees = self._context.are_known(self._image, output, self._choices)
        except Exception as error:  # whatever the network says of a replay
            if is_out_of_memory(error) or came_by_signal(error):
                raise
            agrees = False
        self._tape_is_checked, self._tape = True, self._tape if agrees else None

    def _check_output(self, output: Any, images: torch.Tensor) -> None:
        """Refuse other classes than the unperturbed image has, and what reads maps that the layer overwrote."""
        if self._context.forward.logits is not None and self._context.inputs.others:
            check_width(self._context, find_logits(output, len(images)))
        if any(torch.isnan(scores_of(choice, images, output)).any() for choice in self._choices):
            raise DependentRowsError  # something reads what the layer overwrote, which has fewer rows

    def _own_maps(self) -> torch.Tensor:
        """The layer's own feature maps for the image."""
        return self._context.forward.spatial(self._record.activation, self._layer)[self._image]

    def _record_prefix(self) -> Tape | None:
        """Run up to the layer and record the operations; None if they cannot be replayed."""
        context, record = self._context, self._record
        with context.runs_model(), HookGroup(context.model) as group:
            recorder = PrefixRecorder(group, context.model, f"{record.layer}@{record.call}", ends=True)
            inputs = context.inputs.rows(self._image)  # what is recorded begins with the call, as it does in a replay
            try:
                with recorder.tape:
                    inputs.call(context.model)
            except ReachedError:
                pass
            except Exception as error:  # the network may take no image alone
                if is_out_of_memory(error) or came_by_signal(error):
                    raise
                self._may_replay = False
                return None
        return recorder.made(record.call)

    def _run_maps(self, images: torch.Tensor, before: torch.Tensor, maps: torch.Tensor) -> Any:
        """Run the network on the images ``before`` the layer, and behind it with ``maps`` that belong to ``images``."""
        context, record = self._context, self._record
        perturbed = self._as_returned(maps, images)
        overwriting, calls = Overwriting(), Counter[str]()
        tape = self._tape if len(before) == 1 else None
        replay = None if tape is None else Replay(tape)

        def replaced(module: nn.Module, args: Any, output: Any) -> Any:
            tensor = first_tensor(output)
            calls[record.layer] += 1
            if calls[record.layer] != record.call + 1:
                return None
            if replay is not None:
                replay.live = True
            if tensor is not None and overwriting.is_by(record.layer, tensor):
                if tensor.shape == perturbed.shape:
                    tensor.copy_(perturbed)  # code that reads it by its older name sees the change too
                    return None
                tensor.fill_(float("nan"))  # code that reads it by its older name shows: that tensor has fewer rows
            # The network may overwrite it, and without a replay run again in another layout.
            return replace_first(output, perturbed if replay is not None else perturbed.clone())

        def run(inputs: Inputs) -> Any:
            calls.clear()  # it may run again in another layout
            with HookGroup(context.model) as group:
                overwriting.watch(group, record.layer)
                group.forward(record.layer, replaced)
                with replay or nullcontext():
                    return inputs.call(context.model)

        with context.runs_model():
            if replay is not None:
                output = run(context.inputs.rows(before))
            else:
                output = context.in_fastest_layout(before, {context.inputs.path: context.inputs.x[before]}, run)
        if tape is not None and replay is not None and not (tape.is_intact() and replay.leaves_intact):
            self._tape = self._record_prefix()
        return output

    def _as_returned(self, maps: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Feature maps as the layer would have returned them."""
        raw = self._record.activation
        grid = self._context.forward.grids.grid(tuple(raw.shape), self._layer)
        assert grid is not None  # the maps were laid out by it
        own = raw.index_select(grid.of_images, images[:1])  # all of them are of one image, so none is copied
        size = [len(images) if dim == grid.of_images else -1 for dim in range(own.ndim)]
        return grid.fold(maps.to(raw), own.expand(size))
