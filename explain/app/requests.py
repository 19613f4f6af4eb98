"""What comes to the app from anybody: its limits, uploaded photos, requests in JSON, and regions to
cover."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf
from pathlib import PurePosixPath
from typing import Any, ClassVar, Literal, TypeVar

import torch
from PIL import Image, ImageOps
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from explain._utils.errors import (
    ExplainError,
    ImageError,
    collect_warnings,
    printable,
    shown,
)
from explain._utils.options import CheckedFields, register_reader
from explain.baselines.replacements import get_baseline
from explain.data.bands import Bands
from explain.data.boxes import Box
from explain.data.greys import NO_CONTRAST, Window, has_contrast
from explain.data.images import load_image
from explain.data.limits import TooLargeError
from explain.methods.base import Method, get_method
from explain.models import preprocessing

NAME_LENGTH = 100  # characters of a file name that stay


@dataclass(frozen=True)
class Limits:
    """Bounds that keep one visitor from using up the machine. Visitors are told apart by their
    network addresses."""

    upload: int = 32 * 2**20
    """Bytes of a photo at most, checked before it is decoded."""
    pixels: int = 50_000_000
    """Pixels of a photo at most, checked before it is decoded."""
    photos: int = 64
    """Photos in memory."""
    kept_pixels: int = 200_000_000
    """Pixels of all photos in memory."""
    explanations: int = 48
    """Answers in memory."""
    kept_values: int = 100_000_000
    """Values of the maps of all answers in memory."""
    age: float = 3600.0
    """Seconds after which photos and answers that nobody used expire."""
    waiting: int = 64
    """Requests that may wait for a model."""
    decoders: int = 3
    """Photos that are decoded at a time, all but one of them for the same visitor."""
    body: int = 64 * 2**10
    """Bytes of a request."""
    arrival: float = 120.0
    """Seconds in which all that is sent with a request must arrive."""
    pending: int = 512 * 2**20
    """Bytes of all that arrives or is being read, half of them from one visitor."""
    methods: int = 16
    """Methods of a request."""
    targets: int = 8
    """Targets of a request."""
    seconds: float = 120.0
    """Seconds that a slow method may take."""


class TooSlowError(ExplainError):
    """A photo or a request has not arrived in time."""


class BusyError(ExplainError):
    """Too many requests wait or arrive already."""


def check_byte_count(what: str, count: int, max_bytes: int) -> None:
    """Refuse a request's body (``what`` in the message) of more than ``max_bytes``, by the bytes so
    far as each part arrives, so that no more is kept; replied with status 413.
    """
    if count > max_bytes:
        raise TooLargeError(
            f"{what} must have at most {max_bytes / 2**20:g} MiB, got more; make it smaller"
        )


def decode_upload(
    content: bytes, name: str, limits: Limits, window: Window | Bands | None = None
) -> Image.Image:
    """Decode a photo, with attributes ``filename`` (``name``, from the browser) and ``notes``,
    warnings about the file; ``window`` is a scan's range. Too many bytes are not decoded."""
    check_byte_count("photo", len(content), limits.upload)
    notes: list[str] = []
    base_name = file_name(name)
    try:
        with collect_warnings(notes):
            photo = load_image(content, window, max_pixels=limits.pixels)
    except ImageError as error:
        raise type(error)(f"{base_name}: {error}") from error
    if not has_contrast(photo) and NO_CONTRAST not in notes:
        notes.append(NO_CONTRAST)
    photo.notes = notes  # type: ignore[attr-defined]  # what its answers say of it
    photo.filename = base_name  # type: ignore[attr-defined]  # the name in records
    return photo


def file_name(name: str) -> str:
    """The last part of the path that a browser of any system sent, without control characters, or
    "photo". The path may be hostile: the name is for display, never to open a file."""
    last = PurePosixPath(name.replace("\\", "/")).name
    return printable(last)[-NAME_LENGTH:] if last.strip(". ") else "photo"


SIDE = 320
"""The longer side in pixels at which a baseline is computed: about the size of a network's input,
as blurs expect."""

FILLS = {
    "mean": "Mean colour",
    "zero": "Black",
    "blur": "Blur",
    "noise": "Noise",
    "neighbours": "From around it",
}
"""The baselines that the page offers for a covered region, and their names there."""


CROPS: dict[str, preprocessing.CropLike] = {"": "center", "square": 1.0, "whole": "whole"}
"""The parts of a photo that the page offers: as the model was made for it, or another ``crop``."""


@dataclass(frozen=True)
class CoveredRegion(CheckedFields):
    """A rectangle to cover before the photo is explained. ``fill`` works on the photo's own
    colours, from 0 (black) to 1: "zero" is black for every model."""

    region: tuple[float, float, float, float]
    """x0, y0, x1, y1, as shares of what the model sees."""
    fill: Literal["mean", "zero", "blur", "noise", "neighbours"] = "mean"

    name: ClassVar[str] = "cover"
    error: ClassVar[type[ExplainError]] = ExplainError

    def __post_init__(self) -> None:
        """Check the fields of the covered region in a request of the page: their types, and that
        the corners are shares from 0 to 1 in order.
        """
        super().__post_init__()
        left, top, right, bottom = self.region
        if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
            raise ExplainError(
                "region must be x0, y0, x1, y1 from 0 to 1 with x0 < x1 and y0 < y1, got "
                f"{shown(self.region)}; draw it on the part that the model sees"
            )

    def apply(self, photo: Image.Image, box: Box) -> Image.Image:
        """A copy of a photo with the region, as shares of ``box`` (pixels that the model sees),
        covered; the baseline is computed at `SIDE` pixels, and enlarged.
        """
        # without the name of a file: no record must claim that it is the photo
        covered = photo.copy()
        # (1, 1): the region is in shares of the box, not in pixels of an input
        left, top, right, bottom = map(round, box.to_photo(self.region, (1, 1)))
        small = photo
        if max(photo.size) > SIDE:
            small = ImageOps.contain(photo, (SIDE, SIDE), Image.Resampling.BOX)
        scale = small.width / photo.width
        x = pil_to_tensor(small)[None] / 255
        kept = torch.ones_like(x[:, :1])  # 0 where the baseline takes the photo's place
        rows = slice(max(0, int(top * scale)), ceil(bottom * scale))
        columns = slice(max(0, int(left * scale)), ceil(right * scale))
        kept[..., rows, columns] = 0
        levels = (get_baseline(self.fill)(x, kept)[0].clamp(0, 1) * 255).round().byte()
        filled = to_pil_image(levels).resize(photo.size, Image.Resampling.BICUBIC)
        corners = (left, top, right, bottom)
        covered.paste(filled.crop(corners), corners)
        return covered


def _region(values: Any) -> Any:
    """The `CoveredRegion` of a JSON object: requests are checked as options are. Anything else is
    returned as it is, and refused there.
    """
    has_region = isinstance(values, Mapping) and "region" in values
    return CoveredRegion(**values) if has_region else values


register_reader(CoveredRegion, "a region and its fill", _region)


@dataclass(frozen=True)
class ExplainRequest(CheckedFields):
    """A request to explain a photo with one of the models. Two requests are equal if their methods
    and targets can share an answer."""

    photo: str = ""
    model: int = 0
    methods: tuple[str, ...] = field(default=(), compare=False)
    targets: tuple[int | str, ...] = field(default=(), compare=False)
    """Classes, names of detections, or texts; without any, the best class is explained."""
    layer: str | None = None
    """None: each method takes its own."""
    crop: Literal["", "square", "whole"] = ""
    """The part of the photo that the model sees, one of `CROPS`."""
    seconds: float = 20.0
    """What a slow method may take."""
    cover: CoveredRegion | None = None
    """A region to cover first."""
    earlier: str = field(default="", compare=False)
    """The name of an earlier answer, whose maps are reused where they fit."""

    name: ClassVar[str] = "request"
    error: ClassVar[type[ExplainError]] = ExplainError
    minimums: ClassVar[Mapping[str, float]] = {"model": 0, "targets": 0}
    below: ClassVar[Mapping[str, float]] = {"seconds": inf}

    @classmethod
    def of(cls, values: Any, models: int, limits: Limits) -> "ExplainRequest":
        """Make a request of the JSON object that the page sent, and check it against the limits.
        ``models`` is how many models the app has."""
        request = read_request(cls, values)
        amounts = {
            "model": (request.model, models - 1),
            "methods": (len(request.chosen), limits.methods),
            "targets": (len(request.targets), limits.targets),
            "seconds": (request.seconds, limits.seconds),
        }
        for name, (amount, largest) in amounts.items():
            if amount > largest:
                raise ExplainError(
                    f"{name} of request must be at most {largest:g}, got {amount:g}; use the page"
                )
        return request

    @cached_property
    def chosen(self) -> dict[str, Method]:
        """The methods of the request by their names; "gradcam" where it names none.
        Names with options are refused: options could ask for any amount of work.
        """
        for name in self.methods:
            if not name.replace("+", "").isalnum():
                raise ExplainError(
                    f"method must be a name without options, got {shown(name)}; choose from the "
                    "list"
                )
        return {method.name: method for method in map(get_method, self.methods or ("gradcam",))}


@dataclass(frozen=True)
class CheckRequest(CheckedFields):
    """A request for the ``curve`` or a ``check`` of a map of an answer. ``target`` is its index
    among the answer's."""

    answer: str = ""
    what: Literal["curve", "check"] = "curve"
    method: str = "gradcam"
    target: int = 0

    name: ClassVar[str] = "request"
    error: ClassVar[type[ExplainError]] = ExplainError
    minimums: ClassVar[Mapping[str, float]] = {"target": 0}


LONGEST = 1000  # letters of a question


@dataclass(frozen=True)
class AskRequest(CheckedFields):
    """A question about a photo; empty for captioners."""

    photo: str = ""
    ask: str = ""

    name: ClassVar[str] = "request"
    error: ClassVar[type[ExplainError]] = ExplainError

    def __post_init__(self) -> None:
        """Check the fields, and the length of the question."""
        super().__post_init__()
        if len(self.ask) > LONGEST:
            raise ExplainError(
                f"ask must have at most {LONGEST} letters, got {len(self.ask)}; shorten it"
            )


@dataclass(frozen=True)
class EvidenceRequest(CheckedFields):
    """A request for the smallest evidence of a ``word`` of what was ``answered``."""

    answered: str = ""
    word: int = 0
    kind: Literal["sufficient", "necessary"] = "sufficient"

    name: ClassVar[str] = "request"
    error: ClassVar[type[ExplainError]] = ExplainError
    minimums: ClassVar[Mapping[str, float]] = {"word": 0}


R = TypeVar("R", bound=CheckedFields)


def read_request(kind: type[R], values: Any) -> R:
    """Make a request, of the class ``kind``, of a JSON object that the page sent. Fields that are
    null get their defaults."""
    if not isinstance(values, Mapping):
        raise ExplainError(f"request must be an object of JSON, got {shown(values)}; use the page")
    try:
        return kind(**{name: value for name, value in values.items() if value is not None})
    except ExplainError as error:
        raise ExplainError(f"{error}; use the page") from error
