"""Contact sheets: rows without a single picture, groups in their order, figures of the same
pixels."""

from __future__ import annotations

import dataclasses as dc
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


@pytest.mark.parametrize(
    ("size", "columns", "stretch"),
    [
        ((40, 30), 3, (1, 1)),
        ((30, 59), 3, (1, 1)),
        ((4000, 1000), 3, (2, 1)),
        ((9000, 300), 2, (3, 1)),
        ((100, 800), 3, (1, 3)),
    ],
)
def test_very_long_photos_have_longer_tiles_and_fewer_in_a_row(
    size: tuple[int, int], columns: int, stretch: tuple[float, float]
) -> None:
    tile = sheets.Tile(Image.new("RGB", size, "green"), "name")
    sheet = sheets.Layout("", "", (sheets.Group("", (tile,) * 3),))
    assert (sheet.columns, sheet.stretch) == (columns, stretch)
    drawn = np.asarray(sheets.sheet(sheet, 100)).astype(int)
    green = (np.abs(drawn - (0, 128, 0)).max(2) < 40).sum()
    scale = min(100 * stretch[0] / size[0], 100 * stretch[1] / size[1])
    assert green == pytest.approx(3 * size[0] * size[1] * scale**2, rel=0.06)


def test_a_figure_is_a_sheet_that_shows_itself_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = (
        sheets.Tile(BLANK.picture, "a", "layer3", legend=LEGEND),
        sheets.Tile(BLANK.picture, "b $x", "", "null"),
    )
    contents = sheets.Layout(
        "heading", "model", (sheets.Group("", (BLANK,)), sheets.Group("family", tiles))
    )
    drawn = sheets.figure(contents, "three <maps>")
    picture = sheets.sheet(contents, 340)
    assert np.array_equal(np.asarray(sheets.as_picture(drawn).convert("RGB")), np.asarray(picture))
    shown = drawn._repr_html_()
    displayed = []
    monkeypatch.setitem(
        sys.modules,
        "IPython.display",
        SimpleNamespace(display=lambda each, raw: displayed.append(each)),
    )
    drawn._ipython_display_()
    # and no PNG beside it
    assert [sorted(each) for each in displayed] == [["text/html", "text/plain"]]
    assert re.fullmatch(
        r'<img src="data:image/png;base64,[\w+/=]+" alt="three &lt;maps&gt;" style="[^"]*">', shown
    )


@pytest.mark.parametrize("methods", [2, 5, 7])
def test_the_maps_of_several_targets_line_up_below_each_other_beside_one_photo(
    methods: int,
) -> None:
    rows = {
        heading: [dc.replace(BLANK, name=f"{m}", legend=LEGEND) for m in range(methods)]
        for heading in "abc"
    }
    layout = sheets.Layout(
        "",
        "",
        (
            sheets.Group("", (BLANK,)),
            *(sheets.Group(heading, tuple(row), own_row=True) for heading, row in rows.items()),
        ),
    )
    names = [{column: tile.name for column, (_, tile) in row.items()} for row in layout.places()]
    parts = [names[start : start + 3] for start in range(0, len(names), 3)]
    assert names[0].pop(0) == "name"
    assert [part[0] for part in parts] == [part[1] for part in parts] == [part[2] for part in parts]
    assert [name for part in parts for name in part[0].values()] == [str(m) for m in range(methods)]
    assert all(min(row) == 1 and max(row) < sheets.ABREAST for row in names)
    assert [set(below) for below in layout.legends()] == [set(), set(), set(names[0])] + [
        set(),
        set(),
        set(names[-1]),
    ] * (len(parts) - 1)
    assert sheets.sheet(layout, 100).width == 8 + (1 + len(names[0])) * 108


def test_tables_are_escaped_and_numbers_stand_at_the_right() -> None:
    drawn = table_html(["<layer>"], [["a\x1b<b>"], ["12"]], "x & y")
    assert "<layer>" not in drawn
    assert r"a\x1b&lt;b&gt;" in drawn
    assert '<td style="text-align: right">12</td>' in drawn
    assert "<caption>x &amp; y</caption>" in drawn
