"""Assertions for the tests of a model: that it ignores a region, uses one, agrees with another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from explain._utils.errors import ArgumentError, ExplainError, ModelError, keywords
from explain._utils.random_numbers import seeded
from explain.baselines.replacements import BaselineLike, get_baseline
from explain.insight.maps import in_percent, shares_of
from explain.methods.base import MethodLike
from explain.metrics.intervals import MeanInterval
from explain.testing.regions import RegionLike, masks_elsewhere
from explain.testing.subject import LEAST, ModelLike, ModelUnderTest

MOST_ASKED = 10_000  # photos that a message asks for: of more, another limit is the remedy
BASELINES = ("mean", "neighbours", "noise")


def points(share: float) -> str:
    """Write a share, or a difference of shares, in hundredths ("points") with one decimal place."""
    return f"{100 * share:.1f}".replace("-0.0", "0.0")


def in_points(figure: MeanInterval) -> str:
    """Write the mean of a figure over photos with its 95 % interval."""
    return f"{points(figure.mean)} points (95 %: {points(figure.low)} to {points(figure.high)})"


@dataclass(frozen=True, kw_only=True)
class RegionUse:
    """How much a model uses a region, over some photos: ``change`` is how much more the class's
    probability changes without it than without an equal area elsewhere."""

    photos: int
    change: MeanInterval
    # the mean change without the region, and without the area elsewhere
    without: float
    control: float
    # of the map, and of the photo, in the region; ``excess`` is the first less the second
    share: float
    area: float
    excess: MeanInterval | None
    limit: float
    method: str
    settings: str = field(repr=False)

    def __str__(self) -> str:
        """The figures in one line, in points (hundredths)."""
        covered = (
            f"without the region, the probability changes by {points(self.without)} points, "
            f"without an equal area elsewhere by {points(self.control)}: more by "
            f"{in_points(self.change)}"
        )
        lies = ""
        if self.excess is not None:
            lies = (
                f"; {in_percent(self.share, 1)} of the {self.method} maps lie in it, and "
                f"{in_percent(self.area, 1)} of the area: more by {in_points(self.excess)}"
            )
        return f"{covered}{lies}; limit {points(self.limit)}; {self.photos} photos, {self.settings}"


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far two models agree on some photos: ``change`` is the largest change of a probability,
    ``moved`` the share of the map that lies elsewhere, None where no map was asked for."""

    photos: int
    change: MeanInterval
    moved: MeanInterval | None
    # the share that lies elsewhere between maps of different photos
    usual: float
    # the number of photos with another best class
    other_answers: int
    limit: float
    map_limit: float
    method: str

    def __str__(self) -> str:
        """The figures in one line, in points (hundredths)."""
        answers = (
            f"the largest probability changes by {in_points(self.change)}, limit "
            f"{points(self.limit)}, and {self.other_answers} answers are others"
        )
        maps = ""
        if self.moved is not None:
            maps = (
                f"; {in_points(self.moved)} of the {self.method} maps lie elsewhere, limit "
                f"{points(self.map_limit)} (between different photos {points(self.usual)})"
            )
        return f"{answers}{maps}; {self.photos} photos"


@keywords()
def assert_ignores(
    model: ModelLike,
    photos: Any,
    region: RegionLike,
    *,
    target: int | str | Sequence[int | str] | None = None,
    limit: float = 0.05,
    method: MethodLike | None = "hirescam",
    baselines: Sequence[BaselineLike] = BASELINES,
    placements: int = 5,
    seed: int = 0,
) -> RegionUse:
    """Assert that a model does not use a region of photos, such as the corner with a watermark.

    Two figures must not exceed the limit, with their 95 % intervals over the photos: by how much
    the probability of the class changes more without the region than without an equal area, of the
    same shape, elsewhere (the median of several places, the mean of several baselines); and how
    much more of the map lies in the region than its share of the area. The photos must show what
    the model may not use.

    Args:
        model: a module, a name, or an `Explainer`, which knows how photos become inputs.
        photos: a folder, paths, PIL images, or a tensor of inputs ``(N, C, H, W)``; 8 or more.
        region: a box x0 y0 x1 y1 in pixels of the photo (of the input, where photos are tensors),
            or in shares of its sides (no edge above 1); a mask ``(H, W)``; a function of the photo
            that returns either; or a list with one for each photo. Half of what the model sees at
            most.
        target: a class, or one for each photo; by default the one that the model gives each photo.
        limit: of both figures; 0.05 is five hundredths of a probability, and of a map.
        method: whose map; None leaves the map out, as does a model none of whose layers has a map
            where the method looks at one.
        baselines: what stands for the covered pixels.
        placements: how many places elsewhere.
        seed: of these places.

    Returns:
        The figures; they print themselves.

    Raises:
        AssertionError: the model uses the region.
        ExplainError: the photos are too few to decide, or the region leaves no room.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> photos = torch.zeros(9, 1, 8, 8)
    >>> photos[:, :, 4:6, 4:6] = 1
    >>> assert_ignores(model, photos, (0, 0, 2, 2), method=None).change.mean <= 0
    True
    """
    use = _region_use(model, photos, region, target, limit, method, baselines, placements, seed)
    figures = [use.change] if use.excess is None else [use.change, use.excess]
    if any(figure.low > limit for figure in figures):
        raise AssertionError(f"the model must ignore the region, but uses it: {use}")
    for figure in figures:
        _check_decided(figure, limit, use)
    return use


@keywords()
def assert_uses(
    model: ModelLike,
    photos: Any,
    region: RegionLike,
    *,
    target: int | str | Sequence[int | str] | None = None,
    limit: float = 0.05,
    method: MethodLike | None = "hirescam",
    baselines: Sequence[BaselineLike] = BASELINES,
    placements: int = 5,
    seed: int = 0,
) -> RegionUse:
    """Assert that a model uses a region of photos, such as the object.

    The probability of the class must change by more than the limit without the region, beyond what
    an equal area elsewhere does. And the map must not say otherwise: it does if less of it lies in
    the region than its share of the area.
    Arguments, result and errors as for `assert_ignores`.

    >>> class Centre(torch.nn.Module):
    ...     def forward(self, x):
    ...         centre = x[:, 0, 3:5, 3:5].mean((1, 2))
    ...         return torch.stack([centre, -centre], 1)
    >>> photos = torch.rand(9, 1, 8, 8)
    >>> photos[:, :, 3:5, 3:5] = 1
    >>> assert_uses(Centre(), photos, (3, 3, 5, 5), method=None).change.low > 0.05
    True
    """
    use = _region_use(model, photos, region, target, limit, method, baselines, placements, seed)
    below = use.change.high <= limit or (use.excess is not None and use.excess.high <= 0)
    if below:
        raise AssertionError(f"the model must use the region, but does not: {use}")
    _check_decided(use.change, limit, use)
    return use


@keywords()
def assert_agrees(
    old_model: ModelLike,
    new_model: ModelLike,
    photos: Any,
    *,
    limit: float = 0.05,
    map_limit: float = 0.2,
    method: MethodLike | None = "hirescam",
) -> Agreement:
    """Assert that a new model, such as a smaller one, answers as the old one, for the same reasons.

    The largest change of a probability, and the share of the map that lies elsewhere, must not
    exceed their limits, with their 95 % intervals over the photos. The maps are those of the old
    model's class.

    Args:
        old_model, new_model: as for `assert_ignores`, with the same classes.
        photos: as for `assert_ignores`.
        limit: of the mean change of a probability.
        map_limit: of the mean share of the map.
        method: whose map; None leaves the map out, as for `assert_ignores`.

    Returns:
        The figures; they print themselves.

    Raises:
        AssertionError: the models do not agree.
        ExplainError: the photos are too few to decide; the models have other classes.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> assert_agrees(model, model, torch.rand(9, 1, 8, 8), method=None).change.mean
    0.0
    """
    old = ModelUnderTest(old_model, photos)
    new = ModelUnderTest(new_model, photos)
    method = old.fitting(new.fitting(method))
    changes = []
    moved_shares = []
    usual_shares = []
    other_answers = 0
    for batch in old.batches():
        x = torch.stack([photo.x for photo in batch])
        new_x = torch.stack([new.photos[photo.place].x for photo in batch])
        probabilities = old.probabilities(x)
        new_probabilities = new.probabilities(new_x)
        if probabilities.shape != new_probabilities.shape:
            raise ModelError(
                f"new_model must have the {probabilities.shape[1]} classes of the old one, got "
                f"{new_probabilities.shape[1]}; compare models of the same classes"
            )
        changes.append((new_probabilities - probabilities).abs().amax(1))
        classes = probabilities.argmax(1)
        other_answers += int((new_probabilities.argmax(1) != classes).sum())
        if method is not None:
            maps = shares_of(old.heatmaps(x, method, classes))
            new_maps = shares_of(new.heatmaps(new_x, method, classes))
            maps_of_others = maps.roll(1, 0)  # those of the photos before
            # what moves differs where it was, and where it is: half of the sum
            moved_shares.append((maps - new_maps).abs().sum((1, 2)) / 2)
            usual_shares.append((maps - maps_of_others).abs().sum((1, 2)) / 2)
    name = _name(method)
    agreement = Agreement(
        photos=len(old.photos),
        change=MeanInterval.of(torch.cat(changes)),
        moved=_interval(torch.cat(moved_shares), name) if moved_shares else None,
        usual=float(torch.cat(usual_shares).nanmean()) if usual_shares else math.nan,
        other_answers=other_answers,
        limit=limit,
        map_limit=map_limit,
        method=name,
    )
    figures_with_limits = [(agreement.change, limit)]
    if agreement.moved is not None:
        figures_with_limits.append((agreement.moved, map_limit))
    if any(figure.low > its_limit for figure, its_limit in figures_with_limits):
        raise AssertionError(f"the models must agree, but do not: {agreement}")
    for figure, its_limit in figures_with_limits:
        _check_decided(figure, its_limit, agreement)
    return agreement


def _name(method: MethodLike | None) -> str:
    """The name of a method, given by name or as an object, for the messages of an assertion; empty
    where no map is asked for."""
    return method if isinstance(method, str) else getattr(method, "name", "")


def _check_decided(figure: MeanInterval, limit: float, result: object) -> None:
    """Refuse to decide if the limit lies within the figure's interval; says how many photos would
    do, as the interval shrinks with the root of their number.
    """
    # a figure that equals the limit does not exceed it, so that an interval that ends there decides
    if not figure.low <= limit < figure.high:
        return
    distance = abs(figure.mean - limit)
    needed = figure.count * (figure.half / distance) ** 2 if distance else math.inf
    remedy = "take another limit"
    if needed < MOST_ASKED:
        with_margin = math.ceil(1.2 * needed)  # as the interval is an estimate itself
        remedy = f"about {with_margin} would do"
    raise ExplainError(
        f"photos must be more to decide, got {figure.count}: the limit {points(limit)} lies "
        f"within the interval of {in_points(figure)}; {remedy} ({result})"
    )


def _region_use(
    model: ModelLike,
    photos: Any,
    region: RegionLike,
    target: Any,
    limit: float,
    method: MethodLike | None,
    baselines: Sequence[BaselineLike],
    placements: int,
    seed: int,
) -> RegionUse:
    """Cover the region and equal areas elsewhere (by the seed and the photos' order), in batches,
    and take the map's share in it. ``limit`` is only noted in the result.
    """
    if placements < 1:
        raise ArgumentError(f"placements must be 1 or more, got {placements}; 5 is usual")
    subject = ModelUnderTest(model, photos, region)
    method = subject.fitting(method)
    fillings = [get_baseline(baseline, subject.explainer.preprocess) for baseline in baselines]
    if not fillings:
        raise ArgumentError("baselines must name what covers pixels, got none; 'mean' is usual")
    generator = seeded(seed)
    figures = []  # by batch (4, N): change without the region, without a control, share, area
    for batch in subject.batches():
        x = torch.stack([photo.x for photo in batch])
        classes = subject.classes(batch, x, target)
        region_masks = torch.stack([photo.mask for photo in batch])
        places = [masks_elsewhere(photo.mask, placements, generator) for photo in batch]
        without, control = subject.changes(x, classes, region_masks, torch.stack(places), fillings)
        shares = torch.full_like(without, math.nan)
        if method is not None:
            heat = subject.heatmaps(x, method, classes)
            shares = (heat * region_masks).sum((1, 2)) / heat.sum((1, 2))
        area = region_masks.double().mean((1, 2))
        figures.append(torch.stack([without, control, shares, area]))
    without, control, shares, area = torch.cat(figures, 1).unbind()  # of all photos
    excess = None
    if method is not None:
        excess = _interval(shares - area, _name(method))
    return RegionUse(
        photos=len(area),
        change=MeanInterval.of(without - control),
        without=float(without.mean()),
        control=float(control.mean()),
        share=float(shares.nanmean()),
        area=float(area.mean()),
        excess=excess,
        limit=limit,
        method=_name(method),
        settings=f"{len(fillings)} baselines, {placements} places, seed {seed}",
    )


def _interval(values: torch.Tensor, method: str) -> MeanInterval:
    """Return the mean of the values ``(N,)`` of N photos with its interval, without those that are
    NaN, as they are where a map is zero all over; ``method`` is the name of its method.
    """
    interval = MeanInterval.of(values)
    if interval.count < LEAST:
        raise ExplainError(
            f"method {method} must give {LEAST} maps that are not zero, got {interval.count} for "
            f"{len(values)} photos; take another method, or method=None"
        )
    return interval
