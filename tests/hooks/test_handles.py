"""Groups and the handles of single hooks on a network that anybody can work out on paper."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import explain
from explain import ExplainWarning, HookError, LayerError
from explain.hooks import HookGroup
from explain.hooks.graph import accumulator
from explain.hooks.layer_names import select_places
from explain.hooks.unwrap import callers_hooks
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


# Every module that runs


class Nested(nn.Module):
    """Takes keyword arguments alone, and makes a module while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, *, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return nn.Hardtanh(-99, 99)(self.inner(x)) * scale


EVERY = ["every_forward_pre", "every_forward", "every_backward_pre", "every_backward"]


def global_hooks() -> int:
    """How many hooks and flags there are for every module."""
    of_torch = nn.modules.module
    names = [name for name in vars(of_torch) if re.match("_global_.*(hooks|_called|kwargs)$", name)]
    assert len(names) >= 6
    return sum(len(getattr(of_torch, name)) for name in names)


def type_name(module: nn.Module, *given: object) -> str:
    return type(module).__name__


@pytest.mark.parametrize("model", [None, chain()])
def test_hooks_on_every_module_see_any_model_and_what_is_made_in_forward(
    model: nn.Module | None,
) -> None:
    seen: dict[str, list[str]] = {kind: [] for kind in EVERY}
    x = torch.tensor(2.0, requires_grad=True)
    with HookGroup(model) as group:
        for kind, names in seen.items():
            note = functools.partial(lambda names, *given: names.append(type_name(*given)), names)
            getattr(group, kind)(note)
        made_later = nn.Sequential(nn.Tanh())
        Nested()(x=made_later(x), scale=torch.tensor(3.0)).backward()
        in_threads(1, lambda number: chain()(ones()).backward())
    nn.ReLU()(x).backward()
    inwards = ["Sequential", "Tanh", "Nested", "Identity", "Hardtanh"]
    outwards = ["Tanh", "Sequential", "Identity", "Hardtanh", "Nested"]
    assert seen == {
        "every_forward_pre": inwards,
        "every_forward": outwards,
        "every_backward_pre": ["Nested", "Hardtanh", "Identity", "Sequential", "Tanh"],
        "every_backward": ["Hardtanh", "Identity", "Nested", "Tanh", "Sequential"],
    }
    assert global_hooks() == 0


def test_hooks_on_every_module_replace_what_they_are_given() -> None:
    x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    shapes: list[tuple[int, int]] = []
    with HookGroup() as group:
        group.every_forward_pre(
            lambda module, args, kwargs: (args, {k: v + 1 for k, v in kwargs.items()}),
            with_kwargs=True,
        )
        group.every_forward(
            lambda module, args, kwargs, output: output * 2 if kwargs else None, with_kwargs=True
        )
        group.every_backward_pre(lambda m, go: (go[0] * 5,) if isinstance(m, Nested) else None)
        group.every_backward(lambda m, gi, go: shapes.append((len(gi), len(go))))
        group.every_backward(
            lambda m, gi, go: (gi[0] * 7, gi[1]) if isinstance(m, Nested) else None
        )
        value = Nested()(x=x, scale=scale)
        value.backward()
    assert value.item() == 2 * (2 + 1) * (3 + 1)
    assert (x.grad, scale.grad) == (2 * 4 * 5 * 7, 2 * 3 * 5)
    assert shapes == [(1, 1), (1, 1), (2, 1)]
    assert global_hooks() == 0


def test_hooks_on_every_module_are_those_on_each_one_for_gradients() -> None:
    """As many, of the same values and in the same order, also where modules work in place."""
    logs: list[list[Any]] = [[], []]
    for log, on_every in zip(logs, (True, False), strict=True):
        model = chain()
        x = ones()

        def note(module: nn.Module, gi: Any, go: Any, log: list[Any] = log) -> None:
            log.append((type_name(module), gi[0].tolist(), go[0].tolist()))

        with HookGroup(model) as group:
            group.every_backward(note) if on_every else group.backward(nn.Module, note)
            model(x).backward()
        assert x.grad.tolist() == GRADIENT
    assert logs[0] == logs[1]
    assert len(logs[0]) == 4


class Fallible(nn.Module):
    """Goes on although a module in it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = nn.Linear(5, 5)
        self.whole = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            self.broken(x)
        return self.whole(x).sum()


def test_a_module_that_raised_does_not_mix_up_the_gradients_of_others() -> None:
    model = Fallible().double()
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    seen: list[tuple[str, Any]] = []
    with HookGroup() as group:
        group.every_backward(lambda m, gi, go: seen.append((type_name(m), gi[0].tolist())))
        model(x).backward()
    expected = model.whole.weight.sum(0, keepdim=True).tolist()
    assert seen == [("Linear", expected), ("Fallible", expected)]


@pytest.mark.parametrize("end", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", EVERY)
def test_hooks_on_every_module_are_gone_after_an_error(kind: str, end: type[BaseException]) -> None:
    model = chain()
    with pytest.raises(end), HookGroup() as group, HookGroup(model) as other:
        getattr(group, kind)(nothing)
        getattr(other, kind)(nothing)
        model(ones()).backward()
        raise end
    assert global_hooks() == hooks_on(model) == 0


def test_groups_with_hooks_on_every_module_close_in_any_order() -> None:
    seen: list[str] = []
    first = HookGroup()
    second = HookGroup()
    kept = first.every_forward(lambda *given: seen.append("first"))
    second.every_forward(lambda *given: seen.append("second"))
    assert (len(first), "every module" in repr(kept)) == (1, True)
    nn.ReLU()(ones())
    first.remove()
    nn.ReLU()(ones())
    second.remove()
    nn.ReLU()(ones())
    assert (seen, kept.removed) == (["first", "second", "second"], True)


def test_a_hook_on_every_module_may_run_modules() -> None:
    """They are not hooked themselves, which would never end."""
    seen: list[str] = []

    def runs(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(type_name(module))
        return nn.ReLU()(output)

    with HookGroup() as group:
        group.every_forward(runs)
        group.every_backward(lambda m, gi, go: seen.append(f"back {type_name(m)}"))
        nn.Sequential(nn.Identity())(ones()).sum().backward()
    assert seen == ["Identity", "Sequential", "back Identity", "back Sequential"]


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        ("every_forward", lambda module, args: None),
        ("every_forward_pre", lambda module, args: 1 / 0 if type_name(module) == "ReLU" else None),
        ("every_backward", lambda m, gi, go: (gi[0][:, :1],) if type_name(m) == "ReLU" else None),
    ],
)
def test_a_hook_on_every_module_that_misbehaves_is_named(kind: str, hook: Any) -> None:
    model = chain()
    with pytest.raises(HookError, match="every module") as caught, HookGroup() as group:
        getattr(group, kind)(hook)
        model(ones()).backward()
    assert "ReLU" in str(caught.value) or "must take" in str(caught.value)
    assert global_hooks() == 0


def test_hooks_on_every_module_are_in_the_record_of_an_explanation_and_in_no_copy() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def louder(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = explain.attribute(model, x, "saliency", target=1)
    with HookGroup() as group:
        group.every_forward(louder)
        group.every_forward_pre(lambda module, args, kwargs: None, with_kwargs=True)
        names = callers_hooks(model)
        hooked = explain.attribute(model, x, "saliency", target=1)
        other = copy.deepcopy(model)
    assert [name.split(" on ")[0] for name in names] == ["<lambda>", "louder"]
    assert torch.allclose(hooked.values, plain.values * 2**4)
    assert hooks_on(other) == global_hooks() == 0


def test_an_unused_hook_on_every_module_is_told_where_something_ran() -> None:
    group = HookGroup().__enter__()
    group.every_forward(nothing)
    (ones() * 2).sum().backward()
    with pytest.warns(ExplainWarning, match="every module"):
        group.__exit__(None, None, None)


def test_a_scripted_model_runs_below_hooks_on_every_module() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of newer versions of torch
        model = torch.jit.trace(chain(), ones())
    x = ones()
    seen: list[str] = []
    with HookGroup() as group:
        for kind in EVERY:
            getattr(group, kind)(lambda module, *given: seen.append(type_name(module)))
        model(x).backward()
    assert x.grad.tolist() == GRADIENT
    assert len(seen) >= 4
