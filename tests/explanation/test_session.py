"""A session of an explainer: a question, checked once, asked of batches of inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import explain
from explain.data.boxes import Box
from tests.conftest import ROOT


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    ).eval()


@pytest.fixture
def explainer() -> explain.Explainer:
    torch.manual_seed(0)
    return explain.Explainer(small_cnn(), list("abcde"), size=16, mean=0, std=1)


def test_a_session_gives_what_attribute_and_the_model_give(explainer: explain.Explainer) -> None:
    model = explainer.model
    x = explainer.batch([torch.rand(3, 16, 16).double() for _ in range(3)])
    answers = explainer.session(["gradcam", "saliency"], targets=["b", 3])(x)
    for target, maps in zip((1, 3), answers.results, strict=True):
        expected = explain.attribute(model, x, ["gradcam", "saliency"], target=target)
        for name, attribution in maps.items():
            torch.testing.assert_close(attribution.values, expected[name].values)
    probabilities = model(x).detach().softmax(1)
    torch.testing.assert_close(answers.probabilities, probabilities)
    torch.testing.assert_close(explainer.probabilities(x), probabilities)
    best = [prediction.label for prediction in answers.predictions if prediction is not None]
    assert best == ["abcde"[index] for index in probabilities.argmax(1).tolist()]


def test_a_session_checks_its_arguments_before_there_are_inputs(
    explainer: explain.Explainer,
) -> None:
    with pytest.raises(explain.MethodError, match="gradcamm"):
        explainer.session("gradcamm")
    with pytest.raises(explain.TargetError, match="nonsense"):
        explainer.session(target="nonsense")
    with pytest.raises(explain.ArgumentError, match="layers"):
        explainer.session(layers="0")  # type: ignore[call-arg]


def test_interventions_of_the_explainer_act_in_its_sessions() -> None:
    torch.manual_seed(0)
    model = small_cnn()
    silenced = [explain.hooks.Ablate("0", channels=[0, 2])]
    explainer = explain.Explainer(model, size=16, mean=0, std=1, interventions=silenced)
    x = explainer.batch(torch.rand(2, 3, 16, 16))
    with explain.hooks.intervene(model, silenced):
        expected = model(x).detach().softmax(1)
    torch.testing.assert_close(explainer.probabilities(x), expected)
    torch.testing.assert_close(explainer.session("saliency")(x).probabilities, expected)


def test_a_detectors_boxes_are_in_pixels_of_the_photo() -> None:
    explainer = explain.Explainer("nanodet")
    photo = explainer.read(str(ROOT / "assets" / "coffee.png"))
    seen = Box.whole(photo.size)
    answers = explainer.session("gradcam", top_k=1)(explainer.as_input(photo), [seen])
    in_photo = answers.located[0]
    assert in_photo is not None
    assert answers.predictions == [None]
    box = in_photo.detections[0].box
    assert box is not None
    assert box[2] > explainer.as_input(photo).shape[-1] / 2
    assert next(iter(answers.results_of(0)[0].values())).target == in_photo.names[0]


def test_a_group_of_methods_is_chosen_by_the_inputs(explainer: explain.Explainer) -> None:
    x = explainer.batch(torch.rand(1, 3, 16, 16))
    named = {method.name for method in explainer.session("all").methods_for(x)}
    assert named == set(explain.attribute(explainer.model, x, "all"))
