"""The verdict: each check against a plain computation, the level of the permutation test, and what
is refused."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import MetricError
from explain.data.inputs import as_inputs
from explain.engine import Evidence, InputGradients, Need
from explain.layers.layouts import Grids
from explain.methods import Method, RandomCAM, Saliency
from explain.methods.base import Style, get_method
from explain.metrics import Faithful, Verdict
from explain.metrics.base import digest_of_tensor
from explain.metrics.checking import AREAS_SHARE, MASKS_SHARE, check_maps, most_passes
from explain.metrics.maps import spearman
from explain.metrics.marked_areas import AreaTest, MarkedAreas
from explain.metrics.masked_scores import (
    MaskedScores,
    Placed,
    RandomMasks,
    photo_maps,
    strata_of,
    strong_blur,
)
from explain.metrics.randomised import Randomised
from explain.metrics.sanity import CheckResult, DependsOnClass, DependsOnModel, Stable
from explain.metrics.verdict import CheckResults, Share
from explain.targets import ClassTarget, as_target
from tests.conftest import snapshot
from tests.metrics.conftest import Counting


def check(
    model: nn.Module, x: torch.Tensor, methods: list[Any], target: Any = 1, checks: Any = None
) -> Verdict:
    """The verdict on maps of one photo."""
    objects = [get_method(method) for method in methods]
    attributions = explain.attribute(model, x, objects, target=target)
    maps = [(method, attributions[method.name]) for method in objects]
    settled = ClassTarget((target,)) if isinstance(target, int) else as_target(target)
    return check_maps(model, x, maps, settled, "it", checks=checks)


class OfGradients(Method):
    """A method that sees gradients, which tell classes and models apart."""

    style: ClassVar[Style] = "signed"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset({InputGradients()})


@dataclass(frozen=True)
class PhotoItself(OfGradients):
    """The channels of the photo: it looks at no model. With ``noise``, also a pattern that differs
    from class to class and from model to model; with ``frequency``, it is another one for a photo
    that is hardly another."""

    noise: float = 0
    frequency: float = 0

    name: ClassVar[str] = "photo"

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        if self.frequency:
            return torch.sin(self.frequency * evidence.inputs)
        seed = int.from_bytes(digest_of_tensor(evidence[InputGradients()].double())[:4], "big")
        generator = torch.Generator().manual_seed(seed)
        pattern = torch.randn(evidence.inputs.shape, generator=generator, dtype=torch.float64)
        return evidence.inputs.abs() + self.noise * pattern


# Is it faithful?


def partial_correlation(one: Any, other: Any, rest: Any) -> float:
    """The correlation of what is left of two columns when others are taken out by least squares."""
    pair = np.stack([one, other], 1)
    left = pair - rest @ np.linalg.lstsq(rest, pair, rcond=None)[0]
    return float(left[:, 0] @ left[:, 1] / np.linalg.norm(left, axis=0).prod())


@pytest.mark.parametrize("width", [9, 12])
def test_faithful_equals_a_plain_permutation_test(model: nn.Module, width: int) -> None:
    """One weighted regression for each placement: turned, flipped, and rolled by sixths."""
    x = torch.randn(1, 3, 12, width, dtype=torch.float64)
    attribution = explain.attribute(model, x, "inputxgradient", target=2)
    metric = Faithful(48)
    table = explain.evaluate(model, x, attribution, metric, target=2)
    masks = metric.masked.masks(x)[0]
    fills = [baseline.replacement(x) for baseline in metric.masked.baselines(x)]
    number = np.arange(48) // 2 % 4
    masked = [torch.where(mask, fills[fill], x) for mask, fill in zip(masks, number, strict=True)]
    drops = (model(x) - model(torch.cat(masked)))[:, 2].detach().numpy()
    covered = masks.double().numpy()
    area = covered.mean((1, 2))[:, None]
    fill = np.eye(4)[number]
    of_photo = np.einsum("mhw,khw->mk", covered, photo_maps(x[0]).numpy())
    design = np.hstack([fill, fill * area, area**2, of_photo])
    left = drops - design @ np.linalg.lstsq(design, drops, rcond=None)[0]
    strata = np.arange(48) % 8  # few cells or many, by the baseline
    deviations = np.array([(left[strata == stratum] ** 2).mean() ** 0.5 for stratum in strata])
    weights = 1 / np.maximum(deviations, 0.1 * (left**2).mean() ** 0.5)
    correlations = []
    for turn, flip, down, across in np.ndindex(4, 2, 6, 6):
        placed = np.rot90(attribution.values.sum(1)[0].numpy(), turn)
        if placed.shape != (12, width):
            continue
        placed = placed[:, ::-1] if flip else placed
        placed = np.roll(placed, (round(down * 12 / 6), round(across * width / 6)), (0, 1))
        sums = (covered * placed).sum((1, 2))
        rest = design * weights[:, None]
        correlations.append(partial_correlation(sums * weights, drops * weights, rest))
    expected = np.mean(np.array(correlations) >= correlations[0] - 1e-9)
    assert table["inputxgradient"]["faithful"].item() == pytest.approx(expected)


def linear(weight: torch.Tensor) -> nn.Module:
    """A model of two classes whose second score adds up the photo's pixels by a weight ``(C, H,
    W)``."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(weight.numel(), 2, bias=False)).double()
    model[1].weight.data = torch.stack([torch.zeros_like(weight), weight]).flatten(1)
    return model


def blob() -> torch.Tensor:
    """A blob at a random place, on a torus."""
    middle = torch.rand(2, dtype=torch.float64) * 24
    down, across = ((torch.arange(24) - middle[:, None] + 12) % 24 - 12).square()
    return torch.exp(-(down[:, None] + across) / 18)


def test_maps_that_know_nothing_pass_no_more_often_than_the_level_says() -> None:
    """Random blobs, and maps of the photo alone; the score adds up the photo's values in another
    random blob."""
    count = 20
    passed = Counter[str]()
    for _ in range(count):
        weight = blob().expand(3, -1, -1)
        x = torch.rand(1, 3, 24, 24, dtype=torch.float64) + 1
        away = x - x.mean((2, 3), keepdim=True)
        maps = {"right": weight * away, "blob": blob()[None], "photo": away.norm(dim=1)}
        maps["noise"] = torch.rand(1, 24, 24, dtype=torch.float64)
        table = explain.evaluate(linear(weight), x, maps, Faithful(), target=1)
        passed.update(name for name in maps if table[name]["faithful"] <= 0.05)
    most = count * (0.05 + 3 * (0.05 * 0.95 / count) ** 0.5)
    assert passed.pop("right") >= 0.95 * count
    assert all(times <= most for times in passed.values()), passed


def test_a_pattern_of_class_and_weights_does_not_pass(model: nn.Module) -> None:
    """Its maps differ as much as those of a true method; but the difference predicts no score."""
    checks = (DependsOnModel(), DependsOnClass(), Faithful())
    passed = Counter[str]()
    for _ in range(4):
        x = torch.randn(1, 3, 12, 12, dtype=torch.float64)
        verdict = check(model, x, [PhotoItself(noise=3), "inputxgradient"], checks=checks)
        passed.update(name for name, results in verdict.items() if results.passed)
    assert [*passed] == ["inputxgradient"]


@dataclass(frozen=True, eq=False)
class Exact(OfGradients):
    """Weights times values of a linear model. With ``behind_a_gate``, only for the weights that are
    known, with noise for others; with ``sign`` -1, the opposite."""

    weight: torch.Tensor
    sign: int = 1
    behind_a_gate: bool = False

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        x = evidence.inputs
        gradient = evidence[InputGradients()]
        if self.behind_a_gate and not torch.equal(gradient[0], self.weight):
            return PhotoItself(noise=1)(evidence) - x.abs()
        return self.sign * gradient * (x - x.mean((2, 3), keepdim=True))


def test_a_right_map_is_supported_its_opposite_contradicted_and_one_behind_a_gate_not_shown() -> (
    None
):
    """The map behind a gate is right for this model and for no other: it does not look at it."""
    weight = blob().expand(3, -1, -1).contiguous()
    x = torch.rand(1, 3, 24, 24, dtype=torch.float64)
    methods = (Exact(weight), Exact(weight, -1), Exact(weight, behind_a_gate=True))
    right, opposite, gated = (check(linear(weight), x, [method])["exact"] for method in methods)
    assert right.answer == "supported"
    assert opposite.faithful.answer == opposite.answer == "contradicted"
    assert (gated.faithful.answer, gated.depends_on_model.answer) == ("supported", "not shown")
    assert gated.answer == "not shown"


# The areas that a map marks


def test_marked_areas_are_covered_as_by_hand() -> None:
    """A tenth and a fifth of the pixels, where the map is largest, become the mean colour, and
    then the blurred photo."""
    x = torch.rand(1, 3, 20, 20, dtype=torch.float64)
    maps = torch.rand(2, 20, 20, dtype=torch.float64)
    areas = MarkedAreas.of(maps, seed=0)
    evidence = Evidence(x, torch.zeros(1), None, "", Grids((20, 20)))
    rows = areas.rows(evidence).make(torch.arange(2 * areas.photos_of_each))
    fills = [x.mean((2, 3), keepdim=True).expand_as(x), strong_blur(x.shape).replacement(x)]
    expected = []
    for values in maps:
        for count in (40, 80):
            largest = values >= values.flatten().sort(descending=True).values[count - 1]
            expected += [torch.where(largest, fill, x)[0] for fill in fills]
    assert areas.photos_of_each == 4
    torch.testing.assert_close(rows, torch.stack(expected))


def test_a_map_has_the_level_if_it_comes_before_all_placements_and_maps_of_the_photo() -> None:
    of_photo = photo_maps(torch.rand(3, 12, 12).double())
    drawn: list[torch.Tensor] = []

    def draws(maps: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(len(maps)) - 2 * (maps is of_photo))
        return drawn[-1]

    firsts = 0
    for seed in range(100):
        drawn.clear()
        p_value, controls = AreaTest(of_photo, draws, seed).test(torch.rand(12, 12), 12)
        placements = torch.cat(drawn[2:])
        comes_first = bool(drawn[0] > placements.max())
        assert (p_value, controls) == (1 / 13 if comes_first else 1, 0)
        assert len(placements) == 12 or not comes_first
        firsts += comes_first
    assert firsts > 0
    alike = AreaTest(of_photo, lambda maps: torch.zeros(len(maps)), 0)
    assert alike.test(torch.rand(12, 12), 12) == (1, len(of_photo))


def test_the_two_tests_spend_no_more_than_the_level_and_take_no_more_passes_than_said(
    model: nn.Module, photos: torch.Tensor
) -> None:
    assert pytest.approx(1) == MASKS_SHARE + AREAS_SHARE
    counting = Counting(model)
    verdict = check(counting, photos[:1], ["inputxgradient"])
    assert verdict["inputxgradient"].faithful.passed is not None
    assert len(counting.rows) < most_passes(1) + 60


def test_as_many_masks_are_needed_as_bring_the_level() -> None:
    """With so many independent values, the correlation is that which one in twenty other places
    exceeds, if these vary by chance and because the map is wide."""
    placed = Placed(0.2, 0.1, 0.9, spread=0.005 + 1 / 50, freedom=50)
    freedom = placed.needed(0.05)
    assert pytest.approx(1.6449 * (0.005 + 1 / freedom) ** 0.5, rel=1e-4) == 0.2
    assert math.isinf(replace(placed, spread=0.1).needed(0.05))
    assert math.isinf(replace(placed, correlation=-0.1).needed(0.05))


def test_a_photo_map_does_as_well_if_its_partial_correlation_is_as_large() -> None:
    """The correlation of each with what masks take, where all others are taken out of both."""
    x = torch.rand(1, 3, 24, 24, dtype=torch.float64)
    masks = RandomMasks(80, 0).masks(x)[0]
    maps = photo_maps(x[0])
    drops = masks.double().flatten(1) @ maps[3].flatten() + 0.1 * torch.randn(80)
    masked = MaskedScores(x[0], masks, strata_of(80), drops)
    values = torch.rand(24, 24, dtype=torch.float64)
    placed = masked.test(values[None], drops)
    weights = masked.weights(drops).numpy()
    columns = masked.nuisance.numpy() * weights[:, None]
    of_photo = [
        partial_correlation(columns[:, k], drops.numpy() * weights, np.delete(columns, k, 1))
        for k in range(columns.shape[1] - len(maps), columns.shape[1])
    ]
    assert placed.controls == sum(value >= placed.correlation for value in of_photo)
    assert of_photo[3] == max(of_photo)
    assert placed.controls >= 1


def test_holm_takes_the_smallest_p_values_first() -> None:
    results = {}
    for name, figure in {"a": 0.03, "b": 0.004, "c": 0.02, "d": math.nan, "e": 0.9}.items():
        result = CheckResult("faithful", "faithful", figure, figure <= 0.05, "")
        results[name] = CheckResults(name, (result,))
    # 0.004 * 4 is at most 0.05, and 0.02 * 3 is not
    assert Verdict("cat", results).faithful_after_holm == ["b"]


# Does it depend on the model, and on the class? Is it stable?


def test_similarity_to_random_copies_and_to_other_classes_by_a_plain_computation(
    model: nn.Module, photos: torch.Tensor
) -> None:
    """Two of four other classes are the lower half of them."""
    x = photos[:1]
    checks = [DependsOnModel(copies=2, seed=5), DependsOnClass(classes=2)]
    table = explain.evaluate(model, x, "inputxgradient", checks, target=2)["inputxgradient"]

    def values(network: nn.Module, target: int) -> torch.Tensor:
        return explain.attribute(network, x, "inputxgradient", target=target).values.sum(1)

    randomised = Randomised(model, as_inputs(x))
    upper = randomised.layers[len(randomised.layers) // 2 :]
    of_copies = [values(randomised.of(upper, 5 * 1009 + number), 2) for number in (0, 1)]
    ranking = [index for index in model(x)[0].argsort(descending=True).tolist() if index != 2]
    of_classes = [values(model, index) for index in ranking[2:]]
    for name, compared in {"depends_on_model": of_copies, "depends_on_class": of_classes}.items():
        expected = sum(spearman(values(model, 2), other).item() for other in compared) / 2
        assert table[name].item() == pytest.approx(expected, abs=1e-9)


def test_the_photo_itself_fails_by_model_and_class_and_a_gradient_passes(
    model: nn.Module, photos: torch.Tensor
) -> None:
    methods = [PhotoItself(), "inputxgradient", RandomCAM()]
    checks = (DependsOnModel(), DependsOnClass(), Faithful(samples=240))
    verdict = check(model, photos[:1], methods, checks=checks)
    of_photo = verdict["photo"]
    figures = [of_photo.depends_on_model.figure, of_photo.depends_on_class.figure]
    assert figures == pytest.approx([1, 1])
    assert verdict.passed["photo"] is False
    assert verdict["inputxgradient"].depends_on_model.passed is True
    assert verdict["randomcam"].depends_on_class.figure == pytest.approx(1)


def test_what_no_check_can_judge_is_not_judged(model: nn.Module, photos: torch.Tensor) -> None:
    """A model of one class, a target that is no class, and a score that no mask changes; whether a
    difference predicts the scores, where no masks are run."""
    x = photos[:1]
    without = check(model, x, [Saliency()], checks=(DependsOnModel(), DependsOnClass()))
    assert [result.passed for result in without["saliency"]] == [None, None]
    margin: Any = lambda output: output[:, 0] - output[:, 1]  # noqa: E731
    results = check(model, x, [Saliency()], margin, (DependsOnClass(),))["saliency"]
    assert "the target is no class" in results.depends_on_class.reason
    flat = nn.Sequential(nn.Flatten(), nn.Linear(360, 1)).double()
    attribution = explain.attribute(flat, x, "saliency", target=0)
    maps = [(Saliency(), replace(attribution, values=torch.rand_like(attribution.values)))]
    nn.init.zeros_(flat[1].weight)
    checks = (DependsOnClass(), Faithful())
    verdict = check_maps(flat, x, maps, ClassTarget((0,)), "it", checks=checks)
    assert [result.passed for result in verdict["saliency"]] == [None, None]
    assert verdict.passed == {"saliency": False}  # nothing was applicable


def test_stability_is_the_mean_similarity_over_changes_that_leave_the_scores_alone(
    model: nn.Module, photos: torch.Tensor
) -> None:
    x = photos[:1]
    lights = (-0.3, -0.1, 0.03, 0.2)
    lit = torch.cat([x, *(x + light * (x.max() - x.min()) for light in lights)])
    values = explain.attribute(model, lit, "saliency", target=1).values.abs().amax(1)
    probabilities = model(lit).softmax(1)[:, 1].detach()
    moved = (probabilities[1:] - probabilities[0]).abs()
    slack = float(moved.sort().values[1]) * (1 + 1e-9)
    similarities = spearman(values[:1].expand(4, -1, -1), values[1:])
    metric = Stable(slack=slack, noises=(), contrast=(), light=lights)
    table = explain.evaluate(model, x, "saliency", metric, target=1)
    expected = similarities[moved <= slack].mean()
    torch.testing.assert_close(table["saliency"]["stable"][0], expected, rtol=0, atol=1e-9)
    nothing = check(model, x, [Saliency()], checks=(Stable(slack=0),))["saliency"].stable
    assert nothing.passed is None
    verdict = check(model, x, [PhotoItself(frequency=1e7), Saliency()], checks=(Stable(),))
    assert verdict.passed == {"photo": False, "saliency": True}


# Together


def test_nothing_is_left_changed_and_what_maps_share_is_run_once(
    model: nn.Module, photos: torch.Tensor
) -> None:
    original = snapshot(model)
    counts = []
    for methods in (["layercam"], ["layercam", "randomcam"]):
        counting = Counting(model)
        check(counting, photos[:1], methods)
        counts.append(len(counting.rows))
    assert snapshot(model) == original
    # masks, copies of the model, classes and changes are run once for all
    assert counts[1] - counts[0] <= 10


def test_methods_of_many_passes_run_with_fewer_samples_and_it_is_said(
    model: nn.Module, photos: torch.Tensor
) -> None:
    methods = ["integratedgradients", "occlusion", "smooth(integratedgradients)"]
    verdict = check(model, photos[:1], methods, checks=(DependsOnClass(), Stable()))
    notes = verdict["integratedgradients"].notes
    assert notes == ("run again with steps=32, since a map takes 102 passes",)
    assert "as few times as possible" in verdict["occlusion"].notes[0]
    assert "over 1 of 1 small changes" in verdict["occlusion"].stable.reason
    assert "samples=" in verdict["smooth(integratedgradients)"].notes[0]


@pytest.mark.parametrize(("value", "why"), [(0, "zero everywhere"), (1, "constant")])
def test_a_constant_map_fails_every_check(
    model: nn.Module, photos: torch.Tensor, value: float, why: str
) -> None:
    x = photos[:1]
    attribution = explain.attribute(model, x, "saliency", target=1)
    constant = replace(attribution, values=torch.full_like(attribution.values, value))
    results = check_maps(model, x, [(Saliency(), constant)], ClassTarget((1,)), "it")["saliency"]
    assert [(result.passed, why in result.reason) for result in results] == [(False, True)] * 4


def test_a_verdict_is_the_worst_of_its_results_and_prints_all_of_them() -> None:
    good = CheckResult("faithful", "faithful", 0.025, True, "fine")
    bad = CheckResult("stable", "stable", 0.2, False, "it is not")
    none = CheckResult("depends_on_class", "class", float("nan"), None, "one class only")
    unknown = CheckResult("faithful", "faithful", 0.2, False, "too few masks", undecided=True)
    of_methods = {"m": (none, good, bad), "n": (good, none, good), "u": (good, unknown, good)}
    of_methods["w"] = (unknown, bad, good)
    verdict = Verdict("cat", {name: CheckResults(name, r) for name, r in of_methods.items()})
    assert verdict.passed == {"m": False, "n": True, "u": False, "w": False}
    assert list(verdict.answers.values()) == [
        "contradicted",
        "supported",
        "not shown",
        "contradicted",
    ]
    assert str(verdict).splitlines()[0].split()[:2] == ["m", "contradicted"]
    assert "  m – class: one class only" in verdict.lines(verbose=True)
    record = verdict.to_dict()["methods"]["m"]["answers"]["depends_on_class"]
    assert (record["answer"], record["passed"], record["figure"]) == ("not applicable", None, None)
    assert (verdict["m"].stable, verdict["m"].worst) == (bad, bad)
    with pytest.raises(MetricError, match="method 'k' was not checked"):
        verdict["k"]


def test_a_summary_counts_what_passes_on_many_photos() -> None:
    verdicts = []
    for faithful, stable in ((True, True), (True, None), (False, True), (None, None)):
        one = CheckResult("faithful", "faithful", 0.5, faithful, "")
        other = CheckResult("stable", "stable", 0.5, stable, "")
        verdicts.append(Verdict("it", {"lrp": CheckResults("lrp", (one, other))}))
    shares = Verdict.summary(verdicts).shares["lrp"]
    assert shares == {"all": Share(2, 3), "faithful": Share(2, 3), "stable": Share(2, 2)}
    # Wilson's interval: the shares p for which |passed / n - p| is 1.96 deviations
    for end in Share(54, 100).interval:
        assert abs(0.54 - end) == pytest.approx(1.96 * (end * (1 - end) / 100) ** 0.5)


def test_what_cannot_be_checked_is_refused(model: nn.Module, photos: torch.Tensor) -> None:
    with pytest.raises(MetricError, match="samples of faithful must"):
        Faithful(10)
    with pytest.raises(MetricError, match="x must"):
        check(model, photos, [Saliency()])
    with pytest.raises(MetricError, match="maps must"):
        check_maps(model, photos[:1], [], ClassTarget((1,)), "it")
    with pytest.raises(MetricError, match="verdicts must be"):
        Verdict.summary([])
