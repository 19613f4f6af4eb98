"""Files that appear complete or not at all, and never replace another without permission."""

import io
import json
import os
import re
import secrets
import time
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from explain._utils.errors import (
    FolderError,
    OutputError,
    printable,
    python_or_command,
    reason_of,
    shown,
)
from explain._utils.html import png
from explain._utils.signals import deferring_signals

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LONGEST = 255  # bytes of a name, which file systems take
PATIENCE = 10.0  # seconds to wait for others that put files in place, which takes them milliseconds


def slug(text: str) -> str:
    """Return a text as part of a file name that any system takes: letters and digits of any script,
    dots and dashes, at most 100 bytes."""
    plain = re.sub(r"[^\w.-]+", "-", unicodedata.normalize("NFC", text)).strip("-.")
    while len(plain.encode("utf-8", "replace")) > 100:
        plain = plain[:-1]
    return plain or "image"


def distinct(names: Iterable[str]) -> list[str]:
    """Number those names that would be the same file on some system, where capitals do not count,
    so that all are different; the order stays."""
    taken: dict[str, str] = {}
    for name in names:
        free = name
        count = 2
        while free.casefold() in taken:
            free = f"{name}-{count}"
            count += 1
        taken[free.casefold()] = free
    return list(taken.values())


def json_text(document: Any, encoding: str = "utf-8") -> str:
    """A document as strict, indented JSON that cannot steer a terminal: characters that cannot be
    seen, or that the ``encoding`` lacks, are escapes."""

    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    text = re.sub(r"[^\n -~]", _unless_printable, text)  # all that is not plain ASCII
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return json.dumps(document, indent=2, allow_nan=False)
    return text


def _unless_printable(match: re.Match[str]) -> str:
    """The matched character as it is, or as an escape of JSON where it cannot be seen."""
    character = match[0]
    return character if printable(character) == character else json.dumps(character)[1:-1]


def halved(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return an array divided by its largest magnitude as float16, and that magnitude: half the
    size in files of maps, which are read back as ``values * scale``."""
    scale = np.float32(np.abs(array).max(initial=0) or 1)  # zeros alone are divided by 1
    return (array / scale).astype(np.float16), np.asarray(scale)


def restored(
    values: np.ndarray[Any, Any], scale: np.ndarray[Any, Any] | np.float32
) -> np.ndarray[Any, Any]:
    """Return what `halved` keeps of an array, as float32."""
    return values.astype(np.float32) * scale


class Files:
    """Collects the contents of files for a folder, then writes all of them."""

    def __init__(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Begin an empty set of files for a folder, which need not exist yet; nothing is written
        before `write`."""
        if not isinstance(folder, (str, os.PathLike)):
            raise FolderError(f"folder must be a path, got {shown(folder)}; name one")
        self.folder = Path(folder)
        self.overwrite = overwrite
        self._contents: dict[str, bytes] = {}

    def add_picture(self, name: str, picture: Image.Image) -> None:
        """Add a picture; the name ends in .png, .jpg or .jpeg."""
        if name.lower().endswith((".jpg", ".jpeg")):
            buffer = io.BytesIO()
            picture.save(buffer, "JPEG", quality=90)
            self.add_bytes(name, buffer.getvalue())
        else:
            self.add_bytes(name, png(picture))

    def add_array(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Add an array as a file of NumPy; under a name that ends in .npz as `halved`, compressed,
        with the keys "values" and "scale"."""
        buffer = io.BytesIO()
        if name.endswith(".npz"):
            values, scale = halved(array)
            np.savez_compressed(buffer, values=values, scale=scale)
        else:
            np.save(buffer, array, allow_pickle=False)
        self.add_bytes(name, buffer.getvalue())

    def add_json(self, name: str, record: dict[str, Any]) -> None:
        self.add_bytes(name, (json_text(record) + "\n").encode("utf-8"))

    def add_text(self, name: str, text: str) -> None:
        self.add_bytes(name, text.encode("utf-8"))

    def add_bytes(self, name: str, content: bytes) -> None:
        if name in self._contents:
            raise OutputError(f"output {name!r} would be written twice; choose different names")
        if len(os.fsencode(name)) > LONGEST:
            remedy = python_or_command("pass stem=", "rename the photo")
            raise OutputError(f"output {name!r} must have a shorter name; {remedy}")
        self._contents[name] = content

    @property
    def names(self) -> list[str]:
        """The names of the files so far."""
        return list(self._contents)

    def packed(self) -> bytes:
        """Return all added files as a ZIP archive; nothing is written to disk."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self._contents.items():
                archive.writestr(name, content)
        return buffer.getvalue()

    def write(self) -> list[Path]:
        """Write what was added and return the paths: each file complete under another name first,
        then all put in place under a lock. Without ``overwrite``, an existing one is refused.
        """
        paths = [self.folder / name for name in self._contents]
        if any("\0" in str(path) for path in paths):
            raise OutputError(
                f"output {str(paths[0])!r} must be a path without the character NUL; change it"
            )
        parts: list[Path] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check(paths)
            # under names that cannot be guessed: no link is followed
            for content in self._contents.values():
                parts.append(self.folder / f".explain-{secrets.token_hex(8)}.part")
                with parts[-1].open("xb") as file:
                    file.write(content)
            with locked_folder(self.folder):
                self._check(paths)
                _put_in_place(parts, paths)
        except OSError as error:
            reason = reason_of(error)
            if isinstance(error, FileExistsError):  # where the folder is to be made
                reason = "a file is in its place"
            raise FolderError(
                f"output folder {str(self.folder)!r} cannot be written: {reason}; change it"
            ) from None
        finally:
            for part in parts:
                # a part may be in place already; if it cannot be removed, the first error counts
                with suppress(OSError):
                    part.unlink()
        return paths

    def refuse(self, names: Iterable[str]) -> None:
        """Refuse names as `write` would, before the work for what is in the files; what else keeps
        the folder from being written is left to it."""
        self._check([self.folder / name for name in names])

    def _check(self, paths: list[Path]) -> None:
        """Refuse paths that exist, even as a broken link (unless ``overwrite``), or are folders."""
        taken = [path for path in paths if os.path.lexists(path)]
        for path in taken:
            if path.is_dir():
                raise OutputError(
                    f"output {str(path)!r} must be a file, but a folder is in its place; move it "
                    "away"
                )
        if taken and not self.overwrite:
            more = f" (and {len(taken) - 1} more)" if len(taken) > 1 else ""
            leave = python_or_command("pass overwrite=True", "overwrite it with --force")
            raise OutputError(
                f"output {str(taken[0])!r} exists already{more}; choose another folder, or {leave}"
            )


def write_file(
    path: str | os.PathLike[str], content: str | bytes, *, overwrite: bool = False
) -> Path:
    """Write a single file, complete or not at all, and return its path. Raises `OutputError` if it
    exists and ``overwrite`` is not set, or cannot be written."""
    place = Path(path)
    files = Files(place.parent, overwrite=overwrite)
    files.add_bytes(place.name, content.encode("utf-8") if isinstance(content, str) else content)
    return files.write()[0]


@deferring_signals  # so that an interruption leaves all files in place or none
def _put_in_place(parts: Sequence[Path], paths: Sequence[Path]) -> None:
    """Give finished files their names."""
    for part, path in zip(parts, paths, strict=True):
        part.replace(path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a block another path in the same folder to write to; what it wrote takes the place of
    ``path`` at once if the block ends without an error, and is removed otherwise."""
    part = path.with_name(f".explain-{secrets.token_hex(8)}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink()


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keep others that use this lock out of a folder. It is on the folder itself, and ends with the
    process; on systems without such locks, each file is still whole.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    end = time.monotonic() + PATIENCE
    try:
        while not lock(descriptor):
            if time.monotonic() > end:
                raise FolderError(
                    f"output folder {str(folder)!r} must not be locked, but another program "
                    f"has kept it so for {PATIENCE:g} s; choose another"
                )
            time.sleep(0.01)
        yield
    finally:
        unlock(descriptor)


def lock(descriptor: int) -> bool:
    """Try to lock an open file or folder by its descriptor, without waiting: false if another
    program has locked it. True also where there are no locks."""
    with suppress(OSError):  # a network drive may refuse locks
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def unlock(descriptor: int) -> None:
    """Unlock and close a descriptor. Closing alone is not enough: processes that were forked
    meanwhile have it open too, and would keep the lock."""
    with suppress(OSError):
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def as_cell(value: Any) -> Any:
    """Return a value as a cell of CSV, in which a text that a spreadsheet would run as a formula
    gets an apostrophe before it; numbers stay."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    with suppress(ValueError):
        float(value)
        return value
    return f"'{value}"
