"""A map that is not finished, as the page shows it while it sharpens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from explain.methods import Method, control, family
from explain.methods.base import uses_layer
from explain.pictures import array
from explain.report import as_drawn, plane


def about(method: Method) -> dict[str, Any]:
    """What the page says of a method before it is done."""
    return {
        "name": method.name,
        "family": family(method.name),
        "about": method.about,
        "paper": method.paper,
        "layer": "",
        "passes": None,
        "control": control(method.name),
    }


def unfinished(method: Method, values: torch.Tensor, done: int, total: int) -> dict[str, Any]:
    """The map so far ``(h, w)`` or ``(C, H, W)`` as the page takes it.

    >>> from explain.methods import get_method
    >>> found = unfinished(get_method("rise"), torch.rand(4, 5), 30, 1000)
    >>> found["plane"]["height"], found["remark"]
    (4, 'not finished: 30 of 1000 altered photos')
    """
    values, kind = as_drawn(values.detach().float(), method.style, uses_layer(method))
    if getattr(method, "centred", None) is False:  # what it is taken from on is known at the end; this is near it
        values = values - values.mean()
    remark = f"not finished: {done} of {total} altered photos"
    return _map(kind, array(values), remark, done, signed=method.style == "signed")


def not_begun() -> dict[str, Any]:
    """An empty map in the place of one of which nothing is known until it is done."""
    return _map("heat", np.zeros((1, 1), np.float32), "not there yet; that of the first answer sharpens meanwhile", 0)


def _map(kind: str, values: np.ndarray[Any, Any], remark: str, done: int, *, signed: bool = False) -> dict[str, Any]:
    return {
        "kind": kind,
        "plane": plane(values, signed=signed),
        "layers": [],
        "remark": remark,
        "score": None,
        "delta": None,
        "runs": done,
        "curve": None,
        "figures": {},
        "verdict": None,
    }
