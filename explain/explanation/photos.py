"""Several photos: read as needed, worked on in batches, returned in order; each failure is reported for its photo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from PIL import Image
from torch import nn

from explain._utils.errors import ExplainError, ImageError, PhotoError, PhotosError, TargetError, raised
from explain._utils.nested import first_tensor
from explain.attribution.records import RecordedRequest, asked
from explain.data.images import ImageLike
from explain.hooks.preserve import untouched
from explain.methods import Method
from explain.targets import Target

AT_ONCE = 8  # photos in a batch: on a CPU, larger ones are no faster, and their activations have to fit
AREA = 64_000_000  # pixels of photos that are held at once, if they are more than one
NAMED = 3  # failures that one message names

Result = TypeVar("Result")


@dataclass(frozen=True)
class PhotoRequest:
    """A question for photos: what `attribute` is called with, and what records say about it.

    ``alone`` says that each photo is explained on its own, since the target or a method may treat the rows of a batch
    differently. ``of_each`` has a target for each photo, if they were given.
    """

    methods: list[Method] | str
    targets: list[Target]
    question: RecordedRequest
    options: Mapping[str, Any]
    alone: bool
    of_each: list[Target] | None = None

    def of(self, photo: Photo) -> PhotoRequest:
        """The question for one photo."""
        if self.of_each is None:
            return self
        own = self.of_each[photo.place]
        return replace(self, targets=[own], question=replace(self.question, targets=(asked(own),)), of_each=None)


@dataclass(frozen=True, eq=False)
class Photo:
    """A photo, upright and in RGB, where it comes from, and what the model is given for it: ``(1, C, H, W)``."""

    image: Image.Image = field(repr=False)
    source: str | None
    x: torch.Tensor = field(repr=False)
    name: str = ""
    """How messages call it."""
    place: int = 0


def matched(images: Iterable[ImageLike], request: PhotoRequest) -> Iterator[ImageLike]:
    """Yield photos, of which there must be as many as targets, if there is one for each.

    Raises:
        TargetError: there are more photos, or fewer; it is raised before the first where their number is known.
    """
    count = None if request.of_each is None else len(request.of_each)

    known, number = len(images) if isinstance(images, Sized) else None, 0
    if count is None or known in (None, count):
        for number, image in enumerate(images, 1):
            if count is not None and number > count:
                break
            yield image
    if count is not None and count != (number if known is None else known):
        raise TargetError(
            f"target must hold one target for each of the {known or number} photos, got {count}; targets= takes "
            "several for every photo"
        )


@dataclass
class _Batches(Generic[Result]):
    """What to do with photos, and whether it has worked for any of them yet."""

    prepare: Callable[[ImageLike, int], Photo]
    work: Callable[[list[Photo]], list[Result]]
    at_once: int
    succeeded: bool = False

    def each(self, images: Iterable[ImageLike]) -> Iterator[Result | PhotoError]:
        for first, window in self._windows(images):
            found = self._results(window)
            del window
            self._check(found)
            for place in range(len(found)):
                result = found.pop(place)
                yield _blamed(result, first + place) if isinstance(result, Exception) else result

    def _windows(self, images: Iterable[ImageLike]) -> Iterator[tuple[int, list[Photo | Exception]]]:
        """The photos that are held at once, with the place of the first."""
        window: list[Photo | Exception] = []
        first = area = 0
        for place, image in enumerate(images):
            photo = self._prepared(image, place)
            size = photo.image.width * photo.image.height if isinstance(photo, Photo) else 0
            if window and (len(window) >= self.at_once or area + size > AREA):
                yield first, window
                window, first, area = [], place, 0
            window.append(photo)
            area += size
        if window:
            yield first, window

    def _prepared(self, image: ImageLike, place: int) -> Photo | Exception:
        try:
            return self.prepare(image, place)
        except Exception as error:
            return error

    def _results(self, window: list[Photo | Exception]) -> dict[int, Result | Exception]:
        """The result of each photo: those whose inputs have the same shape are worked on together."""
        found: dict[int, Result | Exception] = {}
        groups: dict[object, list[tuple[int, Photo]]] = {}
        for place, photo in enumerate(window):
            if isinstance(photo, Exception):
                found[place] = photo
            else:
                groups.setdefault((photo.x.shape, photo.x.dtype), []).append((place, photo))
        for group in groups.values():
            places, photos = zip(*group, strict=True)
            found.update(zip(places, self._together(list(photos)), strict=True))
        return found

    def _together(self, photos: list[Photo]) -> Sequence[Result | Exception]:
        """The results of a batch; if it fails, those of each photo alone, so that one cannot spoil the others."""
        try:
            return self.work(photos)
        except Exception as error:
            if len(photos) == 1:
                return [error]
        return [result for photo in photos for result in self._together([photo])]

    def _check(self, found: dict[int, Result | Exception]) -> None:
        """Raise errors that are not a photo's fault, as long as no result is lost by it."""
        failed = [result for result in found.values() if isinstance(result, Exception)]
        self.succeeded |= len(failed) < len(found)
        general = [error for error in failed if not isinstance(error, (ImageError, MemoryError))]
        if general and not self.succeeded:
            raise general[0]


def in_batches(
    images: Iterable[ImageLike],
    prepare: Callable[[ImageLike, int], Photo],
    work: Callable[[list[Photo]], list[Result]],
    at_once: int = AT_ONCE,
) -> Iterator[Result | PhotoError]:
    """Do the work on photos in batches of one shape; give a result or an error for each, in order.

    Args:
        images: read one after the other, and no more of them than are worked on.
        prepare: makes a `Photo` of an image and its place.
        work: gives a result for each photo of a batch.
        at_once: the largest batch.

    Raises:
        Exception: what ``work`` raises for each of the first photos, since it is hardly their fault.
    """
    return _Batches(prepare, work, at_once).each(images)


def collected(found: Iterable[Result | PhotoError]) -> list[Result]:
    """Return the results of all photos.

    Raises:
        PhotosError: some failed; it holds the results of the others.

    >>> collected(iter(["a", "b"]))
    ['a', 'b']
    """
    results = list(found)
    errors = {place: result for place, result in enumerate(results) if isinstance(result, PhotoError)}
    if errors:
        told = "; ".join(map(str, list(errors.values())[:NAMED])) + ("; ..." if len(errors) > NAMED else "")
        raise PhotosError(
            f"{len(errors)} of {len(results)} photos could not be explained ({told}); its results has the others",
            [None if place in errors else result for place, result in enumerate(results)],
            errors,
        )
    return [result for result in results if not isinstance(result, PhotoError)]


def rows_are_apart(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether a model's output for an image ``x`` ``(1, C, H, W)`` is the same next to another image as alone.

    It does not where it normalises over the batch, draws random numbers, or takes one image only.
    """
    try:
        with untouched(model), torch.no_grad():
            alone, both = (first_tensor(model(rows)) for rows in (x.clone(), torch.cat([x, -x.flip(-1)])))
    except Exception:  # anything that it cannot do with two
        return False
    if alone is None or both is None or alone.ndim == 0 or len(alone) != 1 or alone.shape[1:] != both.shape[1:]:
        return False
    error, scale = (alone[0] - both[0]).abs().max(), alone.abs().max()
    coarse = torch.finfo(alone.dtype).eps ** 0.5 if alone.is_floating_point() else 0.0
    return bool(error <= 10 * coarse * scale)


def _blamed(error: Exception, place: int) -> PhotoError:
    told = str(error) if isinstance(error, ExplainError) else raised(error)
    made = PhotoError(f"photo {place}: {told}")
    made.__cause__ = error
    return made
