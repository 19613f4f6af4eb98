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
from tests.conftest import HOOK_DICTS, Made, layer_for, settled

GLOBAL_DICTS = [
    hooks
    for name, hooks in vars(torch_modules).items()
    if name.startswith("_global_") and name.endswith("hooks")
]


def hooks_of(model: nn.Module) -> list[Any]:
    """Every hook that is registered, the very objects in their order."""
    dicts = [getattr(module, name) for module in model.modules() for name in HOOK_DICTS]
    return [list(hooks.items()) for hooks in [*dicts, *GLOBAL_DICTS]]


def plain(*behind: nn.Module) -> nn.Sequential:
    """A network without operations in place, which torch's own full-backward hooks do not survive;
    with others behind its second convolution."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), *behind, nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)]
    return settled(nn.Sequential(*layers, *head)).double().eval()


@pytest.fixture
def hooked() -> Iterator[tuple[nn.Sequential, list[str]]]:
    """A network with hooks of every kind, and the log that they write."""
    model = plain()
    log = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, *_: log.append(f"{name} of {type(module).__name__}")

    handles: list[Any] = []
    for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        for layer in (model[2], model[3], model[6]):
            for name, first in (("first", False), ("second", False), ("put before them", True)):
                register = getattr(layer, f"register_{kind}_hook")
                register(note(f"{kind} {name}"), prepend=first)
        handles += [getattr(torch_modules, f"register_module_{kind}_hook")(note(f"global {kind}"))]
    model[2].register_forward_pre_hook(
        lambda module, args, kwargs: log.append(f"forward_pre with {sorted(kwargs)}"),
        with_kwargs=True,
    )
    model[3].register_forward_hook(lambda *_: log.append("always called"), always_call=True)
    yield model, log
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("method", ["saliency", "guidedbackprop", "inputxgradient", "fullgrad"])
def test_hooks_of_the_user_fire_in_an_explanation_as_in_a_pass_of_their_own(
    method: str, hooked: tuple[nn.Sequential, list[str]], x: torch.Tensor
) -> None:
    model, log = hooked

    def of_a_pass() -> list[str]:
        log.clear()
        at = x.clone().requires_grad_()
        torch.autograd.grad(model(at)[:, 3].sum(), at)
        return list(log)

    in_a_pass = of_a_pass()
    wanted = in_a_pass
    if method in ("guidedbackprop", "fullgrad"):  # which run no backward pass of autograd
        wanted = [line for line in in_a_pass if "backward" not in line]
    before = hooks_of(model)
    assert len(in_a_pass) > 60
    log.clear()
    explain.attribute(model, x, method, target=3)
    assert log == wanted
    assert hooks_of(model) == before
    assert of_a_pass() == in_a_pass


@pytest.mark.parametrize(
    "method", ["gradcam", "guidedbackprop", "scorecam", "ablationcam", "integratedgradients"]
)
@pytest.mark.parametrize("prepend", [False, True])
def test_hooks_that_change_what_flows_are_part_of_the_model(
    prepend: bool, method: str, x: torch.Tensor
) -> None:
    model = plain()
    if prepend:
        model[2].register_forward_hook(lambda *_: None)
    model[2].register_forward_hook(lambda module, args, output: 2 * output - 1, prepend=prepend)
    before = hooks_of(model)
    values = explain.attribute(model, x, method, target=2, layer=layer_for(method, "2")).values
    assert hooks_of(model) == before
    same = plain(Made(lambda made, maps: 2 * maps - 1))
    expected = explain.attribute(same, x, method, target=2, layer=layer_for(method, "3")).values
    torch.testing.assert_close(values, expected)


def test_a_train_that_somebody_has_replaced_stays_replaced(
    monkeypatch: pytest.MonkeyPatch, x: torch.Tensor
) -> None:
    train = nn.Module.train

    def counted(module: nn.Module, mode: bool = True) -> nn.Module:
        return train(module, mode)

    monkeypatch.setattr(nn.Module, "train", counted)
    explain.attribute(plain().train(), x, "saliency", target=1)
    assert nn.Module.train is counted


def test_what_draws_on_the_cpu_leaves_the_generators_of_gpus_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds: list[int] = []
    model = plain(nn.Dropout(0.5))
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    before = torch.get_rng_state()
    explain.evaluate(model, x, "saliency", ["mprt"])
    explain.attribute(model, x, "smoothgrad(samples=2)", target=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeds
