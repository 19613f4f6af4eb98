"""The command line as a stranger uses it: every bad input is one clear line, and the rest still
gets done."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import explain
from explain._utils.errors import printable
from explain.cli import main
from explain.methods.base import FAMILIES
from tests.cli.conftest import Typed
from tests.conftest import ROOT

CAT = str(ROOT / "assets" / "chelsea.png")
COFFEE = str(ROOT / "assets" / "coffee.png")
COMMAND = [sys.executable, "-m", "explain.cli"]
ALWAYS = ["--model", "tiny", "--size", "64"]  # which is quicker than the default
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_photo_is_explained_with_predictions_and_paths(typed: Typed) -> None:
    code, out, err = typed(CAT)
    assert code == 0
    assert err == []
    assert out[0] == CAT
    assert "cat" in out[1]
    assert out[1].endswith("%")
    files = [f"explained/chelsea-tiny-gradcam.{suffix}" for suffix in ("png", "npy", "json")]
    assert [line.split()[-1] for line in out[-3:]] == files
    assert all(Path(line.split()[-1]).is_file() for line in out[-3:])


def test_folders_and_photos_of_one_name_are_told_apart(typed: Typed) -> None:
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Image.new("RGB", (20, 20), "red").save(f"{folder}/photo.png")
    Path("a/notes.txt").write_text("no image")
    Image.new("RGB", (20, 20), "blue").save("a/photo-2.png")
    code, out, _ = typed("a", "b", "a/photo.png", "--verbose", "--method", "saliency")
    assert code == 0
    assert [line for line in out if line.endswith(".png") and "wrote" in line] == [
        "  wrote explained/photo-2-tiny-saliency.png",
        "  wrote explained/photo-tiny-saliency.png",
        "  wrote explained/photo-3-tiny-saliency.png",
    ]


def test_a_model_is_inspected_layer_by_layer(typed: Typed) -> None:
    code, out, err = typed("inspect", CAT, "nothing.jpg")
    assert code == 1
    assert out[0] == CAT
    assert any("layer1" in line and "1 x 128 x " in line for line in out)
    assert "nothing.jpg" in err[0]
    assert not Path("explained").exists()
    code, out, _ = typed("inspect", CAT, "--json")
    layers = json.loads("\n".join(out))["inspected"][0]["layers"]
    assert (code, layers[0]["output"]) == (0, [1, 200])


def test_nothing_is_overwritten_without_force(typed: Typed) -> None:
    assert typed(CAT)[0] == 0
    before = Path("explained/chelsea-tiny-gradcam.png").read_bytes()
    code, _, err = typed(CAT, "--layer", "layer2")
    assert code == 1
    assert "exists already" in err[0]
    assert "--force" in err[0]
    assert typed(CAT, "--target", "espresso")[0] == 0  # another question has another name
    assert Path("explained/chelsea-tiny-espresso-gradcam.png").is_file()
    assert Path("explained/chelsea-tiny-gradcam.png").read_bytes() == before
    assert typed(CAT, "--layer", "layer2", "--force")[0] == 0
    assert Path("explained/chelsea-tiny-gradcam.png").read_bytes() != before


def test_lists(typed: Typed) -> None:
    code, out, _ = typed("methods")
    assert code == 0
    listed = {line.split()[0]: line for line in out if line.startswith("  ")}
    assert sorted(listed) == sorted(
        [*explain.list_methods(), "smooth(METHOD)", "augmented(METHOD)"]
    )
    assert "Selvaraju" in listed["gradcam"]
    assert listed["legrad"].endswith("for vision transformers")
    families = [line for line in out if not line.startswith("  ")]
    assert families == [family for family in FAMILIES if family in families] + ["any of them"]
    assert out.index("relevance") < out.index(listed["lrp"]) < out.index("attention")
    code, out, _ = typed("models")
    assert out[:2] == ["efficientnet-lite0", "tiny"]
    assert "resnet50" in out
    code, out, _ = typed("layers")
    assert [line.split()[0] for line in out if line.endswith("(default)")] == ["layer3"]
    assert any(line.startswith("layer1.0.conv1") for line in out)


def test_output_that_cannot_be_printed_is_one_line_and_closed_pipes_are_quiet(
    tmp_path: Path,
) -> None:
    command = f'"{sys.executable}" -m explain.cli version > /dev/full'
    done = subprocess.run(
        command,
        shell=True,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        1,
        "explain: output cannot be printed: No space left on device\n",
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, "version"], stdout=writer, stderr=subprocess.PIPE, env=ENVIRONMENT, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


OWN = """
import torch
from torch import nn
from explain.models import CenterCrop

class Net(nn.Module):
    preprocess = CenterCrop(64)
    def __init__(self, mode="works"):
        super().__init__()
        self.conv, self.fc, self.mode = nn.Conv2d(3, 4, 3), nn.Linear(4, 2), mode
        self.unused = nn.Conv2d(3, 4, 3)
    def forward(self, x):
        if self.mode == "raises":
            raise ZeroDivisionError("from the model\\nsecond line")
        out = self.fc(self.conv(x).relu().mean((2, 3)))
        return out * float("nan") if self.mode == "nan" else out

def raises():
    return Net("raises")

def nan():
    return Net("nan")

def boom():
    raise ZeroDivisionError("from the factory")
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "own_net:raises", "--method", "saliency"],
            "model 'own_net:raises' raised ZeroDivisionError:",
        ),
        (["--model", "own_net:nan", "--method", "saliency"], "must give finite scores, got nan"),
        (["--model", "own_net:Net", "--layer", "unused"], "was not called in the forward pass"),
        (
            ["--model", "own_net:boom"],
            "model 'own_net:boom' raised ZeroDivisionError: from the factory",
        ),
        (["--model", "broken_net:Net"], "raised SyntaxError"),
        (
            ["--model", "own_net:Net", "--labels", "three.txt"],
            "each of the model's 2 classes, got 3",
        ),
    ],
)
def test_what_ones_own_model_does_wrong_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    typed: Typed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own_net.py").write_text(OWN)
    (tmp_path / "broken_net.py").write_text("def Net(:")
    (tmp_path / "three.txt").write_text("cat\ndog\ncow\n\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    code, _, err = typed(CAT, *arguments)
    assert code == (2 if {"--layer", "--labels"} & set(arguments) else 1)
    assert len(err) == 1
    assert message in err[0]


def test_help_needs_no_torch(tmp_path: Path) -> None:
    code = """
import sys
from explain.cli import main
from explain._utils.errors import printable
try:
    main(["--help"])
except SystemExit:
    pass
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "methods " in done.stdout


@pytest.mark.parametrize("size", [(1, 3000), (1, 1)])
def test_photos_a_pixel_wide_are_explained_in_every_way(
    size: tuple[int, int], typed: Typed
) -> None:
    Image.effect_noise(size, 80).save("thin.png")
    notes = int(size == (1, 1))  # which has no contrast
    for words in (
        ["thin.png", "-m", "gradcam", "-m", "saliency", "-m", "guidedbackprop"],
        ["concepts", "thin.png"],
    ):
        code, _, err = typed(*words)
        assert (code, len(err)) == (0, notes)
    with Image.open("explained/thin-tiny-gradcam.png") as drawn:
        assert drawn.height > min(size[1], 2000)
    assert (
        json.loads(Path("explained/thin-tiny-gradcam.json").read_text())["image"]["path"]
        == "thin.png"
    )


def test_what_libraries_say_about_a_file_is_one_note_or_goes_with_our_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    picture = Image.radial_gradient("L").resize((60, 40))
    picture.convert("1").save(tmp_path / "fax.tif", compression="group4")
    picture.convert("L").save(tmp_path / "zip.tif", compression="tiff_adobe_deflate")
    picture.convert("RGBA").save(tmp_path / "samples.tif")
    samples = b"\x15\x01\x03\0\1\0\0\0"  # the entry that says how many a pixel has
    for name, place in (("fax.tif", 28), ("zip.tif", 28), ("samples.tif", None)):
        content = bytearray((tmp_path / name).read_bytes())
        content[content.index(samples) + 8 if place is None else place] ^= 0xFF
        (tmp_path / name).write_bytes(content)
    assert (
        main(["fax.tif", "zip.tif", "samples.tif", "--model", "tiny", "--method", "saliency"]) == 1
    )
    fax, deflated, many = capfd.readouterr().err.splitlines()
    assert fax.startswith(
        "note: fax.tif: may be damaged, its decoder says: Fax4Decode: Bad code word"
    )
    assert deflated.startswith("explain: image 'zip.tif' is damaged")
    assert many.startswith("explain: image 'samples.tif' is")
    assert len(list((tmp_path / "explained").iterdir())) == 3


STEERING = "ab\\x1b[2J\\x9b31m\\u202e"  # as it would stand in a source file
RAW = STEERING.encode().decode("unicode_escape")

HOSTILE = f"""
import torch
from torch import nn

class Net(nn.Module):
    categories = ["{STEERING}", "plain"]
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential()
        self.stages.add_module("{STEERING}", nn.Conv2d(3, 4, 3))
        self.fc = nn.Linear(4, 2)
    def forward(self, x):
        return self.fc(self.stages(x).relu().mean((2, 3)))
"""


@pytest.mark.parametrize(
    "options",
    [["--method", "saliency"], ["--method", "saliency", "--json"], ["concepts"]],
)
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_labels_and_layers_that_would_steer_the_terminal_are_shown_harmlessly(
    options: list[str], tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_net.py").write_text(HOSTILE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "hostile_net", raising=False)
    code, out, err = typed(*options, CAT, "--model", "hostile_net:Net", "--size", "16")
    assert code == 0
    assert all(printable(line) == line for line in out + err), out + err
    if "--json" in options:
        assert json.dumps(RAW)[1:-1] in json.dumps(json.loads("\n".join(out)))
    else:
        assert any(STEERING in line for line in out), out
    (record,) = Path("explained").glob("*.json")
    text = record.read_text("utf-8")
    assert all(printable(line) == line for line in text.splitlines())
    assert json.dumps(RAW)[1:-1] in json.dumps(json.loads(text))


def test_names_that_cannot_be_shown_stop_nothing_and_json_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = os.fsdecode(b"caf\xe9 \xe7\x8c\xab.png")
    Image.effect_noise((20, 20), 80).save(tmp_path / "plain.png")
    (tmp_path / "plain.png").rename(tmp_path / strange)
    screens = {
        name: io.TextIOWrapper(io.BytesIO(), "ascii", "strict") for name in ("stdout", "stderr")
    }
    for name, screen in screens.items():
        monkeypatch.setattr(sys, name, screen)
    options = "--target 0 --method saliency --model tiny --json"
    words = [strange, "x" * 300 + ".jpg", *options.split()]
    assert main(words) == 1
    monkeypatch.undo()
    screens["stderr"].flush()
    out, err = (screen.buffer.getvalue().decode("ascii") for screen in screens.values())  # type: ignore[attr-defined]
    (line,) = err.splitlines()
    assert "File name too long" in line
    document = json.loads(out)
    assert (document["results"][0]["image"], len(document["errors"])) == (strange, 1)
    (record,) = document["results"][0]["records"]
    assert record["image"]["path"] == strange
    written = next((tmp_path / "explained").glob("*.json"))
    assert json.loads(written.read_text("utf-8"))["image"]["path"] == strange


@pytest.mark.parametrize("words", [["--method", "saliency"], ["concepts"]])
def test_a_folder_that_cannot_be_written_stops_the_run_and_says_so(
    words: list[str], typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        Image.linear_gradient("L").resize((20, 20)).save(f"{name}.png")
    Path("explained").mkdir()
    opened = Path.open

    def read_only(self: Path, mode: str = "r", *others: Any, **named: Any) -> Any:
        if set(mode) & set("wxa"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return opened(self, mode, *others, **named)

    monkeypatch.setattr(Path, "open", read_only)
    code, out, err = typed(*words, "missing.png", "a.png", "b.png", "c.png")
    assert code == 1
    (summary,) = out
    assert summary.endswith("(2 failed, 2 not looked at)")
    missing, stopped = err
    assert "missing.png' does not exist" in missing
    assert stopped == (
        "explain: a.png: output folder 'explained' cannot be written: Read-only file system; "
        "change it; stopped, "
        "2 more not looked at"
    )
    code, out, _ = typed(*words, "a.png", "b.png", "--json")
    document = json.loads("\n".join(out))
    assert (document["results"], len(document["errors"])) == ([], 1)
