"""Figures of matplotlib: as wide as asked, with fine images, and texts that stay texts."""

from __future__ import annotations

import base64
import io
import sys
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from explain import ExplainError
from explain.render import captions, figures, sheets

GREEN = Image.new("RGB", (40, 30), "green")
RAMP = captions.Legend(((0, 0, 0), (255, 255, 255)), ("0", "max"), "evidence")
STEPS = captions.Legend(((9, 9, 9), (99, 0, 0)), ("50 %", "90 %"), "inside", ramp=False)
SVG = "{http://www.w3.org/2000/svg}"


def contents() -> sheets.Layout:
    tiles = (
        sheets.Tile(GREEN, "Grad-CAM", "layer layer3", legend=RAMP),
        sheets.Tile(GREEN, "b $x", "", "null map", (captions.Mark("model", False),), STEPS),
    )
    photo = sheets.Group("", (sheets.Tile(GREEN, "photo"),))
    return sheets.Layout("heading", "detail", (photo, sheets.Group("family", tiles)))


def svg_of(figure: object) -> ElementTree.Element:
    return ElementTree.fromstring(figures.as_file(figure, "svg"))  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [8.0, None])
def test_a_figure_has_fine_images_and_its_words_are_texts(width: float | None) -> None:
    figure = figures.figure_of(contents(), width_cm=width, letters=True)
    if width is not None:
        assert figure.get_figwidth() * 2.54 == pytest.approx(width)
    svg = svg_of(figure)
    words = " ".join("".join(text.itertext()) for text in svg.iter(f"{SVG}text"))
    for word in (
        *("heading", "detail", "photo", "Grad-CAM", "layer3", "b $x", "null map", "family", "(a)"),
        *("(b)", "(c)", "model failed", "0", "max", "evidence", "50 %", "inside"),
    ):
        assert word in words
    resolutions = []
    for image in svg.iter(f"{SVG}image"):
        content = image.attrib["{http://www.w3.org/1999/xlink}href"].split(",")[1]
        opened = Image.open(io.BytesIO(base64.b64decode(content))).convert("RGB")
        if opened.getpixel((0, 0)) == (0, 128, 0):
            scale = float(image.attrib["transform"].split("(")[1].split()[0])
            inches = scale * float(image.attrib["width"]) / 72
            resolutions.append(opened.width / inches)
    assert len(resolutions) == 3
    assert min(resolutions) >= 300 * 0.99  # whole pixels


def test_texts_are_as_large_as_rcparams_say_and_fit_their_width() -> None:
    from matplotlib import rc_context

    heights = []
    for size in (6, 12):
        with rc_context({"font.size": size}):
            figure = figures.figure_of(contents(), width_cm=8)
        heights.append(figure.get_figheight())
        right = max(text.get_window_extent().x1 for text in figure.texts)
        assert right <= figure.bbox.width + 2
        assert max(text.get_fontsize() for text in figure.texts) == pytest.approx(1.2 * size)
    assert heights[0] < heights[1]


@pytest.mark.long
def test_the_same_figure_is_the_same_file_and_a_pdf_has_its_fonts() -> None:
    for ending in ("svg", "pdf"):
        one, other = (
            figures.as_file(figures.figure_of(contents(), width_cm=8), ending) for _ in range(2)
        )
        assert one == other
    assert one.startswith(b"%PDF")
    assert b"/FontFile2" in one  # TrueType: no outlines, no bitmaps


@pytest.mark.parametrize("width", [1, 101, "8", True])
def test_a_width_that_no_figure_has_is_refused(width: object) -> None:
    with pytest.raises(ExplainError, match="width_cm must be a number from 2 to 100"):
        figures.abreast(width, is_table=False)  # type: ignore[arg-type]


def test_a_figure_shows_itself_once(monkeypatch: pytest.MonkeyPatch) -> None:
    figure: Any = figures.figure_of(contents(), "three <maps>")
    displayed: list[dict[str, str]] = []
    module = SimpleNamespace(display=lambda formats, raw: displayed.append(formats))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    figure._ipython_display_()
    # and no PNG beside it
    assert [sorted(formats) for formats in displayed] == [["text/html", "text/plain"]]
    assert 'alt="three &lt;maps&gt;"' in figure._repr_html_()
