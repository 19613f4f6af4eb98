"""What was measured for the leaderboard, as tables, a figure, and the page docs/leaderboard.md."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from standings import DRAWS, FEWEST, beaten, correlations, draws, figures, ranks

import explain
from explain.methods.base import innermost
from explain.metrics import Metric

ROOT = Path(__file__).resolve().parents[1]
ASSETS, PAGE = ROOT / "assets" / "leaderboard", ROOT / "docs" / "leaderboard.md"
BASELINES = ["centre blob", "edges", "uniform", "randomcam"]
REFERENCE = "the box itself"
QUALITY = ["pointinggame", "energypointinggame", "relevancerank", "auc", "deletion", "insertion", "road"]
ABOUT_BOXES, FAITHFUL = QUALITY[:4], QUALITY[4:]
SIGNS = {"more": 1, "less": -1}
BESIDE = "gradcam"  # what methods that were measured on fewer photos are compared with, on these photos
MOST = 0.9  # of the photos: methods that were measured on fewer are not ranked with the others


# From records to a summary


def collected(results: Path, metrics: Mapping[str, Metric], fewest: int = FEWEST) -> dict[str, Any]:
    """A summary of all records in a folder, by model; those of fewer photos than ``fewest`` wait."""
    found, waiting = {}, {}
    for folder in sorted(path for path in results.glob("*") if path.is_dir()):
        records = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
        if len(records) < fewest:
            waiting[folder.name] = len(records)
        else:
            found[folder.name] = of_model(records, metrics)
    import torch

    return {
        "models": found,
        "waiting": waiting,
        "made with": {"explain": explain.__version__, "torch": torch.__version__.split("+")[0]},
    }


def of_model(records: Sequence[Any], metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Means with intervals, costs, who beats which baseline, and how alike metrics rank the methods."""
    names = sorted({name for record in records for name in record["values"]})
    weights = draws(len(records))
    values = {metric: matrix(records, names, metric) for metric in metrics}
    values = {metric: each for metric, each in values.items() if not np.isnan(each).all()}
    signs = {metric: SIGNS[metrics[metric].better] for metric in values}
    by = [name for name in BASELINES if name in names]
    methods: dict[str, Any] = {name: about(name, records) | {"metrics": {}} for name in names}
    for metric, each in values.items():
        better = beaten(each, weights, names, by, signs[metric])
        other = each[:, [names.index(BESIDE)]] if BESIDE in names else np.full((len(each), 1), np.nan)
        found = zip(names, figures(each, weights), figures(each - other, weights), better, strict=True)
        for name, figure, difference, over in found:
            if figure["photos"]:
                beside = {"beside": rounded(difference)} if difference["photos"] else {}
                methods[name]["metrics"][metric] = rounded(figure) | {"better than": over} | beside
    for method in methods.values():
        method["ranked"] = method["kind"] == "method" and counted(method) >= MOST * len(records)
    ranked = [i for i, name in enumerate(names) if methods[name]["ranked"]]
    alike = correlations({metric: each[:, ranked] for metric, each in values.items()}, weights[:501], signs)
    return {
        "photos": len(records),
        "share of the box": round(statistics.fmean(record["share"] for record in records), 3),
        "side": records[0]["side"],
        "pointing": pointing(records),
        "metrics": {name: described(metrics[name]) for name in values},
        "methods": methods,
        "correlations": [rounded(each) for each in alike],
    }


def counted(method: Mapping[str, Any]) -> int:
    """On how many photos a method was measured."""
    return max((int(figure["photos"]) for figure in method["metrics"].values()), default=0)


def pointing(records: Sequence[Any]) -> dict[str, float]:
    """How often a random point and the centre hit in the pointing game."""
    told = [record["pointing"] for record in records if "pointing" in record]
    return {which: round(statistics.fmean(each[which] for each in told), 3) for which in (told[0] if told else ())}


def matrix(records: Sequence[Any], names: Sequence[str], metric: str) -> Any:
    """The values of a metric ``(photos, methods)``; NaN where there is none."""
    rows = [[record["values"].get(name, {}).get(metric) for name in names] for record in records]
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=np.float64)


def about(name: str, records: Sequence[Any]) -> dict[str, Any]:
    costs = [record["costs"][name] for record in records if name in record["costs"]]
    failed = [record["errors"][name] for record in records if name in record["errors"]]
    kind = "reference" if name == REFERENCE else "baseline" if name in BASELINES else "method"
    found: dict[str, Any] = {"kind": kind, "family": innermost(name).family if kind == "method" else kind}
    if costs and name != REFERENCE:
        found["cost"] = round(statistics.median(costs), 2)
    return found | ({"refused": failed[0], "refused on": len(failed)} if failed else {})


def described(metric: Metric) -> dict[str, str]:
    return {"about": metric.about, "better": metric.better, "units": metric.units, "options": repr(metric)}


def rounded(figure: Mapping[str, Any]) -> dict[str, Any]:
    """Figures with five digits; None where there is none."""
    plain = {
        name: (None if np.isnan(value) else float(f"{value:.5g}")) if isinstance(value, float) else value
        for name, value in figure.items()
    }
    return {**plain}


# From the summary to files


def write(found: Mapping[str, Any], assets: Path, page: Path) -> list[Path]:
    """Write the summary, the table, a figure for each model, and the page."""
    assets.mkdir(parents=True, exist_ok=True)
    summary, table = assets / "leaderboard.json", assets / "leaderboard.csv"
    summary.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    table.write_text(as_csv(found), "utf-8")
    pictures = [assets / f"{name}.png" for name in found["models"]]
    for (name, model), file in zip(found["models"].items(), pictures, strict=True):
        from leaderboard_figure import figure

        figure(name, model).savefig(file, dpi=110)
    page.write_text(as_page(found, planted(assets)), "utf-8")
    return [summary, table, *pictures, page]


def planted(assets: Path) -> Any:
    """What examples/planted_evidence.py has found, if it has run."""
    file = assets / "planted.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else None


def as_csv(found: Mapping[str, Any]) -> str:
    """A line for each model, method and metric."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["model", "method", "family", "cost", "metric", "mean", "low", "high", "photos", "better than"])
    for model, each in found["models"].items():
        for name, method in each["methods"].items():
            for metric, figure in method["metrics"].items():
                mean = [figure[key] for key in ("mean", "low", "high", "photos")]
                over = "; ".join(figure["better than"])
                writer.writerow([model, name, method["family"], method.get("cost", ""), metric, *mean, over])
    return out.getvalue()


def standing(model: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """For each method that is ranked its place by each metric of quality, 1 for the best."""
    methods = {name: each for name, each in model["methods"].items() if each["ranked"]}
    found: dict[str, dict[str, float]] = {name: {} for name in methods}
    for metric in (each for each in QUALITY if each in model["metrics"]):
        sign = SIGNS[model["metrics"][metric]["better"]]
        means = [each["metrics"].get(metric, {}).get("mean") for each in methods.values()]
        places = ranks(np.array([np.nan if mean is None else sign * mean for mean in means], dtype=np.float64))
        for name, place in zip(methods, places.tolist(), strict=True):
            if not np.isnan(place):
                found[name][metric] = place
    return found


def convincing(method: Mapping[str, Any], by: Sequence[str]) -> list[str]:
    """The metrics of quality by which a method is better than every baseline."""
    figures_ = method["metrics"]
    return [metric for metric in QUALITY if metric in figures_ and set(by) <= set(figures_[metric]["better than"])]


def in_order(model: Mapping[str, Any]) -> list[str]:
    """The methods, those first that beat the baselines by more metrics; then by the middle one of their ranks."""
    places = standing(model)
    by = baselines(model)

    def key(name: str) -> tuple[float, float]:
        own = list(places[name].values())
        return -len(convincing(model["methods"][name], by)), statistics.median(own) if own else float("inf")

    return sorted(places, key=key)


def baselines(model: Mapping[str, Any]) -> list[str]:
    return [name for name, each in model["methods"].items() if each["kind"] == "baseline"]


# The page


def as_page(found: Mapping[str, Any], planted: Any) -> str:
    """The page, made of a summary; what stands in it is either always so, or is worked out from the summary."""
    parts = [INTRODUCTION.format(explain=found["made with"]["explain"], torch=found["made with"]["torch"], draws=DRAWS)]
    waiting = [f"`{name}` ({count} so far)" for name, count in found["waiting"].items()]
    if waiting:
        parts.append(f"Measured on too few photos yet to be shown: {', '.join(waiting)}.")
    for name, model in found["models"].items():
        parts += [f"## {name}", measured(model), shown(model), table(model, in_order(model)), picture(name)]
        parts += [on_fewer(model), disagreement(model), again(model)]
    if planted is not None:
        from planted_page import section

        parts.append(section(planted))
    limits = LIMITS.format(planted="planted evidence" if planted is None else "[planted evidence](#planted-evidence)")
    page = "\n\n".join(part for part in (*parts, limits) if part) + "\n"
    return re.sub(r"(\d)%", r"\1 %", page)


def words(names: Sequence[str]) -> str:
    """Names in a sentence."""
    quoted = [name if name in BASELINES[:3] or " " in name else f"`{name}`" for name in names]
    if len(quoted) < 2:
        return "".join(quoted) or "none"
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def measured(model: Mapping[str, Any]) -> str:
    methods = {name: each for name, each in model["methods"].items() if each["kind"] == "method"}
    fewer = sorted({counted(each) for each in methods.values() if not each["ranked"]})
    told = (
        f" Expensive methods, and those that were added later, were measured on fewer photos ({_range(fewer)}) and are "
        "not ranked."
        if fewer
        else ""
    )
    refused = [f"`{name}` on {each['refused on']}" for name, each in methods.items() if "refused" in each]
    told += f" Refused: {', '.join(refused)}." if refused else ""
    hits = model["pointing"]
    if hits:
        told += (
            f" In the pointing game, a random point hits {hits['random']:.2f} of the boxes and the centre "
            f"{hits['centre']:.2f}."
        )
    return (
        f"{model['photos']} photos, input of {model['side']} pixels. The box covers {model['share of the box']:.0%} "
        f"of it on average.{told}"
    )


def _range(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def shown(model: Mapping[str, Any]) -> str:
    """What the figures say, in sentences."""
    by, places = baselines(model), standing(model)
    lines = []
    for metric in (each for each in QUALITY if each in model["metrics"]):
        best = sorted((name for name in places if metric in places[name]), key=lambda name: places[name][metric])
        own = {name: model["methods"][name]["metrics"][metric]["mean"] for name in (*best[:3], *by)}
        sign = SIGNS[model["metrics"][metric]["better"]]
        strongest = max(by, key=lambda name: sign * own[name])
        above = [name for name in best if metric in convincing(model["methods"][name], by)]
        lines.append(
            f"- `{metric}`: the best are {words(best[:3])} ({', '.join(_short(own[name]) for name in best[:3])}). The "
            f"strongest baseline is {words([strongest])} with {_short(own[strongest])}. {len(above)} of {len(best)} "
            "methods are better than all baselines."
        )
    never = [name for name in places if not convincing(model["methods"][name], by)]
    if never:
        lines.append(f"- **Not better than all baselines by any metric:** {words(never)}.")
    return "\n".join(lines)


def table(model: Mapping[str, Any], order: Sequence[str]) -> str:
    """The means with their intervals; bold where a method is better than every baseline."""
    columns = [metric for metric in (*QUALITY, "complexity") if metric in model["metrics"]]
    arrows = {"more": "↑", "less": "↓"}
    head = ["method", "cost", "photos", *(f"{each} {arrows[model['metrics'][each]['better']]}" for each in columns)]
    rows = [head, ["---"] * len(head)]
    by = baselines(model)
    for name in (*order, *by, *(each for each in (REFERENCE,) if each in model["methods"])):
        method = model["methods"][name]
        if not method["metrics"]:
            continue
        above = convincing(method, by) if method["kind"] == "method" else []
        cells = [_cell(method["metrics"].get(metric), bold=metric in above) for metric in columns]
        label = f"`{name}`" if method["kind"] == "method" or name == "randomcam" else name
        label = label if method["kind"] == "method" else f"*{label}*"
        rows.append([label, _cost(method.get("cost")), str(counted(method)), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(figure: Mapping[str, Any] | None, *, bold: bool = False) -> str:
    if figure is None or figure["mean"] is None:
        return "–"
    half = (figure["high"] - figure["low"]) / 2
    mean = f"**{_short(figure['mean'])}**" if bold else _short(figure["mean"])
    return f"{mean}\u00a0±\u00a0{half:.{2 if half < 9.995 else 0}f}"  # on one line


def _short(figure: float) -> str:
    return f"{figure:.2f}" if abs(figure) < 9.995 else f"{figure:.1f}" if abs(figure) < 99.95 else f"{figure:.3g}"


def _cost(cost: float | None) -> str:
    return "–" if cost is None else f"{cost:.1f}" if cost < 20 else f"{cost:.0f}"


def on_fewer(model: Mapping[str, Any]) -> str:
    """The methods that are not ranked, beside one that is, on the same photos."""
    columns = [metric for metric in (*QUALITY, "complexity") if metric in model["metrics"]]
    arrows = {"more": "↑", "less": "↓"}
    head = ["method", "cost", "photos", *(f"{each} {arrows[model['metrics'][each]['better']]}" for each in columns)]
    rows = [head, ["---"] * len(head)]
    fewer = {name: each for name, each in model["methods"].items() if each["kind"] == "method" and not each["ranked"]}
    for name, method in sorted(fewer.items(), key=lambda each: each[1].get("cost", 0.0)):
        if method["metrics"]:
            cells = [_difference(method["metrics"].get(metric, {}).get("beside")) for metric in columns]
            rows.append([f"`{name}`", _cost(method.get("cost")), str(counted(method)), *cells])
    if len(rows) == 2:
        return ""
    return "\n\n".join([
        f"Methods that were measured on fewer photos, compared with `{BESIDE}` on the same photos: the mean difference "
        "± half the width of its interval. A handful of photos says little.",
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
    ])  # fmt: skip


def _difference(figure: Mapping[str, Any] | None) -> str:
    if figure is None or figure["mean"] is None:
        return "–"
    half = (figure["high"] - figure["low"]) / 2
    return f"{figure['mean']:+.2f} ± {half:.2f}"


def picture(name: str) -> str:
    return (
        f"![Quality against cost for {name}: each method as a point with a 95 % interval, the baselines as lines]"
        f"(../assets/leaderboard/{name}.png)"
    )


def disagreement(model: Mapping[str, Any]) -> str:
    """How alike metrics rank the methods, and which methods they disagree about most."""
    known = [metric for metric in QUALITY if metric in model["metrics"]]
    rho = {frozenset(each["metrics"]): each for each in model["correlations"]}
    arrow = {name: "↑" if each["better"] == "more" else "↓" for name, each in model["metrics"].items()}
    rows = [["", *(f"{name} {arrow[name]}" for name in known[1:])], ["---"] * len(known)]
    for i, one in enumerate(known[:-1]):
        cells = ["" if known.index(other) <= i else _rho(rho[frozenset((one, other))]) for other in known[1:]]
        rows.append([f"{one} {arrow[one]}", *cells])
    places = standing(model)
    spread = {name: (min(each.values()), max(each.values())) for name, each in places.items() if len(each) > 1}
    widest = sorted(spread, key=lambda name: spread[name][0] - spread[name][1])[:5]
    told = "; ".join(_placed(name, places[name]) for name in widest)
    return "\n\n".join([
        "Rank correlations between metrics (Spearman, over the methods; 1 is the same order, 0 is no relation; the "
        "95 % interval over photos is in brackets). The sign of each metric is set so that more is better:",
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        f"They disagree most about {told}.",
    ])  # fmt: skip


def _rho(each: Mapping[str, Any]) -> str:
    return "–" if each["rho"] is None else f"{each['rho']:.2f} ({each['low']:.2f} to {each['high']:.2f})"


def _placed(name: str, places: Mapping[str, float]) -> str:
    best, worst = min(places, key=lambda each: places[each]), max(places, key=lambda each: places[each])
    return f"`{name}` (rank {places[best]:.0f} by `{best}`, {places[worst]:.0f} by `{worst}`)"


def again(model: Mapping[str, Any]) -> str:
    """The metrics that ask the methods again, which are measured on fewer photos."""
    columns = [metric for metric in ("maxsensitivity", "mprt", "randomlogit") if metric in model["metrics"]]
    if not columns:
        return ""
    rows = [["method", "photos", *(f"{metric} ↓" for metric in columns)], ["---"] * (len(columns) + 2)]
    there = [name for name, each in model["methods"].items() if columns[0] in each["metrics"]]
    first = [name for name in in_order(model) if name in there]
    first += [name for name in there if model["methods"][name]["kind"] == "method" and name not in first]
    for name in (*first, *(name for name in baselines(model) if name in there)):
        own = model["methods"][name]["metrics"]
        label = f"`{name}`" if model["methods"][name]["kind"] == "method" else f"*{name}*"
        rows.append([label, str(own[columns[0]]["photos"]), *(_cell(own.get(metric)) for metric in columns)])
    return "\n\n".join([
        "Sensitivity, and the similarity of the map with random weights (`mprt`) and for other classes "
        "(`randomlogit`). Less is better, but only together: a constant map has no sensitivity, and noise has no "
        "similarity.",
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
    ])  # fmt: skip


INTRODUCTION = """\
# Leaderboard

How good are the maps of each method? This page compares all methods, by several metrics, on photos with boxes around
the object, and with maps that do not use the model. `python examples/leaderboard.py` measures the tables and writes
this page (explain {explain}, torch {torch}). Run again, it continues where it stopped.

- **Photos**: validation photos of Tiny-ImageNet (64 pixels, resized to the model's input) in shuffled order. Only
  photos that the model classifies correctly, with a box of at most three quarters of what the model sees. The
  explained class is the label.
- **Values**: means over the photos ± half the width of the 95 % bootstrap interval ({draws} samples of the photos).
- **Cost**: processor time divided by that of a bare forward pass, measured alternately; the median over the photos.
- **Baselines**: a blob in the *centre* of every photo, the *edges* of the photo (Sobel), a *uniform* map (in random
  order for metrics that rank pixels), and `randomcam`, feature maps with random weights. A value is **bold** if the
  method is better than each of the four on the same photos (at least ten), with the whole interval of the mean
  difference.
- *The box itself* is a map that is 1 in the box and 0 elsewhere.
- **Order**: by the number of bold values, then by the median rank of the method. It is a way to find things, not a
  verdict.
- Measured before version 0.3.0: `kpcacam` with `gamma=None`, its default then, and `mprt` of the small model with
  layers in the order of registration."""

LIMITS = """\
## What this does not show

- Boxes show where the object is, not what the model uses. If a model recognises a boat by the water, a correct map
  marks the water, and loses here. Only {planted} has a known answer.
- Deletion, insertion and ROAD use perturbed photos that the model has never seen, and each favours some kind of map.
  Compare with the box itself: it marks the object, and is still not always the best.
- The models are small, the photos have 64 pixels, and each method has its default options and layer. Another model,
  layer or option can change the order, especially where intervals overlap.
- The ImageNet model was made for photos of 224 pixels. Of these, which are enlarged from 64, it gets about a third
  right, and only those count: what it does on sharp photos may differ. Tiny-ImageNet is made of photos of ImageNet,
  so it may have been trained on larger versions of them.
- Expensive methods were measured on few photos, and mostly against boxes. On planted evidence, where the answer is
  known, some of them (`partitionshap`, `occlusion`) have far more of their map on the mark than `gradcam`.
- There are about three hundred comparisons with baselines for each model. At a level of 95 %, a few of them are
  due to chance.
- Signed values are used as the method defines them: pixels with negative values rank below pixels with zero. Pixel
  methods such as `inputxgradient` spread both signs over the whole photo, so that `auc` is near a half.
- Complexity measures how much of the photo a map marks. A map that marks one wrong pixel has the best value."""
