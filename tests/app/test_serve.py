"""`explain serve` on the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

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
    headers = {"x-explain": "1", "x-name": "a.png"}
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("tiny: http://127.0.0.1:")
        url = line.split(": ", 1)[1].strip()
        with urllib.request.urlopen(url, timeout=60) as page:
            assert b"<title>explain</title>" in page.read()
        upload = urllib.request.Request(f"{url}api/photos", encoded(photo()), headers)
        with urllib.request.urlopen(upload, timeout=60) as reply:
            values = {"photo": json.load(reply)["photo"], "methods": ["rise"]}
        question = urllib.request.Request(f"{url}api/explain", json.dumps(values).encode(), headers)
        with urllib.request.urlopen(question, timeout=60) as answer:  # interrupted while it goes on
            assert b"work" in answer.readline()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert errors == ""
    assert list(tmp_path.iterdir()) == []
