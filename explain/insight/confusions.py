"""Mistakes: which classes are taken for which, and what spoke for the wrong one, and for the right one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from explain._utils.errors import overheard
from explain.attribution.api import attribute
from explain.insight.class_statistics import plain, short
from explain.insight.maps import GRID
from explain.insight.reattribution import RunPhotos, one_for_each_photo
from explain.methods.registry import MethodLike
from explain.runs.reading import Row
from explain.runs.result import Run
from explain.targets import ClassTarget, Difference

SHOWN = 6  # photos of a pair


@dataclass(frozen=True, eq=False)
class ClassEvidence:
    """What spoke for each of two classes in one photo.

    ``wrong`` and ``right`` ``(H, W)`` in [0, 1] show what raises the score of the one over that of the other, and
    ``lead`` is the difference of the two scores.
    """

    row: Row
    wrong: torch.Tensor = field(repr=False)
    right: torch.Tensor = field(repr=False)
    lead: float

    @property
    def common(self) -> float:
        """How much of the two maps lies in the same places: 0 to 1. Near 1, the classes were read from one thing."""
        wrong, right = (F.adaptive_avg_pool2d(each[None], GRID)[0] for each in (self.wrong, self.right))
        if not (wrong.any() and right.any()):
            return float("nan")
        return float(torch.minimum(wrong / wrong.sum(), right / right.sum()).sum())


@dataclass(frozen=True, eq=False)
class Confusion:
    """A class that is taken for another: how often, of how many photos of the class, and how sure the model is.

    ``back`` counts the photos of the other class that are taken for this one. ``spoken`` has what spoke for either in
    some photos, the surest mistake first, where the model was at hand.
    """

    label: str
    prediction: str
    label_class: int
    prediction_class: int
    count: int
    of: int
    back: int
    probability: float
    photos: tuple[str, ...]
    spoken: tuple[ClassEvidence, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "label": self.label, "prediction": self.prediction, "count": self.count, "of": self.of, "back": self.back,
            "probability": plain(self.probability), "photos": list(self.photos),
        }  # fmt: skip
        if self.spoken:
            found["spoken"] = [
                {"name": each.row.name, "lead": plain(each.lead), "common": plain(each.common)} for each in self.spoken
            ]
        return found


_PAIRS = """
SELECT label, prediction, label_class, prediction_class, count(*), avg(probability),
       (SELECT count(*) FROM photos a WHERE a.label_class = p.label_class),
       (SELECT count(*) FROM photos b WHERE b.label_class = p.prediction_class
                                        AND b.prediction_class = p.label_class)
FROM photos p WHERE label_class <> prediction_class
GROUP BY label_class, prediction_class ORDER BY count(*) DESC, avg(probability) DESC, label_class, prediction_class
LIMIT ?
"""
_PHOTOS = """
SELECT name FROM photos WHERE label_class = ? AND prediction_class = ? ORDER BY probability DESC, id LIMIT ?
"""


def pairs(run: Run, most: int = 20) -> list[Confusion]:
    """Say which classes are taken for which, the most frequent pair first; photos whose label is known count."""
    found = []
    for label, prediction, right, wrong, count, sure, of, back in run.query(_PAIRS, (most,)):
        photos = tuple(name for (name,) in run.query(_PHOTOS, (right, wrong, SHOWN)))
        found.append(Confusion(label, prediction, right, wrong, count, of, back, float(sure), photos))
    return found


def with_reasons(found: Sequence[Confusion], photos: RunPhotos, method: MethodLike) -> list[Confusion]:
    """Explain the mistakes of some pairs: the difference of the two scores is the target, either way round.

    Args:
        found: the pairs.
        photos: the photos of the run, and the model.
        method: how to explain.

    Raises:
        ExplainError: the method cannot explain the model.
    """
    done = []
    for pair in found:
        wanted = set(pair.photos)
        rows = [row for row in one_for_each_photo(photos.run, label=pair.label, correct=False) if row.name in wanted]
        order = {name: place for place, name in enumerate(pair.photos)}
        spoken = [each for batch in photos.batches(rows) for each in _spoken(pair, batch.rows, batch.x, photos, method)]
        done.append(replace(pair, spoken=tuple(sorted(spoken, key=lambda each: order[each.row.name]))))
    return done


def _spoken(
    pair: Confusion, rows: Sequence[Row], x: torch.Tensor, photos: RunPhotos, method: MethodLike
) -> list[ClassEvidence]:
    wrong, right = ClassTarget(pair.prediction_class), ClassTarget(pair.label_class)
    model = photos.explainer.model
    with overheard([]):  # of maps that are zero: nothing speaks for one of the classes, as the picture shows
        for_wrong = attribute(model, x, method, target=Difference(wrong, right))
        for_right = attribute(model, x, method, target=Difference(right, wrong))
    return [
        ClassEvidence(row, for_wrong.heatmap[i].cpu(), for_right.heatmap[i].cpu(), float(for_wrong.score[i]))
        for i, row in enumerate(rows)
    ]


def table_rows(found: Sequence[Confusion], most: int = 10) -> list[list[str]]:
    """The rows of a table for people: the heading first."""
    head = ["class", "taken for", "photos", "of", "the other way", "probability", "as in"]
    rows = [
        [
            pair.label, pair.prediction, str(pair.count), str(pair.of), str(pair.back), f"{pair.probability:.0%}",
            ", ".join(map(short, pair.photos[:2])),
        ]
        for pair in list(found)[:most]
    ]  # fmt: skip
    return [head, *rows]
