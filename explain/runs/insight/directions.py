"""Concept vectors from examples: whether a class is read from what photos have in common, and how surely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from explain.errors import RunError, shown
from explain.hooks import Where
from explain.images import ImageLike
from explain.runs.insight.again import Photos, one_for_each_photo
from explain.runs.insight.layer import feature_maps, one_layer, with_gradients
from explain.runs.insight.looking import plain
from explain.runs.insight.statistics import welch
from explain.targets import ClassTarget

LEAST = 5  # examples
STEPS = 100
DECAY = 0.01
"""By how much the length of a vector counts against it, as a share of the loss."""


@dataclass(frozen=True)
class Direction:
    """What a concept means for a class.

    ``score`` is the share of the photos of the class whose score rises if the layer moves towards the concept, on
    average over ``scores``, one for each set of counterexamples. ``random`` has the scores of concepts that mean
    nothing: random photos against others. ``chance`` is the probability of such a difference of the two means if the
    concept meant nothing either, and ``told_apart`` how well the vectors tell examples that they were not made from:
    about 0.5, the layer does not know the concept, whatever the score says.
    """

    layer: str
    target: int
    photos: int
    score: float
    chance: float
    told_apart: float
    scores: tuple[float, ...]
    random: tuple[float, ...]

    @property
    def significant(self) -> bool:
        """Whether the concept matters: by less than one chance in twenty it does not, and the layer knows it.

        For several concepts or classes, divide the twentieth by their number, and compare ``chance`` with that.
        """
        return self.chance < 0.05 and self.told_apart > 0.5

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer, "target": self.target, "photos": self.photos, "score": plain(self.score),
            "chance": plain(self.chance), "told_apart": plain(self.told_apart), "scores": list(self.scores),
            "random": list(self.random),
        }  # fmt: skip

    def __str__(self) -> str:
        usual = math.fsum(self.random) / len(self.random)
        return (
            f"{self.score:.0%} of {self.photos} photos of class {self.target} gain by the concept, {usual:.0%} by "
            f"random ones (p = {self.chance:.2g}); {self.told_apart:.0%} of the examples are told apart in {self.layer}"
        )


def concept_direction(
    photos: Photos,
    examples: Sequence[ImageLike],
    target: int,
    *,
    layer: Where | None = None,
    draws: int = 10,
    most: int = 200,
    seed: int = 0,
) -> Direction:
    """Find out whether a class is read from what the user's examples have in common.

    A linear classifier tells the examples from random photos of the run, by the means of the layer's channels; its
    normal is the concept vector. The score is the share of the photos of the class for which the derivative of the
    logit along the vector is positive. It is found several times, each with two thirds of the examples and other random
    photos, and compared with what random photos give in place of the examples.

    Args:
        photos: the photos of a run, and the model; random photos come from it, but not from the class.
        examples: photos that have the concept, at least five.
        target: the class: photos with this label, or else this prediction.
        layer: one layer; None finds the last feature map.
        draws: how many sets of random photos.
        most: photos of the class that are looked at.
        seed: of what is drawn by chance.

    Raises:
        RunError: there are too few examples, other photos, or photos of the class.
        LayerError: there is no such layer.

    Kim et al., "Interpretability Beyond Feature Attribution: Quantitative Testing with Concept Activation Vectors
    (TCAV)", ICML 2018. (Their vectors are those of all places; with means over places, a concept is the same wherever
    it lies, and fewer examples are enough.)
    """
    if len(examples) < LEAST:
        raise RunError(f"examples must be at least {LEAST} photos, got {len(examples)}; give more")
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 2:
        raise RunError(f"draws must be a whole number from 2, got {shown(draws)}; 10 is usual")
    model = photos.explainer.model
    xs = [photos.explainer.as_input(image) for image in examples]
    name = one_layer(model, xs[0], layer)
    own = torch.cat([_means(feature_maps(model, x, name)) for x in xs])
    others, slopes = _others_and_slopes(photos, name, target, most)
    if len(others) < 3 * len(own):
        raise RunError(
            f"run must have at least {3 * len(own)} photos of other classes for {len(own)} examples, got "
            f"{len(others)}; give fewer examples"
        )
    scale = torch.cat([own, others]).std(0).clamp(min=1e-6)
    own, others, slopes = own / scale, others / scale, slopes * scale  # so that no channel counts more by its size
    generator = torch.Generator().manual_seed(seed)
    scores, usual, told = [], [], []
    many = len(own) - len(own) // 3  # the others show how far the vector holds for photos that it was not made from
    for _ in range(draws):
        order = torch.randperm(len(others), generator=generator)
        first, second = others[order[:many]], others[order[many : 2 * many]]
        part = own[torch.randperm(len(own), generator=generator)]
        normal = vector(part[:many], first)
        scores.append(_share(slopes, normal))
        usual.append(_share(slopes, vector(second, first)))
        told.append(_told_apart(normal, part, first, others[order[2 * many :]], many))
    return Direction(
        layer=name, target=target, photos=len(slopes), score=math.fsum(scores) / draws, chance=welch(scores, usual),
        told_apart=math.fsum(told) / draws, scores=tuple(scores), random=tuple(usual),
    )  # fmt: skip


def vector(examples: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The normal ``(C,)`` of the plane between two groups of points ``(n, C)``, towards the first; logistic regression.

    >>> found = vector(torch.tensor([[2.0, 0.0], [3.0, 1.0]]), torch.tensor([[-2.0, 0.0], [-3.0, 1.0]]))
    >>> bool(found[0] > 0), bool(found[1].abs() < 1e-3)
    (True, True)
    """
    points = torch.cat([examples, others]).double()
    signs = torch.cat([torch.ones(len(examples)), -torch.ones(len(others))]).to(points)
    weights = torch.zeros(points.shape[1] + 1, dtype=torch.double, requires_grad=True)
    solver = torch.optim.LBFGS([weights], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        solver.zero_grad()
        margins = signs * (points @ weights[:-1] + weights[-1])
        value = F.softplus(-margins).mean() + DECAY * weights[:-1].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        solver.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach()[:-1].to(examples)


def _told_apart(
    normal: torch.Tensor, examples: torch.Tensor, others: torch.Tensor, new_others: torch.Tensor, many: int
) -> float:
    """How well a vector made from the first ``many`` examples tells the rest: the mean of the shares that are right."""
    middle = (examples[:many].mean(0) + others.mean(0)) @ normal / 2
    right = (examples[many:] @ normal > middle).double().mean() + (new_others @ normal < middle).double().mean()
    return float(right / 2)


def _share(slopes: torch.Tensor, normal: torch.Tensor) -> float:
    return float((slopes @ normal > 0).double().mean())


def _means(maps: torch.Tensor) -> torch.Tensor:
    return maps.flatten(2).mean(2).float().cpu()


def _others_and_slopes(photos: Photos, name: str, target: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The means of the channels in photos of other classes, and the slopes of the score in those of the class."""
    model, others, slopes = photos.explainer.model, [], []
    looked = 0
    for batch in photos.batches(one_for_each_photo(photos.run)):
        classes = [row.prediction_class if row.label_class is None else row.label_class for row in batch.rows]
        of_class = [i for i, each in enumerate(classes) if each == target][: max(0, most - looked)]
        rest = [i for i, each in enumerate(classes) if each != target]
        if rest:
            others.append(_means(feature_maps(model, batch.x[rest], name)))
        if of_class:
            gradients = with_gradients(model, batch.x[of_class], name, ClassTarget(target))[1]
            slopes.append(gradients.flatten(2).sum(2).float().cpu())
            looked += len(of_class)
    if not slopes or not others:
        raise RunError(
            f"target must be a class of which the run has photos, among others, got {target}; choose another"
        )
    return torch.cat(others), torch.cat(slopes)
