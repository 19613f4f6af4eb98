"""A run as one table for other programs: Parquet, CSV, JSON lines."""

import csv
import json
import os
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from explain._utils.errors import RunError, either, optional
from explain.data.files import as_cell, replacing
from explain.store.reading import Row, StoredRun
from explain.store.sources import text

COLUMNS = {
    "name": "string",
    "method": "string",
    "target": "string",
    "target_class": "int64",
    "score": "float64",
    "probability": "float64",
    "label": "string",
    "label_class": "int64",
    "label_probability": "float64",
    "prediction": "string",
    "prediction_class": "int64",
    "prediction_probability": "float64",
    "correct": "bool",
    "layer": "string",
    "delta": "float64",
    "runs": "int64",
    "error": "float64",
    "path": "string",
    "sha256": "string",
    "width": "int64",
    "height": "int64",
    "left": "float64",
    "top": "float64",
    "right": "float64",
    "bottom": "float64",
    "input_height": "int64",
    "input_width": "int64",
}
"""The columns before boxes, labels and metrics, with their types in Arrow."""
VALUES_AT_ONCE = 4_000_000  # values of maps in memory
ROWS_AT_ONCE = 1024


def export(run: StoredRun, file: str | os.PathLike[str], *, overwrite: bool = False) -> int:
    """Write the rows of a run into one file: ``.parquet`` with the maps (extra ``parquet``),
    ``.csv`` or ``.jsonl``.

    The file appears complete or not at all. In Parquet, ``map`` is a list of float32, row after
    row, and ``map_shape`` its shape; the manifest is among the metadata of the schema, under
    ``explain``. Each metric is a column.

    Args:
        run: the run.
        file: where to write; its ending chooses the format.
        overwrite: replace a file that exists.

    Returns:
        How many rows were written.

    Raises:
        RunError: the file exists, cannot be written or has another ending, or pyarrow is not
            installed.
    """
    path = Path(file)
    writer = _WRITERS.get(path.suffix.lower())
    if writer is None:
        raise RunError(
            f"file must end in one of {', '.join(_WRITERS)}, got {text(path.name)!r}; choose one "
            "of them"
        )
    if os.path.lexists(path) and not overwrite:
        leave = either("pass overwrite=True", "overwrite it with --force")
        raise RunError(f"file {text(path)!r} exists already; choose another, or {leave}")
    metrics = run.metrics
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            return writer(run, metrics, part)
    except OSError as error:
        raise RunError(
            f"file {text(path)!r} cannot be written: {error.strerror or error}; choose another"
        ) from None


def columns_without_map(row: Row, metrics: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a row, but for its map."""
    columns = {
        name: getattr(row, name) if hasattr(row, name) else row.columns[name] for name in COLUMNS
    }
    if isinstance(row.layer, tuple):
        columns["layer"] = ", ".join(row.layer)
    columns["boxes"] = [list(box) for box in row.boxes]
    columns["labels"] = list(row.labels)
    return columns | {metric: row.metrics.get(metric) for metric in metrics}


def with_map(row: Row, metrics: Sequence[str]) -> dict[str, Any]:
    """Return all columns of a row."""
    return {
        **columns_without_map(row, metrics),
        "map_shape": list(row.values.shape),
        "map": row.values.flatten().numpy(),
    }


def arrow_schema(arrow: Any, metrics: Sequence[str]) -> Any:
    """Return the schema of a table in Arrow."""
    kinds = {name: arrow.type_for_alias(kind) for name, kind in COLUMNS.items()}
    kinds["boxes"] = arrow.list_(arrow.list_(arrow.float64()))
    kinds["labels"] = arrow.list_(arrow.string())
    kinds |= dict.fromkeys(metrics, arrow.float64())
    return arrow.schema(
        {**kinds, "map_shape": arrow.list_(arrow.int32()), "map": arrow.list_(arrow.float32())}
    )


def arrow_modules() -> tuple[Any, Any]:
    """Return ``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        RunError: they are not installed.
    """
    arrow, parquet = (
        optional(name, "for Parquet", "parquet", RunError)
        for name in ("pyarrow", "pyarrow.parquet")
    )
    return arrow, parquet


def _to_csv(run: StoredRun, metrics: Sequence[str], path: Path) -> int:
    """Write a line for each row, without its map; boxes and labels are JSON in their cells. Return
    how many."""
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [*COLUMNS, "boxes", "labels", *metrics], lineterminator="\n")
        table.writeheader()
        for row in run.rows():
            columns = columns_without_map(row, metrics)
            for name in ("boxes", "labels"):
                columns[name] = (
                    json.dumps(columns[name], ensure_ascii=False) if columns[name] else None
                )
            table.writerow({name: as_cell(value) for name, value in columns.items()})
            count += 1
    return count


def _to_json_lines(run: StoredRun, metrics: Sequence[str], path: Path) -> int:
    """Write an object for each row, without its map. Return how many."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in run.rows():
            file.write(json.dumps(columns_without_map(row, metrics), ensure_ascii=False) + "\n")
            count += 1
    return count


def _to_parquet(run: StoredRun, metrics: Sequence[str], path: Path) -> int:
    """Write all rows with their maps. Return how many."""
    arrow, parquet = arrow_modules()
    schema = arrow_schema(arrow, metrics).with_metadata({"explain": json.dumps(run.manifest)})
    rows = run.rows()
    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for first in rows:  # as many rows at once as fit into memory, however large their maps are
            size = max(1, min(ROWS_AT_ONCE, VALUES_AT_ONCE // max(1, first.values.numel())))
            together = [with_map(row, metrics) for row in (first, *islice(rows, size - 1))]
            writer.write_table(arrow.Table.from_pylist(together, schema))
            count += len(together)
    return count


_WRITERS: dict[str, Callable[[StoredRun, Sequence[str], Path], int]] = {
    ".parquet": _to_parquet,
    ".csv": _to_csv,
    ".jsonl": _to_json_lines,
}
