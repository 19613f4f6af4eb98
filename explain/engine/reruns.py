"""Perturbed rows: perturbed inputs or feature maps are run in batches, once for all methods and targets that need them.

Rows are built when they are needed and forgotten when their results have been added up, so memory does not grow with
their number. The first batch of each stream contains an unperturbed row, whose score must be the known one. The first
row of the longest stream is also run alone, and must have the same score as among the others. If one of them has not,
the network lets rows depend on each other, and every row is run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from explain._utils.errors import MethodError, note
from explain.data.inputs import Path, dotted
from explain.engine.batching import Add, ProgressCallback, Readers, run_in_batches
from explain.engine.evidence import Evidence, RowOrigin
from explain.engine.forward import ResolvedTarget
from explain.engine.layer_reruns import run_from_layer
from explain.engine.needs import Need, NeedAtLayer
from explain.engine.perturbations import Attributions, Attributor, Perturbation, PerturbedRows, Reducer, Scores
from explain.engine.plan import Plan, Stream
from explain.engine.rerun_context import (
    DependentImagesError,
    DependentRowsError,
    RerunContext,
    check_images,
    check_rows,
    check_width,
)
from explain.engine.settings import Precision, tell
from explain.engine.token_subsets import run_token_subsets
from explain.hooks.preserve import calculating


def run_streams(plan: Plan, context: RerunContext) -> None:
    """Run all perturbed rows of a plan, and add the results to what was found for each target."""
    waiting = []
    for stream in plan.streams:
        if stream.is_known(context.work.precision):
            for choice in context.choices:
                choice.found.update({ask: _of_images(ask, context, choice) for ask in stream.readers})
        else:
            waiting.append(stream)
    if not waiting:
        return
    if context.work.batch_size == 1:
        check_images(context, if_possible=True)  # no batch has two rows, which would show it
    with calculating(context.inputs.x.device.type):
        streams = [(stream, _rows(stream, context)) for stream in waiting]
    lengths = [len(rows[context.inputs.path].owners) for _, rows in streams]

    def order(i: int) -> tuple[bool, bool, int]:
        """What others are compared with comes first, then the longest, which shows best whether rows depend."""
        return lengths[i] > len(context.inputs), not streams[i][0].of.is_reference, -lengths[i]

    ordered = [streams[i] for i in sorted(range(len(streams)), key=order)]
    names = {ask: plan.names_of(ask) for stream in waiting for ask in stream.readers}
    progress, context.longest = ProgressCallback(context.work, sum(lengths)), max(lengths)
    try:
        _run_all(ordered, context, progress, names)
    except DependentRowsError:
        check_images(context)
        note("perturbed rows are run one at a time: the model's scores depend on what stands beside an image")
        context.one_at_a_time = True
        progress.restart()
        _run_all(ordered, context, progress, names)


def _run_all(
    streams: Sequence[tuple[Stream, Mapping[Path, PerturbedRows]]],
    context: RerunContext,
    progress: ProgressCallback,
    names: Mapping[NeedAtLayer, Sequence[str]],
) -> None:
    """Run streams one after the other; an interrupt ends this with partial results, if these are wanted."""
    for stream, rows in streams:
        readers = [Readers(stream, context, choice, names) for choice in context.choices]
        first = rows[context.inputs.path]
        try:
            if stream.of.of_tokens:
                run_token_subsets(first, readers, context, progress)
            elif stream.of.of_layer:
                run_from_layer(stream, first, readers, context, progress)
            else:
                _run_inputs(stream, rows, readers, context, progress)
        except KeyboardInterrupt as error:
            if not context.work.keep_partial:
                raise
            context.interrupted.append(error)
        for reader in readers:
            reader.choice.found.update(reader.results(partial=bool(context.interrupted)))
        if context.interrupted:
            return


def _rows(stream: Stream, context: RerunContext) -> dict[Path, PerturbedRows]:
    """The perturbed rows of each explained input; they are perturbed together, row by row.

    Raises:
        MethodError: one of them has other rows than the first, so that nothing says which belong together.
    """
    paths: Sequence[Path | None] = context.inputs.paths if len(context.inputs.paths) > 1 else (None,)
    found = [context.evidence(context.choices[0], stream.layer, path) for path in paths]
    made = [stream.of.rows(found[0])]
    for evidence, path in zip(found[1:], context.inputs.paths[1:], strict=True):
        made.append(stream.of.matching_rows(evidence, made[0]))
        if not torch.equal(made[-1].owners.cpu(), made[0].owners.cpu()):
            raise MethodError(
                f"explained must name inputs with as many perturbed copies each ({stream.of}), got "
                f"{len(made[0].owners)} for {context.inputs.name} and {len(made[-1].owners)} for {dotted(path)}; name "
                "one"
            )
    return dict(zip(context.inputs.paths, made, strict=True))


def _of_images(ask: NeedAtLayer, context: RerunContext, choice: ResolvedTarget) -> Any:
    """The answer for rows that are not perturbed, which is known already."""
    if isinstance(ask.need, Attributions):
        evidence = context.evidence(choice, ask.layer, ask.input)
        accumulator = ask.need.fold.begin(evidence)
        images = torch.arange(len(context.inputs), device=context.inputs.x.device)
        accumulator.add(images, images, ask.need.method(evidence))
        return accumulator.result()
    if not isinstance(ask.need, Scores) or not ask.need.logits:
        return choice.score
    assert context.forward.logits is not None
    return context.forward.logits


@dataclass(frozen=True)
class PerturbationRunner:
    """Runs perturbed rows that a method can name only when it sees the evidence."""

    context: RerunContext
    choice: ResolvedTarget
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
        if not partial or not self.context.work.keep_partial:
            raise error
        self.context.interrupted.append(error)

    def scores(self, of: Perturbation, *, logits: bool = False) -> torch.Tensor:
        """The score ``(P,)`` of each perturbed row, or its class scores ``(P, K)``."""
        found: torch.Tensor = self._answer(NeedAtLayer(Scores(of, logits), self.layer))
        return found

    def read_for_all(self, of: Perturbation, method: Attributor, fold: Reducer) -> Any:
        """A method's results for all perturbed rows, added up; those for the other targets are remembered for them.

        Progress is not reported: a method that runs few rows at a time does so itself, with `tell`.
        """
        need = NeedAtLayer(Attributions(of, method, fold), self.layer)
        return self._answer(need, self.context.choices, report=False)

    def read_once(self, of: Perturbation, method: Attributor, fold: Reducer) -> Any:
        """The same for this target alone, and not remembered."""
        need = NeedAtLayer(Attributions(of, method, fold), self.layer)
        try:
            return self._answer(need, report=False)
        finally:
            self.choice.found.pop(need, None)

    def tell(self, done: int, total: int, maps: Callable[[], Mapping[str, torch.Tensor]] = dict) -> None:
        """Report how many of a method's own rows are done, and the ``maps`` so far by its name."""
        tell(self.context.work.progress, done, total, maps)

    def remembered(self) -> Iterator[tuple[Need[Any], Any]]:
        """The needs that have been answered for this target, also on the way for another one, and the answers."""
        return ((ask.need, found) for ask, found in list(self.choice.found.items()) if ask.layer == self.layer)

    def _answer(self, ask: NeedAtLayer, choices: Sequence[ResolvedTarget] = (), *, report: bool = True) -> Any:
        if self.context.interrupted:
            raise self.context.interrupted[0]
        if ask not in self.choice.found:
            progress = self.context.work.progress if report else None
            # The method decides what to do with an interrupt.
            work = replace(self.context.work, keep_partial=False, progress=progress)
            again = None in self.context.checked
            context = replace(self.context, choices=choices or [self.choice], work=work, again=again)
            with self.precision:
                run_streams(Plan({"": frozenset({ask})}), context)
        return self.choice.found[ask]


def _run_inputs(
    stream: Stream,
    rows: Mapping[Path, PerturbedRows],
    readers: Sequence[Readers],
    context: RerunContext,
    progress: ProgressCallback,
) -> None:
    """Run perturbed inputs, each batch with all that is needed of it."""
    inner = Plan({"": stream.inner})
    graph, device = inner.whole or bool(inner.layers), context.inputs.x.device
    tuner = context.tuner(graph, context.footprint.most(device, graph=graph))
    owners = rows[context.inputs.path].owners
    numbers = torch.arange(len(owners), device=device)
    # gradients in bfloat16 are off by tens of percent, scores by less than a percent
    in_full = graph or stream.of.full_precision
    run = partial(_run_batch, inner, "full" if in_full else context.work.precision, rows, readers, context)
    run_in_batches(numbers, run, readers, context, progress, tuner, owners, checked=context.again)


def _run_batch(
    inner: Plan,
    precision: Precision,
    rows: Mapping[Path, PerturbedRows],
    readers: Sequence[Readers],
    context: RerunContext,
    numbers: torch.Tensor,
    check: bool,
) -> list[Add]:
    """Gather what the readers need of a batch of perturbed inputs."""
    inputs, first = context.inputs, rows[context.inputs.path]
    with calculating(inputs.x.device.type):
        images = first.owners[numbers]
        perturbed = {path: each.make(numbers).to(inputs.tensor(path)) for path, each in rows.items()}
    unperturbed = images[:1].repeat(len(inputs) - len(numbers) if context.fixed else int(check))
    if len(unperturbed):
        images = torch.cat([images, unperturbed])
        perturbed = {path: torch.cat([t, inputs.tensor(path)[unperturbed]]) for path, t in perturbed.items()}
    given = context.evidence(context.choices[0], None)
    gather = partial(
        context.gather,
        plan=inner,
        precision=precision,
        targets=[reader.choice.of_rows(images) for reader in readers],
        work=replace(context.work, progress=None, batch_size=1 if context.one_at_a_time else context.work.batch_size),
        origin=RowOrigin(given.images, partial(_carried, given, first, images, numbers), given.find_outputs),
    )
    try:
        found = context.in_fastest_layout(images, perturbed, gather)
    except DependentImagesError as error:
        if context.one_at_a_time or len(images) == 1:
            raise
        raise DependentRowsError from error  # they are rows here, and may well be of one image
    if check:

        def run_first() -> Any:
            if len(first.owners) < context.longest:
                return None
            return context.run_alone(inputs.rows(images[:1], {path: tensor[:1] for path, tensor in perturbed.items()}))

        scores = [(reader.choice, of(None).score) for reader, of in zip(readers, found, strict=True)]
        check_rows(context, None, images, scores, run_first)
    added = []
    for reader, evidence_of in zip(readers, found, strict=True):
        check_width(context, evidence_of(None).logits)
        with calculating(inputs.x.device.type):
            added.append(reader.read(images[: len(numbers)], numbers, evidence_of))
    return added


def _carried(
    given: Evidence, rows: PerturbedRows, images: torch.Tensor, numbers: torch.Tensor, tensor: torch.Tensor
) -> torch.Tensor:
    """Bring a tensor of the caller's images to perturbed rows; behind these may be one that is not perturbed."""
    found = given.of_images(tensor)[images]
    if rows.carry is None:
        return found
    return torch.cat([rows.carry(found[: len(numbers)], numbers), found[len(numbers) :]])
