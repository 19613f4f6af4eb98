"""Overlays: a map over its photo, and films of overlays."""

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from explain._utils.errors import ImageError, keywords, shown
from explain._utils.html import png
from explain.data.boxes import Box
from explain.data.files import write_file
from explain.data.images import ImageLike, load_image
from explain.data.inputs import InputLayout, check_layout
from explain.render.captions import (
    COLORS,
    INK,
    PAPER,
    caption,
    enlargement,
    fit,
    font,
    title_size,
)
from explain.render.sheets import Group, Layout, Tile, contact_sheet, evenly_spread
from explain.render.styles import (
    LIFTED,
    SIGNED,
    VALUES,
    Array,
    Heat,
    Reading,
    Style,
    StyleLike,
    as_floats,
    curve,
    get_style,
    lookup_table,
    mark_unseen,
    percents,
    resampled_on_photo,
    rising,
)

LARGEST = float(np.finfo(np.float32).max)
Edges = tuple[float, float, float, float]


@keywords()
def overlay(
    photo: ImageLike | torch.Tensor,
    heatmap: Any,
    style: StyleLike = "heat",
    *,
    box: Box | Edges | None = None,
    colormap: str | None = None,
    alpha: float | None = None,
) -> Image.Image:
    """Draw a heatmap on a photo, at the photo's own resolution.

    For the result of `explain.attribute`: ``overlay(photo, attribution.heatmap[0])``.

    Args:
        photo: a path, the bytes of a file, a PIL image or an array ``(H, W, 3)``, see
            `explain.data.images.load_image`; or a tensor ``(3, H, W)``, from 0 to 1 or of bytes, as
            it was before its normalisation.
        heatmap: ``(h, w)`` in [0, 1], a tensor or an array, of any size: it is stretched over the
            box. For the style "signed", ``attribution.signed[0]`` in [-1, 1]; for "color",
            ``attribution.values[0]`` ``(C, h, w)``.
        style: "heat", "contour", "mask" or "spotlight", or a style with options, as
            ``render.Contour(shares=(0.5,))``; also "intensity", "signed" and "color", which pixel
            methods are drawn in, "evidence" and "certified".
        box: which part of the photo the model saw, as (left, top, right, bottom) in pixels of the
            photo; by default, all of it. What lies outside is hatched. Where the photo was cut by a
            preprocessing, ``explain.data.boxes.locate(preprocess, photo.size)`` finds the box.
        colormap: any colour map of matplotlib, or "print", for styles that have one.
        alpha: opacity of the heat, 0 to 1.

    Returns:
        An RGB picture of the photo's size.

    Raises:
        ImageError: the photo cannot be read, or the heatmap or box is not valid.
        ExplainError: an unknown style or colour map, or an opacity outside [0, 1].

    >>> overlay(Image.new("RGB", (8, 4)), np.ones((2, 2)), "spotlight").size
    (8, 4)
    """
    chosen = get_style(style, colormap=colormap, alpha=alpha)
    if isinstance(photo, torch.Tensor):
        photo = photo.detach().cpu().numpy()
    picture = load_image(photo)
    region = _checked_box((0, 0, *picture.size) if box is None else box)
    return draw_marked(picture, _checked_map(heatmap, chosen), chosen, region, [region])


def draw_marked(
    photo: Image.Image, values: Array, style: Style, region: Box, seen: Sequence[Box]
) -> Image.Image:
    """Return an RGB photo with a map drawn on ``region``, the part that it covers, in a style; the
    parts of the photo that no box in ``seen`` covers, which the model did not see, are hatched."""
    return mark_unseen(style.over(photo).draw(photo, values, region), photo, seen)


def outlined(photo: Image.Image, boxes: Mapping[str, Edges], first: int = 0) -> Image.Image:
    """A copy of a photo with boxes (left, top, right, bottom in pixels) by their labels. ``first``
    is the first one's number in the photo, by which colours go in all pictures.
    """
    picture = photo.copy()
    size = title_size(photo.size)
    draw = ImageDraw.Draw(picture)
    wide = max(1, round(min(photo.size) / 160))
    for number, (label, (x0, y0, x1, y1)) in enumerate(boxes.items(), start=first):
        color = COLORS[number % len(COLORS)]
        left = max(x0, 0)
        top = max(y0, 0)
        right = min(x1, photo.width) - 1
        bottom = min(y1, photo.height) - 1
        if left >= right or top >= bottom:
            continue
        # a rim, half of which the line then covers
        draw.rectangle(
            (left - wide, top - wide, right + wide, bottom + wide), outline=PAPER, width=2 * wide
        )
        draw.rectangle((left, top, right, bottom), outline=color, width=wide)
        if label:
            face = font(size, bold=True)
            name = fit(label, photo.width - left, face.getlength)
            draw.rectangle(
                (left, top, left + face.getlength(name) + size, top + 1.5 * size), fill=color
            )
            draw.text((left + size / 2, top + 0.1 * size), name, PAPER, face)
    return picture


def numbered(photo: Image.Image, slices: Mapping[str, Edges]) -> Image.Image:
    """A copy of a photo of several slices side by side, with the name of each in its corner."""
    picture = photo.copy()
    draw = ImageDraw.Draw(picture)
    for name, (left, top, right, bottom) in slices.items():
        size = max(9, round(min(right - left, bottom - top) / 11))
        face = font(size)
        text = fit(name, right - left, face.getlength)
        draw.text((left + size / 3, top), text, PAPER, face, stroke_width=1, stroke_fill=INK)
    return picture


WEAK = 0.05  # of the largest pair, below which none is drawn


def network(photo: Image.Image, interactions: Array, centres: Array, region: Box) -> Image.Image:
    """Draw a disk for each region, at ``centres`` ``(M, 2)`` (y, x, as parts of ``region``), and a
    line for each pair: red for the target, blue against it. The diagonal is of single regions."""
    picture = LIFTED.below(photo)
    draw = ImageDraw.Draw(picture)
    table = lookup_table(SIGNED)
    # level 128 is zero; strong colours are near both ends
    against, supporting = (tuple(table[128 + 100 * sign].tolist()) for sign in (-1, 1))
    corner = (region.left, region.top)
    places = centres[:, ::-1] * (region.width, region.height) + corner  # x, y in pixels
    # the radius of the largest disk: disks of neighbours do not touch
    unit = min(region.width, region.height) / (3 * max(1, len(places)) ** 0.5)
    sizes = np.abs(interactions)
    pairs = np.triu(sizes, 1)  # each pair once, without single regions
    for first, second in np.argwhere(pairs > WEAK * pairs.max()):
        width = max(1, round(unit / 3 * pairs[first, second] / pairs.max()))
        ends = [tuple(places[first]), tuple(places[second])]
        color = supporting if interactions[first, second] > 0 else against
        draw.line(ends, fill=color, width=width)
    largest = sizes.diagonal().max() or 1.0  # where all are zero, all disks are points
    for number, (across, down) in enumerate(places):
        radius = unit * (sizes[number, number] / largest) ** 0.5  # the area shows the size
        edges = (across - radius, down - radius, across + radius, down + radius)
        color = supporting if interactions[number, number] > 0 else against
        draw.ellipse(edges, fill=color, outline=PAPER)
    return picture


def _checked_box(box: Any) -> Box:
    """Return the ``box`` argument of `overlay` as a `Box`; refuse one whose width or height is not
    positive and finite."""
    region = Box(0, 0, 0, 0)  # refused below, unless ``box`` can be read
    with suppress(TypeError, ValueError):
        region = box if isinstance(box, Box) else Box(*map(float, box))
    if not (0 < region.width < np.inf and 0 < region.height < np.inf):
        raise ImageError(
            f"box must be (left, top, right, bottom) in pixels, got {shown(box)}; mend it"
        )
    return region


def _checked_map(heatmap: Any, style: Style) -> Array:
    """Return the ``heatmap`` argument of `overlay` as a float32 array; refuse one whose shape or
    values the style cannot draw, by what `_NEEDS` says of the kind of map that it reads."""
    least, most, dimensions, remedy = _NEEDS[style.reads]
    values = as_floats("heatmap", heatmap, remedy)
    must = f"heatmap for style {style.name!r} must"
    if values.ndim != dimensions or not values.size:
        raise ImageError(f"{must} be the map of one image, got shape {values.shape}; {remedy}")
    low = float(values.min())
    high = float(values.max())
    # rounding may exceed 1 a little; NaN is neither
    if not (least <= low and high <= most + 1e-6):
        raise ImageError(
            f"{must} have values from {least:g} to {most:g}, got {low:.3g} to {high:.3g}; {remedy}"
        )
    return values


_NEEDS: dict[Reading, tuple[float, float, int, str]] = {
    "heatmap": (0.0, 1.0, 2, "pass attribution.heatmap[0], (H, W) in [0, 1]"),
    "signed": (-1.0, 1.0, 2, "pass attribution.signed[0], (H, W) in [-1, 1]"),
    "values": (-LARGEST, LARGEST, 3, "pass attribution.values[0], (C, H, W)"),
    "sets": (0.0, 1.0, 3, "pass attribution.sets.masks[0], (R, H, W)"),
    "answers": (-1.0, 1.0, 2, "pass attribution.certified[0], (H, W)"),
}
"""What each kind of style needs: the lowest and the highest value, how many dimensions, and what to
pass."""


def concepts(
    photo: Image.Image,
    maps: Array,
    region: Box,
    labels: Sequence[str],
    *,
    shares: Sequence[float] = (),
    title: str = "",
    detail: str = "",
) -> Image.Image:
    """Colour each pixel by the strongest of K maps ``(K, H, W)`` in [0, 1] that cover ``region``,
    with a line for each map's colour below: its label, after its share as a percentage."""
    largest = resampled_on_photo(maps[0], photo.size, region)
    # which map is the largest at each pixel; arrays have the height first
    strongest = np.zeros(photo.size[::-1], np.uint16)
    # one map at a time: at the size of a large photo, all might not fit into memory
    for i, values in enumerate(maps[1:], start=1):
        on_photo = resampled_on_photo(values, photo.size, region)
        strongest[on_photo > largest] = i
        np.maximum(on_photo, largest, out=largest)
    palette = np.resize(np.array(COLORS, np.uint8), (len(maps), 3))  # over again for many maps
    opacity = curve(Heat.alpha * rising(VALUES))
    colors = Image.fromarray(palette[strongest])
    colored = Image.composite(colors, LIFTED.below(photo), Image.fromarray(opacity[largest]))
    colored = mark_unseen(colored, photo, [region])
    percentages = percents(shares) or [""] * len(labels)
    colors_of_lines = [(red, green, blue) for red, green, blue in palette.tolist()]
    entries = list(zip(colors_of_lines, percentages, labels, strict=True))
    return caption(colored, title, detail, entries=entries)


FORMATS: dict[str, dict[str, Any]] = {
    ".gif": {"loop": 0, "disposal": 1},
    ".webp": {"quality": 85, "method": 4},
}
"""Pillow's options for a moving picture, by the ending of its file."""
HELD = 4  # how many times as long as the others the last picture is shown


@dataclass(frozen=True, eq=False)
class MovingOverlay:
    """The overlays of frames in their order, with their names; a notebook shows the `sheet`."""

    pictures: tuple[Image.Image, ...] = field(repr=False)
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.pictures)

    def sheet(self, count: int = 12, tile: int = 180) -> Image.Image:
        """Return a contact sheet of at most ``count`` frames of the film, evenly spread, each
        fitted into a square of ``tile`` pixels."""
        tiles = [Tile(self.pictures[i], self.names[i]) for i in evenly_spread(len(self), count)]
        return contact_sheet(Layout("", "", (Group("", tuple(tiles)),)), tile)

    def save(
        self, path: str | os.PathLike[str], *, seconds: float = 0.2, overwrite: bool = False
    ) -> Path:
        """Write the overlays as a moving picture, each with its name below.

        Args:
            path: ends in ``.gif`` or ``.webp``.
            seconds: how long each frame is shown; the last one four times as long.
            overwrite: replace a file that exists.

        Raises:
            ImageError: the path ends in something else, or ``seconds`` is not from 0.02 to 60.
            OutputError: the file exists and ``overwrite`` is not set, or it cannot be written.
        """
        path = Path(path)
        pairs = zip(self.pictures, self.names, strict=True)
        captioned = [caption(picture, name, "") for picture, name in pairs]
        return write_file(path, moving(captioned, path.name, seconds), overwrite=overwrite)

    def _repr_png_(self) -> bytes:
        """Return what a notebook displays of a film of overlays: its contact sheet as a PNG."""
        return png(self.sheet())


@keywords()
def film(
    frames: Any,
    heatmap: Any,
    style: StyleLike = "heat",
    *,
    unit: str = "frame",
    colormap: str | None = None,
    alpha: float | None = None,
    layout: InputLayout | None = None,
) -> MovingOverlay:
    """Draw the heatmap of a video or volume on its frames or slices, or of tiles or a bag of
    patches on these.

    For the result of `explain.attribute`: ``film(volume[0], attribution.heatmap[0],
    unit="slice")``.

    Args:
        frames: a list of images; or a tensor or array ``(T, H, W)``, ``(T, H, W, 3)``, or as a
            model takes it ``(C, T, H, W)`` or ``(T, C, H, W)`` with one or three channels. Values
            other than uint8 are scaled from their least to their largest one.
        heatmap: ``(T, H, W)``, the maps of all frames, which share one scale.
        style, colormap, alpha: as for `explain.render.overlay`.
        unit: what a frame is called.
        layout: "NTCHW" where the frames come before the channels, or "NCTHW". By default, the sizes
            of the axes decide; where both could be channels, the channels come first.

    Raises:
        ImageError: there are not as many frames as maps, or the frames are no pictures.

    >>> moving = film(np.zeros((1, 4, 8, 6)), np.ones((4, 8, 6)), unit="slice")
    >>> len(moving), moving.names[-1], moving.pictures[0].size  # small frames are enlarged
    (4, 'slice 4 of 4', (240, 320))
    """
    chosen = get_style(style, colormap=colormap, alpha=alpha)
    maps = list(heatmap)
    photos = [load_image(frame) for frame in _frames(frames, len(maps), check_layout(layout))]
    if len(photos) != len(maps) or not photos:
        raise ImageError(
            f"heatmap must have a map for each of {len(photos)} frames, got {len(maps)}; take one "
            "video's"
        )
    times = enlargement(photos[0].size)
    pictures = []
    for photo, frame_map in zip(photos, maps, strict=True):
        size = (photo.width * times, photo.height * times)
        large = photo.resize(size, Image.Resampling.NEAREST)
        pictures.append(overlay(large, frame_map, chosen))
    names = [f"{unit} {i} of {len(maps)}" for i in range(1, len(maps) + 1)]
    return MovingOverlay(tuple(pictures), tuple(names))


CHANNELS = (1, 3)


def _frames(frames: Any, count: int, layout: InputLayout | None) -> Sequence[ImageLike]:
    """Each frame as a picture, from a tensor or array ``(H, W, C)`` for each of ``count`` maps,
    scaled by the range of all frames unless uint8; a list as it is.
    """
    if isinstance(frames, (list, tuple)):
        return frames
    values = np.asarray(frames.detach().cpu() if hasattr(frames, "detach") else frames)
    shape = values.shape
    # frames may come before the channels, unless the channels are last already
    frames_may_be_first = layout == "NTCHW" or (layout is None and shape[-1] not in CHANNELS)
    if values.ndim == 3:  # (T, H, W)
        values = values[..., None]
    # (C, T, H, W)
    elif shape[0] in CHANNELS and shape[1] == count and layout != "NTCHW":
        values = np.moveaxis(values, 0, -1)
    # (T, C, H, W)
    elif shape[0] == count and shape[1] in CHANNELS and frames_may_be_first:
        values = np.moveaxis(values, 1, -1)
    if values.ndim != 4 or values.shape[3] not in CHANNELS:
        raise ImageError(
            f"frames must be (T, H, W), (C, T, H, W) or (T, C, H, W), C 1 or 3, got {shape}; "
            "take one video"
        )
    if values.dtype != np.uint8:
        low = float(values.min())
        high = float(values.max())
        extent = (high - low) or 1.0  # frames of one value become black
        values = (255 * (values - low) / extent).round().astype(np.uint8)
    return list(values)


def moving(pictures: Sequence[Image.Image], name: str, seconds: float) -> bytes:
    """The bytes of a moving picture in the format of ``name`` (.gif or .webp), ``seconds`` a
    picture (0.02 to 60), the last `HELD` times as long. Pillow leaves out repeated pictures.
    """
    ending = Path(name).suffix.lower()
    if ending not in FORMATS:
        raise ImageError(
            f"film must end in {' or '.join(FORMATS)}, got {shown(name)}; choose one of them"
        )
    if not 0.02 <= seconds <= 60:
        raise ImageError(f"seconds must be from 0.02 to 60, got {shown(seconds)}; leave it out")
    pause = round(1000 * seconds)  # Pillow takes milliseconds
    pauses = [pause] * (len(pictures) - 1) + [HELD * pause]
    frames = list(pictures)
    if ending == ".gif":
        frames = [picture.quantize(256, dither=Image.Dither.FLOYDSTEINBERG) for picture in pictures]
    buffer = io.BytesIO()
    frames[0].save(
        buffer,
        ending[1:],
        save_all=True,
        append_images=frames[1:],
        duration=pauses,
        **FORMATS[ending],
    )
    return buffer.getvalue()
