"""Files that appear complete or not at all, and never replace another without permission."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import secrets
import time
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from explain._utils.errors import FolderError, OutputError, either, printable, shown
from explain._utils.html import png

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PATIENCE = 10.0  # seconds to wait for others that put files in place, which takes them milliseconds
_BINARY = getattr(os, "O_BINARY", 0)


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


def json_text(document: Any, encoding: str = "utf-8") -> str:
    """Return a document as strict JSON in which no text can steer a terminal.

    What an ``encoding`` has no character for is written as an escape too.

    >>> print(json_text(["tabby\\x9b2J", "K\\xe4se"]))
    [
      "tabby\\u009b2J",
      "K\xe4se"
    ]
    """
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    text = re.sub(
        r"[^\n -~]", lambda found: found[0] if printable(found[0]) == found[0] else json.dumps(found[0])[1:-1], text
    )
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return json.dumps(document, indent=2, allow_nan=False)
    return text


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
        if not isinstance(folder, (str, os.PathLike)):
            raise FolderError(f"folder must be a path, got {shown(folder)}; name one")
        self.folder = Path(folder)
        self.overwrite = overwrite
        self._contents: dict[str, bytes] = {}

    def add_picture(self, name: str, picture: Image.Image) -> None:
        self.add_bytes(name, png(picture))

    def add_array(self, name: str, array: np.ndarray[Any, Any]) -> None:
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        self.add_bytes(name, buffer.getvalue())

    def add_json(self, name: str, record: dict[str, Any]) -> None:
        self.add_bytes(name, (json_text(record) + "\n").encode("utf-8"))

    def add_text(self, name: str, text: str) -> None:
        self.add_bytes(name, text.encode("utf-8"))

    def add_bytes(self, name: str, content: bytes) -> None:
        if name in self._contents:
            raise OutputError(f"output {name!r} would be written twice; choose different names")
        self._contents[name] = content

    def packed(self) -> bytes:
        """Return what was added as a ZIP archive, without writing anything."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self._contents.items():
                archive.writestr(name, content)
        return buffer.getvalue()

    def write(self) -> list[Path]:
        """Write what was added; return the paths.

        Every file is complete under another name before the first is put in place, and all of them are put in place
        while other processes and threads that write there wait. Of two that save to the same names, without
        ``overwrite`` the second is refused, and with it the second's files replace all of the first's.

        Raises:
            FolderError: the folder cannot be written.
            OutputError: a file exists and may not be overwritten, or its name cannot be used; then nothing has changed.
        """
        paths = [self.folder / name for name in self._contents]
        parked: list[Path] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check(paths)
            for content in self._contents.values():
                self._park(content, parked)
            with locked(self.folder):
                self._check(paths)
                self._place(parked, paths)
        except OSError as error:
            taken = isinstance(error, FileExistsError)
            reason = "a file is in its place" if taken else error.strerror or str(error)
            raise FolderError(
                f"output folder {str(self.folder)!r} cannot be written: {reason}; choose another"
            ) from None
        finally:
            for part in parked:
                with suppress(OSError):  # it is in place already, or cannot be removed: the first error is reported
                    part.unlink()
        return paths

    def _park(self, content: bytes, parked: list[Path]) -> None:
        """Write a file under a new name that cannot be guessed: no link is followed."""
        parked.append(self.folder / f".explain-{secrets.token_hex(8)}.part")
        descriptor = os.open(parked[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)

    def _place(self, parts: list[Path], paths: list[Path]) -> None:
        """Give files their names; without permission to overwrite, all of them or none."""
        if self.overwrite:
            for part, path in zip(parts, paths, strict=True):
                os.replace(part, path)
            return
        placed: list[Path] = []
        try:
            for part, path in zip(parts, paths, strict=True):
                _name_once(part, path, placed)
        except BaseException as error:
            for path in placed:
                with suppress(OSError):
                    path.unlink()
            if isinstance(error, FileExistsError):  # since the check: by a program that does not use the lock
                raise OutputError(_in_the_way(Path(error.filename2 or error.filename), 0)) from None
            raise

    def _check(self, paths: list[Path]) -> None:
        """Refuse names that are taken, or that the file system does not take."""
        there = [path for path in paths if _exists(path)]
        folders = [path for path in there if path.is_dir()]
        if folders:
            raise OutputError(f"output {str(folders[0])!r} must be a file, but a folder is in its place; move it away")
        if there and not self.overwrite:
            raise OutputError(_in_the_way(there[0], len(there) - 1))


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        remedy = either("pass stem=", "rename the photo")
        raise OutputError(f"output {str(path)!r} must have a shorter name for this file system; {remedy}") from None
    return True


def _in_the_way(path: Path, others: int) -> str:
    more = f" (and {others} more)" if others else ""
    leave = either("pass overwrite=True", "overwrite it with --force")
    return f"output {str(path)!r} exists already{more}; choose another folder, or {leave}"


def _name_once(part: Path, path: Path, placed: list[Path]) -> None:
    """Give a file a name that no other file has: a second name first, since only that never replaces another file."""
    try:
        os.link(part, path)
        placed.append(path)
    except FileExistsError:
        raise
    except OSError:  # a file system without second names: an empty file keeps the name until the content comes
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        placed.append(path)
        os.replace(part, path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes and threads out of a folder that they write in this way too.

    The lock is one on the folder itself: it leaves no file behind, and ends with the process that holds it. Systems
    and network drives without such locks are used without; there, each file is still whole.

    Raises:
        FolderError: another program keeps the folder locked.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _wait_for_lock(folder, descriptor)
        yield
    finally:
        with suppress(OSError):  # a child that was forked meanwhile has this descriptor too, and would keep the lock
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _wait_for_lock(folder: Path, descriptor: int) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise FolderError(
                    f"output folder {str(folder)!r} must not be locked, but another program has kept it so for "
                    f"{PATIENCE:g} s; wait until it is done, or choose another"
                ) from None
            time.sleep(0.01)
        except OSError:  # a network drive, say
            return
