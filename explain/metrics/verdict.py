"""`Verdict`: what checks say of the maps of a photo, and what they say of many photos."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from explain._utils.errors import (
    MetricError,
    did_you_mean,
    shown,
)
from explain._utils.html import aligned, lines_html, table_html
from explain.methods.base import title_of
from explain.metrics.evaluation import NotEvaluatedError
from explain.metrics.sanity import (
    LEVEL,
    Answer,
    Check,
    CheckResult,
)

ORDER: tuple[Answer, ...] = ("contradicted", "not shown", "supported", "not applicable")
"""The first answer of a map's checks in this order is that of the map."""


@dataclass(frozen=True, repr=False)
class CheckResults:
    """The results of all checks of one map. It is supported if all that are applicable support it,
    contradicted if one of them contradicts it, and else it is not shown.

    ``notes`` are remarks, such as that the method was run with fewer samples.
    """

    method: str
    results: tuple[CheckResult, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[CheckResult]:
        return iter(self.results)

    def __getattr__(self, check: str) -> CheckResult:
        """The result of a check by its name, such as ``results.faithful``; Python asks only for
        names that are no attributes."""
        by_check: dict[str, CheckResult] = {
            result.check: result for result in vars(self).get("results", ())
        }
        if check not in by_check:
            raise AttributeError(f"no check {check!r} in these results")
        return by_check[check]

    @property
    def answer(self) -> Answer:
        """What the checks say of the map together."""
        return self.worst.answer

    @property
    def passed(self) -> bool:
        """Whether they support it."""
        return self.answer == "supported"

    @property
    def worst(self) -> CheckResult:
        """The result that decides: the first that contradicts the map, or else the first that does
        not show it, or else the first that supports it."""
        return min(self.results, key=lambda result: ORDER.index(result.answer))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as records on disk have them; these keys stay."""
        answers = {result.check: result.to_dict() for result in self.results}
        notes = list(self.notes)
        return {"passed": self.passed, "answer": self.answer, "answers": answers, "notes": notes}

    def __str__(self) -> str:
        lines = [f"{self.method} {self.answer}", *(f"  {result}" for result in self.results)]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Verdict(Mapping[str, CheckResults]):
    """What the checks say of the maps of a photo, by method: ``verdict["gradcam"].answer``, and
    ``verdict["gradcam"].faithful.passed``.

    It prints itself with a line for each method; `lines` has all details. ``seed`` is that of all
    random draws, and ``advice`` what to do about maps that are not supported.
    """

    target: str
    results: Mapping[str, CheckResults]
    seed: int = 0
    advice: tuple[str, ...] = ()

    def __getitem__(self, method: str) -> CheckResults:
        if method not in self.results:
            raise NotEvaluatedError(
                f"method {method!r} was not checked here; {did_you_mean(method, self.results)}"
            )
        return self.results[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def answers(self) -> dict[str, Answer]:
        """Whether each method's map is supported, not shown, or contradicted."""
        return {method: results.answer for method, results in self.results.items()}

    @property
    def passed(self) -> dict[str, bool]:
        """Whether each method's map is supported by all applicable checks."""
        return {method: results.passed for method, results in self.results.items()}

    @property
    def faithful_after_holm(self) -> list[str]:
        """The methods whose map is still faithful after Holm's correction for the number of maps
        that were tested.

        Of twenty maps that know nothing, one passes the check by chance; after the correction, with
        a probability of at most the level, none of them does.

        Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979.
        """
        tested = {
            method: check.figure
            for method, check in self._of_faithful().items()
            if check.figure <= 1
        }
        kept: list[str] = []
        for method in sorted(tested, key=tested.__getitem__):
            if not tested[method] * (len(tested) - len(kept)) <= LEVEL:
                break
            kept.append(method)
        return kept

    def _of_faithful(self) -> dict[str, CheckResult]:
        """The result of the check `Faithful` by method, for methods that have one."""
        checks = ((method, check) for method, results in self.results.items() for check in results)
        return {method: check for method, check in checks if check.check == "faithful"}

    def updated(self, other: "Verdict") -> "Verdict":
        """This verdict with the results of a later one on the same photo and target, which replace
        those of the same methods; target, seed and advice are the later one's."""
        return replace(other, results={**self.results, **other.results})

    @staticmethod
    def summary(verdicts: "Iterable[Verdict]") -> "Summary":
        """Count over the verdicts on many photos how often the map of each method passes each
        check, as a table with intervals.

        >>> good, bad = (CheckResult("faithful", "faithful", p, p < 0.05, "") for p in (0.01, 0.5))
        >>> print(
        ...     Verdict.summary(
        ...         Verdict("cat", {"lrp": CheckResults("lrp", (each,))})
        ...         for each in (good, good, bad)
        ...     )
        ... )
        method  all             faithful
        lrp     67% (21 to 94)  67% (21 to 94)
        """
        listed = list(verdicts)
        if not listed or not all(isinstance(verdict, Verdict) for verdict in listed):
            raise MetricError(
                "verdicts must be one or more of check(), one for each photo, got "
                f"{shown(verdicts)}"
            )
        passed: dict[str, dict[str, list[bool]]] = {}
        for verdict in listed:
            for method, results in verdict.items():
                checks_of_method = passed.setdefault(method, {})
                results_by_name = {
                    "all": results.worst,
                    **{result.check: result for result in results},
                }
                for name, result in results_by_name.items():
                    outcomes = checks_of_method.setdefault(name, [])
                    if result.passed is not None:
                        outcomes.append(result.passed)
        shares = {
            method: {name: Share(sum(passes), len(passes)) for name, passes in checks.items()}
            for method, checks in passed.items()
        }
        return Summary(shares)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as records on disk have them: the results of each method's map."""
        methods = {method: results.to_dict() for method, results in self.results.items()}
        return {"target": self.target, "seed": self.seed, "methods": methods}

    def _repr_html_(self) -> str:
        """The verdict as an HTML table, for notebooks."""
        checks = [check.word for check in next(iter(self.results.values()), ())]
        rows = [
            [
                title_of(method),
                results.answer,
                *(f"{check.mark} {check.shown}" for check in results),
            ]
            for method, results in self.results.items()
        ]
        table = table_html(
            ["method", "map", *checks], rows, f"Sanity checks of the maps for {self.target}"
        )
        return table + lines_html(line.strip() for line in self.details())

    def lines(self, *, verbose: bool = False) -> list[str]:
        """The text of the verdict: a line for each method, and with ``verbose`` the `details`."""
        rows = []
        for method, results in self.results.items():
            marks = [f"{check.mark} {check.word} {check.shown}" for check in results]
            rows.append([method, results.answer, *marks])
        return aligned(rows) + (self.details() if verbose else [])

    def details(self) -> list[str]:
        """Indented lines with the reasons of all that is not supported, notes, which maps are
        faithful after Holm's correction (where that changes anything), and advice."""
        lines = []
        for method, results in self.results.items():
            failed = [check for check in results if not check.passed]
            lines += [f"  {method} {check.mark} {check.word}: {check.reason}" for check in failed]
            lines += [f"  {method}: {note}" for note in results.notes]
        kept = self.faithful_after_holm
        if any(
            check.passed and method not in kept for method, check in self._of_faithful().items()
        ):
            names = ", ".join(kept) or "none"
            lines.append(
                f"  faithful after Holm's correction for {len(self.results)} maps: {names}"
            )
        return [*lines, *(f"  {line}" for line in self.advice)]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


@dataclass(frozen=True)
class Share:
    """``passed`` of ``count`` maps.

    >>> print(Share(9, 10))
    90% (60 to 98)
    """

    passed: int
    count: int

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the share, from 0 to 1, by Wilson's formula; the whole range if
        there is no map."""
        if not self.count:
            return 0.0, 1.0
        share = self.passed / self.count
        z = 1.96**2 / self.count
        half = math.sqrt(z * share * (1 - share) + z * z / 4)
        return max(0.0, (share + z / 2 - half) / (1 + z)), min(
            1.0, (share + z / 2 + half) / (1 + z)
        )

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.passed / self.count:.0%} ({100 * low:.0f} to {100 * high:.0f})"
            if self.count
            else "–"
        )


@dataclass(frozen=True, repr=False)
class Summary:
    """How often the maps of each method pass each check, on many photos:
    ``summary.shares["gradcam"]["faithful"]``.

    "all" counts the maps that pass all checks. A check counts only maps that it applies to. It
    prints as a table.
    """

    shares: Mapping[str, Mapping[str, Share]]

    def __str__(self) -> str:
        """The shares of passed checks as a table of text, a line for each method."""
        names = dict.fromkeys(chain.from_iterable(self.shares.values()))
        rows = [["method", *names]]
        for method, shares in self.shares.items():
            rows.append([method, *(str(shares.get(name, Share(0, 0))) for name in names)])
        return "\n".join(aligned(rows))

    __repr__ = __str__


def advice_on(maps: Mapping[str, CheckResults], checks: Sequence[Check]) -> Iterator[str]:
    """Yield what to do about maps that checks contradict: a line for each check, in which no method
    is recommended whose own map is not supported. ``maps`` are the results by method."""
    failed = [name for name, results in maps.items() if not results.passed]
    for check in checks:
        contradicted = [
            name
            for name, results in maps.items()
            if any(
                result.check == check.name and result.answer == "contradicted" for result in results
            )
        ]
        advice = check.advice_for(failed) if contradicted else ""
        if advice:
            yield f"{check.word} ({', '.join(contradicted)}): {advice}"
