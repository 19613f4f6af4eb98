"""The maps of a run, brought to one small size, with what is known about their photos."""

import math
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from PIL import Image

from explain._utils.errors import RunError, printable
from explain._utils.html import aligned
from explain.data.boxes import Box
from explain.metrics.localisation import in_boxes
from explain.render import overlays, styles
from explain.store.reading import LabelledPhoto, Row, StoredRun, Threshold
from explain.store.sources import boxes_on_input
from explain.targets.outputs import THRESHOLD

T = TypeVar("T")


def json_value(value: Any) -> Any:
    """Return a value of a result as JSON has it: numbers rounded to 6 digits, None for those that
    are not finite, tensors as lists, dataclasses as objects."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, torch.Tensor):
        return json_value(value.tolist())
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return fields_of(value) if is_dataclass(value) else value


def fields_of(thing: Any, names: str = "") -> dict[str, Any]:
    """Some attributes of a result as plain values of JSON, for its ``to_dict``; without ``names``,
    which are separated by spaces, all fields with ``repr=True``."""
    listed = names.split() or [column.name for column in fields(thing) if column.repr]
    return {name: json_value(getattr(thing, name)) for name in listed}


SHORT = 24  # letters of a photo's name


def short(name: str) -> str:
    """Return the end of a photo's name, `SHORT` letters at most, for captions and tables: the end
    says more than the beginning."""
    if len(name) <= SHORT:
        return name
    end = name[1 - SHORT :]
    return f"…{end[end.index('/') :] if '/' in end else end}"


def caption_of_row(row: Row) -> str:
    """The caption of a photo in pictures and tables: its label, or else the prediction, or else its
    name."""
    return row.label or row.prediction or row.name


class _FigureFormatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        """Format one field as `str.format` does, but write percentages as "26 %", and "–" for one
        that is NaN."""
        text = str(super().format_field(value, format_spec))
        if not format_spec.endswith("%"):
            return text
        return "–" if text == "nan%" else text.replace("%", " %")


filled = _FigureFormatter().format
"""Fill a format as `str.format` does, with shares as "26 %", and "–" where one is not a number.

>>> filled("{:.0%} and {:.1%}", 0.256, float("nan"))
'26 % and –'
"""


def in_percent(share: float, digits: int = 0) -> str:
    """Write a share as text in per cent, with ``digits`` decimals; "–" where it is not a number."""
    return filled(f"{{:.{digits}%}}", share)


class Names(tuple[str, ...]):
    """Names of the photos that stand for a result; in a table, two of them."""

    def __format__(self, spec: str) -> str:
        """In a template of ``sections.toml``: the first two names, shortened."""
        return ", ".join(map(short, self[:2]))


def most_frequent(rows: Sequence[Row], most: int) -> str:
    """The ``most`` captions (labels, predictions or names) that are the most frequent among some
    photos, separated by commas."""
    return ", ".join(name for name, _ in Counter(map(caption_of_row, rows)).most_common(most))


def chosen_from(table: T, numbers: Sequence[int], columns: str) -> T:
    """Return a dataclass with some of the rows of its ``columns``, which are tensors and tuples;
    their names are separated by spaces."""
    changes: dict[str, Any] = {}
    for name in columns.split():
        column = getattr(table, name)
        is_tensor = isinstance(column, torch.Tensor)
        changes[name] = column[numbers] if is_tensor else tuple(column[i] for i in numbers)
    return replace(table, **changes)  # type: ignore[type-var]


GRID = 16
"""Places along each side of a map that is compared with others: a map takes a kilobyte."""
EDGE = 2
"""Places along each side of this grid that count as border: an eighth of the photo on each side."""


@dataclass(frozen=True, eq=False)
class RunMaps:
    """N maps of one method as shares ``values`` ``(N, 16, 16)``, each adding up to 1, whatever the
    size of the photo and of the layer."""

    method: str
    names: tuple[str, ...]
    targets: tuple[str, ...]
    values: torch.Tensor
    # ``(N,)`` each: the share of the map, and of the photo, within the boxes; NaN without a box
    on_object: torch.Tensor
    object_size: torch.Tensor
    # ``(N,)``: 1 or 0, NaN without a label; of several labels, whether the target is predicted
    # where it is present
    correct: torch.Tensor
    # with several labels: whether the target is "present", "absent" or "uncertain"; else empty
    findings: tuple[str, ...]
    # left out: maps without a positive value, and photos with the pixels of an earlier one
    empty: int = 0
    repeated: int = 0
    # height and width of the coarsest map at its layer
    resolution: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def at_border(self) -> torch.Tensor:
        """The share of each map's evidence in the outer eighth of the photo on each side, ``(N,)``;
        of an even map, it is 7/16."""
        return 1 - self.values[:, EDGE:-EDGE, EDGE:-EDGE].sum((1, 2))

    @cached_property
    def entropy(self) -> torch.Tensor:
        """The normalised entropy of each map, ``(N,)``: 0 where all evidence is in one place, 1
        where all places have the same."""
        places = self.values.flatten(1)
        spread: torch.Tensor = torch.special.entr(places).sum(1) / math.log(places.shape[1])
        return spread

    @cached_property
    def of_finding(self) -> dict[tuple[str, str], torch.Tensor]:
        """The numbers of the maps of each target and finding, as integer tensors to index the maps
        with; in the order of their first maps."""
        numbers: dict[tuple[str, str], list[int]] = {}
        for number, key in enumerate(zip(self.targets, self.findings, strict=True)):
            numbers.setdefault(key, []).append(number)
        return {key: torch.tensor(rows) for key, rows in numbers.items()}

    def __getitem__(self, which: torch.Tensor) -> "RunMaps":
        """Return the maps with these numbers, an integer tensor; ``empty`` and ``repeated`` stay
        those of the run."""
        columns = "names targets values on_object object_size correct findings"
        return chosen_from(self, which.tolist(), columns)


def shares_of(heatmaps: torch.Tensor) -> torch.Tensor:
    """Return heatmaps ``(N, H, W)`` averaged to the cells of `GRID`, each divided by its sum, so
    that maps of different sizes can be compared; a map that is zero becomes NaN."""
    small = F.adaptive_avg_pool2d(heatmaps, GRID)
    return small / small.sum((1, 2), keepdim=True)


def read_maps(
    run: StoredRun, method: str | None = None, threshold: Threshold = THRESHOLD
) -> RunMaps:
    """A method's maps (the run's first by default) on a grid of 16 × 16, without zeros and repeated
    photos. ``threshold``: from which probability on a label is predicted.
    """
    if not run.methods:
        raise RunError(f"run {str(run.path)!r} must have maps, got none; explain some photos first")
    name = run.methods[0] if method is None else method
    names: list[str] = []
    targets: list[str] = []
    values: list[torch.Tensor] = []
    findings: list[str] = []
    # of each map: its share on the object, the size of the object, and 1 (right), 0 or NaN
    figures: list[tuple[float, float, float]] = []
    seen: set[tuple[str, str]] = set()
    empty = 0
    repeated = 0
    resolution: tuple[int, int] | None = None
    for row in run.rows(name):
        heatmap = row.heatmap
        key = (row.sha256, row.target)
        if key in seen:
            repeated += 1
            continue
        seen.add(key)
        if not heatmap.any():
            empty += 1
            continue
        region = object_of(row)
        on_object = object_size = math.nan
        if region.any():
            on_object = float(heatmap[region].sum() / heatmap.sum())
            object_size = float(region.float().mean())
        names.append(row.name)
        targets.append(row.target)
        values.append(shares_of(heatmap[None])[0])
        finding, is_right = _finding(row, threshold)
        findings.append(finding)
        correct = math.nan if is_right is None else float(is_right)
        figures.append((on_object, object_size, correct))
        height, width = row.values.shape[-2:]
        if resolution is None or min(height, width) < min(resolution):
            resolution = (height, width)
    if not values:
        raise RunError(
            f"run {str(run.path)!r} must have maps of {name!r} that are not zero; choose another "
            "method"
        )
    on_objects, object_sizes, are_correct = torch.tensor(figures).unbind(1)
    return RunMaps(
        method=name,
        names=tuple(names),
        targets=tuple(targets),
        values=torch.stack(values),
        on_object=on_objects,
        object_size=object_sizes,
        correct=are_correct,
        findings=tuple(findings),
        empty=empty,
        repeated=repeated,
        resolution=resolution,
    )


def _finding(row: Row, threshold: Threshold) -> tuple[str, bool | None]:
    """Return whether a map's target is "present", "absent" or "uncertain" in its photo (empty with
    one label), and whether the prediction is right (None where that is not known)."""
    photo = LabelledPhoto.of(row.columns)
    index = row.target_class
    if photo is None or index is None:  # not of several labels, or no class
        return "", row.is_right(threshold)
    if index in photo.uncertain:
        return "uncertain", None
    is_predicted = index in photo.predicted(threshold)
    is_present = index in photo.true
    return "present" if is_present else "absent", is_predicted == is_present


def object_of(row: Row) -> torch.Tensor:
    """Return which pixels ``(H, W)`` of the model's input lie on the object; none where no box is
    known."""
    boxes = boxes_on_input(row.boxes, row.box, row.input_size)
    corners = torch.tensor(boxes, dtype=torch.float64).round().long()
    return in_boxes([corners], row.input_size)[0]


def heated(photo: Image.Image, heatmap: torch.Tensor, box: Box) -> Image.Image:
    """Draw a heatmap ``(H, W)`` in [0, 1] on the part ``box`` of a photo that the model saw (in
    pixels of the photo), with the edge of that part."""
    return overlays.draw_marked(photo, heatmap.cpu().numpy(), styles.Heat(), box, [box])


WIDEST = 50  # letters of a column


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as indented lines for a terminal: columns aligned on the left, cells of at
    most `WIDEST` letters."""
    cells = [[_cut_off(printable(cell)) for cell in row] for row in rows]
    return [f"  {line}" for line in aligned(cells)]


def _cut_off(text: str) -> str:
    """A cell of a table, cut off after `WIDEST` letters."""
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"
