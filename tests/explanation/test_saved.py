"""Records that are damaged in any field are read, or refused in one line that says which field it
is."""

from __future__ import annotations

import io
import json
import math
import tracemalloc
import zipfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import explain
from explain import ExplainError, RecordError
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


def zeros(shape: tuple[int, ...], kind: str = "<f2") -> bytes:
    """A file of NumPy whose values are zero, without ever being in memory."""
    header = io.BytesIO()
    fields = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue() + bytes(math.prod(shape) * np.dtype(kind).itemsize)


@pytest.mark.parametrize(
    ("values", "scale", "shape"),
    [
        (zeros((1, 1)), zeros((3000, 3000), "<f4"), [3000, 3000]),
        (zeros((1, 1)), zeros((3000, 3000), "<f4"), [1, 1]),
        (zeros((3000, 3000)), zeros((), "<f4"), [6, 6]),
        (zeros((6, 6), "<f8"), zeros((), "<f4"), [6, 6]),
        (zeros((6, 6))[:-9], zeros((), "<f4"), [6, 6]),
        (zeros((0,)), zeros((), "<f4"), [2**60, 0]),
        (zeros((2,))[:-4], zeros((), "<f4"), [2**40]),
    ],
)
def test_an_archive_is_unpacked_only_where_the_record_says_the_same(
    values: bytes, scale: bytes, shape: list[int], saved: Path
) -> None:
    record = json.loads(saved.read_text("utf-8"))
    record["values"] = {"shape": shape, "format": "npz", "sha256": "0" * 64}
    saved.write_text(json.dumps(record), "utf-8")
    with zipfile.ZipFile(saved.with_suffix(".npz"), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("values.npy", values)
        archive.writestr("scale.npy", scale)
    tracemalloc.start()
    with pytest.raises(RecordError, match=r"\.npz"):
        explain.load(saved)
    assert tracemalloc.get_traced_memory()[1] < 2e6
    tracemalloc.stop()


@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_files_damaged_in_any_way_are_read_as_saved_or_refused_in_one_line(saved: Path) -> None:
    contents = saved.read_bytes(), saved.with_suffix(".npy").read_bytes()
    first = explain.load(saved).values
    ways = islice(records.damaged(contents, 0), 100)
    results = {what: records.outcome(saved, files, first) for what, files in ways}
    assert set(results.values()) == {records.SAME, records.REFUSED}, results


def test_a_record_keeps_where_cells_look_and_older_ones_are_drawn_evenly(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def network() -> torch.nn.Module:
        parts = [torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.Conv2d(4, 4, 3, 2, 1), torch.nn.ReLU()]
        return torch.nn.Sequential(
            *parts, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 5)
        )

    explainer = explain.Explainer(
        settled(network()).eval(), categories=list("abcde"), preprocess=CenterCrop(32)
    )
    Image.linear_gradient("L").resize((40, 32)).save(tmp_path / "photo.png")
    heatmaps = {}
    for placement in ("cells", "even"):
        made = explainer(tmp_path / "photo.png", "gradcam", "b", placement=placement)
        path = made.save(tmp_path / placement)[2]
        read = explain.load(path)
        torch.testing.assert_close(read.heatmap, made.heatmap, rtol=1e-5, atol=1e-6)
        again = read.repeat(explainer)
        torch.testing.assert_close(again.heatmap, made.heatmap, rtol=1e-5, atol=1e-6)
        heatmaps[placement] = made.heatmap
    assert float((heatmaps["cells"] - heatmaps["even"]).abs().max()) > 0.05
    record = json.loads((tmp_path / "cells" / path.name).read_text("utf-8"))
    del record["placement"]
    (tmp_path / "cells" / path.name).write_text(json.dumps(record), "utf-8")
    torch.testing.assert_close(
        explain.load(tmp_path / "cells" / path.name).heatmap, heatmaps["even"], rtol=1e-5, atol=1e-6
    )


def test_what_an_earlier_version_said_of_a_map_is_left_out_of_its_record(
    saved: Path, explainer: explain.Explainer
) -> None:
    record = json.loads(saved.read_text("utf-8"))
    first = explain.load(saved)
    reason = {"answer": "supported", "passed": True, "figure": 0.2, "symbol": "", "reason": "low"}
    verdict = {"passed": True, "answer": "supported", "answers": {"stable": reason}, "notes": []}
    earlier = {**record, "verdict": verdict, "precision": "full", "rounding": None}
    saved.write_text(json.dumps(earlier), "utf-8")
    read = explain.load(saved)
    assert read.record == first.record
    assert "verdict" not in read.record
    torch.testing.assert_close(read.repeat(explainer).values, first.values)


def test_the_first_frame_of_an_animation_is_explained_again(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (40, 30), color) for color in ("red", "blue")]
    path = tmp_path / "two.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    with pytest.warns(UserWarning, match="frame"):
        explanation = explain.Explainer("tiny")(path, "saliency")
    saved = explain.load(explanation.save(tmp_path)[2])
    with pytest.warns(UserWarning, match="frame"):
        again = saved.repeat()
    torch.testing.assert_close(again.values, explanation.values)
