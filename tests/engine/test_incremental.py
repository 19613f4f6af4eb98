"""Incremental inference equals the whole pass, whatever the network does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import explain
from explain.baselines import OtherPhoto
from explain.engine.incremental import IncrementalInference
from explain.engine.incremental_maps import BoxMaps, PhotoPass, changed_box
from explain.methods import Occlusion

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
MAXIMA = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVERAGES = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
NORMALISATIONS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class Residual(nn.Module):
    """Two ways that meet, by addition or concatenation."""

    def __init__(self, way: nn.Module, joined: bool, inplace: bool) -> None:
        super().__init__()
        self.way = way
        self.joined = joined
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        y = self.way(x)
        if self.joined:
            return torch.cat([y, x], 1).chunk(2, dim=1)[0]
        if self.inplace:
            y += x
            return y
        return x + y


class Gate(nn.Module):
    """Squeeze and excitation: the gate of each row is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean(list(range(2, x.ndim)), keepdim=True).sigmoid()


class Overwrite(nn.Module):
    """An operation in place that needs the whole map, and goes on with the tensor that it was
    given."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0.5
        return x.clamp_(max=2)


class Pad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, [1, 2] * (x.ndim - 2), value=0.3)


def random_layer(draw: random.Random, dims: int, channels: int) -> nn.Module:
    def convolution() -> nn.Module:
        return CONVOLUTIONS[dims](channels, channels, 3, padding=1)

    choices: list[Callable[[], nn.Module]] = [
        lambda: nn.ReLU(inplace=draw.random() < 0.5),
        lambda: nn.PReLU(channels),
        lambda: NORMALISATIONS[dims](channels),
        lambda: MAXIMA[dims](3, draw.choice([1, 2]), 1, ceil_mode=draw.random() < 0.3),
        lambda: AVERAGES[dims](2, 1, draw.choice([0, 1]), count_include_pad=draw.random() < 0.5),
        lambda: Residual(convolution(), joined=draw.random() < 0.4, inplace=draw.random() < 0.5),
        lambda: nn.GroupNorm(2, channels),
        lambda: nn.Upsample(scale_factor=2),
        nn.Hardswish,
        nn.GELU,
        nn.Dropout,
        Gate,
        Overwrite,
        Pad,
    ]
    return draw.choice(choices)()


def random_network(seed: int, sides: Sequence[int]) -> nn.Module:
    """A network of random layers that ends in a linear layer."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    dims = len(sides)
    layers = list[nn.Module]()
    channels = 3
    for _ in range(draw.randint(2, 5)):
        kernel = draw.choice([1, 2, 3])
        stride = draw.choice([1, 1, 2, 3])
        wide = draw.choice([4, 8])
        padding: Any = (
            "same" if stride == 1 and kernel != 2 and draw.random() < 0.3 else draw.choice([0, 1])
        )
        more = {
            "stride": stride,
            "padding": padding,
            "dilation": draw.choice([1, 1, 2]),
            "groups": channels if wide % channels == 0 and draw.random() < 0.5 else 1,
            "padding_mode": draw.choice(["zeros", "zeros", "zeros", "reflect", "circular"]),
        }
        layers.append(CONVOLUTIONS[dims](channels, wide, kernel, **more))
        channels = wide
        layers += [random_layer(draw, dims, channels) for _ in range(draw.randint(1, 3))]
    network = nn.Sequential()
    shape = torch.zeros(1, 3, *sides)
    for layer in layers:  # those that the feature maps are large enough for
        try:
            made = layer.eval()(shape.clone())
        except RuntimeError:
            continue
        if max(made.shape[2:]) < 60:
            network.append(layer)
            shape = made.detach()
    network = network.append(nn.Flatten()).append(nn.Linear(shape.numel(), 5)).double().eval()
    for each in network.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            each.running_mean.normal_()  # type: ignore[union-attr]
    return network


@pytest.mark.parametrize("seed", [*range(20), 34])
def test_random_networks_give_what_a_whole_pass_gives(seed: int) -> None:
    draw = random.Random(seed)
    dims = (2, 2, 2, 1, 3)[seed % 5]
    sides = [draw.randint(15, 30) for _ in range(dims)]
    x = torch.rand(2, 3, *sides, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    owners = torch.tensor([0, 1, 1, 0, 0])
    perturbed = x[owners]
    for row in range(4):  # the last one is not perturbed
        where = tuple(
            slice(start := draw.randint(0, side - 1), start + draw.randint(1, 4)) for side in sides
        )
        perturbed[(row, slice(None), *where)] = draw.random()
    model = random_network(seed, sides)
    for dtype, off in ((torch.double, 1e-12), (torch.float, 1e-5)):
        model = model.to(dtype)
        x = x.to(dtype)
        perturbed = perturbed.to(dtype)
        with torch.no_grad():
            expected = model(perturbed.clone())
            results: list[Any] = []
            for _ in range(2):  # the second time with the results of the first
                box = changed_box(x, owners, perturbed)
                assert box is not None
                found = model(BoxMaps(box, PhotoPass(results)))
                torch.testing.assert_close(
                    found, expected, rtol=off, atol=off * float(expected.abs().max())
                )


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_it_is_used_where_a_trial_finds_it_faster(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_network(1, (26, 26))
    x = torch.rand(1, 3, 26, 26, dtype=torch.double)
    now = [0.0]
    passes = [0]

    def forward(module: nn.Module, args: tuple[Tensor]) -> None:
        is_incremental = isinstance(args[0], BoxMaps)
        passes[0] += is_incremental
        now[0] += len(args[0]) * (factor if is_incremental else 1.0)

    monkeypatch.setattr("explain.engine.incremental.time.perf_counter", lambda: now[0])
    handle = model.register_forward_pre_hook(forward)
    method = Occlusion(window=4, stride=2)
    values = explain.attribute(model, x, method, target=1, batch_size=8).values
    handle.remove()
    assert passes[0] == (2 + 18 if factor < 1 else 2)  # in the trial, and of 144 rows by eight
    monkeypatch.setattr(IncrementalInference, "faster_call", lambda *_: None)
    without_it = explain.attribute(model, x, method, target=1, batch_size=8).values
    torch.testing.assert_close(values, without_it, rtol=1e-10, atol=1e-12)


class Overwrites(nn.Module):
    """A network in which a pass with placeholders goes wrong, as ``way`` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 3)
        self.register_buffer("mean", torch.full((3, 1, 1), 0.45, dtype=torch.double))
        self.way = way
        self.most = torch.inf
        self.alone = 0

    def forward(self, x: Tensor) -> Tensor:
        self.alone += len(x) == 1
        if self.way == "another type":
            x = x.clone()
            x -= self.mean
        h = self.first(x)
        y = h.detach() if self.way == "an alias" else F.dropout(h, training=self.training)
        y.clamp_(max=self.most)
        if 0 in h.stride() and self.way == "a raised error":
            raise ValueError("no memory")
        return self.head(F.relu(self.second(F.relu(h + y))).mean((2, 3)))


@pytest.mark.parametrize("way", ["an alias", "the same tensor", "another type", "a raised error"])
def test_occlusion_is_that_of_whole_passes_where_placeholders_go_wrong(way: str) -> None:
    torch.manual_seed(0)
    model = Overwrites(way).eval()
    dtype = torch.float if way == "another type" else torch.double
    for part in (model.first, model.second, model.head):
        part.to(dtype)
    x, other = torch.rand(2, 1, 3, 64, 64, dtype=dtype)
    other[:, :, 32:] *= 4
    with torch.no_grad():
        # the photo itself is not clipped, and later rows are
        model.most = 1.01 * float(model.first(x).max())
        rows = [x.clone() for _ in range(64)]
        for i, row in enumerate(rows):
            place = (..., slice(i // 8 * 8, i // 8 * 8 + 8), slice(i % 8 * 8, i % 8 * 8 + 8))
            row[place] = other[place]
        drops = model(x)[0, 1] - torch.stack([model(row)[0, 1] for row in rows]).view(8, 8)
    model.alone = 0
    found = explain.attribute(model, x, Occlusion(8, 8, OtherPhoto(other)), target=1).values[
        0, 4::8, 4::8
    ]
    assert model.alone < 8  # rows are run in batches
    off = 1e-5 if dtype == torch.float else 1e-10
    torch.testing.assert_close(found, drops, rtol=off, atol=off)
