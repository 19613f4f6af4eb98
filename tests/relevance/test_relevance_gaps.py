"""What no rule covers is told by name, with what it took; or it is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain import ExplainWarning, MethodError
from explain.methods import LRP, DeepLIFT
from tests.conftest import Made, settled
from tests.relevance.test_relevance import random

X = random(1, 2, 3, 2, 2)


def network(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A dense layer, a function of what it gives, and a head of whatever size that takes."""
    width = function(torch.zeros(1, 6).double()).shape[1]
    model = Made(
        lambda net, x: net.head(function(net.first(x.flatten(1)))),
        first=nn.Linear(12, 6),
        head=nn.Linear(width, 3),
    )
    return settled(model).double()


def with_a_view_overwritten(y: torch.Tensor) -> torch.Tensor:
    z = y * 1
    z[:, 1:4].tan_()
    return z


def with_values_set(y: torch.Tensor) -> torch.Tensor:
    z = y * 1
    z[:, 2] = 0.7
    return z


def with_signals_set(y: torch.Tensor) -> torch.Tensor:
    z = torch.zeros_like(y)
    z[:, :2], z[:, 2:] = y[:, 4:], y[:, :4]
    return z


LOSING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "log_softmax": lambda y: F.log_softmax(y, 1),
    "prod": lambda y: y.prod(1, keepdim=True),
    "var": lambda y: y.var(1, keepdim=True),
    "maximum": lambda y: torch.maximum(y, torch.full_like(y, 0.2)),
    "baddbmm": lambda y: torch.baddbmm(y[:, :, None], y[:, :, None], y[:, None, :1]).flatten(1),
    "log": lambda y: y.abs().log_(),
    "addcmul": lambda y: torch.addcmul(y, y, y, value=0.5),
    "reciprocal": lambda y: 1 / y.abs(),
    "tan": with_a_view_overwritten,
}
CONSERVING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fft": lambda y: torch.cat([torch.fft.rfft(y).real, torch.fft.rfft(y).imag.relu()], 1),
    "topk": lambda y: y.topk(3, 1)[0] + y.sort(1)[0][:, :3],
    "normalize": lambda y: F.normalize(y, dim=1),
    "cummax": lambda y: y.cummax(1)[0],
    "signals": lambda y: torch.maximum(y, y.flip(1)) - torch.minimum(y, 2 * y),
    "bilinear": lambda y: F.bilinear(y, y, torch.arange(72.0).reshape(2, 6, 6).to(y) / 9),
    "pad": lambda y: F.pad(y, (0, 2)),
    "pad with a number": lambda y: F.pad(y, (0, 2), value=0.7),
    "set": with_signals_set,
    "set to a number": with_values_set,
    "filled": lambda y: torch.cat([y[:, :2] * 2, (y[:, 2:] * 2).fill_(0.4)], 1),
    "a number to the power": lambda y: torch.pow(2.0, y),
    "strided": lambda y: y.as_strided((len(y), 3), (6, 2)),
}


@pytest.mark.parametrize("name", LOSING)
def test_what_is_lost_is_what_its_formula_says(name: str) -> None:
    """Value times gradient of what an operation gave, less that of what it was given, for LRP-0."""
    function = LOSING[name]
    model = network(function)
    with pytest.warns(ExplainWarning):
        a = explain.attribute(model, X, LRP("Gradient"), target=1)
    y = model.first(X.flatten(1)).detach().requires_grad_()
    result = function(y)
    of_result, of_y = torch.autograd.grad(model.head(result)[:, 1].sum(), [result, y])
    expected = (of_result * result).sum(1) - (of_y * y).sum(1)
    assert torch.allclose(a.coverage.taken[name], expected.detach(), rtol=1e-9, atol=1e-12)
    assert a.coverage.missed == {name: 1}
    assert a.delta.abs().max() <= 1e-9


@pytest.mark.parametrize("name", CONSERVING)
def test_what_loses_nothing_without_a_rule_is_not_named(name: str) -> None:
    a = explain.attribute(network(CONSERVING[name]), X, LRP("Epsilon"), target=1)
    assert a.coverage.missed == {}  # and a warning would be an error here
    assert set(a.coverage.taken) <= {"biases", "stabiliser", "activations"}
    assert a.delta.abs().max() <= 1e-9 * a.values.abs().sum()


class ClassAttention(nn.Module):
    """A class token, the same for all images, asks the tokens of the photo (CaiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.norm = nn.LayerNorm(4)
        self.query = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x.flatten(2).mT], 1)
        tokens = self.norm(tokens)
        query = self.query(tokens[:, 0])
        weights = (tokens @ query[..., None]).softmax(1)
        return self.head(query + (weights * tokens).sum(1))


@pytest.mark.parametrize("rule", ["Epsilon", "AttnLRP"])
def test_a_query_that_no_image_changes_has_shares_of_each_image(rule: str) -> None:
    model = ClassAttention().double().eval()
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    a = explain.attribute(model, x, LRP(rule), target=1)
    assert a.delta.abs().max() <= 1e-9 * a.values.abs().sum()
    for i in range(3):
        alone = explain.attribute(model, x[i : i + 1], LRP(rule), target=1)
        for name, taken in a.coverage.taken.items():
            torch.testing.assert_close(taken[i], alone.coverage.taken[name][0])


@pytest.mark.parametrize("method", [LRP("Epsilon"), LRP("AttnLRP"), DeepLIFT()], ids=str)
def test_steps_inside_a_transform_are_those_outside(method: Any) -> None:
    inside = network(lambda y: torch.vmap(lambda row: row.exp())(y))
    outside = network(lambda y: y.exp())
    a, expected = (explain.attribute(model, X, method, target=1) for model in (inside, outside))
    assert torch.allclose(a.values, expected.values, rtol=1e-12)


@pytest.mark.parametrize("equation", ["nk,nk->nk", "nk,nj->nkj"])
def test_differences_add_up_through_products_in_the_words_of_einsum(equation: str) -> None:
    model = network(lambda y: torch.einsum(equation, y, y.tanh()).flatten(1))
    a = explain.attribute(model, X, DeepLIFT(0.25), target=1)
    difference = (model(X) - model(torch.full_like(X, 0.25)))[:, 1].detach()
    assert torch.allclose(a.values.flatten(1).sum(1), difference, rtol=1e-9, atol=1e-12)


def test_a_softmax_that_is_no_factor_is_accounted_for_where_it_is_held_constant() -> None:
    model = network(lambda y: y.softmax(1) + y)
    a = explain.attribute(model, X, LRP("Epsilon"), target=1)
    taken = model.first(X.flatten(1)).softmax(1) @ model.head.weight[1]
    assert torch.allclose(a.coverage.taken["softmax"], taken.detach(), atol=1e-5)
    assert a.delta.abs().max() <= 1e-12
    far_apart = network(lambda y: (y * 1000).softmax(1) + y)
    a = explain.attribute(far_apart, X, DeepLIFT(), target=1)
    assert a.values.isfinite().all()
    assert a.delta.abs().max() <= 1e-12


def test_the_shares_of_a_softmax_are_logarithmic_means() -> None:
    """Of each difference of x - log(sum(exp(x))), the logarithmic mean; of the logarithm, in
    proportion to these."""
    model = network(lambda y: y.softmax(1))
    a = explain.attribute(model, X, DeepLIFT(), target=1)
    head = model.head.weight[1].detach()
    p = model.first(X.flatten(1)).softmax(1).detach()
    q = model.first.bias.softmax(0).detach()
    means = (p - q) / (p.log() - q.log())
    mixed = (head * means).sum(1, keepdim=True)
    multipliers = head * means - means / means.sum(1, keepdim=True) * mixed
    expected = (multipliers @ model.first.weight.detach()) * X.flatten(1)
    assert torch.allclose(a.values.flatten(1), expected, rtol=1e-6, atol=1e-9)


def standardised(net: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True)).flatten(1)


def branching(net: Any, x: torch.Tensor) -> torch.Tensor:
    return (x.relu() if x.abs().sum() > 0 else x.exp().sigmoid()).flatten(1)


@pytest.mark.parametrize("forward", [standardised, branching])
def test_a_baseline_without_finite_scores_or_that_takes_another_way_is_refused(
    forward: Any,
) -> None:
    with pytest.raises(MethodError, match=r"baseline (of deeplift )?must"):
        explain.attribute(Made(forward), X, DeepLIFT(), target=1)


def test_the_range_of_the_input_is_one_for_all_or_for_each_channel() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2)).double()
    method = LRP("EpsilonBox", low=(0.0, 0.0), high=(1.0, 1.0))
    with pytest.raises(MethodError, match="channels"):
        explain.attribute(model, X, method, target=0)


@pytest.mark.parametrize("method", ["lrp", "deeplift", "fullgrad"])
def test_what_a_model_has_computed_of_its_weights_and_kept_is_a_constant(method: str) -> None:
    """A bias that is computed once, and kept with its graph, as LeViT does in evaluation mode."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        if net.kept is None:
            net.kept = net.bias[[0, 0, 1, 1, 2, 2]] * 2
        return net.head((net.first(x.flatten(1)) + net.kept).relu())

    parts = {"first": nn.Linear(12, 6), "head": nn.Linear(6, 3), "kept": None}
    model = settled(Made(forward, bias=nn.Parameter(torch.ones(3)), **parts)).double()
    first, second = (explain.attribute(model, X, method, target=1) for _ in range(2))
    assert torch.equal(first.values, second.values)
    for a in (first, second):
        assert a.delta.abs().max() <= 1e-9


def half_by_data(y: torch.Tensor) -> torch.Tensor:
    z = y * 1
    z.data = z.data / 2
    return z


def half_in_a_thread(y: torch.Tensor) -> torch.Tensor:
    halves: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: halves.append(y / 2))
    thread.start()
    thread.join()
    return halves[0]


LEAVING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numpy": lambda y: torch.from_numpy(y.detach().numpy() / 2),
    "autograd": half_by_data,
    "thread": half_in_a_thread,
    "item": lambda y: y.new_full(y.shape, y.mean().item()),
    "tolist": lambda y: y.new_tensor(y.tolist()),
}


@pytest.mark.parametrize("method", ["lrp", "guidedbackprop", "deeplift", "fullgrad"])
@pytest.mark.parametrize("word", LEAVING)
@pytest.mark.filterwarnings("ignore:.*misses the difference")
def test_what_leaves_the_recording_beside_a_live_branch_is_named(word: str, method: str) -> None:
    model = network(lambda y: (y + LEAVING[word](y)).relu())
    with pytest.warns(ExplainWarning, match=word):
        explain.attribute(model, X, method, target=1)


def test_a_choice_by_truth_values_and_whole_numbers_loses_nothing() -> None:
    def chosen(y: torch.Tensor) -> torch.Tensor:
        if not bool(y.isfinite().all()):
            return y
        best = int(y.sum(0).argmax())
        return y[:, best:]

    model = network(lambda y: y)
    best = int(model.first(X.flatten(1)).sum(0).argmax())
    weight = model.head.weight
    model.forward = lambda x: chosen(model.first(x.flatten(1))) @ weight[:, best:].T
    values = explain.attribute(model, X, LRP("Gradient"), target=1).values
    inputs = X.clone().requires_grad_()
    score = (model.first(inputs.flatten(1)) @ (weight[1] * (torch.arange(6) >= best))).sum()
    (gradient,) = torch.autograd.grad(score, [inputs])
    assert torch.allclose(values, gradient * X, atol=1e-12)
