"""`Reported`: what can be shown as a page, as a file or in a notebook."""

from __future__ import annotations

import os
from pathlib import Path
from typing import overload

from explain.engine import Progress
from explain.report.single import page_of
from explain.report.subject import Pictured, Subject
from explain.report.widget import widget
from explain.report.writing import written


class Reported:
    """Gives a `Subject` its report; the state is all the subject's own."""

    @overload
    def to_html(
        self: Subject,
        path: None = None,
        *,
        steps: int | None = None,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> str: ...

    @overload
    def to_html(
        self: Subject,
        path: str | os.PathLike[str],
        *,
        steps: int | None = None,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> Path: ...

    def to_html(
        self: Subject,
        path: str | os.PathLike[str] | None = None,
        *,
        steps: int | None = None,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> str | Path:
        """Write the report: one page for any browser, which asks neither a server nor the network for anything.

        It shows the photo with every map, for every target, in every style; values under the pointer and in a region;
        what the model answered; and the command and the Python that make it again. See `explain.report.sheet` for many
        photos in one page.

        Args:
            path: where to write it, its folder made if needed; without, the page is returned as a text.
            steps: in how many steps the evidence of each map is covered, and shown, for its curves: twice as many runs
                of the model. None are 20, and fewer where there are more than eight maps, but at least 8. 0 leaves the
                curves out, and so does a copy, which has no model.
            overwrite: whether a file that is there may be replaced.
            progress: called with the runs done and their total.

        Raises:
            OutputError: the file is there already and ``overwrite`` is not set, or it cannot be written.
        """
        text = page_of(self, steps=steps, progress=progress)
        return text if path is None else written(text, path, overwrite=overwrite)

    def _repr_html_(self: Pictured) -> str:
        return widget(self)
