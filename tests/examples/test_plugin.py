"""Plug-ins: what an installed package adds is found by its name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PHOTO = str(ROOT / "assets" / "chelsea.png")
BROKEN = """[project]
name = "explain-broken"
version = "0.1"
[project.entry-points."explain.plugins"]
cracked = "explain_broken"
[tool.setuptools]
py-modules = ["explain_broken"]
"""


def install(source: Path, target: Path) -> None:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options]
    subprocess.run([*pip, str(target), str(source)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    source = shutil.copytree(ROOT / "examples" / "plugin", folder / "source")
    install(source, folder / "installed")
    return folder / "installed"


def run(*words: str, plugins: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(plugins), str(ROOT)])
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
def test_the_command_line_finds_what_a_plugin_adds(installed: Path, tmp_path: Path) -> None:
    command = ["-m", "explain.cli", PHOTO, "--model", "tiny", "--json"]
    wanted = ["--method", "peakcam", "--method", "lrp(composite=Peaks)", "--metric", "topshare"]
    found = run(*command, *wanted, plugins=installed, folder=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    (result,) = json.loads(found.stdout)["results"]
    assert {record["method"] for record in result["records"]} == {"peakcam", "lrp"}
    listed = run("-m", "explain.cli", "peaks", plugins=installed, folder=tmp_path)
    assert listed.stdout.split("\n")[0] == "peakcam"
    assert "peaks " in run("-m", "explain.cli", "--help", plugins=installed, folder=tmp_path).stdout


@pytest.mark.long
def test_python_finds_what_a_plugin_adds(installed: Path, tmp_path: Path) -> None:
    code = """
import torch, explain
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2)
)
x = torch.rand(1, 3, 8, 8)
a = explain.attribute(model, x, "peakcam", target=1, layer="1")
maps = model[:2](x)
gradient = model[3].weight[1].reshape(1, 4, 6, 6)
expected = (maps * gradient.amax((2, 3), keepdim=True)).sum(1).relu()
torch.testing.assert_close(a.values, expected)
table = explain.evaluate(model, x, "peakcam", "topshare", target=1)
assert 0 < float(table["peakcam"]["topshare"]) <= 1
covered = explain.attribute(model, x, "occlusion(window=8, baseline=brightest)", target=1)
brightest = x.amax((2, 3), keepdim=True).expand_as(x)
drop = (model(x) - model(brightest))[0, 1].detach()
torch.testing.assert_close(covered.values, drop.expand(1, 8, 8))
assert "peakcam" in explain.list_methods() and "topshare" in explain.list_metrics()
"""
    found = run("-c", code, plugins=installed, folder=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.long
def test_a_plugin_that_fails_is_named_in_one_warning(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(BROKEN)
    (source / "explain_broken.py").write_text("import a_module_that_is_gone\n")
    install(source, tmp_path / "installed")
    code = "import explain; explain.list_methods(); assert 'rise' in explain.list_methods()"
    found = run("-c", code, plugins=tmp_path / "installed", folder=tmp_path)
    assert found.returncode == 0
    assert found.stderr.count("ExplainWarning") == 1
    assert "'cracked' of explain-broken" in found.stderr
    assert "a_module_that_is_gone" in found.stderr
    listed = run("-m", "explain.cli", "methods", plugins=tmp_path / "installed", folder=tmp_path)
    assert listed.returncode == 0
    assert listed.stderr.count("explain-broken") == 1
