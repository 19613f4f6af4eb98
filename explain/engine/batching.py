"""Perturbed rows in batches of the best size, and what is done with the results of each batch."""

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
from explain.engine.perturbations import Accumulator, Attributions, InOrder, Scores
from explain.engine.plan import Stream
from explain.engine.rerun_context import DependentRowsError, EvidenceLookup, RerunContext
from explain.engine.settings import BatchSizeTuner, RuntimeSettings, is_out_of_memory, tell
from explain.targets.base import find_logits

Add = Callable[[], None]
"""Adds the results of a batch to what there is, when all of its work has succeeded."""


class ProgressCallback:
    """Reports how many rows are done, of all streams together."""

    def __init__(self, work: RuntimeSettings, total: int) -> None:
        self._progress, self._total, self._done, self._reported = work.progress, total, 0, 0

    def add(self, rows: int, maps: Callable[[], Mapping[str, torch.Tensor]] = dict) -> None:
        """Report that so many more rows are done, or no longer needed, and the ``maps`` so far to who wants them."""
        self._done += rows
        if self._done > self._reported:
            self._reported = self._done
            tell(self._progress, self._done, self._total, maps)

    def restart(self) -> None:
        """Begin with the first row again; nothing is reported until the work is as far as before."""
        self._done = 0


class Readers:
    """The accumulators of one target for a stream, by the needs that they answer."""

    def __init__(
        self,
        stream: Stream,
        context: RerunContext,
        choice: ResolvedTarget,
        names: Mapping[NeedAtLayer, Sequence[str]],
    ) -> None:
        self.choice, self._names = choice, names
        self._of: dict[NeedAtLayer, Accumulator] = {}
        for ask in stream.readers:
            reducer = ask.need.fold if isinstance(ask.need, Attributions) else InOrder()
            self._of[ask] = reducer.begin(context.evidence(choice, ask.layer, ask.input))

    def read(self, images: torch.Tensor, numbers: torch.Tensor, evidence_of: EvidenceLookup) -> Add:
        """Read what the unfinished accumulators need from the evidence on these rows."""
        values = {ask: _read(ask, evidence_of(ask.layer, ask.input)) for ask in self._unfinished}
        return partial(self._add, images, numbers, values)

    def read_scores(self, images: torch.Tensor, numbers: torch.Tensor, score: torch.Tensor, output: Any) -> Add:
        """The same for scores, and for the output that they were picked from."""
        values = {}
        for ask in self._unfinished:
            logits = isinstance(ask.need, Scores) and ask.need.logits
            values[ask] = at_least_float32(find_logits(output, len(score)).detach() if logits else score)
        return partial(self._add, images, numbers, values)

    def _add(self, images: torch.Tensor, numbers: torch.Tensor, values: dict[NeedAtLayer, torch.Tensor]) -> None:
        for ask, found in values.items():
            self._of[ask].add(images, numbers, found[: len(numbers)])

    @property
    def _unfinished(self) -> list[NeedAtLayer]:
        """The needs that use more rows: those that share a stream get no more than they would alone."""
        return [ask for ask, accumulator in self._of.items() if not accumulator.enough()]

    def enough(self) -> bool:
        return not self._unfinished

    def results(self, *, partial: bool) -> dict[NeedAtLayer, Any]:
        """The results; ``partial`` ones, of those that have one, where not all rows have come."""
        found = {ask: each.partial() if partial else each.result() for ask, each in self._of.items()}
        return {ask: result for ask, result in found.items() if result is not None or not partial}

    def maps(self) -> dict[str, torch.Tensor]:
        """The maps that there are so far, by the methods that need them."""
        found = {ask: each.so_far() for ask, each in self._of.items()}
        return {
            name: values for ask, values in found.items() if values is not None for name in self._names.get(ask, ())
        }

    def needed(self, owners: torch.Tensor) -> torch.Tensor | None:
        """Which rows, of images ``(P,)``, are still needed; None for all of them."""
        done = [self._of[ask].done() for ask in self._unfinished]
        known = [each for each in done if each is not None]
        if not done or len(known) < len(done):
            return None
        finished = torch.stack(known).all(0)
        return ~finished.to(owners.device)[owners] if bool(finished.any()) else None


def _read(ask: NeedAtLayer, evidence: Evidence) -> torch.Tensor:
    if isinstance(ask.need, Attributions):
        return ask.need.method(evidence)
    assert isinstance(ask.need, Scores)
    if not ask.need.logits:
        return evidence.score
    assert evidence.logits is not None
    return evidence.logits


def run_in_batches(
    numbers: torch.Tensor,
    run: Callable[[torch.Tensor, bool], Sequence[Add]],
    readers: Sequence[Readers],
    context: RerunContext,
    progress: ProgressCallback,
    tuner: BatchSizeTuner,
    owners: torch.Tensor | None = None,
    *,
    checked: bool = False,
) -> None:
    """Run rows in batches of the best size.

    ``run`` takes the numbers of the rows, and whether to check that they do not depend on each other: so it is for the
    first batch, unless they were ``checked`` before. With ``owners``, the image of each row, rows of images that need
    no more are left out. A batch that does not fit into memory is halved and run again.
    """
    start, left = 0, len(numbers)
    while start < len(numbers) and not all(reader.enough() for reader in readers):
        size = len(context.inputs) if context.fixed else tuner.rows(len(numbers) - start)
        batch = numbers[start : start + size]
        check = start == 0 and len(batch) > 1 and not context.fixed and not checked
        began = tuner.now()
        try:
            added = run(batch, check)
        except Exception as error:
            if came_by_signal(error):
                raise
            _prepare_retry(error, batch, start, check, context, tuner)
            continue
        for add in added:
            add()
        start += len(batch)
        tuner.note(len(batch), tuner.now() - began, len(numbers) - start)
        if owners is not None:
            numbers = _still_needed(numbers, start, owners, readers)
        progress.add(len(batch) + left - len(numbers), readers[0].maps)
        left = len(numbers)
    if start < len(numbers):
        progress.add(len(numbers) - start, readers[0].maps)


def _prepare_retry(
    error: Exception, batch: torch.Tensor, start: int, check: bool, context: RerunContext, tuner: BatchSizeTuner
) -> None:
    """Make the batches smaller if memory ran out; or as many rows as images, if the network was exported so.

    Raises:
        Exception: the error, if neither helps.
    """
    images = len(context.inputs)
    if context.fixed:
        raise error
    if is_out_of_memory(error):
        if len(batch) == 1:
            raise error
        tuner.fit(len(batch) // 2)
        return
    if start or len(batch) + check == images or isinstance(error, (ExplainError, DependentRowsError)):
        raise error
    note(f"perturbed rows are run {images} at a time: {raised(error)}")
    context.fixed = True


def _still_needed(numbers: torch.Tensor, start: int, owners: torch.Tensor, readers: Sequence[Readers]) -> torch.Tensor:
    """The rows without those, from the ``start``-th on, that no reader needs any more."""
    needed = [reader.needed(owners[numbers[start:]]) for reader in readers if not reader.enough()]
    known = [each for each in needed if each is not None]
    if not known or len(known) < len(needed):
        return numbers
    return torch.cat([numbers[:start], numbers[start:][torch.stack(known).any(0)]])
