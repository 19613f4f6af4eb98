"""What the tests against other packages share: networks, photos and how far two maps are apart.

Every peer is asked for its map before it shifts, scales or enlarges it. Where it follows the paper,
ours has to equal it to 1e-5 of the largest value. Where it does not, a test named after the mistake
shows two things: that the peer is off the plain computation of `tests.methods`, or breaks what must
hold; and that ours is not.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import torch
import torchvision
from torch import nn

from tests.methods import plain

LAYER = 5  # of `network`: a ReLU with a convolution, a ReLU, the mean and the classes behind it
TARGET = 3  # its best class for `photo`


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(seed: int = 5) -> plain.Layers:
    """A small network for the plain computations; `plain.module_of` makes a module of it, with
    in-place ReLUs."""
    first = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2)]
    second = [nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 5, 3, padding=1), nn.ReLU()]
    return plain.layers_of(*first, *second, seed=seed)


def photo(seed: int = 4) -> torch.Tensor:
    return random(seed, 3, 6, 8)


@cache
def _resnet() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torchvision.models.resnet18(num_classes=10).double()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None  # the plain mean of all it sees
                nn.init.normal_(module.bias, std=0.2)
        model.train()(torch.randn(16, 3, 64, 64, dtype=torch.float64))
    return model.eval()


def resnet() -> nn.Module:
    """A ResNet-18 with random weights that have settled: its normalisations know what they
    normalise. A new copy."""
    return deepcopy(_resnet())


def random_model(builder: str) -> nn.Module:
    """A torchvision network as it is made, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torchvision.models.get_model(builder, num_classes=5).double().eval()


def off(found: Any, expected: Any) -> float:
    """By how much two maps differ at most, in units of the largest value."""
    found, expected = (torch.as_tensor(value).detach().double() for value in (found, expected))
    assert found.shape == expected.shape
    assert expected.abs().max() > 0
    return float((found - expected).abs().max() / expected.abs().max())


def agree(found: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    return off(found, expected) <= tolerance


def assert_mistaken(peer: Any, mistake: Any, paper: Any, ours: Any, least: float) -> None:
    """The peer computes the mistake, which is off the paper's formula, and ours is that."""
    assert agree(peer, mistake)
    assert off(peer, paper) > least
    assert agree(ours, paper, 1e-8)


LAYERS = network()
X = photo()
