"""`explain run` and `explain export`: what is printed, and how they end."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

import explain
from explain.cli import main
from explain.cli.progress import RunProgress
from explain.runs import State
from tests.runs.networks import folder_of

QUICK = ["--model", "tiny", "--size", "32", "--workers", "0"]


@pytest.fixture(autouse=True)
def _in_a_folder_with_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "photos", 3)


def typed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], list[str]]:
    code = main([*arguments])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


def test_a_run_is_made_and_continued(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "photos", "--output", "out.sqlite", "--method", "saliency", "--target", "goldfish", *QUICK]
    code, out, err = typed(capsys, *words)
    assert (code, err) == (0, [])  # standard error is no terminal: no progress
    assert len(out) == 1
    assert out[0].startswith("explained 3 photos in ")
    assert out[0].endswith("; 3 rows in out.sqlite")
    assert {row.target for row in explain.open_run("out.sqlite").rows()} == {"goldfish"}
    code, out, err = typed(capsys, *words)
    assert (code, err) == (0, [])
    assert out[0].endswith(" (3 were there); 3 rows in out.sqlite")
    code, out, err = typed(capsys, *words, "--layer", "layer1", "--method", "gradcam")
    assert (code, out) == (1, [])
    assert err[0].startswith(
        "explain: run 'out.sqlite' must be continued as it was begun, but its methods, gradcam was null"
    )


def test_boxes_of_a_list_serve_metrics_that_need_them(capsys: pytest.CaptureFixture[str]) -> None:
    Path("list.csv").write_text("path,label,x0,y0,x1,y1\nphotos/000.png,goldfish,2,2,20,18\nphotos/001.png,1,,,,\n")
    code, _, err = typed(capsys, "run", "list.csv", "-m", "saliency", "--metric", "pointinggame", *QUICK)
    assert (code, err) == (0, [])
    found = [(row.label, row.metrics["pointinggame"]) for row in explain.open_run("run.sqlite").rows()]
    assert found[0][0] == "goldfish"
    assert found[0][1] in (0.0, 1.0)
    assert found[1][1] is None


def test_bad_files_are_told_and_the_rest_is_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("explain.cli.running.LISTED", 2)
    for name in "abc":
        Path(f"photos/{name}.png").write_bytes(b"no photo")
    code, out, err = typed(capsys, "run", "photos", "-m", "saliency", *QUICK)
    assert code == 1
    assert [line.split(": ")[1] for line in err[:2]] == ["a.png", "b.png"]
    assert err[2] == "explain: 1 more photos failed; the table 'failures' of run.sqlite lists them"
    assert " (3 failed); 3 rows in run.sqlite" in out[0]


def test_a_document_says_the_same_and_pictures_are_drawn_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = typed(capsys, "run", "photos", "-m", "saliency", "--json", "--pictures", "worst:1", *QUICK)
    found = json.loads("\n".join(out))
    assert (code, found["errors"]) == (0, [])
    about = found["runs"][0]
    assert (about["run"], about["rows"], about["explained"], about["failures"]) == ("run.sqlite", 3, 3, {})
    assert len(about["pictures"]) == 1
    assert Path(about["pictures"][0]).parent == Path("run-pictures")
    assert Path(about["pictures"][0]).is_file()


def test_an_interrupted_run_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(line: Any, state: State) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunProgress, "__call__", interrupted)
    code, out, err = typed(capsys, "run", "photos", "-m", "saliency", "--batch-size", "1", *QUICK)
    assert (code, out) == (2, [])  # nothing is run several times for saliency
    code, out, err = typed(capsys, "run", "photos", "-m", "saliency", *QUICK)
    assert (code, out) == (130, [])
    assert err == ["explain: interrupted; 3 photos are in run.sqlite, and the same command goes on from there"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "name a source: a folder, a list or shards; explain run --help shows the options"),
        (
            ["run", "photos", "--top-k", "2", "--target", "1"],
            "--top-k and --target cannot both be given; leave one out",
        ),
        (["run", "photos", "--style", "heat"], "--style would have no effect without --pictures; leave it out"),
        (
            ["run", "photos", "--pictures", "all"],
            "pictures must be one of source, worst, best, as in 'worst:50', got 'all'",
        ),
        (["run", "photos", "--method", "gradcan"], "method 'gradcan' is unknown; did you mean 'gradcam'"),
        (
            ["run", "photos", "-m", "all", "-m", "gradcam"],
            "--method all takes the others too, in a run; leave them out",
        ),
        (["run", "photos", "--workers", "x"], "--workers must be a whole number from 0, got 'x'"),
        (["run", "photos", "--recursive"], "--recursive would have no effect with explain run; leave it out"),
        (["run", "photos", "--composite", "Epsilon", "-m", "gradcam"], "--composite would have no effect: no rules"),
        (
            ["run", "photos", "--composite", "Epsilon", "-m", "all"],
            "--composite must be given with named methods in a run; name lrp",
        ),
        (["export", "run.sqlite"], "name a run and the file to write, as in explain export run.sqlite run.parquet"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = typed(capsys, *words)
    assert (code, out, len(err)) == (2, [], 1)
    assert message in err[0]


def test_a_source_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = typed(capsys, "run", "none")
    told = (
        "explain: source 'none' must be a folder, a list, a shard or a photo, but there is no such file; check the path"
    )
    assert (code, out, err) == (1, [], [told])


def test_what_holds_for_every_photo_ends_as_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = typed(capsys, "run", "photos", "--layer", "layr1", *QUICK)
    assert (code, out, len(err)) == (2, [], 1)
    assert "layr1" in err[0]


def test_a_run_is_exported(capsys: pytest.CaptureFixture[str]) -> None:
    typed(capsys, "run", "photos", "-m", "saliency", *QUICK)
    code, out, err = typed(capsys, "export", "run.sqlite", "run.csv")
    assert (code, out, err) == (0, ["3 rows written to run.csv"], [])
    code, out, err = typed(capsys, "export", "run.sqlite", "run.csv")
    told = "explain: file 'run.csv' exists already; choose another, or overwrite it with --force"
    assert (code, out, err) == (1, [], [told])
    assert typed(capsys, "export", "run.sqlite", "run.csv", "--force")[0] == 0


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--actors", "2"], "--actors would have no effect without --ray; leave it out"),
        (["--gpus", "0.5"], "--gpus would have no effect without --ray; leave it out"),
        (["--ray", "--output", "s3://b/maps", "--pictures", "worst:1"], "--pictures writes beside a folder"),
        (["--ray", "--output", "maps", "--workers", "2"], "--workers would have no effect with --ray"),
        (["--ray"], "--ray writes into a folder that all machines share; name it with --output"),
        (["--ray", "--output", "maps", "-m", "all"], "--method all chooses by the first photo, which --ray cannot"),
    ],
)
def test_options_of_a_cluster_that_cannot_be_meant_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = typed(capsys, "run", "photos", *words, "--model", "tiny", "--size", "32")
    assert (code, out) == (2, [])
    assert err[0].startswith(f"explain: {message}")


def test_a_run_on_a_cluster_is_told_as_others_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    class Found:
        failures: ClassVar = {"a.png": "is empty", "b.png": "is empty", "c.png": "is empty"}
        notes: ClassVar = ["one", "two"]
        path, photos = "maps", 7

        def __len__(self) -> int:
            return 7

    def run_on_ray(source: Any, explainer: Any, methods: Any, **options: Any) -> Any:
        given.update(options)
        options["progress"](State(6, 3, 1, 10, 2.0))
        return Found()

    monkeypatch.setattr("explain.runs.run_on_ray", run_on_ray)
    monkeypatch.setattr("explain.cli.running.LISTED", 2)
    words = ["photos", "--ray", "ray://head:10001", "--gpus", "0.25", "--output", "maps", "--model", "tiny"]
    code, out, err = typed(capsys, "run", *words)
    assert code == 1
    assert (given["address"], given["gpus"], given["actors"], given["output"]) == (
        "ray://head:10001",
        0.25,
        None,
        "maps",
    )
    assert "workers" not in given
    assert out[0].endswith(" (1 were there, 3 failed); 7 rows in maps")
    assert err[2] == "explain: 1 more photos failed; the table 'failures' of maps lists them"
    assert "(and 1 more, in the table 'notes' of maps)" in err[3]
