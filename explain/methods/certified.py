"""Maps with a guarantee: which places stay among the largest ones whatever small change is made to
the image."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from explain.engine import Evidence, Need
from explain.engine.needs import applied
from explain.methods.base import (
    Citation,
    Method,
    Outcome,
    cited,
    over_all,
    register_wrapper,
    uses_layer,
)
from explain.methods.estimates import Estimate, EstimateMethod, Estimator
from explain.methods.wrappers import NoisyCopies, span

LOOKS = ((0.25, 0.05), (0.5, 0.1), (1.0, 0.85))
"""After which shares of the copies places are decided, and each time's share of the error."""
LEAST_SIDE = 4
ACROSS = 20
"""Pixels and their part of the longer side that squares are wide, which are decided as one."""
WORTH = 0.01  # share of the places that further copies have to decide, or else none are run


@lru_cache(maxsize=64)
def chances(copies: int, agreement: float, places: int) -> torch.Tensor:
    """Return the largest chance ``(M,)``, in float64, of a false answer in a map of ``places``,
    where at most m of the ``copies`` contradict it, for each m below one half."""
    against = torch.arange((copies + 1) // 2, dtype=torch.float64, device="cpu")
    total = torch.tensor(float(copies), dtype=torch.float64, device="cpu")
    # logarithms of the binomial coefficients, which would overflow
    log_ways = (total + 1).lgamma() - (against + 1).lgamma() - (total - against + 1).lgamma()

    def at_most(share: float) -> torch.Tensor:
        """The chance that at most m copies contradict, where a ``share`` of all copies does."""
        logs = log_ways + against * math.log(share) + (total - against) * math.log1p(-share)
        return logs.exp().cumsum(0)

    # Where neither answer is true, the chance is largest if a share ``agreement`` agrees: on the
    # answer given, or (the + 1) on the other one. The opposite of the truth, which as many
    # contradict, may be given for any place.
    return at_most(1 - agreement) + (places + 1) * at_most(agreement)


def decided(
    against: torch.Tensor, copies: int, agreement: float, error: float, sides: Sequence[int] = (1,)
) -> torch.Tensor:
    """Return which places of a map ``(..., h, w)`` are decided where so many ``copies`` are
    ``against`` the answer of most; any decision is wrong with a chance of at most ``error``."""
    chances_by_against = chances(copies, agreement, against.numel())
    maps = against.reshape(-1, 1, *against.shape[-2:]).double()
    is_decided = torch.zeros_like(maps, dtype=torch.bool)
    # A false decision on a square needs one on each of its places, so a square counts once. Sides
    # share the error equally, the squares of one side by Holm's step-down procedure: what has been
    # decided leaves more of the error to the others.
    for side in sides:
        worst = F.max_pool2d(maps, side, ceil_mode=True)
        sure_count = 0
        while sure_count < worst.numel():
            level = error / len(sides) / (worst.numel() - sure_count)
            # chances grow with the copies against: the first too large one is at this number
            too_many = int((chances_by_against <= level).sum())
            is_sure = worst < too_many
            if int(is_sure.sum()) == sure_count:
                break
            sure_count = int(is_sure.sum())
        if sure_count:
            in_places = is_sure.repeat_interleave(side, -2).repeat_interleave(side, -1)
            # the last squares may reach beyond the map
            is_decided |= in_places[..., : maps.shape[-2], : maps.shape[-1]]
    return is_decided.reshape(against.shape)


@dataclass(frozen=True)
class InTop:
    """Which places of a method's map are larger than all but the ``share`` of the largest ones, as
    truth values ``(b, H, W)``, by what a picture shows of it."""

    method: Method
    share: float

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return self.method.needs

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        values = applied(self.method, evidence).detach()
        neutral = self.method.outcome(evidence).neutral
        if neutral is not None:
            values = values - over_all(neutral, values).to(values)
        # what is shown is as in the heatmap of a result
        is_signed = self.method.style == "signed"
        has_channels = values.ndim == evidence.inputs.ndim
        if has_channels:
            shown = values.sum(1).abs() if is_signed else values.abs().amax(1)
        else:
            # of a layer's signed map, pictures show the positive part
            shows_both_signs = is_signed and evidence.layer is None
            shown = values.abs() if shows_both_signs else values.clamp(min=0)
            shown = evidence.on_photo(shown[:, None])[:, 0]
        falling = shown.flatten(1).sort(1, descending=True).values
        # the largest value that is not in the share: equal ones are out too
        border = falling[:, int(self.share * falling.shape[1])]
        return shown > over_all(border, shown)


class Votes(Estimator):
    """How many noisy copies of one image have each place in the top share, and what is decided by
    them: 1 in the top share, -1 not, 0 open."""

    votes: torch.Tensor
    answers: torch.Tensor

    def __init__(self, method: "Certified") -> None:
        self._method = method
        self.count = method.samples
        # neighbours in a map of single pixels have little in common
        self._has_squares = uses_layer(method)
        # those to come: after how many copies, and with what chance of a false answer
        self._looks = [
            (math.ceil(share * method.samples), error_share * (1 - method.confidence))
            for share, error_share in LOOKS
        ]
        self.taken = 0

    @property
    def decided(self) -> bool:  # type: ignore[override]
        return not self._looks

    @property
    def next_look(self) -> int:
        return self._looks[0][0]

    def take(self, first: int, scores: torch.Tensor) -> None:
        """Take which places the next copies ``(b, ...)`` have in the top share, and decide at fixed
        numbers of copies."""
        if first == 0:  # the shape of the map is known from the first copies
            self.votes = torch.zeros_like(scores[0])
            self.answers = self.votes
        self.taken = first + len(scores)
        self.votes = self.votes + scores.sum(0)
        if self.taken == self.next_look:
            self._decide()

    def estimate(self) -> Estimate:
        return Estimate(self.answers)

    def _decide(self) -> None:
        """Decide what can be; end where the copies to come would decide little more."""
        votes = self.votes
        copies, error = self._looks.pop(0)
        against = torch.minimum(votes, copies - votes)
        agreement = self._method.agreement
        side = max(LEAST_SIDE, max(votes.shape) // ACROSS)
        sides = (1, side) if self._has_squares else (1,)
        is_decided = decided(against, copies, agreement, error, sides)
        is_open = self.answers == 0
        answers_of_most = (2 * votes - copies).sign()
        self.answers = torch.where(is_open & is_decided, answers_of_most, self.answers)
        if not self._looks:
            return
        # what the last look would decide if the same share of the copies to come were against
        all_copies, last_error = self._looks[-1]
        expected_against = (against * all_copies).double() / copies
        expected = decided(expected_against, all_copies, agreement, last_error, sides)
        if float((expected & (self.answers == 0)).double().mean()) < WORTH:
            self._looks.clear()


@dataclass(frozen=True)
class Certified(EstimateMethod):
    r"""Which places of a method's map stay in its top share, or out of it, however the photo is
    changed within a radius; a guarantee by randomised smoothing.

    The smoothed map has a place in the top ``share`` if most noisy copies of the photo
    (:math:`\varepsilon \sim \mathcal N(0, s^2)`, :math:`s` = ``sigma`` times the photo's range)
    have. Where a share ``agreement`` of all copies agrees, no change of the photo with an L2 norm
    below :math:`s\,\Phi^{-1}(\text{agreement})` can turn that answer (Cohen et al., ICML 2019).
    Whether so many agree is tested on ``samples`` copies, exactly, by binomials: with a probability
    of at least ``confidence`` over the noise, *all* answers of an image are right. What cannot be
    told abstains. Single pixels share the error; for maps of a layer, which are smooth, half of it
    is for squares of a twentieth of the side: each counts once, since it is answered only where all
    of its pixels would be. Three looks at the copies share it too, the first after a quarter; they
    end early where more copies would decide less than one pixel in a hundred.

    Args:
        method: any method; its name goes into this one's: ``certified(gradcam)``. What its heatmap
            shows is ranked, in pixels.
        sigma: the standard deviation of the noise relative to the range of the image's values.
        share: of the places, how many are the top ones; equal values at the border are out.
        confidence: the chance, at least, that no answer of an image is wrong.
        samples: how many copies, at most.
        agreement: the share of the copies that has to agree, above one half: more make the radius
            larger, and fewer places certain.
        seed: of the noise; every image gets the same.

    Returns:
        1 in the top share, −1 not in it, 0 abstains: ``(N, H, W)``. ``certified`` of the result has
        it as whole numbers, and ``radius`` ``(N,)`` the L2 norm of a change of the input below
        which it holds.

    Anani et al., "Pixel-level Certified Explanations via Randomized Smoothing", ICML 2025
    (arXiv:2506.15499).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)).double()
    >>> _ = model[1].weight.data.copy_(torch.tensor([[3.0, 0.1, 0.2, 2.0], [0, 0, 0, 0]]))
    >>> x = torch.eye(2, dtype=torch.float64)[None, None]
    >>> a = explain.attribute(model, x, "certified(saliency)", target=0)
    >>> a.certified.tolist(), round(float(a.radius), 3)
    ([[[1, -1], [-1, 1]]], 0.101)
    """

    method: Method
    sigma: float = 0.15
    share: float = 0.5
    confidence: float = 0.999
    samples: int = 400
    agreement: float = 0.75
    seed: int = 0

    minimums = {"samples": 1, "sigma": 0, "share": 0, "confidence": 0, "agreement": 0.5}
    below = {"share": 1, "confidence": 1, "agreement": 1}
    style = "certified"
    one_input = True
    references = frozenset[Need[Any]]()
    differentiable = False

    @property
    def name(self) -> str:
        return f"certified({self.method.name})"

    @property
    def summary(self) -> str:
        return f"places certified to be in the top share of {self.method.name}, or not"

    @property
    def source(self) -> Citation:
        return cited("anani2025certified")

    @property
    def perturbation(self) -> NoisyCopies:
        return NoisyCopies(self.samples, self.sigma, self.seed)

    @property
    def read(self) -> InTop:
        return InTop(self.method, self.share)

    def estimators(self, evidence: Evidence) -> list[Estimator]:
        return [Votes(self) for _ in evidence.inputs]

    def radius(self, x: torch.Tensor) -> torch.Tensor:
        """The L2 norm of a change below which the answers hold, ``(N,)``, for inputs ``x``."""
        quantile = math.sqrt(2) * torch.erfinv(torch.tensor(2 * self.agreement - 1).double())
        return self.sigma * span(x).flatten() * quantile.to(x)

    def outcome(self, evidence: Evidence) -> Outcome:
        return replace(super().outcome(evidence), radius=self.radius(evidence.inputs))


register_wrapper("certified", Certified)
