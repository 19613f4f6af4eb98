"""What must hold for any network of a kind, on random ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.methods import (
    AblationCAM,
    GradCAM,
    HiResCAM,
    IntegratedGradients,
    XGradCAM,
)
from tests.conftest import settled

Shape = tuple[int, int, int, int]
# N, C, H, W
sizes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(4, 9), st.integers(4, 9))
seeds = st.integers(0, 10**6)


def for_many(test: Callable[[Shape, int], None]) -> Callable[[], None]:
    return settings(max_examples=25, deadline=None, derandomize=True)(given(sizes, seeds)(test))


def network(
    seed: int,
    channels: int,
    *,
    bias: bool,
    positive: bool = False,
    pooled: bool = True,
    size: tuple[int, int],
) -> nn.Sequential:
    torch.manual_seed(seed)
    head = nn.Linear(4 if pooled else 4 * size[0] * size[1], 3, bias=bias)
    model = (
        nn.Sequential(
            nn.Conv2d(channels, 5, 3, padding=1, bias=bias),
            nn.ReLU(inplace=True),
            nn.Conv2d(5, 4, 3, padding=1, bias=bias),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1) if pooled else nn.Identity(),
            nn.Flatten(),
            head,
        )
        .double()
        .eval()
    )
    if positive:
        for parameter in model[2:].parameters():
            parameter.data.abs_()
    return model


def images(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@for_many
def test_behind_average_and_linear_head_the_family_agrees(shape: Shape, seed: int) -> None:
    """Grad-CAM = CAM / area = HiResCAM = XGrad-CAM, and Ablation-CAM's weight is w mean(A) / y."""
    model = network(seed, shape[1], bias=True, size=shape[2:])
    x = images(seed, shape)
    methods = [
        "cam",
        GradCAM(relu=False),
        HiResCAM(),
        XGradCAM(relu=False),
        AblationCAM(relu=False),
    ]
    found = {
        name: a.values
        for name, a in explain.attribute(model, x, methods, target=2, layer="3").items()
    }
    expected = found["cam"] / (shape[2] * shape[3])
    for name in ("gradcam", "hirescam", "xgradcam"):
        assert_close(found[name], expected, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        maps = model[:4](x)
        scores = model(x)[:, 2]
    weights = model[6].weight[2] * maps.mean((2, 3)) / scores[:, None]
    ablation = torch.einsum("nk,nkhw->nhw", weights.detach(), maps)
    assert_close(found["ablationcam"], ablation, rtol=1e-8, atol=1e-10)


@for_many
def test_integrated_gradients_are_complete_for_a_smooth_network(shape: Shape, seed: int) -> None:
    model = network(seed, shape[1], bias=True, size=shape[2:])
    x = images(seed, shape)
    for i in (1, 3):
        model[i] = nn.Tanh()
    found = explain.attribute(model, x, IntegratedGradients(steps=32), target=1)
    with torch.no_grad():
        gained = (model(x) - model(torch.zeros_like(x)))[:, 1]
    assert_close(found.values.sum((1, 2, 3)), gained, rtol=1e-4, atol=1e-5)
    assert_close(found.delta, found.values.sum((1, 2, 3)) - gained, rtol=1e-9, atol=1e-12)


@for_many
def test_full_gradients_are_complete(shape: Shape, seed: int) -> None:
    model = network(seed, shape[1], bias=True, size=shape[2:])
    x = images(seed, shape)
    model.insert(1, settled(nn.BatchNorm2d(5), seed).double().eval())
    found = explain.attribute(model, x, "fullgrad", target=1)
    assert_close(found.delta, torch.zeros_like(found.score), rtol=0, atol=1e-9)
