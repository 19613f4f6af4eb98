"""Several photos: read as needed, explained in batches, returned in order; each failure is reported
for its photo."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
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
from explain.attribution.encoding import encode_fields, has_tensor
from explain.attribution.result import Attribution
from explain.data.images import ImageLike
from explain.explanation.detected import Located
from explain.hooks.preserve import untouched
from explain.methods import Method
from explain.methods.base import get_method, list_methods
from explain.targets import ClassTarget, Target, TopClass

# photos in a batch: on a CPU, larger ones are no faster, and their activations have to fit
AT_ONCE = 8
AREA = 64_000_000  # pixels of photos that are in memory at once, if they are more than one
WAITING = 2  # batches of photos that may wait for others of their shape
NAMED = 3  # failures in one message

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class PhotoRequest:
    """What is asked of photos before there are inputs: the arguments of `attribute` that make a
    `Request` of the inputs of each batch.

    ``methods`` are these, or the name of a group, which is resolved by the inputs. ``of_each`` has
    one target for each photo, where ``target`` was a list.
    """

    methods: list[Method] | str
    targets: list[Target]
    options: Mapping[str, Any]
    of_each: list[Target] | None = None

    @cached_property
    def alone(self) -> bool:
        """Whether each photo is explained on its own, since the target or a method may treat the
        images of a batch differently."""
        if any(not isinstance(target, ClassTarget | TopClass) for target in self.targets):
            return True
        methods = self.methods
        if isinstance(methods, str):
            methods = list(map(get_method, list_methods()))
        return any(has_tensor(encode_fields(method)) for method in methods)


@dataclass(frozen=True, eq=False)
class Photo:
    """A photo, upright and in RGB, its source, and the model's input ``(1, C, H, W)``; ``name`` is
    for messages."""

    image: Image.Image
    source: str | None
    x: torch.Tensor
    name: str = ""
    place: int = 0


@dataclass(frozen=True, eq=False)
class BatchAnswers:
    """What a model says of N photos: attributions by method for each target, its class scores and
    probabilities ``(N, K)``, if it gives any; and where the targets are in each photo, if it gives
    none."""

    results: list[dict[str, Attribution]]
    logits: torch.Tensor | None
    probabilities: torch.Tensor | None
    places: Sequence[Located | None]

    def results_of(self, image: int) -> list[dict[str, Attribution]]:
        """The attributions of one photo, a batch of one, by method for each target; boxes and
        regions are called by their names in the photo."""
        results = self.results
        if len(self.places) > 1:
            results = converted(results, itemgetter(image))
        place = self.places[image]
        if place is None:
            return results
        return [
            {name: replace(maps, target=label) for name, maps in of_target.items()}
            for label, of_target in zip(place.names, results, strict=True)
        ]


def converted(
    results: Iterable[Mapping[str, Attribution]], convert: Callable[[Attribution], Attribution]
) -> list[dict[str, Attribution]]:
    """The attributions by method for each target, each converted."""
    return [{name: convert(maps) for name, maps in of_target.items()} for of_target in results]


def photos_for_targets(images: Iterable[ImageLike], request: PhotoRequest) -> Iterator[ImageLike]:
    """Yield photos, and check that there are as many as targets, where there is one for each.

    Raises:
        TargetError: there are more photos, or fewer; before the first photo where their number is
            known.
    """
    if request.of_each is None:
        yield from images
        return
    count = len(request.of_each)
    number = len(images) if isinstance(images, Sized) else 0
    if number in (0, count):
        for number, image in enumerate(images, 1):
            if number > count:
                break
            yield image
    if number != count:
        raise TargetError(
            f"target must hold one target for each photo, got {count} for {number} photos; "
            "targets= takes several for all"
        )


def explained(
    photos: Iterable[T],
    explain: Callable[[list[T]], Iterable[R]],
    *,
    alike: Callable[[T], object],
    at_once: Callable[[T], int],
    apart: Callable[[T], bool],
) -> Iterator[list[tuple[T, R | Exception | None]]]:
    """Explain photos in batches, as they come: each photo of a batch with its result, or with its
    own error.

    Args:
        photos: read as they are needed; those that could not be read may be among them.
        explain: returns a result for each photo of a batch.
        alike: what the photos of a batch have in common, such as the shape of their inputs; None of
            a photo that failed already, which is passed on with None.
        at_once: how many photos like this one make a batch.
        apart: whether a photo like this one gives the same beside others as alone; asked once.

    >>> list(
    ...     explained(
    ...         [1, 0],
    ...         lambda few: [1 / x for x in few],
    ...         alike=type,
    ...         at_once=lambda x: 8,
    ...         apart=bool,
    ...     )
    ... )
    [[(1, 1.0), (0, ZeroDivisionError('division by zero'))]]
    """
    is_apart: bool | None = None
    for batch in in_batches(photos, alike, at_once):
        if alike(batch[0]) is None:
            yield [(batch[0], None)]
            continue
        if len(batch) > 1 and is_apart is None:
            is_apart = apart(batch[0])
        parts = [batch] if is_apart else [[photo] for photo in batch]
        results = [result for part in parts for result in each_tried(part, explain)]
        yield list(zip(batch, results, strict=True))


def in_batches(
    photos: Iterable[T], alike: Callable[[T], object], at_once: Callable[[T], int]
) -> Iterator[list[T]]:
    """Group photos as they come; those that failed already are passed on at once."""
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
    """Yield results in the order of their places, and a `PhotoError` for each error.

    Raises:
        Exception: no photo could be explained before this error, and it is none of reading a photo.
    """
    succeeded = False
    waiting: dict[int, Any] = {}
    next_place = 0
    for batch in batches:
        results = dict(batch)
        errors = [result for result in results.values() if isinstance(result, Exception)]
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
    """Do the work on a batch; if it fails, on each photo alone, so that one cannot spoil the
    others.

    >>> each_tried([1, 0], lambda numbers: [1 / number for number in numbers])
    [1.0, ZeroDivisionError('division by zero')]
    """
    try:
        return list(work(photos))
    except Exception as error:
        if came_by_signal(error):
            raise
        if len(photos) == 1:
            return [error]
    return [result for photo in photos for result in each_tried([photo], work)]


def collected(outcomes: Iterable[Any]) -> list[Any]:
    """Return the results of all photos.

    Raises:
        PhotosError: some failed; it holds the results of the others.

    >>> collected(iter(["a", "b"]))
    ['a', 'b']
    """
    results = list(outcomes)
    errors = {
        place: result for place, result in enumerate(results) if isinstance(result, PhotoError)
    }
    if not errors:
        return results
    messages = "; ".join(map(str, list(errors.values())[:NAMED])) + "; ..." * (len(errors) > NAMED)
    message = (
        f"{len(errors)} of {len(results)} photos could not be explained ({messages}); its results "
        "has the others"
    )
    explanations = [None if place in errors else result for place, result in enumerate(results)]
    raise PhotosError(message, explanations, errors)


def rows_are_apart(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether a model's output for an image ``x`` ``(1, C, H, W)`` is the same next to another
    image as alone.

    It is not where the model normalises over the batch, draws random numbers, or takes one image
    only.
    """
    try:
        with untouched(model), torch.no_grad():
            alone = first_tensor(model(x.clone()))
            both = first_tensor(model(torch.cat([x, -x.flip(-1)])))
    except Exception:  # anything that it cannot do with two
        return False
    if (
        alone is None
        or both is None
        or alone.ndim == 0
        or len(alone) != 1
        or alone.shape[1:] != both.shape[1:]
    ):
        return False
    coarse = torch.finfo(alone.dtype).eps ** 0.5 if alone.is_floating_point() else 0.0
    return bool((alone[0] - both[0]).abs().max() <= 10 * coarse * alone.abs().max())
