"""Several inputs explained together: jointly along one path, each with its values."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ImageError
from explain.methods import IntegratedGradients, Occlusion
from tests.conftest import Made, settled

N = 3


class Two(nn.Module):
    """Two images of different sizes and a vector, which meet in products: each one's part depends
    on the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 4, 3)
        self.right = nn.Conv2d(1, 4, 3)
        self.vector = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, left: Tensor, right: Tensor, *, facts: Tensor) -> Tensor:
        a, b = (torch.relu(m).mean((2, 3)) for m in (self.left(left), self.right(right)))
        return self.head(a * b + self.vector(facts) * a)


@pytest.fixture
def model() -> nn.Module:
    return settled(Two(), seed=4).double().eval()


@pytest.fixture
def given() -> explain.Inputs:
    g = torch.Generator().manual_seed(1)
    left, right, facts = (
        torch.rand(N, *s, generator=g).double() for s in ((3, 8, 6), (1, 7, 7), (5,))
    )
    return explain.Inputs((left, right), {"facts": facts}, explained=[0, 1, "facts"])


def gradients(model: nn.Module, *inputs: Tensor, target: int) -> tuple[Tensor, ...]:
    sources = [tensor.clone().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(
        model(sources[0], sources[1], facts=sources[2])[:, target].sum(), sources
    )


def tensors(given: explain.Inputs) -> list[Tensor]:
    return [*given.args, given.kwargs["facts"]]


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
    inputs = tensors(given)
    points = [[(i + 0.5) / 6 * x for x in inputs] for i in range(6)]
    by_point = [gradients(model, *point, target=2) for point in points]
    for number, part in enumerate(attribution.parts.values()):
        mean = torch.stack([some[number] for some in by_point]).mean(0)
        assert_close(part.values, inputs[number] * mean, rtol=1e-10, atol=1e-13)
        assert part.size == tuple(inputs[number].shape[2:])


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
    rows = (torch.arange(size[0]) + 0.5) * 6 // size[0]
    columns = (torch.arange(size[1]) + 0.5) * 8 // size[1]
    for top, start in itertools.product(range(0, 6, 2), range(0, 8, 2)):
        one = left.clone()
        one[:, :, top : top + 2, start : start + 2] = 0
        covered = (rows // 2 == top // 2)[:, None] & (columns // 2 == start // 2)
        drop = net(left, right) - net(one, right * ~covered)
        expected = drop.expand(2, 2)
        assert_close(values[top : top + 2, start : start + 2], expected, rtol=1e-10, atol=1e-13)
