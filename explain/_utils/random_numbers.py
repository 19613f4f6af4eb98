"""Random numbers that depend on their generator alone, not on the caller's default dtype or
device."""

from collections.abc import Sequence

import torch


def seeded(seed: int, draw: int | None = None) -> torch.Generator:
    """Return a generator on the CPU for any whole number as a seed; with ``draw``, one of several
    for the same seed."""
    return torch.Generator("cpu").manual_seed(
        (seed if draw is None else seed * 1_000_003 + draw) % 2**63
    )


def permutation(count: int, seed: int) -> torch.Tensor:
    """Return the numbers below ``count`` in random order, on the CPU."""
    return torch.randperm(count, generator=seeded(seed), device="cpu")


def uniform(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draw from [0, 1), in float32 on the CPU."""
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def normal(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draw from the standard normal distribution, in float32 on the CPU."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")
