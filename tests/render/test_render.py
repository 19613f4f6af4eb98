"""Rendering against golden pictures, and its rules.

``python tests/render/test_render.py`` draws the golden pictures again; look at them before they are
committed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from explain import render
from explain.data.boxes import Box
from explain.render import captions, overlays, sheets, styles
from explain.render.captions import bar, fit, font, wrapped
from explain.render.styles import (
    HEAT,
    INTENSITY,
    SIGNED,
    default_colormaps,
    lookup_table,
    on_photo,
    place,
)

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


def contents() -> sheets.Layout:
    heat = render.Heat().legend(photo())
    lines = render.Contour().legend(photo())
    tile = sheets.Tile(photo(), "Grad-CAM", "layer layer3", legend=heat)
    turned = photo().rotate(90, expand=True)
    null = sheets.Tile(
        turned, "Random CAM", "layer layer3", "null map: random weights", legend=heat
    )
    groups = (
        sheets.Group("", (sheets.Tile(photo(), "photo"),)),
        sheets.Group("class activation maps", (tile, null)),
        sheets.Group("gradients", (sheets.Tile(photo(), "Saliency", legend=lines),) * 2),
    )
    return sheets.Layout("Egyptian cat, 87 %", "tiny: Egyptian cat 87 %, tabby cat 9.1 %", groups)


PICTURES: dict[str, Callable[[], Image.Image]] = {
    "heat": lambda: render.overlay(photo(), bump(), box=SEEN),
    "contour": lambda: render.overlay(photo(), bump(), "contour", box=SEEN),
    "mask": lambda: render.overlay(photo(), bump(), "mask", box=SEEN),
    "spotlight": lambda: render.overlay(photo(), bump(), "spotlight", box=SEEN),
    "intensity": lambda: render.overlay(photo(), np.abs(waves()), "intensity", box=SEEN),
    "signed": lambda: render.overlay(photo(), waves(), "signed", box=SEEN),
    "color": lambda: render.overlay(
        photo(), np.stack([waves(), waves().T, -waves()]), "color", box=SEEN
    ),
    "caption": lambda: captions.caption(
        render.overlay(photo(), bump(), box=SEEN).resize((360, 240)),
        "Egyptian cat",
        "gradcam · layer3 · tiny",
        render.Heat().legend(photo()),
        end=", 87 %",
    ),
    "sheet": lambda: sheets.sheet(contents(), 120),
    "concepts": lambda: overlays.concepts(
        photo(),
        np.stack([bump(), bump().T]),
        SEEN,
        ["fur, cat", "eye, owl"],
        shares=[0.7, 0.3],
        title="2 concepts",
        detail="12 % left over",
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_looks_as_it_did_when_somebody_looked(name: str) -> None:
    drawn = PICTURES[name]()
    golden = Image.open(GOLDEN / f"{name}.png").convert("RGB")
    assert drawn.size == golden.size
    difference = np.abs(np.asarray(drawn).astype(int) - np.asarray(golden).astype(int))
    assert difference.mean() < TOLERANCE


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


@pytest.mark.parametrize(
    "region", [Box(-10, -5, 50, 25), Box(0.4, 0.4, 0.6, 0.6), Box(-3.7, 2.2, 43.1, 17.9)]
)
@pytest.mark.parametrize("style", styles.CHOICES)
def test_regions_past_the_edges_or_smaller_than_a_pixel_are_drawn(style: str, region: Box) -> None:
    assert place(np.ones((3, 5)), (40, 20), region).shape == (20, 40)
    assert render.overlay(Image.new("RGB", (40, 20)), np.ones((3, 5)), style, box=region).size == (
        40,
        20,
    )


def test_what_lies_on_padding_is_not_on_the_photo() -> None:
    values = np.arange(64.0).reshape(8, 8)
    assert np.array_equal(on_photo(values, (40, 20), Box(0, -10, 40, 30)), values[2:6])
    assert np.array_equal(on_photo(values, (20, 40), Box(-10, 0, 30, 40)), values[:, 2:6])
    assert np.array_equal(on_photo(values, (40, 20), Box(10, 5, 20, 15)), values)


def test_captions_fit_whatever_the_text_and_the_picture() -> None:
    legend = render.Heat().legend(photo())
    for size in ((1, 1), (90, 60), (2000, 100)):
        drawn = captions.caption(
            Image.new("RGB", size), "a very long label " * 20, "method " * 40, legend
        )
        assert drawn.width == max(260, size[0])
        assert drawn.height > size[1]
    shortened = fit("a very long label", 60, 14)
    assert shortened.endswith("…")
    assert font(14).getlength(shortened) <= 60
    assert fit("two\nlines", 500, 14) == "two lines"


def test_a_label_is_cut_before_its_percentage() -> None:
    for width in (90, 140, 400):
        shown = fit("a label that goes on and on", width, 14, bold=True, end=", 87 %")
        assert shown.endswith(", 87 %")
        assert font(14, True).getlength(shown) <= width


def test_what_a_picture_shows_is_said_in_full_in_more_lines() -> None:
    detail = (
        "refinecam · product of 4 layers, features.3.0.block.0 to features · efficientnet-lite0"
    )
    for width in (320, 512):
        lines = wrapped(detail, width - 120, 11, 3)
        assert " ".join(lines).replace("·", "").split() == detail.replace("·", "").split()
        assert all(font(11).getlength(line) <= width - 120 for line in lines)
    assert wrapped(detail, 60, 11, 2)[-1].endswith("…")
    blank = Image.new("RGB", (320, 200))
    steps = render.Contour().legend(blank)
    one, three = (captions.caption(blank, "a cat", words, steps) for words in ("gradcam", detail))
    assert three.height > one.height
    layered = sheets.Tile(photo(), "refinecam", "product of 3 layers, layer2.1 to layer3.2")
    named = sheets.Tile(photo(), "refinecam", "layer2.1")
    heights = [
        sheets.sheet(sheets.Layout("", "", (sheets.Group("", (tile,)),)), 120).height
        for tile in (layered, named)
    ]
    assert heights[0] > heights[1]


@pytest.mark.parametrize("name", [HEAT, INTENSITY, SIGNED])
def test_the_colours_that_are_known_by_heart_are_those_of_matplotlib(name: str) -> None:
    expected = matplotlib.colormaps[name](np.arange(256) / 255, bytes=True)[:, :3]
    assert set(default_colormaps()) == {HEAT, INTENSITY, SIGNED}
    assert np.array_equal(lookup_table(name), expected)
    assert np.array_equal(
        lookup_table("viridis"), matplotlib.colormaps["viridis"](np.arange(256), bytes=True)[:, :3]
    )


def test_a_bar_has_the_colours_of_its_legend_in_their_order() -> None:
    colors = ((10, 20, 30), (200, 40, 60), (90, 220, 120))
    ramp = np.asarray(bar(captions.Legend(colors, ("0", "max"), "heat"), 101, 10))
    assert [tuple(ramp[0, at].tolist()) for at in (0, 50, 100)] == list(colors)
    steps = np.asarray(bar(captions.Legend(colors, ("a", "b", "c"), "shares", ramp=False), 120, 10))
    assert [tuple(steps[3, at].tolist()) for at in (20, 60, 100)] == list(colors)


def test_labels_that_steer_terminals_are_drawn_as_they_are_written() -> None:
    """Nothing in them is obeyed."""
    blank = Image.new("RGB", (300, 100), "white")
    steering = "tab\x1b[2J\x9b\u202e"
    written = r"tab\x1b[2J\x9b\u202e"
    assert (
        captions.caption(blank, steering, steering).tobytes()
        == captions.caption(blank, written, written).tobytes()
    )
    steered, plain = (
        sheets.sheet(sheets.Layout(words, "", (sheets.Group("", (sheets.Tile(photo(), words),)),)))
        for words in (steering, written)
    )
    assert steered.tobytes() == plain.tobytes()


def test_an_overlay_takes_what_attribute_gives_and_any_photo(tmp_path: Path) -> None:
    import torch

    photo().save(tmp_path / "a.png")
    heatmap = torch.rand(7, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    drawn = render.overlay(photo(), heatmap)
    for given in (tmp_path / "a.png", np.asarray(photo()), (tmp_path / "a.png").read_bytes()):
        assert render.overlay(given, heatmap.detach().numpy()).tobytes() == drawn.tobytes()
    assert render.overlay(photo(), heatmap, box=(0, 0, 180, 120)).tobytes() == drawn.tobytes()
    assert render.overlay(photo(), heatmap, box=(0, 0, 90, 120)).tobytes() != drawn.tobytes()
    assert render.overlay(photo(), heatmap.double().half(), "contour").size == (180, 120)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        draw().save(GOLDEN / f"{name}.png")
