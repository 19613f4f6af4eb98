"""Gradients of random networks against finite differences: of one photo and of two, under every
norm and activation."""

from __future__ import annotations

from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import explain
from explain.methods import IntegratedGradients, Saliency
from tests.fuzz.networks import quietly
from tests.fuzz.programs import Network, Program, Step, legal, scores_in
from tests.fuzz.sketch import Sketch
from tests.fuzz.test_networks import ALWAYS

STEP = 1e-6


@st.composite
def normalised(draw: Any) -> Program:
    """Convolutions, norms and activations in any order, some of them behind tokens or beside a
    shortcut."""
    sketch = Sketch(draw, [(3, 6, 5)])
    last = sketch.conv(0, 4, keep=True)
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            last = sketch.add(Step("sequence", (last,)))
        last = sketch.residual(last) if draw(st.booleans()) else sketch.norm(last)
        last = sketch.act(last) if draw(st.booleans()) else last
    if draw(st.booleans()):
        sketch.add(Step("linear", (sketch.add(Step("tokens", (last,))),), (2, True)))
    else:
        sketch.head(2)
    return legal(Program(((3, 6, 5),), tuple(sketch.steps), seed=draw(st.integers(0, 999))))


@hypothesis.settings(ALWAYS, max_examples=20)
@hypothesis.given(normalised(), st.sampled_from([1, 1, 2]))
def test_gradients_of_random_networks_are_their_finite_differences(
    program: Program, photos: int
) -> None:
    network = Network(program).eval()
    g = torch.Generator().manual_seed(program.seed)
    x, direction = (
        torch.randn(photos, *program.inputs[0], generator=g, dtype=torch.float64) for _ in range(2)
    )

    @torch.no_grad()
    def score(at: Tensor) -> Tensor:
        return scores_in(network(at.clone()))[:, 0]

    def slope(at: Tensor, along: Tensor) -> Tensor:
        return (score(at + STEP * along) - score(at - STEP * along)) / (2 * STEP)

    with quietly():
        path = IntegratedGradients(steps=2, rule="midpoint")
        found = explain.attribute(
            network, x, [Saliency(absolute=False), "inputxgradient", path], target=0
        )
    gradient, product, integrated = (each.values for each in found.values())
    size = gradient.abs().flatten(1).sum(1).max() + 1

    def same(sums: Tensor, expected: Tensor) -> None:
        assert_close(sums.flatten(1).sum(1), expected, rtol=1e-5, atol=1e-7 * float(size))

    same(gradient * direction, slope(x, direction))
    same(product, slope(x, x))
    same(integrated, (slope(0.25 * x, x) + slope(0.75 * x, x)) / 2)
    same(
        integrated - found["integratedgradients"].delta[:, None, None, None] / x[0].numel(),
        score(x) - score(0 * x),
    )
