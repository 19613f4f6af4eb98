"""`explain serve` on the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

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
