"""What becomes of each word of an answer without parts of the photo, and without other words: one
set of altered inputs, from which all words are read."""

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch

from explain._utils.random_numbers import normal, seeded
from explain.answers.scoring import Scorer, Word
from explain.baselines.base import Baseline
from explain.methods.regions import Squares

ACROSS = 2  # squares that a window covers in each direction
DEVIATION = 1.4826  # of normal noise, over the median distance from its median


@dataclass(frozen=True, eq=False)
class Altered:
    """The log-probabilities of W words as they are, and of altered inputs. Those of several inputs
    are ``(..., W)``; ``other`` is None without another photo."""

    covered: torch.Tensor
    """Which squares each window covers, ``(windows, rows, columns)``."""
    whole: torch.Tensor
    # with the photo blank, and with another photo
    blank: torch.Tensor
    other: torch.Tensor | None
    # with each window of the photo covered; then without each word of the prompt and the answer;
    # then without all words before the second, the third, ... word of the answer
    windows: torch.Tensor
    prompt: torch.Tensor
    words: torch.Tensor
    without_all: torch.Tensor

    @cached_property
    def squares(self) -> torch.Tensor:
        """What each word loses in each square, ``(W, rows, columns)``: the mean drop over the
        windows that cover it."""
        drops = self.whole - self.windows
        covered = self.covered.to(drops)
        return torch.einsum("nw,nij->wij", drops, covered) / covered.sum(0)

    def lost_without(self, scores: torch.Tensor, word: int) -> tuple[float, ...]:
        """By how much one word drops in ``scores`` ``(b, W)``."""
        return tuple((self.whole[word] - scores[:, word]).tolist())


def count_of(scorer: Scorer, across: int, *, has_other: bool) -> int:
    """How many altered inputs `altered` runs."""
    windows = len(_windows(*Squares(across).cells(scorer.reading.sampling.size)))
    words = len(scorer.words) - 1
    return 2 + has_other + windows + len(scorer.prompt_words) + 2 * words


def altered(scorer: Scorer, across: int, baseline: Baseline, other: torch.Tensor | None) -> Altered:
    """Run the photo as it is, blank, as an ``other`` one ``(1, 3, h, w)``, and with each window of
    2 x 2 squares covered by the baseline; and the photo with words left out.
    """
    photo = scorer.photo
    device = photo.device
    squares = Squares(across)
    covered = _windows(*squares.cells(scorer.reading.sampling.size)).to(device)
    # of each window a mask (1, h, w): each pixel is covered as its square is
    keep = ~covered.flatten(1)[:, squares(photo)[0]][:, None]
    owners = torch.zeros(len(keep), dtype=torch.long, device=device)
    photos = [photo, blank_of(photo), *([] if other is None else [other])]
    photos.append(baseline.covering(photo)(owners, keep.to(photo)))
    # the last word of the answer has none behind it that would depend on it
    later = range(1, len(scorer.words))
    left_out: list[list[Word]] = [[word] for word in scorer.prompt_words]
    left_out += [[word] for word in scorer.words[:-1]]
    left_out += [list(scorer.words[:word]) for word in later]
    scores = scorer(torch.cat(photos))  # in the order of `photos`
    scores_without = scores[:0]  # none, where no word is left out
    if left_out:
        places = torch.stack([scorer.places_of(words) for words in left_out])
        scores_without = scorer(photo.expand(len(places), -1, -1, -1), places)
    prompt, words, without_all = torch.split(
        scores_without, [len(scorer.prompt_words), len(later), len(later)]
    )
    return Altered(
        covered=covered,
        whole=scores[0],
        blank=scores[1],
        other=None if other is None else scores[2],
        windows=scores[-len(keep) :],
        prompt=prompt,
        words=words,
        without_all=without_all,
    )


def blank_of(photo: torch.Tensor) -> torch.Tensor:
    """A photo ``(1, 3, h, w)`` of nothing: the median colour, with the noise of the half of the
    pixels that are nearest to it, as an even ground has."""
    pixels = photo.flatten(2)
    median = pixels.median(2, keepdim=True).values
    deviation = DEVIATION * (pixels - median).abs().median(2, keepdim=True).values
    noise = normal(pixels.shape, seeded(0)).to(photo)
    return (median + deviation * noise).clamp(0, 1).reshape(photo.shape)


def _windows(rows: int, columns: int) -> torch.Tensor:
    """Which of the squares each window covers, ``(windows, rows, columns)``."""
    high = min(ACROSS, rows)
    wide = min(ACROSS, columns)
    windows = []
    for top, left in product(range(rows - high + 1), range(columns - wide + 1)):
        window = torch.zeros(rows, columns, dtype=torch.bool)
        window[top : top + high, left : left + wide] = True
        windows.append(window)
    return torch.stack(windows)
