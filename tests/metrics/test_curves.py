"""Deletion, insertion, pixel flipping, ROAD, sufficiency, comprehensiveness: against slow plain
loops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import explain
from explain.baselines import Blur, Mean, Neighbours, Zero
from explain.metrics import ROAD, Comprehensiveness, Deletion, Insertion, PixelFlipping, Sufficiency
from tests.metrics import plain


@pytest.mark.parametrize("score", ["probability", "logit"])
def test_deletion_insertion_and_flipping_are_areas_under_plain_curves(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor, score: str
) -> None:
    steps = 7
    classes = [4, 0, 2]
    metrics = [
        Deletion(steps, score=score),
        Insertion(steps, Blur(5, 2.0), score=score),  # type: ignore[arg-type]
        PixelFlipping(steps=steps, score=score),
        PixelFlipping("lerf", steps=steps, score=score),  # type: ignore[arg-type]
    ]
    table = explain.evaluate(model, photos, {"map": maps}, metrics, target=classes)
    for i, photo in enumerate(photos):
        read = getattr(plain, score)(model, classes[i])
        order = plain.order_of(maps[i])
        mean = plain.constant(photo.mean((1, 2)).tolist())
        blurred = Blur(5, 2.0).replacement(photo[None])[0]
        expected = {
            "deletion": plain.flipping(photo, order, read, plain.constant([0, 0, 0]), steps),
            "insertion": plain.flipping(photo, order[::-1], read, plain.by_photo(blurred), steps)[
                ::-1
            ],
            "morf": plain.flipping(photo, order, read, mean, steps),
            "lerf": plain.flipping(photo, order[::-1], read, mean, steps),
        }
        for name, curve in expected.items():
            at, found = table.curve("map", name)
            assert found[i].tolist() == pytest.approx(curve, abs=1e-8), name
            shares = [round(120 * k / steps) / 120 for k in range(steps + 1)]
            assert table["map"][name][i].item() == pytest.approx(
                plain.trapezium(curve, shares), abs=1e-10
            ), name
            assert at.tolist() == pytest.approx(shares), name


def test_areas_are_over_the_share_of_the_pixels_that_is_really_covered() -> None:
    """Three steps through five pixels cover 2, 1 and 2 of them: 0.38, where equal steps would make
    it 0.37."""

    class First(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = x[:, 0, 0] @ torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1], dtype=x.dtype)
            return torch.stack([scores, scores * 0], 1)

    x = torch.ones(1, 1, 1, 5, dtype=torch.float64)
    ranked = torch.tensor([[[5.0, 4.0, 3.0, 2.0, 1.0]]], dtype=torch.float64)
    metrics = [
        Deletion(3, score="logit"),
        Insertion(3, Zero(), score="logit"),
        PixelFlipping("lerf", 3, Zero(), score="logit"),
    ]
    table = explain.evaluate(First(), x, {"map": ranked}, metrics, target=0)
    at = [0, 2 / 5, 3 / 5, 1]
    curves = {"deletion": [1, 0.4, 0.2, 0], "insertion": [0, 0.6, 0.8, 1], "lerf": [1, 0.8, 0.6, 0]}
    for name, curve in curves.items():
        assert table.curve("map", name)[1][0].tolist() == pytest.approx(curve, abs=1e-12)
        assert table["map"][name].item() == pytest.approx(plain.trapezium(curve, at), abs=1e-12)


def test_road_is_half_of_lerf_less_morf_with_interpolated_pixels(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    shares = (20, 50, 90)
    baseline = Neighbours(noise=0.3, seed=4)
    table = explain.evaluate(model, photos, {"map": maps}, ROAD(shares, baseline), target=1)
    parts = table.parts("map", "road")
    for i, photo in enumerate(photos):
        order = plain.order_of(maps[i])
        read = plain.probability(model, 1)
        expected = []
        for k, share in enumerate(shares):
            count = round(120 * share / 100)
            both = {}
            for name, places in (("morf", order[:count]), ("lerf", order[120 - count :])):
                keep = torch.ones(120, dtype=torch.float64)
                keep[places] = 0
                filled = baseline(photo[None], keep.reshape(1, 1, 12, 10))[0]
                both[name] = read(filled)
                assert parts[name][i, k].item() == pytest.approx(both[name], abs=1e-8)
                assert bool(parts[f"{name} hits"][i, k]) == (
                    model(filled[None])[0].argmax().item() == 1
                )
            expected.append((both["lerf"] - both["morf"]) / 2)
        assert table.curve("map", "road")[1][i].tolist() == pytest.approx(expected, abs=1e-8)
        assert table["map"]["road"][i].item() == pytest.approx(sum(expected) / 3, abs=1e-8)


def test_sufficiency_and_comprehensiveness_are_mean_losses(
    model: nn.Module, photos: torch.Tensor, maps: torch.Tensor
) -> None:
    shares = (5, 30)
    both = [Comprehensiveness(shares, Mean()), Sufficiency(shares, Zero())]
    table = explain.evaluate(model, photos, {"map": maps}, both)
    for i, photo in enumerate(photos):
        read = plain.probability(model, int(model(photo[None])[0].argmax()))
        order = plain.order_of(maps[i])
        mean = plain.constant(photo.mean((1, 2)).tolist())
        counts = [round(120 * share / 100) for share in shares]
        without = [read(photo) - read(mean(photo, set(order[:count]))) for count in counts]
        only = [
            read(photo) - read(plain.constant([0, 0, 0])(photo, set(order[count:])))
            for count in counts
        ]
        assert table["map"]["comprehensiveness"][i].item() == pytest.approx(
            sum(without) / 2, abs=1e-8
        )
        assert table["map"]["sufficiency"][i].item() == pytest.approx(sum(only) / 2, abs=1e-8)


def test_a_model_that_reads_one_pixel_loses_all_at_that_pixel() -> None:
    class OnePixel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x[:, 0, 2, 3], torch.zeros_like(x[:, 0, 0, 0])], 1)

    photos = torch.full((1, 3, 5, 5), 2.0, dtype=torch.float64)
    right = torch.zeros(1, 5, 5).double()
    wrong = torch.zeros(1, 5, 5).double()
    right[0, 2, 3] = 1
    wrong[0, 2, 3] = -1
    metrics = [Deletion(25, score="logit"), Insertion(25, Zero(), score="logit")]
    table = explain.evaluate(
        OnePixel(), photos, {"right": right, "wrong": wrong}, metrics, target=0
    )
    # gone with the first pixel
    assert table["right"]["deletion"].item() == pytest.approx(2 * 0.5 / 25)
    assert table["right"]["insertion"].item() == pytest.approx(2 * 24.5 / 25)
    assert table["wrong"]["deletion"].item() == pytest.approx(2 * 24.5 / 25)  # with the last one
    assert table["wrong"]["insertion"].item() == pytest.approx(2 * 0.5 / 25)


def test_ties_are_broken_by_a_shuffle_and_not_by_place(
    model: nn.Module, photos: torch.Tensor
) -> None:
    """With ties by index, a map without a word would be judged by the top of the photo."""
    same = torch.zeros(3, 12, 10, dtype=torch.float64)
    first = torch.linspace(1, 0, 120).reshape(1, 12, 10).expand(3, 12, 10).double()
    by_seed = [
        explain.evaluate(model, photos, {"map": same}, Deletion(12, seed=s))["map"]["deletion"]
        for s in (0, 1)
    ]
    by_index = explain.evaluate(model, photos, {"map": first}, Deletion(12))["map"]["deletion"]
    assert not torch.allclose(by_seed[0], by_seed[1])
    assert not torch.allclose(by_seed[0], by_index)
    again = explain.evaluate(model, photos, {"map": same}, Deletion(12))["map"]["deletion"]
    assert torch.equal(by_seed[0], again)
