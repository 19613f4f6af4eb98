"""A preprocessing with other values: in Python, on the command line, and again from a record."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import explain
from explain import ExplainWarning, ModelError
from explain.cli import main
from explain.models import CenterCrop, WholePhoto
from explain.models.preprocessing import adjusted
from tests.conftest import TinyNet, settled

NET = """
import torch
from tests.conftest import TinyNet, settled

def make():
    return settled(TinyNet()).eval()
"""


@pytest.fixture
def photo(tmp_path: Path) -> Image.Image:
    picture = Image.effect_noise((40, 30), 80).convert("RGB")
    picture.save(tmp_path / "photo.png")
    return picture


def plain(photo: Image.Image, side: int, share: float, mean: list[float], std: list[float], how: int) -> np.ndarray:
    """The central square, scaled and normalised, with NumPy."""
    half, (width, height) = min(photo.size) * share / 2, photo.size
    box = (width / 2 - half, height / 2 - half, width / 2 + half, height / 2 + half)
    pixels = np.asarray(photo.resize((side, side), Image.Resampling(how), box=box), np.float64) / 255
    found: np.ndarray = ((pixels - mean) / std).transpose(2, 0, 1)
    return found


@pytest.mark.parametrize("share", [0.5, 0.875, 1])
@pytest.mark.parametrize("how", ["bilinear", "bicubic"])
def test_values_are_those_that_were_given(share: float, how: Any, photo: Image.Image) -> None:
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 2.0]
    net = settled(TinyNet())
    explainer = explain.Explainer(net, size=12, crop=share, mean=mean, std=std, interpolation=how)
    expected = plain(photo, 12, share, mean, std, Image.Resampling[how.upper()])
    np.testing.assert_allclose(explainer.preprocess(photo).numpy(), expected, atol=1e-5)


def test_a_number_stands_for_all_channels_and_the_rest_stays() -> None:
    center = CenterCrop(8, 0.7, interpolation="bicubic")
    assert adjusted(center, mean=0.5) == CenterCrop(8, 0.7, (0.5,) * 3, interpolation="bicubic")
    assert adjusted(center) is center
    whole: Any = explain.Explainer("tiny", crop="whole", std=0.3, interpolation="bicubic").preprocess
    assert isinstance(whole, WholePhoto)
    assert (whole.std, whole.interpolation) == ((0.3,) * 3, "bicubic")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mean": 123.7}, "mean must be from 0 to 1 for pixels from 0 to 1, got 123.7; divide by 255 what was"),
        ({"mean": (0.1, 0.2)}, "mean must be a number, or one for each of the three channels, got (0.1, 0.2)"),
        ({"mean": "0.5"}, "mean must be a number, or one for each of the three channels, got '0.5'"),
        ({"std": (0.1, 0.0, 0.1)}, "std must be above 0 for pixels from 0 to 1, got (0.1, 0.0, 0.1)"),
        ({"std": float("nan")}, "std must be a number, or one for each of the three channels, got nan"),
        ({"interpolation": "cubic"}, "interpolation must be 'bilinear' or 'bicubic', got 'cubic'; use 'bilinear'"),
        ({"crop": 0}, "crop must be one of 'center', 'whole', 'five', or a share above 0 and up to 1, got 0; use"),
        ({"crop": 1.5}, "or a share above 0 and up to 1, got 1.5; use 'center'"),
        ({"crop": True}, "or a share above 0 and up to 1, got True; use 'center'"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        explain.Explainer("tiny", **values)
    assert message in str(caught.value)


def test_a_preprocessing_that_cuts_out_no_centre_keeps_its_values() -> None:
    with pytest.raises(ModelError, match="interpolation cannot be changed"):
        explain.Explainer(settled(TinyNet()), preprocess=lambda image: torch.zeros(3, 8, 8), mean=0.5)


def test_only_what_nobody_says_is_assumed() -> None:
    net = settled(TinyNet())
    with pytest.warns(ExplainWarning, match="deviation"):
        explain.Explainer(net, size=16, mean=0.5)
    with pytest.warns(ExplainWarning, match="preprocess="):
        explain.Explainer(net, std=0.5, mean=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explain.Explainer(net, size=16, mean=0.5, std=0.5)


def test_the_command_line_takes_them_and_the_record_brings_them_back(
    tmp_path: Path, photo: Image.Image, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adjusted_net.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    values = ["--mean", "0.1,0.2,0.3", "--std", "0.5", "--interpolation", "bicubic", "--crop", "0.6", "--size", "16"]
    common = ["photo.png", "--method", "saliency", "--target", "1"]
    assert main([*common, "--model", "adjusted_net:make", *values]) == 0
    assert capsys.readouterr().err == ""
    told = "CenterCrop(side=16, crop=0.6, mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5), interpolation='bicubic')"
    assert explain.load("explained/photo-saliency.json").record["preprocess"] == told
    assert main([*common, "--model", "tiny", *values, "-o", "small"]) == 0
    saved = explain.load("small/photo-saliency.json")
    assert torch.equal(saved.repeat().attributions["saliency"].values[0], saved.values)
    assert main([*common, "--model", "adjusted_net:make", "--size", "16", "-o", "none"]) == 0
    assert "ImageNet's mean and standard deviation; give --size, --mean and --std, or give" in capsys.readouterr().err
    sys.modules.pop("adjusted_net", None)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--mean", "a", "--mean must be a number, or one for each channel as in 0.5,0.4,0.3, got 'a'"),
        ("--std", "1,2", "--std must be a number, or one for each channel as in 0.5,0.4,0.3, got '1,2'"),
        ("--crop", "middle", "--crop must be center, whole, five, or a share above 0 and up to 1, got 'middle'"),
    ],
)
def test_what_is_typed_for_them_is_checked(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["a.png", option, value]) == 2
    assert capsys.readouterr().err == f"explain: {message}; explain --help shows the options\n"
