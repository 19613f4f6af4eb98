"""`explain run` and `explain export`: what is printed, and how they end."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import explain
from explain import RunError
from explain.cli.output import RunProgress
from explain.runs.runner import State
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
    assert "must be continued as it was begun, but its layer was null" in err[0]


def test_boxes_of_a_list_serve_metrics_that_need_them(typed: Typed) -> None:
    Path("list.csv").write_text(
        "path,label,x0,y0,x1,y1\nphotos/000.png,goldfish,2,2,20,18\nphotos/001.png,1,,,,\n"
    )
    code, _, err = typed("run", "list.csv", "-m", "saliency", "--metric", "pointinggame", *QUICK)
    assert (code, err) == (0, [])
    found = [
        (row.label, row.metrics["pointinggame"]) for row in explain.open_run("run.sqlite").rows()
    ]
    assert found[0][0] == "goldfish"
    assert found[0][1] in (0.0, 1.0)
    assert found[1][1] is None


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
    found = json.loads("\n".join(out))
    assert (code, found["errors"]) == (0, [])
    about = found["runs"][0]
    assert (about["run"], about["rows"], about["explained"], about["failures"]) == (
        "run.sqlite",
        3,
        3,
        {},
    )
    assert len(about["pictures"]) == 1
    assert Path(about["pictures"][0]).parent == Path("run-pictures")
    assert Path(about["pictures"][0]).is_file()


def test_an_interrupted_run_says_how_to_go_on(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(line: Any, state: State) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunProgress, "__call__", interrupted)
    code, out, err = typed("run", "photos", "-m", "saliency", "--batch-size", "1", *QUICK)
    assert (code, out) == (2, [])  # nothing is run several times for saliency
    code, out, err = typed("run", "photos", "-m", "saliency", *QUICK)
    assert (code, out) == (130, [])
    assert err == [
        "explain: interrupted; 3 photos are in run.sqlite, and the same command goes on from there"
    ]


def test_a_source_that_is_not_there_is_told(typed: Typed) -> None:
    code, out, err = typed("run", "none")
    assert (code, out, len(err)) == (1, [], 1)
    assert "source 'none' must" in err[0]


def test_what_holds_for_every_photo_ends_as_wrong_usage(typed: Typed) -> None:
    code, out, err = typed("run", "photos", "--layer", "layr1", *QUICK)
    assert (code, out, len(err)) == (2, [], 1)
    assert "layr1" in err[0]


def test_a_run_is_exported(typed: Typed) -> None:
    typed("run", "photos", "-m", "saliency", *QUICK)
    code, out, err = typed("export", "run.sqlite", "run.csv")
    assert (code, out, err) == (0, ["3 rows written to run.csv"], [])
    code, out, err = typed("export", "run.sqlite", "run.csv")
    assert (code, out, len(err)) == (1, [], 1)
    assert "--force" in err[0]
    assert typed("export", "run.sqlite", "run.csv", "--force")[0] == 0


def test_the_progress_has_a_rate_and_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    line = RunProgress()
    line(State(done=40, failed=2, there=58, total=200, seconds=4.2))
    line(State(done=41, failed=2, there=58, total=200, seconds=4.2))  # too soon to be drawn
    assert terminal.getvalue() == (
        "\r\x1b[2K████████████░░░░░░░░░░░░ 100/200 photos, 10 a second, about 10 s left, 2 failed"
    )
    line.wipe()
    assert terminal.getvalue().endswith("\r\x1b[2K")
    assert State(done=1, failed=0, there=0, total=None, seconds=1.0).left is None


def test_a_run_on_a_cluster_gets_its_options(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def run_on_ray(source: Any, explainer: Any, methods: Any, **options: Any) -> Any:
        given.update(options)
        raise RunError("the cluster is busy")

    monkeypatch.setattr("explain.runs.run_on_ray", run_on_ray)
    words = [
        "photos",
        "--ray",
        "ray://head:10001",
        "--gpus",
        "0.25",
        "--output",
        "maps",
        "--model",
        "tiny",
    ]
    assert typed("run", *words) == (1, [], ["explain: the cluster is busy"])
    expected = {"address": "ray://head:10001", "gpus": 0.25, "actors": None, "output": "maps"}
    assert {name: given[name] for name in expected} == expected
    assert "workers" not in given
