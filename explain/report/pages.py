"""Pages: of one photo, as a text, a file or the frame of a notebook; and of many, to filter, sort
and open."""

import base64
import hashlib
import html
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from PIL import Image

from explain._utils.errors import ExplainError, MetricError, keywords, naming, printable
from explain._utils.html import LARGEST, picture_html, png
from explain._utils.resources import packaged_text
from explain._utils.version import __version__
from explain.attribution.result import set_figures
from explain.data.files import Files
from explain.engine.settings import Progress
from explain.render.styles import (
    PRINT,
    Colored,
    Heat,
    Intensity,
    Mask,
    Signed,
    SignedContour,
    Spotlight,
    curve,
)
from explain.report.item import Detail, has_model, item, subject_name, summary, table_of
from explain.report.reproduce import Reproduction, Subject
from explain.targets.labels import class_label, find_label

if TYPE_CHECKING:
    from jinja2 import Environment

    from explain.methods.base import Method
    from explain.metrics.base import MetricLike
    from explain.metrics.evaluation import Table


FIGURE = re.compile(r"[-+±]?[\d.,]+(e[-+]?\d+)?( ?%)?|–")


@dataclass(frozen=True)
class Section:
    """A part of a document.

    The lines of ``text`` are paragraphs. The first row of ``table`` has the headings. ``pictures``
    have alternative texts.
    """

    heading: str
    text: str = ""
    table: Sequence[Sequence[str]] = ()
    pictures: Sequence[tuple[Image.Image, str]] = ()


def document(title: str, introduction: str, sections: Sequence[Section]) -> str:
    """Return a page as one text.

    Args:
        title: the heading.
        introduction: a sentence below it.
        sections: the parts.

    Nothing in the texts can become markup, and the page loads nothing: its pictures are in it.

    >>> "<img src=x" in document(
    ...     "<img src=x>", "", [Section("<img src=x>", table=[["<img src=x>"]])]
    ... )
    False
    """
    style = static(("look.css", "document.css"))
    policy = _policy("img-src data:", f"style-src {_hash(style)}")
    return _filled(
        "document.html",
        title=title,
        introduction=introduction,
        sections=sections,
        style=style,
        policy=policy,
    )


def _filled(template: str, **values: Any) -> str:
    """Fill a template of the page; what is no markup of its own is escaped."""
    return str(_templates().get_template(template).render(values))


@cache
def _templates() -> "Environment":
    """The templates of pages, read once."""
    from jinja2 import Environment, PackageLoader

    templates = Environment(
        loader=PackageLoader("explain.report", "static"), autoescape=True, finalize=_shown
    )
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    templates.filters["figures"] = _figures
    templates.filters["png"] = lambda picture: _base64(png(picture))
    return templates


def _shown(value: Any) -> Any:
    """What a template shows of a value: texts without what steers a terminal; markup as it is."""
    return printable(value) if type(value) is str else value


def _figures(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Which columns of a table have numbers alone, which are aligned at the right."""
    return [all(map(FIGURE.fullmatch, column)) for column in zip(*rows[1:], strict=True)] or [
        False
    ] * len(rows[0])


STYLES = ("look.css",)
SCRIPTS = (
    "elements.js",
    "source.js",
    "planes.js",
    "areas.js",
    "colors.js",
    "pane.js",
    "stage.js",
    "film.js",
    "panels.js",
    "evidence.js",
    "sets.js",
    "tables.js",
    "viewer.js",
    "sheet.js",
    "start.js",
)
MAGNITUDES = ("plasma", "viridis", "inferno", "cividis", PRINT)
CONTRIBUTIONS = ("RdBu_r", "PuOr_r", PRINT)
"""The colour maps in a page."""


@dataclass(frozen=True)
class PageTemplate:
    """The parts of a page besides its data: its ``kind``, style, script, and what its policy allows
    besides these."""

    kind: str
    style: str
    script: str
    policy: str = "img-src data: blob:"


def static(names: Sequence[str]) -> str:
    """Return the text of several files of the page."""
    return "\n".join(_static(name) for name in names)


def page(
    index: Mapping[str, Any],
    items: Sequence[Mapping[str, Any]],
    *,
    title: str,
    widget: bool = False,
    front: PageTemplate | None = None,
) -> str:
    """Return a page as one text.

    Args:
        index: the page in short; its ``photos`` are the summaries of the items.
        items: the values of each photo, from `explain.report.item.item`.
        title: the title of the window or tab.
        widget: whether the page is part of another one.
        front: style and script, where they are not those of a report.

    Nothing in the values can become markup or a script: they are JSON in which ``<`` is written as
    an escape, the scripts put them into texts only, and the page forbids every script and style but
    its own, by their hashes.

    >>> "<img" in page({"photos": [{"name": "<img src=x>"}]}, [], title="<img>")
    False
    """
    if front is None:
        front = PageTemplate(
            "widget" if widget else "report", static(STYLES), static((*SCRIPTS, "begin.js"))
        )
    style_source = f"style-src {_hash(front.style)}"
    script_source = f"script-src {_hash(front.script)}"
    policy = _policy(front.policy, style_source, script_source)
    shared = {
        "version": __version__,
        "drawing": _drawing(),
        "cover": Mask.cover,
        "widget": widget,
    }
    photos = [[photo.get("name", ""), photo.get("label", "")] for photo in index["photos"]]
    return _filled(
        "page.html",
        title=title,
        policy=policy,
        kind=front.kind,
        style=front.style,
        script=front.script,
        index={**shared, **index},
        items=items,
        rows=[["photo", "prediction"], *photos],
    )


def _policy(*allowed: str) -> str:
    """The policy of a page that allows these alone."""
    return "; ".join(["default-src 'none'", *allowed, "base-uri 'none'", "form-action 'none'"])


def _hash(text: str) -> str:
    """The hash of a text as a policy names it."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


@cache
def _drawing() -> dict[str, Any]:
    """How maps of each kind become colours: the page has this from the styles of the package."""
    opaque = Heat(alpha=1.0)
    return {
        "heat": _colored(opaque, MAGNITUDES, 100 * Heat.alpha),
        "intensity": _colored(Intensity(), MAGNITUDES),
        "signed": _colored(Signed(), CONTRIBUTIONS),
        "areas": Mask.spread,
        "dark": Spotlight.dark,
        "net": SignedContour.spread,
        "sides": SignedContour.shares,
    }


def _colored(style: Colored, colormaps: Sequence[str], opacity: float = 100) -> dict[str, Any]:
    """The colours of a kind of maps, for each colour map of the page."""
    styles = {name: replace(style, colormap=name) for name in colormaps}
    return {
        "colormap": style.colormap,
        "colors": {name: _base64(styles[name].table().tobytes()) for name in styles},
        "grounds": {name: astuple(styles[name].ground) for name in styles},
        "levels": _base64(curve(style.opacity()).tobytes()),
        "opacity": opacity,
        "power": style.power,
        "spread": style.spread if style.reads == "signed" else 0,
    }


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


@cache
def _static(name: str) -> str:
    """A file of the page; scripts without their comments and indentation."""
    text = packaged_text("explain.report", f"static/{name}")
    return (
        re.sub(r"^\s*(//.*\n)*\s*", "", text, flags=re.MULTILINE) if name.endswith(".js") else text
    )


def page_of(
    subject: Subject,
    *,
    steps: int | None,
    figures: Sequence[Mapping[str, Any]] = (),
    progress: Progress | None = None,
) -> str:
    """Return the page of one photo; ``figures`` are metrics, for each target ``{method: {metric:
    value}}``."""
    return page_with(
        subject, item(subject, Detail(steps=steps), figures=figures, progress=progress)
    )


def page_with(subject: Subject, values: Mapping[str, Any]) -> str:
    """Return the page of one photo from its ``values``, as `item` returns them."""
    short = summary(subject)
    return page({"photos": [short]}, [values], title=f"{short['label']} – {subject_name(subject)}")


WIDGET = Detail(side=640, quality=80, live=False)
HEIGHT = 660  # pixels
CELLS = (128, 96, 64, 32)
"""Cells along the longer side of maps of single pixels: the most with which the page is small
enough for a notebook."""
LEAST = 60_000  # bytes of the picture below


def widget(subject: Subject, picture: Image.Image, alternative: str) -> str:
    """Return the page in a frame, over a ``picture`` of the same with an ``alternative`` text: 300
    kB at most.

    The frame runs its own scripts and nothing else: it can neither read nor change the notebook.
    Where a notebook is shown without frames or scripts, the picture is visible. So it is if the
    page would be too large.
    """
    most = round(4 / 3 * LARGEST)
    for cells in CELLS:
        values = item(subject, replace(WIDGET, cells=cells))
        text = page({"photos": [summary(subject)]}, [values], title=alternative, widget=True)
        room = most - len(_ascii(html.escape(text)))
        if room > LEAST:
            style = f"max-width: 100%; max-height: {HEIGHT}px"
            below = picture_html(picture, alternative, round(3 / 4 * room), style)
            return _ascii(
                _filled("widget.html", height=HEIGHT, below=below, page=text, title=alternative)
            )
    return picture_html(picture, alternative, LARGEST)


def _ascii(text: str) -> str:
    """Markup in characters that any encoding has."""
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def write_page(text: str, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a page, complete or not at all, and return its path.

    Raises:
        OutputError: the file exists and ``overwrite`` is not set, or it cannot be written.
    """
    place = Path(path)
    files = Files(place.parent, overwrite=overwrite)
    files.add_text(place.name, text)
    return files.write()[0]


class Reportable(Subject):
    """A subject with `to_html`."""

    @overload
    def to_html(
        self,
        path: None = None,
        *,
        steps: int | None = None,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> str: ...

    @overload
    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        steps: int | None = None,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> Path: ...

    @keywords()
    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        steps: int | None = None,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> str | Path:
        """Write the report: one page for any browser, which needs neither a server nor the network.

        It shows the photo with every map, for every target, in every style; values under the
        pointer and in a region; the predictions; and the command and the Python code that repeat
        the explanation. See `explain.report.sheet` for many photos in one page.

        Args:
            path: the file to write; its folder is made if needed. Without it, the page is returned
                as a text.
            steps: the number of steps of the deletion and insertion curves of each map; they take
                twice as many passes of the model. The default is 20, and fewer where there are more
                than eight maps, but at least 8. 0 leaves the curves out, and so does a copy, which
                has no model.
            overwrite: replace an existing file.
            progress: called with the passes done and their total.

        Raises:
            OutputError: the file exists and ``overwrite`` is not set, or it cannot be written.
        """
        text = page_of(self, steps=steps, progress=progress)
        return text if path is None else write_page(text, path, overwrite=overwrite)


Entry = tuple[dict[str, Any], dict[str, Any]]
"""The line of a sheet about a photo, and the photo's own page."""

SHEET = Detail(side=640, quality=80, cells=128)
"""How much of each photo a sheet holds: 200 of them still fit into a mail."""


def sheet(
    explanations: Iterable[Subject],
    path: str | os.PathLike[str],
    *,
    truth: Sequence[int | str | None] | None = None,
    metrics: "MetricLike | Iterable[MetricLike]" = (),
    steps: int | None = 0,
    title: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a page with many photos, which filters, sorts and opens each.

    Args:
        explanations: the explanations that an `explain.Explainer` returns for a list of photos.
        path: the file to write; its folder is made if needed.
        truth: the true class of each photo, as index or label, or None where it is not known: the
            sheet can then be filtered by right and wrong predictions.
        metrics: names or metric objects for each photo's maps; the sheet sorts by them. They need
            the model.
        steps: the number of steps of deletion and insertion curves, as of
            `explain.Explanation.to_html`. 0 leaves them out.
        title: the heading of the page.
        overwrite: replace an existing file.

    Raises:
        ExplainError: no photos, another number of classes than photos, or metrics without a model.
        OutputError: the file exists and ``overwrite`` is not set, or it cannot be written.

    >>> import explain, tempfile
    >>> from PIL import Image
    >>> photos = [Image.new("RGB", (30, 20), color) for color in ("red", "blue")]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sheet(explain.Explainer("tiny")(photos), f"{folder}/photos.html").name
    'photos.html'
    """
    subjects = list(explanations)
    if not subjects:
        raise ExplainError(
            "explanations must hold at least one explanation, got none; explain some photos first"
        )
    if truth is not None and len(truth) != len(subjects):
        raise ExplainError(
            f"truth must hold {len(subjects)} classes or None, one for each photo, got {len(truth)}"
        )
    chosen = (
        [metrics]
        if isinstance(metrics, str) or not isinstance(metrics, Iterable)
        else list(metrics)
    )
    entries = [
        entry(subject, list(map(figures_in, tables_of(subject, chosen))), true_class, steps=steps)
        for subject, true_class in zip(subjects, truth or [None] * len(subjects), strict=True)
    ]
    return write_page(sheet_of(entries, title), path, overwrite=overwrite)


def sheet_of(entries: Sequence[Entry], title: str | None = None) -> str:
    """Return the page of the entries of some photos."""
    name = title or f"{len(entries)} photos"
    index = {"title": printable(name), "photos": [short for short, _ in entries]}
    return page(index, [full for _, full in entries], title=name)


def entry(
    subject: Subject,
    figures: Sequence[Mapping[str, Mapping[str, Any]]] = (),
    truth: int | str | None = None,
    *,
    steps: int | None = 0,
    repeated_by: Reproduction | None = None,
) -> Entry:
    """Return the line of a sheet about a photo (its prediction, whether that is right, metrics),
    and the photo's page.

    ``repeated_by`` says how to repeat the explanation, where the subject itself does not.
    """
    with_sets = []
    for place, result in enumerate(subject.results):
        measured = figures[place] if place < len(figures) else {}
        of_maps = {}
        for name, attribution in result.items():
            of_maps[name] = {**measured.get(name, {}), **set_figures(attribution, 0)}
        with_sets.append(of_maps)
    short = {**summary(subject), "figures": with_sets[0]}
    if truth is not None:
        labels = list(subject.categories or ())
        index = find_label(truth, labels) if isinstance(truth, str) and labels else truth
        label = index if isinstance(index, str) else class_label(labels, index)
        short |= {"truth": printable(label), "right": printable(label) == short["label"]}
    return short, item(
        subject, replace(SHEET, steps=steps), figures=with_sets, repeated_by=repeated_by
    )


def figures_in(table: "Table") -> dict[str, dict[str, float | None]]:
    """Return the metrics of one photo's maps as ``{method: {metric: value}}``."""
    values = table.to_dict()["values"]
    return {
        name: {metric: of_images[0] for metric, of_images in row.items()}
        for name, row in values.items()
    }


def tables_of(
    subject: Subject,
    metrics: "Sequence[MetricLike]",
    methods: "Sequence[Method]" = (),
    **options: Any,
) -> "list[Table]":
    """Evaluate the maps of each target by metrics.

    Args:
        subject: what was explained.
        metrics: names or metric objects.
        methods: those that made the maps; metrics that run a method again take them.
        options: as of `explain.evaluate`.

    Raises:
        MetricError: the model is missing, or the maps are of several crops.
    """
    if not metrics:
        return []
    if not has_model(subject):
        raise MetricError(
            "metrics need an explanation with its explainer and one crop; leave metrics out"
        )
    from explain.metrics import ReattributionMetric, get_metric

    objects = [get_metric(metric) for metric in metrics]
    runs_again = any(isinstance(metric, ReattributionMetric) for metric in objects)
    tables = []
    for index, maps in enumerate(subject.results):
        evaluated: Any = maps
        if runs_again:
            evaluated = {name: attribution.applied(methods) for name, attribution in maps.items()}
        with naming([subject.source]):
            tables.append(table_of(subject, index, evaluated, objects, **options))
    return tables
