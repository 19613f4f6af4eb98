"""Assertions about models: the figures as plain algebra, planted networks, regions of every form."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain import ExplainError
from explain.data.boxes import Box
from explain.testing import assert_agrees, assert_ignores, assert_uses
from explain.testing.regions import mask_on_input, masks_elsewhere
from tests.conftest import Made, snapshot
from tests.runs.networks import as_it_is

SIDE = 12
CORNER = (0, 0, 4, 4)
CENTRE = (4, 4, 8, 8)


class Reader(nn.Module):
    """Two classes by how bright some pixels are: those of the centre, or those of the corner."""

    def __init__(self, box: tuple[int, int, int, int], scale: float = 4.0) -> None:
        super().__init__()
        left, top, right, bottom = box
        weight = torch.zeros(2, 3, SIDE, SIDE)
        weight[0, :, top:bottom, left:right] = scale / 48
        self.conv = nn.Conv2d(3, 3, 1, bias=False)
        self.fc = nn.Linear(3 * SIDE * SIDE, 2)
        self.conv.weight.data = torch.eye(3)[:, :, None, None]
        self.fc.weight.data = weight.flatten(1)
        self.fc.bias.data = torch.tensor([-scale / 2, 0.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.fc(self.conv(x).flatten(1))
        return scores


def photos(count: int = 10) -> torch.Tensor:
    """Noise, with a bright corner and a bright centre."""
    x = 0.2 * torch.rand(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    for left, top, right, bottom in (CORNER, CENTRE):
        x[:, :, top:bottom, left:right] += 0.7
    return x


def test_the_figures_are_those_of_plain_algebra() -> None:
    """The left half has one place elsewhere, the right half: no choice is left to chance."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(32, 3)).double()
    x = torch.rand(9, 2, 4, 4, generator=generator, dtype=torch.float64)
    shares = {"limit": 1.0, "method": "inputxgradient", "baselines": [0.5]}
    model.requires_grad_(False)
    use = assert_ignores(model, x, (0, 0, 2, 4), **shares)
    top = model(x).argmax(1)
    changes = []
    for columns in (slice(0, 2), slice(2, 4)):
        covered = x.clone()
        covered[..., columns] = 0.5
        probabilities = model(covered).softmax(1) - model(x).softmax(1)
        changes.append(probabilities[range(9), top].abs())
    beyond = changes[0] - changes[1]
    mean = float(beyond.mean())
    reach = 2.306004 * float(beyond.std()) / 3  # a table's t with 8 degrees of freedom
    assert use.without == pytest.approx(float(changes[0].mean()))
    assert use.control == pytest.approx(float(changes[1].mean()))
    interval = (use.change.mean, use.change.low, use.change.high)
    assert interval == pytest.approx((mean, mean - reach, mean + reach), abs=1e-4)
    kernel = model[0].weight[:, :, 0, 0]
    weights = torch.einsum("kohw,oi->kihw", model[2].weight.reshape(3, 2, 4, 4), kernel)
    sizes = (x * weights[top]).sum(1).abs()
    within = float((sizes[..., :2].sum((1, 2)) / sizes.sum((1, 2))).mean())
    assert use.excess is not None
    assert (use.share, use.excess.mean) == pytest.approx((within, within - 0.5))


@pytest.mark.parametrize("method", ["hirescam", None])
def test_planted_networks_pass_and_fail(method: str | None) -> None:
    reads_corner = Reader(CORNER)
    reads_centre = Reader(CENTRE)
    x = photos()
    state = snapshot(reads_corner)
    assert_uses(reads_corner, x, CORNER, method=method)
    with pytest.raises(AssertionError, match="10 photos"):
        assert_ignores(reads_corner, x, CORNER, method=method)
    with pytest.raises(AssertionError, match="limit 5"):
        assert_uses(reads_centre, x, CORNER, method=method)
    first, again = (
        assert_ignores(reads_centre, x, CORNER, method=method, seed=3) for _ in range(2)
    )
    assert str(first) == str(again)
    assert snapshot(reads_corner) == state
    assert torch.equal(x, photos())


def test_evidence_for_or_against_a_class_is_use() -> None:
    for target in (0, [0, 1] * 5):
        assert_uses(Reader(CORNER), photos(), CORNER, target=target, method=None)
        assert_ignores(Reader(CENTRE), photos(), CORNER, target=target, method=None)


def test_the_map_shows_a_use_that_the_answer_hides() -> None:
    """Both the corner and the centre would do: nothing changes without one of them."""
    both = Reader(CORNER, 60.0)
    both.fc.weight.data += Reader(CENTRE, 60.0).fc.weight
    both.fc.bias.data = torch.tensor([-10.0, 0.0])
    assert_ignores(both, photos(), CORNER, method=None)
    with pytest.raises(AssertionError):
        assert_ignores(both, photos(), CORNER, method="inputxgradient")


def test_too_few_photos_are_refused() -> None:
    with pytest.raises(ExplainError, match="photos must be 8 or more"):
        assert_ignores(Reader(CENTRE), photos(7), CORNER)
    x = photos(8)
    x[1::2, :, :4, :4] -= 0.7  # half of them have the mark
    question: dict[str, Any] = {"method": None, "limit": 0.2}
    with pytest.raises(ExplainError, match="more to decide") as refused:
        assert_ignores(Reader(CORNER), x, CORNER, **question)
    assert not isinstance(refused.value, AssertionError)
    with pytest.raises(AssertionError):
        assert_ignores(Reader(CORNER), x.repeat(8, 1, 1, 1), CORNER, **question)


@pytest.mark.parametrize(
    ("region", "words"),
    [
        ((0, 0, 13, 4), "0 < x1 <= 12|x1 <= 12"),
        ((4, 0, 4, 4), "x0 < x1"),
        ([CORNER] * 9, "9 for 10 photos|9 for more"),
        ((0, 0, 12, 8), "at most 50%"),
        (torch.zeros(SIDE, SIDE), "outside"),
        (torch.ones(5, 5), "12 × 12"),
        ("corner", "a box"),
    ],
)
def test_regions_that_cannot_be_tested_are_refused(region: Any, words: str) -> None:
    with pytest.raises(ExplainError, match=words) as refused:
        assert_ignores(Reader(CENTRE), photos(), region)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("target", [2, [0] * 9, "cat", "box 1,1,5,5"])
def test_targets_that_are_no_classes_are_refused(target: Any) -> None:
    with pytest.raises(ExplainError, match="target"):
        assert_ignores(Reader(CENTRE), photos(), CORNER, target=target)


def test_every_form_of_a_region_means_the_same(tmp_path: Path) -> None:
    """On photos of twice the side, of which the model sees the left upper quarter."""
    for number, x in enumerate(photos()):
        pixels = np.zeros((2 * SIDE, 2 * SIDE, 3), np.uint8)
        pixels[:SIDE, :SIDE] = (255 * x.movedim(0, 2).clamp(0, 1)).byte()
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")

    def quarter(photo: Image.Image) -> torch.Tensor:
        return as_it_is(photo.crop((0, 0, SIDE, SIDE)))

    quarter.box = lambda size: Box(0, 0, SIDE, SIDE)  # type: ignore[attr-defined]
    mask = np.zeros((2 * SIDE, 2 * SIDE), bool)
    mask[:4, :4] = True
    forms: list[Any] = [
        (0.0, 0.0, 1 / 6, 1 / 6),
        torch.tensor(CORNER),
        mask,
        Image.fromarray(mask),
        lambda photo: (0, 0, photo.width / 6, 4),
        [CORNER] * 10,
        torch.from_numpy(mask).expand(10, -1, -1),
    ]
    files = sorted(tmp_path.iterdir())
    explainer = explain.Explainer(Reader(CORNER), preprocess=quarter)
    of_folder = assert_uses(explainer, tmp_path, CORNER)
    for form in forms:
        assert assert_uses(explainer, files, form) == of_folder
    tensors = [quarter(Image.open(file)) for file in files]
    assert assert_uses(Reader(CORNER), tensors, CORNER) == of_folder


@pytest.mark.parametrize("size", [(5, 7), (31, 40)])
def test_a_mask_is_where_a_pixel_of_the_input_shows_any_of_it(size: tuple[int, int]) -> None:
    """Pixel by pixel: any of the photo's pixels that it overlaps."""
    mask = np.random.default_rng(0).random((20, 30)) < 0.05
    expected = np.zeros(size, bool)
    for row, column in np.ndindex(*size):
        top, bottom = (3 + 16 * edge / size[0] for edge in (row, row + 1))
        left, right = (4 + 21 * edge / size[1] for edge in (column, column + 1))
        rows = slice(int(top), math.ceil(bottom - 1e-9))
        columns = slice(int(left), math.ceil(right - 1e-9))
        expected[row, column] = mask[rows, columns].any()
    on_input = mask_on_input(torch.from_numpy(mask), Box(4, 3, 25, 19), size)
    assert np.array_equal(on_input, expected)


def test_places_elsewhere_have_the_same_shape_and_least_in_common() -> None:
    blob = torch.zeros(9, 11, dtype=torch.bool)
    blob[0, 1] = blob[1, :3] = blob[2, 2] = True
    frame = torch.ones(8, 8, dtype=torch.bool)
    frame[1:-1, 1:-1] = False
    for mask in (blob, frame):
        every = [mask.roll(shift, (0, 1)) for shift in np.ndindex(*mask.shape)]
        least = min(int((shifted & mask).sum()) for shifted in every)
        for one in masks_elsewhere(mask, 40, torch.Generator().manual_seed(0)):
            assert any(torch.equal(one, shifted) for shifted in every)
            assert int((one & mask).sum()) == least
            if mask is blob:  # none leaves the image at one side, to come in at the other
                assert np.ptp(one.any(1).nonzero().tolist()) == 2


def test_a_model_without_maps_is_covered_all_the_same() -> None:
    """None of its layers has one to look at, and the figures of covering are those without."""
    reader = Reader(CENTRE)
    model = Made(lambda made, x: made.fc(x.flatten(1)), fc=reader.fc)
    found = assert_ignores(model, photos(), CORNER)
    assert found.excess is None
    assert found.change == assert_ignores(reader, photos(), CORNER, method=None).change
    assert assert_uses(model, photos(), CENTRE).change.low > 0.05
    with pytest.raises(AssertionError, match="uses it"):
        assert_ignores(model, photos(), CENTRE)
    assert assert_agrees(reader, model, photos()).moved is None


def test_models_agree_or_do_not() -> None:
    old = Reader(CENTRE)
    alike = Reader(CENTRE, 4.1)
    other = Reader(CORNER)
    agreement = assert_agrees(old, alike, photos(), method="inputxgradient")
    changes = (alike(photos()).softmax(1) - old(photos()).softmax(1)).abs().amax(1).detach()
    assert agreement.change.mean == pytest.approx(float(changes.mean()), rel=1e-4)
    assert agreement.moved is not None
    assert agreement.moved.mean < 0.01 < agreement.usual
    with pytest.raises(AssertionError, match="do not"):
        assert_agrees(old, other, photos(), method="inputxgradient")
    assert_agrees(old, other, photos(), method=None, limit=0.5)
    with pytest.raises(ExplainError, match="classes"):
        assert_agrees(old, nn.Sequential(old, nn.Linear(2, 5)), photos())
