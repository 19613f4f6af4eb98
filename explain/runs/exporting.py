"""A run as one table for other programs: Parquet, CSV, JSON lines."""

import csv
import importlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from explain._utils.errors import RunError, optional, python_or_command, warn
from explain.data.files import as_cell, replacing
from explain.store.lists import coco_ids
from explain.store.reading import Row, StoredRun
from explain.store.sources import path_text, true_label_names

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
TableRow: TypeAlias = tuple[dict[str, Any], list[float]]
"""The columns of a row by their names, and the probabilities of its labels or classes."""
MAP_ENDINGS = (".parquet", ".csv", ".jsonl")


def export(
    run: StoredRun,
    file: str | os.PathLike[str],
    *,
    photos: bool = False,
    boxes: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> int:
    """Write a run's rows, or a row for each photo with all probabilities (``photos``), into
    ``.parquet`` (with maps: extra ``parquet``), ``.csv``, ``.jsonl``, or its detections as COCO's
    ``.json`` (numbered by ``boxes``), complete or not at all; returns how many. In Parquet, ``map``
    is a list of float32 with ``map_shape``, and the manifest is under ``explain`` in the schema's
    metadata.
    """
    path = check_table(file, photos=photos, overwrite=overwrite)
    ending = path.suffix.lower()
    if boxes is not None and ending != ".json":
        raise RunError(f"boxes have no effect on a file {ending}; leave them out")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            if ending == ".json":
                return _to_coco(run, boxes, part)
            if ending == ".parquet":
                return _to_parquet(run, part)
            return _to_photos(run, ending, part) if photos else _to_maps(run, ending, part)
    except OSError as error:
        raise RunError(
            f"file {path_text(path)!r} cannot be written: {error.strerror or error}; choose another"
        ) from None


def check_table(
    file: str | os.PathLike[str], *, photos: bool = False, overwrite: bool = False
) -> Path:
    """Return the path of a table that can be written."""
    path = Path(file)
    # Parquet, the first, is for maps alone, and COCO's results are no rows of photos
    endings = MAP_ENDINGS[1:] if photos else (*MAP_ENDINGS, ".json")
    if path.suffix.lower() not in endings:
        raise RunError(
            f"file must end in one of {', '.join(endings)}, got {path_text(path.name)!r}; choose "
            "one of them"
        )
    if os.path.lexists(path) and not overwrite:
        leave = python_or_command("pass overwrite=True", "overwrite it with --force")
        raise RunError(f"file {path_text(path)!r} exists already; choose another, or {leave}")
    return path


def columns_without_map(row: Row, metrics: Sequence[str]) -> dict[str, Any]:
    """The cells of one exported row by the names of `COLUMNS`, then boxes, labels and a column for
    each metric (None where it has no value), in the table's order.
    """
    # the width and the like are in the row's columns only
    columns = {name: getattr(row, name, row.columns.get(name)) for name in COLUMNS}
    if isinstance(row.layer, tuple):
        columns["layer"] = ", ".join(row.layer)
    columns["boxes"] = [list(box) for box in row.boxes]
    columns["labels"] = list(row.labels)
    return columns | {metric: row.metrics.get(metric) for metric in metrics}


def with_map(row: Row, metrics: Sequence[str]) -> dict[str, Any]:
    """Return the cells of one row of a Parquet table: those of `columns_without_map`, and the map,
    flat, with its shape."""
    return {
        **columns_without_map(row, metrics),
        "map_shape": list(row.values.shape),
        "map": row.values.flatten().numpy(),
    }


def arrow_schema(arrow: Any, metrics: Sequence[str]) -> Any:
    """Return the Arrow schema of a Parquet table of maps: its columns in the order of `with_map`.
    Files of `write_part` and `export` have it, and other programs read them."""
    kinds = {name: arrow.type_for_alias(kind) for name, kind in COLUMNS.items()}
    kinds["boxes"] = arrow.list_(arrow.list_(arrow.float64()))
    kinds["labels"] = arrow.list_(arrow.string())
    kinds |= dict.fromkeys(metrics, arrow.float64())
    return arrow.schema(
        {**kinds, "map_shape": arrow.list_(arrow.int32()), "map": arrow.list_(arrow.float32())}
    )


def arrow_modules() -> tuple[Any, Any]:
    """Import ``pyarrow`` and ``pyarrow.parquet``, which are optional, and return both.
    Raises `RunError` if they are not installed.
    """
    parquet = optional("pyarrow.parquet", "for Parquet", "parquet", RunError)
    return importlib.import_module("pyarrow"), parquet


def _to_maps(run: StoredRun, ending: str, path: Path) -> int:
    """Write a table of CSV or JSON lines with a row for each map, without its values; return the
    number of rows."""
    metrics = run.metrics
    labels = _labels_of(run, "labels")

    def rows() -> Iterator[TableRow]:
        """The cells of each row, and the probabilities of all labels of its photo."""
        for row in run.rows():
            columns = columns_without_map(row, metrics)
            if ending == ".csv":  # a cell stays empty where there are no boxes or labels
                columns |= {name: columns[name] or None for name in ("boxes", "labels")}
            yield columns, _probabilities(row.columns, "labels")

    return _write(path, ending, [*COLUMNS, "boxes", "labels", *metrics], labels, rows())


PHOTO_COLUMNS = ("name", "path", "label", "label_probability", "prediction", "probability")


def _to_photos(run: StoredRun, ending: str, path: Path) -> int:
    """Write a table of CSV or JSON lines with a row for each photo, and the probability of every
    label or class; return the number of rows."""
    # a run has one kind of outputs: labels, of which several may be true, or classes
    kind = "labels" if _labels_of(run, "labels") else "classes"
    names_of_outputs = _labels_of(run, kind)
    if not names_of_outputs:
        warn(
            "the probability of each class is not in the table: a run stores it for models of "
            "several labels, and of 2 to 256 classes"
        )

    def rows() -> Iterator[TableRow]:
        """The cells of each photo, and the probabilities of its labels or classes."""
        for photo in run.photo_columns():
            columns: dict[str, Any] = {name: photo[name] for name in PHOTO_COLUMNS}
            columns["labels"] = None  # the true ones of the photo, where they are known
            if photo["labels"] is not None:
                columns["labels"] = true_label_names(photo["labels"])
            yield columns, _probabilities(photo, kind)

    return _write(path, ending, [*PHOTO_COLUMNS, "labels"], names_of_outputs, rows())


def _write(
    path: Path, ending: str, head: Iterable[str], labels: Sequence[str], rows: Iterable[TableRow]
) -> int:
    """Write rows of cells, then the probabilities of ``labels``: as CSV under a head, where lists
    become JSON, or each as a JSON object on a line of its own. Return the number of rows."""
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if ending == ".csv":
            table.writerow(map(as_cell, [*head, *labels]))
        for columns, probabilities in rows:
            count += 1
            if ending == ".csv":
                table.writerow(map(_in_cell, [*columns.values(), *probabilities]))
                continue
            # of a photo without probabilities, this is empty
            by_label = dict(zip(labels, probabilities, strict=False))
            document = {**columns, "probabilities": by_label} if by_label else columns
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
    return count


def _in_cell(value: Any) -> Any:
    """A value as a cell of CSV: lists as JSON, all else as `as_cell`, which keeps spreadsheets from
    taking text for a formula."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else as_cell(value)


def _probabilities(photo: Mapping[str, Any], kind: str) -> list[float]:
    """The stored probabilities of a photo, from its column ``probabilities``; ``kind`` is "labels"
    (several may be true) or "classes" (one is). Empty where the photo has none of that kind."""
    by_kind: dict[str, list[float]] = json.loads(photo["probabilities"] or "{}")
    return by_kind.get(kind, [])


def _labels_of(run: StoredRun, kind: str) -> list[str]:
    """The names of all labels or classes (``kind`` is "labels" or "classes") whose probabilities
    the photos have, by the first photo; empty where they are not stored."""
    first = next(run.photo_columns(), {"probabilities": None})
    return [run.label_of(number) for number in range(len(_probabilities(first, kind)))]


def _to_coco(run: StoredRun, boxes: str | os.PathLike[str] | None, path: Path) -> int:
    """Write a run's detections as COCO's results and return their number. Photos and categories are
    numbered by ``boxes`` or the source; those without a number there are left out with a warning.
    """
    source = run.manifest["source"]
    may_be_annotations = [boxes, source.get("boxes"), source.get("path")]
    file = next((name for name in may_be_annotations if str(name).endswith(".json")), None)
    ids = None if file is None else coco_ids(file)
    results = []
    left_out: Counter[str] = Counter()  # detections, by the photo or label without a number
    is_of_detector = False
    for photo in run.photo_columns():
        is_of_detector = is_of_detector or photo["detections"] is not None
        # without annotations: COCO names the files of photos by their numbers
        stem = Path(photo["name"]).stem
        image_id: Any = int(stem) if stem.isdecimal() else photo["name"]
        if ids is not None:
            image_id = ids.photos.find(photo["path"] or photo["name"], photo["name"])
        for label, score, x0, y0, x1, y1, category in json.loads(photo["detections"] or "[]"):
            if ids is not None:
                category = ids.categories.get(label.casefold())
            if image_id is None or category is None:
                left_out[photo["name"] if image_id is None else label] += 1
                continue
            box = [round(edge, 3) for edge in (x0, y0, x1 - x0, y1 - y0)]  # with width and height
            results.append(
                {"image_id": image_id, "category_id": category, "bbox": box, "score": score}
            )
    if not is_of_detector:
        raise RunError(
            f"run {path_text(run.path)!r} must be one of a detector for a file .json, and has no "
            f"detections; choose {', '.join(MAP_ENDINGS)}"
        )
    if left_out:
        names = ", ".join(map(repr, sorted(left_out)[:5]))
        warn(
            f"{left_out.total()} detections are left out, as the annotations "
            f"{path_text(file or '')!r} do not list {names}"
        )
    path.write_text(json.dumps(results), "utf-8")
    return len(results)


def _to_parquet(run: StoredRun, path: Path) -> int:
    """Write a Parquet file with a row for each map, with its values, and the manifest in the
    metadata of the schema. Return the number of rows."""
    arrow, parquet = arrow_modules()
    metrics = run.metrics
    schema = arrow_schema(arrow, metrics).with_metadata({"explain": json.dumps(run.manifest)})
    rows = run.rows()
    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for first in rows:  # as many rows at once as fit into memory, however large their maps are
            fitting = max(1, min(ROWS_AT_ONCE, VALUES_AT_ONCE // max(1, first.values.numel())))
            together = [with_map(row, metrics) for row in (first, *islice(rows, fitting - 1))]
            writer.write_table(arrow.Table.from_pylist(together, schema))
            count += len(together)
    return count
