"""`explain PHOTO --ask TEXT`: what an image-text model answers about each photo, and what each word
of it rests on."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from explain._utils.errors import ExplainError, ImageError, ModelError, printable
from explain._utils.progress import duration
from explain.cli.commands import UsageError, as_usage, refuse_without_effect
from explain.cli.output import Output, ProgressBar, notes
from explain.cli.several import PhotoResult, blaming, find_photos, for_all, read_photo

if TYPE_CHECKING:
    from explain.answers import Answered, AnswerExplainer

HEEDED = {
    *("images", "recursive", "slices", "model", "device", "ask", "answer", "words", "method"),
    *("baseline", "batch_size", "output", "force", "html", "style"),
}
"""The options of `explain PHOTO` that go with --ask."""


def explain_answers(context: click.Context, options: SimpleNamespace) -> int:
    """Explain the answer about each photo, and return the exit code."""
    answer: Output = context.obj
    for name in context.params:
        refuse_without_effect(context, name, " with --ask", unless=name in HEEDED)
    if len(options.model) != 1:
        raise UsageError(
            "--ask needs one image-text model, as --model llava-hf/llava-1.5-7b-hf or its folder, "
            f"got {', '.join(options.model) or 'none'}"
        )
    if len(options.method) > 1:
        raise UsageError(f"--method {options.method[1]} is one too many with --ask; name one")
    with as_usage(ExplainError):
        method = _checked(options)
    photos = find_photos(
        options.images,
        recursive=options.recursive,
        apart_from=options.output,
        slices=options.slices,
    )
    if Path(options.output).suffix or not options.output:
        raise UsageError(f"--output must be a folder with --ask, got {options.output!r}; name one")
    work = AnswerWork(options, answer, _asker(options, answer), method, photos[0])
    return for_all(photos, work, answer, "explained", options.output)


def _checked(options: SimpleNamespace) -> str | None:
    """The method of the words, None for the default; what is typed is checked before a model is
    loaded, which is slow."""
    from explain.answers.maps import AGREEMENT, OCCLUSION
    from explain.baselines.replacements import get_baseline
    from explain.methods.base import get_method
    from explain.render.styles import get_style

    get_baseline(options.baseline or "mean")
    if options.style:
        get_style(options.style)
    method: str | None = next(iter(options.method), None)
    if method not in (None, AGREEMENT, OCCLUSION):
        get_method(method)
    return method


def _asker(options: SimpleNamespace, answer: Output) -> "AnswerExplainer":
    """The explainer of the model that was named."""
    from explain.answers import AnswerExplainer
    from explain.models.classifier import on_device

    [name] = options.model
    with notes(answer), blaming(name), as_usage(ModelError):
        asker = AnswerExplainer(
            name, baseline=options.baseline or "mean", batch_size=options.batch_size
        )
        if options.device:
            on_device(asker.reader.model, options.device)
    return asker


@dataclass(eq=False)
class AnswerWork:
    """What `explain PHOTO --ask` does for each of the photos at ``paths``."""

    options: SimpleNamespace
    answer: Output
    asker: "AnswerExplainer"
    method: str | None
    paths: Sequence[str]

    def __call__(self, path: str, stem: str, bar: ProgressBar) -> PhotoResult:
        """Explain the answer about the photo at ``path``, save files that begin with ``stem``, and
        return what is printed."""
        from explain.data.files import slug

        options = self.options
        [model] = options.model
        photo = read_photo(path, self.answer, None)
        progress = AnswerProgress(bar, self.answer, self.paths.index(path) == 0, len(self.paths))
        with blaming(model):
            answered = self.asker(
                photo,
                options.ask or None,
                answer=options.answer,
                words=options.words,
                method=self.method,
                other=self._next(path),
                progress=progress,
            )
        files = answered.save(
            options.output,
            stem=f"{stem}-{slug(Path(model).name)}",
            overwrite=options.force,
            style=options.style,
            html=options.html,
        )
        written = list(map(str, files))
        document = {"image": path, "files": written, "records": [answered.to_dict()]}
        lines = [*_lines(answered), *(f"  wrote {file}" for file in written)]
        return PhotoResult(document, lines, written, summary=printable(answered.answer))

    def _next(self, path: str) -> Any:
        """The photo after this one, in whose place words are tried too; None without one that can
        be read."""
        following = self.paths[(self.paths.index(path) + 1) % len(self.paths)]
        if following == path or "-" in (following, path):
            return None
        with suppress(ImageError):
            return read_photo(following, self.answer, None)
        return None


class AnswerProgress:
    """The progress of one answer. That of the ``first`` photo says after its first passes how many
    there are, and how long they take."""

    def __init__(self, bar: ProgressBar, answer: Output, first: bool, photos: int) -> None:
        """Prepare it for one of several ``photos``."""
        self.bar = bar
        self.answer = answer
        self.is_told = not first
        self.photos = photos
        self.begun = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Take how many altered inputs are done, first 0."""
        if not done:
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
