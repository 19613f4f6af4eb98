"""What relevance loses is told for each image, wherever a network has its images: in windows, or
behind the tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.methods import LRP
from tests.conftest import settled


def assert_losses_are_those_of_each_image(model: nn.Module, x: Tensor, composite: str) -> None:
    together = explain.attribute(model, x, LRP(composite), target=1)
    alone = [explain.attribute(model, one[None], LRP(composite), target=1) for one in x]
    assert together.coverage.taken
    for cause, taken in together.coverage.taken.items():
        # an image that loses nothing by a cause does not name it
        none = torch.zeros(1, dtype=taken.dtype)
        expected = torch.cat(
            [a.coverage.taken.get(cause, none) for a in alone if a.coverage is not None]
        )
        assert_close(taken, expected, rtol=1e-8, atol=1e-10, msg=cause)
    assert together.delta.abs().max() <= 1e-8
    assert_close(together.values, torch.cat([a.values for a in alone]), rtol=1e-8, atol=1e-10)


class Between(nn.Module):
    """A convolution, something between that has a bias where the images are laid out in some way,
    and a head."""

    def __init__(self, between: Callable[[Between, Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.first = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        settled(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self, self.first(x)))


LAYOUTS: dict[str, Callable[[Between, Tensor], Tensor]] = {
    "unbound": lambda net, y: torch.stack([(v + 1).tanh().mean((1, 2)) for v in y.unbind(0)]),
    "in one row": lambda net, y: (y.reshape(1, -1, 6, 6) + 1).tanh().view(len(y), 4, -1).sum(2),
    "twice": lambda net, y: (torch.cat([y, y.flip(3)]) + 1).tanh().view(2, -1, 4, 36).sum((0, 3)),
    "last": lambda net, y: (y.flatten(1).mT + 1).tanh().mT.view(len(y), 4, -1).sum(2),
    "backwards": lambda net, y: (y.flip(0) + 1).tanh().flip(0).sum((2, 3)),
    "rolled": lambda net, y: (y.roll(1, 0) + 1).tanh().roll(-1, 0).sum((2, 3)),
    "by einsum": lambda net, y: (
        (torch.einsum("bchw,cd->hwbd", y, net.weight) + 1).tanh().sum((0, 1))
    ),
    "behind channels": lambda net, y: (
        net.norm(y.permute(2, 3, 1, 0).reshape(-1, 4, len(y))).tanh().mean(0).T
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_each_image_loses_is_known_however_images_are_laid_out(name: str) -> None:
    torch.manual_seed(0)
    model = Between(LAYOUTS[name]).double()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    assert_losses_are_those_of_each_image(model, x, "Epsilon")
