"""Write the tables and pictures of docs/leaderboard.md, from assets/leaderboard/table.parquet.

Two short tables go to the page, and all others to assets/tables/leaderboard.md. Methods that look
at a layer are left out on the mobile network with known evidence: there, its last maps have 2 x 2
positions for 64 pixels, and show nothing of a mark.

    python examples/leaderboard/page.py [--check]

Intervals are of the bootstrap over photos (95 %), and over the distinct maps too where a metric's
order of methods is compared with the truth. ``--check`` only says whether the page has the tables
of what is stored.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
from cells import SAME, Cell, beats, cells_of
from run import BLIND, COSTLY_FROM, LOCAL, TRUTH_METRICS, better
from standings import Array, figures, interval, means, rank_correlation
from store import ROOT, TABLE, stored

from explain.methods import list_methods
from explain.methods.base import FAMILIES, MAPS, PATTERNS, get_method, innermost_method, uses_layer
from explain.metrics import get_metric

sys.path.append(str(ROOT / "examples" / "benchmarks"))

from tables import line, published, replaced

PAGE = ROOT / "docs" / "leaderboard.md"
FULL = ROOT / "assets" / "tables" / "leaderboard.md"
DATA = ROOT / "docs" / "_static" / "leaderboard-data.js"
PICTURES = ROOT / "assets" / "leaderboard"
FEWEST = 10  # photos, for a figure to be shown on the page
MODELS = ("residual", "transformer", "plain", "mobile")
KNOWN = ("planted", "parts")
IN_UNITS_OF_THE_MAP = ("completeness", "locallipschitz")  # scores times 100 give 100 times as much


@cache
def board() -> dict[tuple[str, str], Cell]:
    rows = [row for row in stored(TABLE) if not is_left_out(*row[:4])]
    return {(cell.truth, cell.model): cell for cell in cells_of(rows)}


def is_left_out(truth: str, model: str, method: str, metric: str) -> bool:
    """Whether a method looks at a layer of 2 x 2 positions."""
    if truth not in KNOWN or model != "mobile":
        return False
    return looks_at_layer(method) or looks_at_layer(metric.removeprefix(SAME))


@cache
def looks_at_layer(name: str) -> bool:
    return name in list_methods() and uses_layer(get_method(name))


@cache
def signs() -> dict[str, int]:
    return {name: 1 if each == "more" else -1 for name, each in better().items()}


def group_of(metric: str) -> str:
    """The room of a metric: faithfulness, localisation, …"""
    if metric in TRUTH_METRICS:
        return "truth"
    return (
        "faithfulness"
        if metric == "faithful"
        else type(get_metric(metric)).__module__.rpartition(".")[2]
    )


def is_cam_or_control(method: str) -> bool:
    return method in BLIND or innermost_method(method).family in (MAPS, PATTERNS)


def family_of(method: str) -> str:
    return "control maps" if method in BLIND else innermost_method(method).family


def label(method: str) -> str:
    return f"*{method}*" if method in BLIND else f"`{method}`"


@cache
def places(truth: str, model: str, metric: str) -> Array:
    """Of the other distinct maps, the share that each method is better than ``(samples,
    methods)``."""
    cell = board()[truth, model]
    return beats(cell.sampled(metric, signs()[metric]), cell.groups)


def pooled(
    method: str, wanted: Iterable[tuple[str, str, str]], weights: Sequence[float] | None = None
) -> Array:
    """A method's mean place over cells and metrics ``(samples,)``, where it has one; NaN where it
    has none."""
    total = np.zeros(1)
    weight = np.zeros(1)
    for (truth, model, metric), each in zip(
        wanted := list(wanted), weights or [1.0] * len(wanted), strict=True
    ):
        cell = board()[truth, model]
        if method in cell.methods and cell.counts(metric)[cell.methods.index(method)]:
            own = places(truth, model, metric)[:, cell.methods.index(method)]
            total = total + each * np.where(np.isnan(own), 0, own)
            weight = weight + each * ~np.isnan(own)
    return np.where(weight > 0, total / np.where(weight > 0, weight, 1), np.nan)


def networks(truth: str) -> list[str]:
    return [model for model in MODELS if (truth, model) in board()]


def triples(truths: Iterable[str], metric: str) -> list[tuple[str, str, str]]:
    """The cells of kinds of ground truth, with a metric."""
    return [(truth, model, metric) for truth in truths for model in networks(truth)]


def metrics() -> list[str]:
    return sorted({name for cell in board().values() for name in cell.metrics})


def methods() -> list[str]:
    return sorted({name for cell in board().values() for name in cell.methods})


# Tables


def percent(samples: Array) -> str:
    """A share with its interval."""
    if np.isnan(samples[0]):
        return "–"
    low, high = interval(samples[1:])
    return f"{samples[0]:.0%} ({low:.0%} to {high:.0%})".replace("%", " %")


def rho(samples: Array) -> str:
    if np.isnan(samples[0]):
        return "–"
    low, high = interval(samples[1:])
    return f"{samples[0]:.2f} ({low:.2f} to {high:.2f})"


def in_markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def of_photos() -> str:
    """What was measured: on how many photos the figures of each cell are."""
    head = (
        "ground truth",
        "network",
        "photos",
        "methods",
        "distinct maps",
        "a few altered photos",
        "usual curves",
        "other curves",
        "robustness and randomisation",
        "costly methods",
        "combinations",
    )
    rows = []
    total = 0
    for truth, model, _ in triples((*KNOWN, "boxes"), ""):
        cell = board()[truth, model]
        there = ~np.isnan(cell.values)
        filled = int(there.any(0).sum())
        total += filled
        kinds = [
            [i for i, name in enumerate(cell.metrics) if name == each]
            for each in ("infidelity", "deletion", "irof", "maxsensitivity")
        ]
        costly = [i for i, name in enumerate(cell.methods) if cell.passes[name] > COSTLY_FROM]
        counts = [*(there[:, :, each].any((1, 2)) for each in kinds), there[:, costly].any((1, 2))]
        sizes = (
            len(cell.photos),
            len(cell.methods),
            len(cell.firsts),
            *(int(each.sum()) for each in counts),
        )
        rows.append((truth, model, *map(str, sizes), f"{filled:,}"))
    return in_markdown(head, [*rows, ("all", "", *[""] * 8, f"{total:,}")])


def of_truth() -> str:
    """The methods by the known truth: their mean place in eight cells, and their figure in each."""
    wanted = triples(KNOWN, "truth")
    found = {name: pooled(name, wanted) for name in methods()}
    kinds = [triples([truth], "truth") for truth in KNOWN]
    head = (
        "method",
        "passes",
        "cells",
        "win rate",
        *KNOWN,
        *(f"{truth}, {model}" for truth, model, _ in wanted),
    )
    rows = []
    for name in sorted(found, key=lambda each: (-np.nan_to_num(found[each][0], nan=-1), each)):
        if not np.isnan(found[name][0]):
            own = [figure(truth, model, "truth", name) for truth, model, _ in wanted]
            cells = sum(each != "–" for each in own)
            means_ = (
                placed(found[name], of_few(name, wanted)),
                *(share(pooled(name, kind)) for kind in kinds),
            )
            rows.append((label(name), passes(name), str(cells), *means_, *own))
    return in_markdown(head, rows)


def of_few(method: str, wanted: Sequence[tuple[str, str, str]]) -> bool:
    """Whether a method was measured on fewer than ten photos of a cell, by the metric that was
    measured most."""
    most: dict[tuple[str, str], int] = {}
    for truth, model, metric in wanted:
        cell = board()[truth, model]
        if method in cell.methods:
            count = int(cell.counts(metric)[cell.methods.index(method)])
            most[truth, model] = max(count, most.get((truth, model), 0))
    return min((each for each in most.values() if each), default=0) < FEWEST


def placed(samples: Array, few: bool) -> str:
    """A mean place, with an interval where it is of enough photos."""
    return share(samples) if few else percent(samples)


def share(samples: Array) -> str:
    return "–" if np.isnan(samples[0]) else f"{samples[0]:.0%}".replace("%", " %")


def passes(method: str) -> str:
    known = [cell.passes[method] for cell in board().values() if method in cell.passes]
    cost = float(np.median(known))
    return f"{cost:.0f}" if cost >= 9.95 else f"{cost:.1f}"


def figure(truth: str, model: str, metric: str, method: str) -> str:
    """A mean, and the photos it is of where these are not nearly all."""
    cell = board()[truth, model]
    if method not in cell.methods:
        return "–"
    place = cell.methods.index(method)
    count = int(cell.counts(metric)[place])
    if not count:
        return "–"
    mean = signs()[metric] * cell.sampled(metric, signs()[metric])[0, place]
    return f"{mean:.2f}" if count > 0.5 * len(cell.photos) else f"{mean:.2f} ({count})"


@cache
def agreement(truth: str, model: str, metric: str, one_family: bool = False) -> Array:
    """How alike a metric and the truth rank the distinct maps, in samples of photos and maps
    ``(samples,)``; with ``one_family``, those that are no class activation maps and no control
    maps."""
    cell = board()[truth, model]
    maps = cell.firsts
    if one_family:
        maps = np.array([i for i in maps if not is_cam_or_control(cell.methods[i])], np.int64)
    one = places(truth, model, metric)
    other = places(truth, model, "truth")
    one = np.where(cell.steady(metric), one, np.nan)
    generator = np.random.default_rng(0)
    found = [rank_correlation(one[0, maps], other[0, maps])]
    for a, b in zip(one[1:], other[1:], strict=True):
        sample = generator.choice(maps, len(maps))
        found.append(rank_correlation(a[sample], b[sample]))
    return np.array(found)


def mean_of(samples: Sequence[Array]) -> Array:
    """The mean of several figures, in each sample, over those that there are."""
    every = np.stack(samples) if len(samples) else np.full((1, 1), np.nan)
    count = (~np.isnan(every)).sum(0)
    return np.where(
        count > 0,
        np.where(np.isnan(every), 0, every).sum(0) / np.where(count > 0, count, 1),
        np.nan,
    )


@cache
def agreements(metric: str) -> dict[str, Array]:
    """By kind of truth and over both, the mean agreement of a metric with it."""
    cells = {
        truth: [agreement(truth, model, metric) for model in networks(truth)] for truth in KNOWN
    }
    found = {truth: mean_of(each) for truth, each in cells.items()}
    return found | {"both": mean_of([found[truth] for truth in KNOWN if len(found[truth]) > 1])}


def photos_of(metric: str) -> int:
    """The smallest number of photos of a cell that a metric was measured on."""
    counts = [int(cell.counts(metric).max()) for cell in board().values() if cell.truth in KNOWN]
    return min((each for each in counts if each), default=0)


def candidates() -> list[str]:
    """The metrics that do not know where the evidence or the object is, and have no unit of the
    map's."""
    told = {*TRUTH_METRICS, *LOCAL, *IN_UNITS_OF_THE_MAP}
    return [name for name in metrics() if name not in told]


def of_metrics() -> str:
    """The metrics by their agreement with the truth, and where the best control map
    stands by them."""
    head = (
        "metric",
        "kind",
        "photos of a cell",
        "agrees with the truth",
        "planted",
        "parts",
        "best control map",
    )
    every = [name for name in metrics() if name not in TRUTH_METRICS]
    order = sorted(
        every, key=lambda each: (-np.nan_to_num(agreements(each)["both"][0], nan=-2), each)
    )
    rows = []
    for name in order:
        found = agreements(name)
        cells = triples(KNOWN, name)
        blind = {each: pooled(each, cells)[0] for each in BLIND if each in methods()}
        best = max(blind, key=lambda each: np.nan_to_num(blind[each], nan=-1))
        told = f"*{best}* {share(np.array([blind[best]]))}" if blind[best] == blind[best] else "–"
        rows.append(
            (
                f"`{name}`",
                group_of(name),
                str(photos_of(name)),
                rho(found["both"]),
                rho(found["planted"]),
                rho(found["parts"]),
                told,
            )
        )
    return in_markdown(head, rows)


def weights() -> dict[str, float]:
    """What each metric counts on photos without a known truth: its agreement with the truth, where
    it is surely one."""
    found = {name: agreements(name)["both"] for name in candidates()}
    return {name: float(each[0]) for name, each in found.items() if interval(each[1:])[0] > 0}


def of_photographs() -> str:
    """The methods on photographs: by metrics that agree with the truth, and by the box around the
    object."""
    weighed = weights()
    cells = networks("boxes")
    faithful = [("boxes", model, name) for model in cells for name in weighed]
    local = [("boxes", model, name) for model in cells for name in LOCAL]
    found = {
        name: pooled(name, faithful, [weighed[metric] for _, _, metric in faithful])
        for name in methods()
    }
    head = (
        "method",
        "win rate, by metrics that agree with the truth",
        *cells,
        "win rate, by the box",
    )
    rows = []
    for name in sorted(found, key=lambda each: (-np.nan_to_num(found[each][0], nan=-1), each)):
        if np.isnan(found[name][0]):
            continue
        by_model = [
            pooled(name, [("boxes", model, metric) for metric in weighed], list(weighed.values()))
            for model in cells
        ]
        told = placed(found[name], of_few(name, faithful))
        beside = placed(pooled(name, local), of_few(name, local))
        rows.append((label(name), told, *map(share, by_model), beside))
    return in_markdown(head, rows)


def parts_agree(cell: Cell, metric: str, one: Array, other: Array) -> float:
    """How alike two parts of the photos, as truth values, rank the distinct maps by a metric."""
    values = cell.of(metric)[:, cell.firsts]
    return rank_correlation(*(means(values, part[None].astype(float))[0] for part in (one, other)))


def cells_agree(one: tuple[str, str, str], other: tuple[str, str, str]) -> float:
    """How alike two cells rank the maps that are distinct in the first, each by its metric."""
    a = board()[one[:2]]
    b = board()[other[:2]]
    both = [name for name in (a.methods[i] for i in a.firsts) if name in b.methods]
    first, second = (
        np.array([places(*which)[0, cell.methods.index(name)] for name in both])
        for cell, which in ((a, one), (b, other))
    )
    return rank_correlation(first, second)


def stability(metric: str, truths: Sequence[str]) -> dict[str, float]:
    """Mean rank correlations of a metric's order of methods: with other photos, another seed, and
    other networks."""
    wanted = [each for each in triples(truths, metric) if metric in board()[each[:2]].metrics]
    generator = np.random.default_rng(0)
    found: dict[str, list[float]] = {"photos": [], "seeds": [], "networks": []}
    for truth, model, _ in wanted:
        cell = board()[truth, model]
        there = ~np.isnan(cell.of(metric)).all(1)
        for _ in range(20):
            half = np.zeros(len(there), bool)
            half[generator.permutation(np.flatnonzero(there))[::2]] = True
            found["photos"].append(parts_agree(cell, metric, half, there & ~half))
        for a, b in ((0, 1), (0, 2), (1, 2)):
            found["seeds"].append(
                parts_agree(cell, metric, there & (cell.seeds == a), there & (cell.seeds == b))
            )
    for one, other in combinations(wanted, 2):
        if one[0] == other[0]:
            found["networks"].append(cells_agree(one, other))
    return {
        name: float(np.nanmean(each)) if not np.isnan(each).all() else np.nan
        for name, each in found.items()
    }


def of_stability() -> str:
    """Which rankings come out again."""
    head = (
        "metric",
        "ground truth",
        "half of the photos, with the other half",
        "seed, with another seed",
        "network, with another network",
    )
    every = [("truth", (truth,)) for truth in KNOWN]
    every += [(name, (*KNOWN, "boxes")) for name in metrics() if name not in TRUTH_METRICS]
    found = {each: stability(*each) for each in every}
    order = every[:2] + sorted(
        every[2:], key=lambda each: -np.nan_to_num(found[each]["photos"], nan=-1)
    )
    return in_markdown(
        head,
        [
            (
                f"`{name}`",
                truths[0] if len(truths) == 1 else "all",
                *map(number, found[name, truths].values()),
            )
            for name, truths in order
        ],
    )


def number(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.2f}"


def of_kinds() -> str:
    """How alike the kinds of ground truth rank the methods, for each network."""
    rows = []
    for one, other in (
        (("planted", "truth"), ("parts", "truth")),
        (("planted", "truth"), ("boxes", "relevancerank")),
        (("parts", "truth"), ("boxes", "relevancerank")),
    ):
        agree = [
            cells_agree((one[0], model, one[1]), (other[0], model, other[1]))
            if {(one[0], model), (other[0], model)} <= set(board())
            else np.nan
            for model in MODELS
        ]
        rows.append(
            (*(f"{kind}, `{metric}`" for kind, metric in (one, other)), *map(number, agree))
        )
    return in_markdown(("one ranking", "another", *MODELS), rows)


TRUTHS = (
    ("planted", "truth", "best square"),
    ("planted", "relevancerank", "top pixels"),
    ("planted", "auc", "pixel AUC"),
    ("parts", "truth", "parts, Shapley"),
    ("parts", "truth-removal", "parts, removal"),
)
"""What a method may be right about: a kind of ground truth, a metric, and what the page calls
it."""


def is_shown(method: str) -> bool:
    """Whether a method was measured on ten photos or more of each cell, and has a map that no
    method before it has."""
    cells = [cell for cell in board().values() if cell.truth in KNOWN and method in cell.methods]
    counts = [int(cell.counts("truth")[cell.methods.index(method)]) for cell in cells]
    firsts = [cell.methods.index(method) in cell.firsts for cell in cells]
    return min(counts, default=0) >= FEWEST and any(firsts)


def of_methods() -> str:
    """The mean win rate of each method by each truth; for the first one, its interval too."""
    rates: dict[str, list[Array]] = {}
    for name in filter(is_shown, methods()):
        rates[name] = [pooled(name, triples([truth], metric)) for truth, metric, _ in TRUTHS]
    head = ["method", "passes", *(words for _, _, words in TRUTHS)]
    rows = []
    for name in sorted(rates, key=lambda each: -np.nan_to_num(rates[each][0][0], nan=-1)):
        first, *others = rates[name]
        rows.append([label(name), passes(name), percent(first), *map(share, others)])
    return in_markdown(head, rows)


def of_candidates() -> str:
    """The metrics by their agreement with the truth, over all maps and over those that are no class
    activation maps and no control maps; where they are measured on ten photos or more."""
    head = ("metric", "photos", "planted", "parts", "planted, one family", "parts, one family")
    found: dict[str, list[Array]] = {}
    for name in candidates():
        if photos_of(name) < FEWEST:
            continue
        every = agreements(name)
        found[name] = [every[truth] for truth in KNOWN]
        for truth in KNOWN:
            within = [agreement(truth, model, name, True) for model in networks(truth)]
            found[name].append(mean_of(within))
    order = sorted(found, key=lambda each: -np.nan_to_num(found[each][0][0], nan=-2))
    rows = [(f"`{name}`", str(photos_of(name)), *map(rho, found[name])) for name in order]
    return in_markdown(head, rows)


SHORT: Mapping[str, Callable[[], str]] = {
    "board-methods": of_methods,
    "board-candidates": of_candidates,
}
TABLES: Mapping[str, Callable[[], str]] = {
    "board-photos": of_photos,
    "board-truth": of_truth,
    "board-metrics": of_metrics,
    "board-photographs": of_photographs,
    "board-stability": of_stability,
    "board-kinds": of_kinds,
}


# Pictures and data


def data() -> str:
    """All means, halves of their intervals and photos, for the table with filters."""
    names = metrics()
    every = []
    for (truth, model), cell in sorted(board().items()):
        middle = []
        half = []
        count = []
        share = []
        for name in names:
            sampled = signs()[name] * cell.sampled(name, signs()[name])
            own = figures(cell.raw(name), cell.weights)
            few = np.array([each["photos"] < FEWEST for each in own])
            middle.append(_short(np.where(few, np.nan, sampled[0]), 4))
            spread = [
                np.nan if each["photos"] < FEWEST else (each["high"] - each["low"]) / 2
                for each in own
            ]
            half.append(_short(np.array(spread), 2))
            share.append(_short(np.where(few, np.nan, places(truth, model, name)[0])))
            count.append([each["photos"] for each in own])
        every.append(
            {
                "truth": truth,
                "model": model,
                "methods": cell.methods,
                "means": middle,
                "half": half,
                "photos": count,
                "places": share,
            }
        )
    found = {
        "metrics": [
            {"name": name, "group": group_of(name), "more": signs()[name] > 0} for name in names
        ],
        "families": {name: family_of(name) for name in methods()},
        "passes": {name: float(passes(name)) for name in methods()},
        "cells": every,
    }
    return f"window.LEADERBOARD = {json.dumps(found, separators=(',', ':'), ensure_ascii=False)};\n"


def _short(values: Array, digits: int = 3) -> list[float | None]:
    return [None if x != x else float(f"{x:.{digits}g}") for x in values.tolist()]


def drawn(folder: Path) -> list[Path]:
    """The pictures: truth against cost, and the agreement of metrics with the truth."""
    from pictures import against_cost, agreement_map

    found = {}
    for truth in KNOWN:
        wanted = triples([truth], "truth")
        place = {name: pooled(name, wanted) for name in methods() if not of_few(name, wanted)}
        found[f"cost-{truth}.png"] = against_cost(
            truth,
            {
                name: (float(passes(name)), each)
                for name, each in place.items()
                if not np.isnan(each[0])
            },
            {name: family_of(name) for name in place},
            FAMILIES,
        )
    measured = [name for name in candidates() if photos_of(name) >= FEWEST]
    order = sorted(measured, key=lambda each: -np.nan_to_num(agreements(each)["both"][0], nan=-2))
    cells = [each[:2] for each in triples(KNOWN, "truth")]
    values = np.array([[agreement(*cell, name)[0] for cell in cells] for name in order])
    found["agreement.png"] = agreement_map(
        order, [f"{truth}\n{model}" for truth, model in cells], values
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in found.items():
        picture.savefig(folder / name, dpi=110)
    return [folder / name for name in found]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    pages = {PAGE: SHORT, FULL: TABLES}
    wrong = []
    for page, tables in pages.items():
        text = page.read_text("utf-8")
        for name, table in tables.items():
            rows = table()
            if published(text, name).strip() != rows:
                wrong.append(name)
            text = replaced(text, name, rows)
        if not options.check:
            page.write_text(text, "utf-8")
    if options.check:
        wrong += [DATA.name] * (not DATA.exists() or DATA.read_text("utf-8") != data())
        print(f"not as it is stored: {', '.join(wrong)}" if wrong else "as it is stored")
        return bool(wrong)
    DATA.write_text(data(), "utf-8")
    for file in (*pages, DATA, *drawn(PICTURES)):
        print(f"written to {file.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
