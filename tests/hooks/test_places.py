"""Hooks on one call of a layer and on its input, and what handles and recorded values promise."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from explain import ExplainError, HookError
from explain.hooks import HookGroup, capture
from tests.conftest import Made


def twice() -> nn.Module:
    """A convolution and a rectifier that run twice."""
    conv = nn.Conv2d(2, 2, 1, bias=False)
    return Made(
        lambda net, x: net.relu(net.conv(net.relu(net.conv(x)))),
        conv=conv,
        relu=nn.ReLU(inplace=True),
    )


def x() -> torch.Tensor:
    return torch.rand(1, 2, 3, 3, generator=torch.Generator().manual_seed(0)) + 0.5


@pytest.mark.parametrize("call", [0, 1])
def test_a_hook_on_one_call_of_a_layer_acts_for_that_call_in_every_pass(call: int) -> None:
    net = twice()
    first = net.conv(x()).detach() * (10 if call == 0 else 1)
    second = net.conv(first.relu()).detach() * (10 if call == 1 else 1)
    with HookGroup(net) as group:
        group.forward(f"conv@{call}", lambda module, args, output: output * 10)
        for _ in range(2):
            assert_close(net(x()), second.relu())


def test_a_hook_on_the_input_of_a_layer_changes_what_that_layer_alone_is_given() -> None:
    def both(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        held = {"x": x}
        return net.a(held)["x"] * 100 + net.b(held["x"])

    model = Made(both, a=nn.Identity(), b=nn.Identity())
    with HookGroup(model) as group:
        group.forward("a:input", lambda module, args, output: output + 1)
        # what it returned is the caller's dictionary again
        assert model(torch.tensor(1.0)).item() == 101
    net = twice()
    with HookGroup(net) as group:
        group.forward("conv:input@1", lambda module, args, output: output * 0)
        assert net(x()).abs().max() == 0
    with HookGroup(net) as group, pytest.raises(HookError, match="input"):
        group.backward("conv:input", lambda module, grad_input, grad_output: None)


def test_a_call_that_backward_repeats_is_refused_where_a_hook_is_on_one_call() -> None:
    inner = twice()
    net = Made(lambda model, x: checkpoint(model.inner, x, use_reentrant=False), inner=inner)
    with HookGroup(net) as group, pytest.raises(HookError, match="checkpoint"):
        group.forward("inner.conv@1", lambda module, args, output: output * 2)
        net(x().requires_grad_()).sum().backward()


def test_a_layer_that_never_ran_is_told_by_an_error_that_is_a_key_error_too() -> None:
    net = nn.ModuleDict({"used": nn.Linear(2, 2), "left": nn.Linear(2, 2)})
    with capture(net, ["used", "left"]) as seen:
        net["used"](torch.ones(1, 2)).sum()
    for name in ("left", "other"):
        with pytest.raises(ExplainError, match="layer") as caught:
            seen.activations[name]
        assert isinstance(caught.value, KeyError)
        assert not str(caught.value).startswith(("'", '"'))
    with pytest.raises(KeyError, match="gradient"):
        seen.gradients["used"]
    assert "left" not in seen.activations
    assert list(seen.activations) == ["used"]


def test_a_captured_activation_that_a_hook_returns_is_not_overwritten() -> None:
    net = nn.Sequential(nn.Conv2d(2, 16, 1), nn.ReLU(inplace=True))
    with torch.no_grad(), capture(net, "0", gradients=False) as seen:
        net(x() - 1)
    copied = seen.activations["0"].clone()
    assert copied.min() < 0
    with torch.no_grad(), HookGroup(net) as group:
        group.forward("0", lambda module, args, output: seen.records[0].activation)
        net(x())
    with torch.no_grad(), net[0].register_forward_hook(lambda *args: seen.activations["0"]):
        net(x())
    assert torch.equal(seen.records[0].activation, copied)
    assert torch.equal(seen.activations["0"], copied)


def test_calls_of_a_module_that_calls_itself_are_counted_as_they_end() -> None:
    def recursive(model: nn.Module, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return torch.tanh(model.layer(model(x, depth - 1) if depth else x))

    layer = nn.Linear(2, 2).double()
    model = nn.Sequential(Made(recursive, layer=layer))
    ones = torch.ones(1, 2, dtype=torch.float64)
    with capture(model, "0@1") as seen:
        model(ones).sum().backward()
    second = torch.tanh(layer(torch.tanh(layer(ones))))
    score = torch.tanh(layer(second)).sum()
    assert_close(seen.gradients["0@1"], torch.autograd.grad(score, second)[0])


def test_gradients_that_are_neither_on_nor_off_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    with pytest.raises(HookError), capture(model, "0", gradients="full_backward"):  # type: ignore[arg-type]
        model(torch.ones(1, 2))
