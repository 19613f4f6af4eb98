"""Concept vectors from examples (TCAV): whether a class is read from what photos have in common,
and how surely."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from explain._utils.errors import RunError, check_whole_number
from explain._utils.random_numbers import seeded
from explain.attribution.concepts import one_layer
from explain.data.images import ImageLike
from explain.data.inputs import as_inputs
from explain.engine import LayerGradients
from explain.hooks.layer_names import Where
from explain.insight.channels import at_layer, feature_maps
from explain.insight.maps import fields_of, in_percent
from explain.insight.reattribution import RunPhotos, class_in, class_of
from explain.targets import ClassTarget

DECAY = 0.01
"""By how much the length of a normal counts against it, as a share of the loss."""
STEPS = 60
HALVINGS = 8
TOLERANCE = 1e-9
SMALLEST_STEP = 1e-12  # least curvature of the loss, as of a point far on its own side of the plane


def normals(examples: torch.Tensor, counterexamples: torch.Tensor) -> torch.Tensor:
    """Return the normals ``(B, C)`` of planes from counterexamples ``(B, m, C)`` to examples ``(B,
    n, C)``: least mean logistic loss plus `DECAY` times squared length."""
    points = torch.cat([examples, counterexamples], 1).double()
    count = points.shape[1]
    signs = torch.cat([torch.ones(examples.shape[1]), -torch.ones(counterexamples.shape[1])]).to(
        points
    )
    # A normal is a weighted sum of its points, so that only inner products count: of few examples,
    # there are fewer of these than channels.
    gram = points @ points.mT
    ridge = 2 * DECAY * count
    weights = points.new_zeros(len(points), count + 1)  # the weights of the points, and the offset

    def heights(weights: torch.Tensor) -> torch.Tensor:
        """How far each of the n + m points lies above its plane, ``(B, n + m)``."""
        return (gram @ weights[:, :-1, None])[..., 0] + weights[:, -1:]

    def loss(weights: torch.Tensor) -> torch.Tensor:
        """The regularised loss of each of the B planes ``(B,)``."""
        above = heights(weights)
        squared_length = (weights[:, :-1] * (above - weights[:, -1:])).sum(1)
        return F.softplus(-signs * above).mean(1) + DECAY * squared_length

    # Newton's method on the weights of the points
    for _ in range(STEPS):
        margins = signs * heights(weights)
        optimal_weights = signs * torch.sigmoid(-margins) / ridge  # where the loss has no slope
        if (weights[:, :-1] - optimal_weights).abs().max() * ridge < TOLERANCE:
            break
        step = _newton(gram, signs, margins, ridge) - weights
        current_loss = loss(weights)
        # half of the step, and half of that, where all of it goes too far
        for _ in range(HALVINGS):
            too_far = loss(weights + step) > current_loss
            if not too_far.any():
                break
            step = torch.where(too_far[:, None], step / 2, step)
        weights = weights + step
    return (weights[:, None, :-1] @ points)[:, 0].to(examples)


def _newton(
    gram: torch.Tensor, signs: torch.Tensor, margins: torch.Tensor, ridge: float
) -> torch.Tensor:
    """The weights and offset ``(B, P + 1)`` after a Newton step: inner products ``gram`` ``(B, P,
    P)``, ``signs`` ``(P,)`` 1 for examples else -1, ``margins`` ``(B, P)`` on their own side.
    """
    # iteratively reweighted least squares: heights to aim at, each weighted by its curvature
    right_probability = torch.sigmoid(margins)
    curvature = (right_probability * (1 - right_probability)).clamp(min=SMALLEST_STEP)
    targets = signs * (margins + (1 - right_probability) / curvature)
    # By Cholesky, as of every symmetric matrix: LU of several at once fails or hangs in some builds
    # with two threads.
    factor = torch.linalg.cholesky(gram + torch.diag_embed(ridge / curvature))
    right_sides = torch.stack([targets, torch.ones_like(targets)], 2)
    unconstrained, response = torch.cholesky_solve(right_sides, factor).unbind(2)
    # with this offset, the weights of the points add up to 0
    offset = unconstrained.sum(1, keepdim=True) / response.sum(1, keepdim=True)
    return torch.cat([unconstrained - offset * response, offset], 1)


LEAST = 5  # examples
FAKES = 200
"""Random concepts with which the user's concept is compared; the smallest p-value is 1 / (FAKES +
1)."""
AT_ONCE = 2**20  # values in a block of points, which bounds the memory of the random concepts
SLACK = 1e-9  # relative: equal gains may differ in their last digits


@dataclass(frozen=True)
class Direction:
    """What a concept, given by examples, means for a class. ``vector`` ``(C,)`` is the mean of the
    examples less that of other photos."""

    layer: str
    target: str
    examples: int
    photos: int
    # the share of the photos of the class whose logit rises if the layer moves towards the concept
    score: float
    # how much the logit rises for a step of length 1, in each channel's standard deviations
    gain: float
    # p-value of a permutation test: the share of all concepts, random ones and this, with as large
    # a gain, up or down
    chance: float
    # the share of held-out photos on the right side; about 0.5, the layer does not know the concept
    told_apart: float
    # of concepts of as many random photos
    random_scores: tuple[float, ...] = field(repr=False)
    random_gains: tuple[float, ...] = field(repr=False)
    vector: torch.Tensor = field(repr=False)

    @property
    def significant(self) -> bool:
        """Whether the class is read from the concept (p below 0.05), and the layer tells the
        examples apart. For several tests, compare ``chance`` with 0.05 over their number.
        """
        return self.chance < 0.05 and self.told_apart > 0.5

    def to_dict(self) -> dict[str, Any]:
        """The figures of a concept's direction in plain values of JSON, for ``insight.json``,
        without the vector."""
        figures = (
            "layer target examples photos score gain chance told_apart random_scores random_gains"
        )
        return fields_of(self, figures)

    @property
    def table(self) -> "list[Direction]":
        """The rows of the table "direction" of an insight: this one alone; the templates in
        ``sections.toml`` read its attributes."""
        return [self]

    @property
    def usual(self) -> float:
        """The mean magnitude of the gains of random concepts, with which ``gain`` is compared in
        the table."""
        return math.fsum(map(abs, self.random_gains)) / len(self.random_gains)

    def __str__(self) -> str:
        """The direction in one line for the terminal."""
        gain = f"gain by the concept, {self.gain:+.2g} on average (p = {self.chance:.2g})"
        apart = f"{in_percent(self.told_apart)} of the examples are told apart in {self.layer}"
        return f"{in_percent(self.score)} of {self.photos} photos of {self.target} {gain}; {apart}"


def concept_direction(
    photos: RunPhotos,
    examples: Sequence[ImageLike],
    target: int | str,
    *,
    layer: Where | None = None,
    draws: int = 10,
    fakes: int = FAKES,
    most: int = 200,
    seed: int = 0,
) -> Direction:
    """Test whether a class is read from a concept, which is what the user's examples have in common
    (TCAV).

    A linear classifier tells the examples from random photos of the run, by the means of the
    layer's channels; its normal is the concept vector. The score is the share of the photos of the
    class for which the derivative of the logit along the vector is positive, the gain the mean of
    these derivatives. Vectors are found several times, each with two thirds of the examples and
    other random photos. To know what chance gives, all of it is done again with random photos in
    place of the examples, many times: a permutation test, which holds for few examples too. It
    compares gains, since scores may not tell: where a linear layer follows, the score of any vector
    is 0 or 1.

    Args:
        photos: the photos of a run, and the model; random photos come from it, but not from the
            class.
        examples: photos that have the concept, at least five.
        target: the class, as a number or label: photos with this label, or else this prediction.
        layer: one layer; None finds the last feature map.
        draws: how many sets of random photos the examples are told from.
        fakes: how many concepts of random photos it is compared with.
        most: photos of the class that are looked at.
        seed: of what is drawn by chance.

    Raises:
        RunError: there are too few examples, other photos, or photos of the class.
        TargetError: there is no such label.
        LayerError: there is no such layer.

    Kim et al., "Interpretability Beyond Feature Attribution: Quantitative Testing with Concept
    Activation Vectors (TCAV)", ICML 2018. (Their vectors are those of all places; with means over
    places, a concept is the same wherever it lies, and fewer examples are enough. They test scores
    by a t-test over the sets of random photos.)
    """
    if len(examples) < LEAST:
        raise RunError(f"examples must be at least {LEAST} photos, got {len(examples)}; give more")
    check_whole_number("draws", draws, 1, optional=False)
    check_whole_number("fakes", fakes, 20, optional=False)  # of fewer, no p-value is below 0.05
    class_number, label = class_in(photos.explainer, target)
    model = photos.explainer.model
    xs = [photos.explainer.as_input(image) for image in examples]
    layer_name = one_layer(model, as_inputs(xs[0]), layer)
    example_means = torch.cat([_means(feature_maps(model, x, layer_name)) for x in xs])
    other_means, slopes = _others_and_slopes(photos, layer_name, class_number, most)
    # as many for a random concept, and twice as many that it is told from
    if len(other_means) < 3 * len(example_means):
        raise RunError(
            f"run must have {3 * len(example_means)} photos of other classes, got "
            f"{len(other_means)}; give fewer examples"
        )
    vector = example_means.mean(0) - other_means.mean(0)
    scale = torch.cat([example_means, other_means]).std(0).clamp(min=1e-6)
    # so that no channel counts more by its size
    example_means = example_means / scale
    other_means = other_means / scale
    slopes = slopes * scale
    generator = seeded(seed)
    all_others = torch.arange(len(other_means))
    score, gain, told_apart = _trial(
        example_means[None], other_means, [all_others], slopes, draws, generator
    )
    random_scores, random_gains = _by_chance(
        other_means, slopes, len(example_means), draws, fakes, generator
    )
    # the concept itself counts as one of all, so that no p-value is 0
    at_least_as_large = 1 + int((random_gains.abs() >= gain.abs() * (1 - SLACK)).sum())
    return Direction(
        layer=layer_name,
        target=label,
        examples=len(example_means),
        photos=len(slopes),
        score=float(score),
        gain=float(gain),
        chance=at_least_as_large / (1 + fakes),
        told_apart=float(told_apart),
        random_scores=tuple(random_scores.tolist()),
        random_gains=tuple(random_gains.tolist()),
        vector=vector,
    )


def _by_chance(
    points: torch.Tensor,
    slopes: torch.Tensor,
    count: int,
    draws: int,
    fakes: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores and gains ``(fakes,)`` of random concepts: ``count`` of ``points`` ``(M, C)``
    against the rest. Blocks draw from ``generator`` in turn: another block size gives other values.
    """
    scores = []
    gains = []
    # of each draw of a concept: its points and as many others, by channels or with each other
    values_of_concept = draws * 2 * count * max(points.shape[1], 2 * count)
    block = max(1, AT_ONCE // values_of_concept)
    for first in range(0, fakes, block):
        orders = [
            torch.randperm(len(points), generator=generator)
            for _ in range(min(block, fakes - first))
        ]
        concepts = torch.stack([points[order[:count]] for order in orders])
        rest = [order[count:] for order in orders]
        block_scores, block_gains, _ = _trial(concepts, points, rest, slopes, draws, generator)
        scores.append(block_scores)
        gains.append(block_gains)
    return torch.cat(scores), torch.cat(gains)


def _trial(
    concepts: torch.Tensor,
    points: torch.Tensor,
    rest: Sequence[torch.Tensor],
    slopes: torch.Tensor,
    draws: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score, gain and held-out accuracy ``(F,)`` of F concepts ``(F, n, C)`` against the ``points``
    ``(M, C)`` of ``rest``, by ``slopes`` ``(N, C)``; ``draws`` vectors from two thirds each.
    """
    count = concepts.shape[1]
    # a third is held out: it shows whether a vector holds for photos that it was not made from
    fitted = count - count // 3
    shuffled = []
    counterparts = []
    for concept, numbers in zip(concepts, rest, strict=True):
        for _ in range(draws):
            shuffled.append(concept[torch.randperm(count, generator=generator)])
            order = numbers[torch.randperm(len(numbers), generator=generator)]
            counterparts.append(points[order[: 2 * fitted]])  # half of them is held out
    # one after the other, the draws of all concepts: ``(F * draws, n, C)``
    examples = torch.stack(shuffled)
    counterexamples = torch.stack(counterparts)
    fit_examples = examples[:, :fitted]
    fit_counterexamples = counterexamples[:, :fitted]
    vectors = normals(fit_examples, fit_counterexamples)
    vectors = vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12)
    threshold = ((fit_examples.mean(1) + fit_counterexamples.mean(1)) * vectors).sum(1) / 2
    hits = _above(examples[:, fitted:], vectors, threshold)
    false_hits = _above(counterexamples[:, fitted:], vectors, threshold)
    rises = slopes @ vectors.T  # for each photo of the class and each vector

    def of_concepts(values: torch.Tensor) -> torch.Tensor:
        """Means over the draws of each concept, from ``(F * draws,)`` to ``(F,)``."""
        return values.reshape(len(concepts), draws).mean(1)

    scores = of_concepts((rises > 0).double().mean(0))
    gains = of_concepts(rises.double().mean(0))
    accuracies = of_concepts((hits + 1 - false_hits) / 2)  # examples count as much as the others
    return scores, gains, accuracies


def _above(points: torch.Tensor, vectors: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """The share ``(B,)`` of the points ``(B, n, C)`` whose projection on the vectors ``(B, C)``
    exceeds ``threshold`` ``(B,)``."""
    return ((points @ vectors[..., None])[..., 0] > threshold[:, None]).double().mean(1)


def _means(maps: torch.Tensor) -> torch.Tensor:
    """The mean of each channel of feature maps ``(N, C, h, w)``: ``(N, C)``, on the CPU."""
    return maps.flatten(2).mean(2).float().cpu()


def _others_and_slopes(
    photos: RunPhotos, layer: str, target: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The channel means ``(M, C)`` of photos of other classes than ``target``, and the logit's
    gradients ``(N, C)``, summed over positions, in ``most`` photos of it; on the CPU.
    """
    model = photos.explainer.model
    other_means: list[torch.Tensor] = []
    slopes: list[torch.Tensor] = []
    count_of_class = 0
    for batch in photos.batches():
        of_class = [i for i, row in enumerate(batch.rows) if class_of(row) == target]
        of_others = [i for i in range(len(batch.rows)) if i not in of_class]
        if of_others:
            other_means.append(_means(feature_maps(model, batch.x[of_others], layer)))
        of_class = of_class[: max(0, most - count_of_class)]
        if of_class:
            target_class = ClassTarget(target)
            evidence = at_layer(model, batch.x[of_class], layer, target_class, [LayerGradients()])
            slopes.append(evidence.gradients.flatten(2).sum(2).float().cpu())
            count_of_class += len(of_class)
    if not slopes or not other_means:
        raise RunError(
            f"target must be a class of which the run has photos, among others, got {target}"
        )
    return torch.cat(other_means), torch.cat(slopes)
