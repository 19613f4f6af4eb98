"""A photo that a detector or a segmenter is explained on: what is found, where, and how it is
named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import explain
from explain import TargetError
from explain.cli import main
from explain.models.nanodet import detect
from explain.render.overlays import outlined
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


def test_what_is_not_there_is_refused_in_pixels_of_the_photo(
    detector: explain.Explainer, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Python and on the command line: what is there can be typed as it is written, and no option
    is named that there is not."""
    with Image.open(PHOTO) as photo:
        width, height = photo.size
    refusals: dict[Any, str] = {
        "cat": "cat",
        "tie@5": "only 1 is",
        Detections(index=7): "only 2 are",
        "@9999,5": "must lie in",
        "box 2000,3000,2100,3100": f"box 0,0,{width},{height}",
        99: "0 to 79",
    }
    messages = {}
    for target, expected in refusals.items():
        with pytest.raises(TargetError) as refused:
            detector(PHOTO, "saliency", target)
        messages[str(refused.value)] = expected
    command = [str(PHOTO), "--model", "nanodet", "--method", "saliency", "--target", "tie@5"]
    assert main(command) == 2
    messages[capsys.readouterr().err.strip()] = "only 1 is"
    boxes = set()
    for message, expected in messages.items():
        assert expected in message
        assert "\n" not in message
        assert "input" not in message
        assert "image 0" not in message
        assert {word for word in message.split() if word.startswith("--")} == set()
        there, *_ = message.split("; or")
        boxes |= set(re.findall(r"(?:person|tie) box -?\d+(?:,-?\d+){3}", there))
    assert boxes
    for box in boxes:
        assert detector(PHOTO, "saliency", box).targets == [box.split()[0]]


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


def test_a_box_has_one_colour_on_the_photo_and_on_its_map(detector: explain.Explainer) -> None:
    """The line is the same in both; a region that is no detection has the colour of none."""
    explanation = detector(PHOTO, "saliency", targets=["person", "tie", "cat box 100,100,300,300"])
    photo = outlined(explanation.photo, {one.label: one.box for one in explanation.detections})
    colours = []
    for number, prediction in enumerate(explanation.boxes):
        left, top, right, bottom = prediction.box
        at_line = (int(right) - 1 if right < photo.width else int(left), int(top + bottom) // 2)
        colours.append(explanation.overlay("saliency", number).getpixel(at_line))
        if number < 2:
            assert photo.getpixel(at_line) == colours[-1]
    assert len(set(colours)) == 3
