"""The maps of a run, brought to one small size, with what is known about their photos."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from explain._utils.errors import RunError
from explain._utils.spelling import did_you_mean
from explain.runs.explaining import on_input
from explain.runs.reading import Row
from explain.runs.result import Run

GRID = 16
"""Places along each side of a map that is compared with others: a map takes a kilobyte."""
EDGE = 2
"""Places along each side of this grid that count as border: an eighth of the photo on each side."""


@dataclass(frozen=True, eq=False)
class RunMaps:
    """N maps of one method as shares: each adds up to 1, whatever the size of the photo and of the layer.

    ``values`` is ``(N, 16, 16)``. ``on_object`` ``(N,)`` is the share of each map within the boxes of its photo, and
    ``object_size`` the share of the photo that these cover; NaN where there is no box. ``correct`` is 1, 0 or NaN
    where the label is not known. ``empty`` counts maps without a positive value, and ``repeated`` photos with the
    same pixels as one before: both are left out.
    """

    method: str
    names: tuple[str, ...]
    paths: tuple[str | None, ...]
    targets: tuple[str, ...]
    labels: tuple[str | None, ...]
    values: torch.Tensor
    on_object: torch.Tensor
    object_size: torch.Tensor
    correct: torch.Tensor
    empty: int = 0
    repeated: int = 0

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def at_border(self) -> torch.Tensor:
        """The share of each map in the outer eighth of the photo, ``(N,)``; of an even map, it is 7/16."""
        inner = self.values[:, EDGE:-EDGE, EDGE:-EDGE].sum((1, 2))
        return 1 - inner

    @cached_property
    def entropy(self) -> torch.Tensor:
        """How far each map is spread, ``(N,)``: 0 where all lies in one place, 1 where all places have the same."""
        places = self.values.flatten(1)
        spread: torch.Tensor = torch.special.entr(places).sum(1) / math.log(places.shape[1])
        return spread

    @cached_property
    def of_target(self) -> dict[str, torch.Tensor]:
        """The numbers of the maps of each target, in the order in which targets come first."""
        found: dict[str, list[int]] = {}
        for number, target in enumerate(self.targets):
            found.setdefault(target, []).append(number)
        return {target: torch.tensor(numbers) for target, numbers in found.items()}

    def __getitem__(self, which: torch.Tensor) -> RunMaps:
        """Return the maps with these numbers."""
        numbers = which.tolist()
        parts: dict[str, Any] = {}
        for field in fields(self):
            whole = getattr(self, field.name)
            if isinstance(whole, torch.Tensor):
                parts[field.name] = whole[which]
            elif isinstance(whole, tuple):
                parts[field.name] = tuple(whole[number] for number in numbers)
            else:
                parts[field.name] = whole
        return RunMaps(**parts)


def read_maps(run: Run, method: str | None = None) -> RunMaps:
    """Read all maps of a method.

    Args:
        run: the run.
        method: which one; by default the first that was asked for.

    Raises:
        RunError: there is no such method, or the run has no map that says something.
    """
    methods = run.methods
    if not methods:
        raise RunError(f"run {str(run.path)!r} must have maps, got none; explain some photos first")
    name = methods[0] if method is None else method
    if name not in methods:
        raise RunError(f"method {name!r} is not in this run; {did_you_mean(name, methods)}")
    kept: list[Row] = []
    columns: list[tuple[torch.Tensor, float, float]] = []
    seen: set[tuple[str, str]] = set()
    empty = repeated = 0
    for row in run.rows(name):
        key = (row.sha256, row.target)
        if key in seen:
            repeated += 1
            continue
        seen.add(key)
        heatmap = row.heatmap
        if not heatmap.any():
            empty += 1
            continue
        columns.append((_shares(heatmap), *_on_object(row, heatmap)))
        kept.append(_without_map(row))
    if not kept:
        raise RunError(
            f"run {str(run.path)!r} must have maps of {name!r} that are not zero, got none; choose another method"
        )
    return RunMaps(
        method=name,
        names=tuple(row.name for row in kept),
        paths=tuple(row.path for row in kept),
        targets=tuple(row.target for row in kept),
        labels=tuple(row.label for row in kept),
        values=torch.stack([values for values, _, _ in columns]),
        on_object=torch.tensor([share for _, share, _ in columns]),
        object_size=torch.tensor([size for _, _, size in columns]),
        correct=torch.tensor([float("nan") if row.correct is None else float(row.correct) for row in kept]),
        empty=empty,
        repeated=repeated,
    )


def _shares(heatmap: torch.Tensor) -> torch.Tensor:
    """A heatmap ``(H, W)`` on the grid, as shares that add up to 1."""
    small = F.adaptive_avg_pool2d(heatmap[None], GRID)[0]
    return small / small.sum()


def _on_object(row: Row, heatmap: torch.Tensor) -> tuple[float, float]:
    """The share of a heatmap within the boxes of its photo, and the share of the input that they cover."""
    region = object_of(row)
    if not region.any():
        return float("nan"), float("nan")
    return float(heatmap[region].sum() / heatmap.sum()), float(region.float().mean())


def object_of(row: Row) -> torch.Tensor:
    """Return which pixels ``(H, W)`` of the model's input lie on the object; none where no box is known."""
    return region_of(on_input(row.boxes, row.box, row.input_size), row.input_size)


def region_of(boxes: Sequence[tuple[float, float, float, float]], size: Sequence[int]) -> torch.Tensor:
    """Return which pixels ``(H, W)`` lie in one of the boxes."""
    region = torch.zeros(*size, dtype=torch.bool)
    for x0, y0, x1, y1 in boxes:
        region[round(y0) : round(y1), round(x0) : round(x1)] = True
    return region


def _without_map(row: Row) -> Row:
    """A row that holds no map any more, so that as many can be kept as there are."""
    return replace(row, _stored=(b"", (0,), 0.0))
