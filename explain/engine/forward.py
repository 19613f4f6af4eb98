"""One forward pass: what was run, what was recorded on the way, what the targets picked of its output, and whether
this output has been through a softmax or sigmoid already."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from explain._utils.errors import LayerError, ModelError, TargetError
from explain.data.inputs import Inputs, Path
from explain.engine.needs import Backward, NeedAtLayer, at_least_float32
from explain.hooks import inspect
from explain.hooks.attention import AttentionRecord
from explain.hooks.capturing import Capture, Record, why_not_called
from explain.hooks.preserve import detached, recording, untouched
from explain.hooks.tracer import Tracer
from explain.layers.calls import split_call
from explain.layers.layouts import Grids, to_spatial
from explain.relevance.composites import PropagationResult
from explain.relevance.gradient_rules import Coverage, Rule
from explain.targets import ClassTarget, Target, TopClass
from explain.targets.base import find_logits
from explain.targets.detections import NotDetectedError
from explain.targets.functions import Objective
from explain.targets.outputs import Activation, Outputs, outputs_like
from explain.tracing.operations import Operations
from explain.tracing.steps import Step
from explain.tracing.table import operation_name


@dataclass(eq=False)
class ResolvedTarget:
    """A target whose choices are made (such as the top class): its scores, its classes, the evidence found so far."""

    name: str
    target: Target
    score: Tensor
    total: Tensor
    classes: Tensor | None
    coverage: dict[Rule, Coverage] = field(default_factory=dict)
    propagated: dict[Backward, PropagationResult] = field(default_factory=dict)
    attention: Sequence[AttentionRecord] = ()
    """What the latest backward pass brings the attention of the network."""
    found: dict[NeedAtLayer, Any] = field(default_factory=dict)

    def of_rows(self, images: Tensor) -> Target:
        """The target for rows that belong to these images: what was settled for the unperturbed image stays so."""
        return self.target.rows(images) if self.classes is None else ClassTarget(tuple(self.classes[images].tolist()))

    def scores_in(self, images: Tensor, output: Any) -> Tensor:
        """What the target picks from an output with rows that belong to these images."""
        return at_least_float32(self.of_rows(images).pick(output, len(images))[0].detach())


@dataclass(eq=False)
class Forward:
    """A forward pass that has been run.

    ``sources`` are what gradients in the explained inputs are taken of, where the graph reaches back to them.
    ``layers`` records the layers that gradients are taken of, and those of which only the output is wanted.
    """

    model: nn.Module
    inputs: Inputs
    sources: Mapping[Path, Tensor]
    grids: Grids
    layers: Capture
    output: Any
    graph_is_on: bool
    operations: Operations
    steps: Sequence[Step] = ()
    compared: Sequence[Step] = ()
    unreached: Sequence[Tensor] = ()
    """What a backward pass goes to for attention that the explained inputs do not reach."""
    activation: Activation | None = None
    seen: Mapping[type, Any] = field(default_factory=dict)
    """What was watched for needs of some kinds, by the kind."""

    def __post_init__(self) -> None:
        self.logits = self._logits()

    @cached_property
    def outputs(self) -> Outputs:
        """How the class scores become probabilities."""
        return Outputs() if self.logits is None else outputs_of(self.model, self.inputs, self.logits, self.activation)

    @property
    def count(self) -> int:
        return len(self.inputs)

    def source(self, path: Path | None) -> Tensor:
        """The tensor of an explained input that gradients are taken in."""
        return self.sources[path or self.inputs.path]

    def scale(self, resolved: ResolvedTarget) -> float:
        """The magnitude of the numbers that a score's rounding errors are made of; 0 for probabilities."""
        rows = resolved.score.detach() if self.logits is None else self.logits
        if self.logits is not None and bool((rows >= 0).all()) and torch.allclose(rows.sum(1), rows.new_ones(1)):
            return 0.0
        return float(rows[torch.isfinite(rows)].abs().max()) or 1.0

    def _logits(self) -> Tensor | None:
        try:
            logits = find_logits(self.output, self.count).detach()
        except ModelError:
            return None  # not a classifier
        self._check_finite(logits, torch.isnan(logits) | torch.isposinf(logits))
        return at_least_float32(logits)

    def _check_finite(self, scores: Tensor, wrong: Tensor) -> None:
        """Where scores are wrong, run the model again and inspect every layer, to name the first that is not finite."""
        if not wrong.any():
            return
        copies = self.inputs.copied()
        first = inspect(self.model, *copies.args, kwargs=copies.kwargs, gradients=False).first_nonfinite
        where = f", first in layer {first.name!r} ({first.type})" if first is not None and first.name else ""
        raise ModelError(f"model must give finite scores, got {scores[wrong][0].item()}{where}; check its weights")

    def resolve(self, target: Target) -> ResolvedTarget:
        """Settle a target on the output, and pick its scores."""
        with recording(self.graph_is_on):
            settled = target.settled(self.output, self.count)
            score, classes = settled.pick(self.output, self.count)
            total = score.sum()
        self._check_finite(score.detach(), ~torch.isfinite(score.detach()))
        name = settled.name if isinstance(target, (ClassTarget, TopClass)) else target.name
        return ResolvedTarget(name, settled, at_least_float32(detached(score)), total, classes)

    def resolve_all(self, targets: Sequence[Target]) -> list[ResolvedTarget]:
        """Settle all targets; of the best detections on one image, as many as there are."""
        found: list[ResolvedTarget] = []
        for target in targets:
            try:
                found.append(self.resolve(target))
            except NotDetectedError:
                if not (found and self.count == 1 and isinstance(target, TopClass)):
                    raise
        return found

    def total(self, resolved: ResolvedTarget, objective: Objective | None) -> Tensor:
        """What is differentiated: the sum of the scores, or of another objective."""
        if objective is None:
            return resolved.total
        if resolved.classes is None:
            raise TargetError(f"target must be a class to be compared with others, got {resolved.name}; give a label")
        with recording(self.graph_is_on):
            return objective(find_logits(self.output, self.count), resolved.classes).sum()

    def record(self, layer: str) -> Record:
        """Return the call that a layer's name stands for.

        Raises:
            LayerError: it was not called, or gives nothing for each of the images.
        """
        record = self.layers.of(layer)
        if record is None:
            name, _ = split_call(layer, self.model)
            calls = sum(each.layer == name for each in self.layers.records)
            raise LayerError(why_not_called(self.model, layer, calls))
        shape = tuple(record.activation.shape)
        if self.count not in shape[:1] and self.grids.grid(shape) is None:
            raise LayerError(f"layer {layer!r} must give one map for each of {self.count} images, got {shape}")
        return record

    def spatial(self, tensor: Tensor, layer: str) -> Tensor:
        """Lay out what a layer gives, or the gradient in it, as ``(N, C, h, w)``."""
        return at_least_float32(to_spatial(detached(tensor), self.grids, layer))


_KINDS = frozenset(["softmax", "sigmoid", "expit", "hardsigmoid"])


def outputs_of(model: nn.Module, inputs: Inputs, logits: Tensor, activation: Activation | None) -> Outputs:
    """Say how the outputs ``(N, K)`` that a model gave for these inputs become probabilities.

    Where values in [0, 1] leave open what they are, the model is run once more, and its operations are watched.
    """
    return outputs_like(logits, activation, partial(ends_in_probabilities, model, inputs))


def ends_in_probabilities(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a softmax or sigmoid gave a model's outputs, as they are or among what was made of them.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.Sigmoid())
    >>> x = Inputs((torch.rand(1, 3, 1, 1),))
    >>> ends_in_probabilities(model, x), ends_in_probabilities(model[:2], x)
    (True, False)
    """
    with untouched(model), torch.no_grad(), _Watch() as watch:
        output = inputs.copied().call(model)
    try:
        found = find_logits(output, len(inputs))
    except ModelError:
        return False
    for result in watch.results:
        if result.numel() == found.numel() and torch.equal(result.flatten(), found.to(result.dtype).flatten()):
            return True
        if found.shape[1] > 1 and result.shape[-2:] == found.shape:  # they may be made of it
            return True
    return False


class _Watch(Tracer):
    """Records the results of softmaxes and sigmoids in this thread."""

    opens = False

    def __init__(self) -> None:
        self.results: list[Tensor] = []

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if operation_name(func) in _KINDS and isinstance(result, Tensor):
            self.results.append(result)
        return result
