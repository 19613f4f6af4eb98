"""Insight that runs the model again: channels, shared concepts, concept vectors, and removed
evidence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from explain import ExplainError, ExplainWarning
from explain.attribution.concepts import factorise
from explain.insight.ablation import corrected, removed
from explain.insight.channels import channels, feature_maps, receptive_field
from explain.insight.concepts import shared_concepts
from explain.insight.directions import concept_direction, normals
from explain.insight.reattribution import RunPhotos
from tests.conftest import Made
from tests.runs.networks import as_it_is, explainer, stored_run

SIDE = 24
COLOURS = ["red", "green", "blue"]


def by_colour() -> nn.Module:
    """Three classes: how much red, green and blue there is in the brightest places, seen through a
    window of three."""
    look = nn.Conv2d(3, 6, 3, padding=1)
    fc = nn.Linear(6, 3, bias=False)
    weight = torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(0)) / 50
    weight[:3] += (torch.eye(3) - torch.eye(3).roll(1, 1))[:, :, None, None] / 9
    look.weight.data = weight
    look.bias.data.fill_(-0.1)
    fc.weight.data = 20 * torch.eye(3, 6)
    return Made(lambda made, x: made.fc(made.look(x).relu().mean((2, 3))), look=look, fc=fc).eval()


def photo_of(colour: int, number: int) -> Image.Image:
    """Noise in grey, with a square of one colour somewhere."""
    generator = np.random.default_rng(1000 * colour + number)
    pixels = np.repeat(generator.integers(0, 120, (SIDE, SIDE, 1)), 3, 2)
    top, left = generator.integers(0, SIDE - 8, 2)
    pixels[top : top + 8, left : left + 8] = 0
    pixels[top : top + 8, left : left + 8, colour] = generator.integers(200, 256)
    return Image.fromarray(pixels.astype(np.uint8))


def photos_of(folder: Path, images: list[Any], labels: list[int], boxes: Any = None) -> RunPhotos:
    """A run of these photos, explained by Grad-CAM."""
    rows = []
    for number, image in enumerate(images):
        path = f"{number:02}.png"
        Image.fromarray(np.asarray(image)).save(folder / path)
        box = boxes and boxes[number]
        rows.append({"path": path, "label": labels[number], "boxes": [box] if box else []})
    (folder / "list.json").write_text(json.dumps(rows))
    network = explainer(by_colour(), categories=COLOURS)
    return RunPhotos(stored_run(folder, folder / "list.json", network), network)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> RunPhotos:
    labels = [number % 3 for number in range(42)]
    images = [photo_of(label, number) for number, label in enumerate(labels)]
    return photos_of(tmp_path_factory.mktemp("colours"), images, labels)


def inputs(photos: RunPhotos) -> torch.Tensor:
    return torch.stack([as_it_is(Image.open(row.path)) for row in photos.run.rows()])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "side"),
    [
        ([nn.Conv2d(3, 3, 3, 2, 1), nn.MaxPool2d(2), nn.Conv2d(3, 3, 3, 1, 2, 2)], 21),
        ([nn.Conv2d(3, 3, 3, padding=1), nn.Flatten(2), nn.Linear(1024, 7)], 32),
    ],
)
def test_a_receptive_field_is_that_of_the_formula(layers: list[nn.Module], side: int) -> None:
    """r + (k - 1) j for each layer, where j is the product of the strides so far."""
    field = receptive_field(nn.Sequential(*layers), torch.rand(1, 3, 32, 32), "2")
    assert (field.width, field.height) == (side, side)


def test_patches_are_the_places_that_excite_a_channel_most(photos: RunPhotos) -> None:
    model = photos.explainer.model
    report = channels(photos, 1, layer="look", count=6, patches=4)
    assert (report.target, report.field, report.photos) == ("green", (3, 3), 42)
    maps = model.look(inputs(photos)).detach()
    gradient = model.fc.weight[1, :, None, None].detach() * (maps > 0) / SIDE**2
    weights = (maps * gradient)[1::3].sum((2, 3)).mean(0)
    assert report.channels[0].number == weights.argmax() == 1
    for channel in report.channels:
        assert channel.weight == pytest.approx(weights[channel.number].item(), abs=1e-6)
        peaks = maps[:, channel.number].flatten(1).amax(1).sort(descending=True).values[:4]
        assert [patch.value for patch in channel.patches] == pytest.approx(peaks.tolist())
        patch = channel.patches[0]
        place = int(maps[int(patch.row.name[:2]), channel.number].argmax())
        row, column = divmod(place, SIDE)
        expected = [max(column - 1, 0), max(row - 1, 0), min(column + 2, SIDE), min(row + 2, SIDE)]
        assert patch.to_dict()["box"] == pytest.approx(expected, abs=0.05)


def test_an_insight_with_the_model_has_what_the_functions_return(photos: RunPhotos) -> None:
    examples = [photo_of(1, number) for number in range(100, 106)]
    options: Any = {"channels": 2, "concepts": 3, "target": "green", "layer": "look"}
    insight = photos.run.insight(explainer=photos.explainer, examples=examples, **options)
    document = insight.to_dict()
    assert document["channels"] == channels(photos, 1, layer="look", count=2).to_dict()
    assert document["direction"] == concept_direction(photos, examples, 1, layer="look").to_dict()
    assert document["concepts"]["layer"] == "look"
    assert "What channels of look see, by weight for green" in insight.lines()
    assert set(insight.pictures()) >= {"looks", "channels", "concepts"}


@pytest.mark.parametrize(("layer", "side", "finer"), [(None, 3, "1"), ("1", 6, None)])
def test_where_maps_are_coarse_an_insight_names_the_last_layer_that_is_not(
    layer: str | None, side: int, finer: str | None, tmp_path: Path
) -> None:
    """Of maps of 12, 6 and 3 places a side."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Conv2d(k, 4, 3, 2, 1), nn.ReLU()) for k in (3, 4, 4)]
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    photos = [photo_of(number % 3, number) for number in range(6)]
    run = stored_run(tmp_path, photos, explainer(model), "gradcam(relu=False)", layer=layer)
    insight = run.insight(explainer=explainer(model), source=photos)
    assert insight.maps.resolution == (side, side)
    if finer is None:
        assert insight.finer_layer is None
    else:
        assert str(insight.finer_layer).startswith(finer)
        assert repr(insight.finer_layer) in insight.headlines[0]


@pytest.mark.long
def test_shared_concepts_are_as_good_as_those_of_all_photos_at_once(photos: RunPhotos) -> None:
    concepts = shared_concepts(photos, 3, layer="look", rounds=4)
    maps = feature_maps(photos.explainer.model, inputs(photos), "look").clamp(min=0)
    rows = maps.movedim(1, -1).reshape(-1, 6).double()
    weights, vectors = factorise(rows, 3)
    at_once = float((rows - weights @ vectors).norm() / rows.norm())
    assert concepts.error <= at_once * 1.1
    assert sum(concepts.shares) == pytest.approx(1)
    labels = [{example.row.label for example in examples} for examples in concepts.examples]
    assert sorted(map(sorted, labels)) == [["blue"], ["green"], ["red"]]


def test_a_concept_of_the_class_is_significant_and_one_of_nothing_is_not(photos: RunPhotos) -> None:
    """The chance is the share of concepts of random photos that gain as much."""
    green = [photo_of(1, number) for number in range(100, 108)]
    direction = concept_direction(photos, green, 1, layer="look")
    assert direction.significant
    assert (direction.score, direction.told_apart, direction.photos) == (1.0, 1.0, 14)
    as_large = sum(abs(gain) >= direction.gain for gain in direction.random_gains)
    assert direction.chance == (1 + as_large) / 201
    assert concept_direction(photos, green, "red", layer="look", fakes=20).gain < 0
    mixed = [photo_of(2 * (number % 2), 100 + number) for number in range(8)]
    assert not concept_direction(photos, mixed, 1, layer="look", fakes=40).significant


def test_the_gain_is_the_mean_derivative_along_the_vector(
    photos: RunPhotos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one vector for all, both figures follow from gradients."""
    vector = torch.tensor([1.0, -2.0, 0.5, 0.0, 0.0, 3.0])
    of_concepts = "explain.insight.directions.normals"
    monkeypatch.setattr(of_concepts, lambda examples, _: vector.expand(len(examples), -1))
    examples = [photo_of(0, number) for number in range(100, 105)]
    direction = concept_direction(photos, examples, 1, layer="look", draws=1, fakes=20)
    model = photos.explainer.model
    maps = model.look(inputs(photos)).detach().requires_grad_()
    (gradients,) = torch.autograd.grad(model.fc(maps.relu().mean((2, 3)))[:, 1].sum(), maps)
    of_examples = model.look(torch.stack([as_it_is(image) for image in examples]))
    of_class = torch.arange(42) % 3 == 1
    means = torch.cat([of_examples, maps[~of_class]]).detach().mean((2, 3))
    slopes = gradients.sum((2, 3))[of_class] * means.std(0) @ (vector / vector.norm())
    assert direction.gain == pytest.approx(float(slopes.mean()), rel=1e-4)
    assert direction.score == float((slopes > 0).double().mean())
    assert direction.chance == 1  # every vector is the same


@pytest.mark.parametrize("channels", [3, 40])
@pytest.mark.parametrize("shift", [0.2, 1.0, 30.0])  # mixed, apart, and far apart
def test_a_concept_vector_has_the_smallest_loss(shift: float, channels: int) -> None:
    """The gradient of the loss, by autograd, is zero at the normal and at the best offset."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.tensor([1.0] * 12 + [-1.0] * 9, dtype=torch.float64)
    points = torch.randn(21, channels, generator=generator, dtype=torch.float64)
    points += shift * signs[:, None]
    (weights,) = normals(points[None, :12], points[None, 12:]).clone().requires_grad_()
    margins = points @ weights
    low = -1e3
    high = 1e3
    for _ in range(200):  # where the pulls of both sides are equal
        middle = (low + high) / 2
        pull = signs @ torch.sigmoid(-signs * (margins.detach() + middle))
        if pull > 0:
            low = middle
        else:
            high = middle
    loss = torch.log1p(torch.exp(-signs * (margins + low))).mean() + 0.01 * weights.square().sum()
    (gradient,) = torch.autograd.grad(loss, weights)
    assert gradient.abs().max() < 1e-7


def with_control(mask: torch.Tensor) -> list[torch.Tensor]:
    """Nothing, a mask, and the same elsewhere."""
    return [mask * 0, mask, mask.roll((SIDE // 2, SIDE // 2), (2, 3))]


def test_the_accuracy_falls_where_the_evidence_is_removed(photos: RunPhotos) -> None:
    rows = [row for row in photos.run.rows() if row.label == "green"]
    keys = [(row.name, row.target) for row in rows]
    result = removed(photos, "gradcam", keys, share=0.2, baseline="zero")
    heatmaps = torch.stack([row.heatmap.flatten() for row in rows])
    order = heatmaps.argsort(dim=1, descending=True, stable=True)[:, : round(0.2 * SIDE * SIDE)]
    mask = torch.zeros(14, SIDE * SIDE).scatter(1, order, 1).reshape(14, 1, SIDE, SIDE)
    shares = []
    for covered in with_control(mask):
        answers = photos.explainer.model(inputs(photos)[1::3] * (1 - covered)).argmax(1)
        shares.append((answers == 1).double().mean().item())
    assert [result.intact, result.after, result.control] == pytest.approx(shares)
    assert 1 == result.intact >= result.control > result.after


@pytest.mark.parametrize("what", ["object", "background"])
def test_the_object_or_all_else_is_covered(what: str, tmp_path: Path) -> None:
    """Photos of which the left half decides; boxes are on the left, on the right, full or
    missing."""
    images = np.full((4, SIDE, SIDE, 3), 40, np.uint8)
    for number in range(4):
        images[number, 6:18, 2:10, number % 2] = 250
    boxes = [[2, 6, 10, 18], [14, 6, 22, 18], [0, 0, SIDE, SIDE], None]
    boxed = photos_of(tmp_path, list(images), [0, 1] * 2, boxes)
    keys = [(row.name, row.target) for row in boxed.run.rows("gradcam")]
    result = removed(boxed, "gradcam", keys, what, baseline="zero")
    assert [name for name, _ in result.keys] == ["00.png", "01.png"]
    mask = torch.zeros(2, 1, SIDE, SIDE)
    mask[0, :, 6:18, 2:10] = 1
    mask[1, :, 6:18, 14:22] = 1
    for number, covered in enumerate(with_control(mask)):
        visible = covered if what == "background" and number else 1 - covered
        answers = boxed.explainer.model(inputs(boxed)[:2] * visible).argmax(1)
        assert torch.equal(result.answers[:, number], answers)
    assert str(result.of(result.keys[:1])).startswith("1 photos: 100 % as they are, ")


def test_a_mistake_is_corrected_where_what_spoke_for_the_wrong_class_is_covered(
    tmp_path: Path,
) -> None:
    """Photos with a large red square and a small green one."""
    images = np.full((6, SIDE, SIDE, 3), 40, np.uint8)
    images[:, 2:10, 2:12, 0] = 250
    images[:, 14:20, 14:20, 1] = 250
    images[range(6), 23, range(6)] = 0
    photos = photos_of(tmp_path, list(images), [1] * 6)
    (pair,) = photos.run.insight().pairs
    assert (pair.label, pair.prediction, pair.count) == ("green", "red", 6)
    result = corrected(photos, pair, "gradcam", share=0.2, baseline="zero")
    assert (result.photos, result.intact, result.after, result.control) == (6, 1, 0, 1)
    assert result.chance == 1 / 2**6
    assert str(result).endswith("; 100 % become right, 0 % elsewhere")


def test_a_photo_that_is_gone_is_named_and_the_others_go_on(
    photos: RunPhotos, tmp_path: Path
) -> None:
    first, *rest = [*photos.run.rows("gradcam")][:3]
    again = RunPhotos(photos.run, photos.explainer)
    with pytest.warns(ExplainWarning, match=r"'00\.png' is left out.*gone"):
        (batch,) = again.batches([replace(first, path=str(tmp_path / "gone.png")), *rest])
    assert [row.name for row in batch.rows] == ["01.png", "02.png"]
    assert list(again.missing) == ["00.png"]


def test_what_does_not_fit_is_refused(photos: RunPhotos) -> None:
    examples = [photo_of(0, number) for number in range(20)]
    calls: dict[str, Callable[[], Any]] = {
        "target must": lambda: channels(photos, 7),
        "examples must": lambda: concept_direction(photos, examples[:4], 0),
        "run must": lambda: concept_direction(photos, examples, 0),
        "wanted must": lambda: removed(photos, "gradcam", [("no such photo", "green")]),
        "concepts must": lambda: photos.run.insight(concepts=2),
    }
    for message, call in calls.items():
        with pytest.raises(ExplainError, match=message):
            call()
