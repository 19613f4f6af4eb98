"""`explain insight`: what is printed and written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import explain
from explain.cli import main
from tests.runs.networks import folder_of
from tests.runs.test_cli_runs import QUICK, typed


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "photos", 6)
    assert main(["run", "photos", "--output", "run.sqlite", "--target", "goldfish", *QUICK]) == 0


def test_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    code, out, err = typed(capsys, "insight", "run.sqlite")
    assert (code, err) == (0, [])
    assert out == str(explain.insight("run.sqlite")).splitlines()
    assert any(line.startswith("  goldfish  6       –") for line in out)


def test_json_has_all_of_it_and_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    code, out, err = typed(capsys, "insight", "run.sqlite", "--json", "--output", "out")
    assert (code, err) == (0, [])
    (told,) = json.loads("\n".join(out))["insights"]
    files = told.pop("files")
    assert told == json.loads(json.dumps(explain.insight("run.sqlite").to_dict()))
    assert files == ["out/looks.png", "out/insight.json", "out/insight.html"]
    assert all(Path(file).is_file() for file in files)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "name a run, as in explain insight run.sqlite"),
        (["run.sqlite", "--force"], 2, "--force would have no effect without --output; leave it out"),
        (["run.sqlite", "--size", "32"], 2, "--size would have no effect without --model; name the model"),
        (["run.sqlite", "--method", "saliency"], 1, "method 'saliency' is not in this run; "),
        (["none.sqlite"], 1, "run 'none.sqlite' must be a file, but there is none; check the path"),
        (
            ["run.sqlite", "--model", "tiny-transformer"],
            1,
            "explainer must have the weights that the run was made with",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    found, out, err = typed(capsys, "insight", *words)
    assert (found, out, len(err)) == (code, [], 1)
    assert err[0].startswith(f"explain: {said}")
