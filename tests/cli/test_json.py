"""`--json`: one document on standard output in every case, and nothing else there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import explain
from explain.cli import main
from tests.conftest import ROOT

TALKING = """
import os, sys
from explain.models.bundled import load_tiny

def make():
    print("downloading")
    os.write(1, b"from below\\n")
    sys.stdout.write("still downloading")
    return load_tiny(32)

def short():
    raise MemoryError

def stopped():
    raise KeyboardInterrupt

def broken():
    raise SystemError("not so")
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_photos_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talking.py").write_text(TALKING)
    for name in "ab":
        Image.linear_gradient("L").resize((20, 16)).save(tmp_path / f"{name}.png")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "talking", raising=False)
    monkeypatch.chdir(tmp_path)


def document(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, Any], list[str]]:
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    results: dict[str, Any] = json.loads(captured.out)
    return code, results, captured.err.splitlines()


@pytest.mark.parametrize(
    ("words", "code", "key", "error"),
    [
        ("", 2, "results", "name at least one image; explain --help shows the options"),
        ("inspect a.png --method gradcam", 2, "inspected", "--method would have no effect with"),
        ("models zzz", 2, "models", "model 'zzz' is unknown"),
        ("none.png --model tiny", 1, "results", "image 'none.png' does not exist"),
        ("a.png --model talking:short", 1, "results", "memory must hold the model and the photo"),
        ("a.png --model talking:stopped", 130, "results", "interrupted"),
        ("a.png --model talking:broken", 1, "results", "raised SystemError: not so"),
    ],
)
def test_what_goes_wrong_is_in_the_document_too(
    words: str, code: int, key: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, results, err = document(capsys, *words.split())
    assert (ended, set(results), results[key]) == (code, {key, "errors"}, [])
    assert len(results["errors"]) == len(err) == 1
    assert error in results["errors"][0]
    assert err[0] == f"explain: {results['errors'][0]}"


def test_lists_are_documents(capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = document(capsys, "methods", "integ*")[1]["methods"]
    assert (one["name"], one["options"]["rule"]) == ("integratedgradients", "gausslegendre")
    assert "tiny" in document(capsys, "models", "tin*")[1]["models"]
    layers = document(capsys, "layers", "--model", "tiny")[1]["layers"]
    assert [row["name"] for row in layers if row["default"]] == ["layer3"]
    assert document(capsys, "--version")[1] == {"version": [explain.__version__], "errors": []}
    (text,) = document(capsys, "inspect", "--help")[1]["help"]
    assert text.startswith("Usage: explain inspect")


def test_an_interrupt_amid_photos_keeps_what_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect = explain.Explainer.inspect

    def interrupted(explainer: explain.Explainer, photo: Any) -> Any:
        if "b.png" in photo.filename:
            raise KeyboardInterrupt
        return inspect(explainer, photo)

    monkeypatch.setattr(explain.Explainer, "inspect", interrupted)
    code, results, err = document(capsys, "inspect", "a.png", "b.png", "--model", "tiny")
    assert code == 130
    assert [row["image"] for row in results["inspected"]] == ["a.png"]
    assert results["errors"] == ["interrupted"]
    assert err == ["explain: interrupted"]


@pytest.mark.long
def test_what_others_print_goes_to_standard_error(tmp_path: Path) -> None:
    words = ["a.png", "--model", "talking:make", "-m", "saliency", "--json"]
    command = [sys.executable, "-W", "error", "-m", "explain.cli", *words]
    paths = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=paths, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["results"]) == 1
    assert sorted(done.stderr.splitlines()) == ["downloading", "from below", "still downloading"]
