"""The pictures of docs/leaderboard.md: how right a method is against what it costs, and which
metrics say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from standings import Array, interval

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
BLIND = "control maps"
SIZE = 8
# of a label and of a letter, as shares of the panel
HEIGHT = 0.02
WIDTH = 0.0105


def against_cost(
    truth: str,
    points: Mapping[str, tuple[float, Array]],
    families: Mapping[str, str],
    order: Sequence[str],
) -> Figure:
    """Each method a point with its interval, by cost in passes and by its win rate."""
    found = Figure(figsize=(8.5, 8), layout="constrained")
    axes = found.subplots()
    for family, colour, marker in zip(
        (*order, BLIND), [*COLOURS, "0.6"], [*MARKERS, "x"], strict=False
    ):
        mine = [
            each for name, each in points.items() if families[name] == family and family != BLIND
        ]
        if mine:
            x = [max(cost, 0.8) for cost, _ in mine]
            y = np.array([each[0] for _, each in mine])
            ends = np.array([interval(each[1:] if len(each) > 1 else each) for _, each in mine]).T
            reach = np.clip([y - ends[0], ends[1] - y], 0, None)
            axes.errorbar(
                x,
                y,
                yerr=reach,
                fmt=marker,
                color=colour,
                markersize=5,
                elinewidth=0.8,
                label=family,
            )
    blind = {name: float(each[0]) for name, (_, each) in points.items() if families[name] == BLIND}
    for height in blind.values():
        axes.axhline(height, color="0.6", linestyle="--", linewidth=1, zorder=0)
    axes.set(
        xscale="log",
        xlabel="cost in forward passes",
        ylabel="win rate against the other maps",
        ylim=(0, 1),
    )
    axes.set_title(
        f"Right on {truth} evidence: mean over networks, with 95 % intervals",
        fontsize=11,
    )
    left, right = axes.get_xlim()
    axes.set_xlim(left / 1.3, right * 4)
    own = {
        name: (max(cost, 0.8), float(each[0]))
        for name, (cost, each) in points.items()
        if name not in blind
    }
    _label(axes, own, blind)
    handles, labels = axes.get_legend_handles_labels()
    found.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    return found


def agreement_map(metrics: Sequence[str], cells: Sequence[str], values: Array) -> Figure:
    """The rank correlation of each metric with the truth, on each network."""
    found = Figure(figsize=(8, 0.24 * len(metrics) + 1.2), layout="constrained")
    axes = found.subplots()
    shown = axes.imshow(values, vmin=-1, vmax=1, cmap="RdBu", aspect="auto")
    axes.set_xticks(range(len(cells)), cells, fontsize=8)
    axes.set_yticks(range(len(metrics)), metrics, fontsize=8)
    axes.xaxis.tick_top()
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "white" if abs(value) > 0.6 else "black"
            axes.text(
                column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour
            )
    found.colorbar(shown, ax=axes, label="rank correlation with the truth", shrink=0.5)
    return found


def _label(
    axes: Axes, points: Mapping[str, tuple[float, float]], lines: Mapping[str, float]
) -> None:
    """Write each name beside its point, where it covers no other name; those of lines at the right
    edge."""
    taken: list[tuple[float, float, float, float]] = []
    to_panel = axes.transData + axes.transAxes.inverted()
    for name, y in sorted(lines.items(), key=lambda each: each[1]):
        height = float(to_panel.transform((axes.get_xlim()[0], y))[1])
        corner = _free(
            [(0.99 - WIDTH * len(name), height + up) for up in (0.004, -0.024, 0.028, -0.048)],
            name,
            taken,
        )
        axes.text(
            0.99,
            corner[1],
            name,
            transform=axes.transAxes,
            ha="right",
            va="bottom",
            fontsize=SIZE,
            color="0.35",
        )
    spots = {name: tuple(map(float, to_panel.transform(place))) for name, place in points.items()}
    taken += [(x - 0.006, y - 0.008, x + 0.006, y + 0.008) for x, y in spots.values()]
    for name, (x, y) in sorted(spots.items(), key=lambda each: -each[1][1]):
        corner = _free(list(_around(x, y, name)), name, taken)
        if abs(corner[1] - y) > 0.03 or abs(corner[0] - x) > 0.03 + WIDTH * len(name):
            axes.plot(
                [x, corner[0]],
                [y, corner[1] + HEIGHT / 2],
                transform=axes.transAxes,
                color="0.7",
                linewidth=0.5,
            )
        axes.text(*corner, name, transform=axes.transAxes, ha="left", va="bottom", fontsize=SIZE)


def _around(x: float, y: float, name: str) -> Iterator[tuple[float, float]]:
    """Corners of a label near a point, nearer ones first."""
    width = WIDTH * len(name)
    for step in range(14):
        for up in sorted({step, -step}):
            for left in (x + 0.009, x - width - 0.004):
                yield left + 0.004 * step, y - HEIGHT / 2 + up * 0.8 * HEIGHT


def _free(
    corners: Sequence[tuple[float, float]],
    name: str,
    taken: list[tuple[float, float, float, float]],
) -> tuple[float, float]:
    """The first corner at which a label covers nothing; the first of all where there is none."""
    width = WIDTH * len(name)
    for x, y in corners:
        box = (x, y, x + width, y + HEIGHT)
        inside = box[0] > 0 and box[2] < 1 and box[1] > 0 and box[3] < 1
        if inside and not any(
            box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken
        ):
            taken.append(box)
            return x, y
    taken.append((*corners[0], corners[0][0] + width, corners[0][1] + HEIGHT))
    return corners[0]
