"""One more look at the model: the photos of a run as its inputs, in batches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from explain._utils.errors import ExplainError, RunError, shown
from explain.attribution.records import method_of
from explain.data.images import load_image
from explain.explanation.explainer import Explainer
from explain.methods import Method
from explain.runs.files import source_of
from explain.runs.manifest import digest_of
from explain.runs.preparing import as_input
from explain.runs.reading import Row
from explain.runs.result import Run
from explain.runs.sources import entries_of
from explain.targets import ClassTarget, as_target

BATCH = 32


@dataclass(frozen=True, eq=False)
class Batch:
    """Some photos of a run: their rows, and the inputs ``(N, C, H, W)`` that the model was given."""

    rows: tuple[Row, ...]
    x: torch.Tensor


class RunPhotos:
    """The photos of a run, read again, and the model that explained them.

    Args:
        run: the run.
        explainer: what it was made with; its weights must be the same. Without, photos can be drawn, but not explained.
        source: where photos come from that had no file.

    Raises:
        RunError: the model is not that of the run.
    """

    def __init__(self, run: Run, explainer: Explainer | None = None, source: Any = None) -> None:
        self.run, self._explainer = run, explainer
        if explainer is not None:
            _must_be_of(run, explainer)
        self.source = None if source is None else source_of(source)
        self._places: dict[str, Any] | None = None
        self.missing: dict[str, str] = {}

    @property
    def explainer(self) -> Explainer:
        """What the run was made with.

        Raises:
            RunError: it was not given.
        """
        if self._explainer is None:
            raise RunError("explainer must be given to run the model again, got none; give what the run was made with")
        return self._explainer

    def read(self, row: Row) -> Any:
        """The photo of a row as the source has it: a path, an image or a tensor.

        Raises:
            RunError: it has no file, and the source does not have it.
        """
        if self.source is not None:
            if self._places is None:
                self._places = {entry.name: entry for entry in entries_of(self.source) if hasattr(entry, "where")}
            if row.name in self._places:
                return self.source.read(self._places[row.name]).image
        if row.path is None:
            raise RunError(f"photo {row.name!r} must have a file to be looked at again, but has none; give its source")
        return row.path

    def picture(self, row: Row) -> Image.Image:
        """The photo of a row, to be drawn.

        Raises:
            ExplainError: it cannot be read, or its source has a tensor.
        """
        found = self.read(row)
        if isinstance(found, torch.Tensor):
            raise RunError(f"photo {row.name!r} must be an image to be drawn, but its source has a tensor; give images")
        return load_image(found)

    def batches(self, rows: Iterable[Row], size: int = BATCH) -> Iterator[Batch]:
        """Give rows with their inputs, together where their shapes are the same; photos that are gone are `missing`.

        Raises:
            RunError: the inputs have another size than in the run.
        """
        waiting: dict[torch.Size, list[tuple[Row, torch.Tensor]]] = {}
        for row in rows:
            try:
                x = self._input(row)
            except ExplainError as error:
                self.missing[row.name] = str(error)
                continue
            if tuple(x.shape[-2:]) != tuple(row.input_size):
                raise RunError(
                    f"explainer must make inputs of the size that the run had, {tuple(row.input_size)} for "
                    f"{row.name!r}, got {tuple(x.shape[-2:])}; give the same preprocessing"
                )
            same = waiting.setdefault(x.shape, [])
            same.append((row, x))
            if len(same) == size:
                yield self._joined(waiting.pop(x.shape))
        for same in waiting.values():
            yield self._joined(same)

    def _input(self, row: Row) -> torch.Tensor:
        found = self.read(row)
        if isinstance(found, torch.Tensor):
            return as_input(found)
        return as_input(self.explainer.preprocess(load_image(found)))

    def _joined(self, same: Sequence[tuple[Row, torch.Tensor]]) -> Batch:
        x = self.explainer._placed(torch.stack([x for _, x in same]))
        return Batch(tuple(row for row, _ in same), x)


def _must_be_of(run: Run, explainer: Explainer) -> None:
    made_with, given = run.manifest.get("weights"), digest_of(explainer.model)
    if made_with is not None and given != made_with:
        raise RunError(
            f"explainer must have the weights that the run was made with, {str(made_with)[:12]}, got {given[:12]}; "
            "give the same model"
        )


def class_in(explainer: Explainer, target: int | str) -> tuple[int, str]:
    """The number and the label of a class that is given by either.

    Raises:
        TargetError: there is no such label.
        RunError: it is no class.
    """
    found = as_target(target, explainer.categories)
    if not isinstance(found, ClassTarget) or not isinstance(found.index, int):
        raise RunError(f"target must be one class, as a number or label, got {shown(target)}; give one")
    labels = explainer.categories
    known = labels is not None and 0 <= found.index < len(labels)
    return found.index, labels[found.index] if labels is not None and known else str(found.index)


def class_of(row: Row) -> int | None:
    """The class of a photo: its label, or else what the model says."""
    return row.prediction_class if row.label_class is None else row.label_class


def one_for_each_photo(run: Run, **which: Any) -> Iterator[Row]:
    """The first row of each photo; arguments as for `explain.Run.rows`."""
    seen: set[str] = set()
    for row in run.rows(**which):
        if row.name not in seen:
            seen.add(row.name)
            yield row


def method_in(run: Run, name: str) -> Method:
    """The method of a run with the options that it had.

    Raises:
        ExplainError: it was the caller's own, and is not registered.
    """
    about = run.query("SELECT class, options FROM methods WHERE name = ?", (name,))
    kind, options = next(about)
    return method_of({"method": name, "class": kind, "options": json.loads(options)})
