"""What a verdict says: the answer to a question, all answers about a map, and those about all maps of a photo."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from explain._utils.spelling import did_you_mean
from explain.metrics.table import UnjudgedError

MARKS = {True: "✓", False: "✗", None: "–"}
WORDS = {True: "passed", False: "failed", None: "not asked"}


@dataclass(frozen=True)
class Answer:
    """The answer to one question about one map.

    ``figure`` is what was measured, and NaN where nothing could be; ``passed`` is None where the question cannot be
    asked, as of the class where a model has only one; ``reason`` says in one line why it passed or failed.

    >>> print(Answer("faithful", "faithful", 0.025, True, "no other place is as good"))
    ✓ faithful 0.025: no other place is as good
    """

    question: str
    word: str
    figure: float
    passed: bool | None
    reason: str

    @property
    def mark(self) -> str:
        """✓, ✗, or – where the question could not be asked."""
        return MARKS[self.passed]

    @property
    def shown(self) -> str:
        """The figure as people read it."""
        return (
            "–"
            if math.isnan(self.figure)
            else f"{self.figure:.2f}"
            if abs(self.figure) >= 0.1
            else f"{self.figure:.3f}"
        )

    def to_dict(self) -> dict[str, Any]:
        figure = None if math.isnan(self.figure) else self.figure
        return {"passed": self.passed, "figure": figure, "reason": self.reason}

    def __str__(self) -> str:
        return f"{self.mark} {self.word} {self.shown}: {self.reason}"


@dataclass(frozen=True)
class Answers:
    """The answers about one map; it passed if none of them failed, and at least one question could be asked.

    ``notes`` say what else must be known, such as that the method was asked with fewer samples.
    """

    method: str
    answers: tuple[Answer, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Answer]:
        return iter(self.answers)

    @property
    def depends_on_model(self) -> Answer:
        return self._named("depends_on_model")

    @property
    def depends_on_class(self) -> Answer:
        return self._named("depends_on_class")

    @property
    def faithful(self) -> Answer:
        return self._named("faithful")

    @property
    def stable(self) -> Answer:
        return self._named("stable")

    @property
    def passed(self) -> bool:
        return self.worst.passed is True

    @property
    def worst(self) -> Answer:
        """The answer that decides: the first that failed, or else the first that passed."""
        ranked = {False: 0, True: 1, None: 2}
        return min(self.answers, key=lambda answer: ranked[answer.passed])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as records have them."""
        answers = {answer.question: answer.to_dict() for answer in self.answers}
        return {"passed": self.passed, "answers": answers, "notes": list(self.notes)}

    def __str__(self) -> str:
        lines = [f"{self.method} {WORDS[self.passed]}", *(f"  {answer}" for answer in self.answers)]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return str(self)

    def _named(self, question: str) -> Answer:
        return next(answer for answer in self.answers if answer.question == question)


@dataclass(frozen=True)
class Verdict(Mapping[str, Answers]):
    """Which maps of a photo stand up to questions, by method: ``verdict["gradcam"].faithful.passed``.

    Each is the worst of its answers. It prints itself: a line for each method, and the reasons of what failed.
    ``seed`` is that of all that was drawn at random.
    """

    target: str
    answers: Mapping[str, Answers] = field(repr=False)
    seed: int = 0

    def __getitem__(self, method: str) -> Answers:
        if method not in self.answers:
            raise UnjudgedError(f"method {method!r} was not checked here; {did_you_mean(method, self.answers)}")
        return self.answers[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def passed(self) -> dict[str, bool]:
        """Whether each method's map passed all questions that could be asked."""
        return {method: answers.passed for method, answers in self.answers.items()}

    def with_answers(self, other: Verdict) -> Verdict:
        """The same with the answers of another verdict on the same photo, which count where both have some."""
        return replace(self, answers={**self.answers, **other.answers}, seed=other.seed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what each method's map was answered."""
        methods = {method: answers.to_dict() for method, answers in self.answers.items()}
        return {"target": self.target, "seed": self.seed, "methods": methods}

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return str(self)

    def lines(self) -> list[str]:
        """A table with a line for each method, and below it the reasons of what failed and all notes."""
        rows = [
            [method, *(f"{each.mark} {each.word} {each.shown}" for each in answers), WORDS[answers.passed]]
            for method, answers in self.answers.items()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return [*table, *self._reasons()]

    def _reasons(self) -> Iterator[str]:
        for method, answers in self.answers.items():
            for each in answers:
                if not each.passed:
                    yield f"  {method} {each.mark} {each.word}: {each.reason}"
            yield from (f"  {method}: {note}" for note in answers.notes)
