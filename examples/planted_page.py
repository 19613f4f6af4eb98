"""What was measured with planted evidence: its summary, its pictures, and its part of docs/leaderboard.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from standings import draws, figures

BASELINES = ["centre blob", "edges", "uniform", "randomcam"]
COLUMNS = {
    ("one mark", "mark"): "on the mark",
    ("one mark", "hit"): "maximum on it",
    ("one mark", "decoys"): "on decoys",
    ("no mark", "decoys"): "no mark: on decoys",
    ("three marks", "mark"): "three marks: on the mark",
    ("two marks", "mark"): "two marks: on the mark of the target",
    ("two marks", "other mark"): "on the other mark",
}
MARK = 144 / 4096  # the share of a photo that a mark covers


def summary(results: Path) -> dict[str, Any]:
    """Means with intervals for each setting, method and place, and what the models had learnt."""
    models = {
        file.stem: {name: round(value, 4) for name, value in json.loads(file.read_text("utf-8")).items()}
        for file in sorted(results.glob("marks-*.json"))
    }
    by_setting: dict[str, list[Any]] = {}
    for file in sorted(results.glob("[0-9]*-*.json")):
        record = json.loads(file.read_text("utf-8"))
        by_setting.setdefault(record["setting"], []).append(record)
    if not by_setting:
        raise SystemExit(f"planted_evidence.py: results must hold a measured photo, got none in {str(results)!r}")
    settings = {name: of_setting(records) for name, records in by_setting.items()}
    return {"models": models, "share of a mark": round(MARK, 4), "settings": settings}


def of_setting(records: Sequence[Any]) -> dict[str, Any]:
    names = sorted({name for record in records for name in record["shares"]})
    places = sorted({place for record in records for each in record["shares"].values() for place in each})
    weights = draws(len(records))
    methods: dict[str, Any] = {name: {} for name in names}
    for place in places:
        rows = [[record["shares"].get(name, {}).get(place) for name in names] for record in records]
        values = np.array([[np.nan if v is None else v for v in row] for row in rows], dtype=np.float64)
        for name, figure in zip(names, figures(values, weights), strict=True):
            if figure["photos"]:
                methods[name][place] = {key: float(f"{value:.4g}") for key, value in figure.items()}
    right = sum(record["right"] for record in records) / len(records)
    return {"photos": len(records), "right": round(right, 4), "methods": methods}


def cell_of(found: Mapping[str, Any], name: str, column: tuple[str, str]) -> Mapping[str, float] | None:
    """A figure of a method, if there is one."""
    setting, place = column
    figure: Mapping[str, float] | None = found["settings"].get(setting, {}).get("methods", {}).get(name, {}).get(place)
    return figure


def in_order(found: Mapping[str, Any]) -> list[str]:
    """The methods by their share on the mark, largest first; the baselines last."""
    column = ("one mark", "mark")
    names = {name for each in found["settings"].values() for name in each["methods"]}
    share = {name: (cell_of(found, name, column) or {"mean": -1.0})["mean"] for name in names}
    return sorted(names, key=lambda name: (name in BASELINES, -share[name], name))


# The page


def section(found: Mapping[str, Any]) -> str:
    """The part of the page, made of the summary."""
    return "\n\n".join([INTRODUCTION.format(**told(found)), shown(found), table(found), PICTURES])


def told(found: Mapping[str, Any]) -> dict[str, str]:
    models = [f"{_marks(name)}, {_learnt(each)}" for name, each in found["models"].items()]
    counts = sorted({each["photos"] for each in found["settings"].values()})
    told = f"{counts[0]} photos" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} photos"
    return {"models": "; ".join(models), "photos": f"{told} of each kind", "share": f"{found['share of a mark']:.1%}"}


def _marks(name: str) -> str:
    return {"marks-1": "with one mark", "marks-3": "with three marks"}[name]


def _learnt(each: Mapping[str, float]) -> str:
    changed = each.get("decoys change the answer")
    return (
        f"the mark decides in {each['mark decides']:.1%}, {1 - each['no mark, no such class']:.1%} of the photos "
        "without a mark are taken for marked ones, and decoys make no difference to either in "
        f"{each['decoys decide nothing']:.1%}; but of photos without a mark, decoys lower the accuracy from "
        f"{each['own class without a mark']:.0%} to {each['the same with decoys']:.0%}"
        + (f" and change {changed:.0%} of the answers" if changed is not None else "")
    )


def shown(found: Mapping[str, Any]) -> str:
    """What the figures say, in sentences."""
    methods = [name for name in in_order(found) if name not in BASELINES]
    one = {name: cell_of(found, name, ("one mark", "mark")) for name in methods}
    known = {name: each for name, each in one.items() if each is not None}
    uniform = found["share of a mark"]
    blind_ones = {name: cell_of(found, name, ("one mark", "mark")) for name in in_order(found) if name in BASELINES}
    strongest = max((each["mean"], name) for name, each in blind_ones.items() if each is not None)
    below = [name for name, each in known.items() if each["low"] <= strongest[0]]
    first = ", ".join(f"`{name}` ({known[name]['mean']:.0%})" for name in list(known)[:5])
    lines = [f"- The largest shares on the mark: {first}. A uniform map has {uniform:.1%}."]
    if below:
        lines.append(
            f"- **Not significantly more than the strongest baseline** ({strongest[1]}, {strongest[0]:.0%}): "
            f"{_listed(below)}. The mark is salient, so even maps with random weights are high there."
        )
    hits = {name: cell_of(found, name, ("one mark", "hit")) for name in methods}
    always = [name for name, each in hits.items() if each is not None and each["mean"] >= 0.95]
    if always:
        lines.append(f"- The maximum is on the mark in at least 95 % of the photos for {_listed(always)}.")
    confused = [name for name in methods if _confused(found, name)]
    if confused:
        lines.append(
            "- **Two marks, one of them the target:** not significantly more on the mark of the target than on the "
            f"other: {_listed(confused)}."
        )
    drawn_to = [
        name for name in methods if (each := cell_of(found, name, ("no mark", "decoys"))) and each["low"] > 0.16
    ]
    if drawn_to:
        lines.append(
            "- **No mark:** decoys cover 7 % of the photo and mostly leave its class as it is, but more than 16 % of "
            f"the map is on them for {_listed(drawn_to)}."
        )
    return "\n".join(lines)


def _confused(found: Mapping[str, Any], name: str) -> bool:
    asked, other = (cell_of(found, name, ("two marks", place)) for place in ("mark", "other mark"))
    return asked is not None and other is not None and asked["low"] <= other["high"]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table(found: Mapping[str, Any]) -> str:
    """Shares with half the width of their 95 % intervals, in per cent."""
    rows = [["method", "photos", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 2)]
    for name in in_order(found):
        cells = [_cell(cell_of(found, name, column)) for column in COLUMNS]
        photos = max((int(c["photos"]) for column in COLUMNS if (c := cell_of(found, name, column))), default=0)
        rows.append([f"*{name}*" if name in BASELINES else f"`{name}`", str(photos), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return "–"
    return f"{100 * figure['mean']:.0f} ± {50 * (figure['high'] - figure['low']):.0f}"


INTRODUCTION = """\
## Planted evidence

Here the evidence is known. The small model was trained further on photos of ten classes, some of them with a mark of
12 pixels (`python examples/planted_evidence.py`). The mark determines the class, whatever the photo shows. Decoys of
the same colours are not taken for marks; they cover some of the photo, as anything would. On photos that were not used
for training: {models}.

The table has the share of each map's positive values on the mark, in per cent ({photos}; fewer for expensive
methods). The mark covers {share} of a photo. Maps of 8 × 8 values extend beyond the mark, because neighbouring
positions see it too; "maximum on it" is fairer to them. Where there is no mark, the target is the photo's own class,
and the share on the decoys should mostly be small: they change some of the answers."""

PICTURES = """\
![Share of each map on the mark, with intervals, and on the decoys](../assets/leaderboard/planted.png)

![A cat with a mark and two decoys, and the maps of eight methods](../assets/leaderboard/planted-maps.png)"""


# The pictures


def pictures(found: Mapping[str, Any], results: Path, assets: Path) -> list[Path]:
    """Draw the shares, and the maps of a photo that may be shown."""
    files = [assets / "planted.png", assets / "planted-maps.png"]
    chart(found).savefig(files[0], dpi=110)
    from planted_maps import maps

    drawn = maps(results)
    if drawn is None:
        return files[:1]
    drawn.savefig(files[1], dpi=110)
    return files


def chart(found: Mapping[str, Any]) -> Figure:
    """A row for each method: its share on the mark with the interval, and on the decoys."""
    names = in_order(found)[::-1]
    figure = Figure(figsize=(9, 1.6 + 0.21 * len(names)), layout="constrained")
    axes = figure.subplots()
    looks = {
        ("one mark", "mark"): ("o", "#0072b2", "one mark: on it"),
        ("two marks", "mark"): ("s", "#009e73", "two marks: on the one asked for"),
        ("two marks", "other mark"): ("x", "#d55e00", "two marks: on the other one"),
        ("one mark", "decoys"): ("|", "#000000", "one mark: on the decoys"),
    }
    for shift, (column, (marker, colour, label)) in zip((0.2, 0.0, -0.2, 0.2), looks.items(), strict=True):
        there = [(row, each) for row, name in enumerate(names) if (each := cell_of(found, name, column)) is not None]
        if not there:
            continue
        means = [each["mean"] for _, each in there]
        reach = [[e["mean"] - e["low"] for _, e in there], [e["high"] - e["mean"] for _, e in there]]
        rows = [row + shift for row, _ in there]
        axes.errorbar(means, rows, xerr=reach, fmt=marker, color=colour, markersize=5, elinewidth=0.8, label=label)
    axes.axvline(found["share of a mark"], color="0.6", linestyle="--", linewidth=1)
    axes.text(found["share of a mark"], len(names) - 0.3, " a uniform map", fontsize=8, color="0.35", va="bottom")
    kinds = [f"{name} *" if name in BASELINES else name for name in names]
    axes.set_yticks(range(len(names)), kinds, fontsize=8)
    axes.set(xlim=(0, 1), ylim=(-0.7, len(names) + 0.6), xlabel="share of the map's positive values (* knows nothing)")
    axes.grid(axis="x", color="0.9")
    axes.legend(loc="lower right", fontsize=9)
    return figure
