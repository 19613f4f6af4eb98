"""The smallest evidence: regions that are enough for an answer, and regions that it cannot do without."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F

from explain._utils.errors import MethodError
from explain.baselines import Mean
from explain.baselines.base import Baseline
from explain.engine import Activations, Attributions, Evidence, Need, PerturbedRows, perturbations, reruns
from explain.layers.layouts import enlarge
from explain.methods.base import Method, Outcome, register
from explain.methods.estimates import DrawnMasks, FullyMasked, MaskedInputs, Masks, Report, Searched, SearchMethod
from explain.methods.regions import Regions, Squares, region_values

Proof = Literal["none", "found", "minimal", "smallest"]
PROOFS: tuple[Proof, ...] = get_args(Proof)

SHARE = 0.9  # of the answer that has to stay, where no top class can be kept
EXHAUSTIVE = 12  # regions of which all sets are tried
COARSE = 8  # squares across at most where the search begins
LEAST = 1e-12  # probability: its logarithm must exist
ROUNDING = 1e-6  # of a logarithm: a photo keeps the whole of its own probability
STEPS = 12  # lengths of an order of regions that are tried together
SLOW = 0.95  # of the regions: where a round through all leaves that many, they are tried in turn
TURN = 16  # regions of a turn


@dataclass(frozen=True)
class EvidenceSet:
    """A set of regions of one photo, and what is known of it.

    ``mask`` ``(H, W)`` is true in its regions. ``alone`` is the probability of the answer (the score, of a target that
    is no class) when all else is absent, ``without`` when only the set is absent. ``proof`` is "smallest" where every
    smaller set was tried, "minimal" where leaving out any one of its regions was tried and changes the result, "found"
    where the budget ended before that, and "none" where there is no such set.
    """

    mask: torch.Tensor
    alone: float
    without: float
    proof: Proof

    @property
    def size(self) -> float:
        """The share of the photo's pixels in the set."""
        return float(self.mask.double().mean())


@dataclass(frozen=True, eq=False)
class EvidenceSets:
    """The sets of N photos, at most R of each: ``sets[0]`` has those of the first photo.

    ``masks`` ``(N, R, H, W)``, ``alone`` and ``without`` ``(N, R)``, and the numbers in `PROOFS`,
    ``proofs`` ``(N, R)``.
    """

    masks: torch.Tensor
    alone: torch.Tensor
    without: torch.Tensor
    proofs: torch.Tensor

    @classmethod
    def stored(cls, values: torch.Tensor, reasons: int, found: Sequence[Mapping[str, Any]]) -> "EvidenceSets":
        """The sets of one photo from its map ``(H, W)``, which shows their regions, and what a record says of each."""
        numbers = reasons - (values * reasons).ceil()
        masks = torch.stack([(values > 0) & (numbers == number) for number in range(len(found))] or [values > values])
        scores = [[math.nan if each[name] is None else each[name] for each in found] for name in ("alone", "without")]
        proofs = torch.tensor([[PROOFS.index(each["proof"]) for each in found]], dtype=torch.long)
        alone, without = torch.tensor(scores, dtype=torch.float64)[:, None]
        return cls(masks[None, : len(found)], alone, without, proofs)

    def described(self, image: int) -> list[dict[str, Any]]:
        """What a record says of each set of an image: ``alone`` and ``without``, None if unknown, and ``proof``."""

        def known(score: float) -> float | None:
            return None if math.isnan(score) else score

        sets = self[image]
        return [{"alone": known(one.alone), "without": known(one.without), "proof": one.proof} for one in sets]

    def __getitem__(self, image: int) -> tuple[EvidenceSet, ...]:
        scores = zip(self.alone[image].tolist(), self.without[image].tolist(), strict=True)
        parts = zip(self.masks[image], scores, self.proofs[image].tolist(), strict=True)
        return tuple(EvidenceSet(mask, *both, PROOFS[proof]) for mask, both, proof in parts if proof)


@dataclass(frozen=True, eq=False)
class Subsets(Masks):
    """Masks of one image that show some of its regions: ``visible`` ``(P, M)`` of those in ``labels`` ``(H, W)``."""

    image: int
    labels: torch.Tensor
    visible: torch.Tensor

    words = "sets of regions"

    def most(self, size: tuple[int, ...]) -> int:
        return len(self.visible)

    def drawn(self, evidence: Evidence) -> DrawnMasks:
        counts = [len(self.visible) if image == self.image else 0 for image in range(len(evidence.inputs))]
        return DrawnMasks(counts, lambda images, numbers: self.visible[numbers][:, self.labels][:, None])


@dataclass(frozen=True)
class Strength:
    """How strong an answer is, ``(b,)``.

    As a "margin", the distance of its class score to the best other one; of labels of which several may be true, of
    the probability to one half. As a "probability", its logarithm. As a "score", the score.
    """

    kind: Literal["margin", "probability", "score"]
    category: int | None = None

    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        logits, classes = evidence.logits, evidence.classes
        if self.kind == "score" or logits is None or classes is None:
            return evidence.score
        if self.category is not None:
            classes = torch.full_like(classes, self.category)
        if self.kind == "probability":
            return evidence.outputs.of_classes(logits, classes).clamp(min=LEAST).log()
        if evidence.outputs.kind == "labels":
            return evidence.outputs.of_classes(logits, classes) - 0.5
        own = logits.gather(1, classes[:, None])[:, 0]
        return own - logits.scatter(1, classes[:, None], -math.inf).amax(1)


@dataclass(frozen=True)
class SmallestSet(SearchMethod):
    """What `Sufficient` and `Necessary` share: the options, the search, and the map of what was found."""

    regions: Regions = field(default_factory=lambda: Squares(28))
    baseline: tuple[Baseline, ...] | Baseline = field(default_factory=Mean)
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
    """Whether a set is what stays visible; otherwise it is what is covered."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.baseline, tuple) and len(self.baseline) == 1:
            object.__setattr__(self, "baseline", self.baseline[0])
        if not self.baselines:
            raise MethodError(f"baseline of {self.name} must be one of explain.baselines, or several, got none")
        if isinstance(self.keep, float) and not 0 < self.keep <= 1:
            raise MethodError(f"keep of {self.name} must be 'class', or a share up to 1, got {self.keep}; take 0.9")

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """All baselines; a set must be good with each of them."""
        return self.baseline if isinstance(self.baseline, tuple) else (self.baseline,)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        own = {perturbations.PerturbationRuns(), perturbations.PerturbationRuns(self.of_layer)}
        maps = {Activations(), *map(baseline_maps, self.baselines)} if self.of_layer else set()
        return frozenset({*own, *maps, *(() if self.guide is None else self.guide.needs)})

    def search(self, evidence: Evidence, image: int, end: float, report: Report) -> Searched:
        return Search(self, evidence, image, end, report).done()

    def outcome(self, evidence: Evidence) -> Outcome:
        parts = zip(*(each.found for each in self.searched(evidence)), strict=True)
        return replace(super().outcome(evidence), sets=EvidenceSets(*map(torch.stack, parts)))

    def good(self, values: torch.Tensor) -> torch.Tensor:
        """Which sets do what they have to do, from how far they do it ``(P,)``."""
        raise NotImplementedError

    def strength(self, evidence: Evidence, image: int) -> tuple[Strength, float]:
        """What is compared, and the value that it has where the answer just stays."""
        logits, classes = evidence.logits, evidence.classes
        score = evidence.score[image].item()
        if logits is None or classes is None or evidence.outputs.kind == "numbers":
            if self.keep == "class":
                raise MethodError(f"keep of {self.name} must be a share for a target that is no class, got 'class'")
            return Strength("score"), score - (1 - (self.keep or SHARE)) * abs(score)
        margin = Strength("margin")
        if self.keep == "class" or (self.keep is None and float(margin(evidence)[image]) > 0):
            return margin, 0.0
        probability = Strength("probability")
        return probability, float(probability(evidence)[image]) + math.log(self.keep or SHARE) - ROUNDING


@register
class Sufficient(SmallestSet):
    """The smallest set of regions that is enough for the answer.

    All else is absent then.

    Regions are ranked by what the answer loses without them and has with them alone, by large squares first. The
    shortest part of the ranking that keeps the answer is reduced: large squares are left out as long as the answer
    stays, then smaller ones down to the ``regions``, each time as many together as can be (delta debugging, Zeller and
    Hildebrandt, 2002). At the end, leaving out each region has been tried.

    Args:
        regions: how many squares across the smallest ones are, or other regions; of at most 12, every set is tried.
        baseline: what takes the place of what is absent, or several: the set must be enough with each of them.
        keep: "class" keeps the top class; a number keeps that share of the probability (of a score that is no class,
            that share of the score). None keeps the class where the target is on top, and else 0.9 of the probability.
        reasons: how many sets are looked for, without a region in common.
        guide: a method whose map is one more ranking to start with.
        samples: how many photos with absent regions are run, at most.
        max_seconds: stop after so many seconds, which the images share.
        of_layer: cut the feature maps of a layer into regions, and not the photo; what is absent is replaced by the
            feature maps of the baseline at the same places. The layer is the call's ``layer``, or the last map.

    Returns:
        ``(N, H, W)``: 0 outside, and up to 1 for the region of a set that the answer depends on most. With several
        reasons, a first one of R has values above ``(R - 0.5) / R``, and so on. `Attribution.sets` has each set with
        its mask, the probability with it alone and without it, and what is proved of it.

    Carter et al., "What made you do this? Understanding black-box decisions with sufficient input subsets", 2019.

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
        regions, baseline, keep, reasons, guide, samples, max_seconds, of_layer: as for `Sufficient`. A set is necessary
            if the answer is lost with each of the baselines.
        becomes: a class that is to be on top instead: the smallest change that turns the answer into it. With
            ``baseline=explain.baselines.OtherPhoto(...)`` of a photo of that class, regions of the one photo are
            exchanged for those of the other, in pixels or ``of_layer`` (Goyal et al., "Counterfactual Visual
            Explanations", ICML 2019, who let a place take the features of any place; here it is the same place).

    Returns:
        As `Sufficient`.

    Fong and Vedaldi, "Interpretable Explanations of Black Boxes by Meaningful Perturbation", ICCV 2017, looked for
    small deletions that lose the answer; here they consist of regions, and what is proved of each set is said.

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
        if self.becomes is None:
            return super().strength(evidence, image)
        classes = 0 if evidence.logits is None else evidence.logits.shape[1]
        if not 0 <= self.becomes < classes:
            raise MethodError(f"becomes of necessary must be one of the model's {classes} classes, got {self.becomes}")
        return Strength("margin", self.becomes), 0.0


class _SpentError(Exception):
    """No runs or seconds are left."""


@dataclass
class Found:
    """The best set of regions ``(M,)`` so far, and what is proved of it.

    ``without`` ``(M,)`` is how far it did what it has to do without each region, where that was tried.
    """

    regions: torch.Tensor
    without: torch.Tensor
    proof: Proof = "found"
    scores: tuple[float, float] = (math.nan, math.nan)

    @property
    def ranks(self) -> torch.Tensor:
        """A number in (0, 1] for each region of the set, 1 where its absence leaves the lowest value."""
        values, places = torch.unique(self.without[self.regions], return_inverse=True)
        found: torch.Tensor = 1 - places.to(values) / max(len(values), 1)
        return found


class Search:
    """The search for sets in one image.

    A set is a row of truth values, one for each region. `_values` says how far a set does what it has to do.
    """

    def __init__(self, how: SmallestSet, evidence: Evidence, image: int, end: float, report: Report) -> None:
        self._how, self._evidence, self._image, self._end, self._report = how, evidence, image, end, report
        self._runner: reruns.PerturbationRunner = evidence[perturbations.PerturbationRuns(how.of_layer)]
        self._seen = evidence.activations if how.of_layer else evidence.inputs
        self._cells = how.regions(self._seen)[image]
        self._labels = self._cells
        if how.of_layer:  # where they lie in the photo
            in_photo = F.interpolate(self._cells[None, None].double(), evidence.size, mode="nearest-exact")
            self._labels = in_photo[0, 0].long()
        self._levels = self._nested()
        self._strength, self._threshold = how.strength(evidence, image)
        self._found: list[Found] = []
        self._samples = 0

    def done(self) -> Searched:
        """Find one set after the other, each among the regions that are in no earlier one."""
        allowed = torch.ones(len(self._levels[-1]), dtype=torch.bool, device=self._labels.device)
        spent = False
        try:
            while not self._runner.ended and len(self._found) < self._how.reasons and self._find(allowed):
                allowed = allowed & ~self._found[-1].regions
        except _SpentError:
            spent = True
        except KeyboardInterrupt as error:
            self._runner.end(error, partial=bool(self._found))
        if not self._runner.ended:
            for each in self._found:
                each.scores = self._score(each.regions), self._score(~each.regions)
        finished = not self._runner.ended
        planned = self._samples if finished and not spent else self._how.samples
        return Searched(self._map(), self._samples, planned, finished, self._result())

    def _result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The masks ``(R, H, W)``, the scores alone and without ``(R,)``, and the proofs ``(R,)``."""
        most, labels = self._how.reasons, self._labels
        masks = torch.zeros(most, *labels.shape, dtype=torch.bool, device=labels.device)
        scores = self._evidence.inputs.new_full((2, most), math.nan)
        proofs = torch.zeros(most, dtype=torch.long, device=labels.device)
        for number, each in enumerate(self._found):
            masks[number] = each.regions[labels]
            scores[:, number] = torch.tensor(each.scores, dtype=torch.float64)
            proofs[number] = PROOFS.index(each.proof)
        return masks, scores[0], scores[1], proofs

    def _map(self) -> torch.Tensor:
        """The map ``(H, W)``."""
        most, found = self._how.reasons, self._evidence.inputs.new_zeros(len(self._levels[-1]))
        for number, each in enumerate(self._found):
            found[each.regions] = ((most - number - 0.5 + each.ranks / 2) / most).to(found)
        return found[self._labels]

    def _find(self, allowed: torch.Tensor) -> bool:
        """Find a small set of the allowed regions that is good; false where even all of them are not."""
        nothing = torch.zeros_like(allowed)
        good = self._how.good(self._values(torch.stack([allowed, nothing]))).tolist()
        if not good[0]:
            return False
        untried = torch.zeros(len(allowed), dtype=torch.float64, device=allowed.device)
        if good[1]:
            self._found.append(Found(nothing, untried, "smallest"))
            return False
        self._found.append(Found(allowed, untried))
        if int(allowed.sum()) <= EXHAUSTIVE:
            self._try_all(allowed)
        else:
            self._start(allowed)
            for groups in self._levels:
                self._reduce(groups, thorough=groups is self._levels[-1])
            self._found[-1].proof = "minimal"
        return True

    def _start(self, allowed: torch.Tensor) -> None:
        """Rank the largest groups in several ways, and take the shortest beginning of a ranking that is good."""
        groups = members(self._levels[0], allowed)
        lengths = [*dict.fromkeys(round(len(groups) ** (k / STEPS)) for k in range(STEPS))]

        def take(*rankings: torch.Tensor) -> None:
            sets = [union(groups[ranking.argsort(descending=True)], lengths) for ranking in rankings]
            self._take_smallest(torch.cat(sets))

        if self._how.guide is not None:
            take(groups.double() @ self._guided() / groups.sum(1))
        within = self._values(groups)
        take(within)  # so that little budget has a result, too
        without = self._values(allowed & ~groups)
        take(-without, within - without)

    def _reduce(self, level: torch.Tensor, *, thorough: bool) -> None:
        """Leave out groups of regions as long as the set stays good.

        A group that a larger set needs is mostly needed by a smaller one. It is not tried again until no other can be
        left out; being ``thorough``, all are tried then, until none can.
        """
        shrinks = True
        while shrinks:
            before = int(self._found[-1].regions.sum())
            if not self._round(level, self._found[-1].regions) or not thorough:
                return
            shrinks = int(self._found[-1].regions.sum()) < SLOW * before
        self._in_turn(level)

    def _round(self, level: torch.Tensor, regions: torch.Tensor) -> bool:
        """Try all groups in some regions, and leave out as many together as can be; false where none can."""
        groups = waiting = self._leave_out(members(level, regions))
        while len(waiting):
            waiting = self._leave_out(members(level, self._found[-1].regions & waiting.any(0)))
        return len(groups) > 0

    def _in_turn(self, level: torch.Tensor) -> None:
        """Try a few regions at a time, dispensable ones first, until all were tried since one was left out."""
        order, tried = self._found[-1].without.argsort(descending=True), 0
        while tried < len(order := order[self._found[-1].regions[order]]):
            some = order[:TURN]
            order = order.roll(-len(some))
            changed = self._round(level, torch.zeros_like(self._found[-1].regions).scatter(0, some, True))
            tried = 0 if changed else tried + len(some)

    def _leave_out(self, groups: torch.Tensor) -> torch.Tensor:
        """Leave out as many of these groups as can be; return those that could have been left out one by one."""
        best = self._found[-1].regions
        if not len(groups):
            return groups
        values = self._values(best & ~groups)
        without = self._found[-1].without
        self._found[-1].without = torch.where(groups.any(0), values[groups.int().argmax(0)], without)
        good = self._how.good(values)
        groups = groups[values.masked_fill(~good, -math.inf).argsort(descending=True)[: int(good.sum())]]
        if len(groups):
            self._found[-1].regions = best & ~groups[0]
        if len(groups) > 1:
            lengths = [*dict.fromkeys(round(len(groups) ** (k / STEPS)) for k in range(1, STEPS + 1))]
            self._take_smallest(best & ~union(groups, lengths))
        return groups

    def _take_smallest(self, sets: torch.Tensor) -> None:
        """Note the smallest good one of some sets, if it is smaller than the best one."""
        good = self._how.good(self._values(sets))
        sizes = sets.sum(1).masked_fill(~good, len(self._levels[-1]) + 1)
        if int(sizes.min()) < int(self._found[-1].regions.sum()):
            self._found[-1].regions = sets[sizes.argmin()]

    def _try_all(self, allowed: torch.Tensor) -> None:
        """Try all sets of the allowed regions, small ones first."""
        regions = allowed.nonzero()[:, 0].tolist()
        for size in range(1, len(regions) + 1):
            sets = torch.zeros(math.comb(len(regions), size), len(allowed), dtype=torch.bool, device=allowed.device)
            for row, chosen in enumerate(combinations(regions, size)):
                sets[row, list(chosen)] = True
            values = self._values(sets)
            if bool(self._how.good(values).any()):
                self._found[-1] = replace(self._found[-1], regions=sets[values.argmax()], proof="smallest")
                return

    def _values(self, sets: torch.Tensor) -> torch.Tensor:
        """How far sets ``(P, M)`` do what they have to do ``(P,)``, with the baseline that is worst for each.

        Raises:
            _SpentError: no runs are left for them, or no time.
        """
        cost = len(sets) * len(self._how.baselines)
        if self._samples + cost > self._how.samples or time.monotonic() > self._end:
            raise _SpentError
        sign = 1 if self._how.shows or self._strength.category is not None else -1
        visible = sets if self._how.shows else ~sets
        found = [sign * (self._run(visible, each, self._strength) - self._threshold) for each in self._how.baselines]
        self._samples += cost
        self._report(self._samples, self._map)
        return torch.stack(found).amin(0)

    def _run(self, visible: torch.Tensor, baseline: Baseline, read: Strength | perturbations.ScoreOf) -> torch.Tensor:
        perturbed: perturbations.Perturbation
        if self._how.of_layer:
            own, other = (maps[self._image] for maps in (self._seen, self._evidence[baseline_maps(baseline)]))
            owners = torch.full((len(visible),), self._image, device=own.device)
            rows = PerturbedRows(owners, lambda rows: torch.where(visible[rows][:, self._cells][:, None], own, other))
            perturbed = perturbations.GivenMaps(rows)
        else:
            perturbed = MaskedInputs(Subsets(self._image, self._cells, visible), baseline)
        found: torch.Tensor = self._runner.read(perturbed, read)
        return found.double()

    def _score(self, visible: torch.Tensor) -> float:
        """The probability of the answer with these regions alone, with the baseline that is named first."""
        self._samples += 1
        return float(self._run(visible[None], self._how.baselines[0], perturbations.ScoreOf("probability")))

    def _guided(self) -> torch.Tensor:
        """The mean of the guide's map over each region ``(M,)``."""
        assert self._how.guide is not None
        values = self._how.guide(self._evidence)[self._image : self._image + 1].double()
        in_pixels = values.ndim > self._labels.ndim + 1
        map_ = values.sum(1) if in_pixels else enlarge(values[:, None], self._labels.shape)[:, 0]
        return region_values(map_, self._labels[None])[0]

    def _nested(self) -> list[torch.Tensor]:
        """For each level, from coarse to fine, the group of each region ``(M,)``."""
        count, regions = int(self._cells.max()) + 1, self._how.regions
        levels = [torch.arange(count, device=self._cells.device)]
        across = max(regions.cells(tuple(self._cells.shape))) if isinstance(regions, Squares) else 0
        while across > COARSE:
            across = -(-across // 2)
            coarse = Squares(across)(self._seen[:1])[0]
            levels.insert(0, levels[-1].scatter(0, self._cells.flatten(), coarse.flatten()))
        return levels


def baseline_maps(baseline: Baseline) -> Attributions:
    """The need for a layer's feature maps ``(N, C, h, w)`` of photos of which nothing is left but the baseline."""
    answer = perturbations.AnswerTo(Activations())
    return Attributions(FullyMasked(baseline), answer, perturbations.InOrder())


def members(level: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
    """The groups of a level that have some of these regions ``(M,)``, as sets of these: ``(G, M)``.

    >>> members(torch.tensor([0, 0, 1, 2]), torch.tensor([True, True, False, True])).int()
    tensor([[1, 1, 0, 0],
            [0, 0, 0, 1]], dtype=torch.int32)
    """
    found: torch.Tensor = torch.unique(level[regions])
    return (level[None] == found[:, None]) & regions


def union(groups: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The unions of so many of the first groups ``(G, M)``: ``(len(lengths), M)``."""
    return groups.cumsum(0)[torch.tensor(lengths, device=groups.device) - 1] > 0
