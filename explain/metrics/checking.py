"""`check_maps`: run the checks of a photo's maps, and make a `Verdict` of what they say."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, product
from math import isqrt, prod
from typing import Any

import torch
from torch import nn

from explain._utils.errors import (
    ExplainError,
    MethodError,
    MetricError,
    muted,
    naming,
)
from explain.attribution.api import attribute, plan
from explain.attribution.options import Settings
from explain.attribution.result import Attribution
from explain.data.inputs import Inputs
from explain.engine import Perturbation
from explain.engine.ends import reading
from explain.engine.validation import check_inputs
from explain.hooks import intervene
from explain.hooks.intervening import active_interventions
from explain.hooks.preserve import untouched
from explain.hooks.unwrap import unwrapped
from explain.layers.costs import cost_after
from explain.methods.base import Method, options
from explain.metrics.base import MetricInput, MetricResult, ScoreRequest, loss_of
from explain.metrics.evaluation import scored
from explain.metrics.marked_areas import AreaTest, MarkedAreas
from explain.metrics.masked_scores import (
    PHOTO_MAPS,
    MaskedScores,
    photo_maps,
    strata_of,
)
from explain.metrics.sanity import (
    LEVEL,
    MASKS,
    Check,
    CheckResult,
    Claim,
    CoverResult,
    DependsOnClass,
    DependsOnModel,
    Faithful,
    default_checks,
)
from explain.metrics.variants import (
    EvaluatedMethod,
    ModelContext,
    RandomWeights,
    ReattributionMetric,
    Results,
    reattribute,
)
from explain.metrics.verdict import CheckResults, Verdict, advice_on
from explain.targets import ClassTarget, Target, as_target
from explain.targets.text import with_texts

MASKS_SHARE = 0.7
AREAS_SHARE = 0.3
"""What two tests of a map may spend of the level: masks, which all maps share, and where these do
not decide, marked areas. They add up to one, so that together they keep it."""

CONTROLS_AHEAD = 1
"""How many of the photo's own maps may do as well under masks. It is one, since a salient mark that
decides is a photo map's, too."""


def most_passes(maps: int) -> int:
    """How many covered photos `check_maps` runs at most for so many maps of a photo, for a progress
    bar: masked photos through the model and its copies, and the marked areas of the photo's own
    maps and of all placements of each map.

    >>> most_passes(1), most_passes(5)
    (2696, 6984)
    """
    placed = math.ceil(1 / (LEVEL * AREAS_SHARE))
    areas = 2 * MarkedAreas.photos_of_each * (PHOTO_MAPS + 2 * maps * placed)
    return MASKS * (1 + DependsOnModel().copies) + areas


COSTLY = 60
"""Passes from which on a method is run again with fewer samples."""

FEW = 32
"""Samples that it is then run with, at first."""

COUNTS = ("samples", "steps")


def with_fewer_samples(method: Method, most: int) -> Iterator[Method]:
    """Yield the method with fewer samples or steps: first about ``most`` of them, then twice as
    many again and again, for methods that refuse so few.

    A wrapped method gets its share of them. Nothing is yielded if the method has no such option, or
    no more samples.

    >>> from explain.methods import IntegratedGradients, RISE
    >>> few = [each.steps for each in with_fewer_samples(IntegratedGradients(steps=50), 32)]
    >>> next(with_fewer_samples(RISE(), 32)).samples, few
    (32, [32])
    """
    wrapped: Any = options(method).get("method")
    shares = isinstance(wrapped, Method) and _samples(wrapped) > 1
    while most < _samples(method):
        share = isqrt(most) if shares else most
        fewer: dict[str, Any] = {name: min(value, share) for name, value in _counts(method).items()}
        if shares:
            fewer["method"] = next(with_fewer_samples(wrapped, most // share), wrapped)
        with suppress(MethodError):  # the option has a larger minimum
            yield replace(method, **fewer)
        most *= 2


def _counts(method: Method) -> dict[str, int]:
    """The options of a method that are numbers of samples or steps, by their names."""
    return {name: value for name in COUNTS if isinstance(value := options(method).get(name), int)}


def _chain(method: Any) -> Iterator[Method]:
    """Yield a method, the method that it wraps, the method that this wraps, and so on."""
    while isinstance(method, Method):
        yield method
        method = options(method).get("method")


def _samples(method: Method) -> int:
    """The number of samples of a method, times those of the methods that it wraps: about how many
    passes a map takes."""
    return prod(max(_counts(inner).values(), default=1) for inner in _chain(method))


def check_maps(
    model: nn.Module,
    x: Any,
    maps: Sequence[tuple[Method, Attribution]],
    target: Target,
    label: str,
    *,
    seed: int = 0,
    checks: Sequence[Check] | None = None,
    **options: Any,
) -> Verdict:
    """Run sanity checks on maps of one photo.

    Args:
        model: any ``nn.Module``; it is left as it was found.
        x: the photo as the model is given it, ``(1, C, H, W)``.
        maps: methods with their attributions for this photo and target.
        target: what was explained.
        label: the name of the target in the verdict.
        seed: of random weights, masks and noise.
        checks: other ones than `default_checks`, such as ``default_checks(samples=960)``.
        options: ``batch_size`` and ``progress`` as for `explain.attribute`.

    Raises:
        MetricError: x is no single photo, or there is no map.
    """
    model = unwrapped(model)
    model, inputs, _ = with_texts(model, check_inputs(model, x), [target])
    if inputs.x.ndim != 4 or len(inputs.x) != 1:
        raise MetricError(
            f"x must be one photo (1, C, H, W) to be checked, got shape {tuple(inputs.x.shape)}"
        )
    if not maps:
        raise MetricError(
            "maps must hold at least one map to be checked, got none; explain the photo first"
        )
    named = {attribution.method: (method, attribution) for method, attribution in maps}
    reader = reading(model, inputs, options.get("activation"))
    with intervene(model, options.get("interventions", ())), reader:
        return _Checks(
            model, inputs, named, target, options, checks or default_checks(seed), seed
        ).verdict(label)


@dataclass(eq=False)
class _Checks:
    """One call of `check_maps`."""

    model: nn.Module
    inputs: Inputs
    maps: Mapping[str, tuple[Method, Attribution]]
    target: Target
    options: Mapping[str, Any]
    checks: Sequence[Check]
    seed: int

    def __post_init__(self) -> None:
        """Refuse wrong options before anything runs, and find out what all checks share: the scores
        of all classes, also those in the target's region or box, and how outputs become
        probabilities."""
        Settings(**self.options)  # refused here, and not once for each check
        first = next(iter(self.maps.values()))[1]
        classes = None if isinstance(first.target, str) else first.target
        ranking = None
        # the scores of all classes in the target's region or box, and its own class
        if first.logits is None:
            ranking = self._settled_target().class_scores(self._output, len(self.inputs))
        activation = self.options.get("activation")
        self.context = ModelContext(
            self.model, self.inputs, classes, first.logits, activation, ranking
        )
        if first.logits is not None:
            self.options = {**self.options, "activation": self.context.outputs.activation}
        self.notes: dict[str, list[str]] = {name: [] for name in self.maps}
        # by map and check: why the check is not applicable, or has failed
        self.why_not: dict[tuple[str, str], str] = {}
        self.drops_of_areas: dict[tuple[bool, MarkedAreas], torch.Tensor] = {}

    @cached_property
    def _output(self) -> Any:
        """The model's output for the photo, run once; for targets that read a region or box from
        it."""
        with untouched(self.model), torch.no_grad():
            return self.inputs.detached().call(self.model)

    def _settled_target(self) -> Target:
        """The target with what it reads from the output, such as the box of a detection, found once
        and then fixed."""
        with torch.no_grad():
            return self.target.resolved(self._output, len(self.inputs))

    def verdict(self, label: str) -> Verdict:
        """Run all checks of all maps, and make the verdict for the target called ``label``.

        Constant maps fail without a run; checks that do not apply, or whose runs fail, give their
        reason as the result.
        """
        data = {
            name: self.context.data(name, attribution, attribution.score)
            for name, (_, attribution) in self.maps.items()
        }
        varied = {
            name: map_data for name, map_data in data.items() if not map_data.maps.constant[0]
        }
        for (name, map_data), check in product(varied.items(), self.checks):
            try:
                self.why_not[name, check.name] = check.not_applicable(self.context, map_data)
            except ExplainError as error:
                self.why_not[name, check.name] = str(error)
        results: Results = {}
        tests: dict[tuple[str, str], CoverResult] = {}
        if varied:
            kept = {name: replace(map_data, keeps_maps=True) for name, map_data in varied.items()}
            results = self._reattribution_results(kept)
            tests = self._covering_tests(kept, results)

        def decided(name: str, check: Check) -> CheckResult:
            """The `CheckResult` of one check of the map called ``name``."""
            key = (name, check.name)
            if name not in varied:
                what = "constant" if bool(data[name].maps.values.any()) else "zero everywhere"
                return check.result(math.nan, False, f"the map is {what}")
            if key not in results:
                return check.result(math.nan, None, self.why_not[key])
            return check.decide(results[key], tests.get(key))

        results_of_maps = {}
        for name in data:
            check_results = tuple(decided(name, check) for check in self.checks)
            results_of_maps[name] = CheckResults(name, check_results, tuple(self.notes[name]))
        return Verdict(
            label, results_of_maps, self.seed, tuple(advice_on(results_of_maps, self.checks))
        )

    @cached_property
    def _photo_maps(self) -> torch.Tensor:
        """The maps of the photo alone ``(m, H, W)``."""
        return photo_maps(self.context.images[0].detach().cpu().double())

    @cached_property
    def _other_classes(self) -> dict[int, list[int]]:
        """The classes that `DependsOnClass` compares the maps with, by how many they are: those of
        the check, and those of its reduced form, which has fewer. Empty where the model has one
        class."""
        context = self.context
        if context.ranking is None or context.ranking[0].shape[1] < 2:
            return {}
        groups = {}
        for check in self.checks:
            if isinstance(check, DependsOnClass):
                for form in (check, check.reduced):
                    classes = [int(index) for index in form.other_classes(context)]
                    groups[len(classes)] = classes
        return groups

    @cached_property
    def _classes(self) -> list[int]:
        """All of the other classes that any form of the check compares with, each once."""
        return list(dict.fromkeys(chain.from_iterable(self._other_classes.values())))

    @cached_property
    def _targets(self) -> list[Target]:
        """The target, and after it the other classes (in the same region or box) in the order of
        `_classes`; rows of `_drops` are in this order."""
        classes = self.context.classes
        if classes is None:
            target = self._settled_target()
            return [target, *(target.of_classes((index,)) for index in self._classes)]
        return [ClassTarget((int(classes),)), *(ClassTarget((i,)) for i in self._classes)]

    def _drops(self, perturbation: Perturbation, network: nn.Module | None = None) -> torch.Tensor:
        """What each of K perturbed photos takes from the scores of all T targets, ``(T, K)``
        float64 on the CPU; of another ``network``, from the score of the target alone, ``(1,
        K)``."""
        request = ScoreRequest(perturbation, "logit")
        targets = self._targets if network is None else self._targets[:1]
        network = self.model if network is None else network
        settings = Settings(**{**self.options, "progress": None})
        evidence = scored(network, self.inputs, [request], targets, settings)
        whole = torch.stack([target_evidence[request.whole] for target_evidence in evidence])
        scores = torch.cat([request.scores(target_evidence) for target_evidence in evidence])
        return loss_of(whole, scores).cpu().double()

    def _drops_of_copy(self, copy: RandomWeights, perturbation: Perturbation) -> torch.Tensor:
        """What each of K perturbed photos takes from the target's score in a randomised ``copy`` of
        the model, ``(1, K)``, under the interventions of the model itself."""
        network = copy(self.context)
        with intervene(network, active_interventions(self.model)):
            return self._drops(perturbation, network)

    def _covering_tests(
        self, data: Mapping[str, MetricInput], results: Results
    ) -> dict[tuple[str, str], CoverResult]:
        """Test what the maps claim by covering parts of the photo: under random masks, and where
        these do not decide, under the areas that the maps mark. Returns the tests by map and check.

        The check `Faithful` has no figure but its test: an empty result is added to ``results``,
        unless the tests fail; then ``why_not`` has the reason.
        """
        faithful = next((check for check in self.checks if isinstance(check, Faithful)), None)
        if faithful is None:
            return {}
        unmeasured = MetricResult(torch.tensor([math.nan]))
        faithful_results = {(name, faithful.name): unmeasured for name in data}
        claiming = {
            check.name: check for check in self.checks if type(check).claims is not Check.claims
        }
        claimed = {
            key: result
            for key, result in (results | faithful_results).items()
            if key[1] in claiming
        }
        tests: dict[tuple[str, str], CoverResult] = {}
        try:
            masked = self._masked(faithful, [claiming[check] for _, check in claimed])
            claims = {
                (name, check): claiming[check].claims(data[name], result, masked)
                for (name, check), result in claimed.items()
            }
            # a map that a check contradicts needs no more tests
            contradicted = {name for (name, _), check_claims in claims.items() if not check_claims}
            for (name, check), check_claims in claims.items():
                if not check_claims:
                    continue
                test = self._under_masks(check_claims, masked)
                if test.p_value > check_claims[0].level and name not in contradicted:
                    test = self._under_areas(check_claims, test)
                tests[name, check] = test
        except ExplainError as error:
            self.why_not |= {(name, faithful.name): str(error) for name in data}
            return {}
        results |= faithful_results
        return tests

    def _masked(self, faithful: Faithful, checks: Sequence[Check]) -> MaskedScores:
        """Run the photo under random masks, for all maps together: what the masks take from the
        target's score, from those of other classes, and in copies of the model where a check needs
        them."""
        masks = faithful.masked
        with muted():
            drops = self._drops(masks)
            copies = [self._drops_of_copy(copy, masks)[0] for copy in self._copies(checks)]
        photo = self.context.images
        class_drops = {
            number: drops[[1 + self._classes.index(index) for index in group]]
            for number, group in self._other_classes.items()
        }
        copy_drops = torch.stack(copies) if copies else torch.zeros(0, 0)
        strata = strata_of(faithful.samples)
        shown = masks.masks(photo)[0]
        return MaskedScores(photo[0], shown, strata, drops[0], class_drops, copy_drops)

    def _copies(self, checks: Sequence[Check]) -> list[RandomWeights]:
        """The randomised copies of the model that `DependsOnModel` compares with; none if that
        check is not asked for."""
        by_model = next((check for check in checks if isinstance(check, DependsOnModel)), None)
        return [] if by_model is None else by_model.copied(self.context)

    def _under_masks(self, claims: Sequence[Claim], masked: MaskedScores) -> CoverResult:
        """Test a map's claims by random masks: the p-value is the largest of those of all claims,
        corrected for the share of the level that masks may spend (`MASKS_SHARE`); 1 where too many
        of the photo's own maps do as well."""
        tests = [masked.test(claim.maps, claim.drops) for claim in claims]
        placed = max(tests, key=lambda test: test.p_value)
        is_ahead = all(test.controls <= CONTROLS_AHEAD for test in tests)
        samples = len(masked.masks)
        return CoverResult(
            p_value=min(1.0, placed.p_value / MASKS_SHARE) if is_ahead else 1.0,
            opposite=min(1.0, placed.opposite / MASKS_SHARE),
            correlation=placed.correlation,
            masks=samples,
            needed=samples - placed.freedom + placed.needed(claims[0].level * MASKS_SHARE),
        )

    def _under_areas(self, claims: Sequence[Claim], by_masks: CoverResult) -> CoverResult:
        """Test the claims that masks did not show by the areas that the map marks: the smaller of
        both p-values counts, each corrected for its share of the level."""
        p_value = 0.0
        controls = 0
        for claim in claims:
            drops = partial(self._drops_of_marked, claim)
            count = math.ceil(1 / (claim.level * AREAS_SHARE) - 1e-9) - 1
            claim_p_value, controls = AreaTest(self._photo_maps, drops, self.seed).test(
                claim.marked, count
            )
            p_value = max(p_value, claim_p_value)
            if p_value == 1:
                break
        p_value = min(by_masks.p_value, p_value / AREAS_SHARE)
        return replace(by_masks, p_value=p_value, controls=controls, of_controls=PHOTO_MAPS)

    def _drops_of_marked(self, claim: Claim, maps: torch.Tensor) -> torch.Tensor:
        """What the score that a claim is about loses under the areas that ``maps`` ``(m, H, W)``
        mark: ``(m,)``, the mean over the shares and baselines of an area. The score is that of the
        target, the target's less other classes', or that of a copy of the model. Runs are kept by
        areas, since claims share them."""
        areas = MarkedAreas.of(maps, self.seed)
        key = (claim.of == "copy", areas)
        if key not in self.drops_of_areas:
            with muted():
                if claim.of == "copy":
                    drops = self._drops_of_copy(self._copies(self.checks)[0], areas)
                else:
                    drops = self._drops(areas)
            self.drops_of_areas[key] = drops.reshape(len(drops), -1, areas.photos_of_each).mean(2)
        drops = self.drops_of_areas[key]
        if claim.of == "class":
            return drops[0] - drops[1:].mean(0)
        return drops[0]

    def _reattribution_results(self, data: Mapping[str, MetricInput]) -> Results:
        """The results, by map and check, of the checks that run the methods again. Methods whose
        maps take many passes run with fewer samples; if they still take long, with the reduced
        checks."""
        rerun_checks: list[Any] = [
            check
            for check in self.checks
            if isinstance(check, ReattributionMetric)
            and not any(self.why_not[name, check.name] for name in data)
        ]
        if not rerun_checks:
            return {}
        groups: dict[tuple[Any, bool], dict[str, EvaluatedMethod]] = {}
        for name, map_data in data.items():
            method, attribution = self.maps[name]
            evaluated, takes_long = self._cheaper(EvaluatedMethod(method, attribution, map_data))
            groups.setdefault((attribution.fuse, takes_long), {})[name] = evaluated
        results: Results = {}
        for (fuse, takes_long), group in groups.items():
            checks = [check.reduced for check in rerun_checks] if takes_long else rerun_checks
            results |= self._reattributed(checks, group, {**self.options, "fuse": fuse})
        return results

    def _reattributed(
        self, checks: Sequence[Any], maps: Mapping[str, EvaluatedMethod], options: Any
    ) -> Results:
        """Run all ``checks`` of all ``maps`` again together; if this fails, run each check alone,
        so that the others have a result. The reason of a check that fails goes into ``why_not``."""
        try:
            with muted():  # the results contain it
                return reattribute(checks, maps, self.context, self.target, options)
        except ExplainError as error:
            if len(checks) == 1:
                self.why_not |= {(name, checks[0].name): str(error) for name in maps}
                return {}
        results: Results = {}
        for check in checks:
            results |= self._reattributed([check], maps, options)
        return results

    def _cheaper(self, evaluated: EvaluatedMethod) -> tuple[EvaluatedMethod, bool]:
        """The method with fewer samples, and its map with these, if each map takes more than
        `COSTLY` passes; and whether the method still takes long. A note in the verdict says so."""
        attribution = evaluated.attribution
        name = evaluated.data.maps.name
        place: Any = {
            "layer": attribution.layer,
            "fuse": attribution.fuse,
            "placement": attribution.placed,
        }
        planned = plan(self.model, self.inputs, evaluated.method, target=self.target, **place)
        layers = {
            need.layer
            for needs in planned.wanted.values()
            for need in needs
            if need.layer is not None
        }
        cost = planned.cost(cost_after(self.model, self.inputs, layers))
        if cost <= COSTLY:
            return evaluated, False
        why = (
            f"since a map takes {cost:.0f} passes"
            if math.isfinite(cost)
            else "since a map takes many passes"
        )
        options: Any = {**self.options, "progress": None, **place}
        for fewer in with_fewer_samples(evaluated.method, FEW):
            with muted(), suppress(MethodError):
                again = attribute(self.model, self.inputs, fewer, target=self.target, **options)
                counts = ", ".join(
                    f"{key}={count}"
                    for inner in _chain(fewer)
                    for key, count in _counts(inner).items()
                )
                self.notes[name].append(f"run again with {counts}, {why}")
                data_again = self.context.data(name, again, again.score)
                return EvaluatedMethod(fewer, again, replace(data_again, keeps_maps=True)), False
        self.notes[name].append(f"run again as few times as possible, {why}")
        return evaluated, True


def check_explained(
    explanation: Any,
    attributions: Sequence[Attribution],
    index: int,
    seed: int,
    samples: int = MASKS,
    **options: Any,
) -> Verdict:
    """Check the maps of the target at position ``index`` of an `explain.Explanation`, and add the
    verdict to ``explanation.verdicts``, beside earlier results of other methods.

    Raises:
        MetricError: it is a copy without a model; or the maps are of several crops.
    """
    explainer = explanation.explainer
    session = explanation.session
    if explainer is None or session is None:
        raise MetricError(
            "explanation must have its model to be checked, but is a copy; explain the photo again"
        )
    if explanation.crops:
        raise MetricError(
            "maps must be of one crop to be checked, got some of tiles; use explain.evaluate"
        )
    first = attributions[0]
    target = as_target(explanation.target_at(index))
    methods = [] if isinstance(session.methods, str) else session.methods
    maps = [(attribution.applied(methods), attribution) for attribution in attributions]
    settings: Any = {"activation": explainer.activation, **options}
    settings |= {
        "interventions": first.interventions,
        "checks": default_checks(seed, samples),
        "seed": seed,
    }
    with naming([explanation.source]):
        x = explainer.as_input(explanation.photo)
        verdict = check_maps(
            explainer.model, x, maps, target, explanation.targets[index], **settings
        )
    earlier = explanation.verdicts.get(index)
    explanation.verdicts[index] = verdict if earlier is None else earlier.updated(verdict)
    return verdict
