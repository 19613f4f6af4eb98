"""From values and places to pixels, against interpolation pixel by pixel, and the places of cells
in networks."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.interpolate import CubicHermiteSpline
from torch import Tensor, nn
from torch.testing import assert_close

from explain import ExplainWarning
from explain.data.inputs import as_inputs
from explain.layers.grids import NetworkGrids
from explain.layers.placement import Placement, draw, transferred
from tests.networks import Before

ROWS = [2.0, 5.0, 11.0]
COLUMNS = [1.0, 4.5, 8.0, 9.0]
SIZE = (12, 10)


def placed(rows: list[float], columns: list[float], seen: Tensor | None = None) -> Placement:
    axes = torch.tensor(rows), torch.tensor(columns)
    return Placement(SIZE, torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)[None], seen)


def curve(places: list[float], values: np.ndarray, length: int) -> np.ndarray:
    """A cubic spline of scipy through values, whose slope at each is that between its neighbours,
    at the middles of pixels; constant beyond the ends."""
    slopes = np.zeros(len(places))
    for i in range(1, len(places) - 1):
        slopes[i] = (values[i + 1] - values[i - 1]) / (places[i + 1] - places[i - 1])
    pixels = np.clip(np.arange(length) + 0.5, places[0], places[-1])
    return CubicHermiteSpline(places, values, slopes)(pixels)


def interpolated(maps: Tensor, rows: list[float], columns: list[float]) -> Tensor:
    """Each map along its columns, and then along its rows; what is above zero and below apart."""
    drawn = []
    for map_of_image in maps.numpy():
        parts = []
        for part in (np.maximum(map_of_image, 0), np.maximum(-map_of_image, 0)):
            wide = np.stack([curve(columns, line, SIZE[1]) for line in part])
            parts.append(np.stack([curve(rows, line, SIZE[0]) for line in wide.T]).T)
        drawn.append(np.maximum(parts[0], 0) - np.maximum(parts[1], 0))
    return torch.from_numpy(np.stack(drawn))


MAPS = torch.rand(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.4


def test_a_peak_lies_between_two_cells_that_are_alike() -> None:
    line = torch.tensor([0.0, 1, 1, 0], dtype=torch.float64).expand(1, 1, 3, 4)
    drawn = draw(line, SIZE, placed(ROWS, [1.5, 3.5, 5.5, 7.5]))[0, 0]
    assert drawn.argmax(1).eq(4).all()
    assert float(drawn.min()) == 0


def test_values_follow_cubics_through_cells_and_are_constant_beyond() -> None:
    drawn = draw(MAPS[:, None], SIZE, placed(ROWS, COLUMNS))
    assert_close(drawn[:, 0], interpolated(MAPS, ROWS, COLUMNS))


def test_cells_in_another_order_are_drawn_where_they_look() -> None:
    expected = interpolated(MAPS, ROWS, COLUMNS)
    mirrored = placed(ROWS, COLUMNS[::-1])
    assert_close(draw(MAPS.flip(2)[:, None], SIZE, mirrored)[:, 0], expected)
    order = [2, 0, 1]
    rolled = placed([ROWS[i] for i in order], COLUMNS)
    assert_close(draw(MAPS[:, order][:, None], SIZE, rolled)[:, 0], expected)
    turned = Placement(SIZE, placed(ROWS, COLUMNS).centres.transpose(1, 2))
    assert_close(draw(MAPS.mT[:, None], SIZE, turned)[:, 0], expected)


def test_even_cells_and_maps_with_others_are_spread_evenly() -> None:
    expected = F.interpolate(MAPS[:, None], SIZE, mode="bilinear")
    rows = [(i + 0.5) * 4 for i in range(3)]
    columns = [(i + 0.5) * 2.5 for i in range(4)]
    assert torch.equal(draw(MAPS[:, None], SIZE, placed(rows, columns)), expected)
    assert torch.equal(draw(MAPS[:, None], SIZE), expected)
    assert torch.equal(draw(MAPS[:, None], SIZE, placed(ROWS, COLUMNS[:2])), expected)


def test_cells_that_look_nowhere_are_not_drawn_and_pixels_not_seen_are_zero() -> None:
    seen = torch.zeros(SIZE, dtype=torch.bool)
    seen[:, 3:] = True
    nowhere = placed(ROWS, [torch.nan, *COLUMNS[1:]], seen)
    drawn = draw(MAPS[:, None], SIZE, nowhere)[:, 0]
    expected = interpolated(MAPS[:, :, 1:], ROWS, COLUMNS[1:])
    assert_close(drawn[:, :, 3:], expected[:, :, 3:])
    assert not drawn[:, :, :3].any()


def test_cells_on_no_grid_give_their_values_to_the_pixels_near_them() -> None:
    generator = torch.Generator().manual_seed(3)
    centres = torch.rand(1, 3, 4, 2, generator=generator) * torch.tensor(SIZE)
    drawn = draw(MAPS[:, None], SIZE, Placement(SIZE, centres))[:, 0]
    assert drawn.shape == (2, *SIZE)
    least, most = MAPS.flatten(1).aminmax(dim=1)
    assert bool((drawn.flatten(1) >= least[:, None] - 1e-9).all())
    assert bool((drawn.flatten(1) <= most[:, None] + 1e-9).all())
    assert_close(
        draw(torch.ones(1, 1, 3, 4), SIZE, Placement(SIZE, centres)), torch.ones(1, 1, *SIZE)
    )
    for row, column in centres[0].flatten(0, 1).tolist():
        alone = (centres[0].flatten(0, 1) == torch.tensor([row, column])).all(1)
        one = alone.reshape(1, 1, 3, 4).double()
        spot = draw(one, SIZE, Placement(SIZE, centres))[0, 0]
        y, x = divmod(int(spot.argmax()), SIZE[1])
        assert abs(y + 0.5 - row) < 2.5
        assert abs(x + 0.5 - column) < 2.5


def test_each_image_may_have_places_of_its_own() -> None:
    both = Placement(SIZE, torch.cat([placed(ROWS, c).centres for c in (COLUMNS, COLUMNS[::-1])]))
    drawn = draw(MAPS[:, None], SIZE, both)[:, 0]
    assert_close(drawn[0], interpolated(MAPS[:1], ROWS, COLUMNS)[0])
    assert_close(drawn[1], interpolated(MAPS[1:].flip(2), ROWS, COLUMNS)[0])
    assert_close(both[1].centres, placed(ROWS, COLUMNS[::-1]).centres)
    again = pickle.loads(pickle.dumps(both))
    assert torch.equal(draw(MAPS[:, None], SIZE, again)[:, 0], drawn)


def test_a_map_is_brought_to_the_cells_of_another_by_where_both_look() -> None:
    """Rows and columns of pixels, on cells that read them."""
    rows, columns = (torch.arange(length) + 0.5 for length in SIZE)
    of_pixels = placed(rows.tolist(), columns.tolist())
    ramp = rows[:, None].expand(SIZE)[None, None]
    other = placed(ROWS, COLUMNS)
    brought = transferred(ramp, of_pixels, other, (3, 4))
    assert_close(brought[0, 0], torch.tensor(ROWS)[:, None].expand(3, 4))


def of_layer(model: nn.Module, x: Tensor, layer: str = "net") -> Placement | None:
    return NetworkGrids(model, as_inputs(x)).placement(layer)


X = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_pixels_outside_of_a_crop_are_not_seen() -> None:
    inside = torch.zeros(32, 32, dtype=torch.bool)
    inside[8:24, 4:28] = True
    assert torch.equal(of_layer(Before(lambda x: x[..., 8:24, 4:28]), X).seen, inside)
    assert of_layer(Before(lambda x: x), X).seen is None
    remainder = torch.zeros(32, 30, dtype=torch.bool)
    remainder[:, :28] = True  # patches of 4 pixels leave 2 over
    assert torch.equal(of_layer(Before(lambda x: x), X[..., :30]).seen, remainder)


def test_a_crop_that_the_photo_chooses_is_that_of_each_photo() -> None:
    def brightest(x: Tensor) -> Tensor:
        """Eight columns from where the photo is brightest."""
        start = 4 * x.mean((1, 2)).unflatten(1, (8, 4)).mean(2)[:, :7].argmax(1)
        columns = start[:, None] + torch.arange(8)
        return x.gather(3, columns[:, None, None].expand(-1, 3, 32, -1))

    x = torch.zeros(2, 3, 32, 32)
    x[0, ..., 8:12] = 1
    x[1, ..., 20:24] = 1
    model = Before(brightest)
    for photos, starts in ((x, (8, 20)), (x.flip(0), (20, 8))):
        centres = of_layer(model, photos).centres
        for centre, start in zip(centres, starts, strict=True):
            assert_close(centre[0, :, 1], torch.tensor([start + 2.0, start + 6.0]))


def test_places_follow_weights_that_change() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 5, 2, 2), nn.ReLU(), nn.Conv2d(2, 2, 3, 1, 1))
    first = of_layer(model, X, "2")
    assert of_layer(model, X, "2") is first
    with torch.no_grad():
        model[0].weight[..., 1:] = 0  # it looks at the left column of its window alone
    moved = of_layer(model, X, "2")
    assert float((first.centres - moved.centres)[0, 4, 8, 1]) > 1.5
    assert_close(moved.centres, of_layer(copy.deepcopy(model), X, "2").centres)


def test_an_image_has_its_place_whatever_others_are_with_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 2, 5, 2, 2))
    images = X[..., :15, :13]  # random numbers are drawn by 16
    alone, both = (of_layer(copy.deepcopy(model), x, "2") for x in (images[:1], images))
    assert torch.equal(alone.centres, both.centres)


def test_a_mean_of_the_photo_and_its_mirror_image_is_not_drawn_in_the_middle() -> None:
    model = Before(lambda x: (x + x.flip(3)) / 2)
    with pytest.warns(ExplainWarning, match="add"):
        assert of_layer(model, X) is None
    assert of_layer(model, X) is None  # said once


def test_an_operation_without_a_rule_is_named_once() -> None:
    model = Before(lambda x: torch.fft.ifft2(torch.fft.fft2(x)).real)
    with pytest.warns(ExplainWarning, match="fft") as said:
        assert of_layer(model, X) is None
    assert len(said) == 1
    assert of_layer(model, X) is None
    assert NetworkGrids(model, as_inputs(X), "even").placement("net") is None
