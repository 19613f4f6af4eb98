"""Commands beside options, options without effect, and messages in the words of the command line."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import explain
from explain.cli import main
from explain.cli.commands import COMMANDS
from tests.conftest import ROOT

PACKAGE = ROOT / "explain"


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.linear_gradient("L").resize((20, 16)).save("a.png")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], list[str]]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (["methods"], ["--list-methods"]),
        (["layers", "--model", "tiny"], ["--list-layers", "--model", "tiny"]),
        (["layers", "a.png", "--model", "tiny"], ["a.png", "--list-layers", "--model", "tiny"]),
        (
            ["concepts", "a.png", "-k", "2", "--model", "tiny"],
            ["a.png", "--concepts", "2", "--model", "tiny", "--force"],
        ),
        (["version"], ["--version"]),
    ],
)
def test_commands_and_options_say_the_same(
    command: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = run(capsys, *command), run(capsys, *flags)
    assert one == other
    assert (one[0], one[2]) == (0, [])
    assert one[1]


def test_inspect_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", "a.png", "--model", "tiny")
    assert (code, out[0]) == (0, "a.png")
    assert any("layer1" in line for line in out)


def test_methods_that_are_named_are_listed_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "methods", "integ*")
    assert out[0] == "gradients"
    assert out[1].startswith("  integratedgradients ")
    assert out[2].strip() == "options: steps=50, baseline=0.0, rule=gausslegendre, multiply_by_inputs=True"
    _, out, _ = run(capsys, "methods", "finercam")
    assert "cam=gradcam" in out[2]
    assert run(capsys, "methods", "gradcan")[2] == [
        "explain: method 'gradcan' is unknown; did you mean 'gradcam' or 'xgradcam' or 'gradcam++'?"
    ]


@pytest.mark.parametrize("name", [*COMMANDS])
def test_every_command_has_help_and_a_list_names_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, name, "--help")
    assert (code, err) == (0, [])
    assert out[0].startswith(f"usage: explain {name} [-h]")
    assert COMMANDS[name].about in " ".join(out)
    assert f"  explain {name:<10} {COMMANDS[name].about}" in run(capsys, "--help")[1]


def test_the_help_names_every_kind_of_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(" ".join(run(capsys, "--help")[1]).split())
    assert "efficientnet-lite0 (the default), tiny, " in text
    assert "a torchvision name, timm:NAME, or your own as package.module:factory" in text


def test_a_file_or_folder_with_the_name_of_a_command_wins(capsys: pytest.CaptureFixture[str]) -> None:
    Path("models").mkdir()
    Path("a.png").rename("models/b.png")
    code, out, err = run(capsys, "models", "--model", "tiny", "--method", "saliency", "--target", "1")
    assert (code, out[0]) == (0, "models/b.png")
    assert err == ["note: 'models' is taken for the file or folder of that name, not for the command models"]
    Image.new("RGB", (9, 9)).save("methods.png")
    Path("methods.png").rename("methods")
    assert run(capsys, "methods", "--model", "tiny", "--method", "saliency", "--target", "1")[1][0] == "methods"


def test_photos_and_options_come_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (9, 9), "red").save("-b.png")
    code, out, _ = run(capsys, "a.png", "--target", "1", "--model", "tiny", "--method", "saliency", "--", "-b.png")
    assert code == 0
    assert [line for line in out if not line.startswith(" ")][:2] == ["a.png", "-b.png"]
    code, out, _ = run(
        capsys, "--target", "1", "a.png", "--model", "tiny", "./-b.png", "--method", "saliency", "--force"
    )
    assert [line for line in out if not line.startswith(" ")][:2] == ["a.png", "-b.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.png", "--inspect", "--method", "gradcam"], "--method would have no effect with --inspect; leave"),
        (["a.png", "--inspect", "-o", "x", "--force"], "--force, --output would have no effect with --inspect"),
        (["a.png", "--inspect", "--layer", "layer1"], "--layer would have no effect with --inspect"),
        (["a.png", "--inspect", "--concepts", "2"], "--concepts would have no effect with --inspect"),
        (["a.png", "--concepts", "2", "--alpha", "1"], "--alpha would have no effect with --concepts"),
        (["--list-methods", "--model", "tiny"], "--model would have no effect with --list-methods"),
        (["a.png", "--list-models"], "images would have no effect with --list-models"),
        (["a.png", "a.png", "--list-layers"], "layers are listed for one photo, got 2; name one, or none"),
        (["inspect", "a.png", "--method", "gradcam"], "--method would have no effect with explain inspect; leave"),
        (["inspect"], "name at least one image; explain inspect --help shows the options"),
        (["a.png", "--fuse", "max"], "--fuse would have no effect: the maps of one layer are not fused; name several"),
        (["a.png", "--fuse", "max", "--layer", "layer2"], "--fuse would have no effect: the maps of one layer are not"),
        (
            ["a.png", "-m", "saliency", "--layer", "layer2"],
            "--layer would have no effect: no layer is looked at",
        ),
        (["a.png", "--bf16"], "--bf16 would have no effect: the model is run once for gradcam; leave it out"),
        (["a.png", "--batch-size", "3"], "--batch-size would have no effect: the model is run once for gradcam"),
        (["a.png", "--samples", "9"], "--samples would have no effect: nothing is estimated by gradcam; leave it out"),
        (
            ["a.png", "-m", "occlusion", "--tolerance", "0.1"],
            "--tolerance would have no effect: nothing is estimated by occl",
        ),
        (["a.png", "-m", "saliency", "--alpha", "1"], "--alpha would have no effect: nothing is drawn as heat; leave"),
        (["a.png", "-m", "guidedbackprop", "--colormap", "jet"], "--colormap would have no effect: nothing is drawn"),
    ],
)
def test_options_without_effect_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
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
def test_options_with_effect_are_taken(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "a.png", "--model", "tiny", "--size", "32", "--target", "1", *arguments)
    assert (code, err) == (0, [])


def test_budgets_are_those_of_every_method_that_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["-m", "kernelshap", "-m", "rise", "-m", "gradcam", "--samples", "24", "--tolerance", "0.5"]
    typed += ["--max-seconds", "60"]
    code, _, err = run(capsys, "a.png", "--model", "tiny", "--size", "32", "--target", "1", *typed)
    assert (code, err) == (0, [])
    for name in ("kernelshap", "rise"):
        record = json.loads(Path(f"explained/a-{name}.json").read_text())
        assert {key: record["options"][key] for key in ("samples", "tolerance", "max_seconds")} == {
            "samples": 24, "tolerance": 0.5, "max_seconds": 60.0,
        }  # fmt: skip
        assert record["estimate"]["samples"] <= 24
    for wrong in ("0", "-1", "nan", "inf", "soon"):
        assert run(capsys, "a.png", "-m", "rise", f"--max-seconds={wrong}")[2] == [
            f"explain: --max-seconds must be a number above 0, got {wrong!r}; explain --help shows the options"
        ]
    few = run(capsys, "a.png", "-m", "shapleysampling(regions=2)", "--samples", "1", "--force")[2]
    assert few[0].startswith("explain: ")
    assert "samples of shapleysampling must be at least 6 for 4 regions" in few[0]


def test_methods_are_typed_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["--method", "integratedgradients(steps=3, baseline=mean)", "--method", "smooth(gradcam, samples=2)"]
    code, _, err = run(capsys, "a.png", "--model", "tiny", "--size", "32", "--target", "1", *typed)
    assert (code, err) == (0, [])
    record = json.loads(Path("explained/a-integratedgradients.json").read_text())
    assert (record["options"]["steps"], record["options"]["baseline"]) == (3, "mean")
    assert json.loads(Path("explained/a-smooth-gradcam.json").read_text())["options"]["samples"] == 2
    assert run(capsys, "a.png", "--method", "integratedgradients(step=3)")[2] == [
        "explain: method integratedgradients has no option 'step'; did you mean 'steps'?"
    ]


def test_weights_come_as_safetensors_too(capsys: pytest.CaptureFixture[str]) -> None:
    model = explain.Explainer("tiny").model
    state = {name: tensor.contiguous() * 1 for name, tensor in model.state_dict().items()}
    header, data = {}, b""
    kinds = {torch.float32: "F32", torch.int64: "I64"}
    for name, tensor in state.items():
        content = tensor.numpy().tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    Path("own.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    common = ["a.png", "--model", "tiny", "--method", "saliency", "--target", "1"]
    assert run(capsys, *common, "--weights", "own.safetensors", "-o", "own")[0] == 0
    assert run(capsys, *common)[0] == 0
    own, plain = explain.load("own/a-saliency.json"), explain.load("explained/a-saliency.json")
    assert torch.equal(own.values, plain.values)
    assert str(own.record["weights"]).startswith("own.safetensors (sha256 ")
    Path("own.safetensors").write_bytes(b"\xff" * 20)
    code, _, err = run(capsys, *common, "--weights", "own.safetensors", "--force")
    assert (code, len(err)) == (2, 1)
    assert "weights 'own.safetensors'" in err[0]


# Rooms whose messages nobody sees who types a command, and single messages of others: what they ask for is Python.
FOR_CALLERS = {"training", "distributed", "metrics", "checks", "baselines", "hooks", "report"}
FOR_CALLERS_FILES = {
    "attribution/citation.py", "explanation/loading.py", "data/inputs.py", "relevance/composites.py", "__init__.py",
    "_utils/removed.py",
}  # fmt: skip
FOR_CALLERS_ALONE = {
    "see explain.list_methods()", "explain.Inputs(...", "use explain.attribute(model, x)", "explain.data.images.Box",
    "explain.targets.", "positive=False", "integratedgradients(steps=20)", "gradcam(relu=False)",
    "methods must name at least one method", "box=region)",
    "explain.Explainer(", "categories=... takes them", "targets= takes", "target= takes one",
    "explain.evaluate(", "blur(sigma=3)", "explain.open_run(",
    "explain.insight",  # where a name lives, which is no message
    "m.metric",  # part of a query
    "?token=", "charset=utf-8",  # parts of addresses and of headers
}  # fmt: skip


def spoken(path: Path) -> list[str]:
    """The texts of a file that ask for something in the words of Python, but for docstrings and those that `either`
    keeps for callers."""
    tree = ast.parse(path.read_text("utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    kept = [
        node
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "either"
        for node in ast.walk(call.args[0])
    ]
    left_out = docstrings | {id(node) for node in kept}
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in left_out]
    asks = re.compile(r"(?<![\w{'-])[a-z_]+=(?![\"'])|\bexplain\.\w+[.(]|\w+\(\.\.\.\)")
    return [text for text in texts if isinstance(text, str) and asks.search(text)]


def test_messages_on_the_command_line_do_not_ask_for_python() -> None:
    asked = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in FOR_CALLERS and path.relative_to(PACKAGE).as_posix() not in FOR_CALLERS_FILES:
            texts = [text for text in spoken(path) if not any(known in text for known in FOR_CALLERS_ALONE)]
            asked += [f"{path.relative_to(PACKAGE)}: {text}" for text in texts]
    assert asked == []


def test_the_same_message_speaks_to_callers_and_to_typists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("bare_net.py").write_text(
        "from tests.conftest import *\n\ndef make():\n    return settled(TinyNet()).eval()\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "bare_net", raising=False)
    common = ["a.png", "--model", "bare_net:make", "--method", "saliency"]
    code, _, err = run(capsys, *common, "--target", "cat", "--size", "16")
    assert code == 2
    assert "; give --size, --mean and --std, or give the model an attribute preprocess" in err[0]
    assert "the labels are not known; give --labels, or give the class index" in err[1]
    run(capsys, *common, "--target", "1", "--size", "16")
    _, _, err = run(capsys, *common, "--target", "1", "--size", "16")
    assert "choose another folder, or overwrite it with --force" in err[1]
    with pytest.raises(explain.TargetError, match="categories="):
        explain.attribute(torch.nn.Flatten(), torch.rand(1, 3, 2, 2), "saliency", target="cat")


def test_what_the_readme_and_the_command_line_write_is_ignored_by_git() -> None:
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text("utf-8").splitlines()}
    text = (ROOT / "README.md").read_text("utf-8")
    written = re.findall(r"\.save(?:fig)?\(\"([^\"/]+)/?\"", text) + re.findall(r"(?:--output|-o) (\S+)", text)
    assert "explained" in ignored
    assert [name for name in written if name not in ignored] == []
    assert len(written) >= 3
