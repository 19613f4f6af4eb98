"""One forward pass: what was run and recorded on the way, and what the targets picked of the
output."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from explain._utils.device_reads import require_finite
from explain._utils.errors import LayerError, ModelError, TargetError
from explain.data.inputs import Inputs, Path
from explain.engine.needs import Backward, NeedAtLayer, at_least_float32
from explain.engine.output_kinds import outputs_of
from explain.engine.recorded_pass import RecordedPass
from explain.hooks import capturing, inspect
from explain.hooks.attention import AttentionRecord
from explain.hooks.preserve import detached
from explain.layers.layouts import Grids, to_spatial
from explain.relevance import composites, gradient_rules
from explain.relevance.constants import AddedConstant, added_constants
from explain.targets import ClassTarget, Target, TopClass, detections
from explain.targets.base import find_logits, find_scores
from explain.targets.classes import ChosenClasses
from explain.targets.functions import Objective, ScoreTarget
from explain.targets.outputs import Activation, Outputs


@dataclass(eq=False)
class ResolvedTarget:
    """A target whose choices are made (such as the top class), and the evidence about it so far."""

    name: str
    target: Target
    score: Tensor
    """What the target picks, ``(N,)``, detached."""
    total: Tensor
    """What is differentiated: the sum of the scores, or the score of one ``image``."""
    classes: Tensor | None
    """The classes ``(N,)`` that the scores belong to; None where they belong to none."""
    width: int = 0
    """How many class scores each image has, if it has any."""
    image: int | None = None
    coverage: dict[gradient_rules.GradientRule, gradient_rules.Coverage] = field(
        default_factory=dict
    )
    propagated: dict[Backward, composites.PropagationResult] = field(default_factory=dict)
    attention: Sequence[AttentionRecord] = ()
    """The attention of the network; the latest backward pass adds its gradients."""
    answers: dict[NeedAtLayer, Any] = field(default_factory=dict)

    def of_samples(self, images: Tensor) -> Target:
        """The target for perturbed samples that belong to these images ``(b,)``, with the classes
        of the unperturbed images. Otherwise a masked image would be scored by its own top class."""
        if self.classes is None:
            return self.target.rows(images)
        if isinstance(self.target, ClassTarget) and isinstance(self.target.index, int):
            return self.target
        return ChosenClasses(self.classes[images], self.width)

    def scores_in(self, images: Tensor, output: Any) -> Tensor:
        """The scores ``(b,)`` that the target picks from the model's ``output`` for samples that
        belong to these images; a copy, since the next pass may overwrite the output."""
        scores = self.of_samples(images).pick(output, len(images))[0].detach()
        return at_least_float32(scores.clone())


@dataclass(eq=False)
class Forward:
    """A forward pass that has been run."""

    model: nn.Module
    inputs: Inputs
    sources: Mapping[Path, Tensor]
    """What gradients in the explained inputs are taken of, where the graph reaches back to them."""
    grids: Grids
    layers: capturing.Capture
    """Those that gradients are taken of, and those of which only the output is wanted."""
    output: Any
    graph_is_on: bool
    whole: RecordedPass | None = None
    """The recording of the pass, where walks back go over it."""
    attention: Sequence[AttentionRecord] = ()
    """The attentions of the pass, if they were asked for."""
    activation: Activation | None = None
    seen: Mapping[type, Any] = field(default_factory=dict)
    """What `collectors.watch` recorded, by the kind of need."""

    def __post_init__(self) -> None:
        """Read the class scores off the output, and refuse scores that are not finite; minus
        infinity may be among them."""
        self.count = len(self.inputs)
        self.records: dict[str | None, capturing.LayerCall] = {}
        """The calls that the names of layers stand for; see `record`."""
        # read before anything else adds to the graph
        self.end: int = torch._C._autograd._get_sequence_nr()
        """The sequence number that Nodes behind the model begin with, as those of a target."""
        self.logits: Tensor | None = None
        """The class scores ``(N, K)``, detached; None where the output has none."""
        scores = find_scores(self.output, self.count)
        if scores is not None:
            logits = scores.detach().reshape(self.count, -1)
            # the largest score must be finite; others may be minus infinity, as of impossible
            # classes
            require_finite(logits.amax(), partial(self._refuse, logits, allowed=-math.inf))
            # a model may answer in a buffer of its own, which its next pass overwrites
            self.logits = at_least_float32(logits.clone())

    @cached_property
    def outputs(self) -> Outputs:
        """What the class scores are, logits or probabilities, and how they become probabilities;
        found out when needed, as it may run the model once more."""
        if self.logits is None:
            return Outputs()
        return outputs_of(self.model, self.inputs, self.logits, self.activation)

    @cached_property
    def constants(self) -> Sequence[AddedConstant]:
        """The constants, such as biases, that the network adds in this pass, in their order; for
        FullGrad. Empty unless the pass was recorded."""
        if self.whole is None:
            return ()
        return added_constants(self.model, self.whole.recording.steps)

    def source(self, path: Path | None) -> Tensor:
        """The leaf tensor of an explained input that gradients are taken in; None means the first
        explained input."""
        return self.sources[path or self.inputs.path]

    def scale(self, resolved: ResolvedTarget) -> Tensor:
        """The magnitude, as a scalar tensor, of which rounding errors of the scores are shares: the
        largest class score, or 0 if the class scores are probabilities."""
        logits = resolved.score.detach() if self.logits is None else self.logits
        largest = logits.abs().masked_fill(~logits.isfinite(), 0).amax()
        scale = largest.masked_fill(largest == 0, 1)  # 0 stands for probabilities
        if self.logits is None:
            return scale
        # a probability is rounded by a share of itself, however small it is
        are_probabilities = (logits >= 0).all() & logits.sum(1).isclose(logits.new_ones(1)).all()
        return scale.masked_fill(are_probabilities, 0)

    def _refuse(self, scores: Tensor, allowed: float | None = None) -> None:
        """Raise an error for scores that are neither finite nor ``allowed``, naming the first layer
        that is not finite in another run; return if all are in order."""
        wrong = ~torch.isfinite(scores)
        if allowed is not None:
            wrong &= scores != allowed
        if not wrong.any():
            return
        copies = self.inputs.copied()  # the model may overwrite its inputs
        inspection = inspect(self.model, *copies.args, kwargs=copies.kwargs, gradients=False)
        first_layer = inspection.first_nonfinite
        at_layer = ""
        if first_layer is not None and first_layer.name:
            at_layer = f", first in layer {first_layer.name!r} ({first_layer.type})"
        raise ModelError(
            f"model must give finite scores, got {scores[wrong][0].item()}{at_layer}; check its "
            "weights"
        )

    def resolve(self, target: Target) -> ResolvedTarget:
        """Let a target make its choices, such as the top class, on the output, and pick its scores
        with their graph. The graph is needed by the backward passes; ``score`` is a detached copy.
        """
        with torch.set_grad_enabled(self.graph_is_on):
            choice = target.resolved(self.output, self.count)
            score, classes = choice.pick(self.output, self.count)
            total = score.sum()
        require_finite(total, partial(self._refuse, score.detach()))
        return ResolvedTarget(
            name=target.name,
            target=choice,
            score=at_least_float32(detached(score).clone()),
            total=total,
            classes=classes,
            width=0 if self.logits is None else self.logits.shape[1],
        )

    def resolve_all(self, targets: Sequence[Target]) -> list[ResolvedTarget]:
        """Resolve all targets of a call on the output, in their order. Of the best detections on
        one image, there are as many as the detector gives: the list may be shorter."""
        resolved: list[ResolvedTarget] = []
        for target in targets:
            try:
                resolved.append(self.resolve(target))
            except detections.NotDetectedError:
                if not (resolved and self.count == 1 and isinstance(target, TopClass)):
                    raise
        return resolved

    def of_image(self, resolved: ResolvedTarget, image: int) -> ResolvedTarget:
        """A copy of a resolved target in which the score of one image alone is differentiated, for
        networks in which images change each other's scores."""
        with torch.set_grad_enabled(self.graph_is_on):
            score = resolved.target.pick(self.output, self.count)[0]
            # answers begin as a copy, so that those of another image are not overwritten
            return replace(
                resolved, total=score[image], image=image, answers=dict(resolved.answers)
            )

    def total(self, resolved: ResolvedTarget, objective: Objective | None) -> Tensor:
        """The scalar that a backward pass differentiates: the sum over images of the scores, or of
        an ``objective``; of a target for one image, those of this image alone."""
        if objective is None:
            return resolved.total
        if resolved.classes is None:
            raise TargetError(
                f"target must be a class to be compared with others, got {resolved.name}; give a "
                "label"
            )
        with torch.set_grad_enabled(self.graph_is_on):
            scores = objective(find_logits(self.output, self.count), resolved.classes)
            return scores.sum() if resolved.image is None else scores[resolved.image]

    def as_target(self, objective: Objective, resolved: ResolvedTarget) -> ResolvedTarget:
        """The ``objective`` of a resolved class as a target of its own."""
        classes: Any = resolved.classes

        def scores(output: Any, images: Tensor) -> Tensor:
            return objective(find_logits(output, len(images)), classes[images])

        target = ScoreTarget(scores)
        score = target.pick(self.output, self.count)[0].detach()
        return replace(resolved, target=target, score=score, classes=None)

    def record(self, layer: str) -> capturing.LayerCall:
        """Return the recorded call of a layer by its name, after a check that its output has a map
        for each image."""
        record = self.layers.of(layer)
        if record is None:
            raise LayerError(self.layers.why_missing(layer))
        shape = tuple(record.activation.shape)
        # each frame of a video may be an image for the layer; a scalar has no first size
        has_images = self.count in shape[:1] or self.grids.folded_frames(layer) is not None
        if not has_images and self.grids.grid(shape, layer) is None:
            must = f"layer {layer!r} must give one map for each of {self.count} images, got {shape}"
            raise LayerError(
                f"{must}; name another, or use a method without layers, such as saliency or attnlrp"
            )
        return record

    def spatial(self, tensor: Tensor, layer: str | None) -> Tensor:
        """Lay out the output of a layer, or the gradient in it, as maps ``(N, C, h, w)`` in at
        least float32, detached."""
        return at_least_float32(to_spatial(detached(tensor), self.grids, layer or ""))
