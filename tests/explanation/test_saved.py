"""Records that are damaged in any field are read, or refused in one line that says which field it
is."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import explain
from explain import ExplainError
from explain.models import CenterCrop
from tests.conftest import TinyNet, settled
from tests.fuzz import records


@pytest.fixture(scope="module")
def explainer() -> explain.Explainer:
    return explain.Explainer(
        settled(TinyNet()).eval(), categories=list("abcde"), preprocess=CenterCrop(12)
    )


@pytest.fixture
def saved(tmp_path: Path, explainer: explain.Explainer) -> Path:
    Image.linear_gradient("L").resize((20, 16)).save(tmp_path / "photo.png")
    return explainer(tmp_path / "photo.png", "smooth(gradcam, samples=2)", "b").save(
        tmp_path / "out"
    )[2]


@pytest.mark.filterwarnings(
    "ignore:.* is zero everywhere", "ignore:.* must be repeated as it was made"
)
@pytest.mark.parametrize("wrong", ["gone", [[1]]])
def test_whatever_field_is_damaged_is_refused_in_one_line_or_makes_no_difference(
    wrong: Any, saved: Path, explainer: explain.Explainer
) -> None:
    text = saved.read_text("utf-8")
    first = explain.load(saved).values
    refused = []
    for *outer, last in records.places(json.loads(text)):
        record = json.loads(text)
        nested = record
        for key in outer:
            nested = nested[key]
        if wrong == "gone":
            del nested[last]
        else:
            nested[last] = wrong
        saved.write_text(json.dumps(record), "utf-8")
        message = ""
        try:
            loaded = explain.load(saved)
            assert torch.equal(loaded.values, first), (*outer, last)
            loaded.repeat(explainer)
        except ExplainError as error:
            message = str(error)
        assert "\n" not in message
        refused.append(message != "")
    assert len(refused) / 4 < sum(refused) < len(refused)


def test_values_are_read_in_the_order_of_fortran_too(saved: Path) -> None:
    first = explain.load(saved).values
    np.save(saved.with_suffix(".npy"), np.asfortranarray(first.numpy()))
    assert torch.equal(explain.load(saved).values, first)


@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_files_damaged_in_any_way_are_read_as_saved_or_refused_in_one_line(saved: Path) -> None:
    contents = saved.read_bytes(), saved.with_suffix(".npy").read_bytes()
    first = explain.load(saved).values
    ways = islice(records.damaged(contents, 0), 100)
    results = {what: records.outcome(saved, files, first) for what, files in ways}
    assert set(results.values()) == {records.SAME, records.REFUSED}, results
