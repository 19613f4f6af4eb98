"""Altered rows in pieces of the best size, and what reads the results of each piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from explain._utils.errors import ExplainError, note, raised
from explain._utils.signals import came_by_signal
from explain.engine.evidence import Evidence, at_least_float32
from explain.engine.forward import ResolvedTarget
from explain.engine.needs import NeedAtLayer
from explain.engine.perturbations import Accumulator, Attributions, PartialResults, Scores
from explain.engine.plan import Stream
from explain.engine.rerun_context import DependentRowsError, EvidenceLookup, RerunContext
from explain.engine.settings import BatchSizeTuner, RuntimeSettings, is_out_of_memory, tell
from explain.targets import find_logits

Add = Callable[[], None]


class ProgressCallback:
    """Tells how many rows are done, of all streams together."""

    def __init__(self, work: RuntimeSettings, total: int) -> None:
        self._progress, self._total, self._done, self._told = work.progress, total, 0, 0

    def add(self, rows: int, maps: Callable[[], Mapping[str, torch.Tensor]] = dict) -> None:
        """Report that so many more rows are done, or no longer wanted, and the ``maps`` so far to who wants them."""
        self._done += rows
        if self._done > self._told:
            self._told = self._done
            tell(self._progress, self._done, self._total, maps)

    def begin_again(self) -> None:
        """Begin with the first row again; nothing is reported until the work is as far as before."""
        self._done = 0


class _Kept:
    """Keeps one number, or one row of numbers, for each altered row, in the order of their numbers."""

    def __init__(self, like: torch.Tensor) -> None:
        self._empty, self._values, self._numbers = like.new_zeros(0), list[torch.Tensor](), list[torch.Tensor]()

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        self._values.append(values)
        self._numbers.append(numbers)

    def enough(self) -> bool:
        return False

    def result(self) -> torch.Tensor:
        if not self._values:
            return self._empty
        return torch.cat(self._values)[torch.argsort(torch.cat(self._numbers))]


class Readers:
    """What one target's readers of a stream have added up so far."""

    def __init__(
        self,
        stream: Stream,
        asked: RerunContext,
        choice: ResolvedTarget,
        names: Mapping[NeedAtLayer, Sequence[str]] | None = None,
    ) -> None:
        self.choice, self._names = choice, names or {}
        self._of: dict[NeedAtLayer, Accumulator] = {}
        for ask in stream.readers:
            if isinstance(ask.need, Attributions):
                self._of[ask] = ask.need.fold.begin(asked.evidence(choice, ask.layer, ask.input))
            else:
                self._of[ask] = _Kept(choice.score)

    def read(self, images: torch.Tensor, numbers: torch.Tensor, evidence_of: EvidenceLookup) -> Add:
        """Read what is wanted of the evidence on these rows; what is returned adds it to what there is."""
        values = {ask: _read(ask, evidence_of(ask.layer, ask.input)) for ask in self._waiting}
        return partial(self._add, images, numbers, values)

    def read_scores(self, images: torch.Tensor, numbers: torch.Tensor, score: torch.Tensor, output: Any) -> Add:
        """The same of scores, and of the output that they were picked from."""
        values = {}
        for ask in self._waiting:
            logits = isinstance(ask.need, Scores) and ask.need.logits
            values[ask] = at_least_float32(find_logits(output, len(score)).detach() if logits else score)
        return partial(self._add, images, numbers, values)

    def _add(self, images: torch.Tensor, numbers: torch.Tensor, values: dict[NeedAtLayer, torch.Tensor]) -> None:
        for ask, found in values.items():
            self._of[ask].add(images, numbers, found[: len(numbers)])

    @property
    def _waiting(self) -> list[NeedAtLayer]:
        """The asks that want more rows: those that share a stream get no more than they would alone."""
        return [ask for ask, collected in self._of.items() if not collected.enough()]

    def enough(self) -> bool:
        return not self._waiting

    def results(self) -> dict[NeedAtLayer, Any]:
        return {ask: collected.result() for ask, collected in self._of.items()}

    def partial(self) -> dict[NeedAtLayer, Any]:
        """The results of those that have some although not all rows have come."""
        found = {ask: each.partial() for ask, each in self._of.items() if isinstance(each, PartialResults)}
        return {ask: result for ask, result in found.items() if result is not None}

    def maps(self) -> dict[str, torch.Tensor]:
        """The maps that there are so far, by the methods that asked for them."""
        found = {ask: each.so_far() for ask, each in self._of.items() if isinstance(each, PartialResults)}
        return {
            name: values for ask, values in found.items() if values is not None for name in self._names.get(ask, ())
        }

    def waiting(self, owners: torch.Tensor) -> torch.Tensor | None:
        """Which rows, of images ``(P,)``, are still wanted; None where that is not known of each image."""
        collected = [self._of[ask] for ask in self._waiting]
        if not collected or not all(isinstance(each, PartialResults) for each in collected):
            return None
        done = torch.stack([each.done() for each in collected if isinstance(each, PartialResults)]).all(0)
        return ~done.to(owners.device)[owners] if bool(done.any()) else None


def _read(ask: NeedAtLayer, evidence: Evidence) -> torch.Tensor:
    """What a reader takes from the evidence on altered rows."""
    if isinstance(ask.need, Attributions):
        return ask.need.method(evidence)
    assert isinstance(ask.need, Scores)
    if not ask.need.logits:
        return evidence.score
    assert evidence.logits is not None
    return evidence.logits


def in_pieces(
    numbers: torch.Tensor,
    run: Callable[[torch.Tensor, bool], Add],
    readers: Sequence[Readers],
    asked: RerunContext,
    progress: ProgressCallback,
    pace: BatchSizeTuner,
    owners: torch.Tensor | None = None,
    *,
    checked: bool = False,
) -> None:
    """Run rows in pieces of the best size; one that does not fit into memory is halved and run again.

    A network that refuses another number of rows than there are images (one that was exported so) gets that number.
    ``run`` takes the numbers of the rows, and whether to check that they do not depend on each other (it is told not to
    where that was ``checked`` before); it returns what
    adds up the results, so that nothing is added twice. With ``owners``, whose image each row is of, rows of images
    that want no more are left out.
    """
    given, images = 1 if asked.one_at_a_time else asked.work.batch_size, len(asked.inputs)
    start, wanted = 0, len(numbers)
    while start < len(numbers) and not all(reader.enough() for reader in readers):
        piece = numbers[start : start + (images if asked.fixed else given or pace.rows(len(numbers) - start))]
        check = start == 0 and len(piece) > 1 and not asked.fixed and not checked
        began = pace.now()
        try:
            add = run(piece, check)
        except Exception as error:
            if came_by_signal(error):
                raise
            if not is_out_of_memory(error) and not isinstance(error, (ExplainError, DependentRowsError)):
                if asked.fixed or start or len(piece) + check == images:
                    raise
                note(f"altered rows are run {images} at a time: {raised(error)}")
                asked.fixed = True
                continue
            if not is_out_of_memory(error) or len(piece) == 1 or asked.fixed:
                raise
            given = given and len(piece) // 2
            pace.fit(len(piece) // 2)
            continue
        add()
        start += len(piece)
        if given is None:
            pace.note(len(piece), pace.now() - began, len(numbers) - start)
        if owners is not None:
            numbers = _still_wanted(numbers, start, owners, readers)
        progress.add(len(piece) + wanted - len(numbers), readers[0].maps)
        wanted = len(numbers)
    if start < len(numbers):
        progress.add(len(numbers) - start, readers[0].maps)


def _still_wanted(numbers: torch.Tensor, start: int, owners: torch.Tensor, readers: Sequence[Readers]) -> torch.Tensor:
    """The rows without those, from the ``start``-th on, that no reader wants any more."""
    wanted = None
    for reader in readers:
        if reader.enough():
            continue
        mine = reader.waiting(owners[numbers[start:]])
        if mine is None:
            return numbers
        wanted = mine if wanted is None else wanted | mine
    return numbers if wanted is None else torch.cat([numbers[:start], numbers[start:][wanted]])
