"""Detectors × what is explained of a box × methods, against plain maps: most of the table of the
example."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hooks.test_tour import example


@pytest.fixture
def matrix() -> Any:
    default = torch.get_default_dtype()
    yield example("detector_matrix")
    torch.set_default_dtype(default)


@pytest.mark.long
@pytest.mark.parametrize(
    "pattern", ["nanodet", "*faster*", "*ssd*heads", "detr", "yolos", "rt_detr"]
)
def test_every_map_of_a_box_is_the_plain_one(
    pattern: str, matrix: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if "detr" in pattern or pattern == "yolos":
        pytest.importorskip("transformers")
    assert matrix.main(pattern) == 0, capsys.readouterr().out
