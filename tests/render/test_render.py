"""Rendering against golden pictures, and its rules.

``python tests/render/test_render.py`` draws the golden pictures again; look at them before they are committed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from explain import render
from explain.errors import ExplainError
from explain.images import Box
from explain.render.overlay import place
from explain.render.text import fit, font

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 0.6  # grey levels on average; fonts and resampling differ a little between versions
SEEN = Box(30, 0, 150, 120)


def photo() -> Image.Image:
    y, x = np.mgrid[0:120, 0:180]
    return Image.fromarray(np.stack([x, 200 - y, 80 + (x + y) % 60], axis=2).astype(np.uint8))


def bump() -> np.ndarray:
    y, x = np.mgrid[0:10, 0:10]
    return np.exp(-((x - 6.5) ** 2 + (y - 3.0) ** 2) / 6)


def waves() -> np.ndarray:
    y, x = np.mgrid[0:60, 0:60] / 60
    return np.sin(x * 20) * np.cos(y * 14) * np.exp(-((x - 0.6) ** 2 + (y - 0.4) ** 2) * 6)


PICTURES: dict[str, Callable[[], Image.Image]] = {
    "heat": lambda: render.heat(photo(), bump(), SEEN),
    "intensity": lambda: render.intensity(photo(), np.abs(waves()), SEEN),
    "signed": lambda: render.signed(photo(), waves(), SEEN),
    "color": lambda: render.color(photo(), np.stack([waves(), waves().T, -waves()]), SEEN),
    "caption": lambda: render.caption(
        render.heat(photo(), bump(), SEEN).resize((360, 240)),
        "Egyptian cat, 87 %",
        "gradcam · layer3 · bundled",
        "inferno",
    ),
    "sheet": lambda: render.sheet(
        [[photo(), photo().rotate(90, expand=True)]] * 2,
        columns=["photo", "turned"],
        titles=[["cat, 87 %", "layer3"]] * 2,
        tile=120,
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_looks_as_it_did_when_somebody_looked(name: str) -> None:
    drawn = PICTURES[name]()
    golden = Image.open(GOLDEN / f"{name}.png").convert("RGB")
    assert drawn.size == golden.size
    difference = np.abs(np.asarray(drawn).astype(int) - np.asarray(golden).astype(int))
    assert difference.mean() < TOLERANCE


def test_overlays_have_the_size_of_the_photo_and_leave_it_alone() -> None:
    given = photo()
    before = given.tobytes()
    for draw in (render.heat, render.intensity, render.signed):
        assert draw(given, bump(), SEEN).size == given.size
    assert render.color(given, np.stack([waves()] * 3), SEEN).size == given.size
    assert given.tobytes() == before


def test_no_heat_shows_the_photo_and_full_opacity_the_colour_map() -> None:
    whole = Box(0, 0, 180, 120)
    assert render.heat(photo(), np.zeros((4, 4)), whole).tobytes() == photo().tobytes()
    hot = render.heat(photo(), np.ones((4, 4)), whole, alpha=1)
    assert np.unique(np.asarray(hot).reshape(-1, 3), axis=0).tolist() == [
        render.colorize(np.ones((1, 1)))[0, 0].tolist()
    ]
    assert render.heat(photo(), np.ones((4, 4)), whole, alpha=0).tobytes() == photo().tobytes()


def test_width_and_height_are_not_swapped_and_a_map_lands_where_it_belongs() -> None:
    values = np.zeros((2, 4))
    values[1, 3] = 1
    placed = place(values, (40, 20), Box(0, 0, 40, 20))
    assert placed.shape == (20, 40)
    assert np.unravel_index(placed.argmax(), placed.shape)[0] >= 15
    assert np.unravel_index(placed.argmax(), placed.shape)[1] >= 35
    within = place(np.ones((3, 3)), (40, 20), Box(10, 5, 20, 15), outside=7)
    assert (within[5:15, 10:20] == 255).all()
    assert (within == 255).sum() == 100
    assert (within == 7).sum() == 700


@pytest.mark.parametrize("region", [Box(-10, -5, 50, 25), Box(0.4, 0.4, 0.6, 0.6), Box(-3.7, 2.2, 43.1, 17.9)])
def test_regions_past_the_edges_or_smaller_than_a_pixel_are_drawn(region: Box) -> None:
    assert place(np.ones((3, 5)), (40, 20), region).shape == (20, 40)
    assert render.heat(Image.new("RGB", (40, 20)), np.ones((3, 5)), region).size == (40, 20)


def test_signed_pictures_tell_for_from_against() -> None:
    values = np.array([[1.0, -1.0]])
    drawn = np.asarray(render.signed(Image.new("RGB", (40, 20), "white"), values, Box(0, 0, 40, 20)))
    left, right = drawn[10, 2].astype(int), drawn[10, 37].astype(int)
    assert left[0] > left[2] + 40
    assert right[2] > right[0] + 40


def test_zero_is_grey_in_colour_pictures_and_one_channel_is_enough() -> None:
    whole = Box(0, 0, 8, 8)
    assert set(np.asarray(render.color(Image.new("RGB", (8, 8)), np.zeros((3, 4, 4)), whole)).ravel().tolist()) <= {
        127,
        128,
    }
    assert render.color(Image.new("RGB", (8, 8)), np.ones((5, 4, 4)), whole).mode == "RGB"


def test_bad_choices_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ExplainError, match="colormap 'infernno' is unknown; did you mean 'inferno'"):
        render.heat(photo(), bump(), SEEN, colormap="infernno")
    with pytest.raises(ExplainError, match=r"alpha must be an opacity from 0 to 1, got 1\.5"):
        render.heat(photo(), bump(), SEEN, alpha=1.5)


def test_captions_fit_whatever_the_text_and_the_picture() -> None:
    for size in ((1, 1), (90, 60), (2000, 100)):
        drawn = render.caption(Image.new("RGB", size), "a very long label " * 20, "method " * 40, "inferno")
        assert drawn.width == max(260, size[0])
        assert drawn.height > size[1]
    shortened = fit("a very long label", 60, 14)
    assert shortened.endswith("…")
    assert font(14).getlength(shortened) <= 60
    assert fit("two\nlines", 500, 14) == "two lines"


def test_a_caption_has_its_words_and_its_colour_bar() -> None:
    blank = Image.new("RGB", (400, 100), "black")
    strip = np.asarray(render.caption(blank, "a label", "a detail", "inferno"))[100:].astype(int)
    assert (strip[:, :200].max(2) < 60).sum() > 100
    bar = strip[:, 250:]
    assert ((bar.max(2) - bar.min(2)) > 100).sum() > 100
    plain = np.asarray(render.caption(blank, "", "", None))[100:]
    assert (plain == 255).all()


def test_a_figure_has_a_title_over_every_picture() -> None:
    drawn = render.figure([photo()] * 4, ["a", "b $x", "c", "d"], "heading")
    assert [axis.get_title() for axis in drawn.axes] == ["a", "b $x", "c", "d", "", ""]
    drawn.canvas.draw()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        draw().save(GOLDEN / f"{name}.png")


def test_labels_that_steer_terminals_are_drawn_as_they_are_written() -> None:
    """A line break is an escape in a caption, and starts a new line of a title; nothing else is obeyed."""
    blank = Image.new("RGB", (300, 100), "white")
    steering, written = "tab\x1b[2J\x9b\u202e", r"tab\x1b[2J\x9b\u202e"
    assert render.caption(blank, steering, steering).tobytes() == render.caption(blank, written, written).tobytes()
    drawn = render.figure([photo()], [f"{steering}\nb"], steering)
    assert drawn.axes[0].get_title() == f"{written}\nb"
    drawn.canvas.draw()  # a glyph that is missing would be a warning
