"""One forward pass: what was run, what was recorded on the way, and what the targets picked of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from explain._utils.errors import LayerError, ModelError, TargetError
from explain.data.inputs import Inputs, Path
from explain.engine.evidence import at_least_float32
from explain.engine.needs import Backward, NeedAtLayer
from explain.engine.output_activation import outputs_of
from explain.hooks import Capture, Record, inspect
from explain.hooks.preserve import recording
from explain.hooks.records import Source
from explain.layers import to_spatial
from explain.layers.calls import split_call
from explain.layers.feature_maps import Grids
from explain.relevance.composites import PropagationResult
from explain.relevance.deeplift import StepComparison
from explain.relevance.gradient_rules import Coverage, Rule
from explain.targets import ClassTarget, Target
from explain.targets.base import find_logits
from explain.targets.functions import Objective
from explain.targets.outputs import Activation, Outputs
from explain.tracing.operations import Operations
from explain.tracing.steps import Step


@dataclass(eq=False)
class ResolvedTarget:
    """A target of a pass, settled; the scores that it picked and their classes; and what was found for it so far."""

    name: str
    target: Target
    score: torch.Tensor
    total: torch.Tensor
    classes: torch.Tensor | None
    coverage: dict[Rule, Coverage] = field(default_factory=dict)
    propagated: dict[Backward, PropagationResult] = field(default_factory=dict)
    found: dict[NeedAtLayer, Any] = field(default_factory=dict)

    def of_rows(self, images: torch.Tensor) -> Target:
        """The target for rows that belong to these images: what was settled for the unperturbed image stays so."""
        return self.target.rows(images) if self.classes is None else ClassTarget(tuple(self.classes[images].tolist()))


@dataclass(eq=False)
class Forward:
    """A forward pass that has been run.

    ``sources`` are what gradients in the explained inputs are taken of, where the graph reaches back to them.
    ``layers`` records the layers that gradients are taken of, ``watched`` those of which only the output is wanted.
    """

    model: nn.Module
    inputs: Inputs
    sources: Mapping[Path, torch.Tensor]
    grids: Grids
    layers: Capture
    watched: Capture
    output: Any
    graph_is_on: bool
    operations: Operations
    steps: Sequence[Step] = ()
    compared: StepComparison | None = None
    beside: Sequence[torch.Tensor] = ()
    """What a backward pass goes to for attention that the explained inputs do not reach."""
    activation: Activation | None = None

    def __post_init__(self) -> None:
        self.logits = self._logits()

    @cached_property
    def outputs(self) -> Outputs:
        """How the class scores become probabilities."""
        return Outputs() if self.logits is None else outputs_of(self.model, self.inputs, self.logits, self.activation)

    @property
    def count(self) -> int:
        return len(self.inputs)

    def source(self, path: Path | None) -> torch.Tensor:
        """What the gradient in an explained input is taken of."""
        return self.sources[path or self.inputs.path]

    def scale(self, choice: ResolvedTarget) -> float:
        """The magnitude of the numbers that a score's rounding errors are made of; 0 for probabilities."""
        rows = choice.score if self.logits is None else self.logits
        if self.logits is not None and bool((rows >= 0).all()) and torch.allclose(rows.sum(1), rows.new_ones(1)):
            return 0.0
        return float(rows[torch.isfinite(rows)].abs().max()) or 1.0

    def _logits(self) -> torch.Tensor | None:
        try:
            logits = find_logits(self.output, self.count).detach()
        except ModelError:
            return None  # not a classifier
        wrong = torch.isnan(logits) | torch.isposinf(logits)
        if wrong.any():
            raise self._not_finite(logits[wrong])
        return at_least_float32(logits)

    def _not_finite(self, wrong: torch.Tensor) -> ModelError:
        """Run the model again and look at every layer, to say where it went wrong."""
        copies = self.inputs.copied()
        first = inspect(self.model, *copies.args, kwargs=copies.kwargs, gradients=False).first_nonfinite
        where = "" if first is None else f", first in layer {first.name!r} ({first.type})" if first.name else ""
        return ModelError(
            f"model must give finite scores, got {wrong[0].item()}{where}; check its weights and the input's values"
        )

    def choose(self, target: Target) -> ResolvedTarget:
        """Settle a target on the output, and pick its scores."""
        with recording(self.graph_is_on):
            settled = target.settled(self.output, self.count)
            score, classes = settled.pick(self.output, self.count)
            total = score.sum()
        if not torch.isfinite(score.detach()).all():
            raise self._not_finite(score.detach()[~torch.isfinite(score.detach())])
        return ResolvedTarget(target.name, settled, at_least_float32(score.detach()), total, classes)

    def total(self, choice: ResolvedTarget, objective: Objective | None) -> torch.Tensor:
        """What is differentiated: the sum of the scores, or of another objective."""
        if objective is None:
            return choice.total
        if choice.classes is None:
            raise TargetError(
                f"target must be a class for a method that compares classes, got {choice.name}; give a class "
                "index or label"
            )
        with recording(self.graph_is_on):
            return objective(find_logits(self.output, self.count), choice.classes).sum()

    def record(self, layer: str) -> Record:
        """Return the call that a layer's name stands for.

        Raises:
            LayerError: it was not called, or gives nothing for each of the images.
        """
        name, number = split_call(layer, self.model)
        captures = (self.layers, self.watched)
        last = next((r for capture in captures if (r := capture.of_call(name)) is not None), None)
        if last is None:
            called = sorted({record.layer for capture in captures for record in capture.records})
            raise LayerError(
                f"layer {layer!r} was not called in the forward pass{f' ({called} were)' if called else ''}; "
                "choose one that the model uses for this input (--list-layers shows them)"
            )
        record = next((r for capture in captures if (r := capture.of_call(name, number)) is not None), None)
        if record is None:
            raise LayerError(
                f"layer {layer!r} must name one of the calls of {name}, 0 to {last.call}, got {number}; without a "
                "number, it is the last"
            )
        shape = tuple(record.activation.shape)
        if self.count not in shape[:1] and self.grids.grid(shape) is None:
            raise LayerError(
                f"layer {layer!r} must give a map for each of the {self.count} images, got shape {shape}; choose a "
                "layer that keeps the batch dimension first"
            )
        return record

    def sources_of(self, layer: str) -> list[Source]:
        """What to differentiate with respect to, for the gradient in a layer's output that `joined` makes of it."""
        return self.layers.sources_of(self.record(layer))

    def joined(self, layer: str, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the gradient in a layer's output, from those with respect to its `sources_of`."""
        return self.layers.joined(self.record(layer), gradients)

    def spatial(self, tensor: torch.Tensor, layer: str) -> torch.Tensor:
        """Lay out what a layer gives, or the gradient in it, as ``(N, C, h, w)``."""
        return at_least_float32(to_spatial(tensor.detach(), self.grids, layer))
