"""Several photos: read as needed, explained in batches, returned in order; each failure is reported
for its photo."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import nn

from explain._utils.errors import (
    ExplainError,
    ImageError,
    PhotoError,
    PhotosError,
    TargetError,
    raised,
)
from explain._utils.nested import first_tensor
from explain._utils.signals import came_by_signal
from explain.attribution.result import Attribution
from explain.data.images import ImageLike
from explain.explanation.detected import Located
from explain.hooks.preserve import untouched
from explain.targets import Target
from explain.targets.outputs import Prediction

# photos in a batch: on a CPU, larger ones are no faster, and their activations have to fit
AT_ONCE = 8
PASSES = 512  # for one image each, of a batch: results of costly methods come photo by photo
AREA = 64_000_000  # pixels that the photos of one batch may have together, for the memory
WAITING = 2  # how many batches of photos may wait for others of their shape
NAMED = 3  # how many failures one message names

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Photo:
    """A photo, upright and in RGB, with the path of its file and the model's input ``x`` ``(1, C,
    H, W)``. ``name`` is for messages; ``place`` is its number among several photos, from 0."""

    image: Image.Image
    source: str | None
    x: torch.Tensor
    name: str = ""
    place: int = 0


@dataclass(frozen=True, eq=False)
class BatchAnswers:
    """The results for a batch of N photos."""

    results: list[dict[str, Attribution]]
    """For each target, the attributions by method."""
    logits: torch.Tensor | None
    """``(N, K)``, where the model has classes."""
    probabilities: torch.Tensor | None
    """``(N, K)``, where the model has classes."""
    predictions: Sequence[Prediction | None]
    """The best answer for each photo: a class, yes or no, or a number; None where the model gives
    no outputs for classes."""
    located: Sequence[Located | None]
    """Where the targets are in each photo, for a model without class scores, as a detector."""

    def results_of(self, image: int) -> list[dict[str, Attribution]]:
        """Return the attributions of photo number ``image`` in the batch, each as a batch of one:
        for each target, by method. Targets that are boxes or regions get their names in that photo.
        """
        results = self.results
        if len(self.located) > 1:  # else they are a batch of one already
            results = converted(results, itemgetter(image))
        in_photo = self.located[image]
        if in_photo is None:
            return results
        return [
            {name: replace(maps, target=label) for name, maps in of_target.items()}
            for label, of_target in zip(in_photo.names, results, strict=True)
        ]


def converted(
    results: Iterable[Mapping[str, Attribution]], convert: Callable[[Attribution], Attribution]
) -> list[dict[str, Attribution]]:
    """Return attributions, for each target by method, each passed through ``convert``."""
    return [{name: convert(maps) for name, maps in of_target.items()} for of_target in results]


def photos_for_targets(
    images: Iterable[ImageLike], of_each: Sequence[Target] | None
) -> Iterator[ImageLike]:
    """Yield the photos of a call, and check that there are as many as targets ``of_each``, if each
    photo has a target of its own.
    """
    if of_each is None:
        yield from images
        return
    target_count = len(of_each)
    photo_count = len(images) if isinstance(images, Sized) else 0  # of an iterator, counted below
    # a list of another length is refused before any photo is explained
    if photo_count in (0, target_count):
        for photo_count, image in enumerate(images, 1):
            if photo_count > target_count:
                break
            yield image
    if photo_count != target_count:
        raise TargetError(
            f"target must hold one target for each photo, got {target_count} for {photo_count} "
            "photos; targets= takes several for all"
        )


def explained(
    photos: Iterable[T],
    explain: Callable[[list[T]], Iterable[R]],
    *,
    alike: Callable[[T], object],
    at_once: Callable[[T], int],
    apart: Callable[[T], bool],
) -> Iterator[list[tuple[T, R | Exception | None]]]:
    """Yield batches of ``at_once(photo)`` photos with one key ``alike(photo)`` (None: unreadable),
    as they are full, each photo with its result of ``explain``, its own error, or None."""
    is_apart: bool | None = None
    for batch in in_batches(photos, alike, at_once):
        if alike(batch[0]) is None:
            yield [(batch[0], None)]
            continue
        # only a model that answers each photo for itself may take several at once
        if len(batch) > 1 and is_apart is None:
            is_apart = apart(batch[0])
        parts = [batch] if is_apart else [[photo] for photo in batch]
        results = [result for part in parts for result in each_tried(part, explain)]
        yield list(zip(batch, results, strict=True))


def in_batches(
    photos: Iterable[T], alike: Callable[[T], object], at_once: Callable[[T], int]
) -> Iterator[list[T]]:
    """Yield batches of ``at_once(photo)`` photos that share the key ``alike(photo)``; one with the
    key None could not be read, and comes at once. Beyond `WAITING`, the oldest batch goes.
    """
    waiting: dict[object, list[T]] = {}
    for photo in photos:
        key = alike(photo)
        if key is None:
            yield [photo]
            continue
        batch = waiting.setdefault(key, [])
        batch.append(photo)
        full = at_once(photo)
        if len(batch) >= full:
            yield waiting.pop(key)
        elif sum(map(len, waiting.values())) >= WAITING * full:
            yield waiting.pop(next(iter(waiting)))
    yield from waiting.values()


def reported(batches: Iterable[Iterable[tuple[int, Any]]]) -> Iterator[Any]:
    """Yield the result of each photo in the order of their places, with a `PhotoError` instead of
    each error. Each batch has pairs of a photo's place (0, 1, ...) and its result or error.
    """
    succeeded = False
    waiting: dict[int, Any] = {}
    next_place = 0
    for batch in batches:
        results = dict(batch)
        errors = [result for result in results.values() if isinstance(result, Exception)]
        # an error before any success, and of no photo's own, is one of the call: no photo succeeds
        general = [error for error in errors if not isinstance(error, (ImageError, MemoryError))]
        succeeded |= len(errors) < len(results)
        if general and not succeeded:
            raise general[0]
        waiting |= results
        while next_place in waiting:
            result = waiting.pop(next_place)
            if isinstance(result, Exception):
                why = result if isinstance(result, ExplainError) else raised(result)
                named = PhotoError(f"photo {next_place}: {why}")
                named.__cause__ = result
                result = named
            yield result
            next_place += 1


def each_tried(photos: list[T], work: Callable[[list[T]], Iterable[R]]) -> list[R | Exception]:
    """The results of ``work`` for a batch; if it fails, of each photo alone, with its error where
    this fails too. An error that a signal has caused (interrupt, time limit) is raised."""
    try:
        return list(work(photos))
    except Exception as error:
        if came_by_signal(error):
            raise
        if len(photos) == 1:
            return [error]
    return [result for photo in photos for result in each_tried([photo], work)]


def collected(outcomes: Iterable[Any]) -> list[Any]:
    """Return the results of all photos as a list; `PhotosError`, which has them, if some failed."""
    results = list(outcomes)
    errors = {
        place: result for place, result in enumerate(results) if isinstance(result, PhotoError)
    }
    if not errors:
        return results
    messages = "; ".join(map(str, list(errors.values())[:NAMED]))
    if len(errors) > NAMED:
        messages += "; ..."
    message = (
        f"{len(errors)} of {len(results)} photos could not be explained ({messages}); its results "
        "has the others"
    )
    explanations = [None if place in errors else result for place, result in enumerate(results)]
    raise PhotosError(message, explanations, errors)


def samples_are_apart(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether the output for ``x`` ``(1, C, H, W)`` is the same beside its negated mirror image as
    alone; not so for batch statistics, random numbers or models of one image. Two passes.
    """
    try:
        with untouched(model), torch.no_grad():
            alone = first_tensor(model(x.clone()))
            pair = first_tensor(model(torch.cat([x, -x.flip(-1)])))
    except Exception:  # anything that it cannot do with two
        return False
    if (
        alone is None
        or pair is None
        or alone.ndim == 0
        or len(alone) != 1
        or alone.shape[1:] != pair.shape[1:]
    ):
        return False
    # rounding differs with the batch size; the root of the precision is far above that
    coarse = torch.finfo(alone.dtype).eps ** 0.5 if alone.is_floating_point() else 0.0
    return bool((alone[0] - pair[0]).abs().max() <= 10 * coarse * alone.abs().max())
