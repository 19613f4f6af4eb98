"""Maps are drawn where the network looked, in pictures, masks, metrics and regions: an object that
class 0 finds lies where it was put, whatever the network does to the photo first."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models.detection.transform import GeneralizedRCNNTransform

import explain
from explain import ExplainError
from tests.hooks.test_tour import example


class Bright(nn.Module):
    """Class 0 is the brightness of cells of 8 x 8 pixels, squared."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.cells = nn.Conv2d(3, 2, 8, 8)
        self.cells.weight.data.fill_(1 / 192)
        self.cells.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.cells(self.change(x))).flatten(2).pow(2).mean(-1)


placement = example("placement")
photo_with: Callable[[tuple[int, int]], Tensor] = placement.photo_with
CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, int]]] = {
    "nothing": (lambda x: x, (32, 40)),
    **placement.CHANGES,
}


def centre(heatmap: Tensor) -> Tensor:
    """The centroid of what is at least 0.6 of the largest value, in pixels."""
    bright = heatmap.double() * (heatmap >= 0.6 * heatmap.max())
    numbers = torch.arange(128, dtype=torch.float64) + 0.5
    rows = (bright.sum(1) * numbers).sum()
    columns = (bright.sum(0) * numbers).sum()
    return torch.stack([rows, columns]) / bright.sum()


METHODS = ["gradcam", "hirescam", "layercam", "scorecam", "ablationcam", "guidedgradcam"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_map_lies_on_the_object_whatever_the_network_does_to_the_photo(name: str) -> None:
    change, place = CHANGES[name]
    model = Bright(change).eval()
    photo = photo_with(place)
    object_centre = torch.tensor(place, dtype=torch.float64) + 8
    maps = explain.attribute(model, photo, METHODS, target=0, placement="cells")
    for method, found in maps.items():
        for drawn in (found.heatmap[0], found.signed[0].clamp(min=0)):
            off = (centre(drawn) - object_centre).abs()
            assert float(off.max()) < 8, method  # a cell


@pytest.mark.parametrize("size", [(96, 128), (128, 96), (64, 200)])
def test_maps_lie_on_the_object_behind_the_frame_of_a_detector(size: tuple[int, int]) -> None:
    """Torchvision's detectors resize the photo, and write it into a frame."""
    transform = GeneralizedRCNNTransform(160, 240, [0.0] * 3, [1.0] * 3).eval()
    model = Bright(lambda x: transform(list(x))[0].tensors).eval()
    photo = torch.zeros(1, 3, *size)
    photo[:, :, 32:48, 24:40] = 1
    found = explain.attribute(model, photo, target=0, layer="cells", placement="cells")
    bright = (found.heatmap[0] >= 0.6 * found.heatmap.max()).nonzero().double()
    off = bright.mean(0) + 0.5 - torch.tensor([40.0, 32.0])
    assert float(off.norm()) < 2


def test_even_placement_draws_as_other_packages_do() -> None:
    model = Bright(lambda x: x.flip(3)).eval()
    found = explain.attribute(model, photo_with((32, 16)), target=0, placement="even")
    assert found.placement is None
    enlarged = F.interpolate(found.values[:, None], (128, 128), mode="bilinear")[:, 0]
    assert_close(found.heatmap, enlarged / enlarged.max())
    with pytest.raises(ExplainError, match="placement"):
        explain.attribute(model, photo_with((32, 16)), target=0, placement="centre")  # type: ignore[call-overload]


def test_places_stay_with_the_map_in_parts_and_pickles() -> None:
    model = Bright(lambda x: x[..., 32:96, 32:96]).eval()
    photos = torch.cat([photo_with((40, 56)), photo_with((64, 40))])
    found = explain.attribute(model, photos, target=0, placement="cells")
    for i, part in enumerate([found[0], found[1]]):
        again = pickle.loads(pickle.dumps(part))
        assert torch.equal(again.heatmap[0], found.heatmap[i])
    assert not found.heatmap[:, :32].any()
    metrics: Any = explain.evaluate(
        model,
        photos,
        {"a": found},
        ["pointinggame"],
        boxes=[[(56, 40, 72, 56)], [(40, 64, 56, 80)]],
    )
    assert metrics["a"]["pointinggame"].tolist() == [1, 1]


def test_a_region_of_the_photo_is_ablated_where_the_layer_looks_at_it() -> None:
    """Without the cells that look at the object, the score is gone; without others, it stays."""
    for name in ("a centre crop", "a mirror", "transposing", "exchanged halves"):
        change, (row, column) = CHANGES[name]
        model = Bright(change).eval()
        photo = photo_with((row, column))
        score = model(photo)[0, 0].item()
        on_object = (column, row, column + 16, row + 16)
        for region, left in ((on_object, 0.0), ((column + 16, row, column + 24, row + 8), score)):
            with explain.hooks.intervene(model, [explain.hooks.Ablate("cells", region=region)]):
                assert model(photo)[0, 0].item() == pytest.approx(left, abs=1e-6), name


def test_maps_of_several_layers_are_fused_where_their_cells_look() -> None:
    """The finer of two layers sees a mirror image of what the coarser one sees."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine = Bright(lambda x: x)
            self.fine.cells = nn.Conv2d(3, 2, 4, 4)
            self.coarse = Bright(lambda x: x.flip(3))
            for part in (self.fine, self.coarse):
                part.cells.weight.data.fill_(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.fine(x) + self.coarse(x)

    model = Two().eval()
    photo = photo_with((32, 16))
    layers = ["coarse.cells", "fine.cells"]
    for fuse in ("sum", "mean", "product"):
        found = explain.attribute(
            model, photo, target=0, layer=layers, fuse=fuse, placement="cells"
        )
        side = 128 if fuse == "sum" else 32  # what lies apart is added by pixels
        assert found.values.shape == (1, side, side)
        assert float((centre(found.heatmap[0]) - torch.tensor([40.0, 24.0])).abs().max()) < 4, fuse


def test_concepts_lie_where_their_cells_look() -> None:
    from explain.attribution.concepts import find_concepts

    model = Bright(lambda x: x.flip(3)).eval()
    photo = photo_with((32, 16)) + 0.01 * torch.rand(1, 3, 128, 128)
    concepts = find_concepts(model, photo, count=1, layer="cells")
    assert float((centre(concepts.heatmaps[0, 0]) - torch.tensor([40.0, 24.0])).abs().max()) < 8
