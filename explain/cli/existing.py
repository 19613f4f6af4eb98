"""Photos whose results are there already: of the same pixels, and from the same question to the same model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explain.cli.each import Result
from explain.cli.sources import Source

if TYPE_CHECKING:
    from PIL import Image

    from explain.explainer import Explainer
    from explain.methods import Method


def request_of(
    explainer: Explainer,
    methods: Sequence[Method],
    group: str | None,
    targets: Sequence[int | str] | int | None,
    **options: Any,
) -> dict[str, Any]:
    """Return all that is asked, and of which model, in values that JSON can hold.

    Args:
        explainer: the model with its preprocessing.
        methods: those that are named; ``group`` is what the model chooses more by.
        targets: classes, how many of the best, or None for the best.
        options: others that change the values.
    """
    from explain.record import digest
    from explain.runs.fingerprint import identity
    from explain.runs.manifest import described_method

    found = {
        **identity(explainer), "group": group, "methods": {each.name: described_method(each) for each in methods},
        "targets": targets, **options,
    }  # fmt: skip
    found["categories"] = digest(json.dumps(found["categories"]).encode())
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def finished(
    folder: str, source: Source, stem: str, request: dict[str, Any], targets: int, photo: Image.Image
) -> Result | None:
    """Return what to say of a photo whose results are all in a folder, or None where some are missing.

    There must be a record of these very pixels and of this request, with its values and picture, for each method and as
    many targets; where a group chooses methods, at least one. Several have a sheet, which is written last.
    """
    from explain.record import digest

    methods = list(request["methods"]) if request["group"] is None else None
    pixels = digest(photo.tobytes()), list(photo.size)
    found = [
        record
        for record in _records(Path(folder), stem)
        if _is_of(record, source, pixels) and _answers(record, request)
    ]
    files = [str(record.path.with_suffix(suffix)) for record in found for suffix in (".png", ".npy", ".json")]
    sheet = Path(folder) / f"{stem}-sheet.png"
    several = methods is None or len(methods) * targets > 1
    if methods is None:
        complete = bool(found)
    else:
        complete = all(sum(record.method == name for record in found) >= targets for name in methods)
    if not complete or (several and not sheet.is_file()) or not all(map(os.path.isfile, files)):
        return None
    files += [str(sheet)] * several
    about = {"image": str(source), "files": files, "records": [record.content for record in found], "skipped": True}
    return Result(about, ["  skipped: its results are there"], skipped=True)


class _Record:
    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path, self.content, self.method = path, content, content.get("method")


def _records(folder: Path, stem: str) -> Iterator[_Record]:
    """The records whose names begin with a stem; those of photos with longer names are among them."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if name.startswith(f"{stem}-") and name.endswith(".json"):
            try:
                content = json.loads((folder / name).read_bytes())
            except (OSError, ValueError, RecursionError):
                continue  # damaged: not finished
            if isinstance(content, dict):
                yield _Record(folder / name, content)


def _answers(record: _Record, request: dict[str, Any]) -> bool:
    """Whether a record is of the same question to the same model; other methods may have been asked for beside it."""
    from explain.runs.fingerprint import alike

    before = record.content.get("request")
    if not isinstance(before, dict) or before.keys() != request.keys():
        return False
    before = {**before, "methods": _only(before, record.method)}
    wanted = {**request, "methods": _only(request, record.method)}
    return all(alike(key, before[key], value) for key, value in wanted.items())


def _only(request: dict[str, Any], method: str | None) -> Any:
    methods = request["methods"]
    return methods.get(method) if request["group"] is None and isinstance(methods, dict) else methods


def _is_of(record: _Record, source: Source, pixels: tuple[str, list[int]]) -> bool:
    """Whether a record is of this photo."""
    image = record.content.get("image")
    if not isinstance(image, dict) or (image.get("sha256"), image.get("size")) != pixels:
        return False
    path = image.get("path")
    if source.path is None or not isinstance(path, str):
        return source.path is None and path is None
    return os.path.realpath(path) == os.path.realpath(source.path)
