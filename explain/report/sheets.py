"""Many photos in one file: a contact sheet that filters and sorts, and opens each of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explain._utils.errors import ExplainError, MetricError, printable, shown
from explain.models.classifier import class_label
from explain.report.curves import can_be_run
from explain.report.item import Detail, item, summary
from explain.report.page import page
from explain.report.reported import written
from explain.report.reproduce import Reproduction
from explain.report.subject import Subject
from explain.targets.labels import find_label

if TYPE_CHECKING:
    from explain.metrics import MetricLike, Table

Entry = tuple[dict[str, Any], dict[str, Any]]
"""What a sheet says of a photo in short, and all of it."""

DETAIL = Detail(side=640, quality=80, cells=128)
"""What a sheet holds of each photo: enough to look at, and 200 of them can still be mailed."""


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
        explanations: what an `explain.Explainer` gives for a list of photos.
        path: where to write it; its folder is made if needed.
        truth: the right class of each photo, as index or label, or None where it is not known: the sheet can then be
            filtered by right and wrong.
        metrics: names or metric objects that judge each photo's maps; the sheet sorts by them. They need the model.
        steps: in how many steps the evidence of each photo is covered, and shown, for curves; see
            `explain.Explanation.to_html`. 0 leaves them out.
        title: what the page is called.
        overwrite: whether a file that is there may be replaced.

    Raises:
        ExplainError: no photos, another number of classes than photos, or metrics where the model is not at hand.
        OutputError: the file is there already, or cannot be written.

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
    """Return the page of what `entry` made of each photo."""
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
    """Return what a sheet says of a photo in short (its answer, whether that is right, figures), and all of it.

    ``made`` says how to make it again, where the subject itself does not.
    """
    found = summary(subject)
    if truth is not None:
        label = _label(subject, truth)
        found |= {"truth": printable(label), "right": printable(label) == found["label"]}
    first = figures[0] if figures else {}
    short = {**found, "figures": {name: dict(each) for name, each in first.items()}}
    return short, item(subject, replace(DETAIL, steps=steps), figures=figures, made=made)


def figures_in(table: Table) -> dict[str, dict[str, float | None]]:
    """Return what metrics say of one photo's maps: ``{method: {metric: value}}``."""
    values = table.to_dict()["values"]
    return {name: {metric: each[0] for metric, each in row.items()} for name, row in values.items()}


def figures_of(subject: Subject, metrics: Sequence[MetricLike]) -> list[dict[str, dict[str, float | None]]]:
    """Judge the maps of each target by metrics: for each target, ``{method: {metric: value}}``.

    Raises:
        MetricError: the model is not at hand, or the maps are of several crops.
    """
    if not metrics:
        return []
    if not can_be_run(subject):
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
    """The label of the right class, as the model calls it."""
    if isinstance(truth, int):
        return class_label(subject.categories, truth)
    known = list(subject.categories or ())
    return known[find_label(truth, known)] if known else truth
