"""What a newcomer stumbled over: each thing works now, or is refused in one line that says what to do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import explain
from explain.cli import main
from explain.errors import ArgumentError, ExplainError, ExplainWarning, TargetError, close_to, did_you_mean
from explain.methods import AblationCAM
from explain.pictures import remark
from tests.conftest import ROOT, TinyNet, settled

CAT = str(ROOT / "assets" / "chelsea.png")
X = torch.rand(1, 3, 12, 10, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tiny() -> explain.Explainer:
    return explain.Explainer("tiny")


@pytest.fixture(scope="module")
def cat(tiny: explain.Explainer) -> explain.Explanation:
    return tiny(CAT, ["gradcam", "saliency"], ["tabby", "espresso"])


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], list[str]]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


# Misspelt arguments

MADE = explain.Explainer.__new__(explain.Explainer)
PUBLIC = {name: getattr(explain, name) for name in explain.__all__ if inspect.isfunction(getattr(explain, name))} | {
    "Explainer": explain.Explainer,
    "explainer": MADE,
    "explainer.each": MADE.each,
    "explainer.concepts": MADE.concepts,
    **{
        f"explanation.{name}": getattr(explain.Explanation, name)
        for name in ("overlay", "layout", "figure", "sheet", "save")
    },
    "overlay": explain.render.overlay,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_keyword_that_no_public_function_has_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"^[\w.]+ has no argument 'zzz'; (known: |none is known)") as caught:
        PUBLIC[name](zzz=1)
    assert isinstance(caught.value, TypeError)
    assert "self" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: explain.explain(CAT, metod="lrp"), "explain has no argument 'metod'; did you mean 'methods'?"),
        (lambda: explain.explain(CAT, method="lrp"), "explain has no argument 'method'; did you mean 'methods'?"),
        (
            lambda: explain.explain(CAT, model="tiny"),
            "explain has no argument 'model'; explain.Explainer(model=...) takes it, and then the photo",
        ),
        (lambda: explain.Explainer(modell="tiny"), "Explainer has no argument 'modell'; did you mean 'model'?"),
        (lambda: explain.Explainer(labels=["cat"]), "Explainer has no argument 'labels'; categories=... takes them"),
        (
            lambda: explain.attribute(TinyNet(), X, methods=["gradcam"]),
            "attribute has no argument 'methods'; explain.attribute_all takes several",
        ),
        (
            lambda: explain.attribute(TinyNet(), X, batchsize=3),
            "attribute has no argument 'batchsize'; did you mean 'batch_size'?",
        ),
    ],
)
def test_a_misspelt_keyword_is_answered_with_the_right_one(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == message


def test_one_function_finds_what_was_meant() -> None:
    assert close_to("grad-cam", explain.list_methods()) == ["gradcam"]
    assert close_to("Guided_Backprop", explain.list_methods()) == ["guidedbackprop"]
    assert close_to("centre", ["center", "whole", "five"]) == ["center"]
    assert close_to("zzz", ["center"]) == []
    assert did_you_mean("a.b", ["a-b", "ab.c"]) == "did you mean 'a-b'?"


# Values that are no values


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "a"}, "size must be a whole number of pixels from 1, got 'a'; leave it out"),
        ({"size": 0}, "size must be a whole number of pixels from 1, got 0; leave it out"),
        ({"size": 64.0}, "size must be a whole number of pixels from 1, got 64.0; leave it out"),
        ({"size": True}, "size must be a whole number of pixels from 1, got True; leave it out"),
        ({"weights": 5}, "weights must be a file, got 5; load tensors into a module of your own"),
        ({"device": 3.5}, "device '3.5' cannot be used ("),
        ({"crop": "centre"}, "crop must be one of 'center', 'whole', 'five', or a share above 0 and up to 1, got 'cen"),
        ({"crop": [1]}, "or a share above 0 and up to 1, got [1]; use 'center'"),
    ],
)
@pytest.mark.parametrize("model", ["tiny", settled(TinyNet())], ids=["name", "module"])
def test_what_cannot_be_a_value_of_an_explainer_is_refused(options: Any, message: str, model: Any) -> None:
    if "weights" in options and isinstance(model, nn.Module):
        message = "weights can be given for a model by name only"
    if "crop" in options and isinstance(model, nn.Module):
        options = {**options, "preprocess": explain.models.CenterCrop(8)}
    with pytest.raises(ExplainError) as caught:
        explain.Explainer(model, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_number_of_best_classes_is_a_number(tiny: explain.Explainer) -> None:
    for wrong in ("3", 2.0, True):
        with pytest.raises(TargetError, match="top_k must be a whole number from 1, got"):
            tiny(CAT, top_k=wrong)  # type: ignore[arg-type]


def test_a_classifier_has_no_boxes_for_drise(tiny: explain.Explainer) -> None:
    for target in (None, 3):
        with pytest.raises(TargetError) as caught:
            tiny(CAT, "drise(runs=4)", target)
        assert str(caught.value) == (
            "target must be a detected box, explain.targets.Detection, for a method that compares detections, got a "
            "class; drise is for detectors, so take rise"
        )


# What an explanation holds


def test_an_explanation_gives_the_attribution_of_a_method_and_its_values(cat: explain.Explanation) -> None:
    assert list(cat) == cat.methods == ["gradcam", "saliency"]
    assert len(cat) == 2
    assert "saliency" in cat
    assert "lrp" not in cat
    assert cat["saliency"] is cat.results[0]["saliency"]
    assert torch.equal(cat.values, cat["gradcam"].values[0])
    assert torch.equal(cat.heatmap, cat["gradcam"].heatmap[0])
    assert {name: cat[name].values.shape[0] for name in cat} == {"gradcam": 1, "saliency": 1}
    with pytest.raises(explain.errors.MethodError, match="method 'lrp' was not asked for here; known: gradcam, sal"):
        cat["lrp"]


class Negative(nn.Module):
    """A score below zero that a layer's only channel raises."""

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.conv, self.sign = nn.Conv2d(3, 1, 1, bias=False), sign
        nn.init.constant_(self.conv.weight, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sign * self.conv(x).mean((2, 3)) - 9


@pytest.mark.filterwarnings("default:ablationcam divides by the score")
def test_a_negative_score_is_said_to_turn_ablationcam_round() -> None:
    """What the channel shows speaks for the target, and its weight (y - y_k) / y is negative."""
    with pytest.warns(ExplainWarning) as said:
        empty = explain.attribute(Negative(), X, "ablationcam", target=0, layer="conv")
    assert float(empty.score[0]) < 0
    assert not empty.values.any()
    (message,) = [str(each.message) for each in said]
    assert message.startswith("ablationcam is zero everywhere for image 0: the score is negative (-7.5")
    assert "reverses all signs, so that what speaks for the target is left out" in message
    with pytest.warns(ExplainWarning, match=r"ablationcam divides by the score, which is negative for image 0 \(-7.5"):
        signed = explain.attribute(Negative(), X, AblationCAM(relu=False), target=0, layer="conv")
    assert (signed.values < 0).all()
    assert remark(signed) == "negative score: signs reversed"
    with pytest.warns(ExplainWarning, match="so that its positive values speak against the target"):
        against = explain.attribute(Negative(-1.0), X, "ablationcam", target=0, layer="conv")
    assert (against.values > 0).all()
