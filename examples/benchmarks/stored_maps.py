"""What a killed run loses, and what insight of many stored maps takes.

    python examples/benchmarks/stored_maps.py FOLDER [--count 1000] [--maps 100000] [--model tiny]

A run with Grad-CAM over ``--count`` photos of the folder is killed (SIGKILL) when half of them are
done, and continued. Its results are then copied, with noise in the maps, until there are
``--maps``; a new process computes their insight.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import explain
from explain.runs import Entry
from explain.store.sources import Folder
from explain.store.writing import DIGESTED, PhotoRecord, Store, packed, unpacked

BLOCK = 1000  # photos that are written at once


def explained(options: argparse.Namespace, progress: Any = None) -> explain.Run:
    """The run over the first photos of the folder."""
    found = (entry for entry in Folder(options.folder).entries() if isinstance(entry, Entry))
    paths = [str(entry.where) for entry in islice(found, options.count)]
    explainer = explain.Explainer(options.model)
    return explain.run(
        paths, explainer, "gradcam", output=options.file, workers=0, progress=progress
    )


def killed(options: argparse.Namespace) -> tuple[int, float, float]:
    """Kill a run when half of its photos are done; return how many were, and seconds for each, also
    of processors."""
    given = [
        str(options.folder),
        "--count",
        str(options.count),
        "--model",
        options.model,
        "--file",
        options.file,
    ]
    done = 0
    first = 0
    begun = 0.0
    used = 0.0
    before = 0.0
    with subprocess.Popen(
        [sys.executable, __file__, *given, "--part", "run"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            done = int(line.split()[0])
            used = float(line.split()[1])
            if not begun:
                begun = time.perf_counter()
                first = done
                before = used
            if done >= options.count // 2:
                process.send_signal(signal.SIGKILL)
                break
        seconds = time.perf_counter() - begun
    return done, seconds / max(1, done - first), (used - before) / max(1, done - first)


def copies(file: str, maps: int) -> Iterator[PhotoRecord]:
    """The rows of a run again and again under other names, with other maps."""
    noise = np.random.default_rng(0)
    with closing(sqlite3.connect(file)) as db:
        db.row_factory = sqlite3.Row
        rows = db.execute(
            "SELECT * FROM photos JOIN results ON photo = photos.id ORDER BY photos.id"
        ).fetchall()
        photos = db.execute("SELECT * FROM photos ORDER BY id").fetchall()
    for number in range(maps - len(rows)):
        row = rows[number % len(rows)]
        photo = photos[number % len(rows)]
        values = unpacked(row).numpy()
        changed = packed(values * noise.uniform(0.5, 1.5, values.shape))
        mine = {**dict(photo), "name": f"copy-{number}", "path": None, "stamp": None}
        result = {name: row[name] for name in DIGESTED["results"]} | changed
        result |= {"method": "gradcam", "probability": photo["probability"], "metrics": "{}"}
        yield PhotoRecord({name: mine[name] for name in (*DIGESTED["photos"], "stamp")}, (result,))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--maps", type=int, default=100_000)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--part", choices=("run", "insight"), help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "run":
        explained(options, lambda state: print(state.done, time.process_time(), flush=True))
        return
    if options.part == "insight":
        begun = time.perf_counter()
        used = time.process_time()
        explain.open_run(options.file).insight()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        print(
            f"insight: {time.perf_counter() - begun:.0f} s, of a processor "
            f"{time.process_time() - used:.0f} s; "
            f"memory at most {peak:.0f} MB"
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        options.file = f"{folder}/run.sqlite"
        done, each, used = killed(options)
        kept = len(explain.open_run(options.file))
        begun = time.perf_counter()
        found = len(explained(options))
        seconds = time.perf_counter() - begun
        lost = max(0, done - kept)
        print(
            f"killed after {done} photos: {kept} are stored, {lost * each:.2f} s of work are lost, "
            "of processors "
            f"{lost * used:.2f} s"
        )
        print(f"continued in {seconds:.0f} s: {found} photos, each stored once", flush=True)
        store = Store(Path(options.file), {}, compare=False)
        records = copies(options.file, options.maps)
        while block := list(islice(records, BLOCK)):
            store.write(block)
        store.close()
        size = Path(options.file).stat().st_size / 1e6
        print(f"{options.maps} maps in a file of {size:.0f} MB", flush=True)
        subprocess.run(
            [
                sys.executable,
                __file__,
                str(options.folder),
                "--part",
                "insight",
                "--file",
                options.file,
            ],
            check=True,
        )


if __name__ == "__main__":
    main()
