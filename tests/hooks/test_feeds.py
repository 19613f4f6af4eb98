"""What feeds the methods: full-backward hooks give what the engine gives, where they can be
used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import explain
from explain.hooks import capture


def photos() -> torch.Tensor:
    return (
        torch.rand(2, 3, 11, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        - 0.4
    )


class Ways(nn.Module):
    """A network that PyTorch's own full-backward hooks refuse, or see less of, as ``way`` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.conv = nn.Conv2d(3, 4, 3)
        self.relu = nn.ReLU(inplace=way == "in place")
        self.layer = Kept(way)
        self.head = nn.Linear(4, 5)

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
        self.way = way
        self.kept = list[torch.Tensor]()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        self.kept[:] = [y if self.way == "a list" else y.detach()]
        return y


@pytest.mark.parametrize(
    ("way", "refused"),
    [
        ("modules", []),
        ("in place", []),
        ("in place at once", []),
        ("a function", ["guidedbackprop"]),
        ("a list", []),
        ("a mapping", []),
    ],
)
def test_methods_by_full_backward_hooks_are_those_by_autograd_or_refused(
    way: str, refused: list[str]
) -> None:
    torch.manual_seed(0)
    model = Ways(way).double().eval()
    x = photos()
    modes = [module.training for module in model.modules()]
    methods = {
        "gradcam": "gradcam(relu=False)",
        "guidedbackprop": "guidedbackprop()",
        "saliency": "saliency()",
    }
    for name, plain in methods.items():
        for targets in ([2], [0, 4]):  # of several, each has hooks of its own
            method = plain.replace("(", "(gradients=full_backward, ")
            if name in refused:
                with pytest.raises(explain.ExplainError, match="full-backward"):
                    explain.attribute(model, x, method, targets=targets, layer="layer")
                continue
            found = explain.attribute(model, x, method, targets=targets, layer="layer")
            expected = explain.attribute(model, x, plain, targets=targets, layer="layer")
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.values, other.values, rtol=1e-12, atol=1e-14)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
    with pytest.raises(explain.ExplainError, match="positional"):
        explain.attribute(model, {"photo": x}, "saliency(gradients=full_backward)", target=2)


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
@pytest.mark.parametrize("used", [(1,), (0, 2)])
def test_each_call_of_a_layer_has_its_own_gradient_or_none(used: tuple[int, ...], way: str) -> None:
    torch.manual_seed(0)
    model = SomeCalls(used)
    x = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    outputs = [model.layer(x)]
    outputs += [model.layer(outputs[-1].tanh())]
    outputs += [model.layer(outputs[-1].tanh())]
    score = torch.stack([outputs[i].tanh() for i in used]).square().sum()
    expected = torch.autograd.grad(score, outputs, allow_unused=True)
    with capture(model, "layer") as seen:
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
