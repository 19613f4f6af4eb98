"""How much of the package a warm call runs, as `sys.setprofile` sees it: what a simple call does
not need, it skips."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import explain
from explain.methods.base import get_method
from tests.examples.test_benchmarks import BENCHMARKS
from tests.hooks.test_tour import example


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that prints these counts."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return example("benchmarks/small")


def evaluation(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    given = {"gradcam": explain.attribute(model, x, target=1)}
    return lambda: explain.evaluate(model, x, given, ["pointinggame"], boxes=[[(2, 2, 8, 8)]])


WORKS: dict[str, Callable[[nn.Module, torch.Tensor], Callable[[], object]]] = {
    "gradcam": lambda model, x: lambda: explain.attribute(model, x, "gradcam", target=1),
    "saliency": lambda model, x: lambda: explain.attribute(model, x, "saliency", target=1),
    "integrated gradients": lambda model, x: (
        lambda: explain.attribute(model, x, "integratedgradients(steps=8)", target=1)
    ),
    "a metric of a given map": evaluation,
}


SHORT = [0, 1, 4, 5, 6]
"""The parts of the network without the second convolution."""


def short(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for part in SHORT:
        x = model[part](x)
    return x


def nest(model: nn.Sequential) -> None:
    class Gate(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - super().forward(x)

    model[2] = Gate(model[2])


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "weights in place": lambda model: model[2].weight.data.mul_(-1),
    "another parameter": lambda model: setattr(
        model[0], "weight", nn.Parameter(-model[0].weight.data)
    ),
    "another module": lambda model: model.__setitem__(2, nn.Conv2d(8, 8, 5, padding=2).double()),
    "a module with parts": nest,
    "a hook of the caller's": lambda model: model[1].register_forward_hook(lambda m, a, o: o + 1),
    "a mode": lambda model: model.train(),
    "a forward of its own": lambda model: setattr(model, "forward", MethodType(short, model)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_warm_call_follows_a_model_that_has_changed(small: Any, name: str) -> None:
    model = small.network().double()
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    for _ in range(2):
        assert explain.attribute(model, x, target=1).layer == "3"
    CHANGES[name](model)
    for layer in (None, "1", None):
        warm = explain.attribute(model, x, target=1, layer=layer)
        cold = explain.attribute(copy.deepcopy(model), x, target=1, layer=layer)
        assert warm.layer == cold.layer
        assert_close(warm.values, cold.values)
    if name == "a forward of its own":  # and back: the longer way has another last map
        assert warm.layer == "1"
        del model.forward
        assert explain.attribute(model, x, target=1).layer == "3"


@pytest.mark.parametrize(
    ("work", "calls", "functions", "modules"),
    [
        ("gradcam", 302, 232, 42),
        ("saliency", 193, 156, 34),
        ("integrated gradients", 641, 279, 41),
        ("a metric of a given map", 71, 65, 17),
    ],
)
def test_a_warm_call_runs_little_of_the_package(
    small: Any, work: str, calls: int, functions: int, modules: int
) -> None:
    for number in range(200):  # texts of methods, of which not all are kept
        get_method(f"occlusion(stride={number + 1})")
    run = WORKS[work](small.network(), torch.rand(1, 3, 16, 16))
    run()
    counted = small.counted(run)
    assert 0 < counted.calls <= calls
    assert counted.functions <= functions
    assert counted.modules <= modules
