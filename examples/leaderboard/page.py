"""Write the tables of docs/leaderboard.md, from what run.py measured.

    python examples/leaderboard/page.py [RESULTS.jsonl ...] [--check]

Results are kept in assets/tables/leaderboard.jsonl.gz; without arguments, the tables are made from
there. Means and intervals are those of mixed.py. Short tables go to the page, full ones to
assets/tables/leaderboard.md, and the table with filters to docs/_static/leaderboard-data.js.
``--check`` only says whether they are what is stored. Needs statsmodels (the extra "leaderboard").
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from marks import KINDS, explained
from mixed import Estimate, estimate
from networks import ARCHITECTURES
from run import CONTROLS, METRICS, records
from scipy.stats import spearmanr
from scores import SCORES

from explain.methods.base import MAPS, PATTERNS, innermost_method
from explain.metrics import get_metric

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples" / "benchmarks"))

from tables import line, published, replaced  # noqa: E402

PAGE = ROOT / "docs" / "leaderboard.md"
FULL = ROOT / "assets" / "tables" / "leaderboard.md"
RESULTS = ROOT / "assets" / "tables" / "leaderboard.jsonl.gz"
DATA = ROOT / "docs" / "_static" / "leaderboard-data.js"
PICTURE = ROOT / "assets" / "leaderboard" / "marks.png"
KEY = ["kind", "architecture", "side", "seed"]
CONTROL = "control maps"
FAMILIES = {
    MAPS: "CAM",
    PATTERNS: "CAM",
    "gradients": "gradient",
    "relevance": "propagation",
    "perturbation": "perturbation",
    "attention": "attention",
}
CLAIMS = (
    ("deeplift", "gradcam"),
    ("deeplift", "integratedgradients"),
    ("deeplift", "lrp"),
    ("expectedgradients", "integratedgradients"),
    ("integratedgradients", "saliency"),
    ("smoothgrad", "saliency"),
    ("layercam", "gradcam"),
    ("occlusion", "gradcam"),
    ("shapleysampling", "occlusion"),
    ("guidedbackprop", "edges"),
    ("gradcam", "edges"),
    ("eigencam", "edges"),
    ("randomcam", "edges"),
)
"""What people say, as pairs: the first method is better than the second one."""
ZERO = (
    "deeplift",
    "integratedgradients",
    "inputxgradient",
    "lrp",
    "expectedgradients",
    "deepliftshap",
    "saliency",
    "gradcam",
    "occlusion",
    "shapleysampling",
)
"""Methods that are compared where the baseline's colour or an absence decides."""
FEWEST = 4  # methods of a family, for a rank correlation


# What was measured


@cache
def stored() -> tuple[dict[str, Any], ...]:
    """All records."""
    text = gzip.decompress(RESULTS.read_bytes()).decode("utf-8")
    return tuple(json.loads(row) for row in text.splitlines())


def store(files: Iterable[Path]) -> None:
    """Keep the records of these files, with three digits, in one order."""
    rounded = []
    for file in files:
        for record in records(file):
            short = json.loads(
                json.dumps(record), parse_float=lambda text: float(f"{float(text):.3g}")
            )
            short.pop("seconds", None)
            rounded.append(short)
    rounded.sort(key=lambda record: [*(str(record[name]) for name in KEY), "scores" in record])
    lines = [json.dumps(record, separators=(",", ":")) for record in rounded]
    text = "\n".join(lines) + "\n"
    RESULTS.write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))


def learned() -> list[dict[str, Any]]:
    """The records of networks that learned their rule."""
    return [record for record in stored() if "scores" in record]


@cache
def table(what: str) -> pandas.DataFrame:
    """A row for each network and map, a column for each of ``what``: "scores" or "metrics"."""
    rows = []
    for record in stored():
        network = {name: record[name] for name in KEY}
        for method, values in record.get(what, {}).items():
            rows.append(network | {"method": method} | values)
    return pandas.DataFrame(rows).astype({"side": int, "seed": int})


def methods() -> list[str]:
    return sorted(set(table("scores")["method"]))


@cache
def same_maps() -> dict[str, str]:
    """By method, the first one that has the same scores on all networks."""
    firsts: dict[tuple[Any, ...], str] = {}
    same = {}
    frame = table("scores")
    for name in methods():
        rows = frame[frame["method"] == name].sort_values(KEY)
        key = tuple(rows[[*KEY, *SCORES]].fillna(-1).to_numpy().ravel().tolist())
        same[name] = firsts.setdefault(key, name)
    return same


@cache
def is_complete(method: str) -> bool:
    """Whether a method was measured on all networks of the architectures that it explains."""
    frame = table("scores")
    rows = frame[frame["method"] == method]
    same = frame[frame["architecture"].isin(set(rows["architecture"]))]
    return len(rows) == len(same[KEY].drop_duplicates())


def control_names() -> list[str]:
    return [control.name for control in CONTROLS]


def family_of(method: str) -> str:
    if method in control_names():
        return CONTROL
    return FAMILIES[innermost_method(method).family]


def label(method: str) -> str:
    return f"*{method}*" if method in control_names() else f"`{method}`"


def passes(method: str) -> str:
    costs = [record["passes"][method] for record in learned() if method in record["passes"]]
    cost = float(np.median(costs))
    return f"{cost:.0f}"


@cache
def of_score(method: str, score: str, kind: str = "") -> Estimate:
    """The mean score of a method, over all kinds of marks or one."""
    frame = table("scores")
    rows = frame[frame["method"] == method]
    if kind:
        rows = rows[rows["kind"] == kind]
    return estimate(rows[[*KEY, score]].rename(columns={score: "value"}))


@cache
def differences(first: str, second: str, score: str) -> pandas.DataFrame:
    """By how much a method's mean score is larger than another's, on each network that has both."""
    frame = table("scores").set_index(KEY)
    one = frame[frame["method"] == first][score]
    other = frame[frame["method"] == second][score]
    return (one - other).rename("value").reset_index().dropna()


# Tables


def number(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.2f}"


def in_markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def of_networks() -> str:
    """For each kind of mark and side: networks, images, and how many images the networks get
    right."""
    head = ("evidence", "side", "seeds", "networks", "images", "right on test images", "left out")
    rows = []
    columns = [*KEY, "accuracy", "images"]
    trained = [record for record in stored() if "accuracy" in record]
    frame = pandas.DataFrame(trained, columns=columns)
    for side in sorted(set(frame["side"])):
        for kind in KINDS:
            every = frame[(frame["side"] == side) & (frame["kind"] == kind)]
            used = every.dropna(subset=["images"])
            if not len(used):
                continue
            least = f"{used['accuracy'].min():.0%}".replace("%", " %")
            seeds = f"{used['seed'].nunique()}"
            images = f"{int(used['images'].sum())}"
            missing = len(every) - len(used)
            rows.append(
                (kind, str(side), seeds, str(len(used)), images, f"≥ {least}", str(missing))
            )
    return in_markdown(head, rows)


def of_methods() -> str:
    """The distinct methods: their mean by each score, with an interval for the first one."""
    head = ["method", "family", "passes", *SCORES.values()]
    names = [name for name, first in same_maps().items() if name == first and is_complete(name)]
    names.sort(key=lambda name: (-of_score(name, "square").mean, name))
    rows = []
    for name in names:
        means = [number(of_score(name, score).mean) for score in SCORES]
        means[0] = str(of_score(name, "square"))
        rows.append([label(name), family_of(name), passes(name), *means])
    return in_markdown(head, rows)


def signed(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:+.2f}".replace("-", "−")


def sign_of(value: Estimate) -> str:
    """A difference, in bold if its interval leaves out zero."""
    if value.low > 0 or value.high < 0:
        return f"**{signed(value.mean)}**"
    return signed(value.mean)


def conclusion(values: Sequence[Estimate]) -> str:
    """Whether the first method is better by all scores, by some, or by none."""
    better = sum(value.low > 0 for value in values)
    worse = sum(value.high < 0 for value in values)
    if better == len(values):
        return "better by all"
    if better or worse:
        return f"better by {better}, worse by {worse}"
    return "not shown"


def of_claims() -> str:
    """Differences of pairs of methods by each score."""
    head = ["first, second", *SCORES.values(), "conclusion"]
    rows = []
    for first, second in CLAIMS:
        values = [estimate(differences(first, second, score)) for score in SCORES]
        pair = f"{label(first)}, {label(second)}"
        rows.append([pair, *map(sign_of, values), conclusion(values)])
    return in_markdown(head, rows)


def of_claims_by_kind() -> str:
    """Differences of pairs of methods by the best square, for each kind of mark; and on how many
    networks the first is better."""
    head = ["first, second", *KINDS, "networks on which the first is better"]
    rows = []
    for first, second in CLAIMS:
        values = differences(first, second, "square")
        by_kind = values.groupby("kind")["value"].mean()
        cells = [signed(by_kind.get(kind, np.nan)) for kind in KINDS]
        better = int((values["value"] > 0).sum())
        rows.append([f"{label(first)}, {label(second)}", *cells, f"{better} of {len(values)}"])
    return in_markdown(head, rows)


def of_zero() -> str:
    """What is on the evidence where it has the baseline's colour, and where it is an absence."""
    head = ["method"]
    for kind in ("contrast", "grey", "absence"):
        head += [f"{kind}: magnitude", f"{kind}: best square"]
    rows = []
    for name in ZERO:
        row = [label(name)]
        for kind in ("contrast", "grey", "absence"):
            row.append(number(of_score(name, "inside", kind).mean))
            row.append(number(of_score(name, "square", kind).mean))
        rows.append(row)
    return in_markdown(head, rows)


def direction(metric: str) -> int:
    return 1 if get_metric(metric).better == "more" else -1


@cache
def agreement(metric: str, family: str, truth: str) -> Estimate:
    """The rank correlation of a metric's order of methods with that of a score, within a family or
    over all methods and control maps, on average over networks."""
    joined = table("metrics").merge(table("scores"), on=[*KEY, "method"])
    joined = joined[joined["method"].isin(set(same_maps().values()))]
    if family:
        joined = joined[joined["method"].map(family_of) == family]
    rows = []
    for key, group in joined.groupby(KEY):
        both = group[[metric, truth]].dropna()
        if len(both) < FEWEST or both.nunique().min() < 2:
            continue
        correlation = spearmanr(direction(metric) * both[metric], both[truth]).statistic
        rows.append([*key, float(correlation)])
    return estimate(pandas.DataFrame(rows, columns=[*KEY, "value"]))


def of_metrics() -> str:
    """The metrics by their agreement with the best square, within each family."""
    families = list(dict.fromkeys(FAMILIES.values()))
    head = ["metric", "all maps", *families]
    rows = []
    order = sorted(METRICS, key=lambda name: -agreement(name, "", "square").mean)
    for name in order:
        values = [agreement(name, family, "square") for family in families]
        means = [number(value.mean) for value in values]
        rows.append([f"`{name}`", str(agreement(name, "", "square")), *means])
    return in_markdown(head, rows)


def of_metrics_in_full() -> str:
    """The same with intervals, and on how many networks."""
    families = ["", *dict.fromkeys(FAMILIES.values())]
    head = ["metric", "networks", *(family or "all maps" for family in families)]
    rows = []
    for name in METRICS:
        values = [agreement(name, family, "square") for family in families]
        rows.append([f"`{name}`", str(values[0].networks), *map(str, values)])
    return in_markdown(head, rows)


def of_methods_in_full() -> str:
    """All methods, with intervals for each score."""
    head = ["method", "family", "passes", "networks", *SCORES.values(), "same map as"]
    rows = []
    for name, first in sorted(same_maps().items()):
        values = [of_score(first, score) for score in SCORES]
        twin = "" if first == name else label(first)
        cells = [label(name), family_of(name), passes(name), str(values[0].networks)]
        rows.append([*cells, *map(str, values), twin])
    return in_markdown(head, rows)


def of_kinds() -> str:
    """The best square of the distinct methods for each kind of mark and each architecture."""
    head = ["method", *KINDS, *ARCHITECTURES]
    frame = table("scores")
    rows = []
    for name in sorted(set(same_maps().values())):
        rows_of = frame[frame["method"] == name]
        by_kind = rows_of.groupby("kind")["square"].mean()
        by_architecture = rows_of.groupby("architecture")["square"].mean()
        cells = [number(by_kind.get(kind, np.nan)) for kind in KINDS]
        cells += [number(by_architecture.get(each, np.nan)) for each in ARCHITECTURES]
        rows.append([label(name), *cells])
    return in_markdown(head, rows)


SHORT: Mapping[str, Callable[[], str]] = {
    "board-claims": of_claims,
    "board-claims-kinds": of_claims_by_kind,
    "board-methods": of_methods,
    "board-zero": of_zero,
    "board-metrics": of_metrics,
    "board-networks": of_networks,
}
TABLES: Mapping[str, Callable[[], str]] = {
    "board-methods-full": of_methods_in_full,
    "board-kinds": of_kinds,
    "board-metrics-full": of_metrics_in_full,
}


# The table with filters, and the picture


def data() -> str:
    """The means of all scores for each kind, architecture and side, as a script."""
    frame = table("scores")
    networks = []
    for key, group in frame.groupby(["kind", "architecture", "side"]):
        columns = []
        means = group.groupby("method")[list(SCORES)].mean()
        for score in SCORES:
            values = means[score].tolist()
            columns.append([None if value != value else round(value, 3) for value in values])
        networks.append(
            {
                "kind": key[0],
                "architecture": key[1],
                "side": str(key[2]),
                "networks": int(group["seed"].nunique()),
                "methods": means.index.tolist(),
                "means": columns,
            }
        )
    content = {
        "scores": list(SCORES.values()),
        "families": {name: family_of(name) for name in methods()},
        "passes": {name: int(passes(name)) for name in methods()},
        "groups": networks,
    }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return f"window.LEADERBOARD = {text};\n"


def draw() -> None:
    """An image of each kind, and below it where its evidence lies."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(KINDS), figsize=(10, 3.1), layout="constrained")
    for column, kind in enumerate(KINDS):
        # a photo of middle brightness, on which faint patterns are seen on paper
        scenes = (scene for scene in explained(kind, 64, column) if scene.photo.abs().max() < 1.6)
        scene = next(scenes)
        image = (scene.image() / 4 + 0.5).clamp(0, 1).permute(1, 2, 0).numpy()
        marked = image * (0.25 + 0.75 * scene.mask[:, :, None].numpy())
        axes[0, column].set_title(kind, fontsize=11)
        for row, picture in enumerate((image, marked)):
            axes[row, column].imshow(picture, interpolation="nearest")
            axes[row, column].set_axis_off()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    if options.results:
        store(options.results)
    wrong = []
    for page, tables in ((PAGE, SHORT), (FULL, TABLES)):
        text = page.read_text("utf-8")
        for name, make in tables.items():
            rows = make()
            if published(text, name).strip() != rows:
                wrong.append(name)
            text = replaced(text, name, rows)
        if not options.check:
            page.write_text(text, "utf-8")
    script = data()
    if options.check:
        if DATA.read_text("utf-8") != script:
            wrong.append(DATA.name)
        print(f"not as it is stored: {', '.join(wrong)}" if wrong else "as it is stored")
        return bool(wrong)
    DATA.write_text(script, "utf-8")
    draw()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
