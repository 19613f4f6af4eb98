"""The numbers, the table and the figure of docs/verdict.md, and the numbers of docs/leaderboard.md,
from the tables in assets/tables/.

    python examples/technical_report.py [--check]

Numbers go to assets/report/numbers.json, which the pages take their figures from as they are built,
and the picture to assets/report/. ``--check`` only says whether the numbers are those of the
tables.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples" / "benchmarks"))

from tables import END, cells_of, line, published, replaced  # noqa: E402

TABLES = ROOT / "assets" / "tables"
PAGE = ROOT / "docs" / "verdict.md"
PICTURES = ROOT / "assets" / "report"
NUMBERS = PICTURES / "numbers.json"
MODELS = {
    "tiny": "residual network",
    "tiny-transformer": "transformer",
    "plain": "plain network",
    "efficientnet-lite0": "EfficientNet-Lite0",
}
CHECKS = ("depends_on_model", "depends_on_class", "faithful")
GROUPS = ("as they are", "plus a pattern", "times a pattern", "all of them")
RIGHT_MAPS = {
    "linear network: weights × (photo - mean)": "known_linear",
    "network behind a window: the window, 60 masks": "known_window_60",
    "network behind a window: the window, 240 masks": "known_window_240",
    "planted, residual: the mark, 60 masks": "known_mark_60",
}
"""The maps that are right, each with the name of its number."""
BLUE = "#0072b2"
ORANGE = "#d55e00"
GREY = "#70707a"


def table(name: str) -> str:
    """A table of assets/tables/verdict.md."""
    return published((TABLES / "verdict.md").read_text("utf-8"), name)


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
    """By model, the rows of control maps: how many, and the percentage that passes each
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


def pooled() -> str:
    """For each network, the share of its control maps that passes each check, and all three."""
    head = ("network", "maps checked", "model", "class", "faithful", "all three (95 % interval)")
    rows = [head, ("---",) * len(head)]
    for model, name in MODELS.items():
        _, of_model = rows_of(table(f"calibration, {model}"))
        totals = next(row for row in of_model if row[0] == GROUPS[-1])
        rows.append((name, *totals[1:]))
    return "\n".join(map(line, rows))


def parts(name: str) -> str:
    """A part of assets/tables/parts.md: sentences and a table."""
    page = (TABLES / "parts.md").read_text("utf-8")
    return page.split(f"<!-- part: parts-{name} -->\n", 1)[1].split(END, 1)[0]


def better(text: str, what: str) -> list[str]:
    """The methods that a line of assets/tables/parts.md says are better than every control map."""
    lines = (each for each in text.splitlines() if each.startswith("- Better") and what in each)
    return re.findall(r"`([^`]+)`", next(lines, ""))


def leaderboard() -> dict[str, str]:
    """How alike halves of the photos and two networks rank the methods by the truth."""
    page = (TABLES / "leaderboard.md").read_text("utf-8")
    rows = map(cells_of, published(page, "board-stability").splitlines())
    stable = {row[1]: row[2:] for row in rows if row[0] == "`truth`"}
    found = {}
    for truth, (halves, _, networks) in stable.items():
        found[f"board_stable_{truth}"] = halves
        found[f"board_networks_{truth}"] = networks
    return found


def numbers() -> dict[str, str]:
    """The figures that the pages name."""
    by_model = calibrations()
    totals = [row for rows in by_model.values() for row in rows if row["map"] == GROUPS[-1]]
    kinds = [
        (row["faithful"], row["map"], model)
        for model, rows in by_model.items()
        for row in rows
        if row["map"] not in GROUPS
    ]
    share, kind, model = max(kinds)
    result = {
        "null_all_most": f"{max(row['all'] for row in totals):g} %",
        "null_worst": f"{kind} on the {MODELS[model]}, {share:g} %",
    }
    _, right = rows_of(table("right, known"))
    for name, key in RIGHT_MAPS.items():
        row = next(each for each in right if each[0] == name)
        result[key] = f"{percent(row[-1]):g} %"
    heads, rows = rows_of(table("tiny, other methods"))
    result["natural_photos"] = rows[0][1]
    for row in rows:
        if row[0] in ("gradcam", "lrp", "occlusion", "randomcam"):
            result[f"natural_{row[0]}"] = f"{percent(row[heads.index('faithful')]):g} %"
    result["parts_scenes_resnet"] = re.findall(r"- (\d+) scenes", parts("resnet"))[0]
    for network in ("resnet", "transformer"):
        names = better(parts(network), "**correctness** ")
        result[f"parts_correct_{network}"] = ", ".join(f"`{name}`" for name in names)
    photos = parts("idsds")
    result["idsds_orders"] = re.findall(r"two networks correlate by (-?\d\.\d+)", photos)[0]
    result["idsds_photos"] = re.findall(r"- (\d+) photos", photos)[0]
    return result | leaderboard()


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
            parser.exit(1, "the numbers are not those of the tables; run this script again\n")
        return
    text = PAGE.read_text("utf-8")
    PAGE.write_text(replaced(text, "calibration", pooled()), "utf-8")
    NUMBERS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    draw()


if __name__ == "__main__":
    main()
