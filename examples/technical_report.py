"""The table of docs/verdict.md, and what docs/leaderboard.md says of scenes with parts, from the
tables in assets/tables/.

    python examples/technical_report.py [--check]

Numbers go to assets/report/numbers.json, which the page takes its figures from as it is built.
``--check`` only says whether the numbers are those of the tables.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples" / "benchmarks"))

from tables import END, cells_of, line, published, replaced  # noqa: E402

TABLES = ROOT / "assets" / "tables"
PAGE = ROOT / "docs" / "verdict.md"
NUMBERS = ROOT / "assets" / "report" / "numbers.json"
MODELS = {
    "tiny": "residual network",
    "tiny-transformer": "transformer",
    "efficientnet-lite0": "EfficientNet-Lite0",
}
GROUPS = ("all photo maps", "all object maps")


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


def pooled() -> str:
    """For each network, the share of its control maps that each check supports, and all three; and
    of right maps."""
    rows: list[list[str]] = []
    heads: list[str] = []
    for model, name in MODELS.items():
        heads_of_model, of_model = rows_of(table(f"calibration, {model}"))
        heads = heads_of_model or heads
        chosen = [row for row in of_model if row[0] in GROUPS]
        rows.extend([row[0].removeprefix("all "), name, *row[1:]] for row in chosen)
    _, right = rows_of(table("right"))
    rows.extend(["right", *row[:-1]] for row in right)
    lines = [["maps", "network", *heads[1:]], ["---"] * (1 + len(heads)), *rows]
    return "\n".join(map(line, lines))


def parts(name: str) -> str:
    """A part of assets/tables/parts.md: sentences and a table."""
    page = (TABLES / "parts.md").read_text("utf-8")
    return page.split(f"<!-- part: parts-{name} -->\n", 1)[1].split(END, 1)[0]


def better(text: str, what: str) -> list[str]:
    """The methods that a line of assets/tables/parts.md says are better than every control map."""
    lines = (each for each in text.splitlines() if each.startswith("- Better") and what in each)
    return re.findall(r"`([^`]+)`", next(lines, ""))


def numbers() -> dict[str, str]:
    """The figures that the pages name."""
    result = {}
    result["parts_scenes_resnet"] = re.findall(r"- (\d+) scenes", parts("resnet"))[0]
    for network in ("resnet", "transformer"):
        names = better(parts(network), "**correctness** ")
        result[f"parts_correct_{network}"] = ", ".join(f"`{name}`" for name in names)
    photos = parts("idsds")
    result["idsds_orders"] = re.findall(r"two networks correlate by (-?\d\.\d+)", photos)[0]
    result["idsds_photos"] = re.findall(r"- (\d+) photos", photos)[0]
    return result


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


if __name__ == "__main__":
    main()
