"""`explain PHOTO`: each photo explained by each model, evaluated, checked and saved."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from glob import escape
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from explain._utils.errors import ExplainError, MethodError, printable
from explain.cli import answers
from explain.cli import commands as cli
from explain.cli.commands import (
    PHOTOS,
    UsageError,
    commands,
    complete_words,
    is_typed,
    model_options,
    option,
    refuse_without_effect,
)
from explain.cli.output import DONE, Output, ProgressBar
from explain.cli.questions import (
    baseline_of,
    call_options,
    methods_of,
    metrics_of,
    targets_of,
    with_baseline,
)
from explain.cli.several import (
    SHEET,
    PhotoResult,
    Photos,
    Sheet,
    blaming,
    find_photos,
    for_all,
    load_explainer,
    read_photo,
    skipped,
    takes_whole_files,
    write_of_all,
)

if TYPE_CHECKING:
    from PIL import Image

    from explain import Explainer, Explanation
    from explain.baselines.base import Baseline
    from explain.explanation.coco import Annotations
    from explain.methods import Method
    from explain.metrics import Check, Metric
    from explain.metrics.evaluation import Table

BOXES = "boxes.json"
PICTURES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")
OTHER_FILES = (".gif", ".webp", ".bmp", ".tif", ".tiff", ".html", ".json", ".npy", ".npz", ".zip")
"""Endings that nobody means as the name of a folder."""
FEW = 10  # up to so many photos, their pages have curves
MOST_PREDICTIONS = 20  # how many predictions are printed for a photo; records have all
MOST_ROWS = 60  # photos in one figure
FIGURES = (".pdf", ".svg", ".png")


@commands.command(
    PHOTOS,
    epilog="Example: explain cat.jpg --method gradcam --method guidedbackprop --target tabby",
)
@cli.images
@cli.recursive
@option(
    "--slices RANGE",
    "the slices of a volume (.npy, .dcm, .nii), or pages of a TIFF or animation, as 12, 10:20 or "
    "::5, counted from 1",
    default="",
    show_default="all slices, the first page",
)
@cli.method
@cli.evidence
@cli.metric
@option(
    "--check",
    "say whether the maps depend on the model and the class, whether what they mark matters, and "
    "whether they are stable; pictures and records have it too",
)
@cli.targets
@cli.threshold
@option(
    "--text TEXT",
    "a text to explain, with an image-text model such as tiny-clip; repeatable",
    multiple=True,
)
@cli.ask
@cli.answer
@cli.words
@cli.top_k
@cli.layers
@option(
    "--ablate LAYER",
    "explain the model without a layer, or without some channels of it, as in "
    "'layer3[12,40]', 'blocks.3.attn[heads 1]', 'layer2[region 40,30,90,80]'; repeatable",
    multiple=True,
)
@cli.fuse
@cli.placement
@option(
    "--baseline NAME",
    "the baseline of covered pixels in methods and metrics that cover some: zero, black, "
    "mean, blur, noise or neighbours, also with options as in 'blur(sigma=3)'",
    show_default="each one's own",
    shell_complete=complete_words("zero", "black", "mean", "blur", "noise", "neighbours"),
)
@model_options(several=True)
@cli.batch_size
@cli.budget
@cli.output(
    "explained",
    "FOLDER",
    "where to write; of one photo, method and target, also the name of the picture, as cat.png",
)
@cli.force
@option("--skip-existing", "skip photos whose results are already in the folder")
@option("--html", "also write an HTML report, and a page of all photos if there are several")
@option("--curves", "with --html: curves of deletion and insertion for more than ten photos, too")
@cli.style
@option(
    "--alpha A", "opacity of the heat, 0 to 1", type=click.FloatRange(0, 1), show_default="0.75"
)
@option("--colormap NAME", "any colour map of matplotlib; print is for grey print")
@option(
    "--boxes",
    "draw boxes around the parts of each map above a share of its maximum, and write them and "
    f"their masks as COCO JSON to {BOXES}",
)
@option(
    "--box-threshold SHARE",
    "that share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.5,
)
@option(
    "--figure FILE",
    "also write one figure for print of what the model saw, with a row for each photo and a column "
    f"for each method: {', '.join(FIGURES)}",
)
@option(
    "--figure-width CM",
    "its width, as 8 or 17 in papers of two columns",
    type=click.FloatRange(2, 100),
    show_default="as wide as the pictures need",
)
@option(
    "--picture-format png|jpg|pdf|svg",
    "of overlays and sheets; pdf and svg are figures for print, with texts as texts",
    default="png",
)
@option(
    "--largest-side PIXELS",
    "of overlays; larger photos are reduced to it",
    type=click.IntRange(min=1),
    default=2000,
)
@option(
    "--map-format npy|npz",
    "of the raw values: npy in float32, npz in float16 and compressed",
    default="npy",
)
@cli.quiet
@cli.verbose
@cli.json
@click.pass_context
def explain_photos(context: click.Context, /, **values: Any) -> int:
    """Explain what a vision model predicts for photos: draw the evidence on them as heatmaps."""
    options = SimpleNamespace(**values)
    answer: Output = context.obj
    if options.ask is not None or options.answer is not None:
        return answers.explain_answers(context, options)
    refuse_without_effect(context, "words", " without --ask", unless=False)
    models = options.model or (None,)  # None is the default model
    # what was typed is checked before models are loaded, which is slow
    _check_together(context, options, models)
    group, methods = methods_of(context, options)
    metrics = metrics_of(options.metric)
    # a group chooses its methods by the first photo: whether these cover pixels is not known yet
    users = None if group else [*methods, *metrics]
    baseline = baseline_of(context, options.baseline, typed_methods=options.method, users=users)
    settings = {name: getattr(options, name) for name in cli.MODEL_SETTINGS}
    explainers = [
        load_explainer(answer, model=model, ablate=options.ablate, **settings) for model in models
    ]
    photos = find_photos(
        options.images,
        recursive=options.recursive,
        apart_from=options.output,
        slices=options.slices,
        in_volumes=all(map(takes_whole_files, explainers)),
    )
    paths, _ = photos
    if Path(options.output).suffix.lower() in OTHER_FILES or not options.output:
        raise UsageError(
            f"--output must be a folder, or a picture that ends in {', '.join(PICTURES)}, got "
            f"{options.output!r}; name one"
        )
    if _is_picture(options.output):
        has_several_methods = bool(group) or len(methods) > 1
        _check_single(context, options, photos, has_several_methods=has_several_methods)
    refuse_without_effect(context, "box_threshold", " without --boxes", unless=options.boxes)
    if options.figure and len(paths) > MOST_ROWS:
        raise UsageError(
            f"--figure must be of at most {MOST_ROWS} photos, got {len(paths)}; name fewer"
        )
    _refuse_common(options, len(paths))
    sheet = ContactSheet(options, answer, len(paths), has_models=len(models) > 1)
    annotations = None
    if options.boxes:
        from explain.explanation.coco import Annotations

        annotations = Annotations(options.box_threshold)
    works = [
        PhotoWork(
            options,
            answer,
            model=model,
            explainer=explainer,
            sheet=sheet,
            group=group,
            methods=methods,
            metrics=metrics,
            baseline=baseline,
            annotations=annotations,
        )
        for model, explainer in zip(models, explainers, strict=True)
    ]
    work = works[0] if len(works) == 1 else partial(_compare, works)
    code = for_all(photos, work, answer, "explained", options.output)
    # these are written also if some photos failed, whose exit code is kept
    boxes_code = _write_boxes(annotations, options, answer)
    figure_code = _write_figure([work.explained for work in works], options, answer)
    return sheet.write(_sheet_of) or boxes_code or figure_code or code  # the first that is not 0


def _sheet_of(entries: Sequence[Any]) -> str:
    """The page of several explanations."""
    from explain.report.pages import sheet_of

    return sheet_of(entries)


def _write_figure(
    by_model: "Sequence[Sequence[Explanation]]", options: SimpleNamespace, answer: Output
) -> int:
    """Write the figure of all photos (--figure), if any was explained; return the exit code."""
    # of each photo the rows of all models; one that failed on some photos has fewer (None)
    rows = [row for of_photo in zip_longest(*by_model) for row in of_photo if row is not None]
    if not rows:
        return DONE
    from explain.data.files import Files
    from explain.explanation.figure import figure
    from explain.render.figures import as_file

    path = Path(options.figure)
    drawing = {name: getattr(options, name) for name in ("style", "alpha", "colormap")}
    of_all = figure(rows, width_cm=options.figure_width, crop="seen", **drawing)
    files = Files(path.parent, overwrite=options.force)
    files.add_bytes(path.name, as_file(of_all, path.suffix[1:].lower()))
    return write_of_all(files, answer)


def _write_boxes(
    annotations: "Annotations | None", options: SimpleNamespace, answer: Output
) -> int:
    """Write the parts of all maps as COCO JSON (--boxes), if any photo was explained; return the
    exit code."""
    from explain.data.files import Files

    if annotations is None or not annotations.images:
        return DONE
    files = Files(_folder_of(options.output), overwrite=options.force)
    files.add_json(BOXES, annotations.to_dict())
    return write_of_all(files, answer)


def _check_together(
    context: click.Context, options: SimpleNamespace, models: Sequence[str | None]
) -> None:
    """Refuse options of `explain PHOTO` that cannot be given together, and a model named twice.
    ``models`` are the names typed for --model; None is the default model.
    """
    # --force asks for the opposite, and the others for what skipped photos would lack
    for name in ("force", "metric", "check", "html", "boxes", "figure"):
        if options.skip_existing and is_typed(context, name):
            raise UsageError(f"--{name} and --skip-existing cannot both be given; leave one out")
    refuse_without_effect(context, "figure_width", " without --figure", unless=options.figure)
    if options.figure is not None and Path(options.figure).suffix.lower() not in FIGURES:
        raise UsageError(
            f"--figure must be a file that ends in {', '.join(FIGURES)}, got {options.figure!r}; "
            "name one"
        )
    if options.figure and os.path.lexists(options.figure) and not options.force:
        raise UsageError(f"--figure {options.figure!r} exists already; add --force to replace it")
    if len(set(models)) < len(models):
        raise UsageError(f"--model {models[-1]} is one too many; name others")
    if options.skip_existing and len(models) > 1:
        raise UsageError(
            f"--model {models[-1]} is one too many; name one model with --skip-existing"
        )


def _refuse_common(options: SimpleNamespace, count: int) -> None:
    """Refuse the files of all photos together, of which there are ``count``, where they exist."""
    from explain.data.files import Files

    names = []
    if options.boxes:
        names.append(BOXES)
    if options.html and count > 1:
        names.append(SHEET)
    Files(_folder_of(options.output), overwrite=options.force).refuse(names)


def _folder_of(output: str) -> Path:
    """The folder that --output names, or that of the picture that it names."""
    return Path(output).parent if _is_picture(output) else Path(output)


def _is_picture(output: str) -> bool:
    """Whether --output names one picture, and not a folder: by its ending, unless there is a
    folder of that name."""
    path = Path(output)
    return path.suffix.lower() in PICTURES and not path.is_dir()


def _check_single(
    context: click.Context, options: SimpleNamespace, photos: Photos, *, has_several_methods: bool
) -> None:
    """Refuse options that give more than one picture, where --output names one; those of a file of
    defaults (``options.html``, ``options.skip_existing``) are cleared.
    """
    paths, problems = photos
    # --top-k takes the place of targets; "predicted" and "all" may be any number of them
    targets = options.top_k or len(options.target) + len(options.text)
    several = {
        "photos": len(paths) + len(problems) > 1,
        "methods": has_several_methods,
        "targets": targets > 1 or not {"predicted", "all"}.isdisjoint(options.target),
        "models": len(options.model) > 1,
    }
    for what, is_several in several.items():
        if is_several:
            raise UsageError(
                f"--output must be a folder for several {what}, got {options.output!r}; name one"
            )
    if Path(options.output).resolve() in [Path(path).resolve() for path in paths]:
        raise UsageError(
            f"--output must be another file than the photo, got {options.output!r}; name one"
        )
    for name in ("html", "skip_existing", "picture_format", "map_format"):
        refuse_without_effect(context, name, " with a picture as --output", unless=False)
    options.html = options.skip_existing = False  # of a file of defaults: typed ones are refused


class ContactSheet(Sheet):
    """Makes the page of each photo, and collects what the page with all photos shows. ``steps`` are
    those of the deletion and insertion curves: None for the usual number, 0 for no curves."""

    def __init__(
        self, options: SimpleNamespace, answer: Output, count: int, *, has_models: bool
    ) -> None:
        """Prepare the HTML pages of ``count`` photos; ``has_models`` says whether several models
        explain each. With --html and many photos, a note says that pages have no curves."""
        super().__init__(options, answer)
        self.has_models = has_models
        has_curves = options.html and (count <= FEW or options.curves)
        self.steps = None if has_curves else 0
        if options.html and not has_curves:
            message = (
                f"the pages have no curves, as there are more than {FEW} photos; --curves "
                "computes them"
            )
            answer.note(message)

    def page(
        self,
        explanation: "Explanation",
        name: str,
        tables: "Sequence[Table]",
        model: str,
        bar: ProgressBar,
    ) -> str:
        """The HTML page of one photo with a table of metrics for each target, and its entry, a link
        to the file ``name``, kept for the page of all photos.
        """
        from explain.metrics.photos import figures_in
        from explain.report import pages

        figures = [figures_in(table) for table in tables]
        # a line in the list of all photos, and what is shown of the one that is picked
        short, full = pages.entry(explanation, figures)
        title = f"{short['name']} · {model}" if self.has_models else short["name"]
        self.add((short | {"name": title, "page": name}, full))
        return pages.page_of(explanation, steps=self.steps, figures=figures, progress=bar.runs)


@dataclass(eq=False)
class PhotoWork:
    """What `explain PHOTO` does for each photo with one model: explain, evaluate, check, save.
    ``methods`` of a ``group`` are empty until the first photo, which chooses them."""

    options: SimpleNamespace
    answer: Output
    model: str | None
    explainer: "Explainer"
    sheet: ContactSheet
    group: str | None
    methods: "list[Method]"
    metrics: "list[Metric]"
    baseline: "Baseline | None"
    annotations: "Annotations | None"
    explanation: "Explanation | None" = None
    """The explanation of the last photo; `_compare` reads it."""
    explained: "list[Explanation]" = field(default_factory=list)
    """Those of all photos, where a figure of them is asked for."""

    def __post_init__(self) -> None:
        """Fit what was typed to this model: the baseline in its input values, for all methods and
        metrics that cover pixels, and the targets by its labels (a UsageError for unknown ones)."""
        from explain.baselines.replacements import get_baseline
        from explain.data.files import slug

        options = self.options
        self.name = slug(Path(self.model or "default").name)  # as files and columns have it
        if self.baseline is not None:
            self.baseline = get_baseline(self.baseline, self.explainer.preprocess)
        self.methods = [with_baseline(method, self.baseline) for method in self.methods]
        self.metrics = [with_baseline(metric, self.baseline) for metric in self.metrics]
        self.targets: Any = targets_of(
            options.target, self.explainer.categories, options.text, options.threshold
        )

    def __call__(self, path: str, stem: str, bar: ProgressBar) -> PhotoResult:
        """Explain the photo at ``path`` with one model, save files that begin with ``stem`` (plus
        names of model and target), and return what is printed.
        """
        from explain.metrics.photos import tables_of

        options = self.options
        call = call_options(options)
        photo = read_photo(path, self.answer, self.explainer)
        if self.model:
            stem += f"-{self.name}"
        if not self.methods:
            self.methods = self._of_group(photo)
        stored = None if options.force else self._stored(path, stem, photo)
        if stored is not None:
            return stored
        with blaming(self.model):
            explanation = self.explainer(
                photo,
                self.methods,
                targets=self.targets,
                progress=bar.runs,
                **call,
            )
            explanation = replace(explanation, key=self._keys())  # with which `_stored` compares
            tables = []
            if self.metrics:
                settings = {name: call[name] for name in ("layer", "fuse", "batch_size")}
                tables = tables_of(explanation, self.metrics, self.methods, **settings)
            checks = self._checked(explanation, bar) if options.check else []
        stem = self._with_target(stem, explanation)
        html = None
        if options.html:
            html = self.sheet.page(
                explanation,
                name=f"{stem}.html",
                tables=tables,
                model=str(self.model),  # in the title, where there are several
                bar=bar,
            )
        drawing = ("largest_side", "style", "alpha", "colormap")
        save_options: dict[str, Any] = {name: getattr(options, name) for name in drawing}
        save_options["overwrite"] = options.force
        if self.annotations is not None:
            save_options["boxes"] = options.box_threshold
            # as it was typed: a photo from standard input has no file
            self.annotations.add(replace(explanation, source=path))
        if _is_picture(options.output):
            files = [explanation.save_picture(options.output, **save_options)]
        else:
            files = explanation.save(
                options.output,
                stem=stem,
                html=html,
                picture_format=options.picture_format,
                map_format=options.map_format,
                **save_options,
            )
        self.explanation = explanation
        if options.figure:
            self.explained.append(explanation)
        written = list(map(str, files))
        return _result(path, explanation, written, tables, checks)

    def _with_target(self, stem: str, explanation: "Explanation") -> str:
        """The beginning of a photo's files, with the label of a single target that was typed."""
        from explain.data.files import slug

        if (self.options.target or self.options.text) and len(explanation.targets) == 1:
            stem += f"-{slug(explanation.targets[0])}"
        return stem

    def _stored(self, path: str, stem: str, photo: "Image.Image") -> PhotoResult | None:
        """Refuse a photo whose files are there before the work for them; with --skip-existing,
        return what is printed where they are those of this request. If any in the folder begin
        like them, the model runs once, for the labels in their names and for its scores."""
        from explain.data.files import Files, slug
        from explain.explanation.explanation import file_names
        from explain.explanation.loading import Unexplained, stored_records

        options = self.options
        if _is_picture(options.output):
            picture = Path(options.output)
            Files(picture.parent).refuse([picture.name])
            return None
        if not any(Path(options.output).glob(f"{escape(slug(stem))}*")):
            return None
        question: Any = {"targets": self.targets, "top_k": options.top_k}
        try:
            with blaming(self.model):
                # a method without maps: labels and scores are all that is wanted
                predicted = self.explainer(photo, Unexplained(), **question)
        except ExplainError:  # the explanation fails on it as well, and tells
            return None
        keys = self._keys()
        formats = (options.picture_format, options.map_format)
        stem = self._with_target(stem, predicted)
        names = file_names(stem, predicted.targets, list(keys), formats, options.html)
        if not options.skip_existing:
            Files(options.output).refuse(names)
            return None
        files = [Path(options.output, name) for name in names]
        records = stored_records(files, predicted, keys)
        return None if records is None else skipped(path, list(map(str, files)), records)

    def _keys(self) -> dict[str, str]:
        """For each method, by name, a digest of everything asked but the batch size, to compare
        with records: another order or entry in ``asked`` would recognise no saved results.
        """
        from explain._utils.options import by_name
        from explain.attribution.encoding import encode, name_of_callable
        from explain.attribution.records import sha256_of
        from explain.methods.base import get_method

        explainer = self.explainer
        options = self.options
        call = call_options(options)
        del call["batch_size"]  # results do not depend on it
        labels = None if explainer.categories is None else list(explainer.categories)
        asked = [
            call,
            repr(self.targets),
            options.ablate,
            labels,
            explainer.weights,
            name_of_callable(explainer.preprocess),
            options.activation,
            options.unit,
            options.baseline,
        ]
        keys = {}
        # under the names that an explanation has for them
        methods = by_name(self.methods, get_method, MethodError, "method", tell_apart=True)
        for name, method in methods.items():
            # what was asked for is the group, whatever methods it has
            described_method = self.group or encode(method)
            keys[name] = sha256_of(json.dumps([asked, described_method]).encode())
        return keys

    def _of_group(self, photo: "Image.Image") -> "list[Method]":
        """Return the methods of the group ("all" or "everything") that fit the model, chosen by the
        first photo; notes say which are left out and why."""
        from explain.attribution.selection import select
        from explain.methods.base import get_method

        explainer = self.explainer
        session = explainer.session(targets=self.targets)
        with blaming(self.model):
            selection = select(
                explainer.model,
                explainer.as_input(photo),
                str(self.group),
                layer=list(self.options.layer) or None,
                target=session.of_photo(explainer.as_input(photo)).targets[0],
                categories=explainer.categories,
            )
        for note in selection.notes:
            self.answer.note(note)
        return [with_baseline(get_method(name), self.baseline) for name in selection.methods]

    def _checked(self, explanation: "Explanation", bar: ProgressBar) -> "list[Check]":
        """Check the maps of each target (--check); return what is found for each."""
        size = self.options.batch_size
        targets = range(len(explanation.results))
        return [
            explanation.check(target=target, batch_size=size, progress=bar.runs)
            for target in targets
        ]


def _compare(works: Sequence[PhotoWork], path: str, stem: str, bar: ProgressBar) -> PhotoResult:
    """Explain a photo by several models and save a picture that compares them: without a target,
    the best classes of the first, or a model's own where it lacks such a label."""
    from explain.data.files import Files
    from explain.explanation.comparison import compare
    from explain.targets import TopClass

    options = works[0].options
    picture_name = f"{stem}-models.{options.picture_format}"
    page_name = f"{stem}-models.html"
    files = Files(options.output, overwrite=options.force)
    # at once, before the work for what is in them
    files.refuse([picture_name, page_name] if options.html else [picture_name])
    names_no_target = not (options.target or options.text or options.top_k)
    names_predicted = not {"predicted", "all"}.isdisjoint(options.target)
    results: list[PhotoResult] = []
    explanations: dict[str, Explanation] = {}
    for work in works:
        first = next(iter(explanations.values()), None)
        # maps can be compared only where they are of the same targets: those of the first model
        if first is not None and names_no_target:
            best = first.targets[0]
            work.targets = [best] if best in (work.explainer.categories or ()) else None
        elif first is not None and options.top_k:
            labels = work.explainer.categories or ()
            work.targets = [
                label if label in labels else TopClass(rank)
                for rank, label in enumerate(first.targets)
            ]
            # the targets take the place of the k best of this model
            work.options = SimpleNamespace(**{**vars(options), "top_k": None})
        elif first is not None and names_predicted:
            work.targets = list(first.targets)
        results.append(work(path, stem, bar))
        assert work.explanation is not None
        explanations[work.name] = work.explanation
    comparison = compare(explanations)
    files.add_picture(picture_name, comparison.picture())
    if options.html:
        files.add_text(page_name, comparison.to_html())
    written = list(map(str, files.write()))
    by_model = [result.document for result in results]
    document = {**comparison.summary, "image": path, "files": written, "by_model": by_model}
    lines = [line for result in results for line in result.lines]
    lines += [f"  {line}" for line in comparison.lines]
    lines += [f"  wrote {file}" for file in written]
    files_of_all = [file for result in results for file in result.files] + written
    return PhotoResult(document, lines, files_of_all, summary="; ".join(comparison.lines))


def _result(
    path: str,
    explanation: "Explanation",
    files: list[str],
    tables: "Sequence[Table]",
    checks: "Sequence[Check]",
) -> PhotoResult:
    """What is printed for an explained photo (a summary if there are several), and its part of the
    JSON document, whose keys scripts read. ``tables`` and ``checks`` are by target.
    """
    from explain.attribution.pictures import cautions, sentence
    from explain.attribution.result import set_figures

    summary, lines = _predictions(explanation)
    remarks = []  # which the summary has too
    for maps, label in zip(explanation.results, explanation.targets, strict=True):
        for attribution in maps.values():
            if remark := sentence(attribution, label, explanation.categories):
                lines.append(f"  {printable(remark)}")
            warnings = [f"{attribution.method}: {caution}" for caution in cautions(attribution)]
            lines += [f"  {warning}" for warning in warnings]
            remarks += warnings
            # the share of the photo that is enough, or is needed, of methods that look for it
            size = set_figures(attribution, image=0).get("set_size")
            if size is not None:
                remarks.append(f"{attribution.method}: {size:.1%} of the photo")
    lines += [f"  wrote {file}" for file in files]
    targets = range(len(explanation.results))
    records = [
        explanation.record(method, target) for target in targets for method in explanation.methods
    ]
    document: dict[str, Any] = {"image": path, "files": files, "records": records}
    parts = [summary, *remarks]
    if tables:
        document["metrics"] = [table.to_dict() for table in tables]
        lines += _by_target([str(table).splitlines() for table in tables], explanation.targets)
        parts += [part for table in tables for part in _figures(table)]
    if checks:
        document["checks"] = [check.to_dict() for check in checks]
        lines += _by_target([check.lines() for check in checks], explanation.targets)
        for check in checks:
            parts += [f"{name}: {map_check.marks}" for name, map_check in check.items()]
    return PhotoResult(document, lines, files, summary=" · ".join(filter(None, parts)))


def _predictions(explanation: "Explanation") -> tuple[str, list[str]]:
    """Return the printed predictions for a photo: the best two as a short text, and a line for each
    of the first `MOST_PREDICTIONS`, with label, probability or number, and a detector's box."""
    from explain.targets.outputs import THRESHOLD, percent

    predicted = explanation.predicted
    if explanation.probabilities is not None and not predicted:
        share, best = explanation.probabilities.max(0)
        label = printable(explanation.outputs.label(explanation.categories, int(best)))
        message = f"no class reaches {THRESHOLD:.0%}; the best is {label}, {percent(float(share))}"
        return message, [f"  {message}"]
    width = max((len(printable(prediction.label)) for prediction in predicted), default=0)
    lines = []
    for prediction in predicted[:MOST_PREDICTIONS]:
        edges = ",".join(str(round(edge)) for edge in prediction.box or ())
        box = f"  box {edges}" if edges else ""
        lines.append(f"  {printable(prediction.label):<{width}}  {prediction.amount:>7}{box}")
    if len(predicted) > MOST_PREDICTIONS:
        lines.append(f"  and {len(predicted) - MOST_PREDICTIONS} more")
    return ", ".join(f"{printable(best.label)} {best.amount}" for best in predicted[:2]), lines


def _by_target(tables: Sequence[Sequence[str]], targets: Sequence[str]) -> list[str]:
    """Return the printed lines of the tables or checks of several targets, one after the other,
    each indented under the label of its target; a single one stands without label."""
    lines = []
    for table, target in zip(tables, targets, strict=True):
        if len(tables) > 1:
            lines.append(f"  {target}")
        lines += [f"  {line}" for line in table]
    return lines


def _figures(table: "Mapping[str, Mapping[str, Any]]") -> list[str]:
    """Return a text for each method with its figures in a table of metrics, as "gradcam: deletion
    0.12"; these are parts of the one line that is printed for each of several photos."""
    parts = []
    for method, row in table.items():
        figures = ", ".join(f"{name} {value.item():.3g}" for name, value in row.items())
        parts.append(f"{method}: {figures}")
    return parts
