"""One forward pass, and the reruns of a network on perturbed rows.

What was run and recorded on the way, and what the targets picked of the output; what perturbed rows are made of, checks
that their scores do not depend on each other, and where results add up.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from explain._utils.errors import ExplainError, LayerError, ModelError, TargetError, note, raised
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs, Path, dotted
from explain.engine import perturbations, plan
from explain.engine.ends import outputs_of
from explain.engine.incremental import IncrementalInference, Tape
from explain.engine.needs import Backward, Evidence, EvidenceLookup, NeedAtLayer, RowOrigin, applied, at_least_float32
from explain.engine.settings import (
    MEMORY,
    BatchSizeTuner,
    Footprint,
    RuntimeSettings,
    agree,
    autocast,
    lacks_memory,
    raise_unless_of_network,
)
from explain.engine.validation import alone
from explain.hooks import capturing, inspect, interventions
from explain.hooks.attention import AttentionRecord
from explain.hooks.preserve import detached, recording, untouched
from explain.layers.calls import split_call
from explain.layers.layouts import Grids, to_spatial
from explain.relevance import composites, gradient_rules
from explain.relevance.operations import Operations
from explain.relevance.steps import Step
from explain.targets import ClassTarget, Target, TopClass, detections, detector_outputs
from explain.targets.base import find_logits, find_scores
from explain.targets.outputs import Activation, Outputs
from explain.targets.resolve import Objective


@dataclass(eq=False)
class ResolvedTarget:
    """A target whose choices are made (such as the top class): its scores, its classes, the evidence found so far."""

    name: str
    target: Target
    score: Tensor
    total: Tensor
    """What is differentiated: the sum of the scores, or that of one ``image``."""
    classes: Tensor | None
    image: int | None = None
    coverage: dict[gradient_rules.Rule, gradient_rules.Coverage] = field(default_factory=dict)
    propagated: dict[Backward, composites.PropagationResult] = field(default_factory=dict)
    attention: Sequence[AttentionRecord] = ()
    """What the latest backward pass brings the attention of the network."""
    found: dict[NeedAtLayer, Any] = field(default_factory=dict)
    rounding: dict[perturbations.Perturbation, float] = field(default_factory=dict)
    inexact: dict[NeedAtLayer, Any] = field(default_factory=dict)
    """What would have been found with other rounding errors of the same size."""

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
    layers: capturing.Capture
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
        self.end: int = torch._C._autograd._get_sequence_nr()
        """The sequence number that Nodes behind the model begin with, as those of a target."""
        self.logits = self._logits()

    @cached_property
    def outputs(self) -> Outputs:
        """What the class scores are, and how they become probabilities."""
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
        scores = find_scores(self.output, self.count)
        if scores is None:
            return None  # not a classifier
        logits = scores.detach().reshape(self.count, -1)
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
            except detections.NotDetectedError:
                if not (found and self.count == 1 and isinstance(target, TopClass)):
                    raise
        return found

    def of_image(self, resolved: ResolvedTarget, image: int) -> ResolvedTarget:
        """The same target, of which the score of one image alone is differentiated."""
        with recording(self.graph_is_on):
            score = resolved.target.pick(self.output, self.count)[0]
            return replace(resolved, total=score[image], image=image, found=dict(resolved.found))

    def total(self, resolved: ResolvedTarget, objective: Objective | None) -> Tensor:
        """What is differentiated: the sum of the scores, or of another objective; or that of one image."""
        if objective is None:
            return resolved.total
        if resolved.classes is None:
            raise TargetError(f"target must be a class to be compared with others, got {resolved.name}; give a label")
        with recording(self.graph_is_on):
            scores = objective(find_logits(self.output, self.count), resolved.classes)
            return scores.sum() if resolved.image is None else scores[resolved.image]

    def record(self, layer: str) -> capturing.Record:
        """Return the call that a layer's name stands for.

        Raises:
            LayerError: it was not called, or gives nothing for each of the images.
        """
        record = self.layers.of(layer)
        if record is None:
            name, _ = split_call(layer, self.model)
            calls = sum(each.layer == name for each in self.layers.records)
            raise LayerError(capturing.why_not_called(self.model, layer, calls))
        shape = tuple(record.activation.shape)
        of_images = self.count in shape[:1] or self.grids.folded_frames(layer) is not None
        if not of_images and self.grids.grid(shape, layer) is None:
            must = f"layer {layer!r} must give one map for each of {self.count} images, got {shape}"
            raise LayerError(f"{must}; name another, or use a method without layers, such as saliency or attnlrp")
        return record

    def spatial(self, tensor: Tensor, layer: str) -> Tensor:
        """Lay out what a layer gives, or the gradient in it, as ``(N, C, h, w)``."""
        return at_least_float32(to_spatial(detached(tensor), self.grids, layer))


T = TypeVar("T")
TargetScores: TypeAlias = Sequence[tuple[ResolvedTarget, Tensor]]


@dataclass(eq=False)
class RerunContext:
    """What perturbed rows are made of, and how they are run."""

    forward: Forward
    targets: Sequence[ResolvedTarget]
    evidence: Callable[..., Evidence]
    """From a resolved, a layer or none, and a path or none."""
    footprint: Footprint
    settings: RuntimeSettings
    gather: Callable[..., Sequence[EvidenceLookup]]
    """The engine's `gather`, for perturbed rows."""
    origin: RowOrigin | None = None
    """What the inputs are rows of, if they are."""
    tapes: dict[str, Tape] = field(default_factory=dict)
    """What lies before a layer, by its name, if the forward pass recorded it."""
    channels_last: bool = True
    """Whether the network takes inputs in this layout, which convolutions on a CPU are faster in."""
    one_at_a_time: bool = False
    among_others: bool = False
    """Whether each row is run in the place of its image among the others, since these change its score."""
    fixed: bool = False
    """Whether the network takes as many rows as there are images, and no other number."""
    checked: set[str | None] = field(default_factory=set)
    """Where perturbed rows, of the input or of a layer, were found to score the same alone as among others."""
    again: bool = False
    """Whether a method runs further rows, after some that were found not to depend on each other."""
    longest: int = 0
    """The number of rows of the longest stream, whose first row is also run alone for this check."""
    known: list[IncrementalInference] = field(default_factory=list)
    """What is known of the photos, for incremental inference; one, once it was needed."""
    interrupted: list[BaseException] = field(default_factory=list)
    """What has ended the work early, if partial results are wanted."""

    @property
    def model(self) -> nn.Module:
        return self.forward.model

    @property
    def inputs(self) -> Inputs:
        return self.forward.inputs

    @contextmanager
    def runs_model(self) -> Iterator[None]:
        """Run the model outside `gather`, as it does: alone in its thread, left as found, in the same precision."""
        with alone(), untouched(self.model), autocast(self.inputs.x, self.settings.precision):
            yield

    def run_alone(self, inputs: Inputs) -> Any:
        """The network's output for one row; None if it takes only as many rows as there are images."""
        try:
            with self.runs_model():
                return inputs.call(self.model)
        except Exception as error:
            if lacks_memory(error) or came_by_signal(error) or isinstance(error, ExplainError):
                raise
            self.fixed = True
            return None

    def in_fastest_layout(self, images: Tensor, perturbed: Mapping[Path, Tensor], run: Callable[[Inputs], T]) -> T:
        """Run perturbed rows that belong to these images, channels last if the network takes them so."""
        first, layout = perturbed[self.inputs.path], torch.channels_last
        several = len(first) > 1  # one alone is faster by little
        if self.channels_last and several and first.device.type == "cpu" and first.ndim == 4:
            turned = {path: t.contiguous(memory_format=layout) if t.ndim == 4 else t for path, t in perturbed.items()}
            try:
                return run(self.inputs.rows(images, turned))
            except Exception as error:  # such as what .view() says, or a hook that calls it
                raise_unless_of_network(error)
                found = run(self.inputs.rows(images, perturbed))  # raises again what the layout has no part in
                note(f"inputs are laid out channels first, which is slower on a CPU: {raised(error)}")
                self.channels_last = False
                return found
        return run(self.inputs.rows(images, perturbed))

    def incremental(self) -> IncrementalInference | None:
        """What runs the rows of images incrementally; None where nothing does."""
        x, needed = self.inputs.x, sum(size for _, size in self.footprint.outputs) * len(self.inputs)
        if x.device.type != "cpu" or x.ndim < 3 or len(self.inputs.paths) > 1 or needed > MEMORY or self.one_at_a_time:
            return None
        if self.inputs.layout == "NTCHW":  # what the model is given is laid out again
            return None
        self.known[:] = self.known or [IncrementalInference(self.model, x)]
        return self.known[0]

    def tuner(self, kind: Hashable, most: int, sizes: tuple[int, ...] | None = None) -> BatchSizeTuner:
        """What chooses the batch sizes for this ``kind`` of work, of which ``most`` rows fit into memory."""
        x, given = self.inputs.x, 1 if self.one_at_a_time else self.settings.batch_size
        kind = (tuple(x.shape[1:]), x.dtype, self.settings.precision, kind)
        return BatchSizeTuner(self.model, kind, most, x.device, given=given, sizes=sizes)

    def same_scores(self, resolved: ResolvedTarget, one: Tensor, other: Tensor) -> bool:
        """Whether two scores of perturbed rows are the same but for rounding."""
        scale = self.forward.scale(resolved)
        one, other = one.to(resolved.score), other.to(resolved.score)
        return agree(one, other, self.inputs.x, self.settings, scale, 1e-2, half=self.footprint.half)

    @detector_outputs.reading_once()
    def are_known(self, images: Tensor, output: Any, targets: Sequence[ResolvedTarget]) -> bool:
        """Whether an output for these unperturbed images has the scores that are known of them."""
        return all(self.same_scores(each, each.scores_in(images, output), each.score[images]) for each in targets)

    @detector_outputs.reading_once()
    def check_rows(
        self, place: str | None, images: Tensor, scores: TargetScores, run_first: Callable[[], Any], last_is_image: bool
    ) -> None:
        """Check that the scores of perturbed rows, which belong to ``images``, do not depend on each other.

        If the last row is an unperturbed image, its score must be the known one. The first row must have the same score
        alone: ``run_first`` returns the output for it, or None where that cannot be had. That is done once for each
        ``place`` where rows are perturbed: a layer, or None for the input.

        Raises:
            DependentRowsError: a row has another score among the others than alone.
        """
        known = [(target, score[-1:], target.score[images[-1:]]) for target, score in scores if last_is_image]
        if not all(self.same_scores(*each) for each in known):
            raise DependentRowsError
        output = None if place in self.checked else run_first()
        if output is not None:
            alone = [(target, score[:1], target.scores_in(images[:1], output)) for target, score in scores]
            if not all(self.same_scores(*each) for each in alone):
                raise DependentRowsError
            self.checked.add(place)

    def check_images(self, *, if_possible: bool = False) -> None:
        """See whether an image has another score in its batch than alone: then its rows are run in that batch.

        Quantised networks take one scale for all images, which makes a small difference: it is accepted. With
        ``if_possible``, images that cannot be run alone are accepted too.

        Raises:
            DependentImagesError: an image has another score when the same batch is run again; or what depends on each
                other are themselves rows, that batches were made of.
        """
        several = len(self.inputs) > 1
        if not several and (if_possible or self.settings.precision != "full"):
            return
        every = torch.arange(len(self.inputs), device=self.inputs.x.device)
        for mine in every[:, None] if several else ():
            with interventions.rows_of(mine):
                output = self.run_alone(self.inputs.rows(mine))
            if output is None and if_possible:
                return
            self.among_others |= output is None or not self._has_known_scores(mine, output)
        if several and not self.among_others:
            return
        if several and self.origin is not None and self.origin.image is None:
            raise DependentImagesError("model must score each row of a batch on its own, but does not; run them alone")
        with interventions.rows_of(every), self.runs_model():
            output = self.inputs.rows(every).call(self.model)
        for resolved in self.targets:
            again, known = resolved.scores_in(every, output), resolved.score
            if not self.same_scores(resolved, again, known):
                image = int((again - known).abs().argmax())
                but = f"gave image {image} {known[image].item():.4g} and then {again[image].item():.4g}"
                remedy = "(a counter, or random numbers that go on?); put back what it remembers, or use gradcam"
                must = "give an image the same score whenever it is run"
                raise DependentImagesError(f"model must {must}, but {but} {remedy}")
        self.one_at_a_time |= self.among_others

    def _has_known_scores(self, image: Tensor, output: Any) -> bool:
        quantised = any("quantized" in type(module).__module__ for module in self.model.modules())
        for resolved in self.targets:
            alone, among = resolved.scores_in(image, output), resolved.score[image]
            close = abs(alone - among) <= 0.05 * max(alone.abs().max(), among.abs().max())
            if not (self.same_scores(resolved, alone, among) or (quantised and close)):
                return False
        return True

    def check_width(self, logits: Tensor | None) -> None:
        """Refuse scores for other classes than those of the unperturbed images: some input says what they are."""
        known = self.forward.logits
        if self.inputs.others and known is not None and logits is not None and logits.shape[1] != known.shape[1]:
            _refuse_shared(self.inputs.others)


class DependentRowsError(Exception):
    """A row has another score among others than alone."""


class DependentImagesError(ModelError):
    """An image has another score among the others than alone."""


def check_other_inputs(forward: Forward, resolved: ResolvedTarget, settings: RuntimeSettings) -> None:
    """Refuse an input that seems to have a row for each image, but belongs to all of them.

    Perturbed images are given the rows of the images that they are made of; so the first image, with its rows alone,
    has to have the score that it has among the others. If the network takes no other number of images, the image is
    repeated to fill the batch.
    """
    inputs = forward.inputs
    rows = [way for way in inputs.others if inputs.goes_with_images(way)]
    if not rows or len(inputs) == 1:
        return
    for count in (1, len(inputs)):
        first = torch.zeros(count, dtype=torch.long, device=inputs.x.device)
        try:
            score = resolved.scores_in(first, inputs.rows(first).call(forward.model))[:1]
        except Exception as error:  # whatever it is, the image does not go with what it was given
            if came_by_signal(error):
                raise
            continue
        if agree(score, resolved.score[:1], inputs.x, settings, forward.scale(resolved)):
            return
        break
    _refuse_shared(rows)


def _refuse_shared(ways: Iterable[Path]) -> NoReturn:
    remedy = f"name inputs of no single image (of {', '.join(map(dotted, ways))}) in explain.Inputs(..., shared=...)"
    raise ModelError(f"model must score each image the same in any batch, but does not; {remedy}")


Add = Callable[[], None]
"""Adds the results of a batch to what there is, when all of its work has succeeded."""


@dataclass(frozen=True, eq=False)
class RowErrors:
    """Errors of rows' values that are like those that some of the rows have.

    An error is a rounding error of the row, as of one of these rows, and for what covers inputs also a function of what
    is covered: the weights are rounded, too. This is a linear one that varies as much.
    """

    of_some: Tensor
    """The errors of some rows ``(few, ...)``."""
    alike: Tensor
    """Which of them each row ``(rows,)`` has."""
    is_other: Tensor
    """Whether it is none of these rows ``(rows,)``."""
    some: Tensor | None = None
    """The inputs of some rows ``(few, C, H, W)``."""

    def of(self, numbers: Tensor, inputs: Tensor) -> Tensor:
        """The errors of rows with these numbers and inputs."""
        errors = self.of_some[self.alike[numbers]]
        if self.some is None or len(self.some) < 2:
            return errors
        draw = torch.Generator().manual_seed(0)
        direction = torch.randn(self.some[0].numel(), generator=draw).to(self.some)
        known = self.some.flatten(1) @ direction
        spread = known.std()
        if not spread:
            return errors
        steps = (inputs.to(self.some).flatten(1) @ direction - known.mean()) / spread * self.is_other[numbers]
        return errors + steps.reshape(-1, *[1] * (errors.ndim - 1)) * self.of_some.std(0)


class TargetAccumulators:
    """The accumulators of one target for a stream, by the needs that they answer."""

    def __init__(
        self, stream: plan.Stream, context: RerunContext, resolved: ResolvedTarget, names: Mapping[Any, Sequence[str]],
        errors: Mapping[NeedAtLayer, "RowErrors"] | None = None,
    ) -> None:  # fmt: skip
        """With ``errors``, results are added up once more with an error in each row's value."""
        self.resolved, self._names, self._context = resolved, names, context
        self._errors = errors or {}
        self._of: dict[NeedAtLayer, perturbations.Accumulator] = {}
        self._inexact: dict[NeedAtLayer, perturbations.Accumulator] = {}
        for need in stream.needs:
            reducer: perturbations.Reducer = need.kind.reducer  # type: ignore[attr-defined]
            evidence = context.evidence(resolved, need.layer, need.input)
            self._of[need] = reducer.begin(evidence)
            if need in self._errors:
                self._inexact[need] = reducer.begin(evidence)

    def read(self, images: Tensor, numbers: Tensor, evidence_of: EvidenceLookup, first: int = 0) -> Add:
        """Read what the unfinished accumulators need from the evidence on these rows, from the ``first`` on."""
        given = {need: evidence_of(need.layer, need.input) for need in self._unfinished}
        values = {need: applied(need.kind.method, evidence) for need, evidence in given.items()}  # type: ignore[attr-defined]

        def add() -> None:
            for need, found in values.items():
                rows = slice(first, first + len(numbers))
                of_rows = found[rows]
                self._of[need].add(images, numbers, of_rows)
                if need in self._inexact:
                    errors = self._errors[need].of(numbers, given[need].inputs[rows])
                    self._inexact[need].add(images, numbers, of_rows + errors)

        return add

    def read_output(self, images: Tensor, numbers: Tensor, output: Any, first: int = 0) -> Add:
        """The same from the output for rows of one of ``images``; beside the rows with numbers may be others."""
        forward, resolved, count = self._context.forward, self.resolved, len(images)
        logits = None if forward.logits is None else at_least_float32(find_logits(output, count).detach())
        classes = None if resolved.classes is None else resolved.classes[images]
        x = self._context.inputs.x[images[first : first + 1]].expand(count, *self._context.inputs.x.shape[1:])
        about = x, resolved.scores_in(images, output), classes, resolved.name, forward.grids, logits
        evidence = Evidence(*about, find_outputs=self._context.evidence(resolved, None).find_outputs)
        return self.read(images[first : first + len(numbers)], numbers, lambda *place: evidence, first)

    @property
    def _unfinished(self) -> list[NeedAtLayer]:
        """The needs that use more rows: those that share a stream get no more than they would alone."""
        return [need for need, accumulator in self._of.items() if not accumulator.enough()]

    def enough(self) -> bool:
        return not self._unfinished

    def results(self, *, partial: bool) -> dict[NeedAtLayer, Any]:
        """The results; ``partial`` ones, of those that have one, where not all rows have come."""
        return _results(self._of, partial)

    def inexact_results(self, *, partial: bool) -> dict[NeedAtLayer, Any]:
        """The same with an error in each row's value, where these are known."""
        return _results(self._inexact, partial)

    def maps(self) -> dict[str, Tensor]:
        """The maps that there are so far, by the methods that need them."""
        found = [(self._names.get(need, ()), each.so_far()) for need, each in self._of.items()]
        return {name: values for names, values in found if values is not None for name in names}

    def needed(self, owners: Tensor) -> Tensor | None:
        """Which rows, of images ``(P,)``, are still needed; None for all of them."""
        done = [self._of[need].done() for need in self._unfinished]
        known = [each for each in done if each is not None]
        if not done or len(known) < len(done):
            return None
        finished = torch.stack(known).all(0)
        return ~finished.to(owners.device)[owners] if bool(finished.any()) else None


def _results(of: Mapping[NeedAtLayer, perturbations.Accumulator], partial: bool) -> dict[NeedAtLayer, Any]:
    found = {need: each.partial() if partial else each.result() for need, each in of.items()}
    return {need: result for need, result in found.items() if result is not None or not partial}
