"""Many photos on the command line: which are found, which are left out, what is told once, and how
it ends."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import explain
from explain.attribution.pictures import sentence
from explain.cli.output import ProgressBar
from explain.cli.several import find_photos
from tests.cli.conftest import Typed

ALWAYS = ["--model", "tiny", "--size", "32"]


@pytest.fixture(autouse=True)
def _in_a_folder_with_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    photo = Image.linear_gradient("L").resize((20, 16))
    for name in (
        "a.png",
        ".hidden.png",
        "in/b.png",
        "in/.c.png",
        "in/deep/d.png",
        "in/.git/e.png",
        "explained/f.png",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        photo.save(name)


def found(*names: str, recursive: bool = False, apart_from: str = "explained") -> list[str]:
    photos, missing = find_photos(names, recursive=recursive, apart_from=apart_from)
    assert missing == []
    return photos


def test_folders_inside_folders_are_looked_into_on_request() -> None:
    assert found(".", recursive=True) == ["a.png", "in/b.png", "in/deep/d.png"]
    assert found(".", recursive=True, apart_from="out") == [
        "a.png",
        "explained/f.png",
        "in/b.png",
        "in/deep/d.png",
    ]
    assert found("in", "in/b.png", recursive=True) == ["in/b.png", "in/deep/d.png"]
    Path("in/loop").symlink_to(Path("in").resolve())
    assert found("in", recursive=True) == ["in/b.png", "in/deep/d.png"]


def test_recursion_is_an_option(typed: Typed) -> None:
    code, out, _ = typed("in", "--recursive", "--method", "saliency", "--target", "1")
    assert code == 0
    assert [line.split(": ")[0] for line in out[:2]] == ["in/b.png", "in/deep/d.png"]
    code, _, err = typed("a.png", "--recursive")
    assert (code, err) == (
        2,
        ["explain: --recursive would have no effect without a folder; name one, or leave it out"],
    )
    Path("in/b.png").unlink()
    code, _, err = typed("in")
    assert code == 1
    assert err[0].endswith("); --recursive looks into its folders")


def test_slices_of_a_volume_are_photos_in_the_window_that_is_typed(typed: Typed) -> None:
    volume = np.random.default_rng(0).integers(-1000, 3000, (5, 16, 20)).astype(np.int16)
    np.save("in/scan.npy", volume)
    np.save("a.npy", volume)  # beside a photo of this name: a map, say
    assert found(".", recursive=True)[-5:] == [f"in/scan.npy slice {i}" for i in range(5)]
    words = ["--window", "-100,800", "--method", "saliency", "--target", "1", "--json"]
    code, out, err = typed("in/scan.npy", "a.png", "--slices", "1:3", *words)
    assert (code, err) == (0, [])
    results = json.loads("\n".join(out))["results"]
    assert [one["image"] for one in results] == [
        *(f"in/scan.npy slice {i}" for i in (1, 2)),
        "a.png",
    ]
    greys = ((volume[2] + 500.0) / 800).clip(0, 1)
    plain = explain.Explainer("tiny", size=32)(greys, "saliency", target=1)
    assert Path(results[1]["files"][1]).name.startswith("scan-slice-2-tiny-")
    saved = explain.load(results[1]["files"][1])
    torch.testing.assert_close(saved.values, plain.values)
    torch.testing.assert_close(saved.repeat().values, plain.values)
    Path("net.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    layers = nn.Conv3d(1, 2, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten()\n"
        "    return nn.Sequential(*layers).eval()\n"
    )
    values = ["--mean", "0.5", "--std", "0.5", "--size", "16", "--model", "net.py:make"]
    for command in ([], ["inspect"]):
        chosen = [] if command else ["--slices", "1:5"]
        code, out, _ = typed(*command, "in/scan.npy", *chosen, *values, "--json")
        document = json.loads("\n".join(out))
        names = [one["image"] for one in document["results" if not command else "inspected"]]
        assert (code, names) == (0, [f"in/scan.npy{' slices 1:5' if chosen else ''}"])
    for slices, code in (("7:", 1), ("x", 2), ("1:2:0", 2)):
        assert typed("a.npy", "--slices", slices)[0] == code
    assert typed("a.png", "--slices", "1:2")[0] == 2
    assert typed("a.png", "--window", "40")[0] == 2


def test_standard_input_is_a_photo(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=io.BytesIO(Path("a.png").read_bytes()), isatty=bool)
    )
    code, out, err = typed("-", "a.png", "--method", "saliency", "--target", "1")
    assert (code, err) == (0, [])
    assert out[0].startswith("standard input: ")
    piped, named = (
        explain.load(f"explained/{stem}-tiny-fishing-reel-saliency.json") for stem in ("stdin", "a")
    )
    assert (piped.values == named.values).all()
    assert piped.record["image"]["path"] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no photo", "standard input: image of 8 bytes is not an image"),
        (None, "standard input: image - must come through a pipe, but standard input is"),
    ],
)
def test_standard_input_without_a_photo_is_refused(
    content: bytes | None, message: str, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = None if content is None else SimpleNamespace(buffer=io.BytesIO(content), isatty=bool)
    monkeypatch.setattr(sys, "stdin", piped)
    code, out, err = typed("-", "--method", "saliency")
    assert (code, out, len(err)) == (1, [], 1)
    assert err[0].startswith(f"explain: {message}")


def test_what_is_wrong_for_all_photos_is_told_once(typed: Typed) -> None:
    for name in "bcd":
        Image.linear_gradient("L").save(f"{name}.png")
    code, out, (told, stopped) = typed(".", "--target", "500")
    assert code == 2
    assert told.startswith("explain: a.png: ")
    assert "must be a class from 0 to 199" in told
    assert (
        stopped
        == "explain: b.png fails in the same way, as every photo would; stopped, 2 more not looked "
        "at"
    )
    assert out[-1].endswith("(2 failed, 2 not looked at)")


def test_the_smallest_evidence_is_told_in_a_sentence(typed: Typed) -> None:
    code, out, _ = typed(
        "a.png", "--evidence", "--baseline", "black", "--target", "1", "--samples", "80"
    )
    assert code == 0
    for name in ("sufficient", "necessary"):
        (path,) = Path("explained").glob(f"*{name}.json")
        saved = explain.load(path)
        assert saved.label in sentence(saved.attribution, saved.label)
        assert f"  {sentence(saved.attribution, saved.label)}" in out


def test_several_photos_end_with_a_line_that_sums_up(typed: Typed) -> None:
    Path("in/broken.png").write_bytes(b"no photo")
    code, out, _ = typed("a.png", "in", "none.png", "--method", "saliency")
    assert code == 1
    assert out[-1].startswith("explained 2 of 4 photos in ")
    assert out[-1].endswith(" s (2 failed); 6 files written to explained")
    code, out, _ = typed("a.png", "--method", "saliency", "-o", "other")
    assert (code, out[-1]) == (0, "  wrote other/a-tiny-saliency.json")  # one photo needs no sum
    code, out, _ = typed("inspect", "a.png", "in/b.png")
    assert out[-1].startswith("inspected 2 of 2 photos in ")
    assert "written" not in out[-1]


def test_only_whole_results_of_this_very_photo_are_skipped(typed: Typed) -> None:
    two = ["--method", "saliency", "--method", "gradcam", "--top-k", "2", "--skip-existing"]
    assert typed("a.png", *two)[0] == 0
    assert "  skipped: its results are there" in typed("a.png", *two)[1]
    for missing in (
        "a-tiny-sheet.png",
        next(path.name for path in Path("explained").glob("a-*-gradcam.npy")),
    ):
        content = Path("explained", missing).read_bytes()
        Path("explained", missing).unlink()
        code, _, err = typed("a.png", *two)
        assert code == 1
        assert "exists already" in err[0]
        Path("explained", missing).write_bytes(content)
    assert "exists already" in typed("a.png", *two, "--top-k", "3")[2][0]
    Path("other").mkdir()
    Path("a.png").rename("other/a.png")
    assert "  skipped: its results are there" in typed("other/a.png", *two)[1]  # wherever it is
    assert typed("a.png", "--force", "--skip-existing")[0] == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_tells_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    now = [0.0]
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
    bar.close()
    bar.begin("b\x1b.png")
    assert screen.getvalue().endswith(f"{'█' * 6}{'░' * 18} 1/4 b\\x1b.png, about 60 s left")
    bar.wipe()
    assert screen.getvalue().endswith("\r\x1b[2K")


def test_the_sizes_of_evidence_are_told_of_several_photos_and_on_their_page(
    typed: Typed, tmp_path: Path
) -> None:
    """The sizes are those of the records' masks."""
    Image.radial_gradient("L").save("b.png")
    code, lines, errors = typed("a.png", "b.png", "--evidence", "--html", "--samples", "40")
    assert (code, errors) == (0, [])
    for name, line in zip(("a", "b"), lines, strict=False):
        assert line.startswith(f"{name}.png: ")
        for method in ("sufficient", "necessary"):
            mask = np.load(tmp_path / "explained" / f"{name}-tiny-{method}.npy")
            assert f"{method}: {(mask > 0).mean():.1%} of the photo" in line
    page = (tmp_path / "explained" / "contact-sheet.html").read_text("utf-8")
    assert page.count("set_size") >= 4
