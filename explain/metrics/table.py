"""`Table`: the figures of several metrics for several methods; it prints itself."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from explain._utils.errors import MetricError
from explain._utils.spelling import did_you_mean
from explain.metrics.base import Metric, MetricResult

ARROWS = {"more": "↑", "less": "↓"}


class NotEvaluatedError(MetricError, KeyError):
    """A method is not in a table; a ``KeyError`` too, as of any mapping."""


@dataclass(frozen=True, eq=False)
class Table(Mapping[str, Mapping[str, torch.Tensor]]):
    """A figure for each method, metric and image: ``table[method][metric]`` is a tensor ``(N,)``.

    It prints the means over the images; an arrow says whether more (↑) or less (↓) is better. NaN, shown as –, marks
    figures that are not defined for an image; means leave it out. Below stand ``notes``: remarks on all
    figures, such as a baseline that the model takes for the class.
    """

    metrics: Mapping[str, Metric]
    results: Mapping[str, Mapping[str, MetricResult]]
    notes: tuple[str, ...] = ()

    def __getitem__(self, method: str) -> Mapping[str, torch.Tensor]:
        return {name: each.value for name, each in self._of(method).items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def curve(self, method: str, metric: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The shares ``(K,)`` and the curves ``(N, K)`` behind a figure.

        Raises:
            MetricError: the metric has no curve, or was not evaluated.
        """
        found = self._one(method, metric)
        if found.curve is None or found.at is None:
            raise MetricError(f"metric must have a curve, but {metric!r} has none; table[{method!r}] has its figures")
        return found.at, found.curve

    def parts(self, method: str, metric: str) -> Mapping[str, torch.Tensor]:
        """What else a metric found for each image, by name."""
        return self._one(method, metric).parts

    def mean(self, method: str, metric: str) -> float:
        """The mean over the images for which the figure is defined; NaN without any."""
        return float(self._one(method, metric).value.double().nanmean())

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what each metric is, and its figures by method, metric and image; None where not defined."""
        about = {
            name: {"about": m.about, "units": m.units, "better": m.better, "paper": m.paper, "options": repr(m)}
            for name, m in self.metrics.items()
        }
        values = {
            method: {name: [_plain(value) for value in each.value.tolist()] for name, each in row.items()}
            for method, row in self.results.items()
        }
        return {"metrics": about, "values": values, "notes": list(self.notes)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def to_csv(self) -> str:
        """A line for each method and image, a column for each metric."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["method", "image", *self.metrics])
        for method, row in self.results.items():
            columns = [row[name].value.tolist() for name in self.metrics]
            for image, values in enumerate(zip(*columns, strict=True)):
                writer.writerow([method, image, *("" if _plain(v) is None else repr(float(v)) for v in values)])
        return out.getvalue()

    def __str__(self) -> str:
        head = ["", *(f"{name} {ARROWS[metric.better]}" for name, metric in self.metrics.items())]
        rows = [[method, *(_shown(self.mean(method, name)) for name in self.metrics)] for method in self.results]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = []
        for row in (head, *rows):
            figures = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *figures]).rstrip())
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return str(self)

    def _of(self, method: str) -> Mapping[str, MetricResult]:
        if method not in self.results:
            raise NotEvaluatedError(f"method {method!r} was not evaluated here; {did_you_mean(method, self.results)}")
        return self.results[method]

    def _one(self, method: str, metric: str) -> MetricResult:
        row = self._of(method)
        if metric not in row:
            raise MetricError(f"metric {metric!r} was not evaluated here; {did_you_mean(metric, row)}")
        return row[metric]


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}" if abs(value) < 1e-3 and value else f"{value:.3f}"
