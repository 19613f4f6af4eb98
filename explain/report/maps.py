"""Maps as a page has them, quantised and packed; boxes and regions as shares of the photo."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import torch

from explain._utils.errors import ExplainError
from explain.attribution.pictures import array
from explain.attribution.records import decode, unknown
from explain.attribution.result import Attribution
from explain.hooks.preserve import untouched
from explain.methods.base import Style
from explain.report.subject import Subject
from explain.targets import Detection, Segmentation
from explain.targets.regions import Detected

Array = np.ndarray[Any, Any]

COARSE = 64 * 64
"""Cells up to which a map gets 16 bits. Larger ones get 8, with finer steps near zero."""


def plane(values: Array, *, signed: bool = False) -> dict[str, Any]:
    """Quantise a map ``(h, w)``.

    ``scale`` is its largest magnitude, and a step is a share of it: with 16 bits, ``step / 65535``, and with 8 bits,
    ``(step / 255) ** 2``. Of maps with negative values (or ``signed`` ones), it is ``step / 32767`` or
    ``sign * (step / 127) ** 2``. With the ``filter`` "left", each step is stored as the difference to its left
    neighbour. The bytes are compressed with zlib, in little-endian order.

    >>> found = plane(np.array([[0.0, 2.0], [1.0, 0.5]], np.float32))
    >>> found["width"], found["bits"], found["signed"], found["scale"]
    (2, 16, False, 2.0)
    """
    values = np.nan_to_num(np.asarray(values, np.float64), posinf=0.0, neginf=0.0)
    signed, scale = signed or bool((values < 0).any()), float(np.abs(values).max(initial=0.0))
    shares = values / scale if scale > 0 else values
    coarse = values.size <= COARSE
    if not coarse:
        shares = np.sign(shares) * np.sqrt(np.abs(shares))
    kind = np.dtype(f"<{'i' if signed else 'u'}{2 if coarse else 1}")
    steps = np.rint(shares * np.iinfo(kind).max).astype(kind)
    plain, left = zlib.compress(steps.tobytes(), 9), zlib.compress(_differences(steps).tobytes(), 9)
    return {
        "width": int(values.shape[1]),
        "height": int(values.shape[0]),
        "bits": 16 if coarse else 8,
        "signed": signed,
        "scale": scale,
        "filter": "left" if len(left) < len(plain) else "none",
        "data": base64.b64encode(min(plain, left, key=len)).decode("ascii"),
    }


def map_of(attribution: Attribution, longest: int | None = None) -> tuple[Array, str]:
    """Return the map ``(h, w)`` of the first image, and what its values are.

    That is "heat" for a map of a layer, "signed" for contributions of single pixels (added up over the channels), and
    "intensity" for magnitudes of single pixels. Maps of single pixels are averaged down to ``longest`` cells a side.
    """
    values, kind = as_drawn(attribution.contributions[0].float(), attribution.style, attribution.layer is not None)
    return array(values) if kind == "heat" else _averaged(array(values), longest), kind


def as_drawn(values: torch.Tensor, style: Style, of_layer: bool = False) -> tuple[torch.Tensor, str]:
    """Return the values of one image as a map ``(h, w)``, and their kind as in `map_of`."""
    if style == "signed" and not (of_layer and values.ndim == 2):
        return values if values.ndim == 2 else values.sum(0), "signed"
    return (values, "heat") if values.ndim == 2 else (values.abs().amax(0), "intensity")


def _averaged(values: Array, longest: int | None) -> Array:
    if longest is None or max(values.shape) <= longest:
        return values
    import cv2

    share = longest / max(values.shape)
    height, width = (max(1, round(length * share)) for length in values.shape)
    smaller: Array = cv2.resize(values.astype(np.float32), (width, height), interpolation=cv2.INTER_AREA)
    return smaller


def _differences(steps: Array) -> Array:
    """Each step less its left neighbour, modulo the range of the type."""
    unsigned = steps.view(f"<u{steps.dtype.itemsize}")
    found = unsigned.copy()
    found[:, 1:] -= unsigned[:, :-1]
    return found


def place(subject: Subject, index: int, *, live: bool = False) -> dict[str, Any] | None:
    """Return the box or region of a target, which the page marks.

    Where the target itself does not have it and ``live`` is set, the model runs once to find it.
    """
    encoded = subject.question.target(index)
    if encoded is None or unknown(encoded) or subject.crops:
        return None
    try:
        target = decode(encoded)
        if live and subject.explainer is not None and isinstance(target, (Detection, Segmentation)):
            model = subject.explainer.model
            with untouched(model), torch.no_grad():
                target = target.settled(model(subject.explainer.as_input(subject.photo)), 1)
    except ExplainError:
        return None
    box = target.boxes if isinstance(target, Detected) else target.box if isinstance(target, Detection) else None
    if box is not None:
        edges, (height, width) = torch.as_tensor(box).reshape(-1, 4)[0].tolist(), subject.input_size
        return {"box": [edge / side for edge, side in zip(edges, (width, height, width, height), strict=True)]}
    if isinstance(target, Segmentation) and target.mask is not None:
        mask = target.mask.reshape(-1, *target.mask.shape[-2:])[0]
        return {"mask": plane(mask.float().cpu().numpy())}
    return None
