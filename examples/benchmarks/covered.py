"""What methods that cover photos are asked to do when they are timed, here and in Captum: equally
many photos."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from explain.methods import (
    HSIC,
    LIME,
    RISE,
    FeatureAblation,
    KernelSHAP,
    Method,
    Occlusion,
    PartitionSHAP,
    ShapleySampling,
    Sobol,
    Squares,
)

ACROSS = 4  # squares, 16 in all, where their number is not that of the runs
TOGETHER = 16  # photos that Captum runs at once


@dataclass(frozen=True)
class Case:
    """A method, how many photos it covers, and what Captum's is called and given, where it has
    one."""

    method: Method
    photos: int
    theirs: str | None = None
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.method.name


def cases(x: torch.Tensor, samples: int) -> list[Case]:
    """What is done with a photo ``(1, C, H, W)``; about as many ``samples`` each, where their
    number is free.

    Occlusion and ablation cover as many parts as by default.
    """
    side = x.shape[-1]
    channels = x.shape[1]
    window = max(1, round(side / 7))
    stride = (window + 1) // 2
    slides = {
        "sliding_window_shapes": (channels, window, window),
        "strides": (channels, stride, stride),
    }
    cells = Squares(ACROSS)
    usual = Squares()
    regions = {"feature_mask": cells(x)[:, None], "perturbations_per_eval": TOGETHER}
    orders = max(1, samples // 30)  # an order and its reverse uncover 15 squares each
    windows = (-(-(side - window) // stride) + 1) ** 2
    together = {"perturbations_per_eval": TOGETHER}
    return [
        Case(Occlusion(), windows, "Occlusion", {**slides, **together}),
        Case(
            FeatureAblation(usual),
            49,
            "FeatureAblation",
            {**together, "feature_mask": usual(x)[:, None]},
        ),
        Case(
            ShapleySampling(30 * orders, cells),
            30 * orders,
            "ShapleyValueSampling",
            {**regions, "n_samples": 2 * orders},
        ),
        Case(KernelSHAP(samples, cells), samples, "KernelShap", {**regions, "n_samples": samples}),
        Case(LIME(samples, cells), samples, "Lime", {**regions, "n_samples": samples}),
        Case(RISE(samples), samples),
        Case(PartitionSHAP(samples), samples),
        Case(Sobol(4 * 18 * max(1, samples // 72), ACROSS), 4 * 18 * max(1, samples // 72)),
        Case(HSIC(20 * max(1, samples // 20), ACROSS), 20 * max(1, samples // 20)),
    ]
