"""Which finding of an insight the model reads: its pattern is put on other photos, and the answers
are counted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from explain._utils.errors import RunError
from explain.hooks.preserve import untouched
from explain.insight.ablation import sign_test
from explain.insight.class_statistics import ClassStatistics
from explain.insight.clusters import Cluster
from explain.insight.maps import in_percent
from explain.insight.reattribution import RunPhotos, in_parts
from explain.insight.spurious_regions import PatternPhotos, pattern_of
from explain.layers.intervening import intervene
from explain.targets.base import find_logits

TRIED = 5  # clusters that are tried, and as many classes
RECEIVING = 64  # photos that get the pattern of each
CHANCE = 0.05


@dataclass(frozen=True, eq=False)
class TriedFinding:
    """A finding, and the shares of photos of other classes that are taken for its class: ``taken``
    with its pattern, ``control`` with another photo's patch; ``chance`` is McNemar's p-value."""

    finding: Cluster | ClassStatistics
    taken: float
    control: float
    chance: float

    def __str__(self) -> str:
        """The outcome in words, for messages and the terminal."""
        finding = self.finding
        what = "the class" if isinstance(finding, ClassStatistics) else f"{finding.size} photos of"
        return (
            f"{what} {finding.title}: with the pattern, {in_percent(self.taken)} of other photos "
            f"are taken for it, with another patch {in_percent(self.control)}"
        )


def confirmed_finding(
    findings: Sequence[Cluster | ClassStatistics], photos: RunPhotos
) -> TriedFinding:
    """Try findings on the model; of those whose pattern draws more photos of other classes than
    another patch, the one that draws most. Raises `RunError` without one.
    """
    trials = []
    for finding in findings:
        try:
            pattern = pattern_of(finding, photos, most=RECEIVING)
        except RunError:  # too few photos
            continue
        if pattern.target is not None:  # else no prediction can be of its class
            trials.append(_trial(finding, pattern, pattern.target, photos))
    trials.sort(key=lambda trial: trial.control - trial.taken)  # that draws most comes first
    # by Bonferroni, as one of many trials succeeds by chance
    confirmed = [trial for trial in trials if trial.chance * len(trials) <= CHANCE]
    if confirmed:
        return confirmed[0]
    best = f" (the most: {trials[0]})" if trials else ", which have too few photos"
    raise RunError(
        f"finding must be named: the model is not shown to read any of the {len(findings)} that "
        f"stand out{best}; explain more photos, or another layer, where patterns are in the same "
        "place"
    )


def _trial(
    finding: Cluster | ClassStatistics,
    pattern: PatternPhotos,
    target: int,
    photos: RunPhotos,
) -> TriedFinding:
    """Put the pattern of a finding on photos of other classes, and measure how many the model then
    takes for class ``target``: with the pattern, and with a patch of another photo as a control."""
    explainer = photos.explainer

    def scores(x: torch.Tensor) -> torch.Tensor:
        """The class scores ``(N, K)`` of inputs ``(N, C, H, W)``."""
        return find_logits(explainer.model(explainer.batch(x)), len(x))

    exchanged = pattern.exchanged()
    with untouched(explainer.model), intervene(explainer.model, explainer.interventions):
        taken = in_parts(scores, exchanged.pasted).argmax(1) == target
        control = in_parts(scores, exchanged.control).argmax(1) == target
    return TriedFinding(
        finding,
        taken=float(taken.double().mean()),
        control=float(control.double().mean()),
        chance=sign_test(taken, control),
    )
