"""Pictures of some photos of a run, and pages with them, drawn from the stored maps."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
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
from explain.report.reported import written
from explain.report.reproduce import Reproduction
from explain.report.sheets import entry, sheet_of
from explain.runs.reading import Row, StoredRun
from explain.runs.schema import ORDERS
from explain.runs.sources import Entry, Source, entries_of


def choice(which: str) -> tuple[str, int | None]:
    """Read a choice of photos: an order, and how many of them.

    Raises:
        RunError: it is not written in this way.

    >>> choice("worst:50"), choice("source")
    (('worst', 50), ('source', None))
    """
    order, _, count = which.partition(":") if isinstance(which, str) else ("", "", "")
    if order not in ORDERS or not (which == order or re.fullmatch(r"0*[1-9]\d*", count)):
        known = ", ".join(ORDERS)
        raise RunError(f"pictures must be one of {known}, as in 'worst:50', got {shown(which)}; choose one of them")
    return order, int(count) if count else None


def write_pictures(
    run: StoredRun,
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
        source: the source of photos that had no file.
        style: how the maps are drawn, in place of each method's own style.
        overwrite: replace files that exist.

    Returns:
        The paths, the first photo first; and why photos could not be drawn, by their names.

    Raises:
        ExplainError: the choice or the style is unknown, or the folder cannot be written.
    """
    order, count = choice(which)
    look = Look(style)
    paths: list[Path] = []
    failures: dict[str, str] = {}
    entries = _entries_by_name(source)
    digits = len(str(min(run.photos, count or run.photos)))
    for number, rows in enumerate(islice(_rows_by_photo(run, order), count), 1):
        files = Files(folder, overwrite=overwrite)
        try:
            photo = _photo_of(rows[0], source, entries)
            prefix = slug(f"{number:0{digits}} {Path(rows[0].name).stem}")
            names = distinct(slug(f"{prefix}-{row.target}-{row.method}") for row in rows)
            pictures = [row.overlay(look.of(row.style), photo) for row in rows]
        except ExplainError as error:
            failures[rows[0].name] = str(error)
            continue
        for name, picture in zip(names, pictures, strict=True):
            files.add_picture(f"{name}.png", picture)
        paths += files.write()
    return paths, failures


def to_html(
    run: StoredRun,
    path: str | os.PathLike[str],
    which: str = "source:200",
    *,
    source: Source | None = None,
    title: str | None = None,
    overwrite: bool = False,
) -> tuple[Path, dict[str, str]]:
    """Write some photos of a run as one page, to filter, sort and open: see `explain.report.sheet`.

    Args:
        run: the run.
        path: where to write it.
        which: "source:200" for the first 200, "worst:50" (the photos whose label, or else prediction, has the lowest
            probability) or "best:50".
        source: the source of photos that had no file.
        title: the title of the page.
        overwrite: replace a file that exists.

    Returns:
        The path; and why photos could not be shown, by their names.

    Raises:
        ExplainError: the choice is unknown, no photo can be shown, or the page cannot be written.
    """
    order, count = choice(which)
    origin = ModelOrigin(str(run.manifest.get("model", "model")), None, "")
    code = Reproduction(f"import explain\n\nrun = explain.open_run({str(run.path)!r})\nprint(run)")
    items, failures = [], {}
    entries = _entries_by_name(source)
    for rows in islice(_rows_by_photo(run, order), count):
        try:
            photo = load_image(_photo_of(rows[0], source, entries))
        except ExplainError as error:
            failures[rows[0].name] = str(error)
            continue
        figures = {row.method: dict(row.metrics) for row in rows if row.target == rows[0].target}
        shown_photo = _StoredExplanation(tuple(rows), photo, origin, tuple(_by_target(rows)))
        short, full = entry(shown_photo, [figures], made=code)
        known = {} if rows[0].correct is None else {"truth": printable(rows[0].label), "right": rows[0].correct}
        items.append(({**short, **known}, full))
    if not items:
        reason = next(iter(failures.values()), "it has none")
        raise RunError(f"run {str(run.path)!r} must have photos that can be shown, but has not: {reason}")
    page = sheet_of(items, title or f"{run.path.stem}: {len(items)} photos")
    return written(page, path, overwrite=overwrite), failures


@dataclass(frozen=True, eq=False)
class _StoredExplanation:
    """One photo of a run in the form of an explanation, as a report takes it: the top class, and the maps."""

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
        best, probability = self.rows[0].prediction, self.rows[0].prediction_probability
        return [] if best is None or probability is None else [(best, probability)]

    def record(self, method: str | None = None, target: int | str = 0) -> dict[str, Any]:
        """The stored values of one map."""
        label = self.targets[target] if isinstance(target, int) else target
        row = next(row for row in self.rows if row.target == label and row.method == (method or self.methods[0]))
        names = (
            "name", "method", "target", "target_class", "score", "probability", "label", "prediction", "layer", "path",
            "sha256", "delta", "runs", "error",
        )  # fmt: skip
        return {**{name: getattr(row, name) for name in names}, "metrics": dict(row.metrics)}


def _rows_by_photo(run: StoredRun, order: str) -> Iterator[list[Row]]:
    return (list(rows) for _, rows in groupby(run.rows(order=order), key=lambda row: row.name))


def _entries_by_name(source: Source | None) -> dict[str, Entry]:
    return {} if source is None else {entry.name: entry for entry in entries_of(source) if entry.problem is None}


def _photo_of(row: Row, source: Source | None, entries: dict[str, Entry]) -> Any:
    """The photo of a row: that of the source under its name, else its file.

    Raises:
        RunError: there is neither.
    """
    if source is not None and row.name in entries:
        image = source.read(entries[row.name]).image
    elif row.path is not None:
        image = row.path
    else:
        raise RunError(f"photo {row.name!r} must have a file to be drawn, but has none; give its source")
    if isinstance(image, torch.Tensor):
        raise RunError(f"photo {row.name!r} must be an image to be drawn, but its source has a tensor; give images")
    return image


def _by_target(rows: list[Row]) -> list[dict[str, Attribution]]:
    """The maps of each target by method, of those methods that all targets have."""
    found: dict[str, dict[str, Attribution]] = {}
    for row in rows:
        found.setdefault(row.target, {})[row.method] = row.attribution
    shared = [name for name in next(iter(found.values())) if all(name in each for each in found.values())]
    return [{name: each[name] for name in shared} for each in found.values()]
