"""Baselines that replace pixels by colours, blur, noise or another photo."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch

from explain._utils.errors import BaselineError, shown
from explain._utils.options import named_in, names_like, register_reader
from explain._utils.random_numbers import normal, seeded
from explain.baselines.base import (
    Baseline,
    Cover,
    Preprocess,
    check_mask,
    register,
    registered,
    scale_of,
)

USUAL = 20 / 224
"""The strongest blur's standard deviation, as a share of the photo's shorter side."""
TINY = 1e-12
"""The smallest standard deviation."""
REACH = 4.0  # standard deviations from which on a Gaussian counts as nothing


def normal_draw(seed: int, images: torch.Tensor) -> torch.Tensor:
    """A standard normal draw in the shape of one image ``(1, C, H, W)``, the same on every
    device."""
    return normal(images.shape[1:], seeded(seed))[None].to(images.device)


def in_single_or_double(images: torch.Tensor) -> torch.Tensor:
    """The images in at least single precision."""
    return images if images.dtype in (torch.float32, torch.float64) else images.float()


def to_unit(maps: torch.Tensor) -> torch.Tensor:
    """Bring the values of each map ``(N, ...)`` to [0, 1] by its smallest and largest; a constant
    map becomes 0."""
    flat = maps.flatten(1)
    least, most = flat.aminmax(dim=1, keepdim=True)
    return ((flat - least) / torch.where(most > least, most - least, 1)).reshape(maps.shape)


def blurred(x: torch.Tensor, sigma: float, reach: float = math.inf) -> torch.Tensor:
    """Images ``(..., H, W)`` under a Gaussian of ``sigma`` pixels (0: as they are), cut off at
    ``reach``; weights outside the edges are left out: no colour is invented."""
    if sigma == 0:
        return x
    down, across = (_gaussian_weights(side, sigma, reach).to(x) for side in x.shape[-2:])
    return down @ x @ across.T


def _gaussian_weights(side: int, sigma: float, reach: float) -> torch.Tensor:
    """The matrix ``(side, side)`` of a Gaussian blur along one side: row i has what pixel i takes
    of each other pixel; rows add up to one."""
    places = torch.arange(side, dtype=torch.float64, device="cpu")
    distances = places[:, None] - places
    weights = torch.exp(-0.5 * (distances / sigma) ** 2) * (distances.abs() <= reach)
    return weights / weights.sum(1, keepdim=True)


def _statistics(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the standard deviation of each channel of each photo ``(N, C, ...)``: ``(N, C,
    1, ...)`` each, in at least single precision."""
    wide = in_single_or_double(images)
    dims = tuple(range(2, images.ndim))
    return wide.mean(dims, keepdim=True), wide.std(dims, keepdim=True, correction=0)


@register
class Zero(Baseline):
    """Zeros, which behind a normalisation is the mean colour of the training data.

    They are zeros in the units of the model.

    >>> Zero()(torch.ones(1, 1, 1, 2), torch.tensor([[[[1.0, 0.0]]]]))
    tensor([[[[1., 0.]]]])
    """

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(images)


@dataclass(frozen=True)
class Constant(Baseline):
    """One number for all pixels. It is in the units of the model."""

    value: float

    name = "constant"

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        return torch.full_like(images, self.value)


@register
class Black(Baseline):
    """Black pixels, by the preprocessing's mean and deviation.

    They are minus the mean, divided by the deviation, in each channel.

    Args:
        mean: of each channel, or one for all; with pixels between 0 and 1.
        std: the deviation that the preprocessing divides by, given in the same way.

    Raises:
        BaselineError: one of them is missing or no such numbers; `Black.of` reads them off a
            preprocessing.

    >>> Black(mean=(0.5,), std=(0.25,)).replacement(torch.rand(1, 1, 1, 2))
    tensor([[[[-2., -2.]]]])
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    below = {"std": math.inf}

    @classmethod
    def of(cls, preprocess: Preprocess) -> "Black":
        """Make the baseline for the inputs of a preprocessing, whose mean and deviation are read
        off what it makes of a black and of a white photo.

        >>> from explain.models import CenterCrop
        >>> Black.of(CenterCrop(8, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))).std
        (0.25, 0.25, 0.25)
        """
        black, span = scale_of(preprocess)
        return cls(mean=tuple((-black / span).tolist()), std=tuple((1 / span).tolist()))

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        """A black photo for each photo ``(N, C, H, W)``, in the model's units: minus mean over
        deviation."""
        if self.mean is None or self.std is None:
            raise BaselineError(
                "black must know the mean and deviation of inputs; give Black(mean=..., std=...)"
            )
        channels = images.shape[1]
        if not {len(self.mean), len(self.std)} <= {1, channels}:
            raise BaselineError(
                f"mean and std of black must be for {channels} channels, got {shown(self.mean)}"
            )
        mean = torch.tensor(self.mean, dtype=torch.float64)
        std = torch.tensor(self.std, dtype=torch.float64)
        black = (-mean / std).to(images)
        return black.reshape((1, -1, *[1] * (images.ndim - 2))).expand_as(images)


@register
class Mean(Baseline):
    """The mean colour of the photo.

    Of a video, it is that of all its frames.

    >>> Mean().replacement(torch.tensor([[[[1.0, 3.0]]]]))
    tensor([[[[2., 2.]]]])
    """

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        return _statistics(images)[0].to(images).expand_as(images)


@register
class Blur(Baseline):
    """The photo behind a Gaussian blur.

    Each frame of a video is blurred for itself.

    At the edges, the weights of what would lie outside are left out, so that no colour is invented
    there.

    Args:
        kernel: the side of the window in pixels, odd.
        sigma: the standard deviation in pixels.

    The defaults are those of RISE's insertion (Petsiuk et al., BMVC 2018), which pads with zeros
    instead.

    >>> Blur(kernel=3).replacement(torch.ones(1, 1, 2, 2))
    tensor([[[[1., 1.],
              [1., 1.]]]])
    """

    kernel: int = 11
    sigma: float = 5.0

    minimums = {"kernel": 1, "sigma": TINY}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise BaselineError(f"kernel of blur must be odd, got {self.kernel}; use 11")

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        return blurred(in_single_or_double(images), self.sigma, self.kernel // 2).to(images)


@register
class Noise(Baseline):
    """Normal noise with the photo's own mean colour and deviation.

    Every photo gets the same draw, so that it does not depend on the others of a batch.

    Args:
        seed: of the draw.
        scale: the noise's standard deviation, in those of the photo's channels.

    >>> a, b = Noise().replacement(torch.tensor([[[[0.0, 2.0]]], [[[1.0, 3.0]]]]))
    >>> torch.allclose(b - a, torch.ones(1))
    True
    """

    seed: int = 0
    scale: float = 1.0

    minimums = {"scale": 0}

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        mean, deviation = _statistics(images)
        return (mean + self.scale * deviation * normal_draw(self.seed, images).to(mean)).to(images)


@dataclass(frozen=True, eq=False)
class OtherPhoto(Baseline):
    """Another photo.

    Args:
        other: ``(C, H, W)`` or a batch of one, ``(1, C, H, W)``, preprocessed as the images are,
            and of their size.

    Raises:
        BaselineError: it is no such tensor, holds NaN or infinity, or does not fit the images.

    >>> OtherPhoto(torch.zeros(1, 1, 2))(torch.ones(1, 1, 1, 2), torch.tensor([[[[1.0, 0.0]]]]))
    tensor([[[[1., 0.]]]])
    """

    other: torch.Tensor = field(repr=False)

    name: ClassVar[str] = "photo"

    def __post_init__(self) -> None:
        """Check the other photo of the baseline `OtherPhoto`, and keep a copy, which the caller
        cannot change any more."""
        super().__post_init__()
        if self.other.ndim < 3 or not self.other.is_floating_point():
            got = shown(self.other)
            raise BaselineError(
                f"other of photo must be a float tensor (C, H, W), got {got}; preprocess it"
            )
        object.__setattr__(self, "other", self.other.detach().clone())

    def __eq__(self, value: object) -> bool:
        if not isinstance(value, OtherPhoto) or self.other.dtype != value.other.dtype:
            return False
        return torch.equal(self.other.cpu(), value.other.cpu())

    def __hash__(self) -> int:
        return hash((tuple(self.other.shape), float(self.other.double().sum())))

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        """The other photo for each photo ``(N, C, H, W)``; refused if it has another shape."""
        is_batch_of_one = self.other.ndim == images.ndim and len(self.other) == 1
        other = self.other[0] if is_batch_of_one else self.other
        if other.shape != images.shape[1:]:
            size = tuple(images.shape[1:])
            got = tuple(self.other.shape)
            raise BaselineError(
                f"other of photo must have the shape {size} of the images, got {got}; preprocess "
                "both"
            )
        return other.to(images).expand_as(images)


@register
class Defocus(Baseline):
    """The photo behind a blur that is the stronger, the less is kept.

    There are so many blurs from ``sigma`` down to the photo itself, at even steps; in between, the
    two nearest ones are blended. Where half of a pixel is kept, it thus shows a weaker blur, and
    not half of the photo.

    Args:
        sigma: the standard deviation of the strongest blur in pixels; None takes 20 in 224 of the
            shorter side.
        levels: how many blurs, the photo itself among them.

    Fong, Patrick and Vedaldi, "Understanding Deep Networks via Extremal Perturbations and Smooth
    Masks", ICCV 2019.

    >>> x = torch.tensor([[[[0.0, 0.0, 4.0, 0.0, 0.0]]]])
    >>> Defocus(sigma=1.0, levels=2)(x, torch.ones(1, 1, 1, 5)).flatten().tolist()
    [0.0, 0.0, 4.0, 0.0, 0.0]
    >>> half = Defocus(sigma=1.0, levels=3)(x, torch.full((1, 1, 1, 5), 0.5))
    >>> torch.equal(half, Blur(kernel=5, sigma=0.5).replacement(x))
    True
    """

    sigma: float | None = None
    levels: int = 8

    depends_on_mask = True

    minimums = {"sigma": TINY, "levels": 2}

    def __call__(self, images: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        check_mask(images, keep)
        return self.covering(images)(torch.arange(len(images), device=images.device), keep)

    def covering(self, images: torch.Tensor) -> Cover:
        """Cover the same photos ``(N, C, H, W)`` by many masks: where a mask is smaller, a stronger
        blur is seen. Each photo is blurred once, at all levels; differentiable in the mask.
        """
        blurs = self._blurs(images).flatten(3)  # (levels, N, C, places)
        channels = torch.arange(images.shape[1], device=images.device)[None, :, None]
        places = torch.arange(blurs.shape[-1], device=images.device)

        def cover(owners: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            """The photos numbered ``owners`` ``(b,)`` seen through masks ``keep`` ``(b, 1, H, W)``,
            which choose between two neighbouring blurs at each pixel.
            """
            level = keep.to(images).flatten(2) * (self.levels - 1)
            # where all is kept, the photo itself, the last level, is the one above
            level_below = level.detach().floor().clamp(max=self.levels - 2).long()
            more_blurred, less_blurred = (
                blurs[level_number, owners[:, None, None], channels, places]
                for level_number in (level_below, level_below + 1)
            )
            return torch.lerp(more_blurred, less_blurred, level - level_below).reshape(
                [len(owners), *images.shape[1:]]
            )

        return cover

    def _blurs(self, images: torch.Tensor) -> torch.Tensor:
        """The photos at each level of blur ``(levels, N, C, H, W)``, the most blurred first, the
        photos themselves last.
        """
        strongest = USUAL * min(images.shape[-2:]) if self.sigma is None else self.sigma
        blurs = []
        for level in range(self.levels):
            sigma = strongest * (1 - level / (self.levels - 1))
            kernel = 2 * math.ceil(REACH * sigma) + 1
            blurs.append(Blur(kernel, sigma).replacement(images) if sigma else images)
        return torch.stack(blurs)


BaselineLike: TypeAlias = str | float | torch.Tensor | Baseline


def list_baselines(pattern: str = "*") -> list[str]:
    """Return the names of the baselines that match a glob pattern, in alphabetical order."""
    return names_like(registered, pattern, BaselineError)


def get_baseline(baseline: BaselineLike, preprocess: Preprocess | None = None) -> Baseline:
    """Return the baseline that a caller means, for a name, a number or a tensor: what stands for
    "absent" in a photo.

    Args:
        baseline: a name from `list_baselines`, also with options; a number for all pixels, in the
            units of the model; a tensor ``(C, H, W)``, which is another photo; or a baseline, which
            is returned as it is.
        preprocess: what makes a photo the model's input, for the baseline "black", which must know
            it.

    Raises:
        BaselineError: the name is unknown, or the object is no baseline.

    >>> get_baseline("blur"), get_baseline("blur(sigma=3)")
    (Blur(kernel=11, sigma=5.0), Blur(kernel=11, sigma=3))
    >>> get_baseline(0), get_baseline(0.5)
    (Zero(), Constant(value=0.5))
    """
    if isinstance(baseline, (int, float)) and not isinstance(baseline, bool):
        return Zero() if baseline == 0 else Constant(float(baseline))
    if isinstance(baseline, torch.Tensor):
        return OtherPhoto(baseline)
    if isinstance(baseline, str):
        baseline = named_in(registered, baseline, "baseline", BaselineError, "blur(sigma=3)")
    if not isinstance(baseline, Baseline):
        remedy = f"{baseline.__name__}()" if isinstance(baseline, type) else "'blur'"
        raise BaselineError(
            f"baseline must be a name or a baseline, got {shown(baseline)}; use {remedy}"
        )
    # black without a mean and deviation reads them off the preprocessing
    return Black.of(preprocess) if preprocess is not None and baseline == Black() else baseline


register_reader(Baseline, "a baseline", get_baseline)
