"""How perturbed rows are run, decided by a probe before the first of them.

The probe runs an unperturbed image between rows that are far from it. If it has its known score there, rows follow
their images: they are run in batches. Otherwise each row is run alone, in the place of its image among the others; so
every network and every target has the scores that it would have if the caller had perturbed the image.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from explain._utils.errors import ModelError, note, raised
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs, Path
from explain.engine.forward import Forward, ResolvedTarget
from explain.engine.incremental import IncrementalInference
from explain.engine.needs import Evidence, EvidenceLookup, RowOrigin
from explain.engine.replay import Tape
from explain.engine.settings import MEMORY, BatchSizeTuner, Footprint, RuntimeSettings, agree, autocast, lacks_memory
from explain.hooks.interventions import rows_of
from explain.hooks.preserve import untouched
from explain.targets.base import find_logits
from explain.targets.detector_outputs import reading_once

Way: TypeAlias = Literal["channels last", "together", "behind the layer", "in place"]
"""How rows are run: all together, in two layouts; behind a layer alone; or one by one among the other images."""


@dataclass(eq=False)
class RerunState:
    """What is found out on the first rows of a forward pass, for all further ones."""

    ways: dict[Hashable, Way] = field(default_factory=dict)
    """How rows are run that are perturbed at a place: the input (None), or a layer of an image."""
    tapes: dict[str, Tape] = field(default_factory=dict)
    """What lies before a layer, by its name, if the forward pass recorded it."""
    incremental: IncrementalInference | None = None
    interrupted: list[KeyboardInterrupt] = field(default_factory=list)
    """What has ended the work early, if partial results are wanted."""


@dataclass(eq=False)
class RerunContext:
    """What perturbed rows are made of, and how they are run."""

    forward: Forward
    targets: Sequence[ResolvedTarget]
    evidence: Callable[..., Evidence]
    """From a resolved, a layer or none, and a path or none."""
    footprint: Footprint
    settings: RuntimeSettings
    gather: Callable[..., Sequence[EvidenceLookup]]
    """The engine's `gather`, for perturbed rows."""
    origin: RowOrigin | None = None
    """What the inputs are rows of, if they are."""
    state: RerunState = field(default_factory=RerunState)

    @property
    def model(self) -> nn.Module:
        return self.forward.model

    @property
    def inputs(self) -> Inputs:
        return self.forward.inputs

    @property
    def device(self) -> torch.device:
        return self.inputs.x.device

    @contextmanager
    def runs_model(self) -> Iterator[None]:
        """Run the model outside `gather`, as it does: alone in its thread, left as found, in the same precision."""
        with untouched(self.model, alone=True), autocast(self.inputs.x, self.settings.precision):
            yield

    @cached_property
    def input_way(self) -> Way:
        """How perturbed inputs are run."""
        if None not in self.state.ways:
            self.state.ways[None] = self._input_way()
        return self.state.ways[None]

    def _input_way(self) -> Way:
        images = self.probed(torch.tensor([len(self.inputs) - 1], device=self.device))
        if self.runs_in_place or len(images) == 1:
            return "in place"
        rows = {path: between_far_rows(self.inputs.tensor(path)[images]) for path in self.inputs.paths}
        ways: list[Way] = ["together"]
        if self.device.type == "cpu" and self.inputs.x.ndim == 4:
            ways.insert(0, "channels last")  # convolutions on a CPU are faster so

        def run(way: Way) -> Any:
            return self.laid_out(way, images, rows).call(self.model)

        for way in ways:
            if self.is_right(partial(run, way), images):
                return way
        return self.in_place()

    @property
    def runs_in_place(self) -> bool:
        """Whether the inputs are a perturbed row and the other images of its batch."""
        return self.origin is not None and self.origin.image is not None

    @property
    def is_batch_of_rows(self) -> bool:
        """Whether the inputs are perturbed rows that happen to be run together."""
        return self.origin is not None and self.origin.image is None and len(self.inputs) > 1

    def probed(self, image: Tensor) -> Tensor:
        """The image of each row of a probe: more than one where several are run together, and another number than N."""
        count = len(self.inputs)
        if count == 1 and self.settings.batch_size == 1:
            return image
        return image.expand(4 if count == 3 else 3)

    def laid_out(self, way: Way, images: Tensor, perturbed: Mapping[Path, Tensor]) -> Inputs:
        """The inputs for perturbed rows that belong to these images, in the memory format of a way to run them."""
        layout = torch.channels_last if way == "channels last" else torch.preserve_format
        laid_out = {path: t.contiguous(memory_format=layout) if t.ndim == 4 else t for path, t in perturbed.items()}
        return self.inputs.rows(images, laid_out)

    @reading_once()
    def is_right(self, run: Callable[[], Any], images: Tensor) -> bool:
        """Whether ``run`` gives an image its known score: the only one of these, or the second row, between others."""
        known = self.forward.logits
        place = slice(0, 1) if len(images) == 1 else slice(1, 2)
        try:
            with rows_of(images), self.runs_model():
                output = run()
            if known is not None and self.inputs.others:
                width = find_logits(output, len(images)).shape[1]
                if width != known.shape[1]:  # some input says which classes there are
                    return False
            for resolved in self.targets:
                score = resolved.scores_in(images, output)[place]
                if not self.same_scores(resolved, score, resolved.score[images[:1]]):
                    return False
        except Exception as error:  # whatever a network or a target says of other rows than the images
            if came_by_signal(error) or (self.is_batch_of_rows and lacks_memory(error)):
                raise
            note(f"perturbed rows are run in a slower way: {raised(error)}")
            return False
        return True

    def in_place(self) -> Way:
        """Run each row alone, in the place of its image.

        Raises:
            ModelError: images have other scores when the same batch is run again; or they are themselves rows that
                batches were made of.
        """
        count = len(self.inputs)
        if self.is_batch_of_rows:
            raise ModelError("model must score each row of a batch on its own, but does not; use batch_size=1")
        images = torch.arange(count, device=self.device)
        with rows_of(images), self.runs_model():
            output = self.inputs.rows(images).call(self.model)
        for resolved in self.targets:
            again = resolved.scores_in(images, output)
            if not self.same_scores(resolved, again, resolved.score):
                self._refuse(resolved.score, again)
        note("perturbed rows are run one at a time: the scores of an image depend on the others of its batch")
        return "in place"

    def _refuse(self, score: Tensor, again: Tensor) -> None:
        image = int((again - score).abs().argmax())
        must = "model must give an image the same score whenever it is run"
        got = f"but gave image {image} {score[image].item():.4g} and then {again[image].item():.4g}"
        remedy = "(a counter, or random numbers that go on?); put back what it remembers, or use gradcam"
        raise ModelError(f"{must}, {got} {remedy}")

    def same_scores(self, resolved: ResolvedTarget, one: Tensor, other: Tensor) -> bool:
        """Whether two scores of perturbed rows are the same but for rounding."""
        scale = self.forward.scale(resolved)
        one = one.to(resolved.score)
        other = other.to(resolved.score)
        return agree(one, other, self.inputs.x, self.settings, scale, 1e-2, half=self.footprint.half)

    def incremental(self) -> IncrementalInference | None:
        """What runs the rows of images incrementally; None where nothing does."""
        x = self.inputs.x
        needed = sum(size for _, size in self.footprint.outputs) * len(self.inputs)
        if x.device.type != "cpu" or len(self.inputs.paths) > 1 or needed > MEMORY:
            return None
        if self.inputs.layout == "NTCHW":  # what the model is given is laid out again
            return None
        if self.state.incremental is None:
            self.state.incremental = IncrementalInference(self.model, x)
        return self.state.incremental

    def tuner(self, kind: Hashable, way: Way, most: int, sizes: tuple[int, ...] | None = None) -> BatchSizeTuner:
        """What chooses the batch sizes for this ``kind`` of work, of which ``most`` rows fit into memory."""
        x = self.inputs.x
        batch_size = 1 if way == "in place" else self.settings.batch_size
        kind = (tuple(x.shape[1:]), x.dtype, self.settings.precision, kind)
        return BatchSizeTuner(self.model, kind, most, x.device, given=batch_size, sizes=sizes)


def between_far_rows(rows: Tensor) -> Tensor:
    """Equal rows of which all but the second are moved so far away that any influence on it shows; one alone stays."""
    if len(rows) == 1:
        return rows.clone()
    own = rows[:1]
    far = 2 * own + own.abs().amax().clamp(min=1)
    return torch.cat([far, own, -far, far])[: len(rows)]
