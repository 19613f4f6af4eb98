"""The maps that metrics measure: an attribution, or any array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from explain._utils.errors import MetricError, image_name, shown
from explain.attribution.result import Attribution
from explain.layers.feature_maps import enlarge
from explain.methods.base import Style

Sign = Literal["own", "signed", "absolute"]
"""How values become one number for each pixel: "own" as the method means it (see `Maps.per_pixel`), "signed" the
sum over the channels, "absolute" the magnitude of that sum."""

MapsLike: TypeAlias = "Attribution | torch.Tensor | np.ndarray[Any, Any]"


def as_tensor(given: object) -> torch.Tensor | None:
    """A tensor of the real numbers in a tensor or an array of any byte order and strides; None where it has none.

    >>> as_tensor(np.eye(2, dtype=">i2")[::-1]), as_tensor("two")
    (tensor([[0, 1],
            [1, 0]]), None)
    """
    if isinstance(given, np.ndarray) and given.dtype.kind in "fiub":
        kinds = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float32 if given.itemsize <= 4 else np.float64}
        return torch.from_numpy(np.ascontiguousarray(given, dtype=kinds[given.dtype.kind]))
    if isinstance(given, torch.Tensor) and given.layout == torch.strided and not given.is_complex():
        return given
    return None


@dataclass(frozen=True, eq=False)
class Maps:
    """The values that a method gave for N photos: ``(N, h, w)`` or ``(N, C, H, W)``; and the ``size`` of the photos."""

    name: str
    values: torch.Tensor
    size: tuple[int, int]
    style: Style | None = None

    @classmethod
    def of(cls, name: str, given: MapsLike, images: torch.Tensor) -> Maps:
        """Take an attribution or an array for these images ``(N, C, H, W)``.

        Raises:
            MetricError: it is no array of numbers, has NaN or infinity in it, or does not fit the images.
        """
        style = given.style if isinstance(given, Attribution) else None
        values = as_tensor(given.values if isinstance(given, Attribution) else given)
        if values is None:
            raise MetricError(
                f"map {name!r} must be an Attribution, or a tensor or array of real numbers, got {shown(given)}"
            )
        count, size = len(images), (int(images.shape[-2]), int(images.shape[-1]))
        fits = values.ndim == 3 or (values.ndim == 4 and tuple(values.shape[2:]) == size)
        if not fits or len(values) != count or 0 in values.shape:
            raise MetricError(
                f"map {name!r} must have the shape ({count}, h, w), or ({count}, C, {size[0]}, {size[1]}) for each "
                f"pixel, got {tuple(values.shape)}; give one map for each image"
            )
        values = values.detach().to(images.device)
        values = values if values.dtype in (torch.float32, torch.float64) else values.float()
        if values.ndim == 4 and not bool(torch.isfinite(values.abs().sum(1)).all()):
            values = values.double()  # sums over the channels are beyond single precision
        wrong = (~torch.isfinite(values)).flatten(1).any(1)
        if wrong.any():
            raise MetricError(
                f"map {name!r} must hold finite values, got NaN or infinity for image "
                f"{image_name(int(wrong.nonzero()[0]))}; explain it again, or leave it out"
            )
        return cls(name, values, size, style)

    def per_pixel(self, sign: Sign = "own") -> torch.Tensor:
        """One number for each pixel ``(N, H, W)``.

        Maps ``(N, h, w)`` are enlarged. Values for each pixel and channel are added up over the channels. With "own",
        those of our methods that are magnitudes or colours and no contributions count by the largest channel, as
        their heatmaps do.
        """
        values = self.values
        if values.ndim == 3:
            values = values if tuple(values.shape[1:]) == self.size else enlarge(values[:, None], self.size)[:, 0]
        elif sign == "own" and self.style in ("intensity", "color", "heat"):
            return values.abs().amax(1)
        else:
            values = values.sum(1)
        return values.abs() if sign == "absolute" else values

    @property
    def contributions(self) -> torch.Tensor:
        """What each pixel contributes ``(N, H, W)`` float64: signed, and added up over the channels."""
        return self.per_pixel("signed").double()

    @property
    def heatmap(self) -> torch.Tensor:
        """``(N, H, W)`` in [0, 1]: the positive part of the own map, divided by its largest value."""
        positive = self.per_pixel("own").clamp(min=0)
        peak = positive.flatten(1).amax(1).reshape(-1, 1, 1)
        return positive / torch.where(peak > 0, peak, 1)

    @property
    def constant(self) -> torch.Tensor:
        """Which maps ``(N,)`` have the same value everywhere."""
        least, most = self.per_pixel("own").flatten(1).aminmax(dim=1)
        return least == most
