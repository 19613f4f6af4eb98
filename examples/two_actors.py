"""A run on a Ray cluster of two actors finds what one machine finds, also if an actor is killed on
the way.

    python examples/two_actors.py FOLDER [--count 200] [--method gradcam] [--model
    efficientnet-lite0] [--per-file 16]

Starts a cluster on this machine, explains the first photos of a folder on it, ends one of the
actors with SIGKILL when a quarter is done, and compares all rows with those of `explain.run` in one
process, exported: each column, each number of each map. Needs the extra ``ray``. It ends with 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import explain
from explain.data.opening import EXTENSIONS
from explain.runs import Content, Entry, run_on_ray
from explain.runs.runner import State
from explain.store.sources import Folder


class Noted(Folder):
    """A folder that keeps which processes read it."""

    def read(self, entry: Entry) -> Content:
        Path(self.folder).with_name("readers").joinpath(str(os.getpid())).touch()
        return super().read(entry)


def rows_of(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    import pyarrow.parquet

    return {
        (row["name"], row["method"], row["target"]): row
        for row in pyarrow.parquet.read_table(path).to_pylist()
    }


def memory_of(process: int) -> int:
    """The part of a process's memory that it shares with no other, in bytes."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--method", action="append")
    parser.add_argument("--model", default="efficientnet-lite0")
    parser.add_argument("--per-file", type=int, default=16)
    options = parser.parse_args()
    methods = options.method or ["gradcam"]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        (work / "photos").mkdir()
        (work / "readers").mkdir()
        found = sorted(
            path for path in options.folder.rglob("*") if path.suffix.lower() in EXTENSIONS
        )
        for number, path in enumerate(found[: options.count]):
            (work / "photos" / f"{number:05}{path.suffix}").symlink_to(path.resolve())
        return compare(work, explain.Explainer(options.model), methods, options.per_file)


def compare(work: Path, explainer: explain.Explainer, methods: list[str], per_file: int) -> int:
    import ray

    photos = Noted(work / "photos")
    killed: list[int] = []
    memory: list[int] = []

    def kill_one(state: State) -> None:
        if not killed and 4 * state.done >= photos.count:
            actors = sorted(int(path.name) for path in (work / "readers").iterdir())
            memory.extend(map(memory_of, actors))
            killed.append(actors[-1])
            os.kill(actors[-1], signal.SIGKILL)

    begun = time.perf_counter()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": paths}
    )
    started = time.perf_counter()
    run = run_on_ray(
        photos,
        explainer,
        methods,
        output=work / "maps",
        actors=2,
        per_file=per_file,
        progress=kill_one,
    )
    ended = time.perf_counter()
    ray.shutdown()
    local = explain.run(work / "photos", explainer, methods, output=work / "run.sqlite", workers=0)
    after = time.perf_counter()
    local.export(work / "run.parquet")
    same = rows_of(work / "maps") == rows_of(work / "run.parquet")
    readers = len(list((work / "readers").iterdir()))
    size = sum(path.stat().st_size for path in (work / "maps").glob("*.parquet"))
    print(
        f"{run.photos} photos, {len(run)} rows, {len(run.failures)} failed; actors in all: "
        f"{readers}, killed: {killed}"
    )
    print(
        f"cluster: {started - begun:.1f} s to start, {ended - started:.1f} s to run (its actors' "
        "start in it)"
    )
    print(f"one process: {after - ended:.1f} s")
    print(f"memory of each actor alone: {', '.join(f'{each / 1e6:.0f} MB' for each in memory)}")
    print(f"{size / max(1, len(run)):.0f} bytes for each row in Parquet")
    print("all rows are equal" if same else "ROWS DIFFER")
    return 0 if same and killed and not run.failures else 1


if __name__ == "__main__":
    sys.exit(main())
