"""Boxes and regions that were asked for, as shares of what the model saw."""

from __future__ import annotations

from typing import Any

import torch

from explain.errors import ExplainError
from explain.record import decode, unknown
from explain.report.planes import plane
from explain.report.subject import Subject
from explain.targets import Detection, Segmentation


def place(subject: Subject, index: int) -> dict[str, Any] | None:
    """Return the box or region that a target is about, where it was given: the page marks it."""
    asked = subject.question.target(index)
    if asked is None or unknown(asked) or subject.crops:
        return None
    try:
        target = decode(asked)
    except ExplainError:
        return None
    if isinstance(target, Detection) and target.box is not None:
        edges = torch.as_tensor(target.box).reshape(-1, 4)[0].tolist()
        height, width = subject.input_size
        return {"box": [edge / side for edge, side in zip(edges, (width, height, width, height), strict=True)]}
    if isinstance(target, Segmentation) and target.mask is not None:
        mask = target.mask.reshape(-1, *target.mask.shape[-2:])[0]
        return {"mask": plane(mask.float().cpu().numpy())}
    return None
