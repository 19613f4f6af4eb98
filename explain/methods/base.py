"""What a method is: a frozen value with a name, a need for evidence, and the mathematics."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch

from explain.engine import Evidence, Need

Style = Literal["heat", "intensity", "signed", "color"]
"""How an attribution is read: heat over the photo, brightness, positive against negative, or a colour picture."""


@runtime_checkable
class Method(Protocol):
    """A way to attribute a score.

    ``needs`` says which evidence the engine has to gather; calling the method with that evidence gives the raw
    attribution: ``(N, h, w)`` at the layer's resolution, or ``(N, C, H, W)`` in pixels. ``about`` and ``paper`` are
    what a list of methods prints.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    paper: ClassVar[str]
    style: ClassVar[Style]

    @property
    def needs(self) -> frozenset[Need]: ...

    def __call__(self, evidence: Evidence) -> torch.Tensor: ...


def options(method: Method) -> dict[str, Any]:
    """Return the fields of a method and their values: with its name, enough to make it again.

    >>> from explain.methods import GradCAM
    >>> options(GradCAM(relu=False))
    {'relu': False}
    """
    return {field.name: getattr(method, field.name) for field in fields(method)}  # type: ignore[arg-type]
