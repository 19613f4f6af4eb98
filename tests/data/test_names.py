"""Names of photos and slices, shapes of arrays, and values of pixels."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from explain import ImageError
from explain.data.bands import as_read
from explain.data.files import as_cell, halved
from explain.data.greys import has_contrast, to_8_bits, to_levels
from explain.data.opening import ending_of
from explain.data.scans import (
    as_slices,
    chosen_numbers,
    read_range,
    slice_name,
    split_slice,
    stem_of,
)


def test_the_name_of_a_slice_says_which_it_is_and_what_files_are_called() -> None:
    assert slice_name("scan.dcm", 0) == "scan.dcm slice 1"
    assert split_slice("scan.dcm slice 1") == ("scan.dcm", 0)
    assert split_slice("scan.dcm") == ("scan.dcm", None)
    assert stem_of("a/cat.jpg") == "cat"
    assert stem_of("a/scan.dcm slice 12") == "scan slice 12"
    assert [ending_of(name) for name in ("a/Scan.NII.gz", "cat.jpg")] == [".nii.gz", ".jpg"]


def test_a_range_counts_slices_from_one() -> None:
    slices = list(range(1, 31))
    texts = ("12", "10:20", "::5", "28:", "0:5", "0")
    numbers = [[slices[i] for i in chosen_numbers(read_range(text), 30)] for text in texts]
    assert numbers == [[12], list(range(10, 21)), [1, 6, 11, 16, 21, 26], [28, 29, 30], [], []]
    assert read_range("x") is None
    assert list(chosen_numbers(None, 2)) == [0, 1]
    assert list(chosen_numbers(slice(18, None), 20)) == [18, 19]


@pytest.mark.parametrize(
    ("shape", "slices"),
    [
        ((8, 9), (1, 8, 9)),
        ((8, 9, 3), (1, 8, 9, 3)),
        ((3, 8, 9), (1, 8, 9, 3)),
        ((1, 12, 8, 9), (12, 8, 9)),
        ((12, 8, 9, 1), (12, 8, 9)),
        ((5, 3, 8, 9), (5, 8, 9, 3)),
        ((5, 8, 9, 4), (5, 8, 9, 4)),
    ],
)
def test_an_array_is_one_slice_or_several_by_its_axes(
    shape: tuple[int, ...], slices: tuple[int, ...]
) -> None:
    assert as_slices(np.zeros(shape)).shape == slices


def test_pixels_are_read_between_black_and_white() -> None:
    window = (40.0, 400.0)  # black at -160, white at 240
    values = np.array([-100.0, 41.0, 240.0, 300.0])
    assert to_8_bits(values, window=window).tolist() == [38, 128, 255, 255]
    assert np.allclose(to_levels(values, window=window), (values + 160) / 400)
    assert np.allclose(to_levels(np.array([0, 102, 255], np.uint8)), [0, 0.4, 1])
    assert has_contrast(Image.linear_gradient("L"))
    assert not has_contrast(Image.new("RGB", (4, 4), "orange"))


def test_bands_are_read_only_for_a_model_that_takes_them() -> None:
    assert as_read(None, 3) is None
    bands = as_read(None, 4, (4, 3, 2))
    assert getattr(bands, "shown", None) == (4, 3, 2)
    with pytest.raises(ImageError, match="bands"):
        as_read(None, 3, (3, 2, 1))


def test_no_cell_is_run_as_a_formula() -> None:
    cells = [as_cell(value) for value in ("=1+1", "@x", "cat.png", "-1", -1.5)]
    assert cells == ["'=1+1", "'@x", "cat.png", "-1", -1.5]


def test_maps_in_half_precision_keep_their_range() -> None:
    values, scale = halved(np.float32([4e6, -1e6]))
    assert (values.dtype, values.tolist(), float(scale)) == (np.float16, [1.0, -0.25], 4e6)
