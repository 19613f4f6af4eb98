"""Attributions that keep their graph: double backward against plain formulas, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

import explain
from explain.attribution.api import attribute
from explain.methods import (
    LRP,
    Augmented,
    GradCAM,
    GuidedIntegratedGradients,
    Method,
)
from explain.methods.base import get_method, options
from explain.recording.operations import TABLE
from explain.relevance import COMPOSITES
from explain.relevance.composites import transformer_attribution
from tests.conftest import Made, settled, snapshot

LABELS = torch.tensor([1, 2])


def small(method: Method) -> Method:
    fewer = {"samples": 3, "steps": 3}
    return replace(method, **{key: fewer[key] for key in fewer.keys() & options(method)})  # type: ignore[arg-type]


METHODS = {
    m.name: small(m)
    for m in map(get_method, explain.list_methods())
    if m.differentiable and m.name != "cam"
}
METHODS |= {f"lrp {name}": LRP(composite) for name, composite in COMPOSITES.items()}
METHODS |= {
    "lrp of a layer": LRP("EpsilonPlus", of_layer=True),
    "lrp of a concept": LRP("Epsilon", ("last", (0, 2))),
    "lrp for attention": LRP(transformer_attribution()),
    "augmented": Augmented(GradCAM(), scales=(1.0,)),
}

Function = Callable[[Tensor], Tensor]
SPECIAL: dict[str, Function] = {
    "_prelu_kernel": lambda x: F.prelu(x, x.new_full((1,), 0.2)),
    "threshold": lambda x: F.threshold(x, 0.1, 0.3),
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "clamp_max": lambda x: x.clamp_max(0.2),
    "clamp_min": lambda x: x.clamp_min(-0.2),
    "softshrink": lambda x: F.softshrink(x, 0.1),
    "hardshrink": lambda x: F.hardshrink(x, 0.1),
    "log_sigmoid_forward": F.logsigmoid,
    "special_expit": torch.special.expit,
    "special_ndtr": torch.special.ndtr,
    "pow": lambda x: x.pow(3),
    "sqrt": lambda x: (x.square() + 0.1).sqrt(),
    "log1p": lambda x: x.square().log1p(),
    "a quotient": lambda x: x / (1 + x.square()),
    "a softmax": lambda x: x.softmax(-1),
    "a maximum": lambda x: F.pad(F.max_pool2d(x, 2, 1), (0, 1, 0, 1)),
}
NO_SECOND_DERIVATIVE = {"hardsigmoid"}  # PyTorch has none
KNOWN = {row.name for row in TABLE.values() if row.kind in ("activation", "rectifier")}
FUNCTIONS = {
    name: SPECIAL.get(name) or getattr(F, name, None) or getattr(torch, name)
    for name in {*KNOWN, *SPECIAL}
}
ACTIVATIONS: list[Function] = [
    FUNCTIONS[name] for name in sorted(FUNCTIONS.keys() - NO_SECOND_DERIVATIVE)
]


ALL = len(ACTIVATIONS)
FEW = 4


class Attended(nn.Module):
    """Positions attend to each other, under a mask of infinity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(channels, 3 * channels)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        weights = (q @ k.transpose(1, 2) / 2).masked_fill(~seen, -torch.inf).softmax(-1)
        return x + (weights @ v).transpose(1, 2).reshape(x.shape)


def mixed(norm: nn.Module, behind: nn.Module, channels: int) -> Made:
    """A convolution, a normalisation and what stands behind it, and a last convolution before the
    scores."""
    return Made(
        lambda net, x: net.head(net.last(net.behind(net.norm(net.stem(x)))).tanh().mean((2, 3))),
        stem=nn.Conv2d(2, channels, 3, padding=1),
        norm=norm,
        behind=behind,
        last=nn.Conv2d(channels, 4, 2),
        head=nn.Linear(4, 3),
    )


def of_batches() -> Made:
    """Each channel has another activation."""
    channels = Made(lambda net, x: torch.cat([f(x[:, [i]]) for i, f in enumerate(ACTIVATIONS)], 1))
    return mixed(nn.BatchNorm2d(ALL), channels, ALL)


def of_places() -> Made:
    """Activations whose value at zero is learned, a gate, and attention."""
    norm = Made(lambda net, x: net.norm(x.movedim(1, -1)).movedim(-1, 1), norm=nn.LayerNorm(FEW))
    learned = Made(
        lambda net, x: torch.clamp(x, min=net.least) + x * torch.sigmoid(net.slope * x),
        least=nn.Parameter(torch.tensor(0.1)),
        slope=nn.Parameter(torch.tensor(0.8)),
    )
    return mixed(norm, nn.Sequential(learned, Attended(FEW)), FEW)


def smooth_net() -> nn.Module:
    return settled(mixed(nn.BatchNorm2d(4), nn.GELU(), 4)).double().eval()


def photos() -> Tensor:
    return torch.rand(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)


def values_of(model: nn.Module, x: Tensor, *, graph: bool) -> dict[str, Tensor]:
    """The values of all methods."""
    values = {}
    for name, method in METHODS.items():
        layer = "last" if any(need.of_layer for need in method.needs) else None
        values[name] = attribute(
            model, x, method, layer=layer, target=LABELS, create_graph=graph, placement="even"
        ).values  # where cells look is no part of the derivative
    return values


@pytest.mark.long
@pytest.mark.parametrize("network", [of_batches, of_places])
@pytest.mark.filterwarnings("ignore::explain.ExplainWarning")
def test_every_method_has_the_derivative_of_central_differences_in_input_and_weights(
    network: Callable[[], nn.Module],
) -> None:
    """Part of the photo equals the baseline, and stays."""
    model = settled(network()).double()
    x = photos().detach()
    x[0, :, :2] = 0
    points = [x.requires_grad_(), *model.parameters()]
    start = [point.detach().clone() for point in points]
    ways = [torch.randn_like(point) for point in points]
    ways[0] *= start[0] != 0
    values = values_of(model, x, graph=True)
    along = {name: torch.randn_like(each) for name, each in values.items()}
    slopes = {}
    for name, each in values.items():
        total = (each * along[name]).sum()
        gradients = grad(total, points, retain_graph=True, materialize_grads=True)
        slopes[name] = sum(float((g * way).sum()) for g, way in zip(gradients, ways, strict=True))
    step = 1e-7
    ends = []
    for sign in (1, -1):
        for point, at, way in zip(points, start, ways, strict=True):
            point.data.copy_(at + sign * step * way)
        ends.append(values_of(model, x, graph=False))
    for name, up in ends[0].items():
        assert not up.requires_grad
        expected = float(((up - ends[1][name]) * along[name]).sum() / (2 * step))
        assert slopes[name] == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def test_curvature_is_refused_where_pytorch_has_a_wrong_third_derivative() -> None:
    model = of_places().double()
    with pytest.raises(explain.MethodError, match="create_graph"):
        attribute(model, photos(), "shapleycam", layer="stem", create_graph=True)
    attribute(model, photos(), "shapleycam", layer="last", create_graph=True)


WITHOUT = [name for name in explain.list_methods() if not get_method(name).differentiable]


@pytest.mark.parametrize(
    "method", [*WITHOUT, GuidedIntegratedGradients(), "smooth(lime)", "smooth(rollout)"]
)
def test_methods_without_a_graph_say_so(method: Method | str) -> None:
    with pytest.raises(explain.MethodError, match="create_graph"):
        attribute(smooth_net(), photos(), ["gradcam", method], create_graph=True)


@pytest.mark.filterwarnings("ignore::explain.ExplainWarning")
def test_the_model_is_left_as_found_and_its_running_statistics_are_used() -> None:
    """A graph goes on before the input."""
    model = smooth_net().train()
    photo = photos()
    x = photo * 2
    state = snapshot(model)
    names = ["saliency", "gradcam", "guidedbackprop", "lrp", "deeplift", "fullgrad"]
    attributions = attribute(model, x, names, target=LABELS, layer="last", create_graph=True)
    assert snapshot(model) == state
    of_x, of_photo = grad(attributions["lrp"].values.square().sum(), [x, photo])
    assert torch.allclose(of_photo, 2 * of_x)
    plainly = attribute(model.eval(), x, names, target=LABELS, layer="last")
    for name, attribution in attributions.items():
        assert torch.equal(attribution.values, plainly[name].values)
        assert not attribution.score.requires_grad
        assert attribution.delta is None or not attribution.delta.requires_grad
