"""Several inputs explained together: jointly along one path, each with its values."""

from __future__ import annotations

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
        self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(1, 4, 3)
        self.vector, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

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


def test_the_gradient_of_each_input_is_plain_autograds(
    model: nn.Module, given: explain.Inputs
) -> None:
    found = explain.attribute(model, given, "inputxgradient", target=1)
    assert list(found.parts) == ["0", "1", "facts"]
    assert torch.equal(found.values, found.parts["0"].values)
    expected = gradients(model, *tensors(given), target=1)
    for part, x, gradient in zip(found.parts.values(), tensors(given), expected, strict=True):
        assert_close(part.values, x * gradient, rtol=1e-12, atol=1e-14)
        assert part.size == tuple(x.shape[2:])


@pytest.mark.parametrize("batch_size", [None, 1, 4])
def test_paths_are_one_for_all_inputs(
    model: nn.Module, given: explain.Inputs, batch_size: int | None
) -> None:
    method = IntegratedGradients(steps=6, rule="midpoint")
    found = explain.attribute(model, given, method, target=2, batch_size=batch_size)
    points = [(i + 0.5) / 6 for i in range(6)]
    sums = [torch.zeros_like(x) for x in tensors(given)]
    for t in points:
        for total, gradient in zip(
            sums, gradients(model, *(t * x for x in tensors(given)), target=2), strict=True
        ):
            total += gradient / 6
    for part, x, total in zip(found.parts.values(), tensors(given), sums, strict=True):
        assert_close(part.values, x * total, rtol=1e-10, atol=1e-13)


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


@pytest.mark.parametrize(
    "sizes", [((6, 8), (12, 4)), ((8, 10), (16, 12)), ((16, 12), (8, 10)), ((6, 9), (6, 9))]
)
def test_occlusion_covers_the_same_part_of_inputs_of_any_sizes(
    sizes: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    parts = {"left": nn.Conv2d(3, 2, 3), "right": nn.Conv2d(1, 2, 3), "head": nn.Linear(2, 3)}
    pair = Made(
        lambda net, a, b: net.head(
            net.left(a).relu().mean((2, 3)) * net.right(b).relu().mean((2, 3))
        ),
        **parts,
    )
    model = settled(pair, seed=4).double().eval()
    left = torch.rand(2, 3, *sizes[0]).double()
    right = torch.rand(2, 1, *sizes[1]).double()
    method = Occlusion(window=2, stride=2)
    inputs = explain.Inputs((left, right), explained=[0, 1])
    found = explain.attribute(model, inputs, method, target=1).values
    expected = torch.zeros_like(found)
    for top in range(0, sizes[0][0], 2):
        for start in range(0, sizes[0][1], 2):
            one = left.clone()
            other = right.clone()
            one[:, :, top : top + 2, start : start + 2] = 0
            for i in range(sizes[1][0]):
                # each pixel's middle lies on a pixel of the first input
                for j in range(sizes[1][1]):
                    row, column = (
                        (k + 0.5) * a // b
                        for k, a, b in zip((i, j), sizes[0], sizes[1], strict=True)
                    )
                    if top <= row < top + 2 and start <= column < start + 2:
                        other[:, :, i, j] = 0
            drop = model(left, right)[:, 1] - model(one, other)[:, 1]
            expected[:, top : top + 2, start : start + 2] = drop[:, None, None].detach()
    assert_close(found, expected, rtol=1e-10, atol=1e-13)
