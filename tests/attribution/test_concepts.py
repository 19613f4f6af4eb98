"""Concepts: against a factorisation written out, and what holds for any."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import explain
from explain.attribution.concepts import updated_factors
from tests.conftest import TinyNet, snapshot
from tests.methods import plain, plain_factors
from tests.methods.test_exact import photo, random_network


def test_updates_equal_their_plain_computation() -> None:
    rows, where, what = (
        torch.rand(shape, dtype=torch.float64) for shape in ((12, 5), (12, 2), (2, 5))
    )
    expected = plain_factors.nmf(rows, where, what, 7)
    for _ in range(7):
        where, what = updated_factors(rows, where, what)
    assert_close(where, expected[0], rtol=1e-10, atol=1e-14)
    assert_close(what, expected[1], rtol=1e-10, atol=1e-14)


def test_concepts_make_up_the_layer_and_speak_for_classes_as_the_head_says() -> None:
    layers = random_network(2)
    x = photo(3)
    found = explain.find_concepts(
        plain.module_of(layers), x, 5, layer="3", seed=3
    )  # a start from which the local search comes near
    activations = torch.stack([plain.forward(layers, image)[4] for image in x])
    rebuilt = torch.einsum("nkhw,kc->nchw", found.maps, found.vectors)
    error = float((rebuilt - activations).norm() / activations.norm())
    assert found.error == pytest.approx(error, rel=1e-9)
    assert error < 0.05  # there are as many concepts as channels
    assert found.maps.min() >= 0
    assert found.vectors.min() >= 0
    assert_close(found.maps.amax((0, 2, 3)), torch.ones(5, dtype=torch.float64))
    for vector, logits in zip(found.vectors, found.logits, strict=True):
        assert_close(
            logits, plain.forward(layers[4:], vector[:, None, None])[-1], rtol=1e-9, atol=1e-12
        )
    parts = found.maps.sum((0, 2, 3)) * found.vectors.sum(1)
    assert parts.tolist() == sorted(parts.tolist(), reverse=True)


def test_the_model_is_left_as_found_and_a_seed_gives_the_same_again(
    net: TinyNet, x: torch.Tensor
) -> None:
    net.train()
    before = snapshot(net)
    first, again = (explain.find_concepts(net, x, 3, layer="relu", seed=5) for _ in range(2))
    assert torch.equal(first.maps, again.maps)
    assert torch.equal(first.logits, again.logits)
    assert first.heatmaps.shape == (3, 3, 12, 10)
    assert first.classes(2).shape == (3, 2)
    assert snapshot(net) == before
