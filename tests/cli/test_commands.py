"""Commands beside options, options without effect, and messages in the words of the command
line."""

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


def test_the_version_is_an_option_and_a_command(typed: Typed) -> None:
    assert typed("--version") == typed("version") == (0, [f"explain {explain.__version__}"], [])


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["concepts", "a.png", "--alpha", "1"],
            "--alpha would have no effect with explain concepts",
        ),
        (["methods", "--model", "tiny"], "--model would have no effect with explain methods"),
        (["layers", "a.png", "a.png"], "layers are listed for one photo, got 2; name one, or none"),
        (
            ["inspect", "a.png", "--method", "gradcam"],
            "--method would have no effect with explain inspect; leave",
        ),
        (["inspect"], "name at least one image; explain inspect --help shows the options"),
        (
            ["a.png", "--fuse", "max"],
            "--fuse would have no effect: the maps of one layer are not fused; name several",
        ),
        (
            ["a.png", "--fuse", "max", "--layer", "layer2"],
            "--fuse would have no effect: the maps of one layer are not",
        ),
        (
            ["a.png", "-m", "saliency", "--layer", "layer2"],
            "--layer would have no effect: no layer is looked at",
        ),
        (
            ["a.png", "--bf16"],
            "--bf16 would have no effect: the model is run once for gradcam; leave it out",
        ),
        (
            ["a.png", "--batch-size", "3"],
            "--batch-size would have no effect: the model is run once for gradcam",
        ),
        (
            ["a.png", "--samples", "9"],
            "--samples would have no effect: nothing is estimated by gradcam; leave it out",
        ),
        (
            ["a.png", "-m", "occlusion", "--tolerance", "0.1"],
            "--tolerance would have no effect: nothing is estimated",
        ),
        (
            ["a.png", "-m", "saliency", "--alpha", "1"],
            "--alpha would have no effect: nothing is drawn as heat; leave",
        ),
        (
            ["a.png", "-m", "guidedbackprop", "--colormap", "jet"],
            "--colormap would have no effect: nothing is drawn",
        ),
    ],
)
def test_options_without_effect_are_refused(
    arguments: list[str], message: str, typed: Typed
) -> None:
    code, out, err = typed(*arguments)
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith(f"explain: {message}")
    assert not Path("explained").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fuse", "max", "--layer", "layer2", "--layer", "layer3"],
        ["--fuse", "max", "--layer", "layer[23]"],
        ["--fuse", "max", "-m", "refinecam"],
        ["--layer", "layer2", "-m", "saliency", "-m", "gradcam"],
        ["--batch-size", "4", "-m", "smoothgrad(samples=2)"],
        ["--alpha", "1", "-m", "saliency", "--style", "heat"],
        ["--max-seconds", "0.2", "-m", "partitionshap", "-m", "gradcam"],
    ],
)
def test_options_with_effect_are_taken(arguments: list[str], typed: Typed) -> None:
    code, _, err = typed("a.png", "--model", "tiny", "--size", "32", "--target", "1", *arguments)
    assert (code, err) == (0, [])


def test_budgets_are_those_of_every_method_that_estimates(typed: Typed) -> None:
    words = [
        "-m",
        "kernelshap",
        "-m",
        "rise",
        "-m",
        "gradcam",
        "--samples",
        "24",
        "--tolerance",
        "0.5",
    ]
    words += ["--max-seconds", "60"]
    code, _, err = typed("a.png", "--model", "tiny", "--size", "32", "--target", "1", *words)
    assert (code, err) == (0, [])
    for name in ("kernelshap", "rise"):
        record = json.loads(Path(f"explained/a-tiny-fishing-reel-{name}.json").read_text())
        assert {key: record["options"][key] for key in ("samples", "tolerance", "max_seconds")} == {
            "samples": 24,
            "tolerance": 0.5,
            "max_seconds": 60.0,
        }
        assert record["estimate"]["samples"] <= 24
    for wrong in ("0", "-1", "nan", "inf", "soon"):
        code, _, (told,) = typed("a.png", "-m", "rise", "--model", "tiny", f"--max-seconds={wrong}")
        assert code == 2
        assert re.match(r"explain: .*max.seconds.* (0.0|-1.0|'soon'|nan|inf)", told)
    few = typed(
        "a.png", "-m", "shapleysampling(regions=2)", "--samples", "1", "--force", "--model", "tiny"
    )[2]
    assert few[0].startswith("explain: ")
    assert "samples of shapleysampling must be at least 6" in few[0]


def test_methods_are_typed_with_their_options(typed: Typed) -> None:
    words = [
        "--method",
        "integratedgradients(steps=3, baseline=mean)",
        "--method",
        "smooth(gradcam, samples=2)",
    ]
    code, _, err = typed("a.png", "--model", "tiny", "--size", "32", "--target", "1", *words)
    assert (code, err) == (0, [])
    record = json.loads(Path("explained/a-tiny-fishing-reel-integratedgradients.json").read_text())
    assert (record["options"]["steps"], record["options"]["baseline"]) == (3, "mean")
    assert (
        json.loads(Path("explained/a-tiny-fishing-reel-smooth-gradcam.json").read_text())[
            "options"
        ]["samples"]
        == 2
    )
    assert typed("a.png", "--method", "integratedgradients(step=3)")[2] == [
        "explain: method integratedgradients has no option 'step'; did you mean 'steps'?"
    ]


def test_weights_come_as_safetensors_too(typed: Typed) -> None:
    model = explain.Explainer("tiny").model
    state = {name: tensor.contiguous() * 1 for name, tensor in model.state_dict().items()}
    header = {}
    data = b""
    kinds = {torch.float32: "F32", torch.int64: "I64"}
    for name, tensor in state.items():
        content = tensor.numpy().tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {
            "dtype": kinds[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        data += content
    text = json.dumps(header).encode()
    Path("own.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    common = ["a.png", "--model", "tiny", "--method", "saliency", "--target", "1"]
    assert typed(*common, "--weights", "own.safetensors", "-o", "own")[0] == 0
    assert typed(*common)[0] == 0
    own, plain = (
        explain.load(f"{folder}/a-tiny-fishing-reel-saliency.json")
        for folder in ("own", "explained")
    )
    assert torch.equal(own.values, plain.values)
    assert str(own.record["weights"]).startswith("own.safetensors (sha256 ")
    Path("own.safetensors").write_bytes(b"\xff" * 20)
    code, _, err = typed(*common, "--weights", "own.safetensors", "--force")
    assert (code, len(err)) == (2, 1)
    assert "weights 'own.safetensors'" in err[0]


def test_what_the_readme_and_the_command_line_write_is_ignored_by_git() -> None:
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text("utf-8").splitlines()}
    text = (ROOT / "README.md").read_text("utf-8")
    written = re.findall(r"\.save(?:fig)?\(\"([^\"/]+)/?\"", text) + re.findall(
        r"(?:--output|-o) (\S+)", text
    )
    assert "explained" in ignored
    assert [name for name in written if name not in ignored] == []
    assert len(written) >= 3


def test_the_boxes_that_a_detector_finds_are_printed_and_can_be_typed(typed: Typed) -> None:
    photo = str(ROOT / "assets" / "grace_hopper.jpg")
    code, out, err = typed(
        photo,
        "--model",
        "nanodet",
        "--method",
        "saliency",
        "--target",
        "tie",
        "--metric",
        "sparseness",
    )
    assert (code, err) == (0, [])
    found = re.findall(
        r"^  (\w+) +(\d+) %  box (-?\d+),(-?\d+),(-?\d+),(-?\d+)$", "\n".join(out), re.MULTILINE
    )
    assert [label for label, *_ in found] == ["person", "tie"]
    record = json.loads(Path("explained/grace_hopper-nanodet-tie-saliency.json").read_text("utf-8"))
    assert (record["label"], f"{100 * record['probability']:.0f}") == found[1][:2]
    text = f"box {','.join(found[1][2:])}"
    again = typed(
        photo, "--model", "nanodet", "--method", "saliency", "--target", text, "--json", "--force"
    )
    assert json.loads("\n".join(again[1]))["results"][0]["records"][0]["values"] == record["values"]


def test_what_a_detector_does_not_find_is_refused_with_what_it_does(typed: Typed) -> None:
    photo = str(ROOT / "assets" / "grace_hopper.jpg")
    code, out, (told,) = typed(photo, "--model", "nanodet", "--target", "dog@1")
    assert (code, out) == (2, [])
    assert "person, tie" in told


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
