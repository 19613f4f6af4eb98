"""The units of a network make no difference: activations, scores, the caller's default dtype, half
precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.methods import LRP, list_methods
from explain.methods.base import get_method
from explain.relevance.composites import COMPOSITES
from tests.conftest import ATTENDING, Made, settled
from tests.methods.test_properties import quick
from tests.peers.common import random

X = random(1, 2, 3, 12, 10)


def forward(net: Any, x: Tensor) -> Tensor:
    x = F.max_pool2d(F.relu(net.two(F.relu(net.one(x)))), 2)
    return net.fc(F.relu(net.three(x)).mean((2, 3)))


NONE = ["ablationcam", "eigencam", "fem", "fullgrad", "hsic", "kpcacam", "lafam", "randomcam"]
OF_SCORES = dict.fromkeys([*NONE, "sobol"], 0)
OF_SCORES |= dict.fromkeys(["guidedgradcam", "smoothgrad2", "vargrad"], 2)
"""With which power of the score maps grow by their formulas; with 1, if it is not said."""
OF_LAYER = ["ablationcam", "eigencam", "fem", "iscam", "lafam", "randomcam", "scorecam", "sscam"]
"""Methods whose maps have the unit of the layer that they look at."""
# exponentials, probabilities and sigmoids of the score, a second derivative, a sum with mask sizes
NOT_OF_SCORES = {"gradcam++", "smoothgradcam++", "iscam", "scorecam", "sscam", "rise"}
NOT_OF_SCORES |= {"extremalperturbation", "refinecam", "shapleycam"}
ELSEWHERE = {"drise"} | ATTENDING  # detected boxes; what attention is made of has no free unit
ELSEWHERE |= {"sufficient", "necessary"}  # these networks give a blank photo the same answer
METHODS = sorted(set(list_methods()) - ELSEWHERE - {"cam"})


def network() -> nn.Module:
    """Three convolutions and a linear layer; what lies between them has units of its own."""
    one = nn.Conv2d(3, 6, 3, padding=1)
    two = nn.Conv2d(6, 8, 3, padding=1)
    three = nn.Conv2d(8, 8, 3, padding=1)
    return settled(Made(forward, one=one, two=two, three=three, fc=nn.Linear(8, 5))).double()


def scaled(part: str, factor: float) -> nn.Module:
    """The network with other units: behind its second convolution, at its last one, or of its
    scores."""
    model: Any = network()
    layers = [model.two, model.three, model.fc]
    number = ["hidden", "layer", "score"].index(part)
    layers[number].weight.data *= factor
    layers[number].bias.data *= factor
    if part != "score":
        layers[number + 1].weight.data /= factor
    return model


def maps_of(model: nn.Module, x: Tensor = X) -> dict[str, Tensor]:
    """The maps of all methods, which run together."""
    methods = [quick(get_method(name)) for name in METHODS]
    attributions = explain.attribute(model, x, methods, target=1)
    return {name: attribution.values for name, attribution in attributions.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return maps_of(network())


@pytest.mark.filterwarnings("ignore:.*ablationcam divides by the score")
@pytest.mark.parametrize(
    ("part", "factor"), [("hidden", 2.0**-40), ("layer", 2.0**20), ("score", 2.0**-40)]
)
def test_units_of_a_network_change_nothing_but_units(
    part: str, factor: float, expected: dict[str, Tensor]
) -> None:
    for name, values in maps_of(scaled(part, factor)).items():
        if part == "score" and name in NOT_OF_SCORES:
            continue
        power = {"hidden": 0, "layer": int(name in OF_LAYER), "score": OF_SCORES.get(name, 1)}[part]
        tolerance = 1e-9 * float(expected[name].abs().max())
        assert tolerance > 0, name
        assert_close(values / factor**power, expected[name], rtol=1e-9, atol=tolerance, msg=name)


@pytest.mark.parametrize("composite", sorted(COMPOSITES))
def test_images_and_networks_have_their_own_stabilisers(composite: str) -> None:
    """An image of a millionth of the other's size is explained beside it as it is alone; so is a
    network with scores of such a size."""
    x = torch.stack([X[0], X[1] * 1e-6])
    together, alone, scores = (
        explain.attribute(model, photos, LRP(composite), target=1).values
        for model, photos in ((network(), x), (network(), x[1:]), (scaled("score", 2.0**-40), x))
    )
    assert_close(together[1:], alone, rtol=1e-9, atol=1e-12 * float(alone.abs().max()))
    assert torch.equal(scores * 2.0**40, together)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*ablationcam divides by the score")
def test_the_default_dtype_of_the_caller_changes_no_map() -> None:
    model = network().float()
    x = X.float()
    maps = maps_of(model, x)
    torch.set_default_dtype(torch.float64)
    try:
        under_double = maps_of(model, x)
    finally:
        torch.set_default_dtype(torch.float32)
    # whether parts of the network run again, or all of it, is decided by the time that it takes
    rounding = 100 * torch.finfo(torch.float32).eps
    for name, values in under_double.items():
        tolerance = rounding * float(maps[name].abs().max())
        assert_close(values, maps[name], rtol=rounding, atol=tolerance, msg=name)


# Half precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:.* may be off by tens of percent")
def test_integrated_gradients_in_half_precision_add_up_in_single_precision(
    dtype: torch.dtype,
) -> None:
    """Of a function whose gradient 2 w x is two products of numbers in half precision.

    A point is rounded once and each of the products once, which are three relative errors of at
    most eps / 2 in each term of the sum. All terms have one sign, so that the sum has no larger
    relative error.
    """

    squares = Made(
        lambda net, x: (net.weight * x.flatten(1).square()).sum(1, keepdim=True),
        weight=nn.Parameter(random(3, 48).to(dtype)),
    )
    x = random(4, 1, 3, 4, 4).to(dtype)
    found = explain.attribute(squares, x, "integratedgradients", target=0).values
    expected = explain.attribute(
        squares.double(), x.double(), "integratedgradients", target=0
    ).values
    bound = (1 + torch.finfo(dtype).eps / 2) ** 3 - 1
    assert ((found.double() - expected).abs() <= (bound + 1e-6) * expected.abs()).all()


@pytest.mark.parametrize("other", [torch.float64, torch.float16])
@pytest.mark.parametrize("part", ["one", "two", "fc"])
@pytest.mark.filterwarnings("ignore:.*ablationcam divides by the score")
def test_a_network_of_two_precisions_has_the_maps_of_one(part: str, other: torch.dtype) -> None:
    """Layers that are more precise than the photo, or less; the score may be either."""

    def in_turn(net: Any, x: Tensor) -> Tensor:
        maps = F.relu(net.one(x.to(net.one.weight.dtype)))
        maps = net.relu(net.two(maps.to(net.two.weight.dtype)))
        return net.fc(maps.mean((2, 3)).to(net.fc.weight.dtype))

    parts = {"one": nn.Conv2d(3, 4, 3), "two": nn.Conv2d(4, 4, 3), "fc": nn.Linear(4, 5)}
    expected_from = settled(Made(in_turn, relu=nn.ReLU(), **parts)).double().eval()
    names = ["cam", "gradcam", "scorecam", "sscam(samples=2)", "iscam", "ablationcam", "xgradcam"]
    options: Any = {"target": 1, "layer": "relu"}
    expected = explain.attribute(expected_from, X, names, **options)
    mixed = expected_from.float()
    getattr(mixed, part).to(other)
    # ablationcam divides differences of the score by the score
    rtol = 100 * max(torch.finfo(torch.float32).eps, torch.finfo(other).eps)
    for name, found in explain.attribute(mixed, X.float(), names, **options).items():
        scale = float(expected[name].values.abs().max())
        assert_close(
            found.values.double(), expected[name].values, rtol=0, atol=rtol * scale, msg=name
        )
