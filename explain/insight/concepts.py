"""Concepts that all photos share: feature maps factorised in mini-batches, for any number of photos; concept vectors
from examples: whether a class is read from what photos have in common, and how surely."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image

from explain._utils.errors import RunError
from explain.attribution.concepts import factorise, one_layer
from explain.data.images import ImageLike
from explain.data.inputs import as_inputs
from explain.hooks.layer_names import Where
from explain.insight.channels import feature_maps, with_gradients
from explain.insight.maps import as_in, fields_of, heated, most_frequent, named, percent, plain
from explain.insight.reattribution import Batch, RunPhotos, class_in, class_of, one_for_each_photo
from explain.layers.layouts import enlarge
from explain.render.sheets import Group, Layout, Tile, sheet
from explain.store.reading import Row
from explain.store.sources import check_count
from explain.targets import ClassTarget

INNER = 30  # steps by which the places of a batch follow the concepts
OUTER = 5  # steps by which the concepts follow the batches so far
KEPT = 0.5
"""How much what was found in a round counts in the next: its places were those of concepts that have moved since."""
TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Example:
    """A photo in which a concept is strong: its map ``(H, W)``, 1 at its strongest, and how strong it is there."""

    row: Row
    strength: float
    heatmap: torch.Tensor = field(repr=False)


@dataclass(frozen=True, eq=False)
class SharedConcepts:
    """K concepts of a layer, found in all photos of a run together.

    ``vectors`` ``(K, C)`` are each one's activation of the layer's channels, of length 1; ``shares`` ``(K,)`` how much
    of what they make up is each one's; ``error`` the share of the layer's norm that is left over. ``examples`` has the
    photos in which each is strongest.
    """

    layer: str
    photos: int
    vectors: torch.Tensor = field(repr=False)
    shares: tuple[float, ...]
    error: float
    examples: tuple[tuple[Example, ...], ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        photos = [[{"name": each.row.name, "strength": plain(each.strength)} for each in own] for own in self.examples]
        concepts = [{"share": plain(share), "photos": own} for share, own in zip(self.shares, photos, strict=True)]
        return {**fields_of(self, "layer photos error"), "concepts": concepts}

    @property
    def rows(self) -> list[list[str]]:
        """The rows of the table, under its head in ``sections.toml``."""
        found = []
        for number, (share, own) in enumerate(zip(self.shares, self.examples, strict=True), 1):
            rows = [each.row for each in own]
            found.append([str(number), percent(share), most_frequent(rows, 3), as_in([row.name for row in rows])])
        return found

    def picture(self, photos: RunPhotos, tile: int = 140) -> Image.Image:
        """Each concept in the photos in which it is strongest."""
        groups = []
        for number, (share, own) in enumerate(zip(self.shares, self.examples, strict=True), 1):
            pictures = ((heated(photos.picture(each.row), each.heatmap, each.row.box), each.row) for each in own)
            tiles = tuple(Tile(picture, named(row)) for picture, row in pictures)
            groups.append(Group(f"concept {number}: {share:.0%}", tiles))
        title = f"{len(self.shares)} concepts of {self.layer} in {self.photos} photos"
        return sheet(Layout(title, f"{self.error:.0%} of the layer left over", tuple(groups)), tile)


def shared_concepts(
    photos: RunPhotos, count: int = 8, *, layer: Where | None = None, rounds: int = 3, examples: int = 6, seed: int = 0
) -> SharedConcepts:
    """Factorise a layer's feature maps of all photos into a few concepts that are present or absent, never negative.

    What `explain.find_concepts` does for a few images at once is done in mini-batches here: the places of each batch
    are fitted to the concepts, and the concepts to what all batches so far say together, of which only sums are kept
    (Mairal et al., JMLR 2010). Each round goes through all photos once, and a last one says how strong each concept is
    in each photo.

    Args:
        photos: the photos of a run, and the model.
        count: how many concepts.
        layer: one layer; None finds the last feature map. Its negative values, if it has any, are left out.
        rounds: how often all photos are gone through.
        examples: how many photos stand for each concept.
        seed: of the random start.

    Raises:
        RunError: there are no photos, or the layer is zero everywhere.
        LayerError: there is no such layer.
    """
    check_count("count", count, 1, optional=False)
    model, name = photos.explainer.model, ""
    what: torch.Tensor | None = None  # the concepts (K, C); and sums over all places so far, by which they follow them
    own, cross = torch.zeros(()), torch.zeros(())
    for _ in range(rounds):
        own, cross = own * KEPT, cross * KEPT
        for batch in photos.batches(one_for_each_photo(photos.run)):
            name = name or one_layer(model, as_inputs(batch.x[:1]), layer)
            rows = _rows(feature_maps(model, batch.x, name))
            if not rows.any():
                continue
            if what is None:
                if count > min(rows.shape):
                    raise RunError(f"count must be at most {min(rows.shape)} at layer {name}, got {count}; 8 is usual")
                what = factorise(rows, count, seed)[1]
                what = what / what.norm(dim=1, keepdim=True).clamp(min=TINY)
            where = places(rows, what)
            own, cross = own + where.T @ where, cross + where.T @ rows
            for _ in range(OUTER):
                what = what * cross / (own @ what).clamp(min=TINY)
            length = what.norm(dim=1).clamp(min=TINY)  # concepts of length 1, and the sums to the places of these
            what, own, cross = what / length[:, None], own * length[:, None] * length, cross * length[:, None]
    if what is None:
        raise RunError("photos must be active somewhere in the layer for concepts, but none is; choose another layer")
    return _measured(photos, name, what, examples)


def places(rows: torch.Tensor, what: torch.Tensor) -> torch.Tensor:
    """How strong concepts ``(K, C)`` are at each place ``(P, C)``: ``(P, K)``, none negative."""
    cross, own = rows @ what.T, what @ what.T
    where = cross.clamp(min=TINY)
    for _ in range(INNER):
        where = where * cross / (where @ own).clamp(min=TINY)
    return where


def _measured(photos: RunPhotos, name: str, what: torch.Tensor, examples: int) -> SharedConcepts:
    """Go through all photos once more: how strong each concept is, where, and what is left over."""
    model, count = photos.explainer.model, len(what)
    totals, left, whole, seen = torch.zeros(count, dtype=torch.double), 0.0, 0.0, 0
    best: list[list[Example]] = [[] for _ in range(count)]
    for batch in photos.batches(one_for_each_photo(photos.run)):
        maps = feature_maps(model, batch.x, name)
        rows = _rows(maps)
        where = places(rows, what)
        totals += where.sum(0) * what.sum(1)
        left += float((rows - where @ what).square().sum())
        whole += float(rows.square().sum())
        seen += len(batch.rows)
        placed = where.reshape(len(maps), *maps.shape[2:], count).movedim(-1, 1)
        for number, own in enumerate(best):
            own += _strongest(batch, placed[:, number], examples)
            own.sort(key=lambda each: -each.strength)
            del own[examples:]
    order = totals.argsort(descending=True).tolist()
    parts = (totals / totals.sum().clamp(min=TINY)).tolist()
    shares, found = tuple(parts[k] for k in order), tuple(tuple(best[k]) for k in order)
    return SharedConcepts(name, seen, what[order].float(), shares, (left / max(whole, TINY)) ** 0.5, found)


def _strongest(batch: Batch, maps: torch.Tensor, most: int) -> list[Example]:
    """The photos of a batch in which a concept with these maps ``(N, h, w)`` is strongest, by its sum over places."""
    strength = maps.flatten(1).sum(1)
    found = []
    for i in strength.argsort(descending=True)[:most].tolist():
        heatmap = enlarge(maps[i][None, None].float(), tuple(batch.x.shape[-2:]))[0, 0]
        heatmap = (heatmap / heatmap.max().clamp(min=TINY)).clamp(0, 1)
        found.append(Example(batch.rows[i], float(strength[i]), heatmap))
    return found


def _rows(maps: torch.Tensor) -> torch.Tensor:
    """The part of feature maps ``(N, C, h, w)`` that is not negative, a row for each place."""
    return maps.clamp(min=0).movedim(1, -1).reshape(-1, maps.shape[1]).double().cpu()


DECAY = 0.01
"""By how much the length of a normal counts against it, as a share of the loss."""
STEPS, HALVINGS = 60, 8
TOLERANCE = 1e-9
SMALLEST_STEP = 1e-12  # curvature of the loss at a point that is far on its side


def normals(examples: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The normals ``(B, C)`` of the planes between groups ``(B, n, C)`` and ``(B, m, C)``, towards the first ones.

    They have the smallest mean logistic loss and 0.01 times their squared length. It is found by Newton's method for
    the weights of the points, of which there are fewer than channels as a rule.

    >>> found = normals(torch.tensor([[[2.0, 0.0], [3.0, 1.0]]]), torch.tensor([[[-2.0, 0.0], [-3.0, 1.0]]]))[0]
    >>> bool(found[0] > 0), bool(found[1].abs() < 1e-6)
    (True, True)
    """
    points = torch.cat([examples, others], 1).double()
    count = points.shape[1]
    signs = torch.cat([torch.ones(examples.shape[1]), -torch.ones(others.shape[1])]).to(points)
    gram, ridge = points @ points.mT, 2 * DECAY * count
    found = points.new_zeros(len(points), count + 1)  # the weights of the points, and the offset

    def heights(found: torch.Tensor) -> torch.Tensor:
        """How far each point lies above the plane, ``(B, n)``."""
        return (gram @ found[:, :-1, None])[..., 0] + found[:, -1:]

    def loss(found: torch.Tensor) -> torch.Tensor:
        """The loss of each plane ``(B,)``."""
        above = heights(found)
        return F.softplus(-signs * above).mean(1) + DECAY * (found[:, :-1] * (above - found[:, -1:])).sum(1)

    for _ in range(STEPS):
        margins = signs * heights(found)
        if (found[:, :-1] - signs * torch.sigmoid(-margins) / ridge).abs().max() * ridge < TOLERANCE:
            break
        step, before = _newton(gram, signs, margins, ridge) - found, loss(found)
        for _ in range(HALVINGS):  # half of the step, and half of that, where all of it goes too far
            too_far = loss(found + step) > before
            if not too_far.any():
                break
            step = torch.where(too_far[:, None], step / 2, step)
        found = found + step
    return (found[:, None, :-1] @ points)[:, 0].to(examples)


def _newton(gram: torch.Tensor, signs: torch.Tensor, margins: torch.Tensor, ridge: float) -> torch.Tensor:
    """Where the quadratic approximation of the loss is smallest: ridge regression with a weight for each point."""
    near = torch.sigmoid(margins)
    curvature = (near * (1 - near)).clamp(min=SMALLEST_STEP)
    wanted = signs * (margins + (1 - near) / curvature)
    # By Cholesky, as of every symmetric matrix: LU of several at once fails or hangs in some builds with two threads.
    factor = torch.linalg.cholesky(gram + torch.diag_embed(ridge / curvature))
    free, ones = torch.cholesky_solve(torch.stack([wanted, torch.ones_like(wanted)], 2), factor).unbind(2)
    height = free.sum(1, keepdim=True) / ones.sum(1, keepdim=True)  # with it, the weights add up to 0
    return torch.cat([free - height * ones, height], 1)


LEAST = 5  # examples
FAKES = 200
"""Concepts that mean nothing, with which one is compared; the smallest chance is 1 in one more than that."""
AT_ONCE = 2**20  # numbers of a block of points
SLACK = 1e-9  # by which equal gains differ in the last digits


@dataclass(frozen=True)
class Direction:
    """What a concept means for a class.

    ``score`` is the share of the photos of the class whose logit rises if the layer moves towards the concept, and
    ``gain`` by how much it rises for a step of length 1, where each channel is measured in its own standard deviation;
    both are means over sets of counterexamples. ``random_scores`` and ``random_gains`` have the same of concepts that
    mean nothing: as many random photos in place of the examples. ``chance`` is the share of such concepts, the one in
    question among them, whose gain is as large or larger, up or down. ``told_apart`` is how well the vectors tell
    examples that they were not made from: about 0.5, the layer does not know the concept, whatever the gain says.
    ``vector`` ``(C,)`` is the mean of the examples less that of other photos: the concept as a pattern of the layer.
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
        """Whether the concept matters: by less than one chance in twenty it does not, and the layer knows it.

        For several concepts or classes, divide the twentieth by their number, and compare ``chance`` with that.
        """
        return self.chance < 0.05 and self.told_apart > 0.5

    def to_dict(self) -> dict[str, Any]:
        return {name: plain(value) for name, value in vars(self).items() if name != "vector"}

    @property
    def cells(self) -> list[str]:
        """The row of the table, under its head in ``sections.toml``."""
        usual = math.fsum(map(abs, self.random_gains)) / len(self.random_gains)
        gains = [percent(self.score), f"{self.gain:+.3g}", f"±{usual:.3g}", f"{self.chance:.2g}"]
        return [self.target, str(self.photos), *gains, percent(self.told_apart), str(self.examples), self.layer]

    def __str__(self) -> str:
        gain = f"gain by the concept, {self.gain:+.2g} on average (p = {self.chance:.2g})"
        apart = f"{self.told_apart:.0%} of the examples are told apart in {self.layer}"
        return f"{self.score:.0%} of {self.photos} photos of {self.target} {gain}; {apart}"


def concept_direction(
    photos: RunPhotos, examples: Sequence[ImageLike], target: int | str, *, layer: Where | None = None, draws: int = 10,
    fakes: int = FAKES, most: int = 200, seed: int = 0,
) -> Direction:  # fmt: skip
    """Find out whether a class is read from what the user's examples have in common.

    A linear classifier tells the examples from random photos of the run, by the means of the layer's channels; its
    normal is the concept vector. The score is the share of the photos of the class for which the derivative of the
    logit along the vector is positive, the gain the mean of these derivatives. Vectors are found several times, each
    with two thirds of the examples and other random photos. To know what chance gives, all of it is done again with
    random photos in place of the examples, many times: a permutation test, which holds for few examples too. It
    compares gains, since scores may not tell: where a linear layer follows, the score of any vector is 0 or 1.

    Args:
        photos: the photos of a run, and the model; random photos come from it, but not from the class.
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

    Kim et al., "Interpretability Beyond Feature Attribution: Quantitative Testing with Concept Activation Vectors
    (TCAV)", ICML 2018. (Their vectors are those of all places; with means over places, a concept is the same wherever
    it lies, and fewer examples are enough. They test scores by a t-test over the sets of random photos.)
    """
    if len(examples) < LEAST:
        raise RunError(f"examples must be at least {LEAST} photos, got {len(examples)}; give more")
    check_count("draws", draws, 1, optional=False)
    check_count("fakes", fakes, 20, optional=False)
    number, label = class_in(photos.explainer, target)
    model = photos.explainer.model
    xs = [photos.explainer.as_input(image) for image in examples]
    where = one_layer(model, as_inputs(xs[0]), layer)
    own = torch.cat([_means(feature_maps(model, x, where)) for x in xs])
    others, slopes = _others_and_slopes(photos, where, number, most)
    if len(others) < 3 * len(own):
        raise RunError(f"run must have {3 * len(own)} photos of other classes, got {len(others)}; give fewer examples")
    vector = own.mean(0) - others.mean(0)
    scale = torch.cat([own, others]).std(0).clamp(min=1e-6)
    own, others, slopes = own / scale, others / scale, slopes * scale  # so that no channel counts more by its size
    generator = torch.Generator().manual_seed(seed)
    score, gain, told = _tried(own[None], others, [torch.arange(len(others))], slopes, draws, generator)
    usual_scores, usual_gains = _by_chance(others, slopes, len(own), draws, fakes, generator)
    as_large = int((usual_gains.abs() >= gain.abs() * (1 - SLACK)).sum())
    return Direction(
        layer=where, target=label, examples=len(own), photos=len(slopes), score=float(score), gain=float(gain),
        chance=(1 + as_large) / (1 + fakes), told_apart=float(told), random_scores=tuple(usual_scores.tolist()),
        random_gains=tuple(usual_gains.tolist()), vector=vector,
    )  # fmt: skip


def _by_chance(
    others: torch.Tensor, slopes: torch.Tensor, count: int, draws: int, fakes: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores and gains of concepts of ``count`` random photos, ``(fakes,)`` each."""
    found = []
    block = max(1, AT_ONCE // (draws * 2 * count * max(others.shape[1], 2 * count)))
    for first in range(0, fakes, block):
        orders = [torch.randperm(len(others), generator=generator) for _ in range(min(block, fakes - first))]
        concepts = torch.stack([others[order[:count]] for order in orders])
        found.append(_tried(concepts, others, [order[count:] for order in orders], slopes, draws, generator)[:2])
    return torch.cat([scores for scores, _ in found]), torch.cat([gains for _, gains in found])


def _tried(
    concepts: torch.Tensor, others: torch.Tensor, rest: Sequence[torch.Tensor], slopes: torch.Tensor, draws: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Scores, gains and how well examples are told apart ``(F,)`` of concepts ``(F, n, C)``.

    ``rest`` has for each concept the numbers of the other photos that it is told from.
    """
    count = concepts.shape[1]
    many = count - count // 3  # what is left shows how far a vector holds for photos that it was not made from
    used, left, first, new = [], [], [], []
    for concept, numbers in zip(concepts, rest, strict=True):
        for _ in range(draws):
            part = concept[torch.randperm(count, generator=generator)]
            order = numbers[torch.randperm(len(numbers), generator=generator)]
            used.append(part[:many])
            left.append(part[many:])
            first.append(others[order[:many]])
            new.append(others[order[many : 2 * many]])
    examples, counterexamples = torch.stack(used), torch.stack(first)
    found = normals(examples, counterexamples)
    found = found / found.norm(dim=1, keepdim=True).clamp(min=1e-12)
    middle = ((examples.mean(1) + counterexamples.mean(1)) * found).sum(1) / 2
    right = _above(torch.stack(left), found, middle) + 1 - _above(torch.stack(new), found, middle)
    rises = slopes @ found.T  # for each photo of the class and each vector
    each = ((rises > 0).double().mean(0), rises.double().mean(0), right / 2)
    scores, gains, told = (values.reshape(len(concepts), draws).mean(1) for values in each)
    return scores, gains, told


def _above(points: torch.Tensor, found: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
    """The share of points ``(B, n, C)`` on the side to which the normals ``(B, C)`` point, ``(B,)``."""
    return ((points @ found[..., None])[..., 0] > middle[:, None]).double().mean(1)


def _means(maps: torch.Tensor) -> torch.Tensor:
    return maps.flatten(2).mean(2).float().cpu()


def _others_and_slopes(photos: RunPhotos, layer: str, target: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The means of the channels in photos of other classes, and the slopes of the score in those of the class."""
    model, others, slopes = photos.explainer.model, [], []
    looked = 0
    for batch in photos.batches(one_for_each_photo(photos.run)):
        classes = [class_of(row) for row in batch.rows]
        of_class = [i for i, each in enumerate(classes) if each == target][: max(0, most - looked)]
        rest = [i for i, each in enumerate(classes) if each != target]
        if rest:
            others.append(_means(feature_maps(model, batch.x[rest], layer)))
        if of_class:
            gradients = with_gradients(model, batch.x[of_class], layer, ClassTarget(target))[1]
            slopes.append(gradients.flatten(2).sum(2).float().cpu())
            looked += len(of_class)
    if not slopes or not others:
        raise RunError(f"target must be a class of which the run has photos, among others, got {target}")
    return torch.cat(others), torch.cat(slopes)
