"""From a cold start to the written overlay, as a multiple of ``python -c "import torch"``.

    python examples/benchmarks/startup.py [--rounds 9] [--busy 2]

Whole processes run in turn with one thread, with compiled bytecode. The figure is the median of the
ratios of their processor time, which other programs disturb little. The other commands are printed
too, in seconds.

"all threads" is with as many threads as there are processors, and "spinning" the same where they
wait as OpenMP has it: torch is loaded before the command line can set ``OMP_WAIT_POLICY``.
``--busy`` runs so many endless loops beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tables import Table, line
from timing import interleaved, ratio

PHOTO = Path(__file__).resolve().parents[2] / "assets" / "chelsea.png"


SPINNING = "import sys, torch; from explain.cli import main; sys.exit(main(sys.argv[1:]))"
WORK = "`explain PHOTO`, from a cold start to the written overlay"


def table() -> Table:
    return Table("startup", ("command", 'time, by that of `python -c "import torch"`'), ((WORK,),))


def processor() -> float:
    """The seconds of processor time of the processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--busy", type=int, default=0, help="endless loops beside it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPYCACHEPREFIX": f"{folder}/bytecode",
        }
        for name in ("PYTHONDONTWRITEBYTECODE", "OMP_WAIT_POLICY"):
            environment.pop(name, None)
        threaded = {
            name: value
            for name, value in environment.items()
            if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        }
        photo = [str(PHOTO), "--force", "--output", f"{folder}/results"]
        words = {
            "import torch": ["-c", "import torch"],
            "explain photo": ["-m", "explain.cli", *photo],
            "explain photo, all threads": ["-m", "explain.cli", *photo],
            "explain photo, spinning": ["-c", SPINNING, *photo],
            "explain --help": ["-m", "explain.cli", "--help"],
            "explain --version": ["-m", "explain.cli", "--version"],
            "explain methods": ["-m", "explain.cli", "methods"],
            "import explain": ["-c", "import explain"],
            "python": ["-c", "pass"],
        }

        def work(name: str) -> None:
            has_all = name.startswith("explain photo, ")
            command = [sys.executable, *words[name]]
            subprocess.run(
                command,
                check=True,
                stdout=subprocess.DEVNULL,
                env=threaded if has_all else environment,
            )

        loops = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range(options.busy)
        ]
        try:
            seconds = interleaved(
                {name: partial(work, name) for name in words}, options.rounds, processor
            )
        finally:
            for loop in loops:
                loop.kill()
    for name, times in seconds.items():
        low, *_, high = sorted(times * 2)
        print(
            f"{name:<26} {sorted(times)[len(times) // 2]:.3f} s ({low:.3f} to {high:.3f}, "
            f"{options.rounds} rounds)"
        )
    print(f"\n{table().head()}")
    print(line([WORK, f"{ratio(seconds, 'explain photo', 'import torch'):.2f}"]))


if __name__ == "__main__":
    main()
