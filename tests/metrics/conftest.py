"""A small classifier with photos, and maps with ties in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import TinyNet, settled

SIZE = (12, 10)


class Counting(nn.Module):
    """Counts the rows that a network is run on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.rows: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.rows += list(x.detach().clone())
        return self.inner(x)

    @property
    def distinct(self) -> int:
        return len({row.numpy().tobytes() for row in self.rows})


@pytest.fixture
def model() -> TinyNet:
    """A network that is not too sure of itself."""
    net = TinyNet()
    settled(net).double().eval()
    net.fc.weight.data *= 0.1
    return net


@pytest.fixture
def photos() -> torch.Tensor:
    return torch.randn(3, 3, *SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def maps() -> torch.Tensor:
    """Maps ``(3, 12, 10)`` of whole numbers: most values are there several times, and some are
    negative."""
    return torch.randint(-5, 20, (3, *SIZE), generator=torch.Generator().manual_seed(2)).double()
