"""What results look like: overlays where they belong, sheets, captions, notebooks, and short
texts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import explain
from explain import ExplainError, OutputError, render
from explain.attribution.pictures import Look, layer_of, map_for, remark
from explain.attribution.result import Attribution
from explain.methods import IntegratedGradients
from explain.methods.base import title_of
from explain.models import CenterCrop
from explain.render import styles
from explain.targets import Detections, Segmentation, Similarity
from explain.training import GradientFlow
from tests.conftest import ROOT
from tests.render.test_styles import lab


class Brightness(nn.Module):
    """Two class scores from a layer that passes on how bright each place is: the evidence is where
    the light is."""

    def __init__(self) -> None:
        super().__init__()
        self.light = nn.Conv2d(3, 2, 1, bias=False)
        nn.init.constant_(self.light.weight, 1 / 3)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2, 2)
        nn.init.constant_(self.fc.weight, 1.0)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.light(x)).flatten(1))


PLAIN = CenterCrop(64, 0.8, (0.0,) * 3, (1.0,) * 3)
METHODS = ["gradcam", "inputxgradient"]


@pytest.fixture(scope="module")
def explainer() -> explain.Explainer:
    return explain.Explainer(Brightness().eval(), ["light", "dark"], PLAIN)


def spot(size: tuple[int, int], at: tuple[int, int], radius: int = 9) -> Image.Image:
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    lit = (1 + 254 * np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / (2 * radius**2))).astype(
        np.uint8
    )
    return Image.fromarray(np.repeat(lit[..., None], 3, axis=2))


@pytest.mark.parametrize("size", [(200, 300), (500, 120)])
@pytest.mark.parametrize("crop", ["center", "whole", "padded"])
def test_overlays_of_every_crop_lie_where_they_belong(crop: Any, size: tuple[int, int]) -> None:
    """A bright spot is all the evidence there is: on the photo, the map's middle is the spot's."""
    at = (round(size[0] * 0.55), round(size[1] * 0.42))
    model = Brightness().eval()
    if crop == "padded":  # for networks of a fixed size
        model.register_parameter("position", nn.Parameter(torch.zeros(1)))
        crop = "whole"
    explainer = explain.Explainer(model, ["light", "dark"], PLAIN, crop=crop)
    explanation = explainer(spot(size, at), METHODS, 0, layer="light")
    for method in METHODS:
        style = render.Mask(shares=(0.5,))
        overlay = np.asarray(explanation.overlay(method, style=style)).astype(int)
        # the mask shows these pixels as they are, or covers them
        lit = np.asarray(explanation.photo).max(2) > 60
        shown = lit & (np.abs(overlay - np.asarray(explanation.photo)).max(2) <= 2)
        assert shown.any()
        rows, columns = np.nonzero(shown)
        pixel = min(size) / 64
        assert abs(columns.mean() - at[0]) < 2 * pixel, (method, columns.mean(), at)
        assert abs(rows.mean() - at[1]) < 2 * pixel, (method, rows.mean(), at)


@pytest.mark.parametrize("style", styles.CHOICES)
def test_explanations_are_drawn_and_saved_in_any_style(
    style: str, explainer: explain.Explainer, tmp_path: Path
) -> None:
    explanation = explainer(spot((90, 60), (50, 30)), METHODS, 0, layer="light")
    for method in METHODS:
        chosen = Look(style).of(explanation[method].style)
        values = map_for(explanation.attributions[method], chosen)
        expected = render.overlay(explanation.photo, values, chosen, box=explanation.box)
        assert explanation.overlay(method, style=style).tobytes() == expected.tobytes()
    explanation.save(tmp_path, style=style)
    with Image.open(tmp_path / "image-gradcam.png") as saved:
        assert (
            saved.tobytes() == explanation.overlay("gradcam", style=style, caption=True).tobytes()
        )
    with Image.open(tmp_path / "image-sheet.png") as saved:
        assert saved.tobytes() == explanation.sheet(style=style).tobytes()


def test_options_of_styles_go_to_those_that_have_them() -> None:
    assert Look(alpha=0.3).of("heat") == render.Heat(alpha=0.3)
    assert Look(alpha=0.3).of("color") == styles.Color()
    assert Look(colormap="gray").of("intensity") == styles.Intensity(colormap="gray")
    assert Look("contour", "viridis").of("heat") == render.Contour(colormap="viridis")
    assert Look("contour", "PuOr").of("signed") == styles.SignedContour(colormap="PuOr")
    with pytest.raises(ExplainError, match="alpha is for"):
        Look("contour", alpha=0.3)
    with pytest.raises(ExplainError, match="alpha of heat must"):
        Look(alpha=2.0)


def test_arguments_of_pictures_that_would_do_nothing_are_refused(
    explainer: explain.Explainer, tmp_path: Path
) -> None:
    both = explainer(spot((90, 60), (50, 30)), METHODS, 0, layer="light")
    # each map takes what it has, as long as one of them takes it
    faint = both.overlay("gradcam", alpha=0.1)
    assert faint.tobytes() != both.overlay("gradcam").tobytes()
    assert both.sheet(alpha=0.1).tobytes() != both.sheet().tobytes()
    both.save(tmp_path / "both", alpha=0.1)
    alone = explainer(spot((90, 60), (50, 30)), "inputxgradient", 0)
    for draws in (
        lambda: both.overlay("inputxgradient", alpha=0.1),
        lambda: alone.sheet(alpha=0.1),
        lambda: alone.save(tmp_path / "alone", alpha=0.1),
        lambda: alone.save_picture(tmp_path / "alone.png", alpha=0.1),
    ):
        with pytest.raises(ExplainError, match="alpha is for the style heat, got 'signed'"):
            draws()
    for text in ("text", "", 1, None):
        with pytest.raises(explain.ExplainError, match="caption must be True or False"):
            both.overlay(caption=text)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both"]


def test_only_maps_of_single_pixels_are_smoothed_and_only_for_styles_that_draw_areas(
    explainer: explain.Explainer,
) -> None:
    attributions = explainer(spot((90, 60), (50, 30)), METHODS, 0, layer="light").attributions
    layers, pixels = (attributions[method] for method in METHODS)
    heatmap = pixels.heatmap[0].numpy()
    cells = layers.values[0].clamp(min=0).numpy()
    for name in styles.CHOICES:
        style = styles.get_style(name)
        outlined = name in ("contour", "mask")
        assert np.array_equal(
            map_for(layers, style), cells / cells.max() if outlined else layers.heatmap[0].numpy()
        )
        assert np.array_equal(map_for(pixels, style), styles.smoothed(heatmap, style.spread))
    assert np.array_equal(map_for(pixels, styles.Intensity()), heatmap)
    assert np.array_equal(map_for(pixels, styles.Signed()), pixels.signed[0].numpy())


def test_signed_maps_of_pixels_are_seen_in_small_pictures() -> None:
    """At 110 pixels, a tenth of the pixels have a visible colour (the photo below is grey)."""
    methods = ["integratedgradients(steps=10)", "inputxgradient"]
    explanation = explain.Explainer()(ROOT / "assets" / "astronaut.png", methods)
    seen = styles.edges(explanation.box, explanation.photo.size)
    for method in explanation:
        small = explanation.overlay(method).crop(seen).resize((110, 110), Image.Resampling.LANCZOS)
        chroma = np.linalg.norm(lab(np.asarray(small))[..., 1:], axis=2)
        assert (chroma > 20).mean() >= 0.1, method


def test_sheets_have_title_photo_families_layers_and_remarks(explainer: explain.Explainer) -> None:
    methods = ["saliency", "gradcam", "randomcam", "layercam", "inputxgradient"]
    photo = spot((90, 60), (50, 30))
    layout = explainer(photo, methods, 0, layer="light").layout()
    assert layout.title == "light, 50 %"
    assert layout.detail.startswith("Brightness: light 50 %, dark 50 %")
    assert [group.heading for group in layout.groups] == ["", "class activation maps", "gradients"]
    assert {tile.name: (tile.detail, tile.remark) for tile in layout.tiles} == {
        "photo": ("", ""),
        "Grad-CAM": ("layer light", ""),
        "Random CAM": ("layer light", "null map: random weights"),
        "LayerCAM": ("layer light", ""),
        "Saliency": ("", ""),
        "Input × Gradient": ("summed over 1.2 % of the side", ""),
    }
    below = [legend.meaning for row in layout.legends() for legend in row.values()]
    assert sorted(below) == ["contribution", "evidence", "evidence", "evidence", "magnitude"]
    both = explainer(photo, ["gradcam", "saliency"], targets=[0, 1], layer="light").layout()
    titles = ["light, 50 %", "dark, 50 %"]
    assert [group.heading for group in both.groups] == ["", *titles]
    rows = both.places()
    assert rows[0].pop(0)[1].name == "photo"
    for title, row in zip(titles, rows, strict=True):  # below each other, beside one photo
        names = {column: (group.heading, tile.name) for column, (group, tile) in row.items()}
        assert names == {1: (title, "Grad-CAM"), 2: (title, "Saliency")}


@pytest.mark.parametrize("abreast", [4, 6, 8])
def test_seven_methods_and_two_classes_are_one_table_with_its_headings_once(
    explainer: explain.Explainer, abreast: int
) -> None:
    names = "gradcam layercam hirescam gradcam++ saliency inputxgradient deeplift"
    methods = names.split(" ")
    explanation = explainer(spot((90, 60), (50, 30)), methods, targets=[0, 1], layer="light")
    layout = explanation.layout(abreast=abreast)
    rows = layout.places()
    assert max(len(row) for row in rows) <= abreast
    assert sum(len(row) for row in rows) == 1 + 7 * 2
    over_columns = [tile.name for names in layout.names() for tile in (names or {}).values()]
    over_rows = [next(reversed(row.values()))[0].heading.split(" · ")[0] for row in rows]
    headings = [name for name in over_columns + over_rows if name != "photo"]
    assert sorted(headings) == sorted(["light, 50 %", "dark, 50 %", *map(title_of, methods)])


def test_a_large_photo_is_reduced_and_maps_lie_where_they_did(
    explainer: explain.Explainer, tmp_path: Path
) -> None:
    explanation = explainer(spot((2400, 1200), (1500, 600)), "gradcam", 0, layer="light")
    whole = explanation.overlay(largest_side=None)
    assert whole.size == (2400, 1200)
    assert explanation.overlay().size == (2000, 1000)
    assert explanation.sheet().width < 2000
    small = explanation.overlay(largest_side=300)
    assert small.size == (300, 150)
    reduced = np.asarray(whole.resize(small.size, Image.Resampling.BOX)).astype(int)
    assert np.abs(np.asarray(small) - reduced)[:, 80:220].mean() < 3
    explanation.save(tmp_path, largest_side=500)
    with Image.open(tmp_path / "image-gradcam.png") as saved:
        assert saved.width == 500
    with pytest.raises(ExplainError, match="largest_side must be a whole number"):
        explanation.overlay(largest_side=0)


@pytest.mark.parametrize("ending", ["pdf", "svg"])
def test_pictures_are_saved_as_figures(
    explainer: explain.Explainer, tmp_path: Path, ending: str
) -> None:
    explanation = explainer(spot((90, 60), (50, 30)), METHODS, 0, layer="light")
    paths = explanation.save(tmp_path, picture_format=ending)
    names = [path.name for path in paths if path.suffix == f".{ending}"]
    assert names == [f"image-{name}.{ending}" for name in (*METHODS, "sheet")]
    content = (tmp_path / f"image-gradcam.{ending}").read_bytes()
    assert content.startswith(b"%PDF" if ending == "pdf" else b"<?xml")
    if ending == "svg":
        assert b"light, 50 %" in content
        assert b"Grad-CAM" in content


def test_maps_that_say_nothing_and_fusions_are_named() -> None:
    one = torch.ones(1, 2, 2)
    map_of_t = partial(Attribution, target="t", score=torch.ones(1), size=(4, 4))
    fused = map_of_t("layercam", one, layer=("a", "b"), fuse="product")
    assert layer_of(fused) == "product of a, b"
    assert layer_of(replace(fused, layer=tuple("abcd"), fuse="max")) == "max of 4 layers, a to d"
    assert remark(fused) == ""
    assert remark(map_of_t("gradcam", one * 0, layer="a")) == "zero everywhere"
    assert remark(map_of_t("smooth(randomcam)", one, layer="a")) == "null map: random weights"


def test_concepts_are_saved_with_their_shares_values_and_a_record(tmp_path: Path) -> None:
    explainer = explain.Explainer("tiny", size=32)
    photo = tmp_path / "cat.png"
    with Image.open(ROOT / "assets" / "chelsea.png") as opened:
        opened.resize((400, 266)).save(photo)
    result = explainer.concepts(photo, 3)
    picture, concepts = result
    assert picture.tobytes() == result.picture.tobytes()
    parts = (concepts.maps.sum((0, 2, 3)) * concepts.vectors.sum(1)).double()
    assert concepts.shares == pytest.approx((parts / parts.sum()).tolist(), rel=1e-5)
    assert sum(concepts.shares) == pytest.approx(1)
    paths = result.save(tmp_path / "out")
    ends = ["concepts.png", "concepts.npy", "concepts-vectors.npy", "concepts.json"]
    assert [path.name for path in paths] == [f"cat-{end}" for end in ends]
    assert np.array_equal(np.load(paths[1]), concepts.maps[0].numpy())
    assert np.array_equal(np.load(paths[2]), concepts.vectors.numpy())
    record = json.loads(paths[3].read_text())
    assert (record["layer"], record["error"]) == ("layer3", concepts.error)
    assert [part["share"] for part in record["concepts"]] == concepts.shares
    assert [part["label"] for part in record["concepts"]] == result.labels
    with pytest.raises(OutputError, match="exists already"):
        result.save(tmp_path / "out")


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """One of everything that a notebook may show."""
    photo = spot((90, 60), (50, 30))
    explainer = explain.Explainer(Brightness().eval(), ["light <b>", "dark"], PLAIN)
    x = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model = Brightness()
    with GradientFlow(model) as flow:
        model(x).sum().backward()
    return {
        "Explanation": explainer(photo, METHODS, 0, layer="light"),
        "figure": explainer(photo, "gradcam", 0, layer="light").figure(),
        "Attribution": explain.attribute(explainer.model, x, "gradcam", target=1, layer="light"),
        "signed Attribution": explain.attribute(explainer.model, x, "inputxgradient", target=1),
        "Concepts": explain.find_concepts(explainer.model, x, 2, layer="light"),
        "PhotoConcepts": explainer.concepts(photo, 2, layer="light"),
        "Inspection": explainer.inspect(photo),
        "GradientFlow": flow,
    }


@pytest.mark.parametrize("name", ["Explanation", "figure", "Attribution", "PhotoConcepts"])
def test_results_show_themselves_in_a_notebook(name: str, shown: dict[str, Any]) -> None:
    html = shown[name]._repr_html_()
    assert len(html) < 300_000
    assert not hasattr(shown[name], "_repr_png_")  # a notebook stores a result once
    # over its picture, the page in a frame that may do nothing but run its own scripts
    if name == "Explanation":
        html, frame = re.fullmatch(
            r"<div [^<>]+><div>(<img [^<>]+>)</div>(<iframe [^<>]+></iframe></div>)", html
        ).groups()
        assert re.search(r' sandbox="allow-scripts allow-downloads" ', frame)
    matched = re.fullmatch(
        r'<img src="data:image/\w+;base64,[\w+/=]+" alt="([^"<>]+)" style="[^"<>]*">', html
    )
    assert matched is not None, html[-300:]
    assert len(matched[1]) > 20


def test_a_repr_is_short_and_harmless(shown: dict[str, Any]) -> None:
    explainer = shown["Explanation"].explainer
    things = {**shown} | {
        "Explainer": explainer,
        "preprocess": explainer.preprocess,
        "Box": shown["Explanation"].box,
    }
    things["Layout"] = shown["Explanation"].layout()
    things["Scene"] = shown["Explanation"].scene
    things["Classifier"] = explainer._classifier
    things["Plan"] = explain.plan(
        explainer.model, torch.rand(1, 3, 8, 8), ["saliency", "inputxgradient"]
    )
    things["IntegratedGradients"] = IntegratedGradients(baseline=torch.zeros(3, 8, 8))
    things["Similarity"] = Similarity(torch.ones(500))
    things["Segmentation"] = Segmentation(3, torch.ones(9, 9))
    things["Detections"] = Detections(box=torch.tensor([[0.0, 0, 2, 2]] * 9))
    for name, thing in things.items():
        text = repr(thing)
        assert text.count("\n") <= 1, name
        assert len(text) <= 400, (name, text)
        assert "tensor(" not in text, name
    assert repr(shown["Attribution"]) == (
        "Attribution('gradcam', 3 images, values (3, 16, 16), layer 'light', target 1, 1, 1)"
    )
    assert repr(shown["GradientFlow"]).startswith("GradientFlow(1 steps; ")


def test_a_result_of_any_size_takes_at_most_300_kilobytes_of_a_notebook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (320, 400, 3), np.uint8))
    explainer = explain.Explainer(
        Brightness().eval(), preprocess=CenterCrop(224, 1.0, (0.0,) * 3, (1.0,) * 3)
    )
    explanation = explainer(noise, "inputxgradient", targets=[0, 1])
    page = explanation._repr_html_()
    figure = explanation.figure()._repr_html_()
    assert all(len(html) < 300_000 for html in (page, figure))
    monkeypatch.setattr("explain.report.pages.LARGEST", 90_000)
    alone = explanation._repr_html_()
    assert alone.startswith("<img")  # the page does not fit
    assert len(alone) < 121_000
