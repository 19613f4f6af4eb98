"""How much of the package a warm call runs, as `sys.setprofile` sees it: what a simple call does not need, it skips."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import explain

PACKAGE = str(Path(explain.__file__).parent)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()


def functions_called(work: Callable[[], object]) -> list[tuple[str, str]]:
    """The package's functions that a second run calls, by file and name, once for each call."""
    work()
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls.append((code.co_filename, code.co_qualname))

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(previous)
    return calls


def evaluation(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    given = {"gradcam": explain.attribute(model, x, target=1)}
    return lambda: explain.evaluate(model, x, given, ["pointinggame"], boxes=[[(2, 2, 8, 8)]])


WORKS: dict[str, Callable[[nn.Module, torch.Tensor], Callable[[], object]]] = {
    "gradcam": lambda model, x: lambda: explain.attribute(model, x, "gradcam", target=1),
    "saliency": lambda model, x: lambda: explain.attribute(model, x, "saliency", target=1),
    "a metric of a given map": evaluation,
}


@pytest.mark.parametrize(
    ("work", "calls", "functions", "modules"),
    [("gradcam", 420, 290, 41), ("saliency", 290, 215, 34), ("a metric of a given map", 60, 50, 14)],
)
def test_a_warm_call_runs_little_of_the_package(work: str, calls: int, functions: int, modules: int) -> None:
    called = functions_called(WORKS[work](network(), torch.rand(1, 3, 16, 16)))
    assert 0 < len(called) <= calls
    assert len(set(called)) <= functions
    assert len({file for file, _ in called}) <= modules
