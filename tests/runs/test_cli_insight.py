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
    assert main(["run", "photos", *QUICK]) == 0


@pytest.mark.long
def test_channels_and_concepts_are_asked_for_with_the_model(typed: Typed) -> None:
    """Each has its table, its figures in the document, and its picture in the page."""
    row = next(explain.open_run("run.sqlite").rows())
    words = ["insight", "run.sqlite", "--channels", "3", "--concepts", "2", "--output", "out"]
    code, out, err = typed(*words, *SAME, "--target", str(row.prediction))
    assert (code, err) == (0, [])
    assert f"What channels of {row.layer} see, by weight for {row.prediction}" in out
    assert f"Concepts of {row.layer} in 6 photos" in out
    assert "wrote out/concepts.png" in out
    document = json.loads(Path("out/insight.json").read_text())
    assert len(document["channels"]["channels"]) == 3
    assert len(document["concepts"]["concepts"]) == 2
    assert Path("out/insight.html").read_text().count("data:image/png;base64,") == 3
