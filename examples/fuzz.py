"""Hand thousands of broken image files to the command line, and say what became of them.

python examples/fuzz.py --files 2000 --seed 0

Nothing but one clear line may come of a broken file: no traceback, no hang, no half-written result. Files that bring
about anything else are kept, with a report, in `fuzz-failures/`; the exit code is then 1. The files depend on the seed
alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the generator lies with the tests

import torch

from tests.fuzz.command import BROKEN, EXPLAINED, REFUSED, Summary, clear, fuzz


def show(done: int, total: int, summary: Summary) -> None:
    """Draw the progress over itself on a terminal; elsewhere only its end."""
    line = f"{done}/{total} files, {summary.count(REFUSED)} refused, {len(summary.failures)} failures"
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{line}", end="" if done < total else "\n", file=sys.stderr, flush=True)
    elif done == total:
        print(line, file=sys.stderr, flush=True)


def table(summary: Summary) -> str:
    """Return the figures as a table in Markdown."""
    kinds = sorted({mutation for mutation, _ in summary.results})
    rows = [f"| mutation | {EXPLAINED} | {REFUSED} | {BROKEN} |", "|---|---|---|---|"]
    for kind in kinds:
        counts = (summary.results[kind, result] for result in (EXPLAINED, REFUSED, BROKEN))
        rows.append(f"| {kind.replace('_', ' ')} | {' | '.join(map(str, counts))} |")
    totals = (f"**{summary.count(result)}**" for result in (EXPLAINED, REFUSED, BROKEN))
    return "\n".join([*rows, f"| **all** | {' | '.join(totals)} |"])


def fuzz_files(count: int, seed: int, keep: Path) -> bool:
    """Run the command line on broken files; return whether it stood up to them."""
    clear(keep)
    summary = fuzz(count, seed, keep, lambda done, so_far: show(done, count, so_far))
    print(table(summary))
    print(f"\n{summary.calls} calls in one process, {1000 * summary.seconds / count:.0f} ms a file")
    print(f"slowest file: {summary.slowest[0]:.1f} s ({summary.slowest[1]})")
    print(f"memory: {summary.peak / 1e6:.0f} MB at most, {summary.growth / 1e6:.0f} MB more at the end than before")
    for failure in summary.failures:
        print(f"FAILED {failure}")
    return not summary.failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000, metavar="N", help="how many files (2000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other files (0)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="where failures go (fuzz-failures)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # pictures this small are done sooner by one
    return 0 if fuzz_files(options.files, options.seed, options.keep) else 1


if __name__ == "__main__":
    sys.exit(main())
