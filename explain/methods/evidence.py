"""The smallest evidence: regions that are enough for an answer, and regions that it cannot do
without."""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch

from explain._utils.errors import MethodError
from explain._utils.rounding import finite_or_none
from explain.baselines import Mean
from explain.baselines.base import Baseline
from explain.engine import Activations, Attributions, Evidence, Need
from explain.engine.perturbations import (
    AnswerTo,
    GivenSamples,
    KeepAll,
    OutOfTimeError,
    Perturbation,
    ScoreOf,
    Scores,
    Search,
    Searches,
    Steps,
    samples_of,
)
from explain.layers.placement import nearest
from explain.methods.base import Method, Outcome, register
from explain.methods.estimates import SearchMethod
from explain.methods.masking import FullyMasked, ShownParts
from explain.methods.regions import Regions, Squares, region_values

Proof = Literal["none", "found", "minimal", "smallest"]
PROOFS: tuple[Proof, ...] = get_args(Proof)

T = TypeVar("T")
Asking = Generator[Scores, Any, T]
"""A part of a search, which asks for scores, and what it returns."""

SHARE = 0.9  # share of the answer that has to stay, where no top class can be kept
EXHAUSTIVE = 12  # regions of which all sets are tried
COARSE = 8  # squares across at most where the search begins
LEAST = 1e-12  # probability: its logarithm must exist
ROUNDING = 1e-6  # slack of a logarithm, so that an image keeps all of its own probability
STEPS = 12  # lengths of an order of regions that are tried together
SLOW = 0.95  # where a round leaves this share of the regions, they are tried a few at a time
TURN = 16  # regions of a turn


@dataclass(frozen=True)
class EvidenceSet:
    """A set of regions of one image, its pixels ``mask`` ``(H, W)``, and how well it is proved."""

    mask: torch.Tensor
    # the answer's probability (or score) when all else is absent, and when only the set is
    alone: float
    without: float
    # "smallest": all smaller sets were tried; "minimal": leaving out any one region changes the
    # result; "found": the budget ended before that; "none": there is no such set
    proof: Proof

    @property
    def size(self) -> float:
        """The share of the image's pixels in the set."""
        return float(self.mask.double().mean())


@dataclass(frozen=True, eq=False)
class EvidenceSets:
    """The sets of N images, R at most: ``masks`` ``(N, R, H, W)``, and ``figures`` ``(N, R, 3)``:
    alone, without, and the position of the proof in `PROOFS`. ``sets[0]`` is the first image's."""

    masks: torch.Tensor
    figures: torch.Tensor

    @classmethod
    def stored(
        cls, values: torch.Tensor, set_count: int, records: Sequence[Mapping[str, Any]]
    ) -> "EvidenceSets":
        """One image's evidence sets from a saved record: the masks from its map ``(H, W)``, whose
        values code ``set_count`` sets (`RegionSearch.map`), the rest from ``records``
        (`described`)."""
        # within a set, values fall with the region's rank; times ``set_count``, those of set i lie
        # from set_count - i - 0.5 to set_count - i, or a little beyond after half precision: plus a
        # quarter, all of these round to set_count - i
        set_numbers = torch.where(values > 0, set_count - (values * set_count + 0.25).round(), -1)
        masks = set_numbers == torch.arange(len(records)).to(values)[:, None, None]
        figures = []
        for record in records:
            scores = (record["alone"], record["without"])
            known_scores = [math.nan if score is None else score for score in scores]
            figures.append([*known_scores, PROOFS.index(record["proof"])])
        return cls(masks[None], torch.tensor([figures], dtype=torch.float64))

    def described(self, image: int) -> list[dict[str, Any]]:
        """One JSON entry for each evidence set of an image: ``alone`` and ``without``, None where
        NaN, and ``proof``. Records on disk have these keys, and `stored` reads them."""
        return [
            {
                "alone": finite_or_none(evidence_set.alone),
                "without": finite_or_none(evidence_set.without),
                "proof": evidence_set.proof,
            }
            for evidence_set in self[image]
        ]

    def __getitem__(self, image: int) -> tuple[EvidenceSet, ...]:
        """The evidence sets of one image, without the places of ``proof`` "none" that pad the
        tensors."""
        sets = []
        for mask, figures in zip(self.masks[image], self.figures[image].tolist(), strict=True):
            alone, without, proof_position = figures
            proof = PROOFS[int(proof_position)]
            if proof != "none":
                sets.append(EvidenceSet(mask, alone=alone, without=without, proof=proof))
        return tuple(sets)


@dataclass(frozen=True)
class Strength(ScoreOf):
    """How strong an answer is, ``(b,)``: as a "logit" its score, as a "probability" its logarithm,
    as a "margin" the distance to the best other class (of labels, from probability one half)."""

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The strength ``(b,)`` of the answer in each perturbed input."""
        if self.kind == "margin" and evidence.outputs.kind == "labels":
            return ScoreOf("probability", self.category)(evidence) - 0.5
        score = super().__call__(evidence)
        return score.clamp(min=LEAST).log() if self.kind == "probability" else score


@dataclass(frozen=True)
class SmallestSet(SearchMethod):
    """What `Sufficient` and `Necessary` share: the options, and the search for sets."""

    regions: Regions = Squares(28)
    baseline: tuple[Baseline, ...] | Baseline = Mean()
    keep: Literal["class"] | float | None = None
    reasons: int = 1
    guide: Method | None = None
    samples: int = 8000
    max_seconds: float | None = None
    of_layer: bool = False

    minimums = {"reasons": 1, "samples": 1}
    one_input = True
    style = "evidence"
    shows: ClassVar[bool]
    """Whether a set is what stays visible (`Sufficient`), or what is covered (`Necessary`)."""

    def __post_init__(self) -> None:
        """Check the options ``baseline`` and ``keep``, and turn a tuple of one baseline into that
        baseline, so that equal searches compare equal.
        """
        super().__post_init__()
        if isinstance(self.baseline, tuple) and len(self.baseline) == 1:
            object.__setattr__(self, "baseline", self.baseline[0])
        if not self.baselines:
            raise MethodError(f"baseline of {self.name} must be one or several, got none; give one")
        if isinstance(self.keep, float) and not 0 < self.keep <= 1:
            raise MethodError(
                f"keep of {self.name} must be 'class', or a share up to 1, got {self.keep}; take "
                "0.9"
            )

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """All baselines; a set must be good with each of them."""
        return self.baseline if isinstance(self.baseline, tuple) else (self.baseline,)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        """What `Sufficient` and `Necessary` need: the search itself; with ``of_layer`` the feature
        maps of the image and of each baseline; and what the ``guide`` needs."""
        needs: set[Need[Any]] = {Searches(self)}
        if self.of_layer:
            needs |= {Activations(), *map(baseline_maps, self.baselines)}
        if self.guide is not None:
            needs |= self.guide.needs
        return frozenset(needs)

    def search(self, evidence: Evidence, image: int) -> "RegionSearch":
        return RegionSearch(self, evidence, image)

    def outcome(self, evidence: Evidence) -> Outcome:
        """The outcome of `Sufficient` or `Necessary`: the runs spent, and the evidence sets of all
        images in one `EvidenceSets` ``(N, R, ...)``."""
        of_images = [search.sets() for search in evidence[Searches(self)]]  # type: ignore[attr-defined]
        masks = torch.cat([sets.masks for sets in of_images])
        figures = torch.cat([sets.figures for sets in of_images])
        return replace(super().outcome(evidence), sets=EvidenceSets(masks, figures))

    def good(self, values: torch.Tensor) -> torch.Tensor:
        """Which of P sets keep the answer (`Sufficient`) or lose it (`Necessary`): ``(P,)``, from
        signed distances from the threshold ``values`` ``(P,)``.
        """
        raise NotImplementedError

    def strength(self, evidence: Evidence, image: int) -> tuple[Strength, float]:
        """What the search measures in one image, and the threshold above which the answer stays:
        the margin for the top class, the log-probability for a share of it, else the score.
        """
        score = evidence.score[image].item()
        share = SHARE if self.keep is None or self.keep == "class" else self.keep
        is_no_class = evidence.logits is None or evidence.classes is None
        if is_no_class or evidence.outputs.kind == "numbers":
            if self.keep == "class":
                raise MethodError(
                    f"keep of {self.name} must be a share for a target that is no class, got "
                    "'class'"
                )
            # of a negative score too, a share is below the whole
            return Strength("logit"), score - (1 - share) * abs(score)
        margin = Strength("margin")
        if self.keep == "class" or (self.keep is None and float(margin(evidence)[image]) > 0):
            return margin, 0.0
        probability = Strength("probability")
        log_probability = float(probability(evidence)[image])
        return probability, log_probability + math.log(share) - ROUNDING


@register
class Sufficient(SmallestSet):
    """The smallest set of regions that is enough for the answer.

    All else is absent then.

    Regions are ranked by what the answer loses without them and has with them alone, by large
    squares first. The shortest part of the ranking that keeps the answer is reduced: large squares
    are left out as long as the answer stays, then smaller ones down to the ``regions``, each time
    as many together as can be (delta debugging, Zeller and Hildebrandt, 2002). At the end, leaving
    out each region has been tried.

    Args:
        regions: how many squares across the smallest ones are, or other regions; of at most 12,
            every set is tried.
        baseline: what takes the place of what is absent, or several: the set must be enough with
            each of them.
        keep: "class" keeps the top class; a number keeps that share of the probability (of a score
            that is no class, that share of the score). None keeps the class where the target is on
            top, and else 0.9 of the probability.
        reasons: how many sets are looked for, without a region in common.
        guide: a method whose map is one more ranking to start with.
        samples: how many photos with absent regions are run, at most.
        max_seconds: stop after so many seconds, which the images share.
        of_layer: cut the feature maps of a layer into regions, and not the photo; what is absent is
            replaced by the feature maps of the baseline at the same places. The layer is the call's
            ``layer``, or the last map.

    Returns:
        ``(N, H, W)``: 0 outside, and up to 1 for the region of a set that the answer depends on
        most. With several reasons, a first one of R has values above ``(R - 0.5) / R``, and so on.
        `Attribution.sets` has each set with its mask, the probability with it alone and without it,
        and what is proved of it.

    Carter et al., "What made you do this? Understanding black-box decisions with sufficient input
    subsets", 2019.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2, bias=False)).double()
    >>> _ = model[1].weight.data.copy_(torch.tensor([[3.0, 0, 0, 1], [0, 2, 1, 0]]))
    >>> a = explain.attribute(model, torch.ones(1, 1, 2, 2).double(), Sufficient(2, "zero"))
    >>> a.values, a.sets[0][0].proof
    (tensor([[[1., 0.],
             [0., 0.]]], dtype=torch.float64), 'smallest')
    """

    shows = True

    def good(self, values: torch.Tensor) -> torch.Tensor:
        return values > 0


@register
class Necessary(SmallestSet):
    """The smallest set of regions without which the answer is lost.

    The search and the options are those of `Sufficient`.

    Args:
        regions, baseline, keep, reasons, guide, samples, max_seconds, of_layer: as for
            `Sufficient`. A set is necessary if the answer is lost with each of the baselines.
        becomes: a class that is to be on top instead: the smallest change that turns the answer
            into it. With ``baseline=explain.baselines.OtherPhoto(...)`` of a photo of that class,
            regions of the one photo are exchanged for those of the other, in pixels or ``of_layer``
            (Goyal et al., "Counterfactual Visual Explanations", ICML 2019, who let a place take the
            features of any place; here it is the same place).

    Returns:
        As `Sufficient`.

    Fong and Vedaldi, "Interpretable Explanations of Black Boxes by Meaningful Perturbation", ICCV
    2017, looked for small deletions that lose the answer; here they consist of regions, and what is
    proved of each set is said.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2, bias=False)).double()
    >>> _ = model[1].weight.data.copy_(torch.tensor([[3.0, 0, 0, 1], [0, 2, 1, 0]]))
    >>> explain.attribute(model, torch.ones(1, 1, 2, 2).double(), Necessary(2, "zero")).values
    tensor([[[1., 0.],
             [0., 0.]]], dtype=torch.float64)
    """

    becomes: int | None = None

    shows = False

    def good(self, values: torch.Tensor) -> torch.Tensor:
        return values >= 0 if self.becomes is None else values > 0

    def strength(self, evidence: Evidence, image: int) -> tuple[Strength, float]:
        """For `Necessary`, as for all searches for evidence sets; with ``becomes``, the margin of
        that class over all others, which is to become positive."""
        if self.becomes is None:
            return super().strength(evidence, image)
        class_count = 0 if evidence.logits is None else evidence.logits.shape[1]
        if not 0 <= self.becomes < class_count:
            raise MethodError(
                f"becomes of necessary must be one of the model's {class_count} classes, got "
                f"{self.becomes}"
            )
        return Strength("margin", category=self.becomes), 0.0


@dataclass
class RegionSet:
    """The best set of regions ``(M,)`` so far, and what is proved of it. ``without`` ``(M,)`` is
    the value of the set without each region (`RegionSearch._values`), where that was tried.
    """

    regions: torch.Tensor
    without: torch.Tensor
    proof: Proof = "found"
    alone: float = math.nan
    lost: float = math.nan
    """The score with the set alone, and without it."""

    @property
    def size(self) -> int:
        return int(self.regions.sum())

    @property
    def ranks(self) -> torch.Tensor:
        """The rank in (0, 1] of each region of the set, ``(regions,)``: 1 for the region whose
        absence leaves the lowest value. Equal values share a rank.
        """
        values, places = torch.unique(self.without[self.regions], return_inverse=True)
        ranks: torch.Tensor = 1 - places.to(values) / max(len(values), 1)
        return ranks


class RegionSearch(Search):
    """The search for sets of regions in one image; a set is truth values ``(M,)``, one for each
    region. `_values` says how far a set keeps the answer, or loses it."""

    def __init__(self, method: SmallestSet, evidence: Evidence, image: int) -> None:
        """Cut one image, by its number ``image``, into regions, and find out what the search
        compares; runs nothing yet.
        """
        self._method = method
        self._evidence = evidence
        self._image = image
        # what the regions divide, and the region of each of its places
        self._divided = evidence.activations if method.of_layer else evidence.inputs
        self._cells = method.regions(self._divided)[image]
        # the region of each pixel (H, W)
        self._labels = self._cells
        if method.of_layer:  # where they lie in the image
            placement = None if evidence.placement is None else evidence.placement[image]
            self._labels = nearest(self._cells, evidence.size, placement)
        # groups of regions, from coarse to fine
        self._levels = self._nested()
        self._strength, self._threshold = method.strength(evidence, image)
        self._sets: list[RegionSet] = []
        self._ended_early = False

    @property
    def planned(self) -> int:
        """The budget of runs; where the search ended by itself, the runs that it took."""
        return self.samples if self.finished and not self._ended_early else self._method.samples

    @property
    def has_result(self) -> bool:
        return bool(self._sets)

    @property
    def _best(self) -> RegionSet:
        return self._sets[-1]

    def steps(self) -> Steps:
        """Search for up to ``reasons`` sets without a common region: a generator that yields
        requests for scores and is sent them. At the end, two more images are run for each set.
        """
        allowed = torch.ones(len(self._levels[-1]), dtype=torch.bool, device=self._labels.device)
        try:
            while len(self._sets) < self._method.reasons and (yield from self._find(allowed)):
                allowed = allowed & ~self._best.regions
        except OutOfTimeError:
            self._ended_early = True
        # what was found is told in any case, however late it is and beyond the budget
        self.finishing = True
        baseline = self._method.baselines[0]
        probability = ScoreOf("probability")
        for region_set in self._sets:
            set_and_rest = torch.stack([region_set.regions, ~region_set.regions])
            scores = yield self._scores_of_shown(set_and_rest, baseline, probability)
            region_set.alone, region_set.lost = scores.tolist()

    def sets(self) -> EvidenceSets:
        """The evidence sets of this image ``(1, R, ...)`` after the search, filled up to
        ``reasons`` sets with empty ones of the proof "none"."""
        no_regions = torch.zeros_like(self._levels[-1], dtype=torch.bool)
        missing_set = RegionSet(no_regions, without=no_regions, proof="none")
        sets = self._sets + [missing_set] * (self._method.reasons - len(self._sets))
        masks = [region_set.regions[self._labels] for region_set in sets]
        figures = [
            (region_set.alone, region_set.lost, PROOFS.index(region_set.proof))
            for region_set in sets
        ]
        return EvidenceSets(torch.stack(masks)[None], self._evidence.inputs.new_tensor([figures]))

    def map(self) -> torch.Tensor:
        """The map of `Sufficient` or `Necessary` ``(1, H, W)``: set number ``i`` of R has values
        between ``(R - i - 0.5) / R`` and ``(R - i) / R``, by rank, and 0 is outside all sets.
        """
        set_count = self._method.reasons
        values = self._evidence.inputs.new_zeros(len(self._levels[-1]))
        for number, region_set in enumerate(self._sets):
            values[region_set.regions] = (
                (set_count - number - 0.5 + region_set.ranks / 2) / set_count
            ).to(values)
        return values[self._labels][None]

    def _find(self, allowed: torch.Tensor) -> Asking[bool]:
        """Look for one small good set among the allowed regions ``(M,)``, and append it to
        ``_sets``; false if none can follow: all allowed regions are not good, or the empty set is.
        """
        nothing = torch.zeros_like(allowed)
        no_losses = torch.zeros(len(allowed), dtype=torch.float64, device=allowed.device)
        good = yield from self._good(torch.stack([allowed, nothing]))
        all_are_good, nothing_is_good = good.tolist()
        if not all_are_good:
            return False
        if nothing_is_good:
            self._sets.append(RegionSet(nothing, without=no_losses, proof="smallest"))
            return False
        # the first good set; it becomes smaller from here on, until it or the budget is at an end
        self._sets.append(RegionSet(allowed, without=no_losses))
        if int(allowed.sum()) <= EXHAUSTIVE:
            yield from self._try_all(allowed)
            return True
        yield from self._start(allowed)
        for level in self._levels:
            yield from self._reduce(level, thorough=level is self._levels[-1])
        self._best.proof = "minimal"  # of the single regions, none could be left out any more
        return True

    def _start(self, allowed: torch.Tensor) -> Asking[None]:
        """Rank the coarsest groups (by the guide's map, the value alone, the loss without, and
        both); the shortest good beginning of any ranking becomes the best set.
        """
        groups = members(self._levels[0], allowed)
        lengths = step_lengths(len(groups), range(STEPS))

        def beginnings(ranking: torch.Tensor) -> torch.Tensor:
            return union(groups[ranking.argsort(descending=True)], lengths)

        if self._method.guide is not None:
            guided = groups.double() @ self._guided(self._method.guide) / groups.sum(1)
            yield from self._take_smallest(beginnings(guided))
        values_alone = yield from self._values(groups)
        # a small set as early as this, in case the budget ends soon
        yield from self._take_smallest(beginnings(values_alone))
        values_without = yield from self._values(allowed & ~groups)
        yield from self._take_smallest(
            torch.cat([beginnings(-values_without), beginnings(values_alone - values_without)])
        )

    def _reduce(self, level: torch.Tensor, *, thorough: bool) -> Asking[None]:
        """Leave out groups of one level while the best set stays good; one that a larger set needs
        is tried last, and again, with ``thorough``, until none can go: the set is minimal.
        """
        last_size = math.inf
        while self._best.size < SLOW * last_size:
            last_size = self._best.size
            changed = yield from self._round(level, self._best.regions)
            if not changed or not thorough:
                return
        # a round of all groups leaves out hardly any now
        yield from self._in_turn(level)

    def _round(self, level: torch.Tensor, regions: torch.Tensor) -> Asking[bool]:
        """Try each group of a level that lies in ``regions`` ``(M,)``, and leave out as many
        together as possible from the best set; false where none can be left out.
        """
        removable = yield from self._leave_out(members(level, regions))
        # those that could go alone, but not with the others, are tried again now that these are out
        waiting = removable
        while len(waiting):
            waiting = yield from self._leave_out(
                members(level, self._best.regions & waiting.any(0))
            )
        return len(removable) > 0

    def _in_turn(self, level: torch.Tensor) -> Asking[None]:
        """In the search for evidence sets, try a few regions (`TURN`) at a time, those whose loss
        matters least first, until all were tried since a region was last left out."""
        order = self._best.without.argsort(descending=True)
        tried_in_vain = 0
        while True:
            order = order[self._best.regions[order]]  # what is still in the set
            if tried_in_vain >= len(order):
                return
            turn = order[:TURN]
            order = order.roll(-len(turn))
            in_turn = torch.zeros_like(self._best.regions).scatter(0, turn, True)
            changed = yield from self._round(level, in_turn)
            tried_in_vain = 0 if changed else tried_in_vain + len(turn)

    def _leave_out(self, groups: torch.Tensor) -> Asking[torch.Tensor]:
        """Leave out as many of the groups ``(G, M)`` together from the best set as possible; return
        those that could each be left out alone. ``without`` notes each loss.
        """
        best_regions = self._best.regions
        if not len(groups):
            return groups
        values = yield from self._values(best_regions & ~groups)
        # of each region, the value of the set without the group that it is in
        group_of_region = groups.int().argmax(0)
        self._best.without = torch.where(groups.any(0), values[group_of_region], self._best.without)
        good = self._method.good(values)
        order = values.masked_fill(~good, -math.inf).argsort(descending=True)
        # those that matter least come first
        removable = groups[order[: int(good.sum())]]
        if len(removable):
            self._best.regions = best_regions & ~removable[0]
        if len(removable) > 1:
            lengths = step_lengths(len(removable), range(1, STEPS + 1))
            yield from self._take_smallest(best_regions & ~union(removable, lengths))
        return removable

    def _take_smallest(self, sets: torch.Tensor) -> Asking[None]:
        """In the search for evidence sets, make the smallest good set of the candidates ``(P, M)``
        the best set, if it is smaller than the best one by now."""
        good = yield from self._good(sets)
        # those that are not good count as larger than any set
        sizes = sets.sum(1).masked_fill(~good, sets.shape[1] + 1)
        if int(sizes.min()) < self._best.size:
            self._best.regions = sets[sizes.argmin()]

    def _try_all(self, allowed: torch.Tensor) -> Asking[None]:
        """Try all sets of the allowed regions ``(M,)``, small ones first; the first good one is
        proved to be the smallest. Keeps the set as it is if the budget ends before.
        """
        regions = allowed.nonzero()[:, 0]
        for size in range(1, len(regions) + 1):
            chosen = torch.combinations(regions, size)
            sets = torch.zeros(len(chosen), len(allowed), dtype=torch.bool, device=allowed.device)
            values = yield from self._values(sets.scatter_(1, chosen, True))
            if bool(self._method.good(values).any()):
                self._sets[-1] = replace(
                    self._best, regions=sets[values.argmax()], proof="smallest"
                )
                return

    def _good(self, sets: torch.Tensor) -> Asking[torch.Tensor]:
        """Which of the sets ``(P, M)`` are good: truth values ``(P,)``."""
        values = yield from self._values(sets)
        return self._method.good(values)

    def _values(self, sets: torch.Tensor) -> Asking[torch.Tensor]:
        """The signed distance ``(P,)`` of sets ``(P, M)`` from the threshold, with the worst
        baseline. Takes P runs of the budget for each baseline; `OutOfTimeError` without any left.
        """
        baselines = self._method.baselines
        if self.samples + len(sets) * len(baselines) > self._method.samples:
            raise OutOfTimeError
        shows = self._method.shows
        visible = sets if shows else ~sets
        strengths = []
        for baseline in baselines:
            strength = yield self._scores_of_shown(visible, baseline, self._strength)
            strengths.append(strength.double())
        above = torch.stack(strengths) - self._threshold
        # good is above the threshold where the answer has to stay, or another class to be reached
        has_to_rise = shows or self._strength.category is not None
        return above.amin(0) if has_to_rise else (-above).amin(0)

    def _scores_of_shown(self, visible: torch.Tensor, baseline: Baseline, read: ScoreOf) -> Scores:
        """The request for the scores ``(P,)`` with only regions ``visible`` ``(P, M)`` shown and
        the baseline elsewhere: in pixels, or in feature maps with ``of_layer``.
        """
        perturbed: Perturbation
        if self._method.of_layer:
            maps = self._divided[self._image]
            absent = self._evidence[baseline_maps(baseline)][self._image]
            shown_places = visible[:, self._cells][:, None]
            # all samples are of this image; there are none of those before it
            counts = [0] * self._image + [len(visible)]

            def mixed_maps(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
                return torch.where(shown_places[numbers], maps, absent)

            samples = samples_of(counts, maps.device, mixed_maps)
            perturbed = GivenSamples(samples, "maps of which some regions are absent")
        else:
            perturbed = ShownParts(
                baseline, self._image, list(visible), lambda regions: regions[self._cells]
            )
        return Scores(perturbed, read)

    def _guided(self, guide: Method) -> torch.Tensor:
        """The mean of the guide's map over each region ``(M,)``; larger means tried first."""
        values = guide(self._evidence).double()
        has_channels = values.ndim > self._labels.ndim + 1
        in_pixels = values if has_channels else self._evidence.on_photo(values[:, None])
        pixel_values = in_pixels[self._image : self._image + 1].sum(1)
        return region_values(pixel_values, self._labels)[0]

    def _nested(self) -> list[torch.Tensor]:
        """The levels from coarse to fine: for each, the number of the group ``(M,)`` of each
        region. The last has each region alone; regions that are no squares have only that one.
        """
        regions = self._method.regions
        each_alone = torch.arange(int(self._cells.max()) + 1, device=self._cells.device)
        levels = [each_alone]
        squares_across = (
            max(regions.cells(tuple(self._cells.shape))) if isinstance(regions, Squares) else 0
        )
        while squares_across > COARSE:
            squares_across = math.ceil(squares_across / 2)
            coarse_cells = Squares(squares_across)(self._divided[:1])[0]
            # a region belongs to the coarse square that one of its places is in
            level = each_alone.scatter(0, self._cells.flatten(), coarse_cells.flatten())
            levels.insert(0, level)
        return levels


def baseline_maps(baseline: Baseline) -> Attributions:
    """The need for a layer's feature maps ``(N, C, h, w)`` of images that a baseline covers
    entirely."""
    return Attributions(FullyMasked(baseline), AnswerTo(Activations()), KeepAll())


def members(level: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
    """Return the groups of a level that some of the ``regions`` ``(M,)`` are in, as sets of these
    regions ``(G, M)``."""
    groups: torch.Tensor = torch.unique(level[regions])
    return (level == groups[:, None]) & regions


def step_lengths(count: int, steps: Iterable[int]) -> list[int]:
    """Return the lengths at which a ranking of ``count`` groups is tried; each is longer than the
    one before by the same factor."""
    return list(dict.fromkeys(round(count ** (step / STEPS)) for step in steps))


def union(groups: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The unions of the first groups of ``groups`` ``(G, M)``, for each number of groups in
    ``lengths``: ``(len(lengths), M)``."""
    return groups.cumsum(0)[torch.tensor(lengths, device=groups.device) - 1] > 0
