from __future__ import annotations

import pytest
import torch
from torch import nn

from explain import HookError, LayerError
from explain.hooks import HookGroup
from explain.hooks.graph import accumulator
from explain.hooks.layer_names import select_places
from tests.conftest import TinyNet


def test_select_takes_names_patterns_types_and_modules(net: TinyNet) -> None:
    assert list(select_places(net, "layer1.*")) == ["layer1.0", "layer1.1", "layer1.2"]
    assert list(select_places(net, [net.fc, "conv1"])) == ["fc", "conv1"]
    assert list(select_places(net, nn.BatchNorm2d)) == ["bn1", "layer2.1"]
    with pytest.raises(LayerError, match="the model has no"):
        select_places(net, nn.LSTM)
    with pytest.raises(LayerError, match="a ReLU that is not in"):
        select_places(net, nn.ReLU())
    with pytest.raises(LayerError, match="empty"):
        select_places(net, [])
    with pytest.raises(LayerError, match="got 3"):
        select_places(net, 3)  # type: ignore[arg-type]


def test_a_group_without_a_model_refuses_layers_and_plain_tensors() -> None:
    with HookGroup() as group:
        with pytest.raises(HookError, match="without"):
            group.forward("conv", lambda *_: None)
        with pytest.raises(HookError, match="gradient"):
            group.tensor(torch.ones(1), lambda gradient: gradient)
        with pytest.raises(HookError, match="backward"):
            group.after_backward(lambda: None)
        with pytest.raises(HookError, match="requires"):
            accumulator(torch.ones(1))


@pytest.mark.parametrize("prepend", [False, True])
def test_prepended_hooks_come_first(prepend: bool) -> None:
    model = nn.Sequential(nn.Identity())
    order = []
    model[0].register_forward_pre_hook(lambda *_: order.append("forward-pre A"))
    model[0].register_forward_hook(lambda *_: order.append("forward A"))
    with HookGroup(model) as group:
        group.backward_pre("0", lambda *_: order.append("backward-pre A"))
        group.backward("0", lambda *_: order.append("backward A"))
        group.forward_pre("0", lambda module, args: order.append("forward-pre B"), prepend=prepend)
        group.forward("0", lambda module, args, output: order.append("forward B"), prepend=prepend)
        group.backward_pre("0", lambda module, go: order.append("backward-pre B"), prepend=prepend)
        group.backward("0", lambda module, gi, go: order.append("backward B"), prepend=prepend)
        model(torch.ones(1, requires_grad=True)).backward()
    letters = "BA" if prepend else "AB"
    kinds = ["forward-pre", "forward", "backward-pre", "backward"]
    assert order == [f"{kind} {letter}" for kind in kinds for letter in letters]
