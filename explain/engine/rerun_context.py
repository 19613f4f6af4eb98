"""What perturbed rows are made of, how they are run, and checks that their scores do not depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import nn

from explain._utils.errors import ExplainError, ModelError, note, raised
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs, Path, dotted
from explain.engine.evidence import Evidence, at_least_float32
from explain.engine.forward import Forward, ResolvedTarget
from explain.engine.replay import Tape
from explain.engine.settings import BatchSizeTuner, Footprint, RuntimeSettings, agree, autocast, is_out_of_memory
from explain.hooks import untouched

T = TypeVar("T")
EvidenceLookup: TypeAlias = Callable[..., Evidence]
"""From a layer or none, and of several explained inputs one, to what was found for a target."""


@dataclass(eq=False)
class RerunContext:
    """What perturbed rows are made of, and how they are run."""

    forward: Forward
    choices: Sequence[ResolvedTarget]
    evidence: Callable[..., Evidence]
    """From a choice, a layer or none, and a path or none."""
    footprint: Footprint
    work: RuntimeSettings
    gather: Callable[..., Sequence[EvidenceLookup]]
    """The engine's `gather`, for perturbed rows."""
    running: Callable[[], Any]
    tapes: dict[str, Tape] = field(default_factory=dict)
    """What lies before a layer, by its name, if the forward pass recorded it."""
    channels_last: bool = True
    """Whether the network takes inputs in this layout, which convolutions on a CPU are faster in."""
    one_at_a_time: bool = False
    fixed: bool = False
    """Whether the network takes as many rows as there are images, and no other number."""
    checked: set[str | None] = field(default_factory=set)
    """Where perturbed rows, of the input or of a layer, were found to score the same alone as among others."""
    again: bool = False
    """Whether a method runs further rows, after some that were found not to depend on each other."""
    longest: int = 0
    """The number of rows of the longest stream, whose first row is also run alone for this check."""
    interrupted: list[BaseException] = field(default_factory=list)
    """What has ended the work early, if partial results are wanted."""

    @property
    def model(self) -> nn.Module:
        return self.forward.model

    @property
    def inputs(self) -> Inputs:
        return self.forward.inputs

    @contextmanager
    def runs_model(self) -> Iterator[None]:
        """Run the model outside `gather`, as it does: alone in its thread, left as found, in the same precision."""
        with self.running(), untouched(self.model), autocast(self.inputs.x, self.work.precision):
            yield

    def run_alone(self, inputs: Inputs) -> Any:
        """The network's output for one row; None if it takes only as many rows as there are images."""
        try:
            with self.runs_model():
                return inputs.call(self.model)
        except Exception as error:
            if is_out_of_memory(error) or came_by_signal(error) or isinstance(error, ExplainError):
                raise
            self.fixed = True
            return None

    def in_fastest_layout(
        self, images: torch.Tensor, perturbed: Mapping[Path, torch.Tensor], run: Callable[[Inputs], T]
    ) -> T:
        """Run perturbed rows that belong to these images, channels last if the network takes them so."""
        first = perturbed[self.inputs.path]
        several = len(first) > 1  # one alone is faster by little, and see `Inputs.copied`
        if self.channels_last and several and first.device.type == "cpu" and first.ndim == 4:
            turned = {
                path: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t
                for path, t in perturbed.items()
            }
            try:
                return run(self.inputs.rows(images, turned))
            except RuntimeError as error:
                if "view" not in str(error):  # what .view() says of a layout that it cannot take
                    raise
                note(f"inputs are laid out channels first, which is slower on a CPU: {raised(error)}")
                self.channels_last = False
        return run(self.inputs.rows(images, perturbed))

    def tuner(self, kind: Hashable, most: int, sizes: tuple[int, ...] | None = None) -> BatchSizeTuner:
        """What chooses the batch sizes for this ``kind`` of work, of which ``most`` rows fit into memory."""
        x, given = self.inputs.x, 1 if self.one_at_a_time else self.work.batch_size
        kind = (tuple(x.shape[1:]), x.dtype, self.work.precision, kind)
        return BatchSizeTuner(self.model, kind, most, x.device, given=given, sizes=sizes)

    def same_scores(self, choice: ResolvedTarget, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two scores of perturbed rows are the same but for rounding."""
        scale = self.forward.scale(choice)
        return agree(one.to(choice.score), other.to(choice.score), self.inputs.x, self.work, scale, 1e-2)

    def are_known(self, images: torch.Tensor, output: Any, choices: Sequence[ResolvedTarget]) -> bool:
        """Whether an output for these unperturbed images has the scores that are known of them."""
        return all(self.same_scores(each, scores_of(each, images, output), each.score[images]) for each in choices)


def scores_of(choice: ResolvedTarget, images: torch.Tensor, output: Any) -> torch.Tensor:
    """What a target picks from an output with rows that belong to these images."""
    return at_least_float32(choice.of_rows(images).pick(output, len(images))[0].detach())


# Do scores depend on the other rows of a batch? What follows decides that, for images and for perturbed rows.


class DependentRowsError(Exception):
    """A row has another score among others than alone."""


class DependentImagesError(ModelError):
    """An image has another score among the others than alone."""


def check_rows(
    context: RerunContext,
    place: str | None,
    images: torch.Tensor,
    scores: Sequence[tuple[ResolvedTarget, torch.Tensor]],
    run_first: Callable[[], Any],
    *,
    last_is_image: bool = True,
) -> None:
    """Check that the scores of perturbed rows, which belong to ``images``, do not depend on each other.

    If the last row is an unperturbed image, its score must be the known one. The first row must have the same score
    alone: ``run_first`` returns the output for it, or None where that cannot be had. That is done once for each
    ``place`` where rows are perturbed: a layer, or None for the input.

    Raises:
        DependentRowsError: a row has another score among the others than alone.
    """
    for choice, score in scores if last_is_image else ():
        if not context.same_scores(choice, score[-1:], choice.score[images[-1:]]):
            raise DependentRowsError
    output = None if place in context.checked else run_first()
    if output is None:
        return
    for choice, score in scores:
        if not context.same_scores(choice, score[:1], scores_of(choice, images[:1], output)):
            raise DependentRowsError
    context.checked.add(place)


def check_images(context: RerunContext, *, if_possible: bool = False) -> None:
    """Refuse a batch in which an image has another score than alone; perturbed rows could not be compared with it.

    Quantised networks take one scale for all images, which makes a small difference: it is accepted.

    Raises:
        DependentImagesError: an image has another score, or (unless only ``if_possible``) cannot be run alone.
    """
    several = len(context.inputs) > 1
    if not several and (if_possible or context.work.precision != "full"):
        return
    quantised = any("quantized" in type(module).__module__ for module in context.model.modules())
    for image in range(len(context.inputs)):
        mine = torch.tensor([image], device=context.inputs.x.device)
        output = context.run_alone(context.inputs.rows(mine))
        if output is None and if_possible:
            return
        if output is None:
            raise DependentImagesError(
                "model must score each image on its own to be run on perturbed images, but rows change each other's "
                f"scores and it takes {len(context.inputs)} images only; export it for one image"
            )
        for choice in context.choices:
            alone, among = scores_of(choice, mine, output), choice.score[mine]
            close = abs(alone - among) <= 0.05 * max(alone.abs().max(), among.abs().max())
            if context.same_scores(choice, alone, among) or (quantised and close):
                continue
            if several:
                raise DependentImagesError(
                    f"model must score each image on its own to be run on perturbed images, but image {image} scores "
                    f"{among.item():.4g} among the others and {alone.item():.4g} alone (a normalisation over the "
                    "batch?); explain one image at a time"
                )
            raise DependentImagesError(
                f"model must give an image the same score whenever it is run, but gave image {image} "
                f"{among.item():.4g} and then {alone.item():.4g} (a counter, or random numbers that go on?); put back "
                "what it remembers, or use a method of one pass such as gradcam"
            )


def check_inputs_beside(forward: Forward, choice: ResolvedTarget, work: RuntimeSettings) -> None:
    """Refuse an input that seems to have a row for each image, but belongs to all of them.

    Perturbed images are given the rows of the images that they are made of; so the first image, with its rows alone,
    has to have the score that it has among the others. If the network takes no other number of images, the image is
    repeated to fill the batch.
    """
    inputs = forward.inputs
    rows = [way for way in inputs.others if inputs.goes_with_images(way)]
    if not rows or len(inputs) == 1:
        return
    for count in (1, len(inputs)):
        first = torch.zeros(count, dtype=torch.long, device=inputs.x.device)
        try:
            score = choice.of_rows(first).pick(inputs.rows(first).call(forward.model), count)[0][:1].detach()
        except Exception as error:  # whatever it is, the image does not go with what it was given
            if came_by_signal(error):
                raise
            continue
        if agree(at_least_float32(score), choice.score[:1], inputs.x, work, forward.scale(choice)):
            return
        break
    _refuse_shared(rows)


def check_width(context: RerunContext, logits: torch.Tensor | None) -> None:
    """Refuse scores for other classes than those of the unperturbed images: some input says what they are."""
    known = context.forward.logits
    if context.inputs.others and known is not None and logits is not None and logits.shape[1] != known.shape[1]:
        _refuse_shared(context.inputs.others)


def _refuse_shared(ways: Iterable[Path]) -> NoReturn:
    raise ModelError(
        "model must say the same of an image whatever stands beside it, but does not; name those of its inputs "
        f"({', '.join(map(dotted, ways))}) that belong to no single image in explain.Inputs(..., shared=...)"
    )
