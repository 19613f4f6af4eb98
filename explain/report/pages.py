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

from explain._utils.errors import ExplainError, keywords, printable
from explain._utils.html import LARGEST, picture_html, png
from explain._utils.resources import packaged_text
from explain._utils.version import __version__
from explain.attribution import pictures
from explain.attribution.pictures import Look, Scene
from explain.attribution.result import set_figures
from explain.data.files import write_file
from explain.engine.settings import Progress
from explain.render.sheets import Layout, contact_sheet
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
from explain.report.item import Detail, address_of, item, subject_name, summary
from explain.report.reproduce import Reproduction, Subject
from explain.targets.labels import class_label, find_label

if TYPE_CHECKING:
    from jinja2 import Environment

    from explain.metrics.base import MetricLike


FIGURE = re.compile(r"[-+±]?[\d.,]+(e[-+]?\d+)?( ?%)?|–")


@dataclass(frozen=True)
class Section:
    """A part of a document. The lines of ``text`` are paragraphs. The first row of ``table`` has
    the headings. ``pictures`` have alternative texts.
    """

    heading: str
    text: str = ""
    table: Sequence[Sequence[str]] = ()
    pictures: Sequence[tuple[Image.Image, str]] = ()


def document(title: str, introduction: str, sections: Sequence[Section]) -> str:
    """Return a static HTML page of texts, tables and pictures, without any script. Nothing in the
    texts can become markup, and the page loads nothing: its pictures are in it."""
    front = PageTemplate(static(("look.css", "document.css")))
    return _page("document.html", front, title, introduction=introduction, sections=sections)


def page_of_words(title: str, **values: Any) -> str:
    """Return the page of an answer, whose words are buttons that show their maps; without scripts
    and in print, all are shown. ``values`` are for ``answer.html``, and are escaped."""
    front = PageTemplate(static(("look.css", "answer.css")), static(("words.js", "answer.js")))
    return _page("answer.html", front, title, **values)


def words_of_page(**values: Any) -> str:
    """The part of the page of an answer that a page of another kind can have in it: the sentence
    and its maps."""
    return _filled("words.html", **values)


def _filled(template: str, **values: Any) -> str:
    """Fill a Jinja template of ``report/static`` with values; texts are escaped, so that none of
    them can become markup."""
    return str(_templates().get_template(template).render(values))


@cache
def _templates() -> "Environment":
    """The Jinja environment with the HTML templates of pages, made once; every value is escaped,
    and JSON with NaN or infinity is refused, since browsers cannot read it."""
    from jinja2 import Environment, PackageLoader

    templates = Environment(
        loader=PackageLoader("explain.report", "static"), autoescape=True, finalize=_shown
    )
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    templates.filters["figures"] = _figures
    templates.filters["png"] = lambda picture: _base64(png(picture))
    return templates


def _shown(value: Any) -> Any:
    """The value as an HTML template shows it: in texts, control characters are shown as escapes.
    Subclasses of ``str`` are markup that is escaped already, and stay as they are.
    """
    return printable(value) if type(value) is str else value


def _figures(rows: Sequence[Sequence[str]]) -> list[bool]:
    """For each column of a table in a document, whether all cells below the heading are numbers or
    "–": the template aligns these at the right."""
    are_numbers = [all(map(FIGURE.fullmatch, column)) for column in zip(*rows[1:], strict=True)]
    return are_numbers or [False] * len(rows[0])  # headings alone have no columns below


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
    """The parts of a page besides its data: its style, script, what its policy allows besides
    these, and its ``kind``."""

    style: str
    script: str = ""
    policy: str = "img-src data:"
    kind: str = "report"


def static(names: Sequence[str]) -> str:
    """Return the texts of several scripts or styles of the package's pages, joined in this
    order."""
    return "\n".join(_static(name) for name in names)


def page(
    index: Mapping[str, Any],
    items: Sequence[Mapping[str, Any]],
    *,
    title: str,
    widget: bool = False,
    front: PageTemplate | None = None,
) -> str:
    """Return an interactive HTML page of explained photos. ``index`` is the page in short, with the
    `summary` of each photo as ``photos``; ``items`` are from `explain.report.item.item`."""
    if front is None:
        kind = "widget" if widget else "report"
        script = static((*SCRIPTS, "begin.js"))
        policy = "img-src data: blob:"
        front = PageTemplate(static(STYLES), script, policy=policy, kind=kind)
    shared = {
        "version": __version__,
        "drawing": _drawing(),
        "cover": Mask.cover,
        "widget": widget,
    }
    photos = [[photo.get("name", ""), photo.get("label", "")] for photo in index["photos"]]
    stills = [
        {**photo["still"], "caption": f"{photo['name']}: {photo['label']}"}
        for photo in index["photos"]
        if "still" in photo
    ]
    lines = [{key: photo[key] for key in photo if key != "still"} for photo in index["photos"]]
    # Nothing in the values can become markup or a script: they are JSON, in which "<" is an escape,
    # scripts put them into texts only, and the policy allows no script or style but the page's own.
    return _page(
        "page.html",
        front,
        title,
        kind=front.kind,
        index={**shared, **index, "photos": lines},
        stills=stills,
        items=items,
        rows=[["photo", "prediction"], *photos],
    )


def still_of(subject: Subject, picture: Image.Image) -> dict[str, str]:
    """A picture of a photo's maps for where scripts do not run and for print, as the page's
    template takes it: its address and its alternative text."""
    targets = ", ".join(subject.targets)
    methods = ", ".join(subject.methods)
    maps = f"{subject_name(subject)} with maps of {targets}: {methods}"
    return {
        "src": address_of(picture, max(picture.size), QUALITY),
        "alt": printable(maps),
    }


def scene_of(subject: Subject) -> Scene:
    """What the maps of a photo are drawn on: the photo, the box that they cover, what the model
    saw, and the boxes of the targets and of all detections by their labels."""
    boxes = tuple(None if prediction is None else prediction.box for prediction in subject.boxes)
    detected = {
        f"{detection.label} {detection.amount}": detection.box
        for detection in subject.detections
        if detection.box
    }
    slices = getattr(subject.photo, "cells", {})  # of a volume that was read as a stack of slices
    seen = subject.crops or (subject.box,)
    return Scene(subject.photo, subject.box, seen, boxes, detected, slices=slices)


def all_maps(subject: Subject) -> Image.Image:
    """All maps of a photo as one picture, for a page of its own."""
    scene = scene_of(subject).fitted(2 * TILE)
    titles = [
        ", ".join(filter(None, (target, subject.amount(number))))
        for number, target in enumerate(subject.targets)
    ]
    groups = pictures.groups(scene, subject.results, titles, Look(), abreast=ABREAST)
    title = " · ".join(titles)
    return contact_sheet(Layout(title, detail="", groups=groups, abreast=ABREAST), TILE)


def first_map(subject: Subject) -> Image.Image:
    """The first map of a photo as a small picture, for a page of many photos."""
    attribution = next(iter(subject.results[0].values()))
    times = max(1, SMALL // max(subject.photo.size))  # for photos that are smaller still
    scene = scene_of(subject).enlarged(times).fitted(SMALL)
    return scene.overlay(attribution, Look().of(attribution.style))


TILE = 260  # pixels a side of each map in the picture of all
ABREAST = 4  # of these, so that its texts can be read in print
SMALL = 200  # pixels of the longer side of a photo among many
QUALITY = 80


def _page(template: str, front: PageTemplate, title: str, **values: Any) -> str:
    """Fill the template of a whole page, whose Content-Security-Policy allows its own style and
    script and nothing else: no network, no forms, no other script."""
    sources = [front.policy, f"style-src {_hash(front.style)}"]
    if front.script:
        sources.append(f"script-src {_hash(front.script)}")
    policy = "; ".join(["default-src 'none'", *sources, "base-uri 'none'", "form-action 'none'"])
    return _filled(
        template, title=title, policy=policy, style=front.style, script=front.script, **values
    )


def _hash(text: str) -> str:
    """The SHA-256 hash of a script or style as a Content-Security-Policy names it; the browser runs
    only the text that has exactly this hash."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


@cache
def _drawing() -> dict[str, Any]:
    """The colours and constants with which scripts draw each kind of `map_and_kind`, from
    `explain.render`, so that pages and pictures look the same.
    """
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
    """One kind's colours for each colour map of the page, as bytes in base64, with the ``style``'s
    defaults and curve of opacity; ``opacity`` is the first setting, in percent.
    """
    styles = {name: replace(style, colormap=name) for name in colormaps}
    return {
        "colormap": style.colormap,
        "colors": {name: _base64(styles[name].table().tobytes()) for name in styles},
        "grounds": {name: _grounds(styles[name]) for name in styles},
        "levels": _base64(curve(style.opacity()).tobytes()),
        "opacity": opacity,
        "power": style.power,
        "spread": style.spread if style.reads == "signed" else 0,
    }


def _grounds(style: Colored) -> list[tuple[Any, ...]]:
    """What is drawn below the colours of a style: of a photo with colours, and of a scan."""
    scan = Image.new("RGB", (1, 1))
    return [astuple(style.ground), astuple(style.over(scan).ground)]


def _base64(content: bytes) -> str:
    """Bytes as text in base64."""
    return base64.b64encode(content).decode("ascii")


@cache
def _static(name: str) -> str:
    """The text of a script or style of the package's pages, read once; scripts without the comments
    on lines of their own and without indentation, so that pages are smaller."""
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
    """The HTML report of one photo, with curves in ``steps`` steps, during which ``progress`` is
    called; ``figures`` has ``{method: {metric: value}}`` for each target.
    """
    return page_with(
        subject, item(subject, Detail(steps=steps), figures=figures, progress=progress)
    )


def page_with(subject: Subject, values: Mapping[str, Any]) -> str:
    """Return the HTML report of one photo as text from its ``values``, as `item` returns them; the
    app adds its own values to them before."""
    line = {**summary(subject), "still": still_of(subject, all_maps(subject))}
    return page({"photos": [line]}, [values], title=f"{line['label']} – {subject_name(subject)}")


WIDGET = Detail(side=640, quality=80, live=False)
HEIGHT = 660  # pixels
CELLS = (128, 96, 64, 32)
"""Cells along the longer side of maps of single pixels: the most with which the page is small
enough for a notebook."""
LEAST = 60_000  # bytes of the picture below


def widget(subject: Subject, picture: Image.Image, alternative: str) -> str:
    """HTML for a notebook, 300 kB at most: the page in a frame that cannot touch the notebook, over
    a ``picture`` for where frames do not show or the page is too large.
    """
    max_bytes = round(4 / 3 * LARGEST)  # in base64, pictures grow by a third
    for cells in CELLS:
        values = item(subject, replace(WIDGET, cells=cells))
        text = page({"photos": [summary(subject)]}, [values], title=alternative, widget=True)
        # as the attribute of the frame will hold it
        bytes_left = max_bytes - len(_ascii(html.escape(text)))
        if bytes_left > LEAST:
            style = f"max-width: 100%; max-height: {HEIGHT}px"
            picture_below = picture_html(picture, alternative, round(3 / 4 * bytes_left), style)
            return _ascii(
                _filled(
                    "widget.html", height=HEIGHT, below=picture_below, page=text, title=alternative
                )
            )
    return picture_html(picture, alternative, LARGEST)


def _ascii(text: str) -> str:
    """HTML with every character outside ASCII as a character reference, so that its bytes can be
    counted and any encoding of a notebook shows it."""
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


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
        return text if path is None else write_file(path, text, overwrite=overwrite)


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
    from explain.metrics.photos import figures_in, tables_of  # slow to load

    metric_list = (
        [metrics]
        if isinstance(metrics, str) or not isinstance(metrics, Iterable)
        else list(metrics)
    )
    entries = [
        entry(
            subject, list(map(figures_in, tables_of(subject, metric_list))), true_class, steps=steps
        )
        for subject, true_class in zip(subjects, truth or [None] * len(subjects), strict=True)
    ]
    return write_file(path, sheet_of(entries, title), overwrite=overwrite)


def sheet_of(entries: Sequence[Entry], title: str | None = None) -> str:
    """Return the HTML page of a sheet as text, from the entries of its photos (`entry`), in their
    order."""
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
    """A photo's line in a sheet's list and its own page (`item`). ``figures`` has ``{method:
    {metric: value}}`` for each target, ``truth`` is the class as index or label.
    """
    figures_of_targets = []
    for target_index, result in enumerate(subject.results):
        metric_values = figures[target_index] if target_index < len(figures) else {}
        figures_by_method = {}
        for name, attribution in result.items():
            figures_by_method[name] = {
                **metric_values.get(name, {}),
                **set_figures(attribution, image=0),
            }
        figures_of_targets.append(figures_by_method)
    # the list shows the first target alone
    line = {**summary(subject), "figures": figures_of_targets[0]}
    line["still"] = still_of(subject, first_map(subject))
    if truth is not None:
        labels = list(subject.categories or ())
        class_index = find_label(truth, labels) if isinstance(truth, str) and labels else truth
        # a text stays one where there are no labels to find it in
        label = class_index if isinstance(class_index, str) else class_label(labels, class_index)
        line |= {"truth": printable(label), "right": printable(label) == line["label"]}
    return line, item(
        subject, replace(SHEET, steps=steps), figures=figures_of_targets, repeated_by=repeated_by
    )
