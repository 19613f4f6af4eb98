"""How many pictures stand side by side, how large they are, and where they are in a sheet."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from explain.data.boxes import Box
from explain.render.captions import (
    Legend,
    Mark,
    bar,
    beside,
    draw_marks,
    enlargement,
    font,
    placed,
    stacked,
    wrapped,
)
from explain.render.figures import abreast
from explain.render.sheets import Group, Layout, Tile, contact_sheet, evenly_spread, table
from explain.render.styles import fine, has_colors, mark_unseen, rising, thresholds


def picture(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height))


def sheet_of(tile: Tile, count: int) -> Layout:
    return Layout("", "", (Group("", (tile,) * count),))


def test_pictures_are_put_together() -> None:
    both = [picture(60, 40), picture(20, 5)]
    assert stacked(both, 80).size == (80, 45)
    assert placed([(0, both[0]), (70, both[1])], 90).size == (90, 40)
    assert beside([both[0], picture(60, 30)], 2).size == (122, 40)


def test_tiles_fill_the_last_row() -> None:
    columns = [sheet_of(Tile(picture(1, 1)), count).columns for count in (1, 3, 6, 7, 13)]
    assert columns == [2, 3, 6, 4, 5]
    tile = Tile(picture(4, 3))
    table_layout = Layout("", "", (Group("", (tile,)), Group("a", (tile,) * 7, own_row=True)))
    assert [list(row) for row in table_layout.places()] == [[0, 1, 2, 3, 4], [1, 2, 3]]


def test_tiles_of_long_pictures_are_long() -> None:
    sizes = ((60, 40), (80, 20), (20, 80))
    stretched = [sheet_of(Tile(picture(*size)), 1).stretch for size in sizes]
    assert stretched == [(1.0, 1.0), (2.0, 1.0), (1.0, 2.0)]


def test_sheets_and_tables_are_as_wide_as_their_tiles() -> None:
    tile = Tile(picture(40, 30), "photo")
    sheet = contact_sheet(Layout("a cat", "", (Group("", (tile,) * 3),)), tile=100)
    of_table = table([[tile] * 3], ["a", "b", "c"], tile=100)
    assert sheet.width == of_table.width == 332


@pytest.mark.parametrize(
    ("width", "is_table", "count"), [(None, True, 6), (17, True, 8), (8, False, 3)]
)
def test_a_table_may_have_narrower_pictures(
    width: float | None, is_table: bool, count: int
) -> None:
    assert abreast(width, is_table=is_table) == count


def test_numbers_are_spread_evenly() -> None:
    assert evenly_spread(3, 8) == [0, 1, 2]
    assert evenly_spread(9, 3) == [0, 4, 8]


def test_small_photos_are_enlarged_before_they_get_a_caption() -> None:
    assert [enlargement(size) for size in ((32, 32), (320, 200))] == [10, 1]


def test_a_legend_has_its_meaning_below_where_it_does_not_fit_between() -> None:
    steps = Legend(((0, 0, 0), (255, 0, 0)), ("50 %", "90 %"), "evidence inside", ramp=False)
    ramp = Legend(((0, 0, 0), (255, 0, 0)), ("0", "1"), "heat")
    assert bar(ramp, 120, 10).width == 120
    assert bar(steps, 120, 10).height > bar(ramp, 120, 10).height
    tile = Tile(picture(40, 40), legend=ramp)
    heights = [contact_sheet(sheet_of(tile, 1), side).height - side for side in (400, 100)]
    assert heights[0] < 4 * heights[1]


def test_marks_are_at_most_as_wide_as_they_may_be() -> None:
    marks = [Mark("model", True), Mark("class", False)]
    widths = [draw_marks(marks, width, 12).width for width in (200, 90, 40)]
    assert widths[0] <= 200
    assert widths[1] <= 90
    assert widths[2] <= 40


def test_texts_break_between_words() -> None:
    text = "product of 3 layers, layer2.1 to layer3.2"
    lines = wrapped(text, 140, font(12).getlength, 2)
    assert lines == ["product of 3 layers,", "layer2.1 to layer3.2"]
    assert wrapped("", 100, font(12).getlength, 2) == []


def test_what_the_model_saw_whole_is_left_as_it_is() -> None:
    white = Image.new("RGB", (40, 20), "white")
    assert mark_unseen(white, white, [Box(0, 0, 40, 20)]) is white
    half = mark_unseen(white, white, [Box(0, 0, 20, 20)])
    assert half.getpixel((10, 10)) == (255, 255, 255)
    assert half.crop((25, 0, 40, 20)).getextrema() != ((255, 255),) * 3


def test_a_photo_in_grey_has_no_colors() -> None:
    photos = [Image.new("RGB", (4, 3), color) for color in ("red", "grey")]
    assert [has_colors(photo) for photo in photos] == [True, False]


def test_areas_hold_their_shares_of_a_map() -> None:
    assert thresholds(np.array([[4.0, 3.0], [2.0, 1.0]]), [0.4, 0.75]) == [4.0, 2.0]
    assert thresholds(np.zeros((2, 2)), [0.5]) == [np.inf]
    assert min(fine(np.ones((7, 7))).shape) >= 100


def test_weak_values_leave_the_photo_as_it_is() -> None:
    opacity = rising(np.array([0, 0.1, 0.5, 1]))
    assert opacity[[0, 1, 3]].tolist() == [0, 0, 1]
    assert 0.5 < opacity[2] < 1
