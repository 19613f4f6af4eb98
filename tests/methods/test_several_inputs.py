"""Several inputs explained together: jointly along one path, each with its values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ImageError
from explain.methods import IntegratedGradients, Occlusion
from tests.conftest import Made, settled

N = 3


def meeting(net: Any, left: Tensor, right: Tensor, *, facts: Tensor) -> Tensor:
    """Two images of different sizes and a vector, which meet in products: each one's part depends
    on the rest."""
    a = net.left(left).relu().mean((2, 3))
    b = net.right(right).relu().mean((2, 3))
    return net.head(a * b + net.vector(facts) * a)


@pytest.fixture
def model() -> nn.Module:
    images: Any = {"left": nn.Conv2d(3, 4, 3), "right": nn.Conv2d(1, 4, 3)}
    rest: Any = {"vector": nn.Linear(5, 4), "head": nn.Linear(4, 3)}
    return settled(Made(meeting, **images, **rest), seed=4).double()


@pytest.fixture
def given() -> explain.Inputs:
    left = torch.rand(N, 3, 8, 6).double()
    right = torch.rand(N, 1, 7, 7).double()
    return explain.Inputs(
        (left, right), {"facts": torch.rand(N, 5).double()}, explained=[0, 1, "facts"]
    )


@pytest.mark.parametrize(
    ("explained", "message"),
    [
        ([0, "weights"], "input weights must"),
        ([0, "labels"], "input labels must"),
        ([0, "nothing"], "explained must"),
        ([], "tensor"),
    ],
)
def test_inputs_that_cannot_be_explained_together_are_refused(
    explained: list[int | str], message: str, model: nn.Module, given: explain.Inputs
) -> None:
    others = {**given.kwargs, "weights": torch.ones(2), "labels": torch.arange(N)}
    with pytest.raises(ImageError, match=message):
        explain.attribute(
            model, explain.Inputs(given.args, others, explained=explained), "saliency", target=0
        )


@pytest.mark.parametrize("batch_size", [None, 4])
def test_paths_are_one_for_all_inputs(
    model: nn.Module, given: explain.Inputs, batch_size: int | None
) -> None:
    method = IntegratedGradients(steps=6, rule="midpoint")
    attribution = explain.attribute(model, given, method, target=2, batch_size=batch_size)
    assert list(attribution.parts) == ["0", "1", "facts"]
    inputs = [*given.args, given.kwargs["facts"]]
    totals = [torch.zeros_like(each) for each in inputs]
    for i in range(6):
        left, right, facts = point = [((i + 0.5) / 6 * each).requires_grad_() for each in inputs]
        score = model(left, right, facts=facts)[:, 2].sum()
        for total, gradient in zip(totals, torch.autograd.grad(score, point), strict=True):
            total += gradient / 6
    for each, total, part in zip(inputs, totals, attribution.parts.values(), strict=True):
        assert_close(part.values, each * total, rtol=1e-10, atol=1e-13)
        assert part.size == tuple(each.shape[2:])


@pytest.mark.parametrize("size", [(12, 4), (4, 6)])
def test_occlusion_covers_the_same_part_of_inputs_of_any_sizes(size: tuple[int, int]) -> None:
    """A pixel of the second input is covered with that of the first on which its middle lies."""
    net = Made(
        lambda net, a, b: (a * a.mean()).sum((1, 2, 3))[:, None] * (b * b).sum((1, 2, 3))[:, None]
    )
    left = torch.rand(1, 3, 6, 8, dtype=torch.float64)
    right = torch.rand(1, 1, *size, dtype=torch.float64)
    inputs = explain.Inputs((left, right), explained=[0, 1])
    values = explain.attribute(net, inputs, Occlusion(window=2, stride=2), target=0).values[0]
    windows = torch.arange(6)[:, None] // 2 * 4 + torch.arange(8) // 2
    rows = ((torch.arange(size[0]) + 0.5) * 6 / size[0]).long()
    columns = ((torch.arange(size[1]) + 0.5) * 8 / size[1]).long()
    for window in windows.unique():
        here = windows == window
        there = here[rows][:, columns]
        drop = net(left, right) - net(left * ~here, right * ~there)
        assert_close(values[here], drop[0].expand(4), rtol=1e-10, atol=1e-13)
