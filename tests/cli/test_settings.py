"""Settings in a file, lists without torch, completion, formats, how much is said, and several
models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
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
    toml = (
        'size = 32\nmodel = "tiny"\nmethod = ["saliency", "rise"]\nsamples = 8\nmean = [0.4, '
        "0.5, 0.6]\nhtml = false\n"
    )
    Path("pyproject.toml").write_text(
        f'[project]\nname = "x"\n[tool.explain]\n{toml}[tool.explain.run]\nworkers = 0\n'
    )
    assert main(["a.png", "--json"]) == 0
    # which is typed
    assert main(["a.png", "--method", "gradcam", "-o", "other", "--baseline", "blur"]) == 2
    record = json.loads(Path("explained/a-tiny-rise.json").read_text())
    assert record["options"]["samples"] == 8
    assert "mean=(0.4, 0.5, 0.6)" in record["preprocess"]
    assert typed("a.png", "--method", "gradcam", "-o", "other")[0] == 0
    assert {path.name for path in Path("other").glob("*.json")} == {"a-tiny-gradcam.json"}
    Path("explain.toml").write_text('method = ["saliency", "rise"]\n')
    # which takes one method alone
    for command, given in (("run", ["saliency", "rise"]), ("insight", "saliency")):
        assert options_from_file(commands.commands[command])[1]["method"] == given
    Path("explain.toml").write_text('methd = "rise"\n')
    assert typed("a.png")[::2] == (
        2,
        ["explain: explain.toml: option 'methd' is unknown; did you mean 'method'?"],
    )
    Path("explain.toml").write_text("top-k = 0\n")
    assert "explain.toml: Invalid value for '--top-k': 0" in typed("a.png")[2][0]
    Path("explain.toml").write_text("size")
    assert "explain.toml must hold TOML" in typed("a.png")[2][0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ru"], ["plain,run"]),
        (["a.png", "--method", "gradcam+"], ["plain,gradcam++"]),
        (
            ["a.png", "--style", ""],
            ["plain,heat", "plain,contour", "plain,mask", "plain,spotlight"],
        ),
        (["methods", "--"], ["plain,--json", "plain,--help"]),
        (["a.p"], ["file,a.p"]),
    ],
)
def test_words_are_completed(
    words: list[str],
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("_EXPLAIN_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(["explain", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert main([]) == 0
    assert capsys.readouterr().out.split() == expected


def test_small_formats_hold_the_same(typed: Typed) -> None:
    common = ["a.png", "-m", "saliency", "-m", "gradcam"]
    assert typed(*common)[0] == 0
    small = [*common, "--picture-format", "jpg", "--map-format", "npz", "-o", "small"]
    assert typed(*small)[0] == 0
    assert "skipped" in typed(*small, "--skip-existing")[1][1]
    one, other = (
        explain.load(f"{folder}/a-tiny-saliency.json") for folder in ("explained", "small")
    )
    error = (one.values - other.values).abs().max() / one.values.abs().max()
    assert 0 < error < 2**-10
    assert (np.asarray(other.repeat()["saliency"].values[0]) == one.values.numpy()).all()
    with Image.open("small/a-tiny-sheet.jpg") as picture:
        assert picture.format == "JPEG"
    total = {
        folder: sum(path.stat().st_size for path in Path(folder).iterdir())
        for folder in ("explained", "small")
    }
    assert total["small"] < 0.7 * total["explained"]
    damaged = Path("small/a-tiny-saliency.npz")
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(explain.RecordError, match="values"):
        explain.load("small/a-tiny-saliency.json")


def test_several_photos_have_a_line_each_unless_more_or_less_is_wanted(typed: Typed) -> None:
    code, out, _ = typed("a.png", "b.png", "--metric", "complexity")
    assert (code, len(out)) == (0, 3)
    assert out[0].startswith("a.png: ")
    assert "gradcam: complexity " in out[0]
    assert len(typed("a.png", "b.png", "--force", "--verbose")[1]) == 2 * 9 + 1
    assert typed("a.png", "b.png", "--force", "--quiet") == (0, [], [])
    code, out, err = typed("a.png", "none.png", "--force", "-q")
    assert (code, out, len(err)) == (1, [], 1)


def test_models_are_compared(typed: Typed) -> None:
    models = ["--model", "tiny", "--model", "tiny-transformer"]
    code, out, err = typed("a.png", *models, "--json", "--html")
    assert (code, err) == (0, [])
    found, sheet = json.loads("\n".join(out))["results"]
    assert sheet["files"] == ["explained/contact-sheet.html"]
    assert found["models"] == ["tiny", "tiny-transformer"]
    first, second = (each["records"][0] for each in found["by_model"])
    assert first["label"] == second["label"] == found["maps"][0]["target"]
    elsewhere = found["maps"][0]["elsewhere"]
    assert elsewhere["tiny"] == 0 < elsewhere["tiny-transformer"] <= 1
    for name in ("a-models", "a-tiny-gradcam", "a-tiny-transformer-gradcam"):
        assert Path(f"explained/{name}.png").is_file()
    page = Path("explained/contact-sheet.html").read_text()
    assert all(f"<td>a.png · {name}</td>" in page for name in ("tiny", "tiny-transformer"))
    code, _, err = typed("a.png", "--model", "tiny", "--model", "tiny")
    assert (code, "--model tiny is one too many" in err[0]) == (2, True)
