"""The command line as a stranger uses it: every bad input is one clear line, and the rest still
gets done."""

from __future__ import annotations

import errno
import io
import json
import os
import re
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
ALWAYS = ["--model", "tiny", "--size", "64"]  # which is quicker than the default
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_photo_is_explained_with_predictions_and_paths(typed: Typed) -> None:
    code, out, err = typed(CAT)
    assert (code, err, out[0]) == (0, [], CAT)
    assert re.search(r"cat.* %$", out[1])
    files = [f"explained/chelsea-tiny-gradcam.{suffix}" for suffix in ("png", "npy", "json")]
    assert [line.split()[-1] for line in out[-3:]] == files
    assert all(map(os.path.isfile, files))


def test_folders_and_photos_of_one_name_are_told_apart(typed: Typed) -> None:
    for name in ("a/photo.png", "a/photo-2.png", "b/photo.png"):
        Path(name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (20, 20), "red").save(name)
    Path("a/notes.txt").write_text("no image")
    code, _, _ = typed("a", "b", "a/photo.png", "--method", "saliency")
    assert code == 0
    pictures = sorted(path.name for path in Path("explained").glob("*.png"))
    assert pictures == [f"photo{end}-tiny-saliency.png" for end in ("-2", "-3", "")]


def test_a_model_is_inspected_layer_by_layer(typed: Typed) -> None:
    code, out, err = typed("inspect", CAT, "nothing.jpg")
    assert (code, out[0]) == (1, CAT)
    assert any("layer1" in line and "1 x 128 x " in line for line in out)
    assert "nothing.jpg" in err[0]
    assert not Path("explained").exists()


def test_nothing_is_overwritten_without_force(typed: Typed) -> None:
    assert typed(CAT)[0] == 0
    path = Path("explained/chelsea-tiny-gradcam.png")
    content = path.read_bytes()
    code, _, (error,) = typed(CAT, "--layer", "layer2")
    assert code == 1
    assert re.search("exists already.*--force", error)
    assert typed(CAT, "--target", "espresso")[0] == 0  # another question has another name
    assert path.read_bytes() == content
    assert typed(CAT, "--layer", "layer2", "--force")[0] == 0
    assert path.read_bytes() != content


def test_lists(typed: Typed) -> None:
    _, out, _ = typed("methods")
    listed = {line.split()[0]: line for line in out if line.startswith("  ")}
    assert set(listed) == {
        *explain.list_methods(),
        "smooth(METHOD)",
        "augmented(METHOD)",
        "certified(METHOD)",
    }
    assert "Selvaraju" in listed["gradcam"]
    assert listed["legrad"].endswith("for vision transformers")
    families = [line for line in out if not line.startswith("  ")]
    assert families == [family for family in FAMILIES if family in families] + ["any of them"]
    _, out, _ = typed("methods", "integ*")
    assert "options: steps=50, baseline=0.0, rule=gausslegendre, multiply_by_inputs=True" in out[2]
    assert typed("methods", "gradcan")[2][0].endswith("or 'xgradcam' or 'gradcam++'?")
    assert typed("models")[1][:2] == ["efficientnet-lite0", "tiny"]


def run_alone(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        **{"stdout": subprocess.PIPE, **options},
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )


def test_output_that_cannot_be_printed_is_one_line_and_closed_pipes_are_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    full = "explain: output cannot be printed: No space left on device\n"
    with Path("/dev/full").open("wb") as device, os.fdopen(writer, "wb") as pipe:
        for output, said in ((device, full), (pipe, "")):
            done = run_alone("-m", "explain.cli", "version", stdout=output)
            assert (done.returncode, done.stderr) == (1, said)


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
    ("words", "code", "message"),
    [
        ("own_net:raises -m saliency", 1, "model 'own_net:raises' raised ZeroDivisionError:"),
        ("own_net:nan -m saliency", 1, "must give finite scores, got nan"),
        ("own_net:Net --layer unused", 2, "was not called in the forward pass"),
        ("own_net:boom", 1, "model 'own_net:boom' raised ZeroDivisionError: from the factory"),
        ("broken_net:Net", 1, "raised SyntaxError"),
        ("own_net:Net --labels three.txt", 2, "each of the model's 2 classes, got 3"),
    ],
)
def test_what_ones_own_model_does_wrong_is_one_line(
    words: str, code: int, message: str, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own_net.py").write_text(OWN)
    Path("broken_net.py").write_text("def Net(:")
    Path("three.txt").write_text("cat\ndog\ncow\n\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    ended, _, (error,) = typed(CAT, "--model", *words.split())
    assert ended == code
    assert message in error


def test_help_needs_no_torch() -> None:
    code = "import sys, explain.cli; explain.cli.main(['--help']); sys.exit('torch' in sys.modules)"
    done = run_alone("-c", code)
    assert done.returncode == 0, done.stderr
    assert "methods " in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("size", [(1, 3000), (1, 1)])
def test_photos_a_pixel_wide_are_explained_in_every_way(
    size: tuple[int, int], typed: Typed
) -> None:
    Image.effect_noise(size, 80).save("thin.png")
    notes = int(size == (1, 1))  # which has no contrast
    for words in ("thin.png -m gradcam -m saliency -m guidedbackprop", "concepts thin.png"):
        code, _, err = typed(*words.split())
        assert (code, len(err)) == (0, notes)
    with Image.open("explained/thin-tiny-gradcam.png") as drawn:
        assert drawn.height > min(size[1], 2000)


def test_what_libraries_say_about_a_file_is_one_note_or_goes_with_our_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    picture = Image.radial_gradient("L").resize((60, 40))
    picture.convert("1").save("fax.tif", compression="group4")
    picture.save("zip.tif", compression="tiff_adobe_deflate")
    for name in ("fax.tif", "zip.tif"):
        content = bytearray(Path(name).read_bytes())
        content[28] ^= 0xFF
        Path(name).write_bytes(content)
    assert main(["fax.tif", "zip.tif", "--model", "tiny", "--method", "saliency"]) == 1
    fax, deflated = capfd.readouterr().err.splitlines()
    assert fax.startswith("note: fax.tif: may be damaged, its decoder says: Fax4Decode: Bad code")
    assert deflated.startswith("explain: image 'zip.tif' is damaged")
    assert len(list(Path("explained").iterdir())) == 3


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


@pytest.mark.parametrize("words", ["--method saliency", "--method saliency --json", "concepts"])
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_labels_and_layers_that_would_steer_the_terminal_are_shown_harmlessly(
    words: str, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("hostile_net.py").write_text(HOSTILE)
    monkeypatch.delitem(sys.modules, "hostile_net", raising=False)
    monkeypatch.syspath_prepend(Path.cwd())
    code, out, err = typed(*words.split(), CAT, "--model", "hostile_net:Net", "--size", "16")
    assert code == 0
    (record,) = Path("explained").glob("*.json")
    text = record.read_text("utf-8")
    assert all(printable(line) == line for line in out + err + text.splitlines())
    documents = [text, "\n".join(out)] if "--json" in words else [text]
    for document in documents:
        assert json.dumps(RAW)[1:-1] in json.dumps(json.loads(document))
    assert any(STEERING in line for line in out) or "--json" in words


def test_names_that_cannot_be_shown_stop_nothing_and_json_is_valid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strange = os.fsdecode(b"caf\xe9 \xe7\x8c\xab.png")
    Image.effect_noise((20, 20), 80).save("plain.png")
    Path("plain.png").rename(strange)
    screen = io.TextIOWrapper(io.BytesIO(), "ascii", "strict")
    monkeypatch.setattr(sys, "stdout", screen)
    words = "--target 0 --method saliency --model tiny --json"
    assert main([strange, *words.split()]) == 0
    (result,) = json.loads(screen.buffer.getvalue().decode("ascii"))["results"]  # type: ignore[attr-defined]
    (record,) = Path("explained").glob("*.json")
    written = json.loads(record.read_text("utf-8"))
    for document in (result["records"][0], written):
        assert document["image"]["path"] == strange == result["image"]


@pytest.mark.parametrize("words", [["--method", "saliency"], ["concepts"]])
def test_a_folder_that_cannot_be_written_stops_the_run_and_says_so(
    words: list[str], typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        Image.linear_gradient("L").resize((20, 20)).save(f"{name}.png")
    opened = Path.open

    def read_only(self: Path, mode: str = "r", *others: Any, **named: Any) -> Any:
        if set(mode) & set("wxa"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return opened(self, mode, *others, **named)

    monkeypatch.setattr(Path, "open", read_only)
    code, (summary,), (missing, stopped) = typed(*words, "missing.png", "a.png", "b.png", "c.png")
    assert code == 1
    assert summary.endswith("(2 failed, 2 not looked at)")
    assert "missing.png' does not exist" in missing
    assert stopped == (
        "explain: a.png: output folder 'explained' cannot be written: Read-only file system; "
        "change it; stopped, 2 more not looked at"
    )
    document = json.loads("\n".join(typed(*words, "a.png", "b.png", "--json")[1]))
    assert (document["results"], len(document["errors"])) == ([], 1)
