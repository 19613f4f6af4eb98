"""The command line in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from explain.cli import main

Typed: TypeAlias = Callable[..., tuple[int, list[str], list[str]]]
LISTS = ("methods", "metrics", "models", "version", "--version", "--help")


@pytest.fixture
def typed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> Typed:
    """Run a command with the words that a module's ``ALWAYS`` adds; its exit code, and the lines of
    both streams."""
    monkeypatch.chdir(tmp_path)
    always = getattr(request.module, "ALWAYS", [])

    def call(*words: str) -> tuple[int, list[str], list[str]]:
        more = [] if (words[:1] and words[0] in LISTS) or "--model" in words else always
        capsys.readouterr()
        code = main([*words, *more])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return call
