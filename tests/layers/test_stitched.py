"""Stitched segmenters: scores, gradients and maps of windows against plain loops over windows and
pixels."""

from __future__ import annotations

from functools import partial
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
from tests.conftest import Made, settled, snapshot

EXACT = {"rtol": 1e-9, "atol": 1e-11}


def network(dims: int = 2) -> nn.Module:
    """Class maps at half the input's resolution, in two or three dimensions."""
    conv: Any = nn.Conv3d if dims == 3 else nn.Conv2d
    features = nn.Sequential(conv(1, 4, 3, 2, 1), nn.Tanh(), conv(4, 4, 3, 1, 1))
    net = Made(
        lambda net, x: {"out": net.head(net.features(x).tanh())},
        features=features,
        head=conv(4, 3, 1),
    )
    return settled(net, seed=3).double().eval()


def photos(*size: int) -> Tensor:
    return torch.randn(2, 1, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def importance(sides: tuple[int, ...], weights: str) -> Tensor:
    """MONAI's importance map: a product of Gaussians along the sides, or one everywhere."""
    values = torch.ones(sides, dtype=torch.float64)
    if weights == "gaussian":
        grid = torch.meshgrid(*map(torch.arange, sides), indexing="ij")
        for side, places in zip(sides, grid, strict=True):
            values *= (-(((places.double() - (side - 1) / 2) / (side / 8)) ** 2) / 2).exp()
    return values.clamp(min=1e-3)


def windows_of(
    size: tuple[int, ...], sides: tuple[int, ...], overlap: float
) -> list[tuple[slice, ...]]:
    """Where MONAI's windows are: an interval apart, and the last ones moved inside."""
    along = []
    for length, side in zip(size, sides, strict=True):
        interval = max(1, int(side * (1 - overlap)))
        starts = [min(s, length - side) for s in range(0, length - side + interval, interval)]
        along.append([slice(start, start + side) for start in starts])
    return list(product(*along))


def stitched_plainly(
    parts: list[Tensor], size: Any, sides: tuple[int, ...], overlap: float, weights: str
) -> Tensor:
    """The weighted mean of what windows gave, window by window."""
    mode = "trilinear" if len(sides) == 3 else "bilinear"
    total = torch.zeros(*parts[0].shape[:2], *size, dtype=torch.float64)
    share = torch.zeros(size, dtype=torch.float64)
    each = importance(sides, weights)
    for part, place in zip(parts, windows_of(size, sides, overlap), strict=True):
        total[(..., *place)] += each * F.interpolate(part, size=sides, mode=mode)
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
    stitch = partial(stitched_plainly, size=size, sides=sides, overlap=overlap, weights=weights)
    features = [net.features(leaf[(..., *place)]) for place in windows_of(size, sides, overlap)]
    scores = stitch([net.head(each.tanh()) for each in features])
    assert_close(stitched(x), scores, **EXACT)
    mask = torch.zeros(size)
    mask[2:5, 3:9] = 1
    score = (scores[:, 1] * mask).flatten(1).sum(1) / mask.sum()
    gradient, *of_features = torch.autograd.grad(score.sum(), [leaf, *features])
    methods = [Saliency(absolute=False), GradCAM(), HiResCAM(relu=False)]
    before = snapshot(stitched)
    target = Segmentation(1, mask)
    found = explain.attribute(
        stitched, x, methods, target=target, layer="model.features", placement="even"
    )
    assert snapshot(stitched) == before
    assert_close(found["saliency"].values, gradient, **EXACT)
    assert_close(found["saliency"].score, score.detach(), **EXACT)
    cams = []
    products = []
    for activation, each in zip(features, of_features, strict=True):
        weights_of_maps = each.mean([*range(2, each.ndim)], keepdim=True)
        cams.append((weights_of_maps * activation).sum(1, keepdim=True).clamp(min=0).detach())
        products.append((each * activation).sum(1, keepdim=True).detach())
    assert_close(found["gradcam"].values, stitch(cams)[:, 0], **EXACT)
    assert_close(found["hirescam"].values, stitch(products)[:, 0], **EXACT)
    assert found["gradcam"].heatmap.shape == (2, *size)


def of_tokens(model: nn.Module, x: Tensor) -> Tensor:
    """A segmenter of patches as tokens, with one module that is called twice."""
    maps = model.patches(x)
    tokens = model.mix(model.mix(maps.flatten(2).mT).tanh())
    return model.head(tokens.tanh()).mT.unflatten(2, maps.shape[2:])


@pytest.mark.parametrize("layer", ["model.mix", "model.mix@0"])
def test_tokens_lie_in_windows_and_calls_are_counted_in_them(layer: str) -> None:
    parts = {"patches": nn.Conv2d(1, 4, 2, 2), "mix": nn.Linear(4, 4), "head": nn.Linear(4, 3)}
    net = settled(Made(of_tokens, **parts), seed=5).double().eval()
    x = photos(12, 12)
    stitch = partial(stitched_plainly, size=(12, 12), sides=(4, 8), overlap=0.5, weights="gaussian")
    score = Segmentation(2, torch.ones(12, 12))
    stitched = Stitched(net, (4, 8)).eval()
    found = explain.attribute(stitched, x, HiResCAM(relu=False), target=score, layer=layer)
    leaves = []
    scores = []
    for place in windows_of((12, 12), (4, 8), 0.5):
        first = net.mix(net.patches(x[(..., *place)]).flatten(2).mT)
        second = net.mix(first.tanh())
        leaves.append(first if layer.endswith("0") else second)
        scores.append(net.head(second.tanh()).mT.unflatten(2, (2, 4)))
    total = stitch(scores)[:, 2].mean((1, 2)).sum()
    maps = [
        (gradient * tokens).sum(2).detach().unflatten(1, (2, 4))[:, None]
        for tokens, gradient in zip(leaves, torch.autograd.grad(total, leaves), strict=True)
    ]
    assert_close(found.values, stitch(maps)[:, 0], **EXACT)


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
