"""Concept vectors from examples (TCAV): whether a class is read from what photos have in common,
and how surely."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from explain._utils.errors import RunError, check_whole_number
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
SMALLEST_STEP = 1e-12  # curvature of the loss at a point that is far on its side


def normals(examples: torch.Tensor, counterexamples: torch.Tensor) -> torch.Tensor:
    """The normals ``(B, C)`` of the planes between groups ``(B, n, C)`` and ``(B, m, C)``, towards
    the first ones.

    They have the smallest mean logistic loss and 0.01 times their squared length. It is found by
    Newton's method for the weights of the points, of which there are fewer than channels as a rule.

    >>> found = normals(
    ...     torch.tensor([[[2.0, 0.0], [3.0, 1.0]]]), torch.tensor([[[-2.0, 0.0], [-3.0, 1.0]]])
    ... )[0]
    >>> bool(found[0] > 0), bool(found[1].abs() < 1e-6)
    (True, True)
    """
    points = torch.cat([examples, counterexamples], 1).double()
    count = points.shape[1]
    signs = torch.cat([torch.ones(examples.shape[1]), -torch.ones(counterexamples.shape[1])]).to(
        points
    )
    gram = points @ points.mT
    ridge = 2 * DECAY * count
    weights = points.new_zeros(len(points), count + 1)  # the weights of the points, and the offset

    def heights(weights: torch.Tensor) -> torch.Tensor:
        """How far each point lies above the plane, ``(B, n)``."""
        return (gram @ weights[:, :-1, None])[..., 0] + weights[:, -1:]

    def loss(weights: torch.Tensor) -> torch.Tensor:
        """The loss of each plane ``(B,)``."""
        above = heights(weights)
        squared_length = (weights[:, :-1] * (above - weights[:, -1:])).sum(1)
        return F.softplus(-signs * above).mean(1) + DECAY * squared_length

    for _ in range(STEPS):
        margins = signs * heights(weights)
        slopes = weights[:, :-1] - signs * torch.sigmoid(-margins) / ridge
        if slopes.abs().max() * ridge < TOLERANCE:
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
    """One step of Newton's method: where the quadratic approximation of the loss is smallest, by
    ridge regression with a weight for each point."""
    near = torch.sigmoid(margins)
    curvature = (near * (1 - near)).clamp(min=SMALLEST_STEP)
    wanted = signs * (margins + (1 - near) / curvature)
    # By Cholesky, as of every symmetric matrix: LU of several at once fails or hangs in some builds
    # with two threads.
    factor = torch.linalg.cholesky(gram + torch.diag_embed(ridge / curvature))
    sides = torch.stack([wanted, torch.ones_like(wanted)], 2)
    free, ones = torch.cholesky_solve(sides, factor).unbind(2)
    # with it, the weights add up to 0
    height = free.sum(1, keepdim=True) / ones.sum(1, keepdim=True)
    return torch.cat([free - height * ones, height], 1)


LEAST = 5  # examples
FAKES = 200
"""Concepts that mean nothing, with which one is compared; the smallest chance is 1 in one more than
that."""
AT_ONCE = 2**20  # numbers of a block of points
SLACK = 1e-9  # by which equal gains differ in the last digits


@dataclass(frozen=True)
class Direction:
    """What a concept means for a class.

    ``score`` is the share of the photos of the class whose logit rises if the layer moves towards
    the concept, and ``gain`` by how much it rises for a step of length 1, where each channel is
    measured in its own standard deviation; both are means over sets of counterexamples.
    ``random_scores`` and ``random_gains`` have the same of concepts that mean nothing: as many
    random photos in place of the examples. ``chance`` is the share of such concepts, the one in
    question among them, whose gain is as large or larger, up or down. ``told_apart`` is how well
    the vectors tell examples that they were not made from: about 0.5, the layer does not know the
    concept, whatever the gain says. ``vector`` ``(C,)`` is the mean of the examples less that of
    other photos: the concept as a pattern of the layer.
    """

    layer: str
    target: str
    examples: int
    photos: int
    score: float
    gain: float
    chance: float
    told_apart: float
    random_scores: tuple[float, ...] = field(repr=False)
    random_gains: tuple[float, ...] = field(repr=False)
    vector: torch.Tensor = field(repr=False)

    @property
    def significant(self) -> bool:
        """Whether the concept matters: by less than one chance in twenty it does not, and the layer
        knows it.

        For several concepts or classes, divide the twentieth by their number, and compare
        ``chance`` with that.
        """
        return self.chance < 0.05 and self.told_apart > 0.5

    def to_dict(self) -> dict[str, Any]:
        figures = (
            "layer target examples photos score gain chance told_apart random_scores random_gains"
        )
        return fields_of(self, figures)

    @property
    def table(self) -> "list[Direction]":
        """The rows of the table; see ``sections.toml``."""
        return [self]

    @property
    def usual(self) -> float:
        """How large the gains of random concepts are."""
        return math.fsum(map(abs, self.random_gains)) / len(self.random_gains)

    def __str__(self) -> str:
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
    """Find out whether a class is read from what the user's examples have in common.

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
    check_whole_number("fakes", fakes, 20, optional=False)
    number, label = class_in(photos.explainer, target)
    model = photos.explainer.model
    xs = [photos.explainer.as_input(image) for image in examples]
    where = one_layer(model, as_inputs(xs[0]), layer)
    of_examples = torch.cat([_means(feature_maps(model, x, where)) for x in xs])
    of_others, slopes = _others_and_slopes(photos, where, number, most)
    if len(of_others) < 3 * len(of_examples):
        raise RunError(
            f"run must have {3 * len(of_examples)} photos of other classes, got "
            f"{len(of_others)}; give fewer examples"
        )
    vector = of_examples.mean(0) - of_others.mean(0)
    scale = torch.cat([of_examples, of_others]).std(0).clamp(min=1e-6)
    # so that no channel counts more by its size
    of_examples = of_examples / scale
    of_others = of_others / scale
    slopes = slopes * scale
    generator = torch.Generator().manual_seed(seed)
    everything = torch.arange(len(of_others))
    score, gain, told_apart = _trial(
        of_examples[None], of_others, [everything], slopes, draws, generator
    )
    random_scores, random_gains = _by_chance(
        of_others, slopes, len(of_examples), draws, fakes, generator
    )
    as_large = int((random_gains.abs() >= gain.abs() * (1 - SLACK)).sum())
    return Direction(
        layer=where,
        target=label,
        examples=len(of_examples),
        photos=len(slopes),
        score=float(score),
        gain=float(gain),
        chance=(1 + as_large) / (1 + fakes),
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
    """The scores and gains of ``fakes`` concepts that mean nothing, ``(fakes,)`` each: each has
    ``count`` random photos as its examples."""
    scores = []
    gains = []
    block = max(1, AT_ONCE // (draws * 2 * count * max(points.shape[1], 2 * count)))
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
    """The score, the gain, and how well examples are told apart, of each of F concepts ``(F, n,
    C)``.

    ``rest`` has for each concept the numbers of the ``points`` that it is told from.
    """
    count = concepts.shape[1]
    # what is left shows how far a vector holds for photos that it was not made from
    many = count - count // 3
    shuffled = []
    counterparts = []
    for concept, numbers in zip(concepts, rest, strict=True):
        for _ in range(draws):
            shuffled.append(concept[torch.randperm(count, generator=generator)])
            order = numbers[torch.randperm(len(numbers), generator=generator)]
            counterparts.append(points[order[: 2 * many]])
    examples = torch.stack(shuffled)
    counterexamples = torch.stack(counterparts)
    used = examples[:, :many]
    against = counterexamples[:, :many]
    vectors = normals(used, against)
    vectors = vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12)
    middle = ((used.mean(1) + against.mean(1)) * vectors).sum(1) / 2
    hits = _above(examples[:, many:], vectors, middle)
    misses = _above(counterexamples[:, many:], vectors, middle)
    rises = slopes @ vectors.T  # for each photo of the class and each vector

    def of_concepts(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(len(concepts), draws).mean(1)

    scores = of_concepts((rises > 0).double().mean(0))
    gains = of_concepts(rises.double().mean(0))
    return scores, gains, of_concepts((hits + 1 - misses) / 2)


def _above(points: torch.Tensor, vectors: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
    """The share of points ``(B, n, C)`` on the side to which the normals ``(B, C)`` point,
    ``(B,)``."""
    return ((points @ vectors[..., None])[..., 0] > middle[:, None]).double().mean(1)


def _means(maps: torch.Tensor) -> torch.Tensor:
    """The mean of each channel of feature maps ``(N, C, h, w)``: ``(N, C)``, on the CPU."""
    return maps.flatten(2).mean(2).float().cpu()


def _others_and_slopes(
    photos: RunPhotos, layer: str, target: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The means of the channels in photos of other classes ``(M, C)``, and the slopes of the score
    in each channel in photos of the class ``(N, C)``."""
    model = photos.explainer.model
    of_others: list[torch.Tensor] = []
    slopes: list[torch.Tensor] = []
    looked = 0
    for batch in photos.batches():
        of_class = [i for i, row in enumerate(batch.rows) if class_of(row) == target]
        rest = [i for i in range(len(batch.rows)) if i not in of_class]
        if rest:
            of_others.append(_means(feature_maps(model, batch.x[rest], layer)))
        of_class = of_class[: max(0, most - looked)]
        if of_class:
            wanted = ClassTarget(target)
            evidence = at_layer(model, batch.x[of_class], layer, wanted, [LayerGradients()])
            slopes.append(evidence.gradients.flatten(2).sum(2).float().cpu())
            looked += len(of_class)
    if not slopes or not of_others:
        raise RunError(
            f"target must be a class of which the run has photos, among others, got {target}"
        )
    return torch.cat(of_others), torch.cat(slopes)
