"""Many photos on the command line: which are found, which are left out, what is told once, and how
it ends."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

import explain
from explain.attribution.pictures import sentence
from explain.cli.output import ProgressBar
from explain.cli.several import find_photos
from explain.engine import Evidence
from explain.methods import Saliency
from explain.models import CenterCrop
from tests.cli.conftest import Typed
from tests.runs.networks import picture

ALWAYS = ["--model", "tiny", "--size", "32"]


@pytest.fixture(autouse=True)
def _in_a_folder_with_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    photo = Image.linear_gradient("L").resize((20, 16))
    hidden = [".hidden.png", "in/.c.png", "in/.git/e.png"]
    for name in ("a.png", "in/b.png", "in/deep/d.png", "explained/f.png", *hidden):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        photo.save(name)


def photos_in(*names: str, apart_from: str = "explained") -> list[str]:
    photos, missing = find_photos(names, recursive=True, apart_from=apart_from)
    assert missing == []
    return photos


def test_folders_inside_folders_are_looked_into_on_request(typed: Typed) -> None:
    within = ["in/b.png", "in/deep/d.png"]
    assert photos_in(".") == ["a.png", *within]
    assert photos_in(".", apart_from="out") == ["a.png", "explained/f.png", *within]
    Path("in/loop").symlink_to(Path("in").resolve())
    assert photos_in("in", "in/b.png") == within
    code, out, _ = typed("in", "--recursive", "--method", "saliency", "--target", "1")
    assert (code, [line.split(": ")[0] for line in out[:2]]) == (0, within)
    Path("in/b.png").unlink()
    code, _, (error,) = typed("in")
    assert code == 1
    assert error.endswith("); --recursive looks into its folders")


def test_a_photo_is_decoded_and_cropped_once(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    cropped: list[tuple[int, int]] = []
    decode = ImageFile.ImageFile.load
    crop = CenterCrop.__call__

    def load(file: Any, *args: Any) -> Any:
        decoded.extend([file.filename] * bool(file.tile))
        return decode(file, *args)

    def preprocess(self: CenterCrop, image: Image.Image) -> torch.Tensor:
        cropped.append(image.size)
        return crop(self, image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    monkeypatch.setattr(CenterCrop, "__call__", preprocess)
    code, _, _ = typed("a.png", *ALWAYS, "--method", "gradcam", "--method", "saliency")
    assert (code, len(decoded), cropped) == (0, 1, [(20, 16)])


def test_slices_of_a_volume_are_photos_in_the_window_that_is_typed(typed: Typed) -> None:
    volume = np.random.default_rng(0).integers(-1000, 3000, (5, 16, 20)).astype(np.int16)
    np.save("in/scan.npy", volume)
    np.save("a.npy", volume)  # beside a photo of this name: a map, say
    assert photos_in(".")[-5:] == [f"in/scan.npy slice {i}" for i in range(1, 6)]
    words = "--slices 2:3 --window -100,800 --method saliency --target 1 --json"
    code, out, err = typed("in/scan.npy", "a.png", *words.split())
    assert (code, err) == (0, [])
    first, second, last = json.loads("\n".join(out))["results"]
    assert (first["image"], last["image"]) == ("in/scan.npy slice 2", "a.png")
    greys = ((volume[2] + 500.0) / 800).clip(0, 1)
    plain = explain.Explainer("tiny", size=32)(greys, "saliency", target=1)
    saved = explain.load(second["files"][1])
    assert saved.path.name.startswith("scan-slice-3-tiny-")
    torch.testing.assert_close(saved.values, plain.values)
    torch.testing.assert_close(saved.repeat().values, plain.values)
    code, _, (line,) = typed("in/scan.npy", "--slices", "0")
    assert (code, "slices 1 to 5" in line) == (1, True)


def test_pages_are_photos_where_they_are_typed_and_else_the_first_is_told(typed: Typed) -> None:
    first, second = (picture(number, (24, 20)) for number in range(2))
    first.save("a.tif", save_all=True, append_images=[second])
    words = ["--method", "saliency", "--target", "1", "--json"]
    code, out, err = typed("a.tif", *words)
    assert (code, len(json.loads("\n".join(out))["results"])) == (0, 1)
    assert any("2 pages" in line and "'a.tif slice 2'" in line for line in err)
    code, out, err = typed("a.tif", "--slices", "2", *words)
    (one,) = json.loads("\n".join(out))["results"]
    assert (code, err, one["image"]) == (0, [], "a.tif slice 2")
    plain = explain.Explainer("tiny", size=32)(second, "saliency", target=1)
    torch.testing.assert_close(explain.load(one["files"][1]).values, plain.values)


def test_a_model_of_volumes_sees_a_stack_of_slices(typed: Typed) -> None:
    np.save("scan.npy", np.random.default_rng(0).integers(0, 3000, (5, 16, 20)).astype(np.int16))
    Path("net.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    layers = nn.Conv3d(1, 2, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten()\n"
        "    return nn.Sequential(*layers).eval()\n"
    )
    words = "--mean 0.5 --std 0.5 --size 16 --model net.py:make --json"
    for command, slices in ((["inspect"], []), ([], ["--slices", "2:5"])):
        code, out, _ = typed(*command, "scan.npy", *slices, *words.split())
        documents = json.loads("\n".join(out))
        (one,) = documents["inspected" if command else "results"]
        assert (code, one["image"]) == (0, "scan.npy slices 2:5" if slices else "scan.npy")


@pytest.mark.long
def test_one_figure_has_all_photos_and_methods(typed: Typed) -> None:
    methods = ("--method", "gradcam", "--method", "saliency")
    code, out, _ = typed("a.png", "in", *ALWAYS, *methods, "--figure", "f/thesis.svg")
    assert (code, out[-1]) == (0, "wrote f/thesis.svg")
    drawn = Path("f/thesis.svg").read_text("utf-8")
    photos = len(out) - 2  # a line for each, the last but one, and the one above
    assert drawn.count("<image") >= 3 * photos >= 6
    assert all(drawn.count(f">{title}<") == 1 for title in ("photo", "Grad-CAM", "Saliency"))
    code, _, _ = typed("a.png", *ALWAYS, "--figure", "b.pdf", "--figure-width", "8", "--force")
    assert (code, Path("b.pdf").read_bytes()[:4]) == (0, b"%PDF")
    assert b"MediaBox [ 0 0 226." in Path("b.pdf").read_bytes()  # 8 cm in points


def piped(content: bytes | None) -> Any:
    """A standard input; None for none."""
    return content and SimpleNamespace(buffer=io.BytesIO(content), isatty=bool)


def test_standard_input_is_a_photo(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", piped(Path("a.png").read_bytes()))
    code, out, err = typed("-", "a.png", "--method", "saliency", "--target", "1")
    assert (code, err) == (0, [])
    assert out[0].startswith("standard input: ")
    through_pipe, named = (
        explain.load(f"explained/{stem}-tiny-fishing-reel-saliency.json") for stem in ("stdin", "a")
    )
    assert torch.equal(through_pipe.values, named.values)
    assert through_pipe.record["image"]["path"] is None
    refusals = {
        b"no photo": "standard input: image of 8 bytes is not an image",
        None: "standard input: image - must come through a pipe, but standard input is",
    }
    for content, message in refusals.items():
        monkeypatch.setattr(sys, "stdin", piped(content))
        code, out, (error,) = typed("-", "--method", "saliency")
        assert (code, out) == (1, [])
        assert error.startswith(f"explain: {message}")


def test_what_is_wrong_for_all_photos_is_told_once(typed: Typed) -> None:
    for name in "bcd":
        Image.linear_gradient("L").save(f"{name}.png")
    code, out, (told, stopped) = typed(".", "--target", "500")
    assert code == 2
    assert "a.png: " in told
    assert "must be a class from 0 to 199" in told
    assert stopped.endswith("same way, as every photo would; stopped, 2 more not looked at")
    assert out[-1].endswith("(2 failed, 2 not looked at)")


ONE = ["a.png", "--method", "saliency"]
SEVERAL = [*ONE, "--method", "gradcam"]


@pytest.mark.parametrize(
    ("first", "second", "existing"),
    [
        (ONE, ONE, "a-tiny-saliency.png"),
        (ONE, SEVERAL, "a-tiny-saliency.json"),
        (SEVERAL, SEVERAL, "a-tiny-sheet.png"),
        ([*ONE, "--html"], [*ONE, "--html"], "a-tiny.html"),
        ([*ONE, "--top-k", "2"], [*ONE, "--top-k", "3"], None),
        ([*ONE, "--target", "goldfish"], [*SEVERAL, "--target", "goldfish"], None),
        ([*ONE, "--output", "map.png"], [*ONE, "--output", "map.png"], "map.png"),
        ([*ONE, "in/b.png", "--html"], [*ONE, "in/deep", "--html"], "contact-sheet.html"),
        ([*ONE, "--boxes"], ["in/b.png", *ONE[1:], "--boxes"], "boxes.json"),
        (
            [*ONE, "--model", "tiny", "--model", "tiny-transformer"],
            [*ONE, "--model", "tiny-transformer", "--model", "tiny"],
            "a-models.png",
        ),
    ],
)
def test_files_that_are_there_are_refused_before_the_work_for_them(
    first: list[str],
    second: list[str],
    existing: str | None,
    typed: Typed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each alone: a map, its record, a sheet, a page, and what is of several photos or models."""
    made: list[int] = []
    explained = Saliency.__call__

    def counted(method: Saliency, evidence: Evidence) -> torch.Tensor:
        made.append(len(evidence.inputs))
        return explained(method, evidence)

    monkeypatch.setattr(Saliency, "__call__", counted)
    assert typed(*first)[0] == 0
    count = len(made)
    written = [path for path in Path().rglob("*") if path.is_file() and path.name == existing]
    for path in Path("explained").glob("*"):
        if written and path not in written:
            path.unlink()
    code, _, err = typed(*second)
    assert (code, len(made)) == (1, count)
    assert "exists already" in err[-1]
    assert existing is None or existing in err[-1]
    assert typed(*second, "--force")[0] == 0
    assert len(made) > count


def test_other_files_that_begin_alike_are_no_reason_to_refuse(typed: Typed) -> None:
    assert typed(*ONE, "--target", "goldfish")[0] == 0
    assert typed(*ONE)[0] == 0
    assert typed(*SEVERAL[:1], "--method", "gradcam")[0] == 0


@pytest.mark.long
def test_the_smallest_evidence_is_told_in_a_sentence_or_in_sizes(typed: Typed) -> None:
    """The sizes, of several photos and on their page, are those of the records' masks."""
    words = ["--evidence", "--samples", "40", "-o"]
    _, out, _ = typed("a.png", *words, "one")
    Image.radial_gradient("L").save("b.png")
    code, (of_a, *_), errors = typed("a.png", "b.png", *words, "both", "--html")
    assert (code, errors) == (0, [])
    for name in ("sufficient", "necessary"):
        (path,) = Path("one").glob(f"*{name}.json")
        saved = explain.load(path)
        assert f"  {sentence(saved.attribution, saved.label)}" in out
        assert f"{name}: {float((saved.values > 0).double().mean()):.1%} of the photo" in of_a
    assert Path("both/contact-sheet.html").read_text("utf-8").count("set_size") >= 4


def test_several_photos_have_a_line_each_and_one_that_sums_up(typed: Typed) -> None:
    Path("in/broken.png").write_bytes(b"no photo")
    words = ["a.png", "in", "none.png", "--method", "saliency"]
    code, out, _ = typed(*words, "--metric", "complexity")
    assert (code, len(out)) == (1, 3)
    assert re.match("a.png: .*saliency: complexity ", out[0])
    assert out[-1].startswith("explained 2 of 4 photos in ")
    assert out[-1].endswith(" s (2 failed); 6 files written to explained")
    assert len(typed(*words, "--force", "--verbose")[1]) > 10
    code, out, err = typed(*words, "--force", "--quiet")
    assert (code, out, len(err)) == (1, [], 2)
    code, out, _ = typed("a.png", "--method", "saliency", "-o", "other")
    assert (code, out[-1]) == (0, "  wrote other/a-tiny-saliency.json")  # one photo needs no sum


def test_the_bar_tells_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    bar = ProgressBar(4, clock=lambda: now[0])

    def drawn(at: float, act: Callable[..., None], *arguments: Any) -> str:
        """What is drawn then."""
        screen = io.StringIO()
        screen.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stderr", screen)
        now[0] = at
        act(*arguments)
        return screen.getvalue()

    drawn(0.0, bar.begin, "a.png")
    assert drawn(0.5, bar.runs, 5, 100) == ""  # it may be over in a moment
    eighth = f"{'█' * 3}{'░' * 21} 0/4 a.png 50/100 runs, about 70 s left"
    assert drawn(10.0, bar.runs, 50, 100).endswith(eighth)
    assert drawn(10.05, bar.runs, 51, 100) == ""  # not so often
    drawn(20.0, bar.close)
    assert drawn(20.0, bar.begin, "b\x1b.png").endswith(" 1/4 b\\x1b.png, about 60 s left")
    assert drawn(20.0, bar.wipe).endswith("\r\x1b[2K")


@pytest.mark.long
def test_boxes_are_drawn_and_written_as_coco(typed: Typed) -> None:
    code, out, _ = typed("a.png", "in/b.png", "--boxes", "--box-threshold", "0.3", "-m", "gradcam")
    assert (code, out[-1]) == (0, "wrote explained/boxes.json")
    document = json.loads(Path("explained/boxes.json").read_text())
    assert [image["file_name"] for image in document["images"]] == ["a.png", "in/b.png"]
    parts = explain.Explainer("tiny", size=32)("a.png")["gradcam"].boxes(0.3)[0]
    of_first = [part for part in document["annotations"] if part["image_id"] == 1]
    assert len(of_first) == len(parts)
    drawn = Path("explained/a-tiny-gradcam.png").read_bytes()
    typed("a.png", "--force")
    assert Path("explained/a-tiny-gradcam.png").read_bytes() != drawn
    for wrong in (["--box-threshold", "0.3"], ["--boxes", "--box-threshold", "0"]):
        code, _, (error,) = typed("a.png", *wrong)
        assert code == 2
        assert "--box-threshold" in error
    code, _, (error,) = typed("a.png", "--boxes", "--skip-existing")
    assert code == 2
    assert "--boxes" in error


@pytest.mark.long
def test_all_labels_above_a_threshold_are_explained(typed: Typed) -> None:
    explainer = explain.Explainer("tiny", size=32, activation="sigmoid")
    photo = ["a.png", "--activation", "sigmoid", "--target", "predicted"]
    probabilities = explainer.probabilities(explainer.as_input("a.png"))
    assert probabilities is not None
    order = probabilities[0].argsort(descending=True)
    limit = float(probabilities[0, order[2]]) - 1e-6
    code, _, _ = typed(*photo, "--threshold", str(limit))
    assert code == 0
    written = {json.loads(path.read_text())["label"] for path in Path("explained").glob("*.json")}
    assert written == {explainer.categories[index] for index in order[:3].tolist()}
    code, out, _ = typed(*photo, "--threshold", str(limit), "--skip-existing")
    assert "skipped" in out[-1]
    best = explainer.categories[int(order[0])]
    words = ["--threshold", str(limit), "--threshold", f"{best}=1", "-o", "out"]
    code, _, _ = typed(*photo, *words)
    written = {json.loads(path.read_text())["label"] for path in Path("out").glob("*.json")}
    assert written == {explainer.categories[index] for index in order[1:3].tolist()}


@pytest.mark.parametrize(
    "words",
    [
        ["--threshold", "0.3"],
        ["--threshold", "0.3", "--target", "1"],
        ["--threshold", "2", "--target", "predicted"],
        ["--threshold", "half", "--target", "predicted"],
        ["--threshold", "nothing=0.5", "--target", "predicted"],
        ["--target", "predicted", "-o", "one.png"],
    ],
)
def test_thresholds_that_cannot_be_meant_are_refused(typed: Typed, words: list[str]) -> None:
    code, _, (error,) = typed("a.png", *words)
    assert code == 2
    assert re.search("threshold|nothing|output", error)


@pytest.mark.long
def test_a_height_and_a_width_are_typed_and_kept_in_records(
    typed: Typed,
) -> None:
    for size in ("48x32", "48,32"):
        code, _, _ = typed("a.png", "--model", "tiny", "--size", size, "--force")
        assert code == 0
        saved = explain.load("explained/a-tiny-gradcam.json")
        expected = explain.Explainer("tiny", size=(48, 32))("a.png")
        torch.testing.assert_close(saved.repeat()["gradcam"].values, expected["gradcam"].values)
    assert explain.Explainer("tiny", size=(48, 48)).preprocess.side == 48  # type: ignore[attr-defined]
    for wrong in ("48x", "0x32", "1x2x3", "-3"):
        code, _, (error,) = typed("a.png", "--model", "tiny", "--size", wrong)
        assert "size must be" in error
