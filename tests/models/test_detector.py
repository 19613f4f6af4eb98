"""NanoDet: its published outputs, decoding and suppression against slow computations, and what it
finds on photos."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.testing import assert_close
from torchvision.ops import batched_nms

from explain import ModelError
from explain.models import Classifier, bundled, load
from explain.models.nanodet import BINS, STRIDES, NanoDet, decode_heads, detect
from tests.conftest import ROOT
from tests.targets.test_detections import cells, flat, from_sides

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
    assert_close(box_logits, expected["box_logits"].float(), atol=1e-2, rtol=0)
    assert_close(
        decode_heads(heads)["scores"][0, ::EVERY], expected["scores"].float(), atol=1e-3, rtol=0
    )


def test_decoding_is_what_its_description_says() -> None:
    raw = 3 * torch.randn(2, 3 + 4 * BINS, 4, 6, dtype=torch.float64)
    values = decode_heads([raw], STRIDES[:1])
    powers = flat([raw])[..., 3:].exp().unflatten(-1, (4, BINS))
    sides = (powers * torch.arange(BINS)).sum(-1) / powers.sum(-1)
    middles, strides = cells((4, 6, 8))
    assert_close(values["boxes"], strides * from_sides(middles, sides))
    assert_close(values["scores"], flat([raw])[..., :3].sigmoid())


def test_suppression_is_that_of_torchvision() -> None:
    corners = 40 * torch.rand(2, 150, 2)
    boxes = torch.cat([corners, corners + 10 + 20 * torch.rand(2, 150, 2)], -1)
    scores = torch.rand(2, 150, 4)
    dense = {"scores": scores, "boxes": boxes}
    assert [len(image["scores"]) for image in detect(dense, 2)] == [0, 0]
    for image, detections in enumerate(detect(dense, threshold=0.4)):
        cells_above, labels = (scores[image] > 0.4).nonzero(as_tuple=True)
        scores_above = scores[image, cells_above, labels]
        kept = batched_nms(boxes[image, cells_above], scores_above, labels, 0.6)
        assert 20 < len(kept) < len(cells_above)
        expected = {"cells": cells_above, "labels": labels, "scores": scores_above}
        expected["boxes"] = boxes[image, cells_above]
        assert all(torch.equal(detections[name], each[kept]) for name, each in expected.items())


@pytest.mark.parametrize("name", ["nanodet", "person-segmenter"])
def test_a_size_must_fit_the_strides(name: str) -> None:
    detections = load(name, size=96)
    assert detections.preprocess(Image.new("RGB", (30, 20))).shape == (3, 96, 96)
    with pytest.raises(ModelError, match="multiple of 32 pixels"):
        load(name, size=100)


FILES = {"nanodet": "DETECTOR", "person-segmenter": "SEGMENTER", "tiny-transformer": "TRANSFORMER"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_the_published_one_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(bundled, f"{FILES[name]}_FILE")
    changed = tmp_path / "weights"
    monkeypatch.setattr(bundled, f"{FILES[name]}_FILE", changed)
    with pytest.raises(ModelError, match="needs its weights"):
        load(name)
    changed.write_bytes(original.read_bytes()[:-1] + b"?")
    digest = getattr(bundled, f"{FILES[name]}_SHA256")
    with pytest.raises(ModelError, match=rf"\(sha256 {digest[:12]}…\), got"):
        load(name)
