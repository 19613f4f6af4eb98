"""Random numbers that depend on their generator alone, not on the caller's default dtype or device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def uniform(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draw from [0, 1), in float32 on the CPU."""
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def normal(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draw from the standard normal distribution, in float32 on the CPU."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")
