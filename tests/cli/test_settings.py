"""Settings in a file, lists without torch, completion, formats, how much is said, and several
models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import explain
from explain.cli import main
from explain.cli.commands import commands, options_from_file
from tests.cli.conftest import Typed

ALWAYS = ["--model", "tiny", "--size", "32"]


@pytest.fixture(autouse=True)
def _photos(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.radial_gradient("L").resize((64, 48)).save(tmp_path / name)


def test_options_of_a_file_are_defaults(typed: Typed) -> None:
    common = 'size = 32\nmodel = "tiny"\nmethod = ["saliency", "rise"]\nsamples = 8\nhtml = false\n'
    Path("pyproject.toml").write_text(f"[tool.explain]\n{common}[tool.explain.run]\nworkers = 0\n")
    assert main(["a.png"]) == 0
    assert explain.load("explained/a-tiny-rise.json").record["options"]["samples"] == 8
    # what is typed comes first; samples, which have no effect then, are no mistake in a file
    assert main(["a.png", "--method", "gradcam", "-o", "other"]) == 0
    assert [path.name for path in Path("other").glob("*.json")] == ["a-tiny-gradcam.json"]
    # which takes one method alone
    for command, methods in (("run", ["saliency", "rise"]), ("insight", "saliency")):
        assert options_from_file(commands.commands[command])[1]["method"] == methods
    mistakes = {
        'methd = "rise"': "option 'methd' is unknown; did you mean 'method'?",
        "top-k = 0": "Invalid value for '--top-k': 0",
        "size": "must hold TOML",
    }
    for toml, message in mistakes.items():
        Path("explain.toml").write_text(toml)
        code, _, (error,) = typed("a.png")
        assert (code, "explain.toml" in error, message in error) == (2, True, True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ru", "plain,run"),
        ("a.png --method gradcam+", "plain,gradcam++"),
        ("a.png --style ", "plain,heat plain,contour plain,mask plain,spotlight"),
        ("methods --", "plain,--json plain,--help"),
        ("a.p", "file,a.p"),
    ],
)
def test_words_are_completed(
    words: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("_EXPLAIN_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"explain {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" "))))
    assert main([]) == 0
    assert capsys.readouterr().out.split() == expected.split()


@pytest.mark.long
def test_small_formats_hold_the_same(typed: Typed) -> None:
    common = ["a.png", "-m", "saliency", "-m", "gradcam"]
    small = [*common, "--picture-format", "jpg", "--map-format", "npz", "-o", "small"]
    assert typed(*common)[0] == typed(*small)[0] == 0
    assert "skipped" in typed(*small, "--skip-existing")[1][1]
    one = explain.load("explained/a-tiny-saliency.json").values
    other = explain.load("small/a-tiny-saliency.json")
    assert 0 < (one - other.values).abs().max() / one.abs().max() < 2**-10
    assert torch.equal(other.repeat().results[0]["saliency"].values[0], one)
    with Image.open("small/a-tiny-sheet.jpg") as picture:
        assert picture.format == "JPEG"
    damaged = Path("small/a-tiny-saliency.npz")
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(explain.RecordError, match="values"):
        explain.load("small/a-tiny-saliency.json")


@pytest.mark.long
def test_models_are_compared(typed: Typed) -> None:
    models = ["tiny", "tiny-transformer"]
    code, out, err = typed("a.png", "--model", models[0], "--model", models[1], "--json", "--html")
    assert (code, err) == (0, [])
    result, sheet = json.loads("\n".join(out))["results"]
    assert result["models"] == models
    assert result["maps"][0]["elsewhere"]["tiny"] == 0
    pictures = {path.name for path in Path("explained").glob("*.png")}
    assert pictures == {"a-models.png", *(f"a-{name}-gradcam.png" for name in models)}
    page = Path(*sheet["files"]).read_text()
    assert all(f"<figcaption>a.png · {name}: " in page for name in models)
    code, _, (error,) = typed("a.png", "--model", "tiny", "--model", "tiny")
    assert (code, "--model tiny is one too many" in error) == (2, True)


@pytest.mark.long
def test_the_best_classes_of_the_first_model_are_compared(typed: Typed) -> None:
    models = ["tiny", "tiny-transformer"]
    typed("a.png", "--model", models[0], "--model", models[1], "--top-k", "4")
    maps = [explain.load(path) for path in Path("explained").glob("*.json")]
    assert (len(maps), len({saved.label for saved in maps})) == (8, 4)
