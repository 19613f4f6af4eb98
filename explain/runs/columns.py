"""The columns of a run as a table: those of `export`, in one file or in many."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from explain.errors import RunError
from explain.runs.reading import Row

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
