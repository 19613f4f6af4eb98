"""Each method against its slow, plain computation in float64, and against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import explain
from explain import MethodError
from explain.attribution.result import fused
from explain.engine.execution import gather
from explain.engine.needs import Attention
from explain.engine.plan import plan_of
from explain.methods import (
    FEM,
    IDGI,
    ISCAM,
    KPCACAM,
    SSCAM,
    AblationCAM,
    Augmented,
    BlurIntegratedGradients,
    FinerCAM,
    FullGrad,
    GradCAM,
    GradCAMPlusPlus,
    GuidedIntegratedGradients,
    HiResCAM,
    InputXGradient,
    IntegratedGradients,
    LeGrad,
    Saliency,
    ShapleyCAM,
    Smooth,
    SmoothGradCAMPlusPlus,
    XGradCAM,
)
from explain.methods.registry import MethodLike, get_method
from explain.methods.wrappers import noise
from explain.targets import as_target
from tests.conftest import COVERING, GuidedFunction, TinyNet, settled
from tests.methods import plain, plain_attention, plain_factors, plain_masks, plain_paths, plain_scores, plain_steps


def random_network(seed: int) -> list[plain.Layer]:
    g = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * 0.5

    return [
        ("conv", values(4, 3, 3, 3), values(4)),
        ("relu",),
        ("conv", values(5, 4, 3, 3), values(5)),
        ("relu",),
        ("mean",),
        ("linear", values(6, 5), values(6)),
    ]


def photo(seed: int, shape: tuple[int, ...] = (2, 3, 6, 5)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LAYER = 3  # behind the second ReLU


def drawn(method: Smooth | SmoothGradCAMPlusPlus, x: torch.Tensor) -> list[torch.Tensor]:
    """The noise that a method adds to an image."""
    spread = method.sigma * (x.max() - x.min())
    return [spread * noise(method.seed, i, x) for i in range(method.samples)]


def random_weights(x: torch.Tensor) -> torch.Tensor:
    return (torch.rand(5, generator=torch.Generator().manual_seed(0)) * 2 - 1).to(x)


def smooth(kind: Literal["mean", "square", "variance"]) -> Case:
    method = Smooth(samples=3, statistic=kind)

    def slow(layers: list[plain.Layer], x: torch.Tensor, target: int) -> torch.Tensor:
        def gradient(z: torch.Tensor) -> torch.Tensor:
            return plain.backward(layers, plain.forward(layers, z), target)[0]

        return plain_paths.smooth(gradient, x, noise=drawn(method, x), kind="squared" if kind == "square" else kind)

    return method, slow


def integrated(layers: list[plain.Layer], x: torch.Tensor, target: int) -> torch.Tensor:
    points, weights = plain_paths.quadrature("gausslegendre", 7)
    zero = torch.zeros_like(x)
    return plain_paths.integratedgradients(layers, x, target, baseline=zero, points=points, weights=weights)


def noisy_maps(layers: list[plain.Layer], x: torch.Tensor, target: int) -> torch.Tensor:
    maps = plain.forward(layers, x)[LAYER + 1]
    span = torch.stack([m.max() - m.min() for m in maps])[:, None, None]
    shifts = [0.15 * span * noise(0, i, maps[0]) for i in range(2)]
    return plain_masks.sscam(layers, x, target, LAYER, noise=shifts)


def noisy_input(layers: list[plain.Layer], x: torch.Tensor, target: int) -> torch.Tensor:
    shifts = [0.15 * (x.max() - x.min()) * noise(0, i, x) for i in range(2)]
    return plain_masks.sscam(layers, x, target, LAYER, noise=shifts, kind=2)


def at_layer(slow: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    return lambda layers, x, target: slow(layers, x, target, LAYER, **options)


def blur_path(layers: list[plain.Layer], x: torch.Tensor, target: int) -> torch.Tensor:
    return plain_steps.blurintegratedgradients(layers, x, target, steps=3, sigma=0.2 * min(x.shape[1:]))


def guided_path(layers: list[plain.Layer], x: torch.Tensor, target: int, method: Any) -> Any:
    options = {"steps": method.steps, "fraction": method.fraction, "distance": method.distance}
    return plain_steps.guided(layers, x, target, baseline=torch.full_like(x, method.baseline), **options)


def guided(method: GuidedIntegratedGradients) -> Case:
    return method, lambda layers, x, target: plain_steps.along(layers, target, guided_path(layers, x, target, method))


def straight_idgi(layers: list[plain.Layer], x: torch.Tensor, target: int) -> torch.Tensor:
    return plain_steps.idgi(layers, target, plain_steps.straight(x, torch.full_like(x, 0.3), 4))


def blurred_idgi(layers: list[plain.Layer], x: torch.Tensor, target: int) -> torch.Tensor:
    return plain_steps.idgi(layers, target, plain_steps.blurs(x, 0.4 * min(x.shape[1:]), 3))


def guided_idgi(layers: list[plain.Layer], x: torch.Tensor, target: int) -> torch.Tensor:
    path = guided_path(layers, x, target, GuidedIntegratedGradients(4))
    return plain_steps.idgi(layers, target, path)


Case = tuple[MethodLike, Callable[..., torch.Tensor]]
CASES: list[Case] = [
    ("saliency", plain.saliency),
    ("inputxgradient", plain.inputxgradient),
    ("guidedbackprop", plain.guidedbackprop),
    ("deconvnet", plain.deconvnet),
    ("guidedgradcam", at_layer(plain.guidedgradcam)),
    ("cam", at_layer(plain.cam)),
    ("gradcam", at_layer(plain.gradcam)),
    ("gradcam++", at_layer(plain.gradcampp)),
    (GradCAMPlusPlus(relu=False), at_layer(plain.gradcampp, relu=False)),
    (
        SmoothGradCAMPlusPlus(samples=3),
        lambda layers, x, target: plain.smoothgradcampp(
            layers, x, target, LAYER, noise=drawn(SmoothGradCAMPlusPlus(samples=3), x)
        ),
    ),
    ("xgradcam", at_layer(plain.xgradcam)),
    (XGradCAM(relu=False), at_layer(plain.xgradcam, relu=False)),
    ("hirescam", at_layer(plain.hirescam)),
    (HiResCAM(relu=True), at_layer(plain.hirescam, relu=True)),
    ("elementwisecam", at_layer(plain.elementwisecam)),
    ("layercam", at_layer(plain.layercam)),
    ("eigencam", at_layer(plain_factors.eigencam)),
    ("eigengradcam", at_layer(plain_factors.eigengradcam)),
    *[
        (KPCACAM(kernel), at_layer(plain_factors.kpcacam, kernel=kernel))
        for kernel in ("sigmoid", "rbf", "poly", "linear")
    ],
    ("kpcacam", at_layer(plain_factors.kpcacam)),
    ("fem", at_layer(plain_factors.fem)),
    (FEM(k=1), at_layer(plain_factors.fem, k=1)),
    ("shapleycam", at_layer(plain_scores.shapleycam)),
    (ShapleyCAM(residual_softmax=False), at_layer(plain_scores.shapleycam, score="logit")),
    ("finercam", at_layer(plain_scores.finercam)),
    (
        FinerCAM(cam=GradCAMPlusPlus(), objective="weighted", alpha=1.0, references=2),
        at_layer(plain_scores.finercam, objective="weighted", alpha=1.0, references=2, base=plain.gradcampp_map),
    ),
    ("randomcam", lambda layers, x, target: plain.randomcam(layers, x, target, LAYER, weights=random_weights(x))),
    ("scorecam", at_layer(plain_masks.scorecam)),
    (SSCAM(samples=2), noisy_maps),
    (SSCAM(noise="input", samples=2), noisy_input),
    (ISCAM(steps=4), at_layer(plain_masks.iscam, steps=4)),
    ("ablationcam", at_layer(plain_masks.ablationcam)),
    (AblationCAM(relu=False), at_layer(plain_masks.ablationcam, relu=False)),
    ("fullgrad", plain_paths.fullgrad),
    (FullGrad(rescale=False), lambda layers, x, target: plain_paths.fullgrad(layers, x, target, rescale="none")),
    (IntegratedGradients(steps=7), integrated),
    (BlurIntegratedGradients(3), blur_path),
    guided(GuidedIntegratedGradients(5)),
    guided(GuidedIntegratedGradients(3, 0.2, 0.1, 1.0)),
    (IDGI(IntegratedGradients(4, 0.3)), straight_idgi),
    (IDGI(BlurIntegratedGradients(3, 0.4)), blurred_idgi),
    (IDGI(GuidedIntegratedGradients(4)), guided_idgi),
    smooth("mean"),
    smooth("square"),
    smooth("variance"),
]
ELSEWHERE = {
    "attnlrp", "cheferattribution", "cheferbimodal", "deeplift", "deepliftshap", "expectedgradients", "gradientrollout",
    "gradientshap", "legrad", "lrp", "refinecam", "rollout",
}  # fmt: skip


def test_every_method_has_a_plain_computation() -> None:
    assert {get_method(method).name for method, _ in CASES} | ELSEWHERE | COVERING == set(explain.list_methods())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")  # a random network may have nothing to say for a class
def test_a_method_equals_its_plain_computation(case: Case, seed: int) -> None:
    method, slow = case
    # The plain kernel methods rotate matrices with a row for each place by hand: a few places do; paths have steps.
    small = isinstance(get_method(method), (KPCACAM, BlurIntegratedGradients, GuidedIntegratedGradients, IDGI))
    layers, x = random_network(seed), photo(seed + 10, (1, 3, 3, 4) if small else (2, 3, 6, 5))
    model = plain.module_of(layers)
    for target in (0, 4):
        found = explain.attribute(model, x, method, target=target, layer=str(LAYER))
        for i in range(len(x)):
            expected = slow(layers, x[i], target)
            torch.testing.assert_close(found.values[i], expected, rtol=1e-8, atol=1e-12)
            assert found.score[i].item() == pytest.approx(plain.forward(layers, x[i])[-1][target].item(), rel=1e-10)


STAGES = ["1", "4", "7"]
FUSIONS: list[Literal["mean", "max", "product"]] = ["mean", "max", "product"]


def staged_network(seed: int) -> list[plain.Layer]:
    """With batch normalisation, and three resolutions."""
    g = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * 0.5

    def norm(count: int) -> plain.Layer:
        return ("bn", values(count), values(count).abs() + 0.5, values(count), values(count), 1e-5)

    return [
        ("conv", values(4, 3, 3, 3), values(4)), ("relu",), ("halve",),
        ("conv", values(4, 4, 3, 3), values(4)), ("relu",), ("halve",),
        ("conv", values(5, 4, 3, 3), values(5)), norm(5), ("relu",), ("mean",), ("linear", values(6, 5), values(6)),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_maps_of_several_layers_are_fused_as_their_plain_computation(seed: int) -> None:
    layers, x = staged_network(seed), photo(seed, (2, 3, 8, 12))
    model = plain.module_of(layers)
    indices = [int(name) for name in STAGES]
    for i in range(len(x)):
        refined = plain_scores.refinecam(layers, x[i], 2, indices)
        torch.testing.assert_close(
            explain.attribute(model, x[i : i + 1], "refinecam", target=2, layer=STAGES).values[0], refined,
            rtol=1e-8, atol=1e-12,
        )  # fmt: skip
        maps = [plain.layercam(layers, x[i], 2, index) for index in indices]
        for how in FUSIONS:
            found = explain.attribute(model, x[i : i + 1], "layercam", target=2, layer=STAGES, fuse=how).values[0]
            torch.testing.assert_close(found, plain_scores.fuse(maps, how), rtol=1e-8, atol=1e-12)


def test_layers_that_both_speak_against_do_not_speak_for_together() -> None:
    against = -torch.ones(1, 2, 2)
    assert fused([against, against], "product").max() == 0
    assert fused([against, against], "mean").max() == -1


def test_refinecam_finds_the_stages_itself() -> None:
    layers, x = staged_network(1), photo(0, (1, 3, 8, 12))
    found = explain.attribute(plain.module_of(layers), x, "refinecam", target=0)
    assert found.layer == ("1", "4", "8")
    expected = plain_scores.refinecam(layers, x[0], 0, [1, 4, 8])
    assert expected.max() > 0
    torch.testing.assert_close(found.values[0], expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_fullgrad_with_batch_normalisation_is_complete(seed: int) -> None:
    layers, x = staged_network(seed), photo(seed, (2, 3, 8, 12))
    found = explain.attribute(plain.module_of(layers), x, "fullgrad", target=3)
    assert found.delta is not None
    assert found.delta.abs().max() < 1e-9
    for i in range(len(x)):
        torch.testing.assert_close(found.values[i], plain_paths.fullgrad(layers, x[i], 3), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("rule", ["gausslegendre", "left", "right", "midpoint", "trapezoid"])
def test_integrated_gradients_by_every_rule(rule: Any) -> None:
    layers, x = random_network(3), photo(4)
    found = explain.attribute(plain.module_of(layers), x, IntegratedGradients(5, 0.3, rule), target=2)
    points, weights = plain_paths.quadrature(rule, 5)
    assert found.delta is not None
    for i in range(len(x)):
        start = torch.full_like(x[i], 0.3)
        expected = plain_paths.integratedgradients(layers, x[i], 2, baseline=start, points=points, weights=weights)
        torch.testing.assert_close(found.values[i], expected, rtol=1e-8, atol=1e-12)
        missed = expected.sum() - (plain.forward(layers, x[i])[-1][2] - plain.forward(layers, start)[-1][2])
        torch.testing.assert_close(found.delta[i], missed, rtol=1e-8, atol=1e-10)


def test_flips_are_mapped_back() -> None:
    layers, x = random_network(5), photo(6)
    for name, slow in {"saliency": plain.saliency, "gradcam": at_layer(plain.gradcam)}.items():
        method = Augmented(get_method(name), scales=(1.0,))
        found = explain.attribute(plain.module_of(layers), x, method, target=1, layer=str(LAYER)).values
        for i in range(len(x)):
            expected = plain_paths.augmented(lambda z, slow=slow: slow(layers, z, 1), x[i])
            torch.testing.assert_close(found[i], expected, rtol=1e-8, atol=1e-12)


def test_scales_do_not_follow_the_default_device(net: TinyNet, x: torch.Tensor) -> None:
    expected = explain.attribute(net, x, "augmented(saliency)", target=1).values
    with torch.device("meta"):
        found = explain.attribute(net, x, "augmented(saliency)", target=1).values
    assert torch.equal(found, expected)


def test_scales_are_mapped_back() -> None:
    """A network that hands its input on shows where a variant's places come to lie: a bright spot stays in place."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    nn.init.constant_(model[0].weight, 1.0)
    x = torch.zeros(1, 1, 33, 33, dtype=torch.float64)
    x[0, 0, 8, 20] = 1
    for scale in (0.8, 1.0, 1.3):
        method = Augmented(get_method("gradcam"), flip=False, scales=(scale,))
        found = explain.attribute(model, x, method, target=0, layer="0").values[0]
        assert divmod(int(found.argmax()), 33) == (8, 20), scale


@pytest.mark.parametrize("inner", ["gradcam", "layercam", "scorecam", "augmented(saliency)"])
def test_without_noise_smoothing_changes_nothing(inner: str, net: TinyNet, x: torch.Tensor) -> None:
    plainly = explain.attribute(net, x, inner, target=1)
    smoothed = explain.attribute(net, x, Smooth(get_method(inner), samples=2, sigma=0.0), target=1)
    assert smoothed.method == f"smooth({inner})"
    assert smoothed.layer == plainly.layer
    torch.testing.assert_close(smoothed.values, plainly.values, rtol=1e-12, atol=1e-14)


class TestTransformers:
    @pytest.fixture
    def vit(self) -> torchvision.models.VisionTransformer:
        torch.manual_seed(0)
        model = torchvision.models.VisionTransformer(12, 4, 3, 2, 8, 12, num_classes=5)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.4)
        return model.double().eval()

    def test_legrad_and_rollout(self, vit: torchvision.models.VisionTransformer) -> None:
        slow, x = plain_attention.ViT(vit.state_dict(), heads=2, patch=4), photo(15, (2, 3, 12, 12))
        found = explain.attribute(vit, x, ["legrad", LeGrad(blocks=2), "rollout"][::2], target=2)
        last = explain.attribute(vit, x, LeGrad(blocks=2), target=2)
        for i in range(len(x)):
            gradients = slow.attention_gradients(x[i], 2)
            expected = plain_attention.legrad(gradients, (3, 3))
            torch.testing.assert_close(found["legrad"].values[i], expected, rtol=1e-8, atol=1e-12)
            torch.testing.assert_close(
                last.values[i], plain_attention.legrad(gradients[1:], (3, 3)), rtol=1e-8, atol=1e-12
            )
            attentions = slow.forward(x[i])[1]
            expected = plain_attention.rollout(attentions, (3, 3))
            torch.testing.assert_close(found["rollout"].values[i], expected, rtol=1e-8, atol=1e-12)

    def test_attention_weights_and_gradients_are_those_of_the_softmax(
        self, vit: torchvision.models.VisionTransformer
    ) -> None:
        """Torch computes the attention of this network in one kernel, whose weights nobody sees."""
        slow, x = plain_attention.ViT(vit.state_dict(), heads=2, patch=4), photo(15, (1, 3, 12, 12))
        evidence = gather(vit, x, plan_of([Attention(gradients=True)], []), [as_target(2)])[0](None)
        maps = evidence[Attention(gradients=True)]
        assert [tuple(each.weights.shape) for each in maps] == [(1, 2, 10, 10)] * 3
        for each, expected in zip(maps, slow.last_gradients(x[0], 2), strict=True):
            torch.testing.assert_close(each.gradient[0], expected, rtol=1e-8, atol=1e-12)

    def test_networks_without_global_attention_are_refused(self, net: TinyNet, x: torch.Tensor) -> None:
        for method in ("legrad", "rollout"):
            with pytest.raises(MethodError, match=f"{method} must have .* use it for vision transformers"):
                explain.attribute(net, x, method)


@pytest.mark.parametrize("layer", ["0", "1", "2", "3"])
def test_gradcam_is_exact_at_every_layer_with_and_without_rectification(layer: str) -> None:
    layers, x = random_network(7), photo(8)
    for relu in (True, False):
        found = explain.attribute(plain.module_of(layers), x, GradCAM(relu=relu), target=2, layer=layer)
        for i in range(len(x)):
            expected = plain.gradcam(layers, x[i], 2, int(layer), relu=relu)
            torch.testing.assert_close(found.values[i], expected, rtol=1e-8, atol=1e-12)


def test_the_gradient_is_what_finite_differences_say(net: TinyNet) -> None:
    x = photo(3, (1, 3, 8, 8))
    found = explain.attribute(net, x, Saliency(absolute=False), target=1).values
    step = 1e-6
    for position in [(0, 0, 0), (1, 3, 4), (2, 7, 7), (0, 5, 2)]:
        shift = torch.zeros_like(x)
        shift[0][position] = step
        slope = (net(x + shift)[0, 1] - net(x - shift)[0, 1]).item() / (2 * step)
        assert found[0][position].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(
    "builder", ["alexnet", "resnet18", "densenet121", "googlenet", "inception_v3", "shufflenet_v2_x0_5"]
)
def test_guided_backprop_misses_no_relu_of_torchvision(builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules and functions alike: the reference replaces what they all end in."""
    extra = {"init_weights": False} if builder in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(builder, num_classes=3, **extra)
    model = settled(model).double().eval()
    side = {"inception_v3": 75, "alexnet": 63}.get(builder, 32)
    x = photo(5, (1, 3, side, side))
    found = explain.attribute(model, x, "guidedbackprop", target=1).values

    def guided(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        return GuidedFunction.apply(x)

    monkeypatch.setattr(F, "relu", guided)
    monkeypatch.setattr(torch, "relu", guided)
    source = x.clone().requires_grad_()
    expected = torch.autograd.grad(model(source)[0, 1], source)[0]
    assert expected.abs().max() > 0
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-10)


def test_heatmaps_are_divided_by_their_maximum_and_never_shifted() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    nn.init.constant_(model[0].weight, 2.0)
    constant = explain.attribute(model, torch.ones(1, 1, 4, 6), "gradcam", target=0, layer="0")
    assert torch.equal(constant.heatmap, torch.ones(1, 4, 6))
    ramp = torch.linspace(1, 2, 24).reshape(1, 1, 4, 6)
    assert explain.attribute(model, ramp, "gradcam", target=0, layer="0").heatmap.min().item() == pytest.approx(0.5)
    signed = explain.attribute(model, ramp - 1.5, GradCAM(relu=False), target=0, layer="0")
    assert signed.values.min() < 0
    assert signed.heatmap.min() == 0
    assert signed.signed.min().item() == pytest.approx(-1)


def test_heatmaps_of_pixel_methods_take_the_largest_channel_or_the_sum() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 2, 1, bias=False))
    model[1].weight.data = torch.tensor([[1.0, 0.0, -4.0, 1.0, 2.0, 1.0]])
    x = torch.ones(1, 3, 1, 2)
    assert explain.attribute(model, x, "saliency", target=0).heatmap.tolist() == [[[1.0, 0.25]]]
    assert explain.attribute(model, x, InputXGradient(), target=0).heatmap.tolist() == [[[0.5, 1.0]]]


def test_several_layers_are_fused_and_each_map_is_kept(net: TinyNet, x: torch.Tensor) -> None:
    both = explain.attribute(net, x, "gradcam", target=1, layer=["layer1", "layer2"])
    assert both.layer == ("layer1", "layer2")
    assert both.values.shape == (3, 12, 10)
    total = torch.zeros(3, 12, 10, dtype=torch.float64)
    for name in both.layer:
        alone = explain.attribute(net, x, "gradcam", target=1, layer=name).values
        torch.testing.assert_close(both.maps[name], alone, rtol=1e-12, atol=1e-14)
        for i in range(3):
            total[i] += plain.enlarge(alone[i] / alone[i].max(), (12, 10)) / 2
    torch.testing.assert_close(both.values, total, rtol=1e-9, atol=1e-12)
    assert explain.attribute(net, x, "saliency", layer=["layer1", "layer2"]).layer is None
