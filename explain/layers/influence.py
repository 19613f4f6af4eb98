"""How layers reach a score: whether what a layer gives shows what the score comes from.

A layer that the score does not depend on shows nothing; nor does one whose gradient cancels out
over its places (the logits of an attention), the answer itself, and what only weighs another map
(gates, attention over places).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from explain._utils.rounding import all_cancel
from explain.data.inputs import Inputs
from explain.hooks.layer_names import place_of
from explain.hooks.preserve import calculating, untouched
from explain.hooks.unwrap import sharded
from explain.layers.grids import NetworkGrids
from explain.layers.layouts import to_spatial
from explain.layers.recording import CallKey, RecordedCalls, last_of_place, tensors_in
from explain.layers.summary import ForwardSummary
from explain.recording import Step, Value
from explain.recording.attention import RecordedAttention, attentions_in
from explain.recording.gradients import (
    Gradients,
    paths_to,
    reached_from,
    walk_back,
)
from explain.recording.moves import is_move
from explain.recording.record import finished, record_until

Score: TypeAlias = Callable[[Any], Tensor]
"""From a model's output to one score per image."""

CANDIDATES = 24  # whose gradients one pass computes
MAX_CANDIDATES = 6 * CANDIDATES


@dataclass(frozen=True, eq=False)
class ScoredPass:
    """A recorded pass, and the score of its output."""

    steps: Sequence[Step] = ()
    values: Mapping[CallKey, Value] = field(default_factory=dict)
    """What each call of a module gave."""
    outputs: Sequence[Value] = ()
    """The tensors in the network's output."""
    score: Value | None = None
    """The number that is differentiated; None where there is none."""
    graph: Mapping[Value, Tensor] = field(default_factory=dict)
    """The tensors of the pass in the graph of autograd, where weights are gone after the pass."""

    @cached_property
    def to_score(self) -> set[Value]:
        """The values through which a gradient comes from the score."""
        return set() if self.score is None else paths_to([self.score])

    @cached_property
    def attentions(self) -> dict[str, Value]:
        """The weights of each attention, by the innermost module that computes it; of a program
        without modules, the last."""
        return {attention.module: attention.weights.value for attention in self._attentions}

    @cached_property
    def of_heads(self) -> set[Value]:
        """The queries, keys, values and weights of the attentions, from the projections on, and
        what they give until it is projected."""
        of_heads = set[Value]()
        for attention in self._attentions:
            factors = [attention.query.value, attention.key.value, attention.value.value]
            of_heads |= paths_to(factors, until=lambda value: mixes(value.step))
            # from these to the weights, and from the weights to the result
            of_heads |= reached_from(self.steps, factors) & paths_to([attention.weights.value])
            to_result = paths_to([attention.result.value])
            of_heads |= to_result & reached_from(self.steps, [attention.weights.value])
        # and what they become where they are only moved
        for step in self.steps:
            if is_move(step) and not of_heads.isdisjoint(step.inputs):
                of_heads.update(step.outputs)
        return of_heads

    @cached_property
    def _attentions(self) -> list[RecordedAttention]:
        """The attentions of the pass."""
        return attentions_in(step for step in self.steps if step.results)

    def gradients(self, values: Collection[Value]) -> Gradients:
        """The gradients of the score in those values that it depends on."""
        score = self.score
        if score is None:
            return {}
        start = score.tensor.detach().new_ones(())
        with calculating(start.device.type):
            if self.graph:  # steps cannot run again without the weights
                sources = [value for value in values if self.graph[value].requires_grad]
                tensors = [self.graph[value] for value in sources]
                gradients = torch.autograd.grad(
                    self.graph[score], tensors, start, retain_graph=True, allow_unused=True
                )
                pairs = zip(sources, gradients, strict=True)
                return {value: gradient for value, gradient in pairs if gradient is not None}
            through = reached_from(self.steps, values) & self.to_score
            return walk_back(self.steps, {score: start}, set(values), through)


@dataclass(frozen=True, eq=False)
class LayerSearch:
    """What a layer is looked for with; without a score, the model's best one counts."""

    model: nn.Module
    inputs: Inputs
    summary: ForwardSummary
    score: Score | None
    recorded: RecordedCalls
    """A recorded pass of these inputs."""

    @cached_property
    def scored(self) -> ScoredPass:
        """The pass with its score."""
        recorder = self.recorded.recorder
        output = self.recorded.output
        if recorder is None:
            return ScoredPass()
        of_output = tensors_in(output, most=None)
        with ExitStack() as end_of_score:
            end_of_score.enter_context(untouched(self.model, grad=True))
            record_until(end_of_score, recorder)
            score = _best_score(output) if self.score is None else self.score(output).sum()
        outputs = [recorder.value_of(tensor) for tensor in of_output]
        value = None if score is None else recorder.value_of(score)
        graph = recorder.tensors if sharded(self.model) else {}
        steps = finished(recorder, [*of_output, score]).steps
        if value is not None and value not in reached_from(steps, recorder.inputs):
            for step in steps:  # the network switches gradients off: the graph begins at a layer
                step.has_gradient = True
        values = self.recorded.values
        return ScoredPass(steps, values=values, outputs=outputs, score=value, graph=graph)

    def value_of(self, layer: str) -> Value | None:
        """What a layer gave in the pass; None if it did not run."""
        return last_of_place(self.scored.values, place_of(layer, self.model))

    def influences_in_turn(self, layers: Sequence[str]) -> Iterator[dict[str, "ScoreInfluence"]]:
        """How layers reach the score, by layer, for a few dozen of them at a time; callers stop
        when one is right."""
        for start in range(0, min(len(layers), MAX_CANDIDATES), CANDIDATES):
            yield influences_of(self, layers[start : start + CANDIDATES])

    def numbers_read(self) -> int:
        """How many numbers of the model's output the score depends on, by its gradient. Tells
        boxes, which read few numbers, from masks and maps."""
        gradients = self.scored.gradients(self.scored.outputs)
        return sum(int((gradient != 0).sum()) for gradient in gradients.values())


@dataclass(frozen=True)
class ScoreInfluence:
    """How a layer reaches the score of each image."""

    positions: list[int]
    """At how many positions of its map the score of each image changes with it."""
    cancels: bool
    """Whether its gradient adds up to nothing over the positions, but for rounding errors."""
    is_answer: bool
    """Whether no operation with weights lies between it and the score."""
    is_factor: bool
    """Whether it only says how another map, from which it is computed, is weighed."""

    @property
    def shows(self) -> bool:
        """Whether the layer shows where the score comes from, so that it can be explained by
        default."""
        hides = self.cancels or self.is_answer or self.is_factor
        return any(self.positions) and not hides


def first_that_shows(layers: Iterable[str], influences: Mapping[str, ScoreInfluence]) -> str | None:
    """The first layer, in the given order, that shows where a score comes from, or else the first
    that reaches the score; None if none does."""
    reaching = [
        layer for layer in layers if layer in influences and any(influences[layer].positions)
    ]
    return min(reaching, key=lambda layer: not influences[layer].shows, default=None)


def influences_of(search: LayerSearch, layers: Sequence[str]) -> dict[str, ScoreInfluence]:
    """How some layers reach the score, by layer, from one walk back over the recorded pass; those
    that no gradient comes back to are left out."""
    scored = search.scored
    values = {layer: search.value_of(layer) for layer in layers}
    gradients = scored.gradients({value for value in values.values() if value is not None})
    grids = NetworkGrids(search.model, search.inputs)
    answers = set[Value]() if search.score is None else _answers(scored)
    factors = _values_that_weigh(scored, gradients.keys())
    influences = {}
    for layer, value in values.items():
        if value is None or value not in gradients:
            continue
        gradient = to_spatial(gradients[value], grids, layer)
        means = gradient.flatten(2).mean(2)
        positions = (gradient != 0).any(1).flatten(1).sum(1)
        cancels_in_image = all_cancel(means, gradient) & (positions > 0)
        # in all images whose score depends on it, if there is one
        cancels = cancels_in_image.any() and (cancels_in_image | (positions == 0)).all()
        influences[layer] = ScoreInfluence(
            positions.tolist(),
            cancels=bool(cancels),
            is_answer=value in answers,
            is_factor=value in factors,
        )
    return influences


def _best_score(output: Any) -> Tensor | None:
    """The best score in a model's output, the largest number of its first row of scores or first
    tensor, where any answer of the whole network will do."""
    tensors = sorted(tensors_in(output), key=lambda tensor: tensor.ndim != 2)
    return tensors[0].float().amax() if tensors else None


def _answers(scored: ScoredPass) -> set[Value]:
    """The values between a score and the last operations with weights. They are the answer itself,
    in which no map shows where it comes from."""
    score_rows = {value for value in scored.outputs if len(value.shape) <= 2}
    answers = {scored.score}
    before_answers: list[Value] = []
    for step in reversed(scored.steps):
        results = answers.intersection(step.results)
        if not results:
            continue
        sources = [value for value in step.inputs if value in scored.to_score]
        # a row of scores is an end too: there is no map that would be the answer
        if mixes(step) or not score_rows.isdisjoint(results):
            before_answers += sources
        else:
            answers.update(sources)
    # a value that is read by weights too, on another path to the score, is no answer
    return {value for value in answers if value is not None} - paths_to(before_answers)


def mixes(step: Step | None) -> bool:
    """Whether an operation has weights, or mixes channels or positions otherwise; those of
    libraries may. Behind the last such operation, tensors are the answer itself."""
    if step is None:
        return False
    return step.operation.kind in ("convolution", "matrixproduct") or "::" in step.name


def is_product(step: Step | None) -> bool:
    """Whether an operation multiplies two tensors, if both are computed; those of libraries may.
    Convolutions and samplers whose weights or offsets are computed are among them."""
    if step is None:
        return False
    operation = step.operation
    kinds = ("product", "quotient", "convolution", "matrixproduct")
    return operation.kind in kinds or operation.has("samples") or "::" in step.name


def _values_that_weigh(scored: ScoredPass, layers: AbstractSet[Value]) -> set[Value]:
    """The values of layers that reach a score only as a factor of a map from which they are
    computed themselves: gates, attention over places, offsets of deformable convolutions."""
    # they say how much passes, not what is there; of layers multiplied side by side, none is one
    factors = set[Value]()
    for product in scored.steps:
        parents = {value for value in product.inputs if value.depends}
        parents &= scored.to_score
        if len(parents) < 2 or not is_product(product):
            continue
        for factor in parents:
            cofactors = parents - {factor}
            weighed = layers & paths_to(
                cofactors, until=lambda value: value in layers or mixes(value.step)
            )
            # the factor is computed from the map that it weighs
            if weighed and not weighed.isdisjoint(paths_to([factor])):
                results = set(product.results)
                # what also reaches the score on a path around this product
                elsewhere = paths_to(filter(None, [scored.score]), until=results.__contains__)
                factors |= layers - paths_to(cofactors) - elsewhere
    return factors
