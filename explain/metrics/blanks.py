"""Photos that are covered all over: what a network must not take for the class that is explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from explain.errors import image_name
from explain.fills import Fill

KEPT = 0.9


def recognised(
    blank: Mapping[Fill, torch.Tensor], photos: torch.Tensor, altered: torch.Tensor, classes: int
) -> Iterator[str]:
    """Say which photos keep their class though all of them is covered: curves that end there say little.

    A photo keeps it where nine tenths of its probability are left, and this is more than half of the way from chance,
    1 / K, to 1.

    Args:
        blank: for each fill, the number of each image's covered row ``(N,)``, or -1 where none was run.
        photos: the probability of the photos as they are ``(N,)``.
        altered: that of all altered rows ``(P,)``.
        classes: K.
    """
    least = (KEPT * photos).clamp(min=(1 + 1 / classes) / 2)
    for fill, rows in blank.items():
        found = torch.where(rows >= 0, altered[rows.clamp(min=0)], 0)
        kept = (found > least).nonzero().flatten().tolist()
        if kept:
            images, share = ", ".join(map(image_name, kept)), f"{found[kept].min().item():.2f}"
            yield (
                f"image {images} keeps its class with a probability of {share} or more where the fill {fill.name!r} "
                "covers all of it, so that figures by this fill say little; choose another fill"
            )
