"""How much of the package a warm call runs, as `sys.setprofile` sees it: what a simple call does
not need, it skips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import explain
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


@pytest.mark.parametrize(
    ("work", "calls", "functions", "modules"),
    [
        ("gradcam", 410, 280, 41),
        ("saliency", 280, 205, 34),
        ("integrated gradients", 1_120, 390, 42),
        ("a metric of a given map", 60, 50, 14),
    ],
)
def test_a_warm_call_runs_little_of_the_package(
    small: Any, work: str, calls: int, functions: int, modules: int
) -> None:
    run = WORKS[work](small.network(), torch.rand(1, 3, 16, 16))
    run()
    counted = small.counted(run)
    assert 0 < counted.calls <= calls
    assert counted.functions <= functions
    assert counted.modules <= modules
