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
from explain.engine.incremental_maps import BoxMaps, ImagePass, changed_box
from explain.methods import Occlusion
from tests.conftest import Made, settled


def layer(kind: str, dims: int) -> Any:
    return getattr(nn, f"{kind}{dims}d")


def joined(net: Any, x: Tensor) -> Tensor:
    return torch.cat([net.way(x), x], 1).chunk(2, dim=1)[0]


def added_in_place(net: Any, x: Tensor) -> Tensor:
    y = net.way(x)
    y += x
    return y


def gate(net: Any, x: Tensor) -> Tensor:
    """Squeeze and excitation: the gate of each row is its own."""
    return x * x.mean(list(range(2, x.ndim)), keepdim=True).sigmoid()


def overwrite(net: Any, x: Tensor) -> Tensor:
    """An operation in place that needs the whole map, and goes on with the tensor that it was
    given."""
    x[:, 0] = 0.5
    return x.clamp_(max=2)


def pad(net: Any, x: Tensor) -> Tensor:
    return F.pad(x, [1, 2] * (x.ndim - 2), value=0.3)


def random_layer(draw: random.Random, dims: int, channels: int) -> nn.Module:
    way = layer("Conv", dims)(channels, channels, 3, padding=1)
    choices: list[Callable[[], nn.Module]] = [
        lambda: nn.ReLU(inplace=draw.random() < 0.5),
        lambda: nn.PReLU(channels),
        lambda: layer("BatchNorm", dims)(channels),
        lambda: layer("MaxPool", dims)(3, draw.choice([1, 2]), 1, ceil_mode=draw.random() < 0.3),
        lambda: layer("AvgPool", dims)(2, 1, draw.choice([0, 1]), False, draw.random() < 0.5),
        lambda: Made(draw.choice([joined, added_in_place, lambda net, x: x + net.way(x)]), way=way),
        lambda: nn.GroupNorm(2, channels),
        lambda: nn.Upsample(scale_factor=2),
        nn.Hardswish,
        nn.GELU,
        nn.Dropout,
        *(lambda function=function: Made(function) for function in (gate, overwrite, pad)),
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
        wide = draw.choice([4, 8])
        kernel = draw.choice([1, 2, 3])
        options = {
            "stride": draw.choice([1, 1, 2, 3]),
            "padding": draw.choice([0, 1]),
            "dilation": draw.choice([1, 1, 2]),
            "groups": channels if wide % channels == 0 and draw.random() < 0.5 else 1,
            "padding_mode": draw.choice(["zeros", "zeros", "zeros", "reflect", "circular"]),
        }
        if options["stride"] == 1 and kernel != 2 and draw.random() < 0.3:
            options["padding"] = "same"
        layers.append(layer("Conv", dims)(channels, wide, kernel, **options))
        channels = wide
        layers += [random_layer(draw, dims, channels) for _ in range(draw.randint(1, 3))]
    network = nn.Sequential()
    maps = torch.zeros(1, 3, *sides)
    for module in layers:  # those that the feature maps are large enough for
        try:
            after = module.eval()(maps.clone())
        except RuntimeError:
            continue
        if max(after.shape[2:]) < 60:
            network.append(module)
            maps = after.detach()
    network.append(nn.Flatten()).append(nn.Linear(maps.numel(), 5))
    return settled(network, seed).double().eval()


@pytest.mark.parametrize("seed", range(24))
def test_random_networks_give_what_a_whole_pass_gives(seed: int) -> None:
    draw = random.Random(seed)
    dims = (2, 2, 2, 1, 3)[seed % 5]
    most = 18 if dims == 3 else 30
    sides = [draw.randint(15, most) for _ in range(dims)]
    x = torch.rand(2, 3, *sides, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    owners = torch.tensor([0, 1, 1, 0, 0])
    perturbed = x[owners]
    for row in range(4):  # the last one is not perturbed
        starts = [draw.randint(0, side - 1) for side in sides]
        where = [slice(start, start + draw.randint(1, 4)) for start in starts]
        perturbed[(row, slice(None), *where)] = draw.random()
    model = random_network(seed, sides)
    for dtype, off in ((torch.double, 1e-12), (torch.float, 1e-5)):
        model = model.to(dtype)
        x = x.to(dtype)
        perturbed = perturbed.to(dtype)
        box = changed_box(x, owners, perturbed)
        assert box is not None
        results: list[Any] = []
        with torch.no_grad():
            expected = model(perturbed.clone())
            most = float(expected.abs().max())
            for _ in range(2):  # the second time with the results of the first
                scores = model(BoxMaps(box, ImagePass(results)))
                torch.testing.assert_close(scores, expected, rtol=off, atol=off * most)


@pytest.mark.parametrize("counts", [True, False])
def test_averages_at_the_border_are_those_of_whole_passes(counts: bool) -> None:
    torch.manual_seed(0)
    pool = nn.AvgPool2d(3, 2, 1, count_include_pad=counts)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), pool, nn.Flatten(), nn.Linear(4 * 7 * 7, 2)).double()
    x = torch.rand(1, 3, 15, 15, dtype=torch.double)
    owners = torch.zeros(2, dtype=torch.long)
    perturbed = x[owners]
    perturbed[0, :, :3, :3] = 0  # at the border, and in the middle
    perturbed[1, :, 6:9, 6:9] = 0
    box = changed_box(x, owners, perturbed)
    assert box is not None
    with torch.no_grad():
        for _ in range(2):
            scores = model(BoxMaps(box, ImagePass([])))
            torch.testing.assert_close(scores, model(perturbed), rtol=1e-12, atol=1e-12)


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


WRITES: dict[str, Callable[[Tensor, float], Any]] = {
    "an alias": lambda y, most: y.clamp_(max=most),
    "the same tensor": lambda y, most: y.clamp_(max=most),
    "another type": lambda y, most: y.clamp_(max=most),
    "a raised error": lambda y, most: y.clamp_(max=most),
    "-=": lambda y, most: y.__isub__(F.relu(y - most)),
    "foreach": lambda y, most: torch._foreach_clamp_max_([y], most),
    "numpy": lambda y, most: y.numpy().clip(max=most, out=y.numpy()),
    "data is set": lambda y, most: setattr(y, "data", y.clamp(max=most)),
    "a part": lambda y, most: y.permute(0, 2, 3, 1)[..., 1:3].clamp_(max=most),
}


def overwrites(way: str) -> Any:
    """A network in which a pass with placeholders goes wrong, as ``way`` says: two names have one
    tensor, which is overwritten where it is above ``most``."""

    def forward(net: Any, x: Tensor) -> Tensor:
        net.alone += len(x) == 1
        if way == "another type":
            x = x.clone()
            x -= torch.full((3, 1, 1), 0.45, dtype=torch.double)
        h = net.first(x)
        y = F.dropout(h, training=net.training) if way == "the same tensor" else h.detach()
        WRITES[way](y, net.most)
        if 0 in h.stride() and way == "a raised error":
            raise ValueError("no memory")
        return net.head(F.relu(net.second(F.relu(h + y))).mean((2, 3)))

    torch.manual_seed(0)
    parts = {"first": nn.Conv2d(3, 8, 3), "second": nn.Conv2d(8, 8, 3), "head": nn.Linear(8, 3)}
    return Made(forward, **parts, most=torch.inf, alone=0).eval()


@pytest.mark.parametrize("way", WRITES)
def test_occlusion_is_that_of_whole_passes_where_placeholders_go_wrong(way: str) -> None:
    dtype = torch.float if way == "another type" else torch.double
    model = overwrites(way).to(dtype)
    x, other = torch.rand(2, 1, 3, 40, 40, dtype=dtype)
    other[:, :, 20:] *= 4
    covered = x.repeat(25, 1, 1, 1)
    for i, row in enumerate(covered):
        place = (..., slice(i // 5 * 8, i // 5 * 8 + 8), slice(i % 5 * 8, i % 5 * 8 + 8))
        row[place] = other[0][place]
    with torch.no_grad():
        # the photo itself is not clipped, and later rows are
        model.most = 1.01 * float(model.first(x).max())
        drops = [(model(x) - model(row[None]))[0, 1] for row in covered]
    model.alone = 0
    values = explain.attribute(model, x, Occlusion(8, 8, OtherPhoto(other)), target=1).values
    assert model.alone < 8  # rows are run in batches
    off = 1e-5 if dtype == torch.float else 1e-10
    expected = torch.stack(drops).reshape(1, 5, 5)
    torch.testing.assert_close(values[:, 4::8, 4::8], expected, rtol=off, atol=off)
