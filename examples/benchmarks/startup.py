"""From a cold start to the written overlay, as a multiple of ``python -c "import torch"``.

    python examples/benchmarks/startup.py [--rounds 9]

Whole processes run in turn with one thread, with compiled bytecode. The figure is the median of the ratios of their
processor time, which other programs disturb little. The commands that need no torch are printed too, in seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tables import Table, line
from timing import interleaved, ratio

PHOTO = Path(__file__).resolve().parents[2] / "assets" / "chelsea.png"


WORK = "`explain PHOTO`, from a cold start to the written overlay"


def table() -> Table:
    return Table("startup", ("command", 'time, by that of `python -c "import torch"`'), ((WORK,),))


def processor() -> float:
    """The seconds of processor time of the processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": f"{folder}/bytecode"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        words = {
            "import torch": ["-c", "import torch"],
            "explain photo": ["-m", "explain.cli", str(PHOTO), "--force", "--output", f"{folder}/results"],
            "explain --help": ["-m", "explain.cli", "--help"],
            "explain --version": ["-m", "explain.cli", "--version"],
            "explain methods": ["-m", "explain.cli", "methods"],
            "import explain": ["-c", "import explain"],
            "python": ["-c", "pass"],
        }

        def work(arguments: list[str]) -> None:
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)

        works = {name: (lambda arguments=each: work(arguments)) for name, each in words.items()}
        seconds = interleaved(works, options.rounds, processor)
    for name, times in seconds.items():
        low, *_, high = sorted(times * 2)
        print(f"{name:<18} {sorted(times)[len(times) // 2]:.3f} s ({low:.3f} to {high:.3f}, {options.rounds} rounds)")
    print(f"\n{table().head()}")
    print(line([WORK, f"{ratio(seconds, 'explain photo', 'import torch'):.2f}"]))


if __name__ == "__main__":
    main()
