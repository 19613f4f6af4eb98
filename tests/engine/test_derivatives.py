"""Gradients are the derivative of each photo's own score, or a warning says that they are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ExplainWarning
from tests.conftest import Made, layer_for

STEP = 1e-6


def slope(model: nn.Module, x: Tensor, along: Tensor, target: int = 1) -> Tensor:
    """The derivative of each photo's score in a direction, by differences."""
    with torch.no_grad():
        return (model(x + STEP * along) - model(x - STEP * along))[:, target] / (2 * STEP)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "BatchNorm2d": nn.BatchNorm2d,
    "InstanceNorm2d": nn.InstanceNorm2d,
    "BatchNorm3d": nn.BatchNorm3d,
    "InstanceNorm3d": nn.InstanceNorm3d,
    "F.batch_norm": lambda channels: Made(
        lambda net, x: F.batch_norm(x, torch.arange(8.0).to(x), torch.arange(1.0, 9.0).to(x))
    ),
}
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda maps: maps,
    "GELU": F.gelu,
    "dropout": nn.Dropout().eval(),
    "skip": lambda maps: maps + maps.sin(),
}


def becomes_tokens(net: Any, maps: Tensor) -> Tensor:
    """The norm's result becomes tokens behind a class token."""
    tokens = net.between(net.norm(maps)).flatten(2).transpose(1, 2)
    return torch.cat([tokens.new_zeros(len(maps), 1, 8), tokens], 1).tanh().mean(1)


def was_tokens(net: Any, maps: Tensor) -> Tensor:
    """The norm's input was tokens with the sequence first."""
    sequence = maps.flatten(2).permute(2, 0, 1).contiguous()
    maps = net.norm(sequence.permute(1, 2, 0).reshape(maps.shape))
    return net.after(net.between(maps)).tanh().flatten(2).mean(2)


def normalised(norm: str, between: str, pooled: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(1)
    kind = nn.Conv3d if "3d" in norm else nn.Conv2d
    parts = {"conv": kind(3, 8, 3, 2, 1), "norm": NORMS[norm](8), "after": kind(8, 8, 3, 1, 1)}
    parts |= {"head": nn.Linear(8, 3), "between": BETWEEN[between]}
    model = Made(lambda net, x: net.head(pooled(net, F.leaky_relu(net.conv(x)))), **parts)
    return model.double().eval()


@pytest.mark.parametrize("norm", NORMS)
def test_of_one_photo_gradients_through_a_norm_are_the_derivative(norm: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, *[8] * (3 if "3d" in norm else 2), generator=g, dtype=torch.float64)
    methods = ["guidedbackprop", "fullgrad", "lrp", "layercam", "integratedgradients(steps=3)"]
    networks = [normalised(norm, between, becomes_tokens) for between in BETWEEN]
    for model in (*networks, normalised(norm, "nothing", was_tokens)):
        for photos in (x[:1], x):
            along = torch.randn(photos.shape, generator=g, dtype=torch.float64)
            values = explain.attribute(model, photos, "saliency(absolute=False)", target=1).values
            sums = (values * along).flatten(1).sum(1)
            assert_close(sums, slope(model, photos, along), rtol=1e-6, atol=1e-9)
        # the last point of a path is run alone
        how = {"target": 1, "layer": "conv", "batch_size": 2}
        alone, both = (explain.attribute(model, photos, methods, **how) for photos in (x[:1], x))
        for name, a in alone.items():
            assert_close(a.values[0], both[name].values[0], rtol=1e-9, atol=1e-12, msg=name)


class Reversed(torch.autograd.Function):
    """As in domain adaptation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Swish(torch.autograd.Function):
    """A function of its own whose backward is its derivative, as in networks that save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.sigmoid() * (1 + x * (1 - x.sigmoid()))


def hooked(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(hook)
        return x

    return run


def through(function: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 6, 3), "head": nn.Linear(6, 3)}
    model = Made(
        lambda net, x: net.head(function(F.relu(net.conv(x)) + 0).mean((2, 3)).tanh()), **parts
    )
    return model.double().eval()


METHODS = ["gradcam", "finercam", "shapleycam", "saliency", "integratedgradients(steps=64)"]
OF_ALTERED = [
    "smoothgrad",
    "integratedgradients(steps=4)",
    "idgi(path='integratedgradients(steps=4)')",
]
GUIDED = [f"guidedintegratedgradients(steps={steps})" for steps in (1, 4)]
OF_ALTERED += [*GUIDED, f"idgi(path='{GUIDED[1]}')", "xrai", "smoothgradcam++"]
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "reversal": (Reversed.apply, False),
    "rounding": (Rounded.apply, False),
    "a hook that scales": (hooked(lambda gradient: 0.1 * gradient), False),
    "a function": (Swish.apply, True),
    "a hook that changes nothing": (hooked(lambda gradient: None), True),
    "a plain one": (F.silu, True),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_backward_that_is_not_the_derivative_is_named(name: str, method: str) -> None:
    function, is_derivative = FUNCTIONS[name]
    x = torch.rand(2, 3, 8, 8).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        how = {"target": 1, "layer": layer_for(method, "conv")}
        explain.attribute(through(function), x, method, **how)
        if is_derivative:
            explain.attribute(through(function).float(), x.float(), method, **how)
    said = [str(warning.message) for warning in caught]
    assert any("derivative" in each for each in said) != is_derivative
    assert is_derivative <= all("zero everywhere" in each for each in said)


def test_a_kink_beside_the_photo_does_not_make_a_gradient_another() -> None:
    x = torch.rand(1, 3, 4, 4).double()
    kink = x.sum() * (1 + 1e-4)
    identity = hooked(lambda gradient: None)

    def scores(net: nn.Module, x: Tensor) -> Tensor:
        total = identity(x.flatten(1)).sum(1)
        return torch.stack([total + F.relu(total - kink), -total], 1)

    a = explain.attribute(Made(scores).eval(), x, "inputxgradient", target=0)
    torch.testing.assert_close(a.values, x)


def test_what_a_model_decouples_is_seen_by_integrated_gradients() -> None:
    x = torch.rand(2, 3, 8, 8).double()
    model = through(lambda h: h * h.detach())
    with pytest.warns(ExplainWarning, match="derivative"):
        explain.attribute(model, x, "integratedgradients", target=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        explain.attribute(through(Reversed.apply), x, "deeplift", target=1)
    assert not any("integratedgradients" in str(warning.message) for warning in caught)


SMOOTH_LRP = "smooth(lrp, samples=2)"
BRANCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "detached": lambda maps: maps.detach(),
    "data": lambda maps: maps.data,
    "NumPy": lambda maps: torch.from_numpy(maps.detach().numpy().copy()),
    "alive": lambda maps: maps,
}


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize(
    "method",
    ["saliency", "lrp", SMOOTH_LRP, "guidedbackprop", "smoothgrad", "idgi", GUIDED[1]],
)
@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_without_a_gradient_beside_another_is_told(
    name: str, method: str, images: int, kind: torch.dtype
) -> None:
    torch.manual_seed(0)
    parts = {"live": nn.Conv2d(3, 6, 3), "dead": nn.Conv2d(3, 6, 3), "head": nn.Linear(6, 3)}

    def scores(net: Any, x: Tensor) -> Tensor:
        dead = BRANCHES[name](F.relu(net.dead(x)))
        return net.head((F.relu(net.live(x)) + 15 * dead).mean((2, 3)))

    model = Made(scores, **parts).to(kind).eval()
    x = torch.rand(images, 3, 16, 16, generator=torch.Generator().manual_seed(0)).to(kind)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            explain.attribute(model, x, method, target=1)
        said = [str(warning.message) for warning in caught]
        # a recording that relevance follows names what left it
        named = name == "NumPy" and method in ("lrp", SMOOTH_LRP, "guidedbackprop")
        word = "numpy" if named else "derivative"
        assert [word in each for each in said] == [True] * (name != "alive")


def test_a_branch_without_a_gradient_is_told_by_the_weights_of_now() -> None:
    parts = {"live": nn.Conv2d(3, 6, 3), "dead": nn.Conv2d(3, 6, 3), "head": nn.Linear(6, 3)}

    def scores(net: Any, x: Tensor) -> Tensor:
        return net.head((F.relu(net.live(x)) + F.relu(net.dead(x)).detach()).mean((2, 3)))

    model = Made(scores, **parts).eval()
    for weight in (15.0, 0.0, 15.0):
        with torch.no_grad():
            model.dead.weight.fill_(weight)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            explain.attribute(model, torch.rand(1, 3, 16, 16), "saliency", target=1)
        assert any("derivative" in str(warning.message) for warning in caught) == (weight > 0)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("method", OF_ALTERED)
def test_methods_of_altered_photos_say_so_too(name: str, method: str) -> None:
    function, is_derivative = FUNCTIONS[name]
    model = through(function)
    x = torch.rand(2, 3, 8, 8).double()
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            explain.attribute(model, x, method, target=1)
        said = [str(warning.message) for warning in caught]
        assert any("derivative" in each for each in said) != is_derivative


@pytest.mark.parametrize("first", ["integratedgradients(steps=4)", "idgi", "smoothgrad"])
def test_what_altered_photos_tell_of_a_branch_hides_it_from_no_other_method(first: str) -> None:
    """Photos near the baseline tell nothing."""
    model = through(lambda maps: maps + 15 * maps.detach())
    x = torch.rand(1, 3, 8, 8).double()
    for method in (first, "saliency"):
        with pytest.warns(ExplainWarning, match=f"^{method[:4]}.*derivative"):
            explain.attribute(model, x, method, target=1)


@pytest.mark.parametrize("method", [GUIDED[1], f"idgi(path='{GUIDED[1]}')", "smoothgrad"])
def test_gradients_of_altered_photos_in_half_precision_are_told(method: str) -> None:
    model = through(F.silu).bfloat16()
    with pytest.warns(ExplainWarning, match="bfloat16"):
        explain.attribute(model, torch.rand(1, 3, 8, 8).bfloat16(), method, target=1)


@pytest.mark.parametrize("method", ["cheferattribution", "lrp", "attnlrp", "fullgrad"])
def test_a_frozen_network_behind_no_grad_is_refused_in_one_line(method: str) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            maps = model.conv(x)
        return model.head(maps.mean((2, 3)))

    model = Made(forward, conv=nn.Conv2d(2, 2, 3), head=nn.Linear(2, 3)).requires_grad_(False)
    with pytest.raises(explain.ExplainError) as caught:
        explain.attribute(model.eval(), torch.rand(1, 2, 8, 8), method, target=1)
    assert "\n" not in str(caught.value)


class Squared(torch.autograd.Function):
    """A custom function whose backward is right, or twice the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.times = times
        return x.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * ctx.times * x * gradients[0], None


@pytest.mark.parametrize(
    ("times", "noise", "is_told"), [(1, 0, False), (2, 0, True), (1, 0.03, False), (1, 3, False)]
)
def test_a_backward_that_is_not_the_derivative_is_told_unless_scores_change_by_themselves(
    times: float, noise: float, is_told: bool
) -> None:
    torch.manual_seed(0)

    def forward(net: Any, x: Tensor) -> Tensor:
        features = Squared.apply(net.conv(x), times).mean((2, 3))
        return net.head(features) + noise * torch.rand(len(x), 3)

    model = Made(forward, conv=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 3))
    x = torch.rand(2, 3, 8, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExplainWarning)
        explain.attribute(model, x, "saliency", target=1)
    assert any("derivative" in str(warning.message) for warning in caught) == is_told
