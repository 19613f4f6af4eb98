"""A check, its result, all results of one map, and the verdict on the maps of a photo."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from explain._utils.spelling import did_you_mean
from explain.metrics.base import Metric, MetricInput, MetricResult
from explain.metrics.table import NotEvaluatedError
from explain.metrics.variants import ModelContext

MARKS = {True: "✓", False: "✗", None: "–"}
WORDS = {True: "passed", False: "failed"}

SIMILAR = 0.5**0.5
"""The correlation from which on two maps share half of their variation, or more."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of one map.

    ``figure`` is what was measured, and NaN where nothing could be; ``passed`` is None where the check is not
    applicable, as of the class where a model has only one; ``reason`` says in one line why it passed or failed.

    >>> print(CheckResult("faithful", "faithful", 0.025, True, "no other position is as good"))
    ✓ faithful 0.025: no other position is as good
    """

    check: str
    word: str
    figure: float
    passed: bool | None
    reason: str

    @property
    def mark(self) -> str:
        """✓, ✗, or – where the check is not applicable."""
        return MARKS[self.passed]

    @property
    def shown(self) -> str:
        """The figure, rounded."""
        if math.isnan(self.figure):
            return "–"
        return f"{self.figure:.2f}" if abs(self.figure) >= 0.1 else f"{self.figure:.3f}"

    def to_dict(self) -> dict[str, Any]:
        figure = None if math.isnan(self.figure) else self.figure
        return {"passed": self.passed, "figure": figure, "reason": self.reason}

    def __str__(self) -> str:
        return f"{self.mark} {self.word} {self.shown}: {self.reason}"


@dataclass(frozen=True)
class Check(Metric):
    """A metric with a threshold: a frozen dataclass, which is a `ScoreMetric` or a `ReattributionMetric` as well.

    ``word`` names it under a picture.
    """

    word: ClassVar[str] = ""

    def not_applicable(self, context: ModelContext, data: MetricInput) -> str:
        """Why it is not applicable here; empty if it is."""
        return ""

    @property
    def reduced(self) -> Self:
        """The same check with the fewest runs, for methods that take long."""
        return self

    def decide(self, result: MetricResult) -> CheckResult:
        """Compare the figure of the first image with the threshold."""
        raise NotImplementedError

    def result(self, figure: float, passed: bool | None, reason: str) -> CheckResult:
        return CheckResult(self.name, self.word, figure, passed, reason)


@dataclass(frozen=True)
class CheckResults:
    """The results of all checks of one map; it passed if none of them failed, and at least one was applicable.

    ``notes`` are remarks, such as that the method was run with fewer samples.
    """

    method: str
    results: tuple[CheckResult, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[CheckResult]:
        return iter(self.results)

    @property
    def depends_on_model(self) -> CheckResult:
        return self._of("depends_on_model")

    @property
    def depends_on_class(self) -> CheckResult:
        return self._of("depends_on_class")

    @property
    def faithful(self) -> CheckResult:
        return self._of("faithful")

    @property
    def stable(self) -> CheckResult:
        return self._of("stable")

    def _of(self, check: str) -> CheckResult:
        return next(result for result in self.results if result.check == check)

    @property
    def passed(self) -> bool:
        return self.worst.passed is True

    @property
    def worst(self) -> CheckResult:
        """The result that decides: the first that failed, or else the first that passed."""
        return min(self.results, key=lambda result: [False, True, None].index(result.passed))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as records have them."""
        answers = {result.check: result.to_dict() for result in self.results}
        return {"passed": self.passed, "answers": answers, "notes": list(self.notes)}

    def __str__(self) -> str:
        lines = [f"{self.method} {WORDS[self.passed]}", *(f"  {result}" for result in self.results)]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Verdict(Mapping[str, CheckResults]):
    """Which maps of a photo pass the checks, by method: ``verdict["gradcam"].faithful.passed``.

    It prints itself: a line for each method, and the reasons of all failures. ``seed`` is that of all random draws.
    """

    target: str
    results: Mapping[str, CheckResults] = field(repr=False)
    seed: int = 0

    def __getitem__(self, method: str) -> CheckResults:
        if method not in self.results:
            raise NotEvaluatedError(f"method {method!r} was not checked here; {did_you_mean(method, self.results)}")
        return self.results[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def passed(self) -> dict[str, bool]:
        """Whether each method's map passed all applicable checks."""
        return {method: results.passed for method, results in self.results.items()}

    def updated(self, other: Verdict) -> Verdict:
        """The same with the results of another verdict on the same photo, which replace those of the same methods."""
        return replace(self, results={**self.results, **other.results}, seed=other.seed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the results of each method's map."""
        methods = {method: results.to_dict() for method, results in self.results.items()}
        return {"target": self.target, "seed": self.seed, "methods": methods}

    def lines(self) -> list[str]:
        """A table with a line for each method, and below it the reasons of all failures and all notes."""
        rows = [
            [method, *(f"{each.mark} {each.word} {each.shown}" for each in results), WORDS[results.passed]]
            for method, results in self.results.items()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        for method, results in self.results.items():
            lines += [f"  {method} {each.mark} {each.word}: {each.reason}" for each in results if not each.passed]
            lines += [f"  {method}: {note}" for note in results.notes]
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return str(self)
