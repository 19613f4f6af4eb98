"""What must hold for any network of a kind, on random ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import explain
from explain.methods import AblationCAM, GradCAM, HiResCAM, XGradCAM
from tests.conftest import settled

Shape = tuple[int, int, int, int]
# N, C, H, W
sizes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(4, 9), st.integers(4, 9))
seeds = st.integers(0, 10**6)


def for_many(test: Callable[[Shape, int], None]) -> Callable[[], None]:
    return settings(max_examples=15, deadline=None, derandomize=True)(given(sizes, seeds)(test))


def network(channels: int) -> nn.Sequential:
    layers = [
        nn.Conv2d(channels, 5, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(5, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ]
    return nn.Sequential(*layers).double()


@for_many
def test_behind_average_and_linear_head_the_family_agrees(shape: Shape, seed: int) -> None:
    """Grad-CAM = CAM / area = HiResCAM = XGrad-CAM, and Ablation-CAM's weight is w mean(A) / y."""
    torch.manual_seed(seed)
    model = network(shape[1])
    x = torch.randn(shape).double()
    signed = [GradCAM(relu=False), HiResCAM(), XGradCAM(relu=False)]
    methods = ["cam", *signed, AblationCAM(relu=False)]
    maps = explain.attribute(model, x, methods, target=2, layer="3")
    for method in signed:
        expected = maps["cam"].values / (shape[2] * shape[3])
        assert_close(maps[method.name].values, expected, rtol=1e-9, atol=1e-12)
    activations = model[:4](x)
    weights = model[6].weight[2] * activations.mean((2, 3)) / model(x)[:, 2:]
    ablation = torch.einsum("nk,nkhw->nhw", weights, activations)
    assert_close(maps["ablationcam"].values, ablation.detach(), rtol=1e-8, atol=1e-10)


@for_many
def test_full_gradients_are_complete(shape: Shape, seed: int) -> None:
    torch.manual_seed(seed)
    model = network(shape[1])
    x = torch.randn(shape).double()
    model.insert(1, settled(nn.BatchNorm2d(5), seed).double())
    model.eval()
    found = explain.attribute(model, x, "fullgrad", target=1)
    assert_close(found.delta, torch.zeros_like(found.score), rtol=0, atol=1e-9)
