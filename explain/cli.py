"""`explain image.jpg`: arguments in, printed lines and an exit code out."""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explain.arguments import command_line
from explain.errors import ExplainError, ExplainWarning, FolderError, ImageError, OutputError, printable, raised

if TYPE_CHECKING:
    from PIL import Image

    from explain.explainer import Explainer
    from explain.explanation import Explanation

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 if something could not be explained, or 2 for wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a label that the terminal cannot show is no reason to stop
    if not logging.getLogger("PIL").handlers:
        logging.getLogger("PIL").addHandler(logging.NullHandler())  # its log goes to standard error otherwise
    parser = command_line()
    options = parser.parse_args(arguments)
    try:
        code = _run(options, parser)
        _say()  # what cannot be printed shows here, and not when the interpreter ends
        return code
    except _UnheardError as error:
        # Whoever read our output has gone, or it cannot be written; keep the interpreter from complaining at exit.
        with suppress(io.UnsupportedOperation):  # a program may have put something else than a file there
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error.__cause__, BrokenPipeError):
            _complain(f"output cannot be printed: {error}")
        return FAILED
    except ExplainError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if options.list_methods:
        return _list_methods()
    if options.list_models:
        return _list_models()
    if options.list_layers:
        return _list_layers(_explainer(options))
    if not options.images:
        parser.error("name at least one image; --help shows the options")
    if options.top_k and options.target:
        parser.error("--top-k and --target cannot both be given")
    if options.concepts and (options.method or options.target or options.top_k):
        parser.error("--concepts draws what a layer sees, for no class: leave --method, --target and --top-k out")
    try:
        methods = _methods(options.method or ["gradcam"])
        _check_colormap(options.colormap)
    except ExplainError as error:
        parser.error(str(error))
    images, missing = find_images(options.images)
    explainer, name = _explainer(options), "results"
    if options.concepts:
        work = _drawing_concepts(explainer, options)
    elif options.inspect:
        work, name = _inspecting(explainer, options), "inspected"
    else:
        work = _explaining(explainer, methods, options)
    return _for_all(images, missing, work, name, as_json=options.json)


def _methods(names: list[str]) -> list[str] | str:
    from explain.methods import get_method

    if "all" in names:
        return "all"
    return list(dict.fromkeys(get_method(name).name for name in names))


def _check_colormap(name: str | None) -> None:
    if name is not None:
        from explain.render.colors import lookup_table

        lookup_table(name)


def _explainer(options: argparse.Namespace) -> Explainer:
    from explain.explainer import Explainer

    labels = None if options.labels is None else _read_labels(options.labels)
    with _notes(), _blaming(options.model):
        return Explainer(
            options.model,
            categories=labels,
            weights=options.weights,
            size=options.size,
            crop=options.crop,
            device=options.device,
        )


@contextmanager
def _blaming(model: str | None) -> Iterator[None]:
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
        raise ExplainError(f"labels {path!r} cannot be read: {reason}; give a text file with a label a line") from None
    if "" in labels:
        line = labels.index("") + 1
        raise ExplainError(f"labels {path!r} must have a label on every line, but line {line} is empty; fill it")
    return labels


def find_images(given: Sequence[str]) -> tuple[list[Path], list[ExplainError]]:
    """Return the files that images and folders stand for, and an error for each folder without images."""
    from explain.images import EXTENSIONS

    found: list[Path] = []
    missing: list[ExplainError] = []
    for name in given:
        path = Path(name)
        if not name:  # as a path, it would be the folder we are in
            missing.append(ImageError("image must be a file or folder, got an empty name; check the command"))
            continue
        if re.match(r"\w+://", name):
            missing.append(ImageError(f"image {name!r} must be a file, got an address; download it first"))
            continue
        if not os.path.isdir(path):  # unlike Path.is_dir, this takes any name for an answer
            found.append(path)
            continue
        try:
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in EXTENSIONS and p.is_file())
        except OSError as error:
            missing.append(ImageError(f"folder {str(path)!r} cannot be read: {error.strerror}; check its permissions"))
            continue
        found += inside
        if not inside:
            missing.append(ImageError(f"folder {str(path)!r} holds no images ({', '.join(sorted(EXTENSIONS))})"))
    return list(dict.fromkeys(found)), missing


Work = Callable[[Path, str], tuple[dict[str, Any], list[str]]]  # of a photo and a stem: a part of the document, lines


def _for_all(photos: list[Path], missing: list[ExplainError], work: Work, name: str, *, as_json: bool) -> int:
    """Do the work on each photo and print what came of it.

    What fails for one photo is told, and the others still get done; but where no file can be written, the rest stops.
    """
    failures = [str(error) for error in missing]
    for failure in failures:
        _complain(failure)
    done: list[dict[str, Any]] = []
    for number, (path, stem) in enumerate(zip(photos, _stems(photos), strict=True), start=1):
        _progress(number - 1, len(photos), path)
        try:
            with _notes(path):
                found, lines = work(path, stem)
        except (ExplainError, MemoryError) as error:
            left = len(photos) - number if isinstance(error, FolderError) else 0
            failures.append(_blamed(path, error) + (f"; stopped, {left} more not looked at" if left else ""))
            _progress(None, len(photos))
            _complain(failures[-1])
            if isinstance(error, FolderError):
                break
            continue
        done.append(found)
        _progress(None, 2)
        if not as_json:
            _say(path, *lines)
    _progress(None, len(photos))
    if as_json:
        _say_json({name: done, "errors": failures})
    return FAILED if failures else DONE


def _stems(photos: list[Path]) -> list[str]:
    from explain.output import distinct, slug

    return distinct(slug(path.stem) for path in photos)


def _explaining(explainer: Explainer, methods: list[str] | str, options: argparse.Namespace) -> Work:
    from explain.explanation import percent

    def explain(path: Path, stem: str) -> tuple[dict[str, Any], list[str]]:
        with _blaming(options.model):
            targets = _targets(options.target)
            explanation = explainer(
                _photo(path), methods, targets, layer=options.layer, top_k=options.top_k, fuse=options.fuse,
                batch_size=options.batch_size, precision="bf16" if options.bf16 else "full", progress=_ticking(path),
            )  # fmt: skip
        _progress(None, 2)
        if methods == "all":
            _tell_left_out(path, explanation)
        written = explanation.save(
            options.output, stem=stem, overwrite=options.force, alpha=options.alpha, colormap=options.colormap
        )
        files = [str(place) for place in written]
        records = [explanation.record(m, t) for t in range(len(explanation.results)) for m in explanation.methods]
        predictions = [(printable(label), percent(probability)) for label, probability in explanation.predictions]
        width = max((len(label) for label, _ in predictions), default=0)
        lines = [f"  {label:<{width}}  {share:>7}" for label, share in predictions]
        return {"image": str(path), "files": files, "records": records}, lines + _wrote(files)

    return explain


def _drawing_concepts(explainer: Explainer, options: argparse.Namespace) -> Work:
    from explain.concepts import name_concepts
    from explain.output import Files

    def draw(path: Path, stem: str) -> tuple[dict[str, Any], list[str]]:
        with _blaming(options.model):
            picture, found = explainer.concepts(_photo(path), options.concepts, layer=options.layer)
        files = Files(options.output, overwrite=options.force)
        files.add_picture(f"{stem}-concepts.png", picture)
        written = [str(place) for place in files.write()]
        names = name_concepts(found, explainer.categories)
        about = {"image": str(path), "files": written, "layer": found.layer, "concepts": names}
        return about, [f"  {name}" for name in names] + _wrote(written)

    return draw


def _inspecting(explainer: Explainer, options: argparse.Namespace) -> Work:
    def inspect(path: Path, stem: str) -> tuple[dict[str, Any], list[str]]:
        with _blaming(options.model):
            found = explainer.inspect(_photo(path))
        first = found.first_nonfinite
        lines = [*str(found).split("\n"), *([] if first is None else [f"first NaN or infinity: {first.name}"])]
        return {"image": str(path), "layers": [asdict(row) for row in found.rows]}, lines

    return inspect


def _wrote(files: list[str]) -> list[str]:
    return [f"  wrote {file}" for file in files]


def _photo(path: Path) -> Image.Image:
    """Read a photo; where it comes from stays with it. What libraries print about it shortens to a note."""
    from explain.images import hushed, load_image

    with hushed() as said:
        photo = load_image(path)
    troubles = [line for line in said if line and "Warning" not in line]
    if troubles:
        _tell(f"note: {path}: may be damaged, its decoder says: {troubles[0]}")
    photo.filename = str(path)  # type: ignore[attr-defined]  # as Pillow does for those that it opens
    return photo


def _blamed(path: Path, error: ExplainError | MemoryError) -> str:
    """Say which photo an error is about, where it does not say so itself, and what option helps."""
    if isinstance(error, MemoryError):
        return (
            f"{printable(path)}: memory must hold the photo and what is drawn on it, but it ran out; resize the photo"
        )
    named = "" if repr(str(path)) in str(error) else f"{printable(path)}: "
    return f"{named}{error}{' (--force overwrites)' if 'exists already' in str(error) else ''}"


def _targets(given: list[str] | None) -> Any:
    """Targets as the API takes them: whole numbers are class indices, the rest labels."""
    return None if given is None else [int(text) if re.fullmatch(r"-?\d+", text) else text for text in given]


@contextmanager
def _notes(path: Path | None = None) -> Iterator[None]:
    """Print the package's own warnings as notes, and keep those of libraries to themselves."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ExplainWarning)
        try:
            yield
        finally:
            for warning in caught:
                _tell(f"note: {'' if path is None else f'{path}: '}{warning.message}")


def _tell_left_out(path: Path, explanation: Explanation) -> None:
    from explain.methods import list_methods

    missing = [name for name in list_methods() if name not in explanation.methods]
    if missing:
        _tell(f"note: {path}: left out, as they are for other networks or targets: {', '.join(missing)}")


def _ticking(path: Path) -> Any:
    """Draw a bar for the many runs of one method, if these take more than a moment."""
    begun = time.monotonic()

    def tick(done: int, total: int) -> None:
        if time.monotonic() - begun > 1:
            _progress(done, total, path)

    return tick


def _progress(done: int | None, total: int, path: Path | None = None) -> None:
    """Draw a bar on a terminal while there is more than one thing to do; None wipes it."""
    if total < 2 or sys.stderr is None or not sys.stderr.isatty():
        return
    if done is None:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        return
    filled = round(24 * done / total)
    bar = "█" * filled + "░" * (24 - filled)
    name = "" if path is None else printable(path.name)[:30]
    print(f"\r\x1b[2K{bar} {done}/{total} {name}", end="", file=sys.stderr, flush=True)


def _list_methods() -> int:
    from explain.methods import Demanding, get_method, list_methods

    for method in map(get_method, list_methods()):
        only = f"; for {method.only_for}" if isinstance(method, Demanding) else ""
        _say(f"{method.name:<20} {method.about} ({method.paper}){only}")
    _say(f"{'smooth(METHOD)':<20} any method on average over noisy copies of the photo")
    _say(f"{'augmented(METHOD)':<20} any method on average over flips and scales of the photo")
    return DONE


def _list_models() -> int:
    from explain.models import list_models

    _say(*list_models())
    return DONE


def _list_layers(explainer: Explainer) -> int:
    from PIL import Image

    from explain.layers import default_layer, list_layers

    x = explainer.as_input(Image.new("RGB", (256, 256), "gray"))
    with _blaming(explainer.name):
        chosen, calls = default_layer(explainer.model, x), list_layers(explainer.model, x)
    for call in calls:
        grid = f"{call.grid} map" if call.grid else ""
        default = " (default)" if call.label == chosen else ""
        label = printable(call.label)
        _say(f"{label:<32} {call.kind:<20} {call.shape!s:<24} {grid}{default}".rstrip())
    return DONE


class _UnheardError(OutputError):
    """Standard output takes no more."""


def _say(*lines: object) -> None:
    """Print lines that cannot steer the terminal; without any, only what was kept back."""
    try:
        for line in lines:
            print(printable(line))
        if not lines and sys.stdout is not None:  # it is None where standard output was closed
            sys.stdout.flush()
    except OSError as error:
        raise _UnheardError(error.strerror) from error


def _say_json(document: dict[str, Any]) -> None:
    from explain.output import json_text

    _say(*json_text(document, getattr(sys.stdout, "encoding", None) or "utf-8").split("\n"))


def _complain(message: str) -> int:
    _tell(f"explain: {' '.join(message.split())}")
    return FAILED


def _tell(line: str) -> None:
    if sys.stderr is not None:  # it is None where standard error was closed
        print(printable(line), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
