"""A preprocessing with other values: in Python, on the command line, and again from a record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import explain
from explain import ModelError
from explain.models import CenterCrop, WholePhoto
from explain.models.from_torchvision import load_torchvision
from explain.models.preprocessing import adjusted
from tests.conftest import TinyNet, settled
from tests.models.test_given import plain


@pytest.fixture
def photo() -> Image.Image:
    return Image.effect_noise((40, 30), 80).convert("RGB")


@pytest.mark.parametrize("share", [0.5, 0.875, 1])
@pytest.mark.parametrize("how", ["bilinear", "bicubic"])
def test_values_are_those_that_were_given(share: float, how: Any, photo: Image.Image) -> None:
    mean = [0.1, 0.2, 0.3]
    std = [0.4, 0.5, 2.0]
    net = settled(TinyNet())
    explainer = explain.Explainer(net, size=12, crop=share, mean=mean, std=std, interpolation=how)
    edge = 15 * (1 - share)  # of the square in the middle of 40 x 30 pixels
    box = (5 + edge, edge, 35 - edge, 30 - edge)
    expected = plain(photo, (12, 12), mean, std, Image.Resampling[how.upper()], box)
    assert_close(explainer.preprocess(photo), expected)


def test_a_number_stands_for_all_channels_and_the_rest_stays() -> None:
    center = CenterCrop(8, 0.7, interpolation="bicubic")
    assert adjusted(center, mean=0.5) == CenterCrop(8, 0.7, (0.5,) * 3, interpolation="bicubic")
    assert adjusted(center) is center
    whole: Any = explain.Explainer(
        "tiny", crop="whole", std=0.3, interpolation="bicubic"
    ).preprocess
    assert isinstance(whole, WholePhoto)
    assert (whole.std, whole.interpolation) == ((0.3,) * 3, "bicubic")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(({"mean": wrong}, "mean must") for wrong in (123.7, (0.1, 0.2), "0.5")),
        *(({"std": wrong}, "std must") for wrong in ((0.1, 0.0, 0.1), float("nan"))),
        *(({"crop": wrong}, "crop must") for wrong in (0, 1.5, True)),
        ({"interpolation": "cubic"}, "interpolation must"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        explain.Explainer("tiny", **values)


def test_another_size_keeps_the_interpolation_that_is_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = pytest.importorskip("torchvision.models")
    # nothing is downloaded
    monkeypatch.setattr(models, "get_model", lambda name, weights: torch.nn.Identity())
    for name in ("swin_t", "resnet50"):
        published = models.get_model_weights(name).DEFAULT.transforms()
        cropped = load_torchvision(name, size=112).preprocess
        assert cropped == CenterCrop(
            112,
            published.crop_size[0] / published.resize_size[0],
            tuple(published.mean),
            tuple(published.std),
            published.interpolation.value,
        )


@pytest.mark.parametrize("sides", [(12, 24), (24, 12), [20, 7]])
@pytest.mark.parametrize("share", [0.5, 1])
def test_an_input_may_be_no_square(sides: Any, share: float, photo: Image.Image) -> None:
    height, width = sides
    explainer = explain.Explainer(settled(TinyNet()), size=sides, crop=share, mean=0.5, std=0.25)
    scale = min(40 / width, 30 / height) * share
    left = (40 - width * scale) / 2
    top = (30 - height * scale) / 2
    box = (left, top, 40 - left, 30 - top)
    values = [0.5] * 3, [0.25] * 3
    expected = plain(photo, (width, height), *values, Image.Resampling.BILINEAR, box)
    assert_close(explainer.preprocess(photo), expected)
    explanation = explainer(photo, "saliency")
    assert explanation.heatmap.shape == (height, width)
    assert tuple(vars(explanation.box).values()) == pytest.approx(box)


def test_the_whole_photo_is_padded_or_covers_an_input_that_is_no_square(photo: Image.Image) -> None:
    plain_values: Any = {"mean": (0.5,) * 3, "std": (1.0,) * 3}
    padded = WholePhoto((30, 20), **plain_values)
    x = padded(photo)  # as 20 x 15 pixels in the middle
    assert x.shape == (3, 30, 20)
    assert_close(x[:, 7:22], plain(photo, (20, 15), [0.5] * 3, [1.0] * 3, 2))
    assert not x[:, :7].any()
    assert not x[:, 22:].any()
    assert vars(padded.box((40, 30))) == {"left": 0, "top": -14, "right": 40, "bottom": 46}
    covering = WholePhoto((30, 20), **plain_values, pad=False)(photo)
    assert_close(covering, plain(photo, (40, 30), [0.5] * 3, [1.0] * 3, 2))


@pytest.mark.parametrize("size", [0, (0, 4), (1, 2, 3), "48", True, (8.0, 8), ()])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    for make in (explain.Explainer, explain.models.load):
        with pytest.raises(ModelError, match="size must"):
            make("tiny", size=size)
