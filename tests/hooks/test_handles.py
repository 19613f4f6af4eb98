"""Groups and the handles of single hooks: closing, listing, copies, and hooks that never fired."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from explain import ExplainWarning, HookError
from explain.hooks import HookGroup
from tests.conftest import hook_count


def nothing(*given: object) -> None:
    pass


def chain() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    model[0].weight.data = torch.tensor([[1.0, 2], [3, 4]])
    model[2].weight.data = torch.tensor([[5.0, 6]])
    return model


def hooks_on(model: nn.Module) -> int:
    return sum(hook_count(module) for module in model.modules())


def test_a_handle_removes_its_own_hook_alone() -> None:
    model = chain()
    seen = []
    with HookGroup(model) as group:
        first = group.forward(nn.Linear, lambda module, args, output: seen.append("first"))
        group.forward("0", lambda module, args, output: seen.append("second"))
        assert len(group) == 3
        first.remove()
        first.remove()
        assert (first.removed, len(group), hooks_on(model)) == (True, 1, 1)
        model(torch.ones(1, 2))
    assert seen == ["second"]


# Copies


def test_a_copy_of_a_hooked_model_has_none_of_its_hooks() -> None:
    model = chain()
    seen = []
    x = torch.ones(1, 2, requires_grad=True)
    own = model[0].register_forward_hook(lambda module, args, output: seen.append("the user's"))
    with HookGroup(model) as group:
        group.forward(nn.Module, lambda module, args, output: output * 0)
        group.forward_pre("0", lambda module, args, kwargs: None, with_kwargs=True)
        group.backward("1", lambda module, gi, go: (gi[0] * 0,))
        other = copy.deepcopy(model)
        assert hooks_on(other) == 1
        other(x).backward()
        twice = copy.deepcopy(other)
        model(x).backward()
    assert seen == ["the user's", "the user's"]
    assert x.grad is not None
    assert x.grad.tolist() == [[23.0, 34.0]]  # of the copy alone
    assert hooks_on(twice) == 1
    own.remove()


def test_a_hooked_model_is_pickled_without_its_hooks_and_without_this_package(
    tmp_path: Path,
) -> None:
    model = chain()
    x = torch.ones(1, 2, requires_grad=True)
    with HookGroup(model) as group:
        group.forward("0", lambda module, args, output: output * 0)
        group.forward_pre("0", lambda module, args, kwargs: None, with_kwargs=True)
        group.backward("1", lambda module, gi, go: (gi[0] * 0,))
        group.leaf(model[0].weight, lambda gradient: gradient * 0)
        pickled = pickle.dumps(model)
        torch.save(model, tmp_path / "model.pt")
        group.forward("", nothing)
        model(torch.ones(1, 2, requires_grad=True)).backward()
    saved = (tmp_path / "model.pt").read_bytes()
    assert b"explain" not in pickled + saved  # so that any Python can read it
    for other in (pickle.loads(pickled), torch.load(tmp_path / "model.pt", weights_only=False)):
        y = other(x)
        assert y.item() == 57
        assert torch.autograd.grad(y, x)[0].tolist() == [[23.0, 34.0]]


# Edits


EDITS = {
    "data": lambda g: g.data.mul_(2),
    "numpy": lambda g: g.numpy().__imul__(2),
    "detach": lambda g: g.detach().mul_(2),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_a_gradient_behind_autograds_back_are_caught(edit: str) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 3

    def edits(gradient: torch.Tensor) -> None:
        EDITS[edit](gradient)

    with HookGroup() as group, pytest.raises(HookError, match="'edits'"):
        group.tensor(y, edits)
        y.backward(torch.ones(2))


# Hooks that never fired


def told(
    model: nn.Module, register: Callable[[HookGroup], object], work: Callable[[], object]
) -> list[str]:
    """What a group warns of, in which hooks are registered and something is done."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with HookGroup(model) as group:
            register(group)
            work()
    assert {Path(warning.filename) for warning in found} <= {Path(__file__)}
    assert {warning.category for warning in found} <= {ExplainWarning}
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda g, y: g.forward("1", nothing), "layer '1'"),
        (lambda g, y: g.backward("0", nothing), "layer '0'"),
        (lambda g, y: g.tensor(y, nothing), "a tensor"),
        (lambda g, y: g.node(y.grad_fn, nothing), "Node MulBackward0"),
    ],
)
def test_a_hook_that_never_fired_is_named(
    register: Callable[[HookGroup, torch.Tensor], object], message: str
) -> None:
    model = chain()
    y = torch.ones(2, requires_grad=True) * 2
    (found,) = told(model, lambda group: register(group, y), lambda: model[0](torch.ones(1, 2)))
    assert message in found


def test_hooks_that_could_not_have_fired_are_nothing_to_tell_about() -> None:
    model = chain()

    def two(group: HookGroup) -> None:
        group.forward("1", nothing)
        group.backward("0", nothing)

    def on_each(group: HookGroup) -> None:
        for name in ("0", "1"):
            group.forward(name, lambda module, args, output: None)

    assert told(model, two, lambda: None) == []  # nothing ran
    # the same function fired on another layer
    assert told(model, on_each, lambda: model[0](torch.ones(1, 2))) == []
    assert (
        told(model, lambda group: two(group) or group.remove(), lambda: model[0](torch.ones(1, 2)))
        == []
    )
    with pytest.raises(KeyError):  # the block did not end as it should, and that is what is told
        told(model, two, lambda: {}[model[0](torch.ones(1, 2))])
