"""Extremal perturbations: the smooth mask of a given area through which the score is highest."""

import math

import torch
import torch.nn.functional as F

from explain._utils.errors import MethodError
from explain.baselines import Defocus
from explain.baselines.base import Baseline
from explain.engine import Evidence
from explain.engine.perturbations import GivenSamples, Scores, Search, Steps, samples_of
from explain.hooks.preserve import recording
from explain.methods.base import register
from explain.methods.estimates import SearchMethod
from explain.methods.path import ScoreAndGradient

COLDNESS = 20.0  # the inverse of the temperature of the smooth maximum


class SmoothMasks:
    """Masks ``(b, 1, H, W)`` from values ``(b, 1, h, w)`` on a lattice with a point at each
    ``step``. Full masks reach beyond the image by sigma, so that their area counts there too."""

    def __init__(self, size: tuple[int, ...], step: int, sigma: float, like: torch.Tensor) -> None:
        """Compute the kernel of the smooth maximum for images of ``size`` ``(H, W)``; ``step`` and
        ``sigma`` are in pixels, and ``like`` gives the type and the device.
        """
        self._size = size
        self._step = step
        self.lattice = tuple(math.ceil(side / step) for side in size)
        self._beyond = math.ceil(sigma / step)  # cells beyond the lattice
        self._radius = 1 + self._beyond  # points around a pixel that count, in each direction
        pixels_in_cell = torch.arange(step, dtype=torch.float64)
        points = torch.arange(-self._radius, self._radius + 1, dtype=torch.float64)
        # squared distances along one side of pixels in a cell from points, (2r + 1, step)
        squared_distances = (pixels_in_cell - step * points[:, None]).square()
        # over sigma, (2r + 1, 2r + 1, step, step)
        distance = (
            squared_distances[:, None, :, None] + squared_distances[None, :, None, :]
        ).sqrt() / sigma
        # k(z) = exp(-2 max(0, z - 1/2)^2), z the distance over sigma
        kernel = torch.exp(-2 * (distance - 0.5).clamp(min=0).square())
        # as the points in `full`: rows and columns of points, then cells and pixels in turn
        self._kernel = kernel.to(like)[:, :, None, :, None, :]

    def full(self, values: torch.Tensor) -> torch.Tensor:
        """Differentiable masks ``(b, 1, H + margins, W + margins)`` from values ``(b, 1, h, w)`` of
        the lattice, which reach beyond the image by ``sigma``.
        """
        # the cells beyond the image have points around them, too
        margin = self._beyond + self._radius
        window = 2 * self._radius + 1
        padded = F.pad(values[:, 0], [margin] * 4)
        points_around = padded.unfold(1, window, 1).unfold(2, window, 1)
        # (2r + 1, b, 2r + 1, cells, 1, cells, 1)
        points = points_around.permute(3, 0, 4, 1, 2)[:, :, :, :, None, :, None]
        # the smooth maximum of bumps b is the sum of b e^(c b) over that of e^(c b)
        weighted = weights = values.new_zeros(())
        # one row of points at a time, to save memory
        for row, kernel in zip(points, self._kernel, strict=True):
            bumps_here = row * kernel
            exponentials = torch.exp(COLDNESS * bumps_here)
            weighted = weighted + (bumps_here * exponentials).sum(1)
            weights = weights + exponentials.sum(1)
        masks = (weighted / weights).flatten(3, 4).flatten(1, 2)[:, None]  # from cells to pixels
        # only the first pixel of the last cells counts, where their point lies
        past_last = self._step - 1
        return masks[..., : masks.shape[2] - past_last, : masks.shape[3] - past_last]

    def cropped(self, full: torch.Tensor) -> torch.Tensor:
        """Cut the part on the image ``(b, 1, H, W)`` out of masks with margins, as `full` returns
        them."""
        start = self._beyond * self._step
        height, width = self._size
        return full[..., start : start + height, start : start + width]


RATE = 0.01
MOMENTUM = 0.9
WEIGHT = 300.0  # weight of the area against the score, at the first step
GROWTH = 1.0035  # factor of the weight with each step
POINTS = 32  # of the lattice along the shorter side, usually: one in 7 pixels of 224


@register
class ExtremalPerturbation(SearchMethod):
    r"""Smooth mask of a given area that maximises the score.

    Look for the smooth mask of a given area through which the score is highest.

    For each area a, gradient ascent on :math:`y(m \otimes x) -
    \lambda\,\mathrm{mean}\,(\mathrm{sort}(m) - r_a)^2`, where :math:`m \otimes x` is the photo,
    blurred where the mask is small, and :math:`r_a` is 1 in its last share a and 0 elsewhere;
    :math:`\lambda` grows from 300 by 0.35 % at each step. The mask is the smooth maximum of bumps
    on a lattice, which begin at 1. Every other step sees the photo mirrored. The model must have
    gradients.

    All that is optimised are the values on the lattice: the model's parameters are not touched.

    Args:
        area: the share of the mask that is kept; of several, each has a mask, and the map is their
            mean. As in the authors' program, masks reach beyond the photo by sigma, so the share of
            the photo may be 1.4 times as much.
        steps: of the ascent; each runs the photo forward and back once for each area.
        keeps: None, or the share of the score that is to be kept: the map is then the mask of the
            smallest area that keeps it, or of the largest if none does.
        baseline: what is seen where the photo is not: one of `explain.baselines` that changes
            evenly with the mask, or its name; the paper's is the blur of ``defocus``.
        step: pixels from one point of the lattice to the next; None takes 7 in 224 of the shorter
            side.
        sigma: the reach of a point in pixels; None takes three steps.

    Returns:
        ``(N, H, W)`` from 0 to 1: what the mask keeps.

    Fong, Patrick and Vedaldi, "Understanding Deep Networks via Extremal Perturbations and Smooth
    Masks", ICCV 2019 (arXiv:1910.08485).

    >>> import explain
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> a = explain.attribute(
    ...     model, torch.rand(1, 3, 16, 16), ExtremalPerturbation(area=0.2, steps=5), target=1
    ... )
    >>> a.values.shape, a.samples
    (torch.Size([1, 16, 16]), 5)
    """

    area: tuple[float, ...] = (0.1,)
    steps: int = 800
    keeps: float | None = None
    baseline: Baseline = Defocus()
    step: int | None = None
    sigma: float | None = None

    minimums = {"steps": 1, "step": 1, "sigma": 1e-6}
    below = SearchMethod.below | {"area": 1}

    def searches(self, evidence: Evidence) -> list[Search]:
        """One search of `ExtremalPerturbation` for all images together, since their masks ascend in
        the same batches."""
        if len(evidence.size) != 2:
            raise MethodError(
                f"input of {self.name} must be images, got {evidence.inputs.shape}; take occlusion"
            )
        return [_Ascent(self, evidence)]


class _Ascent(Search):
    """The search of `ExtremalPerturbation`: gradient ascent of the masks of all N images and A
    areas at once, those of the first image first."""

    def __init__(self, method: ExtremalPerturbation, evidence: Evidence) -> None:
        """Start with masks of ones for N images and A areas, ``i * A + a`` for area ``a`` of image
        ``i``. ``_wanted`` ``(N A, places)``: the sorted values of a mask of exactly that area.
        """
        x = evidence.inputs
        areas = len(method.area)
        step = method.step or max(1, min(evidence.size) // POINTS)
        self._method = method
        self._x = x
        self._smooth = SmoothMasks(evidence.size, step, method.sigma or 3.0 * step, like=x)
        # the image of each mask
        self._owners = torch.arange(len(x), device=x.device).repeat_interleave(areas)
        # the values on the lattice, which are what ascends
        self._values = x.new_ones((len(self._owners), 1, *self._smooth.lattice))
        self._cover = method.baseline.covering(x)
        self._momentum: torch.Tensor | None = None
        self._whole_score = evidence.score
        # the latest masks, and the scores of the images through them
        self._masks = x.new_ones((len(self._owners), 1, *evidence.size))
        self._scores = evidence.score.repeat_interleave(areas)
        self.images = len(x)
        area = torch.tensor(method.area).to(x).repeat(len(x))[:, None]
        places = self._smooth.full(self._values)[0].numel()
        numbers = torch.arange(places, device=x.device)
        # zeros, then as many ones as the area has places
        self._wanted = (numbers >= (places * (1 - area)).floor()).to(x)

    @property
    def planned(self) -> int:
        return self._method.steps * len(self._owners)

    def steps(self) -> Steps:
        """Take all steps; an interrupt leaves the masks of the last one."""
        for number in range(self._method.steps):
            yield from self._step(number)

    def map(self) -> torch.Tensor:
        """The map of `ExtremalPerturbation` ``(N, H, W)`` from the latest masks: their mean over
        the areas; with ``keeps``, the mask of the smallest area that keeps that share of the score.
        """
        areas = torch.tensor(self._method.area, device=self._masks.device)
        masks = self._masks.reshape((-1, len(areas), *self._masks.shape[2:]))
        if self._method.keeps is None:
            return masks.mean(1)
        score = self._whole_score[:, None].to(self._scores)
        # a share of a negative score, too, is below it
        least_score = score - (1 - self._method.keeps) * score.abs()
        order = areas.argsort()
        keeps_score = (self._scores.reshape(-1, len(areas)) >= least_score)[:, order]
        keeps_score[:, -1] = True  # the largest area, if none keeps enough
        smallest = order[keeps_score.int().argmax(1)]
        return masks.take_along_dim(smallest[:, None, None, None], 1)[:, 0]

    def _step(self, number: int) -> Steps:
        """One step of gradient ascent with momentum in all masks: yields masked images for scores
        and gradients in pixels. Every other one, from the first on, mirrors images.
        """
        areas = len(self._method.area)
        with recording(True):  # gradients may be off around a search
            values = self._values.clone().requires_grad_()
            full = self._smooth.full(values)
            masks = self._smooth.cropped(full)
            photos = self._cover(self._owners, masks)
            if not photos.requires_grad:  # the baseline has no gradient in the mask
                baseline = self._method.baseline.name
                name = self._method.name
                raise MethodError(
                    f"baseline of {name} must change evenly with a mask, got {baseline}; take blur"
                )
            seen = photos.flip(-1) if number % 2 == 0 else photos
        # the masks of an image stand together, one for each area
        detached = seen.detach()
        samples = samples_of(
            [areas] * len(self._x),
            detached.device,
            lambda images, numbers: detached[images * areas + numbers],
        )
        perturbation = GivenSamples(
            samples, "photos seen through masks that are looked for", self._x
        )
        scores_and_gradients = (yield Scores(perturbation, ScoreAndGradient())).to(self._x)
        # of each sample, the score comes first, then the gradient of its pixels
        image_gradient = scores_and_gradients[:, 1:].reshape(seen.shape)
        area_gradient = self._towards_area(full.detach(), number)
        # one backward pass brings both terms of the objective to the lattice
        ascent = torch.autograd.grad((seen, full), values, (image_gradient, area_gradient))[0]
        momentum = ascent if self._momentum is None else self._momentum
        self._momentum = MOMENTUM * momentum + (1 - MOMENTUM) * ascent
        self._values = (self._values + RATE * self._momentum).clamp(0, 1)
        self._masks = masks.detach()
        self._scores = scores_and_gradients[:, 0]

    def _towards_area(self, full: torch.Tensor, number: int) -> torch.Tensor:
        """The gradient ``(N A, 1, ...)`` that draws the sorted values of masks ``full`` towards
        zeros and ones in the shares of the wanted area; its weight grows with the step ``number``.
        """
        flat = full.flatten(1)
        ordered, order = flat.sort(1)
        weight = WEIGHT * GROWTH**number
        pulls = -2 * weight / flat.shape[1] * (ordered - shared(ordered, self._wanted))
        return torch.zeros_like(flat).scatter_(1, order, pulls).reshape(full.shape)


def shared(ordered: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the ``wanted`` value of each of the sorted masks ``ordered`` ``(b, n)``; nearly equal
    masks share the mean of theirs, since otherwise the sort would decide which pixels grow."""
    # decimals in which equal values agree, however they were rounded
    digits = 9 if ordered.dtype == torch.float64 else 5
    # the number of the group of equal values that each one is in
    group = torch.zeros_like(ordered, dtype=torch.long)
    group[:, 1:] = (ordered.round(decimals=digits).diff(dim=1) != 0).cumsum(1)
    sums = torch.zeros_like(ordered).scatter_add_(1, group, wanted)
    counts = torch.zeros_like(ordered).scatter_add_(1, group, torch.ones_like(wanted))
    # there are fewer groups than places: the last sums and counts are zero
    return (sums / counts.clamp(min=1)).gather(1, group)
