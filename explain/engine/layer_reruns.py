"""Altered feature maps: what lies before the layer is run once for each image, what lies behind it for every map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from explain._utils.errors import note, raised
from explain._utils.nested import first_tensor, replace_first
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs
from explain.engine.batching import Add, ProgressCallback, Readers, in_pieces
from explain.engine.perturbations import PerturbedRows
from explain.engine.plan import Stream
from explain.engine.replay import PrefixRecorder, ReachedError, Replay, Tape
from explain.engine.rerun_context import (
    DependentRowsError,
    RerunContext,
    check_width,
    in_fastest_layout,
    running_altered,
    scores_agree,
    scores_of,
)
from explain.engine.settings import BatchSizeTuner, is_out_of_memory, sizes_in_cache
from explain.hooks import HookGroup, Overwriting, Record, calculating, has_hooks
from explain.targets import find_logits


def behind_layer(
    stream: Stream, rows: PerturbedRows, readers: Sequence[Readers], asked: RerunContext, progress: ProgressCallback
) -> None:
    """Run up to the layer once for each image, and from there on for all of its altered feature maps.

    A network in which something leads past the layer may not take more rows behind it than before it, or say something
    else of them, which the row that is not altered shows; it runs whole for every altered map.
    """
    assert stream.layer is not None
    layer, device = stream.layer, asked.inputs.x.device
    cut_off = _CutOff(asked, layer, readers)
    most = asked.footprint.most(device, graph=False, after=layer)
    kind = (tuple(asked.inputs.x.shape[1:]), asked.inputs.x.dtype, asked.work.precision, layer)
    pace = BatchSizeTuner(asked.model, kind, most, device, sizes_in_cache(most, device))
    for image in range(len(asked.inputs)):
        mine = (rows.owners == image).nonzero()[:, 0]
        if not len(mine):
            continue
        cut_off.begin(image)
        in_pieces(mine, partial(cut_off.run, rows), readers, asked, progress, pace)


class _CutOff:
    """Runs what lies behind a layer on other feature maps than its own."""

    def __init__(self, asked: RerunContext, layer: str, readers: Sequence[Readers]) -> None:
        self._asked, self._layer, self._readers = asked, layer, readers
        self._record: Record = asked.forward.record(layer)
        self._fans_out = not asked.one_at_a_time
        self._replays = self._fans_out and not has_hooks(asked.model)  # hooks of others would see the replay
        self._tape: Tape | None = None
        self._tried = False

    def begin(self, image: int) -> None:
        self._image = torch.tensor([image], device=self._asked.inputs.x.device)
        known = self._asked.tapes.pop(self._layer, None)  # of the forward pass of all, which has one image then
        self._tape, self._tried = (known or self._taped()) if self._replays else None, False

    def run(self, rows: PerturbedRows, numbers: torch.Tensor, check: bool) -> Add:
        beside = len(self._asked.inputs) - len(numbers) if self._asked.fixed else int(check)  # not altered

        def make() -> torch.Tensor:
            with calculating(self._asked.inputs.x.device.type):
                maps = rows.make(numbers)
                return torch.cat([maps, *[self._maps(self._image).to(maps)] * beside]) if beside else maps

        if self._tape is not None and not check and not self._tried:
            self._try_tape()
        images = torch.cat([rows.owners[numbers], self._image.repeat(beside)])
        output = self._output(images, make, check)
        scores = [scores_of(reader.choice, images, output) for reader in self._readers]
        add = [
            reader.read_scores(images[: len(numbers)], numbers, score, output)
            for reader, score in zip(self._readers, scores, strict=True)
        ]
        return partial(_all, add)

    def _output(self, images: torch.Tensor, make: Callable[[], torch.Tensor], check: bool) -> Any:
        """The network's output for maps: run from the layer on, or if that fails, as a whole for each."""
        while True:
            fans_out = self._fans_out and not self._asked.one_at_a_time
            maps = make()  # new ones each time, since the network may overwrite them
            first = maps[:1].clone()
            try:
                output = self._scored(images, self._image if fans_out else images, maps)
                if fans_out:
                    self._must_fit(output, images)
                if check:
                    self._check(output, images, first)
                return output
            except Exception as error:  # whatever the network says of more rows than it began with
                if is_out_of_memory(error) or came_by_signal(error) or not fans_out:
                    raise
                way = "is not replayed" if self._tape is not None else "runs again for every map"
                note(f"what lies before layer {self._layer} {way}: {raised(error)}")
            self._fans_out, self._replays, self._tape = self._tape is not None, False, None

    def _try_tape(self) -> None:
        """Replay what lies before the layer for the unaltered maps: if the output differs, do without replays."""
        try:
            output = self._scored(self._image, self._image, self._maps(self._image))
            agrees = all(
                scores_agree(self._asked, r.choice, scores_of(r.choice, self._image, output), self._known(r))
                for r in self._readers
            )
        except Exception as error:  # whatever the network says of a replay
            if is_out_of_memory(error) or came_by_signal(error):
                raise
            agrees = False
        self._tried, self._tape = True, self._tape if agrees else None

    def _known(self, reader: Readers) -> torch.Tensor:
        return reader.choice.score[self._image]

    def _must_fit(self, output: Any, images: torch.Tensor) -> None:
        """Refuse other classes than the unaltered image has, and what reads maps that the layer overwrote."""
        if self._asked.forward.logits is not None and self._asked.inputs.others:
            check_width(self._asked, find_logits(output, len(images)))
        if any(torch.isnan(scores_of(reader.choice, images, output)).any() for reader in self._readers):
            raise DependentRowsError  # something reads what the layer overwrote, which has fewer rows

    def _check(self, output: Any, images: torch.Tensor, first: torch.Tensor) -> None:
        """See that rows do not depend on each other: the last one is not altered, and the first one is run alone too.

        Raises:
            DependentRowsError: one of them has another score among the others than alone.
        """
        asked = self._asked
        for reader in self._readers:
            if not scores_agree(
                asked, reader.choice, scores_of(reader.choice, images, output)[-1:], self._known(reader)
            ):
                raise DependentRowsError
        self._tried = True
        if self._layer in asked.proved:
            return
        alone = self._scored(self._image, self._image, first)
        for reader in self._readers:
            score = scores_of(reader.choice, images, output)[:1]
            if not scores_agree(asked, reader.choice, score, scores_of(reader.choice, self._image, alone)):
                raise DependentRowsError
        asked.proved.add(self._layer)

    def _maps(self, image: torch.Tensor) -> torch.Tensor:
        """The layer's own feature maps for an image."""
        return self._asked.forward.spatial(self._record.activation, self._layer)[image]

    def _taped(self) -> Tape | None:
        """Run up to the layer, noting what happens; None where that cannot be replayed."""
        asked, record = self._asked, self._record
        with running_altered(asked), HookGroup(asked.model) as group:
            taping = PrefixRecorder(group, asked.model, f"{record.layer}@{record.call}", ends=True)
            inputs = asked.inputs.rows(self._image)  # what is noted begins with the call, as it does in a replay
            try:
                with taping.tape:
                    inputs.call(asked.model)
            except ReachedError:
                pass
            except Exception as error:  # the network may take no image alone
                if is_out_of_memory(error) or came_by_signal(error):
                    raise
                self._replays = False
                return None
        return taping.made(record.call)

    def _scored(self, images: torch.Tensor, before: torch.Tensor, maps: torch.Tensor) -> Any:
        """Run the network on the images ``before`` the layer, and behind it with ``maps`` that belong to ``images``."""
        asked, record = self._asked, self._record
        altered = self._laid_out(maps, images)
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
                if tensor.shape == altered.shape:
                    tensor.copy_(altered)  # code that reads it by its older name sees the change too
                    return None
                tensor.fill_(float("nan"))  # code that reads it by its older name shows: that tensor has fewer rows
            # The network may overwrite it, and without a replay run again in another layout.
            return replace_first(output, altered if replay is not None else altered.clone())

        def run(inputs: Inputs) -> Any:
            calls.clear()  # it may run again in another layout
            with HookGroup(asked.model) as group:
                overwriting.watch(group, record.layer)
                group.forward(record.layer, replaced)
                with ExitStack() as stack:
                    if replay is not None:
                        stack.enter_context(replay)
                    return inputs.call(asked.model)

        with running_altered(asked):
            if replay is not None:
                output = run(asked.inputs.rows(before))
            else:
                output = in_fastest_layout(asked, before, {asked.inputs.path: asked.inputs.x[before]}, run)
        if tape is not None and replay is not None and not (tape.is_intact() and replay.leaves_intact):
            self._tape = self._taped()
        return output

    def _laid_out(self, maps: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Feature maps as the layer would have returned them."""
        raw = self._record.activation
        grid = self._asked.forward.grids.grid(tuple(raw.shape), self._layer)
        assert grid is not None  # the maps were laid out by it
        own = raw.index_select(grid.of_images, images[:1])  # all of them are of one image, so none is copied
        size = [len(images) if dim == grid.of_images else -1 for dim in range(own.ndim)]
        return grid.fold(maps.to(raw), own.expand(size))


def _all(add: Sequence[Add]) -> None:
    for each in add:
        each()
