"""Commands beside options, and messages in the words of the command line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from PIL import Image

from explain.cli.commands import PHOTOS, commands
from tests.cli.conftest import Typed
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.linear_gradient("L").resize((20, 16)).save("a.png")


def test_methods_that_are_named_are_listed_with_their_options(typed: Typed) -> None:
    _, out, _ = typed("methods", "integ*")
    assert out[0] == "gradients"
    assert out[1].startswith("  integratedgradients ")
    assert (
        out[2].strip()
        == "options: steps=50, baseline=0.0, rule=gausslegendre, multiply_by_inputs=True"
    )
    _, out, _ = typed("methods", "finercam")
    assert "cam=gradcam" in out[2]
    assert typed("methods", "gradcan")[2] == [
        "explain: method 'gradcan' is unknown; did you mean 'gradcam' or 'xgradcam' or 'gradcam++'?"
    ]


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
    code, out, _ = typed(
        "a.png", "--target", "1", "--model", "tiny", "--method", "saliency", "--", "-b.png"
    )
    assert code == 0
    assert [line.split(": ")[0] for line in out[:2]] == ["a.png", "-b.png"]
    code, out, _ = typed(
        "--target", "1", "a.png", "--model", "tiny", "./-b.png", "--method", "saliency", "--force"
    )
    assert [line.split(": ")[0] for line in out[:2]] == ["a.png", "-b.png"]


def test_budgets_are_those_of_every_method_that_estimates(typed: Typed) -> None:
    common = ["a.png", "--model", "tiny", "--size", "32", "--target", "1"]
    words = "-m kernelshap -m rise -m gradcam --samples 24 --tolerance 0.5 --max-seconds 60"
    assert typed(*common, *words.split())[::2] == (0, [])
    for name in ("kernelshap", "rise"):
        record = json.loads(Path(f"explained/a-tiny-fishing-reel-{name}.json").read_text())
        options = record["options"]
        assert (options["samples"], options["tolerance"], options["max_seconds"]) == (24, 0.5, 60)
        assert record["estimate"]["samples"] <= 24
    for wrong in ("0", "nan", "soon"):
        code, _, (line,) = typed(*common, "-m", "rise", f"--max-seconds={wrong}")
        assert (code, wrong in line or "max_seconds" in line) == (2, True)


def test_the_boxes_that_a_detector_finds_are_printed_and_can_be_typed(typed: Typed) -> None:
    photo = str(ROOT / "assets" / "grace_hopper.jpg")
    common = ["--model", "nanodet", "--method", "saliency"]
    code, out, err = typed(photo, *common, "--target", "tie", "--metric", "sparseness")
    assert (code, err) == (0, [])
    boxes = re.findall(
        r"^  (\w+) +(\d+) %  box (-?\d+),(-?\d+),(-?\d+),(-?\d+)$", "\n".join(out), re.MULTILINE
    )
    assert [label for label, *_ in boxes] == ["person", "tie"]
    record = json.loads(Path("explained/grace_hopper-nanodet-tie-saliency.json").read_text("utf-8"))
    assert (record["label"], f"{100 * record['probability']:.0f}") == boxes[1][:2]
    text = f"box {','.join(boxes[1][2:])}"
    again = typed(photo, *common, "--target", text, "--json", "--force")
    code, out, (line,) = typed(photo, *common, "--target", "dog@1")
    assert (code, out) == (2, [])
    assert "person" in line
    assert "tie" in line
    assert json.loads("\n".join(again[1]))["results"][0]["records"][0]["values"] == record["values"]


def test_a_photo_needs_none_of_the_rooms_of_runs() -> None:
    files = ["commands", "output", "photos", "questions", "several", "views"]
    text = "".join((ROOT / "explain" / "cli" / f"{name}.py").read_text("utf-8") for name in files)
    assert (
        re.findall(
            r"import.*\b(runs|store|insight|app)\b|explain\.(runs|store|insight|app)\b.*import",
            text,
        )
        == []
    )


def test_threads_wait_passively_unless_the_caller_says_otherwise(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    typed("version")
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    typed("version")
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
