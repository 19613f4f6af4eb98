"""Outputs become probabilities once: of models with a softmax or sigmoid at their end, and of those
without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import explain
from explain import ExplainWarning, ModelError, TargetError
from explain.methods import RISE, Occlusion
from explain.metrics import AverageDrop, Deletion
from explain.models import CenterCrop, Classifier

SIDE = 8
PLAIN = CenterCrop(SIDE, 1.0, (0.0,) * 3, (1.0,) * 3)
LABELS = ["red", "green", "blue", "grey"]
PHOTO = Image.new("RGB", (SIDE, SIDE), (230, 120, 40))


class Scores(nn.Module):
    """Scores of four colours, and what becomes of them."""

    def __init__(
        self, last: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores, classes: int = 4
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.head = nn.Linear(3 * SIDE * SIDE, classes)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(self.head.weight.shape, generator=generator) * 0.3)
            self.head.bias.copy_(torch.randn(classes, generator=generator))
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.head(x.flatten(1)))


def scores(model: nn.Module) -> torch.Tensor:
    x = PLAIN(PHOTO)[None].double()
    weight, bias = (p.detach().double() for p in model.parameters())
    return (x.flatten(1) @ weight.T + bias)[0]


SOFTMAX = {
    "a last module": nn.Softmax(1),
    "a function": lambda s: F.softmax(s, dim=1),
    "a method, in half precision": lambda s: s.bfloat16().softmax(1),
    "written out": lambda s: (
        (s - s.amax(1, keepdim=True)).exp() / (s - s.amax(1, keepdim=True)).exp().sum(1)[:, None]
    ),
    "in a dictionary": lambda s: {"logits": s.softmax(1)},
}


@pytest.mark.parametrize("last", SOFTMAX.values(), ids=SOFTMAX)
def test_a_softmax_at_the_end_is_not_applied_again(last: Any) -> None:
    model = Scores(last)
    explainer = explain.Explainer(model, LABELS, PLAIN)
    with pytest.warns(ExplainWarning, match="probabilities"):
        found = explainer(PHOTO, "saliency")
    expected = scores(model).softmax(0)
    torch.testing.assert_close(found.probabilities.double(), expected, rtol=0, atol=4e-3)
    best = expected.argsort(descending=True).tolist()
    assert [label for label, _ in found.predictions] == [LABELS[i] for i in best]
    assert found.record()["activation"] == explainer.activation == "none"
    explainer(PHOTO, "saliency")  # it is said once


SCORES = {
    "logits": lambda s: s,
    "a log-softmax": nn.LogSoftmax(1),
    "small logits": lambda s: 0.01 * s + 0.4,
    "a gate": lambda s: s.sigmoid() * (0.2 * s).abs().clamp(max=1),
    "a score of a sigmoid": lambda s: 2 * s.sigmoid() - 1,
    "percent": lambda s: 100 * s.sigmoid(),
    "whole numbers that add up to one": lambda s: (s == s.amax(1, keepdim=True)) * 1.0 + 0 * s,
    "whole numbers": lambda s: (3 * s).round().long(),
}


@pytest.mark.parametrize("last", SCORES.values(), ids=SCORES)
@pytest.mark.filterwarnings("ignore:.*zero everywhere")  # whole numbers may stay as they are
def test_scores_get_one_softmax(last: Any) -> None:
    model = Scores(last)
    found = explain.Explainer(model, LABELS, PLAIN)(PHOTO, Occlusion(window=4, stride=4))
    expected = last(scores(model)[None])[0].double().softmax(0)
    torch.testing.assert_close(found.probabilities.double(), expected, rtol=0, atol=1e-6)
    assert found.record()["activation"] == "softmax"


SIGMOID = {
    "a last module": nn.Sigmoid(),
    "in place": lambda s: (s + 0).sigmoid_(),
    "a slice": lambda s: s.sigmoid()[:, None][:, 0],
    "the mean of several": lambda s: torch.stack([s.sigmoid(), 1 - (-s).sigmoid()]).mean(0),
    "a weighted mean": lambda s: 0.3 * s.sigmoid() + 0.7 * (1 - torch.sigmoid(-s)),
    "half of a sum": lambda s: (s.sigmoid() + s.sigmoid()) / 2,
    "the exponential of a logarithm": lambda s: F.logsigmoid(s).exp(),
    "two softmaxes of two": lambda s: torch.stack([0 * s, s], 2).softmax(2)[:, :, 1],
}


@pytest.mark.parametrize("last", SIGMOID.values(), ids=SIGMOID)
def test_several_labels_may_be_true_of_a_photo(last: Any) -> None:
    model = Scores(last)
    with pytest.warns(ExplainWarning, match="probabilities"):
        found = explain.Explainer(model, LABELS, PLAIN)(PHOTO, "saliency")
    expected = scores(model).sigmoid()
    torch.testing.assert_close(found.probabilities.double(), expected, rtol=0, atol=1e-6)
    above = sorted(
        ((float(p), LABELS[i]) for i, p in enumerate(expected) if p >= 0.5), reverse=True
    )
    assert 1 < len(above) < 4
    assert found.predictions == [(label, pytest.approx(p, abs=1e-6)) for p, label in above]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "last", [lambda s: s, torch.sigmoid, lambda s: s.sigmoid()[:, 0]], ids=["score", "p", "flat"]
)
def test_one_output_says_yes_or_no(last: Any, sign: int) -> None:
    model = Scores(lambda s: last(sign * s), classes=1)
    explainer = explain.Explainer(
        model, preprocess=PLAIN, activation="sigmoid" if last(torch.tensor([[9.0]])) > 1 else "none"
    )
    found = explainer(PHOTO, "saliency", 0)
    yes = float((sign * scores(model)).sigmoid())
    expected = sorted([(yes, "yes"), (1 - yes, "no")], reverse=True)
    assert found.predictions == [(label, pytest.approx(p, abs=1e-5)) for p, label in expected]
    assert found.targets == ["yes"]
    named = explain.Explainer(model, ["cat"], PLAIN, activation=explainer.activation)(
        PHOTO, "saliency", 0
    )
    assert {label for label, _ in named.predictions} == {"cat", "not cat"}
    for target in ("no", "not cat"):
        named = explain.Explainer(model, ["cat"], PLAIN, activation=explainer.activation)(
            PHOTO, "saliency", target
        )
        assert named.targets == ["not cat"]


def test_one_output_between_0_and_1_is_a_probability_where_a_sigmoid_gave_it() -> None:
    small = Scores(lambda s: 0.3 + 1e-3 * s.tanh(), classes=1)
    found = explain.Explainer(small, preprocess=PLAIN)(PHOTO, Occlusion(window=4), 0)
    assert found.probabilities is None
    assert found.predictions == [("number", pytest.approx(0.3, abs=1e-3))]
    with pytest.warns(ExplainWarning, match="probabilities already"):
        found = explain.Explainer(Scores(nn.Sigmoid(), classes=1), preprocess=PLAIN)(
            PHOTO, "saliency", 0
        )
    assert float(found.probabilities[0]) == pytest.approx(
        float(scores(Scores(classes=1)).sigmoid())
    )


def test_outputs_that_are_no_probabilities_give_no_predictions() -> None:
    found = explain.Explainer(Scores(), LABELS, PLAIN, activation="none")(PHOTO, "saliency")
    assert found.predictions == []
    assert found.probabilities is None


@pytest.mark.parametrize("wrong", ["softmx", 1, True])
def test_an_unknown_activation_is_refused(wrong: Any) -> None:
    with pytest.raises(ModelError, match="activation"):
        explain.Explainer(Scores(), LABELS, PLAIN, activation=wrong)
    with pytest.raises(ModelError, match="activation"):
        explain.attribute(Scores(), torch.rand(1, 3, SIDE, SIDE), "saliency", activation=wrong)
    with pytest.raises(ModelError, match="activation"):  # one output has no softmax
        explain.Explainer(Scores(classes=1), preprocess=PLAIN, activation="softmax")(
            PHOTO, "saliency", 0
        )


ENDS: dict[str, tuple[Any, int, str | None, Callable[[torch.Tensor], torch.Tensor]]] = {
    "scores": (lambda s: s, 4, None, lambda s: s.softmax(1)),
    "softmax": (nn.Softmax(1), 4, None, lambda s: s.softmax(1)),
    "sigmoid": (nn.Sigmoid(), 4, None, torch.sigmoid),
    "scores of labels": (lambda s: s, 4, "sigmoid", torch.sigmoid),
    "one score": (lambda s: s, 1, "sigmoid", torch.sigmoid),
    "one probability": (nn.Sigmoid(), 1, None, torch.sigmoid),
}


@pytest.mark.parametrize("end", ENDS)
class TestEverythingReadsTheSameProbability:
    """What a method, a metric or a curve calls a probability is that of the end of the network,
    computed by hand."""

    def given(
        self, end: str
    ) -> tuple[nn.Module, torch.Tensor, dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]:
        last, classes, activation, expected = ENDS[end]
        model = Scores(last, classes).double()

        def probability(x: torch.Tensor) -> torch.Tensor:
            return expected(model.head(x.flatten(1)))[:, 0].detach()

        x = PLAIN(PHOTO)[None].double()
        return model, x, {} if activation is None else {"activation": activation}, probability

    def test_methods(self, end: str) -> None:
        model, x, options, probability = self.given(end)
        a = explain.attribute(
            model, x, Occlusion(window=4, stride=4, score="probability"), target=0, **options
        )
        for row in (0, 4):
            for column in (0, 4):
                covered = x.clone()
                covered[..., row : row + 4, column : column + 4] = 0
                torch.testing.assert_close(
                    a.values[:, row, column], probability(x) - probability(covered)
                )
        rise = explain.attribute(model, x, RISE(samples=64, grid=2), target=0, **options)
        assert float(rise.neutral) < 1

    def test_metrics(self, end: str) -> None:
        model, x, options, probability = self.given(end)
        if ENDS[end][1] == 1:
            with pytest.raises(TargetError, match="score='logit'"):
                explain.evaluate(model, x, "saliency", "deletion", target=0)
            return
        values = torch.arange(64.0).reshape(1, 8, 8)
        table = explain.evaluate(
            model, x, {"map": values}, [Deletion(steps=4), AverageDrop()], target=0, **options
        )
        expected = []
        for count in (0, 16, 32, 48, 64):
            covered = torch.where(values[:, None] < 64 - count, x, 0.0)
            expected.append(probability(covered))
        found = table.curve("map", "deletion")[1][0]
        torch.testing.assert_close(found.double(), torch.cat(expected), rtol=0, atol=1e-6)
        seen = probability(x * values[:, None] / 63)
        drop = ((probability(x) - seen).clamp(min=0) / probability(x)).double()
        torch.testing.assert_close(table["map"]["averagedrop"].double(), drop, rtol=0, atol=1e-6)


def test_a_classifier_may_say_what_its_outputs_are() -> None:
    model = Scores()
    own = Classifier(model, PLAIN, LABELS, activation="sigmoid")
    found = explain.Explainer(own)(PHOTO, "saliency")
    torch.testing.assert_close(
        found.probabilities.double(), scores(model).sigmoid(), rtol=0, atol=1e-6
    )
