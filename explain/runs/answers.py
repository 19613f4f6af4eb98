"""What an image-text model answers about every photo of a source, as a run: a row for each word."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from explain._utils.errors import (
    ArgumentError,
    ImageError,
    RunError,
    TargetError,
    collect_warnings,
    naming,
    option_name,
    shown,
)
from explain.answers import Answered, AnswerExplainer
from explain.answers.maps import AGREEMENT, STYLES
from explain.attribution.encoding import encode
from explain.data.boxes import Box
from explain.data.files import distinct
from explain.methods.base import MethodLike, get_method
from explain.runs.job import Job
from explain.runs.labels import Labels
from explain.runs.preparing import Prepared, Preparer
from explain.store.identity import inputs_of, network_identity
from explain.store.manifest import described_method
from explain.store.sources import Source
from explain.store.writing import PhotoRecord
from explain.targets.outputs import Prediction


class Levels:
    """A photo as a tensor of its levels ``(3, H, W)``, which half precision holds exactly."""

    box = staticmethod(Box.whole)

    def __call__(self, photo: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(photo)).permute(2, 0, 1).half()

    def photo(self, levels: torch.Tensor) -> Image.Image:
        """The photo of its levels."""
        return Image.fromarray(levels.byte().permute(1, 2, 0).numpy())


@dataclass(frozen=True)
class WordMethod:
    """A method that explains words, as the file of a run describes it."""

    method: MethodLike
    squares: int
    baseline: Any
    paper = None

    @property
    def name(self) -> str:
        """Its name in results."""
        return str(self.method) if self.method in STYLES else get_method(self.method).name

    @property
    def style(self) -> str:
        """How its maps are drawn."""
        return STYLES.get(self.name) or get_method(self.method).style


class AnswerJob(Job):
    """The answers about every photo of a source. Arguments are those of `explain.run`."""

    explainer: Any
    methods: Any

    def __init__(
        self,
        source: Source,
        asker: Any,
        methods: MethodLike | Iterable[MethodLike] | None,
        *,
        ask: str | None,
        answer: str | None,
        words: str | Sequence[str | int] | None,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        """Check all arguments before a photo is read."""
        for name, value in options.items():
            if value not in (None, ()):  # it was given: these are the defaults
                raise ArgumentError(f"{option_name(name)} has no effect with ask; leave it out")
        if isinstance(asker, nn.Module | str):
            asker = AnswerExplainer(asker, batch_size=batch_size)
        elif batch_size is not None:
            raise ArgumentError(
                "batch_size has no effect on an AnswerExplainer, which takes one itself; leave it "
                "out"
            )
        if not isinstance(asker, AnswerExplainer):
            raise RunError(
                "explainer must be an image-text model with ask, got "
                f"{shown(asker)}; take explain.answers.AnswerExplainer"
            )
        chosen = methods or AGREEMENT
        if isinstance(chosen, str) or not isinstance(chosen, Iterable):
            chosen = [chosen]
        of_words = [WordMethod(method, asker.squares, asker.baseline) for method in chosen]
        self.methods = list({method.name: method for method in of_words}.values())  # each once
        self.source = source
        self.explainer = asker
        self.ask = ask
        self.answer = answer
        self.words = words
        # what `Job.__init__` finds out of a classifier and is of no use here is empty
        self.metrics = []
        self.labels = Labels(None, source.classes)
        self.preparer = Preparer(source, Levels(), window=None)
        self._independent = False  # so that photos come one at a time

    @property
    def _described(self) -> dict[str, Any]:
        """The part of the manifest that says what is explained, and how; with the keys that readers
        of runs expect, also where there is nothing to say."""
        asker: AnswerExplainer = self.explainer
        reader = asker.reader
        prompt = reader.prompt_of(self.ask)

        def pixels_of(picture: Image.Image) -> torch.Tensor:
            """What the processor makes of a picture; of test pictures, it shows whether a run is
            continued with the same processor."""
            return reader.read(picture, prompt).sampling.pixels

        arguments = {"squares": asker.squares, "baseline": encode(asker.baseline)}
        return {
            **network_identity(asker.name, asker.model),
            "explainer": {"class": type(asker).__name__, "arguments": arguments},
            "test_inputs": inputs_of(pixels_of),
            "categories": None,
            "methods": {method.name: described_method(method) for method in self.methods},
            "targets": [],
            "metrics": {},
            "layer": None,
            "ask": self.ask,
            "answer": self.answer,
            "words": self.words,
        }

    def answers(self, photos: Sequence[Any]) -> list[PhotoRecord]:
        """Explain the answer about a single photo, by each method that it lacks."""
        [photo] = photos
        notes: list[str] = []
        rows: list[dict[str, Any]] = []
        columns: dict[str, Any] = {}
        with collect_warnings(notes), naming([photo.entry.name]):
            for method in self.methods:
                if photo.lacking is None or method.name in photo.lacking:
                    answered = self._answered(photo, method.method)
                    rows += self._rows(photo, answered)
                    said = Prediction(answered.answer, answered.probability, category=None)
                    # the same for all methods, which explain the same answer
                    columns = self._columns(photo, probabilities=None, best=said, places=None)
        notes = [*photo.notes, *self.labels.notes(photo.label), *notes]
        is_added = photo.lacking is not None
        return [PhotoRecord(columns, tuple(rows), tuple(notes), added=is_added)]

    def _answered(self, photo: Prepared, method: MethodLike) -> Answered:
        """The answer about a photo, explained by one method."""
        image = Levels().photo(photo.x)
        asked = {"answer": self.answer, "words": self.words, "method": method}
        try:
            answered: Answered = self.explainer(image, self.ask, **asked)
        except TargetError as error:
            if self.answer is not None:
                raise
            # the answer is the model's own, so that the error is about this photo alone
            raise ImageError(str(error)) from error
        return answered

    def _rows(self, photo: Prepared, answered: Answered) -> list[dict[str, Any]]:
        """The columns of ``results`` for each word of an answer. What it rests on is kept as its
        metrics; words that are there several times are numbered."""
        rows = []
        names = distinct(word.text for word in answered.words)
        for word, name in zip(answered.words, names, strict=True):
            # as of a batch of one photo, and NaN where a value is not defined
            figures = {
                key: [math.nan if value is None else value] for key, value in word.figures.items()
            }
            row = self._result(
                word.attribution, image=0, photo=photo, probabilities=None, figures=figures
            )
            rows.append({**row, "target": name, "probability": word.probability})
        return rows
