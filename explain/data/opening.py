"""Files of photos: which there are in a folder, opened without waiting, and what decoders print
about them."""

import errno
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

_NAMES = (
    "jpg",
    "jpeg",
    "png",
    "webp",
    "bmp",
    "gif",
    "tif",
    "tiff",
    "ppm",
    "pgm",
    "jfif",
    "avif",
    "heic",
    "heif",
)
EXTENSIONS = frozenset(f".{name}" for name in _NAMES)
SCANS = frozenset([".npy", ".dcm", ".nii", ".nii.gz"])
"""Endings of files with pixels of any depth, in one slice or several."""


def ending_of(name: str) -> str:
    """The ending of a file's name in small letters; ``.nii.gz`` is one."""
    small = name.lower()
    return ".nii.gz" if small.endswith(".nii.gz") else os.path.splitext(small)[1]


def photos_in(
    folder: str, subfolder: str = "", *, recursive: bool = True, apart_from: str = ""
) -> Iterator[tuple[str, str | None]]:
    """Yield (path, None) of each photo from ``folder`` on, by name, and (folder, why) of those that
    cannot be read. Hidden files are left out, and arrays beside a file of the same stem: maps.
    """
    try:
        with os.scandir(os.path.join(folder, subfolder)) as entries:
            items = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError as error:
        yield subfolder, f"cannot be read: {error.strerror}; check its permissions"
        return
    stems = Counter(os.path.splitext(name)[0] for name, _ in items)
    for name, is_folder in items:
        path = os.path.join(subfolder, name)
        if name.startswith("."):
            continue
        stem = os.path.splitext(name)[0]
        ending = ending_of(name)
        if not is_folder and ending in EXTENSIONS | SCANS:
            if ending != ".npy" or stems[stem] == 1:  # else it is the map beside its picture
                yield path, None
        elif is_folder and recursive and os.path.realpath(os.path.join(folder, path)) != apart_from:
            yield from photos_in(folder, path, apart_from=apart_from)


class NoFileError(OSError):
    """What was to be opened is there, but is no file."""


def open_for_reading(path: Path, *, pipes: bool = False) -> IO[bytes]:
    """Open a file for reading in bytes; anything else is refused without waiting, since opening a
    pipe may take forever.
    """
    # Before it is opened, since that may rewind a tape; of folders, open() says what they are.
    mode = path.stat().st_mode
    is_file = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    if not is_file and not (pipes and stat.S_ISFIFO(mode)):
        raise NoFileError(errno.EINVAL, "got a pipe, a socket or a device")
    return path.open("rb")


@contextmanager
def hushed() -> Iterator[list[str]]:
    """Catch what libraries in C print to standard error in a block, in a list filled at its end.
    For programs without threads: nothing reaches standard error meanwhile.
    """
    lines: list[str] = []
    with ExitStack() as stack:
        try:
            standard_error = os.dup(2)
            stack.callback(os.close, standard_error)
            printed = stack.enter_context(tempfile.TemporaryFile())
        except OSError:  # standard error was closed, or there is no room for a copy
            yield lines
            return
        os.dup2(printed.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(standard_error, 2)
            printed.seek(0)
            # a damaged file may print without end, and `troubles` takes the first remark
            lines += printed.read(10_000).decode("utf-8", "replace").splitlines()


def troubles(printed: Sequence[str]) -> list[str]:
    """Return what a decoder has ``printed`` about a photo that may be damaged, as a list of one
    remark; empty if it printed nothing but warnings."""
    serious = [line for line in printed if line and "Warning" not in line]
    return [f"may be damaged, its decoder says: {serious[0]}"] if serious else []
