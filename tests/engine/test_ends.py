"""What a model's outputs are follows from the network's end, and from no photo; scores are told
from features."""

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
from explain.methods import Occlusion
from explain.models import CenterCrop

SIDE = 8
PLAIN = CenterCrop(SIDE, 1.0, (0.0,) * 3, (1.0,) * 3)
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


ENDS: dict[str, tuple[Callable[[Tensor], Tensor], str | None, Callable[[Tensor], Tensor]]] = {
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


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("first", [RED, YELLOW], ids=["red first", "yellow first"])
@pytest.mark.filterwarnings("ignore:.*gives probabilities already")
def test_no_photo_decides_whether_several_labels_may_be_true(end: str, first: Any) -> None:
    last, activation, expected = ENDS[end]
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
    with pytest.warns(explain.ExplainWarning, match="probabilities already"):
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
    x = torch.rand(2, 3, SIDE, SIDE)
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
    with pytest.warns(explain.ExplainWarning, match="class scores"):
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
