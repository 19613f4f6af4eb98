"""Insight with one more look at the model: channels, shared concepts, concept vectors, and removed
evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain import ExplainError, RunError
from explain.attribution.concepts import factorise
from explain.insight import directions
from explain.insight.ablation import corrected, removed
from explain.insight.channels import channels, feature_maps, receptive_field
from explain.insight.concepts import places, shared_concepts
from explain.insight.directions import concept_direction, normals
from explain.insight.reattribution import RunPhotos
from tests.runs.networks import as_it_is

SIDE = 24


class ByColour(nn.Module):
    """Three classes: how much red, green and blue there is in the brightest places, seen through a
    window of three."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv2d(3, 6, 3, padding=1)
        self.fc = nn.Linear(6, 3)
        with torch.no_grad():
            self.look.weight.copy_(
                0.02 * torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(0))
            )
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
def photos(tmp_path_factory: pytest.TempPathFactory) -> RunPhotos:
    folder = tmp_path_factory.mktemp("colours")
    rows = []
    for number in range(42):
        photo_of(number % 3, number).save(folder / f"{number:02}.png")
        rows.append({"path": f"{number:02}.png", "label": number % 3})
    (folder / "list.json").write_text(json.dumps(rows))
    made = explain.Explainer(
        ByColour().eval(), preprocess=as_it_is, categories=["red", "green", "blue"]
    )
    run = explain.run(
        folder / "list.json", made, "gradcam", output=folder / "run.sqlite", workers=0
    )
    return RunPhotos(run, made)


def inputs(photos: RunPhotos) -> tuple[list[str], torch.Tensor]:
    names = [row.name for row in photos.run.rows("gradcam")]
    return names, torch.stack(
        [as_it_is(Image.open(row.path)) for row in photos.run.rows("gradcam")]
    )


@pytest.mark.parametrize(
    ("layers", "side"),
    [
        ([nn.Conv2d(3, 4, 3, padding=1)], 3),
        ([nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 5, padding=2)], 7),
        (
            [
                nn.Conv2d(3, 4, 3, padding=1),
                nn.MaxPool2d(2),
                nn.ReLU(),
                nn.Conv2d(4, 4, 3, padding=1),
            ],
            8,
        ),
        ([nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=2, dilation=2)], 11),
        ([nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(2), nn.Linear(1024, 7)], 32),
    ],
)
def test_a_receptive_field_is_that_of_the_formula(layers: list[nn.Module], side: int) -> None:
    """r + (k - 1) j for each layer, where j is the product of the strides so far."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    left, top, right, bottom = receptive_field(
        model, torch.rand(1, 3, 32, 32), str(len(layers) - 1)
    )
    assert (right - left, bottom - top) == (side, side)


def test_patches_are_the_places_that_excite_a_channel_most(photos: RunPhotos) -> None:
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
            # what the model sees is known no better
            assert edges == pytest.approx(expected_edges, abs=0.05)
    first = found.channels[0].patches[0].picture(photos)
    red, green, blue = np.asarray(first).reshape(-1, 3).mean(0)
    assert green > 2 * max(red, blue)
    assert found.picture(photos).width > 100
    assert json.loads(json.dumps(found.to_dict()))["channels"][0]["channel"] == 1


def test_channels_of_a_class_without_photos_are_refused(photos: RunPhotos) -> None:
    with pytest.raises(RunError, match="target must"):
        channels(photos, 7)


def test_what_is_asked_for_further_is_what_the_functions_say(photos: RunPhotos) -> None:
    examples = [photo_of(1, number) for number in range(100, 106)]
    found = photos.run.insight(
        explainer=photos.explainer,
        channels=2,
        concepts=3,
        examples=examples,
        target="green",
        layer="look",
    )
    assert found.concepts is not None
    assert (found.concepts.layer, len(found.concepts.shares)) == ("look", 3)
    assert {name: found.to_dict()[name] for name in ("channels", "direction")} == {
        "channels": channels(photos, 1, layer="look", count=2).to_dict(),
        "direction": concept_direction(photos, examples, 1, layer="look").to_dict(),
    }
    titles = [line for line in found.lines() if line and not line.startswith(" ")]
    assert titles[4:] == [
        "What channels of look see, by weight for green",
        "Concepts of look in 42 photos",
        "A concept from examples",
    ]
    table = found.parts()["channels"].table
    assert list(table[0][:4]) == ["channel", "weight", "strongest", "in photos of"]
    assert (table[1][0], table[1][3]) == ("1", "green")


def test_a_further_look_needs_the_model(photos: RunPhotos) -> None:
    with pytest.raises(ExplainError, match="concepts must"):
        photos.run.insight(concepts=2)


def test_shared_concepts_are_as_good_as_those_of_all_photos_at_once(photos: RunPhotos) -> None:
    _, x = inputs(photos)
    found = shared_concepts(photos, 3, layer="look", rounds=4)
    maps = feature_maps(photos.explainer.model, x, "look").clamp(min=0)
    rows = maps.movedim(1, -1).reshape(-1, 6).double()
    where, what = factorise(rows, 3)
    at_once = float((rows - where @ what).norm() / rows.norm())
    assert found.error <= at_once * 1.1
    again = places(rows, found.vectors.double())
    assert found.error == pytest.approx(
        float((rows - again @ found.vectors.double()).norm() / rows.norm()), rel=1e-3
    )
    assert sum(found.shares) == pytest.approx(1)
    assert list(found.shares) == sorted(found.shares, reverse=True)
    torch.testing.assert_close(found.vectors.norm(dim=1), torch.ones(3))
    labels = [{each.row.label for each in own} for own in found.examples]
    assert sorted(map(sorted, labels)) == [["blue"], ["green"], ["red"]]  # each concept is a colour
    assert all(
        float(each.heatmap.max()) == pytest.approx(1) for own in found.examples for each in own
    )
    assert found.picture(photos).width > 100


def test_a_concept_of_the_class_is_significant_and_one_of_nothing_is_not(photos: RunPhotos) -> None:
    green = [photo_of(1, number) for number in range(100, 108)]
    found = concept_direction(photos, green, 1, layer="look")
    assert found.significant
    assert (found.score, found.told_apart, found.target) == (1.0, 1.0, "green")
    as_large = sum(abs(gain) >= found.gain for gain in found.random_gains)
    assert found.chance == (1 + as_large) / 201 < 0.03
    against = concept_direction(photos, green, "red", layer="look")
    assert against.score < 0.5
    assert against.gain < 0
    nothing = concept_direction(
        photos, [photo_of(2 * (number % 2), 100 + number) for number in range(8)], 1, layer="look"
    )
    assert not nothing.significant
    assert json.loads(json.dumps(found.to_dict()))["photos"] == 14


def test_chance_says_how_often_random_examples_would_gain_as_much(photos: RunPhotos) -> None:
    """With photos of the run as examples, every chance is as likely as every other: small ones are
    as rare."""
    chances = []
    for seed in range(10):
        drawn = torch.randperm(28, generator=torch.Generator().manual_seed(seed))[:6].tolist()
        others = [number for number in range(42) if number % 3 != 1]
        examples = [photo_of(others[k] % 3, others[k]) for k in drawn]
        found = concept_direction(photos, examples, 1, layer="look", draws=2, fakes=39, seed=seed)
        as_large = sum(abs(gain) >= abs(found.gain) for gain in found.random_gains)
        assert found.chance == (1 + as_large) / 40
        chances.append(found.chance)
    assert sum(chance < 0.2 for chance in chances) <= 5  # of 10, 2 are expected
    assert sum(chance > 0.5 for chance in chances) >= 2


def test_the_gain_is_the_mean_derivative_along_the_vector(
    photos: RunPhotos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a vector that is given, both figures follow from gradients that are found by hand."""
    given = torch.tensor([1.0, -2.0, 0.5, 0.0, 0.0, 3.0])
    monkeypatch.setattr(directions, "normals", lambda examples, _: given.expand(len(examples), -1))
    examples = [photo_of(0, number) for number in range(100, 105)]
    found = concept_direction(photos, examples, 1, layer="look", draws=1, fakes=20)
    model = photos.explainer.model
    _, x = inputs(photos)
    maps = model.look(x).detach().requires_grad_()
    model.fc(maps.relu().mean((2, 3)))[:, 1].sum().backward()
    assert maps.grad is not None
    own = model.look(torch.stack([as_it_is(each) for each in examples])).detach().mean((2, 3))
    of_class = torch.arange(42) % 3 == 1
    scale = torch.cat([own, maps.detach().mean((2, 3))[~of_class]]).std(0)
    slopes = maps.grad.sum((2, 3))[of_class] * scale @ (given / given.norm())
    assert found.gain == pytest.approx(float(slopes.mean()), rel=1e-4)
    assert found.score == float((slopes > 0).double().mean())
    assert found.chance == 1  # every vector is the same


def test_too_few_examples_are_refused(photos: RunPhotos) -> None:
    with pytest.raises(RunError, match="examples must"):
        concept_direction(photos, [photo_of(0, k) for k in range(4)], 0)
    with pytest.raises(RunError, match="run must"):
        concept_direction(photos, [photo_of(0, k) for k in range(20)], 0)


@pytest.mark.parametrize("channels", [3, 40])
def test_a_concept_vector_has_the_smallest_loss(channels: int) -> None:
    """The gradient of the loss, by autograd, is zero at each of them."""
    generator = torch.Generator().manual_seed(0)
    # mixed, apart, and far apart
    shift = torch.tensor([0.2, 1.0, 30.0], dtype=torch.double)[:, None, None]
    one = torch.randn(3, 12, channels, generator=generator, dtype=torch.double) + shift
    other = torch.randn(3, 9, channels, generator=generator, dtype=torch.double) - shift
    found = normals(one, other)
    for normal, first, second in zip(found, one, other, strict=True):
        points = torch.cat([first, second])
        signs = torch.tensor([1.0] * 12 + [-1.0] * 9, dtype=torch.double)
        low = -1e3
        high = 1e3
        for _ in range(200):  # the best offset, where the pulls of both sides are equal
            middle = (low + high) / 2
            pull = float((signs * torch.sigmoid(-signs * (points @ normal + middle))).sum())
            low, high = (middle, high) if pull > 0 else (low, middle)
        weights = normal.clone().requires_grad_()
        loss = (
            torch.log1p(torch.exp(-signs * (points @ weights + low))).mean()
            + 0.01 * weights.square().sum()
        )
        loss.backward()
        assert weights.grad is not None
        assert weights.grad.abs().max() < 1e-7


def test_the_accuracy_falls_where_the_evidence_is_removed(photos: RunPhotos) -> None:
    rows = list(photos.run.rows("gradcam"))
    wanted = [(row.name, row.target) for row in rows if row.label == "green"]
    found = removed(photos, "gradcam", wanted, share=0.2, baseline="zero")
    names, x = inputs(photos)
    chosen = [row for row in rows if row.label == "green"]
    own = x[[names.index(row.name) for row in chosen]]
    masks = []
    for row in chosen:
        values = row.heatmap.flatten().tolist()
        first = sorted(range(len(values)), key=lambda place: (-values[place], place))[
            : round(0.2 * SIDE * SIDE)
        ]
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
    assert found.accuracy == (found.before, found.after, found.control)
    assert found.photos == 14
    assert found.before == 1
    assert found.after < found.control
    with pytest.raises(RunError, match="share must"):
        removed(photos, "gradcam", wanted, share=1.5)
    with pytest.raises(RunError, match="wanted must"):
        removed(photos, "gradcam", [("no such photo", "green")])


@pytest.fixture(scope="module")
def boxed(tmp_path_factory: pytest.TempPathFactory) -> RunPhotos:
    """Photos of which the left half decides: red there or green; boxes are on the left, on the
    right, or missing."""
    folder = tmp_path_factory.mktemp("boxed")
    rows: list[dict[str, Any]] = []
    for number in range(9):
        pixels = np.full((SIDE, SIDE, 3), 40, np.uint8)
        pixels[6:18, 2:10, number % 2] = 250
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append({"path": f"{number}.png", "label": number % 2})
        if number < 8:
            left = 2 if number < 4 else 14
            rows[-1]["boxes"] = [[left, 6, left + 8, 18]]
    rows[7]["boxes"] = [[0, 0, SIDE, SIDE]]
    (folder / "list.json").write_text(json.dumps(rows))
    made = explain.Explainer(
        ByColour().eval(), preprocess=as_it_is, categories=["red", "green", "blue"]
    )
    run = explain.run(
        folder / "list.json", made, "gradcam", output=folder / "run.sqlite", workers=0
    )
    return RunPhotos(run, made)


@pytest.mark.parametrize("what", ["object", "background"])
def test_the_object_or_all_else_is_covered(boxed: RunPhotos, what: str) -> None:
    rows = list(boxed.run.rows("gradcam"))
    found = removed(
        boxed, "gradcam", [(row.name, row.target) for row in rows], what, baseline="zero"
    )
    assert [name for name, _ in found.keys] == [
        f"{number}.png" for number in range(7)
    ]  # no box; a box that baselines it
    for number, (name, _) in enumerate(found.keys):
        row = next(row for row in rows if row.name == name)
        x = as_it_is(Image.open(row.path))[None]
        left = 2 if number < 4 else 14
        keep = torch.ones(SIDE, SIDE)
        keep[6:18, left : left + 8] = 0
        other = torch.ones(SIDE, SIDE)
        other[[y % SIDE for y in range(18, 30)], (left + 12) % SIDE : (left + 12) % SIDE + 8] = 0
        kept = (keep, other) if what == "object" else (1 - keep, 1 - other)
        with torch.no_grad():
            answers = [
                int(boxed.explainer.model(x * each).argmax()) for each in (torch.ones(()), *kept)
            ]
        assert found.given[number].tolist() == [answer == row.label_class for answer in answers]
        assert float(found.covered[number]) == pytest.approx(1 / 6 if what == "object" else 5 / 6)
    on_left = found.of(found.keys[:4])
    assert on_left.photos == 4
    assert on_left.before == 1
    # what decides is still there
    assert (on_left.control if what == "object" else on_left.after) == 1
    assert str(on_left).startswith("4 photos: 100% as they are, ")
    assert on_left.to_dict()["what"] == what


def test_a_mistake_is_corrected_where_what_spoke_for_the_wrong_class_is_covered(
    tmp_path: Path,
) -> None:
    """Photos with a large square of one colour and a small one of their own."""
    rows = []
    for number in range(6):
        pixels = np.full((SIDE, SIDE, 3), 40, np.uint8)
        pixels[2:10, 2:12, 0] = 250
        pixels[14:20, 14:20, 1] = 250
        pixels[23, number] = 0
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        rows.append({"path": f"{number}.png", "label": 1})
    (tmp_path / "list.json").write_text(json.dumps(rows))
    made = explain.Explainer(
        ByColour().eval(), preprocess=as_it_is, categories=["red", "green", "blue"]
    )
    run = explain.run(
        tmp_path / "list.json", made, "gradcam", output=tmp_path / "run.sqlite", workers=0
    )
    (pair,) = run.insight().pairs
    assert (pair.label, pair.prediction, pair.count) == ("green", "red", 6)
    found = corrected(RunPhotos(run, made), pair, "gradcam", share=0.2, baseline="zero")
    assert (found.photos, found.before, found.after, found.control) == (6, 1, 0, 1)
    assert found.accuracy == (0, 1, 0)
    assert found.chance == 1 / 2**6
    assert (
        "without the 20% of the pixels that spoke most for the wrong class, 100% without as many"
        in str(found)
    )
    assert str(found).endswith("; 100% become right, 0% elsewhere")


def test_a_photo_that_is_gone_is_named_and_the_others_go_on(
    photos: RunPhotos, tmp_path: Path
) -> None:
    rows: list[Any] = list(photos.run.rows("gradcam"))[:3]
    lost = type(rows[0])(
        **{
            **{f: getattr(rows[0], f) for f in rows[0].__dataclass_fields__},
            "path": str(tmp_path / "gone.png"),
        }
    )
    again = RunPhotos(photos.run, photos.explainer)
    (batch,) = again.batches([lost, *rows[1:]])
    assert [row.name for row in batch.rows] == ["01.png", "02.png"]
    assert list(again.missing) == ["00.png"]
