"""Photos and models by the names that were typed; the same work for each of several photos."""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

import explain
from explain._utils.errors import ExplainError, FolderError, ImageError, OutputError, raised
from explain._utils.progress import duration
from explain.cli.arguments import ablation
from explain.cli.commands import UsageError, as_usage
from explain.cli.output import DONE, FAILED, USAGE, Output, ProgressBar, notes
from explain.data.files import distinct, slug
from explain.data.images import EXTENSIONS, MAX_BYTES, hushed, load_image, photos_in

STDIN = "-"


@dataclass(frozen=True)
class PhotoSource:
    """Where a photo comes from: a file, or standard input, which has no path."""

    path: Path | None

    def __str__(self) -> str:
        return str(self.path or STDIN)

    @property
    def name(self) -> str:
        """How messages call it."""
        return str(self.path or "standard input")

    @property
    def stem(self) -> str:
        """What the names of its results begin with."""
        return "stdin" if self.path is None else self.path.stem


def source_of(name: str) -> PhotoSource:
    """Return what a name stands for."""
    return PhotoSource(None if name == STDIN else Path(name))


Photos = tuple[list[PhotoSource], list[ExplainError]]
"""Where photos come from, and what is wrong with the other names."""


def find_photos(given: Sequence[str], *, recursive: bool = False, apart_from: str = "") -> Photos:
    """Return the photos that names of files and folders stand for, and an error for each name that is of no use.

    Of a folder, hidden files are left out; with ``recursive``, its folders are looked into too, but for hidden ones and
    the folder ``apart_from``, where results are written.
    """
    found: list[PhotoSource] = []
    missing: list[str] = []
    for name in given:
        if not name:  # as a path, it would be the folder we are in
            missing.append("image must be a file or folder, got an empty name; check the command")
        elif re.match(r"\w+://", name):
            missing.append(f"image {name!r} must be a file, got an address; download it first")
        elif name == STDIN or not os.path.isdir(name):  # unlike Path.is_dir, this accepts any name
            found.append(source_of(name))
        else:
            folder, apart = Path(name), os.path.realpath(apart_from) if apart_from else ""
            inside = list(photos_in(name, recursive=recursive, apart_from=apart))
            found += [PhotoSource(folder / each) for each, problem in inside if problem is None]
            missing += [f"folder {str(folder / each)!r} {problem}" for each, problem in inside if problem is not None]
            if not inside:
                deeper = not recursive and any(each.is_dir() and each.name[0] != "." for each in folder.iterdir())
                remedy = "; --recursive looks into its folders" if deeper else ""
                missing.append(f"folder {name!r} holds no images ({', '.join(sorted(EXTENSIONS))}){remedy}")
    return list(dict.fromkeys(found)), list(map(ImageError, missing))


def photos_of(options: argparse.Namespace) -> Photos:
    """Return the photos that the options of a command name, and what is wrong with some of the names.

    Raises:
        UsageError: ``--recursive`` has no folder to look into.
    """
    if options.recursive and not any(map(os.path.isdir, options.images)):
        raise UsageError("--recursive would have no effect without a folder; name one, or leave it out")
    return find_photos(options.images, recursive=options.recursive, apart_from=getattr(options, "output", ""))


def read_photo(source: PhotoSource, answer: Output) -> Image.Image:
    """Read a photo; where it comes from stays with it. What libraries print about it shortens to a note."""
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
    if sys.stdin is None or sys.stdin.isatty():
        raise ImageError("image - must come through a pipe, but standard input is a terminal or closed; name a file")
    try:
        content = sys.stdin.buffer.read(MAX_BYTES)
    except OSError as error:
        raise ImageError(f"image - cannot be read: {error.strerror}; name a file") from None
    if len(content) == MAX_BYTES:
        raise ImageError(f"image - gives {MAX_BYTES} bytes or more; save it to a file first")
    return content


SETTINGS = ("weights", "activation", "size", "crop", "channels", "mean", "std", "interpolation", "device")
"""The arguments of an `Explainer` that are options under the same names, besides its model and its labels."""


def load_explainer(options: argparse.Namespace, answer: Output) -> explain.Explainer:
    """Load the model.

    Raises:
        UsageError: it, its weights or its labels cannot be used.
        ExplainError: code of the user's own raised something.
    """
    labels = None if options.labels is None else _read_labels(options.labels)
    settings = {name: getattr(options, name) for name in SETTINGS}
    settings["interventions"] = [ablation(text) for text in getattr(options, "ablate", None) or ()]
    with notes(answer), blaming(options.model), as_usage(explain.ModelError):
        return explain.Explainer(options.model, categories=labels, **settings)


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


ASKED = (explain.LabelsError, explain.LayerError, explain.MethodError, explain.TargetError)
"""Errors about what was asked for, rather than about a photo."""


@dataclass(frozen=True)
class PhotoResult:
    """What came of a photo: its part of the document, and lines. ``files`` were written; or all were there before.

    Where there are several photos, ``summary`` is said instead of the lines.
    """

    found: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    skipped: bool = False
    summary: str = ""


Work = Callable[[PhotoSource, str, ProgressBar], PhotoResult]
"""Of a photo and of what the names of its results begin with; runs are told to the bar."""


@dataclass
class _Run:
    """What has become of several photos."""

    answer: Output
    total: int
    failed: int
    files: int = 0
    done: int = 0
    skipped: int = 0
    held: tuple[PhotoSource, ExplainError] | None = None  # the first failure, as long as it may be that of all photos
    refused: bool = False  # whether what was asked for cannot be done, whatever the photo

    @property
    def left(self) -> int:
        return self.total - self.done - self.skipped - self.failed

    def succeed(self, source: PhotoSource, result: PhotoResult) -> None:
        self.tell_held()
        self.done += not result.skipped
        self.skipped += result.skipped
        self.files += len(result.files)
        self.answer.add(result.found)
        short = self.total > 1 and result.summary and not self.answer.verbose
        self.answer.say(*([f"{source.name}: {result.summary}"] if short else [source.name, *result.lines]))

    def fail(self, source: PhotoSource, error: ExplainError) -> bool:
        """Say why a photo failed; return whether all others would fail too."""
        self.failed += 1
        rest = f", {self.left} more not looked at" if self.left else ""
        if not isinstance(error, (ImageError, OutputError)):
            if self.held is None and not self.done and not self.skipped:
                self.held = source, error
                return False
            if self.held is not None and str(self.held[1]) == str(error):
                self.answer.complain(f"{error} (this holds for every photo: none is done{rest})")
                self.held, self.refused = None, isinstance(error, ASKED)
                return True
        self.tell_held()
        stops = isinstance(error, FolderError)
        self.answer.complain(_named(source, error) + (f"; stopped{rest}" if stops and rest else ""))
        return stops

    def tell_held(self, last: bool = False) -> None:
        """Say what was wrong with the first photo; with the only one, what was asked for is not its fault."""
        if self.held is not None:
            self.refused = last and isinstance(self.held[1], ASKED)
            self.answer.complain(str(self.held[1]) if self.refused else _named(*self.held))
            self.held = None


def for_all(found: Photos, work: Work, answer: Output, verb: str, folder: str = "") -> int:
    """Do the work on each photo and say what came of it, and at the end how it went with all of them.

    What fails for one photo is told, and the others still get done. Where no file can be written, or the first two
    photos fail in the same way on account of the model, the layer or the target, the rest is left. What was asked for
    and cannot be done with this model is a matter of usage, and not of the photo. ``verb`` says in the last line what
    has been done.
    """
    photos, missing = found
    for problem in missing:
        answer.complain(str(problem))
    run, bar = _Run(answer, len(photos) + len(missing), len(missing)), ProgressBar(len(photos))
    begun, bar.hidden = time.monotonic(), answer.quiet
    try:
        for source, stem in zip(photos, distinct(slug(photo.stem) for photo in photos), strict=True):
            bar.begin(source.name)
            try:
                with notes(answer, source.name), closing(bar):
                    result = work(source, stem, bar)
            except (ExplainError, MemoryError) as error:
                told = "memory must hold the photo and what is drawn on it, but it ran out; resize the photo"
                if run.fail(source, ImageError(told) if isinstance(error, MemoryError) else error):
                    break
            else:
                run.succeed(source, result)
    finally:
        run.tell_held(last=True)
        if run.total > 1:
            counts = {"failed": run.failed, "skipped": run.skipped, "not looked at": run.left}
            parts = [f"{count} {what}" for what, count in counts.items() if count]
            told = f" ({', '.join(parts)})" if parts else ""
            wrote = f"; {run.files} files written to {folder}" if folder and run.files else ""
            seconds = duration(time.monotonic() - begun)
            answer.say(f"{verb} {run.done} of {run.total} photos in {seconds}{told}{wrote}")
    return USAGE if run.refused else FAILED if answer.errors else DONE


def _named(source: PhotoSource, error: ExplainError) -> str:
    """An error with the photo that it is about, where it does not say so itself."""
    return str(error) if repr(str(source)) in str(error) else f"{source.name}: {error}"
