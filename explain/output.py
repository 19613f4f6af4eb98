"""Files that appear complete or not at all, and never in place of another without leave."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from explain.errors import OutputError


def png_bytes(picture: Image.Image) -> bytes:
    """Return a picture as a PNG file; light compression, since the time goes there."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=4)
    return buffer.getvalue()


class Files:
    """Collects the contents of files for a folder, then writes all of them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = Files(folder)
    ...     files.add_json("a.json", {"x": 1})
    ...     [path.name for path in files.write()]
    ['a.json']
    """

    def __init__(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.folder = Path(folder)
        self.overwrite = overwrite
        self._contents: dict[str, bytes] = {}

    def add_picture(self, name: str, picture: Image.Image) -> None:
        self._contents[name] = png_bytes(picture)

    def add_array(self, name: str, array: np.ndarray[Any, Any]) -> None:
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        self._contents[name] = buffer.getvalue()

    def add_json(self, name: str, record: dict[str, Any]) -> None:
        self._contents[name] = (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode()

    def write(self) -> list[Path]:
        """Write what was added; return the paths.

        Raises:
            OutputError: a file exists and may not be overwritten, or the folder cannot be written. Every file is
                complete under another name before the first is put in place.
        """
        paths = [self.folder / name for name in self._contents]
        parked: list[Path] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check(paths)
            for path, content in zip(paths, self._contents.values(), strict=True):
                parked.append(path.with_name(f".{path.name}.{os.getpid()}.part"))
                with parked[-1].open("wb") as file:
                    file.write(content)
            for part, path in zip(parked, paths, strict=True):
                os.replace(part, path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(
                f"output folder {str(self.folder)!r} cannot be written: {reason}; choose another"
            ) from None
        finally:
            for part in parked:
                part.unlink(missing_ok=True)
        return paths

    def _check(self, paths: list[Path]) -> None:
        there = [path for path in paths if path.exists()]
        if there and not self.overwrite:
            more = f" and {len(there) - 1} more" if len(there) > 1 else ""
            raise OutputError(
                f"output {str(there[0])!r}{more} exists already; choose another folder, or allow overwriting"
            )
