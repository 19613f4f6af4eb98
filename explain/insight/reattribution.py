"""One more look at the model: the photos of a run as its inputs, in batches."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from explain._utils.errors import ExplainError, RunError, muted, shown, warn
from explain.attribution.api import attribute
from explain.attribution.encoding import method_of
from explain.attribution.result import Attribution
from explain.data.boxes import as_input
from explain.explanation.explainer import Explainer
from explain.explanation.photos import in_batches
from explain.methods import Method
from explain.methods.base import MethodLike
from explain.store.identity import preprocessing_identity
from explain.store.lists import source_of
from explain.store.manifest import alike, changes_in_words, digest_of_model
from explain.store.reading import PhotoReader, Row, StoredRun
from explain.targets import ClassTarget, Target, as_target

BATCH = 32


@dataclass(frozen=True, eq=False)
class Batch:
    """Some photos of a run: their rows, and the inputs ``(N, C, H, W)`` that the model was
    given."""

    rows: tuple[Row, ...]
    x: torch.Tensor


class RunPhotos(PhotoReader):
    """The photos of a run, read again, and the model that explained them.

    Args:
        run: the run.
        explainer: what it was made with; its weights and preprocessing must be the same. Without,
            photos can be drawn, but not explained.
        source: where the photos are, if they had no file or it has moved.

    Raises:
        RunError: the model or the preprocessing is not that of the run.
    """

    def __init__(
        self, run: StoredRun, explainer: Explainer | None = None, source: Any = None
    ) -> None:
        """Keep a run and its explainer; refuse an explainer that is not that of the run. Without
        one, photos can only be drawn."""
        super().__init__(run, source)
        self._explainer = explainer
        # the reason for each photo that cannot be read, by its name
        self.missing: dict[str, str] = {}
        self._told: set[str] = set()  # those of which a warning was given
        if explainer is not None:
            _check_explainer(explainer, run.manifest)

    @property
    def explainer(self) -> Explainer:
        """The explainer that the run was made with.

        Raises:
            RunError: it was not given.
        """
        if self._explainer is None:
            raise RunError(
                "explainer must be given to run the model again, got none; give what the run was "
                "made with"
            )
        return self._explainer

    def batches(self, rows: Iterable[Row] | None = None, size: int = BATCH) -> Iterator[Batch]:
        """Read photos of the run again: rows with their inputs, in batches of one shape, of
        ``size`` photos at most. None takes one row of each photo. Photos that cannot be read are
        left out, and named in ``missing``; a warning says how many.

        Raises:
            RunError: the inputs have another size than in the run.
        """
        chosen = one_for_each_photo(self.run) if rows is None else rows
        pairs = filter(None, map(self._pair, chosen))  # of a row and its input
        for alike_pairs in in_batches(pairs, lambda pair: pair[1].shape, lambda _: size):
            x = self.explainer.batch([x for _, x in alike_pairs])
            yield Batch(tuple(row for row, _ in alike_pairs), x)
        self.tell_missing()

    def first(self) -> Batch:
        """The first photo of the run that can be read, in a batch of its own.

        Raises:
            RunError: there is none.
        """
        batch = next(self.batches(self.run.rows(), 1), None)
        if batch is None:
            raise RunError("run must have a photo that can be read, got none; give source=")
        return batch

    def attributed(self, batch: Batch, method: MethodLike, target: Target) -> Attribution:
        """The maps of a batch for a target. Nothing is told of maps that are zero, where nothing
        supports it."""
        with muted():
            return attribute(self.explainer.model, batch.x, method, target=target)

    def tell_missing(self) -> None:
        """Warn of photos that could not be read again, once of each."""
        new = [name for name in self.missing if name not in self._told]
        self._told.update(new)
        if new:
            rest = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
            warn(f"photo {new[0]!r}{rest} is left out: {self.missing[new[0]]}")

    def _pair(self, row: Row) -> tuple[Row, torch.Tensor] | None:
        """Read the photo of a row, and return the row with its input ``(C, H, W)``; None where the
        photo cannot be read, which is noted in ``self.missing``."""
        if row.stack:
            raise RunError(
                "run must be of photos where the model runs again, got volumes; leave out explainer"
            )
        try:
            photo = self.read(row)
            x = as_input(
                photo if isinstance(photo, torch.Tensor) else self.explainer.preprocess(photo)
            )
        except ExplainError as error:
            self.missing[row.name] = str(error)
            return None
        if tuple(x.shape[-2:]) != tuple(row.input_size):
            raise RunError(
                f"explainer must make inputs of the run's size, {tuple(row.input_size)} for "
                f"{row.name!r}, got {tuple(x.shape[-2:])}; give the same preprocessing"
            )
        return row, x


def _check_explainer(explainer: Explainer, manifest: Mapping[str, Any]) -> None:
    """Refuse an explainer whose weights, or whose preprocessing of the test pictures, are not those
    in the manifest of a run."""
    if digest_of_model(explainer.model) != manifest["weights"]:
        raise RunError(
            "explainer must have the weights that the run was made with; give the same model"
        )
    current = preprocessing_identity(explainer)
    # of a caller's function, nothing is known but what it makes of some test pictures; it may do
    # the same as options do to the photos of the run alone
    comparable = _is_own(current) == _is_own(manifest)
    if comparable and not alike("test_inputs", manifest["test_inputs"], current["test_inputs"]):
        stored = {name: manifest[name] for name in current}
        raise RunError(
            "explainer must preprocess photos as in the run, but "
            f"{'; '.join(changes_in_words(stored, current))}; give the same preprocessing"
        )


def _is_own(identity: Mapping[str, Any]) -> bool:
    """Whether a manifest, or `preprocessing_identity`, says that the preprocessing is a function of
    the caller's, of which nothing but its results can be compared."""
    return "preprocess" in identity["explainer"]["from_caller"]


def in_parts(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply ``function`` to photos ``(N, C, H, W)`` in batches of `BATCH`, without gradients, and
    return the joined results on the CPU."""
    with torch.inference_mode():
        return torch.cat([function(part).cpu() for part in torch.split(x, BATCH)])


def class_in(explainer: Explainer, target: int | str) -> tuple[int, str]:
    """Return the number and the label of a class of the model that the caller gives as either; the
    number as text where the model has no label for it.
    """
    resolved = as_target(target, explainer.categories)
    if not isinstance(resolved, ClassTarget) or not isinstance(resolved.index, int):
        raise RunError(
            f"target must be one class, as a number or label, got {shown(target)}; give one"
        )
    number = resolved.index
    labels = explainer.categories or ()
    return number, labels[number] if 0 <= number < len(labels) else str(number)


def class_of(row: Row) -> int | None:
    """The class that a photo of a run counts for: its label, or the prediction where no label is
    known."""
    return row.prediction_class if row.label_class is None else row.label_class


def class_tensor(numbers: Iterable[int | None]) -> torch.Tensor:
    """Return class numbers as an integer tensor ``(N,)``, with -1, which equals no class, for
    None."""
    return torch.tensor([-1 if number is None else number for number in numbers])


def one_for_each_photo(run: StoredRun, **which: Any) -> Iterator[Row]:
    """Give the first row (map) of each photo of a run, for those who want photos rather than maps;
    arguments as for `explain.Run.rows`."""
    seen: set[str] = set()
    for row in run.rows(**which):
        if row.name not in seen:
            seen.add(row.name)
            yield row


def method_in(run: StoredRun, name: str) -> Method:
    """Return a method of a run, made again of its stored name and options.
    Raises `ExplainError` if it was the caller's own, and is not registered.
    """
    (options,) = next(run.query("SELECT options FROM methods WHERE name = ?", (name,)))
    return method_of(name, json.loads(options))


def images_of(photos: Any, name: str) -> list[Any]:
    """Return the images of all photos of a source, such as a folder; ``name`` is that of the
    caller's argument, for messages.
    """
    source = source_of(photos)
    images = []
    for entry in source.entries():
        if entry.problem is not None:
            raise RunError(
                f"{name} must be readable, but {entry.name!r} is not ({entry.problem}); remove it"
            )
        images.append(source.read(entry).image)
    return images
