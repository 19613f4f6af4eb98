"""Random numbers that depend on their generator alone, not on the caller's default dtype or
device."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch


def seeded(seed: int, draw: int | None = None) -> torch.Generator:
    """A CPU generator for any whole number, or number ``draw`` of several independent ones of a
    seed. Another formula would change the maps of every seed.
    """
    return torch.Generator("cpu").manual_seed(
        (seed if draw is None else seed * 1_000_003 + draw) % 2**63
    )


def permutation(count: int, seed: int) -> torch.Tensor:
    """Return the numbers below ``count`` in random order ``(count,)``, on the CPU; the same for the
    same seed."""
    return torch.randperm(count, generator=seeded(seed), device="cpu")


def uniform(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draw uniform random numbers from [0, 1) in this shape, in float32 on the CPU whatever the
    caller's defaults are; the caller moves them to its device."""
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def normal(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draw standard normal random numbers in this shape, in float32 on the CPU whatever the
    caller's defaults are; the caller moves them to its device."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


@contextmanager
def drawing(seed: int, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Let this block draw the random numbers of a ``seed`` on the CPU and on GPUs among the
    ``devices``; those of the process, and of other GPUs, go on as if nothing had been drawn."""
    gpus = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)
        yield
