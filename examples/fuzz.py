"""Random networks by every method, broken image files, and damaged records: what became of them.

    python examples/fuzz.py --networks 1000 --files 2000 --records 2000 --seed 0

Each method's result on each network is held against its plain computation; of a broken file,
nothing but one clear line may come; and a damaged record is read as it was saved, or refused in one
line. What fails is printed, a network as a program to paste into a test; the exit code is then 1.
The seed alone says which networks and files are drawn. Needs the extra `test`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the generator lies with the tests

import torch

import explain
from tests.fuzz import files, networks, records


def fuzz_files(count: int, seed: int) -> bool:
    """Run the command line on broken files; return whether it stood up to them."""
    summary = files.fuzz(count, seed)
    print("| change | explained | refused |\n|---|---|---|")
    for change in sorted({change for change, _ in summary.results}):
        counts = [summary.results[change, result] for result in ("explained", "refused")]
        print(f"| {change.replace('_', ' ')} | {counts[0]} | {counts[1]} |")
    for failure in summary.failures:
        print(f"FAILED {failure}")
    return not summary.failures


def fuzz_networks(count: int, seed: int, minutes: float) -> bool:
    """Explain random networks; return whether every result was what the plain computation gives."""
    start = time.perf_counter()
    known = set[str]()

    def told(figures: networks.Figures) -> bool:
        elapsed = time.perf_counter() - start
        print(
            f"{figures.programs} networks, {len(figures.failures)} failures, {elapsed:.0f} s",
            file=sys.stderr,
        )
        for failure, case in networks.kinds(figures):
            if failure not in known:
                print(f"  {failure}\n  {case}", file=sys.stderr)
            known.add(failure)
        return elapsed > 60 * minutes

    figures = networks.run(count, seed, told)
    print(networks.table(figures))
    for failure, case in networks.kinds(figures):
        print(f"\nFAILED {failure}\n{case}")
    return not figures.failures


def fuzz_records(count: int, seed: int) -> bool:
    """Damage a saved explanation; return whether it was always read as it was saved, or refused in
    one line."""
    photo = Path(__file__).resolve().parents[1] / "assets" / "chelsea.png"
    with tempfile.TemporaryDirectory() as folder:
        explain.Explainer("tiny")(photo).save(folder)
        record = next(path for path in Path(folder).glob("*.json"))
        contents = (record.read_bytes(), record.with_suffix(".npy").read_bytes())
        first = explain.load(record).values
        found = [
            (what, records.outcome(record, files, first))
            for what, files in islice(records.damaged(contents, seed), count)
        ]
    wrong = [each for each in found if each[1] not in (records.SAME, records.REFUSED)]
    refused = sum(result == records.REFUSED for _, result in found)
    print(
        f"{count} damaged records: {refused} refused, {count - refused - len(wrong)} read as "
        f"saved, {len(wrong)} wrong"
    )
    for what, result in wrong:
        print(f"FAILED {what}: {result}")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", type=int, default=0, metavar="N", help="how many networks")
    parser.add_argument("--files", type=int, default=0, metavar="N", help="how many files")
    parser.add_argument(
        "--records", type=int, default=0, metavar="N", help="how many damaged records"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed, other networks and files (0)"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="no more networks after so long"
    )
    options = parser.parse_args()
    if not options.networks and not options.files and not options.records:
        parser.error("say how many: --networks N, --files N, --records N")
    torch.set_num_threads(1)  # what is this small is done sooner by one
    good = not options.networks or fuzz_networks(options.networks, options.seed, options.minutes)
    good &= not options.files or fuzz_files(options.files, options.seed)
    good &= not options.records or fuzz_records(options.records, options.seed)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
