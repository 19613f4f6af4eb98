"""What is seen during training, for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from explain._utils.errors import RunError, shown
from explain.attribution.pictures import Scene
from explain.attribution.result import Attribution
from explain.render.styles import get_style
from explain.runs.preparing import Failed
from explain.runs.schema import unpack
from explain.runs.store import MapRecord, PhotoRecord
from explain.training.store import Gradients

SIDE = 384  # pixels of the longer side of a picture


@dataclass(frozen=True, eq=False)
class TensorBoardLog:
    """Writes what is seen at each step.

    ``names`` has those of the photos in their order, ``scenes`` what their maps are drawn on, None where there is
    nothing; ``sizes`` are those of the model's inputs, and ``styles`` how the maps of each method are drawn.
    """

    writer: Any
    names: Sequence[str]
    scenes: Sequence[Scene | None] = field(repr=False)
    sizes: Sequence[tuple[int, int]]
    styles: Mapping[str, str]

    def enter(
        self, step: int, found: Sequence[PhotoRecord | Failed], figures: Mapping[str, float], gradients: Gradients
    ) -> None:
        """Write the pictures and figures of a step; arguments as for the file of a run."""
        for name, answer, scene, size in zip(self.names, found, self.scenes, self.sizes, strict=True):
            for result in answer.results if isinstance(answer, PhotoRecord) else ():
                tag = f"{name}/{result.method}/{result.target}"
                self.writer.add_scalar(f"score/{tag}", result.score, step)
                if result.probability is not None:
                    self.writer.add_scalar(f"probability/{tag}", result.probability, step)
                if scene is not None:
                    picture = scene.overlay(_attribution(result, size), get_style(self.styles[result.method]))
                    self.writer.add_image(f"maps/{tag}", np.asarray(picture), step, dataformats="HWC")
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        for name, (flow, _) in gradients.flows.items():
            self.writer.add_scalar(f"gradient/{name}", flow.rms, step)
        if gradients.units:
            self.writer.add_scalar("dead units", gradients.dead, step)


def _attribution(result: MapRecord, size: tuple[int, int]) -> Attribution:
    values = unpack(result.map.content, result.map.shape, result.map.scale)[None]
    return Attribution(result.method, values, result.target, torch.tensor([result.score]), result.layer, size)


def writer_of(given: Any) -> tuple[Any, bool]:
    """Return what writes for TensorBoard, and whether it was made here and has to be closed.

    Args:
        given: a folder, or a writer such as ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        RunError: it is neither, or TensorBoard is not installed.

    >>> writer_of(3)
    Traceback (most recent call last):
    explain.RunError: board must be a folder or a SummaryWriter, got 3; name a folder
    """
    if isinstance(given, (str, os.PathLike)):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            remedy = "pip install 'explain[tensorboard]', or give an output file instead"
            raise RunError(f"tensorboard must be installed to write a board; {remedy}") from None
        return SummaryWriter(os.fspath(given)), True
    if callable(getattr(given, "add_scalar", None)) and callable(getattr(given, "add_image", None)):
        return given, False
    raise RunError(f"board must be a folder or a SummaryWriter, got {shown(given)}; name a folder")
