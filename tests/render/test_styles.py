"""Styles: each against what it says, by a plain computation."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from explain import ExplainError, render
from explain.data.boxes import Box
from explain.render import styles
from explain.render.captions import COLORS
from tests.render.test_render import bump, photo

WHOLE = Box(0, 0, 180, 120)


def test_colours_of_the_photo_are_never_those_of_heat() -> None:
    """Two photos of other colours and the same brightness give the same picture."""
    grey = photo().convert("L").convert("RGB")
    assert render.overlay(photo(), bump()).tobytes() == render.overlay(grey, bump()).tobytes()


@pytest.mark.parametrize("brightness", [0, 90, 255])
@pytest.mark.parametrize("name", ["heat", "spotlight", "signed"])
def test_legends_have_the_colours_that_are_on_the_photo(name: str, brightness: int) -> None:
    """On a flat photo, every colour of a picture is in its legend, and the ends are the colours of
    the extremes."""
    flat = Image.new("RGB", (200, 100), (brightness,) * 3)
    style = styles.get_style(name)
    low = -1.0 if style.reads == "signed" else 0.0
    ramp = np.linspace(low, 1, 256)[None]
    colors = np.asarray(style.draw(flat, ramp, Box(0, 0, 200, 100))).astype(int).reshape(-1, 3)
    legend = style.legend(flat)
    assert legend is not None
    shown = np.asarray(legend.colors)
    assert np.abs(colors[:, None] - shown).max(2).min(1).max() <= 12  # a step of the legend
    for value, color in ((low, shown[0]), (1.0, shown[-1])):
        constant = np.asarray(style.draw(flat, np.full((2, 2), value), Box(0, 0, 200, 100)))
        assert np.abs(constant[50, 100].astype(int) - color).max() <= 2


def lab(colors: object) -> np.ndarray:
    """CIELAB of colours ``(..., 3)`` of sRGB from 0 to 255, under D65, by the formulas of the
    CIE."""
    linear = linear_light(colors)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ratio = linear @ np.array(to_xyz).T / np.array([0.9505, 1.0, 1.089])
    root = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = np.moveaxis(root, -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


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
    matrix = np.array(SEEN_BY[seen_by]).T
    shown = {}
    for value in (-1.0, -0.5, 0.0, 0.5, 1.0):
        for brightness in (0, 128, 255):
            flat = Image.new("RGB", (9, 9), (brightness,) * 3)
            picture = render.overlay(
                flat, np.full((3, 3), value), styles.Signed(colormap, spread=0)
            )
            color = np.asarray(picture)[4, 4]
            shown[value, brightness] = lab(in_srgb(linear_light(color) @ matrix))
    for (value, _), color in shown.items():
        for (other, _), another in shown.items():
            if np.sign(value) != np.sign(other):
                assert np.linalg.norm(color - another) > 10, (value, other)


def test_a_peak_is_as_light_over_black_as_over_grey_and_lighter_than_half_of_it_anywhere() -> None:
    def lightness(value: float, brightness: int) -> float:
        flat = Image.new("RGB", (9, 9), (brightness,) * 3)
        return float(lab(np.asarray(render.overlay(flat, np.full((2, 2), value)))[4, 4])[0])

    black, grey, white = (lightness(1, brightness) for brightness in (0, 128, 255))
    assert abs(grey - black) < 8
    assert abs(white - grey) < 8
    assert black > max(lightness(0.5, brightness) for brightness in (0, 128, 255))


@pytest.mark.parametrize("name", ["heat", "signed"])
def test_weak_values_leave_the_photo_grey(name: str) -> None:
    colors = np.asarray(photo().convert("L")).astype(float)
    for value in (0.0, 0.09 if name == "heat" else 0.02):
        values = np.zeros((120, 180))
        values[:, :90] = value
        values[:, 170:] = 1
        style = styles.get_style(name)
        drawn = np.asarray(style.draw(photo(), values, WHOLE))[:, :80].astype(int)
        assert (np.ptp(drawn, axis=2) == 0).all()
        assert np.corrcoef(drawn[..., 0].ravel(), colors[:, :80].ravel())[0, 1] > 0.999


def test_thresholds_are_the_largest_that_keep_the_share() -> None:
    for seed in range(20):
        values = np.random.default_rng(seed).random((9, 7)) ** 4
        for share, threshold in zip(
            (0.2, 0.5, 1.0), styles.thresholds(values, (0.2, 0.5, 1.0)), strict=True
        ):
            kept = values[values >= threshold].sum()
            assert kept >= share * values.sum() * (1 - 1e-9)
            assert values[values > threshold].sum() < share * values.sum()
    assert styles.thresholds(np.zeros((3, 3)), (0.5, 0.9)) == [np.inf, np.inf]


def test_a_mask_shows_the_photo_where_the_shares_lie_and_nothing_else() -> None:
    values = np.array([[8.0, 4.0], [3.0, 1.0]]) / 8
    masked = np.asarray(
        render.Mask(shares=(0.5, 0.75)).draw(photo(), np.kron(values, np.ones((60, 90))), WHOLE)
    )
    original = np.asarray(photo())
    assert np.array_equal(masked[:60, :90], original[:60, :90])  # half of the evidence
    assert (masked[60:] == render.Mask.cover).all()  # what is beyond three quarters
    between = masked[10, 100].astype(float)
    share = 1 - 1 / 2.5
    assert (
        np.abs(
            between - (original[10, 100] * share + np.array(render.Mask.cover) * (1 - share))
        ).max()
        <= 1
    )


def test_a_contour_runs_around_the_places_of_the_shares() -> None:
    """A round bump: the line of a share is the circle that holds it."""
    y, x = np.mgrid[0:240, 0:240] + 0.5
    values = np.exp(-((x - 120) ** 2 + (y - 120) ** 2) / (2 * 30**2))
    blank = Image.new("RGB", (240, 240), "white")
    for share in (0.5, 0.9):
        style = render.Contour(shares=(share,))
        lines = np.asarray(style.draw(blank, values, Box(0, 0, 240, 240)))
        color = style.legend(blank).colors[0]
        # the line's edges are mixed with its dark border
        near = np.abs(lines.astype(int) - color).max(2) < 80
        rows, columns = np.nonzero(near)
        distance = np.hypot(rows + 0.5 - 120, columns + 0.5 - 120)
        expected = 30 * np.sqrt(-2 * np.log(1 - share))  # of a two-dimensional bell
        assert len(rows) > expected
        assert np.abs(distance - expected).max() < 3, share


def test_lines_around_what_is_against_are_dashed_and_those_around_what_is_for_are_not() -> None:
    """Two equal bumps, so that both lines are the circle that holds a half of each."""
    y, x = np.mgrid[0:240, 0:480] + 0.5
    radius = 30 * np.sqrt(2 * np.log(2))
    values = np.zeros((240, 480))
    for side, middle in ((1, 120), (-1, 360)):
        values += side * np.exp(-((x - middle) ** 2 + (y - 120) ** 2) / (2 * 30**2))
    blank = Image.new("RGB", (480, 240), (128, 128, 128))
    lines = np.asarray(styles.SignedContour().draw(blank, values, Box(0, 0, 480, 240)))
    drawn_over = (lines != 128).any(2)
    angles = np.linspace(0, 2 * np.pi, 720, endpoint=False)
    shares = []
    for middle in (120, 360):
        rows = (120 + radius * np.sin(angles)).astype(int)
        columns = (middle + radius * np.cos(angles)).astype(int)
        shares.append(drawn_over[rows, columns].mean())
    assert shares[0] > 0.98
    assert 0.4 < shares[1] < 0.85


def test_the_evidence_of_padding_is_not_counted() -> None:
    values = np.zeros((8, 8))
    values[:1] = 1
    values[3, 4] = 0.5
    values[4, 4] = 0.4
    square = Image.new("RGB", (80, 40), "white")
    strip = Box(0, -20, 80, 60)
    masked = np.asarray(render.Mask(shares=(0.5,)).draw(square, values, strip))
    assert (masked[15, 45] == 255).all()
    assert (masked[:, :30] == render.Mask.cover).all()
    assert (masked[:5] == render.Mask.cover).all()


def test_a_spotlight_is_the_photo_at_the_top_and_dark_grey_at_zero() -> None:
    lit = render.Spotlight(dark=0.25).draw(photo(), np.array([[1.0]]), WHOLE)
    assert lit.tobytes() == photo().tobytes()
    unlit = np.asarray(render.Spotlight(dark=0.25).draw(photo(), np.zeros((2, 2)), WHOLE)).astype(
        float
    )
    assert np.abs(unlit - np.asarray(photo().convert("L").convert("RGB")) * 0.25).max() <= 0.5


def test_sets_of_regions_are_the_photo_and_the_rest_is_pale() -> None:
    sets = np.zeros((3, 4, 6), bool)  # cells of 30 pixels; of three sets, two were found
    sets[0, 1, 1] = True
    sets[1, 2, 4] = True
    original = np.asarray(photo())
    with_sets = np.asarray(render.overlay(photo(), sets, "evidence"))
    without = np.asarray(render.overlay(photo(), sets, styles.RegionSets(without=True)))
    first = np.s_[36:54, 36:54]
    second = np.s_[66:84, 126:144]
    assert all(np.array_equal(with_sets[place], original[place]) for place in (first, second))
    outside = np.s_[96:, :]
    pale = original[outside] + styles.RegionSets.pale * (
        np.array(styles.Mask.cover) - original[outside]
    )
    assert np.abs(with_sets[outside] - pale).max() <= 1
    assert (without[first] == styles.Mask.cover).all()
    assert np.array_equal(without[second], original[second])
    # lines in the colour of the set
    for color, (y, x) in zip(COLORS, ((30, 45), (60, 135)), strict=False):
        assert np.abs(with_sets[y - 2 : y + 3, x].astype(int) - color).max(1).min() < 40


@pytest.mark.parametrize("shares", [(), (0.9, 0.5), (0.0, 0.5), (0.5, 1.1), (0.5, 0.5)])
@pytest.mark.parametrize("style", [render.Contour, render.Mask])
def test_shares_that_are_none_are_refused(style: type, shares: tuple[float, ...]) -> None:
    with pytest.raises(ExplainError, match=f"shares of {style.name} must rise within 0 to 1"):
        style(shares=shares)
    with pytest.raises(ExplainError, match="dark of spotlight must"):
        render.Spotlight(dark=1.0)
