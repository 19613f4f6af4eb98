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
from tests.conftest import Made, settled
from tests.methods import plain
from tests.peers.common import (
    LAYERS,
    TARGET,
    X,
    agree,
    off,
    photo,
    random,
    random_model,
    resnet,
)

peer = pytest.importorskip("captum.attr", reason="Captum comes with the extra 'peers'")

MODEL = plain.module_of(LAYERS)
IMAGE = X[None]
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


def residual(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A block whose addition is a module or not, between a convolution and a head."""
    x = net.relu(net.conv(x))
    branch = net.norm(net.inner(x))
    both = net.addition(branch, x) if hasattr(net, "addition") else branch + x
    return net.fc(net.pool(net.last(both)).flatten(1))


def test_lrp_is_the_same_where_additions_are_modules_and_else_copies_relevance() -> None:
    modules = pytest.importorskip("captum.attr._utils.custom_modules", reason="is of Captum")
    linear = When(("convolution", "dense", "batchnorm"))
    composite = Composite("captum", ((linear, Epsilon(1e-9, absolute=True)),))
    x = torch.rand(1, 3, 8, 8, dtype=torch.float64)
    parts: dict[str, Any] = {"conv": nn.Conv2d(3, 4, 3, padding=1), "norm": nn.BatchNorm2d(4)}
    parts |= {"inner": nn.Conv2d(4, 4, 3, padding=1), "relu": nn.ReLU(), "last": nn.ReLU()}
    parts |= {"pool": nn.AdaptiveAvgPool2d(1), "fc": nn.Linear(4, 3)}
    model = Made(residual, **parts).double().eval()
    relevance = ours(model, methods.LRP(composite), x, 0)
    copied = peer.LRP(model).attribute(x, target=0)
    model.addition = modules.Addition_Module()
    shared = peer.LRP(model).attribute(x, target=0)
    assert agree(ours(model, methods.LRP(composite), x, 0), shared)
    assert agree(relevance, shared)
    assert off(copied, shared) > 0.2


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
    assert agree(guided, ours(model, "guidedgradcam", x, layer=layer, placement="even"))


RULES = {
    "gausslegendre": "gausslegendre",
    "left": "riemann_left",
    "right": "riemann_right",
    "midpoint": "riemann_middle",
}


@pytest.mark.parametrize("rule", RULES)
def test_integrated_gradients_are_the_same(rule: Any) -> None:
    x = torch.stack([photo(), photo(5)])
    found, delta = peer.IntegratedGradients(MODEL).attribute(
        x, 0.5, TARGET, n_steps=20, method=RULES[rule], return_convergence_delta=True
    )
    method = methods.IntegratedGradients(20, 0.5, rule)
    expected = explain.attribute(MODEL, x, method, target=TARGET)
    assert agree(found, expected.values)
    assert agree(delta, expected.delta)


# Where it computes something else


def deep(pool: nn.Module) -> nn.Module:
    """A network of modules, each called once, which Captum hangs its rule on."""
    first = [nn.Conv2d(3, 5, 3), nn.ReLU(), pool]
    last = [nn.Conv2d(5, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 4)]
    return settled(nn.Sequential(*first, *last)).double()


@pytest.mark.parametrize("pool", [nn.AvgPool2d(2), nn.MaxPool2d(2)], ids=["mean", "maximum"])
def test_deeplift_is_the_same_but_captums_loses_differences_at_maxima(pool: nn.Module) -> None:
    """Its values miss the difference of the scores; ours add up to it."""
    model = deep(pool)
    x = random(1, 2, 3, 10, 8)
    baseline = random(2, 1, 3, 10, 8)
    theirs = peer.DeepLift(model).attribute(x, baseline.expand_as(x).clone(), TARGET)
    values = ours(model, methods.DeepLIFT(baseline[0]), x)
    difference = (model(x) - model(baseline))[:, TARGET].detach()
    assert torch.allclose(values.sum((1, 2, 3)), difference, rtol=1e-10)
    if isinstance(pool, nn.AvgPool2d):
        assert agree(theirs, values)
    else:
        assert (theirs.sum((1, 2, 3)) - difference).abs().max() > 0.05


def test_expected_gradients_are_the_same_for_the_same_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    baselines = torch.stack([photo(i) for i in (3, 4, 5)])
    draws = [RandomPoints(6, baselines, 0.0, 2).drawing(IMAGE)(0, sample) for sample in range(6)]
    chosen = [[torch.equal(each, start) for each in baselines].index(True) for start, *_ in draws]
    shares = np.array([share for *_, share in draws])
    monkeypatch.setattr("numpy.random.choice", lambda count, size: np.array(chosen))
    monkeypatch.setattr("numpy.random.uniform", lambda low, high, size: shares)
    shap = peer.GradientShap(MODEL)
    theirs = shap.attribute(IMAGE, baselines, n_samples=6, stdevs=0.0, target=TARGET)
    monkeypatch.undo()
    assert agree(theirs, ours(MODEL, methods.ExpectedGradients(6, baselines, seed=2), IMAGE))


# Covered photos; Captum adds up in single precision, whatever the model's


MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]] * 3 + [[3, 3, 3, 4, 4, 4, 5, 5]] * 3)


@pytest.mark.parametrize(("window", "stride"), [(3, 2), (4, 1)])
def test_occlusion_is_the_same(window: int, stride: int) -> None:
    sides = {"sliding_window_shapes": (3, window, window), "strides": (3, stride, stride)}
    theirs = peer.Occlusion(MODEL).attribute(IMAGE, target=TARGET, **sides)
    assert agree(theirs[:, 0], ours(MODEL, methods.Occlusion(window, stride), IMAGE), 1e-6)


def test_kernelshap_keeps_the_sum_where_captum_weighs_its_ends_heavily() -> None:
    """Captum takes the end points as samples of weight 1,000,000: its values add up only nearly;
    with all coalitions, values are the same."""
    pytest.importorskip("sklearn", reason="captum's LIME fits with scikit-learn")
    options: Any = {"target": TARGET, "feature_mask": MASK[None, None]}
    exact = peer.ShapleyValues(MODEL).attribute(IMAGE, **options)[0, 0]
    assert agree(exact, ours(MODEL, methods.KernelSHAP(regions=MASK), IMAGE)[0])
    theirs = peer.KernelShap(MODEL).attribute(IMAGE, n_samples=40, **options)[0, 0]
    values = ours(MODEL, methods.KernelSHAP(40, MASK), IMAGE)[0]
    gain = float((MODEL(IMAGE) - MODEL(0 * IMAGE)).detach()[0, TARGET])
    places = ([0, 0, 0, 3, 3, 3], [0, 3, 6, 0, 3, 6])
    assert float(values[places].sum()) == pytest.approx(gain, rel=1e-10)
    assert abs(float(theirs[places].sum()) - gain) > 1e-10 * abs(gain)
    # for as many runs, of which it draws some twice
    assert off(values, exact) < off(theirs, exact)


def test_lime_is_the_same_with_the_same_samples_kernel_and_ridge() -> None:
    """Captum's own default is a Lasso, which may set every coefficient to zero."""
    pytest.importorskip("sklearn", reason="captum's LIME fits with scikit-learn")
    from captum._utils.models.linear_model import SkLearnRidge

    method = methods.LIME(40, MASK, ridge=0.7)
    # ours takes the photo itself as one more sample
    drawn = [torch.ones(6, dtype=torch.bool), *method.design.rows(6)]
    samples = iter(drawn)
    lime = peer.LimeBase(
        MODEL,
        SkLearnRidge(alpha=0.7),
        similarity_func=lambda whole, covered, z, **_: torch.exp(
            -(((1 - z.mean().sqrt()) / 0.25) ** 2)
        ),
        perturb_func=lambda whole, **_: next(samples).double()[None],
        perturb_interpretable_space=True,
        from_interp_rep_transform=lambda z, whole, **_: whole * z[0][MASK],
        to_interp_rep_transform=None,
    )
    theirs = lime.attribute(IMAGE, target=TARGET, n_samples=len(drawn))[0][MASK]
    assert agree(theirs, ours(MODEL, method, IMAGE)[0], 1e-6)
