"""Rendering against golden pictures, and its rules.

``python tests/render/test_render.py`` draws the golden pictures again; look at them before they are
committed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops

from explain import ExplainWarning, render
from explain.data.boxes import Box
from explain.render import captions, overlays, sheets
from explain.render.captions import fit, font
from explain.render.styles import resampled_on_photo

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


def overlaid(values: np.ndarray, style: str) -> Image.Image:
    return render.overlay(photo(), values, style, box=SEEN)


def test_an_overlay_takes_the_tensor_before_its_normalisation() -> None:
    pixels = torch.from_numpy(np.asarray(photo()).copy()).permute(2, 0, 1)
    heatmap = torch.from_numpy(bump())
    expected = render.overlay(photo(), bump())
    for tensor in (pixels, pixels / 255, (pixels / 255).double().requires_grad_()):
        found = render.overlay(tensor, heatmap)
        difference = ImageChops.difference(found, expected)
        assert (found.size, np.asarray(difference).max() <= 1) == (expected.size, True)
    with pytest.warns(ExplainWarning, match="window"):
        render.overlay(pixels / 100 - 1, heatmap)


PICTURES: dict[str, Callable[[], Image.Image]] = {
    **{
        style: partial(overlaid, bump(), style)
        for style in ("heat", "contour", "mask", "spotlight")
    },
    "intensity": lambda: overlaid(np.abs(waves()), "intensity"),
    "signed": lambda: overlaid(waves(), "signed"),
    "color": lambda: overlaid(np.stack([waves(), waves().T, -waves()]), "color"),
    "caption": lambda: captions.caption(
        overlaid(bump(), "heat").resize((360, 240)),
        "Egyptian cat",
        "gradcam · layer3 · tiny",
        render.Heat().legend(photo()),
        end=", 87 %",
    ),
    "sheet": lambda: sheets.contact_sheet(contents(), 120),
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
    picture = PICTURES[name]()
    golden = Image.open(GOLDEN / f"{name}.png").convert("RGB")
    assert picture.size == golden.size
    difference = ImageChops.difference(picture.convert("RGB"), golden)
    assert np.asarray(difference).mean() < TOLERANCE


def test_a_label_is_cut_before_its_percentage() -> None:
    measure = font(14, bold=True).getlength
    for width in (90, 140, 400):
        shown = fit("a label that goes on and on", width, measure, end=", 87 %")
        assert shown.endswith(", 87 %")
        assert measure(shown) <= width


def test_labels_that_steer_terminals_are_drawn_as_they_are_written() -> None:
    """Nothing in them is obeyed."""
    blank = Image.new("RGB", (300, 100), "white")
    captioned = []
    listed = []
    for label in ("tab\x1b[2J\x9b\u202e", r"tab\x1b[2J\x9b\u202e"):
        group = sheets.Group("", (sheets.Tile(blank, label),))
        captioned.append(captions.caption(blank, label, label))
        listed.append(sheets.contact_sheet(sheets.Layout(label, "", (group,))))
    assert captioned[0] == captioned[1]
    assert listed[0] == listed[1]


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        draw().save(GOLDEN / f"{name}.png")


def test_a_map_lies_on_its_part_of_the_photo() -> None:
    placed = resampled_on_photo(np.ones((3, 3)), (40, 20), Box(10, 5, 20, 15), outside=7)
    expected = np.full((20, 40), 7)
    expected[5:15, 10:20] = 255
    assert np.array_equal(placed, expected)
