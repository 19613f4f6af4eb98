"""Transformers run on some of a photo's tokens: the others are left out where the first block begins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from explain._utils.errors import MethodError, raised
from explain._utils.signals import came_by_signal
from explain.data.inputs import Path
from explain.engine.batching import Add, ProgressCallback, Readers, in_pieces
from explain.engine.blocks import explained_blocks, first_keyword
from explain.engine.evidence import Evidence, TargetContext, at_least_float32
from explain.engine.forward import ResolvedTarget
from explain.engine.perturbations import PerturbedRows
from explain.engine.plan import Stream
from explain.engine.rerun_context import DependentRowsError, RerunContext, running_altered, scores_agree, scores_of
from explain.engine.settings import BatchSizeTuner, is_out_of_memory
from explain.hooks import HookGroup
from explain.layers import Grid
from explain.targets import find_logits


def sampled_tokens(
    stream: Stream, rows: PerturbedRows, readers: Sequence[Readers], asked: RerunContext, progress: ProgressCallback
) -> None:
    """Run a transformer on some tokens of each photo; each has its place in it already.

    What lies before the first block is run once for each piece of rows.

    Raises:
        MethodError: the network has no blocks that take any number of tokens.
    """
    entrance = _Entrance(asked)
    device = asked.inputs.x.device
    kind = (tuple(asked.inputs.x.shape[1:]), asked.inputs.x.dtype, asked.work.precision, "tokens")
    pace = BatchSizeTuner(asked.model, kind, asked.footprint.most(device, graph=False), device)
    for image in range(len(asked.inputs)):
        mine = (rows.owners == image).nonzero()[:, 0]
        if len(mine):
            of_image = torch.tensor([image], device=device)
            entrance.must_be_seen(of_image)
            in_pieces(mine, partial(_run, entrance, of_image, rows, readers, asked), readers, asked, progress, pace)


def _run(
    entrance: _Entrance,
    image: torch.Tensor,
    rows: PerturbedRows,
    readers: Sequence[Readers],
    asked: RerunContext,
    numbers: torch.Tensor,
    check: bool,
) -> Add:
    keep = rows.make(numbers)
    images = image.expand(len(numbers))
    output = entrance.output(image, keep)
    if check and "tokens" not in asked.proved:
        _must_be_alone(entrance.output(image, keep[:1]), output, images, readers, asked)
        asked.proved.add("tokens")
    add = [reader.read(images, numbers, partial(_evidence, asked, reader.choice, images, output)) for reader in readers]
    return partial(_all, add)


def _must_be_alone(
    alone: Any, output: Any, images: torch.Tensor, readers: Sequence[Readers], asked: RerunContext
) -> None:
    """See that the first row has the same score alone as among others.

    Raises:
        DependentRowsError: it has not.
    """
    for reader in readers:
        one, among = scores_of(reader.choice, images[:1], alone), scores_of(reader.choice, images, output)[:1]
        if not scores_agree(asked, reader.choice, one, among):
            raise DependentRowsError


def _evidence(
    asked: RerunContext,
    choice: ResolvedTarget,
    images: torch.Tensor,
    output: Any,
    layer: str | None,
    path: Path | None = None,
) -> Evidence:
    logits = None
    if asked.forward.logits is not None:
        logits = at_least_float32(find_logits(output, len(images)).detach())
    classes = None if choice.classes is None else choice.classes[images]
    score, x = scores_of(choice, images, output), asked.inputs.x[images]
    outputs = asked.evidence(choice, None).question.outputs
    question = TargetContext(x, score, classes, choice.name, asked.forward.grids, logits, outputs=outputs)
    return Evidence(question, None, {})


class _Entrance:
    """The block of a transformer that runs first, into which some tokens of a photo go."""

    def __init__(self, asked: RerunContext) -> None:
        self._asked = asked
        blocks = self._blocks = explained_blocks(asked.model, asked.inputs)
        # a layer that is known by its name has its grid whatever the shape
        grid = asked.forward.grids.grid((len(asked.inputs), 0, 0), blocks[0]) if blocks else None
        if grid is None or grid.layout not in ("tokens", "tokens first"):
            raise _refused(f"{type(asked.model).__name__} has {'other' if blocks else 'no'} blocks")
        self._grid: Grid = grid

    def must_be_seen(self, image: torch.Tensor) -> None:
        """See that the photo has its own score when all of its tokens go in, as one row of two.

        Raises:
            MethodError: it has not.
        """
        output = self.output(image, torch.ones(2, *self._grid.size, dtype=torch.bool, device=image.device))
        for choice in self._asked.choices:
            found = scores_of(choice, image.expand(2), output)
            if not scores_agree(self._asked, choice, found, choice.score[image].expand(2)):
                raise _refused("the photo has another score when its tokens go into the first block again")

    def output(self, image: torch.Tensor, keep: torch.Tensor) -> Any:
        """The network's output for a photo of which these tokens ``(b, h, w)`` go in, as many in each row."""
        stored = keep.transpose(-1, -2) if self._grid.swapped else keep
        places = stored.flatten(1).nonzero()[:, 1].reshape(len(keep), -1) + self._grid.skip
        extra = torch.arange(self._grid.skip, device=places.device).expand(len(keep), -1)
        chosen = torch.cat([extra, places], 1)
        taken: list[bool] = []

        def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            key = None if args else first_keyword(module, kwargs)
            tokens = args[0] if key is None else kwargs.get(key)
            of_images = self._grid.of_images
            if taken or not isinstance(tokens, torch.Tensor) or tokens.ndim != 3 or tokens.shape[of_images] != 1:
                return None
            taken.append(True)
            some = tokens.movedim(of_images, 0)[0][chosen].movedim(0, of_images)
            return ((some, *args[1:]), kwargs) if key is None else ((), {**kwargs, key: some})

        try:
            with running_altered(self._asked), HookGroup(self._asked.model) as group:
                group.forward_pre(self._blocks, take, with_kwargs=True)
                return self._asked.inputs.rows(image).call(self._asked.model)
        except Exception as error:  # whatever the network says of other tokens than it was made for
            if is_out_of_memory(error) or came_by_signal(error):
                raise
            raise _refused(raised(error)) from error


def _refused(why: str) -> MethodError:
    return MethodError(
        f"model must be a vision transformer whose blocks take any number of tokens for tokens to be left out, but "
        f"{why}; use vitcx, or rise"
    )


def _all(add: Sequence[Add]) -> None:
    for each in add:
        each()
