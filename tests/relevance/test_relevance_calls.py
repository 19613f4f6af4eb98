"""Relevance asked by several at once, again, for one image or many, and broken off: the same bits,
and nothing left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import explain
from explain.methods import LRP, DeepLIFT
from explain.methods.base import MethodLike
from explain.relevance import COMPOSITES
from tests.conftest import settled, snapshot
from tests.relevance.test_relevance import Everything, random

METHODS: dict[str, MethodLike] = {
    **{name: LRP(name) for name in COMPOSITES},
    "of a layer": LRP("EpsilonPlusFlat", of_layer=True),
    "a concept": LRP("EpsilonPlus", concept=("twice", (0, 3))),
    "deeplift": DeepLIFT(0.1),
}


def asked(
    model: nn.Module, x: torch.Tensor, method: MethodLike, target: Any = 1
) -> explain.Attribution:
    layer = "twice" if isinstance(method, LRP) and method.of_layer else None
    return explain.attribute(model, x, method, target=target, layer=layer)


def attending() -> nn.Module:
    return settled(Everything(True)).double().eval()


@pytest.mark.parametrize("name", [*METHODS])
def test_a_second_call_gives_the_same_bits_and_leaves_the_weights(name: str) -> None:
    model = attending()
    x = random(3, 1, 3, 8, 8)
    before = snapshot(model)
    assert torch.equal(*(asked(model, x, METHODS[name]).values for _ in range(2)))
    assert snapshot(model) == before


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_is_its_images_one_by_one(name: str) -> None:
    model = attending()
    x = random(3, 2, 3, 8, 8)
    method = METHODS[name]
    together = asked(model, x, method, [0, 1])
    for i in range(2):
        alone = asked(model, x[i : i + 1], method, [i])
        assert torch.allclose(together.values[i], alone.values[0], rtol=1e-9, atol=1e-12)
        for cause, taken in alone.coverage.taken.items() if isinstance(method, LRP) else ():
            assert torch.allclose(
                together[i].coverage.taken[cause], taken, rtol=1e-9, atol=1e-12
            ), cause
