"""Groups and the handles of single hooks: closing, listing, copies, and hooks that never fired."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from explain import ExplainWarning, HookError
from explain.hooks import HookGroup
from explain.hooks.capturing import Capture
from tests.conftest import hook_count


def nothing(*given: object) -> None:
    pass


def chain() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    model[0].weight.data, model[2].weight.data = (
        torch.tensor([[1.0, 2], [3, 4]]),
        torch.tensor([[5.0, 6]]),
    )
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


def test_the_gates_of_backward_hooks_stay_until_the_last_of_them_is_removed() -> None:
    model = chain()
    seen = []
    x = torch.ones(1, 2, requires_grad=True)
    with HookGroup(model) as group:
        one = group.backward("1", lambda module, gi, go: seen.append("one"))
        two = group.backward_pre("1", lambda module, go: seen.append("two"))
        model(x).backward()
        one.remove()
        model(x).backward()
        two.remove()
        assert hooks_on(model) == 0
        one = group.backward("1", lambda module, gi, go: seen.append("three"))
        model(x).backward()
    assert seen == ["two", "one", "two", "three"]


def test_handles_of_hooks_in_the_graph() -> None:
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    seen: list[str] = []
    with HookGroup() as group:
        handles = [
            group.tensor(y, lambda gradient: seen.append("tensor")),
            group.leaf(x, lambda leaf: seen.append("leaf"), after=True),
            group.tensors([x], lambda gradients: seen.append("tensors")),
            group.node(y.grad_fn, lambda inputs, outputs: seen.append("node")),
            group.node_pre(y.grad_fn, lambda outputs: seen.append("node-pre")),
        ]
        y.backward(retain_graph=True)
        assert sorted(seen) == ["leaf", "node", "node-pre", "tensor", "tensors"]
        for handle in handles:
            handle.remove()
        y.backward()
        assert (len(seen), len(group)) == (5, 0)


def test_a_closed_group_refuses_hooks_of_every_kind() -> None:
    model = chain()
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    group = HookGroup(model)
    group.remove()
    for register in [
        lambda: group.forward("0", nothing),
        lambda: group.backward("0", nothing),
        lambda: group.tensor(y, nothing),
    ]:
        with pytest.raises(HookError, match="group must"):
            register()
    assert hooks_on(model) == 0
    assert repr(group) == "HookGroup(Sequential), closed"


def test_a_hook_that_registers_another_may_return_its_handle() -> None:
    model = chain()
    x = torch.ones(1, 2, requires_grad=True)
    seen: list[list[float]] = []
    with HookGroup(model) as group:
        group.forward(
            "0",
            lambda module, args, output: group.tensor(output, lambda g: seen.append(g[0].tolist())),
        )
        group.tensor(x * 1, nothing).remove()
        group.leaf(x, lambda gradient: group.after_backward(lambda: seen.append([0.0])))
        model(x).backward()
    assert seen == [[5.0, 6.0], [0.0]]
    assert x.grad is not None
    assert x.grad.tolist() == [[23.0, 34.0]]


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


def test_the_hooks_of_a_pass_are_absent_from_copies_and_act_for_their_thread_alone() -> None:
    model = chain()
    x = torch.ones(1, 2)
    with torch.no_grad(), HookGroup(model) as group:
        captured = Capture(group, ["0"], gradients=True)
        ran = group.note_runs(dict(model.named_children()))
        assert hooks_on(copy.deepcopy(model)) == 0
        assert hooks_on(pickle.loads(pickle.dumps(model))) > 0  # which do nothing
        thread = threading.Thread(target=model, args=[x])
        thread.start()
        thread.join()
        assert (captured.records, ran) == ([], [])
        model(x)
        assert (len(captured.records), ran) == (1, ["0", "1", "2"])
    assert hooks_on(model) == 0


def test_parameters_with_hooks_are_pickled_without_a_warning() -> None:
    p = nn.Parameter(torch.ones(1))
    with HookGroup() as group:
        group.leaf(p, lambda gradient: gradient * 2)
        torch.save([p], io.BytesIO())
        assert copy.deepcopy(p)._backward_hooks is None
        (p * 1).backward()
    assert p.grad is not None
    assert p.grad.item() == 2


# Edits


EDITS = {
    "data": lambda g: g.data.mul_(2),
    "data of a view": lambda g: g[:1].data.mul_(2),
    "not a number": lambda g: g.data.fill_(float("nan")),
    "numpy": lambda g: g.numpy().__imul__(2),
    "detach": lambda g: g.detach().mul_(2),
    "asarray": lambda g: __import__("numpy").asarray(g).__imul__(2),
    "dlpack": lambda g: torch.from_dlpack(g).mul_(2),
    "set data": lambda g: setattr(g, "data", g * 2),
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


def test_reading_a_gradient_through_numpy_is_no_edit() -> None:
    x = torch.tensor([1.0, 0.0], requires_grad=True)
    seen: list[float] = []
    with HookGroup() as group:
        group.tensor(y := x * 3, lambda g: seen.append(float(g.numpy()[0] + g.data[0])))
        (y / y.detach()).sum().backward()  # the second gradient is infinite
        group.tensor(z := x * 0, lambda g: seen.append(g.data.isnan().sum().item()))
        (z / z.detach() * 0).sum().backward()
    assert seen == [pytest.approx(2 / 3), 2]


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


def test_a_backward_hook_that_came_after_the_forward_pass_is_told_about() -> None:
    model = chain()
    x = torch.ones(1, 2, requires_grad=True)
    for work in (lambda score: score.backward(), lambda score: torch.autograd.grad(score.sum(), x)):
        score = model(x)
        (found,) = told(
            model,
            lambda group: group.backward("1", nothing),
            lambda work=work, score=score: work(score),
        )
        assert "before the forward pass" in found


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
