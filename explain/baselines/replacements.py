"""Baselines that replace pixels by colours, blur, noise or another photo."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from explain._utils.errors import BaselineError, shown
from explain._utils.random_numbers import normal
from explain.baselines.base import (
    Baseline,
    Cover,
    Preprocess,
    check_mask,
    check_number,
    check_whole,
    register,
    scale_of,
)

USUAL = 20 / 224
"""The strongest blur's standard deviation, as a share of the photo's shorter side."""
REACH = 4.0  # standard deviations from which on a Gaussian counts as nothing


def drawn(seed: int, images: torch.Tensor) -> torch.Tensor:
    """A standard normal draw in the shape of one image ``(1, C, H, W)``, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed % 2**63)
    noise = normal(images.shape[1:], generator)
    return noise[None].to(images.device)


def in_single_or_double(images: torch.Tensor) -> torch.Tensor:
    """The images in at least single precision."""
    return images if images.dtype in (torch.float32, torch.float64) else images.float()


def _statistics(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each channel of each photo, ``(N, C, 1, 1)``, in at least single precision."""
    wide = in_single_or_double(images)
    dims = tuple(range(2, images.ndim))
    return wide.mean(dims, keepdim=True), wide.std(dims, keepdim=True, correction=0)


def _numbers(values: Any, option: str) -> tuple[float, ...]:
    listed = values.tolist() if isinstance(values, (torch.Tensor, np.ndarray)) else values
    items = list(listed) if isinstance(listed, (list, tuple)) else [listed]
    if not items:
        raise BaselineError(f"{option} of black must hold a number for each channel, got none; give one for all")
    return tuple(check_number(each, f"{option} of black") for each in items)


@register
@dataclass(frozen=True)
class Zero(Baseline):
    """Zeros in the units of the model: behind a normalisation, the mean colour of the data that it was trained on.

    >>> Zero()(torch.ones(1, 1, 1, 2), torch.tensor([[[[1.0, 0.0]]]]))
    tensor([[[[1., 0.]]]])
    """

    name: ClassVar[str] = "zero"
    about: ClassVar[str] = "zeros, which behind a normalisation is the mean colour of the training data"

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(images)


@dataclass(frozen=True)
class Constant(Baseline):
    """One number for all pixels, in the units of the model.

    >>> Constant(2.0).replacement(torch.rand(1, 1, 1, 2))
    tensor([[[[2., 2.]]]])
    """

    value: float

    name: ClassVar[str] = "constant"
    about: ClassVar[str] = "one number for all pixels"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", check_number(self.value, "value of constant"))

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        return torch.full_like(images, self.value)


@register
@dataclass(frozen=True)
class Black(Baseline):
    """Black pixels, as the model's preprocessing makes them: minus the mean, by the deviation of each channel.

    Args:
        mean: of each channel, or one for all; with pixels between 0 and 1.
        std: the deviation that the preprocessing divides by, given in the same way.

    Raises:
        BaselineError: one of them is missing or no such numbers; `Black.of` reads them off a preprocessing.

    >>> Black(mean=(0.5,), std=(0.25,)).replacement(torch.rand(1, 1, 1, 2))
    tensor([[[[-2., -2.]]]])
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    name: ClassVar[str] = "black"
    about: ClassVar[str] = "black pixels, by the preprocessing's mean and deviation"

    def __post_init__(self) -> None:
        for option in ("mean", "std"):
            value = getattr(self, option)
            object.__setattr__(self, option, None if value is None else _numbers(value, option))
        if self.std is not None and not all(each > 0 for each in self.std):
            raise BaselineError(
                f"std of black must be of numbers above 0, got {shown(self.std)}; see the preprocessing"
            )

    @classmethod
    def of(cls, preprocess: Preprocess) -> Black:
        """Read mean and deviation off a preprocessing, by what it makes of a black and of a white photo.

        >>> from explain.models import CenterCrop
        >>> Black.of(CenterCrop(8, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))).std
        (0.25, 0.25, 0.25)
        """
        black, span = scale_of(preprocess)
        return cls(mean=tuple((-black / span).tolist()), std=tuple((1 / span).tolist()))

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        if self.mean is None or self.std is None:
            raise BaselineError(
                "baseline black must know the preprocessing's mean and deviation, got none; give "
                "explain.baselines.Black(mean=..., std=...) or Black.of(explainer.preprocess)"
            )
        channels = images.shape[1]
        if not {len(self.mean), len(self.std)} <= {1, channels}:
            raise BaselineError(
                f"baseline black must have a mean and deviation for each of the {channels} channels, got "
                f"{len(self.mean)} "
                f"and {len(self.std)}; give one for all, or {channels}"
            )
        mean, std = (torch.tensor(each, dtype=torch.float64) for each in (self.mean, self.std))
        shape = (1, -1, *[1] * (images.ndim - 2))
        return (-mean / std).to(images).reshape(shape).expand_as(images)


@register
@dataclass(frozen=True)
class Mean(Baseline):
    """The mean colour of the photo itself; of a video, that of all its frames.

    >>> Mean().replacement(torch.tensor([[[[1.0, 3.0]]]]))
    tensor([[[[2., 2.]]]])
    """

    name: ClassVar[str] = "mean"
    about: ClassVar[str] = "the mean colour of the photo"

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        return _statistics(images)[0].to(images).expand_as(images)


@register
@dataclass(frozen=True)
class Blur(Baseline):
    """The photo behind a Gaussian blur; each frame of a video for itself.

    At the edges, the weights of what would lie outside are left out, so that no colour is invented there.

    Args:
        kernel: the side of the window in pixels, odd.
        sigma: the standard deviation in pixels.

    The defaults are those of RISE's insertion (Petsiuk et al., BMVC 2018), which pads with zeros instead.

    >>> Blur(kernel=3).replacement(torch.ones(1, 1, 2, 2))
    tensor([[[[1., 1.],
              [1., 1.]]]])
    """

    kernel: int = 11
    sigma: float = 5.0

    name: ClassVar[str] = "blur"
    about: ClassVar[str] = "the photo behind a Gaussian blur"

    def __post_init__(self) -> None:
        if check_whole(self.kernel, "kernel of blur", 1) % 2 == 0:
            raise BaselineError(f"kernel of blur must be odd, got {self.kernel}; use 11")
        object.__setattr__(self, "sigma", check_number(self.sigma, "sigma of blur", above=0))

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        wide = in_single_or_double(images)
        maps = wide.reshape(-1, 1, *images.shape[-2:])
        places = torch.arange(self.kernel, dtype=wide.dtype, device=wide.device) - self.kernel // 2
        weights = torch.exp(-(places**2) / (2 * self.sigma**2))
        blurred = self._blurred(maps, weights) / self._blurred(torch.ones_like(maps[:1]), weights)
        return blurred.reshape(images.shape).to(images)

    def _blurred(self, maps: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        half = self.kernel // 2
        down = F.conv2d(maps, weights.view(1, 1, -1, 1), padding=(half, 0))
        return F.conv2d(down, weights.view(1, 1, 1, -1), padding=(0, half))


@register
@dataclass(frozen=True)
class Noise(Baseline):
    """Normal noise about the mean colour of the photo, as strong in each channel as the photo itself varies.

    Every photo gets the same draw, so that it does not depend on those beside it.

    Args:
        seed: of the draw.
        scale: the noise's standard deviation, in those of the photo's channels.

    >>> a, b = Noise().replacement(torch.tensor([[[[0.0, 2.0]]], [[[1.0, 3.0]]]]))
    >>> torch.allclose(b - a, torch.ones(1))
    True
    """

    seed: int = 0
    scale: float = 1.0

    name: ClassVar[str] = "noise"
    about: ClassVar[str] = "normal noise with the photo's own mean colour and deviation"

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", check_whole(self.seed, "seed of noise"))
        object.__setattr__(self, "scale", check_number(self.scale, "scale of noise", 0))

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        mean, deviation = _statistics(images)
        return (mean + self.scale * deviation * drawn(self.seed, images).to(mean)).to(images)


@dataclass(frozen=True, eq=False)
class OtherPhoto(Baseline):
    """Another photo, the same for all.

    Args:
        other: ``(C, H, W)``, preprocessed as the images are, and of their size.

    Raises:
        BaselineError: it is no such tensor, holds NaN or infinity, or does not fit the images.

    >>> OtherPhoto(torch.zeros(1, 1, 2))(torch.ones(1, 1, 1, 2), torch.tensor([[[[1.0, 0.0]]]]))
    tensor([[[[1., 0.]]]])
    """

    other: torch.Tensor = field(repr=False)

    name: ClassVar[str] = "photo"
    about: ClassVar[str] = "another photo"

    def __post_init__(self) -> None:
        other = torch.from_numpy(self.other) if isinstance(self.other, np.ndarray) else self.other
        if not isinstance(other, torch.Tensor) or other.ndim < 3 or not other.is_floating_point():
            raise BaselineError(
                f"other of photo must be a floating-point tensor (C, H, W), got {shown(other)}; use "
                "explainer.preprocess(photo)"
            )
        if not bool(torch.isfinite(other).all()):
            raise BaselineError("other of photo must hold finite values, got NaN or infinity; check the preprocessing")
        object.__setattr__(self, "other", other.detach().clone())

    def __eq__(self, value: object) -> bool:
        mine = self.other
        return (
            type(value) is OtherPhoto and mine.dtype == value.other.dtype and torch.equal(mine.cpu(), value.other.cpu())
        )

    def __hash__(self) -> int:
        return hash((tuple(self.other.shape), float(self.other.double().sum())))

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        if self.other.shape != images.shape[1:]:
            raise BaselineError(
                f"other of photo must have the shape {tuple(images.shape[1:])} of the images, got "
                f"{tuple(self.other.shape)}; preprocess both alike"
            )
        return self.other.to(images).expand_as(images)


@register
@dataclass(frozen=True)
class Defocus(Baseline):
    """The photo behind a Gaussian blur that is the stronger, the less of a pixel is kept.

    There are so many blurs from ``sigma`` down to the photo itself, at even steps; in between, the two nearest ones are
    blended. Where half of a pixel is kept, it thus shows a weaker blur, and not half of the photo.

    Args:
        sigma: the standard deviation of the strongest blur in pixels; None takes 20 in 224 of the shorter side.
        levels: how many blurs, the photo itself among them.

    Fong, Patrick and Vedaldi, "Understanding Deep Networks via Extremal Perturbations and Smooth Masks", ICCV 2019.

    >>> x = torch.tensor([[[[0.0, 0.0, 4.0, 0.0, 0.0]]]])
    >>> Defocus(sigma=1.0, levels=2)(x, torch.ones(1, 1, 1, 5)).flatten().tolist()
    [0.0, 0.0, 4.0, 0.0, 0.0]
    >>> half = Defocus(sigma=1.0, levels=3)(x, torch.full((1, 1, 1, 5), 0.5))
    >>> torch.equal(half, Blur(kernel=5, sigma=0.5).replacement(x))
    True
    """

    sigma: float | None = None
    levels: int = 8

    name: ClassVar[str] = "defocus"
    about: ClassVar[str] = "the photo behind a blur that is the stronger, the less is kept"
    depends_on_mask: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.sigma is not None:
            object.__setattr__(self, "sigma", check_number(self.sigma, "sigma of defocus", above=0))
        check_whole(self.levels, "levels of defocus", 2)

    def __call__(self, images: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        check_mask(images, keep)
        keep = keep.expand(len(images), *keep.shape[1:])
        return self.covering(images)(torch.arange(len(images), device=images.device), keep)

    def covering(self, images: torch.Tensor) -> Cover:
        """Cover the same photos by many masks; each is blurred once."""
        blurs = self._blurs(images).flatten(3)  # (levels, N, C, places)
        channels = torch.arange(images.shape[1], device=images.device)[None, :, None]
        places = torch.arange(blurs.shape[-1], device=images.device)

        def cover(owners: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            level = keep.to(images).flatten(2) * (self.levels - 1)
            below = level.detach().floor().clamp(max=self.levels - 2).long()
            one, other = (blurs[which, owners[:, None, None], channels, places] for which in (below, below + 1))
            return torch.lerp(one, other, level - below).reshape(len(owners), *images.shape[1:])

        return cover

    def _blurs(self, images: torch.Tensor) -> torch.Tensor:
        """The photos at each level, the most blurred first."""
        strongest = USUAL * min(images.shape[-2:]) if self.sigma is None else self.sigma
        found = []
        for level in range(self.levels):
            sigma = strongest * (1 - level / (self.levels - 1))
            kernel = 2 * math.ceil(REACH * sigma) + 1
            found.append(Blur(kernel, sigma).replacement(images) if sigma else images)
        return torch.stack(found)
