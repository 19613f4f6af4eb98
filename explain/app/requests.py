"""What comes to the app from anybody: its limits, uploaded photos, requests in JSON, and regions to cover."""

import io
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from math import ceil
from pathlib import PurePosixPath
from typing import Any

import torch
from PIL import Image, ImageOps
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from explain._utils.errors import ExplainError, ImageError, overheard, printable, quiet, shown
from explain.baselines.replacements import get_baseline
from explain.data.boxes import Box
from explain.data.images import load_image
from explain.methods.base import Method, get_method

NAME_LENGTH = 100  # characters of a file name that stay


@dataclass(frozen=True)
class Limits:
    """Bounds that keep one visitor from using up the machine.

    ``upload`` is the largest number of bytes of a photo and ``pixels`` its largest number of pixels, both checked
    before it is decoded. ``photos`` and ``kept_pixels`` limit the photos in memory and their pixels together;
    ``explanations`` and ``kept_values`` limit the answers in memory and the values of their maps together. All of these
    expire after ``age`` seconds without use. ``waiting`` requests may wait for a model; ``decoders`` photos are decoded
    at a time. A request has at most ``body`` bytes, ``methods`` methods and ``targets`` targets, and a slow method may
    take ``seconds``.

    >>> Limits().upload
    33554432
    """

    upload: int = 32 * 2**20
    pixels: int = 50_000_000
    photos: int = 64
    kept_pixels: int = 200_000_000
    explanations: int = 48
    kept_values: int = 100_000_000
    age: float = 3600.0
    waiting: int = 64
    decoders: int = 2
    body: int = 64 * 2**10
    methods: int = 16
    targets: int = 8
    seconds: float = 120.0


class TooLargeError(ImageError):
    """A photo or a request has more bytes or pixels than the app takes."""


def check_size(what: str, count: int, most: int) -> None:
    """Refuse what has too many bytes."""
    if count > most:
        raise TooLargeError(f"{what} must have at most {most / 2**20:g} MiB, got more; make it smaller")


def decode_upload(content: bytes, name: str, limits: Limits) -> Image.Image:
    """Decode an uploaded photo, and return it under its name.

    Raises:
        TooLargeError: it has too many bytes or pixels; it has not been decoded then.
        ImageError: it is no photo, or damaged.

    >>> decode_upload(b"", "cat.jpg", Limits())
    Traceback (most recent call last):
    explain.ImageError: image of 0 bytes is empty (0 bytes); get the file again
    """
    check_size("photo", len(content), limits.upload)
    width = height = 0
    with suppress(Exception), quiet():  # broken files raise nearly anything; `load_image` says what is wrong
        width, height = Image.open(io.BytesIO(content)).size
    if width * height > limits.pixels:
        raise TooLargeError(f"photo must have at most {limits.pixels / 1e6:g} megapixels, got {width} x {height}")
    notes: list[str] = []
    with overheard(notes):
        photo = load_image(content)
    photo.notes = notes  # type: ignore[attr-defined]  # what its answers say of it
    photo.filename = file_name(name)  # type: ignore[attr-defined]  # the name in records
    return photo


def file_name(name: str) -> str:
    r"""Return the last part of a path, without control characters.

    >>> file_name("C:\\photos\\cat.jpg"), file_name("../../etc/passwd"), file_name("/..")
    ('cat.jpg', 'passwd', 'photo')
    """
    last = PurePosixPath(name.replace("\\", "/")).name
    return printable(last)[-NAME_LENGTH:] if last.strip(". ") else "photo"


SIDE = 320
"""The longer side in pixels at which a baseline is computed: about the size of a network's input, as blurs expect."""

FILLS = {"mean": "Mean colour", "zero": "Black", "blur": "Blur", "noise": "Noise", "neighbours": "From around it"}
"""The baselines that the page offers for a covered region, and their names there."""


@dataclass(frozen=True)
class CoveredRegion:
    """A rectangle ``region`` (x0, y0, x1, y1), as shares of the model's view, and the baseline ``fill`` that covers it.

    The baseline works on the photo's own colours, from 0 (black) to 1: "zero" is black for every model.

    >>> grey = Image.new("RGB", (60, 40), (100, 100, 100))
    >>> covered = CoveredRegion((0.0, 0.0, 0.5, 1.0), "zero").apply(grey, Box(10, 0, 50, 40))
    >>> [covered.getpixel(place)[0] for place in ((5, 20), (15, 20), (45, 20))]
    [100, 0, 100]
    """

    region: tuple[float, float, float, float]
    fill: str = "mean"

    def __post_init__(self) -> None:
        left, top, right, bottom = self.region
        if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
            what = "region must be x0, y0, x1, y1 from 0 to 1 with x0 < x1 and y0 < y1"
            raise ExplainError(f"{what}, got {shown(self.region)}; draw it on the part that the model sees")
        if self.fill not in FILLS:
            raise ExplainError(f"fill must be one of {', '.join(FILLS)}, got {shown(self.fill)}; choose one of them")

    def apply(self, photo: Image.Image, box: Box) -> Image.Image:
        """Return a copy of a photo with the region covered; ``box`` is the part of the photo that the model sees."""
        covered = photo.copy()  # without the name of a file: no record must claim that it is the photo
        x0, y0, x1, y1 = self.region
        left = min(max(round(box.left + x0 * box.width), 0), photo.width)
        top = min(max(round(box.top + y0 * box.height), 0), photo.height)
        right = min(max(round(box.left + x1 * box.width), 0), photo.width)
        bottom = min(max(round(box.top + y1 * box.height), 0), photo.height)
        if left < right and top < bottom:
            edges = (left, top, right, bottom)
            covered.paste(self._filled(photo, edges).crop(edges), edges)
        return covered

    def _filled(self, photo: Image.Image, edges: tuple[int, int, int, int]) -> Image.Image:
        """Compute the baseline on a smaller copy, and return it at the photo's size."""
        small = ImageOps.contain(photo, (SIDE, SIDE), Image.Resampling.BOX) if max(photo.size) > SIDE else photo
        share = small.width / photo.width
        left, top, right, bottom = (edge * share for edge in edges)
        x = pil_to_tensor(small)[None] / 255
        keep = torch.ones(1, 1, small.height, small.width)
        rows = slice(int(top), max(int(top) + 1, ceil(bottom)))
        columns = slice(int(left), max(int(left) + 1, ceil(right)))
        keep[:, :, rows, columns] = 0
        levels = (get_baseline(self.fill)(x, keep)[0].clamp(0, 1) * 255).round().byte()
        picture: Image.Image = to_pil_image(levels)
        return picture.resize(photo.size, Image.Resampling.BICUBIC)


CHECKS = ("curve", "check")


@dataclass(frozen=True)
class ExplainRequest:
    """A request to explain a photo with one of the models.

    ``targets`` are classes, names of detections, or texts. Without them, the best class is explained; without
    ``layer``, each method takes its own. A slow method may take ``seconds``. ``cover`` is a region to cover first.
    ``before`` names an earlier answer: its maps are reused where they fit.
    """

    photo: str
    model: int = 0
    methods: tuple[Method, ...] = ()
    targets: tuple[int | str, ...] = ()
    layer: str | None = None
    seconds: float = 20.0
    cover: CoveredRegion | None = None
    before: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, values: Any, models: int, limits: Limits) -> "ExplainRequest":
        """Read a request.

        Raises:
            ExplainError: a field is unknown, missing, or not valid.

        >>> ExplainRequest.of({"photo": "abc", "methods": ["gradcam"], "targets": [3]}, 1, Limits()).targets
        (3,)
        """
        _check_fields(values, cls)
        names = _list("methods", values.get("methods"), limits.methods) or ["gradcam"]
        methods = {method.name: method for method in map(_method, names)}
        targets = [
            _text("target", each) if isinstance(each, str) else whole("target", each, 10**6)
            for each in _list("targets", values.get("targets"), limits.targets)
        ]
        seconds = values.get("seconds", 20.0)
        if not _is_number(seconds) or not 0 < seconds <= limits.seconds:
            raise ExplainError(f"seconds must be above 0 and up to {limits.seconds:g}, got {shown(seconds)}; change it")
        optional = {name: _text(name, values[name]) for name in ("layer", "before") if values.get(name) is not None}
        return cls(
            _text("photo", values.get("photo")),
            whole("model", values.get("model", 0), models),
            tuple(methods.values()),
            tuple(targets),
            seconds=float(seconds),
            cover=None if values.get("cover") is None else _cover(values["cover"]),
            **optional,
        )


@dataclass(frozen=True)
class CheckRequest:
    """A request for the ``curve`` or a ``check`` of a map of an answer. ``target`` is its index among the answer's.

    >>> CheckRequest.of({"answer": "abc", "what": "check", "method": "gradcam"}, Limits()).target
    0
    """

    answer: str
    what: str
    method: str
    target: int = 0

    @classmethod
    def of(cls, values: Any, limits: Limits) -> "CheckRequest":
        """Read a request; errors as of `ExplainRequest.of`."""
        _check_fields(values, cls)
        what = _text("what", values.get("what"))
        if what not in CHECKS:
            raise ExplainError(f"what must be one of {', '.join(CHECKS)}, got {shown(what)}; choose one of them")
        target = whole("target", values.get("target", 0), limits.targets)
        return cls(_text("answer", values.get("answer")), what, _text("method", values.get("method")), target)


def _check_fields(values: Any, kind: type[Any]) -> None:
    """Refuse what is no object of JSON, or has fields that a request of this kind does not have."""
    names = [field.name for field in fields(kind)]
    unknown = sorted(set(map(str, values)) - set(names)) if isinstance(values, Mapping) else [values]
    if unknown:
        raise ExplainError(f"request must be an object with {', '.join(names)}, got {shown(unknown[0])}; send these")


def _method(name: Any) -> Method:
    """Return a method by its plain name: options could ask for any amount of work."""
    if not isinstance(name, str) or not name.replace("+", "").isalnum():
        raise ExplainError(f"method must be a name without options, got {shown(name)}; choose from the list")
    return get_method(_text("method", name))


def _cover(values: Any) -> CoveredRegion:
    _check_fields(values, CoveredRegion)
    region = _list("region", values.get("region"), 4)
    if len(region) != 4 or not all(map(_is_number, region)):
        raise ExplainError(f"region must be four numbers from 0 to 1, got {shown(region)}; draw it on the photo")
    left, top, right, bottom = map(float, region)
    return CoveredRegion((left, top, right, bottom), _text("fill", values.get("fill", "mean")))


def _text(name: str, value: Any, longest: int = 200) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise ExplainError(f"{name} must be a text of 1 to {longest} characters, got {shown(value)}; choose it")
    return value


def _list(name: str, value: Any, most: int) -> list[Any]:
    """Return a list; an empty one where there is none."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > most:
        raise ExplainError(f"{name} must be a list of at most {most}, got {shown(value)}; send fewer at a time")
    return value


def whole(name: str, value: Any, count: int) -> int:
    """Return a whole number from 0 to below ``count``, or refuse it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise ExplainError(f"{name} must be a whole number from 0 to {count - 1}, got {shown(value)}; choose another")
    return value


def _is_number(value: Any) -> bool:
    """Whether a value is a number that fits into a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not abs(value) > sys.float_info.max
