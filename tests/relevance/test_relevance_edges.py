"""Relevance at the edges: through a layer alone, behind steps in place, of what is not registered,
of odd values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import LayerError
from explain.methods import LRP, DeepLIFT, FullGrad
from explain.relevance import COMPOSITES, Composite, Epsilon, When
from explain.relevance.steps import LINEAR
from tests.conftest import Made, settled
from tests.relevance.test_relevance import assert_near, random

EXACT = {"rtol": 1e-9, "atol": 1e-12}
Forward = Callable[..., Tensor]


def network(forward: Forward, **parts: Any) -> Any:
    return settled(Made(forward, **parts)).double().eval()


ZERO = Composite("LRP-0", ((When(LINEAR), Epsilon(0)), *COMPOSITES["Epsilon"].rules))


def value_times_gradient(model: Forward, x: Tensor) -> Tensor:
    """What LRP-0 is for a network of rectifiers."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[:, 1].sum(), x)
    return x.detach() * gradient


def test_what_goes_through_a_layer_in_a_residual_block_is_value_times_gradient_there() -> None:
    """Each channel of one branch, beside another branch and a way past both."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.stem(x).relu()
        y = (net.norm(net.one(y)).relu() + net.other(y)).relu()
        return net.head((y + net.beside(x).relu()).flatten(1))

    def through(channel: int, x: Tensor) -> Tensor:
        y = model.stem(x).relu()
        branch = model.norm(model.one(y))
        branch = torch.where(torch.arange(3)[:, None, None] == channel, branch, branch.detach())
        y = (branch.relu() + model.other(y).detach()).relu()
        return model.head((y + model.beside(x).detach().relu()).flatten(1))

    ways = {"one": nn.Conv2d(3, 3, 3, padding=1), "norm": nn.BatchNorm2d(3)}
    ways |= {"other": nn.Conv2d(3, 3, 1), "beside": nn.Conv2d(2, 3, 3, padding=1)}
    model = network(forward, stem=nn.Conv2d(2, 3, 1), **ways, head=nn.Linear(48, 2))
    x = random(1, 1, 2, 4, 4)
    for channel in range(3):
        a = explain.attribute(model, x, LRP(ZERO, ("norm", (channel,))), target=1)
        assert_near(a.values, value_times_gradient(partial(through, channel), x))


def behind_a_step(step: Callable[[Tensor], Any]) -> tuple[Forward, Forward]:
    """A convolution and a normalisation are one map only if nothing lies between."""

    def in_place(net: Any, x: Tensor) -> Tensor:
        y = net.first(x)
        step(y)
        return net.head(net.norm(y).mean((2, 3)))

    def apart(net: Any, x: Tensor) -> Tensor:
        y = net.first(x) * 1
        step(y)
        return net.head(net.norm(y * 1).mean((2, 3)))

    return in_place, apart


def of_one_number(function: Callable[[Tensor], Tensor]) -> tuple[Forward, Forward]:
    """What a network makes of one number in all is what it makes of a row of one."""

    def forward(net: Any, x: Tensor, row: bool) -> Tensor:
        y = net.first(x).relu()
        one = function(y.mean((0, 1, 2, 3), keepdim=True) if row else y.mean()).flatten()[0]
        return net.head(y.mean((2, 3))) * one + one

    return partial(forward, row=False), partial(forward, row=True)


def changed_by_a_view(net: Any, x: Tensor) -> Tensor:
    """A value that a view of it has overwritten is not what the rectifier made."""
    x = F.avg_pool2d(F.relu(x), 1)
    x.view(-1).sub_(0.7)
    return net.first(x).mean((2, 3))


def changed(net: Any, x: Tensor) -> Tensor:
    return net.first(F.avg_pool2d(F.relu(x), 1) - 0.7).mean((2, 3))


def added_flat(net: Any, x: Tensor) -> Tensor:
    """What is added behind a flattening has more numbers than the convolution has channels."""
    y = net.first(x).flatten(1) + torch.linspace(-1, 1, 64).to(x)
    return net.head(y.relu().view(-1, 4, 4, 4).mean((2, 3)))


def added_as_maps(net: Any, x: Tensor) -> Tensor:
    y = net.first(x) + torch.linspace(-1, 1, 64).to(x).view(4, 4, 4)
    return net.head(y.relu().mean((2, 3)))


def by_module(net: Any, x: Tensor) -> Tensor:
    return net.head(net.first(x).relu().mean((2, 3)))


def by_product(net: Any, x: Tensor) -> Tensor:
    return torch.addmm(net.head.bias, net.first(x).relu().mean((2, 3)), net.head.weight.T)


SAME: dict[str, tuple[Forward, Forward]] = {
    "behind neg_": behind_a_step(lambda y: y.neg_()),
    "behind transpose_": behind_a_step(lambda y: y.transpose_(-1, -2)),
    "behind mul_": behind_a_step(lambda y: y.mul_(-2)),
    "changed by a view": (changed_by_a_view, changed),
    "a constant behind a flattening": (added_flat, added_as_maps),
    "a product that a bias is added to": (by_product, by_module),
    "softplus of one number": of_one_number(F.softplus),
    "exp of one number": of_one_number(torch.exp),
    "silu in place of one number": of_one_number(lambda y: F.silu(y * 1, inplace=True)),
    "relu of one number": of_one_number(F.relu),
    "sum of one number": of_one_number(lambda y: y + 0.3),
    "choice of one number": of_one_number(lambda y: torch.where(y > 9, y, 0.5)),
    "difference of one number": of_one_number(lambda y: 2 - y),
    "quotient of one number": of_one_number(lambda y: y / 3),
}


@pytest.mark.parametrize(
    "composite", ["Epsilon", "EpsilonPlus", "EpsilonAlpha2Beta1", "EpsilonGammaBox"]
)
@pytest.mark.parametrize("name", SAME)
def test_networks_that_are_the_same_have_the_same_relevance(name: str, composite: str) -> None:
    def explained(forward: Forward) -> explain.Attribution:
        parts = {"first": nn.Conv2d(3, 4, 1), "norm": nn.BatchNorm2d(4), "head": nn.Linear(4, 3)}
        x = random(4, 1, 3, 4, 4)
        return explain.attribute(network(forward, **parts), x, LRP(composite), target=1)

    a, expected = map(explained, SAME[name])
    assert a.values.any()
    assert_near(a.values, expected.values, 1e-10)
    assert a.delta.abs().max() <= 1e-10


PARTS: dict[str, Callable[[], Any]] = {
    "layer": lambda: nn.LayerNorm([4, 5, 5]),
    "group": lambda: nn.GroupNorm(2, 4),
    "convolution": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "linear": lambda: nn.Linear(5, 5),
    "parameter": lambda: nn.ParameterList([torch.rand(5) + 1]),
}


@pytest.mark.parametrize("method", [LRP("EpsilonPlusFlat"), DeepLIFT()], ids=str)
@pytest.mark.parametrize("kind", PARTS)
def test_weights_in_a_plain_list_are_weights(kind: str, method: Any) -> None:
    """A list of modules and a ``ModuleList`` of the same are explained alike."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.stem(x)
        (block,) = net.blocks
        return net.head((y * block[0] if kind == "parameter" else block(y)).relu().flatten(1))

    blocks = nn.ModuleList([PARTS[kind]()])
    model = network(forward, stem=nn.Conv2d(3, 4, 1), blocks=blocks, head=nn.Linear(100, 3))
    x = random(1, 2, 3, 5, 5)
    expected = explain.attribute(model, x, method, target=1)
    del model.blocks
    model.blocks = [*blocks]
    assert len([*model.parameters()]) == 4
    a = explain.attribute(model, x, method, target=1)
    assert torch.allclose(a.values, expected.values, rtol=1e-10, atol=1e-12)
    assert a.delta.abs().max() <= 1e-9
    if isinstance(method, LRP):
        assert a.coverage.by_rule == expected.coverage.by_rule


SPECTRAL: dict[str, Forward] = {
    "einsum": lambda y, w: torch.einsum("nchw,cd->ndhw", y, w),
    "matmul": lambda y, w: (y.movedim(1, -1) @ w).movedim(-1, 1),
    "spectrum": lambda y, w: torch.fft.ifft2(torch.fft.fft2(y) * w[0][:, None, None] + 0.5j),
    "sums and joins": lambda y, w: torch.cat([y[:, :2] - 1j, 2j * y[:, 2:]], 1),
}


@pytest.mark.parametrize("function", SPECTRAL.values(), ids=SPECTRAL)
def test_complex_numbers_pass_relevance_in_proportion(function: Forward) -> None:
    """A linear map without a rule: by LRP-0; constants take their share."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = function(net.first(x).relu().to(torch.complex128), net.weight)
        return net.head(y.real.mean((2, 3)))

    weight = nn.Parameter(torch.complex(random(1, 4, 4), random(2, 4, 4)))
    model = network(forward, first=nn.Conv2d(3, 4, 1), head=nn.Linear(4, 3), weight=weight)
    x = random(3, 1, 3, 4, 4)
    a = explain.attribute(model, x, LRP(ZERO), target=1)
    assert_near(a.values, value_times_gradient(model, x))
    for composite in ("Epsilon", "EpsilonGammaBox"):
        a = explain.attribute(model, x, LRP(composite), target=1)
        assert a.delta.abs().max() <= 1e-10


def routed(net: Any, x: Tensor) -> Tensor:
    """Tokens of all images go to one of two experts, which write their results in place."""
    tokens = net.stem(x).relu().flatten(2).transpose(1, 2)
    weight, chosen = net.gate(tokens).softmax(-1).max(-1)
    mixed = torch.zeros_like(tokens)
    for number, expert in enumerate(net.experts):
        here = chosen == number
        mixed[here] = expert(tokens[here]).relu() * weight[here].unsqueeze(-1)
    return net.head(mixed.mean(1))


def test_what_rules_miss_is_counted_for_the_image_whose_token_it_was() -> None:
    """Experts see the tokens of several images in one tensor; each image has its own delta.
    Differences are refused where the baseline's tokens go to other experts."""
    torch.manual_seed(0)
    experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    ends = {"stem": nn.Conv2d(2, 4, 1), "gate": nn.Linear(4, 2), "head": nn.Linear(4, 2)}
    model = Made(routed, experts=experts, **ends).double().eval()
    nn.init.normal_(model.gate.weight, std=3)
    x = random(3, 3, 2, 4, 4)
    together = explain.attribute(model, x, "lrp", target=1)
    alone = [explain.attribute(model, image[None], "lrp", target=1) for image in x]
    assert_close(together.delta, torch.cat([a.delta for a in alone]))
    assert_close(together.values, torch.cat([a.values for a in alone]))
    with pytest.raises(explain.ExplainError):
        explain.attribute(model, x[:1], DeepLIFT(), target=1)


def picked(net: Any, x: Tensor) -> Tensor:
    """Tokens of all images in one tensor, of which each expert picks its own by their numbers."""
    tokens = net.stem(x).relu().flatten(2).transpose(1, 2)
    rows = tokens.reshape(-1, tokens.shape[-1])
    weights, chosen = net.gate(rows).softmax(-1).topk(1)
    mixed = torch.zeros_like(rows)
    for number, expert in enumerate(net.experts):
        here, rank = (chosen == number).nonzero(as_tuple=True)
        mixed.index_add_(0, here, expert(rows[here]) * weights[here, rank, None])
    return net.head(mixed.reshape(tokens.shape).mean(1))


@pytest.mark.parametrize("forward", [routed, picked])
def test_methods_that_record_together_find_what_each_finds_alone(forward: Forward) -> None:
    """What one recorder looks at for itself is no operation of the network to the other."""
    experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    ends = {"stem": nn.Conv2d(2, 4, 1), "gate": nn.Linear(4, 2), "head": nn.Linear(4, 2)}
    model = settled(Made(forward, experts=experts, **ends)).double().eval()
    x = random(3, 3, 2, 4, 4)
    for methods in (["lrp", "fullgrad"], ["guidedbackprop", "fullgrad", "lrp"]):
        for name, a in explain.attribute(model, x, methods, target=1).items():
            expected = explain.attribute(model, x, name, target=1)
            assert_close(a.values, expected.values, msg=name)


def spelled(by_name: bool) -> Forward:
    """A network of functions, called as usual, or with all arguments by name, in any order."""

    def usual(net: Any, x: Tensor) -> Tensor:
        y = F.conv2d(x, net.conv.weight, net.conv.bias, padding=1)
        norm = net.norm
        y = F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        y = F.conv_transpose2d(F.leaky_relu(y, 0.1), net.up.weight, net.up.bias, 2)
        y = F.max_pool2d(y, 2)
        y = torch.where(y > 0, y, 0.1 * y)
        t = y.flatten(2).transpose(1, 2)
        t = F.layer_norm(t, (4,), net.layer.weight, net.layer.bias)
        mixed = F.scaled_dot_product_attention(t, torch.mul(t, 0.5), net.value(t), scale=0.7)
        scores = torch.matmul(torch.div(t, 3.0), mixed.mT)
        t = torch.matmul(F.softmax(scores, -1), torch.add(mixed, net.layer.bias, alpha=2))
        t = torch.sub(t, net.layer.weight).clamp(0)
        return F.linear(torch.mean(t, 1), net.head.weight, net.head.bias)

    def named(net: Any, x: Tensor) -> Tensor:
        y = F.conv2d(weight=net.conv.weight, bias=net.conv.bias, padding=1, input=x)
        norm = net.norm
        statistics = {"running_var": norm.running_var, "running_mean": norm.running_mean}
        y = F.batch_norm(bias=norm.bias, weight=norm.weight, **statistics, input=y)
        y = F.leaky_relu(negative_slope=0.1, input=y)
        y = F.conv_transpose2d(bias=net.up.bias, stride=2, weight=net.up.weight, input=y)
        y = F.max_pool2d(kernel_size=2, input=y)
        is_positive = torch.gt(other=0, input=y)
        y = torch.where(other=torch.mul(other=0.1, input=y), condition=is_positive, input=y)
        t = torch.transpose(dim0=1, dim1=2, input=torch.flatten(start_dim=2, input=y))
        layer = net.layer
        t = F.layer_norm(bias=layer.bias, normalized_shape=(4,), weight=layer.weight, input=t)
        mixed = F.scaled_dot_product_attention(
            scale=0.7, value=net.value(t), key=torch.mul(other=0.5, input=t), query=t
        )
        scores = torch.matmul(other=mixed.mT, input=torch.div(other=3.0, input=t))
        t = torch.matmul(
            other=torch.add(alpha=2, other=layer.bias, input=mixed),
            input=F.softmax(dim=-1, input=scores),
        )
        t = torch.clamp(min=0, input=torch.sub(other=layer.weight, input=t))
        pooled = torch.mean(dim=1, input=t)
        return F.linear(bias=net.head.bias, weight=net.head.weight, input=pooled)

    return named if by_name else usual


@pytest.mark.parametrize(
    "method",
    [
        LRP("EpsilonPlus"),
        LRP("EpsilonAlpha2Beta1"),
        "attnlrp",
        "deeplift",
        "fullgrad",
        "guidedbackprop",
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:deeplift misses")  # what a mask chooses
def test_arguments_may_come_by_name_in_any_order(method: Any) -> None:
    x = random(4, 3, 3, 4, 4)
    values = []
    for by_name in (False, True):
        parts = {
            "conv": nn.Conv2d(3, 4, 3),
            "norm": nn.BatchNorm2d(4),
            "up": nn.ConvTranspose2d(4, 4, 2),
            "layer": nn.LayerNorm(4),
            "value": nn.Linear(4, 4),
            "head": nn.Linear(4, 3),
        }
        values.append(
            explain.attribute(network(spelled(by_name), **parts), x, method, target=1).values
        )
    assert values[0].any()
    assert_close(values[1], values[0], rtol=1e-9, atol=1e-12)


def test_fullgrad_counts_what_is_added_to_each_image_where_a_network_doubles_its_batch() -> None:
    """The mean of the scores of each image and of its mirror image, which run in one batch."""
    body = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    model = network(
        lambda net, x: net.body(torch.cat([x, x.flip(-1)])).unflatten(0, (2, len(x))).mean(0),
        body=body,
    )
    a = explain.attribute(model, random(3, 3, 2, 4, 4), FullGrad(rescale=False), target=1)
    assert_close(a.delta, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("frozen", [False, True])
def test_relevance_of_a_layer_that_no_gradient_leads_from_is_refused(frozen: bool) -> None:
    """Behind a backbone that runs without gradients, rules would see no signal to act on."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = net.backbone(x)
        return net.head(F.elu(net.layer(features)).mean((2, 3)))

    parts = {"backbone": nn.Conv2d(3, 4, 3), "layer": nn.Conv2d(4, 4, 3), "head": nn.Linear(4, 2)}
    model = settled(Made(forward, **parts)).eval().requires_grad_(not frozen)
    x = random(0, 1, 3, 6, 6).float()
    assert explain.attribute(model, x, "gradcam", target=0, layer="layer").values.any()
    with pytest.raises(LayerError, match="layer 'layer' must depend on the input"):
        explain.attribute(model, x, "lrp", target=0, layer="layer")


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tensordot": lambda y, w: torch.tensordot(y, w, dims=([1], [1])),
    "tensordot over the last": lambda y, w: torch.tensordot(y, w.T, dims=1),
    "inner": torch.inner,
    "vecdot": lambda y, w: torch.linalg.vecdot(y[:, None], w),
    "dot": lambda y, w: torch.stack([torch.dot(r, v) for r in y for v in w]).reshape(len(y), -1),
    "linalg.matmul": lambda y, w: torch.linalg.matmul(y, w.T),
    "multi_dot": lambda y, w: torch.linalg.multi_dot([y, w.T, torch.eye(len(w)).to(w)]),
    "multi_dot of rows": lambda y, w: torch.stack(
        [torch.linalg.multi_dot([row, w.T, torch.eye(len(w)).to(w)]) for row in y]
    ),
    "sparse.mm": lambda y, w: torch.sparse.mm(w.detach().to_sparse(), y.T).T,
    "a sparse matrix": lambda y, w: (w.detach().to_sparse() @ y.T).T,
    "einsum": lambda y, w: torch.einsum("nc,kc->nk", y, w),
    "a product and a sum": lambda y, w: (y[:, None] * w).sum(-1),
    "baddbmm": lambda y, w: torch.baddbmm(y.new_zeros(1), y[None], w.T[None])[0],
    "bilinear": lambda y, w: F.bilinear(y, y.new_ones(len(y), 1), w[:, :, None]),
    "bilinear, the other way round": lambda y, w: F.bilinear(y.new_ones(len(y), 1), y, w[:, None]),
    "aten.convolution": lambda y, w: torch.ops.aten.convolution(
        y[..., None], w[..., None], None, [1], [0], [1], False, [0], 1
    )[..., 0],
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_with_weights_is_a_linear_layer_in_whatever_words(
    product: Callable[[Tensor, Tensor], Tensor],
) -> None:
    def explained(multiply: Callable[[Tensor, Tensor], Tensor]) -> explain.Attribution:
        def forward(net: Any, x: Tensor) -> Tensor:
            y = net.first(x).relu().mean((2, 3)) - 0.2
            return net.head(multiply(y, net.weight).relu())

        parts = {
            "first": nn.Conv2d(3, 4, 3),
            "weight": nn.Parameter(torch.zeros(5, 4)),
            "head": nn.Linear(5, 3),
        }
        model = network(forward, **parts)
        return explain.attribute(model, random(4, 2, 3, 6, 6), LRP("ExcitationBackprop"), target=1)

    expected = explained(F.linear)
    assert expected.values.any()
    assert_near(explained(product).values, expected.values, 1e-5)


class Bytes(torch.Tensor):
    """Weights in 8 bits that only a linear layer can take, as those of torchao."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, weight: Tensor) -> Bytes:
        made: Bytes = torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        made.scale = weight.abs().max() / 127
        made.values = (weight / made.scale).round().to(torch.int8)
        return made

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return self.values.to(self.scale) * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return F.linear(args[0], args[1].dequantize(), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return args[0]
        raise NotImplementedError(str(func))


@pytest.mark.parametrize("composite", ["Epsilon", "EpsilonPlus", "ExcitationBackprop"])
def test_quantised_weights_are_the_numbers_that_they_stand_for(composite: str) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return F.linear(net.first(x).relu().mean((2, 3)), net.weight, net.bias)

    parts = {"first": nn.Conv2d(3, 4, 3), "bias": nn.Parameter(torch.zeros(3))}
    model = network(forward, weight=nn.Parameter(torch.zeros(3, 4)), **parts)
    quantised = Bytes(model.weight.detach())
    x = random(4, 2, 3, 6, 6)
    values = []
    for weight in (quantised, quantised.dequantize()):
        del model.weight
        model.weight = weight
        values.append(explain.attribute(model, x, LRP(composite), target=1).values)
    assert values[0].any()
    assert_close(values[0], values[1])
