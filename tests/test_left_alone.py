"""The user's own hooks fire as ever and stay in order; an interruption, wherever it comes, leaves
nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules

import explain
from tests.conftest import HOOK_DICTS, settled

GLOBAL_DICTS = [
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
]
# those that go back to the pixels
WHOLE = ["saliency", "guidedbackprop", "inputxgradient", "fullgrad"]


def hooks_of(model: nn.Module) -> list[Any]:
    """Every hook that is registered, the very objects in their order."""
    of_modules = [
        list(getattr(module, name).items()) for module in model.modules() for name in HOOK_DICTS
    ]
    return [of_modules, [list(getattr(torch_modules, name).items()) for name in GLOBAL_DICTS]]


def plain() -> nn.Sequential:
    """A network without operations in place, which torch's own full-backward hooks do not
    survive."""
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    return settled(nn.Sequential(*layers, nn.Linear(6, 5))).double().eval()


@pytest.fixture
def hooked() -> Iterator[tuple[nn.Sequential, list[str]]]:
    """A network with hooks of every kind, and the log that they write."""
    model = plain()
    log = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, *_: log.append(f"{name} of {type(module).__name__}")

    handles: list[Any] = []
    for layer in (model[2], model[3], model[6]):
        for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
            for name, first in (("first", False), ("second", False), ("put before them", True)):
                register = getattr(layer, f"register_{kind}_hook")
                handles.append(register(note(f"{kind} {name}"), prepend=first))
    model[2].register_forward_pre_hook(
        lambda module, args, kwargs: log.append(f"forward_pre with {sorted(kwargs)}"),
        with_kwargs=True,
    )
    model[3].register_forward_hook(lambda *_: log.append("always called"), always_call=True)
    for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        handles += [getattr(torch_modules, f"register_module_{kind}_hook")(note(f"global {kind}"))]
    yield model, log
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("method", WHOLE)
def test_hooks_of_the_user_fire_in_an_explanation_as_in_a_pass_of_their_own(
    method: str, hooked: tuple[nn.Sequential, list[str]], x: torch.Tensor
) -> None:
    model, log = hooked
    torch.autograd.grad(model(x.requires_grad_())[:, 3].sum(), x)
    wanted = list(log)
    before = hooks_of(model)
    assert len(wanted) > 60
    log.clear()
    explain.attribute(model, x.detach(), method, target=3)
    assert log == wanted
    assert hooks_of(model) == before
    log.clear()
    torch.autograd.grad(model(x)[:, 3].sum(), x)
    assert log == wanted


@pytest.mark.parametrize(
    "method", ["gradcam", "guidedbackprop", "scorecam", "ablationcam", "integratedgradients"]
)
@pytest.mark.parametrize("prepend", [False, True])
def test_hooks_that_change_what_flows_are_part_of_the_model(
    prepend: bool, method: str, x: torch.Tensor
) -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x - 1

    model = plain()
    other = plain()
    other = nn.Sequential(*other[:3], Doubled(), *other[3:])
    if prepend:
        model[2].register_forward_hook(lambda *_: None)
    model[2].register_forward_hook(lambda module, args, output: 2 * output - 1, prepend=prepend)
    before = hooks_of(model)
    found = explain.attribute(model, x, method, target=2, layer="2").values
    assert hooks_of(model) == before
    torch.testing.assert_close(
        found, explain.attribute(other, x, method, target=2, layer="3").values
    )


def test_a_train_that_somebody_has_replaced_stays_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = nn.Module.train

    def counted(module: nn.Module, mode: bool = True) -> nn.Module:
        return plain(module, mode)

    monkeypatch.setattr(nn.Module, "train", counted)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    explain.attribute(model, torch.rand(1, 3, 4, 4), "saliency", target=1)
    assert nn.Module.train is counted
