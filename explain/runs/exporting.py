"""A run as one table for other programs: Parquet with the maps, CSV and JSON lines without."""

from __future__ import annotations

import csv
import importlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from explain._utils.errors import RunError, either
from explain.runs.reading import Row, Stored
from explain.runs.sources import text

PLAIN = (
    "name", "method", "target", "target_class", "score", "probability", "label", "label_class", "label_probability",
    "prediction", "prediction_class", "prediction_probability", "correct", "layer", "delta", "runs", "error", "path",
    "sha256",
)  # fmt: skip


def plain(row: Row, metrics: Sequence[str]) -> dict[str, Any]:
    """The columns of a row, but for its map."""
    found = {name: getattr(row, name) for name in PLAIN}
    found["layer"] = ", ".join(row.layer) if isinstance(row.layer, tuple) else row.layer
    found |= {"width": row.size[0], "height": row.size[1]}
    found |= {"left": row.box.left, "top": row.box.top, "right": row.box.right, "bottom": row.box.bottom}
    found |= {"input_height": row.input_size[0], "input_width": row.input_size[1]}
    found["boxes"] = [list(box) for box in row.boxes]
    return found | {metric: row.metrics.get(metric) for metric in metrics}


def with_map(row: Row, metrics: Sequence[str]) -> dict[str, Any]:
    """Return all columns of a row."""
    return {**plain(row, metrics), "map_shape": list(row.values.shape), "map": row.values.flatten().numpy()}


def arrow_modules() -> tuple[Any, Any]:
    """Return ``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        RunError: they are not installed.
    """
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise RunError("pyarrow must be installed to write Parquet; pip install 'explain[parquet]', or name a .csv "
                       "file") from None  # fmt: skip


def schema_of(arrow: Any, metrics: Sequence[str]) -> Any:
    """Return the schema of a table."""
    integers = {
        "target_class",
        "label_class",
        "prediction_class",
        "runs",
        "width",
        "height",
        "input_height",
        "input_width",
    }
    words = {"name", "method", "target", "label", "prediction", "layer", "path", "sha256"}
    numbers = [
        *(name for name in PLAIN if name not in integers | words | {"correct"}),
        *("left", "top", "right", "bottom"),
        *metrics,
    ]
    kinds = {
        **dict.fromkeys(sorted(integers), arrow.int64()),
        **dict.fromkeys(sorted(words), arrow.string()),
        **dict.fromkeys(numbers, arrow.float64()),
        "correct": arrow.bool_(),
        "boxes": arrow.list_(arrow.list_(arrow.float64())),
        "map_shape": arrow.list_(arrow.int32()),
        "map": arrow.list_(arrow.float32()),
    }
    others = ("width", "height", "left", "top", "right", "bottom", "input_height", "input_width", "boxes")
    columns = (*PLAIN, *others, *metrics, "map_shape", "map")
    return arrow.schema([(name, kinds[name]) for name in columns])


NUMBERS = 4_000_000  # of maps that are held at once
AT_ONCE = 1024  # rows that are held at once


def export(run: Stored, file: str | os.PathLike[str], *, overwrite: bool = False) -> int:
    """Write the rows of a run into one file: ``.parquet`` with the maps (extra ``parquet``), ``.csv`` or ``.jsonl``.

    The file appears complete or not at all. In Parquet, ``map`` is a list of float32, row after row, and ``map_shape``
    its shape; the manifest is among the metadata of the schema, under ``explain``. Each metric is a column.

    Args:
        run: the run.
        file: where to write; its ending says what.
        overwrite: replace a file that is there.

    Returns:
        How many rows were written.

    Raises:
        RunError: the file is there, cannot be written or has another ending, or pyarrow is not installed.

    >>> export(Stored("run.sqlite"), "table.xlsx")
    Traceback (most recent call last):
    explain.RunError: run 'run.sqlite' must be a file, but there is none; check the path
    """
    path = Path(file)
    writer = _WRITERS.get(path.suffix.lower())
    if writer is None:
        known = ", ".join(_WRITERS)
        raise RunError(f"file must end in one of {known}, got {text(path.name)!r}; choose one of them")
    if os.path.lexists(path) and not overwrite:
        leave = either("pass overwrite=True", "overwrite it with --force")
        raise RunError(f"file {text(path)!r} exists already; choose another, or {leave}")
    part = path.with_name(f".explain-{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        count = writer(run, part)
        os.replace(part, path)
    except OSError as error:
        raise RunError(f"file {text(path)!r} cannot be written: {error.strerror or error}; choose another") from None
    finally:
        with suppress(OSError):
            part.unlink()
    return count


def _metrics(run: Stored) -> list[str]:
    return [name for (name,) in run.query("SELECT DISTINCT metric FROM metrics ORDER BY metric")]


def _to_csv(run: Stored, path: Path) -> int:
    metrics, count = _metrics(run), 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer: Any = None
        for count, row in enumerate(run.rows(), 1):  # noqa: B007
            found = plain(row, metrics)
            found["boxes"] = json.dumps(found["boxes"]) if found["boxes"] else None
            if writer is None:
                writer = csv.DictWriter(file, list(found), lineterminator="\n")
                writer.writeheader()
            writer.writerow(found)
    return count


def _to_json_lines(run: Stored, path: Path) -> int:
    metrics, count = _metrics(run), 0
    with path.open("w", encoding="utf-8") as file:
        for count, row in enumerate(run.rows(), 1):  # noqa: B007
            file.write(json.dumps(plain(row, metrics), ensure_ascii=False) + "\n")
    return count


def _to_parquet(run: Stored, path: Path) -> int:
    arrow, parquet = arrow_modules()
    metrics = _metrics(run)
    schema = schema_of(arrow, metrics).with_metadata({"explain": json.dumps(run.manifest)})
    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for rows in _in_parts(run.rows()):
            writer.write_table(arrow.Table.from_pylist([with_map(row, metrics) for row in rows], schema))
            count += len(rows)
    return count


def _in_parts(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """As many rows at once as fit into memory, however large their maps are."""
    for first in rows:
        many = max(1, min(AT_ONCE, NUMBERS // max(1, first.values.numel())))
        yield [first, *islice(rows, many - 1)]


_WRITERS: dict[str, Callable[[Stored, Path], int]] = {
    ".parquet": _to_parquet,
    ".csv": _to_csv,
    ".jsonl": _to_json_lines,
}
