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
import torchvision
from PIL import Image
from torch import nn

import explain
from explain import ExplainError, render
from explain.attribution.pictures import Look, beyond_noise, layer_of, remark
from explain.attribution.result import Attribution
from explain.methods import IntegratedGradients
from explain.methods.base import title_of
from explain.models import CenterCrop
from explain.render import styles
from explain.targets import Detections, Segmentation, Similarity
from tests.conftest import ROOT, Made, settled
from tests.render.test_styles import lab


def brightness() -> nn.Module:
    """Two class scores from a layer that passes on how bright each place is: the evidence is where
    the light is."""
    light = nn.Conv2d(3, 2, 1, bias=False)
    head = nn.Linear(2, 2)
    nn.init.constant_(light.weight, 1 / 3)
    nn.init.constant_(head.weight, 1.0)
    nn.init.zeros_(head.bias)
    model = Made(lambda net, x: net.fc(net.light(x).mean((2, 3))), light=light, fc=head)
    return model.eval()


PLAIN = CenterCrop(64, 0.8, (0.0,) * 3, (1.0,) * 3)
METHODS = ["gradcam", "inputxgradient"]


@pytest.fixture(scope="module")
def explainer() -> explain.Explainer:
    return explain.Explainer(brightness(), ["light", "dark"], PLAIN)


def spot(
    size: tuple[int, int] = (90, 60), at: tuple[int, int] = (50, 30), radius: int = 9
) -> Image.Image:
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    lit = 1 + 254 * np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / (2 * radius**2))
    return Image.fromarray(lit.astype(np.uint8)).convert("RGB")


@pytest.mark.parametrize(
    ("crop", "size"), [("center", (200, 300)), ("whole", (500, 120)), ("padded", (500, 120))]
)
def test_overlays_of_every_crop_lie_where_they_belong(crop: str, size: tuple[int, int]) -> None:
    """A bright spot is all the evidence there is: on the photo, the map's middle is the spot's."""
    at = (round(size[0] * 0.55), round(size[1] * 0.42))
    model = brightness()
    if crop == "padded":  # for networks of a fixed size
        model.register_parameter("position", nn.Parameter(torch.zeros(1)))
    as_given: Any = "center" if crop == "center" else "whole"
    explainer = explain.Explainer(model, ["light", "dark"], PLAIN, crop=as_given)
    explanation = explainer(spot(size, at), METHODS, 0, layer="light")
    photo = np.asarray(explanation.photo).astype(int)
    for method in METHODS:
        overlay = np.asarray(explanation.overlay(method, style=render.Mask(shares=(0.5,))))
        # the mask shows these pixels as they are, or covers them
        shown = (photo.max(2) > 60) & (np.abs(overlay - photo).max(2) <= 2)
        y, x = np.argwhere(shown).mean(0)
        assert np.hypot(x - at[0], y - at[1]) < 2 * min(size) / 64, method


@pytest.mark.parametrize("style", styles.CHOICES)
def test_explanations_are_drawn_and_saved_in_any_style(
    style: str, explainer: explain.Explainer, tmp_path: Path
) -> None:
    """Maps of pixels are smoothed; outlines follow the cells of a layer, not the enlarged map."""
    explanation = explainer(spot(), METHODS, 0, layer="light")
    layers, pixels = (explanation.attributions[method] for method in METHODS)
    cells = layers.values[0].clamp(min=0).numpy()
    areas = style in ("contour", "mask")
    of_layer = cells / cells.max() if areas else layers.heatmap[0].numpy()
    pixel_style = Look(style).of("signed")
    summed = pixels.values[0].sum(0).numpy()
    of_pixels = summed if pixel_style.reads == "signed" else np.abs(summed)
    smooth = styles.smoothed(of_pixels, pixel_style.spread)
    smooth /= np.abs(smooth).max()
    drawn = {
        "gradcam": (of_layer, styles.get_style(style)),
        "inputxgradient": (smooth, pixel_style),
    }
    for method, (values, chosen) in drawn.items():
        expected = render.overlay(explanation.photo, values, chosen, box=explanation.box)
        assert explanation.overlay(method, style=style).tobytes() == expected.tobytes()
    explanation.save(tmp_path, style=style)
    with Image.open(tmp_path / "image-sheet.png") as saved:
        assert saved.tobytes() == explanation.sheet(style=style).tobytes()


def test_options_of_styles_go_to_the_maps_that_have_them_and_are_refused_where_none_has(
    explainer: explain.Explainer, tmp_path: Path
) -> None:
    assert Look("contour", "viridis").of("heat") == render.Contour(colormap="viridis")
    assert Look("contour", "PuOr").of("signed") == styles.SignedContour(colormap="PuOr")
    both = explainer(spot(), METHODS, 0, layer="light")
    assert both.overlay("gradcam", alpha=0.1).tobytes() != both.overlay("gradcam").tobytes()
    assert both.sheet(alpha=0.1).tobytes() != both.sheet().tobytes()
    alone = explainer(spot(), "inputxgradient", 0)
    for draws in (
        lambda: both.overlay("inputxgradient", alpha=0.1),
        lambda: alone.sheet(alpha=0.1),
        lambda: alone.save(tmp_path, alpha=0.1),
        lambda: alone.save_picture(tmp_path / "alone.png", alpha=0.1),
    ):
        with pytest.raises(ExplainError, match="alpha is for the style heat, got 'signed'"):
            draws()
    with pytest.raises(ExplainError, match="alpha of heat must"):
        Look(alpha=2.0)
    with pytest.raises(ExplainError, match="style '' is unknown"):
        both.overlay("gradcam", style="")
    with pytest.raises(ExplainError, match="caption must be True or False"):
        both.overlay(caption="text")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_signed_maps_of_pixels_are_seen_in_small_pictures() -> None:
    """At 110 pixels, a tenth of the pixels have a visible colour (the photo below is grey)."""
    explanation = explain.Explainer()(ROOT / "assets" / "astronaut.png", "inputxgradient")
    seen = styles.edges(explanation.box, explanation.photo.size)
    overlay = explanation.overlay("inputxgradient").crop(seen)
    small = overlay.resize((110, 110), Image.Resampling.LANCZOS)
    chroma = np.linalg.norm(lab(np.asarray(small))[..., 1:], axis=2)
    assert (chroma > 20).mean() >= 0.1


def test_sheets_have_title_photo_families_layers_and_remarks(explainer: explain.Explainer) -> None:
    methods = ["saliency", "gradcam", "randomcam", "layercam", "inputxgradient"]
    layout = explainer(spot(), methods, 0, layer="light").layout()
    assert layout.title == "light, 50 %"
    assert [group.heading for group in layout.groups] == ["", "class activation maps", "gradients"]
    assert {tile.name: (tile.detail, tile.remark) for tile in layout.tiles} == {
        "photo": ("", ""),
        "Grad-CAM": ("layer light", ""),
        "Random CAM": ("layer light", "null map: random weights"),
        "LayerCAM": ("layer light", ""),
        "Saliency": ("", "nearly even: its values differ by at most 0 %"),
        "Input × Gradient": ("summed over 1.2 % of the side", ""),
    }
    below = [legend.meaning for row in layout.legends() for legend in row.values()]
    assert sorted(below) == ["contribution", "evidence", "evidence", "evidence", "magnitude"]


@pytest.mark.parametrize(("count", "abreast"), [(2, 8), (7, 4), (7, 8)])
def test_methods_and_two_classes_are_one_table_with_its_headings_once(
    count: int, abreast: int, explainer: explain.Explainer
) -> None:
    names = "gradcam saliency layercam hirescam gradcam++ inputxgradient deeplift"
    methods = names.split(" ")[:count]
    explanation = explainer(spot(), methods, targets=[0, 1], layer="light")
    layout = explanation.layout(abreast=abreast)
    rows = layout.places()
    assert max(len(row) for row in rows) <= abreast
    assert sum(len(row) for row in rows) == 1 + count * 2
    over_columns = [tile.name for names in layout.names() for tile in (names or {}).values()]
    over_rows = [next(reversed(row.values()))[0].heading.split(" · ")[0] for row in rows]
    headings = [name for name in over_columns + over_rows if name != "photo"]
    assert sorted(headings) == sorted(["light, 50 %", "dark, 50 %", *map(title_of, methods)])


def test_a_large_photo_is_reduced_and_maps_lie_where_they_did(
    explainer: explain.Explainer, tmp_path: Path
) -> None:
    explanation = explainer(spot((2400, 1200), (1500, 600)), "gradcam", 0, layer="light")
    whole = explanation.overlay(largest_side=None)
    small = explanation.overlay(largest_side=300)
    sizes = [whole.size, explanation.overlay().size, small.size]
    assert sizes == [(2400, 1200), (2000, 1000), (300, 150)]
    reduced = np.asarray(whole.resize(small.size, Image.Resampling.BOX)).astype(int)
    assert np.abs(np.asarray(small) - reduced)[:, 80:220].mean() < 3
    explanation.save(tmp_path, largest_side=500)
    with Image.open(tmp_path / "image-gradcam.png") as saved:
        assert saved.width == 500
    explanation.save(tmp_path, picture_format="svg", overwrite=True)
    figure = (tmp_path / "image-gradcam.svg").read_text("utf-8")
    assert re.search("light, 50 %.*Grad-CAM", figure, re.DOTALL)


def test_concepts_are_saved_with_their_values_and_a_record(
    explainer: explain.Explainer, tmp_path: Path
) -> None:
    result = explainer.concepts(spot(), 2, layer="light")
    _, concepts = result
    paths = result.save(tmp_path)
    assert [path.name for path in paths] == [
        f"image-concepts{end}" for end in (".png", ".npy", "-vectors.npy", ".json")
    ]
    assert np.array_equal(np.load(paths[1]), concepts.maps[0].numpy())
    assert np.array_equal(np.load(paths[2]), concepts.vectors.numpy())
    record = json.loads(paths[3].read_text())
    assert (record["layer"], record["error"]) == ("light", concepts.error)
    assert [part["share"] for part in record["concepts"]] == concepts.shares
    assert [part["label"] for part in record["concepts"]] == result.labels


def test_maps_that_say_nothing_and_fusions_are_named() -> None:
    one = torch.ones(1, 2, 2)
    map_of_t = partial(Attribution, target="t", score=torch.ones(1), size=(4, 4))
    fused = map_of_t("layercam", one, layer=("a", "b"), fuse="product")
    assert layer_of(fused) == "product of a, b"
    assert layer_of(replace(fused, layer=tuple("abcd"), fuse="max")) == "max of 4 layers, a to d"
    assert remark(map_of_t("gradcam", one * 0, layer="a")) == "zero everywhere"


def estimate(error: float, values: torch.Tensor, **fields: Any) -> Attribution:
    """An estimated map with the same error everywhere."""
    options: dict[str, Any] = {
        "target": "t",
        "score": torch.ones(1),
        "layer": None,
        "size": (64, 64),
    }
    return Attribution("rise", values, error=torch.full_like(values, error), **options | fields)


def test_an_estimate_fades_as_it_is_lost_in_noise_and_says_so(
    explainer: explain.Explainer,
) -> None:
    """Half of the magnitudes are 1, the others 3: the errors decide which are beyond two of
    them."""
    values = torch.ones(1, 64, 64)
    values[:, :16] = 3.0
    scene = explainer(spot(), "gradcam", 0, layer="light").scene
    plain = scene.overlay(replace(estimate(0.1, values), error=None), styles.Heat(contrast=0.5))
    drawn = []
    for error, share in ((0.1, 1.0), (1.0, 0.5), (2.0, 0.0)):
        map_of_noise = estimate(error, values)
        assert beyond_noise(map_of_noise) == pytest.approx(share)
        assert ("mostly noise: 100 %" in remark(map_of_noise)) == (share == 0)
        drawn.append(np.asarray(scene.overlay(map_of_noise, styles.Heat(contrast=0.5))))
    assert np.array_equal(drawn[0], np.asarray(plain))
    assert np.array_equal(drawn[0], drawn[1])
    faint = np.asarray(
        scene.overlay(
            replace(estimate(2.0, values), error=None), styles.Heat(contrast=0.5, share=0.25)
        )
    )
    assert np.array_equal(drawn[2], faint)
    assert chroma_of(drawn[2]) < 0.6 * chroma_of(drawn[0])
    # of RISE, what makes no difference is the mean score and not zero
    around = estimate(0.2, values, neutral=torch.ones(1))
    assert beyond_noise(around) == pytest.approx(1.0)
    assert beyond_noise(estimate(0.2, values - 0.9, neutral=torch.tensor([0.1]))) == pytest.approx(
        1.0
    )


def chroma_of(picture: np.ndarray) -> float:
    return float(np.linalg.norm(lab(picture)[..., 1:], axis=2).max())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (torch.arange(9.0).reshape(1, 3, 3), "only 3 × 3 cells"),
        (torch.arange(49.0).reshape(1, 7, 7), ""),
        (
            1 + 0.001 * torch.arange(49.0).reshape(1, 7, 7),
            "nearly even: its values differ by at most 5 %",
        ),
        (
            -1 - 0.001 * torch.arange(49.0).reshape(1, 7, 7),
            "nearly even: its values differ by at most 5 %",
        ),
        (torch.tensor([-1.0, 1.0]).repeat(1, 7, 7), ""),
    ],
)
def test_maps_of_few_cells_and_even_ones_say_so(values: torch.Tensor, said: str) -> None:
    layer_map = Attribution("gradcam", values, "t", torch.ones(1), "a", (96, 96))
    assert remark(layer_map) == said


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """One of everything that a notebook may show."""
    explainer = explain.Explainer(brightness(), ["light <b>", "dark"], PLAIN)
    model = explainer.model
    x = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    explanation = explainer(spot(), METHODS, 0, layer="light")
    return {
        "Explanation": explanation,
        "figure": explanation.figure(),
        "Attribution": explain.attribute(model, x, "gradcam", target=1, layer="light"),
        "PhotoConcepts": explainer.concepts(spot(), 2, layer="light"),
        "Concepts": explain.find_concepts(model, x, 2, layer="light"),
        "Inspection": explainer.inspect(spot()),
        "Explainer": explainer,
        "Layout": explanation.layout(),
        "Scene": explanation.scene,
        "Plan": explain.plan(model, x, METHODS, layer="light"),
        "IntegratedGradients": IntegratedGradients(baseline=torch.zeros(3, 8, 8)),
        "Similarity": Similarity(torch.ones(500)),
        "Segmentation": Segmentation(3, torch.ones(9, 9)),
        "Detections": Detections(box=torch.tensor([[0.0, 0, 2, 2]] * 9)),
    }


@pytest.mark.parametrize("name", ["Explanation", "figure", "Attribution", "PhotoConcepts"])
def test_results_show_themselves_in_a_notebook(name: str, shown: dict[str, Any]) -> None:
    html = shown[name]._repr_html_()
    assert not hasattr(shown[name], "_repr_png_")  # a notebook stores a result once
    picture = r'<img src="data:image/\w+;base64,[\w+/=]+" alt="[^"<>]{20,}" style="[^"<>]*">'
    if name == "Explanation":
        # over the page in a frame that may do nothing but run its own scripts
        frame = r'<iframe [^<>]* sandbox="allow-scripts allow-downloads" [^<>]*></iframe>'
        picture = f"<div [^<>]+><div>{picture}</div>{frame}</div>"
    assert re.fullmatch(picture, html), html[-300:]


def test_a_repr_is_short_and_harmless(shown: dict[str, Any]) -> None:
    for name, thing in shown.items():
        text = repr(thing)
        assert text.count("\n") <= 1, name
        assert len(text) <= 400, (name, text)
        assert "tensor(" not in text, name
    assert repr(shown["Attribution"]) == (
        "Attribution('gradcam', 3 images, values (3, 16, 16), layer 'light', target 1, 1, 1)"
    )


def test_a_result_of_any_size_takes_at_most_300_kilobytes_of_a_notebook() -> None:
    noise = Image.effect_noise((400, 320), 90).convert("RGB")
    preprocess = CenterCrop(224, 1.0, (0.0,) * 3, (1.0,) * 3)
    explanation = explain.Explainer(brightness(), preprocess=preprocess)(
        noise, "inputxgradient", targets=[0, 1]
    )
    page = explanation._repr_html_()
    assert page.startswith("<img")  # the page in its frame would be larger
    assert len(page) < 300_000


def test_what_a_network_crops_away_is_marked_as_not_seen() -> None:
    parts = [nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = settled(nn.Sequential(*parts, nn.Linear(4, 5)))
    net[-1].weight.data.abs_()
    model = Made(lambda model, x: model.net(x[..., 8:32, 16:40]), net=net).eval()
    photo = Image.new("RGB", (48, 40), (90, 120, 60))
    explainer = explain.Explainer(
        model, categories=list("abcde"), preprocess=torchvision.transforms.functional.to_tensor
    )
    pictures = [
        np.asarray(explainer(photo, "layercam", target, placement=placement).overlay())
        for target, placement in (("b", "cells"), ("c", "cells"), ("b", "even"))
    ]
    for part in (slice(0, 7), (slice(None), slice(41, None))):
        first, other, even = (picture[part] for picture in pictures)
        assert np.array_equal(first, other)  # no heat
        assert not np.array_equal(first, even)
        assert (first != np.asarray(photo)[part]).any(2).mean() > 0.9
    assert not np.array_equal(pictures[0][8:32, 16:40], pictures[1][8:32, 16:40])
