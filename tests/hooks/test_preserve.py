from __future__ import annotations

import pytest
import torch
from torch import nn

from explain.hooks.preserve import evaluating, untouched
from tests.conftest import TinyNet, snapshot


def test_a_train_method_of_ones_own_is_not_called() -> None:
    class Frozen(nn.Module):
        def train(self, mode: bool = True) -> nn.Module:
            raise AssertionError("train() must not be called")

    model = Frozen()
    with evaluating(model):
        assert not model.training
    assert model.training


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_rng_gradient_mode_and_inference_mode_come_back(net: TinyNet, mode: type) -> None:
    with mode():
        before = snapshot(net)
        with untouched(net):
            assert not torch.is_inference_mode_enabled()
            torch.rand(3)
            torch.set_grad_enabled(not torch.is_grad_enabled())
        assert snapshot(net) == before
