"""What feeds the methods: PyTorch's own full-backward hooks give what the engine gives, where they
can be used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import explain
from explain.engine.needs import GradientsBy
from explain.hooks import HookGroup, capture, inspect
from explain.methods import GradCAM, GuidedBackprop, Saliency
from tests.conftest import settled


def network(*, inplace: bool) -> nn.Sequential:
    layers = [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace),
        nn.Conv2d(4, 6, 3, stride=2),
    ]
    model = nn.Sequential(
        *layers, nn.ReLU(inplace), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    )
    return settled(model).double().eval()


def photos() -> torch.Tensor:
    return (
        torch.rand(2, 3, 11, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        - 0.4
    )


def ways(inplace: bool) -> list[GradientsBy]:
    """What can bring gradients, where PyTorch allows it."""
    return ["autograd"] if inplace else ["autograd", "full_backward"]


@pytest.mark.parametrize("inplace", [False, True])
def test_gradcam_is_what_a_full_backward_hook_gives(inplace: bool) -> None:
    model = network(inplace=inplace)
    x = photos().requires_grad_()
    plain = network(inplace=False)  # with in-place operations, PyTorch refuses the hook
    with capture(plain, ["3"], gradients="full_backward") as seen:
        plain(x)[:, 2].sum().backward()
    weights = seen.gradients["3"].mean((2, 3), keepdim=True)
    expected = (weights * seen.activations["3"]).sum(1)
    for gradients in ways(inplace):
        method = GradCAM(relu=False, gradients=gradients)
        found = explain.attribute(model, x.detach(), method, target=2, layer="3")
        torch.testing.assert_close(found.values, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inplace", [False, True])
def test_guided_backpropagation_is_what_a_returned_grad_input_gives(inplace: bool) -> None:
    model = network(inplace=inplace)
    x = photos()
    plain = network(inplace=False)
    source = x.clone().requires_grad_()
    for module in plain:
        if isinstance(module, nn.ReLU):
            module.register_full_backward_hook(
                lambda module, grad_input, grad_output: (grad_input[0].clamp(min=0),)
            )
    plain(source)[:, 2].sum().backward()
    expected = source.grad
    for gradients in ways(inplace):
        found = explain.attribute(model, x, GuidedBackprop(gradients), target=2)
        torch.testing.assert_close(found.values, expected, rtol=1e-12, atol=1e-14)
    again = x.clone().requires_grad_()
    with HookGroup(model) as group:  # which in-place operations do not disturb
        group.backward(
            nn.ReLU, lambda module, grad_input, grad_output: (grad_input[0].clamp(min=0),)
        )
        model(again)[:, 2].sum().backward()
    torch.testing.assert_close(again.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inplace", [False, True])
def test_saliency_is_the_grad_input_of_the_first_layer(inplace: bool) -> None:
    model = network(inplace=inplace)
    x = photos()
    seen: list[torch.Tensor] = []
    plain = network(inplace=False)
    handle = plain[0].register_full_backward_hook(
        lambda module, grad_input, grad_output: seen.append(grad_input[0])
    )
    plain(x.clone().requires_grad_())[:, 2].sum().backward()
    handle.remove()
    for gradients in ways(inplace):
        found = explain.attribute(model, x, Saliency(gradients=gradients), target=2)
        torch.testing.assert_close(found.values, seen[0].abs(), rtol=1e-12, atol=1e-14)


def test_full_backward_hooks_say_where_they_cannot_be_used() -> None:
    model = network(inplace=True)
    x = photos().requires_grad_()
    with (
        pytest.raises(explain.LayerError, match="in-place"),
        capture(model, "1", gradients="full_backward"),
    ):
        model(x)
    assert not model[1]._backward_hooks
    with (
        pytest.raises(explain.LayerError, match="module"),
        capture(model, "3:input", gradients="full_backward"),
    ):
        pass


class Ways(nn.Module):
    """A network in which PyTorch's full-backward hooks see something else than autograd, as ``way``
    says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.conv, self.relu = way, nn.Conv2d(3, 4, 3), nn.ReLU(inplace=way == "in place")
        self.layer, self.head = Kept(way), nn.Linear(4, 5)

    def forward(self, photo: torch.Tensor) -> Any:
        if self.way == "in place at once":
            photo -= 0.1
        maps = self.layer(self.relu(self.conv(photo)))
        maps = torch.relu(maps) if self.way == "a function" else self.relu(maps)
        scores = self.head(maps.mean((2, 3)) + self.layer.kept[0].amax((2, 3)))
        return {"logits": scores} if self.way == "a mapping" else scores


class Kept(nn.Module):
    """A layer whose output also leaves in a list, with its gradient if ``way`` says so."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.kept, self.conv = way, list[torch.Tensor](), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        self.kept[:] = [y if self.way == "a list" else y.detach()]
        return y


@pytest.mark.parametrize(
    ("way", "refused"),
    [
        ("modules", []),
        ("in place", ["gradcam", "guidedbackprop"]),
        ("in place at once", ["guidedbackprop", "saliency"]),
        ("a function", ["guidedbackprop"]),
        ("a list", ["gradcam"]),
        ("a mapping", ["guidedbackprop", "saliency"]),
    ],
)
def test_methods_by_full_backward_hooks_are_those_by_autograd_or_refused(
    way: str, refused: list[str]
) -> None:
    torch.manual_seed(0)
    model = Ways(way).double().eval()
    x = photos()
    modes = [module.training for module in model.modules()]
    for name in ("gradcam", "guidedbackprop", "saliency"):
        for targets in ([2], [0, 4]):  # of several, each has hooks of its own
            method = f"{name}(gradients=full_backward)"
            if name in refused:
                with pytest.raises(explain.ExplainError, match="full-backward"):
                    explain.attribute(model, x, method, targets=targets, layer="layer")
                continue
            found = explain.attribute(model, x, method, targets=targets, layer="layer")
            expected = explain.attribute(model, x, name, targets=targets, layer="layer")
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.values, other.values, rtol=1e-12, atol=1e-14)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
    with pytest.raises(explain.ExplainError, match="positional"):
        explain.attribute(model, {"photo": x}, "saliency(gradients=full_backward)", target=2)


def test_calls_of_a_shared_layer_get_their_own_gradients() -> None:
    shared = nn.Linear(3, 3).double()
    model = nn.Sequential(shared, nn.Tanh(), shared)
    x = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
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
        self.layer = nn.Linear(3, 3).double()
        self.used = used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [x]
        for _ in range(3):
            outputs.append(self.layer(outputs[-1]).tanh())
        return torch.stack([outputs[1 + i] for i in self.used]).square().sum()


@pytest.mark.parametrize("way", ["backward", "another thread", "seen.backward", "calls of others"])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 2)])
def test_each_call_of_a_layer_has_its_own_gradient_or_none(used: tuple[int, ...], way: str) -> None:
    torch.manual_seed(0)
    model = SomeCalls(used)
    x = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
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

    layer = Layer().eval()
    x = torch.rand(2, 3, requires_grad=True)
    with capture(nn.Sequential(layer), "0", gradients="full_backward") as seen:
        layer(x)[1].pow(2).sum().backward()
    torch.testing.assert_close(seen.gradients["0"], 4 * x.detach())
    with (
        pytest.raises(explain.LayerError, match="dict"),
        capture(layer.train(), "", gradients="full_backward"),
    ):
        layer(x)


def test_operations_and_memory_are_counted() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.flatten(2).transpose(1, 2).reshape(len(x), 1, -1, 4)
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, groups=1), Attention(), nn.Flatten(), nn.Linear(63 * 4, 5)
    )
    found = {row.name: row for row in inspect(model, torch.rand(2, 3, 11, 9)).rows}
    assert found["0"].flops == 2 * (2 * 4 * 9 * 7) * 3 * 9
    assert found["1"].flops == 2 * (2 * 2 * 63 * 63 * 4)
    assert found["3"].flops == 2 * 2 * 63 * 4 * 5
    assert found[""].flops == sum(found[name].flops for name in ("0", "1", "3"))
    assert found["0"].memory == 4 * 2 * 4 * 9 * 7
