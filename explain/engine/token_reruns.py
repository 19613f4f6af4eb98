"""Perturbed tokens of transformers: some of the tokens of an image go into the first block."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from explain._utils.errors import MethodError, raised
from explain.engine.accumulators import Add, TargetAccumulators
from explain.engine.blocks import explained_blocks, with_first
from explain.engine.perturbations import PerturbedRows
from explain.engine.rerun_context import RerunContext
from explain.engine.settings import raise_unless_of_network
from explain.hooks import HookGroup
from explain.layers.layouts import Grid


class TokenRerun:
    """Runs a transformer on some tokens of each image, which have their position encoding already:
    the network before the first block once for a batch, the rest on those tokens."""

    def __init__(
        self,
        context: RerunContext,
        samples: PerturbedRows,
        accumulators: Sequence[TargetAccumulators],
    ) -> None:
        """Find the transformer's first block and how its tokens are laid out; refuse other
        networks."""
        self.context = context
        self.samples = samples
        self.samples_at_once = context.samples_at_once("together")
        self._accumulators = accumulators
        self._blocks = explained_blocks(context.model, context.inputs)
        if not self._blocks:
            raise _refused(f"{type(context.model).__name__} has no blocks")
        # a layer that is known by its name has its grid whatever the shape
        grid = context.forward.grids.grid((len(context.inputs), 0, 0), self._blocks[0])
        if grid is None or grid.layout not in ("tokens", "tokens first"):
            raise _refused(f"{type(context.model).__name__} has other blocks")
        self._grid: Grid = grid
        """Where the first block's tokens lie on the image."""

    def begin(self, image: Tensor) -> None:
        """Check, before the samples of an image ``(1,)``, that the network scores subsets of its
        tokens right: with all of them, as one sample of two, the image has its own score."""
        context = self.context
        self._image = image
        images = image.expand(2)
        indices = (self.samples.owners == image).nonzero()[:, 0]
        all_tokens = torch.ones(2, *self._grid.size, dtype=torch.bool, device=image.device)
        first_and_last = self.samples.make(indices[[0, -1]])
        output_of_all = self._output(all_tokens)
        output_together = self._output(first_and_last)
        output_alone = self._output(first_and_last[1:])
        for resolved in context.targets:
            of_all = resolved.scores_in(images, output_of_all)
            of_last = resolved.scores_in(images, output_together)[1:]
            last_alone = resolved.scores_in(image, output_alone)
            if not (
                context.same_scores(resolved, of_all, resolved.score[images])
                and context.same_scores(resolved, of_last, last_alone)
            ):
                raise _refused(
                    "an image has another score when its tokens go into the first block again, "
                    "among others"
                )

    def confirm(self, samples: int) -> None:
        """Nothing more: `begin` runs the tokens in two batches."""

    def run(self, indices: Tensor) -> list[Add]:
        """Run the network on the image's subsets of tokens at these indices; return functions that
        add the results for each target. `begin` was called with the image before."""
        images = self._image.expand(len(indices))
        output = self._output(self.samples.make(indices))
        return [
            accumulators.read_output(images, indices, output) for accumulators in self._accumulators
        ]

    def _output(self, keep: Tensor) -> Any:
        """The network's output for subsets ``keep`` ``(b, h, w)`` of the image's tokens, as many in
        each sample; others are taken out of the first block's input."""
        is_taken: list[bool] = []  # not empty once the first block has got its tokens

        def kept_tokens(tokens: Any) -> Tensor | None:
            """The tokens of each sample out of the first block's input ``(1, tokens, C)``:
            ``(b, kept, C)``, with those that are no patches; None leaves a later block's input."""
            image_dim = self._grid.of_images
            # later blocks, and what is no sequence of tokens of the one image, stay as they are
            if (
                is_taken
                or not isinstance(tokens, Tensor)
                or tokens.ndim != 3
                or tokens.shape[image_dim] != 1
            ):
                return None
            is_taken.append(True)
            image_tokens = tokens.movedim(image_dim, 0)[0]
            is_kept = torch.ones(len(keep), len(image_tokens), dtype=torch.bool, device=keep.device)
            is_kept[:, list(self._grid.tokens)] = keep.flatten(1)
            # in their order, with the tokens that are no patches
            chosen = is_kept.nonzero()[:, 1].reshape(len(keep), -1)
            return image_tokens[chosen].movedim(0, image_dim)

        def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_first(module, args, kwargs, kept_tokens)

        try:
            with self.context.runs_model(), HookGroup(self.context.model) as group:
                group.forward_pre(self._blocks, take, with_kwargs=True)
                return self.context.inputs.rows(self._image).call(self.context.model)
        # the network may fail in any way on fewer tokens than it was made for
        except Exception as error:
            raise_unless_of_network(error)
            raise _refused(raised(error)) from error


def _refused(why: str) -> MethodError:
    """The error for a network that is no transformer of which a part of the tokens can be run."""
    return MethodError(
        f"model must be a transformer whose blocks take any number of tokens, but {why}; use rise"
    )
