"""Perturbed rows in batches: masked photos, points on a path, altered feature maps; once for all methods and targets.

`run_streams` runs all perturbed rows of a plan, `run_in_batches` cuts a stream of rows into batches and adds up their
results, and `_run_batch` makes the perturbed inputs of one batch and runs the network on them. `BatchSizeTuner` in
`settings` chooses the batch size. `LayerRerun` runs perturbed feature maps, and `TokenRerun` transformers on some of
their tokens: only what lies behind is run for every row.

Rows are built when they are needed and dropped when their results have been added up, so memory does not grow with
their number. The first batch of each stream contains an unperturbed row, whose score must be the known one. The first
row of the longest stream is also run alone, and must have the same score as among the others. If one of these scores
differs, the rows of a batch depend on each other, and every row is run alone. `rerun_context` has these checks.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from explain._utils.errors import ExplainError, MethodError, note, raised
from explain._utils.nested import first_tensor, replace_first
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs, Path, dotted
from explain.engine import forward
from explain.engine import settings as runtime
from explain.engine.collectors import explained_blocks, with_first
from explain.engine.forward import (
    Add,
    DependentImagesError,
    DependentRowsError,
    RerunContext,
    RowErrors,
    TargetAccumulators,
)
from explain.engine.incremental import IncrementalInference, Overwriting, PrefixRecorder, ReachedError, Replay, Tape
from explain.engine.needs import EvidenceLookup, Need, NeedAtLayer, RowOrigin, at_least_float32
from explain.engine.perturbations import Attributor, Perturbation, PerturbedRows, Scores
from explain.engine.plan import Plan, Stream
from explain.engine.settings import BatchSizeTuner, Precision, RuntimeSettings
from explain.hooks import HookGroup
from explain.hooks.interventions import rows_of
from explain.hooks.preserve import calculating
from explain.hooks.unwrap import has_hooks
from explain.layers.layouts import Grid
from explain.targets.base import find_logits
from explain.targets.detector_outputs import reading_once

FEW = 8  # rows that are run in another way as well, to see by how much their scores are off
Run = Callable[[Tensor, bool], Sequence[Add]]


def run_streams(plan: Plan, context: RerunContext, least: float = 1) -> bool:
    """Run all perturbed rows of a plan, and add the results to what was found for each target.

    Of streams with at least so many rows, it is noted by how much scores in bfloat16 are off; whether one was, is
    returned.
    """
    noted = False
    waiting = [stream for stream in plan.streams if not stream.is_known(context.settings.precision)]
    images = torch.arange(len(context.inputs), device=context.inputs.x.device)
    for stream in plan.streams:
        for resolved in context.targets if stream not in waiting else ():  # the answer is known already
            known = TargetAccumulators(stream, context, resolved, {})
            known.read(images, images, partial(context.evidence, resolved))()
            resolved.found.update(known.results(partial=False))
    if not waiting:
        return False
    if context.settings.batch_size == 1:
        context.check_images(if_possible=True)  # no batch has two rows, which would show it
    with calculating(context.inputs.x.device.type, create_graph=context.settings.create_graph):
        streams = [(stream, _rows(stream, context)) for stream in waiting]
    lengths = [len(rows[context.inputs.path].owners) for _, rows in streams]

    def order(i: int) -> tuple[bool, bool, int]:
        """What others are compared with comes first, then the longest, which shows best whether rows depend."""
        return lengths[i] > len(context.inputs), not streams[i][0].of.is_reference, -lengths[i]

    ordered = [streams[i] for i in sorted(range(len(streams)), key=order)]
    names = {need: plan.names_of(need) for stream in waiting for need in stream.needs}
    progress, context.longest = ProgressCallback(context.settings, sum(lengths)), max(lengths)

    def run_all() -> None:
        """Run streams one after the other; an interrupt ends this with partial results, if these are wanted."""
        nonlocal noted
        for stream, rows in ordered:
            accumulators = [TargetAccumulators(stream, context, resolved, names) for resolved in context.targets]
            try:
                errors = _note_rounding(stream, rows, context, least)
                noted |= bool(errors) and not stream.of.is_reference
                if errors and least == 1:
                    accumulators = [
                        TargetAccumulators(stream, context, resolved, names, of_target)
                        for resolved, of_target in zip(context.targets, errors, strict=True)
                    ]
                _StreamRun(stream, rows, accumulators, context, progress).run()
            except KeyboardInterrupt as error:
                if not context.settings.keep_partial:
                    raise
                context.interrupted.append(error)
            for of_target in accumulators:
                of_target.resolved.found.update(of_target.results(partial=bool(context.interrupted)))
                of_target.resolved.inexact.update(of_target.inexact_results(partial=bool(context.interrupted)))
            if context.interrupted:
                return

    try:
        run_all()
    except DependentRowsError:
        context.check_images()
        note("perturbed rows are run one at a time: the model's scores of an image depend on the others of its batch")
        context.one_at_a_time = True
        progress.restart()
        run_all()
    return noted


def _note_rounding(
    stream: Stream, rows: Mapping[Path, PerturbedRows], context: RerunContext, least: float
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
    results = []
    for precision in (context.settings.precision, "full"):
        its = replace(context, settings=replace(context.settings, precision=precision, progress=None))
        sums = [TargetAccumulators(compared, its, each, {}) for each in its.targets]
        _StreamRun(compared, chosen, sums, its, ProgressCallback(its.settings, 0)).run()
        results.append([each.results(partial=False) for each in sums])
    alike = torch.randint(len(few), (len(owners),), generator=torch.Generator().manual_seed(0)).to(owners.device)
    alike[few] = torch.arange(len(few), device=owners.device)
    is_other = torch.ones_like(owners, dtype=torch.bool).index_fill(0, few, False)
    covers = not (stream.of.of_layer or stream.of.of_tokens)
    inputs = at_least_float32(rows[context.inputs.path].make(few)) if covers else None
    errors = []
    for resolved, rounded, exact in zip(context.targets, *results, strict=True):
        largest = (exact[score] - resolved.score[owners[few]]).abs().max()
        if not stream.of.is_reference:
            off = (rounded[score] - exact[score]).abs().max()
            resolved.rounding[stream.of] = float(off / largest) if largest else 0.0
        errors.append(
            {need: RowErrors(rounded[of] - exact[of], alike, is_other, inputs) for need, of in values.items()}
        )
    return errors


def _rows(stream: Stream, context: RerunContext) -> dict[Path, PerturbedRows]:
    """The perturbed rows of each explained input; they are perturbed together, row by row.

    Raises:
        MethodError: one of them has other rows than the first, so that nothing says which belong together.
    """
    paths: Sequence[Path | None] = context.inputs.paths if len(context.inputs.paths) > 1 else (None,)
    found = [context.evidence(context.targets[0], stream.layer, path) for path in paths]
    made = [stream.of.rows(found[0])]
    for evidence, path in zip(found[1:], context.inputs.paths[1:], strict=True):
        made.append(stream.of.matching_rows(evidence, made[0]))
        if not torch.equal(made[-1].owners.cpu(), made[0].owners.cpu()):
            first, other = (len(rows.owners) for rows in (made[0], made[-1]))
            got = f"got {first} and {other} for {dotted(path)}; name one"
            raise MethodError(f"explained must name inputs with as many perturbed copies each ({stream.of}), {got}")
    return dict(zip(context.inputs.paths, made, strict=True))


@dataclass(eq=False)
class _StreamRun:
    """The perturbed rows of a stream, by explained input, and where their results add up, for each target."""

    stream: Stream
    rows: Mapping[Path, PerturbedRows]
    accumulators: Sequence[TargetAccumulators]
    context: RerunContext
    progress: "ProgressCallback"

    def run(self) -> None:
        """Run perturbed inputs, each batch with all that is needed of it; of a layer or tokens, image by image."""
        context, of, first = self.context, self.stream.of, self.rows[self.context.inputs.path]
        device = context.inputs.x.device
        if of.of_tokens or of.of_layer:
            make = TokenRerun if of.of_tokens else partial(LayerRerun, layer=self.stream.layer or "")
            rerun: TokenRerun | LayerRerun = make(context, accumulators=self.accumulators)
            for image in range(len(context.inputs)):
                mine = (first.owners == image).nonzero()[:, 0]
                if len(mine):
                    rerun.begin(torch.tensor([image], device=device))
                    self.run_in_batches(mine, partial(rerun.run, first), rerun.tuner)
            return
        inner = Plan({"": self.stream.inner})
        graph = inner.whole or bool(inner.layers)
        precision: Precision = context.settings.precision if self.stream.in_bfloat16 else "full"
        numbers = torch.arange(len(first.owners), device=device)
        tuner = context.tuner(graph, context.footprint.most(device, graph=graph))
        incremental = None if graph or precision != "full" else context.incremental()
        self.run_in_batches(numbers, partial(self._run_batch, inner, precision, incremental), tuner, first.owners)

    def _run_batch(
        self, inner: Plan, precision: Precision, incremental: IncrementalInference | None, numbers: Tensor, check: bool
    ) -> list[Add]:
        """Gather what the accumulators need of a batch of perturbed inputs."""
        context, inputs, first = self.context, self.context.inputs, self.rows[self.context.inputs.path]
        with calculating(inputs.x.device.type, create_graph=context.settings.create_graph):
            images = first.owners[numbers]
            perturbed = {path: each.make(numbers).to(inputs.tensor(path)) for path, each in self.rows.items()}
        unperturbed = images[:1].repeat(len(inputs) - len(numbers) if context.fixed else int(check))
        place = 0
        if context.among_others:
            place = int(images)
            perturbed = {path: inputs.tensor(path).index_copy(0, images, t) for path, t in perturbed.items()}
            images = torch.arange(len(inputs), device=images.device)
        elif len(unperturbed):
            images = torch.cat([images, unperturbed])
            perturbed = {path: torch.cat([t, inputs.tensor(path)[unperturbed]]) for path, t in perturbed.items()}
        given, size = context.evidence(context.targets[0], None), context.settings.batch_size

        def gather(inputs: Inputs, count: int | None = None) -> Sequence[EvidenceLookup]:
            """Gather what is needed of all rows, or of so many."""
            owners = images[:count]

            def carried(tensor: Tensor) -> Tensor:
                """Bring a tensor of the caller's images to the rows; others, not perturbed, may be beside them."""
                found, mine = given.of_images(tensor)[owners], numbers[:count]
                if first.carry is None:
                    return found
                end = place + len(mine)
                return torch.cat([found[:place], first.carry(found[place:end], mine), found[end:]])

            rows = inputs if count is None else inputs.rows(torch.arange(count))
            targets = [of_target.resolved.of_rows(owners) for of_target in self.accumulators]
            settings = replace(context.settings, progress=None, batch_size=1 if context.one_at_a_time else size)
            image = place if context.among_others else None
            about = {"precision": precision, "origin": RowOrigin(given.images, carried, given.find_outputs, image)}
            with rows_of(owners):
                return context.gather(rows, plan=inner, targets=targets, settings=settings, **about)

        def agree(one: Sequence[EvidenceLookup], other: Sequence[EvidenceLookup]) -> bool:
            found = zip(self.accumulators, one, other, strict=True)
            scores = [(target.resolved, a(None).score, b(None).score) for target, a, b in found]
            return all(context.same_scores(target, a[: len(b)], b) for target, a, b in scores)

        def run(inputs: Inputs) -> Sequence[EvidenceLookup]:
            if incremental is None or len(images) < 2 or context.fixed:
                return gather(inputs)
            return incremental.run(images, inputs.x, partial(gather, inputs), agree, total=len(first.owners))

        try:
            found = context.in_fastest_layout(images, perturbed, run)
        except DependentImagesError as error:
            if context.one_at_a_time or len(images) == 1:
                raise
            raise DependentRowsError from error  # they are rows here, and may well be of one image
        if check:

            def run_first() -> Any:
                if len(first.owners) < context.longest:
                    return None
                alone = {path: tensor[:1] for path, tensor in perturbed.items()}
                with rows_of(images[:1]):
                    return context.run_alone(inputs.rows(images[:1], alone))

            scores = [(each.resolved, of(None).score) for each, of in zip(self.accumulators, found, strict=True)]
            context.check_rows(None, images, scores, run_first, last_is_image=True)
        added = []
        for of_target, evidence_of in zip(self.accumulators, found, strict=True):
            context.check_width(evidence_of(None).logits)
            with calculating(inputs.x.device.type, create_graph=context.settings.create_graph):
                added.append(of_target.read(images[place : place + len(numbers)], numbers, evidence_of, place))
        return added

    def run_in_batches(self, numbers: Tensor, run: Run, tuner: BatchSizeTuner, owners: Tensor | None = None) -> None:
        """Run rows in batches of the best size.

        ``run`` takes the numbers of the rows, and whether to check that they do not depend on each other: so it is for
        the first batch, unless inputs were checked before. With ``owners``, the image of each row, rows of images that
        need no more are left out. A batch that does not fit into memory is halved and run again.
        """
        context, accumulators, start, left = self.context, self.accumulators, 0, len(numbers)
        while start < len(numbers) and not all(of_target.enough() for of_target in accumulators):
            size = len(context.inputs) if context.fixed else tuner.rows(len(numbers) - start)
            batch = numbers[start : start + size]
            checked = context.fixed or (owners is not None and context.again)
            check = start == 0 and len(batch) > 1 and not checked
            began = tuner.now()
            try:
                added = run(batch, check)
            except Exception as error:
                if came_by_signal(error):
                    raise
                self._prepare_retry(error, batch, start, check, tuner)
                continue
            for add in added:
                add()
            start += len(batch)
            tuner.note(len(batch), tuner.now() - began, len(numbers) - start)
            if owners is not None:
                numbers = self._still_needed(numbers, start, owners)
            self.progress.add(len(batch) + left - len(numbers), accumulators[0].maps)
            left = len(numbers)
        if start < len(numbers):
            self.progress.add(len(numbers) - start, accumulators[0].maps)

    def _prepare_retry(self, error: Exception, batch: Tensor, start: int, check: bool, tuner: BatchSizeTuner) -> None:
        """Make the batches smaller if memory ran out; or as many rows as images, if the network was exported so.

        Raises:
            Exception: the error, if neither helps.
        """
        images, full = len(self.context.inputs), runtime.lacks_memory(error)
        if self.context.fixed or (full and len(batch) == 1):
            raise error
        if full:
            tuner.fit(len(batch) // 2)
            return
        if start or len(batch) + check == images or isinstance(error, (ExplainError, DependentRowsError)):
            raise error
        note(f"perturbed rows are run {images} at a time: {raised(error)}")
        self.context.fixed = True

    def _still_needed(self, numbers: Tensor, start: int, owners: Tensor) -> Tensor:
        """The rows without those, from the ``start``-th on, that no target needs any more."""
        needed = [each.needed(owners[numbers[start:]]) for each in self.accumulators if not each.enough()]
        known = [each for each in needed if each is not None]
        all_known = known and len(known) == len(needed)
        return torch.cat([numbers[:start], numbers[start:][torch.stack(known).any(0)]]) if all_known else numbers


class ProgressCallback:
    """Reports how many rows are done, of all streams together."""

    def __init__(self, settings: RuntimeSettings, total: int) -> None:
        self._progress, self._total, self._done, self._reported = settings.progress, total, 0, 0

    def add(self, rows: int, maps: Callable[[], Mapping[str, Tensor]] = dict) -> None:
        """Report that so many more rows are done, or no longer needed, and the ``maps`` so far to who wants them."""
        self._done += rows
        if self._done > self._reported:
            self._reported = self._done
            runtime.report_progress(self._progress, self._done, self._total, maps)

    def restart(self) -> None:
        """Begin with the first row again; nothing is reported until the work is as far as before."""
        self._done = 0


@dataclass(frozen=True)
class PerturbationRunner:
    """Runs perturbed rows that a method can name only when it sees the evidence."""

    context: RerunContext
    resolved: forward.ResolvedTarget
    layer: str | None
    precision: torch.autocast
    kept: dict[Any, Any] = field(default_factory=dict)
    """Where a method may keep what it has worked out from its runs."""

    @property
    def ended(self) -> bool:
        """Whether an interrupt has ended the work: no more rows are run."""
        return bool(self.context.interrupted)

    def end(self, error: KeyboardInterrupt, *, partial: bool) -> None:
        """End the work early; ``partial`` says whether a method has something to show by now.

        Raises:
            KeyboardInterrupt: it has nothing, or partial results are not wanted.
        """
        if not partial or not self.context.settings.keep_partial:
            raise error
        self.context.interrupted.append(error)

    def read(self, of: Perturbation, method: Attributor, *, for_all: bool = False) -> Any:
        """A method's results for all perturbed rows, in their order; the method reports its progress itself.

        They are not remembered, except those of the other targets when run ``for_all`` of them at once.
        """
        need, found = NeedAtLayer(Scores(of, method), self.layer), self.resolved.found
        if self.context.interrupted:
            raise self.context.interrupted[0]
        if need not in found:
            # The method decides what to do with an interrupt.
            settings = replace(self.context.settings, keep_partial=False, progress=None)
            targets, again = self.context.targets if for_all else [self.resolved], None in self.context.checked
            context = replace(self.context, targets=targets, settings=settings, again=again)
            with self.precision:
                noted = run_streams(Plan({"": frozenset({need})}), context, math.inf if "noted" in self.kept else FEW)
            if noted:
                self.kept["noted"] = True
        return found[need] if for_all else found.pop(need)

    def report_progress(self, done: int, total: int, maps: Callable[[], Mapping[str, Tensor]] = dict) -> None:
        """Report how many of a method's own rows are done, and the ``maps`` so far by its name."""
        runtime.report_progress(self.context.settings.progress, done, total, maps)

    def remembered(self) -> Iterator[tuple[Need[Any], Any]]:
        """The needs that have been answered for this target, also on the way for another one, and the answers."""
        return ((need.kind, found) for need, found in list(self.resolved.found.items()) if need.layer == self.layer)


class LayerRerun:
    """Runs a network with other feature maps of a layer, in the fastest of three ways that works:

    1. the operations before the layer are replayed from a tape;
    2. the network before the layer is run for the image, and behind it for several maps;
    3. the network is run whole for every map, as where something leads past the layer and takes no more rows behind it.
    """

    def __init__(self, context: RerunContext, layer: str, accumulators: Sequence[TargetAccumulators]) -> None:
        self._context, self._layer, self._accumulators = context, layer, accumulators
        self._targets = [of_target.resolved for of_target in accumulators]
        self._record = context.forward.record(layer)
        self._runs_whole = context.one_at_a_time
        self._may_replay = not self._runs_whole and not has_hooks(context.model)  # others' hooks would see a replay
        most = context.footprint.most(context.inputs.x.device, graph=False, after=layer)
        self.tuner = context.tuner(layer, most, runtime.sizes_in_cache(most, context.inputs.x.device))

    def begin(self, image: Tensor) -> None:
        """Begin with the maps of an image."""
        self._image = image
        known = self._context.tapes.pop(self._layer, None)  # of the forward pass of all, which has one image then
        self._tape = (known or self._record_prefix()) if self._may_replay else None
        self._tape_is_checked = False

    @reading_once()
    def run(self, rows: PerturbedRows, numbers: Tensor, check: bool) -> list[Add]:
        """Run these perturbed maps of the image."""
        context, image = self._context, self._image
        unperturbed = len(context.inputs) - len(numbers) if context.fixed else int(check)

        def make() -> Tensor:
            with calculating(context.inputs.x.device.type):
                maps = rows.make(numbers)
                if context.among_others:
                    return self._own_maps(slice(None)).to(maps).index_copy(0, image, maps)
                return torch.cat([maps, *[self._own_maps(image).to(maps)] * unperturbed]) if unperturbed else maps

        if self._tape is not None and not check and not self._tape_is_checked:
            self._check_tape()
        images, place = torch.cat([rows.owners[numbers], image.repeat(unperturbed)]), 0
        if context.among_others:
            images, place = torch.arange(len(context.inputs), device=image.device), int(image)
        output = self._output(images, make, check)
        if self._tape is not None and len(context.inputs) == 1:
            context.tapes[self._layer] = self._tape  # for further rows of the image
        return [of_target.read_output(images, numbers, output, place) for of_target in self._accumulators]

    def _output(self, images: Tensor, make: Callable[[], Tensor], check: bool) -> Any:
        """The network's output for maps, run in the next slower way if one fails."""
        while True:
            maps = make()  # new ones each time, since the network may overwrite them
            first = maps[:1].clone()
            try:
                output = self._run_maps(images, images if self._runs_whole else self._image, maps)
                scores = [(resolved, resolved.scores_in(images, output)) for resolved in self._targets]
                if not self._runs_whole:
                    if self._context.forward.logits is not None and self._context.inputs.others:
                        self._context.check_width(find_logits(output, len(images)))
                    if any(torch.isnan(score).any() for _, score in scores):
                        raise DependentRowsError  # something reads what the layer overwrote, which has fewer rows
                if check:
                    run_first = partial(self._run_maps, self._image, self._image, first)
                    self._context.check_rows(self._layer, images, scores, run_first, last_is_image=True)
                    self._tape_is_checked = True  # by the last row
                return output
            except Exception as error:  # whatever the network says of more rows than it began with
                runtime.raise_unless_of_network(error)
                if self._runs_whole:
                    raise
                way = "is not replayed" if self._tape is not None else "runs again for every map"
                note(f"what lies before layer {self._layer} {way}: {raised(error)}")
            self._runs_whole, self._may_replay, self._tape = self._tape is None, False, None

    def _check_tape(self) -> None:
        """Replay the tape for the unperturbed maps; if the score differs, do without it for this image."""
        try:
            output = self._run_maps(self._image, self._image, self._own_maps(self._image))
            agrees = self._context.are_known(self._image, output, self._targets)
        except Exception as error:  # whatever the network says of a replay
            runtime.raise_unless_of_network(error)
            agrees = False
        self._tape_is_checked, self._tape = True, self._tape if agrees else None

    def _own_maps(self, images: Tensor | slice) -> Tensor:
        """The layer's own feature maps for these images."""
        return self._context.forward.spatial(self._record.activation, self._layer)[images]

    def _record_prefix(self) -> Tape | None:
        """Run up to the layer and record the operations; None if they cannot be replayed."""
        context, record = self._context, self._record
        with context.runs_model(), HookGroup(context.model) as group:
            recorder = PrefixRecorder(group, context.model, f"{record.layer}@{record.call}", ends=True)
            inputs = context.inputs.rows(self._image)  # what is recorded begins with the call, as it does in a replay
            try:
                with recorder.tape:
                    inputs.call(context.model)
            except ReachedError:
                pass
            except Exception as error:  # the network may take no image alone
                runtime.raise_unless_of_network(error)
                self._may_replay = False
                return None
        return recorder.made(record.call)

    def _run_maps(self, images: Tensor, before: Tensor, maps: Tensor) -> Any:
        """Run the network on the images ``before`` the layer, and behind it with ``maps`` that belong to ``images``."""
        context, record = self._context, self._record
        raw = record.activation
        grid = context.forward.grids.grid(tuple(raw.shape), self._layer)
        assert grid is not None  # the maps were laid out by it
        # Unless each has the others beside it, all of them are of one image.
        like = raw if context.among_others else grid.repeated(raw, images[:1], len(images))
        perturbed = grid.fold(maps.to(raw), like)  # as the layer would have returned them
        calls = Counter[str]()
        tape = self._tape if len(before) == 1 else None
        replay = None if tape is None else Replay(tape)

        def replaced(overwriting: Overwriting, module: nn.Module, args: Any, output: Any) -> Any:
            tensor = first_tensor(output)
            calls[record.layer] += 1
            if calls[record.layer] != record.call + 1:
                return None
            if replay is not None:
                replay.live = True
            if tensor is not None and overwriting.of(tensor):
                if tensor.shape == perturbed.shape:
                    tensor.copy_(perturbed)  # code that reads it by its older name sees the change too
                    return None
                tensor.fill_(float("nan"))  # code that reads it by its older name shows: that tensor has fewer rows
            # The network may overwrite it, and without a replay run again in another layout.
            return replace_first(output, perturbed if replay is not None else perturbed.clone())

        def run(inputs: Inputs) -> Any:
            calls.clear()  # it may run again in another layout
            with HookGroup(context.model) as group:
                group.forward(record.layer, partial(replaced, Overwriting(group, record.layer)))
                with replay or nullcontext():
                    return inputs.call(context.model)

        given = {context.inputs.path: context.inputs.x[before]}
        with context.runs_model(), rows_of(images, before):
            output = run(context.inputs.rows(before)) if replay else context.in_fastest_layout(before, given, run)
        if tape is not None and replay is not None and not (tape.is_intact() and replay.leaves_intact):
            self._tape = self._record_prefix()
        return output


_PLACE = "tokens of the first block"


class TokenRerun:
    """Runs a transformer on some tokens of each photo; each token has its position encoding already.

    The network before the first block is run once for each batch of rows; some tokens go into the first block.

    Raises:
        MethodError: the network has no blocks that take any number of tokens.
    """

    def __init__(self, context: RerunContext, accumulators: Sequence[TargetAccumulators]) -> None:
        self._context, self._accumulators = context, accumulators
        self.tuner = context.tuner("tokens", context.footprint.most(context.inputs.x.device, graph=False))
        blocks = self._blocks = explained_blocks(context.model, context.inputs)
        # a layer that is known by its name has its grid whatever the shape
        grid = context.forward.grids.grid((len(context.inputs), 0, 0), blocks[0]) if blocks else None
        if grid is None or grid.layout not in ("tokens", "tokens first"):
            raise _refused(f"{type(context.model).__name__} has {'other' if blocks else 'no'} blocks")
        self._grid: Grid = grid

    def begin(self, image: Tensor) -> None:
        """Check that the photo has its own score when all of its tokens go in, as one row of two.

        Raises:
            MethodError: it has not.
        """
        self._image = image
        output = self._output(torch.ones(2, *self._grid.size, dtype=torch.bool, device=image.device))
        if not self._context.are_known(image.expand(2), output, self._context.targets):
            raise _refused("the photo has another score when its tokens go into the first block again")

    @reading_once()
    def run(self, rows: PerturbedRows, numbers: Tensor, check: bool) -> list[Add]:
        """Run the photo with these sets of its tokens."""
        keep, images = rows.make(numbers), self._image.expand(len(numbers))
        output = self._output(keep)
        if check:
            targets = [of_target.resolved for of_target in self._accumulators]
            scores = [(resolved, resolved.scores_in(images, output)) for resolved in targets]
            run_first = partial(self._output, keep[:1])
            self._context.check_rows(_PLACE, images, scores, run_first, last_is_image=False)
        return [of_target.read_output(images, numbers, output) for of_target in self._accumulators]

    def _output(self, keep: Tensor) -> Any:
        """The network's output for these tokens ``(b, h, w)`` of the photo, as many in each row."""
        taken: list[bool] = []

        def some(tokens: Any) -> Tensor | None:
            of_images = self._grid.of_images
            if taken or not isinstance(tokens, Tensor) or tokens.ndim != 3 or tokens.shape[of_images] != 1:
                return None
            taken.append(True)
            of_image = tokens.movedim(of_images, 0)[0]
            is_kept = torch.ones(len(keep), len(of_image), dtype=torch.bool, device=keep.device)
            is_kept[:, list(self._grid.tokens)] = keep.flatten(1)
            chosen = is_kept.nonzero()[:, 1].reshape(len(keep), -1)  # in their order, also those that are no patches
            return of_image[chosen].movedim(0, of_images)

        def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_first(module, args, kwargs, some)

        try:
            with self._context.runs_model(), HookGroup(self._context.model) as group:
                group.forward_pre(self._blocks, take, with_kwargs=True)
                return self._context.inputs.rows(self._image).call(self._context.model)
        except Exception as error:  # whatever the network says of other tokens than it was made for
            runtime.raise_unless_of_network(error)
            raise _refused(raised(error)) from error


def _refused(why: str) -> MethodError:
    return MethodError(f"model must be a transformer whose blocks take any number of tokens, but {why}; use rise")
