"""A folder that several machines write to: a path that they share, or an address in a storage."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from explain._utils.errors import RunError, raised
from explain.runs.sources import text


class Storage:
    """A folder: a path, or an address that fsspec knows, such as ``s3://bucket/maps`` or ``memory://maps``.

    It can be sent to other machines. A file in it appears complete or not at all.

    Args:
        given: the path or the address.
        make: make the folder if there is none.

    Raises:
        RunError: there is a file of this name, fsspec does not know the address, or it lacks a package for it.
    """

    def __init__(self, given: str | os.PathLike[str], *, make: bool = True) -> None:
        self.name = os.fspath(given)
        if "://" not in self.name:
            self.name = os.path.realpath(self.name)
        with self._explained():
            fsspec = importlib.import_module("fsspec")  # here, as it takes a while
            self._files, self.path = fsspec.core.url_to_fs(self.name)
            self.is_local = "file" in self._files.protocol
            if self._files.isfile(self.path):
                raise RunError(f"output {text(given)!r} must be a folder, got a file; choose another name")
            if make:
                self._files.makedirs(self.path, exist_ok=True)

    def stamps(self) -> dict[str, str]:
        """The names of the files in their order, each with its size and what tells its versions apart."""
        with self._explained():
            self._files.invalidate_cache(self.path)
            found = self._files.ls(self.path, detail=True) if self._files.isdir(self.path) else []
        keys = ("ETag", "etag", "LastModified", "updated", "mtime", "created")
        return {
            os.path.basename(about["name"]): f"{about['size']} {next((about[key] for key in keys if key in about), '')}"
            for about in sorted(found, key=lambda about: str(about["name"]))
            if about["type"] == "file" and not os.path.basename(about["name"]).startswith(".")
        }

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it is not there."""
        with self._explained():
            try:
                return bytes(self._files.cat_file(f"{self.path}/{name}"))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or put another in its place."""
        with self._explained():
            if not self.is_local:
                self._files.pipe_file(f"{self.path}/{name}", content)  # storages show a file when it is whole
                return
            part = f"{self.path}/.explain-{secrets.token_hex(8)}.part"
            try:
                self._files.pipe_file(part, content)
                os.replace(part, f"{self.path}/{name}")
            finally:
                with suppress(OSError):
                    os.unlink(part)

    def remove(self, name: str) -> None:
        """Take a file away, if it is there."""
        with self._explained(), suppress(FileNotFoundError):
            self._files.rm_file(f"{self.path}/{name}")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the file system into ours."""
        try:
            yield
        except (OSError, ValueError, ImportError) as error:
            if isinstance(error, RunError):
                raise
            reason = getattr(error, "strerror", None) or raised(error)
            raise RunError(f"output {text(self.name)!r} cannot be used: {reason}; choose another folder, or make "
                           "room and start once more") from error  # fmt: skip
