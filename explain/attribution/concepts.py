"""Concepts in a layer: what its feature maps are made of, where each lies, and which class it
contributes to."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod

import torch
from torch import nn

from explain._utils.errors import LayerError, MethodError, keywords, option_name, warn
from explain._utils.random_numbers import normal
from explain.data.inputs import Inputs, InputsLike
from explain.engine import Activations
from explain.engine.execution import gather
from explain.engine.perturbations import GivenSamples, ScoreOf, Scores, samples_of
from explain.engine.plan import plan_of
from explain.engine.settings import RuntimeSettings
from explain.engine.validation import check_inputs
from explain.hooks import layer_names, preserve, unwrap
from explain.layers import default_layer, summary
from explain.layers.placement import Placement, draw
from explain.targets import TopClass
from explain.targets.labels import class_label

SHOWN = 12  # maps in a picture
STEPS = 400
TOLERANCE = 1e-4
TINY = 1e-7  # stands for a denominator of zero


@dataclass(frozen=True, eq=False, repr=False)
class Concepts:
    """K concepts of a layer, found in N images together.

    ``maps`` ``(N, K, h, w)`` says how strongly each concept is present at each place, 1 at its
    strongest. ``vectors`` ``(K, C)`` is each one's activation of the layer's channels there; the
    sum over concepts of map times vector is the layer's output, up to the share ``error`` of its
    norm. ``logits`` ``(K, classes)`` are the scores that the network gives when all of the layer's
    map is that one concept at its strongest; class tokens, and what leads past the layer, stay
    those of the first image.
    """

    maps: torch.Tensor
    vectors: torch.Tensor
    logits: torch.Tensor
    layer: str
    size: tuple[int, ...]
    error: float
    placement: Placement | None = None

    def __len__(self) -> int:
        return len(self.vectors)

    @cached_property
    def heatmaps(self) -> torch.Tensor:
        """The maps of the concepts as pictures: ``(N, K, H, W)`` float32 in [0, 1] at input
        resolution."""
        return draw(self.maps.float(), self.size, self.placement).clamp(0, 1)

    @property
    def shares(self) -> list[float]:
        """The share of the layer's activation that each concept has: the sum of its map times its
        vector, over that of all.

        They add up to one. The order is that of the concepts, largest first.
        """
        parts = self.maps.double().sum((0, *range(2, self.maps.ndim))) * self.vectors.double().sum(
            1
        )
        return [float(part) for part in parts / parts.sum()]

    def __repr__(self) -> str:
        shares = ", ".join(f"{share:.0%}" for share in self.shares)
        return (
            f"Concepts({len(self)} in layer {self.layer!r}, {shares}; {self.error:.0%} of the "
            "layer is left over)"
        )

    def classes(self, count: int = 3) -> torch.Tensor:
        """The ``count`` best classes of each concept, best first: indices ``(K, count)``."""
        return self.logits.topk(min(count, self.logits.shape[1]), dim=1).indices


def one_layer(model: nn.Module, inputs: Inputs, layer: layer_names.Where | None) -> str:
    """Check that ``layer`` means one layer and return its name; None finds the last feature map.
    For concepts and directions.
    """
    names = (
        [default_layer(model, inputs)]
        if layer is None
        else summary.find_layers(model, inputs, layer)
    )
    if len(names) != 1:
        raise LayerError(
            f"layer must name one layer, got {len(names)}; choose one of {', '.join(names)}"
        )
    return names[0]


@keywords()
def find_concepts(
    model: nn.Module,
    x: InputsLike,
    count: int = 4,
    *,
    layer: layer_names.Where | None = None,
    seed: int = 0,
    batch_size: int | None = None,
) -> Concepts:
    """Factorise a layer's feature maps into a few concepts that are present or absent, never
    negative.

    The activations of all images, a row for each place, are approximated by the product of two
    non-negative matrices: places by concepts, and concepts by channels. Concepts are ordered by how
    much of the activation they explain.

    Args:
        model: any ``nn.Module`` that gives class scores; left exactly as found.
        x: preprocessed images ``(N, C, H, W)``, or several inputs, as for `explain.attribute`;
            concepts that images share are found in all of them.
        count: how many concepts.
        layer: one layer; None finds the last feature map. Its negative values, if it has any, are
            left out.
        seed: of the random start.
        batch_size: how many concepts are shown to the network at once.

    Raises:
        ExplainError: one line that says which argument does not fit and what would.

    Collins et al., "Deep Feature Factorization for Concept Discovery", ECCV 2018
    (arXiv:1806.10206).

    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    ... )
    >>> found = find_concepts(model, torch.rand(2, 3, 16, 16), count=2)
    >>> found.maps.shape, found.vectors.shape, found.logits.shape
    (torch.Size([2, 2, 14, 14]), torch.Size([2, 4]), torch.Size([2, 5]))
    """
    model = unwrap.unwrapped(model)
    inputs = check_inputs(model, x)
    name = one_layer(model, inputs, layer)
    settings = RuntimeSettings(batch_size)
    (evidence_of,) = gather(model, inputs, plan_of([Activations()], [name]), [TopClass()], settings)
    evidence = evidence_of(name)
    with preserve.calculating(inputs.x.device.type):
        maps = _present(evidence.activations, name)
        image_count, channels, *places = maps.shape
        rows = maps.movedim(1, -1).reshape(-1, channels).double()
        largest_count = min(rows.shape)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= largest_count:
            raise MethodError(
                f"{option_name('count')} must be a whole number from 1 to {largest_count} at layer "
                f"{name}, got {count!r:.60}; 4 is usual"
            )
        place_weights, concept_vectors = factorise(rows, count, seed)
        # each map becomes 1 at its strongest place, and its vector takes the scale
        strongest = place_weights.amax(0).clamp(min=torch.finfo(place_weights.dtype).tiny)
        place_weights = place_weights / strongest
        concept_vectors = concept_vectors * strongest[:, None]
        # by how much of the activation each concept explains
        order = (place_weights.sum(0) * concept_vectors.sum(1)).argsort(descending=True)
        place_weights = place_weights[:, order]
        concept_vectors = concept_vectors[order]
        error = float((rows - place_weights @ concept_vectors).norm() / rows.norm())
        # what the layer gives where all of its map is one concept at its strongest
        vectors = concept_vectors.to(maps)
        at_all_places = vectors[:, :, None].expand(-1, -1, prod(places))
        concept_maps = at_all_places.reshape((count, channels, *places))
        concept_samples = samples_of(
            [count], concept_maps.device, lambda images, numbers: concept_maps[numbers]
        )
        maps_of_concepts = (
            place_weights.reshape((image_count, *places, count)).movedim(-1, 1).to(maps)
        )
    scores = Scores(GivenSamples(concept_samples, "a concept alone"), ScoreOf("all"))
    (scores_of,) = gather(model, inputs, plan_of([scores], [name]), [TopClass()], settings)
    return Concepts(
        maps_of_concepts,
        vectors,
        logits=scores_of(name)[scores],
        layer=name,
        size=evidence.size,
        error=error,
        placement=evidence.placement,
    )


def _present(maps: torch.Tensor, layer: str) -> torch.Tensor:
    """The positive part of the feature maps, which concepts are made of; a warning says how much is
    left out. Raises `LayerError` if nothing is positive, since there would be nothing to factorise.
    """
    present = maps.clamp(min=0)
    if not present.any():
        raise LayerError(
            f"layer {layer!r} must be active somewhere for concepts, but no value is above zero"
        )
    left_out = float((maps - present).norm() / maps.norm())
    if left_out > 0:
        warn(
            f"layer {layer} has negative values, {left_out:.0%} of its norm, which concepts "
            "leave out; a layer behind a ReLU has none"
        )
    return present


def factorise(rows: torch.Tensor, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-negative factors ``(P, K)``, ``(K, C)`` of activations ``(P, C)``, by Lee and Seung
    (2001) until ten updates gain under 1e-4. A changed generator or order changes saved concepts.
    """
    scale = (rows.mean() / count).sqrt()  # their product begins at about the size of the rows
    generator = torch.Generator("cpu").manual_seed(seed)
    shapes = (len(rows), count), (count, rows.shape[1])
    place_weights, concept_vectors = (
        normal(shape, generator).abs().to(rows) * scale for shape in shapes
    )
    last_error = inf
    for step in range(STEPS):
        place_weights, concept_vectors = updated_factors(rows, place_weights, concept_vectors)
        if step % 10 == 9:
            error = float((rows - place_weights @ concept_vectors).norm())
            if last_error - error <= TOLERANCE * error:
                break
            last_error = error
    return place_weights, concept_vectors


def updated_factors(
    activations: torch.Tensor, place_weights: torch.Tensor, concept_vectors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors ``(P, K)``, ``(K, C)`` of activations ``(P, C)`` after one multiplicative update,
    of the first and then of the second. Both stay non-negative if they begin so."""

    def safe_quotient(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
        return numerator / torch.where(denominator == 0, TINY, denominator)

    overlaps = concept_vectors @ concept_vectors.T
    place_weights = safe_quotient(
        place_weights * (activations @ concept_vectors.T), place_weights @ overlaps
    )
    concept_vectors = safe_quotient(
        concept_vectors * (place_weights.T @ activations),
        (place_weights.T @ place_weights) @ concept_vectors,
    )
    return place_weights, concept_vectors


def name_concepts(
    concepts: Concepts, categories: Sequence[str] | None, count: int = 2
) -> list[str]:
    """Return the labels of each concept's ``count`` best classes, joined by commas: one text for
    each concept, such as "dog, hen"."""
    return [
        ", ".join(class_label(categories, i) for i in class_indices)
        for class_indices in concepts.classes(count).tolist()
    ]
