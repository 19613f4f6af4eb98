"""`explain serve` on the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from explain.cli import main
from tests.app.conftest import encoded
from tests.conftest import ROOT
from tests.report.conftest import photo


@pytest.mark.long
def test_serve_answers_until_it_is_interrupted(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the app needs uvicorn: pip install -e '.[app]'")
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "explain.cli", "serve", "--model", "tiny", "--port", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        model, url = process.stdout.readline().strip().split(": ", 1)
        assert model == "tiny"

        def ask(path: str, body: bytes | None = None) -> Any:
            headers = {"x-explain": "1", "x-name": "a.png"}
            return urlopen(Request(f"{url}{path}", body, headers), timeout=60)

        with ask("") as page:
            assert b"<title>explain</title>" in page.read()
        with ask("api/photos", encoded(photo())) as reply:
            question = {"photo": json.load(reply)["photo"], "methods": ["rise"]}
        with ask("api/explain", json.dumps(question).encode()) as answer:
            assert b"work" in answer.readline()
            process.send_signal(signal.SIGINT)  # while it goes on
            _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_serve_leaves_the_handlers_of_its_caller() -> None:
    """And passes a signal on that has ended it."""
    pytest.importorskip("uvicorn", reason="the app needs uvicorn: pip install -e '.[app]'")
    came: list[int] = []
    ended = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def handler(number: int, frame: Any) -> None:
        came.append(number)

    def interrupt() -> None:
        while not ended.wait(0.5):  # the first may come before the server has begun
            os.kill(os.getpid(), signal.SIGINT)

    theirs = [signal.signal(number, handler) for number in numbers]
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        code = main(["serve", "--model", "tiny", "--port", "0"])
        ended.set()
        assert [signal.getsignal(number) for number in numbers] == [handler] * 2
    finally:
        for number, handler_of_pytest in zip(numbers, theirs, strict=True):
            signal.signal(number, handler_of_pytest)
    assert (code, set(came)) == (0, {signal.SIGINT})
