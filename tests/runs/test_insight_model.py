"""Insight with one more look at the model: channels, shared concepts, concept vectors, and removed evidence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain.concepts import factorise
from explain.errors import RunError
from explain.runs.insight.again import Photos
from explain.runs.insight.directions import concept_direction, vector
from explain.runs.insight.layer import feature_maps, receptive_field
from explain.runs.insight.patches import channels
from explain.runs.insight.removing import removed
from explain.runs.insight.shared import places, shared_concepts
from explain.runs.insight.statistics import beta_share, welch
from tests.runs.networks import as_it_is

SIDE = 24


class ByColour(nn.Module):
    """Three classes: how much red, green and blue there is in the brightest places, seen through a window of three."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv2d(3, 6, 3, padding=1)
        self.fc = nn.Linear(6, 3)
        with torch.no_grad():
            self.look.weight.copy_(0.02 * torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(0)))
            for k in range(3):
                self.look.weight[k, k] += 1 / 9
                self.look.weight[k, (k + 1) % 3] -= 1 / 9
            self.look.bias.fill_(-0.1)
            self.fc.weight.zero_()
            self.fc.weight[:, :3] = 20 * torch.eye(3)
            self.fc.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc(self.look(x).relu().mean((2, 3)))
        return found


def photo_of(colour: int, number: int) -> Image.Image:
    """Noise in grey, with a square of one colour somewhere."""
    generator = np.random.default_rng(1000 * colour + number)
    pixels = np.repeat(generator.integers(0, 120, (SIDE, SIDE, 1)), 3, 2)
    top, left = generator.integers(0, SIDE - 8, 2)
    pixels[top : top + 8, left : left + 8] = 0
    pixels[top : top + 8, left : left + 8, colour] = generator.integers(200, 256)
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Photos:
    folder = tmp_path_factory.mktemp("colours")
    rows = []
    for number in range(42):
        photo_of(number % 3, number).save(folder / f"{number:02}.png")
        rows.append({"path": f"{number:02}.png", "label": number % 3})
    (folder / "list.json").write_text(json.dumps(rows))
    made = explain.Explainer(ByColour().eval(), preprocess=as_it_is, categories=["red", "green", "blue"])
    run = explain.run(folder / "list.json", made, "gradcam", output=folder / "run.sqlite", workers=0)
    return Photos(run, made)


def inputs(photos: Photos) -> tuple[list[str], torch.Tensor]:
    names = [row.name for row in photos.run.rows("gradcam")]
    return names, torch.stack([as_it_is(Image.open(row.path)) for row in photos.run.rows("gradcam")])


@pytest.mark.parametrize(
    ("layers", "side"),
    [
        ([nn.Conv2d(3, 4, 3, padding=1)], 3),
        ([nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 5, padding=2)], 7),
        ([nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)], 8),
        ([nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=2, dilation=2)], 11),
        ([nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(2), nn.Linear(1024, 7)], 32),
    ],
)
def test_a_receptive_field_is_that_of_the_formula(layers: list[nn.Module], side: int) -> None:
    """r + (k - 1) j for each layer, where j is the product of the strides so far."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    left, top, right, bottom = receptive_field(model, torch.rand(1, 3, 32, 32), str(len(layers) - 1))
    assert (right - left, bottom - top) == (side, side)


def test_patches_are_the_places_that_excite_a_channel_most(photos: Photos) -> None:
    names, x = inputs(photos)
    model = photos.explainer.model
    found = channels(photos, 1, layer="look", count=6, patches=4)
    maps = model.look(x).detach()
    assert (found.layer, found.target, found.field, found.photos) == ("look", "green", (3, 3), 42)
    relu = (maps > 0).float()
    gradient = model.fc.weight[1, :, None, None].detach() * relu / maps[0, 0].numel()
    expected = (maps * gradient)[torch.arange(42) % 3 == 1].sum((2, 3)).mean(0)
    order = expected.argsort(descending=True).tolist()
    assert [each.number for each in found.channels][:1] == order[:1] == [1]
    weights = {each.number: each.weight for each in found.channels}
    torch.testing.assert_close(torch.tensor([weights[k] for k in range(6)]), expected)
    for channel in found.channels:
        peaks = maps[:, channel.number].flatten(1).amax(1)
        assert [each.value for each in channel.patches] == pytest.approx(
            peaks.sort(descending=True).values[:4].tolist()
        )
        for patch in channel.patches:
            image = maps[names.index(patch.row.name), channel.number]
            y, x_ = divmod(int(image.argmax()), SIDE)
            edges = patch.box.left, patch.box.top, patch.box.right, patch.box.bottom
            expected_edges = (max(x_ - 1, 0), max(y - 1, 0), min(x_ + 2, SIDE), min(y + 2, SIDE))
            assert edges == pytest.approx(expected_edges, abs=0.05)  # what the model sees is known no better
    first = found.channels[0].patches[0].picture(photos)
    red, green, blue = np.asarray(first).reshape(-1, 3).mean(0)
    assert green > 2 * max(red, blue)
    assert found.picture(photos).width > 100
    assert json.loads(json.dumps(found.to_dict()))["channels"][0]["channel"] == 1


def test_channels_of_a_class_without_photos_are_refused(photos: Photos) -> None:
    with pytest.raises(RunError, match="target must be a class of which the run has photos, got 7"):
        channels(photos, 7)


def test_shared_concepts_are_as_good_as_those_of_all_photos_at_once(photos: Photos) -> None:
    _, x = inputs(photos)
    found = shared_concepts(photos, 3, layer="look", rounds=4)
    maps = feature_maps(photos.explainer.model, x, "look").clamp(min=0)
    rows = maps.movedim(1, -1).reshape(-1, 6).double()
    where, what = factorise(rows, 3)
    at_once = float((rows - where @ what).norm() / rows.norm())
    assert found.error <= at_once * 1.1
    again = places(rows, found.vectors.double())
    assert found.error == pytest.approx(float((rows - again @ found.vectors.double()).norm() / rows.norm()), rel=1e-3)
    assert sum(found.shares) == pytest.approx(1)
    assert list(found.shares) == sorted(found.shares, reverse=True)
    torch.testing.assert_close(found.vectors.norm(dim=1), torch.ones(3))
    labels = [{each.row.label for each in own} for own in found.examples]
    assert sorted(map(sorted, labels)) == [["blue"], ["green"], ["red"]]  # each concept is a colour
    assert all(float(each.heatmap.max()) == pytest.approx(1) for own in found.examples for each in own)
    assert found.picture(photos).width > 100


def test_a_concept_of_the_class_is_significant_and_one_of_nothing_is_not(photos: Photos) -> None:
    green = [photo_of(1, number) for number in range(100, 108)]
    found = concept_direction(photos, green, 1, layer="look")
    assert found.significant
    assert (found.score, found.told_apart) == (1.0, 1.0)
    against = concept_direction(photos, green, 0, layer="look")
    assert against.score < 0.5
    nothing = concept_direction(
        photos, [photo_of(2 * (number % 2), 100 + number) for number in range(8)], 1, layer="look"
    )
    assert not nothing.significant
    assert json.loads(json.dumps(found.to_json()))["photos"] == 14


def test_too_few_examples_are_refused(photos: Photos) -> None:
    with pytest.raises(RunError, match="examples must be at least 5 photos, got 4"):
        concept_direction(photos, [photo_of(0, k) for k in range(4)], 0)
    with pytest.raises(RunError, match="run must have at least 60 photos of other classes for 20 examples, got 28"):
        concept_direction(photos, [photo_of(0, k) for k in range(20)], 0)


def test_a_concept_vector_has_the_smallest_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(12, 3, generator=generator, dtype=torch.double) + shift for shift in (0.4, -0.4))
    found = vector(one, other)
    points, signs = torch.cat([one, other]), torch.tensor([1.0] * 12 + [-1.0] * 12, dtype=torch.double)

    def loss(weights: torch.Tensor, bias: float) -> float:
        return float((1 + (-signs * (points @ weights + bias)).exp()).log().mean() + 0.01 * (weights @ weights))

    biases = torch.linspace(-1, 1, 401).tolist()
    least = min(loss(found, bias) for bias in biases)
    for step in 0.05 * torch.randn(20, 3, generator=generator, dtype=torch.double):
        assert min(loss(found + step, bias) for bias in biases) > least


def test_the_accuracy_falls_where_the_evidence_is_removed(photos: Photos) -> None:
    rows = list(photos.run.rows("gradcam"))
    wanted = [(row.name, row.target) for row in rows if row.label == "green"]
    found = removed(photos, "gradcam", wanted, share=0.2, fill="zero")
    names, x = inputs(photos)
    chosen = [row for row in rows if row.label == "green"]
    own = x[[names.index(row.name) for row in chosen]]
    masks = []
    for row in chosen:
        values = row.heatmap.flatten().tolist()
        first = sorted(range(len(values)), key=lambda place: (-values[place], place))[: round(0.2 * SIDE * SIDE)]
        kept = torch.zeros(SIDE * SIDE, dtype=torch.bool)
        kept[first] = True
        masks.append(kept.reshape(SIDE, SIDE))
    mask = torch.stack(masks)[:, None]
    with torch.no_grad():
        answers = [
            photos.explainer.model(each).argmax(1)
            for each in (own, own * ~mask, own * ~mask.roll((SIDE // 2, SIDE // 2), (2, 3)))
        ]
    shares = [float((answer == 1).double().mean()) for answer in answers]
    assert (found.before, found.after, found.control) == pytest.approx(tuple(shares))
    assert found.photos == 14
    assert found.before == 1
    assert found.after < found.control
    with pytest.raises(RunError, match=r"share must lie between 0 and 1, got 1\.5"):
        removed(photos, "gradcam", wanted, share=1.5)
    with pytest.raises(RunError, match="wanted must name photos of the run that can be read, got none"):
        removed(photos, "gradcam", [("no such photo", "green")])


def test_a_photo_that_is_gone_is_named_and_the_others_go_on(photos: Photos, tmp_path: Path) -> None:
    rows: list[Any] = list(photos.run.rows("gradcam"))[:3]
    lost = type(rows[0])(**{**{f: getattr(rows[0], f) for f in rows[0].__dataclass_fields__},
                            "path": str(tmp_path / "gone.png")})  # fmt: skip
    again = Photos(photos.run, photos.explainer)
    (batch,) = again.batches([lost, *rows[1:]])
    assert [row.name for row in batch.rows] == ["01.png", "02.png"]
    assert list(again.missing) == ["00.png"]


@pytest.mark.parametrize(("a", "b", "x"), [(0.5, 0.5, 0.3), (2.0, 3.0, 0.9), (9.5, 0.5, 0.97), (30.0, 0.5, 0.5)])
def test_the_beta_function_is_its_integral(a: float, b: float, x: float) -> None:
    """With t = sin² u, the integrand has no poles; by Simpson's rule."""

    def integral(end: float, parts: int = 4000) -> float:
        step = end / parts
        values = [2 * math.sin(k * step) ** (2 * a - 1) * math.cos(k * step) ** (2 * b - 1) for k in range(parts + 1)]
        return step / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))

    assert beta_share(a, b, x) == pytest.approx(integral(math.asin(math.sqrt(x))) / integral(math.pi / 2), rel=1e-5)


def test_welch_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="the reference for Welch's test")
    one, other = [0.2, 0.5, 0.9, 0.4], [0.7, 0.8, 0.95, 0.85, 0.9, 0.99]
    assert welch(one, other) == pytest.approx(stats.ttest_ind(one, other, equal_var=False).pvalue, rel=1e-9)
    assert (welch([1, 1], [1, 1]), welch([1, 1], [2, 2])) == (1.0, 0.0)
