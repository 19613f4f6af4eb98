"""Boxes and regions that were asked for, as shares of what the model saw."""

from __future__ import annotations

from typing import Any

import torch

from explain.errors import ExplainError
from explain.hooks.preserve import untouched
from explain.record import decode, unknown
from explain.report.planes import plane
from explain.report.subject import Subject
from explain.targets import Detection, Segmentation
from explain.targets.places import Detected


def place(subject: Subject, index: int, *, live: bool = False) -> dict[str, Any] | None:
    """Return the box or region that a target is about: the page marks it.

    Where it was not given, the model is run once to find it, if it is at hand and ``live``.
    """
    asked = subject.question.target(index)
    if asked is None or unknown(asked) or subject.crops:
        return None
    try:
        target = decode(asked)
        if live and subject.explainer is not None and isinstance(target, (Detection, Segmentation)):
            target = _settled(subject, target)
    except ExplainError:
        return None
    return _marked(target, subject.input_size)


def _settled(subject: Subject, target: Detection | Segmentation) -> Detected | Segmentation:
    """The target with the box or region that it has on this photo."""
    model = subject.explainer.model
    with untouched(model), torch.no_grad():
        return target.settled(model(subject.explainer.as_input(subject.photo)), 1)


def _marked(target: Any, size: tuple[int, int]) -> dict[str, Any] | None:
    box = target.boxes if isinstance(target, Detected) else target.box if isinstance(target, Detection) else None
    if box is not None:
        edges, (height, width) = torch.as_tensor(box).reshape(-1, 4)[0].tolist(), size
        return {"box": [edge / side for edge, side in zip(edges, (width, height, width, height), strict=True)]}
    if isinstance(target, Segmentation) and target.mask is not None:
        mask = target.mask.reshape(-1, *target.mask.shape[-2:])[0]
        return {"mask": plane(mask.float().cpu().numpy())}
    return None
