"""A photo that a detector or a segmenter is explained on: what is found, where, and how it is
named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.testing import assert_close

import explain
from explain import TargetError
from explain.explanation.detected import detection_names
from explain.models.nanodet import detect
from explain.render.overlays import outlined
from explain.targets import Detections, Segmentation
from tests.conftest import ROOT

PHOTO = ROOT / "assets" / "grace_hopper.jpg"


@pytest.fixture(scope="module")
def detector() -> explain.Explainer:
    return explain.Explainer("nanodet")


def test_what_is_found_is_what_suppression_leaves(
    detector: explain.Explainer, tmp_path: Path
) -> None:
    explanation = detector(PHOTO, "layercam")
    with torch.no_grad():
        (detections,) = detect(detector.model(detector.as_input(PHOTO)))
    scale = torch.tensor(explanation.photo.size * 2) / 416
    assert [detection.label for detection in explanation.detections] == ["person", "tie"]
    boxes = torch.tensor([detection.box for detection in explanation.detections])
    assert_close(boxes, detections["boxes"] * scale, rtol=0, atol=1e-2)
    scores = [detection.probability for detection in explanation.detections]
    assert scores == pytest.approx(detections["scores"].tolist())
    assert explanation.targets == ["person"]
    assert explanation.boxes[0] == explanation.detections[0]
    assert float(explanation["layercam"].score) == pytest.approx(scores[0])
    saved = explain.load(explanation.save(tmp_path)[2])
    assert saved.record["asked"]["options"]["decode"] == "cells"
    assert saved.record["probability"] == pytest.approx(scores[0])
    assert_close(saved.repeat().values, explanation.values)


def test_a_detection_is_named_by_a_text(detector: explain.Explainer) -> None:
    texts = ["tie", "tie@1", "tie@257,480", "box 230,416,286,534", 27, "@30,30"]
    explanation = detector(PHOTO, "saliency", targets=texts)
    assert explanation.targets == ["tie"] * 5 + ["person"]
    x = detector.as_input(PHOTO)
    for name, results in (("tie", explanation.results[:5]), ("person", explanation.results[5:])):
        target = Detections(detector.categories.index(name))
        expected = explain.attribute(detector.model, x, "saliency", target=target).values
        for result in results:
            assert_close(result["saliency"].values, expected, atol=1e-6, rtol=1e-4)


@pytest.fixture(scope="module")
def two_persons() -> Image.Image:
    picture = Image.new("RGB", (1000, 500))
    for left, name in ((0, "grace_hopper.jpg"), (500, "astronaut.png")):
        with Image.open(ROOT / "assets" / name) as photo:
            picture.paste(photo.convert("RGB").resize((500, 500)), (left, 0))
    return picture


@pytest.mark.long
def test_a_label_is_all_detections_of_it_together(
    detector: explain.Explainer, two_persons: Image.Image, tmp_path: Path
) -> None:
    x = detector.as_input(two_persons).requires_grad_()
    output = detector.model(x)
    (found,) = detect(output)
    persons = found["scores"][found["labels"] == 0]
    assert len(persons) == 2
    is_kept = torch.isin(output["scores"][0, :, 0], persons)
    total = output["scores"][0, is_kept, 0].sum()
    (gradient,) = torch.autograd.grad(total, x)
    explanation = detector(two_persons, "saliency(absolute=False)", "person")
    (name,) = explanation.results[0]
    attribution = explanation.results[0][name]
    assert_close(attribution.score[0], total.detach())
    atol = 1e-5 * float(gradient.abs().max())
    assert_close(attribution.values, gradient, atol=atol, rtol=1e-3)
    assert explanation.targets == ["person"]
    assert explanation.boxes == (None,)
    saved = explain.load(explanation.save(tmp_path)[2])
    assert_close(saved.repeat(image=two_persons).values, explanation.values)
    again = detector(two_persons, "saliency(absolute=False)", explanation.target_at(0))
    assert_close(again.values, explanation.values)


@pytest.mark.long
def test_all_is_a_map_of_each_detection_by_its_own_name(
    detector: explain.Explainer, two_persons: Image.Image
) -> None:
    explanation = detector(two_persons, "saliency", "all")
    names = [detection.label for detection in explanation.detections]
    assert explanation.targets == names
    assert {"person@1", "person@2"} <= set(names)
    assert explanation.boxes == explanation.detections
    by_name = detector(two_persons, "saliency", targets=names)
    for one, other in zip(explanation.results, by_name.results, strict=True):
        assert_close(one["saliency"].values, other["saliency"].values)
    best = explain.targets.Predicted(0.6)
    sure = [one.label for one in explanation.detections if one.probability > 0.6]
    assert detector(two_persons, "saliency", best).targets == sure
    of_persons = explain.targets.Predicted({"person": 0.1, "tie": 0.99})
    labels = detector(two_persons, "saliency", of_persons).targets
    assert {"person@1", "person@2"} <= set(labels)
    assert "tie" not in labels
    with pytest.raises(TargetError, match="nothing is") as refused:
        detector(two_persons, "saliency", explain.targets.Predicted(0.999))
    assert "\n" not in str(refused.value)


def test_what_is_not_there_is_refused_in_pixels_of_the_photo(detector: explain.Explainer) -> None:
    """What is there can be typed as it is written, and no option is named that there is not."""
    refusals: dict[Any, str] = {
        "cat": "cat",
        "tie@5": "got 1",
        Detections(index=7): "got 2",
        "@9999,5": "got 0",
        "box 2000,3000,2100,3100": "overlaps it by 0.00",
        99: "got 0",
    }
    for target, expected in refusals.items():
        with pytest.raises(TargetError, match=expected) as refused:
            detector(PHOTO, "saliency", target)
        message = str(refused.value)
        assert not re.search(r"\n|input|image 0| --", message)
    with pytest.raises(TargetError) as refused:
        detector(PHOTO, "saliency", "dog")
    box, *_ = re.findall(r"tie box -?\d+(?:,-?\d+){3}", str(refused.value))
    assert detector(PHOTO, "saliency", box).targets == ["tie"]


def test_a_segmenter_explains_what_it_predicts() -> None:
    segmenter = explain.Explainer("person-segmenter")
    photo = ROOT / "assets" / "astronaut.png"
    explanation = segmenter(photo, "saliency")
    assert explanation.targets == ["person where predicted"]
    expected = explain.attribute(
        segmenter.model, segmenter.as_input(photo), "saliency", target=Segmentation(0)
    )
    assert_close(explanation.values, expected.values[0], atol=1e-6, rtol=1e-4)


def test_of_a_segmenter_the_most_frequent_class_is_explained_and_named() -> None:
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    for weight in model.parameters():
        nn.init.normal_(weight, generator=generator)
    labels = ["road", "tree", "sky", "car"]
    segmenter = explain.Explainer(model, labels, explain.models.CenterCrop(32))
    with pytest.warns(explain.ExplainWarning, match="in most places"):
        explanation = segmenter(PHOTO, "saliency")
    x = segmenter.as_input(PHOTO)
    counts = model(x).argmax(1).flatten().bincount(minlength=4).tolist()
    most = counts.index(max(counts))
    assert explanation.targets == [f"{segmenter.categories[most]} where predicted"]
    expected = explain.attribute(model, x, "saliency", target=Segmentation(most))
    assert_close(explanation.values, expected.values[0])


def test_a_box_has_one_colour_on_the_photo_and_on_its_map(detector: explain.Explainer) -> None:
    explanation = detector(PHOTO, "saliency", targets=["person", "tie"])
    photo = outlined(explanation.photo, {one.label: one.box for one in explanation.detections})
    colours = set()
    for number, prediction in enumerate(explanation.boxes):
        left, top, _, bottom = prediction.box
        at_line = (int(left), int(top + bottom) // 2)
        colour = explanation.overlay("saliency", number).getpixel(at_line)
        assert photo.getpixel(at_line) == colour
        colours.add(colour)
    assert len(colours) == 2


def test_detections_of_one_label_are_numbered() -> None:
    assert detection_names(["cup", "tie", "cup"]) == ["cup@1", "tie", "cup@2"]
