"""Grounded or guessed: how probable a word is without the photo, and without the words before
it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from explain.answers.occlusion import Altered

Mark = Literal["grounded", "guessed", "unclear"]

HALF = 0.5  # share of its probability that a grounded word loses without what it is grounded in
LITTLE = 0.2  # share that a guessed word loses at most
LEAST = 1e-12


def mark_of(value: float) -> Mark:
    """The mark of a word of whose probability the photo accounts for a share of ``value``."""
    if value >= HALF:
        return "grounded"
    return "guessed" if value <= LITTLE else "unclear"


@dataclass(frozen=True)
class Grounding:
    """How probable a word is: as it stands, with the photo blank, with the part covered that it
    needs most, with another photo, and without the words before it (None where not run)."""

    probability: float
    without_image: float
    without_part: float
    # not counted: it may show the same, or what the word goes against
    with_other_photo: float | None
    without_words: float | None

    @property
    def value(self) -> float:
        """The share of the word's probability that the photo accounts for: what it loses without
        the photo, or without the part that it needs most, whichever is more."""
        return self._lost(min(self.without_image, self.without_part))

    @property
    def reference(self) -> float | None:
        """The share that the words before account for, in the same way; None for the first."""
        return None if self.without_words is None else self._lost(self.without_words)

    @property
    def mark(self) -> Mark:
        """Whether the word is "grounded" in the photo, "guessed", or "unclear"."""
        return mark_of(self.value)

    @property
    def text(self) -> str:
        """The mark with its numbers, in a few words."""
        probabilities = {
            "": self.probability,
            " without the photo": self.without_image,
            " without a part": self.without_part,
            " with another": self.with_other_photo,
            " without the words before": self.without_words,
        }
        texts = [
            f"{100 * probability:.0f} %{how}"
            for how, probability in probabilities.items()
            if probability is not None
        ]
        return f"{self.mark}: {', '.join(texts)}"

    def to_dict(self) -> dict[str, Any]:
        """All figures in plain values, with the mark and the text."""
        derived = {
            "value": self.value,
            "reference": self.reference,
            "mark": self.mark,
            "text": self.text,
        }
        return {**asdict(self), **derived}

    def _lost(self, left: float) -> float:
        """The share of the word's probability that is gone where ``left`` is left of it."""
        return max(0.0, 1 - left / max(self.probability, LEAST))


def grounding_of(altered: Altered, word: int) -> Grounding:
    """Whether a word of the answer, by its number, is grounded."""
    without_words = None
    # the first row is for the second word, as the first has none before it
    if word and altered.without_all[word - 1, word].isfinite():  # some models need a word before
        without_words = float(altered.without_all[word - 1, word].exp())
    return Grounding(
        probability=float(altered.whole[word].exp()),
        without_image=float(altered.blank[word].exp()),
        without_part=float(altered.windows[:, word].min().exp()),
        with_other_photo=None if altered.other is None else float(altered.other[word].exp()),
        without_words=without_words,
    )
