"""The numbers and figures of docs/report/, from the tables that other pages of docs/ hold.

    python examples/technical_report.py [--check]

Numbers go to docs/report/numbers.json, which the page takes its figures from as it is built, and
pictures to assets/report/. ``--check`` only says whether the numbers are those of the tables.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples" / "benchmarks"))

from tables import END, cells_of, published  # noqa: E402

DOCS = ROOT / "docs"
PICTURES = ROOT / "assets" / "report"
NUMBERS = DOCS / "report" / "numbers.json"
MODELS = {
    "tiny": "residual network",
    "tiny-transformer": "transformer",
    "plain": "plain network",
    "efficientnet-lite0": "EfficientNet-Lite0",
}
CHECKS = ("depends_on_model", "depends_on_class", "faithful")
GROUPS = ("as they are", "plus a pattern", "times a pattern", "all of them")
TRUTHS = ("each part removed", "Shapley values", "each part exchanged")
BLIND = ("noise", "centre blob", "edges", "local contrast", "mean colour", "uniform")
BLUE = "#0072b2"
ORANGE = "#d55e00"
GREY = "#70707a"


def table(name: str) -> str:
    """A table of docs/verdict.md."""
    return published((DOCS / "verdict.md").read_text("utf-8"), name)


def rows_of(text: str) -> tuple[list[str], list[list[str]]]:
    """The heads of a table and its rows, without emphasis."""
    lines = [
        [cell.strip("*` ") for cell in cells_of(each)]
        for each in text.splitlines()
        if each.startswith("|")
    ]
    return (lines[0], lines[2:]) if lines else ([], [])


def percent(cell: str) -> float:
    return float(cell.split("%")[0])


def calibrations() -> dict[str, list[dict[str, Any]]]:
    """By model, the rows of maps that know nothing: how many, and the percentage that passes each
    check and all."""
    names = ("map", "count", *CHECKS, "all")
    found = {}
    for model in MODELS:
        _, rows = rows_of(table(f"calibration, {model}"))
        found[model] = [
            dict(zip(names, (row[0], int(row[1]), *map(percent, row[2:])), strict=True))
            for row in rows
        ]
    return found


def right() -> tuple[list[str], list[list[str]], dict[str, float]]:
    """The methods on planted evidence, and the rank correlations of what passes with what points at
    the mark."""
    text = table("right, planted, residual")
    told = text.split("points at the mark: ")[-1]
    alike = {name: float(value) for name, value in re.findall(r"(\w+) (-?\d\.\d+)", told)}
    return *rows_of(text), alike


def parts(name: str) -> str:
    """A part of docs/parts.md: sentences and a table."""
    page = (DOCS / "parts.md").read_text("utf-8")
    return page.split(f"<!-- part: parts-{name} -->\n", 1)[1].split(END, 1)[0]


def better(text: str, what: str) -> list[str]:
    """The methods that a line of docs/parts.md says are better than every blind map."""
    line = next(
        (each for each in text.splitlines() if each.startswith("- Better") and what in each), ""
    )
    return re.findall(r"`([^`]+)`", line)


def leaderboard() -> dict[str, Any]:
    """What the tables of docs/leaderboard.md say."""
    page = (DOCS / "leaderboard.md").read_text("utf-8")
    kept = [cells_of(each) for each in published(page, "board-photos").splitlines()[2:]]
    rows = {
        name: [cells_of(each) for each in published(page, f"board-{name}").splitlines()[2:]]
        for name in ("truth", "metrics", "photographs", "stability")
    }
    methods = [
        row
        for row in rows["truth"]
        if row[0].startswith("`") and row[2] == max(each[2] for each in rows["truth"])
    ]
    blind = [row for row in rows["truth"] if row[0].startswith("*")]
    free = [row for row in rows["metrics"] if row[1] != "localisation" and row[3] != "–"]
    counts = [int(row[2]) for row in kept[:-1]]
    stable = {row[1]: row[2:] for row in rows["stability"] if row[0] == "`truth`"}
    return {
        "board_combinations": kept[-1][-1],
        "board_photos": f"{min(counts)} to {max(counts)}",
        "board_methods": len(methods),
        "board_first": ", ".join(f"{row[0]} ({row[3].split(' (')[0]})" for row in methods[:6]),
        "board_gradcam": next(row[3] for row in methods if row[0] == "`gradcam`"),
        "board_gradcam_place": 1 + [row[0] for row in methods].index("`gradcam`"),
        "board_blind": f"{blind[0][0].strip('*')}, {blind[0][3].split(' (')[0]}",
        "board_metrics": ", ".join(f"{row[0]} ({row[3].split(' (')[0]})" for row in free[:5]),
        "board_metrics_last": ", ".join(
            row[0] for row in free if row[3].split(" (")[1].startswith("-")
        ),
        "board_photographs": ", ".join(row[0] for row in rows["photographs"][:5]),
        "board_stable_planted": stable["planted"][0],
        "board_stable_parts": stable["parts"][0],
        "board_networks_planted": stable["planted"][2],
        "board_networks_parts": stable["parts"][2],
    }


def numbers() -> dict[str, Any]:
    """The figures that the text of the report names."""
    by_model = calibrations()
    totals = {
        model: next(row for row in rows if row["map"] == GROUPS[-1])
        for model, rows in by_model.items()
    }
    kinds = [
        (row, model) for model, rows in by_model.items() for row in rows if row["map"] not in GROUPS
    ]
    worst = max(kinds, key=lambda each: each[0]["faithful"])
    heads, rows, alike = right()
    methods = {row[0]: dict(zip(heads, row, strict=True)) for row in rows}
    _, known = rows_of(table("right, known"))
    found: dict[str, Any] = {
        "null_models": len(by_model),
        "null_maps": f"{sum(each['count'] for each in totals.values()):,}",
        "null_all_most": f"{max(each['all'] for each in totals.values()):g} %",
        "null_check_most": (
            f"{max(each[check] for each in totals.values() for check in CHECKS):g} %"
        ),
        "null_worst": f"{worst[0]['map']} on the {MODELS[worst[1]]}, {worst[0]['faithful']:g} %",
        "planted_photos": max((int(row[1]) for row in rows), default=0),
        "planted_methods": len(rows),
        "planted_pointing": sum(percent(row[2]) == 100 for row in rows),
        "rho_faithful": f"{alike.get('faithful', float('nan')):.2f}",
        "rho_all": f"{alike.get('all', float('nan')):.2f}",
    }
    for name, key in (("fullgrad", "fullgrad_class"), ("refinecam", "refinecam_class")):
        found[key] = f"{percent(methods[name]['depends_on_class']):g} %" if name in methods else "–"
    for row in known:
        key = (
            "linear" if row[0].startswith("linear") else "window" if "window" in row[0] else "mark"
        )
        found[
            f"known_{key}" + (f"_{row[0].split(', ')[-1].split()[0]}" if "masks" in row[0] else "")
        ] = f"{percent(row[-1]):g} %"
    heads, rows = rows_of(table("tiny, other methods"))
    found["natural_photos"] = rows[0][1]
    for row in rows:
        found[f"natural_{row[0]}"] = f"{percent(row[heads.index('faithful')]):g} %"
    for network in ("resnet", "transformer"):
        text = parts(network)
        found[f"parts_scenes_{network}"] = re.findall(r"- (\d+) scenes", text)[0]
        found[f"parts_correct_{network}"] = ", ".join(better(text, "**correctness** "))
        found[f"parts_shapley_{network}"] = len(better(text, "with Shapley"))
        found[f"parts_class_{network}"] = len(better(text, "contrastivity"))
        found[f"parts_methods_{network}"] = sum(
            row[0] not in (*TRUTHS, *BLIND) for row in rows_of(text)[1]
        )
        found[f"parts_floor_{network}"] = re.findall(
            r"\*\*correctness\*\* \(the best of them has (-?[\d.]+)", text
        )[0]
        found[f"parts_seeds_{network}"] = re.findall(
            r"correlates with another's by (-?\d\.\d+)", text
        )[0]
    photos = parts("idsds")
    found["idsds_orders"] = re.findall(r"two networks correlate by (-?\d\.\d+)", photos)[0]
    found["idsds_first"] = ", ".join(better(photos, "every blind map")[:4])
    found["idsds_photos"] = re.findall(r"- (\d+) photos", photos)[0]
    return found | leaderboard()


# Figures


def draw() -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    PICTURES.mkdir(parents=True, exist_ok=True)

    by_model = calibrations()
    figure, axes = plt.subplots(
        1, len(by_model), figsize=(2.4 + 2.4 * len(by_model), 4.4), sharey=True, squeeze=False
    )
    for axis, (model, rows) in zip(axes[0], by_model.items(), strict=True):
        rows = [row for row in rows if row["map"] not in GROUPS][::-1]
        places = range(len(rows))
        for check, colour, shape in zip(
            (*CHECKS, "all"), (BLUE, "#009e73", ORANGE, "#18181c"), "os^D", strict=True
        ):
            label = "all three" if check == "all" else check.replace("_", " ")
            axis.plot(
                [row[check] for row in rows],
                places,
                shape,
                color=colour,
                label=label,
                markersize=5,
                alpha=0.85,
            )
        axis.axvline(5, color=GREY, linewidth=1, linestyle="--")
        axis.set(xlim=(-0.6, 13), title=MODELS[model], xlabel="maps that pass, %")
        axis.set_yticks(list(places), [row["map"] for row in rows])
        axis.grid(axis="x", alpha=0.25)
    figure.legend(
        *axes[0][0].get_legend_handles_labels(),
        loc="lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(PICTURES / "calibration.png", dpi=150)

    heads, rows, _ = right()
    rows = sorted(
        rows,
        key=lambda row: [
            percent(row[heads.index(name)]) for name in (heads[2], "faithful", heads[-1])
        ],
    )
    figure, axis = plt.subplots(figsize=(7, 5.2))
    told = (
        (heads[2], "points at the mark", BLUE, "o"),
        ("faithful", "passes the third check", ORANGE, "^"),
        (heads[-1], "passes all checks", "#18181c", "D"),
    )
    for name, label, colour, shape in told:
        values = [percent(row[heads.index(name)]) for row in rows]
        axis.plot(
            values, range(len(rows)), shape, color=colour, label=label, markersize=6, alpha=0.85
        )
    axis.set_yticks(range(len(rows)), [row[0] for row in rows])
    axis.set(xlabel="maps, %", xlim=(-3, 103))
    axis.grid(alpha=0.25)
    figure.legend(loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(PICTURES / "planted.png", dpi=150)

    figure, axes = plt.subplots(1, 2, figsize=(9, 7.2))
    for axis, network in zip(axes, ("resnet", "transformer"), strict=True):
        heads, rows = rows_of(parts(network))
        column = heads.index("correctness")
        shown = [row for row in rows if row[0] not in TRUTHS]
        shown.sort(key=lambda row: float(row[column].split()[0]))
        for place, row in enumerate(shown):
            mean, low, high = map(float, re.findall(r"-?\d+\.\d+", row[column]))
            colour = GREY if row[0] in BLIND else BLUE
            axis.plot([low, high], [place, place], color=colour, linewidth=1.5, alpha=0.6)
            axis.plot(mean, place, "o", color=colour, markersize=4)
        names = [row[0].replace("`", "").split(", ")[0] for row in shown]
        axis.set_yticks(range(len(shown)), names, fontsize=7)
        axis.axvline(0, color=GREY, linewidth=0.8)
        axis.set(
            title=f"{network}, {rows[0][1]} scenes",
            xlabel="correctness (rank correlation)",
            ylim=(-1, len(shown)),
        )
        axis.grid(axis="x", alpha=0.25)
    figure.tight_layout()
    figure.savefig(PICTURES / "parts.png", dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="only compare the numbers with the tables"
    )
    options = parser.parse_args(arguments)
    found = numbers()
    if options.check:
        if json.loads(NUMBERS.read_text("utf-8")) != found:
            parser.exit(
                1,
                "the numbers of docs/report/ are not those of the tables; run this script again\n",
            )
        return
    NUMBERS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    draw()


if __name__ == "__main__":
    main()
