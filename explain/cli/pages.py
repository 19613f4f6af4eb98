"""`--html`: a page for each photo, and one with all of them where there are several."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explain.cli.answer import DONE, Answer
from explain.errors import ExplainError

if TYPE_CHECKING:
    from explain.explanation import Explanation
    from explain.metrics import Table

SHEET = "contact-sheet.html"
MOST = 500  # photos of one sheet; a browser opens no more at once with ease


@dataclass
class Pages:
    """Makes a page for each photo, and keeps what the page with all of them takes."""

    sheet: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    total: int = 0

    def page(self, explanation: Explanation, tables: Sequence[Table], progress: Callable[[int, int], None]) -> str:
        """Return the page of one photo, with what metrics say of its maps."""
        from explain import report

        figures = [report.figures_in(table) for table in tables]
        self.total += 1
        if len(self.sheet) < MOST:
            self.sheet.append(report.entry(explanation, figures))
        return report.page_of(explanation, steps=None, figures=figures, progress=progress)

    def end(self, options: argparse.Namespace, answer: Answer) -> int:
        """Write the page with all photos, if there are several; return the exit code."""
        if len(self.sheet) < 2:
            return DONE
        from explain import report

        if self.total > MOST:
            answer.note(f"{SHEET} has the first {MOST} of {self.total} photos")
        try:
            text = report.sheet_of(self.sheet)
            path = report.written(text, Path(options.output) / SHEET, overwrite=options.force)
        except ExplainError as error:
            return answer.complain(str(error))
        answer.add({"image": None, "files": [str(path)], "records": []})
        answer.say(f"wrote {path}, a page with all of them")
        return DONE
