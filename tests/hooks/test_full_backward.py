"""Full-backward hooks beside plain derivatives: keyword tensors, outputs that leave by several
ways, containers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from explain import HookError
from explain._utils import nested
from explain.hooks import HookGroup
from tests.conftest import Made

Seen = list[tuple[tuple[Any, ...], tuple[Any, ...]]]


def numbers(gradients: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
    return tuple(None if gradient is None else gradient.tolist() for gradient in gradients)


def watched(model: nn.Module, layer: str, run: Callable[[], torch.Tensor]) -> Seen:
    """What a hook on a layer is given, as ``(grad_input, grad_output)``; the pre-hook must be given
    the same output."""
    seen: Seen = []
    before: list[Any] = []
    with HookGroup(model) as group:
        group.backward_pre(layer, lambda module, go: before.append(numbers(go)))
        group.backward(layer, lambda module, gi, go: seen.append((numbers(gi), numbers(go))))
        run().backward()
    assert before == [go for _, go in seen]
    return seen


class Scaled(nn.Module):
    def forward(
        self, x: torch.Tensor, power: int = 1, *, scale: torch.Tensor, shift: Any = 0.0
    ) -> torch.Tensor:
        return x**power * scale + shift


def test_gradients_of_keyword_tensors_follow_those_of_positions() -> None:
    model = Scaled()
    x, scale, shift = (torch.tensor(value, requires_grad=True) for value in (2.0, 3.0, 0.0))
    fixed = scale.detach()
    for run, of_input, of_output in (
        (lambda: model(x, 2, scale=scale) * 5, (60.0, None, 20.0), (5.0,)),
        (lambda: model(shift=shift, x=x, scale=scale), (1.0, 3.0, 2.0), (1.0,)),
        (lambda: model(x=x, scale=fixed), (3.0, None), (1.0,)),
    ):
        assert watched(model, "", run) == [(of_input, of_output)]


# Outputs that leave a module by another way


def leaves(way: str) -> Callable[[nn.Module, torch.Tensor], Any]:
    """What a layer does whose output, 3 x, is handed on by several ways."""

    def forward(layer: nn.Module, x: torch.Tensor) -> Any:
        y = x * 3
        layer.kept = x if way == "input" else y
        if way == "list":
            layer.kept = [y]
        if way == "twice":
            return y, y
        if way == "derived":
            return y, y.amax()
        if way == "view":
            layer.kept = y[:]
            return layer.kept
        return y

    return forward


class Network(nn.Module):
    """Adds up what its layer returned, twice, and the squares of what left it in another way."""

    def __init__(self, way: str, *, only: bool = False, inplace: bool = False) -> None:
        super().__init__()
        self.layer = nn.Sequential(Made(leaves(way)))
        self.only = only
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        returned = self.layer(x * 1)
        y, other = returned if isinstance(returned, tuple) else (returned, self.layer[0].kept)
        if isinstance(other, list):
            other = other.pop()
        first = 0 if self.only else (y.relu_() if self.inplace else y).sum() * 2
        return first + (other * other).sum()


def test_a_tensor_that_was_there_before_the_call_keeps_its_history() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    model = Made(lambda layer: layer.cached)

    def run() -> torch.Tensor:
        model.cached = weight * 3
        node = model.cached.grad_fn
        score = model() * 5 + model() * 7
        assert model.cached.grad_fn is node
        return score

    assert sorted(watched(model, "", run)) == [((), (5.0,)), ((), (7.0,))]
    assert weight.grad.item() == 36
    with HookGroup(model) as group:
        group.backward_pre("", lambda module, go: (go[0] * 2,))
        run().backward()
    assert weight.grad.item() == 36 + 72


# Containers


@dataclass
class Found:
    first: torch.Tensor
    second: torch.Tensor
    note: str = "no tensor"


CONTAINERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"first": a, "second": b},
    "dataclass": Found,
    "nested": lambda a, b: (a, (None, {"second": b}), "note"),
}


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_tensor_of_a_container_has_its_gradient(kind: str, repeated: bool) -> None:
    def gives(layer: nn.Module, x: torch.Tensor) -> Any:
        first = x * 2
        return CONTAINERS[kind](first, first if repeated else x * 3)

    model = Made(gives)
    x = torch.tensor(1.0, requires_grad=True)

    def run() -> torch.Tensor:
        output = model(x)
        assert type(output) is type(gives(model, x))
        (_, first), (_, second) = nested.paths(output)
        return first * 5 + second * 7

    ((grad_input, grad_output),) = watched(model, "", run)
    assert grad_input == (5 * 2.0 + 7 * (2.0 if repeated else 3.0),)
    assert [gradient for gradient in grad_output if gradient is not None] == [5.0, 7.0]


# Where gradients are taken in other ways


@pytest.mark.parametrize("reentrant", [False, True])
def test_full_backward_hooks_inside_a_checkpoint(reentrant: bool) -> None:
    inner = nn.Sequential(Made(leaves("none")), nn.ReLU(inplace=True))
    model = Made(
        lambda layer, x: checkpoint(layer.inner, x, use_reentrant=reentrant) * 5, inner=inner
    )
    x = torch.tensor(2.0, requires_grad=True)
    assert watched(model, "inner.0", lambda: model(x)) == [((15.0,), (5.0,))]
    assert x.grad.item() == 15


def test_transforms_of_torch_func_are_refused() -> None:
    model = nn.Tanh()
    with HookGroup(model) as group, pytest.raises(HookError, match="backward"):
        group.backward("", lambda module, gi, go: None)
        torch.func.grad(lambda x: model(x).sum())(torch.ones(2))


@pytest.mark.parametrize(
    ("way", "options", "layer", "of_input", "of_output"),
    [
        ("attribute", {}, "layer.0", [-12.0, 42.0], ([-4.0, 14.0],)),
        ("list", {"only": True}, "layer", [-18.0, 36.0], ([-6.0, 12.0],)),
        ("attribute", {"inplace": True}, "layer", [0.0, 42.0], ([0.0, 14.0],)),
        ("twice", {}, "layer", [-12.0, 42.0], ([2.0, 2.0], [-6.0, 12.0])),
        ("twice", {"only": True}, "layer", [-18.0, 36.0], (None, [-6.0, 12.0])),
        ("derived", {}, "layer", [6.0, 42.0], ([2.0, 2.0], 12.0)),
        # the view that was kept is none of the hook's, and what is kept of an input is the input's
        ("view", {}, "layer.0", [-12.0, 42.0], ([2.0, 2.0],)),
        ("input", {}, "layer.0", [4.0, 10.0], ([2.0, 2.0],)),
    ],
)
def test_gradients_of_what_leaves_by_several_ways(
    way: str, options: dict[str, bool], layer: str, of_input: list[float], of_output: Any
) -> None:
    model = Network(way, **options)
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    assert watched(model, layer, lambda: model(x)) == [((of_input,), of_output)]


def test_an_input_by_keyword_may_be_overwritten() -> None:
    def overwrites(layer: nn.Module, x: torch.Tensor) -> None:
        x.mul_(3)

    model = Made(overwrites)
    x = torch.tensor(2.0, requires_grad=True)
    hidden = x * 1
    with HookGroup(model) as group:
        handle = group.backward("", lambda module, gi, go: None)
        model(x=hidden)
        handle.remove()  # it would tell that it never fired
    (hidden * 5).backward()
    assert x.grad.item() == 15


def test_second_derivatives_pass_through_hooks_that_change_gradients() -> None:
    model = nn.Tanh().double()
    x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    with HookGroup(model) as group:
        group.backward("", lambda module, gi, go: (gi[0] * 2,))
        (first,) = torch.autograd.grad(model(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
    t = x.tanh().item()
    assert first.item() == pytest.approx(2 * (1 - t**2))
    assert second.item() == pytest.approx(-4 * t * (1 - t**2))
