"""`explain PHOTO`: explanations, written as pictures, values, records and pages."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explain._utils.errors import ExplainError, TargetError, naming, printable
from explain.cli import arguments as args
from explain.cli.arguments import UsageError
from explain.cli.each import PhotoResult, finished, for_all, request_of
from explain.cli.inputs import PhotoSource, blaming, load_explainer, photos_of, read_photo
from explain.cli.options import (
    checked_baseline,
    checked_metrics,
    given_budget,
    refuse_without_effect,
    with_baseline,
    with_rules,
    within_budget,
)
from explain.cli.output import DONE, Command, Output
from explain.cli.progress import ProgressBar

if TYPE_CHECKING:
    from PIL.Image import Image

    from explain.attribution.selection import Selection
    from explain.baselines.base import Baseline
    from explain.checks import Verdict
    from explain.explanation.explainer import Explainer
    from explain.explanation.explanation import Explanation
    from explain.methods import Method
    from explain.metrics import Metric
    from explain.metrics.table import Table


SHEET = "contact-sheet.html"
MOST = 500  # photos of one sheet; a browser opens no more at once with ease


@dataclass
class Pages:
    """Makes a page for each photo, and keeps what the page with all of them takes."""

    sheet: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    total: int = 0

    def page(self, explanation: Explanation, tables: Sequence[Table], progress: Callable[[int, int], None]) -> str:
        """Return the page of one photo, with what metrics say of its maps."""
        from explain.report.reported import page_of
        from explain.report.sheets import entry, figures_in

        figures = [figures_in(table) for table in tables]
        self.total += 1
        if len(self.sheet) < MOST:
            self.sheet.append(entry(explanation, figures))
        return page_of(explanation, steps=None, figures=figures, progress=progress)

    def end(self, options: argparse.Namespace, answer: Output) -> int:
        """Write the page with all photos, if there are several; return the exit code."""
        if len(self.sheet) < 2:
            return DONE
        from explain.report.reported import written
        from explain.report.sheets import sheet_of

        if self.total > MOST:
            answer.note(f"{SHEET} has the first {MOST} of {self.total} photos")
        try:
            text = sheet_of(self.sheet)
            path = written(text, Path(options.output) / SHEET, overwrite=options.force)
        except ExplainError as error:
            return answer.complain(str(error))
        answer.add({"image": None, "files": [str(path)], "records": []})
        answer.say(f"wrote {path}, a page with all of them")
        return DONE


def explain(options: argparse.Namespace, answer: Output) -> int:
    """Explain each photo."""
    from explain.baselines.registry import get_baseline

    (group, named), metrics = _checked(options), checked_metrics(options)
    baseline = checked_baseline(options, [*named, *metrics] if group is None else None)
    photos, missing = photos_of(options)
    explainer = load_explainer(options, answer)
    targets = targets_of(options.target, explainer.categories)
    baseline = None if baseline is None else get_baseline(baseline, explainer.preprocess)
    named = [with_baseline(each, baseline) for each in named]
    classes = None if targets is None else [_class_of(each, explainer.categories) for each in targets]
    with blaming(options.model):
        request = request_of(
            explainer, named, group, options.top_k or classes, layer=options.layer, fuse=options.fuse,
            bf16=options.bf16, composite=options.composite, baseline=None if baseline is None else repr(baseline),
            budget={name: str(value) for name, value in given_budget(options).items()},
        )  # fmt: skip
    work = _Work(
        options, answer, explainer, named, group, [with_baseline(each, baseline) for each in metrics], targets,
        baseline, request,
    )  # fmt: skip
    code = for_all(photos, missing, work, answer, verb="explained", folder=options.output)
    return work.pages.end(options, answer) or code


@dataclass
class _Work:
    """What is done for each photo: explain, evaluate, check, save. ``group`` chooses methods besides those named."""

    options: argparse.Namespace
    answer: Output
    explainer: Explainer
    named: list[Method]
    group: str | None
    metrics: list[Metric]
    targets: list[int | str] | None
    baseline: Baseline | None
    request: dict[str, Any]
    pages: Pages = field(default_factory=Pages)
    chosen: list[Method] | None = None  # of the group, by the first photo

    def __call__(self, source: PhotoSource, stem: str, bar: ProgressBar) -> PhotoResult:
        options = self.options
        photo = read_photo(source, self.answer)
        if options.skip_existing:
            count = options.top_k or len(self.targets or [None])
            there = finished(options.output, source, stem, self.request, count, photo)
            if there is not None:
                return there
        if self.chosen is None:
            self.chosen = [] if self.group is None else self._of_group(self.group, photo)
        methods: list[str | Method] = [*self.named, *self.chosen]
        tables: list[Table] = []
        verdicts: list[Verdict] = []
        with blaming(options.model):
            explanation = self.explainer(
                photo, methods, targets=self.targets, layer=options.layer, top_k=options.top_k, fuse=options.fuse,
                batch_size=options.batch_size, precision="bf16" if options.bf16 else "full", progress=bar.runs,
            )  # fmt: skip
            explanation = replace(explanation, question=replace(explanation.question, request=self.request))
            if self.metrics:
                run = {"layer": options.layer, "fuse": options.fuse, "batch_size": options.batch_size}
                tables = _evaluated(explanation, photo, methods, self.metrics, **run)
            if options.check:
                verdicts = [
                    explanation.check(target=index, batch_size=options.batch_size, progress=bar.runs)
                    for index in range(len(explanation.results))
                ]
        written = explanation.save(
            options.output, stem=stem, overwrite=options.force, style=options.style, alpha=options.alpha,
            colormap=options.colormap, html=self.pages.page(explanation, tables, bar.runs) if options.html else None,
        )  # fmt: skip
        return _result(source, explanation, list(map(str, written)), tables, verdicts)

    def _of_group(self, group: str, photo: Image) -> list[Method]:
        """Choose methods for the model by a photo, and say which are left out."""
        from explain.attribution.selection import select
        from explain.methods.registry import get_method

        options, explainer = self.options, self.explainer
        with blaming(options.model):
            selection = select(
                explainer.model, explainer.as_input(photo), group, layer=options.layer,
                target=self.targets[0] if self.targets else None, categories=explainer.categories,
            )  # fmt: skip
        names = {method.name for method in self.named}
        _tell_left_out(selection, names, self.answer)
        methods = dict.fromkeys(
            with_rules((get_method(name) for name in selection.methods if name not in names), options.composite)
        )
        return [
            with_baseline(each, self.baseline) for each in within_budget(methods, options) if each.name not in names
        ]


def _evaluated(
    explanation: Explanation, photo: Image, methods: Sequence[str | Method], metrics: Sequence[Metric], **options: Any
) -> list[Table]:
    """Evaluate the maps of each target; the methods run again where a metric needs it."""
    from explain.methods.registry import get_method
    from explain.metrics import ReattributionMetric, evaluate

    explainer = explanation.explainer
    x, tables = explainer.as_input(photo), []
    reattributes = any(isinstance(metric, ReattributionMetric) for metric in metrics)
    objects = {method.name: method for method in map(get_method, methods)}
    for result in explanation.results:
        chosen = next(iter(result.values())).target
        target = chosen if isinstance(chosen, str) else int(chosen[0])
        given: Any = {name: objects[name] if reattributes else each for name, each in result.items()}
        with naming([explanation.source]):
            tables.append(
                evaluate(explainer.model, x, given, metrics, target=target, activation=explainer.activation, **options)
            )
    return tables


def _result(
    source: PhotoSource, explanation: Explanation, files: list[str], tables: list[Table], verdicts: list[Verdict]
) -> PhotoResult:
    """What is printed of a photo, and its part of the document."""
    from explain.attribution.pictures import percent

    predictions = [(printable(label), percent(probability)) for label, probability in explanation.predictions]
    width = max((len(label) for label, _ in predictions), default=0)
    lines = [*(f"  {label:<{width}}  {share:>7}" for label, share in predictions), *(f"  wrote {f}" for f in files)]
    records = [explanation.record(m, t) for t in range(len(explanation.results)) for m in explanation.methods]
    found: dict[str, Any] = {"image": str(source), "files": files, "records": records}
    for key, each in (("metrics", tables), ("verdicts", verdicts)):
        if each:
            found[key] = [one.to_dict() for one in each]
            for one, target in zip(each, explanation.targets, strict=True):
                lines += [f"  {target}"] if len(each) > 1 else []
                lines += [f"  {line}" for line in str(one).splitlines()]
    return PhotoResult(found, lines, files)


def _checked(options: argparse.Namespace) -> tuple[str | None, list[Method]]:
    """Return the group of methods that was asked for, and single methods; refuse what cannot be meant."""
    from explain.attribution.selection import GROUPS
    from explain.methods.registry import get_method

    if options.top_k and options.target:
        raise UsageError("--top-k and --target cannot both be given; leave one out")
    for name in ("force", "metric", "check", "html"):
        if options.skip_existing and name in options.given:
            raise UsageError(f"--{name} and --skip-existing cannot both be given; leave one out")
    names = options.method or ["gradcam" if options.composite is None else "lrp"]
    try:
        groups = [name for name in names if name in GROUPS]
        known = with_rules((get_method(name) for name in names if name not in GROUPS), options.composite)
        methods = within_budget(dict.fromkeys(known), options)
        if (options.style, options.alpha, options.colormap) != (None, None, None):
            from explain.attribution.pictures import Look

            Look(options.style, options.colormap, options.alpha)
    except ExplainError as error:
        raise UsageError(str(error)) from None
    if not groups:
        refuse_without_effect(options, methods)
    return max(groups, default=None), methods


def targets_of(given: list[str] | None, categories: Sequence[str] | None) -> list[int | str] | None:
    """Targets as the API takes them: whole numbers are class indices, the rest labels; each class once."""
    if given is None:
        return None
    found: dict[int | str, int | str] = {}
    for text in given:
        target = int(text) if re.fullmatch(r"-?\d+", text) else text
        found.setdefault(_class_of(target, categories), target)
    return list(found.values())


def _class_of(target: int | str, categories: Sequence[str] | None) -> int | str:
    """The class that a label names; one that names none is told with the photo."""
    from explain.targets.labels import find_label

    try:
        return find_label(target, categories) if isinstance(target, str) else target
    except TargetError:
        return target


def _tell_left_out(selection: Selection, named: Collection[str], answer: Output) -> None:
    from explain.attribution.selection import MANY

    unfit = [name for name in selection.unfit if name not in named]
    if unfit:
        answer.note(f"left out, as they are for other networks or targets: {', '.join(unfit)}")
    costly = [
        f"{name} ({cost:.0f})" if math.isfinite(cost) else name
        for name, cost in selection.costly.items()
        if name not in named
    ]
    if costly:
        told = ", ".join(costly)
        answer.note(f"left out, as they take {MANY} passes or more: {told}; --method everything takes them too")


EXPLAIN = Command(
    "explain", "See why a vision model said what it said: writes overlays of the photos given.",
    (
        args.IMAGES, args.RECURSIVE, args.METHOD, args.METRIC, args.CHECK, args.TARGET, args.TOP_K, args.LAYER,
        args.FUSE, args.COMPOSITE, args.BASELINE, *args.MODEL, args.BATCH_SIZE,
        args.BF16, *args.BUDGET, args.OUTPUT, args.FORCE, args.SKIP_EXISTING, args.HTML, args.STYLE, args.ALPHA,
        args.COLORMAP, args.JSON,
    ),
    explain, example="explain cat.jpg --method gradcam --method guidedbackprop --target tabby",
)  # fmt: skip
