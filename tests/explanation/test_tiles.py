"""Photos that a preprocessing makes tiles, patches or frames of: their maps lie where the tiles lie
in the photo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.testing import assert_close

import explain
from explain import ImageError
from explain.attribution.result import Attribution
from explain.data.boxes import Box
from explain.explanation.tiles import tiles_on_photo
from tests.conftest import settled

SIDE = 24


class Bag(nn.Module):
    """Attention over the patches of a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 2)
        self.weight = nn.Linear(8, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.conv(x.flatten(0, 1)).relu().mean((2, 3)).unflatten(0, x.shape[:2])
        return self.head((self.weight(features).softmax(1) * features).sum(1))


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image.convert("RGB")).copy()).movedim(2, 0).float() / 255


def cut(x: torch.Tensor) -> torch.Tensor:
    """The patches ``(6, 3, SIDE, SIDE)`` of 2 rows and 3 columns."""
    return torch.stack(
        [x[:, i : i + SIDE, j : j + SIDE] for i in (0, SIDE) for j in (0, SIDE, 2 * SIDE)]
    )


def photo() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (2 * SIDE, 3 * SIDE, 3), np.uint8)
    return Image.fromarray(noise)


def bag() -> Bag:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Bag().eval()


def test_values_of_patches_are_those_of_the_photo(tmp_path: Path) -> None:
    model = bag()
    explainer = explain.Explainer(
        model, preprocess=lambda image: cut(pixels(image)), layout="NTCHW"
    )
    explanation = explainer(photo(), ["inputxgradient", "gradcam(relu=False)"], target=1)
    x = pixels(photo()).requires_grad_()
    (gradient,) = torch.autograd.grad(model(cut(x)[None])[0, 1], x)
    assert_close(explanation["inputxgradient"].values[0], gradient * x.detach())
    kept: list[torch.Tensor] = []
    handle = model.conv.register_forward_hook(lambda module, args, output: kept.append(output))
    score = model(cut(x)[None])[0, 1]
    handle.remove()
    (of_maps,) = torch.autograd.grad(score, kept[0])
    maps = (of_maps.mean((2, 3), keepdim=True) * kept[0]).sum(1).detach()
    large = nn.functional.interpolate(maps[:, None], (SIDE, SIDE), mode="bilinear")[:, 0]
    rows = [torch.cat([*large[i : i + 3]], 1) for i in (0, 3)]
    assert_close(explanation["gradcam"].values[0], torch.cat(rows))
    assert explanation.overlay("gradcam").size == photo().size
    assert len(explanation.crops) == 6
    paths = explanation.save(tmp_path)
    saved = explain.load(next(path for path in paths if path.name.endswith("gradcam.json")))
    assert_close(saved.values, explanation["gradcam"].values[0])
    several = explainer([photo(), photo()], "inputxgradient", target=1)
    for explanation_of_one in several:
        assert torch.equal(explanation_of_one.values, explanation["inputxgradient"].values[0])


def test_a_photo_is_a_film_that_stands_still_where_a_model_takes_frames() -> None:
    model = bag()
    one = explain.Explainer(model, preprocess=pixels, layout="NTCHW")
    assert one.as_input(photo()).shape == (1, 1, 3, 2 * SIDE, 3 * SIDE)
    model.config = type("Config", (), {"model_type": "tiny", "num_frames": 4})()
    four = explain.Explainer(model, preprocess=pixels, layout="NTCHW")
    assert four.as_input(photo()).shape == (1, 4, 3, 2 * SIDE, 3 * SIDE)
    x = pixels(photo()).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x.expand(1, 4, -1, -1, -1))[0, 1], x)
    assert_close(four(photo(), "inputxgradient", target=1).values, gradient * x.detach())


def test_tiles_of_other_sizes_add_up_and_those_beyond_the_photo_are_cut() -> None:
    values = torch.zeros(1, 2, 3, 4, 4)  # tiles before channels
    values[0, 0] = 1.0
    values[0, 1] = 2.0
    tiles = Attribution("m", values, "score", torch.ones(1), None, (2, 4, 4), frames_first=True)
    # the whole photo, and a finer one whose upper half is padding
    boxes = [Box(0, 0, 8, 8), Box(4, -2, 8, 2)]
    values_on_photo = tiles_on_photo(tiles, boxes, (8, 8)).values
    expected = torch.full((1, 3, 8, 8), 1 / 4)  # a value of the whole is shared by four places
    expected[:, :, :2, 4:] += 2
    assert_close(values_on_photo, expected)
    layers = Attribution("m", values[:, :, 0], "score", torch.ones(1), "a", (2, 4, 4))
    means = torch.ones(1, 8, 8)
    means[:, :2, 4:] = 1.5
    assert_close(tiles_on_photo(layers, boxes, (8, 8)).values, means)


def test_runs_and_concepts_of_tiles_are_refused(tmp_path: Path) -> None:
    explainer = explain.Explainer(
        bag(), preprocess=lambda image: cut(pixels(image)), layout="NTCHW"
    )
    with pytest.raises(explain.ExplainError, match="run"):
        explain.run([photo()], explainer, "gradcam", output=tmp_path / "run.sqlite", workers=0)
    with pytest.raises(explain.ExplainError, match="concepts"):
        explainer.concepts(photo())
    with pytest.raises(explain.ExplainError, match="layout"):
        explain.Explainer(bag(), layout="NHWC")  # type: ignore[arg-type]


class Volumetric(nn.Module):
    """A network of volumes ``(N, 1, D, H, W)``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).relu().mean((2, 3, 4)))


@pytest.mark.parametrize(("slices", "numbers"), [("", range(5)), (" slices 1:4", range(1, 4))])
def test_a_volume_is_explained_as_a_stack_of_its_slices(
    slices: str, numbers: range, tmp_path: Path
) -> None:
    volume = np.random.default_rng(0).integers(-1000, 3000, (5, SIDE, SIDE)).astype(np.int16)
    np.save(tmp_path / "scan.npy", volume)
    model = settled(Volumetric()).eval()
    explainer = explain.Explainer(model, size=SIDE, crop=1, mean=0.5, std=0.25, window=(1000, 4000))
    explanation = explainer(f"{tmp_path}/scan.npy{slices}", "inputxgradient", target=1)
    greys = np.round((volume[list(numbers)] + 1000.0) / 4000 * 255).clip(0, 255) / 255
    x = torch.from_numpy((greys - 0.5) / 0.25)[None, None].requires_grad_()
    (gradient,) = torch.autograd.grad(settled(Volumetric()).double()(x)[0, 1], x)
    expected = (gradient * x).detach()[0, 0]
    values = explanation["inputxgradient"].values[0, 0]
    assert len(explanation.crops) == len(numbers)
    for box, of_slice in zip(explanation.crops, expected, strict=True):
        top = round(box.top)
        left = round(box.left)
        laid = values[top : top + SIDE, left : left + SIDE]
        assert_close(laid.double(), of_slice, rtol=1e-4, atol=1e-7)
    assert_close(values.double().sum(), expected.sum(), rtol=1e-4, atol=1e-7)
    record = next(path for path in explanation.save(tmp_path / "out") if path.suffix == ".json")
    assert_close(explain.load(record).repeat(explainer).values, explain.load(record).values)
    with pytest.raises(ImageError, match="one slice"):
        explain.Explainer("tiny")(f"{tmp_path}/scan.npy{slices}")
