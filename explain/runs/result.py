"""`Run`: the file of a run, and all that can be made of it without a model: pictures, pages,
tables."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from explain._utils.errors import ExplainError, RunError, keywords, printable, shown
from explain.attribution import pictures, records
from explain.attribution.result import Attribution
from explain.data.files import Files, distinct, slug, write_file
from explain.data.scans import stem_of
from explain.render.styles import StyleLike
from explain.report.pages import entry, sheet_of
from explain.report.reproduce import Reproduction, Subject
from explain.runs.exporting import export
from explain.runs.parts import index_of
from explain.store.reading import LabelledPhoto, PhotoReader, Row, StoredRun, Threshold
from explain.store.sources import Source
from explain.store.writing import ORDERS
from explain.targets.outputs import Prediction, percent

if TYPE_CHECKING:
    from explain.insight import Insight
    from explain.metrics.supported import Support


def choice(which: str) -> tuple[str, int | None]:
    """Read a choice of photos, such as "worst:50": an order, and how many of them (None for
    all)."""
    order, _, count = which.partition(":") if isinstance(which, str) else ("", "", "")
    is_count = re.fullmatch(r"0*[1-9]\d*", count) is not None  # a whole number from 1
    if order not in ORDERS or not (which == order or is_count):
        choices = ", ".join(ORDERS)
        raise RunError(
            f"pictures must be one of {choices}, as in 'worst:50', got {shown(which)}; choose one"
        )
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
    """Write overlays of the photos ``which`` ("worst:50" and "best:50" by the probability of the
    label, else prediction; "source" for all), for every method and target; returns the paths, and
    by name why photos could not be drawn.
    """
    look = pictures.Look(style)
    paths: list[Path] = []
    failures: dict[str, str] = {}
    _, count = choice(which)
    # numbers of one width, by which the files sort in the order of the choice
    digits = len(str(min(run.photos, count or run.photos)))
    for number, rows, photo in _shown(run, which, source, failures):
        files = Files(folder, overwrite=overwrite)
        prefix = slug(f"{number:0{digits}} {stem_of(rows[0].name)}")
        names = distinct(slug(f"{prefix}-{row.target}-{row.method}") for row in rows)
        for name, row in zip(names, rows, strict=True):
            files.add_picture(f"{name}.png", row.overlay(look.of(row.style), photo))
        paths += files.write()
    return paths, failures


def to_html(
    run: StoredRun,
    path: str | os.PathLike[str],
    which: str = "source:200",
    *,
    source: Source | None = None,
    title: str | None = None,
    threshold: float | Mapping[Any, float] | None = None,
    overwrite: bool = False,
) -> tuple[Path, dict[str, str]]:
    """Write the photos ``which`` ("source:200", "worst:50", "best:50") as one page
    (`explain.report.sheet`); returns the path, and by name why photos could not be shown.
    ``threshold``: the probability from which on one of several labels is predicted, as of
    `Run.insight`.
    """
    from explain.insight.mistakes import label_thresholds

    # a run knows no more of its model than the name
    origin = records.ModelOrigin(str(run.manifest["model"]), weights=None, preprocess="")
    code = Reproduction(f"import explain\n\nrun = explain.open_run({str(run.path)!r})\nprint(run)")
    items = []
    failures: dict[str, str] = {}
    thresholds = label_thresholds(run, threshold)
    for _, rows, photo in _shown(run, which, source, failures):
        first = rows[0]
        figures = {row.method: dict(row.metrics) for row in rows if row.target == first.target}
        # a line in the list of all photos, and what is shown of the one that is picked
        short, full = entry(_PhotoOfRun.of(rows, photo, origin), [figures], repeated_by=code)
        labelled = LabelledPhoto.of(first.columns)
        is_right = first.is_right(thresholds)
        if labelled is not None:  # several labels may be true of it
            short |= _by_label(run, labelled, thresholds)
        elif is_right is not None:
            short["truth"] = printable(first.label)
        if is_right is not None:
            short["right"] = is_right
        items.append((short, full))
    if not items:
        reason = next(iter(failures.values()), "it has none")
        raise RunError(
            f"run {str(run.path)!r} must have photos that can be shown, but has not: {reason}"
        )
    page = sheet_of(items, title or f"{run.path.stem}: {len(items)} photos")
    return write_file(path, page, overwrite=overwrite), failures


def _by_label(run: StoredRun, photo: LabelledPhoto, threshold: Threshold) -> dict[str, Any]:
    """A photo's true labels ("truth") and its "mistakes" with each label's probability, where
    several labels may be true; the page's script reads these keys.
    """
    missed, false_alarms = photo.mistakes(threshold)
    mistakes = [("missed", number) for number in missed]
    mistakes += [("false alarm", number) for number in false_alarms]
    return {
        "truth": ", ".join(printable(run.label_of(number)) for number in sorted(photo.true)),
        "mistakes": [
            [f"{kind}: {printable(run.label_of(number))}", float(photo.probabilities[number])]
            for kind, number in mistakes
        ],
    }


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _PhotoOfRun(Subject):
    """A photo of a run in the form of an explanation, as a page takes it: without a model."""

    rows: Sequence[Row]

    @classmethod
    def of(
        cls, rows: Sequence[Row], photo: Image.Image, origin: records.ModelOrigin
    ) -> "_PhotoOfRun":
        """A page's subject from the rows of one upright ``photo``: its maps by target and method,
        without methods that lack a target.
        """
        maps: dict[str, dict[str, Attribution]] = {}
        for row in rows:
            maps.setdefault(row.target, {})[row.method] = row.attribution
        rows_by_target = {row.target: row for row in rows}
        of_targets = list(maps.values())
        # a page has the same methods for all targets
        methods = [name for name in of_targets[0] if all(name in of_one for of_one in of_targets)]
        first = rows[0]
        return cls(
            photo=photo,
            source=first.path or first.name,
            origin=origin,
            box=first.box,
            results=tuple({name: of_target[name] for name in methods} for of_target in of_targets),
            input_size=first.input_size,
            asked=[None] * len(maps),  # targets as the caller's objects, which a run does not have
            detections=first.detections,
            boxes=tuple(rows_by_target[target].detection for target in maps),
            rows=rows,
        )

    @property
    def targets(self) -> list[str]:
        """The names of the targets, in the order of the rows."""
        return list(dict.fromkeys(row.target for row in self.rows))

    @property
    def predicted(self) -> list[Prediction]:
        """The prediction of the photo, as a list of one, or all detections; empty where the model
        gives no class or no probability."""
        first = self.rows[0]
        if first.prediction is None or first.prediction_probability is None:
            return list(self.detections)
        return [Prediction(first.prediction, first.prediction_probability, None)]

    def amount(self, target: int) -> str:
        """The probability of the target with this index, or else what stands in place of a
        prediction, such as an amount that a regression gives."""
        label = self.targets[target]
        row = next(row for row in self.rows if row.target == label)
        if row.probability is not None:
            return percent(row.probability)
        return "" if self.predicted else row.prediction or ""

    def target_at(self, index: int) -> str:
        """The name of target number ``index``."""
        return self.targets[index]

    def record(self, method: str | None = None, target: int | str = 0) -> dict[str, Any]:
        """The record of one map that a page shows and lets people copy: the properties of
        `RECORDED` and the metrics."""
        label = self.targets[target] if isinstance(target, int) else target
        wanted = (label, method or self.methods[0])
        row = next(row for row in self.rows if (row.target, row.method) == wanted)
        return {
            **{name: getattr(row, name) for name in RECORDED.split()},
            "metrics": dict(row.metrics),
        }


RECORDED = (
    "name method target target_class score probability label prediction layer path sha256 "
    "delta runs error"
)
"""The attributes of a `Row` that the record of a map on a page has."""


def _shown(
    run: StoredRun, which: str, source: Source | None, failures: dict[str, str]
) -> Iterator[tuple[int, list[Row], Image.Image]]:
    """Yield the photos that ``which`` chooses ("worst:50"): number from 1, rows, photo. Those that
    cannot be read have their reason in ``failures``, and their number is skipped.
    """
    order, count = choice(which)
    reader = PhotoReader(run, source)
    by_photo = groupby(run.rows(order=order), key=lambda row: row.name)
    # (*rows,) makes a list of the rows of each photo
    for number, (name, (*rows,)) in enumerate(islice(by_photo, count), 1):
        try:
            photo = reader.picture(rows[0])
        except ExplainError as error:
            failures[name] = str(error)
        else:
            yield number, rows, photo


class Run(StoredRun):
    """A run over many photos, and all that can be made of it without a model.

    ``len(run)`` is the number of rows: one for each photo, method and target. Nothing is held in
    memory.

    Args:
        file: the file that `explain.run` wrote, or the folder or address that `run_on_ray` wrote.
            The Parquet files of a folder are entered into an SQLite file first, those that are new
            since the last time; a warning names it.

    Raises:
        RunError: there is no run, it cannot be read, or a later version has written it.

    >>> import explain, tempfile
    >>> from PIL import Image
    >>> from torch import nn
    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    ... )
    >>> explainer = explain.Explainer(model, preprocess=explain.models.CenterCrop(8))
    >>> photos = [Image.linear_gradient("L"), Image.radial_gradient("L")]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = explain.run(
    ...         photos, explainer, ["gradcam", "saliency"], output=f"{folder}/run.sqlite", workers=0
    ...     )
    ...     run = Run(f"{folder}/run.sqlite")
    ...     len(run), run.methods, [row.name for row in run.rows(method="gradcam")]
    (4, ['gradcam', 'saliency'], ['photo 0', 'photo 1'])
    """

    export = export
    write_pictures = write_pictures
    to_html = to_html

    def __init__(self, file: str | os.PathLike[str]) -> None:
        super().__init__(
            index_of(file) if "://" in os.fspath(file) or os.path.isdir(file) else file
        )

    @property
    def support(self) -> "dict[str, Support]":
        """What the metrics of "check" say of each method, by the first target of each photo; empty
        where they were not evaluated."""
        from explain.metrics.supported import supports  # slow to load

        columns: dict[str, dict[str, list[float]]] = {}
        of_first_targets = "SELECT min(id) FROM results GROUP BY photo, method"
        rows = self.query(f"SELECT method, metrics FROM results WHERE id IN ({of_first_targets})")
        for method, text in rows:
            for metric, value in json.loads(text).items():
                values = columns.setdefault(method, {}).setdefault(metric, [])
                values.append(math.nan if value is None else value)
        return supports(
            {
                method: {metric: torch.tensor(values) for metric, values in row.items()}
                for method, row in columns.items()
            }
        )

    def insight(self, method: str | None = None, **options: Any) -> "Insight":
        """Summarise the maps: statistics of classes, clusters, mistakes; see
        `explain.insight.result.insight`."""
        # here, since reports and their pictures take a while to load
        from explain.insight.result import insight

        return insight(self, method, **options)


@keywords()
def open_run(file: str | os.PathLike[str]) -> Run:
    """Open a run for reading; no model is loaded.

    Args:
        file: the ``output`` of `explain.run` or `run_on_ray`; the new Parquet files of a folder are
            entered into an SQLite file first, and a warning names it.

    Raises:
        RunError: there is no run, or a later version has written it.

    >>> open_run("none.sqlite")
    Traceback (most recent call last):
    explain.RunError: run 'none.sqlite' must be a file, but there is none; check the path
    """
    return Run(file)
