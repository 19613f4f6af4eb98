"""Attributions that keep their graph: double backward against plain formulas, in float64."""

from __future__ import annotations

import gc
import weakref
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
from explain.relevance import COMPOSITES
from explain.relevance.composites import transformer_attribution
from explain.relevance.table import TABLE
from tests.conftest import settled, snapshot

LABELS = torch.tensor([1, 2])


def small(method: Method) -> Method:
    less = {"samples": 3, "steps": 3}
    return replace(
        method, **{name: value for name, value in less.items() if name in options(method)}
    )  # type: ignore[arg-type]


METHODS = {
    m.name: small(m)
    for m in map(get_method, explain.list_methods())
    if m.differentiable and m.name != "cam"
}
METHODS |= {f"lrp {name}": LRP(composite) for name, composite in COMPOSITES.items()}
METHODS |= {
    "lrp of a layer": LRP("EpsilonPlus", of_layer=True),
    "lrp of a concept": LRP("Epsilon", ("last", (0, 2))),
}
METHODS |= {
    "lrp for attention": LRP(transformer_attribution()),
    "augmented": Augmented(GradCAM(), scales=(1.0,)),
}

Function = Callable[[Tensor], Tensor]
SPECIAL: dict[str, Function] = {
    "prelu": lambda x: F.prelu(x, x.new_full((1,), 0.2)),
    "threshold": lambda x: F.threshold(x, 0.1, 0.3),
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "clamp_max": lambda x: x.clamp_max(0.2),
    "softshrink": lambda x: F.softshrink(x, 0.1),
    "hardshrink": lambda x: F.hardshrink(x, 0.1),
    "log_sigmoid": F.logsigmoid,
    "pow": lambda x: x.pow(3),
    "sqrt": lambda x: (x.square() + 0.1).sqrt(),
    "log1p": lambda x: x.square().log1p(),
    "silu in place": lambda x: F.silu(x * 1, inplace=True),
    "tanh in place": lambda x: (x * 1).tanh_(),
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


class LastDimension(nn.Module):
    """A normalisation of the channels, which are brought to the end for it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)  # type: ignore[no-any-return]


class Learned(nn.Module):
    """Activations whose value at zero is learned, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.least = nn.Parameter(torch.tensor(0.1))
        self.slope = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(x, min=self.least) + x * torch.sigmoid(self.slope * x)


class Activated(nn.Module):
    """Each channel has another activation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([f(x[:, i : i + 1]) for i, f in enumerate(ACTIVATIONS)], 1)


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


class Mixed(nn.Module):
    """A convolution, a normalisation and what stands behind it, and a last convolution before the
    scores."""

    def __init__(self, norm: nn.Module, behind: nn.Module, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, channels, 3, padding=1)
        self.norm = norm
        self.behind = behind
        self.last = nn.Conv2d(channels, 4, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.behind(self.norm(self.stem(x)))).tanh().mean((2, 3)))  # type: ignore[no-any-return]


ALL = len(ACTIVATIONS)
FEW = 4
NETWORKS: dict[str, Callable[[], Mixed]] = {
    "batch": lambda: Mixed(nn.BatchNorm2d(ALL), Activated(), ALL),
    "layer": lambda: Mixed(
        LastDimension(nn.LayerNorm(FEW)), nn.Sequential(Learned(), Attended(FEW)), FEW
    ),
}


def values_of(model: nn.Module, x: Tensor, *, graph: bool) -> dict[str, Tensor]:
    """The values of all methods."""
    values = {}
    for name, method in METHODS.items():
        layer = "last" if any(need.of_layer for need in method.needs) else None
        values[name] = attribute(
            model, x, method, layer=layer, target=LABELS, create_graph=graph
        ).values
    return values


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.filterwarnings("ignore::explain.ExplainWarning")
def test_every_method_has_the_derivative_of_central_differences_in_input_and_weights(
    network: str,
) -> None:
    """Part of the photo equals the baseline, and stays."""
    torch.manual_seed(3)
    model = settled(NETWORKS[network]()).double()
    x = torch.rand(2, 2, 5, 5, dtype=torch.float64)
    x[0, :, :2] = 0
    points = [x.requires_grad_(), *model.parameters()]
    start = [p.detach().clone() for p in points]
    ways = [torch.randn_like(p) for p in points]
    ways[0] *= start[0] != 0
    values = values_of(model, x, graph=True)
    along = {name: torch.randn_like(each) for name, each in values.items()}
    gradients = {
        n: grad((v * along[n]).sum(), points, retain_graph=True, allow_unused=True)
        for n, v in values.items()
    }

    def moved(step: float) -> dict[str, Tensor]:
        with torch.no_grad():
            for point, at, way in zip(points, start, ways, strict=True):
                point.copy_(at + step * way)
        return values_of(model, x, graph=False)

    step = 1e-7
    for (name, up), down in zip(moved(step).items(), moved(-step).values(), strict=True):
        parts = [(g, way) for g, way in zip(gradients[name], ways, strict=True) if g is not None]
        assert all(bool(g.isfinite().all()) for g, _ in parts), name
        slope = sum(float((g * way).sum()) for g, way in parts)
        assert slope == pytest.approx(
            float(((up - down) * along[name]).sum() / (2 * step)), rel=1e-4, abs=1e-5
        ), name
        assert not up.requires_grad


def smooth_net() -> Mixed:
    torch.manual_seed(0)
    return settled(Mixed(nn.BatchNorm2d(4), nn.GELU(), 4)).double().eval()


def photos() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(2, 2, 5, 5, dtype=torch.float64, generator=generator, requires_grad=True)


def test_curvature_is_refused_where_pytorch_has_a_wrong_third_derivative() -> None:
    model = NETWORKS["layer"]().double()
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
def test_the_model_is_left_as_found_and_nothing_stays_alive() -> None:
    """A graph goes on before the input; the model's running statistics are used."""
    model = smooth_net().train()
    state = snapshot(model)
    photo = photos()
    x = photo * 2
    names = ["saliency", "gradcam", "guidedbackprop", "lrp", "deeplift", "fullgrad"]
    attributions = attribute(model, x, names, target=LABELS, layer="last", create_graph=True)
    assert snapshot(model) == state
    of_x, of_photo = grad(attributions["lrp"].values.square().sum(), [x, photo])
    assert torch.allclose(of_photo, 2 * of_x)
    assert bool(of_x.any())
    plainly = attribute(model.eval(), x, names, target=LABELS, layer="last")
    for name, attribution in attributions.items():
        assert torch.equal(attribution.values, plainly[name].values)
        assert attribution.values.requires_grad
        assert not attribution.score.requires_grad
        assert attribution.delta is None or not attribution.delta.requires_grad
    alive = [weakref.ref(attribution.values) for attribution in attributions.values()]
    del attributions, attribution, of_x, of_photo
    gc.collect()
    assert not any(reference() is not None for reference in alive)
