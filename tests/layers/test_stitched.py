"""Stitched segmenters: scores, gradients and maps of windows against plain loops over windows and
pixels."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import MethodError, ModelError
from explain.attribution.selection import select
from explain.methods import GradCAM, HiResCAM, Saliency
from explain.models import Stitched
from explain.targets import Segmentation
from tests.conftest import settled, snapshot

EXACT = {"rtol": 1e-9, "atol": 1e-11}


class Net(nn.Module):
    """Class maps at half the input's resolution, in two or three dimensions."""

    def __init__(self, dims: int = 2) -> None:
        super().__init__()
        conv: Any = nn.Conv3d if dims == 3 else nn.Conv2d
        self.features = nn.Sequential(conv(1, 4, 3, 2, 1), nn.Tanh(), conv(4, 4, 3, 1, 1))
        self.head = conv(4, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.head(self.features(x).tanh())}


def network(dims: int = 2) -> nn.Module:
    return settled(Net(dims), seed=3).double().eval()


def photos(*size: int) -> Tensor:
    return torch.randn(2, 1, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def importance(sides: tuple[int, ...], weights: str) -> Tensor:
    """MONAI's importance map, value by value."""
    found = torch.ones(sides, dtype=torch.float64)
    for place in product(*map(range, sides)):
        if weights == "gaussian":
            parts = [
                ((i - (n - 1) / 2) / (n / 8)) ** 2 / 2 for i, n in zip(place, sides, strict=True)
            ]
            found[place] = max(math.exp(-sum(parts)), 1e-3)
    return found


def windows_of(
    size: tuple[int, ...], sides: tuple[int, ...], overlap: float
) -> list[tuple[slice, ...]]:
    """Where MONAI's windows are: an interval apart, and the last ones moved inside."""
    along = []
    for length, side in zip(size, sides, strict=True):
        interval = max(1, int(side * (1 - overlap)))
        starts = [0]
        while starts[-1] + side < length:
            starts.append(starts[-1] + interval)
        along.append(
            [
                slice(s - max(s + side - length, 0), s - max(s + side - length, 0) + side)
                for s in starts
            ]
        )
    return list(product(*along))


def stitched_plainly(
    parts: list[Tensor], places: list[Any], sides: tuple[int, ...], size: Any, weights: str
) -> Tensor:
    """The weighted mean of what windows gave, window by window."""
    mode = "trilinear" if len(sides) == 3 else "bilinear"
    total = torch.zeros(*parts[0].shape[:2], *size, dtype=torch.float64)
    share = torch.zeros(size, dtype=torch.float64)
    each = importance(sides, weights)
    for part, place in zip(parts, places, strict=True):
        total[(..., *place)] += each * F.interpolate(
            part, size=sides, mode=mode, align_corners=False
        )
        share[place] += each
    return total / share


CASES: list[tuple[tuple[int, ...], Any, float, str]] = [
    ((14, 20), (8, 8), 0.5, "gaussian"),
    ((14, 20), (8, 12), 0.25, "uniform"),
    ((8, 10, 12), (4, 6, 6), 0.5, "gaussian"),
]


@pytest.mark.parametrize(("size", "sides", "overlap", "weights"), CASES)
@pytest.mark.parametrize("recompute", [False, True])
def test_scores_gradients_and_maps_equal_the_plain_computation(
    size: tuple[int, ...], sides: tuple[int, ...], overlap: float, weights: Any, recompute: bool
) -> None:
    net = network(len(size))
    x = photos(*size)
    stitched = Stitched(net, sides, overlap, weights, recompute).eval()
    leaf = x.clone().requires_grad_()
    places = windows_of(size, sides, overlap)
    features = [net.features(leaf[(..., *place)]) for place in places]
    scores = stitched_plainly(
        [net.head(each.tanh()) for each in features], places, sides, size, weights
    )
    assert_close(stitched(x), scores, **EXACT)
    mask = torch.zeros(size)
    mask[(slice(2, 5), slice(3, 9))] = 1
    score = (scores[:, 1] * mask).flatten(1).sum(1) / mask.sum()
    gradients = torch.autograd.grad(score.sum(), [leaf, *features])
    methods = [Saliency(absolute=False), GradCAM(), HiResCAM(relu=False)]
    before = snapshot(stitched)
    found = explain.attribute(
        stitched, x, methods, target=Segmentation(1, mask), layer="model.features"
    )
    assert snapshot(stitched) == before
    assert_close(found["saliency"].values, gradients[0], **EXACT)
    assert_close(found["saliency"].score, score.detach(), **EXACT)
    cams = []
    products = []
    for activation, gradient in zip(features, gradients[1:], strict=True):
        weighted = (
            gradient.flatten(2).mean(2).reshape(*gradient.shape[:2], *[1] * len(size)) * activation
        )
        cams.append(weighted.sum(1, keepdim=True).clamp(min=0).detach())
        products.append((gradient * activation).sum(1, keepdim=True).detach())
    assert_close(
        found["gradcam"].values, stitched_plainly(cams, places, sides, size, weights)[:, 0], **EXACT
    )
    assert_close(
        found["hirescam"].values,
        stitched_plainly(products, places, sides, size, weights)[:, 0],
        **EXACT,
    )
    assert found["gradcam"].layer == "model.features"
    assert found["gradcam"].heatmap.shape == (2, *size)


class Tokens(nn.Module):
    """A segmenter of patches as tokens, with one module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 4, 2, 2)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.patches(x)
        tokens = self.mix(self.mix(maps.flatten(2).mT).tanh())
        return self.head(tokens.tanh()).mT.unflatten(2, maps.shape[2:])


@pytest.mark.parametrize("layer", ["model.mix", "model.mix@0"])
def test_tokens_lie_in_windows_and_calls_are_counted_in_them(layer: str) -> None:
    net = settled(Tokens(), seed=5).double().eval()
    x = photos(12, 12)
    sides = (4, 8)
    places = windows_of((12, 12), sides, 0.5)
    score = Segmentation(2, torch.ones(12, 12))
    found = explain.attribute(
        Stitched(net, sides).eval(), x, HiResCAM(relu=False), target=score, layer=layer
    )
    leaves = []
    scores = []
    for place in places:
        first = net.mix(net.patches(x[(..., *place)]).flatten(2).mT)
        second = net.mix(first.tanh())
        leaves.append(first if layer.endswith("0") else second)
        scores.append(net.head(second.tanh()).mT.unflatten(2, (2, 4)))
    total = stitched_plainly(scores, places, sides, (12, 12), "gaussian")[:, 2].mean((1, 2)).sum()
    maps = [
        (gradient * tokens).sum(2).detach().unflatten(1, (2, 4))[:, None]
        for tokens, gradient in zip(leaves, torch.autograd.grad(total, leaves), strict=True)
    ]
    assert_close(
        found.values, stitched_plainly(maps, places, sides, (12, 12), "gaussian")[:, 0], **EXACT
    )


def test_layers_are_chosen_in_a_window_and_what_cannot_be_stitched_is_refused() -> None:
    net = network()
    x = photos(16, 12)
    target = Segmentation(1, torch.ones(16, 12))
    stitched = Stitched(net, 8).eval()
    assert explain.attribute(stitched, x, "gradcam", target=target).layer == "model.features"
    fit = select(stitched, x, "everything", target=target).methods
    assert {"gradcam", "saliency", "lrp", "eigencam"} <= {*fit}
    for method in ("scorecam", "ablationcam", "guidedgradcam", "fullgrad"):
        assert method not in fit
        with pytest.raises(MethodError, match="Stitched"):
            explain.attribute(stitched, x, method, target=target)
    several = explain.attribute(
        stitched, x, "layercam", target=target, layer=["model.features.0", "model.features.2"]
    )
    assert several.values.shape == (2, 16, 12)
    assert "model.features.0@5" in str(
        explain.plan(stitched, x, "gradcam", target=target, layer="model.features.0")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must"),
        ({"window": (8, 8, 8)}, "window must have 2"),
        ({"overlap": 1}, "overlap must"),
        ({"weights": "linear"}, "weights must"),
        ({"model": nn.Flatten()}, "model must give class maps"),
    ],
)
def test_what_does_not_fit_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Stitched(**{"model": network(), "window": 8, **options})(photos(16, 12))
