"""What docs/leaderboard.md says of scenes with parts, from the tables in assets/tables/.

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

from tables import END  # noqa: E402

TABLES = ROOT / "assets" / "tables"
NUMBERS = ROOT / "assets" / "report" / "numbers.json"


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
    NUMBERS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
