"""Numbers that are none, means that cancel, and reads that wait."""

from __future__ import annotations

import math

import pytest
import torch

from explain._utils.default_device import CALLERS_DEVICE, cpu_by_default
from explain._utils.device_reads import read_together, reading_later, require_finite
from explain._utils.rounding import all_cancel, finite_or_none, likeness, rounding_error


def test_numbers_that_json_cannot_hold_become_none() -> None:
    assert [finite_or_none(number) for number in (0.5, math.nan, math.inf, None)] == [
        0.5,
        None,
        None,
        None,
    ]


def test_means_of_terms_that_cancel_are_rounding_errors() -> None:
    terms = torch.tensor([[0.1, 0.2, -0.3], [0.1, 0.2, 0.3]])
    cancels = terms.mean(1).abs() <= rounding_error(terms, dim=1)
    assert cancels.tolist() == [True, False]
    of_images = torch.stack([torch.tensor([[0.1, 0.2, -0.3], [1e-9, 0, 0]]), terms])
    assert all_cancel(of_images.mean(2), of_images).tolist() == [True, False]


def test_likeness_is_a_cosine_of_any_scale() -> None:
    tiny = torch.tensor([[1e-30, 0.0], [0.0, 0.0], [1e-30, 1e-30]])
    other = torch.tensor([[0.0, 2.0], [1.0, 1.0], [2.0, 0.0]])
    torch.testing.assert_close(likeness(tiny, other), torch.tensor([0.0, 1.0, math.sqrt(0.5)]))


def test_a_number_that_is_not_finite_is_refused_when_it_is_read() -> None:
    refused = list[str]()
    total = torch.tensor(math.nan)
    require_finite(total, lambda: refused.append("now"))
    assert refused == ["now"]
    with reading_later():
        require_finite(total, lambda: refused.append("later"))
        assert refused == ["now"]
        numbers = read_together(torch.tensor([[1.0, 2.0]]), torch.tensor(True))
    assert refused == ["now", "later"]
    assert numbers == [[1.0, 2.0], [1.0]]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_are_made_on_the_cpu_whatever_the_callers_default_is(device: str) -> None:
    with torch.device(device), cpu_by_default():
        assert torch.zeros(1).device.type == "cpu"
        callers = CALLERS_DEVICE.get()
    assert callers == (None if device == "cpu" else torch.device(device))
