"""What the app can be asked, as values read from JSON that anybody may have written; regions taken away."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import ExplainError, shown
from explain.app.limits import Limits
from explain.baselines.base import Baseline
from explain.baselines.registry import get_baseline
from explain.data.images import Box
from explain.methods import Method
from explain.methods.registry import get_method

SIDE = 320
"""The longer side in pixels at which a fill is computed: about what networks see, which blurs are meant for."""

FILLS = {"mean": "Mean colour", "zero": "Black", "blur": "Blur", "noise": "Noise", "neighbours": "From around it"}
"""The fills that the page offers, and what it calls them."""


@dataclass(frozen=True)
class RegionRemoval:
    """A rectangle ``region`` (x0, y0, x1, y1), as shares of what the model sees, and the name of what covers it.

    The fill works on the photo's own colours, from 0 (black) to 1: "zero" is black for every model.

    >>> grey = Image.new("RGB", (60, 40), (100, 100, 100))
    >>> covered = RegionRemoval((0.0, 0.0, 0.5, 1.0), "zero").of(grey, Box(10, 0, 50, 40))
    >>> [covered.getpixel(place)[0] for place in ((5, 20), (15, 20), (45, 20))]
    [100, 0, 100]
    """

    region: tuple[float, float, float, float]
    fill: str = "mean"

    def __post_init__(self) -> None:
        left, top, right, bottom = self.region
        if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
            raise ExplainError(
                f"region must be x0, y0, x1, y1 from 0 to 1 with x0 < x1 and y0 < y1, got {shown(self.region)}; "
                "draw it on the part of the photo that the model sees"
            )
        if self.fill not in FILLS:
            raise ExplainError(f"fill must be one of {', '.join(FILLS)}, got {shown(self.fill)}; choose one of them")

    def of(self, photo: Image.Image, box: Box) -> Image.Image:
        """Return a copy of a photo with the region covered; ``box`` is the part of the photo that the model sees."""
        edges = self._edges(photo, box)
        if edges is None:
            return photo.copy()
        share = min(1.0, SIDE / max(photo.size))
        small = photo.resize(
            (max(1, round(photo.width * share)), max(1, round(photo.height * share))), Image.Resampling.BOX
        )
        filled = _filled(small, [edge * share for edge in edges], get_baseline(self.fill))
        whole = filled.resize(photo.size, Image.Resampling.BICUBIC)
        covered = photo.copy()
        covered.paste(whole.crop(edges), edges[:2])
        return covered  # it has no file: no record must claim that it is the photo

    def _edges(self, photo: Image.Image, box: Box) -> tuple[int, int, int, int] | None:
        """The region in the photo's pixels; None where there are none."""
        wide, high = box.right - box.left, box.bottom - box.top
        left, right = (min(max(round(box.left + share * wide), 0), photo.width) for share in self.region[::2])
        top, bottom = (min(max(round(box.top + share * high), 0), photo.height) for share in self.region[1::2])
        return (left, top, right, bottom) if left < right and top < bottom else None


def _filled(photo: Image.Image, edges: list[float], fill: Baseline) -> Image.Image:
    x = torch.from_numpy(np.array(photo)).permute(2, 0, 1)[None].float() / 255
    keep = torch.ones(1, 1, *x.shape[2:])
    left, top, right, bottom = edges
    rows = slice(int(top), max(int(top) + 1, -int(-bottom // 1)))
    columns = slice(int(left), max(int(left) + 1, -int(-right // 1)))
    keep[:, :, rows, columns] = 0
    levels = (fill(x, keep)[0].clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
    return Image.fromarray(levels.numpy())


TEXT = 200  # characters of a name
FIELDS = ("photo", "model", "methods", "targets", "layer", "seconds", "cover", "before")
CHECKS = ("curve", "check")


@dataclass(frozen=True)
class ExplainRequest:
    """A question: a photo that was sent, which of the models, and how to explain.

    No ``targets`` are the best class; no ``layer`` is each method's own. ``seconds`` is how long each slow method may
    take, and ``cover`` what is covered first. ``before`` names an answer: its maps are taken where they fit.
    """

    photo: str
    model: int = 0
    methods: tuple[Method, ...] = ()
    targets: tuple[int, ...] = ()
    layer: str | None = None
    seconds: float = 20.0
    cover: RegionRemoval | None = None
    before: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, values: Any, models: int, limits: Limits) -> ExplainRequest:
        """Read a question.

        Raises:
            ExplainError: a field is unknown, missing, or holds what cannot be meant.

        >>> ExplainRequest.of({"photo": "abc", "methods": ["gradcam"], "targets": [3]}, 1, Limits()).targets
        (3,)
        """
        if not isinstance(values, Mapping):
            raise ExplainError(f"question must be an object of JSON, got {shown(values)}; send its fields by name")
        _only(values, FIELDS)
        names = _list("methods", values.get("methods", ["gradcam"]), limits.methods)
        targets = _list("targets", values.get("targets", []), limits.targets)
        return cls(
            photo=_text("photo", values.get("photo")),
            model=whole("model", values.get("model", 0), models),
            methods=_methods(names or ["gradcam"]),
            targets=tuple(whole("target", each, 10**6) for each in targets),
            layer=None if values.get("layer") is None else _text("layer", values["layer"]),
            seconds=_seconds(values.get("seconds", 20.0), limits.seconds),
            cover=None if values.get("cover") is None else _cover(values["cover"]),
            before=None if values.get("before") is None else _text("before", values["before"]),
        )


@dataclass(frozen=True)
class CheckRequest:
    """A question about a map of an answer: its ``curve``, or a ``check``. ``target`` is its place among the answer's.

    >>> CheckRequest.of({"answer": "abc", "what": "check", "method": "gradcam"}, Limits()).target
    0
    """

    answer: str
    what: str
    method: str
    target: int = 0

    @classmethod
    def of(cls, values: Any, limits: Limits) -> CheckRequest:
        """Read a question; errors as `Ask.of`."""
        _only(values, ("answer", "what", "method", "target"))
        what = _text("what", values.get("what"))
        if what not in CHECKS:
            raise ExplainError(f"what must be one of {', '.join(CHECKS)}, got {shown(what)}; choose one of them")
        method, target = _text("method", values.get("method")), whole("target", values.get("target", 0), limits.targets)
        return cls(_text("answer", values.get("answer")), what, method, target)


def _only(values: Mapping[str, Any], fields: Sequence[str]) -> None:
    unknown = sorted(set(map(str, values)) - set(fields))
    if unknown:
        raise ExplainError(f"question must have the fields {', '.join(fields)}, got {shown(unknown[0])}; leave it out")


def _methods(names: Sequence[Any]) -> tuple[Method, ...]:
    """The methods, by plain names: options of theirs could ask for any amount of work."""
    found = [get_method(_text("method", name)) for name in dict.fromkeys(map(str, names)) if _plain(name)]
    return tuple({method.name: method for method in found}.values())


def _plain(name: Any) -> bool:
    if isinstance(name, str) and name.replace("+", "").isalnum():
        return True
    raise ExplainError(f"method must be the name of one, without options, got {shown(name)}; choose from the list")


def _cover(values: Any) -> RegionRemoval:
    if not isinstance(values, Mapping) or not set(values) <= {"region", "fill"}:
        raise ExplainError(f"cover must have a region and a fill, got {shown(values)}; draw a region first")
    region = _list("region", values.get("region"), 4)
    if len(region) != 4 or not all(_is_number(edge) for edge in region):
        raise ExplainError(f"region must be four numbers from 0 to 1, got {shown(region)}; draw it on the photo")
    left, top, right, bottom = map(float, region)
    return RegionRemoval((left, top, right, bottom), _text("fill", values.get("fill", "mean")))


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= TEXT:
        raise ExplainError(
            f"{what} must be a text of 1 to {TEXT} characters, got {shown(value)}; choose it on the page"
        )
    return value


def _list(what: str, value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ExplainError(f"{what} must be a list of at most {most}, got {shown(value)}; ask for fewer at a time")
    return value


def whole(what: str, value: Any, count: int) -> int:
    """A whole number below a count, or an error."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise ExplainError(f"{what} must be a whole number from 0 to {count - 1}, got {shown(value)}; choose another")
    return value


def _seconds(value: Any, most: float) -> float:
    if not _is_number(value) or not 0 < value <= most:
        raise ExplainError(f"seconds must be above 0 and up to {most:g}, got {shown(value)}; choose another time")
    return float(value)


def _is_number(value: Any) -> bool:
    """Whether a number was sent, and no larger one than a float can be."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not abs(value) > sys.float_info.max
