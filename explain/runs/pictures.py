"""Pictures of some photos of a run, drawn when they are asked for: the maps are stored, the overlays are not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from explain.errors import ExplainError, RunError, shown
from explain.output import Files, distinct, slug
from explain.pictures import Look
from explain.render import StyleLike
from explain.runs.reading import ORDERS, Row, Stored
from explain.runs.sources import Source, entries_of

_CHOICE = re.compile(rf"({'|'.join(ORDERS)})(?::(\d+))?")


def choice(which: str) -> tuple[str, int | None]:
    """Read which photos are meant: an order, and how many of them.

    Raises:
        RunError: it is not written in this way.

    >>> choice("worst:50"), choice("source")
    (('worst', 50), ('source', None))
    """
    found = _CHOICE.fullmatch(which) if isinstance(which, str) else None
    if found is None or found[2] == "0":
        known = ", ".join(ORDERS)
        raise RunError(f"pictures must be one of {known}, as in 'worst:50', got {shown(which)}; choose one of them")
    return found[1], int(found[2]) if found[2] else None


def write_pictures(
    run: Stored,
    which: str,
    folder: str | os.PathLike[str],
    *,
    source: Source | None = None,
    style: StyleLike | None = None,
    overwrite: bool = False,
) -> tuple[list[Path], dict[str, str]]:
    """Write overlays of some photos: of each, one for every method and target.

    Args:
        run: the run.
        which: "worst:50" (the photos whose label, or else prediction, has the lowest probability), "best:50", or
            "source" for all.
        folder: where to write.
        source: where photos come from that had no file.
        style: how the maps are drawn, in place of each method's own style.
        overwrite: replace files that are there.

    Returns:
        The paths, the first photo first; and why photos could not be drawn, by their names.

    Raises:
        ExplainError: the choice or the style is unknown, or the folder cannot be written.
    """
    order, count = choice(which)
    look = Look(style)
    written: list[Path] = []
    failures: dict[str, str] = {}
    places = None if source is None else {entry.name: entry for entry in entries_of(source) if hasattr(entry, "where")}
    digits = len(str(min(run.photos, count or run.photos)))
    for number, rows in enumerate(islice(by_photo(run, order), count), 1):
        files = Files(folder, overwrite=overwrite)
        try:
            photo = photo_of(rows[0], source, places or {})
            about = slug(f"{number:0{digits}} {Path(rows[0].name).stem}")
            names = distinct(slug(f"{about}-{row.target}-{row.method}") for row in rows)
            pictures = [row.overlay(look.of(row.style), photo) for row in rows]
        except ExplainError as error:
            failures[rows[0].name] = str(error)
            continue
        for name, picture in zip(names, pictures, strict=True):
            files.add_picture(f"{name}.png", picture)
        written += files.write()
    return written, failures


def by_photo(run: Stored, order: str) -> Iterator[list[Row]]:
    """The rows of each photo."""
    rows: list[Row] = []
    for row in run.rows(order=order):
        if rows and rows[0].name != row.name:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def photo_of(row: Row, source: Source | None, places: dict[str, Any]) -> Any:
    """The photo of a row: its file, or what the source has under its name.

    Raises:
        RunError: there is neither.
    """
    from torch import Tensor

    if source is not None and row.name in places:
        image = source.read(places[row.name]).image
    elif row.path is not None:
        image = row.path
    else:
        raise RunError(f"photo {row.name!r} must have a file to be drawn, but has none; give its source")
    if isinstance(image, Tensor):
        raise RunError(f"photo {row.name!r} must be an image to be drawn, but its source has a tensor; give images")
    return image
