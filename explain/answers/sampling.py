"""Where a processor puts a photo in a model's pixels: found by pictures whose levels say where they
are, so that tiles, thumbnails, padding and packed patches need no adapter."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from explain._utils.errors import ModelError
from explain.data.boxes import Array, along_ramp, rising_levels

SHIFTS = 4  # ramps along a side, each a part of a level higher, since levels are whole numbers
SHOWN = 0.1  # share of the largest contrast from which on a value shows the photo
LEAST = 0.01  # share of the photo that is shown, at least
FIELDS = (4, 4)  # rows and columns of a coarse picture that sampling is tried on
MISSED = 0.5  # share of what the processor changes for it that sampling may miss


@dataclass(frozen=True, eq=False)
class Sampling:
    """How a processor samples one photo: value e of the E ``pixels`` is ``offset + weights[:, e]``
    times the colours at ``grid[e]``."""

    pixels: torch.Tensor
    # ``(1, 3, h, w)`` in RGB from 0 to 1, with about as many pixels as the model sees
    photo: torch.Tensor
    grid: torch.Tensor
    """Where each value lies in the photo, ``(E, 2)``: x and y from -1 to 1 along the sides."""
    weights: torch.Tensor
    """What each value takes of red, green and blue, ``(3, E)``; 0 where it shows no photo."""

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of the photo's maps."""
        return self.photo.shape[2], self.photo.shape[3]

    def like(self, photo: Image.Image) -> torch.Tensor:
        """Another photo, stretched to the size of this one: ``(1, 3, h, w)``."""
        return _canvas(photo, self.size[::-1]).to(self.photo)

    def of(self, photos: torch.Tensor) -> torch.Tensor:
        """The model's pixels of altered photos ``(N, 3, h, w)``: those of the photo, and what
        sampling says of the difference; N times as many rows as the pixels have.
        """
        change = self._read(photos - self.photo)
        values = (change * self.weights).sum(1).to(self.pixels)
        pixels = self.pixels.flatten() + values
        return pixels.reshape(len(photos) * len(self.pixels), *self.pixels.shape[1:])

    def on_photo(self, values: torch.Tensor) -> torch.Tensor:
        """Maps ``(N, h, w)`` of the photo from ``values`` ``(N, ...)`` of each of the model's
        pixels; each value is shared out to where it was read, so that sums stay.
        """
        values = values.to(self.grid)
        # reading is linear, and its gradient in the photo is its transpose: what it read goes back
        blank = values.new_zeros(len(values), 1, *self.size, requires_grad=True)
        with torch.enable_grad():
            read = self._read(blank)[:, 0]
        # values that show no photo, such as padding, have no place
        spread = values.reshape(len(values), -1) * self.weights.any(0)
        return torch.autograd.grad(read, blank, spread)[0][:, 0]

    def _read(self, photos: torch.Tensor) -> torch.Tensor:
        """The channels ``(N, C, E)`` of photos where each of the model's pixels lies."""
        grid = self.grid.expand(len(photos), 1, -1, 2)
        read = F.grid_sample(photos.to(grid), grid, padding_mode="border", align_corners=False)
        return read[:, :, 0]


def sampling_of(photo: Image.Image, process: Callable[[Image.Image], torch.Tensor]) -> Sampling:
    """Find out how a processor samples a photo, from its pixels of pictures of one size
    (``process``); a `ModelError` if it does more than to choose, resize, pad and scale."""
    width, height = photo.size
    pixels = process(photo)

    def seen(levels: Array) -> torch.Tensor:
        """What becomes of a picture ``(H, W)`` or ``(H, W, 3)``, in double precision: ``(E,)``."""
        shape = (height, width, 3)
        full = np.broadcast_to(levels if levels.ndim == 3 else levels[..., None], shape)
        values = process(Image.fromarray(np.ascontiguousarray(full, dtype=np.uint8)))
        if values.shape != pixels.shape:
            raise ModelError(
                "processor must make as many pixels of all photos of one size, got "
                f"{tuple(pixels.shape)} and {tuple(values.shape)}; switch off what depends on the "
                "content"
            )
        return values.double().flatten()

    # of a black and of a white picture: what does not change shows no photo
    black = seen(np.zeros((1, 1)))
    contrast = seen(np.full((1, 1), 255)) - black
    is_shown = contrast.abs() > SHOWN * contrast.abs().max()
    divisor = torch.where(is_shown, contrast, 1.0)

    def positions(side: int, *, across: bool) -> torch.Tensor:
        """Where each value lies along one side of the photo, ``(E,)`` from -1 to 1: by its level in
        pictures that become brighter from left to right (``across``), or downwards."""
        # from 0 to 255: the mean over slightly shifted pictures is finer than their whole levels
        level = torch.zeros_like(contrast)
        for number in range(SHIFTS):
            shift = (number + 0.5) / SHIFTS - 0.5
            rising = np.round(rising_levels(side) + shift)
            picture = rising[None] if across else rising[:, None]
            level += (seen(picture) - black) / divisor * 255 / SHIFTS
        position = (along_ramp(level, side) / side * 2 - 1).clamp(-1, 1)
        return torch.where(is_shown, position, 0.0)

    grid = torch.stack([positions(width, across=True), positions(height, across=False)], 1)
    # pictures of one colour each; blue is what these leave of white
    red, green = (seen(np.eye(3)[None, None, channel] * 255) - black for channel in (0, 1))
    weights = torch.stack([red, green, contrast - red - green])
    # what is as small as this is no share of a colour
    weights = torch.where(weights.abs() > SHOWN * contrast.abs(), weights, 0.0) * is_shown
    if not bool(is_shown.any()):
        raise _does_more()
    # the shares of both sides that a crop leaves
    extent = (grid[is_shown].amax(0) - grid[is_shown].amin(0)) / 2
    # how many values there would be of a photo that is not cropped
    shown_of_whole = int(is_shown.sum()) / max(float(extent.prod()), LEAST)
    size = _seen_size(photo.size, shown_of_whole)
    canvas = _canvas(photo, size).to(pixels)
    wide = torch.promote_types(pixels.dtype, torch.float32)  # places need more than half precision
    sampling = Sampling(pixels, canvas, grid.to(wide), weights.to(wide))
    # tried on the change from one picture to another
    pictures = [_coarse(seed, photo.size) for seed in (0, 1)]
    change = seen(np.asarray(pictures[0])) - seen(np.asarray(pictures[1]))
    predicted = [sampling.of(sampling.like(picture)).double().flatten() for picture in pictures]
    missed = (change - (predicted[0] - predicted[1])).norm()
    if float(missed) > MISSED * float(change.norm()):
        raise _does_more()
    return sampling


def _does_more() -> ModelError:
    """The error for a processor whose pixels are no samples of the photo."""
    return ModelError(
        "processor must choose, resize, pad and scale the photo's pixels, and does more; explain "
        "the model with explain.attribute on its own inputs"
    )


def _canvas(photo: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    """A photo ``(1, 3, h, w)`` of a ``size`` (width, height), in RGB from 0 to 1."""
    levels = np.asarray(photo.convert("RGB").resize(size, Image.Resampling.BOX), np.float32) / 255
    return torch.from_numpy(levels).permute(2, 0, 1)[None]


def _coarse(seed: int, size: tuple[int, int]) -> Image.Image:
    """A picture of a ``size`` (width, height) of fields that pass into each other."""
    fields = np.random.default_rng(seed).integers(0, 255, (*FIELDS, 3), dtype=np.uint8)
    return Image.fromarray(fields).resize(size, Image.Resampling.BICUBIC)


def _seen_size(size: tuple[int, int], shown: float) -> tuple[int, int]:
    """The width and height at which a photo has as many values as the model would be shown of all
    of it in three channels, at most its own."""
    width, height = size
    scale = min(1.0, (shown / 3 / (width * height)) ** 0.5)
    return max(1, round(width * scale)), max(1, round(height * scale))
