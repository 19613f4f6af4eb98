"""Photos and models by the names that were typed: files, folders, standard input."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from explain._utils.errors import ExplainError, ImageError, ModelError, raised
from explain.cli.arguments import UsageError
from explain.cli.output import Output, notes

if TYPE_CHECKING:
    from PIL import Image

    from explain.explanation.explainer import Explainer


STDIN = "-"


@dataclass(frozen=True)
class PhotoSource:
    """Where a photo comes from: a file, or standard input, which has no path."""

    path: Path | None

    @classmethod
    def of(cls, name: str) -> PhotoSource:
        return cls(None if name == STDIN else Path(name))

    def __str__(self) -> str:
        return STDIN if self.path is None else str(self.path)

    @property
    def name(self) -> str:
        """How messages call it."""
        return "standard input" if self.path is None else str(self.path)

    @property
    def stem(self) -> str:
        """What the names of its results begin with."""
        return "stdin" if self.path is None else self.path.stem


def find_photos(
    given: Sequence[str], *, recursive: bool = False, apart_from: str = ""
) -> tuple[list[PhotoSource], list[ExplainError]]:
    """Return the photos that names of files and folders stand for, and an error for each name that is of no use.

    Of a folder, hidden files are left out; with ``recursive``, its folders are looked into too, but for hidden ones and
    the folder ``apart_from``, where results are written.
    """
    found: list[PhotoSource] = []
    missing: list[ExplainError] = []
    for name in given:
        path = Path(name)
        if not name:  # as a path, it would be the folder we are in
            missing.append(ImageError("image must be a file or folder, got an empty name; check the command"))
        elif name == STDIN:
            found.append(PhotoSource.of(name))
        elif re.match(r"\w+://", name):
            missing.append(ImageError(f"image {name!r} must be a file, got an address; download it first"))
        elif not os.path.isdir(path):  # unlike Path.is_dir, this accepts any name
            found.append(PhotoSource(path))
        else:
            inside, troubles = _inside(path, recursive, os.path.realpath(apart_from) if apart_from else "")
            found += map(PhotoSource, inside)
            missing += troubles
            if not inside and not troubles:
                missing.append(_no_images(path, recursive))
    return list(dict.fromkeys(found)), missing


def photos_of(options: argparse.Namespace) -> tuple[list[PhotoSource], list[ExplainError]]:
    """Return the photos that the options of a command name, and what is wrong with some of the names.

    Raises:
        UsageError: ``--recursive`` has no folder to look into.
    """
    if options.recursive and not any(map(os.path.isdir, options.images)):
        raise UsageError("--recursive would have no effect without a folder; name one, or leave it out")
    return find_photos(options.images, recursive=options.recursive, apart_from=getattr(options, "output", ""))


def _inside(folder: Path, recursive: bool, apart: str) -> tuple[list[Path], list[ExplainError]]:
    """The photos in a folder in the order of their paths, and what could not be looked into."""
    from explain.data.images import EXTENSIONS

    troubles: list[ExplainError] = []

    def unreadable(error: OSError) -> None:
        troubles.append(
            ImageError(f"folder {str(error.filename)!r} cannot be read: {error.strerror}; check its permissions")
        )

    found: list[Path] = []
    for root, folders, files in os.walk(folder, onerror=unreadable):
        paths = (Path(root) / name for name in files if not name.startswith("."))
        found += [path for path in paths if path.suffix.lower() in EXTENSIONS and path.is_file()]
        folders[:] = [name for name in folders if _is_looked_into(os.path.join(root, name), apart)] if recursive else []
    return sorted(found), troubles


def _is_looked_into(folder: str, apart: str) -> bool:
    return not os.path.basename(folder).startswith(".") and os.path.realpath(folder) != apart


def _no_images(folder: Path, recursive: bool) -> ImageError:
    from explain.data.images import EXTENSIONS

    deeper = not recursive and any(path.is_dir() and not path.name.startswith(".") for path in folder.iterdir())
    remedy = "; --recursive looks into its folders" if deeper else ""
    return ImageError(f"folder {str(folder)!r} holds no images ({', '.join(sorted(EXTENSIONS))}){remedy}")


def stems(photos: Sequence[PhotoSource]) -> Iterator[tuple[PhotoSource, str]]:
    """Each photo with what the names of its results begin with, which no other photo has."""
    from explain.data.files import distinct, slug

    return zip(photos, distinct(slug(photo.stem) for photo in photos), strict=True)


def read_photo(source: PhotoSource, answer: Output) -> Image.Image:
    """Read a photo; where it comes from stays with it. What libraries print about it shortens to a note."""
    from explain.data.images import hushed, load_image

    with hushed() as said:
        photo = load_image(_piped() if source.path is None else source.path)
    troubles = [line for line in said if line and "Warning" not in line]
    if troubles:
        answer.note(f"{source.name}: may be damaged, its decoder says: {troubles[0]}")
    photo.filename = "" if source.path is None else str(source.path)  # type: ignore[attr-defined]  # as Pillow has it
    return photo


def _piped() -> bytes:
    """Return what standard input gives.

    Raises:
        ImageError: there cannot be a photo.
    """
    from explain.data.images import MAX_BYTES

    if sys.stdin is None or sys.stdin.isatty():
        raise ImageError("image - must come through a pipe, but standard input is a terminal or closed; name a file")
    try:
        content = sys.stdin.buffer.read(MAX_BYTES)
    except OSError as error:
        raise ImageError(f"image - cannot be read: {error.strerror}; name a file") from None
    if len(content) == MAX_BYTES:
        raise ImageError(f"image - gives {MAX_BYTES} bytes or more; save it to a file first")
    return content


def load_explainer(options: argparse.Namespace, answer: Output) -> Explainer:
    """Load the model.

    Raises:
        UsageError: it, its weights or its labels cannot be used.
        ExplainError: code of the user's own raised something.
    """
    from explain.explanation.explainer import Explainer

    names = ("weights", "activation", "size", "crop", "mean", "std", "interpolation", "device")
    labels = None if options.labels is None else _read_labels(options.labels)
    with notes(answer), blaming(options.model):
        try:
            settings = {name: getattr(options, name) for name in names}
            return Explainer(options.model, categories=labels, **settings)
        except ModelError as error:  # there is no such model, or not with these options
            raise UsageError(str(error)) from error


@contextmanager
def blaming(model: str | None) -> Iterator[None]:
    """Say in one line what a factory or module of the user's own raises; it may be anything."""
    try:
        yield
    except (ExplainError, MemoryError):
        raise
    except Exception as error:
        raise ExplainError(f"{'the default model' if model is None else f'model {model!r}'} {raised(error)}") from error


def _read_labels(path: str) -> list[str]:
    try:
        labels = [line.strip() for line in Path(path).read_text("utf-8-sig").rstrip().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"labels {path!r} cannot be read: {reason}; give a text file with a label a line") from None
    if "" in labels:
        line = labels.index("") + 1
        raise UsageError(f"labels {path!r} must have a label on every line, but line {line} is empty; fill it")
    return labels
