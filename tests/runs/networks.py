"""A network, photos and the means to look into a run, for the tests of runs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import explain
from tests.conftest import TinyNet, settled


def picture(number: int, size: tuple[int, int] = (24, 20)) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3))
    return Image.fromarray(pixels.astype(np.uint8))


def as_it_is(image: Image.Image) -> torch.Tensor:
    """A preprocessing that keeps the size, so that photos differ in it."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def explainer(model: nn.Module | None = None, **options: Any) -> explain.Explainer:
    return explain.Explainer(model or settled(TinyNet()).eval(), preprocess=as_it_is, **options)


def stored_run(
    folder: Path,
    source: Any,
    model_explainer: explain.Explainer | None = None,
    methods: Any = "gradcam",
    *,
    name: str = "run.sqlite",
    **options: Any,
) -> explain.Run:
    """A run in a file of a folder, without workers unless they are asked for."""
    options = {"output": folder / name, "workers": 0, **options}
    return explain.run(source, model_explainer or explainer(), methods, **options)


def folder_of(path: Path, count: int, size: tuple[int, int] = (24, 20)) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        picture(number, size).save(path / f"{number:03}.png")
    return path


def contents(run: explain.Run) -> dict[tuple[str, str, str], explain.runs.RunRow]:
    """All rows of a run, by what they are of."""
    return {(row.name, row.method, row.target): row for row in run.rows()}


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same(one: explain.Run, other: explain.Run) -> None:
    actual = contents(one)
    expected = contents(other)
    assert actual.keys() == expected.keys()
    assert len(one) == len(actual)
    for key, row in actual.items():
        same = expected[key]
        assert (row.sha256, row.prediction) == (same.sha256, same.prediction)
        torch.testing.assert_close(row.values, same.values, rtol=2e-3, atol=1e-6)
        assert (row.score, row.probability) == pytest.approx((same.score, same.probability), 1e-5)
