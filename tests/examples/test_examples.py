"""The scripts in examples/ do what they say, say where they wrote what, and fail in one line."""

from __future__ import annotations

import os
import re
import runpy
import sys
from dataclasses import replace
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import explain
from tests.conftest import ROOT
from tests.hooks.test_tour import example, scripts_of

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_no_example_has_the_name_of_a_module_that_others_import() -> None:
    """The folder of a script comes first on the path: packaging.py beside training.py would break
    Matplotlib."""
    names = {path.stem for path in EXAMPLES}
    assert not names & {*sys.stdlib_module_names, *packages_distributions()}


@pytest.mark.long
def test_a_short_training_draws_its_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    training = example("training")
    photos = training.from_photos(per_photo=4)
    monkeypatch.setattr(training, "DEPTH", 2)
    monkeypatch.setattr(training, "LAYERS", ["conv1", "conv2", "fc"])
    monkeypatch.setattr(training, "from_photos", lambda: photos)
    training.main(["--steps", "2", "--output", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").stat().st_size > 1000


def run(name: str, *arguments: str) -> None:
    """Run a script as its user does, but in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder; what is started in it finds the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    return tmp_path


SCRIPTS = [
    path
    for path in sorted((ROOT / "examples").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text("utf-8")
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT / "examples")))
def test_every_script_has_help_and_begins_nothing(
    path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "from mixed import" in path.read_text("utf-8"):
        pytest.importorskip("statsmodels", reason="mixed models are those of statsmodels, an extra")
    neighbours = str(path.parent.relative_to(ROOT / "examples"))
    with scripts_of(neighbours), pytest.raises(SystemExit) as ended:
        run(str(path), "--help")
    assert not ended.value.code
    assert "usage:" in capsys.readouterr().out
    assert list(folder.iterdir()) == []


@pytest.mark.long
def test_two_processes_learn_the_same_in_every_way(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run("distributed.py", "--steps", "2")
    out = capfd.readouterr().out
    changes = dict(re.findall(r"^(\S.*?) {2,}.* (\S+)$", out, re.MULTILINE))
    assert float(changes["allreduce"]) == 0
    assert float(changes["codec: halves, all-reduced"]) <= 1e-3
    assert list(folder.iterdir()) == []


@pytest.mark.long
def test_a_packaged_model_is_explained_in_another_process(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run("packaged_model.py")
    out = capfd.readouterr().out
    assert "Calibrated out of the archive: chelsea.png is " in out
    written = {folder / name for name in re.findall(r"written to (\S+)", out)}
    assert written == {*folder.iterdir()}


@pytest.mark.parametrize("name", ["gallery.py", "targets.py", "training.py", "packaged_model.py"])
def test_an_example_fails_in_one_line(name: str, folder: Path) -> None:
    (folder / "file").write_text("")
    arguments = ["--open", "file/other"] if name == "packaged_model.py" else ["file/folder"]
    with pytest.raises(SystemExit) as raised:
        run(name, *arguments)
    assert re.fullmatch(rf"{name}: .*'?{arguments[-1]}'?.*", str(raised.value))


def test_relevance_by_hand_says_what_paper_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures were worked out on paper; each rule's are on the line that names it."""
    example("lrp_by_hand").main()
    out = capsys.readouterr().out
    for line in (
        "gradient: R(x1) = 4, R(x2) = -5;",
        "epsilon 1: R(x1) = 2.133, R(x2) = -2.667;",
        "z+: R(x1) = 2.667, R(x2) = 0;",
        "z+ without biases: R(x1) = 4, R(x2) = 0;",
        "alpha 2 beta 1: R(x1) = 6.667, R(x2) = -12;",
        "gamma 1: R(x1) = 3.307, R(x2) = -1.493;",
        "w2 at the input: R(x1) = 2.6, R(x2) = 1.4;",
        "flat at the input: R(x1) = 2, R(x2) = 2;",
        "zB in [0, 2] at the input: R(x1) = 3, R(x2) = 1;",
        "rescale: C(x1) = 7.8, C(x2) = -3.8;",
    ):
        assert f"\n{line}" in f"\n{out}"


def test_the_smallest_evidence_is_compared_on_the_same_photos() -> None:
    pairs = [({"size": size}, {"size": 0.1}) for size in (0.8, 0.2, None)]
    ratio = example("smallest_evidence").ratio([*pairs, ({"size": 0.5}, None)], "size")
    assert ratio == pytest.approx((0.8 + 0.2) / (0.1 + 0.1))


@pytest.mark.long
def test_the_history_of_a_search_has_what_fewer_samples_find() -> None:
    module = example("smallest_evidence")
    explainer = explain.Explainer("tiny")
    model = module.Counted(explainer.model)
    x = explainer.as_input(ROOT / "assets" / "coffee.png")
    target = int(explainer.model(x).argmax())
    search = explain.methods.Sufficient(10, "zero")
    whole = module.by_sets(search, model, x, target)
    fewer = module.by_sets(replace(search, samples=100), model, x, target)
    then = module.at_budget({"seconds": 1e9, "passes": 0} | whole, 100)
    assert (then["size"], then["proof"]) == (fewer["size"], fewer["proof"])
