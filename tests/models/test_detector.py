"""NanoDet: its published outputs, decoding and suppression against slow computations, and what it
finds on photos."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.ops import batched_nms

import explain
from explain import ModelError, models
from explain.models import Classifier, bundled, load
from explain.models.nanodet import BINS, STRIDES, NanoDet, decode, detect
from tests.conftest import ROOT

GOLDEN = Path(__file__).with_name("golden") / "nanodet.safetensors"
EVERY = 25  # cells of the published outputs, of which these are stored


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return load("nanodet")


def as_input(classifier: Classifier, name: str) -> torch.Tensor:
    with Image.open(ROOT / "assets" / name) as photo:
        return classifier.preprocess(photo.convert("RGB"))[None]


def test_its_outputs_are_the_published_ones(classifier: Classifier) -> None:
    model = classifier.model
    expected = load_file(GOLDEN)
    assert isinstance(model, NanoDet)
    with torch.no_grad():
        levels = model.neck(model.backbone(as_input(classifier, "coffee.png")))
        heads = [head(level) for head, level in zip(model.heads.values(), levels, strict=True)]
    box_logits = torch.cat([raw[0, 80:].flatten(1).T for raw in heads])[::EVERY]
    torch.testing.assert_close(box_logits, expected["box_logits"].float(), atol=1e-2, rtol=0)
    torch.testing.assert_close(
        decode(heads)["scores"][0, ::EVERY], expected["scores"].float(), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize(
    ("photo", "expected"),
    [
        ("coffee.png", [("cup", 0.52)]),
        ("astronaut.png", [("person", 0.74)]),
        ("grace_hopper.jpg", [("person", 0.83), ("tie", 0.50)]),
        ("rocket.jpg", []),
    ],
)
def test_it_finds_what_is_on_a_photo(
    classifier: Classifier, photo: str, expected: list[tuple[str, float]]
) -> None:
    with torch.no_grad():
        (found,) = detect(classifier.model(as_input(classifier, photo)))
    named = [
        (classifier.label(i), s)
        for i, s in zip(found["labels"].tolist(), found["scores"].tolist(), strict=True)
    ]
    assert named == [(label, pytest.approx(score, abs=0.03)) for label, score in expected]


def test_a_box_lies_around_its_thing(classifier: Classifier) -> None:
    with torch.no_grad():
        (found,) = detect(classifier.model(as_input(classifier, "grace_hopper.jpg")))
    left, top, right, bottom = (found["boxes"][1] / 416).tolist()
    assert 0.42 < left < right < 0.58  # the tie, between collar and jacket
    assert 0.66 < top < bottom < 0.92


def plain_box(cell: torch.Tensor, x: int, y: int, stride: int) -> list[float]:
    """The box of one cell ``(44,)``, one number after the other."""
    sides = []
    for side in range(4):
        powers = [math.exp(float(cell[BINS * side + i])) for i in range(BINS)]
        sides.append(stride * sum(i * power for i, power in enumerate(powers)) / sum(powers))
    middle = (stride * (x + 0.5), stride * (y + 0.5))
    return [middle[0] - sides[0], middle[1] - sides[1], middle[0] + sides[2], middle[1] + sides[3]]


def test_decoding_is_what_its_description_says() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(4, 6), (2, 3), (1, 2)]
    classes = 3
    maps = [
        3 * torch.randn(2, classes + 4 * BINS, *size, generator=generator, dtype=torch.float64)
        for size in sizes
    ]
    found = decode(maps)
    cell = 0
    for raw, stride, (rows, columns) in zip(maps, STRIDES, sizes, strict=True):
        for y in range(rows):
            for x in range(columns):
                for image in range(2):
                    own = raw[image, :, y, x]
                    assert found["boxes"][image, cell].tolist() == pytest.approx(
                        plain_box(own[3:], x, y, stride)
                    )
                    assert found["logits"][image, cell].tolist() == own[:3].tolist()
                    scores = [1 / (1 + math.exp(-logit)) for logit in own[:3].tolist()]
                    assert found["scores"][image, cell].tolist() == pytest.approx(scores)
                cell += 1
    assert cell == found["boxes"].shape[1]


def test_suppression_is_that_of_torchvision() -> None:
    generator = torch.Generator().manual_seed(0)
    corners = 40 * torch.rand(2, 150, 2, generator=generator)
    boxes = torch.cat([corners, corners + 10 + 20 * torch.rand(2, 150, 2, generator=generator)], -1)
    scores = torch.rand(2, 150, 4, generator=generator)
    for image, found in enumerate(detect({"scores": scores, "boxes": boxes}, threshold=0.4)):
        cells, labels = (scores[image] > 0.4).nonzero(as_tuple=True)
        kept = batched_nms(boxes[image, cells], scores[image, cells, labels], labels, 0.6)
        assert 20 < len(kept) < len(cells)
        assert torch.equal(found["cells"], cells[kept])
        assert torch.equal(found["labels"], labels[kept])
        assert torch.equal(found["boxes"], boxes[image, cells[kept]])
        assert torch.equal(found["scores"], scores[image, cells[kept], labels[kept]])


def test_few_candidates_and_none() -> None:
    output = {
        "scores": torch.tensor([[[0.5, 0.9]], [[0.1, 0.2]]]),
        "boxes": torch.tensor([[[0.0, 0, 9, 9]]] * 2),
    }
    assert [len(found["scores"]) for found in detect(output)] == [2, 0]
    assert [found["labels"].tolist() for found in detect(output, candidates=1)] == [[1], []]
    assert detect(output)[1]["boxes"].shape == (0, 4)


def test_gradients_of_scores_and_boxes_reach_the_input(classifier: Classifier) -> None:
    x = as_input(classifier, "coffee.png").requires_grad_()
    (found,) = detect(classifier.model(x))
    for score in (found["scores"][0], *found["boxes"][0]):
        (gradient,) = torch.autograd.grad(score, x, retain_graph=True)
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


def test_cells_of_an_image_are_the_same_alone_and_in_a_batch(classifier: Classifier) -> None:
    x = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        batch = classifier.model(x)
        alone = classifier.model(x[1:])
    assert batch["boxes"].shape == (2, 8 * 12 + 4 * 6 + 2 * 3, 4)
    for name, values in batch.items():
        torch.testing.assert_close(values[1:], alone[name], atol=1e-4, rtol=1e-4)


def test_a_photo_is_explained_for_one_box() -> None:
    explainer = explain.Explainer("nanodet")
    photo = ROOT / "assets" / "coffee.png"
    (found,) = detect(explainer.model(explainer.as_input(photo)))
    cell = int(found["cells"][0])
    label = int(found["labels"][0])
    layer = "heads.stride32.hidden"  # the head that found it
    explanation = explainer(
        photo, "gradcam", lambda output: output["logits"][:, cell, label], layer=layer
    )
    assert explanation.input_size == (416, 416)
    heat = explanation.attributions["gradcam"].heatmap[0]
    left, top, right, bottom = found["boxes"][0].round().long().clamp(0, 416).tolist()
    assert heat[top:bottom, left:right].sum() > 0.8 * heat.sum()


def test_the_names_are_known() -> None:
    assert models.list_models()[3:6] == ["tiny-clip", "nanodet", "person-segmenter"]
    with pytest.raises(ModelError, match="did you mean 'nanodet'"):
        load("nanodets")


@pytest.mark.parametrize("name", ["nanodet", "person-segmenter"])
def test_a_size_must_fit_the_strides(name: str) -> None:
    found = load(name, size=96)
    assert found.preprocess(Image.new("RGB", (30, 20))).shape == (3, 96, 96)
    with pytest.raises(ModelError, match="multiple of 32 pixels"):
        load(name, size=100)


FILES = {"nanodet": "DETECTOR", "person-segmenter": "SEGMENTER", "tiny-transformer": "TRANSFORMER"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_the_published_one_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(bundled, f"{FILES[name]}_FILE")
    changed = tmp_path / "weights"
    if original.suffix == ".safetensors":
        assert {tensor.dtype for tensor in load_file(original).values()} == {torch.float16}
    monkeypatch.setattr(bundled, f"{FILES[name]}_FILE", changed)
    with pytest.raises(ModelError, match="needs its weights"):
        load(name)
    changed.write_bytes(original.read_bytes()[:-1] + b"?")
    digest = getattr(bundled, f"{FILES[name]}_SHA256")
    with pytest.raises(ModelError, match=rf"\(sha256 {digest[:12]}…\), got"):
        load(name)
