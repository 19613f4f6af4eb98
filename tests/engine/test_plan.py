"""What a plan promises: together never costs more than apart, the counts are true, and a newcomer
can read them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import explain
from explain.engine import Attributions
from explain.engine.perturbations import Scores
from explain.methods import AblationCAM, Augmented, IntegratedGradients, Smooth
from explain.methods.base import get_method
from tests.conftest import ATTENDING, COVERING, TinyNet, settled

METHODS = [name for name in explain.list_methods() if name not in ATTENDING | COVERING]
RERUNNING = [
    n
    for n in METHODS
    if any(isinstance(need, (Scores, Attributions)) for need in get_method(n).needs)
]
ONE_PASS = [name for name in METHODS if name not in RERUNNING]
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
NESTED = "smooth(integratedgradients)"


FORWARD = {torch.ops.aten.convolution.default, torch.ops.aten.addmm.default}
BACKWARD = {torch.ops.aten.convolution_backward.default, torch.ops.aten.threshold_backward.default}


class Work(TorchDispatchMode):
    """Counts rows of the network's operations, forward, forward with a graph, and backward: in
    each, how far it goes.

    A convolution counts with the number of its output channels, which tells the layers of a network
    apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in FORWARD:
            first = args[1] if func is torch.ops.aten.addmm.default else args[0]
            kind = f"{func} of {tuple(first.shape[1:])} to {tuple(result.shape[1:])}"
            self.rows[kind] += len(first)
            self.rows[f"{kind}, recorded"] += len(first) * torch.is_grad_enabled()
        elif func in BACKWARD:
            self.rows[f"{func} of {tuple(args[1].shape[1:])}"] += len(args[1])
        return result


@cache
def net() -> nn.Module:
    model = settled(TinyNet()).double().eval()
    with torch.no_grad():
        model.layer2[1].bias.add_(4.0)  # no map is constant, so all of them have rows
    explain.attribute(model, X, ["gradcam", "refinecam"], target=1)  # finds the layers
    return model


@cache
def worked(*methods: str) -> tuple[Counter[str], dict[str, explain.Attribution]]:
    model = net()
    explain.attribute(model, X, methods, target=1)  # probes batches of these sizes, once for all
    with Work() as work:
        attributions = explain.attribute(model, X, methods, target=1)
    return work.rows, attributions


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *pairwise(ONE_PASS),
        *combinations(["scorecam", "iscam", "ablationcam"], 2),
        ("smoothgrad", "vargrad"),
        ("smoothgrad", "smoothgradcam++"),
        ("integratedgradients", "scorecam"),
        ("integratedgradients", "saliency"),
        ("integratedgradients", "ablationcam"),
        ("smooth(gradcam)", "smooth(saliency)"),
        ("smooth(gradcam)", "smooth(scorecam)"),
        ("augmented(gradcam)", "augmented(shapleycam)"),
        ("scorecam", "refinecam"),
        ("ablationcam", "guidedgradcam"),
    ],
)
@pytest.mark.filterwarnings("ignore:integratedgradients misses")  # of scores that are nearly equal
def test_two_methods_cost_no_more_together_than_apart(first: str, second: str) -> None:
    rows, together = worked(first, second)
    apart = worked(first)[0] + worked(second)[0]
    assert rows <= apart, rows - apart
    if {first, second} <= set(ONE_PASS):
        through_head = next(rows[kind] for kind in rows if kind.endswith("to (5,)"))
        assert through_head == len(X)  # one forward pass for both
    for name, a in together.items():
        alone = worked(name)[1][name].values
        torch.testing.assert_close(a.values, alone, rtol=1e-12, atol=1e-12)


SMALL = {
    "smoothgrad": Smooth(samples=4),
    NESTED: Smooth(IntegratedGradients(steps=3), samples=2),
    "augmented(scorecam)": Augmented(get_method("scorecam"), scales=(1.0,)),
    "integratedgradients": IntegratedGradients(steps=5),
}


@pytest.mark.parametrize("name", [*METHODS, NESTED, "augmented(scorecam)", "smooth(guidedgradcam)"])
def test_a_plan_counts_what_runs_row_by_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = SMALL.get(name, get_method(name))
    # probes batches of these sizes, once for all
    explain.attribute(net(), X[:1], [method], targets=[1, 2], batch_size=1)
    passes_back: list[int] = []
    grad = torch.autograd.grad

    def counted(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # a walk over a recording differentiates single operations, by lists of their results
        if isinstance(outputs, torch.Tensor):
            passes_back.append(1)
        return grad(outputs, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    with Work() as work:
        plan = explain.plan(net(), X[:1], method, targets=[1, 2], batch_size=1)
        assert not work.rows
        explain.attribute(net(), X[:1], [method], targets=[1, 2], batch_size=1)
    scored = next(work.rows[kind] for kind in work.rows if kind.endswith("to (5,)"))
    # a replay is tried with the maps as they are
    assert scored == plan.passes + plan.rows + isinstance(method, AblationCAM)
    assert len(passes_back) == plan.passes_back + plan.rows_back


PRINTED = """\
1 forward pass of 2 images: smooth(integratedgradients)
50 perturbed inputs (noisy copies of the photo) forward: smooth(integratedgradients)
  made of these: 2500 perturbed inputs (points on the path from the baseline to the photo) forward and back
  made of these: 50 perturbed inputs (the baseline) forward
in all: 1 forward pass, 0 backward passes, 2600 perturbed inputs forward, 2500 back"""


def test_a_plan_prints_itself() -> None:
    printed = str(explain.plan(net(), X, [NESTED], targets=[1])).splitlines()
    assert sorted(printed) == sorted(PRINTED.splitlines())
    assert printed[0] == PRINTED.splitlines()[0]


def test_a_measured_plan_says_seconds_and_memory() -> None:
    methods = ["saliency", "rise"]
    plain = explain.plan(net(), X, methods)
    assert plain.seconds is plain.memory is None
    plan = explain.plan(net(), X, methods, measure=True)
    *lines, last = str(plan).splitlines()
    assert lines == str(plain).splitlines()
    assert re.fullmatch(r"at most about [\d.]+ (s|min|h), and \d+ MB besides the weights", last)
    assert plan.seconds > explain.plan(net(), X, "gradcam", measure=True).seconds > 0
    assert " 5 MB " in str(replace(plan, memory=5 * 2**20))


def test_progress_may_be_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    explain.attribute(net(), X, "occlusion", target=1, progress=True, batch_size=2)
    drawn = capsys.readouterr().err.split("\r\x1b[2K")
    assert re.fullmatch(r"█+ (\d+)/\1\n", drawn[-1])
    explain.attribute(net(), X, "occlusion", target=1, progress=False)
    assert capsys.readouterr().err == ""
