"""Many photos in one call: the same as one after the other, in their order, whatever some of them
are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ImageError, PhotosError, TargetError
from explain.explanation.explanation import method_slug
from explain.explanation.photos import each_tried
from explain.methods import IntegratedGradients
from tests.conftest import Made, TinyNet, in_threads, settled, snapshot
from tests.runs.networks import as_it_is, folder_of, picture

METHODS = ["gradcam", "saliency", "randomcam", "smoothgrad", "ablationcam", "eigencam", "finercam"]


@pytest.fixture
def explainer() -> explain.Explainer:
    return explain.Explainer(settled(TinyNet()).double(), preprocess=as_it_is)


PHOTOS = [picture(0), picture(1, (20, 28)), picture(2)]


def assert_same(one: explain.Explanation, other: explain.Explanation) -> None:
    for name in ("photo", "source", "box", "input_size", "targets"):
        assert getattr(one, name) == getattr(other, name)
    assert dict(one.predictions) == pytest.approx(dict(other.predictions), rel=1e-6)
    for maps, expected in zip(one.results, other.results, strict=True):
        assert list(maps) == list(expected)
        for method, attribution in maps.items():
            alone = expected[method]
            assert_close(attribution.values, alone.values, rtol=1e-9, atol=1e-12)
            assert_close(attribution.score, alone.score)
            assert str(attribution.target) == str(alone.target)
            assert (attribution.layer, attribution.size) == (alone.layer, alone.size)


def assert_each_is_as_alone(explainer: explain.Explainer, methods: Any, target: Any = None) -> None:
    for photo, explanation in zip(PHOTOS, explainer(PHOTOS, methods, target), strict=True):
        assert_same(explanation, explainer(photo, methods, target))


def test_a_list_gives_what_each_photo_gives_alone_in_order(explainer: explain.Explainer) -> None:
    state = snapshot(explainer.model)
    assert_each_is_as_alone(explainer, METHODS)
    assert snapshot(explainer.model) == state
    assert explainer([]) == []
    assert len(explainer(iter(PHOTOS), "saliency", targets=[2, 0])[2].results) == 2


def test_warnings_name_the_photo_also_where_threads_explain_others(tmp_path: Path) -> None:
    """A dead map is of one photo of two, while another thread explains its own."""
    conv = nn.Conv2d(3, 2, 1)
    nn.init.ones_(conv.weight)
    nn.init.constant_(conv.bias, -0.5)
    head = nn.Linear(2, 3)
    nn.init.ones_(head.weight)
    model = nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    for name, brightness in (("bright.png", 200), ("dark.png", 0), ("other.png", 200)):
        Image.new("RGB", (16, 16), (brightness,) * 3).save(tmp_path / name)
    explainer = explain.Explainer(model, list("abc"), as_it_is)
    elsewhere = explain.Explainer(copy.deepcopy(model), list("abc"), as_it_is)
    photos = [tmp_path / "other.png"] * 2

    def explain_others(*_: Any) -> None:
        in_threads(1, lambda _: elsewhere(photos, "gradcam"))

    with (
        conv.register_forward_hook(explain_others),
        pytest.warns(explain.ExplainWarning, match=r"dark\.png") as told,
    ):
        explainer([tmp_path / "bright.png", tmp_path / "dark.png"], "gradcam", "a")
    assert not any("bright.png" in str(warning.message) for warning in told)


def test_what_is_kept_of_one_photo_holds_nothing_of_the_others(
    explainer: explain.Explainer,
) -> None:
    explanation = explainer(PHOTOS, ["gradcam", "integratedgradients"], 1)[2]
    tensors = [explanation.probabilities]
    for attribution in explanation.attributions.values():
        tensors += [value for value in vars(attribution).values() if isinstance(value, Tensor)]
    for tensor in tensors:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_of_many_photos_the_bad_ones_are_named_and_no_others_lost(
    explainer: explain.Explainer, tmp_path: Path
) -> None:
    folder_of(tmp_path, 2)
    (tmp_path / "bad.png").write_bytes(b"no photo")
    photos = [tmp_path / f"{stem}.png" for stem in ("000", "bad", "none", "001")]
    with pytest.raises(PhotosError, match="2 of 4 photos could not be") as caught:
        explainer(photos, "saliency", 1)
    first, bad, none, last = caught.value.results
    assert (first.source, bad, none) == (str(photos[0]), None, None)
    assert list(caught.value.errors) == [1, 2]
    assert isinstance(caught.value.errors[2].__cause__, ImageError)
    assert_same(last, explainer(photos[3], "saliency", 1))


def test_one_photo_that_breaks_the_model_does_not_spoil_its_batch() -> None:
    class Fragile(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            if (x.flatten(1).amax(1) == 0).any():
                raise ZeroDivisionError("black")
            return super().forward(x)

    fragile = explain.Explainer(settled(Fragile()).double(), preprocess=as_it_is)
    photos = [PHOTOS[0], Image.new("RGB", (24, 20)), PHOTOS[2]]
    first, black, last = fragile.each(photos, "saliency", 1)
    assert str(black) == "photo 1: raised ZeroDivisionError: black"
    for explanation, photo in ((first, photos[0]), (last, photos[2])):
        assert_same(explanation, fragile(photo, "saliency", 1))  # type: ignore[arg-type]


def test_networks_that_couple_a_batch_see_one_photo_at_a_time() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    parts = {"conv": nn.Conv2d(3, 4, 3), "norm": norm, "fc": nn.Linear(4, 5)}
    net = Made(lambda net, x: net.fc(net.norm(net.conv(x)).relu().mean((2, 3))), **parts)
    coupled = explain.Explainer(net.double(), preprocess=as_it_is)
    assert_each_is_as_alone(coupled, ["gradcam", "saliency"], 1)


def test_targets_and_baselines_of_the_callers_own_see_one_photo_at_a_time(
    explainer: explain.Explainer,
) -> None:
    """A function may index the rows of a batch, and a baseline may have a row for each image of
    it."""

    def first_row_alone(output: Tensor) -> Tensor:
        assert len(output) == 1
        return output[[0], 2]

    assert_each_is_as_alone(explainer, "saliency", first_row_alone)
    batches: list[int] = []
    explainer.model.register_forward_pre_hook(lambda model, args: batches.append(len(args[0])))
    baseline = torch.zeros(3, 20, 24).double()
    explainer([PHOTOS[0]] * 3, IntegratedGradients(steps=2, baseline=baseline), 1)
    assert max(batches) == 4  # two steps of one photo, and the photo twice between two others


def test_an_attribution_has_the_attributions_of_its_images() -> None:
    net = settled(TinyNet()).eval()
    x = torch.rand(4, 3, 12, 10)
    for method, layer in (("integratedgradients", None), ("layercam", ["layer1", "layer2"])):
        batch = explain.attribute(net, x, method, target=[0, 1, 2, 3], layer=layer)
        for i, image in enumerate(batch):
            alone = explain.attribute(net, x[i : i + 1], method, target=i, layer=layer)
            for name in ("values", "score", "target", "logits", "heatmap", "delta"):
                assert_close(getattr(image, name), getattr(alone, name), rtol=1e-4, atol=1e-5)
            assert_close(dict(image.maps), dict(alone.maps), rtol=1e-4, atol=1e-5)
            assert (len(image), image.layer, image.method) == (1, alone.layer, alone.method)
    assert torch.equal(batch[-1].values, batch.values[3:])
    assert torch.equal(batch[1:3].values, batch.values[1:3])
    with pytest.raises(IndexError):
        batch[4]


def test_a_list_of_targets_is_one_for_each_photo(explainer: explain.Explainer) -> None:
    targets: list[Any] = [2, None, explain.targets.Difference(0, 1)]
    explanations = explainer(PHOTOS, "saliency", targets)
    for photo, target, one in zip(PHOTOS, targets, explanations, strict=True):
        alone = explainer(photo, "saliency", target)
        assert_same(one, alone)
        assert one.record()["asked"] == alone.record()["asked"]


@pytest.mark.parametrize("photos", [PHOTOS[0], PHOTOS, iter(PHOTOS)], ids=["one", "list", "iter"])
def test_targets_are_as_many_as_photos(photos: Any, explainer: explain.Explainer) -> None:
    with pytest.raises(TargetError, match="targets="):
        explainer(photos, "saliency", [0, 1])


def test_of_a_batch_that_fails_each_photo_is_tried_alone() -> None:
    ones, error = each_tried([1, 0], lambda numbers: [1 / number for number in numbers])
    assert ones == 1
    assert isinstance(error, ZeroDivisionError)


def test_files_are_called_by_their_method() -> None:
    names = [method_slug(name) for name in ("smooth(gradcam)", "occlusion(window=8)")]
    assert names == ["smooth-gradcam", "occlusion-window=8"]
