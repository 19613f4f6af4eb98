"""Photos and models by the names that were typed, and the same work for each of several photos."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from explain._utils.errors import (
    ExplainError,
    FolderError,
    ImageError,
    LabelsError,
    LayerError,
    MethodError,
    ModelError,
    OutputError,
    TargetError,
    raised,
)
from explain._utils.progress import duration
from explain.cli.commands import UsageError, as_usage, without_effect
from explain.cli.output import DONE, FAILED, USAGE, Output, ProgressBar, in_brackets, notes

if TYPE_CHECKING:
    from PIL import Image

    from explain import Explainer
    from explain.data.files import Files
    from explain.hooks.interventions import Ablate

STDIN = "-"
ASKED = (LabelsError, LayerError, MethodError, TargetError)
"""Errors that may be due to the command line (a label, layer, method or target), and not to a
photo."""


Photos = tuple[list[str], list[str]]
"""The paths of photos ("-" for standard input), and a message for each name that stands for no
photo."""


def find_photos(
    names: Sequence[str],
    *,
    recursive: bool = False,
    apart_from: str = "",
    slices: str = "",
    in_volumes: bool = False,
) -> Photos:
    """The photos that typed ``names`` stand for ("-": standard input), each once, and what is wrong
    with others. ``slices`` ("10:20") are photos, unless ``in_volumes``; hidden files are left out.
    """
    from explain.data.scans import chosen_numbers, read_range, slice_names

    if recursive and not any(map(os.path.isdir, names)):
        raise UsageError(
            "--recursive would have no effect without a folder; name one, or leave it out"
        )
    chosen = read_range(slices or ":")  # all of them without --slices
    if chosen is None:
        raise UsageError(
            f"--slices must be a number from 1 or a range, as 12, 10:20 or ::5, got {slices!r}"
        )
    photos: list[str] = []
    problems: list[str] = []
    has_volume = False
    # where a command writes, there are pictures that are no photos
    apart = os.path.realpath(apart_from) if apart_from else ""
    for path, problem in chain.from_iterable(_files_of(name, recursive, apart) for name in names):
        if problem:
            problems.append(problem)
            continue
        # of a file with pages, such as an animation, only the first one unless --slices is typed
        photos_in_file = slice_names(path, pages=slices != "")
        count = len(photos_in_file)
        if count > 1:
            has_volume = True
            photos_in_file = [photos_in_file[number] for number in chosen_numbers(chosen, count)]
            if not photos_in_file:
                problems.append(
                    f"image {path!r} has slices 1 to {count}, and none of them is in {slices}"
                )
            elif in_volumes:  # together they are one photo
                photos_in_file = [f"{path} slices {slices}" if slices else path]
        photos += photos_in_file
    if slices and not has_volume:
        raise without_effect("--slices", " without a file of several slices or pages")
    return list(dict.fromkeys(photos)), problems


def _files_of(name: str, recursive: bool, apart_from: str) -> Iterator[tuple[str, str]]:
    """Yield the paths that a typed name stands for, each with what is wrong with it, or "". A
    folder gives its photos, or itself as a problem if it has none; ``apart_from`` is left out.
    """
    from explain.data.opening import EXTENSIONS, SCANS, photos_in

    if not name:  # as a path, it would be the current folder
        yield name, "image must be a file or folder, got an empty name; check the command"
        return
    if re.match(r"\w+://", name):
        yield name, f"image {name!r} must be a file, got an address; download it first"
        return
    if name == STDIN or not os.path.isdir(name):  # unlike Path.is_dir, this accepts any name
        yield str(Path(name)), ""
        return
    files = list(photos_in(name, recursive=recursive, apart_from=apart_from))
    for path, problem in files:
        whole = str(Path(name, path))
        yield whole, "" if problem is None else f"folder {whole!r} {problem}"
    if files:
        return
    is_deeper = any(path.is_dir() and path.name[0] != "." for path in Path(name).iterdir())
    remedy = "name another"
    if is_deeper and not recursive:
        remedy = "--recursive looks into its folders"
    endings = ", ".join(sorted(EXTENSIONS | SCANS))
    yield name, f"folder {name!r} holds no images ({endings}); {remedy}"


def photo_label(path: str) -> str:
    """Return the name of a photo in messages: its path, or "standard input"."""
    return "standard input" if path == STDIN else path


def read_photo(path: str, answer: Output, explainer: "Explainer | None") -> "Image.Image":
    """Return the photo at a path ("-": standard input), with ``filename``, as the ``explainer``'s
    model takes it (None: in colours). Lack of contrast and libraries' messages give notes."""
    from explain.data.greys import NO_CONTRAST, has_contrast
    from explain.data.images import load_image
    from explain.data.opening import hushed, troubles

    read = load_image if explainer is None else explainer.read
    with hushed() as printed:  # by decoders in C, which do not raise for all that is damaged
        photo = read(_piped() if path == STDIN else path)
    if not has_contrast(photo):
        answer.note(f"{photo_label(path)}: {NO_CONTRAST}", once=True)
    for trouble in troubles(printed):
        answer.note(f"{photo_label(path)}: {trouble}")
    photo.filename = "" if path == STDIN else path  # type: ignore[attr-defined]  # as Pillow has it
    return photo


def _piped() -> bytes:
    """Return the bytes of a photo that is piped into standard input."""
    if sys.stdin is None or sys.stdin.isatty():
        raise ImageError(
            "image - must come through a pipe, but standard input is a terminal or closed; name a "
            "file"
        )
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise ImageError(f"image - cannot be read: {error.strerror}; name a file") from None


def load_explainer(
    answer: Output,
    *,
    model: str | None,
    labels: str | None = None,
    ablate: Sequence[str] = (),
    **settings: Any,
) -> "Explainer":
    """The model (None: the default one) that options name, as an `Explainer` that takes
    ``settings``; its warnings become notes.
    """
    import explain

    interventions = [ablation(text) for text in ablate]
    with notes(answer), blaming(model), as_usage((ImageError, ModelError)):
        return explain.Explainer(model, categories=labels, interventions=interventions, **settings)


def takes_whole_files(explainer: "Explainer") -> bool:
    """Whether all slices or bands of a file are one photo for the model."""
    return explainer.sees_volumes or explainer.sees_bands


def ablation(text: str) -> "Ablate":
    """Read --ablate as a layer or its units: ``layer3``, ``layer3[12,40]`` (channels), ``attn[heads
    1]``, ``layer2[region 40,30,90,80]`` (left, top, right, bottom)."""
    from explain.hooks.interventions import Ablate

    match = re.fullmatch(
        r"([^\[\]]+)(?:\[(?:(heads|tokens|channels|region) )?([\d.,\s-]+)\])?", text.strip()
    )
    requirement = (
        "a layer, also with units as in 'layer3[12,40]', 'attn[heads 1]' or 'layer3[region "
        "40,30,90,80]'"
    )
    if match is None:
        raise UsageError(f"--ablate must be {requirement}, got {text!r}")
    layer, units, numbers = match.groups()
    if numbers is None:
        return Ablate(layer)
    as_number: Any = float if units == "region" else int
    try:
        chosen_units: Any = {units or "channels": list(map(as_number, numbers.split(",")))}
        return Ablate(layer, **chosen_units)
    except ValueError as error:
        # what Python says of a text that is no number would not help
        reason = f" ({error})" if isinstance(error, ExplainError) else ""
        raise UsageError(f"--ablate must be {requirement}, got {text!r}{reason}") from None


@contextmanager
def blaming(model: str | None) -> Iterator[None]:
    """Turn any error of a model's own code in the block into an `ExplainError` of one line that
    names the model (None: the default one): tracebacks are for this package's faults.
    """
    try:
        yield
    except (ExplainError, MemoryError):
        raise
    except Exception as error:
        raise ExplainError(
            f"{'the default model' if model is None else f'model {model!r}'} {raised(error)}"
        ) from error


@dataclass(frozen=True)
class PhotoResult:
    """The result of a command for one photo: its part of the JSON document, and the printed lines,
    which ``summary`` replaces where there are several photos, unless --verbose is given."""

    document: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    # nothing was written, since all results were there before
    skipped: bool = False
    summary: str = ""


def skipped(path: str, files: list[str], records: list[dict[str, Any]]) -> PhotoResult:
    """The result for a photo that --skip-existing skips."""
    document = {"image": path, "files": files, "records": records, "skipped": True}
    message = "skipped: its results are there"
    return PhotoResult(document, [f"  {message}"], skipped=True, summary=message)


Work = Callable[[str, str, ProgressBar], PhotoResult]
"""The work of a command on one photo: of its path, of the beginning of its files' names, and of the
bar that shows its passes."""


def for_all(photos: Photos, work: Work, answer: Output, verb: str, folder: str = "") -> int:
    """Do ``work`` on each photo, print results, errors and a last line ("explained 3 of 4 photos"),
    and return the exit code. Stops if no file can be written, or the first two photos fail alike.
    """
    paths, problems = photos
    for problem in problems:
        answer.complain(problem)
    tally = _Tally(answer, total=len(paths) + len(problems), failed=len(problems))
    begun = time.monotonic()
    try:
        _work_on(paths, work, tally)
    finally:  # also of an interrupted command
        if tally.total > 1:
            seconds = duration(time.monotonic() - begun)
            answer.say(
                f"{verb} {tally.done} of {tally.total} photos in {seconds}{tally.rest(folder)}"
            )
    if tally.is_refused:
        return USAGE
    return FAILED if answer.errors else DONE


def _work_on(paths: Sequence[str], work: Work, tally: "_Tally") -> None:
    """Do the work on one photo after the other until the tally says that the rest would fail too.
    Names of files begin with the photo's, numbered where two share it.
    """
    from explain.data.files import distinct, slug
    from explain.data.scans import stem_of

    answer = tally.answer
    bar = ProgressBar(len(paths))
    bar.hidden = answer.quiet
    stems = distinct(slug("stdin" if path == STDIN else stem_of(path)) for path in paths)
    for path, stem in zip(paths, stems, strict=True):
        bar.begin(photo_label(path))
        try:
            with notes(answer, photo_label(path)), closing(bar):
                result = work(path, stem, bar)
        except ExplainError as error:
            goes_on = tally.fail(path, error)
        except MemoryError:
            message = (
                "memory must hold the photo and what is drawn on it, but it ran out; resize "
                "the photo"
            )
            goes_on = tally.fail(path, ImageError(message))
        else:
            goes_on = tally.succeed(path, result)
        if not goes_on:
            return


MOST = 500  # photos on one contact sheet: a browser is slow with more
SHEET = "contact-sheet.html"


@dataclass(eq=False)
class Sheet:
    """Collects what the page of several photos shows of each: the first `MOST` of ``count``."""

    options: SimpleNamespace
    answer: Output
    entries: list[Any] = field(default_factory=list)
    count: int = 0

    def add(self, entry: Any) -> None:
        """Take one more photo."""
        self.count += 1
        if len(self.entries) < MOST:
            self.entries.append(entry)

    def write(self, page_of: Callable[[list[Any]], str]) -> int:
        """Write the HTML page with all photos, if there are at least two; return the exit code."""
        if len(self.entries) < 2:
            return DONE
        from explain.data.files import Files

        if self.count > MOST:
            self.answer.note(f"{SHEET} has the first {MOST} of {self.count} photos")
        files = Files(self.options.output, overwrite=self.options.force)
        files.add_text(SHEET, page_of(self.entries))
        return write_of_all(files, self.answer)


def write_of_all(files: "Files", answer: Output) -> int:
    """Write a file of all photos together, and return the exit code. A file that cannot be written
    is reported, not raised."""
    try:
        [path] = files.write()
    except ExplainError as error:
        return answer.complain(str(error))
    answer.add({"image": None, "files": [str(path)], "records": []}, [f"wrote {path}"])
    return DONE


@dataclass
class _Tally:
    """How many photos of a command are done, skipped and failed so far; prints the result of
    each."""

    answer: Output
    total: int
    failed: int
    files: int = 0  # that were written
    done: int = 0
    skipped: int = 0
    common_error: str = ""  # the error of the first photo, which all others may have too
    is_refused: bool = False  # what was asked for cannot be done, whatever the photo

    @property
    def left(self) -> int:
        """How many photos have not been tried."""
        return self.total - self.done - self.skipped - self.failed

    def rest(self, folder: str) -> str:
        """Return the end of a command's last line: how many photos failed, were skipped or not
        tried, and how many files were written to ``folder``."""
        counts = {"failed": self.failed, "skipped": self.skipped, "not looked at": self.left}
        written = f"; {self.files} files written to {folder}" if folder and self.files else ""
        return in_brackets(counts) + written

    def succeed(self, path: str, result: PhotoResult) -> bool:
        """Count a photo as done or skipped, and print its result: the lines for a single photo or
        with --verbose, else the summary. Returns True: the command goes on, as `fail` may not."""
        self.skipped += result.skipped
        self.done += not result.skipped
        self.files += len(result.files)
        self.answer.add(result.document)
        if self.total > 1 and result.summary and not self.answer.verbose:
            self.answer.say(f"{photo_label(path)}: {result.summary}")
        else:
            self.answer.say_all([photo_label(path), *result.lines])
        return True

    def fail(self, path: str, error: ExplainError) -> bool:
        """Count a failed photo, print why, and return whether to go on: not if the folder cannot be
        written, nor if the first two have the same error. `ASKED` sets ``is_refused``.
        """
        self.failed += 1
        message = str(error) if repr(path) in str(error) else f"{photo_label(path)}: {error}"
        stops = isinstance(error, FolderError)  # no other photo could be written either
        # it is of neither a photo nor a file, and no photo has worked yet
        may_hold_for_all = not (
            isinstance(error, (ImageError, OutputError)) or self.done or self.skipped
        )
        if may_hold_for_all:
            stops = self.common_error == str(error)  # the second photo with it
            self.common_error = str(error)
            self.is_refused = isinstance(error, ASKED) and (stops or self.total == 1)
            if stops:
                message = f"{photo_label(path)} fails in the same way, as every photo would"
            elif self.is_refused:  # of what was typed, not of the single photo
                message = str(error)
        rest = f"; stopped, {self.left} more not looked at" if stops and self.left else ""
        self.answer.complain(f"{message}{rest}")
        return not stops
