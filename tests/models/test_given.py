"""What a module says about its own preprocessing and labels is used, and what is assumed is
said."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.testing import assert_close

import explain
from explain import ExplainWarning, ModelError
from explain.models import CenterCrop
from explain.models.attached import as_classifier
from tests.conftest import TinyNet

pytestmark = pytest.mark.filterwarnings("ignore:::timm", "ignore:::transformers")


@pytest.fixture
def photo() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3)).astype(np.uint8))


def plain(
    photo: Image.Image,
    size: tuple[int, int],
    mean: list[float],
    std: list[float],
    how: Any,
    box: Any = None,
) -> torch.Tensor:
    """Resize the whole photo, or a box of it, to (width, height) and normalise it."""
    pixels = torch.from_numpy(np.array(photo.resize(size, how, box))).permute(2, 0, 1) / 255
    return (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


MEAN = [0.1, 0.2, 0.3]
STD = [0.4, 0.5, 0.6]
CONFIG = {
    "mean": MEAN,
    "std": STD,
    "interpolation": "bicubic",
    "input_size": (3, 32, 32),
    "num_classes": 5,
}


def timm_model(**overlay: Any) -> Any:
    timm = pytest.importorskip("timm", reason="timm is an extra")
    overlay = {**CONFIG, "crop_pct": 0.8, **overlay}
    return timm.create_model("test_resnet", num_classes=5, pretrained_cfg_overlay=overlay)


SAID = {"size": 48, "mean": 0.25, "std": (0.2, 0.3, 0.4), "interpolation": "bilinear"}


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        *((mode, ()) for mode in ("center", "squash", "border")),
        *(("center", (name,)) for name in SAID),
        ("center", tuple(SAID)),
    ],
)
def test_values_of_timm_are_those_of_timm_itself_but_for_what_is_said(
    mode: str, names: tuple[str, ...], photo: Image.Image
) -> None:
    model = timm_model(crop_mode=mode)
    said: dict[str, Any] = {name: SAID[name] for name in names}
    timm = pytest.importorskip("timm", reason="timm is an extra")
    config = {**timm.data.resolve_model_data_config(model), **said}
    if config.pop("size", None):
        config["input_size"] = (3, 48, 48)
    if "mean" in said:
        config["mean"] = (0.25,) * 3
    expected = timm.data.create_transform(**config)(photo)
    for wrapped in (model, nn.DataParallel(model)):
        assert torch.equal(explain.Explainer(wrapped, **said).preprocess(photo), expected)


@pytest.mark.parametrize("crop", ["whole", 0.5])
@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_another_crop_keeps_the_values_that_come_with_a_model(
    kind: str, crop: Any, photo: Image.Image
) -> None:
    if kind == "timm":
        model = timm_model()
    else:
        model = tiny_vit()
        transformers = pytest.importorskip("transformers", reason="transformers is an extra")
        values: dict[str, Any] = {"image_mean": MEAN, "image_std": STD}
        model.image_processor = transformers.MobileNetV2ImageProcessor(
            size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}, resample=3, **values
        )
    x = explain.Explainer(model, crop=crop).preprocess(photo)
    if crop == "whole":  # its shorter side has 32 pixels, or its longer one where that is fixed
        size = (48, 32) if kind == "timm" else (32, 21)
        x = x if kind == "timm" else x[:, 5:26]
        box = None
    else:
        size = (32, 32)
        box = (30, 15, 60, 45)
    bicubic = Image.Resampling.BICUBIC
    expected = plain(photo, size, MEAN, STD, bicubic, box)
    assert_close(x, expected, atol=1e-6, rtol=0)


class Processor:
    """What a processor of transformers has that amounts to a stretched photo."""

    model_input_names = ("pixel_values",)
    do_resize = do_normalize = do_rescale = True
    do_center_crop = False
    rescale_factor: float | None = 1 / 255
    resample: int | None = None
    size = MappingProxyType({"height": 8, "width": 8})
    image_mean = image_std = (0.5, 0.5, 0.5)

    def preprocess(self, images: Any) -> Any:
        raise NotImplementedError


class UnscaledProcessor(Processor):
    do_rescale = False
    rescale_factor = None


class NearestProcessor(Processor):
    resample = 0


def test_a_processor_without_division_or_interpolation_is_not_replaced_by_one_with_it() -> None:
    cropped = explain.Explainer(TinyNet(), preprocess=Processor(), crop=0.5).preprocess
    assert cropped == CenterCrop(8, crop=0.5, mean=(0.5,) * 3, std=(0.5,) * 3)
    for processor in (UnscaledProcessor(), NearestProcessor()):
        with pytest.raises(ModelError, match="needs a preprocessing that cuts out the centre"):
            explain.Explainer(TinyNet(), preprocess=processor, crop=0.5)


def test_a_timm_model_for_other_classes_or_in_grey_says_what_it_assumes(photo: Image.Image) -> None:
    timm = pytest.importorskip("timm", reason="timm is an extra")
    for options in ({"num_classes": 5}, {"in_chans": 1}):
        model = timm.create_model("test_resnet", **options).eval()
        with pytest.warns(ExplainWarning, match="assumed") as warned:
            explain.Explainer(model)(photo, "saliency")
        assert len(warned) == 1
        # nothing is left to assume
        x = explain.Explainer(model, size=32, mean=0.5, std=0.25).preprocess(photo)
        assert x.shape == (options.get("in_chans", 3), 32, 32)
    grey = np.asarray(photo.convert("L"), np.float64).mean() / 255
    assert float(x.mean()) == pytest.approx((grey - 0.5) / 0.25, abs=0.2)


def test_labels_of_timm_are_those_of_the_configuration_or_of_imagenet() -> None:
    timm = pytest.importorskip("timm", reason="timm is an extra")
    named = {"label_names": ["n1", "n2"], "label_descriptions": {"n1": "goose", "n2": "crane"}}
    model = timm.create_model("test_resnet", num_classes=2, pretrained_cfg_overlay=named)
    assert as_classifier(model).categories == ["goose", "crane"]
    loaded = as_classifier(timm.create_model("test_resnet"))
    assert loaded.categories is not None
    assert (len(loaded.categories), loaded.categories[207]) == (1000, "golden retriever")
    model.categories = ["a", "b"]
    assert as_classifier(model).categories == ["a", "b"]


def tiny_vit(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    config = transformers.ViTConfig(**{"image_size": 32, "patch_size": 8, **sizes, **options})
    return transformers.ViTForImageClassification(config)


LABELS = {0: "goose", 1: "crane", 2: "gull"}


def test_a_hugging_face_model_brings_labels_and_size_and_says_what_is_assumed(
    photo: Image.Image,
) -> None:
    with pytest.warns(ExplainWarning, match="ViTImageProcessor"):
        explainer = explain.Explainer(tiny_vit(id2label=LABELS))
    assert explainer.categories == ["goose", "crane", "gull"]
    expected = plain(photo, (32, 32), [0.5] * 3, [0.5] * 3, Image.Resampling.BILINEAR)
    assert_close(explainer.preprocess(photo), expected, atol=0.02, rtol=0)
    # nothing is left to assume
    said = explain.Explainer(tiny_vit(), size=32, mean=MEAN, std=STD).preprocess
    expected = plain(photo, (32, 32), MEAN, STD, Image.Resampling.BILINEAR)
    assert_close(said(photo), expected, atol=0.02, rtol=0)
    with pytest.warns(ExplainWarning, match="'height': 16"):
        assert explain.Explainer(tiny_vit(), size=16).preprocess(photo).shape == (3, 16, 16)
    assert as_classifier(tiny_vit(id2label={0: "LABEL_0", 1: "LABEL_1"})).categories is None


def test_an_image_processor_beside_the_weights_or_on_the_model_is_used(
    photo: Image.Image, tmp_path: Path
) -> None:
    model = tiny_vit(id2label=LABELS)
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=MEAN, image_std=STD
    )
    expected = plain(photo, (32, 32), MEAN, STD, Image.Resampling.BILINEAR)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    saved = transformers.ViTForImageClassification.from_pretrained(tmp_path)
    explainers = [explain.Explainer(saved), explain.Explainer(model, preprocess=processor)]
    model.image_processor = processor
    for explainer in [*explainers, explain.Explainer(model)]:
        assert_close(explainer.preprocess(photo), expected, atol=0.02, rtol=0)
    assert explain.Explainer(model, size=16).preprocess(photo).shape == (3, 16, 16)
    assert dict(processor.size)["height"] == 32  # the caller's own is left alone


def test_what_is_assumed_is_said_once_and_only_where_it_matters() -> None:
    net = TinyNet()
    with pytest.warns(ExplainWarning, match="'TinyNet'") as said:
        explain.Explainer(net, size=40)
    assert len(said) == 1
    explain.Explainer(net, preprocess=CenterCrop(40))
    explain.Explainer()
    net.preprocess = CenterCrop(8)
    assert explain.Explainer(net).preprocess == CenterCrop(8)


def test_another_size_is_cut_from_as_large_a_share_of_the_photo() -> None:
    model = tiny_vit()
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    # a shorter side of 256, of which 224 are cut
    model.image_processor = transformers.MobileNetV2ImageProcessor(
        size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224}
    )
    resized: Any = as_classifier(model, size=112).preprocess
    assert resized.options["size"] == {"shortest_edge": 128}
    assert resized.options["crop_size"] == {"height": 112, "width": 112}
