"""Many photos in one call: the same as one after the other, in their order, whatever some of them
are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ImageError, PhotosError, TargetError
from explain.methods import IntegratedGradients
from tests.conftest import Made, TinyNet, settled, snapshot
from tests.runs.networks import as_it_is, picture

METHODS = ["gradcam", "saliency", "randomcam", "smoothgrad", "ablationcam", "eigencam", "finercam"]


class Counting(TinyNet):
    """Notes how many images each call has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return super().forward(x)


@pytest.fixture
def explainer() -> explain.Explainer:
    return explain.Explainer(settled(Counting()).double(), preprocess=as_it_is)


def assert_same(one: explain.Explanation, other: explain.Explanation) -> None:
    assert one.photo.tobytes() == other.photo.tobytes()
    for name in ("source", "box", "input_size", "targets"):
        assert getattr(one, name) == getattr(other, name)
    assert [label for label, _ in one.predictions] == [label for label, _ in other.predictions]
    assert [p for _, p in one.predictions] == pytest.approx(
        [p for _, p in other.predictions], rel=1e-6
    )
    for maps, expected in zip(one.results, other.results, strict=True):
        assert list(maps) == list(expected)
        for method, attribution in maps.items():
            alone = expected[method]
            assert_close(attribution.values, alone.values, rtol=1e-9, atol=1e-12)
            assert_close(attribution.score, alone.score)
            assert str(attribution.target) == str(alone.target)
            assert (attribution.layer, attribution.size) == (alone.layer, alone.size)


def test_a_list_gives_what_each_photo_gives_alone_in_order(explainer: explain.Explainer) -> None:
    photos = [picture(i, (24, 20) if i % 3 else (20, 28)) for i in range(7)]
    state = snapshot(explainer.model)
    explanations = explainer(photos, METHODS, top_k=2)
    assert snapshot(explainer.model) == state
    assert isinstance(explanations, list)
    for photo, explanation in zip(photos, explanations, strict=True):
        assert_same(explanation, explainer(photo, METHODS, top_k=2))
        assert explanation.explainer is explainer
    assert explainer([]) == []
    assert len(explainer((photo for photo in photos[:2]), "saliency")) == 2


def test_what_is_kept_of_one_photo_holds_nothing_of_the_others(
    explainer: explain.Explainer,
) -> None:
    photos = [picture(i) for i in range(8)]
    explanation = explainer(photos, ["gradcam", "integratedgradients"], 1)[3]
    tensors = [explanation.probabilities]
    for attribution in explanation.attributions.values():
        tensors += vars(attribution).values()
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_of_many_photos_the_bad_ones_are_named_and_no_others_lost(
    explainer: explain.Explainer, tmp_path: Path
) -> None:
    for i in range(3):
        picture(i).save(tmp_path / f"{i}.png")
    (tmp_path / "bad.png").write_bytes((tmp_path / "0.png").read_bytes()[:90])
    photos = [tmp_path / f"{stem}.png" for stem in ("0", "bad", "1", "none", "2")]
    with pytest.raises(PhotosError, match="2 of 5 photos could not be") as caught:
        explainer(photos, "saliency", 1)
    sources = [result and result.source for result in caught.value.results]
    assert sources == [str(photos[0]), None, str(photos[2]), None, str(photos[4])]
    assert list(caught.value.errors) == [1, 3]
    assert isinstance(caught.value.errors[3].__cause__, ImageError)
    assert_same(caught.value.results[4], explainer(photos[4], "saliency", 1))


def test_one_photo_that_breaks_the_model_does_not_spoil_its_batch(
    explainer: explain.Explainer,
) -> None:
    class Fragile(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            if (x.flatten(1).amax(1) == 0).any():
                raise ZeroDivisionError("black")
            return super().forward(x)

    fragile = explain.Explainer(settled(Fragile()), preprocess=as_it_is)
    photos = [picture(0), Image.new("RGB", (24, 20)), picture(1)]
    results = list(fragile.each(photos, "saliency", 1))
    assert [type(result).__name__ for result in results] == [
        "Explanation",
        "PhotoError",
        "Explanation",
    ]
    assert str(results[1]) == "photo 1: raised ZeroDivisionError: black"
    assert_same(results[2], fragile(photos[2], "saliency", 1))  # type: ignore[arg-type]


def test_networks_that_couple_a_batch_see_one_photo_at_a_time() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    parts = {"conv": nn.Conv2d(3, 4, 3), "norm": norm, "fc": nn.Linear(4, 5)}
    net = Made(lambda net, x: net.fc(net.norm(net.conv(x)).relu().mean((2, 3))), **parts)
    coupled = explain.Explainer(net.double(), preprocess=as_it_is)
    photos = [picture(i) for i in range(3)]
    for photo, explanation in zip(photos, coupled(photos, ["gradcam", "saliency"], 1), strict=True):
        assert_same(explanation, coupled(photo, ["gradcam", "saliency"], 1))


def test_targets_and_baselines_of_the_callers_own_see_one_photo_at_a_time(
    explainer: explain.Explainer,
) -> None:
    """A function may index the rows of a batch, and a baseline may have a row for each image of
    it."""
    photos = [picture(i) for i in range(3)]

    def first_row_alone(output: Tensor) -> Tensor:
        assert len(output) == 1
        return output[[0], 2]

    for photo, explanation in zip(
        photos, explainer(photos, "saliency", first_row_alone), strict=True
    ):
        assert_same(explanation, explainer(photo, "saliency", first_row_alone))
    explainer.model.seen.clear()
    explainer(photos, IntegratedGradients(steps=2, baseline=torch.zeros(3, 20, 24).double()), 1)
    assert max(explainer.model.seen) == 3  # two steps of one photo, and the photo as it is


def test_an_attribution_has_the_attributions_of_its_images() -> None:
    net = settled(TinyNet()).eval()
    x = torch.rand(4, 3, 12, 10)
    for method in ("gradcam", "integratedgradients", "layercam"):
        layer = ["layer1", "layer2"] if method == "layercam" else None
        batch = explain.attribute(net, x, method, target=[0, 1, 2, 3], layer=layer)
        for i, image in enumerate(batch):
            alone = explain.attribute(net, x[i : i + 1], method, target=i, layer=layer)
            for name in ("values", "score", "target", "logits", "heatmap", "delta"):
                assert_close(getattr(image, name), getattr(alone, name), rtol=1e-4, atol=1e-5)
            assert list(image.maps) == list(alone.maps)
            for name, values in alone.maps.items():
                assert_close(image.maps[name], values, rtol=1e-4, atol=1e-5)
            assert (len(image), image.layer, image.method) == (1, alone.layer, alone.method)
    assert torch.equal(batch[-1].values, batch.values[3:])
    assert torch.equal(batch[1:3].values, batch.values[1:3])
    with pytest.raises(IndexError):
        batch[4]


def test_a_list_of_targets_is_one_for_each_photo(explainer: explain.Explainer) -> None:
    photos = [picture(i) for i in range(3)]
    wanted: list[Any] = [2, None, explain.targets.Difference(0, 1)]
    for targets in ([2, 0, 1], wanted):
        explanations = explainer(photos, "saliency", targets)
        for photo, target, one in zip(photos, targets, explanations, strict=True):
            alone = explainer(photo, "saliency", target)
            assert one.targets == alone.targets
            assert_close(one["saliency"].values, alone["saliency"].values, rtol=1e-5, atol=1e-7)
            assert one.record()["asked"] == alone.record()["asked"]
    both = explainer(photos, "saliency", targets=[2, 0])
    assert [len(one.results) for one in both] == [2, 2, 2]


@pytest.mark.parametrize("count", [2, 4])
def test_targets_are_as_many_as_photos(count: int, explainer: explain.Explainer) -> None:
    photos = [picture(i) for i in range(3)]
    for images in (photos, iter(photos)):
        with pytest.raises(TargetError, match="targets="):
            explainer(images, "saliency", [0] * count)
    with pytest.raises(TargetError, match="targets="):
        explainer(photos[0], "saliency", [0, 1])
