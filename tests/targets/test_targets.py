from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ModelError, TargetError
from explain.hooks import FeatureExtractor
from explain.methods import AblationCAM
from explain.targets import (
    BinaryLogit,
    ClassTarget,
    Detections,
    Difference,
    ScoreTarget,
    Segmentation,
    Similarity,
    Text,
    TopClass,
    as_target,
)
from explain.targets.base import Sum
from explain.targets.functions import Contrast
from explain.targets.labels import find_label
from explain.targets.per_image import Separate, take
from tests.conftest import layer_for

LOGITS = torch.tensor([[0.1, 3.0, 2.0], [5.0, 1.0, 4.0]])
LABELS = ["tabby cat", "Egyptian cat", "red panda", "crane", "crane"]


@pytest.mark.parametrize(
    ("target", "classes"),
    [
        (None, [1, 0]),
        (2, [2, 2]),
        (torch.tensor([0, 2]), [0, 2]),
        (np.int64(1), [1, 1]),
        ([np.int64(2), torch.tensor(1)], [2, 1]),
        (range(1, 3), [1, 2]),
        (TopClass(1), [2, 2]),
        ((2, 1), [2, 1]),
        ([(2,), torch.tensor([1])], [2, 1]),
        ([None, ClassTarget(2)], [1, 2]),
    ],
)
def test_class_targets_pick_their_logits(target: Any, classes: list[int]) -> None:
    score, picked = as_target(target).pick(LOGITS, 2)
    assert picked.tolist() == classes
    assert score.tolist() == [LOGITS[0, classes[0]], LOGITS[1, classes[1]]]


def test_a_callable_is_a_target_with_its_name() -> None:
    def margin(output: Tensor) -> Tensor:
        return output[:, 1] - output[:, 0]

    target = as_target(margin)
    score, classes = target.pick(LOGITS, 2)
    assert target.name == "margin"
    assert classes is None
    assert_close(score, torch.tensor([2.9, -4.0]))
    assert ScoreTarget(lambda output: output.sum()).pick(LOGITS[:1], 1)[0].shape == (1,)


NO_TARGETS = [True, 1.5, [1.5], (), object(), [True], [(1, 2), 0.5], [[1, True]], TopClass]


@pytest.mark.parametrize("target", [*NO_TARGETS, torch.zeros(2, 2), lambda a, b, c: a])
def test_what_is_no_target_is_refused(target: Any) -> None:
    with pytest.raises(TargetError, match=r"(target|index|target <lambda>) must"):
        as_target(target)


MAPS = torch.arange(2 * 4 * 3 * 2.0).reshape(2, 4, 3, 2).sin()
CORNERS = torch.tensor([[0.0, 0, 5, 6], [5, 6, 10, 12]])
DETECTED = [{"boxes": CORNERS, "labels": torch.zeros(2), "scores": torch.ones(2)}] * 2


@pytest.mark.parametrize(
    ("target", "output", "message"),
    [
        (3, LOGITS, "class"),
        (-4, LOGITS, "class"),
        ([1, 2, 0], LOGITS, "images"),
        (TopClass(3), LOGITS, "classes"),
        (0, {"loss": torch.zeros(3, 3)}, "callable"),
        (lambda output: output, LOGITS, "shape"),
        (lambda output: 3.0, LOGITS, "return"),
        ((4, 0, 0), MAPS, "within"),
        ([(0, 0), (0, 0)], MAPS, "dimensions"),
        ([lambda output: output[:, 0]] * 3, LOGITS, "images"),
        ([ClassTarget((0, 1)), lambda output, images: output], LOGITS, "function"),
        ([Similarity(torch.eye(2, 3)), 1], LOGITS, "embedding must"),
        (Similarity(torch.ones(4)), LOGITS, "embedding must have the shape"),
        (Similarity(torch.ones(4)), {"mask": torch.zeros(2)}, "returns embeddings"),
        (BinaryLogit(), LOGITS, "one logit"),
        (TopClass(1), MAPS, "top_k must"),
        (Segmentation((0, 1, 2)), MAPS, "category must"),
        (Segmentation(9), MAPS, "class"),
        (Segmentation("cat"), MAPS, "labels are not known"),
        (Segmentation(0, torch.zeros(3, 2)), MAPS, "mask must be true"),
        (Segmentation(0, torch.ones(2, 3)), MAPS, "mask must cover"),
        (Segmentation(0, torch.ones(3, 3, 2)), MAPS, "mask must have one"),
        (Segmentation(0, point=(0.5, 0.5, 0.5)), MAPS, "point must be 2"),
        (Segmentation(1), MAPS - 9 * torch.eye(4)[1, None, :, None, None], "class 1 must"),
        (Segmentation(0), LOGITS, "class maps"),
        (Detections(0), MAPS, "boxes with scores"),
        (Detections(9), DETECTED, "must be detected"),
        (Detections(box=(4, 4, 6, 8)), DETECTED, "must overlap"),
        (Detections(box=torch.tensor([[0, 0, 5, 6]] * 3)), DETECTED, "box must have one"),
        (Detections("cat"), DETECTED, "labels are not known"),
    ],
)
def test_targets_that_do_not_fit_the_output_are_refused(
    target: Any, output: Any, message: str
) -> None:
    with pytest.raises((TargetError, ModelError), match=message):
        as_target(target).resolved(output, 2).pick(output, 2)


@pytest.mark.parametrize(
    ("label", "index"),
    [("tabby cat", 0), ("Tabby Cat", 0), ("tabby", 0), ("red_panda", 2), ("egyptian", 1)],
)
def test_labels_are_found_by_name_or_by_a_word_of_their_own(label: str, index: int) -> None:
    assert find_label(label, LABELS) == index
    assert as_target(label, LABELS) == ClassTarget(index)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("taby cat", "did you mean 'tabby cat'"),
        ("cat", "Egyptian"),
        ("crane", "classes"),
        ("", "label"),
    ],
)
def test_labels_that_fit_none_or_several_are_refused_with_suggestions(
    label: str, message: str
) -> None:
    with pytest.raises(TargetError, match=message):
        find_label(label, LABELS)
    with pytest.raises(TargetError, match="labels are not known"):
        find_label(label, None)


def test_a_weighted_contrast_is_finite_where_the_other_classes_have_no_probability_left() -> None:
    logits = torch.tensor([[2000.0, 3.0, 1.0, -40.0]], dtype=torch.float64, requires_grad=True)
    shares = torch.tensor([3.0, 1.0], dtype=torch.float64).softmax(0)
    score = Contrast("weighted", alpha=1.0, references=2)(logits, torch.tensor([0]))
    assert_close(score[0], 2000 - 3 * shares[0] - shares[1])
    assert torch.autograd.grad(score.sum(), logits)[0].isfinite().all()


# --- callables that are told whose rows they read


PICKED = torch.tensor([2, 0, 3])


def of_images(output: Tensor, images: Tensor) -> Tensor:
    return output[torch.arange(len(images)), PICKED[images]]


def of_images_by_keyword(output: Tensor, *, images: Tensor) -> Tensor:
    return of_images(output, images)


class OfImages(nn.Module):
    def forward(self, output: Tensor, images: Tensor) -> Tensor:
        return of_images(output, images)


@pytest.mark.parametrize("method", ["integratedgradients(steps=3)", "scorecam", "ablationcam"])
def test_callables_may_take_the_images_of_rows(method: str, net: nn.Module, x: Tensor) -> None:
    run = partial(
        explain.attribute, net, x, method, layer=layer_for(method, "layer2"), batch_size=4
    )
    expected = run(target=PICKED)
    for function in (of_images, of_images_by_keyword, OfImages(), partial(of_images)):
        assert_close(run(target=function).values, expected.values, rtol=1e-10, atol=1e-12)


def test_rows_of_rows_belong_to_the_first_images() -> None:
    seen: list[list[int]] = []

    def score(output: Tensor, images: Tensor) -> Tensor:
        seen.append(images.tolist())
        return output[:, 0]

    target = as_target(score)
    target.pick(torch.zeros(3, 2), 3)
    rows = target.rows(torch.tensor([2, 2, 0])).rows(torch.tensor([2, 0, 1, 0]))
    rows.pick(torch.zeros(4, 2), 4)
    assert seen == [[0, 1, 2], [0, 2, 2, 2]]
    assert hash(rows) == hash(rows)


@pytest.mark.parametrize(
    "function",
    [
        lambda output, category=2: output[:, category],  # as written in a loop
        lambda *outputs: outputs[0][:, 2],
        lambda output, **options: output[:, 2],
        lambda output, *, category=2: output[:, category],
        partial(lambda output, category: output[:, category], category=2),
    ],
)
def test_what_has_a_default_is_no_second_argument(function: Callable[..., Tensor]) -> None:
    assert torch.equal(ScoreTarget(function).pick(LOGITS, 2)[0], LOGITS[:, 2])


# --- a target for each image


def test_a_list_of_callables_has_one_for_each_image(net: nn.Module, x: Tensor) -> None:
    targets = [lambda y: y[:, 1] - y[:, 0], lambda y: y.logsumexp(1), 3]
    for method in ("integratedgradients(steps=3)", AblationCAM(relu=False)):
        layer = layer_for(method, "layer2")
        together = explain.attribute(net, x, method, target=targets, layer=layer, batch_size=3)
        for i, target in enumerate(targets):
            alone = explain.attribute(net, x[i : i + 1], method, target=target, layer=layer)
            assert_close(together.values[i], alone.values[0], rtol=1e-10, atol=1e-12)
            assert_close(together.score[i], alone.score[0], rtol=1e-10, atol=1e-12)
        assert together.target == "<lambda>, <lambda>, 3"


PLACES = [(3, 2, 1), (0, 1, 1)]
PLACED = torch.stack([MAPS[0, 3, 2, 1], MAPS[1, 0, 1, 1]])


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ((3, 2, 1), MAPS[:, 3, 2, 1]),
        (PLACES, PLACED),
        (torch.tensor(PLACES), PLACED),
        (np.array(PLACES), PLACED),
    ],
)
@pytest.mark.parametrize("output", [MAPS, (None, MAPS)])
def test_tuples_are_places_in_an_output_with_several_dimensions(
    target: Any, expected: Tensor, output: Any
) -> None:
    settled = as_target(target).resolved(output, 2)
    assert torch.equal(settled.pick(output, 2)[0], expected)
    turned = settled.rows(torch.tensor([1, 0, 1]))
    assert torch.equal(turned.pick(take(output, 2, [1, 0, 1]), 3)[0], expected[[1, 0, 1]])


def test_targets_for_each_image_settle_on_their_own_image_alone() -> None:
    maps = torch.zeros(2, 3, 2, 2)
    maps[0, 1] = 5
    maps[1, 2, 0] = 7
    # neither class is in the other image
    target = as_target([Segmentation(1), Segmentation(2)]).resolved(maps, 2)
    altered = torch.arange(3 * 3 * 4.0).reshape(3, 3, 2, 2)
    score = target.rows(torch.tensor([1, 0, 1])).pick(altered, 3)[0]
    assert_close(
        score, torch.stack([altered[0, 2, 0].mean(), altered[1, 1].mean(), altered[2, 2, 0].mean()])
    )


def test_labels_may_be_one_for_each_image() -> None:
    assert as_target(["tabby", "red panda"], LABELS) == ClassTarget((0, 2))
    assert as_target(["tabby", 3], LABELS) == ClassTarget((0, 3))
    mixed = as_target([Difference("tabby", "red panda"), "tabby"], LABELS)
    assert isinstance(mixed, Separate)
    assert mixed.name == "tabby cat − red panda, tabby cat"
    assert isinstance(as_target(2 * mixed), Sum)
    with pytest.raises(TargetError, match="labels are not known"):
        as_target(["tabby", 3])


@pytest.mark.parametrize("categories", [b"tabby", 3, {0: "tabby"}, {"tabby"}, ["tabby", 3]])
def test_categories_that_are_no_list_of_texts_are_refused(categories: Any) -> None:
    with pytest.raises(ModelError, match="categories"):
        as_target("tabby", categories)
    assert as_target("tabby", iter(LABELS)) == ClassTarget(0)


# --- a single neuron


def test_a_neuron_is_an_output_of_the_network_that_ends_there(net: nn.Module, x: Tensor) -> None:
    features = FeatureExtractor(net, "layer1", graph=True)
    by_hand = nn.Sequential(net.conv1, net.bn1, nn.ReLU(), net.layer1)
    neuron = explain.attribute(features, x, "guidedbackprop", target=(5, 3, 4))
    expected = explain.attribute(by_hand, x, "guidedbackprop", target=lambda y: y[:, 5, 3, 4])
    assert_close(neuron.values, expected.values, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClassTarget(1.5), "must be"),  # type: ignore[arg-type]
        (lambda: TopClass("best"), "must be"),  # type: ignore[arg-type]
        (lambda: BinaryLogit(positive="no"), "must be"),  # type: ignore[arg-type]
        (lambda: Detections(index="second"), "must be"),  # type: ignore[arg-type]
        (lambda: Detections(threshold="high"), "must be"),  # type: ignore[arg-type]
        (lambda: Segmentation(1.5), "must be"),  # type: ignore[arg-type]
        (lambda: Text("a bus", words="yes"), "must be"),  # type: ignore[arg-type]
        (lambda: Similarity(torch.zeros(5)), "only zeros"),
        (lambda: Similarity(torch.tensor(3.0)), "embedding must"),
        (lambda: Segmentation(0, torch.ones(12)), r"got \(12,\)"),
        (lambda: ClassTarget(0) + 3, "targets"),  # type: ignore[operator]
    ],
)
def test_values_that_no_target_can_have_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        make()
