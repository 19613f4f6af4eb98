"""Styles: each against what it says, by a plain computation."""

from __future__ import annotations

from itertools import combinations

import cv2
import numpy as np
import pytest
from PIL import Image

from explain import ExplainError, render
from explain.data.boxes import Box
from explain.render import styles
from explain.render.captions import COLORS
from tests.render.test_render import bump, photo

WHOLE = Box(0, 0, 180, 120)


def drawn(style: str | styles.Style, values: object, brightness: int = 128) -> np.ndarray:
    """The colours that values have on a flat grey photo, one pixel for each."""
    values = np.atleast_2d(values).astype(float)
    flat = Image.new("RGB", values.shape[::-1], (brightness,) * 3)
    picture = styles.get_style(style).draw(flat, values, Box(0, 0, *flat.size))
    return np.asarray(picture).astype(int)


def bell(middle: int) -> np.ndarray:
    y, x = np.mgrid[0:240, 0:480] + 0.5
    return np.exp(-((x - middle) ** 2 + (y - 120) ** 2) / (2 * 30**2))


def radius(share: float) -> float:
    """Of the circle that holds a share of a bell in two dimensions, 30 pixels wide."""
    return 30 * float(np.sqrt(-2 * np.log(1 - share)))


def test_colours_of_the_photo_are_never_those_of_heat() -> None:
    """Two photos of other colours and the same brightness give the same picture."""
    grey = photo().convert("L").convert("RGB")
    grey.putpixel((0, 0), (255, 0, 0))
    pictures = [np.asarray(render.overlay(one, bump()))[1:] for one in (photo(), grey)]
    assert np.array_equal(*pictures)


@pytest.mark.parametrize("name", ["heat", "signed"])
def test_a_scan_keeps_its_contrast_where_there_is_no_heat(name: str) -> None:
    scan = photo().convert("L").convert("RGB")
    values = np.zeros((12, 18), np.float32)
    values[:6, :9] = np.linspace(0.5, 1, 9)
    seen = np.asarray(render.overlay(scan, values, name))
    without = np.s_[80:, 120:]
    assert np.array_equal(seen[without], np.asarray(scan)[without])
    assert (seen[:40, :60] != np.asarray(scan)[:40, :60]).all(2).mean() > 0.9
    faded = np.asarray(render.overlay(photo(), values, name))[without]
    assert np.ptp(faded.mean(2)) < 0.6 * np.ptp(np.asarray(scan)[without].mean(2))


@pytest.mark.parametrize("style", ["heat", "intensity"])
@pytest.mark.parametrize("brightness", [0, 128, 255])
def test_one_sided_maps_in_print_go_from_dark_to_light(style: str, brightness: int) -> None:
    """In grey, over any photo, in steps that never fall."""
    chosen = styles.get_style(style, colormap=styles.PRINT)
    light = lab(drawn(chosen, np.linspace(0, 1, 256), brightness)[0])[:, 0]
    rising = light[20:]  # below, the photo shows
    assert np.diff(rising).min() > -0.5
    assert light[0] < 45
    assert light[-1] > 75


@pytest.mark.parametrize("brightness", [0, 90, 255])
@pytest.mark.parametrize("name", ["heat", "spotlight", "signed"])
def test_legends_have_the_colours_that_are_on_the_photo(name: str, brightness: int) -> None:
    """On a flat photo, every colour of a picture is in its legend, and the ends are the colours of
    the extremes."""
    low = -1.0 if name == "signed" else 0.0
    colors = drawn(name, np.linspace(low, 1, 256), brightness)[0]
    legend = styles.get_style(name).legend(Image.new("RGB", (200, 100), (brightness,) * 3))
    assert legend is not None
    shown = np.asarray(legend.colors)
    distances = np.abs(colors[:, None] - shown).max(2)
    assert distances.min(1).max() <= 12  # a step of the legend
    assert max(distances[0, 0], distances[-1, -1]) <= 2


def lab(colors: object) -> np.ndarray:
    """CIELAB, under D65, of colours ``(..., 3)`` of sRGB from 0 to 255."""
    shares = np.asarray(colors, np.float32) / 255
    return cv2.cvtColor(shares.reshape(1, -1, 3), cv2.COLOR_RGB2LAB).reshape(shares.shape)


def linear_light(colors: object) -> np.ndarray:
    share = np.asarray(colors, np.float64) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def in_srgb(linear: np.ndarray) -> np.ndarray:
    share = linear.clip(0, 1)
    return 255 * np.where(share <= 0.0031308, 12.92 * share, 1.055 * share ** (1 / 2.4) - 0.055)


# Machado, Oliveira and Fernandes, 2009, severity 1.0: what is seen of linear red, green and blue.
DEFICIENCIES = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
SEEN_BY = {**DEFICIENCIES, "grey print": [[0.2126, 0.7152, 0.0722]] * 3}


@pytest.mark.parametrize(
    ("colormap", "seen_by"),
    [
        *((styles.PRINT, name) for name in SEEN_BY),
        *((styles.SIGNED, name) for name in DEFICIENCIES),
    ],
)
def test_for_against_and_nothing_are_told_apart(colormap: str, seen_by: str) -> None:
    """Also with a colour-vision deficiency, over any photo; in grey print, with the colour map for
    it. A distance of 10 in CIELAB is seen at a glance."""
    style = styles.Signed(colormap, spread=0)
    seen = {}
    for name, of_sign in {"against": [-1.0, -0.5], "nothing": [0.0], "for": [0.5, 1.0]}.items():
        shown = [drawn(style, value, light)[0, 0] for value in of_sign for light in (0, 128, 255)]
        seen[name] = lab(in_srgb(linear_light(shown) @ np.array(SEEN_BY[seen_by]).T))
    for one, other in combinations(seen, 2):
        distances = np.linalg.norm(seen[one][:, None] - seen[other], axis=-1)
        assert distances.min() > 10, (one, other)


def test_a_peak_is_as_light_over_black_as_over_grey_and_lighter_than_half_of_it_anywhere() -> None:
    halves, peaks = lab([drawn("heat", [0.5, 1], light)[0] for light in (0, 128, 255)])[..., 0].T
    assert np.abs(np.diff(peaks)).max() < 8
    assert peaks[0] > halves.max()


def test_thresholds_are_the_largest_that_keep_the_share() -> None:
    shares = (0.2, 0.5, 1.0)
    values = np.random.default_rng(0).random((9, 7)) ** 4
    for share, threshold in zip(shares, styles.thresholds(values, shares), strict=True):
        assert values[values >= threshold].sum() >= share * values.sum() * (1 - 1e-9)
        assert values[values > threshold].sum() < share * values.sum()
    assert styles.thresholds(np.zeros((3, 3)), (0.5, 0.9)) == [np.inf, np.inf]


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_contour_runs_around_the_places_of_the_shares(share: float) -> None:
    style = render.Contour(shares=(share,))
    color = style.legend(Image.new("RGB", (9, 9), "white")).colors[0]
    # the line's edges are mixed with its dark border
    near = np.abs(drawn(style, bell(120), 255) - color).max(2) < 80
    distance = np.hypot(*(np.argwhere(near) + 0.5 - 120).T)
    assert len(distance) > radius(share)
    assert np.abs(distance - radius(share)).max() < 3


def test_lines_around_what_is_against_are_dashed_and_those_around_what_is_for_are_not() -> None:
    """Two equal bumps, so that both lines are the circle that holds a half of each."""
    lines = (drawn(styles.SignedContour(), bell(120) - bell(360)) != 128).any(2)
    angles = np.linspace(0, 2 * np.pi, 720, endpoint=False)
    rows = (120 + radius(0.5) * np.sin(angles)).astype(int)
    columns = (120 + radius(0.5) * np.cos(angles)).astype(int)
    assert lines[rows, columns].mean() > 0.98
    assert 0.4 < lines[rows, columns + 240].mean() < 0.85


@pytest.mark.parametrize("sideways", [False, True])
def test_the_evidence_of_padding_is_not_counted(sideways: bool) -> None:
    values = np.zeros((8, 8))
    values[[0, -1]] = 1
    values[3, 4] = 0.5
    values[4, 4] = 0.4
    style = render.Mask(shares=(0.5,))
    if sideways:
        tall = Image.new("RGB", (40, 80), "white")
        masked = style.draw(tall, values.T, Box(-20, 0, 60, 80))
        masked = masked.transpose(Image.Transpose.TRANSPOSE)
    else:
        masked = style.draw(Image.new("RGB", (80, 40), "white"), values, Box(0, -20, 80, 60))
    assert masked.getpixel((45, 15)) == (255, 255, 255)
    covered = [masked.getpixel(place) for place in ((0, 20), (29, 39), (45, 0), (79, 4))]
    assert set(covered) == {render.Mask.cover}


def test_sets_of_regions_are_the_photo_and_the_rest_is_pale() -> None:
    sets = np.zeros((3, 4, 6), bool)  # cells of 30 pixels; of three sets, two were found
    sets[0, 1, 1] = True
    sets[1, 2, 4] = True
    first = (45, 45)
    second = (135, 75)
    outside = (90, 105)
    picture = render.overlay(photo(), sets, "evidence")
    without = render.overlay(photo(), sets, styles.RegionSets(without=True))
    for place in (first, second):
        assert picture.getpixel(place) == photo().getpixel(place)
    covered = Image.new("RGB", (180, 120), styles.Mask.cover)
    pale = Image.blend(photo(), covered, styles.RegionSets.pale).getpixel(outside)
    assert np.abs(np.subtract(picture.getpixel(outside), pale)).max() <= 1
    assert without.getpixel(first) == styles.Mask.cover
    assert without.getpixel(second) == photo().getpixel(second)
    # lines in the colour of the set
    pixels = np.asarray(picture).astype(int)
    assert np.abs(pixels[28:33, 45] - COLORS[0]).max(1).min() < 40
    assert np.abs(pixels[58:63, 135] - COLORS[1]).max(1).min() < 40


@pytest.mark.parametrize("shares", [(), (0.9, 0.5), (0.0, 0.5), (0.5, 1.1), (0.5, 0.5)])
def test_shares_that_are_none_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ExplainError, match="shares of mask must rise within 0 to 1"):
        render.Mask(shares=shares)
