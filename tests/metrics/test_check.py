"""`explanation.check()`, `--check` and "check": what is said of one photo, and of many."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain import ExplainError, MetricError
from explain.baselines import Blur, Mean
from explain.engine import Evidence, Need
from explain.methods import IntegratedGradients, Method
from explain.metrics import MPRT, Check, Covering
from explain.metrics.base import get_metric
from explain.metrics.maps import spearman
from explain.models import CenterCrop
from explain.render.captions import Mark
from explain.targets import Detections, Segmentation
from tests.conftest import ROOT, Made, TinyNet, settled, snapshot
from tests.metrics.conftest import Counting

CAT = str(ROOT / "assets" / "chelsea.png")
SIDE = 24


@dataclass(frozen=True)
class PhotoMap(Method):
    """The brightness of the photo, which asks no model."""

    name: ClassVar[str] = "brightness"
    summary: ClassVar[str] = "a map that knows the photo alone"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence.inputs.sum(1)


@dataclass(frozen=True)
class Nothing(PhotoMap):
    """A map of zeros."""

    name: ClassVar[str] = "nothing"

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return torch.zeros_like(evidence.inputs[:, 0])


@dataclass(frozen=True)
class Mixed(IntegratedGradients):
    """A right map, with some of the brightness of the photo added."""

    name: ClassVar[str] = "mixed"
    share: float = 0.0

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        right = super().__call__(evidence).sum(1)
        brightness = evidence.inputs.sum(1)
        parts = [each - each.mean() for each in (right, brightness)]
        parts = [each / each.std() for each in parts]
        return parts[0] * (1 - self.share) + parts[1] * self.share


@dataclass(frozen=True)
class Unsteady(PhotoMap):
    """The brightness of the photo, with a share that is another for every photo."""

    name: ClassVar[str] = "unsteady"
    share: float = 0.0

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        brightness = super().__call__(evidence)
        steady = (brightness - brightness.mean()) / brightness.std()
        maps = []
        for image in evidence.inputs:
            seed = int(image.double().sum().abs() * 1e6)
            generator = torch.Generator().manual_seed(seed)
            maps.append(torch.randn(image.shape[1:], generator=generator))
        return steady * (1 - self.share) + torch.stack(maps) * self.share


RIGHT = IntegratedGradients(steps=2, baseline="mean")  # type: ignore[arg-type]


def linear(seed: int = 0) -> nn.Module:
    """A network with an exact map: scores are linear in the pixels, each class reads a part of the
    photo. Two layers, of which the second makes the classes of the parts."""
    torch.manual_seed(seed)
    cells = nn.Conv2d(3, 8, SIDE // 4, SIDE // 4, bias=False)
    head = nn.Linear(8 * 16, 4)
    head.weight.data *= 6
    return nn.Sequential(cells, nn.Flatten(), head).double().eval()


@pytest.fixture
def x() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.rand(12, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def explainer() -> explain.Explainer:
    return explain.Explainer(settled(TinyNet()).eval(), list("abcde"), CenterCrop(16))


@pytest.fixture(scope="module")
def checked(explainer: explain.Explainer) -> tuple[explain.Explanation, Check]:
    explanation = explainer(CAT, ["gradcam", "guidedbackprop"], targets=["b", "c"])
    return explanation, explanation.check(target="c")


# What is measured


def plain_covering(
    model: nn.Module, x: torch.Tensor, marked: torch.Tensor, uncover: bool, target: int
) -> torch.Tensor:
    """The mean probability over two baselines without the marked part, or with it alone."""
    side = min(x.shape[-2:])
    kept = marked if uncover else ~marked
    probabilities = []
    for baseline in (Mean(), Blur(2 * (side // 8) + 1, max(1.0, side / 12))):
        seen = torch.where(kept[:, None], x, baseline.replacement(x))
        probabilities.append(model(seen).softmax(1)[:, target])
    return torch.stack(probabilities).mean(0)


@pytest.mark.parametrize("uncover", [False, True])
@pytest.mark.parametrize("against", ["elsewhere", "middle", "edges"])
def test_covering_is_the_difference_to_as_much_elsewhere(
    x: torch.Tensor, against: Any, uncover: bool
) -> None:
    model = linear()
    maps = torch.rand(12, SIDE, SIDE, generator=torch.Generator().manual_seed(0)).double()
    metric = Covering(against, share=0.25, placements=3, uncover=uncover)
    table = explain.evaluate(model, x, maps, metric, target=1)
    parts = table.parts("map", metric.name)

    def largest(values: torch.Tensor) -> torch.Tensor:
        least = values.flatten(1).quantile(0.75, dim=1)
        return values > least[:, None, None]

    marked = plain_covering(model, x, largest(maps), uncover, 1)
    torch.testing.assert_close(parts["marked"], marked)
    torch.testing.assert_close(parts["original"], model(x).softmax(1)[:, 1])
    sign = 1 if uncover else -1
    expected = sign * (marked - parts["others"].mean(1))
    torch.testing.assert_close(table["map"][metric.name], expected)
    if against == "middle":
        places = (torch.arange(SIDE) - (SIDE - 1) / 2).double() ** 2
        middle = -(places[:, None] + places).expand(12, -1, -1)
        inner = largest(middle)  # without those as far away as the last one
        other = plain_covering(model, x, inner, uncover, 1)
        assert (parts["others"][:, 0] - other).abs().max() < 0.1
    if against == "elsewhere":
        assert parts["others"].shape == (12, 3)
        assert not torch.allclose(parts["others"], marked[:, None].expand(12, 3))


def test_areas_elsewhere_are_as_large_and_the_same_for_all_maps(x: torch.Tensor) -> None:
    """A part that a network never sees matters nowhere; and what is moved is as large: of a map
    that is moved along, others are the same."""
    model = Made(lambda net, x: x.mean((1, 2))[:, :3] * 9).double()  # all places are alike
    maps = torch.rand(12, SIDE, SIDE, generator=torch.Generator().manual_seed(0)).double()
    flat = torch.ones_like(x) * x[:, :, :1, :1]
    table = explain.evaluate(model, flat, maps, Covering(), target=1)
    assert table["map"]["covering"].abs().max() < 1e-12


def test_half_of_the_layers_is_that_of_two_steps_and_copies_have_seeds(x: torch.Tensor) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(4 * 18 * 18, 3),
    ).double()  # fmt: skip

    def curve(**options: Any) -> torch.Tensor:
        metric = MPRT(**options)
        return explain.evaluate(model, x[:2], "saliency", metric).curve("saliency", metric.name)[1]

    half = curve(steps=1, share=0.5, copies=2)
    assert half.shape == (2, 2)
    torch.testing.assert_close(half[:, :1], curve(steps=2)[:, :1])
    torch.testing.assert_close(half[:, 1:], curve(steps=1, share=0.5, seed=1))
    assert not torch.allclose(half[:, 0], half[:, 1])


# One photo


def test_what_is_covered_is_chosen_by_name() -> None:
    assert get_metric("covering") == Covering()
    assert get_metric("uncovering") == Covering(uncover=True)
    assert get_metric("covering-edges") == Covering("edges")
    assert get_metric("covering-middle") == Covering("middle")


def test_a_right_map_and_one_that_asks_no_model(x: torch.Tensor) -> None:
    explainer = explain.Explainer(linear().float(), list("abcd"), CenterCrop(SIDE))
    check = explainer(CAT, [RIGHT, PhotoMap()]).check()
    right = check["integratedgradients"]
    assert [result.mark for result in right][:3] == ["✓", "✓", "✓"]
    assert right.covering.value < right.covering.reference
    wrong = check["brightness"]
    for result in (wrong.model, wrong.of_class):
        assert result.mark == "✗"
        assert result.value == pytest.approx(result.reference) == 1
    assert wrong.model.text in str(check)
    with pytest.raises(MetricError, match="checked"):
        check["gradcam"]


SHARES = (0.0, 0.3, 0.45, 0.5, 0.55, 0.6, 0.8, 1.0)


def test_marks_are_set_by_the_thresholds_that_the_docs_give() -> None:
    explainer = explain.Explainer(linear().float(), list("abcd"), CenterCrop(SIDE))
    x = explainer.as_input(Image.open(CAT).convert("RGB"))
    given: dict[str, set[str]] = {}
    for share in SHARES:
        method = Mixed(steps=2, baseline="mean", share=share)  # type: ignore[arg-type]
        explanation = explainer(CAT, method)
        results = explanation.check()["mixed"]
        target = int(explainer.model(x).argmax())
        covered = explain.evaluate(explainer.model, x, method, Covering(), target=target)
        parts = covered.parts("mixed", "covering")
        ahead = int((parts["marked"][:, None] < parts["others"]).sum())
        unlike = 1 - results.stability.value / results.stability.reference
        figures = {
            "model": (results.model, results.model.value < 0.5, results.model.value < 0.5**0.5),
            "class": (
                results.of_class,
                results.of_class.value < 0.5,
                results.of_class.value < 0.5**0.5,
            ),
            "covering": (results.covering, ahead >= 15, ahead >= 8),
            "stability": (results.stability, unlike > 0.5, unlike > 0),
        }
        for name, (result, is_good, is_fair) in figures.items():
            assert result.mark == ("✓" if is_good else "?" if is_fair else "✗"), (name, share)
            given.setdefault(name, set()).add(result.mark)
    assert given["model"] == given["class"] == {"✓", "?", "✗"}
    assert len(given["covering"]) > 1


def test_stability_is_marked_by_the_change_of_a_map_with_its_values_elsewhere() -> None:
    explainer = explain.Explainer(linear().float(), list("abcd"), CenterCrop(SIDE))
    marks = {}
    for share in (0.0, 0.2, 0.35, 0.45, 0.6, 0.8, 1.0):
        stability = explainer(CAT, Unsteady(share)).check()["unsteady"].stability
        of_reference = stability.value / stability.reference
        expected = "✓" if of_reference < 0.5 else "?" if of_reference < 1 else "✗"
        assert stability.mark == expected, (share, of_reference)
        marks[stability.mark] = of_reference
    assert marks.keys() >= {"✓", "?"}


def test_a_check_is_in_the_explanation_its_records_pictures_and_copies(
    checked: tuple[explain.Explanation, Check],
) -> None:
    explanation, check = checked
    assert list(check) == ["gradcam", "guidedbackprop"]
    names = [result.name for result in check["gradcam"]]
    assert names == ["model", "class", "covering", "stability"]
    assert explanation.checks == {1: check}
    record = json.loads(json.dumps(explanation.record("gradcam", "c")))
    assert record["check"] == check["gradcam"].to_dict()
    assert explanation.record("gradcam", "b")["check"] is None
    marks = [tile.marks for tile in explanation.layout().tiles]
    assert marks[:3] == [()] * 3
    signs = {"✓": True, "✗": False, "?": None}
    assert marks[3] == tuple(Mark(r.name, signs[r.mark]) for r in check["gradcam"])
    with pytest.raises(MetricError, match="explanation must"):
        copy.deepcopy(explanation).check()


def test_a_second_check_adds_to_the_first(
    explainer: explain.Explainer, checked: tuple[explain.Explanation, Check]
) -> None:
    explanation = explainer(CAT, ["gradcam", "saliency"], 2)
    first = explanation.check("gradcam")
    second = explanation.check(["saliency"], seed=3)
    assert dict(explanation.checks[0]) == {**first, **second}
    assert first["gradcam"] == checked[1]["gradcam"]  # nothing is random without its seed


def test_the_passes_of_a_check_are_few_whatever_the_method_takes() -> None:
    methods = [
        "gradcam",
        "rise",
        "smoothgrad",
        "integratedgradients",
        "smooth(integratedgradients)",
    ]
    counting = Counting(settled(TinyNet()).eval())
    explainer = explain.Explainer(counting, list("abcde"), CenterCrop(16))
    explanation = explainer(CAT, methods)
    before = snapshot(counting)
    for name in methods:
        counting.rows.clear()
        check = explanation.check(name)
        assert len(counting.rows) <= 240, name
        assert not any(result.text.startswith("not measured") for result in check[name]), name
        assert bool(check[name].note) == (name != "gradcam")
    assert snapshot(counting) == before


def test_a_constant_map_is_told_without_a_pass() -> None:
    counting = Counting(settled(TinyNet()).eval())
    explainer = explain.Explainer(counting, list("abcde"), CenterCrop(16))
    with pytest.warns(explain.ExplainWarning, match="zero"):
        explanation = explainer(Image.new("RGB", (16, 16)), [Nothing(), "saliency"])
    counting.rows.clear()
    results = explanation.check("nothing")["nothing"]
    assert [result.mark for result in results] == ["✗"] * 4
    assert not counting.rows
    assert explanation.check(["nothing", "saliency"])["saliency"].model.mark in "✓?✗"
    assert counting.rows


BOXES = torch.tensor([[0.0, 0, 16, 8], [0, 8, 16, 16]])


def maps(self: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Maps of three classes for each photo, as a segmentation network gives them."""
    return {"out": self.two(self.one(x).relu())}


def detections(self: Any, x: torch.Tensor) -> Any:
    """Two boxes for each photo, of which one that scores little is left out."""
    outputs = []
    for scores in cells(self, x)["scores"][..., 1]:
        kept = scores > scores.max() - 0.02
        labels = torch.tensor([1, 2])[kept]
        outputs.append({"boxes": BOXES[kept], "labels": labels, "scores": scores[kept]})
    return outputs


def cells(self: Any, x: torch.Tensor) -> Any:
    """Two boxes with a score for each class, before non-maximum suppression."""
    scores = maps(self, x)["out"].sigmoid().unflatten(2, (2, 8)).mean((3, 4)).mT
    return {"scores": scores, "boxes": BOXES.expand(len(x), 2, 4)}


def network(output: Any) -> nn.Module:
    torch.manual_seed(0)
    one = nn.Conv2d(3, 8, 3, padding=1)
    return Made(output, one=one, two=nn.Conv2d(8, 3, 3, padding=1)).eval()


@pytest.mark.parametrize(
    ("output", "target", "has_classes"),
    [
        (maps, Segmentation(1, torch.eye(16) > 0), True),
        (detections, Detections(box=(0, 0, 16, 8)), False),
        (cells, Detections(box=(0, 8, 16, 16)), True),
    ],
)
def test_regions_and_boxes_are_checked_and_what_cannot_be_measured_says_so(
    output: Any, target: Any, has_classes: bool
) -> None:
    model = network(output)
    explainer = explain.Explainer(model, ["none", "upper", "lower"], CenterCrop(16))
    explanation = explainer(CAT, "inputxgradient", targets=[target])
    results = explanation.check()["inputxgradient"]
    assert [r.value == r.value for r in results] == [True, has_classes, True, True]
    assert (results.of_class.mark == "?") != has_classes
    if output is cells:  # the maps of the other classes in the same box
        x = explainer.as_input(Image.open(CAT).convert("RGB"))
        own = int(model(x)["scores"][0, 1].argmax())
        others = [
            explain.attribute(model, x, "inputxgradient", target=Detections(other, BOXES[1]))
            for other in {0, 1, 2} - {own}
        ]
        values = explanation.attributions["inputxgradient"].values.sum(1)
        alike = [float(spearman(values, other.values.sum(1))) for other in others]
        assert results.of_class.value == pytest.approx(sum(alike) / 2)


def test_a_region_that_a_randomised_network_does_not_predict_is_still_that_of_the_photo() -> None:
    model = network(maps)
    x = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    predicted = model(x)["out"].argmax(1)
    best = int(predicted.flatten().mode().values)
    metrics: Any = ["mprt", "emprt"]
    one, other = (
        explain.evaluate(model, x, "inputxgradient", metrics, target=target)["inputxgradient"]
        for target in (Segmentation(best), Segmentation(best, predicted == best))
    )
    assert all(torch.equal(one[metric], other[metric]) for metric in metrics)


def test_a_figure_that_fails_leaves_the_others_their_results(
    explainer: explain.Explainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(layer: nn.Linear) -> None:
        raise RuntimeError("no")

    explanation = explainer(CAT, "gradcam", 1)
    monkeypatch.setattr(nn.Linear, "reset_parameters", refuse)
    results = explanation.check()["gradcam"]
    assert [result.value != result.value for result in results] == [True, False, False, False]
    assert "reset_parameters" in results.model.text
    for arguments, message in (({"batch_size": 0}, "batch_size"), ({"methods": "lrp"}, "lrp")):
        with pytest.raises(ExplainError, match=message):
            explanation.check(**arguments)


# Many photos


def test_only_right_maps_of_many_photos_are_supported(x: torch.Tensor) -> None:
    table = explain.evaluate(linear(), x, [RIGHT, PhotoMap()], "check")
    right = table.support["integratedgradients"]
    wrong = table.support["brightness"]
    assert right.supported
    assert not right.failed
    assert wrong.failed == ["mprt-upper", "randomlogit", "best"]
    columns = table["integratedgradients"]
    least = torch.stack([columns[f"covering{of}"] for of in ("", "-edges", "-middle")]).amin(0)
    assert right.intervals["best"].mean == pytest.approx(float(least.mean()))
    assert "not supported" in str(table)
    few = explain.evaluate(linear(), x[:9], RIGHT, "check").support["integratedgradients"]
    assert few.failed == ["photos"]
    assert explain.evaluate(linear(), x, RIGHT, "covering").support == {}


def test_dependence_of_many_photos_is_shown_by_intervals_below_half_of_the_variation(
    x: torch.Tensor,
) -> None:
    similar = 0.5**0.5
    failed = set()
    for share in SHARES:
        method = Mixed(steps=2, baseline="mean", share=share)  # type: ignore[arg-type]
        support = explain.evaluate(linear(), x, method, "check").support["mixed"]
        for name in ("mprt-upper", "randomlogit"):
            is_shown = support.intervals[name].high < similar
            assert (name in support.failed) == (not is_shown), (name, share)
            failed.add((name, is_shown))
    assert len(failed) == 4


@pytest.mark.long
def test_what_shows_no_class_has_crosses_with_every_seed() -> None:
    """Guided backpropagation and a class activation map with random weights."""
    explanation = explain.Explainer("tiny")(CAT, ["guidedbackprop", "randomcam"])
    for seed in range(6):
        check = explanation.check(seed=seed)
        assert {found.of_class.mark for found in check.values()} == {"✗"}, seed
