"""The verdict: each check against a plain computation, the level of the permutation test, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import explain
from explain import MetricError
from explain.checks import Faithful, Verdict
from explain.checks.sanity import (
    ORIGINAL,
    CheckResult,
    DependsOnClass,
    DependsOnModel,
    Stable,
    all_placements,
    far_down,
    placed,
    same_details,
    with_noise,
)
from explain.checks.verdict import CheckResults, check_maps, with_fewer_samples
from explain.data.inputs import as_inputs
from explain.engine import Evidence, InputGradients, Need
from explain.methods import GradCAM, Method, RandomCAM, Saliency
from explain.methods.base import Style, get_method
from explain.metrics import MetricInput, MetricResult
from explain.metrics.base import PerturbedPhotoPool
from explain.metrics.maps import Maps, spearman
from explain.metrics.variants import Randomised
from explain.targets import ClassTarget, Target
from explain.targets.resolve import TargetLike
from tests.conftest import snapshot
from tests.metrics.test_evaluation import Counting


def checked(
    model: nn.Module, x: torch.Tensor, methods: list[Any], target: TargetLike = 1, checks: Any = None, **options: Any
) -> Verdict:
    """The verdict on maps of one photo."""
    known = [get_method(method) for method in methods]
    found = explain.attribute(model, x, known, target=target)
    settled: Target = ClassTarget((target,)) if isinstance(target, int) else explain.targets.as_target(target)
    return check_maps(model, x, [(m, found[m.name]) for m in known], settled, "it", checks=checks, **options)


@dataclass(frozen=True)
class Edges(Method):
    """A method that draws the photo's own channels and looks at no model."""

    name: ClassVar[str] = "edges"
    about: ClassVar[str] = "the photo"
    style: ClassVar[Style] = "intensity"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence.inputs.abs()


@dataclass(frozen=True)
class Shattered(Method):
    """A method whose map has nothing to do with that of a photo that is hardly another."""

    name: ClassVar[str] = "shattered"
    about: ClassVar[str] = "noise"
    style: ClassVar[Style] = "signed"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return torch.sin(1e7 * evidence.inputs)


# Is it faithful?


def test_the_places_of_copies_are_a_group() -> None:
    for size in ((3, 3), (3, 6)):
        own = torch.arange(size[0] * size[1]).reshape(1, *size)
        elements = [ORIGINAL, *all_placements(size)]
        lie = {tuple(placed(own, place).flatten().tolist()) for place in elements}
        assert len(lie) == len(elements)
        for first in elements:
            for then in elements:
                assert tuple(placed(placed(own, first), then).flatten().tolist()) in lie


def test_faithful_equals_a_plain_permutation_test(model: nn.Module, photos: torch.Tensor) -> None:
    x = photos[:1, :, :, :9]
    a = explain.attribute(model, x, "inputxgradient", target=2)
    check = Faithful(percentiles=(20, 50))
    table = explain.evaluate(model, x, {"it": a}, check, target=2)
    values, mean = a.values.sum(1)[0], x.mean((2, 3), keepdim=True)
    pixels = values.numel()

    def quality(place: Any) -> float:
        rank = placed(torch.argsort(torch.argsort(values.flatten(), descending=True)).reshape(1, *values.shape), place)
        total = 0.0
        for share in (20, 50):
            top = (rank < round(pixels * share / 100)).double()[:, None]
            shown, hidden = x * top + mean * (1 - top), x * (1 - top) + mean * top
            total += float((model(shown)[0, 2] - model(hidden)[0, 2]).detach())
        return total / 2

    drawn = check.placements((12, 9))
    assert len(set(drawn)) == len(drawn) == 35  # all that there are, as the photo is no square
    copies = [quality(place) for place in drawn]
    better = sum(each >= quality(ORIGINAL) for each in copies)
    assert table["it"]["faithful"].item() == pytest.approx((1 + better) / 36)
    assert table.parts("it", "faithful")["own"].item() == pytest.approx(quality(ORIGINAL), rel=1e-9)
    assert sorted(table.parts("it", "faithful")["copies"][0].tolist()) == pytest.approx(sorted(copies), rel=1e-9)


def test_maps_that_lie_anywhere_pass_no_more_often_than_the_level_says() -> None:
    """Blobs in random places, and a score that adds up another blob: one in twenty may pass."""
    count, side = 200, 12
    generator = torch.Generator().manual_seed(0)
    yx = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).double()

    def blobs() -> torch.Tensor:
        middle = torch.rand(count, 2, 1, 1, generator=generator, dtype=torch.float64) * side
        away = (yx[None] - middle + side / 2) % side - side / 2
        return torch.exp(-away.square().sum(1) / 8)

    maps, weights = blobs(), blobs()
    check = Faithful(baseline="zero")  # type: ignore[arg-type]

    def passed(maps: torch.Tensor) -> float:
        images = torch.ones(count, 1, side, side, dtype=torch.float64)
        case, pool = MetricInput(Maps("it", maps, (side, side)), images, torch.zeros(count)), PerturbedPhotoPool(images)
        numbers = [pool.add(request) for request in check.requests(case)]
        rows: Any = pool.rows(None)  # type: ignore[arg-type]
        photos = rows.make(torch.arange(len(pool)))[:, 0]
        found = (photos * weights[rows.owners]).sum((1, 2))
        scores = [found[each] for each in numbers]
        return float((check(case, scores).value <= check.level).double().mean())

    assert passed(maps) <= 0.05 + 3 * (0.05 * 0.95 / count) ** 0.5
    assert passed(weights) > 0.95


def test_a_map_of_the_right_place_is_faithful_and_one_of_another_is_not() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12 * 12, 2, bias=False)).double()
    with torch.no_grad():
        weight = torch.zeros(2, 12, 12, dtype=torch.float64)
        weight[1, 1:4, 7:11] = 1
        model[1].weight.copy_(weight.flatten(1))
    x = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x[0, 0, 1:4, 7:11] += 1
    right, wrong = weight[1][None], weight[1][None].flip(1)
    table = explain.evaluate(model, x, {"right": right, "wrong": wrong}, Faithful(), target=1)
    assert table["right"]["faithful"].item() == 1 / 40
    assert table["wrong"]["faithful"].item() > 0.05


def test_copies_that_lie_where_the_map_lies_are_counted(model: nn.Module, photos: torch.Tensor) -> None:
    """A blob in the middle stays there when it is flipped or turned, so that some copies are no other place."""
    yx = torch.stack(torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")).double() - 5.5
    blob = torch.exp(-(yx[0] ** 2 + 1.1 * yx[1] ** 2) / 20)[None] + 1e-6 * torch.arange(144).reshape(1, 12, 12)
    check = Faithful(copies=71, percentiles=(25, 50))
    x = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    judged = explain.evaluate(model, x, {"it": blob}, check, target=1)
    overlap = judged.parts("it", "faithful")["overlap"][0]
    top = [set(blob.flatten().argsort(descending=True)[:count].tolist()) for count in (36, 72)]
    for place, found in zip(check.placements((12, 12)), overlap.tolist(), strict=True):
        numbers = placed(torch.arange(144).reshape(1, 12, 12), place).flatten().tolist()
        shared = [sum(numbers[pixel] in each for pixel in each) / len(each) for each in top]
        assert found == pytest.approx(sum(shared) / 2)
    assert (overlap > 0.8).sum() == 7
    parts = {"better": torch.tensor([3]), "copies": torch.tensor([[1.0, 2, 3, 0, 0]]), "own": torch.tensor([1.0]),
             "overlap": torch.tensor([[0.9, 0.2, 0.51, 0.9, 0.1]])}  # fmt: skip
    answer = Faithful(copies=5, level=0.2).decide(MetricResult(torch.tensor([4 / 6]), parts=parts))
    assert "3 of 5 copies of the map in other places explain the score at least as well" in answer.reason
    assert answer.reason.endswith("2 of these share more than half of the map's place")


def test_a_level_that_no_copies_reach_is_refused_or_not_asked(model: nn.Module, photos: torch.Tensor) -> None:
    with pytest.raises(MetricError, match="level of faithful must"):
        Faithful(level=0.01)
    answers = checked(model, photos[:1], ["gradcam"], checks=(Faithful(copies=71, level=0.02),))["gradcam"]
    assert answers.faithful.passed is None
    assert "35 places are too few" in answers.faithful.reason


# Does it depend on the model?


def test_the_likeness_to_copies_with_random_upper_layers_is_that_of_a_plain_computation(
    model: nn.Module, photos: torch.Tensor
) -> None:
    x, check = photos[:1], DependsOnModel(copies=2, seed=5)
    judged = explain.evaluate(model, x, ["gradcam"], check, target=1, layer="layer1")
    other_model = Randomised(model, as_inputs(x))
    layers = other_model.layers
    own = explain.attribute(model, x, GradCAM(), target=1, layer="layer1").values
    found = []
    for number in range(2):
        copy = other_model.of(layers[len(layers) // 2 :], 5 * 1009 + number)
        other = explain.attribute(copy, x, GradCAM(), target=1, layer="layer1").values
        big = [explain.layers.layouts.enlarge(each[:, None], (12, 10))[:, 0] for each in (own, other)]
        found.append(spearman(*big).nan_to_num(0).item())
    assert judged["gradcam"]["depends_on_model"].item() == pytest.approx(sum(found) / 2, abs=1e-9)


def test_a_method_that_ignores_the_model_fails_though_its_map_is_multiplied_by_another() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, 1, 40, 40, generator=generator, dtype=torch.float64)
    coarse = torch.linspace(0.2, 3, 40, dtype=torch.float64)
    own, masked = Maps("a", values, (40, 40)), Maps("b", -values * coarse, (40, 40))
    other = Maps("c", torch.randn(1, 1, 40, 40, generator=generator, dtype=torch.float64), (40, 40))
    assert same_details(own, masked, "own").item() > 0.98
    assert same_details(own, other, "own").item() < 0.1
    assert same_details(own, Maps("d", torch.zeros_like(values), (40, 40)), "own").item() == 0
    assert same_details(own, Maps("e", values[:, 0], (40, 40)), "own").isnan().all()  # a map of a layer


def test_the_photo_itself_fails_by_model_and_class_and_a_gradient_passes(
    model: nn.Module, photos: torch.Tensor
) -> None:
    verdict = checked(model, photos[:1], [Edges(), "inputxgradient"], checks=(DependsOnModel(), DependsOnClass()))
    edges, gradient = verdict["edges"], verdict["inputxgradient"]
    assert (edges.results[0].figure, edges.results[0].passed) == (pytest.approx(1), False)
    assert (edges.results[1].figure, edges.results[1].passed) == (pytest.approx(1), False)
    assert gradient.results[0].passed is True
    assert verdict.passed["edges"] is False


# Does it depend on the class?


def test_other_classes_are_taken_from_the_lower_half_of_the_ranking(model: nn.Module, photos: torch.Tensor) -> None:
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
    maps = {c: explain.attribute(model, x, "inputxgradient", target=c).values.sum(1) for c in range(5)}
    expected = [spearman(maps[own], maps[ranked[place]]).item() for place in far_down(4, 2)]
    got = table.parts("inputxgradient", "depends_on_class")["alike"][0]
    assert got.tolist() == pytest.approx(expected, abs=1e-9)


def test_a_map_without_a_class_fails_and_a_model_of_one_class_is_not_asked(
    model: nn.Module, photos: torch.Tensor
) -> None:
    asked = (DependsOnClass(),)
    assert checked(model, photos[:1], [RandomCAM()], checks=asked)["randomcam"].depends_on_class.figure == 1
    single = nn.Sequential(nn.Flatten(), nn.Linear(360, 1)).double()
    answers = checked(single, photos[:1], [Saliency()], 0, asked)["saliency"]
    assert answers.depends_on_class.passed is None
    assert "one class only" in answers.depends_on_class.reason
    assert answers.passed is False  # nothing could be asked
    free = checked(model, photos[:1], [Saliency()], lambda output: output[:, 0] - output[:, 1], asked)["saliency"]
    assert "the target is no class" in free.depends_on_class.reason


# Is it stable?


def test_stability_is_the_mean_likeness_over_changes_that_leave_the_scores_alone(
    model: nn.Module, photos: torch.Tensor
) -> None:
    x = photos[:1]
    with torch.no_grad():
        before = model(x).softmax(1)[0, 1]
        moved = [float((model(change(x)).softmax(1)[0, 1] - before).abs()) for change in Stable().changes]
    slack = sorted(moved)[len(moved) // 2] * (1 + 1e-9)
    check = Stable(slack=slack)
    table = explain.evaluate(model, x, "saliency", check, target=1)
    own = explain.attribute(model, x, "saliency", target=1).values.abs().amax(1)
    alike, counted = [], [each <= slack for each in moved]
    for change in check.changes:
        other = explain.attribute(model, change(x), "saliency", target=1).values.abs().amax(1)
        alike.append(spearman(own, other).item())
    assert 0 < sum(counted) < len(counted)
    expected = sum(a for a, c in zip(alike, counted, strict=True) if c) / sum(counted)
    assert table["saliency"]["stable"].item() == pytest.approx(expected, abs=1e-9)
    noise = with_noise(x, 0.1, 3) - x
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


def test_nothing_is_left_changed_and_what_maps_share_is_run_once(model: nn.Module, photos: torch.Tensor) -> None:
    before, inner = snapshot(model), Counting(model)
    first, second = ["layercam"], ["layercam", "randomcam"]
    samples = []
    for methods in (first, second):
        inner.rows.clear()
        checked(inner, photos[:1], methods)
        samples.append(len(inner.rows))
    assert snapshot(model) == before
    rows = Faithful().copies * 2 * len(Faithful().percentiles)
    assert rows < samples[0] <= 250
    assert samples[1] - samples[0] <= rows + 8  # copies of the model, classes and changes are run once for all


def test_methods_of_many_runs_are_asked_with_fewer_and_it_is_said(model: nn.Module, photos: torch.Tensor) -> None:
    verdict = checked(model, photos[:1], ["integratedgradients"], checks=(DependsOnModel(), DependsOnClass()))
    assert verdict["integratedgradients"].notes == ("run again with steps=32, since a map takes 102 passes",)
    assert [each.samples for each in with_fewer_samples(explain.methods.Smooth(samples=100), 40)] == [40, 80]
    wrapped: Any = next(with_fewer_samples(get_method("smooth(integratedgradients)"), 40))
    assert (wrapped.samples, wrapped.method.steps) == (6, 6)
    assert list(with_fewer_samples(GradCAM(), 40)) == []
    assert verdict["integratedgradients"].results[0].passed is True
    long = checked(model, photos[:1], ["occlusion"], checks=(DependsOnModel(), DependsOnClass(), Stable()))["occlusion"]
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
    answers = [CheckResults("m", (none, good, bad), ("asked with fewer",)), CheckResults("n", (good,) * 3)]
    verdict = Verdict("cat", {each.method: each for each in answers})
    assert verdict.passed == {"m": False, "n": True}
    assert str(verdict).splitlines() == [
        "m  – class –         ✓ faithful 0.025  ✗ stable 0.20     map: check failed",
        "n  ✓ faithful 0.025  ✓ faithful 0.025  ✓ faithful 0.025  map: check passed", "  m – class: one class only",
        "  m ✗ stable: it is not", "  m: asked with fewer",
    ]  # fmt: skip
    plain = verdict.to_dict()["methods"]["m"]
    assert plain["passed"] is False
    assert plain["answers"]["depends_on_class"] == {"passed": None, "figure": None, "reason": "one class only"}
    assert verdict["m"].stable is bad
    with pytest.raises(MetricError, match="method 'k' was not checked"):
        verdict["k"]


def test_what_is_no_single_photo_is_refused(model: nn.Module, photos: torch.Tensor) -> None:
    found = explain.attribute(model, photos, "saliency", target=1)
    with pytest.raises(MetricError, match="x must"):
        check_maps(model, photos, [(Saliency(), found)], ClassTarget((1, 1, 1)), "it")
    with pytest.raises(MetricError, match="maps must"):
        check_maps(model, photos[:1], [], ClassTarget((1,)), "it")
