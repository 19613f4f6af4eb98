"""`explain run` and `explain export`: what is printed, and how they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import explain
from tests.cli.conftest import Typed
from tests.runs.networks import folder_of

QUICK = ["--model", "tiny", "--size", "32", "--workers", "0"]


@pytest.fixture(autouse=True)
def _in_a_folder_with_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "photos", 3)


def test_a_run_is_made_and_continued(typed: Typed) -> None:
    words = [
        "run",
        "photos",
        "--output",
        "out.sqlite",
        "--method",
        "saliency",
        "--target",
        "goldfish",
        *QUICK,
    ]
    code, out, err = typed(*words)
    assert (code, err) == (0, [])  # standard error is no terminal: no progress
    assert len(out) == 1
    assert out[0].startswith("explained 3 photos in ")
    assert out[0].endswith("; 3 rows in out.sqlite")
    assert {row.target for row in explain.open_run("out.sqlite").rows()} == {"goldfish"}
    code, out, err = typed(*words)
    assert (code, err) == (0, [])
    assert out[0].endswith(" (3 were there); 3 rows in out.sqlite")
    code, out, err = typed(*words, "--layer", "layer1", "--method", "gradcam")
    assert (code, out) == (1, [])
    assert "layer: none before, layer1 now; ask for the same again, or give another" in err[0]


def test_bad_files_are_told_and_the_rest_is_counted(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("explain.cli.runs.LISTED", 2)
    for name in "abc":
        Path(f"photos/{name}.png").write_bytes(b"no photo")
    code, out, err = typed("run", "photos", "-m", "saliency", *QUICK)
    assert code == 1
    assert [line.split(": ")[1] for line in err[:2]] == ["a.png", "b.png"]
    assert err[2] == "explain: 1 more photos failed; the table 'failures' of run.sqlite lists them"
    assert " (3 failed); 3 rows in run.sqlite" in out[0]


def test_a_document_says_the_same_and_pictures_are_drawn_on_request(typed: Typed) -> None:
    code, out, _ = typed(
        "run", "photos", "-m", "saliency", "--json", "--pictures", "worst:1", *QUICK
    )
    document = json.loads("\n".join(out))
    assert (code, document["errors"]) == (0, [])
    summary = document["runs"][0]
    assert (summary["run"], summary["rows"], summary["explained"], summary["failures"]) == (
        "run.sqlite",
        3,
        3,
        {},
    )
    assert len(summary["pictures"]) == 1
    assert Path(summary["pictures"][0]).parent == Path("run-pictures")
    assert Path(summary["pictures"][0]).is_file()


def test_a_run_is_exported(typed: Typed) -> None:
    typed("run", "photos", "-m", "saliency", *QUICK)
    code, out, err = typed("export", "run.sqlite", "run.csv")
    assert (code, out, err) == (0, ["3 rows written to run.csv"], [])
    code, out, err = typed("export", "run.sqlite", "run.csv")
    assert (code, out, len(err)) == (1, [], 1)
    assert "--force" in err[0]
    assert typed("export", "run.sqlite", "run.csv", "--force")[0] == 0
