"""`check_maps`: what four metrics say of the maps of one photo, in words."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isqrt
from typing import Any, Literal

import torch
from torch import nn

from explain._utils.errors import (
    ExplainError,
    MethodError,
    MetricError,
    did_you_mean,
    muted,
    naming,
)
from explain._utils.html import lines_html, table_html
from explain._utils.rounding import finite_or_none
from explain.attribution.api import attribute, plan
from explain.attribution.options import Settings
from explain.attribution.result import Attribution
from explain.methods.base import Method, title_of
from explain.methods.base import options as options_of
from explain.metrics.base import Metric, MetricResult
from explain.metrics.covering import Covering
from explain.metrics.evaluation import NotEvaluatedError, Table, evaluate
from explain.metrics.maps import Maps
from explain.metrics.randomisation import MPRT, RandomLogit
from explain.metrics.robustness import Sensitivity
from explain.metrics.supported import SIMILAR
from explain.targets import Target, as_target

Mark = Literal["✓", "?", "✗"]

LITTLE = 0.5
"""The correlation up to which two maps share a quarter of their variation, or less."""

AHEAD = 15 / 16
"""The share of the other places than which the marked part has to matter more."""

MOST_PASSES = 11
"""Passes for one map from which on a method is run again with fewer samples, or not at all: nine
maps of these, and 44 covered photos, are fewer than 240."""

FEWER = (10, 5, 3)
COUNTS = ("samples", "steps")


@dataclass(frozen=True)
class CheckResult:
    """One figure of a map: its ``value`` beside that of a ``reference``, a ``mark`` (✓, ? or ✗) by
    thresholds, and a ``text``. What could not be measured is NaN and marked with ?.

    >>> print(CheckResult("class", 0.21, 1.0, "✓", "0.21 alike to the maps of 3 other classes"))
    ✓ class: 0.21 alike to the maps of 3 other classes
    """

    name: str
    value: float
    reference: float
    mark: Mark
    text: str

    @property
    def passed(self) -> bool | None:
        """Whether the mark is ✓; None for ?."""
        return None if self.mark == "?" else self.mark == "✓"

    def __str__(self) -> str:
        text = self.text if self.text.startswith(self.name) else f"{self.name}: {self.text}"
        return f"{self.mark} {text}"


@dataclass(frozen=True, repr=False)
class MapCheck:
    """What the check says of the map of a ``method``: does it depend on the ``model`` and on the
    class (``of_class``), does what it marks matter (``covering``), and is it stable
    (``stability``)? ``note`` says how a method of many passes was run again."""

    method: str
    model: CheckResult
    of_class: CheckResult
    covering: CheckResult
    stability: CheckResult
    note: str = ""

    def __iter__(self) -> Iterator[CheckResult]:
        return iter((self.model, self.of_class, self.covering, self.stability))

    @property
    def marks(self) -> str:
        """All four marks in one line."""
        return " ".join(f"{result.mark} {result.name}" for result in self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as records on disk have them; these keys stay."""
        figures = {}
        for result in self:
            numbers = {name: finite_or_none(getattr(result, name)) for name in NUMBERS}
            figures[result.name] = {**asdict(result), **numbers}
        return {"figures": figures, "note": self.note}

    def lines(self) -> list[str]:
        """The method, and a line for each figure."""
        notes = [f"  note: {self.note}"] if self.note else []
        return [self.method, *(f"  {result}" for result in self), *notes]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


NUMBERS = ("value", "reference")

REFERENCES = {
    "model": "to the maps of copies with a random upper half",
    "class": "to the maps of other classes",
}
"""What maps are correlated to."""


@dataclass(frozen=True, repr=False)
class Check(Mapping[str, MapCheck]):
    """What the check says of the maps of a photo for a ``target``, by method:
    ``check["gradcam"].covering.mark``. It prints itself; ``seed`` is that of all random draws."""

    target: str
    results: Mapping[str, MapCheck]
    seed: int = 0

    def __getitem__(self, method: str) -> MapCheck:
        if method not in self.results:
            raise NotEvaluatedError(
                f"method {method!r} was not checked here; {did_you_mean(method, self.results)}"
            )
        return self.results[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def updated(self, later: "Check") -> "Check":
        """This check with the results of a later one on the same photo and target."""
        return replace(later, results={**self.results, **later.results})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as the command line prints them: the results of each method's map."""
        methods = {method: map_check.to_dict() for method, map_check in self.results.items()}
        return {"target": self.target, "seed": self.seed, "methods": methods}

    def lines(self) -> list[str]:
        """The text: each method with a line for each figure."""
        return [line for map_check in self.results.values() for line in map_check.lines()]

    def _repr_html_(self) -> str:
        """The marks as an HTML table with all texts below, for notebooks."""
        rows = []
        for method, map_check in self.results.items():
            rows.append([title_of(method), *(result.mark for result in map_check)])
        head = ["method", "model", "class", "covering", "stability"]
        table = table_html(head, rows, f"Check of the maps for {self.target}")
        return table + lines_html(self.lines())

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


Found = dict[tuple[str, str], MetricResult | ExplainError]
"""By method and metric: the result, or why there is none."""

Pairs = Mapping[str, tuple[Method, Attribution]]


def check_maps(
    model: nn.Module,
    x: Any,
    maps: Pairs,
    target: Target,
    label: str,
    *,
    seed: int = 0,
    **options: Any,
) -> Check:
    """Check maps of one photo ``(1, C, H, W)``, in at most 240 passes of the model for each.
    ``options`` are those of `explain.evaluate`; a `MetricError` without a map."""
    if not maps:
        raise MetricError("maps must hold at least one map to be checked; explain the photo first")
    Settings(**options)  # wrong ones are refused here, and not measured later
    run = partial(evaluate, model, x, target=target, **options)
    # no mark depends on uncovering, which is why few places do
    covering = [Covering(seed=seed), Covering(uncover=True, placements=4, seed=seed)]
    # metrics that run the method again
    again: tuple[Any, ...] = (
        MPRT(steps=1, share=0.5, copies=2, seed=seed),
        RandomLogit(seed=seed),
        Sensitivity(samples=4, seed=seed),
    )
    notes: dict[str, str] = {}
    # of the images that these are laid on, only the size counts
    own_maps = {
        name: Maps.of(name, attribution, torch.zeros(1, 1, *attribution.size))
        for name, (_, attribution) in maps.items()
    }
    # what is constant has its marks without a run
    varying = {name: pair for name, pair in maps.items() if not own_maps[name].constant[0]}
    with muted():  # the texts contain it
        results = _evaluated(run, varying, covering)
        # a target that is no class has no probability: all metrics of it have failed
        is_probability = any(isinstance(result, MetricResult) for result in results.values())
        if not is_probability:
            of_score = [replace(metric, score="logit") for metric in covering]
            results = _evaluated(run, varying, of_score)
        repeated = {}
        for name, (method, attribution) in varying.items():
            laid_out: Any = {
                "layer": attribution.layer,
                "fuse": attribution.fuse,
                "placement": attribution.placed,
            }
            cost = partial(_cost, model, x, {**laid_out, "target": target})
            fewer = next((few for few in _reduced(method) if cost(few) <= MOST_PASSES), None)
            if fewer is None:
                why = MetricError(f"a map takes {cost(method):,.0f} passes")
                results |= {(name, metric.name): why for metric in again}
                continue
            if fewer is not method:
                attribution = attribute(model, x, fewer, target=target, **laid_out, **options)
                counts = {key: value for key, value in options_of(fewer).items() if key in COUNTS}
                words = ", ".join(f"{key}={value}" for key, value in counts.items())
                notes[name] = f"run again with {words}, for a map takes {cost(method):,.0f} passes"
            repeated[name] = (fewer, attribution)
        results |= _evaluated(run, repeated, again)
    checks = {}
    for name in maps:
        in_words = _InWords(own_maps[name], results, label, is_probability)
        checks[name] = MapCheck(
            name,
            model=in_words.similarity("model", "mprt-upper"),
            of_class=in_words.similarity("class", "randomlogit"),
            covering=in_words.covering(),
            stability=in_words.stability(),
            note=notes.get(name, ""),
        )
    return Check(label, checks, seed)


def _evaluated(run: Callable[..., Table], maps: Pairs, metrics: Sequence[Metric]) -> Found:
    """Evaluate maps by metrics together; if this fails, metric by metric and map by map, so that
    the others have a result."""
    if not maps:
        return {}
    try:
        table = run(maps, metrics)
    except ExplainError as error:
        if len(maps) == len(metrics) == 1:  # alone already
            return {(name, metrics[0].name): error for name in maps}
        results: Found = {}
        for metric in metrics:
            for name, pair in maps.items():
                results |= _evaluated(run, {name: pair}, [metric])
        return results
    return {
        (name, metric): result
        for name, row in table.results.items()
        for metric, result in row.items()
    }


def _reduced(method: Method) -> Iterator[Method]:
    """Yield the method, and then with fewer and fewer samples or steps."""
    yield method
    for count in FEWER:
        try:
            fewer = _with_samples(method, count)
        except MethodError:  # the option has a larger minimum
            return
        if fewer == method:  # it has no such option, or no more than so many
            return
        yield fewer


def _with_samples(method: Method, count: int) -> Method:
    """The method with at most so many samples or steps; a method that it wraps gets its share."""
    all_options = options_of(method)
    wrapped = all_options.get("method")
    has_counts = isinstance(wrapped, Method) and any(name in options_of(wrapped) for name in COUNTS)
    # the runs of both multiply
    share = isqrt(count) if has_counts else count
    fewer: dict[str, Any] = {
        name: min(all_options[name], share)
        for name in COUNTS
        if isinstance(all_options.get(name), int)
    }
    if isinstance(wrapped, Method):
        fewer["method"] = _with_samples(wrapped, share)
    return replace(method, **fewer)


def _cost(model: nn.Module, x: Any, place: Any, method: Method) -> float:
    """How many photos run through the model for one map; infinite where that is not known."""
    planned = plan(model, x, method, **place)
    return planned.passes + planned.rows if math.isfinite(planned.cost()) else math.inf


def _mark(*, is_good: bool, is_fair: bool) -> Mark:
    """✓ for what is good, ? for what is fair, else ✗, as for NaN."""
    if is_good:
        return "✓"
    return "?" if is_fair else "✗"


@dataclass(frozen=True, eq=False)
class _InWords:
    """Makes the results of one map from the results of the metrics."""

    maps: Maps
    results: Found
    label: str
    is_probability: bool

    def _result_or_why_none(self, name: str, metric: str) -> MetricResult | CheckResult:
        """The result of a metric; where the map is constant or was not measured, that of the check,
        which says so."""
        unmeasured = partial(CheckResult, name, value=math.nan, reference=math.nan)
        if self.maps.constant[0]:
            what = "zero everywhere" if self.maps.zero[0] else "constant"
            return unmeasured(mark="✗", text=f"the map is {what}")
        result = self.results[self.maps.name, metric]
        if isinstance(result, ExplainError):
            return unmeasured(mark="?", text=f"not measured: {result}")
        return result

    def similarity(self, name: str, metric: str) -> CheckResult:
        """The result of a similarity, which must be small; a map that does not look has 1."""
        result = self._result_or_why_none(name, metric)
        if isinstance(result, CheckResult):
            return result
        value = float(result.value[0])
        mark = _mark(is_good=value < LITTLE, is_fair=value < SIMILAR)
        text = f"a correlation of {value:.2f} {REFERENCES[name]} (1: the same map)"
        return CheckResult(name, value, reference=1.0, mark=mark, text=text)

    def covering(self) -> CheckResult:
        """The result of `Covering`: the marked part has to matter more than in the other places."""
        of_metrics = []
        for metric in ("covering", "uncovering"):
            result = self._result_or_why_none("covering", metric)
            if isinstance(result, CheckResult):
                return result
            of_metrics.append(result.parts)
        covered, alone = of_metrics
        # the scores without the marked part, and without as much in each of the other places
        marked = covered["marked"][0]
        elsewhere = covered["others"][0]
        ahead = float((marked < elsewhere).double().mean())
        mark = _mark(is_good=ahead >= AHEAD, is_fair=ahead >= 0.5)
        whole = self._amount(covered["original"][0])
        unit = " %" if self.is_probability else ""
        text = (
            f"covering the marked fifth: {self.label} {whole} → {self._amount(marked)}{unit}; "
            f"as much elsewhere: {whole} → {self._elsewhere(elsewhere)}; the marked fifth alone: "
            f"{self._amount(alone['marked'][0])}{unit}; as much elsewhere: "
            f"{self._elsewhere(alone['others'][0])}"
        )
        return CheckResult("covering", float(marked), float(elsewhere.mean()), mark, text)

    def _elsewhere(self, scores: torch.Tensor) -> str:
        """The mean of some scores, and the least and the largest in brackets."""
        unit = " %" if self.is_probability else ""
        ends = f"{self._amount(scores.min())}–{self._amount(scores.max())}"
        return f"{self._amount(scores.mean())}{unit} ({ends})"

    def _amount(self, score: torch.Tensor) -> str:
        """A probability in per cent, without the sign, or a score."""
        return f"{100 * float(score):.0f}" if self.is_probability else f"{float(score):.3g}"

    def stability(self) -> CheckResult:
        """The result of `Sensitivity`: the change has to be small beside that of a map with the
        same values in other places, of which the mean is known."""
        result = self._result_or_why_none("stability", "maxsensitivity")
        if isinstance(result, CheckResult):
            return result
        value = float(result.value[0])
        values = self.maps.values.double().flatten()
        # two draws of the same values differ by twice their variance in the mean square
        reference = math.sqrt(2 * float(values.var(correction=0) / values.square().mean()))
        share = value / reference
        mark = _mark(is_good=share < 0.5, is_fair=share < 1)
        text = (
            f"{value:.2f} of its length changes under slight noise (the same values shuffled: "
            f"{reference:.2f})"
        )
        return CheckResult("stability", value, reference, mark, text)


def check_explained(explanation: Any, methods: Sequence[str], index: int, **options: Any) -> Check:
    """Check maps of the target at position ``index`` of an `explain.Explanation`, and add the
    result to ``explanation.checks``, beside earlier ones of other methods.
    """
    explainer = explanation.explainer
    session = explanation.session
    if explainer is None or session is None:
        raise MetricError(
            "explanation must have its model to be checked, but is a copy; explain the photo again"
        )
    attributions = [explanation.on_input(index)[name] for name in methods]
    first = attributions[0]
    # method objects of the caller, whose options their names do not tell
    own_methods = [] if isinstance(session.methods, str) else session.methods
    maps = {
        attribution.method: (attribution.applied(own_methods), attribution)
        for attribution in attributions
    }
    with naming([explanation.source]):
        check = check_maps(
            explainer.model,
            explanation.inputs,
            maps,
            as_target(explanation.target_at(index)),
            explanation.targets[index],
            activation=explainer.activation,
            interventions=first.interventions,
            **options,
        )
    earlier = explanation.checks.get(index)
    explanation.checks[index] = check if earlier is None else earlier.updated(check)
    return check
