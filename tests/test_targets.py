from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from explain.errors import ModelError, TargetError
from explain.targets import ClassTarget, Contrast, ScoreTarget, TopClass, as_target, find_label, find_logits

LOGITS = torch.tensor([[0.1, 3.0, 2.0], [5.0, 1.0, 4.0]])
LABELS = ["tabby cat", "Egyptian cat", "red panda", "crane", "crane"]


@pytest.mark.parametrize(
    ("given", "scores", "classes"),
    [
        (None, [3.0, 5.0], [1, 0]),
        (2, [2.0, 4.0], [2, 2]),
        ([2, 1], [2.0, 1.0], [2, 1]),
        (torch.tensor([0, 2]), [0.1, 4.0], [0, 2]),
        (torch.tensor(1), [3.0, 1.0], [1, 1]),
        (np.int64(1), [3.0, 1.0], [1, 1]),
        ([np.int64(2), torch.tensor(1)], [2.0, 1.0], [2, 1]),
        (range(1, 3), [3.0, 4.0], [1, 2]),
        (TopClass(1), [2.0, 4.0], [2, 2]),
    ],
)
def test_class_targets_pick_their_logits(given: object, scores: list[float], classes: list[int]) -> None:
    score, picked = as_target(given).pick(LOGITS, 2)  # type: ignore[arg-type]
    torch.testing.assert_close(score, torch.tensor(scores))
    assert picked is not None
    assert picked.tolist() == classes


def test_a_callable_is_a_target_with_its_name() -> None:
    def margin(output: torch.Tensor) -> torch.Tensor:
        return output[:, 1] - output[:, 0]

    target = as_target(margin)
    score, classes = target.pick(LOGITS, 2)
    assert target.name == "margin"
    assert classes is None
    torch.testing.assert_close(score, torch.tensor([2.9, -4.0]))
    assert ScoreTarget(lambda output: output.sum()).pick(LOGITS[:1], 1)[0].shape == (1,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "must be a class from 0 to 2 for this model, got 3"),
        (-1, "must be a class from 0 to 2 for this model, got -1"),
        ([1, 2, 0], "one class for each of the 2 images, got 3"),
        (TopClass(3), "top 4 classes, but the model has 3"),
        (lambda output: output, r"shape \(2,\), got \(2, 3\)"),
        (lambda output: 3.0, "must return a tensor of 2 scores, got float"),
    ],
)
def test_targets_that_do_not_fit_the_output_are_refused(given: object, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        as_target(given).pick(LOGITS, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [True, 1.5, [1.5], [], torch.tensor([0.5]), object()])
def test_what_is_no_target_is_refused(given: object) -> None:
    with pytest.raises(TargetError, match="target must"):
        as_target(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("label", "index"), [("tabby cat", 0), ("Tabby Cat", 0), ("tabby", 0), ("red_panda", 2), ("egyptian", 1)]
)
def test_labels_are_found_by_name_or_by_a_word_of_their_own(label: str, index: int) -> None:
    assert find_label(label, LABELS) == index
    assert as_target(label, LABELS) == ClassTarget(index)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("taby cat", "did you mean 'tabby cat'"),
        ("cat", "fits 2 labels: 'tabby cat', 'Egyptian cat'"),
        ("crane", "label of classes 3, 4; give the class index"),
        ("pand", "is not a label"),
        ("", "is not a label"),
    ],
)
def test_labels_that_fit_none_or_several_are_refused_with_suggestions(label: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        find_label(label, LABELS)
    with pytest.raises(TargetError, match="labels are not known"):
        find_label(label, None)


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        (LOGITS, None),
        [None, LOGITS],
        {"out": LOGITS, "aux": 1},
        {"logits": LOGITS},
        {"x": LOGITS},
        SimpleNamespace(logits=LOGITS),
    ],
)
def test_class_scores_are_found_in_what_models_return(output: object) -> None:
    assert find_logits(output, 2) is LOGITS


@pytest.mark.parametrize("output", ["text", {}, [], torch.zeros(3), torch.zeros(3, 3), torch.zeros(2, 3, 4, 4)])
def test_outputs_without_class_scores_are_refused(output: object) -> None:
    with pytest.raises(ModelError, match="pass a callable as target"):
        find_logits(output, 2)


def test_a_weighted_contrast_is_finite_where_the_other_classes_have_no_probability_left() -> None:
    logits = torch.tensor([[2000.0, 3.0, 1.0, -40.0]], dtype=torch.float64, requires_grad=True)
    shares = torch.tensor([3.0, 1.0], dtype=torch.float64).softmax(0)
    score = Contrast("weighted", alpha=1.0, references=2)(logits, torch.tensor([0]))
    torch.testing.assert_close(score[0], 2000 - 3 * shares[0] - shares[1])
    assert torch.autograd.grad(score.sum(), logits)[0].isfinite().all()
