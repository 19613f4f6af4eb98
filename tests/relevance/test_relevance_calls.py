"""Relevance asked by several at once, again, for one image or many, and broken off: the same bits,
and nothing left."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain.methods import LRP, DeepLIFT
from explain.methods.base import MethodLike
from explain.relevance import COMPOSITES
from tests.conftest import in_threads, settled, snapshot
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


def test_eight_threads_get_the_relevance_that_one_gets() -> None:
    """Each by a method of its own, all on one network, twice over."""
    model = attending()
    names = [*METHODS][-8:]
    pictures = [random(i, 2, 3, 8, 8) for i in range(8)]
    alone = [
        {name: asked(model, pictures[i], METHODS[name]).values for name in names[i::8]}
        for i in range(8)
    ]
    before = snapshot(model)
    found = [dict[str, torch.Tensor]() for _ in range(8)]
    together = threading.Barrier(8)

    def work(i: int) -> None:
        together.wait()
        for _ in range(2):
            found[i] |= {
                name: asked(model, pictures[i], METHODS[name]).values for name in names[i::8]
            }

    in_threads(8, work)
    for mine, others in zip(found, alone, strict=True):
        assert mine.keys() == others.keys()
        for name, values in mine.items():
            assert torch.equal(values, others[name]), name
    assert snapshot(model) == before


@pytest.mark.parametrize("name", [*METHODS])
def test_a_second_call_gives_the_same_bits_and_leaves_the_weights(name: str) -> None:
    model = attending()
    x = random(3, 1, 3, 8, 8)
    before = snapshot(model)
    assert torch.equal(*(asked(model, x, METHODS[name]).values for _ in range(2)))
    assert snapshot(model) == before


class Broken(RuntimeError):
    pass


class Breaking(nn.Module):
    """A network in which something goes wrong: on the way forward, or on the way back, before or
    behind a map."""

    def __init__(self, where: str, error: type[BaseException]) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(64, 3)
        self.where = where
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu_(self.norm(self.one(x)))
        if self.where == "forward":
            raise self.error
        if self.where == "early" and x.requires_grad:
            x.register_hook(self.fail)
        x = F.relu(self.two(x), inplace=True).flatten(1)
        if self.where == "late" and x.requires_grad:
            x.register_hook(self.fail)
        return self.head(x)

    def fail(self, gradient: torch.Tensor) -> None:
        raise self.error


@pytest.mark.parametrize("where", ["forward", "early", "late"])
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_weights_are_the_same_bits_after_an_exception_anywhere(
    where: str, error: type[BaseException]
) -> None:
    model = settled(Breaking(where, error)).double().eval()
    x = random(3, 2, 3, 8, 8)
    before = snapshot(model)
    for method in (LRP("Epsilon"), LRP("EpsilonPlusFlat"), LRP("EpsilonGammaBox"), DeepLIFT(0.1)):
        with pytest.raises(error):
            explain.attribute(model, x, method, target=1)
        assert snapshot(model) == before
    model.where = "nowhere"
    a = explain.attribute(model, x, LRP("EpsilonPlusFlat"), target=1)
    fresh = settled(Breaking("nowhere", error)).double().eval()
    assert torch.equal(
        a.values, explain.attribute(fresh, x, LRP("EpsilonPlusFlat"), target=1).values
    )


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
