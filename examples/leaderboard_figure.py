"""Quality against cost: each method a point with its interval, the baselines as lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from explain.methods.base import FAMILIES

PANELS = {"relevancerank": "on the object's box", "road": "for the model's answer"}
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
SIZE = 9
HEIGHT = 0.022  # of a label, as a share of the panel's
WIDTH = 0.0125  # of a letter, as a share of the panel's width


def figure(name: str, model: Mapping[str, Any]) -> Figure:
    """Draw a panel for each of two metrics: one of boxes, one of faithfulness."""
    columns = [metric for metric in PANELS if metric in model["metrics"]] or list(model["metrics"])[:1]
    found = Figure(figsize=(8, 7.6 * len(columns)), layout="constrained")
    for axes, metric in zip(found.subplots(len(columns), 1, squeeze=False)[:, 0], columns, strict=True):
        _panel(axes, metric, model)
    handles, labels = found.axes[0].get_legend_handles_labels()
    found.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    found.suptitle(f"{name}, {model['photos']} photos: means and 95 % intervals; up is better, left is cheaper")
    return found


def _panel(axes: Axes, metric: str, model: Mapping[str, Any]) -> None:
    better = model["metrics"][metric]["better"]
    points = {}
    for name, method in model["methods"].items():
        found = method["metrics"].get(metric)
        if found is None or found["mean"] is None:
            continue
        if method["ranked"]:
            points[name] = (max(method["cost"], 0.5), found)
        elif method["kind"] == "baseline":
            axes.axhline(found["mean"], color="0.6", linestyle="--", linewidth=1, zorder=0)
    for kind, colour, marker in zip(FAMILIES, COLOURS, MARKERS, strict=False):
        mine = [points[name] for name in points if model["methods"][name]["family"] == kind]
        if not mine:
            continue
        x, y = [cost for cost, _ in mine], [each["mean"] for _, each in mine]
        reach = [[each["mean"] - each["low"] for _, each in mine], [each["high"] - each["mean"] for _, each in mine]]
        axes.errorbar(x, y, yerr=reach, fmt=marker, color=colour, markersize=5, elinewidth=0.8, alpha=0.85, label=kind)
    axes.set(xscale="log", xlabel="cost in bare forward passes")
    axes.set_ylabel(f"{metric} ({'more' if better == 'more' else 'less'} is better)")
    axes.set_title(f"{metric}: {PANELS.get(metric, '')}".rstrip(": "), fontsize=11)
    if better == "less":
        axes.invert_yaxis()
    left, right = axes.get_xlim()
    axes.set_xlim(left / 1.5, right * 4)
    _label(axes, {name: (cost, each["mean"]) for name, (cost, each) in points.items()}, _lines(model, metric))


def _lines(model: Mapping[str, Any], metric: str) -> dict[str, float]:
    return {
        name: method["metrics"][metric]["mean"]
        for name, method in model["methods"].items()
        if method["kind"] == "baseline" and metric in method["metrics"]
    }


def _label(axes: Axes, points: Mapping[str, tuple[float, float]], lines: Mapping[str, float]) -> None:
    """Write each name beside its point, where it covers no other name; the baselines' at the right edge."""
    taken: list[tuple[float, float, float, float]] = []
    to_panel = axes.transData + axes.transAxes.inverted()
    for name, y in sorted(lines.items(), key=lambda each: each[1]):
        height = float(to_panel.transform((axes.get_xlim()[0], y))[1])
        corner = _free([(0.99 - WIDTH * len(name), height + up) for up in (0.004, -0.026, 0.03, -0.05)], name, taken)
        axes.text(0.99, corner[1], name, transform=axes.transAxes, ha="right", va="bottom", fontsize=SIZE, color="0.35")
    spots = {name: tuple(map(float, to_panel.transform(place))) for name, place in points.items()}
    taken += [(x - 0.006, y - 0.008, x + 0.006, y + 0.008) for x, y in spots.values()]
    for name, (x, y) in sorted(spots.items(), key=lambda each: -each[1][1]):
        corner = _free(list(_around(x, y, name)), name, taken)
        if abs(corner[1] - y) > 0.03 or abs(corner[0] - x) > 0.03 + WIDTH * len(name):
            axes.plot([x, corner[0]], [y, corner[1] + HEIGHT / 2], transform=axes.transAxes, color="0.7", linewidth=0.5)
        axes.text(*corner, name, transform=axes.transAxes, ha="left", va="bottom", fontsize=SIZE)


def _around(x: float, y: float, name: str) -> Iterator[tuple[float, float]]:
    """Corners of a label near a point, nearer ones first."""
    width = WIDTH * len(name)
    for step in range(12):
        for up in sorted({step, -step}):
            for left in (x + 0.009, x - width - 0.004):
                yield left + 0.004 * step, y - HEIGHT / 2 + up * 0.8 * HEIGHT


def _free(
    corners: Sequence[tuple[float, float]], name: str, taken: list[tuple[float, float, float, float]]
) -> tuple[float, float]:
    """The first corner at which a label covers nothing; the first of all where there is none."""
    width = WIDTH * len(name)
    for x, y in corners:
        box = (x, y, x + width, y + HEIGHT)
        inside = box[0] > 0 and box[2] < 1 and box[1] > 0 and box[3] < 1
        if inside and not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken):
            taken.append(box)
            return x, y
    taken.append((corners[0][0], corners[0][1], corners[0][0] + width, corners[0][1] + HEIGHT))
    return corners[0]
