"""Files that appear complete or not at all, and never in place of another without leave."""

from __future__ import annotations

import io
import json
import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from explain.errors import OutputError


def slug(text: str) -> str:
    """Return a text as part of a file name, on any system: letters and digits of any script, dots and dashes.

    >>> slug("tabby cat/../x"), slug("猫?")
    ('tabby-cat-..-x', '猫')
    """
    plain = re.sub(r"[^\w.-]+", "-", unicodedata.normalize("NFC", text)).strip("-.")
    while len(plain.encode("utf-8", "replace")) > 100:
        plain = plain[:-1]
    return plain or "image"


def distinct(names: Iterable[str]) -> list[str]:
    """Number names that would be the same file on some system.

    >>> distinct(["a", "A", "a-2", "b"])
    ['a', 'A-2', 'a-2-2', 'b']
    """
    used: set[str] = set()
    found = []
    for name in names:
        candidate, count = name, 1
        while candidate.casefold() in used:
            count += 1
            candidate = f"{name}-{count}"
        used.add(candidate.casefold())
        found.append(candidate)
    return found


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
        self._add(name, png_bytes(picture))

    def add_array(self, name: str, array: np.ndarray[Any, Any]) -> None:
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        self._add(name, buffer.getvalue())

    def add_json(self, name: str, record: dict[str, Any]) -> None:
        text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
        self._add(name, (text + "\n").encode("utf-8", "replace"))  # a file name may hold what is no character

    def _add(self, name: str, content: bytes) -> None:
        if name in self._contents:
            raise OutputError(f"output {name!r} would be written twice; choose different names")
        self._contents[name] = content

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
        there = [path for path in paths if os.path.lexists(path)]
        folders = [path for path in there if path.is_dir()]
        if folders:
            raise OutputError(f"output {str(folders[0])!r} must be a file, but a folder is in its place; move it away")
        if there and not self.overwrite:
            more = f" (and {len(there) - 1} more)" if len(there) > 1 else ""
            raise OutputError(
                f"output {str(there[0])!r} exists already{more}; choose another folder, or pass overwrite=True"
            )
