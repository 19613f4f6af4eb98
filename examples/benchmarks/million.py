"""What a million photos would cost, by method: processor hours and bytes, from what a few photos
take in one process.

    python examples/benchmarks/million.py FOLDER [--count 32] [--model efficientnet-lite0] [--price
    0.04]

Prints a row of a table for each method. Times are processor time of one thread, which other
programs on the machine disturb less than the time on the wall; reading and preprocessing the photos
is in them. Bytes are those of a Parquet file (extra ``parquet``). The last column is the hours
times ``--price``, what an hour of one processor core costs. Nothing of a cluster is in it: neither
its start nor what it waits for.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from pathlib import Path

import torch

import explain
from explain.data.opening import EXTENSIONS
from explain.runs.exporting import arrow_modules, arrow_schema, with_map

PHOTOS = 1_000_000
FEW = {"integratedgradients": 4, "smoothgrad": 4, "scorecam": 8, "rise": 70}
"""Methods that take long: for how many times fewer photos they are measured."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--model", default="efficientnet-lite0")
    parser.add_argument("--price", type=float, default=0.04)
    parser.add_argument("--method", action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    explainer = explain.Explainer(options.model)
    found = sorted(path for path in options.folder.rglob("*") if path.suffix.lower() in EXTENSIONS)
    explainer(found[0], "gradcam")  # the first call is slower
    for method in options.method or ["gradcam", "saliency", *FEW]:
        count = max(1, options.count // FEW.get(method, 1))
        seconds, size = cost(explainer, [str(path) for path in found[:count]], method)
        hours = seconds * PHOTOS / 3600
        print(
            f"| `{method}` | {seconds:.2g} | {hours:,.0f} | {size:,.0f} | "
            f"{size * PHOTOS / 1e9:.2g} | "
            f"{hours * options.price:,.0f} |",
            flush=True,
        )


def cost(explainer: explain.Explainer, photos: list[str], method: str) -> tuple[float, float]:
    """Processor seconds and bytes for each photo."""
    with tempfile.TemporaryDirectory() as place:
        begun = time.process_time()
        run = explain.run(photos, explainer, method, output=f"{place}/run.sqlite", workers=0)
        seconds = time.process_time() - begun
        return seconds / len(photos), size_of(run)


def size_of(run: explain.Run) -> float:
    """Bytes for each row in a file of a cluster: without the manifest."""
    arrow, parquet = arrow_modules()
    rows = [with_map(row, []) for row in run.rows()]
    buffer = io.BytesIO()
    parquet.write_table(
        arrow.Table.from_pylist(rows, arrow_schema(arrow, [])), buffer, compression="zstd"
    )
    return len(buffer.getvalue()) / len(run)


if __name__ == "__main__":
    main()
