"""Many photos in one file: a contact sheet that filters and sorts, and opens each of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explain._utils.errors import ExplainError, MetricError, printable, shown
from explain.models.classifier import class_label
from explain.report.curves import has_model
from explain.report.item import Detail, item, summary
from explain.report.page import page
from explain.report.reported import written
from explain.report.reproduce import Reproduction
from explain.report.subject import Subject
from explain.targets.labels import find_label

if TYPE_CHECKING:
    from explain.metrics.base import MetricLike
    from explain.metrics.table import Table

Entry = tuple[dict[str, Any], dict[str, Any]]
"""The line of a sheet about a photo, and the photo's own page."""

DETAIL = Detail(side=640, quality=80, cells=128)
"""How much of each photo a sheet holds: 200 of them still fit into a mail."""


def sheet(
    explanations: Iterable[Subject],
    path: str | os.PathLike[str],
    *,
    truth: Sequence[int | str | None] | None = None,
    metrics: MetricLike | Iterable[MetricLike] = (),
    steps: int | None = 0,
    title: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a page with many photos, which filters, sorts and opens each.

    Args:
        explanations: the explanations that an `explain.Explainer` returns for a list of photos.
        path: the file to write; its folder is made if needed.
        truth: the true class of each photo, as index or label, or None where it is not known: the sheet can then be
            filtered by right and wrong predictions.
        metrics: names or metric objects for each photo's maps; the sheet sorts by them. They need the model.
        steps: the number of steps of deletion and insertion curves, as of `explain.Explanation.to_html`. 0 leaves
            them out.
        title: the heading of the page.
        overwrite: replace an existing file.

    Raises:
        ExplainError: no photos, another number of classes than photos, or metrics without a model.
        OutputError: the file exists and ``overwrite`` is not set, or it cannot be written.

    >>> import explain, tempfile
    >>> from PIL import Image
    >>> photos = [Image.new("RGB", (30, 20), color) for color in ("red", "blue")]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sheet(explain.Explainer("tiny")(photos), f"{folder}/photos.html").name
    'photos.html'
    """
    text = sheet_html(explanations, truth=truth, metrics=metrics, steps=steps, title=title)
    return written(text, path, overwrite=overwrite)


def sheet_html(
    explanations: Iterable[Subject],
    *,
    truth: Sequence[int | str | None] | None = None,
    metrics: MetricLike | Iterable[MetricLike] = (),
    steps: int | None = 0,
    title: str | None = None,
) -> str:
    """Return the page that `sheet` writes, as text; arguments and errors are the same."""
    subjects = list(explanations)
    if not subjects:
        raise ExplainError("explanations must hold at least one explanation, got none; explain some photos first")
    if truth is not None and len(truth) != len(subjects):
        raise ExplainError(
            f"truth must hold a class for each of the {len(subjects)} photos, got {len(truth)}; use None where it is "
            "not known"
        )
    chosen = [metrics] if isinstance(metrics, str) or not isinstance(metrics, Iterable) else list(metrics)
    classes = truth or [None] * len(subjects)
    entries = [
        entry(subject, figures_of(subject, chosen), classes[number], steps=steps)
        for number, subject in enumerate(subjects)
    ]
    return sheet_of(entries, title)


def sheet_of(entries: Sequence[Entry], title: str | None = None) -> str:
    """Return the page of the entries of some photos."""
    name = title or f"{len(entries)} photos"
    return page(
        {"title": printable(name), "photos": [short for short, _ in entries]}, [full for _, full in entries], title=name
    )


def entry(
    subject: Subject,
    figures: Sequence[Mapping[str, Mapping[str, Any]]] = (),
    truth: int | str | None = None,
    *,
    steps: int | None = 0,
    made: Reproduction | None = None,
) -> Entry:
    """Return the line of a sheet about a photo (its prediction, whether that is right, metrics), and the photo's page.

    ``made`` says how to repeat the explanation, where the subject itself does not.
    """
    first = figures[0] if figures else {}
    short = {**summary(subject), "figures": {name: dict(each) for name, each in first.items()}}
    if truth is not None:
        label = printable(_label(subject, truth))
        short |= {"truth": label, "right": label == short["label"]}
    return short, item(subject, replace(DETAIL, steps=steps), figures=figures, made=made)


def figures_in(table: Table) -> dict[str, dict[str, float | None]]:
    """Return the metrics of one photo's maps as ``{method: {metric: value}}``."""
    values = table.to_dict()["values"]
    return {name: {metric: each[0] for metric, each in row.items()} for name, row in values.items()}


def figures_of(subject: Subject, metrics: Sequence[MetricLike]) -> list[dict[str, dict[str, float | None]]]:
    """Compute metrics of the maps of each target: for each target, ``{method: {metric: value}}``.

    Raises:
        MetricError: the model is missing, or the maps are of several crops.
    """
    if not metrics:
        return []
    if not has_model(subject):
        raise MetricError(
            "metrics need an explanation with its explainer and one crop, got one without; leave metrics out"
        )
    from explain.metrics import evaluate, get_metric

    objects = [get_metric(metric) for metric in metrics]
    x, found = subject.explainer.as_input(subject.photo), []
    for result in subject.results:
        chosen = next(iter(result.values())).target
        if isinstance(chosen, str):
            raise MetricError(f"metrics need a class as target, got {shown(chosen)}; leave metrics out")
        found.append(figures_in(evaluate(subject.explainer.model, x, dict(result), objects, target=int(chosen[0]))))
    return found


def _label(subject: Subject, truth: int | str) -> str:
    """The label of the true class, as the model calls it."""
    if isinstance(truth, int):
        return class_label(subject.categories, truth)
    known = list(subject.categories or ())
    return known[find_label(truth, known)] if known else truth
