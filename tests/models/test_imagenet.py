"""The default model: its network, compared with plain computations and with timm's, its weights,
and its labels."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torch.testing import assert_close

import explain
from explain import ExplainWarning, ModelError, TargetError
from explain.models import Classifier, bundled, load
from explain.models.bundled import imagenet_labels
from explain.targets.labels import find_label
from tests.conftest import ROOT

NAME = "efficientnet-lite0"


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return load(NAME)


@pytest.mark.filterwarnings("ignore:::timm")
def test_the_network_computes_what_timms_own_does_with_the_same_weights(
    classifier: Classifier,
) -> None:
    timm = pytest.importorskip("timm", reason="timm is an extra")
    theirs = timm.create_model("tf_efficientnet_lite0").eval()
    own = classifier.model.state_dict()
    # both in the order of the layers
    state = dict(zip(theirs.state_dict(), own.values(), strict=True))
    theirs.load_state_dict(state)
    for size in ((64, 64), (65, 97), (33, 40)):
        x = torch.randn(1, 3, *size)
        assert_close(classifier.model(x), theirs(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("photo", "expected"),
    [("chelsea.png", "cat"), ("rocket.jpg", "missile")],
)
def test_it_knows_what_is_on_the_photos(classifier: Classifier, photo: str, expected: str) -> None:
    explanation = explain.Explainer(classifier)(ROOT / "assets" / photo, "gradcam")
    assert expected in explanation.predictions[0][0]
    assert explanation.attributions["gradcam"].layer == "features"


def test_weights_that_are_not_the_published_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = tmp_path / "weights.pth"
    changed.write_bytes(b"something else")
    monkeypatch.setattr(bundled, "weights_file", lambda: changed)
    with pytest.raises(ModelError, match="efficientnet-lite0-"):
        load(NAME)


def test_without_its_weights_the_small_model_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, bundled.PACKAGE, None)  # as if it were not installed
    with pytest.warns(ExplainWarning, match="'tiny'") as said:
        assert load().name == "tiny"
    assert len(said) == 1
    with pytest.raises(ModelError, match="efficientnet-lite0-"):
        load(NAME)


def test_labels_are_readable_distinct_and_in_order(classifier: Classifier) -> None:
    labels = classifier.categories
    assert labels is not None
    assert len(labels) == len({label.casefold() for label in labels}) == 1000
    assert all(re.fullmatch(r"\S[^,]{,30}\S", label) for label in labels)
    assert labels[134] == "crane (bird)"
    assert labels[517] == "crane (machine)"
    theirs = torchvision.models.EfficientNet_B0_Weights.DEFAULT.meta["categories"]
    for i, (label, words, other) in enumerate(zip(labels, labels.synonyms, theirs, strict=True)):
        known = {word.casefold() for word in (label, *words)}
        assert other.casefold().removesuffix(" bird").removesuffix(" tank suit") in known, i


@pytest.mark.parametrize(
    ("typed", "label"),
    [
        ("tabby", "tabby cat"),
        ("Tabby Cats", "tabby cat"),
        ("pumas", "cougar"),
        ("crane bird", "crane (bird)"),
        ("t shirt", "T-shirt"),
        ("school buses", "school bus"),
        ("cock", "rooster"),
        ("mice", "computer mouse"),
        ("house finch", "house finch"),
        ("TVs", "television"),
        ("golden", "golden retriever"),
    ],
)
def test_a_label_is_found_in_part_as_a_plural_or_as_a_synonym(
    classifier: Classifier, typed: str, label: str
) -> None:
    assert classifier.label(find_label(typed, classifier.categories)) == label


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("cats", "Egyptian"),
        ("kitties", "Egyptian"),
        ("crane", "machine"),
        ("panda", "labels"),
        ("person", "'bridegroom'"),
        ("house", "'house' is not a"),
        ("puppy", "'Chihuahua'"),  # no mud puppy
        ("men", "'men' is not a"),  # no man-eater
        ("dromedaries camel", "label"),
        ("retriev", "did you mean 'flat-coated retriever'"),
        ("dromedarry", "did you mean 'Arabian camel'"),
    ],
)
def test_what_fits_several_labels_or_none_is_suggested(
    classifier: Classifier, typed: str, message: str
) -> None:
    with pytest.raises(TargetError, match=message):
        find_label(typed, classifier.categories)


def test_kinds_of_things_stand_for_classes_that_are_there() -> None:
    lines = (Path(bundled.__file__).with_name("imagenet_kinds.txt")).read_text("utf-8").splitlines()
    words = [word for line in lines for word in line.partition(": ")[0].split(", ")]
    assert len(words) == len(set(words))
    labels = imagenet_labels()
    synonyms = [
        {word.casefold() for word in (label, *more)}
        for label, more in zip(labels, labels.synonyms, strict=True)
    ]
    labelled = {label.casefold() for label in labels}
    for word in sorted({*words} - labelled)[::4]:
        classes = {number for number, names in enumerate(synonyms) if word in names}
        if len(classes) == 1:
            assert {find_label(word, labels)} == classes
            continue
        with pytest.raises(
            TargetError, match=f"fits {len(classes)} labels" if classes else "class"
        ):
            find_label(word, labels)
