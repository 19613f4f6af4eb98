"""Commands beside options, and messages in the words of the command line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

import explain
from explain.cli.commands import PHOTOS, commands
from tests.cli.conftest import Typed
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.linear_gradient("L").resize((20, 16)).save("a.png")


@pytest.mark.parametrize("name", [name for name in commands.commands if name != PHOTOS])
def test_every_command_has_help_and_a_list_names_it(name: str, typed: Typed) -> None:
    code, out, err = typed(name, "--help")
    assert (code, err) == (0, [])
    assert out[0].startswith(f"Usage: explain {name} [OPTIONS]")
    assert name in [line.split()[0] for line in typed("--help")[1] if line.startswith("  ")]


def test_the_name_of_a_command_is_the_command_whatever_files_there_are(typed: Typed) -> None:
    listed = typed("models")
    Path("models").mkdir()
    Path("a.png").rename("models/b.png")
    assert typed("models") == listed
    code, out, _ = typed("./models", "--model", "tiny", "--method", "saliency", "--target", "1")
    assert (code, out[0]) == (0, "models/b.png")


def test_photos_and_options_come_in_any_order(typed: Typed) -> None:
    Image.new("RGB", (9, 9), "red").save("-b.png")
    for words in (
        "a.png --target 1 --model tiny --method saliency -- -b.png",
        "--target 1 a.png --model tiny ./-b.png --method saliency --force",
    ):
        code, out, _ = typed(*words.split())
        assert (code, [line.split(": ")[0] for line in out[:2]]) == (0, ["a.png", "-b.png"])


def test_budgets_are_those_of_every_method_that_estimates(typed: Typed) -> None:
    common = "a.png --model tiny --size 32 --target 1 -m kernelshap -m rise -m gradcam"
    budgets = "--samples 24 --tolerance 0.5 --max-seconds 60"
    assert typed(*common.split(), *budgets.split())[::2] == (0, [])
    for name in ("kernelshap", "rise"):
        record = explain.load(f"explained/a-tiny-fishing-reel-{name}.json").record
        assert (
            record["options"].items()
            >= {"samples": 24, "tolerance": 0.5, "max_seconds": 60}.items()
        )
        assert record["estimate"]["samples"] <= 24
    for wrong in ("0", "nan"):
        code, _, (line,) = typed(*common.split(), "--output", "new", f"--max-seconds={wrong}")
        assert (code, "max_seconds" in line or wrong in line) == (2, True)


@pytest.mark.long
def test_the_boxes_that_a_detector_finds_are_printed_and_can_be_typed(typed: Typed) -> None:
    photo = str(ROOT / "assets" / "grace_hopper.jpg")
    common = ["--model", "nanodet", "--method", "saliency", "--target"]
    code, out, err = typed(photo, *common, "tie", "--metric", "sparseness")
    assert (code, err) == (0, [])
    pattern = r"^  (\w+) +\d+ %  (box (?:-?\d+,){3}-?\d+)$"
    boxes = dict(re.findall(pattern, "\n".join(out), re.MULTILINE))
    assert list(boxes) == ["person", "tie"]
    first = explain.load("explained/grace_hopper-nanodet-tie-saliency.json")
    assert typed(photo, *common, boxes["tie"], "-o", "again")[0] == 0
    (record,) = Path("again").glob("*.json")
    assert torch.equal(explain.load(record).values, first.values)
    code, out, (line,) = typed(photo, *common, "dog@1")
    assert (code, out) == (2, [])
    assert re.search("person.*tie", line)


@pytest.mark.long
def test_all_boxes_above_a_confidence_have_a_picture_each(typed: Typed) -> None:
    photo = str(ROOT / "assets" / "grace_hopper.jpg")
    common = [photo, "--model", "nanodet", "--method", "saliency", "--target", "all"]
    for words, expected in (([], {"person", "tie"}), (["--threshold", "0.6"], {"person"})):
        assert typed(*common, *words, "--force")[0] == 0
        records = [json.loads(path.read_text()) for path in Path("explained").glob("*.json")]
        assert {record["label"] for record in records} == expected
        assert len(list(Path("explained").glob("*-saliency.png"))) == len(expected)
        for path in Path("explained").iterdir():
            path.unlink()


def test_threads_wait_passively_unless_the_caller_says_otherwise(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    typed("version")
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    typed("version")
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
