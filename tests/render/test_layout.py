"""Contact sheets: rows without a single picture, groups in their order, figures of the same
pixels."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from explain._utils.html import table_html
from explain.render import captions, sheets

BLANK = sheets.Tile(Image.new("RGB", (40, 30), "green"), "name")
LEGEND = captions.Legend(((0, 0, 0), (255, 255, 255)), ("0", "max"), "evidence")


def test_a_figure_is_a_sheet_that_shows_itself_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = (
        sheets.Tile(BLANK.picture, "a", "layer3", legend=LEGEND),
        sheets.Tile(BLANK.picture, "b $x", "", "null"),
    )
    contents = sheets.Layout(
        "heading", "model", (sheets.Group("", (BLANK,)), sheets.Group("family", tiles))
    )
    figure = sheets.figure(contents, "three <maps>")
    picture = sheets.contact_sheet(contents, 340)
    assert np.array_equal(np.asarray(sheets.as_picture(figure).convert("RGB")), np.asarray(picture))
    shown = figure._repr_html_()
    displayed = []
    monkeypatch.setitem(
        sys.modules,
        "IPython.display",
        SimpleNamespace(display=lambda formats, raw: displayed.append(formats)),
    )
    figure._ipython_display_()
    # and no PNG beside it
    assert [sorted(formats) for formats in displayed] == [["text/html", "text/plain"]]
    assert re.fullmatch(
        r'<img src="data:image/png;base64,[\w+/=]+" alt="three &lt;maps&gt;" style="[^"]*">', shown
    )


def test_tables_are_escaped_and_numbers_stand_at_the_right() -> None:
    table = table_html(["<layer>"], [["a\x1b<b>"], ["12"]], "x & y")
    assert "<layer>" not in table
    assert r"a\x1b&lt;b&gt;" in table
    assert '<td style="text-align: right">12</td>' in table
    assert "<caption>x &amp; y</caption>" in table
