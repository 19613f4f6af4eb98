"""What a model's outputs are follows from the network's end, and from no photo: they become
probabilities once, and scores are told from features."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ExplainWarning, ModelError, TargetError
from explain.methods import Occlusion
from explain.metrics import Deletion
from explain.models import CenterCrop, Classifier
from tests.conftest import Made, layer_for

SIDE = 8
PLAIN = CenterCrop(SIDE, 1.0, (0.0,) * 3, (1.0,) * 3)
LABELS = ["red", "green", "blue"]
RED = Image.new("RGB", (SIDE, SIDE), (242, 13, 13))  # a sigmoid of its channels adds up to one
YELLOW = Image.new("RGB", (SIDE, SIDE), (242, 242, 13))
BROWN = Image.new("RGB", (SIDE, SIDE), (200, 130, 70))  # no share is a round number
WHOLE = Occlusion(SIDE, SIDE)
Function = Callable[[Tensor], Any]


def scores(x: Tensor) -> Tensor:
    """Scores of red, green and blue, from the means of the channels."""
    return 12 * x.mean((2, 3)) - 6


def of_photo(photo: Image.Image) -> Tensor:
    return scores(PLAIN(photo)[None].double())[0]


def channels(last: Function, classes: int = 3) -> nn.Module:
    """A network that does something with the scores of the colours."""
    return Made(lambda net, x: last(scores(x)[:, :classes]))


def outside_of_torch(s: Tensor) -> Tensor:
    shares = np.exp(s.detach().numpy())
    return torch.from_numpy(shares / shares.sum(1, keepdims=True))


def softmax(s: Tensor) -> Tensor:
    return s.double().softmax(-1)


def in_half(dtype: torch.dtype, back: bool, s: Tensor) -> Tensor:
    shares = (s - s.amax(1, True)).to(dtype).exp()
    shares = shares / shares.sum(1, keepdim=True)
    return shares.float() if back else shares


SOFTMAX: dict[str, Function] = {
    "a softmax": lambda s: F.softmax(s, dim=1),
    "in half precision": lambda s: s.bfloat16().softmax(1),
    "written out": lambda s: (
        (s - s.amax(1, True)).exp() / (s - s.amax(1, True)).exp().sum(1, keepdim=True)
    ),
    **{
        f"written out in half precision, {end}": partial(in_half, dtype, back)
        for end, dtype, back in [
            ("16 bits", torch.float16, False),
            ("brain floats", torch.bfloat16, False),
            ("then single", torch.float16, True),
            ("then single from brain floats", torch.bfloat16, True),
        ]
    },
    "in a dictionary": lambda s: {"logits": s.softmax(1)},
    "a softmax that torch does not see": outside_of_torch,
}
SIGMOID: dict[str, Function] = {
    "in place": lambda s: (s + 0).sigmoid_(),
    "a slice": lambda s: s.sigmoid()[:, None][:, 0],
    "the mean of several": lambda s: torch.stack([s.sigmoid(), 1 - (-s).sigmoid()]).mean(0),
    "a weighted mean": lambda s: 0.3 * s.sigmoid() + 0.7 * (1 - torch.sigmoid(-s)),
    "the exponential of a logarithm": lambda s: F.logsigmoid(s).exp(),
    "written out": lambda s: 1 / (1 + (-s).exp()),
    "written out by its exponential": lambda s: s.exp() / (1 + s.exp()),
    "written out, in half precision": lambda s: (1 / (1 + (-s).half().exp())).float(),
    "written out for each sign": lambda s: torch.where(
        s < 0, s.exp() / (1 + s.exp()), 1 / (1 + (-s).exp())
    ),
    "a hyperbolic tangent": lambda s: (1 + (s / 2).tanh()) / 2,
    "of a constant mask": lambda s: s.sigmoid() * torch.ones(s.shape[1]),
    "two softmaxes of two": lambda s: torch.stack([0 * s, s], 2).softmax(2)[:, :, 1],
}
SCORES: dict[str, Function] = {
    "scores": lambda s: s,
    "a log-softmax": nn.LogSoftmax(1),
    "small scores": lambda s: 0.01 * s + 0.4,
    "a gate": lambda s: s.sigmoid() * (0.2 * s).abs().clamp(max=1),
    "a score of a sigmoid": lambda s: 2 * s.sigmoid() - 1,
    "a score of a distance": lambda s: (-(s**2)).exp(),
    "a share of the largest": lambda s: s.sigmoid() / s.sigmoid().amax(1, True),
    "percent": lambda s: 100 * s.sigmoid(),
    "whole numbers that add up to one": lambda s: (s == s.amax(1, keepdim=True)) * 1.0 + 0 * s,
    "whole numbers": lambda s: s.round().long(),
}
SAID: dict[str, tuple[Function, Any, Function]] = {
    "a sigmoid, said to be probabilities": (torch.sigmoid, "none", torch.sigmoid),
    "a sigmoid, said to be one": (torch.sigmoid, "sigmoid", torch.sigmoid),
    "scores, said to be of a sigmoid": (lambda s: s, "sigmoid", torch.sigmoid),
    "a softmax, said to be one": (lambda s: s.softmax(1), "softmax", softmax),
    "the logarithm of a sigmoid": (F.logsigmoid, None, torch.sigmoid),
    "the same, written out": (lambda s: -F.softplus(-s), None, torch.sigmoid),
}
PROBABILITIES = {
    **{name: (last, None, softmax) for name, last in SOFTMAX.items()},
    **{name: (last, None, torch.sigmoid) for name, last in SIGMOID.items()},
}
ENDS = PROBABILITIES | SAID
ENDS |= {name: (last, None, lambda s, last=last: softmax(last(s))) for name, last in SCORES.items()}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "first", [RED, YELLOW, BROWN], ids=["red first", "yellow first", "brown first"]
)
def test_outputs_become_probabilities_once_whichever_photo_comes_first(
    end: str, first: Image.Image
) -> None:
    last, activation, expected = ENDS[end]
    explainer = explain.Explainer(channels(last), LABELS, PLAIN, activation=activation)
    photos = [first, RED, YELLOW]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method = WHOLE if "whole" in end or "see" in end else "saliency"
        explanations = explainer(photos, method, 0)
    said = sum("probabilities already" in str(warning.message) for warning in caught)
    assert said == (end in PROBABILITIES)
    off = 4e-3 if "half" in end else 1e-5
    for photo, explanation in zip(photos, explanations, strict=True):
        probabilities = expected(scores(PLAIN(photo)[None].double()))[0].double()
        assert_close(explanation.probabilities.double(), probabilities, rtol=0, atol=off)
        best = probabilities.argsort(descending=True, stable=True).tolist()
        if expected is torch.sigmoid:
            best = [i for i in best if probabilities[i] >= 0.5]
        shown = [(LABELS[i], pytest.approx(float(probabilities[i]), abs=off)) for i in best]
        assert explanation.predictions == shown


def exported(model: nn.Module, x: Tensor) -> nn.Module:
    return torch.export.export(model, (x,)).module()


PROGRAMS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "traced": torch.jit.trace,
    "exported": exported,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("end", ["a slice", "written out"])
def test_programs_without_modules_say_what_their_outputs_are(program: Any, end: str) -> None:
    x = PLAIN(YELLOW)[None]
    model = program(channels(SIGMOID[end]), x)
    method = Occlusion(SIDE, SIDE, score="probability")
    values = explain.attribute(model, x, method, target=0).values
    change = scores(x).sigmoid() - torch.tensor(-6.0).sigmoid()
    assert_close(values[:, 0, 0], change[:, 0])


@pytest.mark.parametrize("last", [F.softmax, SOFTMAX["written out"]], ids=["called", "written"])
def test_some_classes_of_a_softmax_are_probabilities(last: Any) -> None:
    model = channels(lambda s: (last(s, 1) if last is F.softmax else last(s))[:, :2])
    with pytest.warns(ExplainWarning, match="probabilities already"):
        shown = explain.Explainer(model, LABELS[:2], PLAIN)(RED, "saliency", 0)
    assert_close(shown.probabilities.double(), of_photo(RED).softmax(0)[:2], rtol=0, atol=1e-6)


def test_yes_and_no_of_one_sigmoid_are_two_classes() -> None:
    model = channels(lambda s: torch.stack([1 - s[:, 0].sigmoid(), s[:, 0].sigmoid()], 1))
    with pytest.warns(ExplainWarning, match="probabilities already"):
        shown = explain.Explainer(model, ["no", "yes"], PLAIN)(RED, "saliency", 1)
    yes = float(of_photo(RED)[0].sigmoid())
    assert shown.predictions == [
        ("yes", pytest.approx(yes, abs=1e-5)),
        ("no", pytest.approx(1 - yes, abs=1e-5)),
    ]


def test_a_number_in_a_part_of_the_range_of_a_probability_is_a_number() -> None:
    disparity = channels(lambda s: 0.3 * s.sigmoid(), 1)
    shown = explain.Explainer(disparity, preprocess=PLAIN)(RED, "saliency", 0)
    expected = 0.3 * float(of_photo(RED)[0].sigmoid())
    assert shown.predictions == [("number", pytest.approx(expected, abs=1e-5))]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("last", "activation"),
    [(lambda s: s, "sigmoid"), (torch.sigmoid, "none"), (lambda s: s.sigmoid()[:, 0], "none")],
    ids=["score", "p", "flat"],
)
def test_one_output_says_yes_or_no(last: Function, activation: Any, sign: int) -> None:
    model = channels(lambda s: last(sign * s), 1)
    yes = float((sign * of_photo(RED)[0]).sigmoid())
    for labels, words in ((None, ("yes", "no")), (["cat"], ("cat", "not cat"))):
        explainer = explain.Explainer(model, labels, PLAIN, activation=activation)
        shown = explainer(RED, "saliency", 0)
        expected = sorted(zip((yes, 1 - yes), words, strict=True), reverse=True)
        assert shown.predictions == [(label, pytest.approx(p, abs=1e-5)) for p, label in expected]
        assert shown.targets == [words[0]]
        assert explainer(RED, "saliency", "no").targets == [words[1]]


def test_one_output_between_0_and_1_is_a_probability_where_a_sigmoid_gave_it() -> None:
    small = channels(lambda s: 0.3 + 1e-3 * s.tanh(), 1)
    shown = explain.Explainer(small, preprocess=PLAIN)(RED, WHOLE, 0)
    assert shown.probabilities is None
    assert shown.predictions == [("number", pytest.approx(0.3, abs=1e-3))]
    with pytest.warns(ExplainWarning, match="probabilities already"):
        shown = explain.Explainer(channels(nn.Sigmoid(), 1), preprocess=PLAIN)(RED, "saliency", 0)
    assert float(shown.probabilities[0]) == pytest.approx(float(of_photo(RED)[0].sigmoid()))


def test_a_caller_or_a_classifier_says_what_outputs_are() -> None:
    model = channels(lambda s: s)
    shown = explain.Explainer(model, LABELS, PLAIN, activation="none")(RED, "saliency")
    assert shown.predictions == []
    assert shown.probabilities is None
    classifier = Classifier(model, PLAIN, LABELS, activation="sigmoid")
    shown = explain.Explainer(classifier)(RED, "saliency")
    assert_close(shown.probabilities.double(), of_photo(RED).sigmoid(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("wrong", ["softmx", 1, True])
def test_an_unknown_activation_is_refused(wrong: Any) -> None:
    model = channels(lambda s: s)
    with pytest.raises(ModelError, match="activation"):
        explain.Explainer(model, LABELS, PLAIN, activation=wrong)
    with pytest.raises(ModelError, match="activation"):
        explain.attribute(model, torch.rand(1, 3, SIDE, SIDE), "saliency", activation=wrong)
    single = explain.Explainer(channels(lambda s: s, 1), preprocess=PLAIN, activation="softmax")
    with pytest.raises(ModelError, match="activation"):
        single(RED, "saliency", 0)


@pytest.mark.parametrize(
    ("last", "classes", "activation", "expected"),
    [
        (lambda s: s, 3, None, softmax),
        (nn.Softmax(1), 3, None, softmax),
        (nn.Sigmoid(), 3, None, torch.sigmoid),
        (lambda s: s, 3, "sigmoid", torch.sigmoid),
        (lambda s: s, 1, "sigmoid", torch.sigmoid),
        (nn.Sigmoid(), 1, None, torch.sigmoid),
    ],
)
def test_methods_and_metrics_read_the_same_probability(
    last: Function, classes: int, activation: Any, expected: Function
) -> None:
    def probability(x: Tensor) -> Tensor:
        return expected(scores(x)[:, :classes])[:, 0]

    model = channels(last, classes)
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options = {"target": 0, "activation": activation}
    method = Occlusion(window=4, stride=4, score="probability")
    values = explain.attribute(model, x, method, **options).values
    covered = x.clone()
    covered[..., 4:, :4] = 0
    assert_close(values[:, 4, 0], probability(x) - probability(covered))
    if classes == 1:
        with pytest.raises(TargetError, match="score='logit'"):
            explain.evaluate(model, x, "saliency", "deletion", target=0)
        return
    ranks = torch.arange(64.0).reshape(1, 8, 8)
    table = explain.evaluate(model, x, {"map": ranks}, Deletion(steps=4), **options)
    kept = [torch.where(ranks[:, None] < 64 - count, x, 0.0) for count in (0, 16, 32, 48, 64)]
    curve = table.curve("map", "deletion")[1][0]
    assert_close(curve.double(), probability(torch.cat(kept)), rtol=0, atol=1e-6)


@dataclass
class Result:
    a: Tensor
    b: Tensor


def heads(give: Callable[[Tensor, Tensor, Tensor], Any]) -> nn.Module:
    """Features, scores that come from them, and another head, of which ``give`` returns some."""

    def forward(net: Any, x: Tensor) -> Any:
        features = net.features(net.conv(x).relu().mean((2, 3)))
        return give(features, net.scores(features), net.other(features))

    torch.manual_seed(0)
    layers = {"features": nn.Linear(5, 6), "scores": nn.Linear(6, 4), "other": nn.Linear(6, 3)}
    return Made(forward, conv=nn.Conv2d(3, 5, 3), **layers).eval()


RETURNED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
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


@pytest.mark.parametrize("give", RETURNED.values(), ids=RETURNED)
def test_features_are_not_explained_as_classes(give: Any) -> None:
    x = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    plain = heads(lambda f, s, o: s)
    # with a graph, with a part of it, without
    for method in ("saliency", "gradcam", Occlusion(4, 4, score="probability")):
        a, expected = (
            explain.attribute(model, x, method, target=[1, 3], layer=layer_for(method, "conv"))
            for model in (heads(give), plain)
        )
        assert_close(a.score, plain(x)[[0, 1], [1, 3]].detach())
        assert_close(a.values, expected.values)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("freeze", [False, True])
def test_features_of_a_traced_program_are_not_explained_as_classes(freeze: bool) -> None:
    x = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    model = heads(lambda f, s, o: (f, s))
    program = torch.jit.trace(model, x)
    if freeze:
        program = torch.jit.freeze(program)  # without a mode
    a = explain.attribute(program, x, Occlusion(4, 4), target=[1, 3])
    assert_close(a.score, model(x)[1][[0, 1], [1, 3]].detach())


def test_where_nothing_tells_features_from_scores_it_is_said() -> None:
    def hidden(tensor: Tensor) -> Tensor:
        return torch.from_numpy(tensor.detach().numpy().copy())

    model = heads(lambda f, s, o: (hidden(f), hidden(s)))
    x = torch.rand(2, 3, SIDE, SIDE)
    with pytest.warns(ExplainWarning, match="class scores"):
        explain.attribute(model, x, WHOLE, target=1)
    # the caller's own choice
    a = explain.attribute(model, x, WHOLE, target=lambda output: output[1][:, 1])
    named = heads(lambda f, s, o: {"f": hidden(f), "logits": hidden(s)})
    for score in (a.score, explain.attribute(named, x, WHOLE, target=1).score):
        assert_close(score, model(x)[1][:, 1])


def test_of_several_heads_the_labels_say_which_is_explained() -> None:
    model = heads(lambda f, s, o: (s, o))
    shown = explain.Explainer(model, ["a", "b", "c"], PLAIN)(RED, "saliency")
    assert_close(shown.probabilities, model(PLAIN(RED)[None])[1][0].softmax(0).detach())


@pytest.mark.parametrize(
    ("problem", "end"),
    [("multi_label_classification", torch.sigmoid), ("regression", lambda s: s)],
)
def test_a_configuration_of_transformers_says_what_outputs_are(problem: str, end: Function) -> None:
    model = channels(lambda s: s)
    model.config = SimpleNamespace(problem_type=problem)  # type: ignore[assignment]
    x = PLAIN(YELLOW)[None]
    method = Occlusion(SIDE, SIDE, score="probability")
    values = explain.attribute(model, x, method, target=0).values
    change = end(scores(x)) - end(torch.tensor(-6.0))
    assert_close(values[:, 0, 0], change[:, 0])
