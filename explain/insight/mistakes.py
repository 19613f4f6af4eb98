"""Mistakes: which class is taken for which, and what spoke for either; labels that are missed, and
false alarms; evidence that is off the object."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from explain._utils.resources import packaged_text
from explain.attribution.encoding import decode
from explain.insight.maps import Names, fields_of, object_of, shares_of, short
from explain.insight.reattribution import Batch, RunPhotos, one_for_each_photo
from explain.methods.base import MethodLike
from explain.store.reading import Row, StoredRun, Threshold
from explain.targets import ClassTarget, Difference, Predicted
from explain.targets.outputs import THRESHOLD

HALF = 0.5  # share of the sufficient regions that has to lie on the object
MOST_PAIRS = 20
SHOWN = 6  # photos of a pair


@dataclass(frozen=True, eq=False)
class ClassEvidence:
    """What spoke for each of two classes in one photo: ``wrong`` and ``right`` ``(H, W)`` in [0, 1]
    raise that class's score over the other's; ``lead`` is the difference of the scores."""

    row: Row
    wrong: torch.Tensor = field(repr=False)
    right: torch.Tensor = field(repr=False)
    lead: float

    @property
    def common(self) -> float:
        """How much the two maps overlap: 0 to 1, NaN where one is zero. Near 1, both classes were
        read from the same places."""
        wrong, right = shares_of(torch.stack([self.wrong, self.right]))
        return float(torch.minimum(wrong, right).sum())


@dataclass(frozen=True, eq=False)
class Confusion:
    """A class that is taken for another in ``count`` of its ``of`` photos; ``back`` counts the
    reverse. ``spoken`` has the evidence, the surest mistake first, where the model was at hand."""

    label: str
    prediction: str
    label_class: int
    prediction_class: int
    count: int
    of: int
    back: int
    probability: float
    photos: Names
    spoken: tuple[ClassEvidence, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The pair of classes in plain values of JSON, for ``insight.json``; "spoken" has figures
        of the explained photos, without their maps."""
        document = fields_of(self, "label prediction count of back probability photos")
        if self.spoken:
            document["spoken"] = [
                {"name": evidence.row.name, **fields_of(evidence, "lead common")}
                for evidence in self.spoken
            ]
        return document


_PAIRS = packaged_text("explain.insight", "mistakes.sql")
_PHOTOS = (
    "SELECT name FROM photos WHERE label_class = ? AND prediction_class = ? ORDER BY "
    "probability DESC, id LIMIT ?"
)


def pairs(run: StoredRun) -> list[Confusion]:
    """List the classes that are taken for others, the most frequent pair first, `MOST_PAIRS` at
    most; only photos whose label is known count."""
    confusions = []
    for label, prediction, right, wrong, count, sure, of, back in run.query(_PAIRS, (MOST_PAIRS,)):
        photos = Names(name for (name,) in run.query(_PHOTOS, (right, wrong, SHOWN)))
        confusions.append(
            Confusion(
                label=label,
                prediction=prediction,
                label_class=right,
                prediction_class=wrong,
                count=count,
                of=of,
                back=back,
                probability=float(sure),
                photos=photos,
            )
        )
    return confusions


def with_reasons(
    confusions: Sequence[Confusion], photos: RunPhotos, method: MethodLike
) -> list[Confusion]:
    """Explain the mistakes in ``confusions`` for the photos that each names: maps of the difference
    of the two classes' scores, either way round, go into ``spoken``.
    """
    explained = []
    for pair in confusions:
        rows = one_for_each_photo(photos.run, label=pair.label, correct=False)
        spoken = []
        for batch in photos.batches(row for row in rows if row.name in pair.photos):
            spoken += _spoken(batch, pair, photos, method)
        # as the pair names them: the surest mistake first
        spoken.sort(key=lambda evidence: pair.photos.index(evidence.row.name))
        explained.append(replace(pair, spoken=tuple(spoken)))
    return explained


def _spoken(
    batch: Batch, pair: Confusion, photos: RunPhotos, method: MethodLike
) -> list[ClassEvidence]:
    """Explain the mistake ``pair`` in each photo of a batch: a map of what raises the wrong class
    over the right one, and a map of the opposite, both `ClassEvidence`."""
    wrong = ClassTarget(pair.prediction_class)
    right = ClassTarget(pair.label_class)
    for_wrong = photos.attributed(batch, method, Difference(wrong, right))
    for_right = photos.attributed(batch, method, Difference(right, wrong))
    wrong_maps = for_wrong.heatmap.cpu()
    right_maps = for_right.heatmap.cpu()
    leads = for_wrong.score.tolist()  # differences of the two scores, as the target is one
    return [
        ClassEvidence(row, wrong=wrong_maps[number], right=right_maps[number], lead=leads[number])
        for number, row in enumerate(batch.rows)
    ]


@dataclass(frozen=True, eq=False)
class LabelMistakes:
    """One label of several, ``missed`` in ``present`` photos that have it, or predicted
    (``false_alarms``) in ``absent`` ones that do not."""

    label: str
    label_class: int
    present: int
    absent: int
    missed: int
    false_alarms: int
    # its probability by name, the surest mistake first
    missed_photos: Mapping[str, float]
    alarm_photos: Mapping[str, float]
    # what supports it ``(H, W)`` in [0, 1], if the model was at hand
    maps: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def missed_in(self) -> Names:
        """The names of the photos in which the label is missed."""
        return Names(self.missed_photos)

    @property
    def alarm_in(self) -> Names:
        """The names of the photos in which the label is a false alarm."""
        return Names(self.alarm_photos)

    @property
    def kinds(self) -> list[tuple[str, Mapping[str, float]]]:
        """A heading with the counts of each kind of mistake (missed, false alarm), and the label's
        probability in some photos by name. Headings become keys of pictures and captions.
        """
        kinds = [
            (f"{self.label} missed: {self.missed} of {self.present}", self.missed_photos),
            (
                f"{self.label}, false alarm: {self.false_alarms} of {self.absent}",
                self.alarm_photos,
            ),
        ]
        return [(words, photos) for words, photos in kinds if photos]

    def to_dict(self) -> dict[str, Any]:
        """The mistakes of one label in plain values of JSON, for ``insight.json``, without the
        maps."""
        return fields_of(self)


def unknown_labels(run: StoredRun) -> dict[str, int]:
    """Count the photos of each label of the source that is none of the model's, the most frequent
    label first; empty where the model has no labels."""
    if run.manifest["categories"] is None:
        return {}
    counts: Counter[str] = Counter()
    for (labels,) in run.query("SELECT labels FROM photos WHERE labels IS NOT NULL ORDER BY id"):
        counts.update(name for number, name, *_ in json.loads(labels) if number is None)
    return dict(counts.most_common())


def label_thresholds(
    run: StoredRun, threshold: float | Mapping[Any, float] | None
) -> np.ndarray[Any, Any]:
    """Return the probability from which on each label of the run is predicted, ``(K,)``; None takes
    those of the run's target `Predicted`. One number without photos of several labels."""
    if threshold is None:
        for target in run.manifest["targets"]:
            if target.get("class") == Predicted.__name__:
                threshold = decode(target).threshold
    predicted = Predicted(threshold)
    photo = next(run.labelled_photos(), None)
    if photo is None:
        return np.full(1, THRESHOLD)
    return predicted.labelled(run.categories).limits(len(photo.probabilities)).numpy()


def label_mistakes(run: StoredRun, threshold: Threshold) -> list[LabelMistakes] | None:
    """The misses and false alarms (from the probability ``threshold`` on) of each label with any,
    the most first. None for a run in which no photo has several labels that the model knows.
    """
    labelled = 0
    present: Counter[int] = Counter()
    uncertain: Counter[int] = Counter()
    # by label, the label's probability by the name of a photo
    missed_photos: defaultdict[int, dict[str, float]] = defaultdict(dict)
    alarm_photos: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for photo in run.labelled_photos():
        labelled += 1
        uncertain.update(photo.uncertain)
        present.update(photo.true)
        missed, false_alarms = photo.mistakes(threshold)
        for numbers, photos in ((missed, missed_photos), (false_alarms, alarm_photos)):
            for number in numbers:
                photos[number][photo.name] = float(photo.probabilities[number])
    if not present:
        return None
    mistakes = []
    probability = itemgetter(1)
    for number in missed_photos.keys() | alarm_photos.keys():
        # the surest mistakes first: the least probable of those missed
        missed_in = sorted(missed_photos[number].items(), key=probability)
        alarm_in = sorted(alarm_photos[number].items(), key=probability, reverse=True)
        mistakes.append(
            LabelMistakes(
                label=run.label_of(number),
                label_class=number,
                present=present[number],
                absent=labelled - uncertain[number] - present[number],
                missed=len(missed_in),
                false_alarms=len(alarm_in),
                missed_photos=dict(missed_in[:SHOWN]),
                alarm_photos=dict(alarm_in[:SHOWN]),
            )
        )
    return sorted(
        mistakes, key=lambda label: (-label.missed - label.false_alarms, label.label_class)
    )


def with_label_maps(
    mistakes: Sequence[LabelMistakes], photos: RunPhotos, method: MethodLike
) -> list[LabelMistakes]:
    """Explain each label in those of its missed photos and false alarms of which the run has no map
    of that label; the maps go into ``maps``. ``method`` is the run's.
    """
    statement = "SELECT p.name FROM photos p JOIN results r ON r.photo = p.id WHERE r.class = ?"
    explained = []
    for label in mistakes:
        stored = {name for (name,) in photos.run.query(statement, (label.label_class,))}
        wanted = {*label.missed_photos, *label.alarm_photos} - stored
        rows = (row for row in one_for_each_photo(photos.run) if row.name in wanted)
        maps: dict[str, torch.Tensor] = {}
        # where nothing is wanted, the rows of the run need not be gone through
        for batch in photos.batches(rows) if wanted else ():
            of_label = photos.attributed(batch, method, ClassTarget(label.label_class))
            names = [row.name for row in batch.rows]
            maps |= dict(zip(names, of_label.heatmap.cpu(), strict=True))
        explained.append(replace(label, maps=maps))
    return explained


@dataclass(frozen=True)
class OddEvidence:
    """A photo whose smallest evidence is off the object, as ``finding`` says. ``size`` is its share
    of the photo; ``on_object`` its share on the object, NaN where nothing is needed."""

    photo: str
    target: str
    finding: str
    size: float
    on_object: float

    @property
    def name(self) -> str:
        """The end of the photo's name."""
        return short(self.photo)


def odd_evidence(run: StoredRun) -> list[OddEvidence] | None:
    """Photos, worst first: less than half of a `Sufficient` set or nothing of a `Necessary` one in
    their boxes, or the same answer without the photo. None for a run without these methods.
    """
    methods = [name for name in ("sufficient", "necessary") if name in run.methods]
    if not methods:
        return None
    of_rows = [_oddness(row) for name in methods for row in run.rows(name)]
    findings = [finding for finding in of_rows if finding is not None]
    return sorted(findings, key=lambda odd: (odd.finding, odd.on_object))


def _oddness(row: Row) -> OddEvidence | None:
    """What is odd about one evidence map: a sufficient set empty or mostly off the object, or a
    necessary one without a pixel on it. None if nothing is, or no box is known.
    """
    is_sufficient = row.method == "sufficient"  # else necessary
    if is_sufficient and row.metrics.get("set_size") == 0:
        finding = "needs nothing of the photo"
        return OddEvidence(row.name, row.target, finding, size=0.0, on_object=math.nan)
    object_region = object_of(row)
    in_set = row.heatmap > 0
    if not in_set.any() or not object_region.any():
        return None
    share_on_object = float(in_set[object_region].sum() / in_set.sum())
    if is_sufficient and share_on_object < HALF:
        finding = "enough is off the object"
    elif not is_sufficient and share_on_object == 0:
        finding = "needs nothing of the object"
    else:
        return None
    size = float(in_set.float().mean())
    return OddEvidence(row.name, row.target, finding, size=size, on_object=share_on_object)
