"""Altered rows: the same question asked of altered inputs or feature maps, in pieces, once for all that is asked.

Rows are built when they are needed and forgotten when their results have been added up, so memory does not grow with
their number. The first piece of each stream contains a row that is not altered: its score must be the one that is known
already. The first row of the longest stream is also run alone, and must have the same score as among the others. If one
of them has not, the network lets rows depend on each other, and every row is run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from explain._utils.errors import ExplainError, MethodError, note
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs, Path, dotted
from explain.engine.batching import Add, ProgressCallback, Readers, in_pieces
from explain.engine.evidence import Evidence, RowOrigin
from explain.engine.forward import ResolvedTarget
from explain.engine.layer_reruns import behind_layer
from explain.engine.needs import Need, NeedAtLayer
from explain.engine.perturbations import (
    Attributions,
    Attributor,
    Following,
    Perturbation,
    PerturbedRows,
    Reducer,
    Scores,
    TokenPerturbation,
)
from explain.engine.plan import Plan, Stream
from explain.engine.rerun_context import (
    DependentImagesError,
    DependentRowsError,
    RerunContext,
    check_width,
    in_fastest_layout,
    running_altered,
    scores_agree,
    scores_of,
)
from explain.engine.settings import BatchSizeTuner, is_out_of_memory, tell
from explain.engine.token_subsets import sampled_tokens
from explain.hooks import calculating


def run_streams(plan: Plan, asked: RerunContext) -> None:
    """Run all altered rows of a plan, and add their answers to what was found for each target."""
    waiting = []
    for stream in plan.streams:
        if stream.is_known(asked.work.precision):
            for choice in asked.choices:
                choice.found.update({ask: _known(ask, asked, choice) for ask in stream.readers})
        else:
            waiting.append(stream)
    if not waiting:
        return
    if asked.work.batch_size == 1:
        _must_score_alone(asked, if_it_can=True)  # no piece has two rows, which would show it
    with calculating(asked.inputs.x.device.type):
        streams = [(stream, _rows(stream, asked)) for stream in waiting]
    lengths = [len(rows[asked.inputs.path].owners) for _, rows in streams]
    order = sorted(range(len(streams)), key=lambda i: _when(streams[i][0], lengths[i], len(asked.inputs)))
    streams = [streams[i] for i in order]
    names = {ask: plan.names_of(ask) for stream in waiting for ask in stream.readers}
    progress, asked.longest = ProgressCallback(asked.work, sum(lengths)), max(lengths)
    try:
        _run_all(streams, asked, progress, names)
    except DependentRowsError:
        _must_score_alone(asked)
        note("altered rows are run one at a time: the model's scores depend on what stands beside an image")
        asked.one_at_a_time = True
        progress.begin_again()
        _run_all(streams, asked, progress, names)


def _when(stream: Stream, length: int, images: int) -> tuple[bool, bool, int]:
    """When a stream is run: what others are compared with first; then the longest, which shows best what rows do."""
    return length > images, not getattr(stream.of, "is_reference", False), -length


def _run_all(
    streams: Sequence[tuple[Stream, Mapping[Path, PerturbedRows]]],
    asked: RerunContext,
    progress: ProgressCallback,
    names: Mapping[NeedAtLayer, Sequence[str]],
) -> None:
    """Run streams one after the other, and put what they say into what was found for each target.

    An interrupt ends this with what there is by then, where that is wanted.
    """
    for stream, rows in streams:
        readers = [Readers(stream, asked, choice, names) for choice in asked.choices]
        try:
            _run(stream, rows, readers, asked, progress)
        except KeyboardInterrupt as error:
            if not asked.work.keep_partial:
                raise
            asked.interrupted.append(error)
        for reader in readers:
            reader.choice.found.update(reader.partial() if asked.interrupted else reader.results())
        if asked.interrupted:
            return


def _rows(stream: Stream, asked: RerunContext) -> dict[Path, PerturbedRows]:
    """The altered rows of each explained input; they are altered together, row by row.

    Raises:
        MethodError: one of them has other rows than the first, so that nothing says which belong together.
    """
    paths: Sequence[Path | None] = asked.inputs.paths if len(asked.inputs.paths) > 1 else (None,)
    found = [asked.evidence(asked.choices[0], stream.layer, path) for path in paths]
    made = [stream.of.rows(found[0])]
    for evidence, path in zip(found[1:], asked.inputs.paths[1:], strict=True):
        of: Any = stream.of
        made.append(of.rows_beside(evidence, made[0]) if isinstance(of, Following) else of.rows(evidence))
        if not torch.equal(made[-1].owners.cpu(), made[0].owners.cpu()):
            raise MethodError(
                f"explained must name inputs with as many altered copies each ({stream.of}), got "
                f"{len(made[0].owners)} for {asked.inputs.name} and {len(made[-1].owners)} for {dotted(path)}; name one"
            )
    return dict(zip(asked.inputs.paths, made, strict=True))


def _run(
    stream: Stream,
    rows: Mapping[Path, PerturbedRows],
    readers: Sequence[Readers],
    asked: RerunContext,
    progress: ProgressCallback,
) -> None:
    """Run a stream; the readers take what it says for each target."""
    if isinstance(stream.of, TokenPerturbation):
        sampled_tokens(stream, rows[asked.inputs.path], readers, asked, progress)
    elif stream.of.of_layer:
        behind_layer(stream, rows[asked.inputs.path], readers, asked, progress)
    else:
        _at_input(stream, rows, readers, asked, progress)


def _alone(asked: RerunContext, inputs: Inputs) -> Any:
    """The network's output for one row; None if it takes only as many rows as there are images."""
    try:
        with running_altered(asked):
            return inputs.call(asked.model)
    except Exception as error:
        if is_out_of_memory(error) or came_by_signal(error) or isinstance(error, ExplainError):
            raise
        asked.fixed = True
        return None


def _must_score_alone(asked: RerunContext, *, if_it_can: bool = False) -> None:
    """Refuse a batch in which an image has another score than alone; altered rows could not be compared with it.

    Quantised networks take one scale for all images, which makes a small difference: it is accepted.
    """
    several = len(asked.inputs) > 1
    if not several and (if_it_can or asked.work.precision != "full"):
        return
    quantised = any("quantized" in type(module).__module__ for module in asked.model.modules())
    for image in range(len(asked.inputs)):
        mine = torch.tensor([image], device=asked.inputs.x.device)
        output = _alone(asked, asked.inputs.rows(mine))
        if output is None:
            if if_it_can:
                return
            raise DependentImagesError(
                "model must score each image on its own to be run on altered images, but rows change each other's "
                f"scores and it takes {len(asked.inputs)} images only; export it for one image"
            )
        for choice in asked.choices:
            score, among = scores_of(choice, mine, output), choice.score[mine]
            close = abs(score - among) <= 0.05 * max(score.abs().max(), among.abs().max())
            if scores_agree(asked, choice, score, among) or (quantised and close):
                continue
            told = _another_score if several else _changing_score
            raise DependentImagesError(told(image, f"{among.item():.4g}", f"{score.item():.4g}"))


def _another_score(image: int, among: str, alone: str) -> str:
    return (
        f"model must score each image on its own to be run on altered images, but image {image} scores {among} among "
        f"the others and {alone} alone (a normalisation over the batch?); explain one image at a time"
    )


def _changing_score(image: int, first: str, then: str) -> str:
    return (
        f"model must give an image the same score whenever it is run, but gave image {image} {first} and then {then} "
        "(a counter, or random numbers that go on?); put back what it remembers, or use a method of one pass such as "
        "gradcam"
    )


def _known(ask: NeedAtLayer, asked: RerunContext, choice: ResolvedTarget) -> Any:
    """What is asked of rows that are not altered, which is there already."""
    if isinstance(ask.need, Attributions):
        evidence = asked.evidence(choice, ask.layer, ask.input)
        collected, images = ask.need.fold.begin(evidence), torch.arange(len(asked.inputs), device=asked.inputs.x.device)
        collected.add(images, images, ask.need.method(evidence))
        return collected.result()
    if not isinstance(ask.need, Scores) or not ask.need.logits:
        return choice.score
    assert asked.forward.logits is not None
    return asked.forward.logits


@dataclass(frozen=True)
class Runner:
    """Runs altered rows for a method that may do so."""

    asked: RerunContext
    choice: ResolvedTarget
    layer: str | None
    precision: torch.autocast
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return bool(self.asked.interrupted)

    def end(self, error: KeyboardInterrupt, *, partial: bool) -> None:
        """End the work with what there is, where a method has something and it is wanted."""
        if not partial or not self.asked.work.keep_partial:
            raise error
        self.asked.interrupted.append(error)

    def scores(self, of: Perturbation, *, logits: bool = False) -> torch.Tensor:
        """The score ``(P,)`` of each altered row, or its class scores ``(P, K)``; equal plans are run once."""
        found: torch.Tensor = self._answer(NeedAtLayer(Scores(of, logits), self.layer))
        return found

    def read(self, of: Perturbation, method: Attributor, fold: Reducer) -> Any:
        """What a method says of each altered row, added up by a fold; equal plans are run once."""
        return self._answer(NeedAtLayer(Attributions(of, method, fold), self.layer))

    def read_for_all(self, of: Perturbation, method: Attributor, fold: Reducer) -> Any:
        """The same, and what it says for the other targets is remembered for them; the method tells how far it is."""
        return self._answer(NeedAtLayer(Attributions(of, method, fold), self.layer), self.asked.choices, told=False)

    def read_once(self, of: Perturbation, method: Attributor, fold: Reducer) -> Any:
        """The same, and not remembered; the method tells how far it is."""
        ask = NeedAtLayer(Attributions(of, method, fold), self.layer)
        try:
            return self._answer(ask, told=False)
        finally:
            self.choice.found.pop(ask, None)

    def tell(self, done: int, total: int, maps: Callable[[], Mapping[str, torch.Tensor]] = dict) -> None:
        """Tell how many of the rows that a method plans as it goes are done, and its maps so far."""
        tell(self.asked.work.progress, done, total, maps)

    def remembered(self) -> Iterator[tuple[Need[Any], Any]]:
        """What this target has been asked, also on the way for another one, and the answers."""
        return ((ask.need, found) for ask, found in list(self.choice.found.items()) if ask.layer == self.layer)

    def _answer(self, ask: NeedAtLayer, choices: Sequence[ResolvedTarget] = (), *, told: bool = True) -> Any:
        if self.asked.interrupted:
            raise self.asked.interrupted[0]
        if ask not in self.choice.found:
            progress = self.asked.work.progress if told else None
            # The method decides what to do with an interrupt.
            work = replace(self.asked.work, keep_partial=False, progress=progress)
            asked = replace(self.asked, choices=choices or [self.choice], work=work, again=None in self.asked.proved)
            with self.precision:
                run_streams(Plan({"": frozenset({ask})}), asked)
        return self.choice.found[ask]


def _at_input(
    stream: Stream,
    rows: Mapping[Path, PerturbedRows],
    readers: Sequence[Readers],
    asked: RerunContext,
    progress: ProgressCallback,
) -> None:
    """Run altered inputs, each piece with all that is asked of it."""
    inputs = asked.inputs
    inner = Plan({"": stream.inner})
    graph = inner.whole or bool(inner.layers)
    run = partial(_run_piece, inner, rows, readers, asked)
    kind = (tuple(inputs.x.shape[1:]), inputs.x.dtype, asked.work.precision, graph)
    pace = BatchSizeTuner(asked.model, kind, asked.footprint.most(inputs.x.device, graph=graph), inputs.x.device)
    owners = rows[inputs.path].owners
    in_pieces(
        torch.arange(len(owners), device=inputs.x.device),
        run,
        readers,
        asked,
        progress,
        pace,
        owners,
        checked=asked.again,
    )


def _run_piece(
    inner: Plan,
    rows: Mapping[Path, PerturbedRows],
    readers: Sequence[Readers],
    asked: RerunContext,
    numbers: torch.Tensor,
    check: bool,
) -> Add:
    """Ask a piece of altered inputs what the readers want to know."""
    inputs, first = asked.inputs, rows[asked.inputs.path]
    with calculating(inputs.x.device.type):
        images = first.owners[numbers]
        altered = {path: each.make(numbers).to(inputs.tensor(path)) for path, each in rows.items()}
    beside = images[:1].repeat(len(inputs) - len(numbers) if asked.fixed else int(check))  # not altered
    if len(beside):
        images = torch.cat([images, beside])
        altered = {path: torch.cat([t, inputs.tensor(path)[beside]]) for path, t in altered.items()}
    given = asked.evidence(asked.choices[0], None)
    ask = partial(
        asked.gather,
        plan=inner,
        targets=[reader.choice.of_rows(images) for reader in readers],
        work=replace(asked.work, progress=None, batch_size=1 if asked.one_at_a_time else asked.work.batch_size),
        origin=RowOrigin(given.images, partial(_carried, given, first, images, numbers), given.question.outputs),
    )
    try:
        found = in_fastest_layout(asked, images, altered, ask)
    except DependentImagesError as error:
        if asked.one_at_a_time or len(images) == 1:
            raise
        raise DependentRowsError from error  # they are rows here, and may well be of one image
    if check:
        one = inputs.rows(images[:1], {path: tensor[:1] for path, tensor in altered.items()})
        longest = len(first.owners) >= asked.longest
        _check(readers, asked, images, one, [evidence_of(None).score for evidence_of in found], longest)
    add = []
    for reader, evidence_of in zip(readers, found, strict=True):
        check_width(asked, evidence_of(None).logits)
        with calculating(inputs.x.device.type):
            add.append(reader.read(images[: len(numbers)], numbers, evidence_of))
    return partial(_all, add)


def _check(
    readers: Sequence[Readers],
    asked: RerunContext,
    images: torch.Tensor,
    first: Inputs,
    scores: list[torch.Tensor],
    longest: bool,
) -> None:
    """See that rows do not depend on each other: the last one is not altered, and of the longest stream the first one
    is run alone too.

    Raises:
        DependentRowsError: one of them has another score among the others than alone.
    """
    for reader, score in zip(readers, scores, strict=True):
        if not scores_agree(asked, reader.choice, score[-1:], reader.choice.score[images[-1:]]):
            raise DependentRowsError
    output = _alone(asked, first) if longest and None not in asked.proved else None
    if output is None:
        return
    for reader, score in zip(readers, scores, strict=True):
        if not scores_agree(asked, reader.choice, score[:1], scores_of(reader.choice, images[:1], output)):
            raise DependentRowsError
    asked.proved.add(None)


def _carried(
    given: Evidence, rows: PerturbedRows, images: torch.Tensor, numbers: torch.Tensor, tensor: torch.Tensor
) -> torch.Tensor:
    """Bring a tensor of the caller's images to altered rows; behind these may be one that is not altered."""
    found = given.of_images(tensor)[images]
    if rows.carry is None:
        return found
    return torch.cat([rows.carry(found[: len(numbers)], numbers), found[len(numbers) :]])


def _all(add: Sequence[Add]) -> None:
    for each in add:
        each()
