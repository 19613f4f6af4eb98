"""Measures every published table, in a sensible order, within 40 minutes on two quiet cores.

    python examples/benchmarks/all.py [--output tables.md] [--update] [--only peers pairs] [--quick]

Each table is printed by a script of its own, which runs in a process of its own. They are collected
in ``--output``; ``--update`` puts them into the pages of docs/, between the markers that name them.
What is over a goal is told on the way. The peers are in the extra ``peers``, what the app needs in
``app``; without them their cells say so, and the pages are not updated.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from tables import in_markdown, page_of, replaced

HERE = Path(__file__).resolve().parent

# By table, what prints it: short ones first, so that what is wrong shows early.
COMMANDS = {
    "startup": ["startup.py"],
    "hooks": ["hooks.py", "--rounds", "7"],
    "interventions": ["interventions.py", "--rounds", "3"],
    "overhead": [
        "overhead.py",
        "--rounds",
        "5",
        "--models",
        "resnet18",
        "mobilenet_v3_small",
        "tiny",
    ],
    "gradients": ["gradients.py", "--rounds", "5"],
    "pairs": ["pairs.py", "--rounds", "3"],
    "graphs": ["graphs.py", "--rounds", "5"],
    "boxes": ["boxes.py", "--rounds", "9"],
    "methods": ["methods.py", "--threads", "1", "--rounds", "3"],
    "covering": ["covering.py", "--rounds", "3"],
    "incremental": ["incremental.py", "--rounds", "5"],
    "accuracy": ["accuracy.py"],
    "peers": ["peers.py", "--rounds", "5"],
    "metrics": ["metrics.py", "--rounds", "3"],
    "check": ["check.py"],
    "app": ["app.py"],
}
QUICK = {
    "startup": ["startup.py", "--rounds", "1"],
    "hooks": ["hooks.py", "--quick"],
    "interventions": ["interventions.py", "--quick"],
    "overhead": ["overhead.py", "--rounds", "1", "--models", "tiny"],
    "gradients": ["gradients.py", "--quick"],
    "pairs": ["pairs.py", "--quick"],
    "graphs": ["graphs.py", "--quick"],
    "boxes": ["boxes.py", "--quick"],
    "methods": ["methods.py", "--quick"],
    "covering": ["covering.py", "--quick"],
    "incremental": ["incremental.py", "--quick", "--rows", "resnet18"],
    "accuracy": ["accuracy.py", "--quick"],
    "peers": ["peers.py", "--quick"],
    "metrics": ["metrics.py", "--quick"],
    "check": ["check.py", "--quick"],
    "app": ["app.py", "--users", "2", "--rounds", "2", "--model", "tiny"],
}


def printed(command: list[str]) -> str:
    """Run a script and return its table; it prints it line by line on the way."""
    script, *options = command
    lines = []
    with subprocess.Popen(
        [sys.executable, str(HERE / script), *options], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for each in process.stdout:
            print(each, end="", flush=True)
            lines.append(each)
    if process.returncode:
        raise SystemExit(
            f"all.py: {script} must end well, but ended with {process.returncode}; see above"
        )
    return in_markdown("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("tables.md"))
    parser.add_argument(
        "--update", action="store_true", help="put the tables into the pages of docs/"
    )
    parser.add_argument("--only", nargs="*", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument(
        "--quick", action="store_true", help="small and quick, to see that everything runs"
    )
    options = parser.parse_args()
    if options.quick and options.update:
        parser.error("--update is for measured tables; leave out --quick")
    start = time.monotonic()
    found = {}
    for name in options.only:
        print(
            f"\n== {name} ({(time.monotonic() - start) / 60:.1f} min, load "
            f"{os.getloadavg()[0]:.1f})",
            flush=True,
        )
        found[name] = printed((QUICK if options.quick else COMMANDS)[name])
        options.output.write_text(
            "\n\n".join(f"{name}:\n\n{rows}" for name, rows in found.items()) + "\n", "utf-8"
        )
    if options.update:
        if any("not installed" in rows for rows in found.values()):
            raise SystemExit(
                "all.py: peers and the app must be installed for --update; use pip install -e "
                "'.[peers,app]'"
            )
        for name, rows in found.items():
            page = page_of(name)
            page.write_text(replaced(page.read_text("utf-8"), name, rows), "utf-8")
    print(
        f"\nwritten to {options.output}{' and docs/' * options.update} "
        f"after {(time.monotonic() - start) / 60:.1f} min"
    )


if __name__ == "__main__":
    main()
