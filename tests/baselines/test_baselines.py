"""Baselines: what takes the place of covered pixels, against slow plain versions; one by one and in
batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from explain import BaselineError
from explain.baselines import Black, Blur, Defocus, Mean, Neighbours, Noise, OtherPhoto, Zero
from explain.baselines.base import Baseline
from explain.baselines.replacements import get_baseline
from explain.models import CenterCrop

ALL: list[Baseline] = [
    Zero(),
    Black((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)),
    Mean(),
    Blur(5, 1.5),
    Noise(seed=3),
    Neighbours(seed=2),
    Defocus(1.5, 4),
    OtherPhoto(torch.linspace(-1, 1, 3 * 9 * 7).reshape(3, 9, 7)),
]
X = torch.rand(2, 3, 2, 2)
MASK = torch.zeros(1, 1, 2, 2)
EACH = pytest.mark.parametrize("baseline", ALL, ids=lambda baseline: baseline.name)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 3, 9, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def keep() -> torch.Tensor:
    return (torch.rand(3, 1, 9, 7, generator=torch.Generator().manual_seed(1)) > 0.6).double()


@EACH
def test_kept_pixels_stay_bit_by_bit_and_a_photo_does_not_depend_on_those_beside_it(
    baseline: Baseline, images: torch.Tensor, keep: torch.Tensor
) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x = images.to(dtype)
        before = x.clone()
        filled = baseline(x, keep.to(dtype))
        assert filled.dtype == dtype
        assert filled.shape == x.shape
        assert torch.equal(x, before)
        kept = keep.bool().expand_as(x)
        assert torch.equal(filled[kept], x[kept])
        assert not torch.equal(filled[~kept], x[~kept])
        alone = torch.cat([baseline(x[i : i + 1], keep[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(
            filled, alone, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=1e-12
        )
    assert torch.equal(baseline(images, torch.ones(1, 1, 9, 7)), images)


@EACH
def test_many_masks_at_once_are_what_each_would_be(
    baseline: Baseline, images: torch.Tensor, keep: torch.Tensor
) -> None:
    owners = torch.tensor([2, 0, 0])
    found = baseline.covering(images)(owners, keep)
    torch.testing.assert_close(found, baseline(images[owners], keep), rtol=0, atol=1e-12)
    one = baseline.covering(images[:1])(torch.zeros(3, dtype=torch.long), keep)
    torch.testing.assert_close(
        one, baseline(images[:1].repeat(3, 1, 1, 1), keep), rtol=0, atol=1e-12
    )
    one.zero_()  # the network may overwrite what it gets
    assert images[0].any()


def test_replacements_by_their_formulas(images: torch.Tensor) -> None:
    nothing = torch.zeros(1, 1, 9, 7)
    assert torch.equal(Zero()(images, nothing), torch.zeros_like(images))
    black = Black((0.4, 0.5, 0.6), (0.2, 0.25, 0.5))(images, nothing)
    torch.testing.assert_close(black[2, :, 4, 4], torch.tensor([-2.0, -2.0, -1.2]).double())
    mean = Mean()(images, nothing)
    assert mean[1, 2, 3, 4].item() == pytest.approx(
        sum(images[1, 2].flatten().tolist()) / 63, rel=1e-12
    )
    noise = Noise(seed=3, scale=2.0)(images, nothing)
    draws = torch.randn(3, 9, 7, generator=torch.Generator().manual_seed(3)).double()
    for i in range(3):
        for c in range(3):
            values = images[i, c].numpy()
            expected = values.mean() + 2 * values.std() * draws[c].numpy()
            np.testing.assert_allclose(noise[i, c].numpy(), expected, atol=1e-12)


def plain_blur(channel: torch.Tensor, kernel: int, sigma: float) -> torch.Tensor:
    """Each pixel as the weighted mean of those in the window that lie within the photo."""
    height, width, half = *channel.shape, kernel // 2
    found = torch.zeros_like(channel)
    for y in range(height):
        for x in range(width):
            total = weights = 0.0
            for v in range(max(0, y - half), min(height, y + half + 1)):
                for u in range(max(0, x - half), min(width, x + half + 1)):
                    weight = math.exp(-((v - y) ** 2 + (u - x) ** 2) / (2 * sigma**2))
                    total += weight * channel[v, u].item()
                    weights += weight
            found[y, x] = total / weights
    return found


@pytest.mark.parametrize(("kernel", "sigma"), [(3, 1.0), (11, 5.0)])
def test_blur_is_a_weighted_mean_of_what_lies_within_the_photo(
    images: torch.Tensor, kernel: int, sigma: float
) -> None:
    found = Blur(kernel, sigma).replacement(images)
    torch.testing.assert_close(
        found[1, 2], plain_blur(images[1, 2], kernel, sigma), rtol=0, atol=1e-12
    )


def plain_road(image: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """ROAD's linear system as a dense matrix, equation by equation."""
    covered = [(y, x) for y in range(keep.shape[0]) for x in range(keep.shape[1]) if keep[y, x] < 1]
    place = {pixel: i for i, pixel in enumerate(covered)}
    matrix = torch.zeros(len(covered), len(covered), dtype=torch.float64)
    right = torch.zeros(len(covered), image.shape[0], dtype=torch.float64)
    for (y, x), i in place.items():
        for dy in (-1, 0, 1):
            for dx in (-1, 0, 1):
                v = y + dy
                u = x + dx
                if (dy, dx) == (0, 0) or not (0 <= v < keep.shape[0] and 0 <= u < keep.shape[1]):
                    continue
                weight = 1 / 6 if 0 in (dy, dx) else 1 / 12
                matrix[i, i] += weight
                if (v, u) in place:
                    matrix[i, place[v, u]] -= weight
                else:
                    right[i] += weight * image[:, v, u].double()
    solved = torch.linalg.solve(matrix, right)
    filled = image.double().clone()
    for (y, x), i in place.items():
        filled[:, y, x] = solved[i]
    return filled


def masks(size: tuple[int, int]) -> dict[str, torch.Tensor]:
    height, width = size
    scattered = (torch.rand(size, generator=torch.Generator().manual_seed(5)) > 0.7).double()
    hole, half, one, striped = (torch.ones(size, dtype=torch.float64) for _ in range(4))
    hole[1 : height - 2, 2 : width - 1] = 0
    half[:, width // 2 :] = 0
    one.zero_()
    one[height // 3, width - 2] = 1
    striped[::2] = 0
    return {
        "scattered": scattered,
        "hole": hole,
        "half": half,
        "all but one": one,
        "striped": striped,
    }


@pytest.mark.parametrize("size", [(9, 7), (17, 20)])
def test_neighbours_solve_roads_equations(size: tuple[int, int]) -> None:
    images = torch.randn(
        2, 3, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    for name, mask in masks(size).items():
        keep = mask.expand(2, 1, *size)
        found = Neighbours(noise=0)(images, keep)
        torch.testing.assert_close(
            found[1], plain_road(images[1], mask), rtol=0, atol=1e-8, msg=name
        )
        noisy = Neighbours(noise=0.5, seed=7)(images, keep)
        draw = torch.randn(3, *size, generator=torch.Generator().manual_seed(7)).double()
        torch.testing.assert_close(
            noisy, found + 0.5 * draw * (1 - keep), rtol=0, atol=1e-12, msg=name
        )
        single = Neighbours(noise=0)(images.float(), keep)
        torch.testing.assert_close(single, found.float(), rtol=0, atol=2e-5, msg=name)


def test_a_defocused_photo_is_blurred_less_where_more_is_kept(images: torch.Tensor) -> None:
    """Between two blurs of 1.5, 1.0, 0.5 and 0 pixels, the nearest ones blend."""
    keep = torch.rand(3, 1, 9, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = Defocus(1.5, 4)(images, keep)
    blurs = [
        plain_blur(images[1, 2], 2 * math.ceil(4 * sigma) + 1, sigma) for sigma in (1.5, 1.0, 0.5)
    ]
    blurs.append(images[1, 2])
    for y in range(9):
        for x in range(7):
            level = 3 * keep[1, 0, y, x].item()
            below = min(int(level), 2)
            expected = (below + 1 - level) * blurs[below][y, x] + (level - below) * blurs[
                below + 1
            ][y, x]
            assert found[1, 2, y, x].item() == pytest.approx(expected.item(), abs=1e-12)
    wide = torch.rand(1, 1, 112, 150)
    torch.testing.assert_close(
        Defocus()(wide, torch.zeros(1, 1, 112, 150)), Blur(81, 10.0).replacement(wide)
    )


@pytest.mark.parametrize(
    "baseline",
    [Zero(), Mean(), Blur(), Noise(), Defocus(2.0), Neighbours()],
    ids=lambda baseline: baseline.name,
)
def test_videos_are_filled_frame_by_frame_where_colours_are_of_places(baseline: Baseline) -> None:
    video = torch.randn(
        2, 3, 4, 9, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    keep = (torch.rand(2, 1, 4, 9, 7, generator=torch.Generator().manual_seed(1)) > 0.5).double()
    filled = baseline(video, keep)
    kept = keep.bool().expand_as(video)
    assert torch.equal(filled[kept], video[kept])
    if isinstance(baseline, (Zero, Blur)):
        frames = torch.stack([baseline(video[:, :, t], keep[:, :, t]) for t in range(4)], 2)
        torch.testing.assert_close(filled, frames)
    if isinstance(baseline, Neighbours):
        still = Neighbours(noise=0)
        frames = torch.stack([still(video[:, :, t], keep[:, :, t]) for t in range(4)], 2)
        torch.testing.assert_close(still(video, keep), frames)


def test_pictures_show_what_the_model_would_see() -> None:
    photo = Image.new("RGB", (40, 32), (200, 100, 50))
    for baseline in ALL[:-1]:
        seen = np.asarray(baseline.picture(photo))
        assert seen.shape == (32, 40, 3)
        assert (seen[0, 0] == (200, 100, 50)).all()
    assert (np.asarray(Zero().picture(photo))[16, 20] == 0).all()
    preprocess = CenterCrop(24, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    seen = np.asarray(Zero().picture(photo, preprocess))
    assert seen.shape == (24, 24, 3)
    assert (seen[12, 12] == 128).all()
    covered = np.asarray(Zero().picture(photo, keep=torch.zeros(32, 40)))
    assert not covered.any()


WRONG: list[tuple[Any, str]] = [
    (lambda: Blur(kernel=4), "kernel"),
    (lambda: Blur(sigma=0.0), "sigma"),
    (lambda: Black()(X, MASK), "mean and dev"),
    (lambda: Black((0.5, 0.5), (1.0,)).replacement(X), "3 channels"),
    (lambda: Black.of(lambda image: CenterCrop(4)(image) ** 2), "scale and shift"),
    (lambda: OtherPhoto(torch.full((3, 2, 2), torch.nan)), "other"),
    (lambda: OtherPhoto(torch.zeros(3, 2, 2)).replacement(torch.zeros(1, 3, 4, 4)), "shape"),
    (lambda: Zero()(X[0], MASK), "images"),
    (lambda: Zero()(X, X), "keep"),
    (lambda: Zero()(X, torch.full((1, 1, 2, 2), 2.0)), "keep"),
    (lambda: get_baseline("bluur"), "'blur'"),
    (lambda: get_baseline("blur(sigmar=3)"), "'sigma'"),
    (lambda: get_baseline("photo"), "object"),
    (lambda: get_baseline(Zero), "class"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_what_does_not_fit_is_refused_in_one_line(call: Any, message: str) -> None:
    with pytest.raises(BaselineError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_number_or_a_tensor_stands_for_a_baseline() -> None:
    photos = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    keep = torch.zeros(1, 1, 8, 8)
    other = torch.rand(3, 8, 8, dtype=torch.float64)
    assert get_baseline(0) == Zero()
    assert torch.equal(get_baseline(0.25)(photos, keep), torch.full_like(photos, 0.25))
    assert torch.equal(get_baseline(other)(photos, keep), other.expand_as(photos))
