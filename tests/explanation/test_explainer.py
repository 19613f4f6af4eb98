from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ImageFile
from torch import nn

import explain
from explain.models import CenterCrop
from tests.conftest import ROOT

CAT = str(ROOT / "assets" / "chelsea.png")


def test_one_call_explains_a_photo(tmp_path: Path) -> None:
    explanation = explain.explain(CAT)
    assert "cat" in explanation.predictions[0][0]
    assert explanation.targets == [explanation.predictions[0][0]]
    paths = explanation.save(tmp_path)
    assert [path.name for path in paths] == [f"chelsea-gradcam.{e}" for e in ("png", "npy", "json")]
    assert np.load(paths[1]).shape == (7, 7)


@pytest.mark.parametrize("several", [False, True])
def test_warnings_about_photos_carry_the_line_of_the_caller(several: bool) -> None:
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Tanh(), pooled)
    explainer = explain.Explainer(model, preprocess=CenterCrop(32))
    with pytest.warns(explain.ExplainWarning) as caught:
        explainer([CAT] if several else CAT, "guidedbackprop", 1)
    assert {warning.filename for warning in caught} == {__file__}


def test_a_photo_takes_one_pass_and_two_more_where_the_model_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[nn.Module] = []
    decoded: list[str] = []
    decode = ImageFile.ImageFile.load

    def load(file: Any, *args: Any) -> Any:
        decoded.extend([file.filename] * bool(file.tile))
        return decode(file, *args)

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    explainer = explain.Explainer("tiny")
    explainer.model.register_forward_pre_hook(lambda model, args: passes.append(model))
    for count in (1, 2, 3):
        assert explainer(CAT).predictions
        assert (len(passes), len(decoded)) == (count + 2, count)


def test_the_default_model_is_loaded_once() -> None:
    assert explain.explain(CAT).explainer.model is explain.explain(CAT).explainer.model
