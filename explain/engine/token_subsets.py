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
from explain.engine.batching import Add, ProgressCallback, Readers, run_in_batches
from explain.engine.blocks import explained_blocks, first_keyword
from explain.engine.evidence import Evidence, at_least_float32
from explain.engine.forward import ResolvedTarget
from explain.engine.perturbations import PerturbedRows
from explain.engine.rerun_context import RerunContext, check_rows, scores_of
from explain.engine.settings import is_out_of_memory
from explain.hooks import HookGroup
from explain.layers.layouts import Grid
from explain.targets.base import find_logits

_PLACE = "tokens of the first block"


def run_token_subsets(
    rows: PerturbedRows, readers: Sequence[Readers], context: RerunContext, progress: ProgressCallback
) -> None:
    """Run a transformer on some tokens of each photo; each token has its position encoding already.

    The network before the first block is run once for each batch of rows.

    Raises:
        MethodError: the network has no blocks that take any number of tokens.
    """
    blocks = _FirstBlock(context)
    device = context.inputs.x.device
    tuner = context.tuner("tokens", context.footprint.most(device, graph=False))
    for image in range(len(context.inputs)):
        mine = (rows.owners == image).nonzero()[:, 0]
        if len(mine):
            of_image = torch.tensor([image], device=device)
            blocks.check_all_tokens(of_image)
            run_in_batches(
                mine, partial(_run, blocks, of_image, rows, readers, context), readers, context, progress, tuner
            )


def _run(
    blocks: _FirstBlock,
    image: torch.Tensor,
    rows: PerturbedRows,
    readers: Sequence[Readers],
    context: RerunContext,
    numbers: torch.Tensor,
    check: bool,
) -> list[Add]:
    keep = rows.make(numbers)
    images = image.expand(len(numbers))
    output = blocks.output(image, keep)
    if check:
        scores = [(reader.choice, scores_of(reader.choice, images, output)) for reader in readers]
        run_first = partial(blocks.output, image, keep[:1])
        check_rows(context, _PLACE, images, scores, run_first, last_is_image=False)
    return [
        reader.read(images, numbers, partial(_evidence, context, reader.choice, images, output)) for reader in readers
    ]


def _evidence(
    context: RerunContext,
    choice: ResolvedTarget,
    images: torch.Tensor,
    output: Any,
    layer: str | None,
    path: Path | None = None,
) -> Evidence:
    logits = None
    if context.forward.logits is not None:
        logits = at_least_float32(find_logits(output, len(images)).detach())
    classes = None if choice.classes is None else choice.classes[images]
    score, x = scores_of(choice, images, output), context.inputs.x[images]
    outputs = context.evidence(choice, None).find_outputs
    return Evidence(x, score, classes, choice.name, context.forward.grids, logits, find_outputs=outputs)


class _FirstBlock:
    """The block of a transformer that runs first, into which some tokens of a photo go."""

    def __init__(self, context: RerunContext) -> None:
        self._context = context
        blocks = self._blocks = explained_blocks(context.model, context.inputs)
        # a layer that is known by its name has its grid whatever the shape
        grid = context.forward.grids.grid((len(context.inputs), 0, 0), blocks[0]) if blocks else None
        if grid is None or grid.layout not in ("tokens", "tokens first"):
            raise _refused(f"{type(context.model).__name__} has {'other' if blocks else 'no'} blocks")
        self._grid: Grid = grid

    def check_all_tokens(self, image: torch.Tensor) -> None:
        """Check that the photo has its own score when all of its tokens go in, as one row of two.

        Raises:
            MethodError: it has not.
        """
        output = self.output(image, torch.ones(2, *self._grid.size, dtype=torch.bool, device=image.device))
        if not self._context.are_known(image.expand(2), output, self._context.choices):
            raise _refused("the photo has another score when its tokens go into the first block again")

    def output(self, image: torch.Tensor, keep: torch.Tensor) -> Any:
        """The network's output for these tokens ``(b, h, w)`` of a photo, as many in each row."""
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
            with self._context.runs_model(), HookGroup(self._context.model) as group:
                group.forward_pre(self._blocks, take, with_kwargs=True)
                return self._context.inputs.rows(image).call(self._context.model)
        except Exception as error:  # whatever the network says of other tokens than it was made for
            if is_out_of_memory(error) or came_by_signal(error):
                raise
            raise _refused(raised(error)) from error


def _refused(why: str) -> MethodError:
    return MethodError(
        f"model must be a vision transformer whose blocks take any number of tokens for tokens to be left out, but "
        f"{why}; use vitcx, or rise"
    )
