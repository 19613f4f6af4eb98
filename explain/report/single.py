"""One photo in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from explain.engine import Progress
from explain.report.item import Detail, item, name_of, summary
from explain.report.page import page
from explain.report.subject import Subject


def page_of(
    subject: Subject,
    *,
    steps: int | None,
    figures: Sequence[Mapping[str, Any]] = (),
    progress: Progress | None = None,
) -> str:
    """Return the page of one photo; ``figures`` has what metrics say, for each target ``{method: {metric: value}}``."""
    return page_with(subject, item(subject, Detail(steps=steps), figures=figures, progress=progress))


def page_with(subject: Subject, values: Mapping[str, Any]) -> str:
    """Return the page of one photo, of which ``values`` are what `item` returns."""
    short = summary(subject)
    return page({"photos": [short]}, [values], title=f"{short['label']} – {name_of(subject)}")
