"""What relevance loses is told for each image, wherever a network has its images: in windows, or
behind the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.methods import LRP
from tests.conftest import Made, settled

Layout = Callable[[Any, Tensor], Tensor]
LAYOUTS: dict[str, Layout] = {
    "in one row": lambda net, y: (y.reshape(1, -1, 6, 6) + 1).tanh().view(len(y), 4, -1).sum(2),
    "twice": lambda net, y: (torch.cat([y, y.flip(3)]) + 1).tanh().view(2, -1, 4, 36).sum((0, 3)),
    "last": lambda net, y: (y.flatten(1).mT + 1).tanh().mT.view(len(y), 4, -1).sum(2),
    "behind channels": lambda net, y: (
        net.norm(y.permute(2, 3, 1, 0).reshape(-1, 4, len(y))).tanh().mean(0).T
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_each_image_loses_is_known_however_images_are_laid_out(name: str) -> None:
    """What stands between a convolution and a head has a bias."""
    parts = {"first": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 3)}
    between = LAYOUTS[name]
    model = settled(Made(lambda net, x: net.head(between(net, net.first(x))), **parts)).double()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    together = explain.attribute(model, x, LRP("Epsilon"), target=1)
    alone = [explain.attribute(model, one[None], LRP("Epsilon"), target=1) for one in x]
    assert together.coverage.taken
    for cause, taken in together.coverage.taken.items():
        # an image that loses nothing by a cause does not name it
        none = torch.zeros(1, dtype=taken.dtype)
        expected = torch.cat([a.coverage.taken.get(cause, none) for a in alone])
        assert_close(taken, expected, rtol=1e-8, atol=1e-10, msg=cause)
    assert together.delta.abs().max() <= 1e-8
    assert_close(together.values, torch.cat([a.values for a in alone]), rtol=1e-8, atol=1e-10)
