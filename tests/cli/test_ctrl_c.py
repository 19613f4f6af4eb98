"""Ctrl-C while the command line and the libraries that it needs are loaded."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import pytest
from PIL import Image

from tests.cli.conftest import Typed
from tests.conftest import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

LOADING = """
import sys

class Interrupted:
    def find_spec(self, name, *more):
        if name == "{name}":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from explain.cli import main
sys.exit(main(["version"]))
"""


@pytest.mark.parametrize("name", ["click", "explain._utils.errors", "explain.cli.lists"])
def test_an_interrupt_while_the_commands_are_loaded_has_no_traceback(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADING.format(name=name)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


MODULE = """
import os, signal, time
from pathlib import Path

os.kill(os.getpid(), signal.SIGINT)
for _ in range(3):
    time.sleep(0.04)
Path("loaded").touch()
from explain.models.bundled import load_tiny as make
"""


def test_an_import_is_not_split(typed: Typed, tmp_path: Path) -> None:
    Image.linear_gradient("L").save(tmp_path / "a.png")
    (tmp_path / "module.py").write_text(MODULE)
    before = signal.getsignal(signal.SIGINT)
    code, _, errors = typed("a.png", "--model", "./module.py:make")
    assert (code, errors) == (130, ["explain: interrupted"])
    assert (tmp_path / "loaded").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_command_leaves_the_handlers_of_its_caller(typed: Typed, tmp_path: Path) -> None:
    """The caller's own are not even replaced for a while: theirs hear of an interrupt."""
    Image.linear_gradient("L").save(tmp_path / "a.png")
    (tmp_path / "module.py").write_text(MODULE)
    came: list[str] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(signal.Signals(number).name)

    theirs = [signal.signal(number, handler) for number in numbers]
    try:
        for words in (["a.png"], ["run", ".", "--output", "run.sqlite", "--workers", "1"]):
            assert typed(*words, "--model", "./module.py:make")[0] == 0
            assert [signal.getsignal(number) for number in numbers] == [handler] * 3
            assert came[0] == "SIGINT"  # from the module, as it is imported
    finally:
        for number, handler_of_pytest in zip(numbers, theirs, strict=True):
            signal.signal(number, handler_of_pytest)


def test_an_import_that_does_not_end_is_split(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("explain.cli.interrupts.LONGEST", 0.01)
    Image.linear_gradient("L").save(tmp_path / "a.png")
    (tmp_path / "endless.py").write_text(MODULE.replace("range(3)", "range(1500)"))
    start = time.monotonic()
    code, _, _ = typed("a.png", "--model", "./endless.py:make")
    assert code == 130
    assert not (tmp_path / "loaded").exists()
    assert time.monotonic() - start < 50


@pytest.mark.long
def test_an_interrupt_at_any_time_is_one_line(tmp_path: Path) -> None:
    words = [str(ROOT / "assets" / "coffee.png"), "--model", "tiny"]
    code = "import sys; from explain.cli import main; print(flush=True); sys.exit(main())"
    draw = random.Random(0)
    for _ in range(30):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            cwd=tmp_path,
            env=ENVIRONMENT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with process:
            assert process.stdout is not None
            process.stdout.readline()  # Python itself has been loaded
            time.sleep(draw.uniform(0, 1.5))
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        assert process.returncode in (0, 130)
        assert errors in ("", "explain: interrupted\n")
