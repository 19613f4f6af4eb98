"""What texts and outputs mean: labels, predictions, boxes and tokens by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from explain.targets import ClassTarget, Text, TopClass
from explain.targets.base import find_tensor, summary_of_output
from explain.targets.detections import overlaps, suppressed
from explain.targets.labels import Categories, class_label, from_start
from explain.targets.outputs import (
    FinalActivation,
    Outputs,
    Prediction,
    label_of_no,
    outputs_like,
    percent,
)
from explain.targets.per_image import Element
from explain.targets.resolve import as_targets, check_categories, one_per_image
from explain.targets.text import is_image_text, targets_in
from explain.targets.tokenizer import is_punctuation


def test_the_tensor_of_an_output_is_found_and_described() -> None:
    scores = torch.zeros(2, 5)
    assert find_tensor((None, {"not": "looked into"}, scores), 2, [2]) is scores
    assert find_tensor((scores,), 3, [2]) is None
    assert summary_of_output({"out": torch.zeros(1, 2)}) == "dict with 'out' (1, 2)"
    assert summary_of_output([3]) == "list with 0 int"


def test_labels_of_classes() -> None:
    birds = Categories(["crane (bird)", "rooster"], [["crane"], ["cock", "cockerel"]])
    assert birds[1] == "rooster"
    assert birds.synonyms[1] == ("cock", "cockerel")
    assert [class_label(["cat", "dog"], 1), class_label(None, 1)] == ["dog", "class 1"]
    assert check_categories(("cat", "dog")) == ["cat", "dog"]
    assert check_categories(None) is None


def test_indices_that_count_from_the_end() -> None:
    assert from_start(-1, 5) == 4
    assert from_start((3, -2, -6), 5) == (3, 3, -6)


@pytest.mark.parametrize(
    ("probability", "text"),
    [(0.873, "87 %"), (0.0997, "10 %"), (0.042, "4.2 %"), (0.0001, "<0.1 %")],
)
def test_probabilities_as_people_read_them(probability: float, text: str) -> None:
    assert percent(probability) == text


def test_predictions_in_words() -> None:
    years = Prediction("age", None, 0, number=56.234, unit="years")
    assert Prediction("cat", 0.873, 3).amount == "87 %"
    assert years.amount == "56.23 years"
    assert Prediction("cat", None, 3).amount == ""
    [no, yes] = Outputs("sigmoid", "labels").predicted(torch.tensor([0.25]), ["cat"], 5)
    assert [no.label, yes.label] == ["not cat", "cat"]
    [age] = Outputs("none", "numbers", unit="years").predicted(torch.tensor([56.25]), ["age"], 5)
    assert age.amount == "56.25 years"


def test_labels_of_outputs() -> None:
    classes = Outputs()
    numbers = Outputs("none", "numbers")
    assert [classes.label(["cat", "dog"], 1), classes.label(None, 1)] == ["dog", "class 1"]
    assert [classes.label(None, 0, classes=1), label_of_no(None)] == ["yes", "no"]
    assert [numbers.label(None, 0, classes=1), numbers.label(None, 1)] == ["number", "number 1"]
    assert label_of_no(["pneumonia"]) == "not pneumonia"


def test_what_outputs_are() -> None:
    shares = torch.tensor([[0.25, 0.75]])
    assert outputs_like(shares).activation == "softmax"
    assert outputs_like(torch.tensor([[56.0]])).kind == "numbers"
    assert outputs_like(shares, seen=lambda: FinalActivation(classes=2)) == Outputs(
        "none", "classes"
    )


def test_boxes_that_overlap() -> None:
    boxes = torch.tensor([[0.0, 0, 2, 2], [1, 0, 3, 2]])
    torch.testing.assert_close(overlaps(boxes, boxes[0]), torch.tensor([1, 1 / 3]))
    boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 9, 8], [20, 0, 29, 9]])
    scores = torch.tensor([[0.9], [0.8], [0.7]])
    assert [*suppressed(scores, boxes, 0.5)] == [(0, 0), (2, 0)]
    assert [*suppressed(scores, boxes, 0.5, dense=False)] == [(0, 0), (1, 0), (2, 0)]


def test_targets_from_what_a_caller_gives() -> None:
    assert as_targets(3) == [ClassTarget(3)]
    named = as_targets(targets=[3, "tabby"], categories=["tabby cat"])
    assert named == [ClassTarget(3), ClassTarget(0)]
    assert as_targets(top_k=2) == [TopClass(0), TopClass(1)]
    assert one_per_image(["tabby", 3]) == ["tabby", 3]
    assert one_per_image(torch.tensor([3, 4])) == [3, 4]
    assert one_per_image((3, 2, 1)) is None


def test_one_number_of_each_image() -> None:
    values, _ = Element((1, 0)).pick(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), 1)
    assert values.tolist() == [3.0]


def test_texts_in_targets() -> None:
    difference = Text("a bus") - 2 * Text("a truck")
    assert [text.text for text in targets_in(difference, Text)] == ["a bus", "a truck"]
    assert not is_image_text(nn.Linear(2, 2))
    assert is_punctuation("▁,")
    assert not is_punctuation("don't")
