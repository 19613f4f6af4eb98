"""What a notebook shows: the page in a frame of its own, over a picture for where scripts or frames are taken out."""

from __future__ import annotations

import html

from explain.render import picture_html
from explain.report.item import Detail, item, summary
from explain.report.page import page
from explain.report.subject import Pictured

DETAIL = Detail(side=800, cells=128, live=False)
HEIGHT = 660  # pixels


def widget(subject: Pictured) -> str:
    """Return the page in a frame, over a picture of the same.

    The frame runs its own scripts and nothing else: it can neither read nor change the notebook. Where a notebook is
    shown without frames or scripts, the picture is what is seen.
    """
    picture, alternative = subject._repr_png_(), subject.alternative
    text = page({"photos": [summary(subject)]}, [item(subject, DETAIL)], title=alternative, widget=True)
    below = f'<div style="max-height: {HEIGHT}px; overflow: hidden">{picture_html(picture, alternative)}</div>'
    ascii_only = (
        html.escape(text).encode("ascii", "xmlcharrefreplace").decode("ascii")
    )  # whatever the notebook's own is
    frame = (
        f'<iframe srcdoc="{ascii_only}" sandbox="allow-scripts allow-downloads" allow="clipboard-write" '
        f'title="{html.escape(alternative)}" style="position: absolute; left: 0; top: 0; width: 100%; height: 100%; '
        'border: 0"></iframe>'
    )
    return f'<div style="position: relative; min-height: {HEIGHT}px">{below}{frame}</div>'
