"""`explain PHOTO`, and what else is shown of photos and models: `explain layers`, `inspect`, `concepts`, `trace`."""

import argparse
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

import explain
from explain import layers
from explain._utils.errors import ExplainError, TargetError, naming, printable
from explain._utils.progress import duration
from explain.attribution.pictures import sentence
from explain.attribution.records import digest
from explain.attribution.selection import MANY, select
from explain.baselines.replacements import get_baseline
from explain.cli import arguments as args
from explain.cli.commands import UsageError
from explain.cli.output import DONE, Output, ProgressBar
from explain.data.files import Files, slug
from explain.explanation.comparison import compare
from explain.methods.base import Method, get_method
from explain.models.files import is_file_or_code
from explain.report import item, pages
from explain.runs.manifest import identity
from explain.store.manifest import alike, described_method
from explain.targets import Text
from explain.targets.labels import find_label
from explain.targets.outputs import THRESHOLD, percent

if TYPE_CHECKING:
    from explain.metrics import Metric, Verdict
    from explain.metrics.evaluation import Table


SHEET = "contact-sheet.html"
FEW = 10  # photos up to which their pages have curves
MOST_PREDICTIONS = 20  # printed of a photo; records have all
LONG = 30.0  # seconds of checks and curves from which on it is said before how long they take
MOST = 500  # photos of one sheet; a browser opens no more at once with ease


def explain_photos(options: argparse.Namespace, answer: Output) -> int:
    """Explain each photo."""
    models = options.model or [None]
    if len(set(models)) < len(models) or (len(models) > 1 and options.skip_existing):
        other = "others" if len(set(models)) < len(models) else "one model with --skip-existing"
        raise UsageError(f"--model {models[-1]} is one too many; name {other}")
    first, *others = [_Work(argparse.Namespace(**{**vars(options), "model": name}), answer) for name in models]
    for each in [first, *others]:
        each.sheet, each.alone = first.sheet, not others
    work = partial(_compare, [first, *others]) if others else first
    code = args.for_all(first.photos, work, answer, "explained", options.output)
    return first.write_sheet() or code


class _Work:
    """What is done for each photo: explain, evaluate, check, save; and the page with all of them."""

    def __init__(self, options: argparse.Namespace, answer: Output) -> None:
        """Read what was asked for, and load the model.

        Raises:
            UsageError: some of it cannot be meant.
        """

        for name in ("force", "metric", "check", "html"):
            if options.skip_existing and name in options.given:
                raise UsageError(f"--{name} and --skip-existing cannot both be given; leave one out")
        self.options, self.answer = options, answer
        self.name = slug(Path(options.model or "default").name)  # as files and columns have it
        groups, named = args.checked_methods(options)
        self.group = max(groups, default=None)  # what the model chooses more methods by
        metrics = args.checked_metrics(options)
        baseline = args.checked_baseline(options, None if groups else [*named, *metrics])
        self.photos = args.photos_of(options)
        self.explainer = args.load_explainer(options, answer)
        labels = self.explainer.categories
        self.baseline = None if baseline is None else get_baseline(baseline, self.explainer.preprocess)
        self.named: list[Method] = [args.with_baseline(each, self.baseline) for each in named]
        self.metrics: list[Metric] = [args.with_baseline(each, self.baseline) for each in metrics]
        self.targets = [*(targets_of(options.target, labels) or ()), *map(Text, options.text or ())] or None
        self.of_one = len(self.targets or ()) == 1  # whether the names of files have it
        classes = self.targets and [e.name if isinstance(e, Text) else _class_of(e, labels) for e in self.targets]
        with args.blaming(options.model):
            self.request = request_of(
                self.explainer, self.named, self.group, options.top_k or classes, layer=options.layer,
                fuse=options.fuse, bf16=options.bf16, composite=options.composite,
                baseline=None if baseline is None else repr(self.baseline),
                budget={name: str(value) for name, value in args.given_budget(options).items()},
            )  # fmt: skip
        self.chosen: list[Method] | None = None  # of the group, by the first photo
        self.explanation: explain.Explanation | None = None  # the last one
        self.sheet: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.pages, self.alone = 0, True  # without other models
        self.announced = not (options.check or options.html)
        many = len(self.photos[0]) > FEW and not options.curves
        self.steps = 0 if many or not options.html else None
        if options.html and many:
            told = f"the pages have no curves, as there are more than {FEW} photos; --curves computes them"
            self.answer.note(told, once=True)

    def __call__(self, source: args.PhotoSource, stem: str, bar: ProgressBar) -> args.PhotoResult:

        options = self.options
        photo = args.read_photo(source, self.answer)
        stem += f"-{self.name}" if options.model else ""
        if options.skip_existing:
            count = options.top_k or len(self.targets or [None])
            formats = (options.picture_format, options.map_format)
            there = finished(options.output, source, stem, self.request, count, photo, formats)
            if there is not None:
                return there
        if self.chosen is None:
            self.chosen = [] if self.group is None else self._of_group(self.group, photo)
        methods: list[str | Method] = [*self.named, *self.chosen]
        tables: list[Table] = []
        verdicts: list[Verdict] = []
        with args.blaming(options.model):
            explanation = self.explainer(
                photo, methods, targets=self.targets, layer=options.layer, top_k=options.top_k, fuse=options.fuse,
                batch_size=options.batch_size, precision="bf16" if options.bf16 else "full", progress=bar.runs,
            )  # fmt: skip
            explanation = replace(explanation, question=replace(explanation.question, request=self.request))
            if self.metrics:
                tables = self._evaluated(explanation, photo, methods)
            self._announce(explanation)
            if options.check:
                verdicts = [
                    explanation.check(target=index, batch_size=options.batch_size, progress=bar.runs)
                    for index in range(len(explanation.results))
                ]
        if self.of_one:
            stem += f"-{slug(explanation.targets[0])}"
        written = explanation.save(
            options.output, stem=stem, overwrite=options.force, style=options.style, alpha=options.alpha,
            colormap=options.colormap, html=self._page(explanation, stem, tables, bar) if options.html else None,
            picture_format=options.picture_format, map_format=options.map_format,
        )  # fmt: skip
        self.explanation = explanation
        return _result(source, explanation, list(map(str, written)), tables, verdicts)

    def _of_group(self, group: str, photo: Image.Image) -> list[Method]:
        """Choose methods for the model by a photo, and say which are left out."""
        options, explainer = self.options, self.explainer
        with args.blaming(options.model):
            selection = select(
                explainer.model, explainer.as_input(photo), group, layer=options.layer,
                target=self.targets[0] if self.targets else None, categories=explainer.categories,
            )  # fmt: skip
        names = {method.name for method in self.named}
        unfit = [name for name in selection.unfit if name not in names]
        if unfit:
            self.answer.note(f"left out, as they are for other networks or targets: {', '.join(unfit)}")
        costs = {name: f" ({cost:.0f})" if math.isfinite(cost) else "" for name, cost in selection.costly.items()}
        costly = ", ".join(name + cost for name, cost in costs.items() if name not in names)
        if costly:
            told = f"left out, as they take {MANY} passes or more: {costly}; --method everything takes them too"
            self.answer.note(told)
        own = args.with_rules(map(get_method, selection.methods), options.composite)
        chosen = args.within_budget((each for each in dict.fromkeys(own) if each.name not in names), options)
        return [args.with_baseline(each, self.baseline) for each in chosen]

    def _evaluated(
        self, found: explain.Explanation, photo: Image.Image, methods: Sequence[str | Method]
    ) -> "list[Table]":
        """Evaluate the maps of each target; the methods run again where a metric needs it."""
        from explain.metrics import ReattributionMetric

        options, explainer = self.options, self.explainer
        x, tables = explainer.as_input(photo), []
        reattributes = any(isinstance(metric, ReattributionMetric) for metric in self.metrics)
        objects = {method.name: method for method in map(get_method, methods)}
        for result, wanted in zip(found.results, found.request.targets, strict=True):
            chosen = next(iter(result.values())).target
            target = wanted if isinstance(chosen, str) else int(chosen[0])
            given: Any = {name: objects[name] if reattributes else each for name, each in result.items()}
            with naming([found.source]):
                table = explain.evaluate(
                    explainer.model, x, given, self.metrics, target=target, activation=explainer.activation,
                    layer=options.layer, fuse=options.fuse, batch_size=options.batch_size,
                )  # fmt: skip
            tables.append(table)
        return tables

    def _announce(self, explanation: explain.Explanation) -> None:
        """Say before the first checks and curves how long those of all photos will take, if that is long."""
        if self.announced:
            return
        self.announced = True
        passes, seconds = item.cost_ahead(explanation, check=self.options.check, steps=self.steps)
        in_all = seconds * len(self.photos[0])
        if in_all >= LONG:
            what = " and ".join(["checks"] * self.options.check + ["curves"] * (self.steps is None))
            told = f"about {passes:,} passes of the model for a photo, and {duration(in_all)} for all photos"
            self.answer.note(f"{what} will take {told}")

    def _page(self, explanation: explain.Explanation, stem: str, tables: "Sequence[Table]", bar: ProgressBar) -> str:
        """Return the page of one photo, with what metrics say of its maps; keep what the page with all takes."""
        figures = [pages.figures_in(table) for table in tables]
        self.pages += 1
        if len(self.sheet) < MOST:
            short, full = pages.entry(explanation, figures)
            name = short["name"] if self.alone else f"{short['name']} · {self.options.model}"
            self.sheet.append(({**short, "name": name, "page": f"{stem}.html"}, full))
        return pages.page_of(explanation, steps=self.steps, figures=figures, progress=bar.runs)

    def write_sheet(self) -> int:
        """Write the page with all photos, if there are several; return the exit code."""
        if len(self.sheet) < 2:
            return DONE

        if self.pages > MOST:
            self.answer.note(f"{SHEET} has the first {MOST} of {self.pages} photos")
        try:
            place = Path(self.options.output) / SHEET
            path = pages.written(pages.sheet_of(self.sheet), place, overwrite=self.options.force)
        except ExplainError as error:
            return self.answer.complain(str(error))
        self.answer.add({"image": None, "files": [str(path)], "records": []})
        self.answer.say(f"wrote {path}, a page with all of them")
        return DONE


def _compare(works: Sequence[_Work], source: args.PhotoSource, stem: str, bar: ProgressBar) -> args.PhotoResult:
    """Explain a photo by several models: without a target, all of them for the best class of the first."""
    results, found = [], dict[str, explain.Explanation]()
    options = works[0].options
    free = not (options.target or options.text or options.top_k)
    for work in works:
        if found and free:
            best, labels = next(iter(found.values())).targets[0], work.explainer.categories or ()
            work.targets = [best] if best in labels else None
        results.append(work(source, stem, bar))
        if work.explanation is not None:
            found[work.name] = work.explanation
    comparison = compare(found)
    files = Files(options.output, overwrite=options.force)
    files.add_picture(f"{stem}-models.{options.picture_format}", comparison.picture())
    if options.html:
        files.add_text(f"{stem}-models.html", comparison.to_html())
    written = list(map(str, files.write()))
    lines = [*(line for each in results for line in each.lines), *(f"  {line}" for line in comparison.lines)]
    document = {**comparison.summary, "image": str(source), "files": written, "by_model": [e.found for e in results]}
    every = [file for each in results for file in each.files]
    return args.PhotoResult(
        document, [*lines, *(f"  wrote {file}" for file in written)], [*every, *written],
        summary="; ".join(comparison.lines),
    )  # fmt: skip


def _result(
    source: args.PhotoSource, explanation: explain.Explanation, files: list[str], *about: "Sequence[Table | Verdict]"
) -> args.PhotoResult:
    """What is printed of a photo, and its part of the document, with the tables and verdicts about each target."""
    lines, width = [], max((len(printable(label)) for label, _ in explanation.predictions), default=0)
    for each in explanation.predicted:
        box = f"  box {','.join(f'{edge:.0f}' for edge in each.box)}" if each.box else ""
        lines.append(f"  {printable(each.label):<{width}}  {each.amount:>7}{box}")
    if len(lines) > MOST_PREDICTIONS:
        lines[MOST_PREDICTIONS:] = [f"  and {len(lines) - MOST_PREDICTIONS} more"]
    records = [explanation.record(m, t) for t in range(len(explanation.results)) for m in explanation.methods]
    summary = [", ".join(f"{printable(each.label)} {each.amount}" for each in explanation.predicted[:2])]
    if explanation.probabilities is not None and not lines:
        share, best = explanation.probabilities.max(0)
        label = explanation.outputs.label(explanation.categories, int(best))
        summary = [f"no class reaches {THRESHOLD:.0%}; the best is {printable(label)}, {percent(float(share))}"]
        lines = [f"  {summary[0]}"]
    found: dict[str, Any] = {"image": str(source), "files": files, "records": records}
    results = zip(explanation.results, explanation.targets, strict=True)
    named = explanation.categories
    told = [sentence(each, label, named) for result, label in results for each in result.values()]
    lines += [f"  {printable(words)}" for words in told if words]
    lines += [f"  wrote {f}" for f in files]
    for key, several in zip(("metrics", "verdicts"), about, strict=True):
        if several:
            found[key] = [one.to_dict() for one in several]
            for one, target in zip(several, explanation.targets, strict=True):
                lines += [f"  {target}"] if len(several) > 1 else []
                lines += [f"  {line}" for line in str(one).splitlines()]
                summary += _in_brief(key, one)
    return args.PhotoResult(found, lines, files, summary=" · ".join(filter(None, summary)))


def _in_brief(key: str, found: Any) -> list[str]:
    """The figures or results of each method, for the line of a photo among many."""
    if key == "verdicts":
        return [f"{method}: check {'passed' if passed else 'failed'}" for method, passed in found.passed.items()]
    rows = {method: [f"{name} {value.item():.3g}" for name, value in row.items()] for method, row in found.items()}
    return [f"{method}: {', '.join(row)}" for method, row in rows.items()]


def targets_of(given: list[str] | None, categories: Sequence[str] | None) -> list[int | str] | None:
    """Targets as the API takes them: whole numbers are class indices, the rest labels; each class once."""
    if given is None:
        return None
    found: dict[int | str, int | str] = {}
    for text in given:
        target = int(text) if re.fullmatch(r"-?\d+", text) else text
        found.setdefault(_class_of(target, categories), target)
    return list(found.values())


def target_of(given: str | None, categories: Sequence[str] | None) -> int | str | None:
    """The target of commands that take one."""
    found = targets_of(None if given is None else [given], categories)
    return None if found is None else found[0]


def _class_of(target: int | str, categories: Sequence[str] | None) -> int | str:
    """The class that a label names; one that names none is told with the photo."""
    with suppress(TargetError):
        return find_label(target, categories) if isinstance(target, str) else target
    return target


def request_of(
    explainer: explain.Explainer, methods: Sequence[Method], group: str | None, targets: Any, **options: Any
) -> dict[str, Any]:
    """Return all that is asked, and of which model, in values that JSON can hold.

    Args:
        explainer: the model with its preprocessing.
        methods: those that are named; ``group`` is what the model chooses more by.
        targets: classes, how many of the best, or None for the best.
        options: others that change the values.
    """

    name = str(explainer._origin.arguments.get("model", ""))
    told_by_name = explainer.weights is not None and not is_file_or_code(name)  # its weights are published
    model = identity(explainer, trained=told_by_name)
    described = {each.name: described_method(each) for each in methods}
    model["categories"] = digest(json.dumps(model["categories"]).encode())
    request = {**model, "group": group, "methods": described, "targets": targets, **options}
    plain: dict[str, Any] = json.loads(json.dumps(request))
    return plain


def finished(
    folder: str, source: args.PhotoSource, stem: str, request: dict[str, Any], targets: int, photo: Image.Image,
    formats: tuple[str, str] = ("png", "npy"),
) -> args.PhotoResult | None:  # fmt: skip
    """Return what to say of a photo whose results are all in a folder, or None where some are missing.

    There must be a record of these very pixels and of this request, with its values and picture, for each method and as
    many targets; where a group chooses methods, at least one. Several have a sheet, which is written last.
    """

    methods = list(request["methods"]) if request["group"] is None else None
    image = {"sha256": digest(photo.tobytes()), "size": list(photo.size), "path": _place(source.path)}
    found: dict[Path, dict[str, Any]] = {}
    for path in sorted(Path(folder).glob(f"{escape(stem)}-*.json")):  # those of photos with longer names are among them
        with suppress(OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):  # it is damaged
            record = json.loads(path.read_bytes())
            known = {**record["image"], "path": _place(record["image"]["path"])}
            if {key: known.get(key) for key in image} == image and _answers(record, request):
                found[path] = record
    files = [str(path.with_suffix(f".{suffix}")) for path in found for suffix in (*formats, "json")]
    if methods is None or len(methods) * targets > 1:
        named = isinstance(request["targets"], list) and targets == 1
        words = [slug(record["label"]) for record in found.values()][:1] if named else []
        files.append(str(Path(folder) / f"{'-'.join([stem, *words, 'sheet'])}.{formats[0]}"))
    counts = Counter(record["method"] for record in found.values())
    complete = bool(found) and all(counts[name] >= targets for name in methods or ())
    if not complete or not all(map(os.path.isfile, files)):
        return None
    about = {"image": str(source), "files": files, "records": list(found.values()), "skipped": True}
    told = "skipped: its results are there"
    return args.PhotoResult(about, [f"  {told}"], skipped=True, summary=told)


def _place(path: str | Path | None) -> str | None:
    return None if path is None else os.path.realpath(path)


def _answers(record: dict[str, Any], request: dict[str, Any]) -> bool:
    """Whether a record is of the same request to the same model; that may have had other methods besides."""
    before, method = record["request"], record["method"]
    if request["group"] is None:
        before, request = ({**each, "methods": each["methods"].get(method)} for each in (before, request))
    return before.keys() == request.keys() and all(alike(key, before[key], value) for key, value in request.items())


def draw_concepts(options: argparse.Namespace, answer: Output) -> int:
    """Draw the concepts of each photo."""
    photos, explainer = args.photos_of(options), args.load_explainer(options, answer)

    def work(source: args.PhotoSource, stem: str, bar: ProgressBar) -> args.PhotoResult:
        photo = args.read_photo(source, answer)
        with args.blaming(options.model):
            found = explainer.concepts(photo, options.count, layer=options.layer)
        written = [str(path) for path in found.save(options.output, stem=stem, overwrite=options.force)]
        document = {"image": str(source), "files": written, "layer": found.concepts.layer, "concepts": found.labels}
        lines = [*(f"  {name}" for name in found.labels), *(f"  wrote {file}" for file in written)]
        return args.PhotoResult(document, lines, written, summary=", ".join(found.labels))

    return args.for_all(photos, work, answer, "drew", options.output)


def inspect(options: argparse.Namespace, answer: Output) -> int:
    """Print the outputs of all layers for each photo."""
    photos, explainer = args.photos_of(options), args.load_explainer(options, answer)

    def work(source: args.PhotoSource, stem: str, bar: ProgressBar) -> args.PhotoResult:
        photo = args.read_photo(source, answer)
        with args.blaming(options.model):
            found = explainer.inspect(photo)
        first = found.first_nonfinite
        lines = [*str(found).split("\n"), *([] if first is None else [f"first NaN or infinity: {first.name}"])]
        return args.PhotoResult({"image": str(source), "layers": [asdict(row) for row in found.rows]}, lines)

    return args.for_all(photos, work, answer, "inspected")


def trace(options: argparse.Namespace, answer: Output) -> None:
    """Patch each part of a network from the first photo into the second, and print the effects."""
    if len(options.images) != 2:
        raise UsageError(f"two photos must be named, CLEAN and CORRUPTED, got {len(options.images)}")
    explainer = args.load_explainer(options, answer)
    clean, corrupted = (explainer.as_input(args.read_photo(args.source_of(name), answer)) for name in options.images)
    with args.blaming(options.model):
        found = explain.trace(
            explainer.model, clean, corrupted, options.at, layers=options.layer, categories=explainer.categories,
            target=target_of(options.target, explainer.categories), batch_size=options.batch_size,
        )  # fmt: skip
    document, wrote = found.to_dict(), []
    if options.output is not None:
        files = Files(options.output, overwrite=options.force)
        files.add_picture("trace.png", found.picture())
        document["files"] = list(map(str, files.write()))
        wrote = [f"wrote {path}" for path in document["files"]]
    answer.add(document)
    answer.say(*str(found).split("\n"), *wrote)


def list_layers(options: argparse.Namespace, answer: Output) -> None:
    """List the layers of a model by the names of their calls for one photo."""
    if len(options.images) > 1:
        raise UsageError(f"layers are listed for one photo, got {len(options.images)}; name one, or none")
    explainer = args.load_explainer(options, answer)
    photos = [args.read_photo(args.source_of(name), answer) for name in options.images]
    x = explainer.as_input(*photos or [Image.new("RGB", (256, 256), "gray")])
    with args.blaming(explainer.name):
        chosen, calls = layers.default_layer(explainer.model, x), layers.list_layers(explainer.model, x)
    for call in calls:
        grid, default = None if call.grid is None else str(call.grid), call.label == chosen
        answer.add({"name": call.label, "kind": call.kind, "shape": list(call.shape), "map": grid, "default": default})
        end = (f"{grid} map" if grid else "") + (" (default)" if default else "")
        answer.say(f"{printable(call.label):<32} {call.kind:<20} {call.shape!s:<24} {end}".rstrip())
