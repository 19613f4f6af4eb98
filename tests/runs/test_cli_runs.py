"""`explain run` and `explain export`: what is printed, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import explain
from explain.store.writing import Store
from tests.cli.conftest import Typed
from tests.runs.networks import folder_of, read_csv

QUICK = ["--model", "tiny", "--size", "32", "--workers", "0"]


@pytest.fixture(autouse=True)
def _in_a_folder_with_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "photos", 3)


def test_a_run_is_made_continued_and_exported(typed: Typed) -> None:
    words = [
        "run",
        "photos",
        "--output",
        "out.sqlite",
        "--method",
        "saliency",
        "--target",
        "goldfish",
    ]
    code, out, err = typed(*words, *QUICK)
    assert (code, err) == (0, [])  # standard error is no terminal: no progress
    assert re.fullmatch(r"explained 3 photos in .*; 3 rows in out\.sqlite", "\n".join(out))
    assert {row.target for row in explain.open_run("out.sqlite").rows()} == {"goldfish"}
    code, out, err = typed(*words, *QUICK)
    assert (code, err) == (0, [])
    assert out[0].endswith(" (3 were there); 3 rows in out.sqlite")
    code, out, err = typed(*words, *QUICK, "--layer", "layer1", "--method", "gradcam")
    assert (code, out) == (1, [])
    assert "layer: none before, layer1 now; ask for the same again, or give another" in err[0]
    export = ["export", "out.sqlite", "run.csv"]
    assert typed(*export) == (0, ["3 rows written to run.csv"], [])
    code, out, err = typed(*export)
    assert (code, out, len(err)) == (1, [], 1)
    assert "--force" in err[0]
    assert typed(*export, "--force")[0] == 0


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_with_one_line_and_leaves_only_its_file(
    number: signal.Signals, code: int, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done by then is there, and the rest is done later."""
    write = Store.write
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]

    def interrupted(store: Store, answers: Any) -> None:
        write(store, answers)
        os.kill(os.getpid(), number)

    words = ["run", "photos", "--output", "out.sqlite", "--method", "rise(samples=600)", *QUICK]
    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", interrupted)
        done = typed(*words)
    assert done[:2] == (code, [])
    (line,) = done[2]
    assert "; 1 photo is in out.sqlite" in line
    assert sorted(path.name for path in Path().iterdir()) == ["out.sqlite", "photos"]
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
    assert typed(*words)[1][0].endswith(" (1 were there); 3 rows in out.sqlite")


def test_bad_files_are_told_and_the_rest_is_counted(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("explain.cli.runs.LISTED", 1)
    for name in "ab":
        Path(f"photos/{name}.png").write_bytes(b"no photo")
    code, out, err = typed("run", "photos", "-m", "saliency", *QUICK)
    assert code == 1
    assert "a.png" in err[0]
    assert err[1] == "explain: 1 more photos failed; the table 'failures' of run.sqlite lists them"
    assert " (2 failed); 3 rows in run.sqlite" in out[0]


def test_a_document_says_the_same_and_pictures_are_drawn_on_request(typed: Typed) -> None:
    words = ["run", "photos", "-m", "saliency", "--json", "--pictures", "worst:1"]
    code, out, _ = typed(*words, *QUICK)
    document = json.loads("\n".join(out))
    assert (code, document["errors"]) == (0, [])
    (summary,) = document["runs"]
    expected = {"run": "run.sqlite", "rows": 3, "explained": 3, "failures": {}}
    assert expected.items() <= summary.items()
    (file,) = map(Path, summary["pictures"])
    assert file.parent == Path("run-pictures")
    assert file.is_file()


def test_a_table_of_a_row_a_photo_is_written_and_what_a_changed_request_adds_is_said(
    typed: Typed,
) -> None:
    Path("list.csv").write_text("photo,label\n000.png,goldfish\n002.png,gold fish\n")
    words = ["run", "photos", "-m", "saliency", "--boxes", "list.csv", "--table", "t.csv", *QUICK]
    code, out, err = typed(*words)
    assert (code, out[-1]) == (0, "wrote t.csv")
    assert err == [
        "note: label 'gold fish' is none of the model's: it counts neither as right nor as wrong; "
        "did you mean 'goldfish'?"
    ]
    table = read_csv(Path("t.csv"))
    assert [row["label"] for row in table] == ["goldfish", "", "gold fish"]
    for row in table:
        probabilities = [float(value) for value in list(row.values())[7:]]
        assert (len(probabilities), sum(probabilities)) == (200, pytest.approx(1, abs=1e-4))
        assert max(probabilities) == pytest.approx(float(row["probability"]), rel=1e-6)
    words += ["-m", "inputxgradient"]
    assert typed(*words)[0] == 2
    code, out, err = typed(*words, "--force")
    assert (code, read_csv(Path("t.csv"))) == (0, table)
    assert err[0].startswith("note: methods, inputxgradient: none before, InputXGradient")


@pytest.mark.long
def test_a_run_prints_which_methods_it_supports(typed: Typed) -> None:
    words = ["run", "photos", "--output", "out.sqlite", "--method", "saliency", "--check", *QUICK]
    code, out, _ = typed(*words)
    assert code == 0
    assert "not supported" in out[-1]
    code, out, _ = typed(*words, "--json")
    found = json.loads("\n".join(out))["runs"][0]["check"]["saliency"]
    assert not found["supported"]
    assert found["intervals"]["best"][2] == 3
