"""Pages of one photo: as a text, as a file, and in the frame of a notebook."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from explain._utils.html import picture_html
from explain.data.files import Files
from explain.engine.settings import Progress
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
    """Return the page of one photo; ``figures`` are metrics, for each target ``{method: {metric: value}}``."""
    return page_with(subject, item(subject, Detail(steps=steps), figures=figures, progress=progress))


def page_with(subject: Subject, values: Mapping[str, Any]) -> str:
    """Return the page of one photo from its ``values``, as `item` returns them."""
    short = summary(subject)
    return page({"photos": [short]}, [values], title=f"{short['label']} – {name_of(subject)}")


DETAIL = Detail(side=800, cells=128, live=False)
HEIGHT = 660  # pixels


def widget(subject: Subject, picture: bytes, alternative: str) -> str:
    """Return the page in a frame, over a ``picture`` (PNG) of the same with an ``alternative`` text.

    The frame runs its own scripts and nothing else: it can neither read nor change the notebook. Where a notebook is
    shown without frames or scripts, the picture is visible.
    """
    text = page({"photos": [summary(subject)]}, [item(subject, DETAIL)], title=alternative, widget=True)
    below = f'<div style="max-height: {HEIGHT}px; overflow: hidden">{picture_html(picture, alternative)}</div>'
    ascii_only = html.escape(text).encode("ascii", "xmlcharrefreplace").decode("ascii")  # for any encoding
    frame = (
        f'<iframe srcdoc="{ascii_only}" sandbox="allow-scripts allow-downloads" allow="clipboard-write" '
        f'title="{html.escape(alternative)}" style="position: absolute; left: 0; top: 0; width: 100%; height: 100%; '
        'border: 0"></iframe>'
    )
    return f'<div style="position: relative; min-height: {HEIGHT}px">{below}{frame}</div>'


def written(text: str, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a page, complete or not at all, and return its path.

    Raises:
        OutputError: the file exists and ``overwrite`` is not set, or it cannot be written.
    """
    place = Path(path)
    files = Files(place.parent, overwrite=overwrite)
    files.add_text(place.name, text)
    return files.write()[0]


class Reportable:
    """Adds `to_html` to a `Subject`."""

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
        """Write the report: one page for any browser, which needs neither a server nor the network.

        It shows the photo with every map, for every target, in every style; values under the pointer and in a region;
        the predictions; and the command and the Python code that repeat the explanation. See `explain.report.sheet`
        for many photos in one page.

        Args:
            path: the file to write; its folder is made if needed. Without it, the page is returned as a text.
            steps: the number of steps of the deletion and insertion curves of each map; they take twice as many passes
                of the model. The default is 20, and fewer where there are more than eight maps, but at least 8. 0
                leaves the curves out, and so does a copy, which has no model.
            overwrite: replace an existing file.
            progress: called with the passes done and their total.

        Raises:
            OutputError: the file exists and ``overwrite`` is not set, or it cannot be written.
        """
        text = page_of(self, steps=steps, progress=progress)
        return text if path is None else written(text, path, overwrite=overwrite)
