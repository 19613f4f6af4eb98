"""Between which bounds values lie, whatever the input: exact for what rises or falls, and never too
narrow."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from explain.engine.ranges import ranges_of
from explain.recording import record
from tests.conftest import Made

INF = math.inf
MASK = torch.tensor([0.25, 0.5, 2.0, 0.0])
CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, float, int] | None]] = {
    "plain": (lambda x: x, None),
    "softmax": (lambda x: x.softmax(1), (0, 1, 4)),
    "softmax along the batch": (lambda x: x.softmax(0), (0, 1, 256)),
    "written out": (lambda x: x.exp() / x.exp().sum(1, keepdim=True), (0, 1, 4)),
    "logarithm": (lambda x: x - x.logsumexp(1, keepdim=True), (-INF, 0, 4)),
    "its exponential": (lambda x: (x - x.logsumexp(1, keepdim=True)).exp(), (0, 1, 4)),
    "less its maximum": (lambda x: x - x.amax(1, keepdim=True), None),
    "less its mean": (lambda x: x - x.mean(1, keepdim=True), None),
    "complement": (lambda x: 1 - x.softmax(1), (0, 1, 0)),
    "moved": (lambda x: x.softmax(1).T.flip(0)[1:].unsqueeze(0), (0, 1, 4)),
    "sum": (lambda x: x.sigmoid().sum(1), (0, 4, 0)),
    "scaled in place": (lambda x: x.sigmoid().mul_(3).sub_(1), (-1, 2, 0)),
    "by constants": (lambda x: x.sigmoid() * MASK, (0, 2, 0)),
    "square": (lambda x: (2 * x.sigmoid() - 1) ** 2, (0, 1, 0)),
    "absolute": (lambda x: (3 * x.sigmoid() - 1).abs(), (0, 2, 0)),
    "across zero": (lambda x: 1 / x.tanh(), (-INF, INF, 0)),
    "divided across zero": (lambda x: x.sigmoid() / (2 * x.sigmoid() - 1), None),
    "logarithm of a sigmoid": (lambda x: x.sigmoid().log(), (-INF, 0, 0)),
    "difference": (lambda x: x[:, :2].sigmoid() - x[:, 2:].sigmoid(), (-1, 1, 0)),
    "written": (
        lambda x: torch.zeros(256, 4).index_copy(1, torch.arange(2), x[:, :2].sigmoid()),
        (0, 1, 0),
    ),
    "maxima": (lambda x: x.sigmoid().max(1).values, (0, 1, 0)),
    "linear": (lambda x: x.sigmoid() @ torch.ones(4, 2), None),
}


@pytest.mark.parametrize(("function", "expected"), CASES.values(), ids=CASES)
def test_values_lie_in_the_range_that_their_operations_give(
    function: Callable[[Tensor], Tensor], expected: tuple[float, float, int] | None
) -> None:
    x = 20 * torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    recording = record(Made(lambda net, x: function(x)), x)
    found = ranges_of(recording.steps).get(recording.outputs[()])
    assert found == expected
    if found is not None:
        values = function(x).double()
        assert found.low <= values.min()
        assert values.max() <= found.high


def test_constants_of_a_blind_record_may_be_anything() -> None:
    recording = record(Made(lambda net, x: x.sigmoid() * MASK), torch.rand(2, 4))
    assert ranges_of(recording.steps, blind=True).get(recording.outputs[()]) is None
