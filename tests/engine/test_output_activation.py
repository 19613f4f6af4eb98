"""What a model's outputs are follows from the network's end, and from no photo: they become
probabilities once, and scores are told from features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

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
        self, last: Callable[[Tensor], Tensor] = lambda scores: scores, classes: int = 4
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.head = nn.Linear(3 * SIDE * SIDE, classes)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(self.head.weight.shape, generator=generator) * 0.3)
            self.head.bias.copy_(torch.randn(classes, generator=generator))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(x.flatten(1)))


def scores(model: nn.Module) -> Tensor:
    x = PLAIN(PHOTO)[None].double()
    weight, bias = (p.detach().double() for p in model.parameters())
    return (x.flatten(1) @ weight.T + bias)[0]


SOFTMAX = {
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
    "in place": lambda s: (s + 0).sigmoid_(),
    "a slice": lambda s: s.sigmoid()[:, None][:, 0],
    "the mean of several": lambda s: torch.stack([s.sigmoid(), 1 - (-s).sigmoid()]).mean(0),
    "a weighted mean": lambda s: 0.3 * s.sigmoid() + 0.7 * (1 - torch.sigmoid(-s)),
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


ENDS: dict[str, tuple[Any, int, str | None, Callable[[Tensor], Tensor]]] = {
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
    ) -> tuple[nn.Module, Tensor, dict[str, Any], Callable[[Tensor], Tensor]]:
        last, classes, activation, expected = ENDS[end]
        model = Scores(last, classes).double()

        def probability(x: Tensor) -> Tensor:
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


RED = (242, 13, 13)  # a sigmoid of its channels adds up to one
YELLOW = (242, 242, 13)


class Channels(nn.Module):
    """Scores of red, green and blue, from the means of the channels; and what becomes of them."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(12 * x.mean((2, 3)) - 6)


def one_colour(colour: tuple[int, int, int]) -> Image.Image:
    return Image.new("RGB", (SIDE, SIDE), colour)


CHANNEL_ENDS: dict[
    str, tuple[Callable[[Tensor], Tensor], str | None, Callable[[Tensor], Tensor]]
] = {
    "a sigmoid": (torch.sigmoid, None, torch.sigmoid),
    "a sigmoid, said to be probabilities": (torch.sigmoid, "none", torch.sigmoid),
    "a sigmoid, said to be one": (torch.sigmoid, "sigmoid", torch.sigmoid),
    "scores, said to be of a sigmoid": (lambda s: s, "sigmoid", torch.sigmoid),
    "the logarithm of a sigmoid": (F.logsigmoid, None, torch.sigmoid),
    "scores": (lambda s: s, None, lambda s: s.softmax(1)),
    "a softmax": (lambda s: s.softmax(1), None, lambda s: s.softmax(1)),
    "a softmax, said to be one": (lambda s: s.softmax(1), "softmax", lambda s: s.softmax(1)),
    "a softmax with a temperature": (
        lambda s: (s / 3).softmax(1),
        None,
        lambda s: (s / 3).softmax(1),
    ),
}


@pytest.mark.parametrize("end", CHANNEL_ENDS)
@pytest.mark.parametrize("first", [RED, YELLOW], ids=["red first", "yellow first"])
@pytest.mark.filterwarnings("ignore:.*gives probabilities already")
def test_no_photo_decides_whether_several_labels_may_be_true(end: str, first: Any) -> None:
    last, activation, expected = CHANNEL_ENDS[end]
    explainer = explain.Explainer(
        Channels(last), ["red", "green", "blue"], PLAIN, activation=activation
    )  # type: ignore[arg-type]
    photos = [one_colour(first), one_colour(RED), one_colour(YELLOW)]
    for photo, explanation in zip(photos, explainer(photos, "saliency", 0), strict=True):
        scores = 12 * PLAIN(photo)[None].double().mean((2, 3)) - 6
        probabilities = expected(scores)[0]
        torch.testing.assert_close(
            explanation.probabilities.double(), probabilities, rtol=0, atol=1e-5
        )
        best = probabilities.argsort(descending=True).tolist()
        if expected is torch.sigmoid:
            best = [i for i in best if probabilities[i] >= 0.5]
        assert [label for label, _ in explanation.predictions] == [
            ["red", "green", "blue"][i] for i in best
        ]


def outside_of_torch(scores: Tensor) -> Tensor:
    shares = np.exp(scores.detach().numpy())
    return torch.from_numpy(shares / shares.sum(1, keepdims=True))


def test_a_softmax_that_torch_does_not_see_is_not_applied_again() -> None:
    with pytest.warns(ExplainWarning, match="probabilities already"):
        found = explain.Explainer(Channels(outside_of_torch), preprocess=PLAIN)(
            one_colour(YELLOW), Occlusion(4, 4)
        )
    scores = 12 * PLAIN(one_colour(YELLOW)).double().mean((1, 2)) - 6
    torch.testing.assert_close(found.probabilities.double(), scores.softmax(0), rtol=0, atol=1e-5)


@dataclass
class Result:
    a: Tensor
    b: Tensor


class Heads(nn.Module):
    """Features, scores that come from them, and another head; ``give`` chooses what is returned."""

    def __init__(self, give: Callable[[Tensor, Tensor, Tensor], Any], width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 3)
        self.features = nn.Linear(5, width)
        self.scores = nn.Linear(width, 4)
        self.other = nn.Linear(width, 3)
        self.give = give

    def forward(self, x: Tensor) -> Any:
        f = self.features(self.conv(x).relu().mean((2, 3)))
        return self.give(f, self.scores(f), self.other(f))


GIVEN: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "features first": lambda f, s, o: (f, s),
    "features last": lambda f, s, o: (s, f),
    "a dictionary": lambda f, s, o: {"a": f, "b": s},
    "a dataclass": lambda f, s, o: Result(f, s),
    "features of length one": lambda f, s, o: [F.normalize(f), s],
    "features of as many columns": lambda f, s, o: (f[:, :4], s),
    "scores and their softmax": lambda f, s, o: (s, s.softmax(1), f),
    "named scores": lambda f, s, o: {"a": o, "logits": s},
    "two heads": lambda f, s, o: (s, o),
}


@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN)
def test_features_are_not_explained_as_classes(give: Any) -> None:
    x = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    heads = Heads(give).eval()
    plain = Heads(lambda f, s, o: s).eval()
    for method in (
        "saliency",
        "gradcam",
        Occlusion(4, 4, score="probability"),
    ):  # with a graph, with a part of it, without
        a, expected = (
            explain.attribute(model, x, method, target=[1, 3], layer="conv")
            for model in (heads, plain)
        )
        torch.testing.assert_close(a.score, plain(x)[[0, 1], [1, 3]].detach())
        torch.testing.assert_close(a.values, expected.values)


def test_where_nothing_tells_features_from_scores_it_is_said() -> None:
    def hidden(*tensors: Tensor) -> Any:
        return tuple(torch.from_numpy(t.detach().numpy().copy()) for t in tensors)

    model = Heads(lambda f, s, o: hidden(f, s)).eval()
    x = torch.rand(2, 3, SIDE, SIDE)
    with pytest.warns(ExplainWarning, match="class scores"):
        explain.attribute(model, x, Occlusion(4, 4), target=1)
    # the caller's own choice
    a = explain.attribute(model, x, Occlusion(4, 4), target=lambda output: output[1][:, 1])
    torch.testing.assert_close(a.score, model(x)[1][:, 1])
    named = Heads(lambda f, s, o: dict(zip(("f", "logits"), hidden(f, s), strict=True))).eval()
    torch.testing.assert_close(
        explain.attribute(named, x, Occlusion(4, 4), target=1).score, model(x)[1][:, 1]
    )


def test_of_several_heads_the_labels_say_which_is_explained() -> None:
    model = Heads(lambda f, s, o: (s, o)).eval()
    found = explain.Explainer(model, ["a", "b", "c"], PLAIN)(one_colour(RED), "saliency")
    scores = model(PLAIN(one_colour(RED))[None])[1][0]
    torch.testing.assert_close(found.probabilities, scores.softmax(0).detach())


@pytest.mark.parametrize(
    ("problem", "end"),
    [("multi_label_classification", torch.sigmoid), ("regression", lambda s: s)],
)
def test_a_configuration_of_transformers_says_what_outputs_are(
    problem: str, end: Callable[[Tensor], Tensor]
) -> None:
    x = PLAIN(one_colour(YELLOW))[None]
    model = Channels(lambda s: s)
    model.config = SimpleNamespace(problem_type=problem)  # type: ignore[assignment]
    method = Occlusion(SIDE, SIDE, score="probability")
    values = explain.attribute(model, x, method, target=0).values
    change = end(12 * x.mean((2, 3)) - 6) - end(torch.tensor(-6.0))
    torch.testing.assert_close(values[:, 0, 0], change[:, 0])
