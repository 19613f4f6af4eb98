"""Where the values of the table are: lines that are added while measuring, and one Parquet file of
all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "assets" / "leaderboard" / "table.parquet"
COLUMNS = ("truth", "model", "method", "metric", "photo", "seed", "value")
KEYS = COLUMNS[:5]


def lines(store: Path) -> Iterator[dict[str, Any]]:
    """The records of a store, one for each photo of a network."""
    if store.exists():
        # what comes after the last line was not written whole
        for line in store.read_text("utf-8").split("\n")[:-1]:
            yield json.loads(line)


def rows(store: Path) -> Iterator[tuple[Any, ...]]:
    """A row for each value; what a method costs in passes is a metric too, and so is each method
    with the same map."""
    for record in lines(store):
        about = (record["truth"], record["model"])
        own = (record["photo"], record["seed"])
        for method, values in record["values"].items():
            for metric, value in (values | {"passes": record["costs"][method]}).items():
                yield (*about, method, metric, *own, value)
        for one, other in record["clones"]:
            yield (*about, one, f"same map as {other}", *own, 1.0)


def stored(file: Path) -> list[tuple[Any, ...]]:
    """The rows of a Parquet file, if there is one."""
    if not file.exists():
        return []
    import pyarrow.parquet

    found = pyarrow.parquet.read_table(file).to_pydict()
    return list(zip(*(found[name] for name in COLUMNS), strict=True))


def parquet(store: Path, file: Path = TABLE) -> Path:
    """Write one file of what it held before and what is in a store; a value that is in both counts
    once."""
    import pyarrow
    import pyarrow.parquet

    every = {row[: len(KEYS)]: row for row in (*stored(file), *rows(store))}
    columns = dict(
        zip(COLUMNS, zip(*(every[key] for key in sorted(every)), strict=True), strict=True)
    )
    kinds = {"seed": pyarrow.int8(), "value": pyarrow.float32()}
    names = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    table = pyarrow.table(
        {
            name: pyarrow.array(values, pyarrow.string()).cast(names)
            if name not in kinds
            else pyarrow.array(values, kinds[name])
            for name, values in columns.items()
        }
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, file, compression="zstd")
    return file


def known(store: Path, file: Path = TABLE) -> dict[tuple[str, str], set[str]]:
    """The photos of each kind and network that were measured."""
    found: dict[tuple[str, str], set[str]] = {}
    for row in stored(file):
        found.setdefault((row[0], row[1]), set()).add(row[4])
    for record in lines(store):
        found.setdefault((record["truth"], record["model"]), set()).add(record["photo"])
    return found
