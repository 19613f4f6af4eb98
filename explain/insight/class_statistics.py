"""Where each class looks: its mean map, how much of it lies on the object, clusters of its maps, and mistakes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import torch
import torch.nn.functional as F

from explain._utils.errors import muted
from explain.attribution.api import attribute
from explain.insight.maps import GRID, RunMaps, as_in, fields_of, object_of, percent, plain, short
from explain.insight.reattribution import RunPhotos, one_for_each_photo
from explain.methods.base import MethodLike
from explain.methods.score_cam import means
from explain.store.reading import Row, StoredRun
from explain.targets import ClassTarget, Difference

SURE = 1.96  # standard errors within which the true mean lies in 95 of 100 cases
FILLED = 0.9
"""The share of a photo from which on an object fills it: all evidence is on it then, wherever a class looks."""
HALF = 0.5  # of what is enough that has to lie on the object
LEAST = 5
"""Photos without which nothing is said of a class: their spread could not be estimated."""


@dataclass(frozen=True, eq=False)
class Mean:
    """A mean over photos, and its standard error; NaN where no photo has a figure, or a single one for the error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: torch.Tensor) -> "Mean":
        """The mean of those that are not NaN.

        >>> Mean.of(torch.tensor([1.0, float("nan"), 3.0]))
        Mean(value=2.0, error=1.0)
        """
        known = values[~values.isnan()].double()
        count = len(known)
        error = float(known.std() / math.sqrt(count)) if count > 1 else math.nan
        return cls(float(known.mean()) if count else math.nan, error)

    def to_dict(self) -> dict[str, float | None]:
        return {"mean": plain(self.value), "error": plain(self.error)}


@dataclass(frozen=True, eq=False)
class ClassStatistics:
    """Where one class looks.

    ``mean`` and ``spread`` ``(16, 16)`` are the mean and the standard deviation of its maps, each of which adds up to
    1. ``on_object`` is the share of the evidence within the boxes, ``object_size`` the share of the photo that these
    cover, and ``excess`` how far the first is beyond the second: 0 is what an even map has, 1 has all on the object.
    Photos that the object fills (more than nine tenths) say nothing of that, and do not count for it. ``at_border`` is
    the share in the outer eighth (7/16 of an even map), ``entropy`` 1 for an even map and 0 for a single place.
    ``apart`` is how far the mean map lies from that of all other photos, beyond what chance alone would give: 0 to 1.
    ``striking`` is the figure that classes are ordered by, see `looks`.
    """

    target: str
    photos: int
    accuracy: float
    mean: torch.Tensor = field(repr=False)
    spread: torch.Tensor = field(repr=False)
    on_object: Mean
    object_size: Mean
    excess: Mean
    at_border: Mean
    entropy: Mean
    apart: float
    striking: float

    def to_dict(self) -> dict[str, Any]:
        names = "target photos accuracy on_object object_size excess at_border entropy apart striking"
        return {**fields_of(self, names), "map": plain(self.mean)}

    @property
    def cells(self) -> list[str]:
        """A row of the table, under its head in ``sections.toml``."""
        shares = (self.accuracy, self.on_object.value, self.object_size.value, self.at_border.value)
        spread = [f"{self.entropy.value:.2f}", f"{self.apart:.2f}"]
        return [self.target, str(self.photos), *map(percent, shares), *spread]


def looks(maps: RunMaps, least: int = LEAST) -> list[ClassStatistics]:
    """Say where each class looks, the most striking first.

    Where boxes are known, a class is the more striking, the less of its evidence is on the object: classes are ordered
    by how far their excess (see `ClassStatistics`) lies below that of all photos, less 1.96 standard errors, so that a
    class of
    few photos does not come first by chance. Without boxes, they are ordered by how far their mean map is apart from
    that of the other photos.

    Args:
        maps: the maps of a run.
        least: how many photos a class must have.
    """
    told = torch.where(maps.object_size <= FILLED, maps.object_size, math.nan)
    excess = (maps.on_object - told) / (1 - told)
    boxed = bool((~excess.isnan()).any())
    usual = Mean.of(excess).value
    total, squares = maps.values.double().sum(0), (maps.values.double() ** 2).sum(0)
    found = []
    for target, rows in maps.of_target.items():
        if len(rows) < least:
            continue
        own = maps[rows]
        beyond = Mean.of(excess[rows])
        apart = _apart(own.values.double(), total, squares, len(maps))
        below = usual - (beyond.value + SURE * beyond.error) if boxed else apart
        found.append(ClassStatistics(
            target, len(rows), Mean.of(own.correct).value, own.values.mean(0), own.values.std(0),
            Mean.of(own.on_object), Mean.of(own.object_size), beyond, Mean.of(own.at_border), Mean.of(own.entropy),
            apart, striking=-math.inf if math.isnan(below) else below,
        ))  # fmt: skip
    return sorted(found, key=lambda look: (-look.striking, -look.apart, look.target))


def _apart(own: torch.Tensor, total: torch.Tensor, squares: torch.Tensor, count: int) -> float:
    """How far the mean of some maps lies from that of all others: half the distance of shares that is not chance.

    The square of the distance of two means is on average the square of the true distance, and their variances.
    """
    others = count - len(own)
    if others < 2 or len(own) < 2:
        return 0.0
    mean, rest = own.mean(0), (total - own.sum(0)) / others
    noise = own.var(0) / len(own)
    of_rest = ((squares - (own**2).sum(0)) / others - rest**2) / (others - 1)
    true = ((mean - rest) ** 2 - noise - of_rest.clamp(min=0)).sum().clamp(min=0)
    # The root of the places brings it to the scale of a sum over them; 1 would be two maps without a common place.
    return float((true * mean.numel()).sqrt() / 2)


SHOWN = 6  # photos of a pair


@dataclass(frozen=True, eq=False)
class ClassEvidence:
    """What spoke for each of two classes in one photo.

    ``wrong`` and ``right`` ``(H, W)`` in [0, 1] show what raises the score of the one over that of the other, and
    ``lead`` is the difference of the two scores.
    """

    row: Row
    wrong: torch.Tensor = field(repr=False)
    right: torch.Tensor = field(repr=False)
    lead: float

    @property
    def common(self) -> float:
        """How much of the two maps lies in the same places: 0 to 1. Near 1, the classes were read from one thing."""
        wrong, right = (F.adaptive_avg_pool2d(each[None], GRID)[0] for each in (self.wrong, self.right))
        if not (wrong.any() and right.any()):
            return float("nan")
        return float(torch.minimum(wrong / wrong.sum(), right / right.sum()).sum())


@dataclass(frozen=True, eq=False)
class Confusion:
    """A class that is taken for another: how often, of how many photos of the class, and how sure the model is.

    ``back`` counts the photos of the other class that are taken for this one. ``spoken`` has what spoke for either in
    some photos, the surest mistake first, where the model was at hand.
    """

    label: str
    prediction: str
    label_class: int
    prediction_class: int
    count: int
    of: int
    back: int
    probability: float
    photos: tuple[str, ...]
    spoken: tuple[ClassEvidence, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        found = fields_of(self, "label prediction count of back probability photos")
        if self.spoken:
            found["spoken"] = [{"name": each.row.name, **fields_of(each, "lead common")} for each in self.spoken]
        return found

    @property
    def cells(self) -> list[str]:
        """A row of the table, under its head in ``sections.toml``."""
        counts = (f"{self.count}", f"{self.of}", f"{self.back}", f"{self.probability:.0%}")
        return [self.label, self.prediction, *counts, as_in(self.photos)]


@dataclass(frozen=True)
class OddEvidence:
    """A photo of which the part that is enough lies off the object, or whose answer needs nothing of the object.

    ``size`` is the share of the photo in the set of regions, and ``on_object`` the share of the set on the object; NaN
    for an answer that needs nothing of the whole photo.
    """

    photo: str
    target: str
    finding: str
    size: float
    on_object: float

    def to_dict(self) -> dict[str, Any]:
        return fields_of(self, "photo target finding size on_object")

    @property
    def cells(self) -> list[str]:
        """A row of the table, under its head in ``sections.toml``."""
        return [short(self.photo), self.target, self.finding, f"{self.size:.1%}", percent(self.on_object)]


def odd_evidence(run: StoredRun) -> list[OddEvidence] | None:
    """List photos whose smallest evidence is not on the object; None for a run without `Sufficient` and `Necessary`.

    That is where less than half of what is enough lies in the boxes of the object, where nothing of what is needed
    does, and where the answer is the same without the whole photo. Photos without boxes are left out of the first two.
    """
    methods = [name for name in ("sufficient", "necessary") if name in run.methods]
    found = []
    for row in (row for name in methods for row in run.rows(name)):
        region, inside, enough = object_of(row), row.heatmap > 0, row.method == "sufficient"
        if enough and row.metrics.get("set_size") == 0:
            found.append(OddEvidence(row.name, row.target, "needs nothing of the photo", 0.0, math.nan))
        elif inside.any() and region.any():
            share, size = float(inside[region].sum() / inside.sum()), float(inside.float().mean())
            if enough and share < HALF:
                found.append(OddEvidence(row.name, row.target, "enough is off the object", size, share))
            elif not enough and not share:
                found.append(OddEvidence(row.name, row.target, "needs nothing of the object", size, share))
    return sorted(found, key=lambda each: (each.finding, each.on_object)) if methods else None


_PAIRS = (resources.files("explain.insight") / "mistakes.sql").read_text("utf-8")
_PHOTOS = "SELECT name FROM photos WHERE label_class = ? AND prediction_class = ? ORDER BY probability DESC, id LIMIT ?"


def pairs(run: StoredRun, most: int = 20) -> list[Confusion]:
    """Say which classes are taken for which, the most frequent pair first; photos whose label is known count."""
    found = []
    for label, prediction, right, wrong, count, sure, of, back in run.query(_PAIRS, (most,)):
        photos = tuple(name for (name,) in run.query(_PHOTOS, (right, wrong, SHOWN)))
        found.append(Confusion(label, prediction, right, wrong, count, of, back, float(sure), photos))
    return found


def with_reasons(found: Sequence[Confusion], photos: RunPhotos, method: MethodLike) -> list[Confusion]:
    """Explain the mistakes of some pairs: the difference of the two scores is the target, either way round.

    Args:
        found: the pairs.
        photos: the photos of the run, and the model.
        method: how to explain.

    Raises:
        ExplainError: the method cannot explain the model.
    """
    model, done = photos.explainer.model, []
    for pair in found:
        wrong, right = ClassTarget(pair.prediction_class), ClassTarget(pair.label_class)
        rows = one_for_each_photo(photos.run, label=pair.label, correct=False)
        spoken = []
        for batch in photos.batches(row for row in rows if row.name in pair.photos):
            with muted():  # of maps that are zero: nothing speaks for one of the classes, as the picture shows
                for_wrong = attribute(model, batch.x, method, target=Difference(wrong, right))
                for_right = attribute(model, batch.x, method, target=Difference(right, wrong))
            maps = (for_wrong.heatmap.cpu(), for_right.heatmap.cpu(), for_wrong.score.tolist())
            spoken += [ClassEvidence(*each) for each in zip(batch.rows, *maps, strict=True)]
        done.append(replace(pair, spoken=tuple(sorted(spoken, key=lambda each: pair.photos.index(each.row.name)))))
    return done


FLOOR = 1e-3  # below it, eigenvalues count as the same: as zero
STARTS = 10  # of the means, of which the best end is taken


def distances(maps: torch.Tensor) -> torch.Tensor:
    r"""How far maps of shares ``(N, ...)`` lie apart, ``(N, N)``: 0 if they are the same, 1 without a common place.

    The Hellinger distance :math:`\sqrt{1 - \sum_i \sqrt{p_i q_i}}`.

    >>> distances(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))[0]
    tensor([0., 1., 0.], dtype=torch.float64)
    """
    roots = maps.flatten(1).double().sqrt()
    apart: torch.Tensor = (1 - roots @ roots.T).clamp(0, 1).sqrt()
    apart.fill_diagonal_(0)
    return apart


def spectrum(apart: torch.Tensor, most: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Look at points as a graph in which each is joined to its nearest neighbours.

    Twice as many neighbours as the logarithm of the number of points, at least 5: the logarithm keeps a graph together
    (von Luxburg, 2007), and with no more than that, groups of some tens of points fall apart by chance. An edge that
    only one end asks for counts half. Neighbours weigh :math:`\exp(-d^2 / \sigma_i \sigma_j)`, where
    :math:`\sigma_i` is the distance to the last neighbour (Zelnik-Manor and Perona, NIPS 2004).

    Args:
        apart: their distances ``(N, N)``.
        most: how many groups there may be.

    Returns:
        The smallest eigenvalues of the normalised Laplacian ``(E,)``, which lie between 0 and 2, and the eigenvectors
        ``(N, E)``.
    """
    count = len(apart)
    near = min(count - 1, max(5, round(2 * math.log(count))))
    order = apart.clone().fill_diagonal_(math.inf).topk(near, largest=False)
    scale = order.values[:, -1].clamp(min=1e-12)
    close = torch.exp(-order.values.square() / (scale[:, None] * scale[order.indices]))
    weights = torch.zeros_like(apart).scatter_(1, order.indices, close)
    weights = (weights + weights.T) / 2
    degree = weights.sum(1).clamp(min=1e-12).rsqrt()
    laplacian = torch.eye(count, dtype=apart.dtype) - degree[:, None] * weights * degree
    values, vectors = torch.linalg.eigh(laplacian)
    return values[: most + 1].clamp(min=0), vectors[:, : most + 1]


def number_of_groups(values: torch.Tensor) -> tuple[int, float]:
    """How many groups there are, from 2, by the eigenvalues of `spectrum`, and the largest gap, behind as many of them.

    A gap is the factor by which an eigenvalue is larger than the one before. Differences would say less: eigenvalues
    lie the further apart, the larger they are, also where there are no groups.
    """
    gaps = (values[1:] + FLOOR) / (values[:-1] + FLOOR)
    count = int(gaps[1:].argmax()) + 2 if len(gaps) > 1 else 1
    return count, float(gaps[count - 1])


def grouped(vectors: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    """Put points into groups by their places among the first eigenvectors ``(N, E)``: a number for each, ``(N,)``.

    Each point is brought to length 1 there (Ng, Jordan and Weiss, NIPS 2001).
    """
    best, least = torch.zeros(len(vectors), dtype=torch.long), math.inf
    places = vectors[:, :count] / vectors[:, :count].norm(dim=1, keepdim=True).clamp(min=1e-12)
    for start in range(STARTS if count > 1 else 0):
        apart = torch.cdist(places, means(places, count, seed + start))
        total = float(apart.amin(1).square().sum())
        if total < least:
            best, least = apart.argmin(1), total
    return best


def silhouettes(apart: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """How well each point fits its group, ``(N,)``: 1 if the others are far away, below 0 if another group is nearer.

    The mean distance to the nearest other group less that to its own, over the larger (Rousseeuw, 1987); 0 for a
    point that is alone.
    """
    numbers: torch.Tensor = torch.unique(groups)
    if len(numbers) < 2:
        return torch.zeros(len(apart), dtype=apart.dtype)
    member = (groups[:, None] == numbers).to(apart)
    sizes = member.sum(0)
    sums = apart @ member
    own = member.bool()
    to_own = sums[own] / (sizes - 1).clamp(min=1).expand_as(sums)[own]
    to_other = (sums / sizes).masked_fill(own, math.inf).amin(1)
    found = (to_other - to_own) / torch.maximum(to_own, to_other).clamp(min=1e-12)
    return torch.where(sizes.expand_as(sums)[own] < 2, 0.0, found)


LEAST_MAPS = 20
"""Maps of a class without which no clusters are looked for."""
SMALLEST = 4  # photos of a cluster that is told
MOST = 8  # clusters of a class
AT_ONCE = 2000
"""Maps of a class that are clustered: of more, as many are drawn by chance."""
CENTRAL = 9  # photos that stand for a cluster
MAX_LIKENESS = 0.9
"""The cosine of two mean maps from which on they show the same places."""


@dataclass(frozen=True, eq=False)
class Cluster:
    """Photos of one class with the same reason.

    ``stands_out`` is the mean silhouette of its maps: near 1, they are alike and unlike all others of the class, and
    about 0, they differ from the others as much as from each other. ``share`` is its part of the maps of the class,
    ``mean`` ``(16, 16)`` their mean. ``gap`` is the largest factor between
    eigenvalues of the class that follow each other, whose place says how many clusters there are. ``photos`` names
    those that are most alike the rest of the cluster, ``members`` all of them, and ``rows`` has the numbers of its
    maps. ``excess`` ``(16, 16)`` is its mean map less that of the others of the class.
    """

    target: str
    size: int
    share: float
    stands_out: float
    gap: float
    of: int
    accuracy: float
    on_object: Mean
    at_border: Mean
    entropy: Mean
    photos: tuple[str, ...]
    mean: torch.Tensor = field(repr=False)
    rows: torch.Tensor = field(repr=False)
    members: tuple[str, ...] = field(default=(), repr=False)
    excess: torch.Tensor | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        names = "target size share stands_out gap accuracy on_object at_border entropy photos"
        return {**fields_of(self, names), "clusters_of_target": self.of, "map": plain(self.mean)}

    @property
    def cells(self) -> list[str]:
        """A row of the table, under its head in ``sections.toml``."""
        shares = (self.accuracy, self.on_object.value, self.at_border.value)
        size = [str(self.size), percent(self.share), f"{self.stands_out:.2f}"]
        return [self.target, *size, *map(percent, shares), as_in(self.photos)]


def reasons(maps: RunMaps, *, least: int = LEAST_MAPS, most: int = MOST, seed: int = 0) -> list[Cluster]:
    """Cluster the maps of each class, and rank all clusters by how much they stand out.

    Args:
        maps: the maps of a run.
        least: how many maps a class must have.
        most: how many clusters a class may have.
        seed: of what is drawn by chance.

    Lapuschkin et al., "Unmasking Clever Hans predictors and assessing what machines really learn", Nature
    Communications 2019 (SpRAy).
    """
    found = []
    for rows in maps.of_target.values():
        if len(rows) >= least:
            found += clusters_of(maps, rows, most=most, seed=seed)
    return sorted(found, key=lambda cluster: (-cluster.stands_out, -cluster.size, cluster.target))


def clusters_of(maps: RunMaps, rows: torch.Tensor, *, most: int = MOST, seed: int = 0) -> list[Cluster]:
    """Cluster the maps with these numbers; those of one class that has a single cluster are none.

    A silhouette says how much nearer the maps of a group are to each other than to the rest, and not how far that is.
    So a group whose mean map shows the same places as that of the others has no reason of its own, and is left out.
    """
    if len(rows) > AT_ONCE:
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:AT_ONCE].sort().values]
    apart = distances(maps.values[rows])
    values, vectors = spectrum(apart, min(most, len(rows) - 1))
    count, gap = number_of_groups(values)
    groups = grouped(vectors, count, seed)
    fits = silhouettes(apart, groups)
    numbers = sorted(set(groups.tolist()))
    found: list[Cluster] = []
    for number in numbers:
        inside = (groups == number).nonzero().flatten()
        if len(inside) < SMALLEST or len(numbers) < 2:
            continue
        own = maps[rows[inside]]
        mean = own.values.mean(0)
        mean_of_others = maps.values[rows[groups != number]].mean(0)
        if F.cosine_similarity(mean.flatten(), mean_of_others.flatten(), dim=0) >= MAX_LIKENESS:
            continue
        central = apart[inside][:, inside].mean(1).argsort()[:CENTRAL]
        found.append(Cluster(
            own.targets[0], len(inside), len(inside) / len(rows), float(fits[inside].mean()), gap, len(numbers),
            Mean.of(own.correct).value, Mean.of(own.on_object), Mean.of(own.at_border), Mean.of(own.entropy),
            tuple(own.names[i] for i in central.tolist()), mean, rows[inside], members=own.names,
            excess=mean - mean_of_others,
        ))  # fmt: skip
    return found
