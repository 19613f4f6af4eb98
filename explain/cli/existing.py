"""Photos whose results are there already, from a run before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from explain.cli.each import Result
from explain.cli.sources import Source


def finished(folder: str, source: Source, stem: str, methods: list[str] | None, targets: int) -> Result | None:
    """Return what to say of a photo whose results are all in a folder, or None where some are missing.

    There must be a record of this very photo, with its values and picture, for each method and as many targets; where
    ``methods`` is None, since they depend on the model, at least one. Several have a sheet, which is written last.
    """
    found = [record for record in _records(Path(folder), stem) if _is_of(record, source)]
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


def _is_of(record: _Record, source: Source) -> bool:
    """Whether a record is of this photo."""
    image = record.content.get("image")
    path = image.get("path") if isinstance(image, dict) else None
    if source.path is None or not isinstance(path, str):
        return source.path is None and path is None
    return os.path.realpath(path) == os.path.realpath(source.path)
