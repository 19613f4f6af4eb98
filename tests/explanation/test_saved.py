"""Records that are damaged in any field are read, or refused in one line that says which field it
is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import explain
from explain import ExplainError, RecordError
from explain.attribution.encoding import encode
from explain.data.images import load_image
from explain.models import CenterCrop
from tests.conftest import TinyNet, settled
from tests.fuzz import records

WRONG: list[Any] = [[[1]], 2**70]


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


def damaged(record: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for *outer, last in records.places(record):
        for wrong in ["gone", *WRONG]:
            other = json.loads(json.dumps(record))
            nested = other
            for key in outer:
                nested = nested[key]
            if wrong == "gone":
                del nested[last]
            else:
                nested[last] = wrong
            yield f"{'.'.join(map(str, [*outer, last]))} = {wrong!r}", other


@pytest.mark.filterwarnings(
    "ignore:.* is zero everywhere", "ignore:.* must be repeated as it was made"
)
def test_whatever_field_is_damaged_is_refused_in_one_line_or_makes_no_difference(
    saved: Path, explainer: explain.Explainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads(saved.read_text("utf-8"))
    first = explain.load(saved)
    tried = 0
    refused = 0
    photo = load_image(first.record["image"]["path"])  # once
    monkeypatch.setattr(
        "explain.explanation.loading.load_image", lambda image, *window, **stack: photo.copy()
    )
    for what, other in islice(damaged(record), 0, None, 2):
        saved.write_text(json.dumps(other), "utf-8")
        tried += 1
        try:
            loaded = explain.load(saved)
            heatmap = loaded.heatmap
            assert torch.equal(loaded.values, first.values), what
            assert heatmap.shape == first.heatmap.shape or what.startswith(
                ("input_size", "values")
            ), what
            loaded.repeat(explainer)
        except ExplainError as error:
            message = str(error)
            refused += 1
            assert "\n" not in message, what
    assert tried > 60
    assert tried / 4 < refused < tried


def test_what_is_no_path_of_a_record_is_refused() -> None:
    for file in (None, b"a.json", "a.png"):
        with pytest.raises(RecordError, match="file must"):
            explain.load(file)  # type: ignore[arg-type]


def test_a_tensor_too_large_for_a_record_is_named_in_it() -> None:
    large = torch.zeros(1).expand(2**27)  # which needs no memory
    assert encode(large) == {"unknown": f"a tensor of shape ({2**27},)"}


def test_values_are_read_in_the_order_of_fortran_too(saved: Path) -> None:
    first = explain.load(saved).values
    np.save(saved.with_suffix(".npy"), np.asfortranarray(first.numpy()))
    assert torch.equal(explain.load(saved).values, first)


@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_files_damaged_in_any_way_are_read_as_saved_or_refused_in_one_line(saved: Path) -> None:
    contents = saved.read_bytes(), saved.with_suffix(".npy").read_bytes()
    first = explain.load(saved).values
    results = [
        (what, records.outcome(saved, damaged, first))
        for what, damaged in islice(records.damaged(contents, 0), 100)
    ]
    wrong = [result for result in results if result[1] not in (records.SAME, records.REFUSED)]
    assert wrong == []
    assert {result for _, result in results} == {records.SAME, records.REFUSED}
