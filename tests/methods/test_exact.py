"""Each method against its slow, plain computation in float64, and against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import methods
from explain.methods.base import MethodLike
from tests.conftest import Made, layer_for
from tests.fuzz.expected import METHODS, RERUNS, drawn
from tests.methods import (
    plain,
    plain_factors,
    plain_masks,
    plain_paths,
    plain_scores,
    plain_steps,
)
from tests.peers.common import network


def random_network(seed: int) -> plain.Layers:
    first = nn.Conv2d(3, 4, 3, padding=1)
    second = nn.Conv2d(4, 5, 3, padding=1)
    return plain.layers_of(first, nn.ReLU(), second, nn.ReLU(), seed=seed)


def photo(seed: int, shape: tuple[int, ...] = (2, 3, 6, 5)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LAYER = 3  # behind the second ReLU


def noisy_input(layers: plain.Layers, x: Tensor, target: int, layer: int) -> Tensor:
    return plain_masks.sscam(layers, x, target, layer, noise=drawn(2, x), kind=2)


def along_a_guided_path(layers: plain.Layers, x: Tensor, target: int, layer: int) -> Tensor:
    start = torch.full_like(x, 0.2)
    path = plain_steps.guided(
        layers, x, target, baseline=start, steps=3, fraction=0.1, distance=1.0
    )
    return plain_steps.along(layers, target, path)


def by_direction(path_of: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda layers, x, target, layer: plain_steps.idgi(
        layers, target, path_of(layers, x, target)
    )


def blurred(layers: plain.Layers, x: Tensor, target: int) -> Any:
    return plain_steps.blurs(x, 0.4 * min(x.shape[1:]), 3)


def guided(layers: plain.Layers, x: Tensor, target: int) -> Any:
    return plain_steps.guided(
        layers, x, target, baseline=torch.zeros_like(x), steps=4, fraction=0.25, distance=0.02
    )


def unscaled(layers: plain.Layers, x: Tensor, target: int, layer: int) -> Tensor:
    return plain_paths.fullgrad(layers, x, target, rescale="none")


Case = tuple[MethodLike, Callable[..., Tensor]]
# the others are compared on each of the random networks of tests/fuzz
CASES: list[Case] = [
    *(METHODS[name] for name in sorted(RERUNS)),
    *(
        (methods.KPCACAM(kernel), partial(plain_factors.kpcacam, kernel=kernel))
        for kernel in ("rbf", "poly", "linear")
    ),
    (methods.GradCAMPlusPlus(relu=False), partial(plain.gradcampp, relu=False)),
    (methods.XGradCAM(relu=False), partial(plain.xgradcam, relu=False)),
    (methods.HiResCAM(relu=True), partial(plain.hirescam, relu=True)),
    (methods.FEM(k=1), partial(plain_factors.fem, k=1)),
    (methods.SSCAM(noise="input", samples=2), noisy_input),
    (methods.FullGrad(rescale=False), unscaled),
    (methods.AblationCAM(relu=False), partial(plain_masks.ablationcam, relu=False)),
    (methods.GuidedIntegratedGradients(3, 0.2, 0.1, 1.0), along_a_guided_path),
    (methods.IDGI(methods.BlurIntegratedGradients(3, 0.4)), by_direction(blurred)),
    (methods.IDGI(methods.GuidedIntegratedGradients(4)), by_direction(guided)),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
# a random network may have nothing to say for a class
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_a_method_equals_its_plain_computation(case: Case, seed: int) -> None:
    """With rectifiers in place, and with functional ones."""
    method, slow = case
    layers = random_network(seed)
    x = photo(seed + 10)
    model = plain.module_of(layers)
    if seed:
        for number in (1, 3):
            model[number] = Made(lambda net, x: F.relu(x))
    target = (0, 4)[seed]
    layer = layer_for(method, str(LAYER))
    found = explain.attribute(model, x, method, target=target, layer=layer, placement="even")
    for i in range(len(x)):
        expected = slow(layers, x[i], target, LAYER)
        assert_close(found.values[i], expected, rtol=1e-8, atol=1e-12)
        assert found.score[i].item() == pytest.approx(
            plain.forward(layers, x[i])[-1][target].item(), rel=1e-10
        )


@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_maps_of_several_layers_are_fused_as_their_plain_computation() -> None:
    layers = network()
    x = photo(0, (1, 3, 8, 12))
    stages = [2, 5, 7]
    maps = [plain.layercam(layers, x[0], 2, stage) for stage in stages]
    where: Any = {"target": 2, "layer": [str(stage) for stage in stages], "placement": "even"}
    fusions: list[Literal["mean", "max", "product"]] = ["mean", "max", "product"]
    for how in fusions:
        fused = explain.attribute(plain.module_of(layers), x, "layercam", fuse=how, **where)
        assert_close(fused.values[0], plain_scores.fuse(maps, how), rtol=1e-8, atol=1e-12)
    refined = explain.attribute(plain.module_of(layers), x, "refinecam", **where).values
    expected = plain_scores.refinecam(layers, x[0], 2, stages)
    assert_close(refined[0], expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("rule", ["gausslegendre", "left", "right", "midpoint", "trapezoid"])
def test_integrated_gradients_by_every_rule(rule: Any) -> None:
    layers = random_network(3)
    x = photo(4)
    found = explain.attribute(
        plain.module_of(layers), x, methods.IntegratedGradients(5, 0.3, rule), target=2
    )
    points, weights = plain_paths.quadrature(rule, 5)
    for i in range(len(x)):
        start = torch.full_like(x[i], 0.3)
        expected = plain_paths.integratedgradients(
            layers, x[i], 2, baseline=start, points=points, weights=weights
        )
        assert_close(found.values[i], expected, rtol=1e-8, atol=1e-12)
        missed = expected.sum() - (
            plain.forward(layers, x[i])[-1][2] - plain.forward(layers, start)[-1][2]
        )
        assert_close(found.delta[i], missed, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("scale", [0.8, 1.3])
def test_scales_are_mapped_back(scale: float) -> None:
    """A bright spot stays in place: the layer hands the input on."""
    model = Made(lambda net, x: net.same(x).mean((2, 3)), same=nn.Identity())
    x = torch.zeros(1, 1, 33, 33, dtype=torch.float64)
    x[0, 0, 8, 20] = 1
    method = methods.Augmented(methods.GradCAM(), flip=False, scales=(scale,))
    values = explain.attribute(model, x, method, target=0, layer="same").values[0]
    assert divmod(int(values.argmax()), 33) == (8, 20)
