"""Every kind of hook that PyTorch has: on every module, on state dicts, on optimizers, and in which order."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.modules.module as global_hooks
import torch.optim.optimizer as optimizers
from torch import nn

from explain import HookError
from explain.hooks import HookGroup, inspect
from tests.conftest import hook_count

COVERED = {
    (nn.Module, "register_forward_pre_hook"): "forward_pre",
    (nn.Module, "register_forward_hook"): "forward",
    (nn.Module, "register_full_backward_pre_hook"): "backward_pre",
    (nn.Module, "register_full_backward_hook"): "backward",
    (nn.Module, "register_backward_hook"): "backward",  # deprecated, and wrong where a module has several operations
    (nn.Module, "register_state_dict_pre_hook"): "state_dict_pre",
    (nn.Module, "register_state_dict_post_hook"): "state_dict",
    (nn.Module, "register_load_state_dict_pre_hook"): "load_state_dict_pre",
    (nn.Module, "register_load_state_dict_post_hook"): "load_state_dict",
    (torch.Tensor, "register_hook"): "tensor",
    (torch.Tensor, "register_post_accumulate_grad_hook"): "leaf",
    (torch.autograd.graph.Node, "register_hook"): "node",
    (torch.autograd.graph.Node, "register_prehook"): "node_pre",
    (torch.autograd.graph, "register_multi_grad_hook"): "tensors",
    (global_hooks, "register_module_forward_pre_hook"): "every_forward_pre",
    (global_hooks, "register_module_forward_hook"): "every_forward",
    (global_hooks, "register_module_full_backward_pre_hook"): "every_backward_pre",
    (global_hooks, "register_module_full_backward_hook"): "every_backward",
    (global_hooks, "register_module_backward_hook"): "every_backward",  # deprecated
    (global_hooks, "register_module_module_registration_hook"): "every_submodule",
    (global_hooks, "register_module_parameter_registration_hook"): "every_parameter",
    (global_hooks, "register_module_buffer_registration_hook"): "every_buffer",
    (torch.optim.Optimizer, "register_step_pre_hook"): "step_pre",
    (torch.optim.Optimizer, "register_step_post_hook"): "step",
    (torch.optim.Optimizer, "register_state_dict_pre_hook"): "state_dict_pre",
    (torch.optim.Optimizer, "register_state_dict_post_hook"): "state_dict",
    (torch.optim.Optimizer, "register_load_state_dict_pre_hook"): "load_state_dict_pre",
    (torch.optim.Optimizer, "register_load_state_dict_post_hook"): "load_state_dict",
    (optimizers, "register_optimizer_step_pre_hook"): "every_step_pre",
    (optimizers, "register_optimizer_step_post_hook"): "every_step",
}


def test_every_hook_that_pytorch_registers_has_its_method() -> None:
    places = {place for place, _ in COVERED}
    offered = {
        (place, name)
        for place in places
        for name in dir(place)
        if name.startswith("register_") and name.endswith("hook") and name != "register_hooks"
    }
    assert offered == set(COVERED)
    for method in COVERED.values():
        assert (getattr(HookGroup, method).__doc__ or "").startswith("Call ``fn"), method


class Twice(nn.Module):
    """Takes keyword arguments, and makes a module while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, flag: bool = False) -> torch.Tensor:
        return nn.Dropout(0.0)(self.inner(input=x)) * scale


def names(seen: list[Any]) -> list[str]:
    return [type(module).__name__ for module in seen]


def test_hooks_on_every_module_reach_those_made_in_the_forward_pass() -> None:
    model, other, seen = Twice(), nn.Tanh(), []
    x, scale = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    with HookGroup(model) as group:
        group.every_forward_pre(lambda module, args: seen.append(module))
        group.every_backward(lambda module, gi, go: seen.append(module))
        model(other(x), scale=scale).backward()
        model.inner(x)
    assert names(seen) == ["Twice", "Identity", "Dropout", "Dropout", "Identity", "Twice", "Identity"]


def test_hooks_on_every_module_without_a_model() -> None:
    seen: list[nn.Module] = []
    with HookGroup() as group:
        handle = group.every_forward(lambda module, args, output: seen.append(module))
        nn.Sequential(nn.Tanh())(torch.ones(1))
        thread = threading.Thread(target=nn.Sigmoid(), args=(torch.ones(1),))
        thread.start()
        thread.join()
        handle.remove()
        nn.ReLU()(torch.ones(1))
    assert names(seen) == ["Tanh", "Sequential"]


def test_all_threads_on_request() -> None:
    model, seen = nn.Sequential(nn.Tanh()), []
    x = torch.ones(1, requires_grad=True)

    def work() -> None:
        model(x).backward()

    with HookGroup(model, all_threads=True) as group:
        group.forward("0", lambda module, args, output: seen.append("forward"))
        group.backward("0", lambda module, gi, go: seen.append("backward"))
        group.every_forward_pre(lambda module, args, kwargs: seen.append(type(module).__name__), with_kwargs=True)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == ["Sequential", "Tanh", "forward", "backward"]


def test_keyword_arguments_for_hooks_on_every_module() -> None:
    model, seen = Twice(), []
    x = torch.tensor(2.0)

    def doubles(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        seen.append(sorted(kwargs))
        return (args, {**kwargs, "scale": kwargs["scale"] * 2}) if "scale" in kwargs else None

    with HookGroup(model) as group:
        group.every_forward_pre(doubles, with_kwargs=True)
        group.every_forward(
            lambda module, args, kwargs, output: seen.append((len(args), len(kwargs))), with_kwargs=True
        )
        assert model(x, scale=torch.tensor(3.0)).item() == 12
        other = copy.deepcopy(model)
        assert sum(map(hook_count, other.modules())) == 0
    assert seen == [["scale"], ["input"], (0, 1), [], (1, 0), (1, 1)]
    assert sum(map(hook_count, model.modules())) == 0
    assert not torch.nn.modules.module._global_forward_hooks_with_kwargs  # PyTorch alone leaves the flag behind


def test_an_inspection_tells_the_shapes_of_keyword_tensors() -> None:
    rows = inspect(Twice(), torch.ones(2, 3), kwargs={"scale": torch.ones(3), "flag": True}).rows
    assert [(row.name, row.inputs) for row in rows] == [("", [[2, 3], [3]]), ("inner", [[2, 3]])]


def test_hooks_on_every_module_that_are_called_though_it_raised() -> None:
    model, seen = nn.Sequential(nn.Linear(2, 2)), []
    with HookGroup(model) as group, pytest.raises(RuntimeError):
        group.every_forward(lambda module, args, output: seen.append((type(module).__name__, output)), always=True)
        model(torch.ones(1, 5))
    assert seen == [("Linear", None), ("Sequential", None)]
    with HookGroup(model) as group, pytest.raises(HookError, match="with_kwargs"):
        group.every_forward(lambda *_: None, with_kwargs=True, always=True)


def test_every_backward_pre_changes_what_backward_gets() -> None:
    model, seen = nn.Sequential(nn.Identity(), nn.Identity()), []
    x = torch.tensor(1.0, requires_grad=True)
    with HookGroup(model) as group:
        group.every_backward_pre(lambda module, go: (go[0] * 2,))
        group.every_backward(lambda module, gi, go: seen.append((type(module).__name__, go[0].item())))
        model(x).backward()
    assert seen == [("Identity", 4.0), ("Identity", 8.0), ("Sequential", 2.0)]
    assert x.grad is not None
    assert x.grad.item() == 8


def test_what_modules_register() -> None:
    seen: list[tuple[str, str]] = []

    class Grows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.head = nn.Linear(1, 1)
            self.register_buffer("seen", x)
            return self.head(x)

    model = Grows()
    with HookGroup(model) as group:
        group.every_submodule(lambda module, name, submodule: seen.append((type(module).__name__, name)))
        group.every_parameter(lambda module, name, parameter: seen.append((type(module).__name__, name)))
        group.every_buffer(lambda module, name, buffer: buffer * 2)
        nn.Sequential(nn.Linear(1, 1))
        model(torch.ones(1, 1))
    assert seen == [("Linear", "weight"), ("Linear", "bias"), ("Grows", "head")]
    assert model.seen.item() == 2


@pytest.mark.parametrize("prepend", [False, True])
def test_prepended_hooks_come_first(prepend: bool) -> None:
    model, order = nn.Sequential(nn.Identity()), []
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


# State


def test_hooks_on_the_state_of_modules() -> None:
    model, log = nn.Sequential(nn.Linear(1, 1)), []
    with HookGroup(model) as group:
        group.state_dict_pre("0", lambda module, prefix, keep_vars: log.append(("writes", prefix)))
        group.state_dict("0", lambda module, state, prefix, meta: state.__setitem__("extra", torch.ones(1)))
        group.load_state_dict_pre("0", lambda module, state, *_: log.append(("reads", sorted(state))))
        group.load_state_dict("", lambda module, keys: keys.unexpected_keys.clear())
        state = model.state_dict()
        assert sorted(state) == ["0.bias", "0.weight", "extra"]
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert log == [("writes", "0."), ("reads", ["0.bias", "0.weight"])]
    assert sorted(model.state_dict()) == ["0.bias", "0.weight"]
    assert len(log) == 2


def test_hooks_on_the_steps_and_the_state_of_optimizers() -> None:
    weight, log = nn.Parameter(torch.tensor(1.0)), []
    optimizer = torch.optim.SGD([weight], lr=0.5)
    other = torch.optim.SGD([nn.Parameter(torch.tensor(1.0))], lr=0.5)
    with HookGroup() as group:
        group.step_pre(optimizer, lambda opt, args, kwargs: log.append(f"before {weight.item()}"))
        group.step(optimizer, lambda opt, args, kwargs: log.append(f"after {weight.item()}"))
        group.every_step_pre(lambda opt, args, kwargs: log.append("before any"))
        group.every_step(lambda opt, args, kwargs: log.append("after any"))
        (weight * 1).backward()
        optimizer.step()
        other.step()
        group.state_dict_pre(optimizer, lambda opt: log.append("writes"))
        group.state_dict(optimizer, lambda opt, state: {**state, "extra": 1})
        group.load_state_dict_pre(optimizer, lambda opt, state: log.append(f"reads {state['extra']}"))
        group.load_state_dict(optimizer, lambda opt: log.append("has read"))
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    steps = ["before any", "before 1.0", "after 0.5", "after any", "before any", "after any"]
    assert log == [*steps, "writes", "reads 1", "has read"]
    assert "extra" not in optimizer.state_dict()
    with HookGroup() as group, pytest.raises(HookError, match="Optimizer"):
        group.step(nn.Linear(1, 1), lambda *_: None)  # type: ignore[arg-type]
