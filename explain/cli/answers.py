"""`explain PHOTO --ask TEXT`: what an image-text model answers about each photo, and what each word
of it rests on."""

import json
import math
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from explain._utils.errors import ExplainError, ImageError, ModelError, printable
from explain._utils.progress import duration
from explain.cli.commands import UsageError, as_usage, is_typed, refuse_without_effect
from explain.cli.output import Output, ProgressBar, notes
from explain.cli.several import (
    STDIN,
    PhotoResult,
    Sheet,
    blaming,
    find_photos,
    for_all,
    read_photo,
    skipped,
)

if TYPE_CHECKING:
    from explain.answers import Answered, AnswerExplainer
    from explain.report.pages import Section

SHARED = {"model", "device", "ask", "answer", "words", "method", "batch_size", "output"}
HEEDED = {
    *SHARED,
    *("images", "recursive", "slices", "baseline", "force", "skip_existing", "html", "style"),
}
"""The options of `explain PHOTO` that go with --ask."""
HEEDED_BY_RUNS = {*SHARED, "source", "workers", "table", "pictures", "force", "style"}
"""Those of `explain run`."""


def explain_answers(context: click.Context, options: SimpleNamespace) -> int:
    """Explain the answer about each photo, and return the exit code."""
    answer: Output = context.obj
    methods = word_methods(context, options, HEEDED)
    if len(methods) > 1:
        raise UsageError(f"--method {methods[1]} is one too many with --ask; name one")
    # --force asks for the opposite, and the page of all photos would lack those that are skipped
    for name in ("force", "html"):
        if options.skip_existing and is_typed(context, name):
            raise UsageError(f"--{name} and --skip-existing cannot both be given; leave one out")
    photos = find_photos(
        options.images,
        recursive=options.recursive,
        apart_from=options.output,
        slices=options.slices,
    )
    # with an ending it would be a picture, which only `explain PHOTO` without --ask writes
    if Path(options.output).suffix or not options.output:
        raise UsageError(f"--output must be a folder with --ask, got {options.output!r}; name one")
    sheet = Sheet(options, answer)
    paths, _ = photos
    work = AnswerWork(
        options,
        answer,
        asker=asker_of(options, answer),
        method=methods[0] if methods else None,
        paths=paths,
        sheet=sheet,
    )
    code = for_all(photos, work, answer, "explained", options.output)
    return sheet.write(_sheet_of) or code  # the first that is not 0, `DONE`


def _sheet_of(entries: "Sequence[Section]") -> str:
    """The page of several answers."""
    from explain.report.pages import document

    return document(f"{len(entries)} answers", "", entries)


def word_methods(
    context: click.Context, options: SimpleNamespace, heeded: Collection[str]
) -> list[str]:
    """The methods that are named; what is typed is checked before a model is loaded, which is
    slow. Options that are not ``heeded`` are refused."""
    from explain.answers.maps import STYLES
    from explain.baselines.replacements import get_baseline
    from explain.methods.base import get_method
    from explain.render.styles import get_style

    for name in context.params:
        refuse_without_effect(context, name, " with --ask", unless=name in heeded)
    names = _model_names(options)
    if len(names) != 1:
        raise UsageError(
            "--ask needs one image-text model, as --model llava-hf/llava-1.5-7b-hf or its folder, "
            f"got {', '.join(names) or 'none'}"
        )
    with as_usage(ExplainError):  # which the following raise for names that they do not know
        get_baseline(_baseline_name(options))
        if options.style:
            get_style(options.style)
        methods = list(options.method)
        for method in methods:
            if method not in STYLES:  # those are of words alone, and no methods of a photo
                get_method(method)
    return methods


def _model_names(options: SimpleNamespace) -> list[str]:
    """What --model names: several texts where it can be repeated, as in `explain PHOTO`."""
    return [options.model] if isinstance(options.model, str) else list(options.model or ())


def _baseline_name(options: SimpleNamespace) -> str:
    """What --baseline names, which not every command with --ask has."""
    return getattr(options, "baseline", None) or "mean"


def asker_of(options: SimpleNamespace, answer: Output) -> "AnswerExplainer":
    """The explainer of the model that was named."""
    from explain.answers import AnswerExplainer
    from explain.models.classifier import on_device

    [name] = _model_names(options)
    baseline = _baseline_name(options)
    with notes(answer), blaming(name), as_usage(ModelError):
        asker = AnswerExplainer(name, baseline=baseline, batch_size=options.batch_size)
        if options.device:
            on_device(asker.model, options.device)
    return asker


@dataclass(eq=False)
class AnswerWork:
    """What `explain PHOTO --ask` does for each of the photos at ``paths``."""

    options: SimpleNamespace
    answer: Output
    asker: "AnswerExplainer"
    method: str | None
    paths: Sequence[str]
    sheet: Sheet

    def __call__(self, path: str, stem: str, bar: ProgressBar) -> PhotoResult:
        """Explain the answer about the photo at ``path``, save files that begin with ``stem``, and
        return what is printed."""
        from explain.data.files import slug

        options = self.options
        [model] = options.model
        photo = read_photo(path, self.answer, explainer=None)
        other = self._following_photo(path)
        stem = f"{stem}-{slug(Path(model).name)}"
        key = self._key(photo, other)
        stored = self._stored(path, stem, photo, key) if options.skip_existing else None
        if stored is not None:
            return stored
        is_first = self.paths.index(path) == 0
        progress = AnswerProgress(bar, self.answer, first=is_first, photos=len(self.paths))
        with blaming(model):
            answered = self.asker(
                photo,
                options.ask or None,  # captioners are not asked anything: --ask ''
                answer=options.answer,
                words=options.words,
                method=self.method,
                other=other,
                progress=progress,
            )
        answered = replace(answered, key=key)  # which `_stored` compares in the saved record
        self._enter(path, answered)
        files = answered.save(
            options.output,
            stem=stem,
            overwrite=options.force,
            style=options.style,
            html=options.html,
        )
        written = list(map(str, files))
        document = {"image": path, "files": written, "records": [answered.to_dict()]}
        lines = [*_lines(answered), *(f"  wrote {file}" for file in written)]
        return PhotoResult(document, lines, written, summary=printable(answered.answer))

    def _enter(self, path: str, answered: "Answered") -> None:
        """Put an answer on the page of all photos."""
        from explain.report.pages import Section

        if self.options.html:
            picture = answered.sheet(tile=180)
            section = Section(path, pictures=[(picture, answered.alternative)])
            self.sheet.add(section)

    def _key(self, photo: Any, other: Any) -> str:
        """A digest of all that is asked of a photo, to compare with records."""
        from explain.attribution.records import sha256_of, size_and_digest

        options = self.options
        pictures = [None if one is None else size_and_digest(one) for one in (photo, other)]
        words = (options.ask, options.answer, options.words, self.method, options.baseline)
        return sha256_of(json.dumps([pictures, words]).encode())

    def _stored(self, path: str, stem: str, photo: Any, key: str) -> PhotoResult | None:
        """What is printed for a photo whose results are all in the folder already; None if any are
        missing, are of another request, or of a model that says something else by now."""
        record_file = Path(self.options.output, f"{stem}-answer.json")
        try:
            record = json.loads(record_file.read_text("utf-8"))
            files = [*record["files"], record_file.name]
            if record["key"] != key or not all(
                record_file.with_name(name).is_file() for name in files
            ):
                return None
            with blaming(self.options.model[0]):
                of_tokens = self.asker.probabilities(photo, self.options.ask or None, record["ids"])
            stored_and_now = [
                (word["probability"], of_tokens[word["number"]]) for word in record["words"]
            ]
        # there is no record, or not one that `explain` wrote; or the model failed on its answer
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        # the same model and photo differ by rounding alone
        if not all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in stored_and_now):
            return None
        return skipped(path, [str(record_file.with_name(name)) for name in files], [record])

    def _following_photo(self, path: str) -> Any:
        """The photo after this one (the first after the last), in whose place words are tried too;
        None without one that can be read."""
        following = self.paths[(self.paths.index(path) + 1) % len(self.paths)]
        # standard input can be read only once
        if following == path or STDIN in (following, path):
            return None
        with suppress(ImageError):  # it is reported when its own turn comes
            return read_photo(following, self.answer, explainer=None)
        return None


class AnswerProgress:
    """The progress of one answer. That of the ``first`` photo says after its first passes how many
    there are, and how long they take."""

    def __init__(self, bar: ProgressBar, answer: Output, *, first: bool, photos: int) -> None:
        """Prepare it for one of several ``photos``."""
        self.bar = bar
        self.answer = answer
        self.is_told = not first
        self.photos = photos
        self.begun = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Take how many altered inputs are done, first 0."""
        if not done:  # the time until here went into the answer itself
            self.begun = time.monotonic()
        elif not self.is_told:
            seconds = (time.monotonic() - self.begun) / done * total
            scope = "" if self.photos == 1 else f" for each of {self.photos} photos"
            self.bar.wipe()
            self.answer.note(f"{total} altered inputs{scope}, about {duration(seconds)}")
            self.is_told = True
        self.bar.runs(done, total)


def _lines(answered: "Answered") -> list[str]:
    """The printed lines of an answer: the answer, and its words with what each rests on."""
    from explain.targets.outputs import percent

    width = max(len(printable(word.text)) for word in answered.words)
    lines = [f"  {printable(answered.answer)}"]
    for word in answered.words:
        greyed = f" ({word.greyed})" if word.greyed else ""
        line = f"  {printable(word.text):<{width}}  {percent(word.probability):>7}  "
        lines.append(f"{line}{word.grounding.mark:<8}  {word.summary}{greyed}".rstrip())
    return lines
