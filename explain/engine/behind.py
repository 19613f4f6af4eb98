"""Altered feature maps: what lies before the layer is run once for each image, what lies behind it for every map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from explain.engine.altered import Rows
from explain.engine.asked import Asked, DependentRowsError, check_width, in_fastest_layout, running_altered
from explain.engine.evidence import at_least_float32
from explain.engine.pieces import Readers, Told, in_pieces
from explain.engine.plan import Stream
from explain.engine.replay import Replay, Tape
from explain.engine.work import Pace, agree, is_out_of_memory
from explain.errors import ExplainError, note, raised
from explain.hooks import HookGroup, Overwriting, Record, calculating, first_tensor, has_hooks, on_layer, replace_first
from explain.inputs import Inputs
from explain.interrupts import came_by_signal
from explain.targets import find_logits


def behind_layer(stream: Stream, rows: Rows, readers: Sequence[Readers], asked: Asked, progress: Told) -> None:
    """Run up to the layer once for each image, and from there on for all of its altered feature maps.

    A network in which something leads past the layer may not take more rows behind it than before it, or say something
    else of them, which the row that is not altered shows; it runs whole for every altered map.
    """
    assert stream.layer is not None
    layer, device = stream.layer, asked.inputs.x.device
    cut_off = _CutOff(asked, layer, readers)
    most = asked.footprint.most(device, graph=False, after=layer)
    kind = (tuple(asked.inputs.x.shape[1:]), asked.inputs.x.dtype, layer)
    pace = Pace(asked.model, kind, most, device)
    for image in range(len(asked.inputs)):
        mine = (rows.owners == image).nonzero()[:, 0]
        if not len(mine):
            continue
        cut_off.begin(image)
        in_pieces(mine, partial(cut_off.run, rows), readers, asked, progress, pace)


class _CutOff:
    """Runs what lies behind a layer on other feature maps than its own."""

    def __init__(self, asked: Asked, layer: str, readers: Sequence[Readers]) -> None:
        self._asked, self._layer, self._readers = asked, layer, readers
        self._record: Record = asked.forward.record(layer)
        self._fans_out = not asked.one_at_a_time
        self._tape: Tape | None = None

    def begin(self, image: int) -> None:
        self._image = torch.tensor([image], device=self._asked.inputs.x.device)
        self._tape = self._taped() if self._fans_out else None

    def run(self, rows: Rows, numbers: torch.Tensor, check: bool) -> None:
        with calculating(self._asked.inputs.x.device.type):
            images, maps = rows.owners[numbers], rows.make(numbers)
        own = self._maps(self._image)
        if check:
            images, maps = torch.cat([images, self._image]), torch.cat([maps, own.to(maps)])
        if self._fans_out and not self._asked.one_at_a_time:
            try:
                output = self._scored(images, self._image, maps)
                self._check(output, images, check)
            except (RuntimeError, ValueError, IndexError, ExplainError, DependentRowsError) as error:
                if is_out_of_memory(error) or came_by_signal(error):
                    raise
                note(f"every map of layer {self._layer} takes a whole pass: {raised(error)}")
                self._fans_out, self._tape = False, None
        if not self._fans_out or self._asked.one_at_a_time:
            output = self._scored(images, images, maps)
            self._check(output, images, check)
        for reader in self._readers:
            score = reader.choice.of_rows(images).pick(output, len(images))[0].detach()
            reader.add_scores(images[: len(numbers)], numbers, at_least_float32(score), output)

    def _check(self, output: Any, images: torch.Tensor, check: bool) -> None:
        asked = self._asked
        if asked.forward.logits is not None and asked.inputs.others:
            check_width(asked, find_logits(output, len(images)))
        for reader in self._readers:
            score = at_least_float32(reader.choice.of_rows(images).pick(output, len(images))[0].detach())
            if torch.isnan(score).any():
                raise DependentRowsError  # something reads what the layer overwrote, which has fewer rows
            if check and not agree(score[-1:], reader.choice.score[images[-1:]], asked.inputs.x, asked.work, 1e-2):
                raise DependentRowsError

    def _maps(self, image: torch.Tensor) -> torch.Tensor:
        """The layer's own feature maps for an image."""
        return self._asked.forward.spatial(self._record.activation, self._layer)[image]

    def _taped(self) -> Tape | None:
        """Run up to the layer, noting what happens; not where hooks of others would see the replay."""
        asked, record, tape, calls = self._asked, self._record, Tape(), Counter[str]()
        if has_hooks(asked.model):
            return None
        overwriting = Overwriting()

        def reached(module: nn.Module, args: Any, output: Any) -> None:
            calls[record.layer] += 1
            tensor = first_tensor(output)
            overwrites = tensor is not None and overwriting.is_by(record.layer, tensor)
            if calls[record.layer] == record.call + 1:
                tape.stop()
                raise _Reached(overwrites)

        alone = asked.inputs.rows(self._image)  # made before the tape runs, as before a replay
        with running_altered(asked), HookGroup(asked.model) as group:
            overwriting.watch(group, record.layer)
            on_layer(group, asked.model, record.layer, reached)
            try:
                with tape:
                    alone.call(asked.model)
            except _Reached as end:
                return None if end.overwrites else tape
        return None

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
                    tensor.copy_(altered)  # who reads it by its older name sees the change too
                    return None
                tensor.fill_(float("nan"))  # who reads it by its older name shows it: that one has fewer rows
            return replace_first(output, altered.clone())  # the network may overwrite it, and run once more

        def run(inputs: Inputs) -> Any:
            calls.clear()  # it may run once more in another layout
            with HookGroup(asked.model) as group:
                overwriting.watch(group, record.layer)
                on_layer(group, asked.model, record.layer, replaced)
                with ExitStack() as stack:
                    if replay is not None:
                        stack.enter_context(replay)
                    return inputs.call(asked.model)

        with running_altered(asked):
            if replay is not None:
                output = run(asked.inputs.rows(before))
            else:
                output = in_fastest_layout(asked, before, {asked.inputs.path: asked.inputs.x[before]}, run)
        if tape is not None and not tape.is_intact():
            self._tape = self._taped()
        return output

    def _laid_out(self, maps: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Feature maps as the layer would have given them."""
        raw = self._record.activation
        grid = self._asked.forward.grids.grid(tuple(raw.shape), self._layer)
        assert grid is not None  # the maps were laid out by it
        return grid.fold(maps.to(raw), raw.index_select(grid.of_images, images))


class _Reached(BaseException):
    """Ends a forward pass at the layer; no ``except Exception`` of the model catches it."""

    def __init__(self, overwrites: bool) -> None:
        super().__init__()
        self.overwrites = overwrites
