"""`explain insight`: what is printed and written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import explain
from explain.cli import main
from tests.cli.conftest import Typed
from tests.runs.networks import folder_of
from tests.runs.test_cli_runs import QUICK

SAME = QUICK[:4]  # the model of the run, and the size of its inputs


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "photos", 6)
    assert main(["run", "photos", "--output", "run.sqlite", "--target", "goldfish", *QUICK]) == 0


def test_channels_concepts_and_examples_are_asked_for_with_the_model(typed: Typed) -> None:
    """Each has its table, its figures in the document and, but for the concept vector, its picture
    in the page."""
    assert main(["run", "photos", "--output", "all.sqlite", *QUICK]) == 0
    (target, *_) = [row.prediction for row in explain.open_run("all.sqlite").rows()]
    asked = [
        "insight",
        "all.sqlite",
        *SAME,
        "--channels",
        "3",
        "--concepts",
        "2",
        "--target",
        str(target),
    ]
    code, out, err = typed(*asked, "--output", "out")
    assert (code, err) == (0, [])
    layer = (
        explain.open_run("all.sqlite")
        .insight(explainer=explain.Explainer("tiny", size=32), channels=1)
        .channels
    )
    assert layer is not None
    assert f"What channels of {layer.layer} see, by weight for {target}" in out
    assert f"Concepts of {layer.layer} in 6 photos" in out
    assert [line for line in out if line.startswith("wrote")] == [
        f"wrote out/{name}"
        for name in ("looks.png", "channels.png", "concepts.png", "insight.json", "insight.html")
    ]
    document = json.loads(Path("out/insight.json").read_text())
    assert len(document["channels"]["channels"]) == 3
    assert len(document["concepts"]["concepts"]) == 2
    assert Path("out/insight.html").read_text().count("data:image/png;base64,") == 3
