"""Pictures of some photos of a run, and pages with them, drawn from the stored maps."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from explain._utils.errors import ExplainError, RunError, printable, shown
from explain.attribution.pictures import Look
from explain.attribution.records import ModelOrigin, RecordedRequest
from explain.attribution.result import Attribution
from explain.data.files import Files, distinct, slug
from explain.data.images import Box, load_image
from explain.render.styles import StyleLike
from explain.report.reported import written as written_page
from explain.report.reproduce import Reproduction
from explain.report.sheets import entry, sheet_of
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


@dataclass(frozen=True, eq=False)
class _Kept:
    """What a run has of one photo, as a report takes it: the best answer, and the maps by target and method."""

    rows: tuple[Row, ...]
    photo: Image.Image
    origin: ModelOrigin
    results: tuple[Mapping[str, Attribution], ...]
    crops: tuple[Box, ...] = ()
    question: RecordedRequest = field(default_factory=lambda: RecordedRequest({}))
    categories: None = None
    probabilities: torch.Tensor | None = None
    explainer: None = None

    @property
    def source(self) -> str:
        return self.rows[0].path or self.rows[0].name

    @property
    def box(self) -> Box:
        return self.rows[0].box

    @property
    def input_size(self) -> tuple[int, int]:
        return self.rows[0].input_size

    @property
    def methods(self) -> list[str]:
        return list(self.results[0])

    @property
    def targets(self) -> list[str]:
        return list(dict.fromkeys(row.target for row in self.rows))

    @property
    def predictions(self) -> list[tuple[str, float]]:
        first = self.rows[0]
        best, probability = first.prediction, first.prediction_probability
        return [] if best is None or probability is None else [(best, probability)]

    def record(self, method: str | None = None, target: int | str = 0) -> dict[str, Any]:
        """What the run has of one map."""
        label = self.targets[target] if isinstance(target, int) else target
        row = next(row for row in self.rows if row.target == label and row.method == (method or self.methods[0]))
        names = ("name", "method", "target", "target_class", "score", "probability", "label", "prediction", "layer")
        more = {"path": row.path, "sha256": row.sha256, "delta": row.delta, "runs": row.runs, "error": row.error}
        return {**{name: getattr(row, name) for name in names}, **more, "metrics": dict(row.metrics)}


def to_html(
    run: Stored,
    path: str | os.PathLike[str],
    which: str = "source:200",
    *,
    source: Source | None = None,
    title: str | None = None,
    overwrite: bool = False,
) -> tuple[Path, dict[str, str]]:
    """Write some photos of a run as one page: see `explain.report.sheet`.

    Args:
        run: the run.
        path: where to write it.
        which: "source:200" for the first 200, "worst:50" (the photos whose label, or else prediction, has the lowest
            probability) or "best:50".
        source: where photos come from that had no file.
        title: what the page is called.
        overwrite: whether a file that is there may be replaced.

    Returns:
        The path; and why photos could not be shown, by their names.

    Raises:
        ExplainError: the choice is unknown, no photo can be shown, or the page cannot be written.
    """
    order, count = choice(which)
    origin = ModelOrigin(str(run.manifest.get("model", "model")), None, "")
    again = Reproduction(f"import explain\n\nrun = explain.open_run({str(run.path)!r})\nprint(run)")
    places = None if source is None else {entry.name: entry for entry in entries_of(source) if hasattr(entry, "where")}
    entries, failures = [], {}
    for rows in islice(by_photo(run, order), count):
        try:
            photo = load_image(photo_of(rows[0], source, places or {}))
        except ExplainError as error:
            failures[rows[0].name] = str(error)
            continue
        figures = {row.method: dict(row.metrics) for row in rows if row.target == rows[0].target}
        kept = _Kept(tuple(rows), photo, origin, tuple(_by_target(rows)))
        short, full = entry(kept, [figures], made=again)
        known = {} if rows[0].correct is None else {"truth": printable(rows[0].label), "right": rows[0].correct}
        entries.append(({**short, **known}, full))
    if not entries:
        reason = next(iter(failures.values()), "it has none")
        raise RunError(f"run {str(run.path)!r} must have photos that can be shown, but has not: {reason}")
    text = sheet_of(entries, title or f"{run.path.stem}: {len(entries)} photos")
    return written_page(text, path, overwrite=overwrite), failures


def _by_target(rows: list[Row]) -> list[dict[str, Attribution]]:
    """The maps of each target by method, of those methods that all targets have."""
    found: dict[str, dict[str, Attribution]] = {}
    for row in rows:
        found.setdefault(row.target, {})[row.method] = row.attribution
    shared = [name for name in next(iter(found.values())) if all(name in each for each in found.values())]
    return [{name: each[name] for name in shared} for each in found.values()]
