"""Answers in words that do not rest on the photo."""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from explain.answers.grounding import mark_of
from explain.insight.maps import short
from explain.store.reading import StoredRun

MANY = 5
NEARLY = 0.8  # share of the photos where a word of habit is guessed
LOW = 0.2  # share of the photo in the words of an answer, below which it rests on something else


@dataclass(frozen=True)
class Ungrounded:
    """An answer that does not rest on its photo: ``guessed`` words were said whatever was there;
    ``image`` is the photo's mean share in the words, NaN where the method sees the photo alone."""

    photo: str
    answer: str
    guessed: str
    image: float

    @property
    def name(self) -> str:
        """The end of the photo's name."""
        return short(self.photo)


def ungrounded(run: StoredRun, method: str) -> list[Ungrounded] | None:
    """Return answers with guessed words, or whose words the photo has less than a fifth of, the
    smallest share first; None for a run without answers."""
    if "greyed" not in run.metrics:
        return None
    said = Counter[str]()
    guessed = Counter[str]()
    answers = []
    # greyed words do not count
    of_words = (row for row in run.rows(method) if not row.metrics["greyed"])
    for name, rows_of_photo in groupby(of_words, key=lambda row: row.name):
        words = list(rows_of_photo)
        # without a figure, nothing says that a word rests on the photo
        marks = {row.target: mark_of(row.metrics["grounded"] or 0) for row in words}
        guesses = [word for word, mark in marks.items() if mark == "guessed"]
        said.update([*marks])
        guessed.update(guesses)
        shares = [row.metrics.get("image", math.nan) for row in words]
        image = fmean(math.nan if share is None else share for share in shares)
        answers.append((name, words[0].prediction or "", guesses, image))
    # guessed in nearly all of many photos, as "of" is: these say nothing of one photo
    habits = {word for word in said if said[word] >= MANY and guessed[word] >= NEARLY * said[word]}
    listed = []
    for name, answer, guesses, image in answers:
        remarkable = [word for word in guesses if word not in habits]
        if remarkable or image < LOW:  # false for NaN
            listed.append(Ungrounded(name, answer, ", ".join(remarkable), image))
    return sorted(listed, key=lambda answer: (not answer.guessed, answer.image))
