"""What feeds the methods: PyTorch's own full-backward hooks give what the engine gives, where they can be used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import explain
from explain.hooks import HookGroup, capture, inspect
from tests.conftest import settled


def network(*, inplace: bool) -> nn.Sequential:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace), nn.Conv2d(4, 6, 3, stride=2)]
    model = nn.Sequential(*layers, nn.ReLU(inplace), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    return settled(model).double().eval()


def photos() -> torch.Tensor:
    return torch.rand(2, 3, 11, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.4


@pytest.mark.parametrize("inplace", [False, True])
def test_gradcam_is_what_a_full_backward_hook_gives(inplace: bool) -> None:
    model, x = network(inplace=inplace), photos().requires_grad_()
    plain = network(inplace=False)  # with in-place operations, PyTorch refuses the hook
    with capture(plain, ["3"], gradients="full_backward") as seen:
        plain(x)[:, 2].sum().backward()
    weights = seen.gradients["3"].mean((2, 3), keepdim=True)
    expected = (weights * seen.activations["3"]).sum(1)
    found = explain.attribute(model, x.detach(), "gradcam(relu=False)", target=2, layer="3")
    torch.testing.assert_close(found.values, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inplace", [False, True])
def test_guided_backpropagation_is_what_a_returned_grad_input_gives(inplace: bool) -> None:
    model, x = network(inplace=inplace), photos()
    plain, source = network(inplace=False), x.clone().requires_grad_()
    for module in plain:
        if isinstance(module, nn.ReLU):
            module.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0].clamp(min=0),))
    plain(source)[:, 2].sum().backward()
    expected = source.grad
    found = explain.attribute(model, x, "guidedbackprop", target=2)
    torch.testing.assert_close(found.values, expected, rtol=1e-12, atol=1e-14)
    again = x.clone().requires_grad_()
    with HookGroup(model) as group:  # which in-place operations do not disturb
        group.backward(nn.ReLU, lambda module, grad_input, grad_output: (grad_input[0].clamp(min=0),))
        model(again)[:, 2].sum().backward()
    torch.testing.assert_close(again.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inplace", [False, True])
def test_saliency_is_the_grad_input_of_the_first_layer(inplace: bool) -> None:
    model, x = network(inplace=inplace), photos()
    seen: list[torch.Tensor] = []
    plain = network(inplace=False)
    handle = plain[0].register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_input[0]))
    plain(x.clone().requires_grad_())[:, 2].sum().backward()
    handle.remove()
    found = explain.attribute(model, x, "saliency", target=2)
    torch.testing.assert_close(found.values, seen[0].abs(), rtol=1e-12, atol=1e-14)


def test_full_backward_hooks_say_where_they_cannot_be_used() -> None:
    model, x = network(inplace=True), photos().requires_grad_()
    with pytest.raises(explain.LayerError, match="in-place"), capture(model, "1", gradients="full_backward"):
        model(x)
    assert not model[1]._backward_hooks
    with pytest.raises(explain.LayerError, match="module"), capture(model, "3:input", gradients="full_backward"):
        pass


def test_calls_of_a_shared_layer_get_their_own_gradients() -> None:
    shared = nn.Linear(3, 3).double()
    model, x = nn.Sequential(shared, nn.Tanh(), shared), torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    with capture(model, ["0@0", "0@1"], gradients="full_backward") as hooks:
        model(x).square().sum().backward()
    with capture(model, ["0@0", "0@1"]) as engine:
        model(x).square().sum().backward()
    for name in ("0@0", "0@1"):
        torch.testing.assert_close(hooks.gradients[name], engine.gradients[name])


class SomeCalls(nn.Module):
    """Calls its layer three times, and scores what the calls in ``used`` give."""

    def __init__(self, used: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.used = nn.Linear(3, 3).double(), used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [x]
        for _ in range(3):
            outputs.append(self.layer(outputs[-1]).tanh())
        return torch.stack([outputs[1 + i] for i in self.used]).square().sum()


@pytest.mark.parametrize("way", ["backward", "another thread", "seen.backward", "calls of others"])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 2)])
def test_each_call_of_a_layer_has_its_own_gradient_or_none(used: tuple[int, ...], way: str) -> None:
    torch.manual_seed(0)
    model, x = SomeCalls(used), torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    outputs = [model.layer(x)]
    outputs += [model.layer(outputs[-1].tanh())]
    outputs += [model.layer(outputs[-1].tanh())]
    score = torch.stack([outputs[i].tanh() for i in used]).square().sum()
    expected = torch.autograd.grad(score, outputs, allow_unused=True)
    with capture(model, "layer", gradients="full_backward") as seen:
        if way == "calls of others":
            in_thread(lambda: SomeCalls.forward(model, 3 * x).backward())
        score = model(x)
        if way == "calls of others":
            in_thread(lambda: SomeCalls.forward(model, 5 * x).backward())
    if way == "seen.backward":
        seen.backward(score)
        assert model.layer.weight.grad is None
    elif way == "another thread":
        in_thread(score.backward)
    else:
        score.backward()
    assert len(seen.records) == 3
    for record, gradient in zip(seen.records, expected, strict=True):
        if gradient is None:
            assert record.gradient is None
        else:
            torch.testing.assert_close(record.gradient, gradient, rtol=1e-12, atol=1e-14)


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_the_first_tensor_of_a_tuple_has_the_gradient_and_containers_are_refused() -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"maps": x * 2} if self.training else (3, x * 2)

    layer, x = Layer().eval(), torch.rand(2, 3, requires_grad=True)
    with capture(nn.Sequential(layer), "0", gradients="full_backward") as seen:
        layer(x)[1].pow(2).sum().backward()
    torch.testing.assert_close(seen.gradients["0"], 4 * x.detach())
    with pytest.raises(explain.LayerError, match="dict"), capture(layer.train(), "", gradients="full_backward"):
        layer(x)


def test_operations_and_memory_are_counted() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.flatten(2).transpose(1, 2).reshape(len(x), 1, -1, 4)
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    model = nn.Sequential(nn.Conv2d(3, 4, 3, groups=1), Attention(), nn.Flatten(), nn.Linear(63 * 4, 5))
    found = {row.name: row for row in inspect(model, torch.rand(2, 3, 11, 9)).rows}
    assert found["0"].flops == 2 * (2 * 4 * 9 * 7) * 3 * 9
    assert found["1"].flops == 2 * (2 * 2 * 63 * 63 * 4)
    assert found["3"].flops == 2 * 2 * 63 * 4 * 5
    assert found[""].flops == sum(found[name].flops for name in ("0", "1", "3"))
    assert found["0"].memory == 4 * 2 * 4 * 9 * 7
