"""The command line as a stranger uses it: every bad input is one clear line, and the rest still
gets done."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
ALWAYS = ["--model", "tiny"]  # which is quicker than the default
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


def test_all_options_reach_the_explanation(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "gradcam",
        "lrp",
        "attnlrp",
        "saliency",
        "cam",
        "legrad",
        "rollout",
        "scorecam",
        "sscam",
    ]
    monkeypatch.setattr("explain.attribution.selection.list_methods", lambda: names)
    arguments = [
        "--method",
        "all",
        "--target",
        "tabby",
        "--layer",
        "layer2",
        "--size",
        "32",
        "--device",
        "cpu",
        "--alpha",
        "0.8",
    ]
    code, _, err = typed(CAT, *arguments, "--colormap", "viridis", "--output", "there/deep")
    assert code == 0
    unfit, costly = (
        line.removesuffix("; --method everything takes them too").split(": ")[2].split(", ")
        for line in err
    )
    assert [line[:44] for line in err] == [
        "note: left out, as they are for other networ",
        "note: left out, as they take 200 passes or m",
    ]
    assert {"cam", "legrad", "rollout"} <= set(unfit)
    assert {"scorecam (258)", "sscam (2562)"} <= set(costly)
    record = json.loads(Path("there/deep/chelsea-tiny-tabby-cat-gradcam.json").read_text())
    assert (record["label"], record["layer"], record["input_size"]) == (
        "tabby cat",
        "layer2",
        [32, 32],
    )
    assert len(list(Path("there/deep").glob("*.png"))) == len(names) - len(unfit) - len(costly) + 1


def test_json_is_one_document_with_results_and_errors(typed: Typed) -> None:
    code, out, _ = typed(CAT, "nothing.jpg", "--json", "--top-k", "2")
    document = json.loads("\n".join(out))
    assert code == 1
    assert len(document["results"][0]["records"]) == 2
    assert len(document["results"][0]["files"]) == 7
    assert "nothing.jpg' does not exist" in document["errors"][0]


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


def test_an_empty_name_is_not_the_folder_we_are_in(typed: Typed) -> None:
    Image.new("RGB", (20, 20), "red").save("unasked.png")
    code, out, err = typed("")
    assert (code, out) == (1, [])
    assert err == ["explain: image must be a file or folder, got an empty name; check the command"]


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
    found = {line.split()[0]: line for line in out if line.startswith("  ")}
    assert sorted(found) == sorted([*explain.list_methods(), "smooth(METHOD)", "augmented(METHOD)"])
    assert "Selvaraju" in found["gradcam"]
    assert found["legrad"].endswith("for vision transformers")
    families = [line for line in out if not line.startswith("  ")]
    assert families == [family for family in FAMILIES if family in families] + ["any of them"]
    assert out.index("relevance") < out.index(found["lrp"]) < out.index("attention")
    code, out, _ = typed("models")
    assert out[:2] == ["efficientnet-lite0", "tiny"]
    assert "resnet50" in out
    code, out, _ = typed("layers")
    assert [line.split()[0] for line in out if line.endswith("(default)")] == ["layer3"]
    assert any(line.startswith("layer1.0.conv1") for line in out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name at least one image"),
        ([CAT, "--method", "gradcan"], "did you mean 'gradcam'"),
        (
            [CAT, "--alpha", "2"],
            "'--alpha': 2.0 is not in the range 0<=x<=1; explain --help shows the options",
        ),
        ([CAT, "--alpha", "much"], "'--alpha': 'much' is not a valid float"),
        ([CAT, "--fuse", "most"], "'--fuse': 'most' is not one of 'mean', 'max', 'product'"),
        ([CAT, "--top-k", "0"], "'--top-k': 0 is not in the range x>=1"),
        ([CAT, "--top-k", "2", "--target", "3"], "cannot both be given"),
        ([CAT, "--size", "-5"], "'--size': -5 is not in the range x>=1"),
        ([CAT, "--colormap", "rainbo"], "did you mean 'rainbow'"),
        ([CAT, "--zzz"], "No such option '--zzz'; explain --help shows the options"),
        ([CAT, "--alhpa", "1"], "'--alpha'"),
        (
            [CAT, "--model", "tiny", "--method"],
            "Option '--method' requires an argument; explain --help shows the options",
        ),
        (["metods"], "did you mean 'explain methods'?"),
    ],
)
def test_wrong_usage_is_code_2_and_writes_nothing(
    arguments: list[str], message: str, typed: Typed
) -> None:
    code, out, err = typed(*arguments)
    assert code == 2
    assert out == []
    assert len(err) == 1
    assert err[0].startswith("explain: ")
    assert message in err[0]
    assert not Path("explained").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "500"], "must be a class from 0 to 199"),
        (["--target", "expresso"], "did you mean 'espresso'"),
        (["--layer", "layer9"], "did you mean 'layer"),
        (["--layer", "fc"], "must give a spatial map, got shape (1, 200)"),
        (["--target", "-1"], "must be a class from 0 to 199"),
        (["--top-k", "201"], "at most 200"),
        (["--weights", "x" * 300], "there is none"),
        (
            ["--layer", "layr3", "--method", "saliency", "--method", "gradcam"],
            "did you mean 'layer3'",
        ),
        (["--model", "resnet5"], "did you mean 'resnet50'"),
        (["--model", "no.such:thing"], "no module named 'no'"),
        (["--weights", "none.pt"], "there is none"),
        (["--device", "toaster"], "device 'toaster' cannot be used"),
        (["--size", "8"], "at least 16 pixels for the model 'tiny', got 8"),
        (["--labels", "none.txt"], "labels 'none.txt' cannot be read"),
    ],
)
def test_what_was_asked_for_and_cannot_be_done_is_code_2_and_one_line_without_the_photo(
    arguments: list[str], message: str, typed: Typed
) -> None:
    code, _, err = typed(CAT, *arguments)
    assert code == 2
    assert len(err) == 1
    assert err[0].startswith("explain: ")
    assert CAT not in err[0]
    assert message in err[0]
    assert list(Path("explained").glob("*")) == []


def test_a_folder_that_is_a_file_is_code_1(typed: Typed) -> None:
    code, _, err = typed(CAT, "--output", COFFEE)
    assert (code, len(err)) == (1, 1)
    assert "cannot be written" in err[0]


def make_odd_files(folder: Path) -> None:
    with Image.open(CAT) as image:
        photo = image.convert("RGB").resize((60, 40))
    photo.save(folder / "good.png")
    photo.convert("CMYK").save(folder / "cmyk.jpg")
    photo.convert("L").save(folder / "grey.png")
    photo.quantize(16).save(folder / "palette.png", transparency=3)
    photo.save(folder / "moving.gif", save_all=True, append_images=[photo.rotate(90)])
    Image.fromarray((np.asarray(photo.convert("L")).astype(np.uint16)) * 257).save(
        folder / "deep.png"
    )
    Image.new("RGB", (1, 1), "blue").save(folder / "dot.png")
    content = (folder / "good.png").read_bytes()
    (folder / "empty.png").write_bytes(b"")
    (folder / "cut.png").write_bytes(content[: len(content) // 2])
    (folder / "text.jpg").write_text("no picture")
    header = bytearray(b"BM" + bytes(52))
    header[10] = 54
    header[14] = 40
    header[26] = 1
    header[28] = 24
    header[18:22] = header[22:26] = (20_000).to_bytes(4, "little")
    (folder / "bomb.bmp").write_bytes(header)


GOOD = {"good", "cmyk", "grey", "palette", "moving", "deep", "dot"}
BAD = {
    "empty.png": "is empty",
    "cut.png": "damaged or truncated",
    "text.jpg": "not an image",
    "bomb.bmp": "megapixels",
}


def test_odd_files_work_or_say_why_and_the_others_still_get_done(
    tmp_path: Path, typed: Typed
) -> None:
    (tmp_path / "photos").mkdir()
    make_odd_files(tmp_path / "photos")
    code, out, err = typed("photos", "missing.jpg", "--target", "66")
    assert code == 1
    errors = [line for line in err if not line.startswith("note: ")]
    assert len(errors) == len(BAD) + 1
    for name, message in [*BAD.items(), ("missing.jpg", "does not exist")]:
        assert any(name in line and message in line for line in errors), name
    written = {
        p.name.removesuffix("-tiny-tabby-cat-gradcam.png") for p in Path("explained").glob("*.png")
    }
    assert written == GOOD
    assert len(list(Path("explained").iterdir())) == 3 * len(GOOD)
    assert not any("Traceback" in line for line in out + err)
    with Image.open("explained/dot-tiny-tabby-cat-gradcam.png") as drawn:
        assert drawn.width >= 1


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

def lost():
    return open("own weights.pt")
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
        (["--model", "own_net:lost"], "raised FileNotFoundError"),
        (["--model", "broken_net:Net"], "raised SyntaxError"),
        (["--model", "own_net:Net", "--labels", "gap.txt"], "but line 2 is empty"),
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
    (tmp_path / "gap.txt").write_text("cat\n\ndog\n")
    (tmp_path / "three.txt").write_text("cat\ndog\ncow\n\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    code, _, err = typed(CAT, *arguments)
    assert code == (2 if {"--layer", "--labels"} & set(arguments) else 1)
    assert len(err) == 1
    assert message in err[0]


def test_ones_own_model_with_weights_and_labels_works(
    tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net.py").write_text(OWN)
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    torch.manual_seed(0)
    main([CAT, "--model", "own_net:Net", "--target", "1"])
    import own_net  # type: ignore[import-not-found]

    torch.save(own_net.Net().state_dict(), "weights.pt")
    arguments = [
        "--weights",
        "weights.pt",
        "--labels",
        "labels.txt",
        "--method",
        "saliency",
        "--target",
        "dog",
    ]
    code, out, err = typed(CAT, "--model", "own_net:Net", *arguments)
    assert (code, err) == (0, [])
    assert {line.split()[0] for line in out[1:3]} == {"cat", "dog"}


def test_an_interrupt_is_one_line_and_its_own_code(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("explain.explanation.explainer.load_image", interrupt)
    code, _, err = typed(CAT)
    assert code == 130
    assert err == ["explain: interrupted"]


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
    Image.new("RGB", size, "orange").save("thin.png")
    for words in (
        ["thin.png", "-m", "gradcam", "-m", "saliency", "-m", "guidedbackprop"],
        ["concepts", "thin.png"],
    ):
        code, _, err = typed(*words)
        assert (code, err) == (0, [])
    with Image.open("explained/thin-tiny-gradcam.png") as drawn:
        assert drawn.height > size[1]
    assert (
        json.loads(Path("explained/thin-tiny-gradcam.json").read_text())["image"]["path"]
        == "thin.png"
    )


@pytest.mark.parametrize("command", [[], ["inspect"], ["concepts"]])
def test_names_that_would_steer_the_terminal_are_shown_harmlessly(
    command: list[str], typed: Typed
) -> None:
    good = "good\x1b[31m\nexplain: red\u2028.png"
    bad = "bad\x1b[2J\a\n.png"
    Image.new("RGB", (20, 20), "green").save(good)
    Path(bad).write_text("no image")
    code, out, err = typed(*command, good, bad)
    assert code == 1
    assert out[0].startswith(r"good\x1b[31m\nexplain: red\u2028.png")
    assert [line.startswith("note: ") or r"bad\x1b[2J\x07\n.png" in line for line in err] == [
        True
    ] * len(err)
    assert sum(line.startswith("explain: ") for line in err) == 1
    assert not set("".join(out + err)) & set("\x1b\a")


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


@pytest.mark.parametrize("command", [[], ["concepts"]])
def test_a_photo_too_large_for_the_memory_is_one_line_and_the_others_still_get_done(
    command: list[str], typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = explain.render.styles.place

    def short_of_memory(
        values: np.ndarray, size: tuple[int, int], *others: object, **named: object
    ) -> np.ndarray:
        if size == (500, 500):
            raise MemoryError
        return place(values, size, *others, **named)  # type: ignore[arg-type]

    for module in ("styles", "overlays"):
        monkeypatch.setattr(
            importlib.import_module(f"explain.render.{module}"), "place", short_of_memory
        )
    for name, side in (("large.png", 500), ("small.png", 20)):
        Image.new("RGB", (side, side), "green").save(name)
    code, out, err = typed(*command, "large.png", "small.png")
    assert code == 1
    assert out[0].startswith("small.png: ")
    complaints = [line for line in err if line.startswith("explain: ")]
    assert complaints == [
        (
            "explain: large.png: memory must hold the photo and what is drawn on it, but it ran out; "
            "resize the photo"
        )
    ]
    assert {path.name.split("-")[0] for path in Path("explained").iterdir()} == {"small"}


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
    ("options", "json_too"),
    [
        (["--method", "gradcam", "--method", "saliency", "--top-k", "2"], False),
        (["--method", "saliency", "--top-k", "2"], True),
        (["layers"], True),
        (["concepts"], False),
        (["inspect"], False),
        (["--layer", "stages.\x1b[2J"], False),
        (["--target", "\x1b[2J"], True),
    ],
)
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_labels_and_layers_that_would_steer_the_terminal_are_shown_harmlessly(
    options: list[str],
    json_too: bool,
    tmp_path: Path,
    typed: Typed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "hostile_net.py").write_text(HOSTILE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "hostile_net", raising=False)
    arguments = [
        *options,
        CAT,
        "--model",
        "hostile_net:Net",
        "--size",
        "16",
        *(["--json"] if json_too else []),
    ]
    code, out, err = typed(*arguments)
    assert all(printable(line) == line for line in out + err), out + err
    refused = options[0] in ("--layer", "--target")
    assert code == 2 * refused
    if json_too:
        document = json.loads("\n".join(out))
        assert bool(document["errors"]) == refused
        assert refused or json.dumps(RAW)[1:-1] in json.dumps(document)
    elif not refused:
        assert any(STEERING in line for line in out), out
    for record in Path("explained").glob("*.json"):
        assert all(printable(line) == line for line in record.read_text("utf-8").splitlines())
        told = json.loads(record.read_text("utf-8"))
        assert json.dumps(RAW)[1:-1] in json.dumps(told.get("predictions", told.get("concepts")))


def test_what_was_typed_is_complained_about_harmlessly(typed: Typed) -> None:
    code, _, err = typed(CAT, "--no\x1b[2Jsuch")
    assert code == 2
    assert err == [r"explain: No such option '--no\x1b[2Jsuch'; explain --help shows the options"]


def test_names_that_cannot_be_shown_stop_nothing_and_json_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = os.fsdecode(b"caf\xe9 \xe7\x8c\xab.png")
    Image.new("RGB", (20, 20), "green").save(tmp_path / "plain.png")
    (tmp_path / "plain.png").rename(tmp_path / strange)
    screens = {
        name: io.TextIOWrapper(io.BytesIO(), "ascii", "strict") for name in ("stdout", "stderr")
    }
    for name, screen in screens.items():
        monkeypatch.setattr(sys, name, screen)
    words = [
        strange,
        "x" * 300 + ".jpg",
        "--target",
        "0",
        "--method",
        "saliency",
        "--model",
        "tiny",
        "--json",
    ]
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
    missing, told = err
    assert "missing.png' does not exist" in missing
    assert told == (
        "explain: a.png: output folder 'explained' cannot be written: Read-only file system; "
        "change it; stopped, "
        "2 more not looked at"
    )
    code, out, _ = typed(*words, "a.png", "b.png", "--json")
    document = json.loads("\n".join(out))
    assert (document["results"], len(document["errors"])) == ([], 1)


def test_relevance_heeds_a_layer(typed: Typed) -> None:
    code, _, err = typed(CAT, "--method", "lrp", "--layer", "layer2")
    assert (code, err) == (0, [])
    assert np.load("explained/chelsea-tiny-lrp.npy").ndim == 2
