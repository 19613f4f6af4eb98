"""What must hold for any network of a kind, on random ones."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import explain
from explain.methods import GradCAM

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
sizes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(4, 9), st.integers(4, 9))  # N, C, H, W
seeds = st.integers(0, 10**6)


def network(
    seed: int, channels: int, *, bias: bool, positive: bool = False, pooled: bool = True, size: tuple[int, int]
) -> nn.Sequential:
    torch.manual_seed(seed)
    head: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3, bias=bias)]
    if not pooled:
        head = [nn.Flatten(), nn.Linear(4 * size[0] * size[1], 3, bias=bias)]
    model = (
        nn.Sequential(
            nn.Conv2d(channels, 5, 3, padding=1, bias=bias),
            nn.ReLU(inplace=True),
            nn.Conv2d(5, 4, 3, padding=1, bias=bias),
            nn.ReLU(inplace=True),
            *head,
        )
        .double()
        .eval()
    )
    if positive:
        for parameter in model[2:].parameters():
            parameter.data.abs_()
    return model


def images(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@SETTINGS
@given(sizes, seeds)
def test_without_biases_input_times_gradient_adds_up_to_the_score(shape: tuple[int, int, int, int], seed: int) -> None:
    model = network(seed, shape[1], bias=False, pooled=False, size=shape[2:])
    a = explain.attribute(model, images(seed, shape), "inputxgradient", target=1)
    torch.testing.assert_close(a.values.sum((1, 2, 3)), a.score, rtol=1e-9, atol=1e-12)


@SETTINGS
@given(sizes, seeds)
def test_before_average_and_linear_head_gradcam_is_cam_over_its_area(
    shape: tuple[int, int, int, int], seed: int
) -> None:
    model, x = network(seed, shape[1], bias=True, size=shape[2:]), images(seed, shape)
    found = explain.attribute(model, x, GradCAM(relu=False), target=2, layer="3").values
    with torch.no_grad():
        cam = torch.einsum("k,nkhw->nhw", model[6].weight[2], model[:4](x))
    torch.testing.assert_close(found, cam / (shape[2] * shape[3]), rtol=1e-9, atol=1e-12)


@SETTINGS
@given(sizes, seeds)
def test_with_all_weights_downstream_positive_guided_backprop_is_the_gradient_of_rectified_paths(
    shape: tuple[int, int, int, int], seed: int
) -> None:
    """Nothing negative ever arrives at a ReLU, so clamping changes nothing."""
    model, x = network(seed, shape[1], bias=True, positive=True, size=shape[2:]), images(seed, shape)
    guided = explain.attribute(model, x, "guidedbackprop", target=0).values
    source = x.clone().requires_grad_()
    gradient = torch.autograd.grad(model(source)[:, 0].sum(), source)[0]
    torch.testing.assert_close(guided, gradient, rtol=1e-9, atol=1e-12)


@SETTINGS
@given(sizes, seeds, st.floats(0.1, 10))
def test_scaling_the_head_scales_every_attribution(shape: tuple[int, int, int, int], seed: int, factor: float) -> None:
    model, x = network(seed, shape[1], bias=True, positive=True, size=shape[2:]), images(seed, shape)
    before = explain.attribute_all(model, x, explain.list_methods(), target=1)
    model[6].weight.data *= factor
    after = explain.attribute_all(model, x, explain.list_methods(), target=1)
    for name, a in before.items():
        power = 2 if name == "guidedgradcam" else 1
        torch.testing.assert_close(after[name].values, a.values * factor**power, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(after[name].heatmap, a.heatmap, rtol=1e-4, atol=1e-5)
