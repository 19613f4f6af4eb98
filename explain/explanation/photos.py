"""Several photos: read as needed, explained in batches, returned in order; each failure is reported for its photo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any

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
AREA = 64_000_000  # pixels of photos that are in memory at once, if they are more than one
NAMED = 3  # failures in one message


@dataclass(frozen=True)
class PhotoRequest:
    """A request for photos: the arguments of `attribute`, and their form in records.

    ``alone`` says that each photo is explained on its own, since the target or a method may treat the images of a batch
    differently. ``of_each`` has one target for each photo, where ``target`` was a list.
    """

    methods: list[Method] | str
    targets: list[Target]
    question: RecordedRequest
    options: Mapping[str, Any]
    alone: bool
    of_each: list[Target] | None = None

    def of(self, photo: Photo) -> PhotoRequest:
        """Return the request for one photo."""
        if self.of_each is None:
            return self
        own = self.of_each[photo.place]
        return replace(self, targets=[own], question=replace(self.question, targets=(asked(own),)), of_each=None)


@dataclass(frozen=True, eq=False)
class Photo:
    """A photo, upright and in RGB, its source, and the model's input ``(1, C, H, W)``; ``name`` is for messages."""

    image: Image.Image = field(repr=False)
    source: str | None
    x: torch.Tensor = field(repr=False)
    name: str = ""
    place: int = 0


def matched(images: Iterable[ImageLike], request: PhotoRequest) -> Iterator[ImageLike]:
    """Yield photos, and check that there are as many as targets, where there is one for each.

    Raises:
        TargetError: there are more photos, or fewer; before the first photo where their number is known.
    """
    if request.of_each is None:
        yield from images
        return
    count, number = len(request.of_each), 0
    known = len(images) if isinstance(images, Sized) else None
    if known in (None, count):
        for number, image in enumerate(images, 1):
            if number > count:
                break
            yield image
    if count != (number if known is None else known):
        raise TargetError(
            f"target must hold one target for each of the {known or number} photos, got {count}; targets= takes "
            "several for every photo"
        )


def in_batches(
    images: Iterable[ImageLike],
    prepare: Callable[[ImageLike, int], Photo],
    explain: Callable[[list[Photo]], list[Any]],
    at_once: int = AT_ONCE,
) -> Iterator[Any]:
    """Explain photos in batches of one shape; yield a result or a `PhotoError` for each, in order.

    Args:
        images: read as they are needed.
        prepare: makes a `Photo` of an image and its place.
        explain: returns a result for each photo of a batch.
        at_once: the largest batch.

    Raises:
        Exception: all of the first photos failed with it, and it is no error of reading them.
    """
    first, succeeded = 0, False
    for window in _windows(images, prepare, at_once):
        results = _results(window, explain)
        window.clear()
        failed = [result for result in results if isinstance(result, Exception)]
        succeeded |= len(failed) < len(results)
        general = [error for error in failed if not isinstance(error, (ImageError, MemoryError))]
        if general and not succeeded:
            raise general[0]
        first += len(results)
        while results:
            place, result = first - len(results), results.pop(0)
            yield _photo_error(result, place) if isinstance(result, Exception) else result


def _windows(
    images: Iterable[ImageLike], prepare: Callable[[ImageLike, int], Photo], at_once: int
) -> Iterator[list[Photo | Exception]]:
    """Yield the photos that are in memory at once; an error in place of one that cannot be read."""
    window: list[Photo | Exception] = []
    area = 0
    for place, image in enumerate(images):
        photo: Photo | Exception
        try:
            photo = prepare(image, place)
            size = photo.image.width * photo.image.height
        except Exception as error:
            photo, size = error, 0
        if window and (len(window) >= at_once or area + size > AREA):
            yield window
            window, area = [], 0
        window.append(photo)
        area += size
    if window:
        yield window


def _results(window: list[Photo | Exception], explain: Callable[[list[Photo]], list[Any]]) -> list[Any]:
    """Return the result or error of each photo; those with inputs of one shape are explained together."""
    results: list[Any] = list(window)
    groups: dict[object, list[int]] = {}
    for place, photo in enumerate(window):
        if isinstance(photo, Photo):
            groups.setdefault((photo.x.shape, photo.x.dtype), []).append(place)
    for places in groups.values():
        for place, result in zip(places, _together([results[place] for place in places], explain), strict=True):
            results[place] = result
    return results


def _together(photos: list[Photo], explain: Callable[[list[Photo]], list[Any]]) -> list[Any]:
    """Return the results of a batch; if it fails, those of each photo alone, so that one cannot spoil the others."""
    try:
        return explain(photos)
    except Exception as error:
        if len(photos) == 1:
            return [error]
    return [result for photo in photos for result in _together([photo], explain)]


def _photo_error(error: Exception, place: int) -> PhotoError:
    made = PhotoError(f"photo {place}: {error if isinstance(error, ExplainError) else raised(error)}")
    made.__cause__ = error
    return made


def collected(found: Iterable[Any]) -> list[Any]:
    """Return the results of all photos.

    Raises:
        PhotosError: some failed; it holds the results of the others.

    >>> collected(iter(["a", "b"]))
    ['a', 'b']
    """
    results = list(found)
    errors = {place: result for place, result in enumerate(results) if isinstance(result, PhotoError)}
    if errors:
        messages = "; ".join(map(str, list(errors.values())[:NAMED])) + ("; ..." if len(errors) > NAMED else "")
        raise PhotosError(
            f"{len(errors)} of {len(results)} photos could not be explained ({messages}); its results has the others",
            [None if place in errors else result for place, result in enumerate(results)],
            errors,
        )
    return results


def rows_are_apart(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether a model's output for an image ``x`` ``(1, C, H, W)`` is the same next to another image as alone.

    It is not where the model normalises over the batch, draws random numbers, or takes one image only.
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
