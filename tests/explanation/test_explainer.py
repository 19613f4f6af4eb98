from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

import explain
from explain import ExplainWarning, ImageError, MethodError, ModelError, OutputError, TargetError
from explain.attribution.pictures import percent
from explain.engine import Evidence, InputGradients
from explain.methods import GradCAM, Method
from explain.methods.registry import get_method
from explain.models import CenterCrop
from tests.conftest import ROOT, TinyNet, settled, snapshot

CAT = ROOT / "assets" / "chelsea.png"
METHODS = ["gradcam", "ablationcam", "fullgrad", "guidedbackprop", "inputxgradient", "saliency"]


@pytest.fixture(scope="module")
def explainer() -> explain.Explainer:
    return explain.Explainer("tiny")


def test_one_call_explains_a_photo(tmp_path: Path) -> None:
    explanation = explain.explain(CAT)
    assert "cat" in explanation.predictions[0][0]
    assert explanation.targets == [explanation.predictions[0][0]]
    assert explanation.methods == ["gradcam"]
    paths = explanation.save(tmp_path / "out")
    assert [path.name for path in paths] == ["chelsea-gradcam.png", "chelsea-gradcam.npy", "chelsea-gradcam.json"]
    assert np.load(paths[1]).shape == (7, 7)


def test_overlays_are_at_the_photos_own_resolution_for_every_method_and_photo(explainer: explain.Explainer) -> None:
    for photo in (CAT, ROOT / "assets" / "coffee.png"):
        explanation = explainer(photo, METHODS)
        with Image.open(photo) as image:
            for method in METHODS:
                assert explanation.overlay(method).size == image.size
                assert explanation.overlay(method, caption=True).width == image.width


def test_predictions_are_calibrated_probabilities_best_first(explainer: explain.Explainer) -> None:
    explanation = explainer(CAT)
    with torch.inference_mode():
        logits = explainer.model(explainer.preprocess(Image.open(CAT).convert("RGB"))[None])
    expected = explainer._classifier.probabilities(logits)[0].sort(descending=True).values[:5]
    assert [p for _, p in explanation.predictions] == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("target", ["tabby cat", "tabby", 66, torch.tensor(66), np.int64(66)])
def test_targets_are_labels_or_indices(explainer: explain.Explainer, target: object) -> None:
    explanation = explainer(CAT, target=target)  # type: ignore[arg-type]
    assert explanation.targets == ["tabby cat"]
    assert explanation.attributions["gradcam"].target.tolist() == [66]  # type: ignore[union-attr]


def test_several_targets_and_the_best_k_are_explained_together(explainer: explain.Explainer, tmp_path: Path) -> None:
    both = explainer(CAT, ["gradcam", "saliency"], targets=["tabby", "espresso"])
    assert both.targets == ["tabby cat", "espresso"]
    assert both.overlay("gradcam", "espresso").tobytes() == both.overlay("gradcam", 1).tobytes()
    assert both.overlay("gradcam", "tabby").tobytes() == both.overlay("gradcam", 0).tobytes()
    assert both.overlay("gradcam", 0).tobytes() != both.overlay("gradcam", 1).tobytes()
    names = [path.name for path in both.save(tmp_path)]
    assert "chelsea-tabby-cat-gradcam.png" in names
    assert "chelsea-espresso-saliency.json" in names
    assert names[-1] == "chelsea-sheet.png"
    best = explainer(CAT, top_k=3)
    assert best.targets == [label for label, _ in best.predictions[:3]]
    assert len(explainer(CAT, top_k=7).predictions) == 7


def test_a_record_is_enough_to_do_it_again(explainer: explain.Explainer, tmp_path: Path) -> None:
    explainer(CAT, [GradCAM(relu=False), "guidedgradcam"], target="espresso", layer="layer2").save(tmp_path)
    record = json.loads((tmp_path / "chelsea-gradcam.json").read_text())
    again = explain.Explainer(record["model"])(
        record["image"]["path"],
        type(get_method(record["method"]))(**record["options"]),
        target=record["target"],
        layer=record["layer"],
    )
    assert np.array_equal(again.attributions["gradcam"].values[0].numpy(), np.load(tmp_path / "chelsea-gradcam.npy"))
    assert again.record() == record
    assert record["label"] == "espresso"
    assert record["options"] == {"relu": False}
    assert record["score"] == pytest.approx(again.attributions["gradcam"].score.item())
    assert record["weights"] is None
    assert record["versions"]["torch"] == torch.__version__
    nested = json.loads((tmp_path / "chelsea-guidedgradcam.json").read_text())
    assert nested["options"] == {"cam": {"class": "GradCAM", "options": {"relu": True}}}


def test_saving_refuses_to_overwrite(explainer: explain.Explainer, tmp_path: Path) -> None:
    explanation = explainer(CAT)
    explanation.save(tmp_path)
    with pytest.raises(OutputError, match="exists already"):
        explanation.save(tmp_path)
    explanation.save(tmp_path, overwrite=True)
    assert explanation.save(tmp_path, stem="other/name")[0].name == "other-name-gradcam.png"


def test_figures_sheets_and_notebooks_show_everything(explainer: explain.Explainer) -> None:
    explanation = explainer(CAT, METHODS, targets=["tabby", "espresso"])
    titles = [axis.get_title() for axis in explanation.figure().axes]
    assert titles[0] == "photo"
    assert sum(bool(title) for title in titles) == 1 + 2 * len(METHODS)
    assert explanation.sheet().width > explanation.sheet(tile=80).width
    assert explanation._repr_png_().startswith(b"\x89PNG")
    assert "photo" not in repr(explanation)


def test_any_module_can_be_explained_with_its_own_labels() -> None:
    net = settled(TinyNet()).train()
    before = snapshot(net)
    explainer = explain.Explainer(net, categories=["a", "b", "c", "d", "e"], preprocess=CenterCrop(40))
    explanation = explainer(np.random.default_rng(0).random((30, 50, 3)), METHODS, target="c", layer="layer1")
    assert snapshot(net) == before
    assert explainer.model is net
    assert explainer.preprocess(Image.new("RGB", (9, 9))).shape == (3, 40, 40)
    assert explanation.targets == ["c"]
    assert explanation.source is None
    assert explain.Explainer(net, preprocess=CenterCrop(40))(CAT).targets[0].startswith("class ")


def test_a_torchvision_model_with_random_weights_works_out_of_the_box() -> None:
    with pytest.warns(ExplainWarning, match="assumed"):
        explanation = explain.Explainer(torchvision.models.resnet18())(CAT, METHODS)
    assert explanation.attributions["gradcam"].layer == "layer4"
    assert explanation.overlay("guidedbackprop").size == (451, 300)


def test_a_model_that_is_no_classifier_is_explained_through_a_callable() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.ReLU())

    def brightness(output: torch.Tensor) -> torch.Tensor:
        return output.mean((1, 2, 3))

    explanation = explain.Explainer(model, preprocess=CenterCrop(40))(CAT, "saliency", target=brightness)
    assert explanation.targets == ["brightness"]
    assert explanation.predictions == []
    assert explanation.record()["target"] == "brightness"
    assert explanation.record()["probability"] is None
    assert explanation.overlay(caption=True).height > explanation.overlay().height


def test_an_empty_list_of_predictions_is_not_an_error_in_figures() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.ReLU())
    explanation = explain.Explainer(model, preprocess=CenterCrop(40))(
        CAT, "gradcam", target=lambda output: output.mean((1, 2, 3)), layer="0"
    )
    assert explanation.figure().axes[0].get_title() == "photo"


def test_photos_that_are_turned_get_overlays_that_are_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(CAT) as image:
        image.convert("RGB").rotate(90, expand=True).save(tmp_path / "turned.jpg", exif=exif, quality=95)
    explanation = explain.Explainer("tiny")(tmp_path / "turned.jpg")
    assert explanation.overlay().size == (451, 300)
    assert "cat" in explanation.predictions[0][0]


def test_wrong_requests_say_what_is_right(explainer: explain.Explainer) -> None:
    explanation = explainer(CAT)
    with pytest.raises(MethodError, match="'saliency' was not asked"):
        explanation.overlay("saliency")
    with pytest.raises(TargetError, match="'espresso' was not explained"):
        explanation.overlay(target="espresso")
    with pytest.raises(TargetError, match="position"):
        explanation.overlay(target=1)
    with pytest.raises(TargetError, match="cannot"):
        explainer(CAT, target=1, top_k=2)
    with pytest.raises(TargetError, match="number"):
        explainer(CAT, top_k=0)
    with pytest.raises(TargetError, match="did you mean 'espresso'"):
        explainer(CAT, target="expresso")
    with pytest.raises(ModelError, match="got int"):
        explain.Explainer(3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="device 'gpu' cannot be used"):
        explain.Explainer(device="gpu")
    with pytest.raises(ModelError, match="by name only"):
        explain.Explainer(nn.Identity(), weights="x.pt")
    with pytest.raises(ImageError, match="return"):
        explain.Explainer(TinyNet(), preprocess=lambda image: torch.zeros(1, 3, 8, 8))(CAT)


@pytest.mark.parametrize(("value", "text"), [(1.0, "100 %"), (0.5, "50 %"), (0.0312, "3.1 %"), (0.0, "<0.1 %")])
def test_probabilities_are_printed_as_people_read_them(value: float, text: str) -> None:
    assert percent(value) == text


def test_targets_whose_labels_look_alike_as_file_names_all_get_their_files(tmp_path: Path) -> None:
    explainer = explain.Explainer(
        settled(TinyNet()), categories=["tabby cat", "tabby-cat", "猫", "犬", "?"], preprocess=CenterCrop(32)
    )
    paths = explainer(CAT, "saliency", top_k=5).save(tmp_path)
    assert len(set(paths)) == 16
    assert all(path.is_file() for path in paths)
    assert "chelsea-猫-saliency.png" in {path.name for path in paths}


@dataclass(frozen=True)
class Constant(Method):
    """A method of somebody else's, that is not registered."""

    level: float = 0.5
    name: ClassVar[str] = "constant"
    about: ClassVar[str] = "the same everywhere"

    @property
    def needs(self) -> frozenset[object]:
        return frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return torch.full_like(evidence.inputs[:, 0], self.level)


def test_a_method_object_needs_no_registration(tmp_path: Path) -> None:
    explanation = explain.Explainer("tiny")(CAT, [Constant(0.25), "saliency"])
    assert explanation.attributions["constant"].values.max() == 0.25
    assert len(explanation.save(tmp_path)) == 7
    assert explanation.sheet().width > 0
    assert explanation.record("constant")["options"] == {"level": 0.25}


def test_labels_must_be_as_many_as_classes() -> None:
    with pytest.raises(ModelError, match="classes"):
        explain.Explainer(settled(TinyNet()), categories=["a", "b"], preprocess=CenterCrop(32))(CAT, "saliency")


def test_a_single_logit_says_yes_or_no() -> None:
    explanation = explain.Explainer(settled(TinyNet(classes=1)), preprocess=CenterCrop(32))(CAT, "saliency")
    yes = float(explanation["saliency"].score.double().sigmoid())
    assert dict(explanation.predictions) == {
        "yes": pytest.approx(yes, abs=1e-6),
        "no": pytest.approx(1 - yes, abs=1e-6),
    }
    assert explanation.record()["probability"] == pytest.approx(yes, abs=1e-6)


def test_a_very_long_photo_is_drawn_within_reason() -> None:
    explanation = explain.Explainer("tiny")(Image.new("RGB", (10, 8000), "teal"), target=0)
    assert max(explanation.figure().get_size_inches()) < 20
    inside = np.asarray(explanation.overlay())[4000, 2:8]
    assert (inside != 255).any()
