"""Some photos of a run as one page, to filter, sort and open: the photos are read again, the model is not run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from explain import report
from explain.errors import ExplainError, RunError, printable
from explain.images import Box, load_image
from explain.record import Origin, Question
from explain.report import Again
from explain.result import Attribution
from explain.runs.pictures import by_photo, choice, photo_of
from explain.runs.reading import Row, Stored
from explain.runs.sources import Source, entries_of


@dataclass(frozen=True, eq=False)
class _Kept:
    """What a run has of one photo, as a report takes it: the best answer, and the maps by target and method."""

    rows: tuple[Row, ...]
    photo: Image.Image
    origin: Origin
    results: tuple[Mapping[str, Attribution], ...]
    crops: tuple[Box, ...] = ()
    question: Question = field(default_factory=lambda: Question({}))
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
    origin = Origin(str(run.manifest.get("model", "model")), None, "")
    again = Again(f"import explain\n\nrun = explain.open_run({str(run.path)!r})\nprint(run)")
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
        short, full = report.entry(kept, [figures], made=again)
        known = {} if rows[0].correct is None else {"truth": printable(rows[0].label), "right": rows[0].correct}
        entries.append(({**short, **known}, full))
    if not entries:
        reason = next(iter(failures.values()), "it has none")
        raise RunError(f"run {str(run.path)!r} must have photos that can be shown, but has not: {reason}")
    text = report.sheet_of(entries, title or f"{run.path.stem}: {len(entries)} photos")
    return report.written(text, path, overwrite=overwrite), failures


def _by_target(rows: list[Row]) -> list[dict[str, Attribution]]:
    """The maps of each target by method, of those methods that all targets have."""
    found: dict[str, dict[str, Attribution]] = {}
    for row in rows:
        found.setdefault(row.target, {})[row.method] = row.attribution
    shared = [name for name in next(iter(found.values())) if all(name in each for each in found.values())]
    return [{name: each[name] for name in shared} for each in found.values()]
