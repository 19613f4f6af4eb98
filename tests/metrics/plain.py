"""Metrics again, slowly and plainly, one photo and one altered photo at a time, written from the
papers' formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

Read = Callable[[torch.Tensor], float]
Cover = Callable[[torch.Tensor, set[int]], torch.Tensor]


def probability(model: nn.Module, target: int) -> Read:
    def read(photo: torch.Tensor) -> float:
        with torch.no_grad():
            scores = model(photo[None])[0].tolist()
        powers = [2.718281828459045 ** (score - max(scores)) for score in scores]
        return powers[target] / sum(powers)

    return read


def logit(model: nn.Module, target: int) -> Read:
    def read(photo: torch.Tensor) -> float:
        with torch.no_grad():
            return float(model(photo[None])[0, target])

    return read


def order_of(values: torch.Tensor, seed: int = 0) -> list[int]:
    """The places of a map, largest value first; equal values as a shuffle with a seed has them."""
    flat = values.flatten().tolist()
    shuffle = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(shuffle, key=lambda place: -flat[place])


def constant(value: Sequence[float]) -> Cover:
    def cover(photo: torch.Tensor, places: set[int]) -> torch.Tensor:
        covered = photo.clone()
        for place in places:
            row, column = divmod(place, photo.shape[2])
            for channel in range(photo.shape[0]):
                covered[channel, row, column] = value[channel]
        return covered

    return cover


def by_photo(other: torch.Tensor) -> Cover:
    """Cover by another photo."""

    def cover(photo: torch.Tensor, places: set[int]) -> torch.Tensor:
        covered = photo.clone()
        for place in places:
            row, column = divmod(place, photo.shape[2])
            covered[:, row, column] = other[:, row, column]
        return covered

    return cover


def trapezium(values: Sequence[float], at: Sequence[float]) -> float:
    """The area under straight lines between points, each at its own place."""
    pairs = list(zip(at, values, strict=True))
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(pairs))


def flipping(
    photo: torch.Tensor, order: list[int], read: Read, cover: Cover, steps: int
) -> list[float]:
    """What is read while more and more of the places are covered, in order."""
    total = len(order)
    return [
        read(cover(photo, set(order[: round(total * step / steps)]))) for step in range(steps + 1)
    ]
