from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile
from torch import nn

import explain
from explain.models import CenterCrop
from tests.conftest import ROOT, TinyNet, settled, snapshot

CAT = ROOT / "assets" / "chelsea.png"
METHODS = ["gradcam", "fullgrad", "guidedbackprop"]


@pytest.fixture(scope="module")
def explainer() -> explain.Explainer:
    return explain.Explainer("tiny")


def test_one_call_explains_a_photo(tmp_path: Path) -> None:
    explanation = explain.explain(CAT)
    assert "cat" in explanation.predictions[0][0]
    assert explanation.targets == [explanation.predictions[0][0]]
    assert explanation.methods == ["gradcam"]
    paths = explanation.save(tmp_path / "out")
    assert [path.name for path in paths] == [
        "chelsea-gradcam.png",
        "chelsea-gradcam.npy",
        "chelsea-gradcam.json",
    ]
    assert np.load(paths[1]).shape == (7, 7)


def test_any_module_can_be_explained_with_its_own_labels() -> None:
    net = settled(TinyNet()).train()
    state = snapshot(net)
    explainer = explain.Explainer(
        net, categories=["a", "b", "c", "d", "e"], preprocess=CenterCrop(40)
    )
    explanation = explainer(
        np.random.default_rng(0).random((30, 50, 3)), METHODS, target="c", layer="layer1"
    )
    assert snapshot(net) == state
    assert explainer.model is net
    assert explainer.preprocess(Image.new("RGB", (9, 9))).shape == (3, 40, 40)
    assert explanation.targets == ["c"]
    assert explanation.source is None
    assert explain.Explainer(net, preprocess=CenterCrop(40))(CAT).targets[0].startswith("class ")


@pytest.mark.parametrize("several", ["one photo", "a list", "each"])
def test_warnings_about_photos_carry_the_line_of_the_caller(several: str) -> None:
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Tanh(), pooled)
    explainer = explain.Explainer(model, preprocess=CenterCrop(32))
    calls = {
        "one photo": lambda: explainer(CAT, "guidedbackprop", 1),
        "a list": lambda: explainer([CAT], "guidedbackprop", 1),
        "each": lambda: list(explainer.each([CAT], "guidedbackprop", 1)),
    }
    with pytest.warns(explain.ExplainWarning) as caught:
        calls[several]()
    assert {warning.filename for warning in caught} == {__file__}


def test_a_single_logit_says_yes_or_no() -> None:
    model = settled(TinyNet(classes=1))
    explanation = explain.Explainer(model, preprocess=CenterCrop(32), activation="sigmoid")(
        CAT, "saliency"
    )
    yes = float(explanation["saliency"].score.double().sigmoid())
    assert dict(explanation.predictions) == {
        "yes": pytest.approx(yes, abs=1e-6),
        "no": pytest.approx(1 - yes, abs=1e-6),
    }
    assert explanation.record()["probability"] == pytest.approx(yes, abs=1e-6)


def test_a_photo_takes_one_pass_and_one_more_where_the_model_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[nn.Module] = []
    decoded: list[str] = []
    decode = ImageFile.ImageFile.load

    def load(file: Any, *args: Any) -> Any:
        decoded.extend([file.filename] * bool(file.tile))
        return decode(file, *args)

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    path = tmp_path / "cat.jpg"
    Image.linear_gradient("L").save(path)
    explainer = explain.Explainer("tiny")
    explainer.model.register_forward_pre_hook(lambda model, args: passes.append(model))
    counts = []
    for _ in range(3):
        explanation = explainer(path)
        assert explanation.predictions
        counts.append((len(passes), len(decoded)))
    assert counts == [(2, 1), (3, 2), (4, 3)]
    default = explain.explain(path).explainer.model
    handle = default.register_forward_pre_hook(lambda model, args: passes.append(model))
    assert explain.explain(path).explainer.model is default
    handle.remove()
    assert passes[4:] == [default]
