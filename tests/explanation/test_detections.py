"""A photo that a detector or a segmenter is explained on: what is found, where, and how it is
named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import explain
from explain.models.nanodet import detect
from explain.targets import Detections, Segmentation
from tests.conftest import ROOT

PHOTO = ROOT / "assets" / "grace_hopper.jpg"


@pytest.fixture(scope="module")
def detector() -> explain.Explainer:
    return explain.Explainer("nanodet")


@pytest.fixture(scope="module")
def segmenter() -> explain.Explainer:
    return explain.Explainer("person-segmenter")


def test_what_is_found_is_what_suppression_leaves(detector: explain.Explainer) -> None:
    explanation = detector(PHOTO, "layercam")
    with torch.no_grad():
        (detections,) = detect(detector.model(detector.as_input(PHOTO)))
    width, height = explanation.photo.size
    assert [detection.label for detection in explanation.predicted] == ["person", "tie"]
    for detection, box, score in zip(
        explanation.detections, detections["boxes"], detections["scores"], strict=True
    ):
        scale = torch.tensor([width, height] * 2) / 416
        assert detection.box == pytest.approx((box * scale).tolist(), abs=1e-2)
        assert detection.probability == pytest.approx(float(score))
    assert explanation.targets == ["person"]
    assert explanation.boxes[0] == explanation.detections[0]
    assert explanation["layercam"].score.tolist() == pytest.approx(
        [explanation.detections[0].probability]
    )


def test_a_detection_is_named_by_a_text(detector: explain.Explainer) -> None:
    texts = ["tie", "tie@1", "tie@257,480", "box 230,416,286,534", 27, "@30,30"]
    explanation = detector(PHOTO, "layercam", targets=texts)
    assert explanation.targets == ["tie"] * 5 + ["person"]
    x = detector.as_input(PHOTO)
    labels = [Detections(detector.categories.index(name)) for name in ("tie", "person")]
    tie, person = explain.attribute(detector.model, x, "layercam", targets=labels)
    for result in explanation.results:
        expected = tie if result["layercam"].target == "tie" else person
        assert_close(result["layercam"].values, expected.values, atol=1e-6, rtol=1e-4)


def test_a_record_repeats_the_same_box(detector: explain.Explainer, tmp_path: Path) -> None:
    explanation = detector(PHOTO, "layercam", "tie")
    explanation.save(tmp_path)
    record = json.loads((tmp_path / "grace_hopper-layercam.json").read_text("utf-8"))
    assert (record["label"], record["asked"]["options"]["decode"]) == ("tie", "cells")
    assert record["probability"] == pytest.approx(explanation.detections[1].probability)
    again = explain.load(tmp_path / "grace_hopper-layercam.json").repeat()
    assert_close(again.values, explanation.values)


def test_a_segmenter_explains_what_it_predicts(segmenter: explain.Explainer) -> None:
    photo = ROOT / "assets" / "astronaut.png"
    explanation = segmenter(photo, "saliency")
    assert explanation.targets == ["person where predicted"]
    expected = explain.attribute(
        segmenter.model, segmenter.as_input(photo), "saliency", target=Segmentation(0)
    )
    assert_close(explanation.values, expected.values[0], atol=1e-6, rtol=1e-4)
