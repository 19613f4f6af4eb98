"""What was typed: photos and models by their names; what options mean together, and which have no effect."""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

import explain
from explain._utils.errors import BaselineError, ExplainError, FolderError, ImageError, OutputError, raised
from explain._utils.progress import duration
from explain.attribution import pictures, selection
from explain.baselines.base import Baseline
from explain.baselines.replacements import get_baseline
from explain.cli.commands import UsageError, as_usage
from explain.cli.output import DONE, FAILED, USAGE, Output, ProgressBar, notes
from explain.data.files import distinct, slug
from explain.data.images import MAX_BYTES, load_image
from explain.data.opening import EXTENSIONS, hushed, photos_in, troubles
from explain.engine.perturbations import Attributions, PerturbationRuns, Scores
from explain.hooks.interventions import Ablate
from explain.methods import LRP, Method
from explain.methods.base import get_method, uses_layer
from explain.methods.base import options as options_of
from explain.render.styles import get_style

if TYPE_CHECKING:
    from explain.metrics import Metric

BUDGET = ("samples", "tolerance", "max_seconds")


def given_budget(options: argparse.Namespace) -> dict[str, float]:
    """The budgets that were given, by the names of the methods' options."""
    found = {name: getattr(options, name) for name in BUDGET}
    return {name: value for name, value in found.items() if value is not None}


def within_budget(methods: Iterable[str | Method], options: argparse.Namespace) -> list[Method]:
    """The methods with the budgets that were typed, as far as each has such an option.

    Raises:
        MethodError: one cannot do with so little.
    """
    found = []
    for method in map(get_method, methods):
        mine = {name: value for name, value in given_budget(options).items() if name in options_of(method)}
        found.append(replace(method, **mine) if mine else method)
    return found


def checked_metrics(options: argparse.Namespace, *, boxes: bool = False) -> "list[Metric]":
    """Return the metrics that were named, and refuse what cannot be meant; ``boxes`` may come with the photos."""
    if not options.metric:
        return []
    from explain.metrics import get_metric  # slow to load

    with as_usage(ExplainError):
        chosen = {metric.name: metric for metric in map(get_metric, options.metric)}
    for name, metric in chosen.items():
        if metric.needs_object and not boxes:
            raise UsageError(f"metric {name!r} needs to know where the object is; use evaluate(..., boxes=...)")
    return list(chosen.values())


def checked_baseline(options: argparse.Namespace, covering: Sequence[object] | None) -> Baseline | None:
    """Return the baseline that was named, if one was; ``covering`` has the methods and metrics, or None for a group.

    Raises:
        UsageError: there is none of that name, a method has its own already, or nothing is covered.
    """
    if options.baseline is None:
        return None
    with as_usage(BaselineError):
        baseline = get_baseline(options.baseline)
    own = [name for name in options.method or () if re.search(r"\bbaseline\s*=", name)]
    if own:
        raise UsageError(f"--baseline {options.baseline} and {own[0]!r} both say what covers pixels; leave one out")
    if covering is not None and not any(map(covers, covering)):
        names = ", ".join(str(getattr(each, "name", each)) for each in covering)
        refuse_without_effect(options, ("baseline", False, f": no pixels are covered for {names}"))
        return None
    return baseline


def covers(each: object) -> bool:
    """Whether a method, or the method within it, or a metric covers pixels."""
    return hasattr(each, "baseline") or (hasattr(each, "method") and covers(each.method))


def with_baseline(each: Any, baseline: Baseline | None) -> Any:
    """The same method or metric with another baseline, if it covers pixels."""
    if baseline is None or not covers(each):
        return each
    if hasattr(each, "baseline"):
        return replace(each, baseline=baseline)
    return replace(each, method=with_baseline(each.method, baseline))


def with_rules(methods: Iterable[Method], composite: str | None) -> list[Method]:
    """Give ``lrp`` the composite that was named, if one was; ``attnlrp`` has its own.

    Raises:
        MethodError: there is no composite of this name.

    >>> from explain.methods.base import get_method
    >>> [getattr(m, "composite", None) for m in with_rules(map(get_method, ["lrp", "attnlrp", "fem"]), "EpsilonBox")]
    ['EpsilonBox', 'AttnLRP', None]
    """
    if composite is None:
        return list(methods)
    LRP(composite)  # the name is checked also where no method takes it
    automatic = LRP().composite
    return [replace(m, composite=composite) if isinstance(m, LRP) and m.composite == automatic else m for m in methods]


def checked_methods(options: argparse.Namespace) -> tuple[list[str], list[Method]]:
    """Return the groups of methods that were named, and the single methods with their rules and budgets.

    Raises:
        UsageError: one is unknown, or an option does not go with them.
    """
    for name in ("target", "text"):
        if options.top_k and getattr(options, name, None):
            raise UsageError(f"--top-k and --{name} cannot both be given; leave one out")
    evidence = ["sufficient", "necessary"] if getattr(options, "evidence", False) else []
    names = [*(options.method or ()), *evidence] or ["gradcam" if options.composite is None else "lrp"]
    groups = [name for name in names if name in selection.GROUPS]
    with as_usage(ExplainError):
        known = with_rules((get_method(name) for name in names if name not in selection.GROUPS), options.composite)
        methods = within_budget(dict.fromkeys(known), options)
        pictures.Look(options.style, getattr(options, "colormap", None), getattr(options, "alpha", None))
    if not groups:
        _refuse_unheeded(options, methods)
    return groups, methods


def _refuse_unheeded(options: argparse.Namespace, methods: Sequence[Method]) -> None:
    """Refuse the first option that none of these methods heeds."""
    names = ", ".join(method.name for method in methods)
    styles = [get_style(options.style or method.style) for method in methods]
    several = len(options.layer or ()) > 1 or any(re.search(r"[*?\[]", layer) for layer in options.layer or ())
    evaluates = bool(options.metric or getattr(options, "check", False))
    many = (Attributions, PerturbationRuns, Scores)  # what takes more than the photo itself
    reruns = any(isinstance(need, many) for method in methods for need in method.needs)
    composites = [method.composite for method in methods if isinstance(method, LRP)]
    rules = f"the rules of {names} are chosen already" if composites else f"no rules are chosen for {names}"
    heeded: list[tuple[str, bool, str]] = [
        ("layer", any(uses_layer(m) or m.layer_optional for m in methods), f"no layer is looked at for {names}"),
        ("composite", options.composite in composites, rules),
        ("fuse", several or (not options.layer and any(m.fusion for m in methods)),
         "the maps of one layer are not fused; name several with --layer"),
        ("batch_size", evaluates or reruns, f"the model is run once for {names}"),
        *((name, any(name in options_of(m) for m in methods), f"nothing is estimated by {names}") for name in BUDGET),
        ("bf16", reruns, f"the model is run once for {names}"),
        ("alpha", any(hasattr(style, "alpha") for style in styles), "nothing is drawn as heat"),
        ("colormap", bool(options.style) or any(hasattr(style, "colormap") for style in styles),
         "nothing is drawn with a colour map"),
    ]  # fmt: skip
    refuse_without_effect(options, *((name, is_heeded, f": {reason}") for name, is_heeded, reason in heeded))


def refuse_without_effect(options: argparse.Namespace, *heeded: tuple[str, bool, str]) -> None:
    """Refuse the first option that was given and is not heeded; each has its name, whether it is, and why not.

    Raises:
        UsageError: there is one.
    """
    for name, is_heeded, why in heeded:
        if name in options.given and not is_heeded:
            raise UsageError(f"--{name.replace('_', '-')} would have no effect{why}; leave it out")


def ablation(text: str) -> Ablate:
    """Read what to ablate, as ``layer3`` or ``layer3[12,40]``, ``attn[heads 1]``, ``layer2[region 40,30,90,80]``.

    Raises:
        UsageError: it is written in another way.

    >>> ablation("layer3[12,40]").channels
    (12, 40)
    """
    found = re.fullmatch(r"([^\[\]]+)(?:\[(?:(heads|tokens|channels|region) )?([\d.,\s-]+)\])?", text.strip())
    try:
        if found is None:
            raise ValueError
        layer, units, numbers = found.groups()
        kind: Any = float if units == "region" else int
        chosen: Any = {} if numbers is None else {units or "channels": [kind(each) for each in numbers.split(",")]}
        return Ablate(layer, **chosen)
    except ValueError as error:
        why = f" ({error})" if isinstance(error, ExplainError) else ""
        known = "a layer, also with units as in 'layer3[12,40]', 'attn[heads 1]' or 'layer3[region 40,30,90,80]'"
        raise UsageError(f"--ablate must be {known}, got {text!r}{why}") from None


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
    with hushed() as printed:
        photo = load_image(_piped() if source.path is None else source.path)
    for trouble in troubles(printed):
        answer.note(f"{source.name}: {trouble}")
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


SETTINGS = ("weights", "activation", "unit", "size", "crop", "channels", "mean", "std", "interpolation", "device")
"""The arguments of an `Explainer` that are options under the same names, besides its model and its labels."""


def load_explainer(options: argparse.Namespace, answer: Output) -> explain.Explainer:
    """Load the model.

    Raises:
        UsageError: it, its weights or its labels cannot be used.
        ExplainError: code of the user's own raised something.
    """
    settings = {name: getattr(options, name) for name in SETTINGS}
    settings["interventions"] = [ablation(text) for text in getattr(options, "ablate", None) or ()]
    with notes(answer), blaming(options.model), as_usage(explain.ModelError):
        return explain.Explainer(options.model, categories=options.labels, **settings)


@contextmanager
def blaming(model: str | None) -> Iterator[None]:
    """Say in one line what a factory or module of the user's own raises; it may be anything."""
    try:
        yield
    except (ExplainError, MemoryError):
        raise
    except Exception as error:
        raise ExplainError(f"{'the default model' if model is None else f'model {model!r}'} {raised(error)}") from error


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
