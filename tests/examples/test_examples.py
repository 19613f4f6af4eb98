"""The scripts in examples/ do what they say, say where they wrote what, and fail in one line."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import explain
from tests.conftest import ROOT
from tests.hooks.test_tour import example

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_no_example_has_the_name_of_a_module_that_others_import() -> None:
    """The folder of a script comes first on the path: packaging.py beside training.py would break
    Matplotlib."""
    names = {path.stem for path in EXAMPLES}
    assert not names & {*sys.stdlib_module_names, *packages_distributions()}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The training example, with a network of three layers and small batches."""
    module = example("training")
    monkeypatch.setattr(module, "DEPTH", 2)
    monkeypatch.setattr(module, "BATCH", 8)
    monkeypatch.setattr(module, "LAYERS", ["conv1", "conv2", "fc"])
    photos = module.from_photos
    monkeypatch.setattr(module, "from_photos", lambda: photos(per_photo=20))
    return module


def test_a_short_training_draws_each_loss_at_its_step(
    training: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = {}
    draw = training.draw
    monkeypatch.setattr(
        training,
        "draw",
        lambda runs: drawn.setdefault("figure", draw(drawn.setdefault("runs", runs))),
    )
    training.main(["--steps", "5", "--output", str(tmp_path / "a.png")])
    assert capsys.readouterr().out.endswith(f"written to {tmp_path / 'a.png'}\n")
    assert (tmp_path / "a.png").stat().st_size > 1000
    runs = [run for pair in drawn["runs"].values() for run in pair]
    panels = [axes for part in drawn["figure"].subfigs for axes in part.axes]
    lines = [
        line
        for axes in panels
        if axes.get_title().startswith("training loss")
        for line in axes.lines
    ]
    assert len(lines) == len(runs) == 4
    for run, line in zip(runs, lines, strict=True):
        assert len(run.losses) == 5
        steps, means = line.get_data()
        assert list(steps) == [1, 2, 3, 4, 5]
        np.testing.assert_allclose(means, np.cumsum(run.losses) / np.arange(1, 6))
    for axes in panels:
        if axes.get_title().startswith("gradient of the first layer"):
            assert all(list(line.get_xdata()) == [1, 2, 3, 4, 5] for line in axes.lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps"),
        (["--classes", "1"], "--classes"),
        (["--output", "nowhere/a.png"], "folder"),
        (["--output", "a.xyz"], "png"),
    ],
)
def test_training_refuses_at_once(
    training: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        training.main(arguments)
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])


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
TUTORIALS = [
    path
    for path in sorted((ROOT / "examples" / "gallery").glob("*.py"))
    if "assets" in path.read_text("utf-8")
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT / "examples")))
def test_every_script_has_help_and_begins_nothing(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    before = set(sys.modules)
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
    finally:
        for name in set(sys.modules) - before:
            if str(ROOT / "examples") in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]  # another script may have a neighbour of this name
    assert not ended.value.code
    assert "usage:" in capsys.readouterr().out
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "where", [ROOT, ROOT / "examples" / "gallery"], ids=["root", "its own folder"]
)
def test_tutorials_find_their_photos_wherever_they_are_started(
    path: Path, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(where)
    monkeypatch.setattr(sys, "argv", [os.path.relpath(path, where)])
    text = path.read_text("utf-8")
    assert "../" not in text
    [line] = re.findall(r"^assets = .*$", text, re.MULTILINE)
    known: dict[str, Any] = {"Path": Path, "sys": sys}
    exec(line, known)
    assert known["assets"].resolve() == ROOT / "assets"
    for name in re.findall(r'assets / "([^"]+)"', text):
        assert (known["assets"] / name).exists(), name


@pytest.mark.long
def test_two_processes_learn_the_same_in_every_way(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run("distributed.py", "--steps", "2")
    out = capfd.readouterr().out
    changes = dict(re.findall(r"^(\S.*?) {2,}.* (\S+)$", out, re.MULTILINE))
    for name, most in {
        "allreduce": 0,
        "hook (state, bucket)": 1e-6,
        "codec: halves, all-reduced": 1e-3,
    }.items():
        assert float(changes[name]) <= most
    assert "communication hook failed on rank 1 of 2: encode raised ValueError: this process" in out
    assert list(folder.iterdir()) == []


@pytest.mark.long
def test_a_packaged_model_is_explained_in_another_process(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run("packaged_model.py")
    out = capfd.readouterr().out
    assert "my_network goes in" in out
    assert "my_statistics is mocked" in out
    assert "Calibrated out of the archive: chelsea.png is " in out
    assert {Path(folder, name) for name in re.findall(r"written to (\S+)", out)} == set(
        folder.iterdir()
    )
    with pytest.raises(SystemExit, match="packaged_model"):
        run("packaged_model.py")


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
    lines = capsys.readouterr().out.splitlines()
    on_paper = {
        "gradient": (4, -5),
        "epsilon 1": (32 / 15, -8 / 3),
        "z+": (8 / 3, 0),
        "z+ without biases": (4, 0),
        "alpha 2 beta 1": (20 / 3, -12),
        "gamma 1": (248 / 75, -112 / 75),
        "w2 at the input": (2.6, 1.4),
        "flat at the input": (2, 2),
        "zB in [0, 2] at the input": (3, 1),
    }
    for name, (one, two) in on_paper.items():
        assert any(
            line.startswith(f"{name}: R(x1) = {one:.4g}, R(x2) = {two:.4g};") for line in lines
        ), name
    assert any(line.startswith("rescale: C(x1) = 7.8, C(x2) = -3.8;") for line in lines)


def test_verdicts_are_counted_and_written_into_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = example("verdicts")
    answers = {
        word: {"passed": word != "faithful", "figure": 0.0, "reason": ""} for word in module.WORDS
    }
    good = {
        word: {"passed": True if word != "stable" else None, "figure": 0.0, "reason": ""}
        for word in module.WORDS
    }
    lines = [
        {"photo": "a", "methods": {"gradcam": {"passed": True, "answers": good}}},
        {"photo": "b"},  # the model names another class
        {"photo": "c", "methods": {"gradcam": {"passed": False, "answers": answers}}},
    ]
    results = tmp_path / "results.jsonl"
    page = tmp_path / "page.md"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    page.write_text("before\n<!-- table: tiny -->\nold\n<!-- end -->\nafter\n", "utf-8")
    monkeypatch.setattr(module, "PAGE", page)
    module.main([str(tmp_path), str(results), "--count", "--update", "--model", "tiny"])
    row = "| gradcam | 2 | 50% (9% to 91%) | 100% | 100% | 50% | 100% |"
    assert capsys.readouterr().out.splitlines()[-1] == row
    assert page.read_text("utf-8").splitlines()[-3:] == [row, "<!-- end -->", "after"]
    with pytest.raises(SystemExit, match="place"):
        module.updated("nothing", "other", "")


@pytest.mark.long
def test_the_history_of_a_search_has_what_fewer_samples_find() -> None:
    module = example("smallest_evidence")
    explainer = explain.Explainer("tiny")
    model = module.Counted(explainer.model)
    x = explainer.as_input(ROOT / "assets" / "coffee.png")
    target = int(explainer.model(x).argmax())

    def found(**options: Any) -> Any:
        return module.by_sets(explain.methods.Sufficient(10, "zero", **options), model, x, target)

    whole = {"seconds": 1e9, "passes": 0} | found()
    assert len(whole["history"]) > 5
    for samples in (100, whole["history"][-1][0] - 1):
        fewer = found(samples=samples)
        then = module.at_budget(whole, samples)
        assert (then["size"], then["proof"]) == (fewer["size"], fewer["proof"])


def test_the_smallest_evidence_is_compared_on_the_same_photos(tmp_path: Path) -> None:
    module = example("smallest_evidence")
    history = [
        [0, 0.0, 0, 0.0],
        [2, 1.0, 5, 0.5],
        [100, 0.4, 105, 1.0],
        [300, 0.1, 305, 3.0],
        [390, 0.1, 395, 4.0],
    ]
    own = {
        "size": 0.1,
        "passes": 400,
        "seconds": 4.0,
        "proof": "minimal",
        "right": True,
        "history": history,
    }
    lines = [
        {"photo": "a", "way": "sufficient", **own},
        {"photo": "a", "way": "ReX", "size": 0.8, "passes": 200, "seconds": 3.0, "right": True},
        {"photo": "b", "way": "sufficient", **own},
    ]
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in lines), "utf-8")
    found = module.tables([file])
    rows = found["evidence-few"].splitlines()
    assert rows[2] == "| `sufficient` | 2 | 10.0% | 10.0% | 1.00 | 400 | 1.00 | 100.0% |"
    assert rows[5] == "| … 200 passes at most | 2 | 40.0% | 40.0% | 4.00 | 105 | 0.25 | 0.0% |"
    assert rows[6] == "| ReX | 1 | 80.0% | 80.0% | 8.00 | 200 | 0.75 | – |"
    assert (
        found["evidence-rex"].splitlines()[2]
        == "| few | 1 | 0.50 | 0.50 | 0.53 | 0.33 | 1 of 1 | 0.50 |"
    )
