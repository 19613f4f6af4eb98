"""Faith-Shap: exact against its closed form, and what pictures make of it."""

from __future__ import annotations

from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import explain
from explain.methods import FaithSHAP, region_values
from explain.methods.shapley import faithful_interactions
from tests.conftest import ROOT

REGIONS = 10


def harsanyi(scores: Tensor) -> Tensor:
    """What each set of regions adds to all of its parts, by the bits of its number."""
    dividends = scores.clone()
    numbers = torch.arange(len(scores))
    for region in range(REGIONS):
        having = numbers[(numbers >> region) & 1 == 1]
        dividends[having] -= dividends[having - 2**region]
    return dividends


def closed_form(scores: Tensor) -> Tensor:
    """Theorem 19 of the paper, for pairs at most: ``(M, M)``."""
    dividends = harsanyi(scores)
    values = torch.zeros(REGIONS, REGIONS, dtype=torch.float64)
    for first in range(REGIONS):
        for second in range(first, REGIONS):
            wanted = (1 << first) | (1 << second)
            size = wanted.bit_count()
            value = float(dividends[wanted])
            for larger in range(2**REGIONS):
                count = larger.bit_count()
                if count > 2 and larger & wanted == wanted:
                    part = comb(count - 1, 2) / comb(count + 1, 2 + size)
                    sign = (-1) ** (2 - size) * size / (2 + size) * comb(2, size)
                    value += sign * part * float(dividends[larger])
            values[first, second] = values[second, first] = value
    return values


def test_all_coalitions_give_the_closed_form() -> None:
    scores = torch.randn(
        2**REGIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    seen = torch.arange(2**REGIONS)[:, None] >> torch.arange(REGIONS) & 1
    values = faithful_interactions(
        seen[1:-1].double(), scores[1:-1], float(scores[-1]), float(scores[0])
    )
    torch.testing.assert_close(values, closed_form(scores), rtol=0, atol=1e-11)


class Products(nn.Module):
    """The sum of a few columns, and twice the product of the first and the last one."""

    def forward(self, x: Tensor) -> Tensor:
        columns = x.sum((1, 2))
        score = columns[:, 0] + 3 * columns[:, 1] + 2 * columns[:, 0] * columns[:, -1]
        return torch.stack([score, -score], 1)


def test_few_coalitions_find_the_pair_of_a_score_with_one_product() -> None:
    labels = torch.arange(6).expand(2, 6)
    x = torch.full((2, 1, 2, 6), 0.5, dtype=torch.float64)
    a = explain.attribute(Products(), x, FaithSHAP(samples=40, regions=labels), target=0)
    alone = torch.tensor([1.0, 3, 0, 0, 0, 0], dtype=torch.float64)
    wanted = alone.diag()
    wanted[0, 5] = wanted[5, 0] = 2
    assert a.interactions is not None
    torch.testing.assert_close(a.interactions, wanted.expand(2, 6, 6), rtol=0, atol=1e-10)
    of_regions = region_values(a.values, labels.expand(2, 2, 6))[0]
    torch.testing.assert_close(of_regions, alone + torch.tensor([1.0, 0, 0, 0, 0, 1]))
    assert a.centres is not None
    assert a.centres[0, :, 0].tolist() == [0.5] * 6
    torch.testing.assert_close(a.centres[0, :, 1], (torch.arange(6) + 0.5) / 6)
    assert a.delta is not None
    assert a.delta.abs().max() < 1e-10
    with pytest.raises(explain.ExplainError, match="at least 21"):
        explain.attribute(Products(), x, FaithSHAP(samples=20, regions=labels), target=0)


def test_images_may_have_different_numbers_of_regions() -> None:
    x = torch.zeros(2, 1, 8, 8)
    x[0, :, :4] = 1
    x[1, :, :4, :4] = 1
    halves = x[0, 0].long()
    quarters = torch.arange(8)[:, None] // 4 * 2 + torch.arange(8) // 4
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    regions = torch.stack([halves, quarters])
    a = explain.attribute(model, x, FaithSHAP(regions=regions, samples=200), target=0)
    assert a.interactions is not None
    assert a.interactions.shape == (2, 4, 4)
    weights = model[1].weight[0].detach().view(8, 8)
    alone = [float((weights * x[image, 0])[:4, :4].sum()) for image in range(2)]
    assert a.interactions[1, 0, 0].item() == pytest.approx(alone[1], abs=1e-6)
    assert not a.interactions[0, 2:].any()
    assert a[1].interactions is not None
    assert a[1].interactions.shape == (1, *a.interactions.shape[1:])


def test_pairs_are_drawn_beside_the_map(tmp_path: Any) -> None:
    explanation = explain.Explainer("tiny")(
        ROOT / "assets" / "chelsea.png", methods=["faithshap(regions=2)"]
    )
    tiles = explanation.layout().groups[-1].tiles
    assert [tile.name for tile in tiles[-2:]] == ["Faith-SHAP", "in pairs"]
    picture = tiles[-1].picture
    colors = {color for _, color in picture.getcolors(10**6)}
    assert any(max(color) - min(color) > 60 for color in colors)  # the photo below is grey
    explanation.save(tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 1
