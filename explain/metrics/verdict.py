"""`Verdict`: all results of the checks of a photo's maps; and `check_maps`, which makes one."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, product
from math import isqrt, prod
from typing import Any

import torch
from torch import nn

from explain._utils.errors import ExplainError, MethodError, MetricError, did_you_mean, muted, naming, shown
from explain._utils.html import lines_html, table_html
from explain.attribution.api import attribute, plan
from explain.attribution.options import Settings
from explain.attribution.result import Attribution
from explain.data.inputs import Inputs
from explain.engine.ends import reading
from explain.engine.execution import gather
from explain.engine.needs import needs_at
from explain.engine.perturbations import Scores, Unperturbed
from explain.engine.plan import Plan
from explain.engine.validation import check_inputs
from explain.hooks.interventions import intervene
from explain.hooks.preserve import untouched
from explain.hooks.unwrap import unwrapped
from explain.layers.costs import cost_after
from explain.methods.base import Method, get_method, options, title_of
from explain.metrics.base import MetricInput, PerturbedPhotoPool, ScoreMetric
from explain.metrics.evaluation import NotEvaluatedError, evaluate
from explain.metrics.masked_scores import MaskedScores
from explain.metrics.sanity import LEVEL, Check, CheckResult, DependsOnClass, Faithful, default_checks
from explain.metrics.variants import EvaluatedMethod, ModelContext, ReattributionMetric, Results, reattribute
from explain.targets import ClassTarget, Target
from explain.targets.text import with_texts

WORDS = {True: "map: check passed", False: "map: check failed"}


@dataclass(frozen=True, repr=False)
class CheckResults:
    """The results of all checks of one map; it passed if none of them failed, and at least one was applicable.

    ``notes`` are remarks, such as that the method was run with fewer samples.
    """

    method: str
    results: tuple[CheckResult, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[CheckResult]:
        return iter(self.results)

    def __getattr__(self, check: str) -> CheckResult:
        """The result of a check by its name, such as ``results.faithful``."""
        found: dict[str, CheckResult] = {result.check: result for result in vars(self).get("results", ())}
        if check not in found:
            raise AttributeError(f"no check {check!r} in these results")
        return found[check]

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

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Verdict(Mapping[str, CheckResults]):
    """Which maps of a photo pass the checks, by method: ``verdict["gradcam"].faithful.passed``.

    It prints itself: a line for each method, and the reasons of all failures. ``seed`` is that of all random draws.
    """

    target: str
    results: Mapping[str, CheckResults]
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

    @property
    def faithful_after_holm(self) -> list[str]:
        """The methods whose map is faithful after Holm's correction for the number of maps that were tested.

        Of twenty maps that know nothing, one passes the check by chance; after the correction, with a probability of
        at most the level, none of them does.

        Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979.
        """
        checks = ((method, each) for method, results in self.results.items() for each in results)
        tested = {method: each.figure for method, each in checks if each.check == "faithful" and each.figure <= 1}
        kept: list[str] = []
        for left, method in zip(range(len(tested), 0, -1), sorted(tested, key=tested.__getitem__), strict=True):
            if not tested[method] * left <= LEVEL:
                break
            kept.append(method)
        return kept

    def updated(self, other: "Verdict") -> "Verdict":
        """The same with the results of another verdict on the same photo, which replace those of the same methods."""
        return replace(self, results={**self.results, **other.results}, seed=other.seed)

    @staticmethod
    def summary(verdicts: "Iterable[Verdict]") -> "Summary":
        """Count what passes over the verdicts on many photos.

        >>> good, bad = (CheckResult("faithful", "faithful", p, p < 0.05, "") for p in (0.01, 0.5))
        >>> print(Verdict.summary(Verdict("cat", {"lrp": CheckResults("lrp", (each,))}) for each in (good, good, bad)))
        method  all             faithful
        lrp     67% (21 to 94)  67% (21 to 94)
        """
        listed = list(verdicts)
        if not listed or not all(isinstance(each, Verdict) for each in listed):
            raise MetricError(f"verdicts must be one or more of check(), one for each photo, got {shown(verdicts)}")
        found: dict[str, dict[str, list[bool]]] = {}
        for method, results in (each for verdict in listed for each in verdict.items()):
            own = found.setdefault(method, {"all": []})
            for name, passed in (("all", results.worst.passed), *((each.check, each.passed) for each in results)):
                own.setdefault(name, []).extend([] if passed is None else [passed])
        return Summary({m: {name: Share(sum(p), len(p)) for name, p in own.items()} for m, own in found.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the results of each method's map."""
        methods = {method: results.to_dict() for method, results in self.results.items()}
        return {"target": self.target, "seed": self.seed, "methods": methods}

    def _repr_html_(self) -> str:
        checks = [each.word for each in next(iter(self.results.values()), ())]
        rows = [
            [title_of(method), *(f"{each.mark} {each.shown}" for each in results), WORDS[results.passed]]
            for method, results in self.results.items()
        ]
        table = table_html(["method", *checks, ""], rows, f"Sanity checks of the maps for {self.target}")
        return table + lines_html(line.strip() for line in self.lines()[len(rows) :])

    def lines(self) -> list[str]:
        """A table with a line for each method, and below it the reasons of all failures and all notes."""
        rows = [
            [method, *(f"{each.mark} {each.word} {each.shown}" for each in results), WORDS[results.passed]]
            for method, results in self.results.items()
        ]
        lines = aligned(rows)
        for method, results in self.results.items():
            lines += [f"  {method} {each.mark} {each.word}: {each.reason}" for each in results if not each.passed]
            lines += [f"  {method}: {note}" for note in results.notes]
        every = ((method, each) for method, found in self.results.items() for each in found if each.check == "faithful")
        kept, alone = self.faithful_after_holm, {method for method, each in every if each.passed}
        if alone > set(kept):
            names = ", ".join(kept) or "none"
            lines.append(f"  faithful after Holm's correction for {len(self.results)} maps: {names}")
        return lines

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
        """The 95 % interval of the share, by Wilson's formula; from 0 to 1 if there is no map."""
        if not self.count:
            return 0.0, 1.0
        share, z = self.passed / self.count, 1.96**2 / self.count
        half = math.sqrt(z * share * (1 - share) + z * z / 4)
        return max(0.0, (share + z / 2 - half) / (1 + z)), min(1.0, (share + z / 2 + half) / (1 + z))

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.passed / self.count:.0%} ({100 * low:.0f} to {100 * high:.0f})" if self.count else "–"


@dataclass(frozen=True, repr=False)
class Summary:
    """How often the maps of each method pass each check, on many photos: ``summary.shares["gradcam"]["faithful"]``.

    "all" counts the maps that pass all checks. A check counts only maps that it applies to. It prints as a table.
    """

    shares: Mapping[str, Mapping[str, Share]]

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for own in self.shares.values() for name in own))
        rows = [["method", *names]]
        rows += [[method, *(str(own.get(n, Share(0, 0))) for n in names)] for method, own in self.shares.items()]
        return "\n".join(aligned(rows))

    __repr__ = __str__


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


COSTLY = 60
"""Passes from which on a method is run again with fewer samples."""

FEW = 32
"""Samples that it is then run with, at first."""

COUNTS = ("samples", "steps")


def with_fewer_samples(method: Method, most: int) -> Iterator[Method]:
    """The method with fewer samples: first ``most`` of them, then twice as many, for those that take no fewer.

    A wrapped method gets its share of them. Empty if the method has no such option, or no more samples.

    >>> from explain.methods import IntegratedGradients, RISE
    >>> few = [each.steps for each in with_fewer_samples(IntegratedGradients(steps=50), 32)]
    >>> next(with_fewer_samples(RISE(), 32)).samples, few
    (32, [32])
    """
    counts, inner = _counts(method), options(method).get("method")
    wrapped = inner if isinstance(inner, Method) and _samples(inner) > 1 else None
    while most < _samples(method):
        own = most if wrapped is None else isqrt(most)
        fewer: dict[str, Any] = {name: min(value, own) for name, value in counts.items()}
        if wrapped is not None:
            fewer["method"] = next(with_fewer_samples(wrapped, most // own), wrapped)
        with suppress(MethodError):  # it has a minimum
            yield replace(method, **fewer)
        most *= 2


def _counts(method: Method) -> dict[str, int]:
    return {name: value for name in COUNTS if isinstance(value := options(method).get(name), int)}


def _chain(method: Any) -> Iterator[Method]:
    """A method, the one that it wraps, and so on."""
    while isinstance(method, Method):
        yield method
        method = options(method).get("method")


def _samples(method: Method) -> int:
    """The number of samples, times those of a wrapped method."""
    return prod(max(_counts(each).values(), default=1) for each in _chain(method))


def check_maps(
    model: nn.Module, x: Any, maps: Sequence[tuple[Method, Attribution]], target: Target, label: str, *, seed: int = 0,
    checks: Sequence[Check] | None = None, **options: Any,
) -> Verdict:  # fmt: skip
    """Run sanity checks on maps of one photo.

    Args:
        model: any ``nn.Module``; it is left as it was found.
        x: the photo as the model is given it, ``(1, C, H, W)``.
        maps: methods with their attributions for this photo and target.
        target: what was explained.
        label: the name of the target in the verdict.
        seed: of random weights, masks and noise.
        checks: other ones than `default_checks`, such as ``default_checks(samples=240)``.
        options: ``batch_size``, ``progress`` and ``precision`` as for `explain.attribute`.

    Raises:
        MetricError: x is no single photo, or there is no map.
    """
    model = unwrapped(model)
    model, inputs, _ = with_texts(model, check_inputs(model, x), [target])
    if inputs.x.ndim != 4 or len(inputs.x) != 1:
        raise MetricError(f"x must be one photo (1, C, H, W) to be checked, got shape {tuple(inputs.x.shape)}")
    if not maps:
        raise MetricError("maps must hold at least one map to be checked, got none; explain the photo first")
    named = {attribution.method: (method, attribution) for method, attribution in maps}
    reader = reading(model, inputs, options.get("activation"))
    with intervene(model, options.get("interventions", ())), reader:
        return _Checks(model, inputs, named, target, options).verdict(checks or default_checks(seed), label, seed)


@dataclass(eq=False)
class _Checks:
    """One call of `check_maps`."""

    model: nn.Module
    inputs: Inputs
    maps: Mapping[str, tuple[Method, Attribution]]
    target: Target
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        Settings(**self.options)  # refused here, and not once for each check
        first = next(iter(self.maps.values()))[1]
        classes = None if isinstance(first.target, str) else first.target
        ranking = self._ranking() if first.logits is None else None
        activation = self.options.get("activation")
        self.context = ModelContext(self.model, self.inputs, classes, first.logits, activation, ranking)
        if first.logits is not None:
            self.options = {**self.options, "activation": self.context.outputs.activation}
        self.notes: dict[str, list[str]] = {name: [] for name in self.maps}
        self.masked: MaskedScores | None = None
        self.why_not: dict[tuple[str, str], str] = {}  # by map and check: why it is not applicable, or has failed

    def _ranking(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The scores of all classes in the target's region or box, and its own class."""
        with untouched(self.model), torch.no_grad():
            output = self.inputs.detached().call(self.model)
            return self.target.settled(output, len(self.inputs)).class_scores(output, len(self.inputs))

    def verdict(self, checks: Sequence[Check], label: str, seed: int) -> Verdict:
        data = {name: self.context.data(name, each, each.score) for name, (_, each) in self.maps.items()}
        varied = {name: each for name, each in data.items() if not each.maps.constant[0]}
        found: Results = {}
        for (name, each), check in product(varied.items(), checks):
            try:
                self.why_not[name, check.name] = check.not_applicable(self.context, each)
            except ExplainError as error:
                self.why_not[name, check.name] = str(error)
        if varied:
            scored = [check for check in checks if isinstance(check, ScoreMetric)]
            found = self._each(partial(self._by_masks, checks), [c for c in scored if isinstance(c, Faithful)], varied)
            found |= self._each(self._by_scores, [c for c in scored if not isinstance(c, Faithful)], varied)
            varied = {name: replace(each, masked=self.masked) for name, each in varied.items()}
            found |= self._by_reattribution(checks, varied)
        results = {}
        for name, each in data.items():
            own = []
            for check in checks:
                if name not in varied:
                    what = "is constant" if bool(each.maps.values.any()) else "is zero everywhere"
                    own.append(check.result(math.nan, False, f"the map {what}"))
                elif (name, check.name) in found:
                    result = check.decide(found[name, check.name])
                    advice = check.advice_for(name) if result.passed is False else ""
                    own.append(replace(result, reason="; ".join(filter(None, [result.reason, advice]))))
                else:
                    own.append(check.result(math.nan, None, self.why_not[name, check.name]))
            results[name] = CheckResults(name, tuple(own), tuple(self.notes[name]))
        return Verdict(label, results, seed)

    def _by_masks(
        self, checks: Sequence[Check], faithful: Sequence[Faithful], data: Mapping[str, MetricInput]
    ) -> Results:
        """The results of `Faithful`; masked photos run once, for all maps and all classes that are compared."""
        context, target = self.context, self.target
        with untouched(self.model), torch.no_grad():
            output = self.inputs.detached().call(self.model)
            target = target.settled(output, 1) if context.classes is None else ClassTarget((int(context.classes),))
        asked = [each for check in checks if isinstance(check, DependsOnClass) for each in (check, check.reduced)]
        known = context.ranking is not None and context.ranking[0].shape[1] > 1
        groups = [[int(other) for other in each.other_classes(context)] for each in asked] if known else []
        of_classes = target.of_classes if context.classes is None else ClassTarget
        classes = list(dict.fromkeys(chain(*groups)))
        targets = [target, *(of_classes((each,)) for each in classes)]
        found: Results = {}
        for check in faithful:
            masks, pool = check.masks(context.images), PerturbedPhotoPool(context.images)
            rows = [pool.add(request) for request in masks.requests()]
            original, perturbed = Scores(Unperturbed()), Scores(pool)
            planned = Plan({"checks": needs_at([original, perturbed], [])}, len(targets), 1)
            evidence = [of(None) for of in gather(self.model, self.inputs, planned, targets, Settings(**self.options))]
            scores = [[each[perturbed][own] for own in rows] for each in evidence]
            drops = [each[original] - masks.in_order(own)[0] for each, own in zip(evidence, scores, strict=True)]
            own, *others = (each.cpu().double() for each in drops)
            lost = dict(zip(classes, others, strict=True))
            self.masked = MaskedScores(
                masks, own, {len(group): torch.stack([lost[n] for n in group]) for group in groups}
            )
            exact = {"target_score": evidence[0][original], "masked": self.masked}
            found |= {(name, check.name): check(replace(each, **exact), scores[0]) for name, each in data.items()}
        return found

    def _by_scores(self, metrics: Sequence[Any], maps: Iterable[str]) -> Results:
        """The results of score metrics; the perturbed photos of all maps run together."""
        given: Any = {name: self.maps[name][1] for name in maps}
        table = evaluate(self.model, self.inputs, given, metrics, target=self.target, **self.options)
        return {(name, metric): each for name, row in table.results.items() for metric, each in row.items()}

    def _by_reattribution(self, checks: Sequence[Any], data: Mapping[str, MetricInput]) -> Results:
        """The results of metrics that run the methods again; methods of many passes run with fewer samples."""
        again: list[Any] = [check for check in checks if isinstance(check, ReattributionMetric)]
        again = [check for check in again if not any(self.why_not[name, check.name] for name in data)]
        groups: dict[tuple[Any, bool], dict[str, EvaluatedMethod]] = {}
        for name, each in data.items() if again else ():
            method, attribution = self.maps[name]
            evaluated, long = self._cheaper(EvaluatedMethod(method, attribution, each))
            groups.setdefault((attribution.fuse, long), {})[name] = evaluated
        found: Results = {}
        for (fuse, long), group in groups.items():
            options: Any = {**self.options, "fuse": fuse}
            run = partial(reattribute, context=self.context, target=self.target, options=options)
            found |= self._each(run, [check.reduced for check in again] if long else again, group)
        return found

    def _each(self, evaluate: Callable[..., Results], checks: Sequence[Any], maps: Mapping[str, Any]) -> Results:
        """Run all checks together; if one of them fails, each alone, so that the others have a result."""
        if not checks:
            return {}
        try:
            with muted():  # the results contain it
                return evaluate(checks, maps)
        except ExplainError as error:
            if len(checks) > 1:
                return {key: each for one in checks for key, each in self._each(evaluate, [one], maps).items()}
            self.why_not |= {(name, checks[0].name): str(error) for name in maps}
            return {}

    def _cheaper(self, evaluated: EvaluatedMethod) -> tuple[EvaluatedMethod, bool]:
        """The method with fewer samples, if each of its maps takes many passes; and whether it still takes long."""
        attribution, name = evaluated.attribution, evaluated.data.maps.name
        where: Any = {"layer": attribution.layer, "fuse": attribution.fuse}
        planned = plan(self.model, self.inputs, evaluated.method, target=self.target, **where)
        layers = {need.layer for needs in planned.wanted.values() for need in needs if need.layer is not None}
        cost = planned.cost(cost_after(self.model, self.inputs, layers))
        if cost <= COSTLY:
            return evaluated, False
        why = f"since a map takes {cost:.0f} passes" if math.isfinite(cost) else "since a map takes many passes"
        options: Any = {**self.options, "progress": None, **where}
        for fewer in with_fewer_samples(evaluated.method, FEW):
            with muted(), suppress(MethodError):
                found = attribute(self.model, self.inputs, fewer, target=self.target, **options)
                counts = ", ".join(f"{key}={n}" for each in _chain(fewer) for key, n in _counts(each).items())
                self.notes[name].append(f"run again with {counts}, {why}")
                return EvaluatedMethod(fewer, found, self.context.data(name, found, found.score)), False
        self.notes[name].append(f"run again as few times as possible, {why}")
        return evaluated, True


def check_explained(
    explanation: Any, found: Sequence[Attribution], index: int, seed: int, samples: int, **options: Any
) -> Verdict:
    """Check maps of the target at a position of an `explain.Explanation`, and add the verdict to the explanation.

    Raises:
        MetricError: it is a copy without a model; or the maps are of several crops.
    """
    if explanation.explainer is None or explanation.request is None:
        raise MetricError("explanation must have its model to be checked, but is a copy; explain the photo again")
    if explanation.crops:
        raise MetricError("maps must be of one crop to be checked, got some of tiles; use explain.evaluate")
    chosen, request, explainer = found[0].target, explanation.request, explanation.explainer
    target = request.targets[index] if isinstance(chosen, str) else ClassTarget((int(chosen[0]),))
    given = [] if isinstance(request.methods, str) else request.methods
    maps = [(method_of(each, given), each) for each in found]
    options = {"precision": explanation.question.precision, "activation": explainer.activation, **options}
    options["interventions"] = found[0].interventions
    with naming([explanation.source]):
        x = explainer.as_input(explanation.photo)
        options |= {"seed": seed, "checks": default_checks(seed, samples)}
        verdict = check_maps(explainer.model, x, maps, target, explanation.targets[index], **options)
    known = explanation.verdicts.get(index)
    explanation.verdicts[index] = verdict if known is None else known.updated(verdict)
    return verdict


def method_of(attribution: Attribution, methods: Sequence[Method] = ()) -> Method:
    """The method that made an attribution, with its options; one of these, or one that is known by its name.

    >>> import torch
    >>> one = torch.ones(1, 1, 1)
    >>> method_of(Attribution("hirescam", one, "score", one[0, 0], None, (1, 1), options={"relu": True}))
    HiResCAM(relu=True)
    """
    method = next((each for each in methods if each.name == attribution.method), None) or get_method(attribution.method)
    made_with = {each.name for each in fields(method) if each.init}
    return replace(method, **{name: value for name, value in attribution.options.items() if name in made_with})
