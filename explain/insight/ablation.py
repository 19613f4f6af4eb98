"""Whether a finding is true: cover the evidence, the object or all else, and see how many answers
change."""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from explain._utils.errors import RunError, check_choice, shown
from explain.baselines.replacements import BaselineLike, get_baseline
from explain.insight.maps import chosen_from, fields_of, in_percent, json_value, object_of
from explain.insight.mistakes import Confusion
from explain.insight.reattribution import Batch, RunPhotos, class_tensor, one_for_each_photo
from explain.methods.base import MethodLike
from explain.store.reading import Row
from explain.targets import ClassTarget, Difference

SHARE = 0.1
"""The share of the pixels of a photo that are covered as its evidence, by default."""
PARTS = {
    "evidence": "without the {share} of the pixels with most evidence",
    "object": "without the object, {share} of the pixels",
    "background": "without all but the object, {share} of the pixels",
    "mistake": "without the {share} of the pixels that spoke most for the wrong class",
}
NOTHING = (
    "wanted must name photos of the run that can be read and have that part, got none; "
    "choose others"
)
Masks = Callable[[Batch], torch.Tensor]
"""Returns which pixels of the photos of a batch to cover, a bool tensor ``(N, H, W)``."""


@dataclass(frozen=True, eq=False)
class AblationResult:
    """What covering a part of some photos did to the answers: for photos as they are, without the
    part, and without an equal area elsewhere (control), so that it counts what is covered."""

    # "evidence", "object", "background" or "mistake"
    what: str
    # the name and the target of each photo
    keys: tuple[tuple[str, str], ...] = field(repr=False)
    # ``(N,)`` each: the class that is asked about, and that of the label, -1 for none
    wanted: torch.Tensor = field(repr=False)
    labels: torch.Tensor = field(repr=False)
    # ``(N, 3)``: the classes that the model gave; the control covers the area half a photo further
    # down and to the right, around the border
    answers: torch.Tensor = field(repr=False)
    # ``(N,)``: how much of the photo the part is
    covered: torch.Tensor = field(repr=False)

    @property
    def photos(self) -> int:
        """The number of maps that count: photos, each with one target."""
        return len(self.keys)

    @property
    def share(self) -> float:
        """The mean share of a photo that the part covers."""
        return float(self.covered.mean())

    @property
    def gives_class(self) -> torch.Tensor:
        """Whether the model gave the class that is asked about, ``(N, 3)``: of the photo as it is,
        without the part, and without the same area elsewhere."""
        return self.answers == self.wanted[:, None]

    @property
    def _shares(self) -> tuple[float, ...]:
        """The shares of photos whose class the model gave: as they are, without the part, and
        without the same area elsewhere."""
        return tuple(self.gives_class.double().mean(0).tolist())

    @property
    def intact(self) -> float:
        """The share of photos whose class the model gives as they are."""
        return self._shares[0]

    @property
    def after(self) -> float:
        """The share of photos whose class the model gives without the part."""
        return self._shares[1]

    @property
    def control(self) -> float:
        """The share of photos whose class the model gives without the same area elsewhere."""
        return self._shares[2]

    @property
    def chance(self) -> float:
        """The probability that ``after`` falls as far below ``control`` by chance, by McNemar's
        test."""
        # among the photos where the two differ, each is as likely to be the one that changes
        _, after, control = self.gives_class.unbind(1)
        return sign_test(control, after)

    @property
    def accuracy(self) -> tuple[float, ...]:
        """The shares of photos whose label the model gave, in the order of `intact`, `after` and
        `control`; NaN where no label is known."""
        right = (self.answers == self.labels[:, None])[self.labels >= 0]
        return tuple(right.double().mean(0).tolist())

    def of(self, wanted: Collection[tuple[str, str]]) -> "AblationResult":
        """Return the result for those photos only that ``wanted`` names, as pairs of name and
        target; the model does not run again.
        """
        keys = set(wanted)
        chosen = [number for number, key in enumerate(self.keys) if key in keys]
        if not chosen:
            raise RunError(NOTHING)
        return chosen_from(self, chosen, "keys wanted labels answers covered")

    def to_dict(self) -> dict[str, Any]:
        """The figures of an ablation in plain values of JSON, without those of single photos;
        "before" is `intact`."""
        return {
            **fields_of(self, "what photos share"),
            "before": json_value(self.intact),
            **fields_of(self, "after control chance accuracy"),
        }

    def __str__(self) -> str:
        """The outcome of an ablation in one line, for the terminal."""
        part = PARTS[self.what].format(share=in_percent(self.share))
        after = (
            f"{in_percent(self.after)} {part}, {in_percent(self.control)} without as many elsewhere"
        )
        intact = f"{self.photos} photos: {in_percent(self.intact)} as they are"
        line = f"{intact}, {after} (p = {self.chance:.2g})"
        if self.what != "mistake":
            return line
        _, right, right_elsewhere = self.accuracy
        return f"{line}; {in_percent(right)} become right, {in_percent(right_elsewhere)} elsewhere"


def removed(
    photos: RunPhotos,
    method: str,
    wanted: Collection[tuple[str, str]],
    what: str = "evidence",
    *,
    share: float | None = None,
    baseline: BaselineLike = "blur",
    as_predicted: bool = False,
) -> AblationResult:
    """Cover a part of some photos, and count how often the model still gives their class.

    Args:
        photos: the photos of a run, and the model.
        method: whose maps say where the evidence is.
        wanted: names of photos with the targets that were explained, as in ``zip(maps.names,
            maps.targets)``.
        what: "evidence", the pixels where the map is highest; "object", what lies in the boxes;
            "background", all else. Photos without a box, and those that it fills, do not count for
            the latter two. (The control of an object that covers more than a quarter of the photo
            may overlap with it.)
        share: of the pixels of each photo, with the evidence; 0.1 by default.
        baseline: what takes their place.
        as_predicted: count how often the model gives the target that was explained, and not the
            label of the photo; it also does so where there is no label.

    Raises:
        RunError: there is no such part, the share is no share, or none of these photos can be read
            or has a box.
        BaselineError: there is no such baseline.
    """
    check_choice("what", what, ("evidence", "object", "background"), error=RunError)
    if what != "evidence" and share is not None:
        raise RunError(
            f"share must be left out for the {what}, whose size the boxes give, got {share}"
        )
    keys = set(wanted)
    share_of_evidence = _checked_share(share)
    rows = (row for row in photos.run.rows(method) if (row.name, row.target) in keys)
    if what != "evidence":
        rows = (row for row in rows if 0 < object_of(row).float().mean() < 1)

    def mask(row: Row) -> torch.Tensor:
        """The pixels of a photo to cover, ``(H, W)``."""
        if what == "evidence":
            return _highest_pixels(row.heatmap, share_of_evidence)
        return object_of(row) if what == "object" else ~object_of(row)

    def class_of(row: Row) -> int | None:
        """The class that is asked about; None counts as a class that the model never gives."""
        return row.target_class if as_predicted or row.label_class is None else row.label_class

    def masks(batch: Batch) -> torch.Tensor:
        return torch.stack([mask(row) for row in batch.rows])

    return _ablated(photos, rows, what, masks=masks, class_of=class_of, baseline=baseline)


def corrected(
    photos: RunPhotos,
    pair: Confusion,
    method: MethodLike,
    *,
    share: float | None = None,
    baseline: BaselineLike = "blur",
) -> AblationResult:
    """Cover what spoke for the wrong class in all photos of a mistake, and count how often it is
    still made.

    ``accuracy`` of the answer says how often the right class is given then.

    Args:
        photos: the photos of a run, and the model.
        pair: a mistake, as in ``insight.pairs``.
        method: how the difference of the scores of the wrong and the right class is explained.
        share: of the pixels of each photo; 0.1 by default.
        baseline: what takes their place.

    Raises:
        RunError: the share is no share, or none of the photos can be read.
        BaselineError: there is no such baseline.
    """
    share = _checked_share(share)
    lead = Difference(ClassTarget(pair.prediction_class), ClassTarget(pair.label_class))

    def masks(batch: Batch) -> torch.Tensor:
        """The pixels that support the wrong class most over the right one, for a batch of
        photos."""
        heatmaps = photos.attributed(batch, method, lead).heatmap
        return torch.stack([_highest_pixels(heatmap, share) for heatmap in heatmaps])

    wrong = one_for_each_photo(
        photos.run, label=pair.label, prediction=pair.prediction, correct=False
    )
    classes = (pair.label_class, pair.prediction_class)  # several classes may have one label
    rows = (row for row in wrong if (row.label_class, row.prediction_class) == classes)
    return _ablated(
        photos,
        rows,
        "mistake",
        masks=masks,
        class_of=lambda _: pair.prediction_class,
        baseline=baseline,
    )


def _ablated(
    photos: RunPhotos,
    rows: Iterable[Row],
    what: str,
    *,
    masks: Masks,
    class_of: Callable[[Row], int | None],
    baseline: BaselineLike,
) -> AblationResult:
    """The classes that the model gives photos as they are, with ``masks`` covered, and with the
    masks rolled by half the height and width (control). ``what`` is a key of `PARTS`; ``class_of``
    gives the class that is asked about.
    """
    filling = get_baseline(baseline)
    model = photos.explainer.model
    counted: list[Row] = []
    answers: list[torch.Tensor] = []
    covered: list[torch.Tensor] = []
    for batch in photos.batches(rows):
        mask = masks(batch).to(batch.x.device)[:, None]
        elsewhere = mask.roll([side // 2 for side in mask.shape[2:]], [2, 3])
        cover = filling.covering(batch.x)
        every_image = torch.arange(len(batch.x), device=batch.x.device)  # is covered once
        with torch.inference_mode():
            # it takes what is kept, not what is covered
            without = cover(every_image, (~mask).to(batch.x))
            control = cover(every_image, (~elsewhere).to(batch.x))
            classes = [model(x).argmax(1) for x in (batch.x, without, control)]
        answers.append(torch.stack(classes, 1).cpu())
        covered.append(mask.float().mean((1, 2, 3)).cpu())
        counted += batch.rows
    if not counted:
        raise RunError(NOTHING)
    return AblationResult(
        what,
        keys=tuple((row.name, row.target) for row in counted),
        wanted=class_tensor(map(class_of, counted)),
        labels=class_tensor(row.label_class for row in counted),
        answers=torch.cat(answers),
        covered=torch.cat(covered),
    )


def _checked_share(share: float | None) -> float:
    """Return the share of the pixels to cover, `SHARE` if None is given; refuse what does not lie
    between 0 and 1."""
    share = SHARE if share is None else share
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
        raise RunError(f"share must lie between 0 and 1, got {shown(share)}; 0.1 is usual")
    return float(share)


def _highest_pixels(heatmap: torch.Tensor, share: float) -> torch.Tensor:
    """Mark the ``share`` of the pixels of a heatmap ``(H, W)`` with the highest values, at least
    one; of equal ones, the first. A bool tensor ``(H, W)``."""
    ranks = heatmap.flatten().argsort(descending=True, stable=True).argsort()
    return (ranks < max(1, round(share * len(ranks)))).reshape(heatmap.shape)


def sign_test(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the one-sided p-value of McNemar's test: how probably ``first`` is the true one at
    least so often where just one of two bool tensors ``(N,)`` is, if both were as likely."""
    only_first = int((first & ~second).sum())
    differing = int((first ^ second).sum())
    outcomes: int = sum(math.comb(differing, k) for k in range(only_first, differing + 1))
    return float(outcomes / 2**differing)
