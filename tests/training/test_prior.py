from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad

import explain
from explain.training import AttributionPrior
from tests.conftest import snapshot


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Softplus(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Softplus(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    ).double()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mask = torch.zeros(2, 8, 8)
    mask[:, :4, :6] = 1
    return torch.rand(2, 3, 8, 8, dtype=torch.float64), torch.tensor([1, 0]), mask


def plain(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return grad(model(x).gather(1, labels[:, None]).sum(), x, create_graph=True)[0]


def gradients_of(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    found = grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


def test_outside_is_the_sum_of_squares_outside_the_mask_and_trains_the_weights() -> None:
    model = network()
    x, labels, mask = batch()
    before = snapshot(model)
    found = AttributionPrior("saliency", weight=3)(model, x, labels, mask)
    expected = 3 * (plain(model, x, labels) * (1 - mask[:, None])).square().sum() / 2
    assert torch.allclose(found, expected)
    assert torch.allclose(gradients_of(found, model), gradients_of(expected, model))
    assert snapshot(model) == before


def test_share_is_that_of_the_magnitudes_at_the_resolution_of_the_map() -> None:
    model = network()
    x, labels, mask = batch()
    method = "gradcam(relu=False)"
    found = AttributionPrior(method, "share", layer="3")(model, x, labels, mask)
    values = explain.attribute(model, x, method, target=labels, layer="3").values.abs()
    coarse = mask.double().reshape(2, 4, 2, 4, 2).mean((2, 4))
    expected = ((values * (1 - coarse)).sum((1, 2)) / values.sum((1, 2))).mean()
    assert torch.allclose(found, expected)
    assert bool(gradients_of(found, model).any())


@pytest.mark.parametrize("method", ["lrp", "integratedgradients(steps=2)", "gradcam(relu=False)"])
def test_sparsity_is_one_less_gini_of_all_pairs(method: str) -> None:
    model = network()
    x, labels, _ = batch()
    found = AttributionPrior(method, "sparsity")(model, x, labels)
    rows = explain.attribute(model, x, method, target=labels).values.flatten(1).abs()
    pairs = (rows[:, :, None] - rows[:, None]).abs().sum((1, 2))
    expected = 1 - pairs / (2 * rows.shape[1] * rows.sum(1))
    assert torch.allclose(found, expected.mean())
    assert bool(gradients_of(found, model).any())


def test_agreement_compares_the_map_of_the_changed_photo() -> None:
    model = network()
    x, labels, _ = batch()
    map_of = plain(model, x, labels).abs()
    brighter: Any = {"augment": lambda x: x * 1.2, "moves": False}
    for back, options in (
        (plain(model, x.flip(-1), labels).flip(-1), {}),
        (plain(model, x * 1.2, labels), brighter),
    ):
        found = AttributionPrior("saliency", "agreement", **options)(model, x, labels)
        cosine = F.cosine_similarity(map_of.flatten(1), back.abs().flatten(1))
        assert torch.allclose(found, (1 - cosine).mean())


def test_a_penalty_that_is_unknown_and_a_weight_that_is_none_are_refused() -> None:
    for options in ({"penalty": "inside"}, {"weight": float("nan")}):
        with pytest.raises(explain.MethodError, match="must be"):
            AttributionPrior(**options)  # type: ignore[arg-type]


def test_a_prior_needs_a_mask_of_the_right_shape_and_a_method_with_a_graph() -> None:
    model = network()
    x, labels, mask = batch()
    for other in (None, mask[:1], mask[:, :4], mask.unsqueeze(1).expand(-1, 3, -1, -1)):
        with pytest.raises(explain.MethodError, match="mask"):
            AttributionPrior()(model, x, labels, other)
    with pytest.raises(explain.MethodError, match="create_graph"):
        AttributionPrior("lime")(model, x, labels, mask)
