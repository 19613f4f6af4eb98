"""A walk through all kinds of hooks, on networks so small that each figure can be worked out on
paper.

    python examples/hooks_tour.py                  all of it, in a few seconds
    python examples/hooks_tour.py tensor backward  some sections
    python examples/hooks_tour.py --list           what there is

Every figure is computed as it is printed. Hooks that belong to a `HookGroup` are gone when its
block ends.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from explain import HookError, attribute, hooks
from explain.distributed.communication import Codec, communicate
from explain.distributed.packaging import export_package, import_package
from explain.hooks import HookGroup
from explain.hooks.graph import accumulator as node_of_leaf
from explain.models.small_networks import SmallResNet

WIDTH = 96
SECTIONS: dict[str, Callable[[], None]] = {}


def section(run: Callable[[], None]) -> Callable[[], None]:
    SECTIONS[run.__name__] = run
    return run


def show(label: str, *values: object) -> None:
    """Print a line of the tour, or two: what it is, and the values."""
    line = f"    {label:<56}"
    text = ", ".join(map(written, values))
    print(
        f"{line} {text}".rstrip()
        if len(line) + len(text) < WIDTH
        else f"{line.rstrip()}\n            {text}"
    )


def written(value: object) -> str:
    if isinstance(value, torch.Tensor):
        value = value.squeeze(0).tolist() if value.ndim > 1 else value.tolist()
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(written, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def tell(text: object, indent: str = "    ") -> None:
    print(
        textwrap.fill(
            str(text),
            WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
    )


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True)


def gradients(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
    return [tensor.grad for tensor in tensors]


def linear_network() -> nn.Sequential:
    """Linear(3 to 4), a ReLU that works in place, Linear(4 to 1), with small whole weights."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    signs = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(1.0, 13.0).reshape(4, 3) * signs)
        model[0].bias.copy_(torch.arange(1.0, 5.0))
        model[2].weight.copy_(torch.arange(1.0, 5.0))
        model[2].bias.fill_(1.0)
    return model


class Thrice(nn.Module):
    """Doubles its input three times, with one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.twice.weight, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(self.twice(self.twice(x)))


class Cube(nn.Module):
    """Three autograd operations in one module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2 * x).pow(3) * 5


class Product(nn.Module):
    """Multiplies two inputs."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b


class TwoRectifiers(nn.Module):
    """A ReLU that is a module, and one that is a call of a function unless ``hidden`` is False."""

    def __init__(self, hidden: bool = True) -> None:
        super().__init__()
        self.relu, self.last = nn.ReLU(), torch.relu if hidden else nn.ReLU()
        self.weight = torch.tensor([[1.0, 3.0], [1.0, -1.0]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.last(self.relu(x) @ self.weight)
        return z[:, 0] - z[:, 1]


# Tensors


@section
def tensor() -> None:
    """group.tensor(t, fn) calls fn with the gradient of an intermediate tensor, which autograd
    otherwise throws away.

    What fn returns replaces it from there on. Merely binding fn's argument to something else
    changes nothing.
    """

    def rebinds(gradient: torch.Tensor) -> None:
        gradient = gradient * 2  # a new tensor under an old name, which nobody else sees

    show("x, y, w; z = x + y; o = w * z", 2, 3, 4)
    for label, hook in {
        "the hook only looks": lambda gradient: None,
        "the hook returns 2 * gradient": lambda gradient: 2 * gradient,
        "the hook only rebinds its argument": rebinds,
    }.items():
        x = number(2.0)
        y = number(3.0)
        w = number(4.0)
        z = x + y
        seen: list[torch.Tensor] = []
        with HookGroup() as group:
            group.tensor(z, seen.append)
            group.tensor(z, hook)
            (w * z).backward()
        show(f"{label}: gradients of x, y, w", *gradients(x, y, w))
    show("z's gradient, seen by a hook without retain_grad", *seen)


@section
def retain_grad() -> None:
    """t.retain_grad() keeps an intermediate gradient in t.grad; a hook sees it pass, and keeps
    nothing by itself.

    A hook sees what came before its turn; t.grad is what left after the last hook. Over several
    passes t.grad adds up.
    """
    x = number(2.0)
    y = number(3.0)
    w = number(4.0)
    z = x + y
    z.retain_grad()
    seen: list[torch.Tensor] = []
    with HookGroup() as group:
        group.tensor(z, lambda gradient: seen.append(gradient))
        group.tensor(z, lambda gradient: 2 * gradient)
        group.tensor(z, lambda gradient: seen.append(gradient))
        o = w * z
        o.backward(retain_graph=True)
        show("z = x + y; o = w * z, w = 4: hooks before and after one that doubles", *seen)
        show("z.grad, although retain_grad came first", z.grad)
        o.backward()
        show("z.grad after a second pass; what the hooks saw in it", z.grad, *seen[2:])


@section
def order() -> None:
    """Hooks along a chain fire from its end to its start, each on what those before it returned.

    Those on one tensor fire in the order of their registration. Removing a hook before backward
    takes effect; removing it after undoes nothing.
    """
    show("a, b; c = a * b; d; e = c * d", 2, 3, 4)
    show("the hooks return: for c gradient + 2, for d gradient + 100, for e gradient * 2")
    for fate in ("stays", "is removed before backward", "is removed after backward"):
        a = number(2.0)
        b = number(3.0)
        d = number(4.0)
        c = a * b
        e = c * d
        c.retain_grad()
        e.retain_grad()
        with HookGroup() as group, HookGroup() as of_c:
            of_c.tensor(c, lambda gradient: gradient + 2)
            group.leaf(d, lambda gradient: gradient + 100)
            group.tensor(e, lambda gradient: gradient * 2)
            if fate.endswith("before backward"):
                of_c.remove()
            e.backward()
            if fate.endswith("after backward"):
                of_c.remove()
        show(f"d, c, a, b when c's hook {fate}", *gradients(d, c, a, b))
    show("e.grad", e.grad)
    tell(
        "It has been doubled: in today's PyTorch retain_grad observes last. In older versions it "
        "took its turn among "
        "the hooks, came before this one here, and e.grad was 1."
    )


@section
def leaf() -> None:
    """group.leaf(p, fn) calls fn(gradient) before a leaf accumulates it; with after=True, fn(p)
    when p.grad is there.

    The second is enough for an optimizer that steps during backward, and frees each gradient as
    soon as it is used.
    """
    v = torch.zeros(3, requires_grad=True)
    with HookGroup() as group:
        group.leaf(v, lambda gradient: gradient * 2)
        v.backward(torch.tensor([1.0, 2.0, 3.0]))
    show("v's gradient is (1, 2, 3), and its hook doubles it", v.grad)

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    p = number(3.0)
    with HookGroup() as group:
        group.leaf(p, step, after=True)
        (p * p).backward()
    show("p = 3 after a step of 0.1 * 6 taken in backward; p.grad", p, p.grad)


@section
def inplace() -> None:
    """A hook that edits its gradient in place is refused: other branches may hold the very same
    tensor.

    In e = c + d both branches receive one tensor, so an edit on the way to d also reaches c, which
    nobody hooked.
    """
    w = number(1.0)
    c = w * 1
    d = w * 1
    seen: list[torch.Tensor] = []
    c.register_hook(seen.append)
    d.register_hook(lambda gradient: gradient.mul_(2) and None)
    (c + d).backward()
    show("bare PyTorch, d's hook doubles in place: c's gradient", *seen)

    w = number(1.0)
    x = torch.tensor(2.0)
    a = w + x
    b = w + 1
    seen = []
    with HookGroup() as group:
        group.tensor(a, seen.append)
        (a * b).backward()
    show("w, x; a = w + x; b = w + 1; y = a * b", 1, x)
    show("gradients of a and w, when a's hook only looks", *seen, w.grad)

    def doubles_in_place(grad: torch.Tensor) -> None:
        grad *= 2

    a = w + x
    b = w + 1
    with HookGroup() as group:
        group.tensor(a, doubles_in_place)
        refused(lambda: (a * b).backward())


@section
def edited() -> None:
    """A hook that edits its gradient and returns it as well changes two tensors: the one it got,
    and the one passed on.

    The tensor that it got may be the caller's own, or shared with another branch. Return a new one,
    or nothing.
    """
    x = torch.ones(2, requires_grad=True)
    given = torch.ones(2)

    def edits_and_returns(gradient: torch.Tensor) -> torch.Tensor:
        gradient *= 2
        return gradient * 3

    y = 1 * x
    y.register_hook(edits_and_returns)  # PyTorch's own, which does not look
    y.backward(given)
    show("x's gradient, and the tensor that backward was given", x.grad, given)
    y = 1 * x
    with HookGroup() as group:
        group.tensor(y, edits_and_returns)
        refused(lambda: y.backward(torch.ones(2)))
    x.grad, given, y = None, torch.ones(2), 1 * x
    with HookGroup() as group:
        group.tensor(y, lambda gradient: gradient * 6)
        y.backward(given)
    show("return gradient * 6 instead: the same two", x.grad, given)


@section
def tensors() -> None:
    """group.tensors([...], fn) calls fn once for several tensors: with all gradients, or with the
    first to arrive."""
    x = number(1.0)
    a = 2 * x
    b = 3 * x
    with HookGroup() as group:
        group.tensors([a, b], lambda found: show("y = 5 * a + 7 * b; all gradients", *found))
        group.tensors([a, b], lambda first: show("the first of them to arrive", first), mode="any")
        (5 * a + 7 * b).backward()


# Modules


@section
def module() -> None:
    """group.forward_pre and group.forward call before and after a module's forward, and may replace
    what passes.

    Layers are selected by name, pattern, module or class. with_kwargs hands over keyword arguments
    as well.
    """
    model = linear_network()
    x = torch.ones(1, 3)
    with HookGroup(model) as group:
        group.forward_pre("0", lambda m, args: show("before the first layer: input", *args))
        group.forward(nn.Linear, lambda m, args, output: show(f"after {m}", output[0]))
        group.forward(nn.ReLU, lambda m, args, output: show(f"after {m}", output[0]))
        model(x)
    with HookGroup(model) as group:
        group.forward_pre("0", lambda m, args: (2 * args[0],))
        show("output, when a hook doubles the input", model(x))
    with HookGroup(model) as group:
        group.forward("1", lambda m, args, output: torch.zeros_like(output))
        show("output, when a hook replaces the ReLU's by zeros", model(x))
    with HookGroup(model) as group:
        group.forward_pre(
            "0", lambda m, args, kwargs: show("keyword arguments", list(kwargs)), with_kwargs=True
        )
        model[0](input=x)
    show(
        "hooks left on the model",
        sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
    )


@section
def two_inputs() -> None:
    """A hook before a module of two inputs receives both in one tuple, and returns both in one
    tuple.

    One value alone takes the place of the whole tuple, and the module misses its second input.
    """
    a = number(3.0)
    b = number(4.0)
    show("a, b; forward(a, b) = a * b", a, b)
    model = Product()
    with HookGroup(model) as group:
        group.forward_pre("", lambda m, args: show("before: inputs", *args))
        group.forward_pre("", lambda m, args: (2 * args[0], args[1] + 1))
        group.forward(
            "",
            lambda m, args, output: show(
                "a hook made them (2 * a, b + 1): inputs, output", *args, output
            ),
        )
        group.backward(
            "", lambda m, gi, go: show("gradients of both inputs, as the module got them", *gi)
        )
        model(a, b).backward()
    show("gradients of a and b", *gradients(a, b))
    with HookGroup(model) as group:
        group.forward_pre("", lambda m, args: 2 * args[0])
        try:
            model(a, b)
        except TypeError as error:
            show("a hook that returns 2 * a alone", str(error).partition(" ")[2])


@section
def shapes() -> None:
    """A shape inspector: one forward hook on every layer; and hooks.inspect, which makes a table of
    what it finds."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    x = torch.ones(1, 1, 6, 6)
    with HookGroup(model) as group:
        group.forward(
            "*",
            lambda m, args, out: show(
                f"{type(m).__name__}: input, output", args[0].shape, out.shape
            ),
        )
        model(x)
    print(textwrap.indent(str(hooks.inspect(model, x)), "    "))


@section
def always() -> None:
    """A forward hook with always=True is called even if the module raised; its output is None
    then."""
    model = linear_network()
    with HookGroup(model) as group, suppress(RuntimeError):
        group.forward("0", lambda m, args, output: show("this line is not printed"))
        group.forward(
            "0",
            lambda m, args, output: show("input of shape, output", args[0].shape, output),
            always=True,
        )
        model(torch.ones(1, 5))


@section
def backward() -> None:
    """group.backward calls with the gradients of a module's inputs and outputs once both are known:
    from the end.

    It may return another grad_input. The ReLU here works in place, which PyTorch's own
    full-backward hooks forbid.
    """
    model = linear_network()
    x = torch.ones(1, 3, requires_grad=True)

    def report(
        module: nn.Module,
        grad_input: tuple[torch.Tensor, ...],
        grad_output: tuple[torch.Tensor, ...],
    ) -> None:
        show(f"{type(module).__name__}: grad_output -> grad_input", grad_output[0], grad_input[0])

    with HookGroup(model) as group:
        group.backward(["0", "1", "2"], report)
        model(x).backward()
    with HookGroup(model) as group:
        group.backward(
            "0",
            lambda m, gi, go: show("no input needs a gradient: grad_output, grad_input", *go, *gi),
        )
        model(x.detach()).backward()
    x.grad = None
    with HookGroup(model) as group:
        group.backward("1", lambda m, gi, go: (go[0].clamp(min=0),))
        model(x).backward()
    show("a hook lets the gradient past the ReLU: x's is", x.grad)
    for own in model:
        own.register_full_backward_hook(report)
    try:
        model(x)
    except RuntimeError as error:
        tell(f"PyTorch's own on the same model: {str(error).split('. ')[0]}.")


@section
def backward_pre() -> None:
    """group.backward_pre calls before a module's backward, with grad_output, and may replace it."""
    model = linear_network()
    x = torch.ones(1, 3, requires_grad=True)
    with HookGroup(model) as group:
        group.backward_pre(
            "2", lambda m, grad_output: show("backward-pre: grad_output", *grad_output)
        )
        group.backward_pre("2", lambda m, grad_output: (2 * grad_output[0],))
        group.backward("2", lambda m, gi, go: show("backward, after a hook that doubled it", *go))
        model(x).backward()
    show("x's gradient is twice what it was", x.grad)


@section
def deprecated() -> None:
    """register_backward_hook, now deprecated, hooks the last autograd operation of a module and
    calls it the module.

    Its grad_input is what that operation passes on, which need not be a gradient of the module's
    input.
    """

    def old(
        module: nn.Module, grad_input: tuple[torch.Tensor | None, ...], grad_output: object
    ) -> None:
        show("    deprecated hook", *(gradient for gradient in grad_input if gradient is not None))

    def compare(label: str, model: nn.Module, x: torch.Tensor) -> None:
        show(f"grad_input of {label}")
        handle = model.register_backward_hook(old)
        model(x.requires_grad_()).sum().backward()
        handle.remove()
        with HookGroup(model) as group:
            group.backward("", lambda m, gi, go: show("    full-backward hook", *gi))
            model(x).sum().backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare("y = 5 * (2 * x) ** 3, at x = 1", Cube(), torch.ones(1))
        compare(
            "the linear network's last layer", linear_network()[2], torch.tensor([[7.0, 0, 27, 0]])
        )
        layer = nn.Linear(2, 2)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        compare("a layer of two outputs, for a batch of two", layer, torch.ones(2, 2))
        compare("the same layer, for one input without a batch", layer, torch.ones(2))
    tell(
        "Of y, the old hook shows what the multiplication by 5 passes on, and misses the power and "
        "the doubling. Of "
        "the layer, it shows the gradients of all operands of addmm: bias, input and transposed "
        "weight. That of the "
        "bias is a sum over the batch; early versions of PyTorch had a row for each sample, and "
        "scripts that read "
        "per-sample gradients from it are wrong today. Without a batch, the last operation is a "
        "view, and the old hook "
        f"sees nothing of the layer. PyTorch warns: {str(caught[0].message).split('. ')[1]}."
    )


@section
def convolution() -> None:
    """All four hooks on a convolution and a pooling layer, in the order in which they fire."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.MaxPool2d(2))
    with torch.no_grad():
        model[0].weight[0] = 1.0
        model[0].weight[1] = 2.0
    x = torch.ones(1, 1, 4, 4, requires_grad=True)
    with HookGroup(model) as group:
        for name in ("0", "1"):
            kind = type(model.get_submodule(name)).__name__
            group.forward_pre(
                name, lambda m, args, kind=kind: show(f"forward-pre   {kind}: input", args[0].shape)
            )
            group.forward(
                name,
                lambda m, args, out, kind=kind: show(
                    f"forward       {kind}: feature maps", *out[0]
                ),
            )
            group.backward_pre(
                name, lambda m, go, kind=kind: show(f"backward-pre  {kind}: grad_output", *go[0][0])
            )
            group.backward(
                name,
                lambda m, gi, go, kind=kind: show(f"backward      {kind}: grad_input", *gi[0][0]),
            )
        model(x).sum().backward()


@section
def triple() -> None:
    """A convolution's Node has three gradients: of its input, its weight and its bias. Its module's
    hook has the first.

    The deprecated module hook showed all three; a hook on the Node is the way to them that remains.
    """
    model = nn.Conv2d(1, 1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        model.bias.zero_()
    x = torch.ones(1, 1, 3, 3, requires_grad=True)
    with HookGroup(model) as group:
        group.backward(
            "", lambda m, gi, go: show("module: grad_input", *(gradient[0] for gradient in gi))
        )
        model(x).sum().backward()
    y = model(x)
    with HookGroup() as group:
        group.node(
            y.grad_fn,
            lambda gi, go: show(
                "Node: gradients of input, weight, bias", gi[0][0], gi[1][0], gi[2]
            ),
        )
        y.sum().backward()


@section
def every() -> None:
    """group.every_forward_pre, every_forward, every_backward_pre and every_backward call for
    whatever runs: of any model, also modules that are made inside forward.

    PyTorch's own hooks of this kind act in all threads, and until somebody removes them.
    """
    fired: list[str] = []
    with HookGroup() as group:
        group.every_forward_pre(lambda m, args: fired.append(f"before {type(m).__name__}"))
        group.every_forward(lambda m, args, output: fired.append(f"after {type(m).__name__}"))
        group.every_backward_pre(lambda m, go: fired.append(f"towards {type(m).__name__}"))
        group.every_backward(lambda m, gi, go: fired.append(f"back through {type(m).__name__}"))
        y = nn.Sequential(nn.Linear(3, 1))(torch.ones(1, 3))
        nn.ReLU()(y).backward()
    nn.ReLU()(torch.ones(1))
    tell(", ".join(fired))


@section
def parts() -> None:
    """A name may mean one call of a layer ("twice@1"), its input ("2:input"), or a part of an
    attention ("attn:pattern")."""
    thrice = Thrice()
    with HookGroup(thrice) as group:
        group.forward("twice@1", lambda m, args, output: show("its second call gives", output))
        group.forward("twice@1", lambda m, args, output: output + 1)
        show("2 * 2 * 2, and 1 added after the second", thrice(torch.ones(1, 1)))
    model = linear_network()
    with HookGroup(model) as group:
        group.forward("2:input", lambda m, args, x: show("what its last layer is given", x))
        model(torch.ones(1, 3))
    attention = nn.MultiheadAttention(2, 1, bias=False, batch_first=True).eval()
    same = torch.ones(1, 2, 2)
    with HookGroup(attention) as group:
        group.forward(":pattern", lambda m, args, x: show("weights of two equal tokens", x[0, 0]))
        attention(same, same, same, need_weights=False)


# The autograd graph


@section
def graph() -> None:
    """hooks.graph(output) walks the autograd Nodes behind a tensor, nearest first, each once."""
    output = linear_network()(torch.ones(1, 3))
    tell(", ".join(node.name().rsplit("::", 1)[-1] for node in hooks.graph(output)))


@section
def node() -> None:
    """group.node_pre and group.node call before and after a Node runs; they reach operations that
    are no module."""
    x = torch.tensor([3.0, -1.0], requires_grad=True)
    y = (x * 2).relu()
    relu = next(node for node in hooks.graph(y) if node.name() == "ReluBackward0")
    with HookGroup() as group:
        group.node_pre(
            relu, lambda grad_outputs: show("y = relu(2 * x): grad_outputs", *grad_outputs)
        )
        group.node_pre(relu, lambda grad_outputs: (10 * grad_outputs[0],))
        group.node(relu, lambda gi, go: show("after a hook that returned 10 times that", *go))
        group.node(relu, lambda gi, go: show("grad_inputs", *gi))
        group.node(relu, lambda gi, go: (gi[0] + 1,))
        y.sum().backward()
    show("x's gradient, after a hook that added 1", x.grad)


@section
def guided() -> None:
    """Guided back-propagation lets only positive gradients past a rectifier.

    It is usually told as a full-backward hook on every nn.ReLU that returns the clamped grad_input.
    Such a hook misses rectifiers that are calls of functions, as DenseNet's last one is; a hook on
    the Nodes meets them all.
    """
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    show("x; z = relu(relu(x) @ ((1, 3), (1, -1))); y = z[0] - z[1]", x)
    show("gradient of y", torch.autograd.grad(TwoRectifiers()(x), x)[0])
    for label, model in {
        "the second relu is a function": TwoRectifiers(),
        "both are modules": TwoRectifiers(hidden=False),
    }.items():
        show(f"{label}: hooks on modules, on Nodes", by_modules(model, x), by_nodes(model, x))

    from torchvision.models.densenet import DenseNet

    torch.manual_seed(0)
    dense = DenseNet(
        growth_rate=4, block_config=(1, 1), num_init_features=4, bn_size=1, num_classes=2
    ).eval()
    x = torch.rand(1, 3, 32, 32, requires_grad=True)
    rectifiers = [node for node in hooks.graph(dense(x)) if node.name() == "ReluBackward0"]
    modules = [module for module in dense.modules() if isinstance(module, nn.ReLU)]
    show("a small DenseNet: ReLU modules, ReLU Nodes", len(modules), len(rectifiers))
    right = by_nodes(dense, x)
    show("modules and Nodes agree", close(by_modules(dense, x), right))
    show(
        "modules and the first Node behind the output agree",
        close(by_modules(dense, x, missed=1), right),
    )
    ours = attribute(dense, x.detach(), "guidedbackprop", target=0).values
    show("explain.attribute and Nodes agree", close(ours, right))


def by_modules(model: nn.Module, x: torch.Tensor, missed: int = 0) -> torch.Tensor:
    """Guided gradients by hooks on modules, and on so many of the Nodes nearest to the output."""
    with HookGroup(model) as group:
        group.backward(nn.ReLU, lambda m, grad_input, grad_output: (grad_input[0].clamp(min=0),))
        score = model(x)[:1].flatten()[0]
        rectifiers = [node for node in hooks.graph(score) if node.name() == "ReluBackward0"]
        for node in rectifiers[:missed]:
            group.node(node, lambda grad_inputs, grad_outputs: (grad_inputs[0].clamp(min=0),))
        return torch.autograd.grad(score, x)[0]


def by_nodes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Guided gradients by hooks on all ReLU Nodes."""
    score = model(x)[:1].flatten()[0]
    with HookGroup() as group:
        for node in hooks.graph(score):
            if node.name() == "ReluBackward0":
                group.node(node, lambda grad_inputs, grad_outputs: (grad_inputs[0].clamp(min=0),))
        return torch.autograd.grad(score, x)[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


@section
def accumulator() -> None:
    """explain.hooks.graph.accumulator(p) is the Node that adds to p.grad, which autograd does not
    show.

    p.expand_as(p) leads to it.

    A hook on it sees the final gradient, the sum of all branches.
    """
    p = number(3.0)
    y = p * p + p
    found = node_of_leaf(p)
    show(
        "behind p.expand_as(p)", found.name(), p.expand_as(p).grad_fn.next_functions[0][0] is found
    )
    with HookGroup() as group:
        group.node_pre(
            found,
            lambda grad_outputs: show("p = 3; y = p * p + p: before accumulation", *grad_outputs),
        )
        group.node(found, lambda gi, go: show("after it: p.grad", p.grad))
        y.backward()


@section
def after_backward() -> None:
    """group.after_backward(fn), called from another hook, has fn called once, when the whole pass
    is done."""
    x = number(2.0)
    y = 3 * x
    fired: list[str] = []

    def at_y(gradient: torch.Tensor) -> None:
        fired.append("y")
        group.after_backward(lambda: fired.append("end of the pass"))

    with HookGroup() as group:
        group.tensor(y, at_y)
        group.leaf(x, lambda parameter: fired.append("x"), after=True)
        y.backward()
    show("y = 3 * x: order", *fired)


# Tools made of hooks


@section
def capture() -> None:
    """hooks.capture(model, layers) records what layers give and the gradients that come back, call
    by call."""
    model = Thrice()
    with hooks.capture(model, "twice") as seen:
        model(torch.ones(1, 1)).backward()
    for record in seen.records:
        show(
            f"{record.layer}, call {record.call}: activation, gradient",
            record.activation,
            record.gradient,
        )


@section
def extractor() -> None:
    """hooks.FeatureExtractor(model, layers) is a module that returns features, and stops behind the
    last of them."""
    model = linear_network()
    ran: list[str] = []
    with HookGroup(model) as group:
        group.forward("*", lambda m, args, output: ran.append(str(m)))
        features = hooks.FeatureExtractor(model, ["0", "1"])(torch.ones(1, 3))
    for name, value in features.items():
        show(f"features of layer {name}", value)
    show("modules that ran to their end", *ran)
    show("the features keep a graph", features["1"].requires_grad)


@section
def timeline() -> None:
    """hooks.timeline(model, x) runs forward and backward, and lists which hook fires when."""
    print(textwrap.indent(str(hooks.timeline(linear_network(), torch.ones(1, 3))), "    "))


@section
def intervention() -> None:
    """hooks.intervene(model, ...) replaces what layers give, in forward, by Ablate, Patch, Steer,
    Project or Replace."""
    model = linear_network()
    x = torch.ones(1, 3)
    show("score", model(x))
    halves = hooks.Replace("1", lambda output: output / 2)
    for label, change in {
        "first channel of layer 1 set to 0": hooks.Ablate("1", channels=[0]),
        "layer 1 moved by (1, 0, 0, 0)": hooks.Steer("1", torch.tensor([1.0, 0, 0, 0])),
        "layer 1 halved": halves,
    }.items():
        with hooks.intervene(model, change):
            show(label, model(x))
    show("score afterwards", model(x))


@section
def recording() -> None:
    """hooks.record(model, x) lists the operations that a model computes: functions, methods and
    modules alike, below Python."""
    recording = hooks.record(linear_network(), torch.ones(1, 3))
    tell(", ".join(step.name for step in recording.steps))


# Between processes, and in archives


@section
def communication() -> None:
    """communicate(model, how) chooses how DistributedDataParallel sends gradients, by PyTorch's
    communication hook, and records what was sent.

    There is one process here; examples/distributed.py has several.
    """
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", init_method=Path(folder, "meeting").as_uri(), rank=0, world_size=1
        )
        try:
            halves = Codec(lambda bucket: bucket.half(), lambda sent: sent.float())
            model = nn.Linear(3, 1)
            parallel = DistributedDataParallel(model)
            recorder = communicate(parallel, halves)
            parallel(torch.tensor([[1.0, 2.0, 3.0]])).backward()
        finally:
            dist.destroy_process_group()
    (sent,) = recorder.buckets
    show("gradients of weight and bias", model.weight.grad, model.bias.grad)
    show("bytes of the bucket, bytes sent as float16", sent.bytes, sent.bytes_sent)


@section
def packaging() -> None:
    """export_package(model, file) calls on_intern, on_extern and on_mock for each module of code
    that goes in, stays out or is replaced: the hooks of torch.package."""
    fired: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.pt")
        export_package(
            SmallResNet(2, 4, (8,), (1,)),
            file,
            categories=["cat", "dog"],
            on_intern=lambda exporter, name: fired.append(f"in: {name}"),
            on_extern=lambda exporter, name: fired.append(f"out: {name}"),
        )
        packaged = import_package(file)  # this runs the code in the file
    tell(", ".join(name for name in fired if name.startswith("in") or name == "out: torch"))
    show("opened again: labels", packaged.categories)


# What goes wrong


@section
def errors() -> None:
    """A hook that does not fit, misbehaves or raises is named, with its layer and its direction."""
    model = linear_network()
    x = torch.ones(1, 3, requires_grad=True)
    for register in (
        lambda group: group.forward("0", lambda module: None),
        lambda group: group.backward("1", lambda m, grad_input, grad_output: grad_input[0][:, :2]),
        lambda group: group.forward("2", lambda m, args, output: 1 / 0),
    ):
        with HookGroup(model) as group:
            refused(lambda register=register, group=group: (register(group), model(x).backward()))


def refused(run: Callable[[], object]) -> None:
    try:
        run()
    except HookError as error:
        tell(f"HookError: {error}")


def main(names: Iterable[str] = ()) -> None:
    for name in names or SECTIONS:
        run = SECTIONS[name]
        print(f"\n{name} {'-' * (WIDTH - len(name) - 1)}")
        for paragraph in inspect.cleandoc(run.__doc__ or "").split("\n\n"):
            tell(paragraph.replace("\n", " "), indent="")
        print()
        run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections", nargs="*", metavar="section", help="one of those that --list prints"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the sections")
    options = parser.parse_args()
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if options.list:
        print("\n".join(SECTIONS))
    else:
        main(options.sections)
