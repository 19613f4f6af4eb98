"""Groups and the handles of single hooks on a network that anybody can work out on paper."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from explain import ExplainWarning, HookError, LayerError
from explain.hooks import HookGroup
from explain.hooks.graph import accumulator
from explain.hooks.layer_names import select_places
from tests.conftest import TinyNet, hook_count, in_threads


def nothing(*given: object) -> None:
    pass


def chain() -> nn.Sequential:
    first = nn.Linear(2, 2, bias=False)
    last = nn.Linear(2, 1, bias=False)
    first.weight.data = torch.tensor([[1.0, 2], [3, 4]])
    last.weight.data = torch.tensor([[5.0, 6]])
    return nn.Sequential(first, nn.ReLU(inplace=True), last)


GRADIENT = [[23.0, 34.0]]  # of the score of a chain in its input


def ones() -> torch.Tensor:
    return torch.ones(1, 2, requires_grad=True)


def hooks_on(model: nn.Module) -> int:
    return sum(hook_count(module) for module in model.modules())


def test_hooks_act_for_this_thread_only_and_until_the_block_ends() -> None:
    model = chain()
    calls: list[str] = []
    with HookGroup(model) as group:
        group.forward(nn.Module, lambda module, args, output: calls.append("forward"))
        group.backward(nn.Module, lambda module, gi, go: calls.append("backward"))
        in_threads(1, lambda number: model(ones()).backward())
        assert calls == []
        model(ones()).backward()
    model(ones()).backward()
    assert calls == ["forward"] * 4 + ["backward"] * 4


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda g: g.forward("0", lambda module: None), "forward"),
        (lambda g: g.backward("1", lambda m, gi, go: gi * 2), "gradients"),
        (lambda g: g.backward("1", lambda m, gi, go: gi[0][:, :1]), "shape that it was given"),
        (lambda g: g.backward_pre("1", lambda m, go: 3), "backward-pre"),
        (lambda g: g.forward("0", lambda m, a, out: 1 / 0), "ZeroDivisionError"),
        (lambda g: g.backward("2", lambda m, gi, go: go[0].mul_(2) and None), "backward"),
        (lambda g: g.forward("0", 3), "callable"),
    ],
)
def test_a_hook_that_misbehaves_is_named(register: Any, message: str) -> None:
    model = chain()
    with pytest.raises(HookError, match=message), HookGroup(model) as group:
        register(group)
        model(ones()).backward()
    assert hooks_on(model) == 0


def test_a_removed_hook_changes_no_gradient_of_a_pass_that_it_saw() -> None:
    model = chain()
    x = ones()
    group = HookGroup(model)
    group.backward("1", lambda module, grad_input, grad_output: (grad_input[0] * 0,))
    score = model(x)
    group.remove()
    score.backward()
    assert x.grad.tolist() == GRADIENT


def test_select_takes_names_patterns_types_and_modules(net: TinyNet) -> None:
    assert list(select_places(net, "layer1.*")) == ["layer1.0", "layer1.1", "layer1.2"]
    assert list(select_places(net, [net.fc, "conv1"])) == ["fc", "conv1"]
    assert list(select_places(net, nn.BatchNorm2d)) == ["bn1", "layer2.1"]
    refused: list[tuple[Any, str]] = [(nn.LSTM, "the model has no"), ([], "empty"), (3, "got 3")]
    for layers, message in [*refused, (nn.ReLU(), "a ReLU that is not in")]:
        with pytest.raises(LayerError, match=message):
            select_places(net, layers)


def test_a_group_without_a_model_refuses_layers_and_plain_tensors() -> None:
    group = HookGroup()
    for work, message in (
        (lambda: group.forward("conv", nothing), "without"),
        (lambda: group.tensor(torch.ones(1), nothing), "gradient"),
        (lambda: group.after_backward(nothing), "backward"),
        (lambda: accumulator(torch.ones(1)), "requires"),
    ):
        with pytest.raises(HookError, match=message):
            work()


@pytest.mark.parametrize("prepend", [False, True])
def test_prepended_hooks_come_first(prepend: bool) -> None:
    model = chain()
    kinds = ["forward_pre", "forward", "backward_pre", "backward"]
    order: list[str] = []
    with HookGroup(model) as group:
        for letter in "AB":
            for kind in kinds:
                note = functools.partial(lambda text, *given: order.append(text), kind + letter)
                getattr(group, kind)("0", note, prepend=prepend and letter == "B")
        model(ones()).backward()
    letters = "BA" if prepend else "AB"
    assert order == [kind + letter for kind in kinds for letter in letters]


def test_a_handle_removes_its_own_hook_alone_and_names_its_function() -> None:
    def doubled(factor: int, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * factor

    model = chain()
    with HookGroup(model) as group:
        with group.forward("2", functools.partial(doubled, 2)) as first:
            group.forward(nn.Linear, nothing)
            assert len(group) == sum(len(layer._forward_hooks) for layer in model) == 3
            assert "doubled" in repr(first)
            assert "doubled" in repr(model[2]._forward_hooks)
            assert first.id in model[2]._forward_hooks
            assert model(ones()).item() == 2 * 57
        first.remove()
        assert (first.removed, len(group), len(model[2]._forward_hooks)) == (True, 2, 1)
        assert model(ones()).item() == 57


# Copies


def hooked(model: nn.Module, group: HookGroup) -> None:
    """Register hooks of several kinds, which change what a chain gives."""
    group.forward("2", lambda module, args, output: output * 0)
    group.forward_pre("0", lambda module, args, kwargs: None, with_kwargs=True)
    group.backward("1", lambda module, gi, go: (gi[0] * 0,))
    group.leaf(model[0].weight, lambda gradient: gradient * 0)


def test_a_copy_of_a_hooked_model_has_none_of_its_hooks() -> None:
    model = chain()
    seen = []
    own = model[0].register_forward_hook(lambda module, args, output: seen.append("the user's"))
    with HookGroup(model) as group:
        hooked(model, group)
        other = copy.deepcopy(model)
        twice = copy.deepcopy(other)
        x = ones()
        other(x).backward()
        assert x.grad.tolist() == GRADIENT
        model(ones()).backward()
    assert seen == ["the user's", "the user's"]
    assert hooks_on(other) == hooks_on(twice) == 1
    own.remove()


def test_a_hooked_model_is_pickled_without_its_hooks_and_without_this_package(
    tmp_path: Path,
) -> None:
    model = chain()
    with HookGroup(model) as group:
        hooked(model, group)
        pickled = pickle.dumps(model)
        torch.save(model, tmp_path / "model.pt")
        model(ones()).backward()
    saved = (tmp_path / "model.pt").read_bytes()
    assert b"explain" not in pickled + saved  # so that any Python can read it
    for other in (pickle.loads(pickled), torch.load(tmp_path / "model.pt", weights_only=False)):
        x = ones()
        assert torch.autograd.grad(other(x), x)[0].tolist() == GRADIENT


# Edits


@pytest.mark.parametrize(
    "edit",
    [
        lambda g: g.data.mul_(2),
        lambda g: g.numpy().__imul__(2),
        lambda g: g.detach().mul_(2),
    ],
    ids=["data", "numpy", "detach"],
)
def test_edits_of_a_gradient_behind_autograds_back_are_caught(edit: Any) -> None:
    def edits(gradient: torch.Tensor) -> None:
        edit(gradient)

    y = torch.ones(2, requires_grad=True) * 3
    with HookGroup() as group, pytest.raises(HookError, match="'edits'"):
        group.tensor(y, edits)
        y.backward(torch.ones(2))


# Hooks that never fired


def told(
    model: nn.Module, register: Callable[[HookGroup], object], work: Callable[[], object]
) -> list[str]:
    """What a group warns of, in which hooks are registered and something is done."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        with HookGroup(model) as group:
            register(group)
            work()
    assert {Path(warning.filename) for warning in raised} <= {Path(__file__)}
    assert {warning.category for warning in raised} <= {ExplainWarning}
    return [str(warning.message) for warning in raised]


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda g, y: g.forward("1", nothing), "layer '1'"),
        (lambda g, y: g.backward("0", nothing), "layer '0'"),
        (lambda g, y: g.tensor(y, nothing), "a tensor"),
        (lambda g, y: g.node(y.grad_fn, nothing), "Node MulBackward0"),
    ],
)
def test_a_hook_that_never_fired_is_named(register: Any, message: str) -> None:
    model = chain()
    y = ones() * 2
    (warning,) = told(model, lambda group: register(group, y), lambda: model[0](torch.ones(1, 2)))
    assert message in warning


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("called", ["", "layers.1", "layers.1.self_attn"])
def test_a_layer_that_is_left_out_is_named_without_gradients_too(mode: Any, called: str) -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(encoder, 2).eval()
    hooked = "layers.1.self_attn.out_proj"
    tokens = torch.rand(2, 5, 8)
    inputs = [tokens] * (3 if called.endswith("attn") else 1)
    hooks = [lambda g: g.forward(hooked, nothing), lambda g: g.forward_pre(hooked, nothing)]
    for register in (*hooks, lambda g: g.backward(hooked, nothing)):
        with mode():
            (message,) = told(model, register, lambda: model.get_submodule(called)(*inputs))
            assert hooked in message
            assert told(model, register, lambda: None) == []
            assert told(model, register, lambda: model.layers[0](tokens)) == (
                [message] if torch.is_grad_enabled() else []
            )
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_hooks_that_could_not_have_fired_are_nothing_to_tell_about() -> None:
    model = chain()

    def two(group: HookGroup) -> None:
        group.forward("1", nothing)
        group.backward("0", nothing)

    def same(group: HookGroup) -> None:
        group.forward(["0", "1"], nothing)

    run = functools.partial(model[0], torch.ones(1, 2))
    assert told(model, two, lambda: None) == []  # nothing ran
    assert told(model, same, run) == []  # it fired on another layer
    assert told(model, lambda group: two(group) or group.remove(), run) == []
    with pytest.raises(KeyError):  # the block did not end as it should, and that is what is told
        told(model, two, lambda: {}[run()])
