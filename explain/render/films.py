"""Films: the frames of a video, or the slices of a volume, with their maps; as a sheet, or as a moving picture."""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from explain._utils.errors import ImageError, keywords, shown
from explain._utils.html import png
from explain.data.files import Files
from explain.data.images import ImageLike, load_image
from explain.render.captions import caption, enlargement
from explain.render.overlays import overlay
from explain.render.sheets import Group, Layout, Tile, evenly_spread, sheet
from explain.render.styles import StyleLike, get_style

ENDINGS = (".gif", ".webp")
HELD = 4  # times as long as the others the last picture is shown


@dataclass(frozen=True, eq=False)
class Film:
    """The overlays of frames in their order, with their names; a notebook shows the `sheet`."""

    pictures: tuple[Image.Image, ...] = field(repr=False)
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.pictures)

    def sheet(self, count: int = 12, tile: int = 180) -> Image.Image:
        """Return a picture of at most so many frames, evenly spread, each fitted into a square of ``tile`` pixels."""
        tiles = [Tile(self.pictures[i], self.names[i]) for i in evenly_spread(len(self), count)]
        return sheet(Layout("", "", (Group("", tuple(tiles)),)), tile)

    def save(self, path: str | os.PathLike[str], *, seconds: float = 0.2, overwrite: bool = False) -> Path:
        """Write the moving picture.

        Args:
            path: ends in ``.gif`` or ``.webp``.
            seconds: how long each frame is shown; the last one four times as long.
            overwrite: replace a file that is there.

        Raises:
            ImageError: it ends in something else, or the time is none.
            OutputError: the file is there already, or cannot be written.
        """
        captioned = [caption(each, name, "") for each, name in zip(self.pictures, self.names, strict=True)]
        files = Files(Path(path).parent, overwrite=overwrite)
        files.add_bytes(Path(path).name, moving(captioned, Path(path).name, seconds))
        return files.write()[0]

    def _repr_png_(self) -> bytes:
        return png(self.sheet())


@keywords()
def film(
    frames: Any, heatmap: Any, style: StyleLike = "heat", *, unit: str = "frame", colormap: str | None = None,
    alpha: float | None = None,
) -> Film:  # fmt: skip
    """Draw the heatmap of a video or volume on its frames or slices.

    For the result of `explain.attribute`: ``film(volume[0], attribution.heatmap[0], unit="slice")``.

    Args:
        frames: a list of images; or a tensor or array ``(T, H, W)``, ``(T, H, W, 3)``, or as a model takes it
            ``(C, T, H, W)`` with one or three channels. All values but uint8 are scaled from their least to their
            largest one.
        heatmap: ``(T, H, W)``, the maps of all frames; one scale for all of them.
        style, colormap, alpha: as for `explain.render.overlay`.
        unit: what a frame is called.

    Raises:
        ImageError: there are not as many frames as maps, or they are no pictures.

    >>> found = film(np.zeros((1, 4, 8, 6)), np.ones((4, 8, 6)), unit="slice")
    >>> len(found), found.names[-1], found.pictures[0].size  # small frames are enlarged
    (4, 'slice 4 of 4', (240, 320))
    """
    chosen, maps = get_style(style, colormap=colormap, alpha=alpha), list(heatmap)
    photos = [load_image(each) for each in _frames(frames, len(maps))]
    if len(photos) != len(maps) or not photos:
        raise ImageError(f"heatmap must have a map for each of {len(photos)} frames, got {len(maps)}; take one video's")
    times = enlargement(photos[0].size)
    large = [each.resize((each.width * times, each.height * times), Image.Resampling.NEAREST) for each in photos]
    pictures = tuple(overlay(photo, each, chosen) for photo, each in zip(large, maps, strict=True))
    return Film(pictures, tuple(f"{unit} {i} of {len(maps)}" for i in range(1, len(maps) + 1)))


def _frames(frames: Any, count: int) -> Sequence[ImageLike]:
    """The frames of a tensor or array, as arrays of uint8."""
    if isinstance(frames, (list, tuple)):
        return frames
    values = np.asarray(frames.detach().cpu() if hasattr(frames, "detach") else frames)
    if values.ndim == 4 and values.shape[0] in (1, 3) and values.shape[1] == count:
        values = np.moveaxis(values, 0, -1)
    if values.ndim not in (3, 4) or (values.ndim == 4 and values.shape[3] not in (1, 3)):
        raise ImageError(f"frames must be (T, H, W) or (C, T, H, W), C 1 or 3, got {values.shape}; take one video")
    if values.dtype != np.uint8:
        low, high = float(values.min()), float(values.max())
        values = (255 * (values - low) / ((high - low) or 1.0)).round().astype(np.uint8)
    return [each[..., 0] if values.ndim == 4 and values.shape[3] == 1 else each for each in values]


def moving(pictures: Sequence[Image.Image], name: str, seconds: float) -> bytes:
    """Return pictures as a moving one, in the format that the name of its file ends in.

    Each picture must differ from the one before, or it is left out.
    """
    ending = Path(name).suffix.lower()
    if ending not in ENDINGS:
        raise ImageError(f"film must end in {' or '.join(ENDINGS)}, got {shown(name)}; choose one of them")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0.02 <= seconds <= 60:
        raise ImageError(f"seconds must be from 0.02 to 60, got {shown(seconds)}; leave it out")
    pause, gif = round(1000 * seconds), ending == ".gif"
    pauses = [*[pause] * (len(pictures) - 1), HELD * pause]
    options: dict[str, Any] = {"disposal": 1} if gif else {"quality": 85, "method": 4}
    frames = [each.quantize(256, dither=Image.Dither.FLOYDSTEINBERG) if gif else each for each in pictures]
    buffer = io.BytesIO()
    frames[0].save(buffer, ending[1:], save_all=True, append_images=frames[1:], duration=pauses, loop=0, **options)
    return buffer.getvalue()
