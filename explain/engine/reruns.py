"""Perturbed rows in batches: masked photos, points on a path, altered feature maps; once for all
methods and targets.

`run_streams` runs all perturbed rows of a plan, `_run_in_batches` cuts a stream of rows into
batches and adds up their results. `InputRerun` makes the perturbed inputs of one batch and runs the
network on them; `LayerRerun` runs perturbed feature maps, and `TokenRerun` transformers on some of
their tokens: only what lies behind is run for every row.

Rows are built when they are needed and dropped when their results have been added up, so memory
does not grow with their number. `rerun_context` finds out how rows can be run, before the first of
them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from explain._utils.default_device import CALLERS_DEVICE
from explain._utils.device_reads import refused_by, require_finite
from explain._utils.errors import MethodError
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs, Path, dotted
from explain.engine.accumulators import Add, RowErrors, TargetAccumulators
from explain.engine.ends import reading
from explain.engine.incremental import FEW as FEW_IN_TRIAL
from explain.engine.incremental import WORTH_A_TRIAL, IncrementalInference
from explain.engine.layer_reruns import LayerRerun
from explain.engine.needs import EvidenceLookup, NeedAtLayer, RowOrigin, at_least_float32
from explain.engine.perturbations import PerturbedRows, Scores
from explain.engine.plan import PerturbationPass, Plan
from explain.engine.rerun_context import RerunContext, RerunState, Way, between_far_rows
from explain.engine.settings import (
    MEMORY,
    Precision,
    RuntimeSettings,
    lacks_memory,
    report_progress,
)
from explain.engine.token_reruns import TokenRerun
from explain.hooks.interventions import intervening_on_rows
from explain.hooks.preserve import calculating
from explain.targets.base import find_logits
from explain.targets.detector_outputs import reading_once

FEW = 8
"""How many rows are run in another way as well, to see by how much their scores are off."""
INCREMENTAL_ROWS = 4
"""How many times as many rows make a fast batch where most of each is not computed."""
StreamRows = Mapping[Path, PerturbedRows]
"""The perturbed rows of a stream, by explained input."""


def run_streams(plan: Plan, context: RerunContext, least: float = 1) -> bool:
    """Run all perturbed rows of a plan, and add the results to what was found for each target.

    Of streams with at least so many rows, it is noted by how much scores in bfloat16 are off;
    whether one was, is returned.
    """
    with calculating(context.device.type, create_graph=context.settings.create_graph):
        waiting = []
        for stream in plan.streams:
            if stream.is_known(context.settings.precision):
                _take_known(stream, context)
            else:
                waiting.append((stream, _rows(stream, context)))
        # what others are compared with comes first
        waiting.sort(key=lambda item: not item[0].perturbation.is_reference)
        total = sum(len(rows[context.inputs.path].owners) for _, rows in waiting)
        progress = ProgressCallback(context.settings, total)
        noted = False
        for stream, rows in waiting:
            if context.state.interrupted:
                break
            names = {need: plan.names_of([need]) for need in stream.needs}
            noted |= _run_stream(stream, rows, context, names, progress, least)
    return noted


def _take_known(stream: PerturbationPass, context: RerunContext) -> None:
    """Add up what the first forward pass has found for the unperturbed images."""
    images = torch.arange(len(context.inputs), device=context.device)
    for resolved in context.targets:
        accumulators = TargetAccumulators(stream, context, resolved, {}, torch.zeros_like(images))
        accumulators.read(images, images, partial(context.evidence, resolved))()
        resolved.answers.update(accumulators.results(partial=False))


def _run_stream(
    stream: PerturbationPass,
    rows: StreamRows,
    context: RerunContext,
    names: Mapping[NeedAtLayer, Sequence[str]],
    progress: "ProgressCallback",
    least: float,
) -> bool:
    """Run one stream, and add its results to what was found; whether it was noted by how much
    scores are off."""
    errors: list[dict[NeedAtLayer, RowErrors]] = []
    numbers = rows[context.inputs.path].numbers
    sums = [
        TargetAccumulators(stream, context, resolved, names, numbers)
        for resolved in context.targets
    ]
    try:
        if context.settings.precision != "full" and stream.in_bfloat16:
            errors = _note_rounding(stream, rows, context, least)
        if errors and least == 1:
            pairs = zip(context.targets, errors, strict=True)
            sums = [
                TargetAccumulators(stream, context, resolved, names, numbers, errors_of)
                for resolved, errors_of in pairs
            ]
        _run_rows(stream, rows, sums, context, progress)
    except KeyboardInterrupt as error:  # ends this with partial results, if these are wanted
        if not context.settings.keep_partial:
            raise
        context.state.interrupted.append(error)
    is_partial = bool(context.state.interrupted)
    for of_target in sums:
        of_target.resolved.answers.update(of_target.results(partial=is_partial))
        of_target.resolved.inexact.update(of_target.inexact_results(partial=is_partial))
    return bool(errors) and not stream.perturbation.is_reference


def _note_rounding(
    stream: PerturbationPass, rows: StreamRows, context: RerunContext, least: float
) -> list[dict[NeedAtLayer, RowErrors]]:
    """Note by how much scores in bfloat16 are off: those of a few rows, by the largest change of
    the score in them.

    Returns:
        For each target, errors of the values that are added up, like those of the few rows. Fewer
        rows than ``least`` are not looked at; then, it is empty.
    """
    owners = rows[context.inputs.path].owners
    if len(owners) < least:
        return []
    few = torch.linspace(0, len(owners) - 1, min(FEW, len(owners)), device=owners.device).long()
    chosen = {path: of_input.some(few) for path, of_input in rows.items()}
    score = NeedAtLayer(Scores(stream.perturbation), stream.layer)
    values = {}
    for need in stream.needs:
        method = need.kind.method  # type: ignore[attr-defined]
        values[need] = replace(need, kind=Scores(stream.perturbation, method))
    compared = PerturbationPass(stream.perturbation, stream.layer, tuple({score, *values.values()}))
    all_rounded = _run_few(compared, chosen, context, context.settings.precision)
    all_exact = _run_few(compared, chosen, context, "full")
    generator = torch.Generator().manual_seed(0)
    sample_of_row = torch.randint(len(few), (len(owners),), generator=generator)
    sample_of_row = sample_of_row.to(owners.device)
    sample_of_row[few] = torch.arange(len(few), device=owners.device)
    is_sampled = torch.zeros_like(owners, dtype=torch.bool).index_fill(0, few, True)
    covers = not (stream.perturbation.of_layer or stream.perturbation.of_tokens)
    inputs = at_least_float32(rows[context.inputs.path].make(few)) if covers else None
    errors = []
    for resolved, rounded, exact in zip(context.targets, all_rounded, all_exact, strict=True):
        largest = (exact[score] - resolved.score[owners[few]]).abs().max()
        if not stream.perturbation.is_reference:
            off = (rounded[score] - exact[score]).abs().max()
            resolved.rounding[stream.perturbation] = float(off / largest) if largest else 0.0
        errors.append(
            {
                need: RowErrors(rounded[of_few] - exact[of_few], sample_of_row, is_sampled, inputs)
                for need, of_few in values.items()
            }
        )
    return errors


def _run_few(
    stream: PerturbationPass, rows: StreamRows, context: RerunContext, precision: Precision
) -> list[dict[NeedAtLayer, Any]]:
    """The results of some rows in another precision, for each target."""
    settings = replace(context.settings, precision=precision, progress=None)
    state = RerunState(ways=context.state.ways)
    context = replace(context, settings=settings, state=state)
    numbers = rows[context.inputs.path].numbers
    sums = [
        TargetAccumulators(stream, context, resolved, {}, numbers) for resolved in context.targets
    ]
    _run_rows(stream, rows, sums, context, ProgressCallback(settings, 0))
    return [of_target.results(partial=False) for of_target in sums]


def _rows(stream: PerturbationPass, context: RerunContext) -> StreamRows:
    """The perturbed rows of each explained input; they are perturbed together, row by row.

    Raises:
        MethodError: one of them has other rows than the first, so that nothing says which belong
            together.
    """
    target = context.targets[0]
    evidence = [context.evidence(target, stream.layer, path) for path in context.inputs.places]
    first = stream.perturbation.rows(evidence[0])
    rows = {context.inputs.path: first}
    for path, of_input in zip(context.inputs.paths[1:], evidence[1:], strict=True):
        rows[path] = stream.perturbation.matching_rows(of_input, first)
        if not torch.equal(rows[path].owners.cpu(), first.owners.cpu()):
            raise MethodError(
                "explained must name inputs with as many perturbed copies each "
                f"({stream.perturbation}), got {len(first.owners)} and "
                f"{len(rows[path].owners)} for {dotted(path)}; name one"
            )
    return rows


def _run_rows(
    stream: PerturbationPass,
    rows: StreamRows,
    sums: Sequence[TargetAccumulators],
    context: RerunContext,
    progress: "ProgressCallback",
) -> None:
    """Run perturbed inputs, each batch with all that is needed of it; of a layer or tokens, image
    by image."""
    first = rows[context.inputs.path]
    if not stream.in_bfloat16 and context.settings.precision != "full":
        context = replace(context, settings=replace(context.settings, precision="full"))
    if not (stream.perturbation.of_tokens or stream.perturbation.of_layer):
        indices = torch.arange(len(first.owners), device=context.device)
        _run_in_batches(InputRerun(stream, rows, sums, context), indices, sums, progress)
        return
    of_layer = stream.perturbation.of_layer
    rerun = (
        LayerRerun(context, stream.layer or "", first, sums)
        if of_layer
        else TokenRerun(context, first, sums)
    )
    for image in range(len(context.inputs)):
        indices = (first.owners == image).nonzero()[:, 0]
        if len(indices):
            rerun.begin(torch.tensor([image], device=context.device))
            _run_in_batches(rerun, indices, sums, progress)


def _run_in_batches(
    rerun: "InputRerun | LayerRerun | TokenRerun",
    indices: Tensor,
    sums: Sequence[TargetAccumulators],
    progress: "ProgressCallback",
) -> None:
    """Run rows with these indices in batches. One that does not fit into memory is halved."""
    state = rerun.context.state
    count = len(indices)
    while count and not all(map(TargetAccumulators.enough, sums)):
        most = min(rerun.rows_at_once, state.fitting or rerun.rows_at_once)
        rows = math.ceil(count / math.ceil(count / most))  # as many in each: a small one is slow
        batch = indices[:rows]
        try:
            with reading_once():
                results = rerun.run(batch)
        except Exception as error:
            if came_by_signal(error) or not lacks_memory(error) or rows == 1:
                raise
            state.fitting = rows // 2
            continue
        for add in results:
            add()
        indices = indices[rows:]
        if rows < count:
            indices = _still_needed(indices, rerun.rows.owners, sums)
        progress.add(count - len(indices), sums[0].maps)
        count = len(indices)
    if count:
        progress.add(count, sums[0].maps)


def _still_needed(indices: Tensor, owners: Tensor, sums: Sequence[TargetAccumulators]) -> Tensor:
    """The rows without those that no target needs any more."""
    needed = [
        accumulators.needed(owners[indices]) for accumulators in sums if not accumulators.enough()
    ]
    by_row = [of_images for of_images in needed if of_images is not None]
    if not by_row or len(by_row) < len(needed):
        return indices
    return indices[torch.stack(by_row).any(0)]


class InputRerun:
    """Runs a network on perturbed inputs.

    Where only class scores are needed of them, they are read from the output; `gather` brings all
    other evidence.
    """

    def __init__(
        self,
        stream: PerturbationPass,
        rows: StreamRows,
        sums: Sequence[TargetAccumulators],
        context: RerunContext,
    ) -> None:
        self.context = context
        self.rows = rows[context.inputs.path]
        self._of_inputs = rows
        self._sums = sums
        self._inner = stream.inner_plan
        is_alone = len(self.rows.owners) == len(context.inputs) == 1
        self._way_to_run: Way = "one at a time" if is_alone else self._find_way_to_run()
        are_classes = all(resolved.classes is not None for resolved in context.targets)
        self._reads_scores = are_classes and context.forward.logits is not None and not stream.inner
        graph = self._inner.whole or bool(self._inner.layers)
        self.rows_at_once = context.rows_at_once(self._way_to_run, graph=graph)
        self._faster_call = self._find_faster_call()
        if self._faster_call is not None and context.settings.batch_size is None:
            self.rows_at_once *= INCREMENTAL_ROWS

    def _find_way_to_run(self) -> Way:
        context = self.context
        inputs = context.inputs

        def run(way: Way, images: Tensor) -> Any:
            rows = {path: between_far_rows(inputs.tensor(path)[images]) for path in inputs.paths}
            return context.laid_out(way, images, rows).call(context.model)

        ways: list[Way] = ["together"]
        if context.device.type == "cpu" and inputs.x.ndim == 4:
            ways.insert(0, "channels last")  # convolutions on a CPU are faster so
        last = torch.full((1,), len(inputs) - 1, device=context.device)
        return context.way(None, {way: partial(run, way) for way in ways}, last)

    def _find_faster_call(self) -> Callable[[Tensor, Inputs], Any] | None:
        """What runs rows faster than the model's call, by their images and inputs, if anything
        does."""
        context = self.context
        x = context.inputs.x
        count = len(self.rows.owners)
        is_plain = (
            self._reads_scores
            and self._way_to_run != "one at a time"
            and context.settings.precision == "full"
        )
        is_photo = len(context.inputs.paths) == 1 and context.inputs.layout != "NTCHW"
        # its own tensors are made within the model's passes, on the default device of the caller
        is_on_cpu = x.device.type == "cpu" and CALLERS_DEVICE.get() is None
        if not is_plain or not is_photo or not is_on_cpu or count < WORTH_A_TRIAL:
            return None
        if context.footprint.whole * len(x) > MEMORY:
            return None
        incremental = context.state.incremental or IncrementalInference(context.model, x)
        context.state.incremental = incremental
        rows = min(count, INCREMENTAL_ROWS * self.rows_at_once)
        images, _, inputs = self._batch(torch.arange(rows, device=context.device))
        few = images[:FEW_IN_TRIAL]

        def agree(output: Any, of_few: Any) -> bool:
            scores = [
                (resolved, resolved.scores_in(images, output), resolved.scores_in(few, of_few))
                for resolved in context.targets
            ]
            return all(
                bool(context.same_scores(resolved, all_of_them[: len(few)], some))
                for resolved, all_of_them, some in scores
            )

        with context.runs_model(), intervening_on_rows(images, few):
            return incremental.faster_call(images, inputs, agree)

    def _batch(self, indices: Tensor) -> tuple[Tensor, int, Inputs]:
        """The image of each row that is run, from where on these are perturbed rows with these
        indices, and the inputs for all."""
        inputs = self.context.inputs
        place = 0
        images = self.rows.owners[indices]
        perturbed = {
            path: rows.make(indices).to(inputs.tensor(path))
            for path, rows in self._of_inputs.items()
        }
        if self._way_to_run == "one at a time":
            place = int(images) if len(inputs) > 1 else 0
            perturbed = {
                path: inputs.tensor(path).index_copy(0, images, row)
                for path, row in perturbed.items()
            }
            images = torch.arange(len(inputs), device=images.device)
        return images, place, self.context.laid_out(self._way_to_run, images, perturbed)

    def run(self, indices: Tensor) -> list[Add]:
        """Gather what the accumulators need of the perturbed inputs with these indices."""
        context = self.context
        of_rows = self.rows.owners[indices]
        images, place, inputs = self._batch(indices)
        if self._reads_scores:
            with context.runs_model(), intervening_on_rows(images):
                output = (
                    inputs.call(context.model)
                    if self._faster_call is None
                    else self._faster_call(images, inputs)
                )
            refuse = partial(self._refuse, indices)
            require_finite(find_logits(output, len(images)).sum(), refuse)
            return [
                of_target.read_output(images, indices, output, place, inputs.x)
                for of_target in self._sums
            ]
        with refused_by(partial(self._refuse, indices)):
            lookups = self._gathered(indices, images, place, inputs)
        pairs = zip(self._sums, lookups, strict=True)
        return [
            of_target.read(of_rows, indices, evidence_of, place) for of_target, evidence_of in pairs
        ]

    def _refuse(self, indices: Tensor) -> None:
        """Gather evidence on some rows once more, to say where their scores are not finite."""
        context = self.context
        images, place, inputs = self._batch(indices)
        reader = reading(context.model, context.inputs, context.settings.activation)
        with reader, calculating(context.device.type, create_graph=False):
            self._gathered(indices, images, place, inputs)

    def _gathered(
        self, indices: Tensor, images: Tensor, place: int, inputs: Inputs
    ) -> Sequence[EvidenceLookup]:
        """The evidence on all rows of a batch, of which the perturbed ones begin at a ``place``."""
        context = self.context
        settings = context.settings
        if settings.progress is not None:
            settings = replace(settings, progress=None)
        if self._way_to_run == "one at a time":
            settings = replace(settings, batch_size=1)
        unperturbed = context.evidence(context.targets[0], None)
        end = place + len(indices)

        def carried(tensor: Tensor) -> Tensor:
            """Bring a tensor of the caller's images to the rows; others, not perturbed, may be
            beside them."""
            of_rows = unperturbed.of_images(tensor)[images]
            if self.rows.carry is None:
                return of_rows
            moved = self.rows.carry(of_rows[place:end], self.rows.numbers[indices])
            return torch.cat([of_rows[:place], moved, of_rows[end:]])

        image = place if self._way_to_run == "one at a time" else None
        with intervening_on_rows(images), context.mixed_precision:
            return context.gather(
                inputs,
                plan=self._inner,
                targets=[of_target.resolved.of_rows(images) for of_target in self._sums],
                settings=settings,
                precision=settings.precision,
                origin=RowOrigin(unperturbed.images, carried, context.find_outputs, image),
            )


class ProgressCallback:
    """Reports how many rows are done, of all streams together."""

    def __init__(self, settings: RuntimeSettings, total: int) -> None:
        self._progress = settings.progress
        self._total = total
        self._done = 0

    def add(self, rows: int, maps: Callable[[], Mapping[str, Tensor]] = dict) -> None:
        """Report that so many more rows are done, or no longer needed, and the ``maps`` so far to
        who wants them."""
        self._done += rows
        if rows and self._progress:
            report_progress(self._progress, self._done, self._total, maps)
