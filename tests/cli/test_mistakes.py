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
    f"notes.txt {TINY}": (1, "notes.txt"),
    f"broken.png {TINY}": (1, "broken.png"),
    f"https://site.example/cat.png {TINY}": (1, "download"),
    TINY: (2, "image"),
    # the model
    "cat.png --model resnet5": (2, "resnet50"),
    "cat.png --model mine:model": (2, "mine"),
    "cat.png --model tiny --weights none.pt": (2, "none.pt"),
    "cat.png --model tiny --labels none.txt": (2, "none.txt"),
    f"cat.png {TINY} --device gpu": (2, "gpu"),
    f"cat.png {TINY} --crop middle": (2, "--crop"),
    # the question
    f"cat.png {TINY} --method gradcamm": (2, "'gradcam'"),
    f"cat.png {TINY} --method rise(n=3)": (2, "samples"),
    f"cat.png {TINY} --top-k 0": (2, "--top-k"),
    f"cat.png {TINY} --target 1000": (2, "199"),
    f"cat.png {TINY} --target taby": (2, "tabby"),
    f"cat.png {TINY} --layer layer9": (2, "layer3"),
    f"cat.png {TINY} --style heatmap": (2, "'heat'"),
    f"cat.png {TINY} --method saliency --alpha 0.5": (2, "--alpha"),
    f"cat.png {TINY} --methods gradcam": (2, "--method"),
    f"cat.png {TINY} --layer fc": (2, "must give a spatial map, got shape (1, 200)"),
    f"cat.png {TINY} --top-k 201": (2, "at most 200"),
    "cat.png --alpha much": (2, "'--alpha': 'much' is not a valid float"),
    "cat.png --fuse most": (2, "'--fuse': 'most' is not one of 'mean', 'max', 'product'"),
    "cat.png --colormap rainbo": (2, "did you mean 'rainbow'"),
    "cat.png --no\x1b[2Jsuch": (2, r"No such option '--no\x1b[2Jsuch'; explain --help shows"),
    "metods": (2, "did you mean 'explain methods'?"),
    # options without effect
    "concepts cat.png --alpha 1": (2, "--alpha would have no effect with explain concepts"),
    "methods --model tiny": (2, "--model would have no effect with explain methods"),
    "layers cat.png cat.png": (2, "layers are listed for one photo, got 2; name one, or none"),
    "cat.png --fuse max": (2, "--fuse would have no effect: the maps of one layer are not fused"),
    "cat.png -m saliency --layer layer2": (2, "--layer would have no effect: no layer is looked"),
    "cat.png --bf16": (2, "--bf16 would have no effect: the model is run once for gradcam"),
    "cat.png --batch-size 3": (2, "--batch-size would have no effect: the model is run once"),
    "cat.png --samples 9": (2, "--samples would have no effect: nothing is estimated by gradcam"),
    "cat.png -m guidedbackprop --colormap jet": (2, "--colormap would have no effect: nothing is"),
    # the output
    f"cat.png {TINY} --output there": (1, "--force"),
    f"cat.png {TINY} --output there/cat-tiny-gradcam.png": (1, "--force"),
    f"cat.png {TINY} --output notes.txt": (1, "notes.txt"),
    f"cat.png {TINY} --output /proc/nowhere": (1, "cannot be written"),
    f"cat.png {TINY} --output cat.gif": (2, "--output"),
    f"cat.png {TINY} --output cat.png --force": (2, "another file"),
    f"cat.png dog.png {TINY} --output map.png": (2, "several photos"),
    f"cat.png {TINY} --top-k 2 --output map.png": (2, "several targets"),
    f"cat.png {TINY} --method saliency --method gradcam --output map.png": (2, "several methods"),
    f"cat.png {TINY} --map-format npz --output map.png": (2, "--map-format"),
    # runs
    f"run empty {TINY} --output run.sqlite": (1, "empty"),
    "insight run.sqlite": (1, "run.sqlite"),
    "export notes.txt scores.csv": (1, "notes.txt"),
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
    name: str, begins: bytes, files: list[Path], typed: Typed
) -> None:
    question = ["cat.png", *TINY.split(" "), "--target", "7", "--output", name]
    code, out, err = typed(*question, "--json")
    assert (code, err) == (0, [])
    assert json.loads("\n".join(out))["results"][0]["files"] == [name]
    assert Path(name).read_bytes().startswith(begins)
    new = {path.name for path in Path().rglob("*")} - {path.name for path in files}
    assert new - {"new"} == {Path(name).name}
    if name.endswith("png"):
        explanation = explain.Explainer("tiny", size=32)("cat.png", target=7)
        expected = explanation.overlay(caption=True)
        assert Image.open(name).tobytes() == expected.tobytes()
    assert typed(*question)[0] == 1
    assert typed(*question, "--force")[0] == 0
