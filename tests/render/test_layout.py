"""Contact sheets: rows without a single picture, groups in their order, figures with the same contents."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest
from PIL import Image

from explain._utils.html import table_html
from explain.render import captions, figure, sheets
from explain.render.sheets import ABREAST

BLANK = sheets.Tile(Image.new("RGB", (40, 30), "green"), "name")


def layout(*sizes: int, **words: str) -> sheets.Layout:
    groups = tuple(sheets.Group(f"group {i}" if i else "", (BLANK,) * size) for i, size in enumerate(sizes))
    return sheets.Layout(words.get("title", "title"), words.get("detail", ""), groups)


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_no_row_has_one_picture_and_none_is_too_long(groups: int) -> None:
    for sizes in product((1, 2, 3, 5, 11), repeat=groups):
        sheet = layout(1, *sizes)
        rows = sheet.rows()
        lengths = [sum(len(group.tiles) for group in row) for row in rows]
        assert max(lengths) <= sheet.columns <= ABREAST
        assert 1 not in lengths or len(rows) == 1, (sizes, lengths)
        flat = [group for row in rows for group in row]
        assert [g.heading for g in flat if not g.goes_on] == [g.heading for g in sheet.groups]
        assert sum(lengths) == 1 + sum(sizes)


def test_only_the_last_row_is_short() -> None:
    """But where it would have a single tile in every width: then the row before lends it one."""
    for count in range(2, 130):
        lengths = [sum(len(group.tiles) for group in row) for row in layout(1, count - 1).rows()]
        full = lengths[:-1] if count % 60 != 1 else lengths[:-2]
        assert set(full) <= {max(lengths)}, (count, lengths)
        assert lengths[-1] > 1
        assert sum(lengths) == count
    families = [len(row) for row in layout(1, 12, 4, 3, 13, 5).rows()]
    assert len(families) == 8
    assert layout(1, 12, 4, 3, 13, 5).columns == 5
    assert layout().rows() == []


@pytest.mark.parametrize(
    ("size", "columns", "stretch"),
    [((40, 30), 3, (1, 1)), ((30, 59), 3, (1, 1)), ((4000, 1000), 3, (2, 1)), ((9000, 300), 2, (3, 1)),
     ((100, 800), 3, (1, 3))],
)  # fmt: skip
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
    assert len(figure.figure(sheet).axes) == 3


def test_a_figure_has_the_tiles_of_a_sheet_and_their_words() -> None:
    tiles = (sheets.Tile(BLANK.picture, "a", "layer3"), sheets.Tile(BLANK.picture, "b $x", "", "null map"))
    legend = captions.Legend(((0, 0, 0), (255, 255, 255)), ("0", "max"), "evidence")
    contents = sheets.Layout("heading", "model", (sheets.Group("", (BLANK,)), sheets.Group("family", tiles)), (legend,))
    drawn = figure.figure(contents, "three <maps>")
    assert [axis.get_title() for axis in drawn.axes] == ["name", "a\nlayer3", "b $x\nnull map", ""]
    assert drawn.axes[1].texts[0].get_text().strip() == "family"
    assert drawn.axes[3].get_xlabel() == "evidence"
    assert drawn.get_suptitle() == "heading\nmodel"
    shown = drawn._repr_html_()
    assert re.fullmatch(r'<img src="data:image/png;base64,[\w+/=]+" alt="three &lt;maps&gt;" style="[^"]*">', shown)


def test_tables_are_escaped_and_numbers_stand_at_the_right() -> None:
    drawn = table_html(["<layer>"], [["a\x1b<b>"], ["12"]], "x & y")
    assert "<layer>" not in drawn
    assert r"a\x1b&lt;b&gt;" in drawn
    assert '<td style="text-align: right">12</td>' in drawn
    assert "<caption>x &amp; y</caption>" in drawn
