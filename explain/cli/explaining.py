"""`explain PHOTO`: explanations, written as pictures, values, records and pages."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explain._utils.errors import ExplainError, TargetError, printable
from explain.cli.arguments import (  # fmt: skip
    ALPHA,
    BATCH_SIZE,
    BF16,
    BUDGET,
    CHECK,
    COLORMAP,
    COMPOSITE,
    FILL,
    FORCE,
    FUSE,
    HTML,
    IMAGES,
    JSON,
    LAYER,
    METHOD,
    METRIC,
    MODEL,
    OUTPUT,
    RECURSIVE,
    SKIP_EXISTING,
    STYLE,
    TARGET,
    TOP_K,
    UsageError,
)
from explain.cli.each import PhotoResult, finished, for_all, request_of
from explain.cli.inputs import PhotoSource, blaming, load_explainer, photos_of, read_photo
from explain.cli.metrics import checked, checked_metrics, judged, lines_of
from explain.cli.options import (
    checked_baseline,
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
    from explain.checks import Verdict
    from explain.explanation.explainer import Explainer
    from explain.explanation.explanation import Explanation
    from explain.methods import Method
    from explain.metrics import Table


SHEET = "contact-sheet.html"
MOST = 500  # photos of one sheet; a browser opens no more at once with ease


@dataclass
class Pages:
    """Makes a page for each photo, and keeps what the page with all of them takes."""

    sheet: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    total: int = 0

    def page(self, explanation: Explanation, tables: Sequence[Table], progress: Callable[[int, int], None]) -> str:
        """Return the page of one photo, with what metrics say of its maps."""
        from explain import report

        figures = [report.figures_in(table) for table in tables]
        self.total += 1
        if len(self.sheet) < MOST:
            self.sheet.append(report.entry(explanation, figures))
        return report.page_of(explanation, steps=None, figures=figures, progress=progress)

    def end(self, options: argparse.Namespace, answer: Output) -> int:
        """Write the page with all photos, if there are several; return the exit code."""
        if len(self.sheet) < 2:
            return DONE
        from explain import report

        if self.total > MOST:
            answer.note(f"{SHEET} has the first {MOST} of {self.total} photos")
        try:
            text = report.sheet_of(self.sheet)
            path = report.written(text, Path(options.output) / SHEET, overwrite=options.force)
        except ExplainError as error:
            return answer.complain(str(error))
        answer.add({"image": None, "files": [str(path)], "records": []})
        answer.say(f"wrote {path}, a page with all of them")
        return DONE


def explain(options: argparse.Namespace, answer: Output) -> int:
    """Explain each photo."""
    from explain.attribution.pictures import percent
    from explain.baselines import get_baseline
    from explain.methods import get_method

    (group, named), metrics = _checked(options), checked_metrics(options)
    baseline = checked_baseline(options, [*named, *metrics] if group is None else None)
    photos, missing = photos_of(options)
    explainer = load_explainer(options, answer)
    targets = targets_of(options.target, explainer.categories)
    baseline = None if baseline is None else get_baseline(baseline, explainer.preprocess)
    named, metrics = (
        [with_baseline(each, baseline) for each in named],
        [with_baseline(each, baseline) for each in metrics],
    )
    classes = None if targets is None else [_class_of(each, explainer.categories) for each in targets]
    with blaming(options.model):
        request = request_of(
            explainer, named, group, options.top_k or classes, layer=options.layer, fuse=options.fuse,
            bf16=options.bf16, composite=options.composite, baseline=None if baseline is None else repr(baseline),
            budget={name: str(value) for name, value in given_budget(options).items()},
        )  # fmt: skip
    selections: list[Selection] = []  # the first photo's serves for all
    pages = Pages()

    def work(source: PhotoSource, stem: str, bar: ProgressBar) -> PhotoResult:
        count = options.top_k or len(targets or [None])
        photo = read_photo(source, answer)
        there = finished(options.output, source, stem, request, count, photo) if options.skip_existing else None
        if there is not None:
            return there
        if group is not None and not selections:
            with blaming(options.model):
                selections.append(_selected(explainer, photo, group, options, targets))
            _tell_left_out(selections[0], [method.name for method in named], answer)
        taken = {method.name for method in named}
        others = [name for selection in selections for name in selection.methods if name not in taken]
        chosen = dict.fromkeys(with_rules(map(get_method, others), options.composite))
        more = [with_baseline(each, baseline) for each in within_budget(chosen, options) if each.name not in taken]
        methods: list[str | Method] = [*named, *more]
        with blaming(options.model):
            explanation = explainer(
                photo, methods, targets=targets, layer=options.layer, top_k=options.top_k, fuse=options.fuse,
                batch_size=options.batch_size, precision="bf16" if options.bf16 else "full", progress=bar.runs,
            )  # fmt: skip
        explanation = replace(explanation, question=replace(explanation.question, request=request))
        tables: list[Table] = []
        if metrics:
            with blaming(options.model):
                run = {"layer": options.layer, "fuse": options.fuse, "batch_size": options.batch_size}
                tables = judged(explanation, photo, methods, metrics, **run)
        verdicts: list[Verdict] = []
        if options.check:
            with blaming(options.model):
                verdicts = checked(explanation, batch_size=options.batch_size, progress=bar.runs)
        written = explanation.save(
            options.output, stem=stem, overwrite=options.force, style=options.style, alpha=options.alpha,
            colormap=options.colormap, html=pages.page(explanation, tables, bar.runs) if options.html else None,
        )  # fmt: skip
        files = [str(place) for place in written]
        records = [explanation.record(m, t) for t in range(len(explanation.results)) for m in explanation.methods]
        predictions = [(printable(label), percent(probability)) for label, probability in explanation.predictions]
        width = max((len(label) for label, _ in predictions), default=0)
        lines = [*(f"  {label:<{width}}  {share:>7}" for label, share in predictions), *(f"  wrote {f}" for f in files)]
        found: dict[str, Any] = {"image": str(source), "files": files, "records": records}
        if tables:
            found["metrics"] = [table.to_dict() for table in tables]
            lines += lines_of([str(table) for table in tables], explanation.targets)
        if verdicts:
            found["verdicts"] = [verdict.to_dict() for verdict in verdicts]
            lines += lines_of([str(verdict) for verdict in verdicts], explanation.targets)
        return PhotoResult(found, lines, files)

    code = for_all(photos, missing, work, answer, verb="explained", folder=options.output)
    return pages.end(options, answer) or code


def _checked(options: argparse.Namespace) -> tuple[str | None, list[Method]]:
    """Return the group of methods that was asked for, and single methods; refuse what cannot be meant."""
    from explain.attribution.selection import GROUPS
    from explain.methods import get_method

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


def _selected(
    explainer: Explainer, photo: Image, group: str, options: argparse.Namespace, targets: list[int | str] | None
) -> Selection:
    """Choose methods for the model, by a photo."""
    from explain.attribution.selection import select

    target = targets[0] if targets else None
    x = explainer.as_input(photo)
    return select(explainer.model, x, group, layer=options.layer, target=target, categories=explainer.categories)


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
    from explain.targets import find_label

    try:
        return find_label(target, categories) if isinstance(target, str) else target
    except TargetError:
        return target


def _tell_left_out(selection: Selection, named: list[str], answer: Output) -> None:
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
        IMAGES, RECURSIVE, METHOD, METRIC, CHECK, TARGET, TOP_K, LAYER, FUSE, COMPOSITE, FILL, *MODEL, BATCH_SIZE,
        BF16, *BUDGET, OUTPUT, FORCE, SKIP_EXISTING, HTML, STYLE, ALPHA, COLORMAP, JSON,
    ),
    explain, example="explain cat.jpg --method gradcam --method guidedbackprop --target tabby",
)  # fmt: skip
