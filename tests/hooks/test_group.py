from __future__ import annotations

import pytest
import torch
from torch import nn

from explain import HookError, LayerError
from explain.hooks import HookGroup, graph
from explain.hooks.graph import accumulator
from explain.hooks.layer_names import select_places
from tests.conftest import TinyNet, hook_count


def total_hooks(model: nn.Module) -> int:
    return sum(hook_count(module) for module in model.modules())


def test_hooks_are_gone_after_the_block_and_after_an_error_in_it(net: nn.Module) -> None:
    with HookGroup(net) as group:
        group.forward(nn.Conv2d, lambda *_: None)
        group.forward_pre("fc", lambda *_: None)
        assert total_hooks(net) == len(group) == 6
    assert total_hooks(net) == 0
    group = HookGroup(net)
    with pytest.raises(KeyboardInterrupt), group:
        group.forward("layer*", lambda *_: None)
        raise KeyboardInterrupt
    assert total_hooks(net) == 0
    group.remove()
    group.remove()
    assert len(group) == 0


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


def test_tensor_and_node_hooks_change_gradients_until_removed() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = x * 3
    z = y.relu().sum()
    relu = next(node for node in graph(z) if node.name() == "ReluBackward0")
    with HookGroup() as group:
        group.tensor(y, lambda gradient: gradient * 2)
        group.node(relu, lambda inputs, outputs: (inputs[0] + 1,))
        group.node_pre(relu, lambda outputs: (outputs[0] * 5,))
        assert torch.autograd.grad(z, x, retain_graph=True)[0].tolist() == [
            (5 + 1) * 2 * 3,
            (0 + 1) * 2 * 3,
        ]
    assert torch.autograd.grad(z, x)[0].tolist() == [3, 0]


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
