"""A small network whose gradients anybody can work out on paper; `examples/hooks_tour.py` has more
such figures."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from explain import HookError
from explain.hooks import HookGroup


def linear_network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    rows = torch.arange(1.0, 13).reshape(4, 3) * torch.tensor([[1.0], [-1], [1], [-1]])
    model[0].weight.data = rows
    model[0].bias.data = torch.tensor([1.0, 2, 3, 4])
    model[2].weight.data = torch.tensor([[1.0, 2, 3, 4]])
    model[2].bias.data = torch.ones(1)
    return model


def test_hooks_act_for_this_thread_only_and_until_the_block_ends() -> None:
    model = linear_network()
    calls: list[str] = []
    x = torch.ones(1, 3, requires_grad=True)
    with HookGroup(model) as group:
        group.forward(nn.Module, lambda module, args, output: calls.append("forward"))
        group.backward(nn.Module, lambda module, gi, go: calls.append("backward"))
        thread = threading.Thread(target=lambda: model(x).backward())
        thread.start()
        thread.join()
        assert calls == []
        model(x).backward()
    model(x).backward()
    assert calls == ["forward"] * 4 + ["backward"] * 4


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda g: g.forward("0", lambda module: None), "forward"),
        (lambda g: g.backward("1", lambda m, gi, go: gi * 2), "gradients"),
        (lambda g: g.backward("1", lambda m, gi, go: gi[0][:, :2]), "shape that it was given"),
        (lambda g: g.backward_pre("1", lambda m, go: 3), "backward-pre"),
        (lambda g: g.forward("0", lambda m, a, out: 1 / 0), "ZeroDivisionError"),
        (lambda g: g.backward("2", lambda m, gi, go: 1 / 0), "ZeroDivisionError"),
        (lambda g: g.backward("2", lambda m, gi, go: go[0].mul_(2) and None), "backward"),
        (lambda g: g.forward("0", 3), "callable"),
    ],
)
def test_a_hook_that_misbehaves_is_named(register: object, message: str) -> None:
    model = linear_network()
    x = torch.ones(1, 3, requires_grad=True)
    with pytest.raises(HookError, match=message), HookGroup(model) as group:
        register(group)  # type: ignore[operator]
        model(x).backward()
    assert not model[0]._forward_hooks
    assert x.requires_grad


def test_a_removed_hook_changes_no_gradient_of_a_pass_that_it_saw() -> None:
    model = linear_network()
    x = torch.ones(1, 3, requires_grad=True)
    group = HookGroup(model)
    group.backward("1", lambda module, grad_input, grad_output: (grad_input[0] * 0,))
    score = model(x)
    group.remove()
    score.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[22, 26, 30]]
