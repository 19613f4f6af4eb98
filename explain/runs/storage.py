"""A folder that several machines write to: a path that they share, or an address in a storage."""

from __future__ import annotations

import importlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from explain._utils.errors import RunError, raised
from explain.runs.sources import text


class Storage:
    """A folder: a path, or an address that pyarrow knows, such as ``s3://bucket/maps`` or ``gs://bucket/maps``.

    It can be sent to other machines. A file in it appears complete or not at all.

    Args:
        given: the path or the address.

    Raises:
        RunError: there is a file of this name, or pyarrow does not know the address.
    """

    def __init__(self, given: str | os.PathLike[str]) -> None:
        name = os.fspath(given)
        self.is_remote = re.match(r"[a-zA-Z][\w+.-]*://", name) is not None
        self.name = name if self.is_remote else os.path.realpath(name)
        if not self.is_remote and os.path.lexists(name) and not os.path.isdir(name):
            raise RunError(f"output {text(name)!r} must be a folder, got a file; choose another name")
        with self._told():
            if self.is_remote:
                system, path = self._storage()
                system.create_dir(path, recursive=True)
            else:
                Path(self.name).mkdir(parents=True, exist_ok=True)

    def files(self, ending: str) -> list[str]:
        """The names of the files that end so, in their order."""
        with self._told():
            if not self.is_remote:
                return sorted(each.name for each in Path(self.name).glob(f"[!.]*{ending}"))
            system, path = self._storage()
            found = system.get_file_info(importlib.import_module("pyarrow.fs").FileSelector(path))
            return sorted(each.base_name for each in found if each.is_file and each.base_name.endswith(ending))

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it is not there."""
        with self._told():
            try:
                with self.opened(name) as file:
                    return bytes(file.read())
            except FileNotFoundError:
                return None

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        """A file, open for reading."""
        if not self.is_remote:
            with open(os.path.join(self.name, name), "rb") as file:
                yield file
            return
        system, path = self._storage()
        with system.open_input_file(f"{path}/{name}") as file:
            yield file

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or put another in its place."""
        with self._told():
            if self.is_remote:
                system, path = self._storage()
                with system.open_output_stream(f"{path}/{name}") as file:  # there when it is closed, in a storage
                    file.write(content)
                return
            part = Path(self.name, f".explain-{secrets.token_hex(8)}.part")
            try:
                part.write_bytes(content)
                os.replace(part, Path(self.name, name))
            finally:
                with suppress(OSError):
                    part.unlink()

    def remove(self, name: str) -> None:
        """Take a file away, if it is there."""
        with self._told():
            if not self.is_remote:
                Path(self.name, name).unlink(missing_ok=True)
                return
            system, path = self._storage()
            with suppress(FileNotFoundError):
                system.delete_file(f"{path}/{name}")

    def _storage(self) -> tuple[Any, str]:
        try:
            storage: Any = importlib.import_module("pyarrow.fs")
        except ImportError:
            raise RunError(f"pyarrow must be installed to use {self.name!r}; pip install 'explain[parquet]'") from None
        system, path = storage.FileSystem.from_uri(self.name)
        return system, path

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say in our words what the system says."""
        try:
            yield
        except (OSError, ValueError) as error:  # pyarrow has no errors of its own for storages
            reason = getattr(error, "strerror", None) or raised(error)
            raise RunError(f"output {text(self.name)!r} cannot be used: {reason}; choose another folder, or make "
                           "room and start once more") from error  # fmt: skip
