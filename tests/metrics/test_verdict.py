"""The verdict: each check against a plain computation, the level of the permutation test, and what
is refused."""

from __future__ import annotations

import itertools
import math
import re
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
from explain.methods import GradCAM, Method, RandomCAM, Saliency
from explain.methods.base import Style, get_method
from explain.metrics import Faithful, Verdict
from explain.metrics.base import MetricResult, digest_of
from explain.metrics.maps import spearman
from explain.metrics.masked_scores import photo_maps
from explain.metrics.randomised import Randomised
from explain.metrics.sanity import (
    CheckResult,
    DependsOnClass,
    DependsOnModel,
    NormalNoise,
    Stable,
    far_down,
)
from explain.metrics.verdict import CheckResults, Share, check_maps, with_fewer_samples
from explain.targets import ClassTarget, Target
from explain.targets.resolve import TargetLike
from tests.conftest import snapshot
from tests.metrics.test_evaluation import Counting


def checked(
    model: nn.Module,
    x: torch.Tensor,
    methods: list[Any],
    target: TargetLike = 1,
    checks: Any = None,
    **options: Any,
) -> Verdict:
    """The verdict on maps of one photo."""
    known = [get_method(method) for method in methods]
    found = explain.attribute(model, x, known, target=target)
    settled: Target = (
        ClassTarget((target,)) if isinstance(target, int) else explain.targets.as_target(target)
    )
    return check_maps(
        model, x, [(m, found[m.name]) for m in known], settled, "it", checks=checks, **options
    )


@dataclass(frozen=True)
class Edges(Method):
    """A method that draws the photo's own channels and looks at no model."""

    name: ClassVar[str] = "edges"
    summary: ClassVar[str] = "the photo"
    style: ClassVar[Style] = "intensity"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence.inputs.abs()


@dataclass(frozen=True)
class Shattered(Method):
    """A method whose map has nothing to do with that of a photo that is hardly another."""

    name: ClassVar[str] = "shattered"
    summary: ClassVar[str] = "noise"
    style: ClassVar[Style] = "signed"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return torch.sin(1e7 * evidence.inputs)


# Is it faithful?


def places(values: Any) -> list[Any]:
    """A map ``(H, W)`` in all places, by numpy: turned, flipped, rolled by sixths; its own
    first."""
    height, width = values.shape
    turned = [np.rot90(values, turn) for turn in (range(4) if height == width else (0, 2))]
    flipped = [each for one in turned for each in (one, one[:, ::-1])]
    steps = [(round(i * height / 6), round(j * width / 6)) for i in range(6) for j in range(6)]
    return [np.roll(each, step, (0, 1)) for each in flipped for step in steps]


def residual(values: Any, columns: Any) -> Any:
    """What is left of values ``(K,)`` after a regression on columns ``(K, c)``."""
    return values - columns @ np.linalg.lstsq(columns, values, rcond=None)[0]


def photo_columns(x: torch.Tensor) -> list[Any]:
    return [each.numpy() for each in photo_maps(x[0].double())]


def plain_p(maps: list[Any], drops: list[Any], covered: Any, which: Any, photo: list[Any]) -> float:
    """The p-value of `MaskedScores.test` by one regression for each placement of each map."""
    area = covered.mean((1, 2))
    columns = [(which == b).astype(float) for b in range(4)]
    columns = [*columns, *(each * area for each in columns), area**2]
    columns += [(covered * each).sum((1, 2)) for each in photo]
    design = np.stack(columns, 1)
    found = []
    for together in zip(*(places(each) for each in maps), strict=True):
        correlations = []
        for each, drop in zip(together, drops, strict=True):
            left = residual((covered * each).sum((1, 2)), design)
            lost = residual(drop, design)
            correlations.append(float(left @ lost / np.sqrt((left @ left) * (lost @ lost))))
        found.append(np.mean(correlations))
    return float(np.mean(np.array(found) >= found[0] - 1e-9))


@pytest.mark.parametrize("width", [9, 12])
def test_faithful_equals_a_plain_permutation_test(
    model: nn.Module, photos: torch.Tensor, width: int
) -> None:
    x = torch.randn(
        1, 3, 12, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64
    )
    a = explain.attribute(model, x, "inputxgradient", target=2)
    check = Faithful(48)
    found = explain.evaluate(model, x, {"it": a}, check, target=2)
    masks = check.masked.masks(x)[0]
    which = np.arange(48) // 2 % 4
    with torch.no_grad():
        photo = [each.replacement(x) for each in check.masked.baselines(x)]
        masked = [torch.where(mask, photo[which[k]], x) for k, mask in enumerate(masks)]
        drops = (model(x) - model(torch.cat(masked)))[:, 2].numpy()
    values = a.values.sum(1)[0].numpy()
    covered = masks.double().numpy()
    expected = plain_p([values], [drops], covered, which, photo_columns(x))
    assert found["it"]["faithful"].item() == pytest.approx(expected)


def test_the_maps_of_a_photo_are_what_their_names_say() -> None:
    x = torch.rand(3, 24, 18, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    distance, _, edges, _, middle, wide, _, product = photo_maps(x)
    channel_means = [x[c].mean() for c in range(3)]
    plain = sum((x[c, 5, 7] - channel_means[c]) ** 2 for c in range(3)) ** 0.5
    assert distance[5, 7] == pytest.approx(float(plain))
    grey = x.mean(0)
    assert edges[5, 7] == pytest.approx(
        float((grey[6, 7] - grey[5, 7]).abs() + (grey[5, 8] - grey[5, 7]).abs())
    )
    assert int(middle.argmax()) in {place * 18 + column for place in (11, 12) for column in (8, 9)}
    assert bool((wide >= middle).all())
    assert product[5, 7] == pytest.approx(float(distance[5, 7] * middle[5, 7]))


def linear(weight: torch.Tensor) -> nn.Module:
    """A model of two classes whose second score adds up the photo's pixels by a weight ``(C, H,
    W)``."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(weight.numel(), 2, bias=False)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.stack([torch.zeros_like(weight), weight]).flatten(1))
    return model


def blob(generator: torch.Generator, side: int = 24) -> torch.Tensor:
    """A blob at a random place, on a torus."""
    yx = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).double()
    middle = torch.rand(2, 1, 1, generator=generator, dtype=torch.float64) * side
    away = (yx - middle + side / 2) % side - side / 2
    return torch.exp(-away.square().sum(0) / 18)


def test_maps_that_know_nothing_pass_no_more_often_than_the_level_says() -> None:
    """Random blobs, and maps of the photo alone; the score adds up the photo's values in another
    random blob."""
    generator = torch.Generator().manual_seed(0)
    count = 25
    passed: dict[str, list[bool]] = {"right": [], "blob": [], "noise": [], "photo": []}
    for _ in range(count):
        weight = blob(generator).expand(3, -1, -1)
        x = torch.rand(1, 3, 24, 24, generator=generator, dtype=torch.float64) + 1
        away = x - x.mean((2, 3), keepdim=True)
        maps = {
            "right": weight * away,
            "blob": blob(generator)[None],
            "photo": away.norm(dim=1),
            "noise": torch.rand(1, 24, 24, generator=generator, dtype=torch.float64),
        }
        found = explain.evaluate(linear(weight), x, maps, Faithful(), target=1)
        for name in maps:
            passed[name].append(bool(found[name]["faithful"] <= 0.05))
    shares = {name: sum(each) / count for name, each in passed.items()}
    most = 0.05 + 3 * (0.05 * 0.95 / count) ** 0.5
    assert max(shares["blob"], shares["noise"], shares["photo"]) <= most, shares
    assert shares["right"] >= 0.95, shares


def test_a_map_and_its_sum_over_the_channels_have_the_same_answer(
    model: nn.Module, photos: torch.Tensor
) -> None:
    a = explain.attribute(model, photos[:1], "inputxgradient", target=2)
    maps = {"channels": a, "sum": a.values.sum(1)}
    found = explain.evaluate(model, photos[:1], maps, Faithful(), target=2)
    assert found["channels"]["faithful"] == found["sum"]["faithful"]


def test_masks_differ_from_photo_to_photo_and_with_the_seed(photos: torch.Tensor) -> None:
    masks = Faithful(40).masked.masks(photos)
    assert masks.shape == (len(photos), 40, *photos.shape[2:])
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks, Faithful(40).masked.masks(photos))
    assert not torch.equal(masks, Faithful(40, seed=1).masked.masks(photos))


def test_too_few_masks_are_refused_and_a_score_that_masks_do_not_change_is_not_judged() -> None:
    with pytest.raises(MetricError, match="samples of faithful must"):
        Faithful(10)
    flat = linear(torch.zeros(3, 24, 24, dtype=torch.float64))
    x = torch.rand(1, 3, 24, 24, dtype=torch.float64)
    maps = explain.attribute(
        linear(torch.ones(3, 24, 24, dtype=torch.float64)), x, "saliency", target=1
    )
    drawn = replace(maps, values=torch.rand_like(maps.values))
    verdict = check_maps(
        flat, x, [(Saliency(), drawn)], ClassTarget((1,)), "it", checks=(Faithful(),)
    )
    assert verdict["saliency"].faithful.passed is None


@dataclass(frozen=True)
class Hashed(Method):
    """The photo's own channels, and a pattern that differs from class to class and from model to
    model."""

    name: ClassVar[str] = "hashed"
    summary: ClassVar[str] = "the photo and a pattern"
    style: ClassVar[Style] = "signed"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        seed = int.from_bytes(digest_of(evidence[InputGradients()].double())[:4], "big")
        drawn = torch.randn(
            evidence.inputs.shape,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64,
        )
        return evidence.inputs.abs() + 3 * drawn


@pytest.mark.parametrize("check", [DependsOnModel(), DependsOnClass(), Faithful(), Stable()])
def test_the_figure_of_a_check_agrees_with_its_result_and_no_method_is_advised_against_itself(
    check: Any,
) -> None:
    for alike, p_value in itertools.product((0.09, 0.7, 0.72, 0.99), (0.01, 0.2, math.nan)):
        parts = {
            "alike": torch.full((1, 2), alike),
            "zeros": torch.zeros(1, 2),
            "p": torch.tensor([p_value]),
        }
        parts |= {"correlation": torch.tensor([0.1]), "counted": torch.tensor([2])}
        value = p_value if check.word == "faithful" else alike
        result = check.decide(MetricResult(torch.tensor([value]), parts=parts))
        if result.symbol == "p":
            assert math.isnan(result.figure) or result.passed == (result.figure <= 0.05)
        else:
            assert result.passed == (result.figure < 0.5**0.5) ^ (check.word == "stable")
    for method in ("gradcam", "lrp", "smooth(gradcam)", "sufficient", "smooth(saliency)"):
        advised = re.findall(r"[\w()]+", check.advice_for(method))
        assert method not in advised
        assert method.removeprefix("smooth(").rstrip(")") not in advised


def test_a_pattern_of_class_and_weights_does_not_fool_the_checks(model: nn.Module) -> None:
    """Its maps differ as much as those of a true method; but the difference predicts no score."""
    generator = torch.Generator().manual_seed(2)
    passed = {"hashed": 0, "inputxgradient": 0}
    checks = (DependsOnModel(), DependsOnClass(), Faithful())
    for _ in range(5):
        x = torch.randn(1, 3, 12, 12, generator=generator, dtype=torch.float64)
        verdict = checked(model, x, [Hashed(), "inputxgradient"], checks=checks)
        for name, results in verdict.items():
            if name == "hashed":  # its similarity is low, so the p-value decides
                assert results.depends_on_class.symbol == "p" or results.depends_on_class.passed
            passed[name] += results.passed
    assert passed["hashed"] == 0
    assert passed["inputxgradient"] > 0


def test_holm_takes_the_smallest_p_values_first() -> None:
    def of(figure: float) -> CheckResults:
        return CheckResults("m", (CheckResult("faithful", "faithful", figure, figure <= 0.05, ""),))

    figures = {"a": 0.03, "b": 0.004, "c": 0.02, "d": float("nan"), "e": 0.9}
    verdict = Verdict("cat", {name: of(figure) for name, figure in figures.items()})
    assert verdict.faithful_after_holm == ["b"]  # 0.004 * 4 is at most 0.05, and 0.02 * 3 is not
    assert verdict.lines()[-1].endswith(": b")


# Does it depend on the model?


def test_the_likeness_to_copies_with_random_upper_layers_is_that_of_a_plain_computation(
    model: nn.Module, photos: torch.Tensor
) -> None:
    x = photos[:1]
    check = DependsOnModel(copies=2, seed=5)
    judged = explain.evaluate(model, x, ["gradcam"], check, target=1, layer="layer1")
    other_model = Randomised(model, as_inputs(x))
    layers = other_model.layers
    own = explain.attribute(model, x, GradCAM(), target=1, layer="layer1").values
    found = []
    for number in range(2):
        copy = other_model.of(layers[len(layers) // 2 :], 5 * 1009 + number)
        other = explain.attribute(copy, x, GradCAM(), target=1, layer="layer1").values
        big = [
            explain.layers.layouts.enlarge(each[:, None], (12, 10))[:, 0] for each in (own, other)
        ]
        found.append(spearman(*big).nan_to_num(0).item())
    assert judged["gradcam"]["depends_on_model"].item() == pytest.approx(sum(found) / 2, abs=1e-9)


def test_the_photo_itself_fails_by_model_and_class_and_a_gradient_passes(
    model: nn.Module, photos: torch.Tensor
) -> None:
    verdict = checked(
        model, photos[:1], [Edges(), "inputxgradient"], checks=(DependsOnModel(), DependsOnClass())
    )
    edges = verdict["edges"]
    gradient = verdict["inputxgradient"]
    assert (edges.results[0].figure, edges.results[0].passed) == (pytest.approx(1), False)
    assert (edges.results[1].figure, edges.results[1].passed) == (pytest.approx(1), False)
    assert gradient.results[0].passed is True
    assert verdict.passed["edges"] is False


# Does it depend on the class?


def test_other_classes_are_taken_from_the_lower_half_of_the_ranking(
    model: nn.Module, photos: torch.Tensor
) -> None:
    assert far_down(999, 3) == [583, 750, 916]
    for others in range(1, 30):
        for count in range(1, 6):
            found = far_down(others, count)
            assert found
            assert len(set(found)) == len(found) <= count
            assert all(others / 2 < place <= others for place in found)
    x = photos[:1]
    logits = model(x)[0]
    own = 2
    ranked = [own, *(i for i in logits.argsort(descending=True).tolist() if i != own)]
    table = explain.evaluate(model, x, "inputxgradient", DependsOnClass(classes=2), target=own)
    maps = {
        c: explain.attribute(model, x, "inputxgradient", target=c).values.sum(1) for c in range(5)
    }
    expected = [spearman(maps[own], maps[ranked[place]]).item() for place in far_down(4, 2)]
    got = table.parts("inputxgradient", "depends_on_class")["alike"][0]
    assert got.tolist() == pytest.approx(expected, abs=1e-9)


def test_a_map_without_a_class_fails_and_a_model_of_one_class_is_not_asked(
    model: nn.Module, photos: torch.Tensor
) -> None:
    asked = (DependsOnClass(),)
    assert (
        checked(model, photos[:1], [RandomCAM()], checks=asked)["randomcam"].depends_on_class.figure
        == 1
    )
    single = nn.Sequential(nn.Flatten(), nn.Linear(360, 1)).double()
    answers = checked(single, photos[:1], [Saliency()], 0, asked)["saliency"]
    assert answers.depends_on_class.passed is None
    assert "one class only" in answers.depends_on_class.reason
    assert answers.passed is False  # nothing could be asked
    free = checked(
        model, photos[:1], [Saliency()], lambda output: output[:, 0] - output[:, 1], asked
    )["saliency"]
    assert "the target is no class" in free.depends_on_class.reason


# Is it stable?


def test_stability_is_the_mean_likeness_over_changes_that_leave_the_scores_alone(
    model: nn.Module, photos: torch.Tensor
) -> None:
    x = photos[:1]
    with torch.no_grad():
        before = model(x).softmax(1)[0, 1]
        photo = Evidence(x, torch.zeros(1), None, "", Grids((12, 10)))
        moved = [
            float((model(each.perturbed(photo)).softmax(1)[0, 1] - before).abs())
            for each in Stable().changes
        ]
    slack = sorted(moved)[len(moved) // 2] * (1 + 1e-9)
    check = Stable(slack=slack)
    table = explain.evaluate(model, x, "saliency", check, target=1)
    own = explain.attribute(model, x, "saliency", target=1).values.abs().amax(1)
    alike = []
    counted = [each <= slack for each in moved]
    for change in check.changes:
        other = (
            explain.attribute(model, change.perturbed(photo), "saliency", target=1)
            .values.abs()
            .amax(1)
        )
        alike.append(spearman(own, other).item())
    assert 0 < sum(counted) < len(counted)
    expected = sum(a for a, c in zip(alike, counted, strict=True) if c) / sum(counted)
    assert table["saliency"]["stable"].item() == pytest.approx(expected, abs=1e-9)
    noise = NormalNoise(0.1, 3).perturbed(photo) - x
    assert noise.std().item() == pytest.approx(0.1 * (x.max() - x.min()).item(), rel=0.1)


def test_a_shattered_map_fails_and_where_every_change_moves_the_scores_nothing_is_said(
    model: nn.Module, photos: torch.Tensor
) -> None:
    verdict = checked(model, photos[:1], [Shattered(), Saliency()], checks=(Stable(),))
    assert verdict.passed == {"shattered": False, "saliency": True}
    assert abs(verdict["shattered"].stable.figure) < 0.3
    nothing = checked(model, photos[:1], [Saliency()], checks=(Stable(slack=0),))["saliency"].stable
    assert nothing.passed is None
    assert "moved the scores" in nothing.reason


# Together


def test_nothing_is_left_changed_and_what_maps_share_is_run_once(
    model: nn.Module, photos: torch.Tensor
) -> None:
    before = snapshot(model)
    inner = Counting(model)
    first = ["layercam"]
    second = ["layercam", "randomcam"]
    samples = []
    for methods in (first, second):
        inner.rows.clear()
        checked(inner, photos[:1], methods)
        samples.append(len(inner.rows))
    assert snapshot(model) == before
    rows = Faithful().samples
    assert rows < samples[0] <= rows + 30
    # masks, copies of the model, classes and changes are run once for all
    assert samples[1] - samples[0] <= 10


def test_methods_of_many_runs_are_asked_with_fewer_and_it_is_said(
    model: nn.Module, photos: torch.Tensor
) -> None:
    verdict = checked(
        model, photos[:1], ["integratedgradients"], checks=(DependsOnModel(), DependsOnClass())
    )
    assert verdict["integratedgradients"].notes == (
        "run again with steps=32, since a map takes 102 passes",
    )
    assert [
        each.samples for each in with_fewer_samples(explain.methods.Smooth(samples=100), 40)
    ] == [40, 80]
    wrapped: Any = next(with_fewer_samples(get_method("smooth(integratedgradients)"), 40))
    assert (wrapped.samples, wrapped.method.steps) == (6, 6)
    assert list(with_fewer_samples(GradCAM(), 40)) == []
    assert verdict["integratedgradients"].results[0].passed is True
    long = checked(
        model, photos[:1], ["occlusion"], checks=(DependsOnModel(), DependsOnClass(), Stable())
    )["occlusion"]
    assert len(long.notes) == 1
    assert "run again as few times as possible, since a map takes" in long.notes[0]
    assert "to the map of a copy with" in long.depends_on_model.reason
    assert "to the map of a class far" in long.depends_on_class.reason
    assert "over 1 of 1 small changes" in long.stable.reason


def test_a_map_that_says_nothing_fails_every_check(model: nn.Module, photos: torch.Tensor) -> None:
    x = photos[:1]
    found = explain.attribute(model, x, "saliency", target=1)
    for value, why in ((0, "zero everywhere"), (1, "constant")):
        empty = replace(found, values=torch.full_like(found.values, value))
        verdict = check_maps(model, x, [(Saliency(), empty)], ClassTarget((1,)), "it")
        answers = verdict["saliency"]
        assert not answers.passed
        assert [each.passed for each in answers] == [False] * 4
        assert all(why in each.reason and each.shown == "–" for each in answers)


def test_a_verdict_is_the_worst_of_its_answers_and_prints_all_of_them() -> None:
    good = CheckResult("faithful", "faithful", 0.025, True, "fine")
    bad = CheckResult("stable", "stable", 0.2, False, "it is not")
    none = CheckResult("depends_on_class", "class", float("nan"), None, "one class only")
    assert CheckResults("m", (good, none)).passed
    assert not CheckResults("m", (none,)).passed
    assert CheckResults("m", (good, none, bad)).worst is bad
    answers = [
        CheckResults("m", (none, good, bad), ("asked with fewer",)),
        CheckResults("n", (good,) * 3),
    ]
    verdict = Verdict("cat", {each.method: each for each in answers})
    assert verdict.passed == {"m": False, "n": True}
    assert str(verdict).splitlines() == [
        "m  – class –         ✓ faithful 0.025  ✗ stable 0.20     map: check failed",
        "n  ✓ faithful 0.025  ✓ faithful 0.025  ✓ faithful 0.025  map: check passed",
        "  m – class: one class only",
        "  m ✗ stable: it is not",
        "  m: asked with fewer",
    ]
    plain = verdict.to_dict()["methods"]["m"]
    assert plain["passed"] is False
    assert plain["answers"]["depends_on_class"] == {
        "passed": None,
        "figure": None,
        "symbol": "",
        "reason": "one class only",
    }
    assert verdict["m"].stable is bad
    with pytest.raises(MetricError, match="method 'k' was not checked"):
        verdict["k"]


def test_what_is_no_single_photo_is_refused(model: nn.Module, photos: torch.Tensor) -> None:
    found = explain.attribute(model, photos, "saliency", target=1)
    with pytest.raises(MetricError, match="x must"):
        check_maps(model, photos, [(Saliency(), found)], ClassTarget((1, 1, 1)), "it")
    with pytest.raises(MetricError, match="maps must"):
        check_maps(model, photos[:1], [], ClassTarget((1,)), "it")


@pytest.mark.parametrize(("passed", "count"), [(0, 7), (3, 7), (7, 7), (54, 100)])
def test_the_ends_of_the_interval_are_as_far_from_the_share_as_chance_allows(
    passed: int, count: int
) -> None:
    # Wilson's: the shares p for which |passed / n - p| is 1.96 deviations
    for end in Share(passed, count).interval:
        assert abs(passed / count - end) == pytest.approx(
            1.96 * (end * (1 - end) / count) ** 0.5, abs=1e-12
        )


def test_a_summary_counts_what_passes_on_many_photos() -> None:
    def results(*passed: bool | None) -> CheckResults:
        names = ("faithful", "stable")
        return CheckResults(
            "lrp", tuple(CheckResult(n, n, 0.5, p, "") for n, p in zip(names, passed, strict=True))
        )

    found = [results(True, True), results(True, None), results(False, True), results(None, None)]
    summary = Verdict.summary([Verdict("it", {"lrp": each}) for each in found])
    assert summary.shares["lrp"] == {
        "all": Share(2, 3),
        "faithful": Share(2, 3),
        "stable": Share(2, 2),
    }
    for wrong in ([], [None], Verdict("it", {"lrp": found[0]})):
        with pytest.raises(MetricError, match="verdicts must be"):
            Verdict.summary(wrong)
