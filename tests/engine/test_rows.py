"""Perturbed rows: their order, what lies before a layer, and what a progress callback takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from explain.data.inputs import as_inputs
from explain.engine.blocks import transformer_blocks
from explain.engine.perturbations import samples_of
from explain.engine.prefix import LayerPrefix
from explain.engine.settings import takes_maps


@pytest.mark.parametrize("counts", [[1, 2], [2, 2], [0, 3], [2, 0, 1]])
def test_the_first_rows_of_all_images_come_first(counts: list[int]) -> None:
    rows = samples_of(counts, torch.device("cpu"), lambda images, numbers: images + numbers)
    expected = sorted(
        (number, image) for image, count in enumerate(counts) for number in range(count)
    )
    assert [*zip(rows.numbers.tolist(), rows.owners.tolist(), strict=True)] == expected


def test_what_lies_before_a_layer_is_answered_with_what_it_gave() -> None:
    prefix = LayerPrefix()
    for number in (1, 5):
        with prefix.passing():
            before = torch.full([2], number)
            prefix.reach()
            behind = torch.full([2], number)
        assert before.tolist() == [1, 1]
        assert behind.tolist() == [number, number]


@pytest.mark.parametrize(
    ("progress", "takes"),
    [
        (lambda done, total: None, False),
        (lambda done, total, maps: None, True),
        (lambda done, total, maps=None: None, True),
        (lambda *values: None, True),
    ],
)
def test_a_callback_takes_maps_if_its_signature_says_so(
    progress: Callable[..., Any], takes: bool
) -> None:
    assert takes_maps(progress) == takes


def test_blocks_are_the_largest_modules_with_one_attention() -> None:
    models = pytest.importorskip("torchvision.models", reason="a transformer of torchvision")
    model = models.VisionTransformer(16, 4, 2, 2, 8, 16).eval()
    blocks = transformer_blocks(model, as_inputs(torch.rand(1, 3, 16, 16)))
    assert blocks == ["encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"]
