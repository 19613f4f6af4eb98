"""What perturbed photos cost with ``compile=True``, with and without the time that compiling takes.

    python examples/benchmarks/compiled.py [--rows resnet18] [--rounds 5] [--threads 1] [--quick]

RISE, one photo, in batches of 16. 112 masks are run, compiled and not, in turn; that compiling is for longer runs is
switched off. The first of the seven batches is never compiled: its part is taken off. The first column is the median
over the rounds of the ratio of their times, with the range. The second is what compiling took, once for each network:
the first run with an empty cache, less a later one. The others are computed from these: 2,000 masks with the time to
compile, by those that are not compiled, and from how many on compiling pays. With one thread, times are those of the
processor, the compiler's included. Masks of RISE cover too much for incremental inference.
"""

from __future__ import annotations

import os
import tempfile

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # nothing that was compiled before
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # so that the processor time of the compiler is seen

import argparse
import math
import statistics
import time
from functools import partial

import torch
from incremental import spread
from peers import network
from runs import processor
from tables import Table, line
from timing import interleaved

import explain
from explain.engine import settings
from explain.methods import RISE

NETWORKS = {"tiny": 80, "tiny-transformer": 64, "efficientnet-lite0": 224, "resnet18": 224}
OWN = ("efficientnet-lite0", "tiny", "tiny-transformer")
SAMPLES, MEASURED, BATCH = 2000, 112, 16


def table() -> Table:
    head = ("network", "each photo, by uncompiled", "to compile", f"{SAMPLES:,} photos, by uncompiled", "pays from")
    return Table("compiled", head, tuple((name,) for name in NETWORKS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="a part of the names of the networks to run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one round, to see that everything runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings.WORTH_COMPILING = MEASURED
    clock = processor if options.threads == 1 else time.perf_counter
    print(table().head())
    for name in NETWORKS:
        if options.rows not in name:
            continue
        model = explain.Explainer(name).model if name in OWN else network(name)
        x = torch.randn(1, 3, NETWORKS[name], NETWORKS[name], generator=torch.Generator().manual_seed(1))
        run = partial(explain.attribute, model, x, RISE(MEASURED), target=1, batch_size=BATCH)
        expected, begun = run().values, clock()
        values = run(compile=True).values
        first = clock() - begun
        works = {"plain": run, "compiled": partial(run, compile=True)}
        seconds = interleaved(works, 1 if options.quick else options.rounds, clock, warm=False)
        plain = BATCH / MEASURED  # the share of rows that are not compiled
        ratios = [(a / b - plain) / (1 - plain) for a, b in zip(seconds["compiled"], seconds["plain"], strict=True)]
        off = (values - expected).abs().max() / expected.abs().max()
        each, saved = statistics.median(seconds["plain"]) / MEASURED, 1 - statistics.median(ratios)
        compiling = max(0.0, first - statistics.median(seconds["compiled"]))
        whole = 1 - saved + compiling / (SAMPLES * each)
        pays = f"{math.ceil(compiling / each / saved / 100) * 100:,} photos" if saved > 0 else "never"
        print(line([name, spread(ratios), f"{compiling:.0f} s", f"{whole:.2f}", pays]), flush=True)
        if off > 1e-4:
            raise SystemExit(f"compiled.py: values must be the same, but are off by {off:.1e} of the largest")


if __name__ == "__main__":
    main()
