"""`film`: how the map of a photo moved during training, from the file of a watched training."""

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from explain._utils.errors import RunError, keywords, python_or_command
from explain._utils.html import picture_html
from explain._utils.spelling import did_you_mean
from explain.attribution.pictures import Look, Scene
from explain.data.files import Files
from explain.data.images import ImageLike
from explain.render import captions, overlays, styles
from explain.render.figures import as_picture, empty
from explain.render.sheets import Group, Layout, Tile, contact_sheet, evenly_spread
from explain.runs.result import Run, open_run
from explain.store import reading, sources
from explain.targets.outputs import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 480  # pixels of the longer side of the photo in a film
TILES = 8  # snapshots that a figure shows at most
WIDE = 10.0  # inches of a figure
CURVES = 3.0  # inches of the height of its curves


@dataclass(frozen=True, eq=False)
class Film:
    """The maps of one photo by one method, snapshot by snapshot: as `pictures`, as one moving
    picture with `save`, and side by side as `figure`."""

    name: str
    """What the photo is called."""
    method: str
    steps: tuple[int, ...]
    """The number of the training step of each snapshot."""
    rows: tuple[reading.Row, ...] = field(repr=False)
    """What is stored of each snapshot."""
    photo: Image.Image = field(repr=False)
    style: styles.StyleLike | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def _repr_html_(self) -> str:
        return picture_html(
            as_picture(self.figure()), f"{self.name}: maps of {self.method} during training"
        )

    @property
    def similarity(self) -> list[float]:
        """The correlation of each map with the last one: 1.0 for the same places; NaN where a map
        is the same all over. It says when the map had found its place.
        """
        maps = [row.values.double().flatten().numpy() for row in self.rows]
        with np.errstate(divide="ignore", invalid="ignore"):
            return [float(np.corrcoef(values, maps[-1])[0, 1]) for values in maps]

    def pictures(self) -> list[Image.Image]:
        """Return the photo with the map of each snapshot, and below it the step and the
        probability; all of one size."""
        pictures = [
            captions.caption(overlay, f"step {step:,}", f"{row.method} · {_outcome(row)}")
            for step, row, overlay in zip(self.steps, self.rows, self._overlays, strict=True)
        ]
        width = max(picture.width for picture in pictures)
        height = max(picture.height for picture in pictures)
        return [
            ImageOps.expand(
                picture, (0, 0, width - picture.width, height - picture.height), "white"
            )
            for picture in pictures
        ]

    def save(
        self, path: str | os.PathLike[str], *, seconds: float = 0.4, overwrite: bool = False
    ) -> list[Path]:
        """Write the moving picture, and the figure beside it as PNG; both are there afterwards, or
        none.

        Args:
            path: ends in ``.gif`` or ``.webp``.
            seconds: how long each snapshot is shown; the last one four times as long.
            overwrite: replace files that are there.

        Returns:
            Both paths.

        Raises:
            ImageError: it ends in something else, or the time is none.
            OutputError: a file is there already, or cannot be written.
        """
        where = Path(path)
        files = Files(where.parent, overwrite=overwrite)
        files.add_bytes(where.name, overlays.moving(self.pictures(), where.name, seconds))
        files.add_picture(f"{where.stem}.png", as_picture(self.figure()))
        return files.write()

    def figure(self) -> "Figure":
        """Return a figure: up to eight snapshots, evenly spread, and over all steps the probability
        and `similarity`."""
        shown = evenly_spread(len(self), TILES)
        tiles = [
            Tile(self._overlays[i], f"step {self.steps[i]:,}", _outcome(self.rows[i]))
            for i in shown
        ]
        groups = (Group("", tuple(tiles)),)
        picture = contact_sheet(Layout(title="", detail="", groups=groups), tile=300)
        height = WIDE * picture.height / picture.width
        span = f"from step {self.steps[0]} to step {self.steps[-1]}"
        figure = empty(
            (WIDE, height + CURVES),
            f"how {self.method} moved on {self.name} over {len(self)} snapshots, {span}",
        )
        above, below = figure.subplots(2, 1, height_ratios=[height, CURVES])
        above.imshow(np.asarray(picture))
        above.set_axis_off()
        probabilities = [row.probability for row in self.rows]
        if any(probability is not None for probability in probabilities):
            targets = {row.target for row in self.rows}
            target_label = self.rows[0].target if len(targets) == 1 else "the top class"
            below.plot(
                self.steps,
                probabilities,
                "o-",
                markersize=3,
                color="#2563a8",
                label=f"probability of {target_label}",
            )
        similarities = self.similarity
        below.plot(
            self.steps,
            similarities,
            "s-",
            markersize=3,
            color="#c0392b",
            label="correlation with the last map",
        )
        below.set(xlabel="step of training", ylim=(np.nanmin([0.0, *similarities]) - 0.05, 1.05))
        below.xaxis.get_major_locator().set_params(integer=True)
        below.spines[["top", "right"]].set_visible(False)
        below.grid(alpha=0.25)
        below.legend(
            loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=2, frameon=False, fontsize=8
        )
        return figure

    @cached_property
    def _overlays(self) -> list[Image.Image]:
        """The photo at `SIDE` pixels with the map of each snapshot drawn on it, in the order of
        ``steps``; drawn once, for the pictures and the figure."""
        look = Look(self.style)
        box = self.rows[0].box
        scene = Scene(self.photo, box, (box,)).fitted(SIDE)
        scene = scene.enlarged(captions.enlargement(scene.photo.size))
        return [scene.overlay(row.attribution, look.of(row.style)) for row in self.rows]


@keywords()
def film(
    run: Run | str | os.PathLike[str],
    photo: str | os.PathLike[str],
    *,
    method: str | None = None,
    target: str | int | None = None,
    image: ImageLike | None = None,
    style: styles.StyleLike | None = None,
) -> Film:
    """Show how the map of a photo moved during training.

    Args:
        run: the file of a training that was watched with `Monitor`.
        photo: its name there, or the end of its name or path, such as "cat.jpg".
        method: which, where there are several.
        target: a label or the number of a class, where several were explained.
        image: the photo, where it had no file or this has moved.
        style: how the maps are drawn, in place of the method's own style.

    Raises:
        RunError: the run is none of a training, the photo is not in it or has changed, or more than
            one thing may be meant.
        ImageError: the photo cannot be read.

    >>> film("none.sqlite", "cat.jpg")
    Traceback (most recent call last):
    explain.RunError: run 'none.sqlite' must be a file, but there is none; check the path
    """
    run = run if isinstance(run, Run) else open_run(run)
    (count,) = next(
        run.query("SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'steps'")
    )
    if not count:  # only the file of a training has this table
        raise RunError(
            f"run {sources.path_text(run.path)!r} must be of a training, got another; watch a "
            "training first"
        )
    name = _full_name(run, sources.path_text(photo))
    rows_by_step = _rows_by_step(run, name, method, target)
    first = next(iter(rows_by_step.values()))
    remedy = python_or_command("pass image=", "make the film in Python, which takes it")
    picture = first.picture(image, remedy)
    return Film(
        name,
        first.method,
        steps=tuple(rows_by_step),
        rows=tuple(rows_by_step.values()),
        photo=picture,
        style=style,
    )


def _full_name(run: Run, photo: str) -> str:
    """The name that a watched photo has in the file of a training, from what the caller calls it:
    its name, or the end of its name or path, such as "cat.jpg".
    """
    # a photo has a row for each step: the path of any will do, and max takes one
    query = (
        "SELECT s.name, max(p.path) FROM steps s JOIN photos p ON p.id = s.photo GROUP BY s.name"
    )
    paths: dict[str, str | None] = dict(run.query(query))  # by name; None: no file
    if photo in paths:
        return photo
    # whole parts of a path, as "/cat.jpg", must fit, so that "bobcat.jpg" does not
    path_end = f"/{Path(photo).as_posix()}".replace("//", "/")
    matches = [
        name
        for name, path in paths.items()
        if f"/{name}".endswith(path_end) or f"/{path}".endswith(path_end)
    ]
    if len(matches) != 1:
        hint = (
            f"it may be {matches[0]!r} or {matches[1]!r}" if matches else did_you_mean(photo, paths)
        )
        raise RunError(f"photo must be one of this run's {len(paths)}, got {photo!r}; {hint}")
    return matches[0]


def _rows_by_step(
    run: Run, name: str, method: str | None, target: str | int | None
) -> dict[int, reading.Row]:
    """One watched photo's stored map at each step with a snapshot, in rising order; ``name`` is its
    full name. ``method`` and ``target`` None: the only one, or each step's top class.
    """
    # each step has the photo under another name (`stored_name`)
    query = "SELECT p.name, s.step FROM steps s JOIN photos p ON p.id = s.photo WHERE s.name = ?"
    steps: dict[str, int] = dict(run.query(query, (name,)))
    rows = list(run.rows_where(" WHERE p.id IN (SELECT photo FROM steps WHERE name = ?)", (name,)))
    methods = list(dict.fromkeys(row.method for row in rows))
    if method is None and len(methods) > 1:
        raise RunError(f"method must be one of {', '.join(methods)}, got none; choose one of them")
    if method is not None and method not in methods:
        raise RunError(f"method {method!r} is not in this run; {did_you_mean(method, methods)}")
    rows = [row for row in rows if method in (None, row.method)]
    # a label, or the number of a class, which may be typed
    chosen = [
        row for row in rows if target in (None, row.target, row.target_class, str(row.target_class))
    ]
    if not chosen:
        raise RunError(
            f"target {target!r} was not explained; "
            f"{did_you_mean(str(target), [r.target for r in rows])}"
        )
    by_step = {steps[row.name]: row for row in sorted(chosen, key=lambda row: steps[row.name])}
    if len(by_step) < len(chosen):  # several maps of a step, which differ by their targets
        targets = ", ".join(dict.fromkeys(row.target for row in chosen))
        raise RunError(f"target must be one of {targets}, got none; choose one of them")
    return by_step


def _outcome(row: reading.Row) -> str:
    """The caption of a snapshot's map: its target, and the probability where there is one."""
    return row.target if row.probability is None else f"{row.target}, {percent(row.probability)}"
