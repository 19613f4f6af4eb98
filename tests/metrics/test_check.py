"""`explanation.check()` and `--check`: the verdict in pictures, records and on the command line."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain import ExplainError, MetricError
from explain.metrics import Verdict
from explain.metrics.maps import spearman
from explain.models import CenterCrop
from explain.render.captions import Mark
from explain.targets import Detections, Segmentation
from tests.conftest import ROOT, Made, TinyNet, settled

CAT = str(ROOT / "assets" / "chelsea.png")
CHECKS = ["depends_on_model", "depends_on_class", "faithful", "stable"]


@pytest.fixture(scope="module")
def explainer() -> explain.Explainer:
    return explain.Explainer(settled(TinyNet()).eval(), list("abcde"), CenterCrop(16))


@pytest.fixture(scope="module")
def checked(explainer: explain.Explainer) -> tuple[explain.Explanation, Verdict]:
    explanation = explainer(CAT, ["gradcam", "guidedbackprop"], targets=["b", "c"])
    return explanation, explanation.check(target="c")


def test_a_verdict_is_in_the_explanation_its_records_pictures_and_copies(
    checked: tuple[explain.Explanation, Verdict],
) -> None:
    explanation, verdict = checked
    assert list(verdict.passed) == ["gradcam", "guidedbackprop"]
    assert [result.check for result in verdict["gradcam"]] == CHECKS
    assert explanation.verdicts == {1: verdict}
    record = json.loads(json.dumps(explanation.record("gradcam", "c")))
    assert record["verdict"] == verdict["gradcam"].to_dict()
    assert explanation.record("gradcam", "b")["verdict"] is None
    marks = [tile.marks for tile in explanation.layout().tiles]
    assert marks[:3] == [()] * 3
    signs = {"supported": True, "contradicted": False}
    assert marks[3] == tuple(Mark(r.word, signs.get(r.answer)) for r in verdict["gradcam"])
    with pytest.raises(MetricError, match="explanation must"):
        copy.deepcopy(explanation).check()


def test_a_second_check_adds_to_the_first(
    explainer: explain.Explainer, checked: tuple[explain.Explanation, Verdict]
) -> None:
    explanation = explainer(CAT, ["gradcam", "saliency"], 2)
    first = explanation.check("gradcam")
    second = explanation.check(["saliency"], seed=3)
    assert dict(explanation.verdicts[0]) == {**first, **second}
    assert first["gradcam"] == checked[1]["gradcam"]  # nothing is random without its seed


BOXES = torch.tensor([[0.0, 0, 16, 8], [0, 8, 16, 16]])


def maps(self: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Maps of three classes for each photo, as a segmentation network gives them."""
    return {"out": self.two(self.one(x).relu())}


def detections(self: Any, x: torch.Tensor) -> Any:
    """Two boxes for each photo, of which one that scores little is left out."""
    outputs = []
    for scores in cells(self, x)["scores"][..., 1]:
        kept = scores > scores.max() - 0.02
        labels = torch.tensor([1, 2])[kept]
        outputs.append({"boxes": BOXES[kept], "labels": labels, "scores": scores[kept]})
    return outputs


def cells(self: Any, x: torch.Tensor) -> Any:
    """Two boxes with a score for each class, before non-maximum suppression."""
    scores = maps(self, x)["out"].sigmoid().unflatten(2, (2, 8)).mean((3, 4)).mT
    return {"scores": scores, "boxes": BOXES.expand(len(x), 2, 4)}


def network(output: Any) -> nn.Module:
    torch.manual_seed(0)
    one = nn.Conv2d(3, 8, 3, padding=1)
    return Made(output, one=one, two=nn.Conv2d(8, 3, 3, padding=1)).eval()


@pytest.mark.parametrize(
    ("output", "target", "has_classes"),
    [
        (maps, Segmentation(1, torch.eye(16) > 0), True),
        (detections, Detections(box=(0, 0, 16, 8)), False),
        (cells, Detections(box=(0, 8, 16, 16)), True),
    ],
)
def test_regions_boxes_and_functions_are_checked_and_what_is_not_applicable_says_so(
    output: Any, target: Any, has_classes: bool
) -> None:
    model = network(output)
    explainer = explain.Explainer(model, ["none", "upper", "lower"], CenterCrop(16))
    explanation = explainer(CAT, "inputxgradient", targets=[target])
    results = explanation.check()["inputxgradient"]
    assert [r.passed is not None for r in results] == [True, has_classes, True, True]
    assert ("no scores of other classes" in results.depends_on_class.reason) != has_classes
    if output is cells:  # the map of the class that is last in the same box
        x = explainer.as_input(Image.open(CAT).convert("RGB"))
        last = int(model(x)["scores"][0, 1].argmin())
        other = explain.attribute(model, x, "inputxgradient", target=Detections(last, BOXES[1]))
        values = explanation.attributions["inputxgradient"].values.sum(1)
        expected = float(spearman(values, other.values.sum(1)))
        assert results.depends_on_class.figure == pytest.approx(expected)


def test_a_region_that_a_randomised_network_does_not_predict_is_still_that_of_the_photo() -> None:
    model = network(maps)
    x = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    predicted = model(x)["out"].argmax(1)
    best = int(predicted.flatten().mode().values)
    metrics: Any = ["mprt", "emprt"]
    one, other = (
        explain.evaluate(model, x, "inputxgradient", metrics, target=target)["inputxgradient"]
        for target in (Segmentation(best), Segmentation(best, predicted == best))
    )
    assert all(torch.equal(one[metric], other[metric]) for metric in metrics)


def test_a_check_that_fails_leaves_the_others_their_results(
    explainer: explain.Explainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(layer: nn.Linear) -> None:
        raise RuntimeError("no")

    explanation = explainer(CAT, "gradcam", 1)
    monkeypatch.setattr(nn.Linear, "reset_parameters", refuse)
    results = explanation.check()["gradcam"]
    assert [result.passed is None for result in results] == [True, False, False, False]
    assert "reset_parameters" in results.depends_on_model.reason
    for arguments, message in (({"batch_size": 0}, "batch_size"), ({"methods": "lrp"}, "lrp")):
        with pytest.raises(ExplainError, match=message):
            explanation.check(**arguments)


@pytest.mark.long
def test_what_shows_no_class_is_contradicted_with_every_seed() -> None:
    """Guided backpropagation and a class activation map with random weights."""
    explanation = explain.Explainer("tiny")(CAT, ["guidedbackprop", "randomcam"])
    for seed in range(6):
        answers = explanation.check(seed=seed).answers
        assert set(answers.values()) == {"contradicted"}, seed
