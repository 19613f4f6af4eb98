"""Contact sheets: rows without a single picture, groups in their order, figures with the same contents."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest
from PIL import Image

from explain import render
from explain.render.layout import ABREAST
from explain.render.sheet import REMARK

BLANK = render.Tile(Image.new("RGB", (40, 30), "green"), "name")


def layout(*sizes: int, **words: str) -> render.Layout:
    groups = tuple(render.Group(f"group {i}" if i else "", (BLANK,) * size) for i, size in enumerate(sizes))
    return render.Layout(words.get("title", "title"), words.get("detail", ""), groups)


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


def test_a_long_group_is_cut_into_equal_rows() -> None:
    lengths = [[len(group.tiles) for group in row] for row in layout(11).rows()]
    assert lengths in ([[6], [5]], [[5], [6]])
    assert [[len(group.tiles) for group in row] for row in layout(13).rows()] in (
        [[5], [4], [4]],
        [[4], [4], [5]],
        [[4], [5], [4]],
    )


def test_a_sheet_grows_with_its_tiles_and_has_what_its_tiles_say() -> None:
    small, large = render.sheet(layout(1, 2), 80), render.sheet(layout(1, 2), 160)
    assert small.width < large.width
    remarked = render.Layout("", "", (render.Group("", (BLANK, render.Tile(BLANK.picture, "a", "b", "null map"))),))
    drawn = np.asarray(render.sheet(remarked, 120)).astype(int)
    assert (np.abs(drawn - REMARK).max(2) < 40).sum() > 20
    plain = np.asarray(render.sheet(layout(2), 120)).astype(int)
    assert (np.abs(plain - REMARK).max(2) < 40).sum() == 0


def test_a_figure_has_the_tiles_of_a_sheet_and_their_words() -> None:
    tiles = (render.Tile(BLANK.picture, "a", "layer3"), render.Tile(BLANK.picture, "b $x", "", "null map"))
    legend = render.Legend(((0, 0, 0), (255, 255, 255)), ("0", "max"), "evidence")
    contents = render.Layout("heading", "model", (render.Group("", (BLANK,)), render.Group("family", tiles)), (legend,))
    drawn = render.figure(contents, "three <maps>")
    assert [axis.get_title() for axis in drawn.axes] == ["name", "a\nlayer3", "b $x\nnull map", ""]
    assert drawn.axes[1].texts[0].get_text().strip() == "family"
    assert drawn.axes[3].get_xlabel() == "evidence"
    assert drawn.get_suptitle() == "heading\nmodel"
    shown = drawn._repr_html_()
    assert re.fullmatch(r'<img src="data:image/png;base64,[\w+/=]+" alt="three &lt;maps&gt;" style="[^"]*">', shown)


def test_tables_are_escaped_and_numbers_stand_at_the_right() -> None:
    drawn = render.table_html(["<layer>"], [["a\x1b<b>"], ["12"]], "x & y")
    assert "<layer>" not in drawn
    assert r"a\x1b&lt;b&gt;" in drawn
    assert '<td style="text-align: right">12</td>' in drawn
    assert "<caption>x &amp; y</caption>" in drawn
