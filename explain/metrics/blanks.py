"""Photos that are covered all over: what a network must not take for the class that is explained."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from explain.errors import image_name, warn
from explain.fills import Fill


def tell_recognised(blank: Mapping[Fill, torch.Tensor], probability: torch.Tensor, classes: int) -> None:
    """Warn where a photo keeps its class though all of it is covered: curves that end there say little.

    It keeps it where its probability is more than half of the way from chance, 1 / K, to 1.

    Args:
        blank: for each fill, the number of each image's covered row ``(N,)``, or -1 where none was run.
        probability: of all rows ``(P,)``.
        classes: K.
    """
    least = (1 + 1 / classes) / 2
    for fill, rows in blank.items():
        found = torch.where(rows >= 0, probability[rows.clamp(min=0)], 0)
        kept = (found > least).nonzero().flatten().tolist()
        if kept:
            images = ", ".join(image_name(image) for image in kept)
            warn(
                f"image {images} keeps its class with a probability of up to {found.max().item():.2f} where the fill "
                f"{fill.name!r} covers all of it, so that figures by this fill say little; choose another fill"
            )
