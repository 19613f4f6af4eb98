"""Where the results of perturbed samples add up, for each target of a stream."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
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


class TargetAccumulators:
    """The accumulators of one target for a stream, by the needs that they answer."""

    def __init__(
        self,
        stream: PerturbationPass,
        context: RerunContext,
        resolved: ResolvedTarget,
        names: Mapping[Any, Sequence[str]],
        numbers: Tensor,
    ) -> None:
        """Begin an accumulator for each need of the stream, and the time of those with
        ``max_seconds``. ``numbers`` ``(P,)`` are those of all samples in their images."""
        self.resolved = resolved
        self._numbers = numbers
        self._names = names
        self._context = context
        self._accumulators: dict[NeedAtLayer, perturbations.Accumulator] = {}
        self._ends: dict[NeedAtLayer, float] = {}
        """When the time of a need is over, if it is limited, by ``time.monotonic()``."""
        for need in stream.needs:
            reducer: perturbations.Reducer = need.kind.reducer  # type: ignore[attr-defined]
            evidence = context.evidence(resolved, need.layer, need.input)
            self._accumulators[need] = reducer.begin(evidence)
            seconds: float | None = getattr(reducer, "max_seconds", None)
            if seconds is not None:
                self._ends[need] = time.monotonic() + seconds

    def read(
        self, images: Tensor, indices: Tensor, evidence_of: EvidenceLookup, first: int = 0
    ) -> Add:
        """Apply the methods of the unfinished needs to a batch of perturbed samples ``(b,)``, which
        begin at sample ``first`` of the evidence, and return a function that adds the results."""
        # reading and adding are apart, so that a batch that fails adds nothing for any target
        values = {}
        for need in self._unfinished:
            evidence = evidence_of(need.layer, need.input)
            values[need] = applied(need.kind.method, evidence)  # type: ignore[attr-defined]
        # the evidence may be about more samples, as where one image of a batch is perturbed
        samples = slice(first, first + len(indices))
        numbers = self._numbers[indices]

        def add() -> None:
            for need, batch_values in values.items():
                self._accumulators[need].add(images, numbers, batch_values[samples])

        return add

    def read_output(
        self,
        images: Tensor,
        indices: Tensor,
        output: Any,
        first: int = 0,
        inputs: Tensor | None = None,
    ) -> Add:
        """As `read`, with evidence that is made from the network's ``output``: class scores alone.
        ``images`` ``(b,)`` is the image of each sample of it."""
        forward = self._context.forward
        resolved = self.resolved
        has_logits = forward.logits is not None
        x = self._context.inputs.x
        # without inputs, feature maps or tokens were perturbed, and the evidence has the image
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
            find_probability=resolved.of_samples(images).probability,
        )
        sample_images = images[first : first + len(indices)]
        # class scores are the same evidence for every layer and input
        return self.read(sample_images, indices, lambda *place: evidence, first)

    @property
    def _unfinished(self) -> list[NeedAtLayer]:
        """The needs that use more samples: those that share a stream get no more than each would
        get alone."""
        unfinished = []
        for need, accumulator in self._accumulators.items():
            is_late = time.monotonic() >= self._ends.get(need, math.inf)
            ends_early = is_late and accumulator.has_result()
            if not ends_early and not accumulator.enough():
                unfinished.append(need)
        return unfinished

    def enough(self) -> bool:
        """Whether no need of the target uses more samples."""
        return not self._unfinished

    def results(self, *, partial: bool) -> dict[NeedAtLayer, Any]:
        """The answers to the needs of this target's perturbed samples; with ``partial``, after an
        interrupt, those so far. Needs without a partial result are left out."""
        results = {}
        for need, accumulator in self._accumulators.items():
            result = accumulator.partial() if partial else accumulator.result()
            if result is not None or not partial:
                results[need] = result
        return results

    def maps(self) -> dict[str, Tensor]:
        """The maps so far, by the names of the methods that show them; for progress callbacks. The
        keys are names of methods, as the user's callback gets them."""
        maps = {}
        for need, accumulator in self._accumulators.items():
            values = accumulator.so_far()
            if values is not None:
                maps.update(dict.fromkeys(self._names.get(need, ()), values))
        return maps

    def needed(self, owners: Tensor) -> Tensor | None:
        """Which of some samples are still needed, as truth values ``(P,)``, by their images
        ``owners``; None for all. The others are never run."""
        done = [self._accumulators[need].done() for need in self._unfinished]
        # None: the need takes samples of all images until it has enough
        done_images = [is_done for is_done in done if is_done is not None]
        needs_all_images = len(done_images) < len(done)
        if not done or needs_all_images:
            return None
        finished = torch.stack(done_images).all(0)
        return ~finished.to(owners.device)[owners] if bool(finished.any()) else None
