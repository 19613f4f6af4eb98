"""Random networks by every method, broken image files, and damaged records: what became of them.

    python examples/fuzz.py --networks 1000 --files 2000 --records 2000 --seed 0

Each method's result on each network is held against its plain computation; of a broken file,
nothing but one clear line may come; and a damaged record is read as it was saved, or refused in one
line. What fails is printed, a network as a program to paste into a test; the exit code is then 1.
The seed alone says which networks and files are drawn. Needs the extra `test`.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the generator lies with the tests

import hypothesis
import torch

import explain
from tests.fuzz import files, networks, records

CHUNK = 50
"""How many networks are drawn at a time."""


def run(
    count: int, seed: int, told: Callable[[networks.Figures], bool] = lambda figures: False
) -> networks.Figures:
    """Check ``count`` cases, others for every seed; ``told`` hears of the figures now and then, and
    may stop."""
    figures = networks.Figures()
    for start in range(0, count, CHUNK):
        explore = hypothesis.seed(seed * 1_000_003 + start)(
            hypothesis.settings(
                max_examples=min(CHUNK, count - start),
                deadline=None,
                database=None,
                phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )(
                hypothesis.given(networks.cases())(
                    lambda case: networks.check(case, figures=figures) and None
                )
            )
        )
        explore()
        if told(figures):
            break
    return figures


def without_numbers_and_names(failure: str) -> str:
    """A failure's message without its numbers and names."""
    return re.sub(r"'[^']*'|[bmt]?\d[\d.]*(e[-+]?\d+)?(\.m\d+)?", "#", failure)


def table(figures: networks.Figures) -> str:
    """The figures in Markdown."""
    compared = sum(figures.compared.values())
    refused = sum(figures.refused.values())
    rows = [("random networks", f"{figures.programs:,}"), ("method runs compared", f"{compared:,}")]
    rows += [
        (f"refused: {kind}", f"{n:,} ({n / (compared + refused):.1%})")
        for kind, n in figures.refused.most_common()
    ]
    rows += [(f"not compared: {kind}", f"{n:,}") for kind, n in figures.skipped.most_common()]
    rows += [
        (f"not compared: {name} changes as much with the last digits", f"{n:,}")
        for name, n in figures.unsteady.most_common()
    ]
    rows += [
        (f"largest deviation of {name}", f"{off:.0e}")
        for name, off in sorted(figures.deviation.items())
    ]
    rows += [("failures", f"{len(figures.failures):,}")]
    return "\n".join(
        ["| what | how many |", "|---|---|", *(f"| {what} | {many} |" for what, many in rows)]
    )


def kinds(figures: networks.Figures) -> list[tuple[str, networks.Case]]:
    """Of each kind of failure, the one with the shortest program."""
    found: dict[str, tuple[str, networks.Case]] = {}
    for failure, case in sorted(figures.failures, key=lambda pair: len(repr(pair[1]))):
        found.setdefault(without_numbers_and_names(failure), (failure, case))
    return list(found.values())


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
        for failure, case in kinds(figures):
            if failure not in known:
                print(f"  {failure}\n  {case}", file=sys.stderr)
            known.add(failure)
        return elapsed > 60 * minutes

    figures = run(count, seed, told)
    print(table(figures))
    for failure, case in kinds(figures):
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
