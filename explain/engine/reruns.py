"""Perturbed rows in batches: masked photos, points on a path, altered feature maps; once for all methods and targets.

`run_streams` runs all perturbed rows of a plan, `_run_in_batches` cuts a stream of rows into batches and adds up their
results. `BatchSizeTuner` in `settings` chooses the batch size. `InputRerun` makes the perturbed inputs of one batch and
runs the network on them; `LayerRerun` runs perturbed feature maps, and `TokenRerun` transformers on some of their
tokens: only what lies behind is run for every row.

Rows are built when they are needed and dropped when their results have been added up, so memory does not grow with
their number. `rerun_context` finds out how rows can be run, before the first of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from explain._utils.errors import MethodError
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs, Path, dotted
from explain.engine import settings as runtime
from explain.engine.accumulators import Add, RowErrors, TargetAccumulators
from explain.engine.layer_reruns import LayerRerun
from explain.engine.needs import EvidenceLookup, NeedAtLayer, RowOrigin, at_least_float32
from explain.engine.perturbations import PerturbedRows, Scores
from explain.engine.plan import Plan, Stream
from explain.engine.rerun_context import RerunContext, Way
from explain.engine.settings import Precision, RuntimeSettings
from explain.engine.token_reruns import TokenRerun
from explain.hooks.interventions import rows_of
from explain.hooks.preserve import calculating

FEW = 8
"""How many rows are run in another way as well, to see by how much their scores are off."""
StreamRows = Mapping[Path, PerturbedRows]
"""The perturbed rows of a stream, by explained input."""


def run_streams(plan: Plan, context: RerunContext, least: float = 1) -> bool:
    """Run all perturbed rows of a plan, and add the results to what was found for each target.

    Of streams with at least so many rows, it is noted by how much scores in bfloat16 are off; whether one was, is
    returned.
    """
    waiting = [stream for stream in plan.streams if not stream.is_known(context.settings.precision)]
    for stream in plan.streams:
        if stream not in waiting:
            _take_known(stream, context)
    if not waiting:
        return False
    waiting.sort(key=lambda stream: not stream.of.is_reference)  # what others are compared with comes first
    with calculating(context.device.type, create_graph=context.settings.create_graph):
        streams = [(stream, _rows(stream, context)) for stream in waiting]
    lengths = [len(rows[context.inputs.path].owners) for _, rows in streams]
    names = {need: plan.names_of([need]) for stream in waiting for need in stream.needs}
    progress = ProgressCallback(context.settings, sum(lengths))
    noted = False
    interrupted = context.state.interrupted
    for stream, rows in streams:
        numbers = rows[context.inputs.path].numbers
        sums = [TargetAccumulators(stream, context, resolved, names, numbers) for resolved in context.targets]
        try:
            errors = _note_rounding(stream, rows, context, least)
            noted |= bool(errors) and not stream.of.is_reference
            if errors and least == 1:
                sums = [
                    TargetAccumulators(stream, context, resolved, names, numbers, of_target)
                    for resolved, of_target in zip(context.targets, errors, strict=True)
                ]
            _run_stream(stream, rows, sums, context, progress)
        except KeyboardInterrupt as error:  # ends this with partial results, if these are wanted
            if not context.settings.keep_partial:
                raise
            interrupted.append(error)
        for of_target in sums:
            of_target.resolved.found.update(of_target.results(partial=bool(interrupted)))
            of_target.resolved.inexact.update(of_target.inexact_results(partial=bool(interrupted)))
        if interrupted:
            break
    return noted


def _take_known(stream: Stream, context: RerunContext) -> None:
    """Add up what the first forward pass has found for the unperturbed images."""
    images = torch.arange(len(context.inputs), device=context.device)
    for resolved in context.targets:
        known = TargetAccumulators(stream, context, resolved, {}, torch.zeros_like(images))
        known.read(images, images, partial(context.evidence, resolved))()
        resolved.found.update(known.results(partial=False))


def _note_rounding(
    stream: Stream, rows: StreamRows, context: RerunContext, least: float
) -> list[dict[NeedAtLayer, RowErrors]]:
    """Note by how much scores in bfloat16 are off: those of a few rows, by the largest change of the score in them.

    Returns:
        For each target, errors of the values that are added up, like those of the few rows. Fewer rows than ``least``
        are not looked at; then, it is empty.
    """
    owners = rows[context.inputs.path].owners
    wanted = context.settings.precision != "full" and stream.in_bfloat16
    if len(owners) < least or not wanted:
        return []
    few = torch.linspace(0, len(owners) - 1, min(FEW, len(owners)), device=owners.device).long()
    chosen = {path: of_input.some(few) for path, of_input in rows.items()}
    score = NeedAtLayer(Scores(stream.of), stream.layer)
    values = {need: replace(need, kind=Scores(stream.of, need.kind.method)) for need in stream.needs}  # type: ignore[attr-defined]
    compared = Stream(stream.of, stream.layer, tuple({score, *values.values()}))
    all_rounded = _run_few(compared, chosen, context, context.settings.precision)
    all_exact = _run_few(compared, chosen, context, "full")
    alike = torch.randint(len(few), (len(owners),), generator=torch.Generator().manual_seed(0)).to(owners.device)
    alike[few] = torch.arange(len(few), device=owners.device)
    is_other = torch.ones_like(owners, dtype=torch.bool).index_fill(0, few, False)
    covers = not (stream.of.of_layer or stream.of.of_tokens)
    inputs = at_least_float32(rows[context.inputs.path].make(few)) if covers else None
    errors = []
    for resolved, rounded, exact in zip(context.targets, all_rounded, all_exact, strict=True):
        largest = (exact[score] - resolved.score[owners[few]]).abs().max()
        if not stream.of.is_reference:
            off = (rounded[score] - exact[score]).abs().max()
            resolved.rounding[stream.of] = float(off / largest) if largest else 0.0
        errors.append(
            {need: RowErrors(rounded[of] - exact[of], alike, is_other, inputs) for need, of in values.items()}
        )
    return errors


def _run_few(
    stream: Stream, rows: StreamRows, context: RerunContext, precision: Precision
) -> list[dict[NeedAtLayer, Any]]:
    """The results of some rows in another precision, for each target."""
    settings = replace(context.settings, precision=precision, progress=None)
    state = replace(context.state, tapes={}, incremental=None)
    context = replace(context, settings=settings, state=state)
    numbers = rows[context.inputs.path].numbers
    sums = [TargetAccumulators(stream, context, resolved, {}, numbers) for resolved in context.targets]
    _run_stream(stream, rows, sums, context, ProgressCallback(settings, 0))
    return [of_target.results(partial=False) for of_target in sums]


def _rows(stream: Stream, context: RerunContext) -> StreamRows:
    """The perturbed rows of each explained input; they are perturbed together, row by row.

    Raises:
        MethodError: one of them has other rows than the first, so that nothing says which belong together.
    """
    paths: Sequence[Path | None] = context.inputs.paths if len(context.inputs.paths) > 1 else (None,)
    evidence = [context.evidence(context.targets[0], stream.layer, path) for path in paths]
    first = stream.of.rows(evidence[0])
    rows = {context.inputs.path: first}
    for path, of_input in zip(context.inputs.paths[1:], evidence[1:], strict=True):
        rows[path] = stream.of.matching_rows(of_input, first)
        if not torch.equal(rows[path].owners.cpu(), first.owners.cpu()):
            got = f"got {len(first.owners)} and {len(rows[path].owners)} for {dotted(path)}; name one"
            raise MethodError(f"explained must name inputs with as many perturbed copies each ({stream.of}), {got}")
    return rows


def _run_stream(
    stream: Stream,
    rows: StreamRows,
    sums: Sequence[TargetAccumulators],
    context: RerunContext,
    progress: "ProgressCallback",
) -> None:
    """Run perturbed inputs, each batch with all that is needed of it; of a layer or tokens, image by image."""
    first = rows[context.inputs.path]
    if not (stream.of.of_tokens or stream.of.of_layer):
        numbers = torch.arange(len(first.owners), device=context.device)
        _run_in_batches(InputRerun(stream, rows, sums, context), numbers, sums, progress)
        return
    of_layer = stream.of.of_layer
    rerun = LayerRerun(context, stream.layer or "", first, sums) if of_layer else TokenRerun(context, first, sums)
    for image in range(len(context.inputs)):
        numbers = (first.owners == image).nonzero()[:, 0]
        if len(numbers):
            rerun.begin(torch.tensor([image], device=context.device))
            _run_in_batches(rerun, numbers, sums, progress)


def _run_in_batches(
    rerun: "InputRerun | LayerRerun | TokenRerun",
    numbers: Tensor,
    sums: Sequence[TargetAccumulators],
    progress: "ProgressCallback",
) -> None:
    """Run rows with these numbers in batches of the best size. One that does not fit into memory is halved."""
    tuner = rerun.tuner
    start = 0
    while start < len(numbers) and not all(of_target.enough() for of_target in sums):
        batch = numbers[start : start + tuner.rows(len(numbers) - start)]
        began = tuner.now()
        try:
            results = rerun.run(batch)
        except Exception as error:
            if came_by_signal(error) or not runtime.lacks_memory(error) or len(batch) == 1:
                raise
            tuner.fit(len(batch) // 2)
            continue
        for add in results:
            add()
        start += len(batch)
        left = len(numbers) - start
        tuner.note(len(batch), tuner.now() - began, left)
        if isinstance(rerun, InputRerun):
            numbers = rerun.still_needed(numbers, start)
        progress.add(len(batch) + left - (len(numbers) - start), sums[0].maps)
    if start < len(numbers):
        progress.add(len(numbers) - start, sums[0].maps)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Perturbed inputs that are run together."""

    numbers: Tensor
    """Those of the perturbed rows ``(b,)``."""
    images: Tensor
    """The image of each row that is run; of one in the place of its image, all images."""
    place: int
    """Where the perturbed rows begin."""
    perturbed: Mapping[Path, Tensor]


class InputRerun:
    """Runs a network on perturbed inputs."""

    def __init__(
        self, stream: Stream, rows: StreamRows, sums: Sequence[TargetAccumulators], context: RerunContext
    ) -> None:
        self._rows = rows
        self._first = rows[context.inputs.path]
        self._sums = sums
        self._context = context
        is_alone = len(self._first.owners) == len(context.inputs) == 1
        self._way: Way = "in place" if is_alone else context.input_way
        self._inner = Plan({"": stream.inner})
        self._precision: Precision = context.settings.precision if stream.in_bfloat16 else "full"
        graph = self._inner.whole or bool(self._inner.layers)
        can_skip = self._way != "in place" and not graph and self._precision == "full"
        self._incremental = context.incremental() if can_skip else None
        self.tuner = context.tuner(graph, self._way, context.footprint.most(context.device, graph=graph))
        settings = replace(context.settings, progress=None)
        self._settings = replace(settings, batch_size=1) if self._way == "in place" else settings

    def run(self, numbers: Tensor) -> list[Add]:
        """Gather what the accumulators need of the perturbed inputs with these numbers."""
        context = self._context
        with self._calculating():
            batch = self._batch(numbers)
        inputs = context.laid_out(self._way, batch.images, batch.perturbed)
        if self._incremental is None or len(numbers) < 2:
            lookups = self._gather(batch, inputs)
        else:
            total = len(self._first.owners)
            run = partial(self._gather, batch, inputs)
            lookups = self._incremental.run(batch.images, inputs.x, run, self._agree, total=total)
        images = batch.images[batch.place : batch.place + len(numbers)]
        with self._calculating():
            return [
                of_target.read(images, numbers, evidence_of, batch.place)
                for of_target, evidence_of in zip(self._sums, lookups, strict=True)
            ]

    def _calculating(self) -> Any:
        return calculating(self._context.device.type, create_graph=self._context.settings.create_graph)

    def _batch(self, numbers: Tensor) -> _Batch:
        inputs = self._context.inputs
        images = self._first.owners[numbers]
        perturbed = {path: rows.make(numbers).to(inputs.tensor(path)) for path, rows in self._rows.items()}
        if self._way != "in place":
            return _Batch(numbers, images, 0, perturbed)
        among = {path: inputs.tensor(path).index_copy(0, images, row) for path, row in perturbed.items()}
        every = torch.arange(len(inputs), device=images.device)
        return _Batch(numbers, every, int(images), among)

    def _gather(self, batch: _Batch, inputs: Inputs, count: int | None = None) -> Sequence[EvidenceLookup]:
        """Gather what is needed of all rows of a batch, or of so many."""
        context = self._context
        images = batch.images[:count]
        unperturbed = context.evidence(context.targets[0], None)

        def carried(tensor: Tensor) -> Tensor:
            """Bring a tensor of the caller's images to the rows; others, not perturbed, may be beside them."""
            of_rows = unperturbed.of_images(tensor)[images]
            if self._first.carry is None:
                return of_rows
            numbers = batch.numbers[:count]
            end = batch.place + len(numbers)
            moved = self._first.carry(of_rows[batch.place : end], self._first.numbers[numbers])
            return torch.cat([of_rows[: batch.place], moved, of_rows[end:]])

        rows = inputs if count is None else inputs.rows(torch.arange(count, device=context.device))
        image = batch.place if self._way == "in place" else None
        origin = RowOrigin(unperturbed.images, carried, unperturbed.find_outputs, image)
        targets = [of_target.resolved.of_rows(images) for of_target in self._sums]
        with rows_of(images):
            return context.gather(
                rows,
                plan=self._inner,
                targets=targets,
                settings=self._settings,
                precision=self._precision,
                origin=origin,
            )

    def _agree(self, lookups: Sequence[EvidenceLookup], of_few: Sequence[EvidenceLookup]) -> bool:
        """Whether rows have the same scores as a few of them that were run in another way."""
        for of_target, evidence_of, few_of in zip(self._sums, lookups, of_few, strict=True):
            few = few_of(None).score
            if not self._context.same_scores(of_target.resolved, evidence_of(None).score[: len(few)], few):
                return False
        return True

    def still_needed(self, numbers: Tensor, start: int) -> Tensor:
        """The rows without those, from the ``start``-th on, that no target needs any more."""
        left = numbers[start:]
        needed = [each.needed(self._first.owners[left]) for each in self._sums if not each.enough()]
        known = [each for each in needed if each is not None]
        if not known or len(known) < len(needed):
            return numbers
        return torch.cat([numbers[:start], left[torch.stack(known).any(0)]])


class ProgressCallback:
    """Reports how many rows are done, of all streams together."""

    def __init__(self, settings: RuntimeSettings, total: int) -> None:
        self._progress = settings.progress
        self._total = total
        self._done = 0

    def add(self, rows: int, maps: Callable[[], Mapping[str, Tensor]] = dict) -> None:
        """Report that so many more rows are done, or no longer needed, and the ``maps`` so far to who wants them."""
        self._done += rows
        if rows:
            runtime.report_progress(self._progress, self._done, self._total, maps)
