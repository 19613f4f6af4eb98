"""Against zennit: the composites of the literature, on networks that its canonisers know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import explain
from explain.methods import LRP
from explain.relevance import COMPOSITES, Composite
from tests.peers.common import random, resnet

pytest.importorskip("zennit", reason="zennit comes with the extra 'peers'")

from zennit import canonizers, composites
from zennit import torchvision as architectures
from zennit.attribution import Gradient

LOW = (-3.0,) * 3
HIGH = (3.0,) * 3


def vgg() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layout = [8, "M", 12, "M", 16, 16, "M"]
        features = torchvision.models.vgg.make_layers(layout, batch_norm=True)  # type: ignore[arg-type]
        model = nn.Sequential(
            features, nn.Flatten(), nn.Linear(256, 32), nn.ReLU(True), nn.Linear(32, 10)
        ).double()
        model.train()(torch.randn(16, 3, 32, 32, dtype=torch.float64))
    return model.eval()


def theirs(model: nn.Module, x: torch.Tensor, composite: Any, target: int) -> torch.Tensor:
    with Gradient(model=model, composite=composite) as attributor:
        return attributor(x, torch.eye(10, dtype=x.dtype)[[target] * len(x)])[1]


def box(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"low": torch.full_like(x[:1], LOW[0]), "high": torch.full_like(x[:1], HIGH[0])}


def finer(name: str | Composite) -> LRP:
    """A composite with stabilisers so small that it does not matter which operations have one:
    zennit's sums do too."""
    known = COMPOSITES[name] if isinstance(name, str) else name
    rules = tuple(
        (when, replace(r, epsilon=1e-12) if hasattr(r, "epsilon") else r) for when, r in known.rules
    )
    return LRP(Composite(known.name, rules))


PAIRS: dict[str, tuple[LRP, Any]] = {
    "EpsilonPlus": (finer("EpsilonPlus"), lambda x: composites.EpsilonPlus),
    "EpsilonPlusFlat": (finer("EpsilonPlusFlat"), lambda x: composites.EpsilonPlusFlat),
    "EpsilonAlpha2Beta1": (finer("EpsilonAlpha2Beta1"), lambda x: composites.EpsilonAlpha2Beta1),
    "EpsilonAlpha2Beta1Flat": (
        finer("EpsilonAlpha2Beta1Flat"),
        lambda x: composites.EpsilonAlpha2Beta1Flat,
    ),
    "EpsilonGammaBox": (
        finer(COMPOSITES["EpsilonGammaBox"].within(LOW, HIGH)),
        lambda x: lambda **more: composites.EpsilonGammaBox(**box(x), **more),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("network", ["vgg", "resnet"])
def test_composites_are_the_same_where_canonisers_know_the_network(network: str, name: str) -> None:
    method, make = PAIRS[name]
    model, x = (
        (vgg(), random(0, 1, 3, 32, 32))
        if network == "vgg"
        else (resnet(), random(0, 1, 3, 64, 64))
    )
    canonizer = (
        canonizers.SequentialMergeBatchNorm()
        if network == "vgg"
        else architectures.ResNetCanonizer()
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var += module.eps  # type: ignore[operator]
            # zennit's canoniser adds it once more to the variance of one that it leaves behind
            module.eps = 0.0
    target = 3
    with torch.no_grad():
        score = model(x)[:, target]
    expected = (
        theirs(model, x, make(x)(canonizers=[canonizer], stabilizer=1e-12, epsilon=1e-12), target)
        * score[:, None, None, None]
    )
    found = explain.attribute(model, x, method, target=target).values
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
