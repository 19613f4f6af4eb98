"""A figure of several photos: what stands where, on which scale, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

import explain
from explain import ExplainError, render
from explain.render import styles
from tests.explanation.test_pictures import METHODS, PLAIN, brightness, spot


def green(photo: Image.Image, share: float = 1.0) -> Image.Image:
    """A photo with colours, so that maps are drawn as on any other, and a share of its light."""
    channels = np.asarray(photo) * share
    channels[..., 0] *= 0.5
    return Image.fromarray(channels.astype(np.uint8))


@pytest.fixture(scope="module")
def both() -> list[Any]:
    explainer = explain.Explainer(brightness(), ["light", "dark"], PLAIN)
    photos = [green(spot()), green(spot(), 0.4)]
    return explainer(photos, METHODS, targets=[0, 1], layer="light")


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.texts]


def images(figure: Any) -> list[np.ndarray]:
    """The pictures of a figure by rows, without the bars of legends."""
    drawn = [np.asarray(axes.images[0].get_array()) for axes in figure.axes]
    return [picture for picture in drawn if picture.shape[0] > 1]


def test_photos_are_rows_and_methods_are_columns(both: list[Any]) -> None:
    figure = explain.figure(both, width_cm=12, letters=True)
    assert figure.get_figwidth() * 2.54 == pytest.approx(12)
    words = texts(figure)
    for once in ("photo", "Grad-CAM", "(a)", "(f)"):
        assert words.count(once) == 1
    assert "(g)" not in words
    assert words.count("light, 50 %") == 2
    one = explain.figure(both, methods=["inputxgradient"], target="dark", width_cm=8)
    assert len(images(one)) == 4
    assert texts(one).count("dark, 50 %") == 2
    assert "Grad-CAM" not in texts(one)


def test_one_scale_for_all_maps_of_a_method(both: list[Any]) -> None:
    """The map of the darker photo is as much smaller as its values are."""
    weaker = float(both[1]["gradcam"].values.max() / both[0]["gradcam"].values.max())
    assert weaker < 0.5
    shared, own = (
        explain.figure(both, methods=["gradcam"], scale=scale, width_cm=8)
        for scale in ("shared", "own")
    )
    dark = both[1]
    for figure, share in ((shared, weaker), (own, 1.0)):
        drawn = images(figure)[3]
        heatmap = dark["gradcam"].heatmap[0].numpy() * share
        expected = render.overlay(dark.photo, heatmap, box=dark.box)
        large = expected.resize(drawn.shape[1::-1], Image.Resampling.LANCZOS)
        assert np.abs(drawn.astype(int) - np.asarray(large)).max() <= 3
    brighter = images(shared)[1]
    assert np.array_equal(brighter, images(own)[1])
    end = f"{float(both[0]['gradcam'].on_input().max()):.2g}"
    assert texts(shared).count(end) == 1
    assert texts(own).count("max") >= 1


def test_a_share_of_a_scale_is_that_of_the_values_before_the_square_root() -> None:
    values = np.random.default_rng(0).normal(size=(120, 100)).astype(np.float32)
    bright = np.quantile(np.abs(values), 0.995)
    for share in (1.0, 0.3):
        scaled = share * (values / bright).clip(-1, 1)
        expected = np.sign(scaled) * np.sqrt(np.abs(scaled)) / 2 + 0.5
        levels = styles.Signed(spread=0, share=share).levels(values)
        np.testing.assert_allclose(levels, expected, atol=1e-6)


def test_a_map_of_zeros_does_not_end_a_shared_scale(both: list[Any]) -> None:
    assert styles.Heat().largest(np.zeros((4, 4))) == 0
    assert styles.Signed().largest(np.zeros((4, 4))) == 0


def test_methods_keep_their_order_and_photos_are_cut_where_it_is_asked_for() -> None:
    explainer = explain.Explainer(brightness(), ["light", "dark"], PLAIN)
    methods = ["saliency", "gradcam", "inputxgradient", "layercam"]
    explanation = explainer(green(spot((200, 80))), methods, 0, layer="light")
    given = ["photo", "Saliency", "Grad-CAM", "Input × Gradient", "LayerCAM"]
    by_family = ["photo", "Grad-CAM", "LayerCAM", "Saliency", "Input × Gradient"]
    for order, expected in (("given", given), ("family", by_family)):
        layout = explanation.layout(order=order)
        assert [tile.name for tile in layout.tiles] == expected
        together = texts(explain.figure([explanation], order=order, width_cm=30))
        assert [word for word in together if word in expected] == expected
    assert explanation.layout().groups[1].heading
    assert not explanation.layout(order="given").groups[1].heading
    seen = styles.edges(explanation.box, explanation.photo.size)
    for tile, whole in zip(
        explanation.layout(crop="seen").tiles, explanation.layout().tiles, strict=True
    ):
        cut = np.asarray(whole.picture.crop(seen))
        inside = np.s_[2:-2, 2:-2]  # of the line around what is seen
        assert np.array_equal(np.asarray(tile.picture)[inside], cut[inside])
    height, width, _ = images(explanation.figure(crop="seen"))[0].shape
    assert height == width


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"explanations": []}, "explanations must"),
        ({"explanations": ["cat.jpg"]}, "explanations must"),
        ({"methods": ["lime"]}, "lime"),
        ({"target": "cat"}, "cat"),
        ({"scale": "shared", "style": "contour"}, "scale must"),
        ({"scale": "one"}, "scale must"),
        ({"order": "name"}, "order must"),
        ({"crop": "square"}, "crop must"),
        ({"width_cm": 1}, "width_cm must"),
    ],
)
def test_what_no_figure_shows_is_refused(
    both: list[Any], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ExplainError, match=said):
        explain.figure(**{"explanations": both, **arguments})


def test_every_panel_of_contours_has_its_own_legend_and_heat_one_for_each_column(
    both: list[Any],
) -> None:
    contours = texts(explain.figure(both, width_cm=17, style="contour"))
    assert contours.count("evidence inside") == 2  # of Grad-CAM, in both rows
    assert contours.count("lines hold 50 %") == 2  # of the signed map
    heat = explain.figure(both, methods=["gradcam"], scale="shared", width_cm=8)
    assert texts(heat).count("evidence") == 1
