"""Mistakes that people make on the command line: one line and an exit code for each; and a picture
that is named as the output."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

import explain
from tests.cli.conftest import Typed

TINY = "--model tiny --size 32"
MISTAKES = {
    # the photo
    f"cats.png {TINY}": (1, "cats.png"),
    f"empty {TINY}": (1, "empty"),
    f"broken.png {TINY}": (1, "broken.png"),
    f"https://site.example/cat.png {TINY}": (1, "download"),
    TINY: (2, "image"),
    # the model
    "cat.png --model resnet5": (2, "resnet50"),
    "cat.png --model mine:model": (2, "mine"),
    "cat.png --model tiny --weights none.pt": (2, "none.pt"),
    # the question
    f"cat.png {TINY} --method gradcamm": (2, "'gradcam'"),
    f"cat.png {TINY} --method rise(n=3)": (2, "samples"),
    f"cat.png {TINY} --target taby": (2, "tabby"),
    f"cat.png {TINY} --layer layer9": (2, "layer3"),
    f"cat.png {TINY} --method saliency --alpha 0.5": (2, "--alpha"),
    f"cat.png {TINY} --methods gradcam": (2, "--method"),
    f"cat.png {TINY} --layer fc": (2, "must give a spatial map, got shape (1, 200)"),
    f"cat.png {TINY} --top-k 201": (2, "at most 200"),
    "cat.png --fuse most": (2, "'--fuse': 'most' is not one of 'mean', 'max', 'product', 'sum'"),
    "cat.png --colormap rainbo": (2, "did you mean 'rainbow'"),
    "cat.png --no\x1b[2Jsuch": (2, r"No such option '--no\x1b[2Jsuch'; explain --help shows"),
    "metods": (2, "did you mean 'explain methods'?"),
    # options without effect
    "concepts cat.png --alpha 1": (2, "--alpha would have no effect with explain concepts"),
    "methods --model tiny": (2, "--model would have no effect with explain methods"),
    "cat.png --recursive": (2, "--recursive would have no effect without a folder; name one"),
    "cat.png --slices 1:2": (2, "--slices"),
    "cat.png --figure a.txt": (2, "--figure must"),
    "cat.png --figure cat.png": (2, "exists already"),
    "cat.png --figure-width 8": (2, "--figure-width would have no effect"),
    "cat.png --window 40": (2, "--window"),
    "cat.png --force --skip-existing": (2, "--skip-existing"),
    "layers cat.png cat.png": (2, "layers are listed for one photo, got 2; name one, or none"),
    "cat.png --fuse max": (2, "--fuse would have no effect: the maps of one layer are not fused"),
    "cat.png -m saliency --layer layer2": (2, "--layer would have no effect: no layer is looked"),
    "cat.png --bf16": (2, "No such option '--bf16'"),
    "cat.png --samples 9": (2, "--samples would have no effect: nothing is estimated by gradcam"),
    "cat.png -m guidedbackprop --colormap jet": (2, "--colormap would have no effect: nothing is"),
    # the output
    f"cat.png {TINY} --output there": (1, "--force"),
    f"cat.png {TINY} --output notes.txt": (1, "notes.txt"),
    f"cat.png {TINY} --output /proc/nowhere": (1, "cannot be written"),
    f"cat.png {TINY} --output cat.gif": (2, "--output"),
    f"cat.png {TINY} --output cat.png --force": (2, "another file"),
    f"cat.png dog.png {TINY} --output map.png": (2, "several photos"),
    f"cat.png {TINY} --map-format npz --output map.png": (2, "--map-format"),
    # runs
    "insight run.sqlite": (1, "run.sqlite"),
}


@pytest.fixture
def files(tmp_path: Path, typed: Typed) -> list[Path]:
    """Two photos, files that are none, an empty folder, and results."""
    for name in ("cat.png", "dog.png"):
        Image.linear_gradient("L").resize((20, 16)).save(name)
    for name in ("notes.txt", "broken.png"):
        Path(name).write_text("hello")
    Path("empty").mkdir()
    Path("there").mkdir()
    for ending in ("png", "npy", "json"):
        Path(f"there/cat-tiny-gradcam.{ending}").write_text("before")
    return sorted(tmp_path.rglob("*"))


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_told_in_one_line(
    words: str, files: list[Path], typed: Typed, tmp_path: Path
) -> None:
    code, named = MISTAKES[words]
    said = typed(*words.split(" "))
    assert (said[0], said[1], len(said[2])) == (code, [], 1), said
    assert named in said[2][0]
    assert not re.search(r"object at 0x|Traceback|Error\b", said[2][0])
    assert sorted(tmp_path.rglob("*")) == files
    assert Path("there/cat-tiny-gradcam.png").read_text() == "before"


@pytest.mark.parametrize(
    ("name", "begins"),
    [("map.png", b"\x89PNG"), ("new/map.JPEG", b"\xff\xd8"), ("map.svg", b"<?xml")],
)
def test_the_output_may_be_the_name_of_one_picture(
    name: str, begins: bytes, files: list[Path], typed: Typed, tmp_path: Path
) -> None:
    question = ["cat.png", *TINY.split(" "), "--target", "7", "--output", name]
    code, out, err = typed(*question, "--json")
    assert (code, err) == (0, [])
    assert json.loads("\n".join(out))["results"][0]["files"] == [name]
    assert Path(name).read_bytes().startswith(begins)
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - set(files)
    assert written == {tmp_path / name}
    if name.endswith("png"):
        explanation = explain.Explainer("tiny", size=32)("cat.png", target=7)
        assert Image.open(name).tobytes() == explanation.overlay(caption=True).tobytes()
    assert typed(*question)[0] == 1
    assert typed(*question, "--force")[0] == 0
