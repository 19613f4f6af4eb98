"""Photos that a preprocessing makes tiles, patches or frames of: their maps lie where the tiles lie
in the photo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.testing import assert_close

import explain
from explain import ImageError
from explain.attribution.pictures import Scene
from explain.attribution.result import Attribution
from explain.data.boxes import Box
from explain.explanation.tiles import tiles_on_photo
from explain.render.styles import get_style
from tests.conftest import Made, settled
from tests.runs.networks import as_it_is, picture, stored_run

SIDE = 24


def pixels(image: Image.Image) -> torch.Tensor:
    return as_it_is(image.convert("RGB"))


def cut(x: torch.Tensor) -> torch.Tensor:
    """The patches ``(6, 3, SIDE, SIDE)`` of 2 rows and 3 columns."""
    rows = x.unfold(1, SIDE, SIDE).unfold(2, SIDE, SIDE)
    return rows.movedim(0, 2).flatten(0, 1)


PHOTO = picture(0, (3 * SIDE, 2 * SIDE))


def input_times_gradient(score: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Of the pixels of the photo, by autograd."""
    x = pixels(PHOTO).requires_grad_()
    (gradient,) = torch.autograd.grad(score(x), x)
    return gradient * x.detach()


def bag() -> nn.Module:
    """Attention over the patches of a bag."""
    parts = {"conv": nn.Conv2d(3, 8, 3, 2), "weight": nn.Linear(8, 1), "head": nn.Linear(8, 3)}

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        maps = net.conv(x.flatten(0, 1))
        features = maps.relu().mean((2, 3)).unflatten(0, x.shape[:2])
        return net.head((net.weight(features).softmax(1) * features).sum(1))

    return settled(Made(forward, **parts)).eval()


def test_values_of_patches_are_those_of_the_photo(tmp_path: Path) -> None:
    model = bag()
    explainer = explain.Explainer(
        model, preprocess=lambda image: cut(pixels(image)), layout="NTCHW"
    )
    explanation = explainer(PHOTO, ["inputxgradient", "gradcam(relu=False)"], target=1)
    expected = input_times_gradient(lambda x: model(cut(x)[None])[0, 1])
    assert_close(explanation["inputxgradient"].values[0], expected)
    maps = model.conv(cut(pixels(PHOTO)))
    behind = Made(lambda net, maps: model.function(net, maps[None]), **dict(model.named_children()))
    behind.conv = nn.Identity()
    (gradients,) = torch.autograd.grad(behind(maps)[0, 1], maps)
    cams = (gradients.mean((2, 3), keepdim=True) * maps).sum(1, keepdim=True).detach()
    large = nn.functional.interpolate(cams, (SIDE, SIDE), mode="bilinear")[:, 0]
    on_photo = large.unflatten(0, (2, 3)).transpose(1, 2).reshape(2 * SIDE, 3 * SIDE)
    assert_close(explanation["gradcam"].values[0], on_photo)
    assert explanation.overlay("gradcam").size == PHOTO.size
    assert len(explanation.crops) == 6
    explanation.save(tmp_path)
    saved = explain.load(tmp_path / "image-gradcam.json")
    assert_close(saved.values, on_photo)
    for one in explainer([PHOTO, PHOTO], "inputxgradient", target=1):
        assert torch.equal(one.values, explanation["inputxgradient"].values[0])


def test_a_photo_is_a_film_that_stands_still_where_a_model_takes_frames() -> None:
    model = bag()
    one = explain.Explainer(model, preprocess=pixels, layout="NTCHW")
    assert one.as_input(PHOTO).shape == (1, 1, 3, 2 * SIDE, 3 * SIDE)
    model.config = type("Config", (), {"model_type": "tiny", "num_frames": 4})()
    four = explain.Explainer(model, preprocess=pixels, layout="NTCHW")
    assert four.as_input(PHOTO).shape == (1, 4, 3, 2 * SIDE, 3 * SIDE)
    expected = input_times_gradient(lambda x: model(x.expand(1, 4, -1, -1, -1))[0, 1])
    assert_close(four(PHOTO, "inputxgradient", target=1).values, expected)


def test_tiles_of_other_sizes_add_up_and_those_beyond_the_photo_are_cut() -> None:
    values = torch.ones(1, 2, 3, 4, 4)  # tiles before channels
    values[0, 1] = 2.0
    tiles = Attribution("m", values, "score", torch.ones(1), None, (2, 4, 4), frames_first=True)
    # the whole photo, and a finer one whose upper half is padding
    boxes = [Box(0, 0, 8, 8), Box(4, -2, 8, 2)]
    expected = torch.full((1, 3, 8, 8), 1 / 4)  # a value of the whole is shared by four places
    expected[:, :, :2, 4:] += 2
    assert_close(tiles_on_photo(tiles, boxes, (8, 8)).values, expected)
    layers = Attribution("m", values[:, :, 0], "score", torch.ones(1), "a", (2, 4, 4))
    means = torch.ones(1, 8, 8)
    means[:, :2, 4:] = 1.5
    assert_close(tiles_on_photo(layers, boxes, (8, 8)).values, means)


def test_runs_and_concepts_of_tiles_are_refused(tmp_path: Path) -> None:
    explainer = explain.Explainer(
        bag(), preprocess=lambda image: cut(pixels(image)), layout="NTCHW"
    )
    with pytest.raises(explain.ExplainError, match="run"):
        stored_run(tmp_path, [PHOTO], explainer)
    with pytest.raises(explain.ExplainError, match="concepts"):
        explainer.concepts(PHOTO)


@pytest.mark.parametrize("style", ["signed", "heat"])
def test_maps_of_slices_do_not_reach_into_other_slices(style: str) -> None:
    """Two slices side by side: all that one says is at its edge to the other."""
    scan = Image.new("RGB", (402, 200), (90, 90, 90))
    cells = {"slice 1": (0.0, 0.0, 200.0, 200.0), "slice 2": (202.0, 0.0, 402.0, 200.0)}
    scene = Scene(scan, Box.whole(scan.size), (Box.whole(scan.size),), slices=cells)
    values = torch.zeros(1, 1, 200, 402)
    values[..., 202:206] = 1.0
    one = Attribution("inputxgradient", values, "t", torch.ones(1), None, (200, 402))
    drawn = np.asarray(scene.overlay(one, get_style(style)))
    below = np.s_[60:]  # of the numbers
    assert (drawn[below, :200] == 90).all()
    assert (drawn[below, 203:206] != 90).any(2).all()


def test_slices_of_a_volume_are_explained_as_a_stack(tmp_path: Path) -> None:
    volume = np.random.default_rng(0).integers(-1000, 3000, (5, SIDE, SIDE)).astype(np.int16)
    np.save(tmp_path / "scan.npy", volume)
    parts = {"conv": nn.Conv3d(1, 4, 3, padding=1), "head": nn.Linear(4, 3)}
    model = Made(lambda net, x: net.head(net.conv(x).relu().mean((2, 3, 4))), **parts)
    model = settled(model).eval()
    explainer = explain.Explainer(model, size=SIDE, crop=1, mean=0.5, std=0.25, window=(1000, 4000))
    place = f"{tmp_path}/scan.npy slices 2:4"
    explanation = explainer(place, "inputxgradient", target=1)
    greys = np.round((volume[1:4] + 1000.0) / 4000 * 255).clip(0, 255) / 255
    x = torch.from_numpy((greys - 0.5) / 0.25)[None, None].requires_grad_()
    (gradient,) = torch.autograd.grad(copy.deepcopy(model).double()(x)[0, 1], x)
    expected = (gradient * x).detach()[0, 0]
    values = explanation.values[0].double()
    for box, of_slice in zip(explanation.crops, expected, strict=True):
        part = values[round(box.top) :, round(box.left) :][:SIDE, :SIDE]
        assert_close(part, of_slice, rtol=1e-4, atol=1e-7)
    assert_close(values.sum(), expected.sum(), rtol=1e-4, atol=1e-7)
    scan, of_method = explanation.layout().groups
    assert [tile.name for tile in (*scan.tiles, *of_method.tiles)] == 2 * [
        "slice 2",
        "slice 3",
        "slice 4",
    ]
    for tile, greys_of_slice in zip(scan.tiles, greys, strict=True):
        shown = np.asarray(tile.picture)[..., 0]
        assert np.array_equal(shown, np.round(greys_of_slice * 255).astype(np.uint8))
    overlay = np.asarray(explanation.overlay())
    for tile, cell in zip(of_method.tiles, explanation.photo.cells.values(), strict=True):
        left, top, right, bottom = cell
        lower = SIDE // 2  # below the number
        drawn = overlay[top + lower : bottom, left:right]
        assert np.array_equal(np.asarray(tile.picture)[lower:], drawn)
    assert explanation.figure(width_cm=8).get_figwidth() * 2.54 == pytest.approx(8)
    saved = explain.load(explanation.save(tmp_path / "out")[2])
    assert_close(saved.repeat(explainer).values, saved.values)
    many = explainer(np.repeat(volume, 4, axis=0), "inputxgradient", target=1).layout()
    assert len(many.groups[0].tiles) == 12
    assert many.groups[0].tiles[-1].name == "slice 20"
    with pytest.raises(ImageError, match="one slice"):
        explain.Explainer("tiny")(place)


def network_of_volumes() -> nn.Module:
    parts = {"conv": nn.Conv3d(1, 4, 3, padding=1), "head": nn.Linear(4, 3)}
    model = Made(lambda net, x: 5 * net.head(net.conv(x).relu().mean((2, 3, 4))), **parts)
    return settled(model).double().eval()


def test_the_check_of_a_volume_covers_the_marked_fifth_of_its_voxels() -> None:
    model = network_of_volumes()
    volume = np.random.default_rng(0).integers(-1000, 3000, (5, SIDE, SIDE)).astype(np.int16)
    explainer = explain.Explainer(model, size=SIDE, crop=1, mean=0.5, std=0.25, window=(1000, 4000))
    explanation = explainer(volume, ["saliency", "gradcam"], target=1)
    check = explanation.check(seed=3)
    x = explainer.as_input(volume)
    values = explain.attribute(model, x, "saliency", target=1).values.abs().amax(1).flatten()
    keep = torch.ones(x.numel(), dtype=torch.float64)
    keep[values.topk(round(x.numel() / 5)).indices] = 0
    keep = keep.reshape(1, 1, *x.shape[2:])
    strong_blur = explain.baselines.Blur(2 * (SIDE // 8) + 1, SIDE / 12)
    with torch.no_grad():
        marked = [
            model(baseline(x, keep)).softmax(1)[0, 1]
            for baseline in (explain.baselines.Mean(), strong_blur)
        ]
    assert check["saliency"].covering.value == pytest.approx(float(sum(marked)) / 2, rel=1e-9)
    assert all(result.mark in "✓✗?" and result.value == result.value for result in check["gradcam"])
    assert explanation.record("gradcam")["check"]
    with pytest.raises(explain.ExplainError, match="copy"):
        copy.deepcopy(explanation).check()
    (entry,) = (explain.report.item.curves(explanation, 0, explanation.results[0], 4),)
    table = explain.evaluate(model, x, "saliency", "deletion(steps=4)", target=1)
    area = float(table["saliency"]["deletion"])
    assert entry["saliency"]["areas"]["deletion"] == pytest.approx(area, abs=1e-4)


def test_the_check_of_tiles_is_of_all_tiles_as_the_model_gets_them() -> None:
    model = bag()
    explainer = explain.Explainer(
        model, preprocess=lambda image: cut(pixels(image)), layout="NTCHW"
    )
    explanation = explainer(PHOTO, "inputxgradient", target=1)
    found = explanation.check()["inputxgradient"].covering
    inputs = explain.Inputs((explainer.as_input(PHOTO),), layout="NTCHW")
    table = explain.evaluate(model, inputs, "inputxgradient", "covering", target=1)
    parts = table.parts("inputxgradient", "covering")
    assert found.value == pytest.approx(float(parts["marked"][0]), rel=1e-5)
    assert found.reference == pytest.approx(float(parts["others"].mean()), rel=1e-5)
