"""Perturbed samples in batches: masked images, points on a path, altered feature maps; once for all
methods and targets.

`run_streams` runs all perturbed samples of a plan, `_run_in_batches` cuts a stream of samples into
batches and adds up their results. `InputRerun` makes the perturbed inputs of one batch and runs the
network on them; `LayerRerun` runs perturbed feature maps, and `TokenRerun` transformers on some of
their tokens: only what lies behind is run for every sample.

Samples are built when they are needed and dropped when their results have been added up, so memory
does not grow with their number. `rerun_context` finds out how samples can be run, before the first
of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from explain._utils.default_device import CALLERS_DEVICE
from explain._utils.device_reads import refused_by, require_finite
from explain._utils.errors import MethodError
from explain._utils.random_numbers import drawing
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs, Path, dotted
from explain.engine.accumulators import Add, TargetAccumulators
from explain.engine.incremental import FEW as FEW_IN_TRIAL
from explain.engine.incremental import WORTH_A_TRIAL, IncrementalInference
from explain.engine.layer_reruns import LayerRerun
from explain.engine.needs import EvidenceLookup, NeedAtLayer, SampleOrigin
from explain.engine.output_kinds import reading
from explain.engine.perturbations import PerturbedRows
from explain.engine.plan import PerturbationPass, Plan
from explain.engine.rerun_context import RerunContext, Way, between_far_samples
from explain.engine.settings import (
    MEMORY,
    RuntimeSettings,
    lacks_memory,
    report_progress,
)
from explain.engine.token_reruns import TokenRerun
from explain.hooks.interventions import intervening_on_samples
from explain.hooks.preserve import calculating
from explain.targets.base import find_logits
from explain.targets.detector_outputs import reading_once

INCREMENTAL_SAMPLES = 4
"""How many times as many samples make a fast batch where most of each is not computed."""
StreamSamples = Mapping[Path, PerturbedRows]
"""The perturbed samples of a stream, by explained input."""


def run_streams(plan: Plan, context: RerunContext) -> None:
    """Run all perturbed samples of a plan, and write their results into the answers of each target;
    after an interrupt, no further stream."""
    with calculating(context.device.type, create_graph=context.settings.create_graph):
        streams_to_run = []
        for stream in plan.streams:
            if stream.is_known:
                _take_known(stream, context)
            else:
                streams_to_run.append((stream, _samples_of(stream, context)))
        # reference samples come first, as others are compared with them
        streams_to_run.sort(key=lambda item: not item[0].perturbation.is_reference)
        # each of several explained inputs has as many samples
        total = sum(len(samples[context.inputs.path].owners) for _, samples in streams_to_run)
        progress = ProgressCallback(context.settings, total)
        for stream, samples in streams_to_run:
            if context.state.interrupted:
                break
            # a progress callback gets the maps so far by methods
            names = {need: plan.names_of([need]) for need in stream.needs}
            _run_stream(stream, samples, context, names, progress)


def _take_known(stream: PerturbationPass, context: RerunContext) -> None:
    """Answer needs about unperturbed samples with the evidence of the first forward pass, without
    running them. Only for streams of which `PerturbationPass.is_known` is true."""
    images = torch.arange(len(context.inputs), device=context.device)
    for resolved in context.targets:
        # Sample i is the only one of image i, so it has the number 0. No progress is shown, so
        # there are no names.
        accumulators = TargetAccumulators(
            stream, context, resolved, names={}, numbers=torch.zeros_like(images)
        )
        evidence_of = partial(context.evidence, resolved)
        add = accumulators.read(images, indices=images, evidence_of=evidence_of)
        add()
        resolved.answers.update(accumulators.results(partial=False))


def _run_stream(
    stream: PerturbationPass,
    samples: StreamSamples,
    context: RerunContext,
    names: Mapping[NeedAtLayer, Sequence[str]],
    progress: "ProgressCallback",
) -> None:
    """Run one stream of perturbed samples for all targets, and write the results into their
    answers; after an interrupt, those so far if partial results are wanted."""
    numbers = samples[context.inputs.path].numbers
    sums = [
        TargetAccumulators(stream, context, resolved, names, numbers)
        for resolved in context.targets
    ]
    try:
        _run_samples(stream, samples, sums, context, progress)
    # an interrupt ends the stream with partial results, if these are wanted
    except KeyboardInterrupt as error:
        if not context.settings.keep_partial:
            raise
        context.state.interrupted.append(error)
    is_partial = bool(context.state.interrupted)
    for accumulators in sums:
        accumulators.resolved.answers.update(accumulators.results(partial=is_partial))


def _samples_of(stream: PerturbationPass, context: RerunContext) -> StreamSamples:
    """The perturbed samples of each explained input, by its path; inputs are perturbed together,
    sample by sample."""
    any_target = context.targets[0]  # perturbations look at nothing that depends on it
    evidence = [context.evidence(any_target, stream.layer, path) for path in context.inputs.places]
    of_first_input = stream.perturbation.rows(evidence[0])
    samples = {context.inputs.path: of_first_input}
    for path, input_evidence in zip(context.inputs.paths[1:], evidence[1:], strict=True):
        samples[path] = stream.perturbation.matching_rows(input_evidence, of_first_input)
        if not torch.equal(samples[path].owners.cpu(), of_first_input.owners.cpu()):
            raise MethodError(
                "explained must name inputs with as many perturbed copies each "
                f"({stream.perturbation}), got {len(of_first_input.owners)} and "
                f"{len(samples[path].owners)} for {dotted(path)}; name one"
            )
    return samples


def _run_samples(
    stream: PerturbationPass,
    samples: StreamSamples,
    sums: Sequence[TargetAccumulators],
    context: RerunContext,
    progress: "ProgressCallback",
) -> None:
    """Run the perturbed samples of a stream, and add their results to ``sums``, the accumulators of
    each target."""
    # Maps and tokens lie inside the network, which has them once for all explained inputs: samples
    # of the first input do for these. Inputs have samples each, all with the same owners.
    of_first_input = samples[context.inputs.path]
    rerun: LayerRerun | TokenRerun
    if stream.perturbation.of_layer:
        assert stream.layer is not None
        rerun = LayerRerun(context, stream.layer, of_first_input, sums)
    elif stream.perturbation.of_tokens:
        rerun = TokenRerun(context, of_first_input, sums)
    else:
        indices = torch.arange(len(of_first_input.owners), device=context.device)
        _run_in_batches(InputRerun(stream, samples, sums, context), indices, sums, progress)
        return
    # image by image, since what lies before the maps or tokens is run once for an image
    for image in range(len(context.inputs)):
        indices = (of_first_input.owners == image).nonzero()[:, 0]
        if len(indices):
            rerun.begin(torch.tensor([image], device=context.device))
            _run_in_batches(rerun, indices, sums, progress)


def _run_in_batches(
    rerun: "InputRerun | LayerRerun | TokenRerun",
    indices: Tensor,
    sums: Sequence[TargetAccumulators],
    progress: "ProgressCallback",
) -> None:
    """Run the perturbed samples with these indices in batches, until no target needs more. A batch
    that does not fit into memory is halved, and so are all later ones."""
    state = rerun.context.state
    count = len(indices)
    while count and not all(map(TargetAccumulators.enough, sums)):
        most_at_once = min(rerun.samples_at_once, state.fitting or rerun.samples_at_once)
        # batches of equal size, since a small last one is slow
        batch_length = math.ceil(count / math.ceil(count / most_at_once))
        batch = indices[:batch_length]
        try:
            with reading_once():  # the boxes of a detector, for all targets
                results = rerun.run(batch)
        except Exception as error:
            if came_by_signal(error) or not lacks_memory(error) or batch_length == 1:
                raise
            state.fitting = batch_length // 2
            continue
        for add in results:
            add()
        # run after all of the work: sees that an image still has its score in a batch of the last
        # length
        state.confirm = partial(rerun.confirm, batch_length)
        indices = indices[batch_length:]
        if batch_length < count:
            indices = _still_needed(indices, rerun.samples.owners, sums)
        # those that were run and those that are no longer needed; the maps shown are those of the
        # first target
        progress.add(count - len(indices), sums[0].maps)
        count = len(indices)
    if count:
        progress.add(count, sums[0].maps)


def _still_needed(indices: Tensor, owners: Tensor, sums: Sequence[TargetAccumulators]) -> Tensor:
    """The ``indices`` without those samples that no target needs any more, since its images are
    done. ``owners`` ``(P,)`` is the image of each sample of the stream."""
    needed = [
        accumulators.needed(owners[indices]) for accumulators in sums if not accumulators.enough()
    ]
    # a target for which it is None needs all samples
    by_sample = [is_needed for is_needed in needed if is_needed is not None]
    if not by_sample or len(by_sample) < len(needed):
        return indices
    return indices[torch.stack(by_sample).any(0)]


class InputRerun:
    """Runs a network on perturbed inputs. Where only class scores are needed of them, they are read
    from the output; `gather` brings all other evidence."""

    def __init__(
        self,
        stream: PerturbationPass,
        samples: StreamSamples,
        sums: Sequence[TargetAccumulators],
        context: RerunContext,
    ) -> None:
        """Find out, perhaps by a trial, how the network can be run on perturbed inputs: together or
        one by one, how many at once. ``sums`` has an accumulator for each target."""
        self.context = context
        self.samples = samples[context.inputs.path]
        self._of_inputs = samples
        """The perturbed samples of each explained input, by its path; ``samples`` are those of the
        first."""
        self._sums = sums
        self._inner = stream.inner_plan
        """The passes that are needed of each sample beside its score."""
        # a single sample of a single image needs no probe: it is run as the image was
        is_alone = len(self.samples.owners) == len(context.inputs) == 1
        self._way_to_run: Way = "one at a time" if is_alone else self._find_way_to_run()
        self._is_by_hooks = stream.perturbation.is_by_hooks
        self._draws_anew = stream.perturbation.draws_anew
        if not self._draws_anew:
            context.warn_of_draws()
        elif context.state.draws:  # each sample has random numbers of its own
            self._way_to_run = "one at a time"
        self._look_at_gradients(stream.gradients_plan)
        has_scores = context.forward.logits is not None and not stream.inner
        self._reads_scores = has_scores and all(
            resolved.classes is not None for resolved in context.targets
        )
        # where gradients are taken of samples, in the inputs or a layer, outputs stay in memory
        keeps_graph = self._inner.whole or bool(self._inner.layers)
        self.samples_at_once = context.samples_at_once(self._way_to_run, graph=keeps_graph)
        self._faster_call = self._find_faster_call()
        if self._faster_call is not None and context.settings.batch_size is None:
            self.samples_at_once *= INCREMENTAL_SAMPLES

    def _look_at_gradients(self, plan: Plan) -> None:
        """Warn of gradients that are not the derivative of the score, for the methods of a plan:
        those of an unperturbed image, since a black one tells nothing."""
        context = self.context
        methods = next(iter(plan.wanted))  # `gradients_plan` has their names as its only key
        if not methods or not plan.needs or methods in context.state.looked_at:
            return
        context.state.looked_at.add(methods)
        # one image does, unless the others of its batch change its score
        together = self._way_to_run != "one at a time"
        inputs = context.inputs.first() if together else context.inputs
        images = torch.arange(len(inputs), device=context.device)
        targets = [resolved.of_samples(images) for resolved in context.targets]
        with intervening_on_samples(images), context.mixed_precision:
            context.look_at_gradients(inputs, plan, targets)

    def _find_way_to_run(self) -> Way:
        """Probe how the network scores images right among perturbed samples: together in either
        memory format, or alone. The choice is kept for all further samples of the same inputs."""
        context = self.context
        ways: list[Way] = ["together"]
        if context.device.type == "cpu" and context.inputs.x.ndim == 4:
            ways.insert(0, "channels last")  # convolutions on a CPU are faster in this layout
        choices = {way: partial(self._unperturbed, way) for way in ways}
        return context.way(place=None, choices=choices, image=self._last_image)

    @property
    def _last_image(self) -> Tensor:
        """The image ``(1,)`` that probes run."""
        return torch.full((1,), len(self.context.inputs) - 1, device=self.context.device)

    def _unperturbed(self, way: Way, images: Tensor) -> Any:
        """The network's output for copies of an image between far samples, run in one of the
        ways."""
        inputs = self.context.inputs
        samples = {path: between_far_samples(inputs.tensor(path)[images]) for path in inputs.paths}
        return self.context.laid_out(way, images, samples).call(self.context.model)

    def confirm(self, samples: int) -> None:
        """Probe after batches of so many samples; see `RerunContext.confirm`."""
        if self._is_by_hooks:  # which would alter the image of the probe too
            return
        way = self._way_to_run
        if self._faster_call is not None:  # it takes less memory than a whole pass
            samples = max(1, samples // INCREMENTAL_SAMPLES)
        self.context.confirm(way, partial(self._unperturbed, way), self._last_image, samples)

    def _find_faster_call(self) -> Callable[[Tensor, Inputs], Any] | None:
        """A function that runs perturbed inputs faster than the model, by incremental inference, or
        None. Only for class scores of images on a CPU: elsewhere it does not pay."""
        context = self.context
        x = context.inputs.x
        count = len(self.samples.owners)
        is_plain = self._reads_scores and self._way_to_run != "one at a time"
        is_image = len(context.inputs.paths) == 1 and context.inputs.as_taken
        # incremental inference makes tensors during the model's passes, so on the caller's default
        # device
        is_on_cpu = x.device.type == "cpu" and CALLERS_DEVICE.get() is None
        if not is_plain or not is_image or not is_on_cpu or count < WORTH_A_TRIAL:
            return None
        if context.footprint.whole * len(x) > MEMORY:  # it keeps what all operators give for images
            return None
        incremental = context.state.incremental or IncrementalInference(context.model, x)
        context.state.incremental = incremental
        samples = min(count, INCREMENTAL_SAMPLES * self.samples_at_once)
        images, _, inputs = self._batch(torch.arange(samples, device=context.device))
        first_images = images[:FEW_IN_TRIAL]  # of the first samples

        def agree(output: Any, output_of_first: Any) -> bool:
            """Whether first samples have the same scores in the output of all and in their own."""
            for resolved in context.targets:
                among_all = resolved.scores_in(images, output)[: len(first_images)]
                on_their_own = resolved.scores_in(first_images, output_of_first)
                if not context.same_scores(resolved, among_all, on_their_own):
                    return False
            return True

        # the trial runs all samples of the batch, and the first few
        with context.runs_model(), intervening_on_samples(images, first_images):
            return incremental.faster_call(images, inputs, agree)

    def _batch(self, indices: Tensor) -> tuple[Tensor, int, Inputs]:
        """Make a batch of the perturbed samples with these indices. Returns the image ``(b,)`` of
        each sample that is run, the number of the first perturbed one, and the inputs."""
        inputs = self.context.inputs
        first_sample = 0
        images = self.samples.owners[indices]
        perturbed = {
            path: samples.make(indices).to(inputs.tensor(path))
            for path, samples in self._of_inputs.items()
        }
        if self._way_to_run == "one at a time":
            # The batch is the caller's, with one image perturbed in its place. If there is but one,
            # its number need not be read from the device.
            first_sample = int(images) if len(inputs) > 1 else 0
            perturbed = {
                path: inputs.tensor(path).index_copy(0, images, sample)
                for path, sample in perturbed.items()
            }
            images = torch.arange(len(inputs), device=images.device)
        return images, first_sample, self.context.laid_out(self._way_to_run, images, perturbed)

    def run(self, indices: Tensor) -> list[Add]:
        """Run the network on one batch of perturbed inputs; return functions that add the results,
        of which nothing is added before all of the batch has succeeded."""
        context = self.context
        owners = self.samples.owners[indices]
        images, first_sample, inputs = self._batch(indices)
        if self._reads_scores:
            with context.runs_model(), intervening_on_samples(images):
                output = (
                    inputs.call(context.model)
                    if self._faster_call is None
                    else self._faster_call(images, inputs)
                )
            refuse = partial(self._refuse, indices)
            require_finite(find_logits(output, len(images)).sum(), refuse)
            return [
                accumulators.read_output(
                    images, indices, output, first=first_sample, inputs=inputs.x
                )
                for accumulators in self._sums
            ]
        with refused_by(partial(self._refuse, indices)):
            lookups = self._gathered(indices, images, first_sample, inputs)
        pairs = zip(self._sums, lookups, strict=True)
        return [
            accumulators.read(owners, indices, evidence_of, first=first_sample)
            for accumulators, evidence_of in pairs
        ]

    def _refuse(self, indices: Tensor) -> None:
        """Raise the error of a batch whose scores are not finite, by another run that finds the
        first layer at fault; return if nothing is, as when a sum overflowed."""
        context = self.context
        images, first_sample, inputs = self._batch(indices)
        reader = reading(context.model, context.inputs, context.settings.activation)
        with reader, calculating(context.device.type, create_graph=False):
            self._gathered(indices, images, first_sample, inputs)

    def _gathered(
        self, indices: Tensor, images: Tensor, first_sample: int, inputs: Inputs
    ) -> Sequence[EvidenceLookup]:
        """The evidence on all samples of a batch, by target, through `gather`; the perturbed ones
        begin at ``first_sample``. Targets keep the classes of the unperturbed images."""
        context = self.context
        settings = context.settings
        # progress counts the samples of this stream, not those that are made of them
        if settings.progress is not None:
            settings = replace(settings, progress=None)
        is_alone = self._way_to_run == "one at a time"
        if is_alone:  # so are samples that are made of these
            settings = replace(settings, batch_size=1)
        unperturbed = context.evidence(context.targets[0], None)
        end_sample = first_sample + len(indices)

        def carried(tensor: Tensor) -> Tensor:
            """Bring a tensor with a value for each of the caller's images to the samples of the
            batch; others than the perturbed ones are images as they are."""
            of_samples = unperturbed.of_images(tensor)[images]
            if self.samples.carry is None:
                return of_samples
            moved = self.samples.carry(
                of_samples[first_sample:end_sample], self.samples.numbers[indices]
            )
            return torch.cat([of_samples[:first_sample], moved, of_samples[end_sample:]])

        image = first_sample if is_alone else None
        draws: AbstractContextManager[None] = nullcontext()
        if self._draws_anew and is_alone:
            draws = drawing(int(self.samples.numbers[indices]), [context.device])
        with intervening_on_samples(images), context.mixed_precision, draws:
            return context.gather(
                inputs,
                plan=self._inner,
                targets=[accumulators.resolved.of_samples(images) for accumulators in self._sums],
                settings=settings,
                origin=SampleOrigin(unperturbed.images, carried, context.find_outputs, image),
            )


class ProgressCallback:
    """Reports how many samples are done, of all streams together."""

    def __init__(self, settings: RuntimeSettings, total: int) -> None:
        """Begin a count of perturbed samples for the user's progress callback; ``total`` is that of
        all streams."""
        self._progress = settings.progress
        self._total = total
        self._done = 0

    def add(self, samples: int, maps: Callable[[], Mapping[str, Tensor]] = dict) -> None:
        """Report that so many more perturbed samples are done or no longer needed, so that the sum
        ends at the total; ``maps`` makes the maps so far, if wanted."""
        self._done += samples
        if samples and self._progress:
            report_progress(self._progress, self._done, self._total, maps)
