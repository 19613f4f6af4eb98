"""Each method against its slow, plain computation in float64, and against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import methods
from explain.methods.base import MethodLike, get_method
from tests.conftest import GuidedFunction, Made, settled
from tests.fuzz.expected import METHODS, drawn
from tests.methods import (
    plain,
    plain_attention,
    plain_factors,
    plain_masks,
    plain_paths,
    plain_scores,
    plain_steps,
)


def random_network(seed: int) -> list[plain.Layer]:
    g = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * 0.5

    return [
        ("conv", values(4, 3, 3, 3), values(4)),
        ("relu",),
        ("conv", values(5, 4, 3, 3), values(5)),
        ("relu",),
        ("mean",),
        ("linear", values(6, 5), values(6)),
    ]


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


def straight_idgi(layers: plain.Layers, x: Tensor, target: int, layer: int) -> Tensor:
    return plain_steps.idgi(layers, target, plain_steps.straight(x, torch.full_like(x, 0.3), 4))


def blurred_idgi(layers: plain.Layers, x: Tensor, target: int, layer: int) -> Tensor:
    return plain_steps.idgi(layers, target, plain_steps.blurs(x, 0.4 * min(x.shape[1:]), 3))


def guided_idgi(layers: plain.Layers, x: Tensor, target: int, layer: int) -> Tensor:
    zero = torch.zeros_like(x)
    path = plain_steps.guided(
        layers, x, target, baseline=zero, steps=4, fraction=0.25, distance=0.02
    )
    return plain_steps.idgi(layers, target, path)


def unscaled(layers: plain.Layers, x: Tensor, target: int, layer: int) -> Tensor:
    return plain_paths.fullgrad(layers, x, target, rescale="none")


Case = tuple[MethodLike, Callable[..., Tensor]]
ELSEWHERE = {
    "attnlrp",
    "cheferattribution",
    "cheferbimodal",
    "deeplift",
    "deepliftshap",
    "expectedgradients",
    "gradeclip",
    "gradientrollout",
    "gradientshap",
    "legrad",
    "lrp",
    "refinecam",
    "rollout",
}
CASES: list[Case] = [
    *(case for name, case in METHODS.items() if name not in ELSEWHERE | {"cam", "shapleycam"}),
    ("cam", plain.cam),
    ("shapleycam", plain_scores.shapleycam),
    *(
        (methods.KPCACAM(kernel), partial(plain_factors.kpcacam, kernel=kernel))
        for kernel in ("rbf", "poly", "linear")
    ),
    (methods.GradCAMPlusPlus(relu=False), partial(plain.gradcampp, relu=False)),
    (methods.XGradCAM(relu=False), partial(plain.xgradcam, relu=False)),
    (methods.HiResCAM(relu=True), partial(plain.hirescam, relu=True)),
    (methods.FEM(k=1), partial(plain_factors.fem, k=1)),
    (methods.ShapleyCAM(residual_softmax=False), partial(plain_scores.shapleycam, score="logit")),
    (methods.SSCAM(noise="input", samples=2), noisy_input),
    (methods.FullGrad(rescale=False), unscaled),
    (methods.AblationCAM(relu=False), partial(plain_masks.ablationcam, relu=False)),
    (methods.GuidedIntegratedGradients(3, 0.2, 0.1, 1.0), along_a_guided_path),
    (methods.IDGI(methods.IntegratedGradients(4, 0.3)), straight_idgi),
    (methods.IDGI(methods.BlurIntegratedGradients(3, 0.4)), blurred_idgi),
    (methods.IDGI(methods.GuidedIntegratedGradients(4)), guided_idgi),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
# a random network may have nothing to say for a class
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_a_method_equals_its_plain_computation(case: Case, seed: int) -> None:
    """With rectifiers in place, and with functional ones."""
    method, slow = case
    # The plain kernel methods rotate matrices with a row for each place by hand: a few places do;
    # paths have steps.
    small = get_method(method).name in (
        "kpcacam",
        "blurintegratedgradients",
        "guidedintegratedgradients",
        "idgi",
    )
    layers = random_network(seed)
    x = photo(seed + 10, (1, 3, 3, 4) if small else (2, 3, 6, 5))
    model = plain.module_of(layers)
    if seed:
        for number in (1, 3):
            model[number] = Made(lambda net, x: F.relu(x))
    target = (0, 4)[seed]
    found = explain.attribute(model, x, method, target=target, layer=str(LAYER))
    for i in range(len(x)):
        expected = slow(layers, x[i], target, LAYER)
        assert_close(found.values[i], expected, rtol=1e-8, atol=1e-12)
        assert found.score[i].item() == pytest.approx(
            plain.forward(layers, x[i])[-1][target].item(), rel=1e-10
        )


STAGES = ["1", "4", "7"]
FUSIONS: list[Literal["mean", "max", "product"]] = ["mean", "max", "product"]


def staged_network(seed: int) -> list[plain.Layer]:
    """With batch normalisation, and three resolutions."""
    g = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * 0.5

    def norm(count: int) -> plain.Layer:
        return ("bn", values(count), values(count).abs() + 0.5, values(count), values(count), 1e-5)

    return [
        ("conv", values(4, 3, 3, 3), values(4)),
        ("relu",),
        ("halve",),
        ("conv", values(4, 4, 3, 3), values(4)),
        ("relu",),
        ("halve",),
        ("conv", values(5, 4, 3, 3), values(5)),
        norm(5),
        ("relu",),
        ("mean",),
        ("linear", values(6, 5), values(6)),
    ]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_maps_of_several_layers_are_fused_as_their_plain_computation(seed: int) -> None:
    layers = staged_network(seed)
    x = photo(seed, (2, 3, 8, 12))
    model = plain.module_of(layers)
    indices = [int(name) for name in STAGES]
    for i in range(len(x)):
        refined = plain_scores.refinecam(layers, x[i], 2, indices)
        assert_close(
            explain.attribute(model, x[i : i + 1], "refinecam", target=2, layer=STAGES).values[0],
            refined,
            rtol=1e-8,
            atol=1e-12,
        )
        maps = [plain.layercam(layers, x[i], 2, index) for index in indices]
        for how in FUSIONS:
            found = explain.attribute(
                model, x[i : i + 1], "layercam", target=2, layer=STAGES, fuse=how
            ).values[0]
            assert_close(found, plain_scores.fuse(maps, how), rtol=1e-8, atol=1e-12)


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


def test_flips_are_mapped_back() -> None:
    layers = random_network(5)
    x = photo(6)
    for name, slow in {
        "saliency": plain.saliency,
        "gradcam": partial(plain.gradcam, layer=LAYER),
    }.items():
        method = methods.Augmented(get_method(name), scales=(1.0,))
        found = explain.attribute(
            plain.module_of(layers), x, method, target=1, layer=str(LAYER)
        ).values
        for i in range(len(x)):
            expected = plain_paths.augmented(lambda z, slow=slow: slow(layers, z, 1), x[i])
            assert_close(found[i], expected, rtol=1e-8, atol=1e-12)


def test_scales_are_mapped_back() -> None:
    """A network that hands its input on shows where a variant's places come to lie: a bright spot
    stays in place."""
    model = nn.Sequential(
        nn.Conv2d(1, 1, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).double()
    nn.init.constant_(model[0].weight, 1.0)
    x = torch.zeros(1, 1, 33, 33, dtype=torch.float64)
    x[0, 0, 8, 20] = 1
    for scale in (0.8, 1.0, 1.3):
        method = methods.Augmented(get_method("gradcam"), flip=False, scales=(scale,))
        found = explain.attribute(model, x, method, target=0, layer="0").values[0]
        assert divmod(int(found.argmax()), 33) == (8, 20), scale


def test_legrad_and_rollout() -> None:
    torch.manual_seed(0)
    vit = torchvision.models.VisionTransformer(12, 4, 3, 2, 8, 12, num_classes=5).double().eval()
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.4)
    slow = plain_attention.ViT(vit.state_dict(), heads=2, patch=4)
    x = photo(15, (2, 3, 12, 12))
    found = explain.attribute(vit, x, ["legrad", "rollout"], target=2)
    last = explain.attribute(vit, x, methods.LeGrad(blocks=2), target=2)
    for i in range(len(x)):
        gradients = slow.attention_gradients(x[i], 2)
        _, attentions, _ = slow.forward(x[i])
        for values, expected in (
            (found["legrad"].values, plain_attention.legrad(gradients, (3, 3))),
            (last.values, plain_attention.legrad(gradients[1:], (3, 3))),
            (found["rollout"].values, plain_attention.rollout(attentions, (3, 3))),
        ):
            assert_close(values[i], expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    "builder",
    ["alexnet", "densenet121", "googlenet"],
)
def test_guided_backprop_misses_no_relu_of_torchvision(
    builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules and functions alike: the reference replaces what they all end in."""
    extra = {"init_weights": False} if builder == "googlenet" else {}
    model = torchvision.models.get_model(builder, num_classes=3, **extra)
    model = settled(model).double().eval()
    side = 63 if builder == "alexnet" else 32
    x = photo(5, (1, 3, side, side))
    found = explain.attribute(model, x, "guidedbackprop", target=1).values

    def guided(x: Tensor, inplace: bool = False) -> Tensor:
        return GuidedFunction.apply(x)

    monkeypatch.setattr(F, "relu", guided)
    monkeypatch.setattr(torch, "relu", guided)
    source = x.clone().requires_grad_()
    expected = torch.autograd.grad(model(source)[0, 1], source)[0]
    assert expected.abs().max() > 0
    scale = expected.abs().max()
    assert_close(found / scale, expected / scale, rtol=0, atol=1e-10)
