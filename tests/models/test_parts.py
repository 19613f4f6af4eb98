"""Parts of the bundled models, and sizes and labels that callers give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.testing import assert_close

from explain.models.bundled import PAD, START, UNKNOWN, WordPieces, with_synonyms
from explain.models.files import BlackBox, is_file_or_code
from explain.models.nanodet import BINS, NanoDet, decode_heads, detect
from explain.models.preprocessing import CenterCrop, StretchedPhoto, adjusted, checked_side
from explain.models.small_networks import (
    EfficientNetLite0,
    PersonSegmenter,
    SameConv2d,
    SmallResNet,
    SmallTransformer,
)


@pytest.mark.parametrize(
    ("network", "size", "output"),
    [
        (SmallResNet(classes=5), (64, 64), (1, 5)),
        (SmallTransformer(classes=5, depth=1), (64, 64), (1, 5)),
        (EfficientNetLite0(classes=5), (64, 40), (1, 5)),
        (PersonSegmenter(), (64, 96), (1, 1, 64, 96)),
    ],
    ids=["residual", "transformer", "efficientnet", "segmenter"],
)
def test_networks_have_the_shapes_that_they_say(
    network: torch.nn.Module, size: tuple[int, int], output: tuple[int, ...]
) -> None:
    with torch.no_grad():
        assert network.eval()(torch.zeros(1, 3, *size)).shape == output


def test_the_detector_has_a_score_and_a_box_for_each_cell() -> None:
    with torch.no_grad():
        output = NanoDet(classes=5).eval()(torch.zeros(1, 3, 64, 96))
    cells = 8 * 12 + 4 * 6 + 2 * 3  # of strides 8, 16 and 32
    assert output["scores"].shape == (1, cells, 5)
    assert output["boxes"].shape == (1, cells, 4)


def test_a_side_of_a_box_is_the_mean_of_its_bins() -> None:
    flat = torch.zeros(1, 1 + 4 * BINS, 1, 2)  # one class, two cells, every distance 5 strides
    output = decode_heads([flat], [8])
    assert output["scores"][0, :, 0].tolist() == [0.5, 0.5]
    boxes = torch.tensor([[-36.0, -36.0, 44.0, 44.0], [-28.0, -36.0, 52.0, 44.0]])
    assert_close(output["boxes"][0], boxes)


def test_of_two_boxes_much_alike_the_better_one_stays() -> None:
    boxes = torch.tensor([[[0.0, 0, 9, 9], [0, 0, 9, 8], [20, 0, 29, 9]]])
    (detected,) = detect({"scores": torch.tensor([[[0.9], [0.8], [0.7]]]), "boxes": boxes})
    assert detected["cells"].tolist() == [0, 2]


@pytest.mark.parametrize(("height", "width"), [(7, 10), (8, 9), (5, 5)])
def test_padding_is_that_of_tensorflow(height: int, width: int) -> None:
    convolution = SameConv2d(3, 4, 3, stride=2)
    x = torch.randn(1, 3, height, width)
    rows, columns = -(-height // 2), -(-width // 2)
    down, across = 2 * (rows - 1) + 3 - height, 2 * (columns - 1) + 3 - width
    # the odd pixel on the right and below
    padded = F.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2))
    expected = F.conv2d(padded, convolution.weight, convolution.bias, 2)
    assert_close(convolution(x), expected)
    assert expected.shape == (1, 4, rows, columns)


def test_words_are_split_into_their_longest_pieces() -> None:
    pieces = WordPieces([PAD, START, UNKNOWN, "cat", "##s"])
    ids = pieces(["Cats!", "dog"])
    assert ids.shape == (2, 16)
    assert ids[0, :4].tolist() == [1, 3, 4, 0]
    assert set(ids[1, 1:].tolist()) == {pieces.ids[UNKNOWN], pieces.ids[PAD]}


def test_a_black_box_is_given_batches_that_it_was_made_for() -> None:
    lengths = []

    def scores(x: torch.Tensor) -> torch.Tensor:
        lengths.append(len(x))
        return x.mean((2, 3))

    x = torch.rand(5, 3, 8, 8)
    assert_close(BlackBox(scores, (2, 3, 8, 8))(x), x.mean((2, 3)))
    assert lengths == [2, 2, 2]


def test_labels_that_imagenet_has_get_its_synonyms() -> None:
    labels = with_synonyms(["tabby cat", "gizmo"])
    assert "cat" in labels.synonyms[0]
    assert labels.synonyms[1] == ()


def test_models_that_run_a_file_or_code_are_told_by_their_names() -> None:
    names = ("tiny", "timm:resnet18.a1_in1k", "./x.pt2", "a.b:make", "timm:hf-hub:a/b")
    assert [is_file_or_code(name) for name in names] == [False, False, True, True, True]


def test_a_size_is_one_number_for_a_square() -> None:
    assert [checked_side(size) for size in (8, [8, 8], (8, 4))] == [8, 8, (8, 4)]


def test_a_stretched_photo_is_seen_whole() -> None:
    preprocess = StretchedPhoto(8)
    box = preprocess.box((30, 20))
    assert preprocess(Image.new("RGB", (30, 20))).shape == (3, 8, 8)
    assert (box.left, box.top, box.width, box.height) == (0, 0, 30, 20)


def test_a_preprocessing_is_adjusted_for_grey_and_other_values() -> None:
    crop = adjusted(CenterCrop(8), mean=0.5, std=(0.2, 0.3, 0.4))
    assert crop == CenterCrop(8, mean=(0.5, 0.5, 0.5), std=(0.2, 0.3, 0.4))
    assert len(adjusted(CenterCrop(8), channels=1).mean) == 1
