"""The same work for each of several photos: failures are told one by one, finished photos are skipped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explain._utils.errors import (
    ExplainError,
    FolderError,
    ImageError,
    LabelsError,
    LayerError,
    MethodError,
    OutputError,
    TargetError,
)
from explain.cli.inputs import PhotoSource, stems
from explain.cli.output import DONE, FAILED, USAGE, Output, notes
from explain.cli.progress import ProgressBar, duration

if TYPE_CHECKING:
    from PIL import Image

    from explain.explanation.explainer import Explainer
    from explain.methods import Method


ASKED = (LabelsError, LayerError, MethodError, TargetError)
"""Errors about what was asked for, rather than about a photo."""


@dataclass(frozen=True)
class PhotoResult:
    """What came of a photo: its part of the document, and lines. ``files`` were written; or all were there before."""

    found: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    skipped: bool = False


Work = Callable[[PhotoSource, str, ProgressBar], PhotoResult]
"""Of a photo and of what the names of its results begin with; runs are told to the bar."""


@dataclass
class _Run:
    """The state of the work on several photos; ``verb`` says in the last line what has been done."""

    work: Work
    answer: Output
    bar: ProgressBar
    verb: str
    total: int
    begun: float = field(default_factory=time.monotonic)
    files: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    held: tuple[PhotoSource, ExplainError] | None = None  # the first failure, as long as it may be that of all photos
    refused: bool = False  # whether what was asked for cannot be done, whatever the photo

    def take(self, source: PhotoSource, stem: str) -> bool:
        """Do the work on a photo; return whether any other photo can be worked on."""
        self.bar.begin(source.name)
        try:
            with notes(self.answer, source.name):
                result = self.work(source, stem, self.bar)
        except (ExplainError, MemoryError) as error:
            self.bar.end()
            self.failed += 1
            return self._goes_on(source, error)
        except BaseException:  # an interrupt too must not find half a bar on the line; it goes on
            self.bar.wipe()
            raise
        self.bar.end()
        self._enter(source, result)
        return True

    def _enter(self, source: PhotoSource, result: PhotoResult) -> None:
        self.tell_held()
        self.done += not result.skipped
        self.skipped += result.skipped
        self.files += len(result.files)
        self.answer.add(result.found)
        self.answer.say(source.name, *result.lines)

    def _goes_on(self, source: PhotoSource, error: ExplainError | MemoryError) -> bool:
        left = self.total - self.done - self.skipped - self.failed
        if isinstance(error, FolderError):
            self.tell_held()
            self.answer.complain(_blamed(source, error) + (f"; stopped, {left} more not looked at" if left else ""))
            return False
        if isinstance(error, ExplainError) and not isinstance(error, (ImageError, OutputError)):
            if self.held is None and not self.done and not self.skipped:
                self.held = source, error
                return True
            if self.held is not None and str(self.held[1]) == str(error):
                rest = f", {left} more not looked at" if left else ""
                self.answer.complain(f"{error} (this holds for every photo: none is done{rest})")
                self.held, self.refused = None, isinstance(error, ASKED)
                return False
        self.tell_held()
        self.answer.complain(_blamed(source, error))
        return True

    def tell_held(self) -> None:
        """Tell what was wrong with the first photo, since it is not so with all of them."""
        if self.held is not None:
            source, error = self.held
            self.held = None
            self.answer.complain(_named(source, str(error)))

    def end(self) -> None:
        """Tell what was wrong with the only photo that could be read; what was asked for is not its fault."""
        if self.held is not None and isinstance(self.held[1], ASKED):
            self.answer.complain(str(self.held[1]))
            self.held, self.refused = None, True
        self.tell_held()

    def sum_up(self, folder: str | None) -> None:
        """Say in one line what has been done."""
        parts = [f"{self.failed} failed"] if self.failed else []
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        left = self.total - self.done - self.skipped - self.failed
        if left:
            parts.append(f"{left} not looked at")
        told = f" ({', '.join(parts)})" if parts else ""
        wrote = f"; {self.files} files written to {folder}" if folder is not None and self.files else ""
        seconds = duration(time.monotonic() - self.begun)
        self.answer.say(f"{self.verb} {self.done} of {self.total} photos in {seconds}{told}{wrote}")


def for_all(
    photos: list[PhotoSource],
    missing: list[ExplainError],
    work: Work,
    answer: Output,
    *,
    verb: str,
    folder: str | None = None,
) -> int:
    """Do the work on each photo and say what came of it, and at the end how it went with all of them.

    What fails for one photo is told, and the others still get done. Where no file can be written, or the first two
    photos fail in the same way on account of the model, the layer or the target, the rest is left. What was asked for
    and cannot be done with this model is a matter of usage, and not of the photo.
    """
    for error in missing:
        answer.complain(str(error))
    total = len(photos) + len(missing)
    run = _Run(work, answer, ProgressBar(len(photos)), verb, total, failed=len(missing))
    try:
        for source, stem in stems(photos):
            if not run.take(source, stem):
                break
    finally:
        run.end()
        if total > 1:
            run.sum_up(folder)
    return USAGE if run.refused else FAILED if answer.errors else DONE


def _blamed(source: PhotoSource, error: ExplainError | MemoryError) -> str:
    """Say which photo an error is about, where it does not say so itself."""
    if isinstance(error, MemoryError):
        return f"{source.name}: memory must hold the photo and what is drawn on it, but it ran out; resize the photo"
    return _named(source, str(error))


def _named(source: PhotoSource, message: str) -> str:
    return message if repr(str(source)) in message else f"{source.name}: {message}"


def request_of(
    explainer: Explainer,
    methods: Sequence[Method],
    group: str | None,
    targets: Sequence[int | str] | int | None,
    **options: Any,
) -> dict[str, Any]:
    """Return all that is asked, and of which model, in values that JSON can hold.

    Args:
        explainer: the model with its preprocessing.
        methods: those that are named; ``group`` is what the model chooses more by.
        targets: classes, how many of the best, or None for the best.
        options: others that change the values.
    """
    from explain.attribution.records import digest
    from explain.runs.manifest import described_method, identity

    found = {
        **identity(explainer), "group": group, "methods": {each.name: described_method(each) for each in methods},
        "targets": targets, **options,
    }  # fmt: skip
    found["categories"] = digest(json.dumps(found["categories"]).encode())
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def finished(
    folder: str, source: PhotoSource, stem: str, request: dict[str, Any], targets: int, photo: Image.Image
) -> PhotoResult | None:
    """Return what to say of a photo whose results are all in a folder, or None where some are missing.

    There must be a record of these very pixels and of this request, with its values and picture, for each method and as
    many targets; where a group chooses methods, at least one. Several have a sheet, which is written last.
    """
    from explain.attribution.records import digest

    methods = list(request["methods"]) if request["group"] is None else None
    pixels = digest(photo.tobytes()), list(photo.size)
    found = [
        record
        for record in _records(Path(folder), stem)
        if _is_of(record, source, pixels) and _answers(record, request)
    ]
    files = [str(record.path.with_suffix(suffix)) for record in found for suffix in (".png", ".npy", ".json")]
    sheet = Path(folder) / f"{stem}-sheet.png"
    several = methods is None or len(methods) * targets > 1
    if methods is None:
        complete = bool(found)
    else:
        complete = all(sum(record.method == name for record in found) >= targets for name in methods)
    if not complete or (several and not sheet.is_file()) or not all(map(os.path.isfile, files)):
        return None
    files += [str(sheet)] * several
    about = {"image": str(source), "files": files, "records": [record.content for record in found], "skipped": True}
    return PhotoResult(about, ["  skipped: its results are there"], skipped=True)


class _Record:
    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path, self.content, self.method = path, content, content.get("method")


def _records(folder: Path, stem: str) -> Iterator[_Record]:
    """The records whose names begin with a stem; those of photos with longer names are among them."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if name.startswith(f"{stem}-") and name.endswith(".json"):
            try:
                content = json.loads((folder / name).read_bytes())
            except (OSError, ValueError, RecursionError):
                continue  # damaged: not finished
            if isinstance(content, dict):
                yield _Record(folder / name, content)


def _answers(record: _Record, request: dict[str, Any]) -> bool:
    """Whether a record is of the same question to the same model; other methods may have been asked for beside it."""
    from explain.runs.manifest import alike

    before = record.content.get("request")
    if not isinstance(before, dict) or before.keys() != request.keys():
        return False
    before = {**before, "methods": _only(before, record.method)}
    wanted = {**request, "methods": _only(request, record.method)}
    return all(alike(key, before[key], value) for key, value in wanted.items())


def _only(request: dict[str, Any], method: str | None) -> Any:
    methods = request["methods"]
    return methods.get(method) if request["group"] is None and isinstance(methods, dict) else methods


def _is_of(record: _Record, source: PhotoSource, pixels: tuple[str, list[int]]) -> bool:
    """Whether a record is of this photo."""
    image = record.content.get("image")
    if not isinstance(image, dict) or (image.get("sha256"), image.get("size")) != pixels:
        return False
    path = image.get("path")
    if source.path is None or not isinstance(path, str):
        return source.path is None and path is None
    return os.path.realpath(path) == os.path.realpath(source.path)
