"""How perturbed samples are run, decided by a probe before the first of them.

The probe runs an unperturbed image twice, between samples that are far from it. If it has its known
score in both places, samples follow their images: they are run in batches. Otherwise each sample is
run alone, in the place of its image among the others; so every network and every target has the
scores that it would have if the caller had perturbed the image.

Each run begins with what the caller has left in the model, and with the same random numbers. A
network may keep state where that cannot be put back, so the probe comes again after all batches,
with as many samples as the last of them: once for a model, its weights and the number of samples.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from explain._utils.device_reads import read_together
from explain._utils.errors import ModelError, note, raised, warn
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs, Path
from explain.engine.forward import Forward, ResolvedTarget
from explain.engine.incremental import IncrementalInference
from explain.engine.needs import Evidence, EvidenceLookup, SampleOrigin
from explain.engine.plan import Plan
from explain.engine.prefix import LayerPrefix
from explain.engine.settings import Footprint, RuntimeSettings, lacks_memory
from explain.hooks.interventions import intervening_on_samples
from explain.hooks.preserve import calculating, findings_of, has_drawn, untouched
from explain.targets import Target
from explain.targets.base import find_logits
from explain.targets.detector_outputs import reading_once

Way: TypeAlias = Literal["channels last", "together", "behind the layer", "one at a time"]
"""How samples are run: all together, in two layouts; behind a layer alone; or one by one among the
other images."""

_MUST_REPEAT = "model must give an image the same score in each run"
_RESET = (
    "it keeps something from run to run, or its random numbers go on: reset it in a forward-pre "
    "hook of the model (another batch_size is no help), or use gradcam"
)


@dataclass(eq=False)
class RerunState:
    """What is decided or found out on the first samples of a forward pass, for all further ones."""

    ways: dict[Hashable, Way] = field(default_factory=dict)
    """How samples are run that are perturbed at a place: the input (None), or a layer of an
    image."""
    prefixes: dict[str, LayerPrefix | None] = field(default_factory=dict)
    """What lies before a layer for the only image, by the layer's name."""
    incremental: IncrementalInference | None = None
    interrupted: list[KeyboardInterrupt] = field(default_factory=list)
    """What has ended the work early, if partial results are wanted."""
    fitting: int | None = None
    """How many samples fit into memory, where more did not."""
    draws: bool = False
    """Whether a probe has seen the network draw random numbers."""
    is_told: bool = False
    """Whether that has been warned of."""
    looked_at: set[str] = field(default_factory=set)
    """The methods whose gradients have been looked at."""
    confirm: Callable[[], None] | None = None
    """The probe of the last batch, to be run after all of the work."""


@dataclass(eq=False)
class RerunContext:
    """What perturbed samples are made of, and how they are run."""

    forward: Forward
    targets: Sequence[ResolvedTarget]
    evidence: Callable[..., Evidence]
    """From a resolved, a layer or none, and a path or none."""
    footprint: Footprint
    settings: RuntimeSettings
    mixed_precision: AbstractContextManager[Any]
    """The caller's, which is left off but where the model runs."""
    gather: Callable[..., Sequence[EvidenceLookup]]
    """The engine's `gather`, for perturbed samples."""
    look_at_gradients: Callable[[Inputs, Plan, Sequence[Target]], None]
    """Warns of gradients in images that are not the derivative."""
    origin: SampleOrigin | None = None
    """What the inputs are samples of, if they are."""
    state: RerunState = field(default_factory=RerunState)

    def __post_init__(self) -> None:
        """Take over what all reruns read from the first forward pass: the model, its inputs, device
        and outputs. ``targets`` must not be empty."""
        forward = self.forward
        self.model: nn.Module = forward.model
        self.inputs: Inputs = forward.inputs
        self.device: torch.device = self.inputs.x.device
        self.find_outputs = self.evidence(self.targets[0], None).find_outputs

    @contextmanager
    def runs_model(self) -> Iterator[None]:
        """Enter what the model runs under outside `gather`: alone in its thread, left as found, in
        the caller's mixed precision."""
        with untouched(self.model, alone=True), self.mixed_precision:
            yield

    def way(
        self, place: Hashable, choices: Mapping[Way, Callable[[Tensor], Any]], image: Tensor
    ) -> Way:
        """Choose how perturbed samples are run at ``place`` (None for inputs, or a layer and an
        image): the first of ``choices`` that gives an unperturbed ``image`` its score."""
        if place not in self.state.ways:
            images = self._probed(image)
            # then the inputs themselves are a batch in which one image is perturbed
            alone_anyway = self.origin is not None and self.origin.image is not None
            # the user wants single samples, which behind a layer may yet be run in several ways
            is_single_input = place is None and len(images) == 1
            if alone_anyway or is_single_input:
                self.state.ways[place] = "one at a time"
            else:
                right = (way for way, run in choices.items() if self._probe_way(run, images))
                first_right: Way | None = next(right, None)
                self.state.ways[place] = first_right or self._one_at_a_time()
        return self.state.ways[place]

    def warn_of_draws(self) -> None:
        """Warn once that all perturbed images get the same random numbers, if the network draws
        some."""
        if self.state.draws and not self.state.is_told and self.origin is None:
            self.state.is_told = True
            warn(
                "model draws random numbers in evaluation mode: all altered images get those of "
                "the first pass; Smooth(method, sigma=0, samples=25) averages over draws"
            )

    def finish(self) -> None:
        """Run the last batch's probe once more, after all of the work."""
        confirm = self.state.confirm
        # it holds the state that holds it, which only the garbage collector would free
        self.state.confirm = None
        if confirm is not None and not self.state.interrupted:
            confirm()

    def confirm(
        self, way: Way, run: Callable[[Tensor], Any], image_index: Tensor, samples: int
    ) -> None:
        """Probe once more, after batches of so many ``samples``, that an image (its index ``(1,)``)
        keeps its score. Done once for a model, its weights, and the kind and number of samples."""
        key = ("keeps scores", way, samples, self.inputs.sizes)
        findings = findings_of(self.model)
        if key in findings:
            return
        # the work is over, and so are the blocks that it ran in: scores are compared as there
        with calculating(self.device.type):
            # each sample ran in the place of its image in the caller's batch, which is run again
            if way == "one at a time":
                self._must_repeat()
            elif not self._probe_way(run, image_index.expand(samples)):
                raise ModelError(
                    f"{_MUST_REPEAT}, but it did not after batches of {samples}; {_RESET}"
                )
        findings[key] = True

    def _probed(self, image: Tensor) -> Tensor:
        """The image of each sample of a probe, all the same: four or five samples, unlike the
        caller's batch, as a network may look at that. One sample if samples are run alone."""
        count = len(self.inputs)
        if count == 1 and self.settings.batch_size == 1:
            return image
        return image.expand(5 if count == 4 else 4)

    def laid_out(self, way: Way, images: Tensor, perturbed: Mapping[Path, Tensor]) -> Inputs:
        """The model's inputs for perturbed samples of these images ``(b,)``, in the way's memory
        format: ``perturbed`` by path; other inputs get the samples of the images."""
        layout = torch.channels_last if way == "channels last" else torch.preserve_format
        laid_out = {
            path: tensor.contiguous(memory_format=layout) if tensor.ndim == 4 else tensor
            for path, tensor in perturbed.items()
        }
        return self.inputs.rows(images, laid_out)

    @reading_once()
    def _probe_way(self, run: Callable[[Tensor], Any], images: Tensor) -> bool:
        """Whether ``run`` gives an unperturbed image (the second and last sample, or the only one)
        its known score between far ones; no after any error of the network."""
        logits = self.forward.logits
        are_same = []
        # as a slice: from the second sample in one step to the last, see `between_far_samples`
        of_image = slice(1, None, max(1, len(images) - 2)) if len(images) > 1 else slice(None)
        try:
            with intervening_on_samples(images), self.runs_model():
                output = run(images)
                self.state.draws |= has_drawn()
            # another input may set the number of classes, such as texts
            if logits is not None and self.inputs.other_tensors:
                classes = find_logits(output, len(images)).shape[1]
                if classes != logits.shape[1]:
                    return False
            for resolved in self.targets:
                scores = resolved.scores_in(images, output)[of_image]
                are_same.append(self.same_scores(resolved, scores, resolved.score[images[:1]]))
        # a network or a target may fail on other samples in any way
        except Exception as error:
            if came_by_signal(error) or (self._is_batch_of_samples and lacks_memory(error)):
                raise
            note(f"perturbed inputs are run in a slower way: {raised(error)}")
            return False
        # one truth value for each target, which are read from the device at once
        return all(map(all, read_together(*are_same)))

    @property
    def _is_batch_of_samples(self) -> bool:
        """Whether the inputs are themselves perturbed samples of a caller that are run together in
        a batch."""
        return self.origin is not None and self.origin.image is None and len(self.inputs) > 1

    def _one_at_a_time(self) -> Way:
        """Choose to run each perturbed sample alone, in the place of its image among the caller's
        images."""
        if self._is_batch_of_samples:
            raise ModelError(
                "model must score each sample of a batch on its own, but does not; use batch_size=1"
            )
        self._must_repeat()
        note(
            "perturbed inputs are run one at a time: the scores of an image depend on the others "
            "of its batch"
        )
        return "one at a time"

    def _must_repeat(self) -> None:
        """Run the caller's batch again, and refuse a model that gives it other scores then."""
        images = torch.arange(len(self.inputs), device=self.device)
        with intervening_on_samples(images), self.runs_model():
            output = self.inputs.rows(images).call(self.model)
        for resolved in self.targets:
            again = resolved.scores_in(images, output)
            if not self.same_scores(resolved, again, resolved.score):
                image = int((again - resolved.score).abs().argmax())  # the worst
                raise ModelError(
                    f"{_MUST_REPEAT}, but gave image {image} {resolved.score[image].item():.4g} "
                    f"and then {again[image].item():.4g}; {_RESET}"
                )

    def same_scores(self, resolved: ResolvedTarget, one: Tensor, other: Tensor) -> Tensor:
        """Whether scores ``(b,)`` of the same images from two runs agree up to rounding; one truth
        value as a tensor, so that nothing waits for the device."""
        one = one.to(resolved.score)
        other = other.to(resolved.score)
        rounding = torch.finfo(self.inputs.x.dtype).eps
        is_half = self.footprint.half or rounding > 1e-4
        if is_half:
            return torch.isclose(one, other, rtol=0.1, atol=1e-2).all()
        is_single = rounding > 1e-10
        relative, absolute = (1e-3, 1e-4) if is_single else (1e-5, 1e-8)
        # rounding differs between batch sizes, and is as large as the numbers that scores are made
        # of, such as the largest class score
        scale = self.forward.scale(resolved).to(other)
        # without a scale, as of probabilities, the relative tolerance alone counts
        relative_tolerance = torch.where(scale == 0, 10 * relative, relative)
        return ((one - other).abs() <= absolute * scale + relative_tolerance * other.abs()).all()

    def samples_at_once(self, way: Way, *, graph: bool = False, after: str | None = None) -> int:
        """How many perturbed samples make a batch, as the user set it, or what is fast and fits
        into memory: with a ``graph`` or without, from the layer ``after`` on."""
        if way == "one at a time":
            return 1
        size = self.settings.batch_size or self.footprint.samples_at_once(
            self.device, graph=graph, after=after
        )
        return min(size, self.state.fitting or size)


def between_far_samples(samples: Tensor) -> Tensor:
    """Samples for a probe, made of equal copies of an image: it stays in the second sample and the
    last; the others are moved so far away that any influence shows. One sample stays as it is."""
    if len(samples) == 1:
        return samples.clone()
    far = 2 * samples + samples[:1].abs().amax().clamp(min=1)
    far[2::2] *= -1  # every other one on the other side
    far[1] = samples[0]
    far[-1] = samples[0]
    return far
