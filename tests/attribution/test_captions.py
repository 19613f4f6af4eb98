"""Words and colours of a map: its noise, its cells, its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from explain.attribution.concepts import Concepts, name_concepts
from explain.attribution.pictures import cautions, certainty
from explain.attribution.result import Attribution, fused


def test_noise_takes_colour_away() -> None:
    one = torch.ones(1, 2, 2)
    noisy = Attribution("rise", one, "score", one, None, (2, 2), error=one)
    sure = replace(noisy, error=0.1 * one)
    assert certainty(noisy) == 0.25
    assert certainty(sure) == 1.0


def test_a_coarse_and_even_map_is_cautioned_of() -> None:
    one = torch.ones(1, 3, 3)
    coarse, even = cautions(Attribution("gradcam", one, "score", one, "layer4", (96, 96)))
    assert "3 × 3" in coarse
    assert "even" in even


def test_maps_of_layers_are_fused_at_the_finest() -> None:
    both = fused([torch.ones(1, 2, 2), torch.zeros(1, 4, 4)])
    assert torch.equal(both, torch.full((1, 4, 4), 0.5))


@pytest.mark.parametrize(("count", "names"), [(1, "dog"), (2, "dog, hen")])
def test_concepts_are_named_by_their_best_classes(count: int, names: str) -> None:
    effects = torch.tensor([[0.0, 2.0, 1.0]])
    concepts = Concepts(torch.ones(1, 1, 1, 1), torch.ones(1, 2), effects, "a", (1, 1), 0.0)
    assert name_concepts(concepts, ["cat", "dog", "hen"], count) == [names]
