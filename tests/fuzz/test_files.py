"""Broken image files through the command line; `python examples/fuzz.py` does the same with
thousands of them."""

from __future__ import annotations

from tests.fuzz import files


def test_broken_files_are_explained_or_refused_in_one_line_and_leave_nothing_half_done() -> None:
    summary = files.fuzz(16, seed=0)
    assert summary.failures == []
    assert min(summary.count("explained"), summary.count("refused")) > 3


def test_what_is_no_picture_is_refused() -> None:
    group = [
        files.Case(number, about, "no picture", content, f"f{number:05d}x.png")
        for number, (about, content) in enumerate(files.no_pictures().items())
    ]
    problems, refused = files.check(group)
    assert problems == []
    assert refused == group
