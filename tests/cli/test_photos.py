"""Many photos on the command line: which are found, which are left out, what is told once, and how it ends."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

import explain
from explain.cli import main
from explain.cli.inputs import find_photos
from explain.cli.progress import ProgressBar, duration

QUICK = ["--model", "tiny", "--size", "32"]


@pytest.fixture(autouse=True)
def _in_a_folder_with_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    photo = Image.linear_gradient("L").resize((20, 16))
    for name in ("a.png", ".hidden.png", "in/b.png", "in/.c.png", "in/deep/d.png", "in/.git/e.png", "explained/f.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        photo.save(name)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], list[str]]:
    code = main([*arguments, *QUICK])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


def found(*names: str, recursive: bool = False, apart_from: str = "explained") -> list[str]:
    photos, missing = find_photos(names, recursive=recursive, apart_from=apart_from)
    assert missing == []
    return [str(photo) for photo in photos]


def test_hidden_files_of_folders_are_left_out() -> None:
    assert found(".") == ["a.png"]
    assert found("in") == ["in/b.png"]
    assert found(".hidden.png", "in/.c.png") == [".hidden.png", "in/.c.png"]  # as they were named


def test_folders_inside_folders_are_looked_into_on_request() -> None:
    assert found(".", recursive=True) == ["a.png", "in/b.png", "in/deep/d.png"]
    assert found(".", recursive=True, apart_from="out") == ["a.png", "explained/f.png", "in/b.png", "in/deep/d.png"]
    assert found("in", "in/b.png", recursive=True) == ["in/b.png", "in/deep/d.png"]
    Path("in/loop").symlink_to(Path("in").resolve())
    assert found("in", recursive=True) == ["in/b.png", "in/deep/d.png"]


def test_recursion_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "in", "--recursive", "--method", "saliency", "--target", "1")
    assert code == 0
    assert [line for line in out if not line.startswith(" ")][:2] == ["in/b.png", "in/deep/d.png"]
    code, _, err = run(capsys, "a.png", "--recursive")
    assert (code, err) == (2, ["explain: --recursive would have no effect without a folder; name one, or leave it out"])
    Path("in/b.png").unlink()
    code, _, err = run(capsys, "in")
    assert code == 1
    assert err[0].endswith("); --recursive looks into its folders")


def test_standard_input_is_a_photo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(Path("a.png").read_bytes()), isatty=bool))
    code, out, err = run(capsys, "-", "a.png", "--method", "saliency", "--target", "1")
    assert (code, err) == (0, [])
    assert out[0] == "standard input"
    piped, named = (explain.load(f"explained/{stem}-saliency.json") for stem in ("stdin", "a"))
    assert (piped.values == named.values).all()
    assert piped.record["image"]["path"] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "standard input: image of 0 bytes is empty"),
        (b"no photo", "standard input: image of 8 bytes is not an image"),
        (None, "standard input: image - must come through a pipe, but standard input is a terminal or closed"),
    ],
)
def test_standard_input_without_a_photo_is_refused(
    content: bytes | None, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = None if content is None else SimpleNamespace(buffer=io.BytesIO(content), isatty=bool)
    monkeypatch.setattr(sys, "stdin", piped)
    code, out, err = run(capsys, "-", "--method", "saliency")
    assert (code, out, len(err)) == (1, [], 1)
    assert err[0].startswith(f"explain: {message}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layer", "layer9"], "did you mean 'layer"),
        (["--target", "expresso"], "target 'expresso' is not a label of this model; did you mean 'espresso'?"),
        (["--target", "500"], "must be a class from 0 to 199 for this model, got 500"),
    ],
)
def test_what_is_wrong_for_all_photos_is_told_once(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "bcd":
        Image.linear_gradient("L").save(f"{name}.png")
    code, out, err = run(capsys, ".", *options)
    assert code == 2
    assert len(err) == 1
    assert message in err[0]
    assert err[0].endswith(" (this holds for every photo: none is done, 2 more not looked at)")
    assert not any(photo in err[0] for photo in ("a.png", "b.png"))
    assert out[-1].endswith("(2 failed, 2 not looked at)")


def test_what_is_wrong_for_one_photo_is_told_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect = explain.Explainer.inspect

    def picky(self: explain.Explainer, photo: Image.Image) -> object:
        if photo.filename == "a.png":  # type: ignore[attr-defined]
            raise explain.ModelError("model must like the photo")
        return inspect(self, photo)

    monkeypatch.setattr(explain.Explainer, "inspect", picky)
    code, out, err = run(capsys, "a.png", "in/b.png", "--inspect")
    assert (code, out[0]) == (1, "in/b.png")
    assert err == ["explain: a.png: model must like the photo"]


def test_several_photos_end_with_a_line_that_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in/broken.png").write_bytes(b"no photo")
    code, out, _ = run(capsys, "a.png", "in", "none.png", "--method", "saliency")
    assert code == 1
    assert out[-1].startswith("explained 2 of 4 photos in ")
    assert out[-1].endswith(" s (2 failed); 6 files written to explained")
    code, out, _ = run(capsys, "a.png", "--method", "saliency", "-o", "other")
    assert (code, out[-1]) == (0, "  wrote other/a-saliency.json")  # one photo needs no sum
    code, out, _ = run(capsys, "a.png", "in/b.png", "--inspect")
    assert out[-1].startswith("inspected 2 of 2 photos in ")
    assert "written" not in out[-1]


def test_photos_with_results_are_skipped_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "a.png", "--method", "saliency")[0] == 0
    before = Path("explained/a-saliency.json").stat().st_mtime_ns
    code, out, err = run(capsys, "a.png", "in/b.png", "--method", "saliency", "--skip-existing")
    assert (code, err) == (0, [])
    assert out[:2] == ["a.png", "  skipped: its results are there"]
    assert out[-1].startswith("explained 1 of 2 photos in ")
    assert "(1 skipped)" in out[-1]
    assert Path("explained/a-saliency.json").stat().st_mtime_ns == before
    assert main(["a.png", "--method", "saliency", "--skip-existing", *QUICK, "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["results"]
    assert (one["skipped"], [record["method"] for record in one["records"]]) == (True, ["saliency"])


def test_only_whole_results_of_this_very_photo_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    two = ["--method", "saliency", "--method", "gradcam", "--top-k", "2", "--skip-existing"]
    assert run(capsys, "a.png", *two)[0] == 0
    assert "  skipped: its results are there" in run(capsys, "a.png", *two)[1]
    for missing in ("a-sheet.png", next(path.name for path in Path("explained").glob("a-*-gradcam.npy"))):
        content = Path("explained", missing).read_bytes()
        Path("explained", missing).unlink()
        code, _, err = run(capsys, "a.png", *two)
        assert code == 1
        assert "exists already" in err[0]
        Path("explained", missing).write_bytes(content)
    assert "exists already" in run(capsys, "a.png", *two, "--top-k", "3")[2][0]
    Path("other").mkdir()
    Path("a.png").rename("other/a.png")
    code, _, err = run(capsys, "other/a.png", *two)
    assert code == 1
    assert "exists already" in err[0]
    assert "overwrite it with --force" in err[0]
    assert run(capsys, "a.png", "--force", "--skip-existing")[0] == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_tells_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, now = Terminal(), [0.0]
    monkeypatch.setattr(sys, "stderr", screen)

    def drawn(at: float) -> str:
        now[0] = at
        screen.seek(0)
        screen.truncate()
        return ""

    bar = ProgressBar(4, clock=lambda: now[0])
    drawn(0.0)
    bar.begin("a.png")
    assert screen.getvalue().endswith(f"{'░' * 24} 0/4 a.png")
    drawn(0.5)
    bar.runs(5, 100)
    assert screen.getvalue() == ""  # it may be over in a moment
    drawn(10.0)
    bar.runs(50, 100)  # an eighth of all in 10 s
    assert screen.getvalue().endswith(f"{'█' * 3}{'░' * 21} 0/4 a.png 50/100 runs, about 70 s left")
    drawn(10.05)
    bar.runs(51, 100)
    assert screen.getvalue() == ""  # not so often
    drawn(20.0)
    bar.end()
    bar.begin("b\x1b.png")
    assert screen.getvalue().endswith(f"{'█' * 6}{'░' * 18} 1/4 b\\x1b.png, about 60 s left")
    bar.wipe()
    assert screen.getvalue().endswith("\r\x1b[2K")


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_nothing_is_drawn_where_there_is_no_terminal(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    bar = ProgressBar(3)
    bar.begin("a")
    bar.runs(1, 2)
    bar.end()
    assert stream is None or stream.getvalue() == ""  # type: ignore[attr-defined]


def test_times_are_told_as_people_do() -> None:
    assert [duration(seconds) for seconds in (0.04, 9.94, 42.2, 89, 100, 5000, 7200)] == [
        "0.0 s", "9.9 s", "42 s", "89 s", "2 min", "83 min", "2.0 h",
    ]  # fmt: skip


def test_a_folder_that_cannot_be_looked_into_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def forbidden(path: str) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", forbidden)
    photos, missing = find_photos(["in"], recursive=True)
    assert [str(photo) for photo in photos] == ["in/b.png"]
    assert [str(error) for error in missing] == [
        "folder 'in/deep' cannot be read: Permission denied; check its permissions"
    ]
