"""Baselines: what takes the place of covered pixels, against slow plain versions; one by one and in
batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from explain import BaselineError
from explain.baselines import Black, Blur, Defocus, Mean, Neighbours, Noise, OtherPhoto, Zero
from explain.baselines.base import Baseline, range_of, scale_of
from explain.baselines.replacements import get_baseline, list_baselines
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
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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
    for dtype in DTYPES:
        x = images.to(dtype)
        filled = baseline(x, keep.to(dtype))
        assert (filled.dtype, filled.shape) == (dtype, x.shape)
        kept = keep.bool().expand_as(x)
        assert torch.equal(filled[kept], x[kept])
        assert not torch.equal(filled[~kept], x[~kept])
        alone = torch.cat([baseline(x[i : i + 1], keep[i : i + 1]) for i in range(3)])
        rtol = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(filled, alone, rtol=rtol, atol=1e-12)
    assert torch.equal(baseline(images, torch.ones(1, 1, 9, 7)), images)


@EACH
def test_many_masks_at_once_are_what_each_would_be(
    baseline: Baseline, images: torch.Tensor, keep: torch.Tensor
) -> None:
    before = images.clone()
    for owners in (torch.tensor([2, 0, 0]), torch.tensor([0, 0, 0])):
        covered = baseline.covering(images[: owners.max() + 1])(owners, keep)
        expected = baseline(images[owners], keep)
        torch.testing.assert_close(covered, expected, rtol=0, atol=1e-12)
        covered.zero_()  # the network may overwrite what it gets
    assert torch.equal(images, before)


def test_replacements_by_their_formulas(images: torch.Tensor) -> None:
    nothing = torch.zeros(1, 1, 9, 7)
    assert torch.equal(Zero()(images, nothing), torch.zeros_like(images))
    black = Black((0.4, 0.5, 0.6), (0.2, 0.25, 0.5))(images, nothing)
    torch.testing.assert_close(black[2, :, 4, 4], torch.tensor([-2.0, -2.0, -1.2]).double())
    mean = images.mean((2, 3), keepdim=True).expand_as(images)
    torch.testing.assert_close(Mean()(images, nothing), mean, rtol=1e-12, atol=0)
    noise = Noise(seed=3, scale=2.0)(images, nothing)
    draws = torch.randn(3, 9, 7, generator=torch.Generator().manual_seed(3)).double()
    deviation = images.std((2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(noise, mean + 2 * deviation * draws, rtol=0, atol=1e-12)


def plain_blur(channel: torch.Tensor, kernel: int, sigma: float) -> torch.Tensor:
    """Each pixel as the weighted mean of those in the window that lie within the photo."""
    rows, columns = torch.meshgrid(*map(torch.arange, channel.shape), indexing="ij")
    blurred = torch.zeros_like(channel)
    for y, x in np.ndindex(channel.shape):
        down = rows - y
        across = columns - x
        weights = torch.exp(-(down**2 + across**2).double() / (2 * sigma**2))
        weights *= torch.maximum(down.abs(), across.abs()) <= kernel // 2
        blurred[y, x] = (weights * channel).sum() / weights.sum()
    return blurred


@pytest.mark.parametrize(("kernel", "sigma"), [(3, 1.0), (11, 5.0)])
def test_blur_is_a_weighted_mean_of_what_lies_within_the_photo(
    images: torch.Tensor, kernel: int, sigma: float
) -> None:
    found = Blur(kernel, sigma).replacement(images)
    torch.testing.assert_close(
        found[1, 2], plain_blur(images[1, 2], kernel, sigma), rtol=0, atol=1e-12
    )


def plain_road(image: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """ROAD's linear system as a dense matrix: each pixel is the weighted mean of its neighbours."""
    height, width = keep.shape
    weights = torch.zeros(height * width, height * width, dtype=torch.float64)
    for y, x, down, across in np.ndindex(height, width, 3, 3):
        v = y + down - 1
        u = x + across - 1
        if (v, u) != (y, x) and 0 <= v < height and 0 <= u < width:
            weights[y * width + x, v * width + u] = 1 / 6 if 1 in (down, across) else 1 / 12
    matrix = weights.sum(1).diag() - weights
    covered = keep.flatten() < 1
    filled = image.double().flatten(1).T.clone()
    right = -matrix[covered][:, ~covered] @ filled[~covered]
    filled[covered] = torch.linalg.solve(matrix[covered][:, covered], right)
    return filled.T.reshape(image.shape)


def masks(size: tuple[int, int]) -> dict[str, torch.Tensor]:
    height, width = size
    hole, half, one = torch.ones(3, height, width, dtype=torch.float64)
    hole[1 : height - 2, 2 : width - 1] = 0
    half[:, width // 2 :] = 0
    one.zero_()
    one[height // 3, width - 2] = 1
    scattered = (torch.rand(size, dtype=torch.float64) > 0.7).double()
    return {"scattered": scattered, "hole": hole, "half": half, "all but one": one}


@pytest.mark.parametrize("size", [(9, 7), (17, 20)])
def test_neighbours_solve_roads_equations(size: tuple[int, int]) -> None:
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    draw = torch.randn(3, *size, generator=torch.Generator().manual_seed(7)).double()
    for name, mask in masks(size).items():
        keep = mask.expand(2, 1, *size)
        expected = torch.stack([plain_road(image, mask) for image in images])
        for dtype, atol in ((torch.float64, 1e-8), (torch.float32, 2e-5)):
            filled = Neighbours(noise=0)(images.to(dtype), keep).double()
            torch.testing.assert_close(filled, expected, rtol=0, atol=atol, msg=name)
        noisy = Neighbours(noise=0.5, seed=7)(images, keep)
        expected = expected + 0.5 * draw * (1 - keep)
        torch.testing.assert_close(noisy, expected, rtol=0, atol=1e-8, msg=name)


def test_a_defocused_photo_is_blurred_less_where_more_is_kept(images: torch.Tensor) -> None:
    """Between two blurs of 1.5, 1.0, 0.5 and 0 pixels, the nearest ones blend."""
    keep = torch.rand(3, 1, 9, 7, dtype=torch.float64)
    found = Defocus(1.5, 4)(images, keep)
    kernels = {1.5: 13, 1.0: 9, 0.5: 5}
    blurs = [plain_blur(images[1, 2], kernel, sigma) for sigma, kernel in kernels.items()]
    blurs.append(images[1, 2])
    level = 3 * keep[1, 0]
    expected = sum((1 - (level - k).abs()).clamp(min=0) * blur for k, blur in enumerate(blurs))
    torch.testing.assert_close(found[1, 2], expected, rtol=0, atol=1e-12)
    wide = torch.rand(1, 1, 112, 150)
    torch.testing.assert_close(
        Defocus()(wide, torch.zeros(1, 1, 112, 150)), Blur(81, 10.0).replacement(wide)
    )


@pytest.mark.parametrize(
    "baseline", [Zero(), Mean(), Blur(), Noise(), Defocus(2.0), Neighbours(noise=0)], ids=str
)
def test_videos_are_filled_frame_by_frame_where_colours_are_of_places(baseline: Baseline) -> None:
    video = torch.randn(2, 3, 4, 9, 7, dtype=torch.float64)
    keep = (torch.rand(2, 1, 4, 9, 7) > 0.5).double()
    filled = baseline(video, keep)
    kept = keep.bool().expand_as(video)
    assert torch.equal(filled[kept], video[kept])
    if isinstance(baseline, (Zero, Blur, Neighbours)):
        frames = [baseline(video[:, :, t], keep[:, :, t]) for t in range(4)]
        torch.testing.assert_close(filled, torch.stack(frames, 2))


def test_pictures_show_what_the_model_would_see() -> None:
    photo = Image.new("RGB", (40, 32), (200, 100, 50))
    for baseline in ALL[:-1]:
        seen = np.asarray(baseline.picture(photo))
        assert seen.shape == (32, 40, 3)
        assert (seen[0, 0] == (200, 100, 50)).all()
    preprocess = CenterCrop(24, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    seen = np.asarray(Zero().picture(photo, preprocess))
    assert seen.shape == (24, 24, 3)
    assert (seen[12, 12] == 128).all()
    covered = np.asarray(Zero().picture(photo, keep=torch.zeros(32, 40)))
    assert not covered.any()


WRONG: list[tuple[Any, str]] = [
    (lambda: Blur(kernel=4), "kernel"),
    (lambda: Black()(X, MASK), "mean and dev"),
    (lambda: Black((0.5, 0.5), (1.0,)).replacement(X), "3 channels"),
    (lambda: Black.of(lambda image: CenterCrop(4)(image) ** 2), "scale and shift"),
    (lambda: OtherPhoto(torch.zeros(3, 2, 2)).replacement(torch.zeros(1, 3, 4, 4)), "shape"),
    (lambda: Zero()(X[0], MASK), "images"),
    (lambda: Zero()(X, X), "keep"),
    (lambda: get_baseline("bluur"), "'blur'"),
    (lambda: get_baseline("blur(sigmar=3)"), "'sigma'"),
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


def test_the_range_of_a_preprocessing_is_what_black_and_white_become() -> None:
    preprocess = CenterCrop(8, mean=(0.5,) * 3, std=(0.25, 0.25, 0.5))
    black, span = scale_of(preprocess)
    assert torch.allclose(black, torch.tensor([-2.0, -2.0, -1.0]))
    assert torch.allclose(span, torch.tensor([4.0, 4.0, 2.0]))
    assert np.allclose(range_of(preprocess), [(-2, -2, -1), (2, 2, 1)])
    assert range_of(lambda photo: preprocess(photo) ** 2) is None


def test_baselines_are_listed_by_a_pattern() -> None:
    assert {"black", "blur", "mean", "zero"} <= set(list_baselines())
    assert list_baselines("b*") == sorted(name for name in list_baselines() if name[0] == "b")
