"""What sources and stored runs make of names, labels and boxes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from torch import nn
from torch.utils.data import Subset

from explain._utils.errors import ImageError, reason_of
from explain.data.boxes import Box
from explain.store.lists import PathIndex, class_columns, coco_rows, shard_names
from explain.store.manifest import alike, changes_in_words, digest_of_model
from explain.store.reading import LabelledPhoto
from explain.store.sources import (
    Photos,
    as_boxes,
    boxes_as_text,
    boxes_of_class,
    boxes_on_input,
    content_of,
    entries_of,
    innermost_dataset,
    labels_as_text,
    labels_in,
    path_text,
    plain_key,
    true_label_names,
)
from explain.store.writing import content_digest, digest_of_cells, quoted


def test_columns_of_zeros_and_ones_are_classes() -> None:
    cells = [{"path": "a.png", "age": "61", "Edema": "1.0"}, {"Edema": ""}]
    assert class_columns(cells) == ["Edema"]
    assert class_columns([{"label": "cat", "Edema": "1"}]) == []


def test_annotations_of_coco_become_one_entry_for_each_photo() -> None:
    annotations = {
        "images": [{"id": 7, "file_name": "a.jpg"}],
        "annotations": [{"image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4]}],
        "categories": [{"id": 3, "name": "dog"}],
    }
    expected = {"path": "a.jpg", "label": ["dog"], "boxes": [[1, 2, 4, 6, "dog"]]}
    assert coco_rows(annotations) == [expected]


@pytest.mark.parametrize(
    ("path", "value"),
    [("photos/val/1.jpg", 7), ("./val/1.jpg", 7), ("photos/train/1.jpg", None), ("2.jpg", 8)],
)
def test_paths_that_begin_elsewhere(path: str, value: int | None) -> None:
    assert PathIndex({"val/1.jpg": 7, "photos/2.jpg": 8}).find(path) == value


def test_names_of_files() -> None:
    assert shard_names("train-{008..010}.tar") == [f"train-0{n}.tar" for n in ("08", "09", "10")]
    assert path_text("caf\udce9.jpg") == "caf\\xe9.jpg"
    names = [entry.name for entry in entries_of(Photos(["a.png", "a.png", "b.png"]))]
    assert names == ["a.png", "a.png (2)", "b.png"]


def test_manifests_are_compared() -> None:
    assert not alike("weights", 1.0, 1.000001)
    assert digest_of_model(nn.ReLU()) == digest_of_model(nn.Tanh())
    assert digest_of_model(nn.ReLU()) != digest_of_model(nn.Linear(1, 1))
    methods = {name: {"class": "", "options": {}} for name in ("gradcam", "lrp")}
    stored = {"methods": methods, "layer": None}
    changes = changes_in_words(stored, {"methods": {"lrp": methods["lrp"]}, "layer": "l"})
    assert [change.partition(":")[0] for change in changes] == ["methods, gradcam", "layer"]
    assert changes_in_words(stored, stored) == []


def test_labels_that_are_missed_and_false_alarms() -> None:
    photo = LabelledPhoto("a", np.array([0.1, 0.9, 0.7]), frozenset([0]), frozenset([2]))
    assert photo.mistakes(0.5) == ([0], [1])


def test_errors_in_one_line() -> None:
    assert reason_of(FileNotFoundError(2, "No such file")) == "No such file"
    assert reason_of(ValueError()) == "ValueError"


def test_items_of_data_sets() -> None:
    assert [plain_key("Image Index"), plain_key("pixel_values")] == ["imageindex", "pixelvalues"]
    assert content_of((b"...", 3)).label == 3
    subset = Subset(Subset(["a", "b", "c"], [2, 1]), [1])
    assert innermost_dataset(subset, 0) == (["a", "b", "c"], 1)


def test_labels_of_photos() -> None:
    assert [labels_in(None), labels_in("cat"), labels_in((1, "dog"))] == [(), ("cat",), (1, "dog")]
    text = labels_as_text([(3, "cat"), (None, "roof")])
    assert json.loads(text or "") == [[3, "cat"], [None, "roof"]]
    assert [labels_as_text([]), labels_as_text(None)] == ["[]", None]
    assert true_label_names('[[3, "cat"], [5, "dog", "uncertain"]]') == ["cat"]
    assert true_label_names(None) == []


def test_boxes_of_photos() -> None:
    assert as_boxes([1, 2, 3, 4]) == ((1.0, 2.0, 3.0, 4.0),)
    assert as_boxes([[1, 2, 3, 4, "dog"]]) == ((1.0, 2.0, 3.0, 4.0, "dog"),)
    boxes = [(0, 0, 1, 1, "dog"), (2, 2, 3, 3, "cat"), (4, 4, 5, 5)]
    assert boxes_of_class(boxes, "dog@2") == [(0, 0, 1, 1), (4, 4, 5, 5)]
    assert json.loads(boxes_as_text(((0.0, 1.0, 2.0, 3.0),)) or "") == [[0, 1, 2, 3]]
    assert boxes_as_text(()) is None
    seen = Box(20, 0, 40, 20)
    assert boxes_on_input([(10, 0, 30, 20)], seen, (10, 10)) == [(0.0, 0.0, 5.0, 10.0)]


@pytest.mark.parametrize("boxes", [[[]], [[1, 2, 3, 4], []]])
def test_a_box_without_edges_is_refused(boxes: list[list[int]]) -> None:
    with pytest.raises(ImageError, match="boxes must be x0 y0 x1 y1"):
        as_boxes(boxes)


def test_digests_are_the_same_after_reading() -> None:
    assert quoted(["left", "top"]) == '"left", "top"'
    written = digest_of_cells(["a", -0.0, float("nan")])
    assert written == digest_of_cells(["a", 0.0, None])
    assert digest_of_cells(["a", 1]) != digest_of_cells(["a1"])
    # stored runs hold this number
    assert content_digest(b"a map") == 2074911400714055296
