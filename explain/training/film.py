"""`film`: how the map of a photo moved during training, from the file of a watched training."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from explain._utils.errors import RunError, either, keywords, shown
from explain._utils.spelling import did_you_mean
from explain.attribution.pictures import Look, percent
from explain.data.files import Files
from explain.data.images import ImageLike, load_image
from explain.render.captions import caption, enlargement
from explain.render.figure import as_png, empty
from explain.render.styles import StyleLike
from explain.runs.reading import Row
from explain.runs.result import Run, open_run
from explain.runs.sources import text
from explain.training.photos import shrunk_scene

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 480  # pixels of the longer side of the photo in a film
TILES = 8  # looks that a figure shows at most
ENDINGS = (".gif", ".webp")
HELD = 4  # times as long as the others the last picture is shown


@dataclass(frozen=True, eq=False)
class Film:
    """The maps of one photo by one method, look by look.

    ``name`` is what the photo is called, ``steps`` has the numbers of training steps, and ``rows`` what is stored of
    each; `pictures` are what it shows, `save` writes them as one moving picture, and `figure` has them side by side.
    """

    name: str
    method: str
    steps: tuple[int, ...]
    rows: tuple[Row, ...] = field(repr=False)
    photo: Image.Image = field(repr=False)
    style: StyleLike | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def _repr_png_(self) -> bytes:
        return as_png(self.figure())

    @property
    def similarity(self) -> list[float]:
        """The correlation of each map with the last one: 1.0 for the same places; NaN where a map is the same all over.

        It says when the map had found its place.
        """
        last = self.rows[-1].values.double().flatten()
        return [_correlation(row.values.double().flatten().numpy(), last.numpy()) for row in self.rows]

    def pictures(self) -> list[Image.Image]:
        """Return the photo with the map of each look, and below it the step and the probability; all of one size."""
        found = [
            caption(overlay, f"step {step:,}", f"{row.method} · {row.target}{_probability(row)}")
            for step, row, overlay in zip(self.steps, self.rows, self._overlays, strict=True)
        ]
        width, height = max(each.width for each in found), max(each.height for each in found)
        sheets = [Image.new("RGB", (width, height), "white") for _ in found]
        for sheet, each in zip(sheets, found, strict=True):
            sheet.paste(each, (0, 0))
        return sheets

    def save(self, path: str | os.PathLike[str], *, seconds: float = 0.4, overwrite: bool = False) -> list[Path]:
        """Write the moving picture, and the figure beside it as PNG; both are there afterwards, or none.

        Args:
            path: ends in ``.gif`` or ``.webp``.
            seconds: how long each look is shown; the last one four times as long.
            overwrite: replace files that are there.

        Returns:
            Both paths.

        Raises:
            RunError: it ends in something else, or the time is none.
            OutputError: a file is there already, or cannot be written.
        """
        where = Path(path)
        if where.suffix.lower() not in ENDINGS:
            raise RunError(f"film must end in {' or '.join(ENDINGS)}, got {text(where.name)!r}; choose one of them")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0.02 <= seconds <= 60:
            raise RunError(f"seconds must be from 0.02 to 60, got {shown(seconds)}; leave it out")
        files = Files(where.parent, overwrite=overwrite)
        files.add_bytes(where.name, _moving(self.pictures(), where.suffix.lower(), round(1000 * seconds)))
        files.add_bytes(f"{where.stem}.png", as_png(self.figure()))
        return files.write()

    def figure(self) -> Figure:
        """Return a figure: up to eight looks, evenly spread, and over all steps the probability and `similarity`."""
        chosen = _spread(len(self), TILES)
        columns = len(chosen) if len(chosen) <= 4 else -(-len(chosen) // 2)
        rows = -(-len(chosen) // columns)
        about = f"how {self.method} moved on {self.name} over {len(self)} looks, from step {self.steps[0]} to step "
        shape = self.photo.height / self.photo.width
        drawn = empty((3.0 * max(columns, 2), 3.0 * rows * shape + 0.5 * rows + 3.0), f"{about}{self.steps[-1]}")
        parts: Any = drawn.subfigures(2, 1, height_ratios=[3.0 * rows * shape + 0.5 * rows, 3.0])
        above, below = parts
        axes = np.atleast_1d(np.asarray(above.subplots(rows, columns))).ravel()
        for axis in axes:
            axis.set_axis_off()
        for axis, place in zip(axes, chosen, strict=False):
            axis.imshow(np.asarray(self._overlays[place]), interpolation="none")
            row = self.rows[place]
            axis.set_title(f"step {self.steps[place]:,}: {row.target}{_probability(row)}", fontsize=8, parse_math=False)
        self._draw_curves(below.subplots())
        return drawn

    def _draw_curves(self, axis: Any) -> None:
        known = [float("nan") if row.probability is None else row.probability for row in self.rows]
        if not np.isnan(known).all():
            targets = {row.target for row in self.rows}
            whose = next(iter(targets)) if len(targets) == 1 else "the top class"
            axis.plot(self.steps, known, "o-", markersize=3, color="#2563a8", label=f"probability of {whose}")
        axis.plot(
            self.steps, self.similarity, "s-", markersize=3, color="#c0392b", label="correlation with the last map"
        )
        low = min([0.0, *(each for each in self.similarity if not np.isnan(each))])
        axis.set(xlabel="step of training", ylim=(low - 0.05, 1.05))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=2, frameon=False, fontsize=8)

    @cached_property
    def _overlays(self) -> list[Image.Image]:
        look = Look(self.style)
        scene = shrunk_scene(self.photo, self.rows[0].box, SIDE)
        scene = scene.enlarged(enlargement(scene.photo.size))
        return [scene.overlay(row.attribution, look.of(row.style)) for row in self.rows]


@keywords()
def film(
    run: Run | str | os.PathLike[str],
    photo: str | os.PathLike[str],
    *,
    method: str | None = None,
    target: str | int | None = None,
    image: ImageLike | None = None,
    style: StyleLike | None = None,
) -> Film:
    """Show how the map of a photo moved during training.

    Args:
        run: the file of a training that was watched with `Watch`.
        photo: its name there, or the end of its name or path, such as "cat.jpg".
        method: which, where there are several.
        target: a label or the number of a class, where several were explained.
        image: the photo, where it had no file or this has moved.
        style: how the maps are drawn, in place of the method's own style.

    Raises:
        RunError: the run is none of a training, the photo is not in it, or more than one thing may be meant.
        ImageError: the photo cannot be read.

    >>> film("none.sqlite", "cat.jpg")
    Traceback (most recent call last):
    explain.RunError: run 'none.sqlite' must be a file, but there is none; check the path
    """
    found = run if isinstance(run, Run) else open_run(run)
    if not next(found.query("SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'steps'"))[0]:
        raise RunError(f"run {text(found.path)!r} must be one of a training that was watched, got another; "
                       "watch a training first")  # fmt: skip
    name = _named(found, text(photo))
    looks = list(_looks(found, name, method, target))
    rows = [row for _, row in looks]
    return Film(name, rows[0].method, tuple(step for step, _ in looks), tuple(rows), _image(rows[0], image), style)


def _named(run: Run, photo: str) -> str:
    """The one photo that is meant."""
    known = dict(run.query("SELECT s.name, max(p.path) FROM steps s JOIN photos p ON p.id = s.photo GROUP BY s.name"))
    if photo in known:
        return photo
    end = f"/{Path(photo).as_posix()}"
    near = [
        name for name, path in known.items()
        if f"/{name}".endswith(end) or (path and (f"/{path}".endswith(end) or _is_same(path, photo)))
    ]  # fmt: skip
    if len(near) != 1:
        hint = f"it may be {near[0]!r} or {near[1]!r}" if near else did_you_mean(photo, known)
        raise RunError(f"photo must be one of this run's {len(known)}, got {photo!r}; {hint}")
    return str(near[0])


def _is_same(path: str, photo: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(photo)


def _looks(run: Run, name: str, method: str | None, target: str | int | None) -> Iterator[tuple[int, Row]]:
    """The rows of a photo with their steps, one for each step."""
    names = "SELECT p.name, s.step FROM steps s JOIN photos p ON p.id = s.photo WHERE s.name = ?"
    steps: dict[str, int] = dict(run.query(names, (name,)))
    rows = list(run._rows(" WHERE p.id IN (SELECT photo FROM steps WHERE name = ?)", (name,)))
    methods = list(dict.fromkeys(row.method for row in rows))
    if method is None and len(methods) > 1:
        raise RunError(f"method must be one of {', '.join(methods)}, got none; choose one of them")
    if method is not None and method not in methods:
        raise RunError(f"method {method!r} is not in this run; {did_you_mean(method, methods)}")
    rows = [row for row in rows if method is None or row.method == method]
    if target is not None:
        targets = list(dict.fromkeys(row.target for row in rows))
        rows = [row for row in rows if target in (row.target, row.target_class, str(row.target_class))]
        if not rows:
            raise RunError(f"target {target!r} was not explained; {did_you_mean(str(target), targets)}")
    rows.sort(key=lambda row: steps[row.name])
    for step, each in groupby(rows, lambda row: steps[row.name]):
        first, *others = each
        if others:
            several = ", ".join(row.target for row in (first, *others))
            raise RunError(f"target must be one of {several}, got none; choose one of them")
        yield step, first


def _image(row: Row, given: ImageLike | None) -> Image.Image:
    if given is None and row.path is None:
        remedy = either("pass image=", "make the film in Python, which takes it")
        raise RunError(f"image must be given for a photo that had no file, got none; {remedy}")
    return load_image(row.path if given is None else given)  # type: ignore[arg-type]


def _correlation(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    a, b = one - one.mean(), other - other.mean()
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else float("nan")


def _probability(row: Row) -> str:
    return "" if row.probability is None else f", {percent(row.probability)}"


def _spread(count: int, most: int) -> list[int]:
    """At most so many places, evenly spread, with the first and the last.

    >>> _spread(3, 8), _spread(9, 3)
    ([0, 1, 2], [0, 4, 8])
    """
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most))})


def _moving(pictures: Sequence[Image.Image], ending: str, pause: int) -> bytes:
    """Return pictures as one that moves; each says its step, so that none is like the one before and left out."""
    pauses = [*[pause] * (len(pictures) - 1), HELD * pause]
    buffer = io.BytesIO()
    if ending == ".webp":
        first, *rest = pictures
        first.save(buffer, "WEBP", save_all=True, append_images=rest, duration=pauses, loop=0, quality=85, method=4)
        return buffer.getvalue()
    first, *rest = [picture.quantize(256, dither=Image.Dither.FLOYDSTEINBERG) for picture in pictures]
    first.save(buffer, "GIF", save_all=True, append_images=rest, duration=pauses, loop=0, disposal=1)
    return buffer.getvalue()
