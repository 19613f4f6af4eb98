"""Broken image files through the command line; `python examples/fuzz.py` does the same with
thousands of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest
from PIL import Image

from explain.cli import main
from tests.fuzz import command
from tests.fuzz.command import JSON, PLAIN, Mode, check, fuzz
from tests.fuzz.files import MUTATIONS, PLACES, Case, cases


def case(number: int, content: bytes, place: str = "plain", suffix: str = ".png") -> Case:
    return Case(number, "a picture", "unchanged", place, content, suffix, "0")


@pytest.fixture
def good(tmp_path: Path) -> bytes:
    Image.linear_gradient("L").resize((40, 30)).convert("RGB").save(tmp_path / "good.png")
    return (tmp_path / "good.png").read_bytes()


def test_broken_files_are_explained_or_refused_in_one_line_and_leave_nothing_half_done(
    tmp_path: Path,
) -> None:
    summary = fuzz(48, seed=0, keep=tmp_path)
    assert summary.failures == []
    assert summary.count("explained") + summary.count("refused") == 48
    assert min(summary.count("explained"), summary.count("refused")) > 8
    assert {mutation for mutation, _ in summary.results} == set(MUTATIONS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [PLAIN, JSON], ids=["lines", "JSON"])
def test_a_photo_is_found_wherever_it_lies_and_whatever_it_is_called(
    good: bytes, mode: Mode
) -> None:
    call = check([case(i, good, place) for i, place in enumerate(sorted(PLACES))], mode)
    assert call.problems == []
    refused = {c.place for c in call.cases if call.result(c) == "refused"}
    assert refused - {"forbidden"} == {
        "address",
        "below_a_file",
        "broken_link",
        "empty_folder",
        "missing",
    }


def test_the_files_depend_on_the_seed_alone() -> None:
    first, again, other = (list(islice(cases(seed), 40)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


Main = Callable[[Sequence[str]], int]


def half_written(arguments: Sequence[str]) -> int:
    code = main(arguments)
    folder = Path(arguments[arguments.index("--output") + 1])
    path = next(folder.glob("*.png"))
    path.write_bytes(path.read_bytes()[:-100])
    return code


def raising(arguments: Sequence[str]) -> int:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("broken", "problem"), [(half_written, "is not whole"), (raising, "ZeroDivisionError")]
)
def test_the_check_finds_what_is_broken(
    broken: Main, problem: str, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "main", broken)
    call = check([case(1, good), case(2, b"no picture", suffix=".txt")], PLAIN)
    assert any(problem in found for found in call.problems), call.problems
    assert call.result(call.cases[0]) == "failed"
