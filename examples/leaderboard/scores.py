"""How well a map fits the truth, in five ways; all in [0, 1], more being better.

square    of all squares as large as a mark, those with the largest sums, as many as there are marks:
          their overlap with the marks (IoU)
top       the share of the top pixels that lie on the marks, as many as the marks have
auc       the probability that a pixel of the marks has a larger value than another pixel
shapley   of the pairs of squares in the image whose Shapley values differ, the share that the map's
          sums order in the same way
removal   the same for the drop of the score when one square is removed

Equal values are in a random order: what counts is the mean over all orders (of equal squares, one
is taken at random). Pairs differ where the difference is more than a tenth of the range of the
scores.
"""

from __future__ import annotations

from itertools import combinations
from math import factorial

import torch
import torch.nn.functional as F

SCORES = {
    "square": "best square",
    "top": "top pixels",
    "auc": "pixel AUC",
    "shapley": "parts, Shapley",
    "removal": "parts, removal",
}
DIFFERENCE = 0.1  # of the range of the scores


def best_squares(values: torch.Tensor, mask: torch.Tensor, marks: int) -> float:
    """The overlap (IoU) of the best squares of a map ``(H, W)`` with marks; 0 for a constant map.

    >>> mask = torch.zeros(8, 8, dtype=torch.bool)
    >>> mask[2:4, 4:6] = True
    >>> best_squares(mask.float(), mask, 1), best_squares(mask.float().roll(1, 0), mask, 1)
    (1.0, 0.3333333333333333)
    """
    if values.max() == values.min():
        return 0.0
    side = round((int(mask.sum()) / marks) ** 0.5)
    sums = F.avg_pool2d(values.double()[None, None], side, 1)[0, 0]
    shuffle = torch.rand(sums.shape, generator=torch.Generator().manual_seed(0))
    sums = sums + 1e-9 * float(values.abs().max()) * shuffle  # breaks ties
    chosen = torch.zeros_like(mask)
    for _ in range(marks):
        place = int(sums.argmax())
        top = place // sums.shape[1]
        left = place % sums.shape[1]
        chosen[top : top + side, left : left + side] = True
        # the next square does not overlap with this one
        sums[
            max(0, top - side + 1) : top + side, max(0, left - side + 1) : left + side
        ] = -torch.inf
    shared = float((chosen & mask).sum())
    return shared / float((chosen | mask).sum())


def top_share(values: torch.Tensor, mask: torch.Tensor) -> float:
    """The share of the top pixels of a map ``(H, W)`` that are in a mask of so many pixels.

    >>> top_share(torch.tensor([[3.0, 1.0, 1.0, 0.0]]), torch.tensor([[True, True, False, False]]))
    0.75
    """
    count = int(mask.sum())
    limit = values.flatten().sort(descending=True).values[count - 1]
    larger = values > limit
    equal = values == limit
    free = count - int(larger.sum())
    hits = float((larger & mask).sum()) + free * float((equal & mask).sum()) / float(equal.sum())
    return hits / count


def pixel_auc(values: torch.Tensor, mask: torch.Tensor) -> float:
    """The probability that a pixel in a mask has a larger value than one that is not; half for
    equal ones.

    >>> pixel_auc(torch.tensor([[3.0, 1.0, 1.0, 0.0]]), torch.tensor([[True, True, False, False]]))
    0.875
    """
    mine = values[mask].double()
    rest = values[~mask].double().sort().values
    smaller = torch.searchsorted(rest, mine)
    not_larger = torch.searchsorted(rest, mine, right=True)
    return float((smaller + not_larger).double().mean()) / (2 * len(rest))


def shapley_values(scores: torch.Tensor) -> torch.Tensor:
    """Exact Shapley values ``(M,)`` of parts, from the scores of all sets of them ``(2 ** M,)``.

    >>> shapley_values(torch.tensor([0.0, 1.0, 0.0, 5.0])).tolist()
    [3.0, 2.0]
    """
    total = len(scores).bit_length() - 1
    values = torch.zeros(total, dtype=torch.float64)
    for subset in range(len(scores)):
        size = subset.bit_count()
        for part in range(total):
            if subset >> part & 1:
                continue
            weight = factorial(size) * factorial(total - size - 1) / factorial(total)
            values[part] += weight * float(scores[subset | 1 << part] - scores[subset])
    return values


def removal_values(scores: torch.Tensor) -> torch.Tensor:
    """How far the score falls without each part ``(M,)``, from the scores of all sets of them.

    >>> removal_values(torch.tensor([0.0, 1.0, 0.0, 5.0])).tolist()
    [5.0, 4.0]
    """
    total = len(scores).bit_length() - 1
    last = len(scores) - 1
    drops = [float(scores[last] - scores[last ^ 1 << part]) for part in range(total)]
    return torch.tensor(drops, dtype=torch.float64)


def ordered_pairs(sums: torch.Tensor, worth: torch.Tensor, least: float) -> float:
    """Of the pairs of parts whose worth differs by more than ``least``, the share that ``sums``
    orders in the same way; NaN where there is none.

    >>> ordered_pairs(torch.tensor([3.0, 1.0, 1.0]), torch.tensor([1.0, 0.0, 0.5]), 0.1)
    0.8333333333333334
    """
    points = []
    for one, other in combinations(range(len(worth)), 2):
        difference = float(worth[one] - worth[other])
        if abs(difference) <= least:
            continue
        agreement = float(sums[one] - sums[other]) * difference
        points.append(0.5 if agreement == 0 else float(agreement > 0))
    return sum(points) / len(points) if points else float("nan")


def all_scores(
    values: torch.Tensor, mask: torch.Tensor, marks: int, parts: torch.Tensor, scores: torch.Tensor
) -> dict[str, float]:
    """The five scores of a map ``(H, W)``; ``parts`` ``(M, H, W)`` are the squares of the image,
    ``scores`` ``(2 ** M,)`` the network's for each set of them."""
    values = values.double()
    means = (values * parts).sum((1, 2)) / parts.sum((1, 2))
    least = DIFFERENCE * float(scores.max() - scores.min())
    return {
        "square": best_squares(values, mask, marks),
        "top": top_share(values, mask),
        "auc": pixel_auc(values, mask),
        "shapley": ordered_pairs(means, shapley_values(scores), least),
        "removal": ordered_pairs(means, removal_values(scores), least),
    }
