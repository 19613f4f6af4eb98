"""From a cold start to the written overlay, as a multiple of ``python -c "import torch"``.

    python examples/benchmarks/startup.py [--rounds 9]

Both are run in turn as whole processes; the figure is the median of the ratios.
"""

from __future__ import annotations

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        explain = [sys.executable, "-m", "explain.cli", str(PHOTO), "--force", "--output", folder]
        works = {
            "import torch": lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True),
            "explain photo": lambda: subprocess.run(explain, check=True, stdout=subprocess.DEVNULL),
        }
        seconds = interleaved(works, options.rounds)
    for name, times in seconds.items():
        print(f"{name:<14} {sorted(times)[len(times) // 2]:.2f} s (median of {options.rounds})")
    print(f"\n{table().head()}")
    print(line([WORK, f"{ratio(seconds, 'explain photo', 'import torch'):.2f}"]))


if __name__ == "__main__":
    main()
