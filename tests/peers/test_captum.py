"""Against Captum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import methods
from explain.methods.path import RandomPoints
from explain.relevance import Composite, Epsilon, When
from tests.methods import plain
from tests.peers.common import (
    TARGET,
    agree,
    network,
    off,
    photo,
    random,
    random_model,
    resnet,
)

peer = pytest.importorskip("captum.attr", reason="Captum comes with the extra 'peers'")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting .* hooks on ReLU activations"),  # said at every call
    pytest.mark.filterwarnings("ignore:Setting forward, backward hooks and attributes"),
    pytest.mark.filterwarnings("ignore:Input Tensor .* did not already require gradients"),
]


def ours(
    model: nn.Module, method: Any, x: torch.Tensor, target: int = TARGET, **more: Any
) -> torch.Tensor:
    return explain.attribute(model, x, method, target=target, **more).values


# Where it follows the papers


PIXELS = {
    "Saliency": "saliency",
    "InputXGradient": "inputxgradient",
    "GuidedBackprop": "guidedbackprop",
    "Deconvolution": "deconvnet",
}


@pytest.mark.parametrize("name", PIXELS)
def test_pixel_methods_are_the_same_where_every_relu_is_a_module(name: str) -> None:
    model = random_model("resnet18")
    x = random(0, 1, 3, 64, 64)
    assert agree(getattr(peer, name)(model).attribute(x, TARGET), ours(model, PIXELS[name], x))


class Residual(nn.Module):
    """A block whose addition is a module or not, between a convolution and a head."""

    def __init__(self, addition: nn.Module | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.relu = nn.ReLU()
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.addition = addition
        self.last = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.conv(x))
        branch = self.norm(self.inner(x))
        both = branch + x if self.addition is None else self.addition(branch, x)
        scores: torch.Tensor = self.fc(self.pool(self.last(both)).flatten(1))
        return scores


def test_lrp_is_the_same_where_additions_are_modules_and_else_copies_relevance() -> None:
    modules = pytest.importorskip("captum.attr._utils.custom_modules", reason="is of Captum")
    linear = When(("convolution", "dense", "batchnorm"))
    composite = Composite("captum", ((linear, Epsilon(1e-9, absolute=True)),))
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = []
    for addition in (modules.Addition_Module(), None):
        torch.manual_seed(0)
        model = Residual(addition).double().eval()
        values.append(peer.LRP(model).attribute(x, target=TARGET % 3).detach())
        relevance = ours(model, methods.LRP(composite), x, TARGET % 3)
        torch.testing.assert_close(
            relevance, values[0], rtol=0, atol=1e-5 * float(values[0].abs().max())
        )
    assert (values[1] - values[0]).abs().max() > 0.2 * values[0].abs().max()


def test_layer_methods_are_the_same_on_a_resnet() -> None:
    model = resnet()
    x = random(0, 1, 3, 96, 64)
    layer = "layer2"
    inside = model.layer2
    gradcam = peer.LayerGradCam(model, inside).attribute(x, TARGET, relu_attributions=True)[:, 0]
    assert agree(gradcam, ours(model, "gradcam", x, layer=layer))
    product = peer.LayerGradientXActivation(model, inside).attribute(x, TARGET)
    assert agree(product.sum(1), ours(model, "hirescam", x, layer=layer))
    guided = peer.GuidedGradCam(model, inside).attribute(x, TARGET, interpolate_mode="bilinear")
    assert agree(guided, ours(model, "guidedgradcam", x, layer=layer))


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("gausslegendre", "gausslegendre"),
        ("left", "riemann_left"),
        ("right", "riemann_right"),
        ("midpoint", "riemann_middle"),
    ],
)
def test_integrated_gradients_are_the_same(rule: Any, name: str) -> None:
    model = plain.module_of(network())
    x = torch.stack([photo(), photo(5)])
    found, delta = peer.IntegratedGradients(model).attribute(
        x, 0.5, TARGET, n_steps=20, method=name, return_convergence_delta=True
    )
    expected = explain.attribute(
        model, x, methods.IntegratedGradients(20, 0.5, rule), target=TARGET
    )
    assert agree(found, expected.values)
    assert agree(delta, expected.delta)


# Where it computes something else


def deep(pool: nn.Module) -> nn.Module:
    """A network of modules, each called once, which Captum hangs its rule on."""
    layers = [
        nn.Conv2d(3, 5, 3),
        nn.ReLU(),
        pool,
        nn.Conv2d(5, 4, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 4),
    ]
    model = nn.Sequential(*layers).double()
    for i, parameter in enumerate(model.parameters()):
        parameter.data = random(i, *parameter.shape) * 0.4
    return model


def test_deeplift_is_the_same_where_every_operation_is_a_module() -> None:
    model = deep(nn.AvgPool2d(2))
    x = random(1, 2, 3, 10, 8)
    baseline = random(2, 3, 10, 8)
    expected = peer.DeepLift(model).attribute(x, baseline[None].expand_as(x).clone(), TARGET)
    assert agree(expected, ours(model, methods.DeepLIFT(baseline), x))


def test_expected_gradients_are_the_same_for_the_same_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = plain.module_of(network())
    x = photo()[None]
    baselines = torch.stack([photo(i) for i in (3, 4, 5)])
    points = RandomPoints(6, baselines, 0.0, 2)
    draws = [points.drawing(x)(0, sample) for sample in range(6)]
    chosen = [
        next(i for i, each in enumerate(baselines) if torch.equal(each, start))
        for start, _, _ in draws
    ]
    monkeypatch.setattr("numpy.random.choice", lambda count, size: np.array(chosen))
    monkeypatch.setattr(
        "numpy.random.uniform", lambda low, high, size: np.array([share for _, _, share in draws])
    )
    theirs = peer.GradientShap(model).attribute(
        x, baselines, n_samples=6, stdevs=0.0, target=TARGET
    )
    monkeypatch.undo()
    assert agree(theirs, ours(model, methods.ExpectedGradients(6, baselines, seed=2), x))


def test_captums_deeplift_loses_differences_at_maxima() -> None:
    """Its values miss the difference of the scores; ours add up to it."""
    model = deep(nn.MaxPool2d(2))
    x = random(1, 2, 3, 10, 8)
    baseline = random(2, 3, 10, 8)
    with torch.no_grad():
        difference = (model(x) - model(baseline[None]))[:, TARGET]
    theirs = peer.DeepLift(model).attribute(x, baseline[None].expand_as(x).clone(), TARGET)
    assert (theirs.flatten(1).sum(1) - difference).abs().max() > 0.05
    assert torch.allclose(
        ours(model, methods.DeepLIFT(baseline), x).flatten(1).sum(1), difference, rtol=1e-10
    )


# Covered photos; Captum adds up in single precision, whatever the model's


MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]] * 3 + [[3, 3, 3, 4, 4, 4, 5, 5]] * 3)


@pytest.mark.parametrize(("window", "stride"), [(3, 2), (4, 1)])
def test_occlusion_is_the_same(window: int, stride: int) -> None:
    model = plain.module_of(network())
    x = photo()[None]
    sides = {"sliding_window_shapes": (3, window, window), "strides": (3, stride, stride)}
    theirs = peer.Occlusion(model).attribute(x, target=TARGET, **sides)
    assert agree(theirs[:, 0], ours(model, methods.Occlusion(window, stride), x), 1e-6)


def test_exact_shapley_values_are_the_same() -> None:
    model = plain.module_of(network())
    x = photo()[None]
    mask = MASK.clamp(max=4)
    theirs = peer.ShapleyValues(model).attribute(x, target=TARGET, feature_mask=mask[None, None])
    found = explain.attribute(model, x, methods.KernelSHAP(regions=mask), target=TARGET)
    assert found.samples == 30
    assert agree(theirs[:, 0], found.values)


def test_kernelshap_keeps_the_sum_where_captum_weighs_its_ends_heavily() -> None:
    """Captum takes the end points as samples of weight 1,000,000: its values add up only nearly."""
    pytest.importorskip("sklearn", reason="captum's LIME fits with scikit-learn")
    model = plain.module_of(network())
    x = photo()[None]
    torch.manual_seed(0)
    theirs = peer.KernelShap(model).attribute(
        x, target=TARGET, feature_mask=MASK[None, None], n_samples=40
    )[:, 0]
    found = explain.attribute(model, x, methods.KernelSHAP(40, MASK), target=TARGET)
    exact = ours(model, methods.KernelSHAP(62, MASK), x)
    gain = float((model(x) - model(0 * x)).detach()[0, TARGET])
    places = [(0, 0), (0, 3), (0, 6), (3, 0), (3, 3), (3, 6)]
    assert sum(float(found.values[0][place]) for place in places) == pytest.approx(gain, rel=1e-10)
    assert abs(sum(float(theirs[0][place]) for place in places) - gain) > 1e-10 * abs(gain)
    # for as many runs, of which it draws some twice
    assert off(found.values, exact) < off(theirs, exact)


def test_lime_is_the_same_with_the_same_samples_kernel_and_ridge() -> None:
    """Captum's own default is a Lasso, which may set every coefficient to zero."""
    pytest.importorskip("sklearn", reason="captum's LIME fits with scikit-learn")
    from captum._utils.models.linear_model import SkLearnRidge

    model = plain.module_of(network())
    x = photo()[None]
    method = methods.LIME(40, MASK, ridge=0.7)
    # ours takes the photo itself as one more sample
    drawn = [torch.ones(6, dtype=torch.bool), *method.design.rows(6)]
    samples = iter(drawn)
    lime = peer.LimeBase(
        model,
        SkLearnRidge(alpha=0.7),
        similarity_func=lambda whole, covered, z, **_: torch.exp(
            -(((1 - z.mean().sqrt()) / 0.25) ** 2)
        ),
        perturb_func=lambda whole, **_: next(samples).double()[None],
        perturb_interpretable_space=True,
        from_interp_rep_transform=lambda z, whole, **_: whole * z[0][MASK],
        to_interp_rep_transform=None,
    )
    theirs = lime.attribute(x, target=TARGET, n_samples=len(drawn))[0][MASK]
    assert agree(theirs, ours(model, method, x)[0], 1e-6)
