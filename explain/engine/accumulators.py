"""Where the results of perturbed rows add up, for each target of a stream."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from explain.engine import perturbations
from explain.engine.forward import ResolvedTarget
from explain.engine.needs import Evidence, EvidenceLookup, NeedAtLayer, applied, at_least_float32
from explain.engine.plan import PerturbationPass
from explain.engine.rerun_context import RerunContext
from explain.targets.base import find_logits

Add = Callable[[], None]
"""Adds the results of a batch to what there is, when all of its work has succeeded."""


@dataclass(frozen=True, eq=False)
class RowErrors:
    """Errors of rows' values that are like those that some of the rows have.

    An error is a rounding error of the row, as of one of these rows, and for what covers inputs
    also a function of what is covered: the weights are rounded, too. This is a linear one that
    varies as much.
    """

    sample: Tensor
    """The errors of some rows ``(few, ...)``."""
    sample_of_row: Tensor
    """Which of them each row ``(rows,)`` has."""
    is_sampled: Tensor
    """Whether it is one of these rows ``(rows,)``."""
    sample_inputs: Tensor | None = None
    """The inputs of some rows ``(few, C, H, W)``."""

    def of_rows(self, indices: Tensor, inputs: Tensor) -> Tensor:
        """Simulated rounding errors ``(b, ...)`` of bfloat16 for the values of perturbed rows, with
        these indices and inputs.

        Results are added up once more with them, to see how far they are off. Each row has the
        error of one measured row. For perturbed inputs, those of rows that were not measured get a
        term that is linear in the input and as large, since rounded weights err alike on similar
        inputs.
        """
        errors = self.sample[self.sample_of_row[indices]]
        if self.sample_inputs is None or len(self.sample_inputs) < 2:
            return errors
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(self.sample_inputs[0].numel(), generator=generator)
        direction = direction.to(self.sample_inputs)
        sample_projections = self.sample_inputs.flatten(1) @ direction
        spread = sample_projections.std()
        if not spread:
            return errors
        steps = (inputs.to(direction).flatten(1) @ direction - sample_projections.mean()) / spread
        steps = torch.where(self.is_sampled[indices], 0, steps)
        return errors + steps.reshape(-1, *[1] * (errors.ndim - 1)) * self.sample.std(0)


class TargetAccumulators:
    """The accumulators of one target for a stream, by the needs that they answer."""

    def __init__(
        self,
        stream: PerturbationPass,
        context: RerunContext,
        resolved: ResolvedTarget,
        names: Mapping[Any, Sequence[str]],
        numbers: Tensor,
        errors: Mapping[NeedAtLayer, "RowErrors"] | None = None,
    ) -> None:
        """Begin an accumulator for each need of the stream, for one target.

        ``numbers`` ``(P,)`` are those of all rows in their images, ``names`` the methods behind
        each need. With ``errors``, results are added up once more with an error in each row's
        value. The time of reducers with ``max_seconds`` begins here. Streams of perturbed rows are
        run for all targets at once, each with accumulators of its own.
        """
        self.resolved = resolved
        self._numbers = numbers
        self._names = names
        self._context = context
        self._errors = errors or {}
        self._accumulators: dict[NeedAtLayer, perturbations.Accumulator] = {}
        self._inexact: dict[NeedAtLayer, perturbations.Accumulator] = {}
        """Accumulators of the same values with simulated rounding errors."""
        self._ends: dict[NeedAtLayer, float] = {}
        """When the time of a need is over, by ``time.monotonic()``."""
        for need in stream.needs:
            reducer: perturbations.Reducer = need.kind.reducer  # type: ignore[attr-defined]
            evidence = context.evidence(resolved, need.layer, need.input)
            self._accumulators[need] = reducer.begin(evidence)
            seconds: float | None = getattr(reducer, "max_seconds", None)
            if seconds is not None:
                self._ends[need] = time.monotonic() + seconds
            if need in self._errors:
                self._inexact[need] = reducer.begin(evidence)

    def read(
        self, images: Tensor, indices: Tensor, evidence_of: EvidenceLookup, first: int = 0
    ) -> Add:
        """Apply the methods of the unfinished needs to a batch, and return a function that adds the
        results.

        ``images`` and ``indices`` ``(b,)`` are those of the perturbed rows, which begin at row
        ``first`` of the evidence. Reading and adding are apart so that a batch that fails adds
        nothing for any target.
        """
        evidence_by_need = {}
        values = {}
        for need in self._unfinished:
            evidence_by_need[need] = evidence_of(need.layer, need.input)
            values[need] = applied(need.kind.method, evidence_by_need[need])  # type: ignore[attr-defined]
        rows = slice(first, first + len(indices))
        numbers = self._numbers[indices]

        def add() -> None:
            for need, batch_values in values.items():
                row_values = batch_values[rows]
                self._accumulators[need].add(images, numbers, row_values)
                if need in self._inexact:
                    errors = self._errors[need].of_rows(
                        indices, evidence_by_need[need].inputs[rows]
                    )
                    self._inexact[need].add(images, numbers, row_values + errors)

        return add

    def read_output(
        self,
        images: Tensor,
        indices: Tensor,
        output: Any,
        first: int = 0,
        inputs: Tensor | None = None,
    ) -> Add:
        """As `read`, with evidence that is made from the network's ``output``: class scores alone,
        no further pass.

        ``images`` ``(b,)`` is the image of every row of the output; the perturbed rows are
        ``len(indices)`` from ``first`` on. Without ``inputs``, feature maps or tokens were
        perturbed, and the evidence has the photo. Called where class scores are all that is needed
        of the rows.
        """
        forward = self._context.forward
        resolved = self.resolved
        has_logits = forward.logits is not None
        x = self._context.inputs.x
        evidence = Evidence(
            inputs=x[images[first : first + 1]].expand(len(images), *x.shape[1:])
            if inputs is None
            else inputs,
            score=resolved.scores_in(images, output),
            classes=None if resolved.classes is None else resolved.classes[images],
            target=resolved.name,
            grids=forward.grids,
            logits=at_least_float32(find_logits(output, len(images)).detach().clone())
            if has_logits
            else None,
            find_outputs=self._context.find_outputs,
            find_probability=resolved.of_rows(images).probability,
        )
        row_images = images[first : first + len(indices)]
        return self.read(row_images, indices, lambda *place: evidence, first)

    @property
    def _unfinished(self) -> list[NeedAtLayer]:
        """The needs that use more rows: those that share a stream get no more than each would get
        alone.

        Asked again for each batch, so accumulators may finish at different times; `enough` and
        `needed` follow it.
        """
        unfinished = []
        for need, accumulator in self._accumulators.items():
            deadline = self._ends.get(need)
            is_late = (
                deadline is not None and time.monotonic() >= deadline and accumulator.has_result()
            )
            if not is_late and not accumulator.enough():
                unfinished.append(need)
        return unfinished

    def enough(self) -> bool:
        """Whether no need of the target uses more rows."""
        return not self._unfinished

    def results(self, *, partial: bool) -> dict[NeedAtLayer, Any]:
        """The answers to the needs of this target's perturbed rows; with ``partial``, after an
        interrupt, those so far.

        Needs without a partial result are left out.
        """
        return _results(self._accumulators, partial)

    def inexact_results(self, *, partial: bool) -> dict[NeedAtLayer, Any]:
        """The results by need with simulated rounding errors in each row's value; empty where none
        were measured."""
        return _results(self._inexact, partial)

    def maps(self) -> dict[str, Tensor]:
        """The maps so far, by the names of the methods that show them; for progress callbacks.

        The keys are names of methods, as the user's callback gets them.
        """
        maps = {}
        for need, accumulator in self._accumulators.items():
            values = accumulator.so_far()
            if values is not None:
                maps.update(dict.fromkeys(self._names.get(need, ()), values))
        return maps

    def needed(self, owners: Tensor) -> Tensor | None:
        """Which of some rows are still needed, as truth values ``(P,)``, by their images
        ``owners``; None for all.

        Rows that are not needed are never run, so an accumulator must not count on them once it
        said `done`.
        """
        done = [self._accumulators[need].done() for need in self._unfinished]
        done_images = [is_done for is_done in done if is_done is not None]
        if not done or len(done_images) < len(done):
            return None
        finished = torch.stack(done_images).all(0)
        return ~finished.to(owners.device)[owners] if bool(finished.any()) else None


def _results(
    accumulators: Mapping[NeedAtLayer, perturbations.Accumulator], partial: bool
) -> dict[NeedAtLayer, Any]:
    """The results of accumulators, by the need that they answer; with ``partial``, those so far,
    where there are some.

    An answer that is left out is missing for the method, which then has no attribution.
    """
    results = {}
    for need, accumulator in accumulators.items():
        result = accumulator.partial() if partial else accumulator.result()
        if result is not None or not partial:
            results[need] = result
    return results
