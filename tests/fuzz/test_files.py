"""Broken image files through the command line; `python examples/fuzz.py` does the same with
thousands of them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from explain.cli import main
from tests.fuzz import files


def test_broken_files_are_explained_or_refused_in_one_line_and_leave_nothing_half_done() -> None:
    summary = files.fuzz(40, seed=0)
    assert summary.failures == []
    assert min(summary.count("explained"), summary.count("refused")) > 8


def test_what_is_no_picture_is_refused() -> None:
    group = [
        files.Case(number, about, "no picture", content, f"f{number:05d}x.png")
        for number, (about, content) in enumerate(files.no_pictures().items())
    ]
    problems, refused = files.check(group)
    assert problems == []
    assert refused == group


def test_the_check_finds_results_that_are_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_written(arguments: list[str]) -> int:
        code = main(arguments)
        path = next(Path(arguments[arguments.index("--output") + 1]).glob("*.png"))
        path.write_bytes(path.read_bytes()[:-100])
        return code

    monkeypatch.setattr(files, "main", half_written)
    good = [case for case in islice(files.cases(0), 40) if case.is_good]
    problems, _ = files.check(good[:1])
    assert len(problems) == 1
