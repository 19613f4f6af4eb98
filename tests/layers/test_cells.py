"""Where cells look, against their squared gradients in the pixels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.testing import assert_close

from explain import LayerError
from explain.data.inputs import as_inputs
from explain.layers import cell_centres
from explain.layers.grids import NetworkGrids
from tests.networks import Before


def centroids(
    model: nn.Module,
    x: Tensor,
    layer: str,
    *,
    of_sums: bool = False,
    within: slice = slice(None),
) -> Tensor:
    """The centre of the squared gradient of each cell in the pixels ``(h, w, 2)``; ``of_sums``, of
    the sum over its channels; of the cells ``within`` these rows and columns alone."""
    kept = {}
    handle = model.get_submodule(layer).register_forward_hook(
        lambda module, args, output: kept.update(output=output)
    )
    image = x.clone().requires_grad_()
    model(image)
    handle.remove()
    cells = kept["output"].sum(1, keepdim=True) if of_sums else kept["output"]
    cells = cells[..., within, within]
    rows, columns = (torch.arange(n, dtype=x.dtype) + 0.5 for n in x.shape[2:])
    centres = torch.full((*cells.shape[2:], 2), torch.nan, dtype=x.dtype)
    for i in range(cells.shape[2]):
        for j in range(cells.shape[3]):
            squares = 0
            for channel in range(cells.shape[1]):
                (gradient,) = torch.autograd.grad(cells[0, channel, i, j], image, retain_graph=True)
                squares = squares + gradient.square().sum((0, 1))
            centres[i, j, 0] = (squares.sum(1) * rows).sum() / squares.sum()
            centres[i, j, 1] = (squares.sum(0) * columns).sum() / squares.sum()
    return centres


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()),
    )


def warped(x: Tensor) -> Tensor:
    theta = torch.tensor([[[0.5, 0, 0.25], [0, 0.5, -0.25]]], dtype=x.dtype)
    grid = F.affine_grid(theta.expand(len(x), -1, -1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


CHANGES = {
    "nothing": lambda x: x,
    "centre crop": lambda x: x[..., 8:24, 8:24],
    "padded": lambda x: F.pad(x, (0, 8, 0, 8)),
    "mirrored": lambda x: x.flip(3),
    "transposed": lambda x: x.transpose(2, 3),
    "rolled": lambda x: x.roll((8, 8), (2, 3)),
    "turned": lambda x: torch.rot90(x, 1, (2, 3)),
    "halves exchanged": lambda x: torch.cat([x[..., 16:], x[..., :16]], 3),
    "half size": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "sampled": warped,
    "written in place": lambda x: x.clone().index_copy_(3, torch.arange(16), x[..., 16:]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_cells_look_where_a_change_of_the_photo_has_moved_their_pixels(name: str) -> None:
    torch.manual_seed(0)
    model = Before(CHANGES[name]).double().eval()
    x = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    centres = cell_centres(model, x, "net")
    expected = centroids(model, x, "net")
    looks_somewhere = ~expected.isnan()
    assert torch.equal(~centres.isnan(), looks_somewhere)
    # the weights within a window are taken over all channels together, as the gradients are
    off = (centres - expected)[looks_somewhere].abs()
    assert float(off.max()) < 0.75


def test_cells_of_strided_convolutions_look_beside_their_share() -> None:
    torch.manual_seed(0)
    model = convolutions().double().eval()
    x = torch.rand(1, 3, 48, 40, dtype=torch.float64)
    centres = cell_centres(model, x, "5")
    expected = centroids(model, x, "5")
    height, width = centres.shape[:2]
    rows = (torch.arange(height) + 0.5) * 48 / height
    columns = (torch.arange(width) + 0.5) * 40 / width
    even = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)
    off = float((centres - expected).abs().nanmean())
    off_evenly = float((even - expected).abs().nanmean())
    assert off < 0.7
    assert off < off_evenly / 3


class Padded(nn.Module):
    """A convolution behind a padding of its own, as TensorFlow's networks have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(8, 8, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.pad(x, (0, 1, 0, 1)))


STACKS: dict[str, Callable[[], nn.Sequential]] = {
    "strided": convolutions,
    "padded": lambda: nn.Sequential(*convolutions()[:3], Padded()),
    "groups": lambda: nn.Sequential(
        *convolutions()[:3], nn.Conv2d(8, 8, 5, 2, 2, groups=8), nn.Conv2d(8, 12, 3, 1, 2, 2)
    ),
    "pooled": lambda: nn.Sequential(
        *convolutions()[:3], nn.AvgPool2d(3, 2, 1, ceil_mode=True), nn.Conv2d(8, 4, 3, 1, 1)
    ),
    "enlarged": lambda: nn.Sequential(
        *convolutions(), nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.Conv2d(4, 4, 3, 1, 1)
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_cells_are_drawn_where_they_would_look_in_a_larger_photo(name: str) -> None:
    """So that an object that is moved by a stride moves the map by a cell, at the border too."""
    torch.manual_seed(0)
    model = STACKS[name]().double().eval()
    x = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    layer = str(len(model) - 1)
    placement = NetworkGrids(model, as_inputs(x)).placement(layer)
    assert placement is not None
    rows = placement.centres[0, :, 0, 0]
    beside = round(64 / float(rows[3] - rows[1]))  # cells that look beside, in a larger photo
    around = F.pad(x, (32, 32, 32, 32), mode="circular")
    middle = slice(beside, beside + len(rows))
    expected = centroids(model, around, layer, within=middle) - 32
    off = (placement.centres[0] - expected).abs()
    cell = 32 / beside
    assert float(off.max()) < cell
    assert float(off.mean()) < 0.25 * cell
    if name != "enlarged":  # where neighbours have different windows
        assert_close(rows.diff(), torch.full_like(rows[1:], cell), atol=1e-4, rtol=0)


def test_channels_that_say_nothing_have_no_part_in_where_cells_look() -> None:
    """A channel that is always zero has a variance of nearly zero, as in trained networks."""
    torch.manual_seed(0)
    model = convolutions().double().eval()
    with torch.no_grad():
        model[0].weight[:4] *= 1e-9
        model[0].weight[4:, :, :, 1:] *= 0.1  # the others look to the left
        model[1].running_var[:4] = 1e-12
        model[1].eps = 1e-12
    x = torch.rand(1, 3, 48, 40, dtype=torch.float64)
    off = (cell_centres(model, x, "5") - centroids(model, x, "5")).abs()
    assert float(off.mean()) < 0.5


class Gated(nn.Module):
    """A wide window, nearly closed by a gate, beside a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.wide = nn.Conv2d(8, 8, 7, 1, 3)
        self.gate = nn.Conv2d(8, 8, 1)
        nn.init.constant_(self.gate.bias, -4)
        self.sum = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        gate = self.gate(x.mean((2, 3), keepdim=True)).sigmoid()
        return self.sum(x + 4 * self.wide(x) * gate)


def test_what_a_gate_lets_pass_counts_by_its_value() -> None:
    torch.manual_seed(0)
    model = Gated().double().eval()
    x = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    expected = centroids(model, x, "sum")
    assert float((cell_centres(model, x, "sum") - expected).abs().mean()) < 0.6
    with torch.no_grad():
        model.gate.bias.fill_(4)  # open: cells at the border look further inwards
    is_open = centroids(model, x, "sum")
    assert float((is_open - expected).abs().max()) > 2
    assert float((cell_centres(model, x, "sum") - is_open).abs().mean()) < 0.6


def test_channels_that_look_to_both_sides_are_one_map() -> None:
    """Of a depthwise convolution that is wide beside the photo."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(4, 4, 7, 1, 3, groups=4), nn.Conv2d(4, 4, 1)
    model = nn.Sequential(nn.Conv2d(3, 4, 8, 8), *convolutions).double().eval()
    with torch.no_grad():
        model[1].weight[0, :, :, :-1] = 0
        model[1].weight[1, :, :, 1:] = 0
        model[1].weight[2:, :, :, :2] = 0
        model[1].weight[2:, :, :, -2:] = 0
    x = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    off = (cell_centres(model, x, "2") - centroids(model, x, "2")).abs()
    assert float(off.mean()) < 1
    assert NetworkGrids(model, as_inputs(x)).placement("2") is not None


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_cells_of_networks_look_where_their_squared_gradient_is(name: str) -> None:
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None).eval()
    layer = "layer4" if name == "resnet18" else "features"
    x = torch.rand(1, 3, 160, 160)
    expected = centroids(model, x, layer, of_sums=True)
    places = (torch.arange(len(expected)) + 0.5) * 160 / len(expected)
    even = torch.stack(torch.meshgrid(places, places, indexing="ij"), -1)
    off = (cell_centres(model, x, layer) - expected).abs().mean()
    assert float(off) < float((even - expected).abs().mean()) / 3


def test_layers_without_a_map_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 2))
    with pytest.raises(LayerError, match="map"):
        cell_centres(model, torch.rand(1, 3, 8, 8), "2")
