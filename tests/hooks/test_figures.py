"""Small computations whose gradients anybody can work out on paper, as hooks see and change them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from explain import HookError
from explain.hooks import HookGroup, accumulator, graph


def leaf(value: float) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True)


def grads(*tensors: torch.Tensor) -> list[float | None]:
    return [None if t.grad is None else t.grad.item() for t in tensors]


def test_a_product_of_a_sum() -> None:
    """x=2, y=3, w=4, z=x+y, o=w*z."""

    def run(hook: object) -> tuple[list[float], list[float | None]]:
        x, y, w = leaf(2.0), leaf(3.0), leaf(4.0)
        z = x + y
        seen: list[float] = []
        with HookGroup() as group:
            group.tensor(z, lambda gradient: seen.append(gradient.item()))
            if hook is not None:
                group.tensor(z, hook)  # type: ignore[arg-type]
            (w * z).backward()
        return seen, grads(x, y, w)

    def rebinds(gradient: torch.Tensor) -> None:
        gradient = gradient * 2

    assert run(None) == ([4.0], [4.0, 4.0, 5.0])
    assert run(lambda gradient: gradient * 2) == ([4.0], [8.0, 8.0, 5.0])
    assert run(rebinds) == ([4.0], [4.0, 4.0, 5.0])


@pytest.mark.parametrize(
    ("removed", "expected"), [("never", [112, 10, 30, 20]), ("before", [112, 8, 24, 16]), ("after", [112, 10, 30, 20])]
)
def test_a_chain_with_hooks_on_every_step(removed: str, expected: list[float]) -> None:
    """a=2, b=3, c=a*b, d=4, e=c*d; hooks add 2 to c's gradient, 100 to d's, and double e's."""
    a, b, d = leaf(2.0), leaf(3.0), leaf(4.0)
    c = a * b
    e = c * d
    c.retain_grad()
    e.retain_grad()
    of_c = HookGroup()
    with HookGroup() as group:
        of_c.tensor(c, lambda gradient: gradient + 2)
        group.leaf(d, lambda gradient: gradient + 100)
        group.tensor(e, lambda gradient: gradient * 2)
        if removed == "before":
            of_c.remove()
        e.backward()
        if removed == "after":
            of_c.remove()
    of_c.remove()
    assert grads(d, c, a, b) == expected
    assert grads(e) == [2.0]  # retain_grad observes last in today's torch


def test_a_vector() -> None:
    v = torch.zeros(3, requires_grad=True)
    with HookGroup() as group:
        group.leaf(v, lambda gradient: gradient * 2)
        v.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert v.grad is not None
    assert v.grad.tolist() == [2, 4, 6]


def test_a_gradient_that_branches_share_may_not_be_edited_in_place() -> None:
    w, x = leaf(1.0), torch.tensor(2.0)
    a, b = w + x, w + 1
    seen: list[float] = []
    with HookGroup() as group:
        group.tensor(a, lambda gradient: seen.append(gradient.item()))
        (a * b).backward()
    assert seen == [2.0]
    assert grads(w) == [5.0]

    def doubles_in_place(grad: torch.Tensor) -> None:
        grad *= 2

    a, b = w + x, w + 1
    with HookGroup() as group, pytest.raises(HookError, match="'doubles_in_place'"):
        group.tensor(a, doubles_in_place)
        (a * b).backward()


def linear_network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    rows = torch.arange(1.0, 13).reshape(4, 3) * torch.tensor([[1.0], [-1], [1], [-1]])
    model[0].weight.data, model[0].bias.data = rows, torch.tensor([1.0, 2, 3, 4])
    model[2].weight.data, model[2].bias.data = torch.tensor([[1.0, 2, 3, 4]]), torch.ones(1)
    return model


def test_forward_and_full_backward_hooks_of_a_linear_network() -> None:
    model, x = linear_network(), torch.ones(1, 3, requires_grad=True)
    outputs: dict[str, list[float]] = {}
    found: list[tuple[str, list[float], list[float]]] = []
    with HookGroup(model) as group:
        for name in ("0", "1", "2"):
            group.forward(name, lambda m, a, out, name=name: outputs.__setitem__(name, out[0].tolist()))
            group.backward(
                name, lambda m, gi, go, name=name: found.append((name, go[0][0].tolist(), gi[0][0].tolist()))
            )
        model(x).backward()
    assert outputs == {"0": [7, -13, 27, -29], "1": [7, 0, 27, 0], "2": [89]}
    assert found == [
        ("2", [1], [1, 2, 3, 4]),
        ("1", [1, 2, 3, 4], [1, 0, 3, 0]),
        ("0", [1, 0, 3, 0], [22, 26, 30]),
    ]


def test_full_backward_hooks_work_when_no_input_requires_a_gradient_and_change_what_flows() -> None:
    model, x = linear_network(), torch.ones(1, 3)
    seen: list[object] = []
    with HookGroup(model) as group:
        group.backward("0", lambda module, grad_input, grad_output: seen.append((grad_input, grad_output[0].tolist())))
        group.backward("2", lambda module, grad_input, grad_output: (grad_input[0] * 10,))
        model(x).backward()
    assert seen == [((None,), [[10, 0, 30, 0]])]


def test_backward_pre_hooks_come_first_and_change_grad_output() -> None:
    model, x = linear_network(), torch.ones(1, 3, requires_grad=True)
    order: list[object] = []
    with HookGroup(model) as group:
        group.backward("2", lambda m, gi, go: order.append(("full", go[0].item())))
        group.backward_pre("2", lambda m, go: (order.append(("pre", go[0].item())), (go[0] * 2,))[1])
        model(x).backward()
    assert x.grad is not None
    assert order == [("pre", 1.0), ("full", 2.0)]
    assert x.grad.tolist() == [[44, 52, 60]]


def test_feature_maps_of_a_convolution_and_the_firing_order() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.MaxPool2d(2))
    model[0].weight.data[0], model[0].weight.data[1] = 1.0, 2.0
    order: list[str] = []
    maps: list[list[float]] = []
    with HookGroup(model) as group:
        group.forward_pre("0", lambda m, a: order.append("forward-pre"))
        group.forward("0", lambda m, a, out: (order.append("forward"), maps.append(out[0, :, 0, 0].tolist()))[0])
        group.backward_pre("0", lambda m, go: order.append("backward-pre"))
        group.backward("0", lambda m, gi, go: order.append("backward"))
        model(torch.ones(1, 1, 4, 4)).sum().backward()
    assert maps == [[9.0, 18.0]]
    assert order == ["forward-pre", "forward", "backward-pre", "backward"]


def test_an_accumulator_sees_the_final_gradient_of_a_parameter() -> None:
    p = leaf(3.0)
    seen: list[float] = []
    after: list[float | None] = []
    node = accumulator(p)
    assert node.name() == "torch::autograd::AccumulateGrad"
    with HookGroup() as group:
        group.node_pre(node, lambda grad_outputs: seen.append(grad_outputs[0].item()))
        group.leaf(p, lambda done: after.extend(grads(done)), after=True)
        (p * p + p).backward()
    assert seen == [7.0]
    assert after == [7.0]
    with pytest.raises(HookError, match="requires"):
        accumulator(p * 2)


def test_all_or_any_of_several_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    a, b = x * 2, x * 3
    found: list[object] = []
    with HookGroup() as group:
        group.tensors([a, b], lambda gradients: found.append([g.tolist() for g in gradients]))
        group.tensors([a, b], lambda gradient: found.append(gradient.tolist()), mode="any")
        (a + 2 * b).sum().backward()
    assert sorted(found, key=len, reverse=True)[0] in ([[1, 1], [2, 2]], [1, 1], [2, 2])
    assert [[1, 1], [2, 2]] in found
    assert len(found) == 2


def test_something_after_the_backward_pass_that_runs() -> None:
    x = leaf(2.0)
    y = x * 3
    order: list[str] = []
    with HookGroup() as group:
        group.tensor(y, lambda g: (order.append("y"), group.after_backward(lambda: order.append("end")))[0])
        group.leaf(x, lambda done: order.append("x"), after=True)
        y.backward()
    assert order == ["y", "x", "end"]
    with HookGroup() as group, pytest.raises(HookError, match="backward"):
        group.after_backward(lambda: None)


def test_saved_tensors_are_packed_until_the_group_ends() -> None:
    packed: list[int] = []
    x = leaf(3.0)
    with HookGroup() as group:
        group.saved_tensors(lambda t: (packed.append(1), t.double())[1], lambda t: t.float())
        y = x * x
    count = len(packed)
    assert count == 2
    y.backward()
    assert grads(x) == [6.0]
    assert (x * x).requires_grad
    assert len(packed) == count


def test_hooks_for_every_module_act_for_this_model_and_thread_only() -> None:
    model, other = linear_network(), linear_network()
    names = {id(module): name for name, module in model.named_modules()}
    order: list[str] = []
    x = torch.ones(1, 3, requires_grad=True)
    with HookGroup(model) as group:
        group.every_forward_pre(lambda module, args: order.append(f"pre {names[id(module)]}"))
        group.every_forward(lambda module, args, output: order.append(f"forward {names[id(module)]}"))
        group.every_backward(lambda module, gi, go: order.append(f"backward {names[id(module)]}"))
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
        other(x)
        assert order == []
        model(x).backward()
    forward = ["pre ", "pre 0", "forward 0", "pre 1", "forward 1", "pre 2", "forward 2", "forward "]
    assert order == [*forward, "backward 2", "backward 1", "backward 0", "backward "]
    model(x)
    assert len(order) == 12


def test_removal_before_backward_takes_effect() -> None:
    model, x = linear_network(), torch.ones(1, 3, requires_grad=True)
    group = HookGroup(model)
    group.backward("1", lambda module, grad_input, grad_output: (grad_input[0] * 0,))
    score = model(x)
    group.remove()
    score.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[22, 26, 30]]


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (
            lambda g: g.forward("0", lambda module: None),
            "forward",
        ),
        (
            lambda g: g.backward("1", lambda m, gi, go: gi * 2),
            "gradients",
        ),
        (lambda g: g.backward("1", lambda m, gi, go: gi[0][:, :2]), "shape that it was given"),
        (
            lambda g: g.backward_pre("1", lambda m, go: 3),
            "backward-pre",
        ),
        (
            lambda g: g.forward("0", lambda m, a, out: 1 / 0),
            "ZeroDivisionError",
        ),
        (lambda g: g.backward("2", lambda m, gi, go: 1 / 0), "ZeroDivisionError"),
        (
            lambda g: g.backward("2", lambda m, gi, go: go[0].mul_(2) and None),
            "backward",
        ),
        (lambda g: g.forward("0", 3), "callable"),
    ],
)
def test_a_hook_that_misbehaves_is_named(register: object, message: str) -> None:
    model, x = linear_network(), torch.ones(1, 3, requires_grad=True)
    with pytest.raises(HookError, match=message), HookGroup(model) as group:
        register(group)  # type: ignore[operator]
        model(x).backward()
    assert not model[0]._forward_hooks
    assert x.requires_grad


def test_a_module_that_runs_three_times_meets_its_hook_three_times() -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = nn.Linear(1, 1, bias=False)
            self.twice.weight.data.fill_(2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.twice(self.twice(self.twice(x)))

    model = Thrice()
    found: list[tuple[float, float]] = []
    with HookGroup(model) as group:
        group.backward("twice", lambda m, gi, go: found.append((gi[0].item(), go[0].item())))
        model(torch.ones(1, 1, requires_grad=True)).backward()
    assert found == [(2.0, 1.0), (4.0, 2.0), (8.0, 4.0)]


def test_graph_names_the_nodes_of_the_linear_network() -> None:
    names = [node.name() for node in graph(linear_network()(torch.ones(1, 3)))]
    assert names.count("AddmmBackward0") == 2
    assert names.count("ReluBackward0") == 1


class Overwrites(nn.Module):
    """Goes on with a tensor that a rectifier has overwritten, and ignores what the rectifier returned."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.inner = nn.Sequential(self.relu)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 1.0
        self.inner(h[:])
        return (h * 3).sum()


def test_a_hooked_module_that_overwrites_its_input_does_so_with_its_gradient() -> None:
    model, x = Overwrites(), torch.tensor([-1.0, 2.0], requires_grad=True)
    seen: list[tuple[list[float], list[float]]] = []
    with HookGroup(model) as group:
        group.backward(["relu", "inner"], lambda m, gi, go: seen.append((go[0].tolist(), gi[0].tolist())))
        score = model(x)
        score.backward()
    assert score.item() == 6.0
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 3.0]
    assert seen == [([3.0, 3.0], [0.0, 3.0])] * 2


def test_full_backward_hooks_copy_nothing_but_leaves() -> None:
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Flatten())
    x = torch.tensor([[-1.0, 2.0]], requires_grad=True)
    with HookGroup(model) as group:
        group.backward(nn.Module, lambda m, gi, go: None)
        inner = x * 1.0
        assert model(inner).data_ptr() == inner.data_ptr()
        model(x).sum().backward()
    assert x.tolist() == [[-1.0, 2.0]]
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 1.0]]
