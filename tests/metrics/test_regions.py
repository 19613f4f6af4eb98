"""Curves over squares and superpixels, and what the photo's own heatmap leaves of the score."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import ExplainWarning
from explain.baselines import Mean, Noise, Zero
from explain.metrics import IROF, AverageDrop, IncreaseInConfidence, RegionPerturbation, Selectivity
from explain.metrics.faithfulness import superpixels
from tests.metrics import plain


def squares(height: int, width: int, side: int) -> list[list[int]]:
    """The places in each square, row by row."""
    return [
        [
            y * width + x
            for y in range(top, min(height, top + side))
            for x in range(left, min(width, left + side))
        ]
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]


def test_squares_are_covered_by_the_sum_of_the_map_in_each(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    metrics = [RegionPerturbation(4, 5, Noise(seed=2)), Selectivity(5, 100, Zero(), score="logit")]
    table = explain.evaluate(model, photos, {"map": maps}, metrics, target=1)
    four_steps = Selectivity(5, 4, Zero(), score="logit")
    fewer = explain.evaluate(model, photos, {"map": maps}, four_steps, target=1)
    for i, photo in enumerate(photos):
        flat = maps[i].flatten()
        read = plain.probability(model, 1)
        cover = plain.by_photo(Noise(seed=2).replacement(photo[None])[0])
        ordered = sorted(squares(12, 10, 4), key=lambda places: -flat[places].sum().item())
        curve = [read(cover(photo, set(chain.from_iterable(ordered[:k])))) for k in range(6)]
        assert table.curve("map", "regionperturbation")[1][i].tolist() == pytest.approx(
            curve, abs=1e-8
        )
        aopc = sum(curve[0] - value for value in curve) / 6
        assert table["map"]["regionperturbation"][i].item() == pytest.approx(aopc, abs=1e-8)
        ordered = sorted(squares(12, 10, 5), key=lambda places: -flat[places].sum().item())
        read = plain.logit(model, 1)
        cover = plain.constant([0, 0, 0])
        curve = [read(cover(photo, set(chain.from_iterable(ordered[:k])))) for k in range(7)]
        equal = [k / 6 for k in range(7)]
        assert table["map"]["selectivity"][i].item() == pytest.approx(
            plain.trapezium(curve, equal), abs=1e-8
        )
        # in four steps, by 1.5 squares each, to the nearest square
        shares = [0, 2 / 6, 3 / 6, 4 / 6, 1]
        four = plain.trapezium([curve[round(6 * share)] for share in shares], shares)
        assert fewer["map"]["selectivity"][i].item() == pytest.approx(four, abs=1e-8)


def test_irof_is_the_area_over_the_share_that_superpixels_leave(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    table = explain.evaluate(model, photos, {"map": maps}, IROF(8), target=1)
    pieces = superpixels(photos, 8)
    for i, photo in enumerate(photos):
        labels = pieces[i].flatten()
        flat = maps[i].flatten()
        places = [
            torch.nonzero(labels == k).flatten().tolist() for k in range(int(labels.max()) + 1)
        ]
        ordered = sorted(places, key=lambda each: -flat[each].mean().item())
        read = plain.probability(model, 1)
        cover = plain.constant(photo.mean((1, 2)).tolist())
        curve = [
            read(cover(photo, set(chain.from_iterable(ordered[:k]))))
            for k in range(len(ordered) + 1)
        ]
        equal = [k / len(ordered) for k in range(len(ordered) + 1)]
        expected = 1 - plain.trapezium([value / curve[0] for value in curve], equal)
        assert table["map"]["irof"][i].item() == pytest.approx(expected, abs=1e-8)


def test_superpixels_follow_colours_and_have_no_gaps() -> None:
    generator = torch.Generator().manual_seed(0)
    photo = 0.05 * torch.randn(2, 3, 24, 32, generator=generator)
    photo[0, :, 5:14, 9:20] += 2
    found = superpixels(photo, 24, compactness=0.3)
    assert found.shape == (2, 24, 32)
    for pieces in found:
        assert set(pieces.flatten().tolist()) == set(range(int(pieces.max()) + 1))
    inside = set(found[0, 5:14, 9:20].flatten().tolist())
    outside = set(found[0].flatten().tolist()) - inside
    assert outside, "a piece that is only background"
    bright = torch.zeros(24, 32, dtype=torch.bool)
    bright[5:14, 9:20] = True
    mixed = sum(
        min(bright[found[0] == k].sum().item(), (~bright[found[0] == k]).sum().item())
        for k in inside
    )
    assert mixed < 0.05 * 24 * 32
    assert torch.equal(superpixels(photo[1:], 24, 0.3)[0], found[1])


def test_the_photo_behind_its_heatmap_by_the_formula(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    metrics = [AverageDrop(Mean()), IncreaseInConfidence(Zero())]
    table = explain.evaluate(model, photos, {"map": maps}, metrics, target=[1, 0, 3])
    for i, photo in enumerate(photos):
        read = plain.probability(model, [1, 0, 3][i])
        mask = (maps[i] / maps[i].max()).clamp(min=0)
        behind = read(mask * photo + (1 - mask) * photo.mean((1, 2), keepdim=True))
        drop = max(0.0, read(photo) - behind) / read(photo)
        assert table["map"]["averagedrop"][i].item() == pytest.approx(drop, abs=1e-8)
        assert table["map"]["increase"][i].item() == float(read(mask * photo) > read(photo))


def test_shares_of_next_to_nothing_are_not_defined_and_said_to_be(
    photos: torch.Tensor, maps: torch.Tensor
) -> None:
    class Sure(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x.sum((1, 2, 3)) * 0 + 50, x.sum((1, 2, 3)) * 0], 1)

    with pytest.warns(ExplainWarning, match="original") as caught:
        table = explain.evaluate(Sure(), photos, {"map": maps}, ["averagedrop", "irof"], target=1)
    assert len(caught) == 2
    assert table["map"]["averagedrop"].isnan().all()
    assert table["map"]["irof"].isnan().all()
    assert str(table).splitlines()[1].split() == ["map", "–", "–"]
    assert table.to_dict()["values"]["map"]["irof"] == [None] * 3
    assert np.isnan(table.mean("map", "irof"))
