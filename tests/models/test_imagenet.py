"""The default model: its network, compared with plain computations and with timm's, its weights, and its labels."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import nn

import explain
from explain import ExplainWarning, ModelError, TargetError, models
from explain.models import Classifier, imagenet, load
from explain.models.efficientnet import EPSILON, STAGES, ConvNormActivation, EfficientNetLite0, MBConv, SameConv2d
from explain.models.labels import imagenet_labels
from explain.targets.labels import find_label
from tests.conftest import ROOT, settled

NAME = "efficientnet-lite0"


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return load(NAME)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("size", [(7, 8), (9, 12), (1, 2), (5, 6)])
def test_padding_is_that_of_tensorflow(kernel: int, stride: int, size: tuple[int, int]) -> None:
    """As TensorFlow's own documentation has it, one place of the output after the other."""
    torch.manual_seed(0)
    layer, x = SameConv2d(1, 1, kernel, stride, bias=False).double(), torch.randn(1, 1, *size, dtype=torch.float64)
    rows, columns = (-(-length // stride) for length in size)
    top, left = (max(0, kernel - stride if length % stride == 0 else kernel - length % stride) // 2 for length in size)
    expected = torch.zeros(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            for i in range(kernel):
                for j in range(kernel):
                    y, z = row * stride + i - top, column * stride + j - left
                    if 0 <= y < size[0] and 0 <= z < size[1]:
                        expected[row, column] += layer.weight[0, 0, i, j].item() * x[0, 0, y, z]
    torch.testing.assert_close(layer(x)[0, 0].detach(), expected)


def test_blocks_compute_what_their_formula_says() -> None:
    torch.manual_seed(0)
    block, x = settled(MBConv(4, 4, 3, 5, 1)).double().eval(), torch.randn(2, 4, 6, 5, dtype=torch.float64)
    out = x
    for part in block.block:
        convolution, norm = part[0], part[1]
        out = F.conv2d(out, convolution.weight, None, 1, convolution.weight.shape[-1] // 2, 1, convolution.groups)
        scale = norm.weight / (norm.running_var + EPSILON).sqrt()
        shift = norm.bias - norm.running_mean * scale
        out = out * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)
        out = out.clamp(0, 6) if part is not block.block[-1] else out
    torch.testing.assert_close(block(x), out + x)
    assert not MBConv(4, 8, 1, 3, 1).shortcut
    assert not MBConv(4, 4, 1, 3, 2).shortcut


def test_parts_are_named_as_in_torchvision() -> None:
    """The EfficientNet of torchvision without its squeeze-and-excitation layers, which come third in its blocks."""
    settings = [
        torchvision.models.efficientnet.MBConvConfig(expansion, kernel, stride, inputs, outputs, count, 1.0, 1.0)
        for (expansion, kernel, stride, outputs, count), inputs in zip(
            STAGES, [32, *(stage[3] for stage in STAGES)], strict=False
        )
    ]
    with torch.device("meta"):
        theirs = torchvision.models.EfficientNet(settings, 0.2)
        ours = EfficientNetLite0()
    expected = {}
    for name, tensor in theirs.state_dict().items():
        parts = name.split(".")
        if "fc1" in parts or "fc2" in parts:
            continue
        if len(parts) > 4 and parts[3] == "block":  # features.STAGE.BLOCK.block.PLACE...
            layers = theirs.get_submodule(".".join(parts[:4]))
            parts[4] = str(min(int(parts[4]), len(layers) - 2))  # what follows the left-out layer moves up
        expected[".".join(parts)] = tensor.shape
    assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == expected
    kinds = {type(module) for module in ours.modules() if not list(module.children())}
    assert kinds == {nn.Conv2d, SameConv2d, nn.BatchNorm2d, nn.ReLU6, nn.AdaptiveAvgPool2d, nn.Dropout, nn.Linear}


def test_dropout_only_works_in_training() -> None:
    layers = [module for module in EfficientNetLite0(classes=2).modules() if isinstance(module, nn.Dropout)]
    assert [layer.p for layer in layers] == [0.2]


@pytest.mark.filterwarnings("ignore:::timm")
def test_the_network_computes_what_timms_own_does_with_the_same_weights(classifier: Classifier) -> None:
    timm = pytest.importorskip("timm", reason="timm is an extra")
    theirs = timm.create_model("tf_efficientnet_lite0").eval()
    own = classifier.model.state_dict()
    state = dict(zip(theirs.state_dict(), own.values(), strict=True))  # both in the order of the layers
    theirs.load_state_dict(state)
    for size in ((64, 64), (65, 97), (33, 40)):
        x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(classifier.model(x), theirs(x), atol=1e-4, rtol=1e-4)


def test_every_published_tensor_has_its_place(classifier: Classifier) -> None:
    path = imagenet.weights_file()
    assert path is not None
    published = torch.load(path, weights_only=True)
    state = classifier.model.state_dict()
    assert {imagenet.renamed(name) for name in published} == set(state)
    assert all(torch.equal(state[imagenet.renamed(name)], tensor) for name, tensor in published.items())
    assert not classifier.model.training
    assert str(classifier.weights).endswith(f"(sha256 {imagenet.SHA256})")


@pytest.mark.parametrize(
    ("photo", "expected"), [("chelsea.png", "cat"), ("coffee.png", "espresso"), ("rocket.jpg", "missile")]
)
def test_it_knows_what_is_on_the_photos(classifier: Classifier, photo: str, expected: str) -> None:
    explanation = explain.Explainer(classifier)(ROOT / "assets" / photo, ["gradcam", "guidedbackprop"])
    assert expected in explanation.predictions[0][0]
    assert explanation.attributions["gradcam"].layer == "features"
    assert explanation.input_size == (224, 224)


def test_any_input_size_works(classifier: Classifier) -> None:
    photo = Image.new("RGB", (60, 50), "orange")
    for side in (1, 33, 80):
        x = load(NAME, size=side).preprocess(photo)
        assert x.shape == (3, side, side)
        assert classifier.model(x[None]).shape == (1, 1000)


def test_preprocessing_is_bicubic_and_cuts_seven_eighths(classifier: Classifier) -> None:
    photo = Image.effect_noise((256, 256), 60).convert("RGB")
    pixels = torchvision.transforms.functional.to_tensor(photo.crop((16, 16, 240, 240)))
    torch.testing.assert_close(classifier.preprocess(photo), (pixels - 0.498) / 0.502)
    large = Image.effect_noise((512, 640), 60).convert("RGB")
    small = large.crop((32, 96, 480, 544)).resize((224, 224), Image.Resampling.BICUBIC)
    expected = (torchvision.transforms.functional.to_tensor(small) - 0.498) / 0.502
    torch.testing.assert_close(classifier.preprocess(large), expected, atol=0.25, rtol=0)  # but for the edges
    torch.testing.assert_close(classifier.preprocess(large)[:, 4:-4, 4:-4], expected[:, 4:-4, 4:-4])


def test_weights_that_are_not_the_published_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "weights.pth"
    changed.write_bytes(b"something else")
    monkeypatch.setattr(imagenet, "weights_file", lambda: changed)
    with pytest.raises(
        ModelError,
        match="efficientnet-lite0-",
    ):
        load(NAME)


def test_without_its_weights_the_small_model_serves_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, imagenet.PACKAGE, None)  # as if it were not installed
    with pytest.warns(ExplainWarning, match="'tiny'") as said:
        assert load().name == "tiny"
    assert len(said) == 1
    with pytest.raises(ModelError, match="efficientnet-lite0-"):
        load(NAME)


def test_models_go_by_their_names() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load().name == NAME
        assert load("tiny").name == load("bundled").name == "tiny"
    assert models.list_models()[:2] == [NAME, "tiny"]
    with pytest.raises(ModelError, match=r"did you mean 'efficientnet-lite0'"):
        load("efficientnet-lite")


def test_labels_are_readable_distinct_and_in_order(classifier: Classifier) -> None:
    labels = classifier.categories
    assert labels is not None
    assert len(labels) == len({label.casefold() for label in labels}) == 1000
    assert all(label.strip() == label and 2 <= len(label) <= 32 and "," not in label for label in labels)
    assert (labels[134], labels[517], labels[281]) == ("crane (bird)", "crane (machine)", "tabby cat")
    theirs = torchvision.models.EfficientNet_B0_Weights.DEFAULT.meta["categories"]
    for i, (label, words, other) in enumerate(zip(labels, labels.synonyms, theirs, strict=True)):
        known = {word.casefold() for word in (label, *words)}
        assert other.casefold().removesuffix(" bird").removesuffix(" tank suit") in known, i


@pytest.mark.parametrize(
    ("typed", "label"),
    [
        *[("tabby", "tabby cat"), ("Tabby Cats", "tabby cat"), ("puma", "cougar"), ("pumas", "cougar")],
        *[("crane bird", "crane (bird)"), ("mobile phone", "cell phone"), ("t shirt", "T-shirt")],
        *[
            ("polar bears", "polar bear"),
            ("school buses", "school bus"),
            ("cock", "rooster"),
            ("mice", "computer mouse"),
            ("house finch", "house finch"),
            ("laptop", "laptop"),
            ("tv", "television"),
            ("TVs", "television"),
            ("fridge", "refrigerator"),
            ("golden", "golden retriever"),
            ("finch", "house finch"),
        ],
    ],
)
def test_a_label_is_found_in_part_as_a_plural_or_as_a_synonym(classifier: Classifier, typed: str, label: str) -> None:
    assert classifier.label(find_label(typed, classifier.categories)) == label


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("cat", "Egyptian"),
        ("cats", "Egyptian"),
        ("crane", "machine"),
        ("panda", "labels"),
        ("kitties", "Egyptian"),
        ("bike", "mountain"),
        ("puppy", "'Chihuahua'"),  # not the mud puppy
        ("airplane", "'airliner'"),  # not the airplane wing
        ("person", "'bridegroom'"),
        ("men", "'men' is not a"),  # not the man-eater
        ("house", "'house' is not a"),
        ("retriev", "did you mean 'flat-coated retriever'"),
        ("dromedaries camel", "label"),
        ("dromedarry", "did you mean 'Arabian camel'"),
    ],
)
def test_what_fits_several_labels_or_none_is_suggested(classifier: Classifier, typed: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        find_label(typed, classifier.categories)


def test_kinds_of_things_stand_for_classes_that_are_there() -> None:
    lines = (Path(imagenet.__file__).with_name("imagenet_kinds.txt")).read_text("utf-8").splitlines()
    words = [word for line in lines for word in line.partition(": ")[0].split(", ")]
    assert len(words) == len(set(words)) > 150
    assert all(word == word.strip().lower() != "" for word in words)
    labels = imagenet_labels()
    classes: dict[str, set[int]] = {}
    for i, others in enumerate(labels.synonyms):
        for other in others:
            classes.setdefault(other.casefold(), set()).add(i)
    for word in {*words} - {*labels.absent} - {label.casefold() for label in labels}:
        stands_for = classes[word]
        if len(stands_for) == 1:
            assert {find_label(word, labels)} == stands_for
        else:
            with pytest.raises(TargetError, match=f"fits {len(stands_for)} labels"):
                find_label(word, labels)
    for word in labels.absent:
        with pytest.raises(TargetError, match="class"):
            find_label(word, labels)


def test_the_small_models_labels_have_synonyms_too() -> None:
    labels = load("tiny").categories
    assert labels is not None
    with pytest.raises(TargetError, match="Egyptian"):
        find_label("kitty", labels)
    assert labels[find_label("fridges", labels)] == "refrigerator"


def test_every_label_names_its_own_class(classifier: Classifier) -> None:
    assert classifier.categories is not None
    for index in range(0, 1000, 7):
        assert find_label(classifier.label(index), classifier.categories) == index


def test_activations_are_separate_modules() -> None:
    part = ConvNormActivation(3, 4)
    assert [type(layer) for layer in part] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU6]
    modules = list(EfficientNetLite0(classes=2).named_modules(remove_duplicate=False))
    rectifiers = [id(module) for _, module in modules if isinstance(module, nn.ReLU6)]
    assert len(rectifiers) == len(set(rectifiers)) == 33
