"""The smallest evidence of a word: regions of the photo that are enough for it, or that it cannot
do without."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from explain._utils.errors import MethodError, check_choice, check_whole_number, muted
from explain.answers.scoring import Scorer
from explain.attribution.api import attribute
from explain.attribution.result import Attribution
from explain.baselines.base import Baseline
from explain.engine.settings import Progress
from explain.methods.evidence import EvidenceSet, Necessary, Proof, Sufficient
from explain.methods.regions import Squares

Kind = Literal["sufficient", "necessary"]
KINDS = {"sufficient": Sufficient, "necessary": Necessary}
KEPT = 0.9  # share of the word's probability that has to stay


@dataclass(frozen=True, eq=False)
class WordEvidence:
    """A set of regions of the photo for a word, found by ``passes`` of at most ``budget`` altered
    photos; ``attribution`` has its map, and ``smallest`` is the set, None without one."""

    kind: Kind
    attribution: Attribution
    smallest: EvidenceSet | None
    # the word's; ``alone`` is that with the set alone, ``without`` that with only the set covered
    probability: float
    budget: int
    passes: int

    @property
    def mask(self) -> torch.Tensor:
        """Which part of the photo is in the set, ``(h, w)``, laid over the whole photo."""
        if self.smallest is None:
            return torch.zeros(self.attribution.size, dtype=torch.bool)
        return self.smallest.mask

    @property
    def size(self) -> float:
        """The share of the photo in the set."""
        return float(self.mask.double().mean())

    @property
    def alone(self) -> float | None:
        return None if self.smallest is None else float(self.smallest.alone)

    @property
    def without(self) -> float | None:
        return None if self.smallest is None else float(self.smallest.without)

    @property
    def proof(self) -> Proof:
        return "none" if self.smallest is None else self.smallest.proof

    @property
    def text(self) -> str:
        """What was found in a sentence, with the budget."""
        within = f"{self.passes} of {self.budget} altered photos"
        if self.smallest is None:
            return f"no part of the photo is {self.kind} for the word ({within})"
        how = "covered leaves"
        left = self.smallest.without
        if self.kind == "sufficient":
            how = "alone keeps"
            left = self.smallest.alone
        return (
            f"{100 * self.size:.0f} % of the photo {how} "
            f"a probability of {100 * left:.0f} % (with all of it {100 * self.probability:.0f} %; "
            f"{self.proof}, {within})"
        )

    def to_dict(self) -> dict[str, Any]:
        """The set in plain values, without its mask."""
        names = ("kind", "size", "alone", "without", "proof", "probability", "budget", "passes")
        return {**{name: getattr(self, name) for name in names}, "text": self.text}


def evidence_of(
    scorer: Scorer,
    word: int,
    baseline: Baseline,
    kind: Any,
    budget: int,
    squares: int,
    progress: Progress | None = None,
) -> WordEvidence:
    """The smallest set of ``squares`` across that is sufficient or necessary for word number
    ``word``."""
    check_choice("kind", kind, tuple(KINDS), error=MethodError)
    check_whole_number("budget", budget, 1, error=MethodError)
    check_whole_number("squares", squares, 1, error=MethodError)
    method = KINDS[kind](Squares(squares), baseline, keep=KEPT, samples=budget)

    def probability(output: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The word's probability in each altered photo."""
        return output["answer"][:, word].exp()

    inputs = scorer.photo_inputs
    with muted():  # of words that need no part of the photo, which the result says
        attribution = attribute(
            scorer.model,
            inputs,
            method,
            target=probability,
            batch_size=scorer.batch_size,
            progress=progress,
        )
    sets = attribution.sets[0] if attribution.sets else ()
    return WordEvidence(
        kind,
        attribution,
        smallest=sets[0] if sets else None,
        probability=float(attribution.score),
        budget=budget,
        passes=attribution.samples or 0,
    )
