"""Numbers of passes and steps, and code, that a page shows."""

from __future__ import annotations

import pytest
import torch

from explain.attribution.result import Attribution
from explain.methods import RISE
from explain.report.item import passes_run, steps_for
from explain.report.pages import page_of_words
from explain.report.reproduce import spelled_out
from tests.report.conftest import HOSTILE


def test_curves_of_many_maps_have_fewer_steps() -> None:
    assert [steps_for(maps) for maps in (1, 8, 12, 46)] == [20, 20, 13, 8]


def test_a_method_that_stopped_early_took_fewer_passes() -> None:
    one = torch.ones(1)
    options = {"spent": 8 * one, "planned": 20 * one}
    stopped = Attribution("rise", one, "score", one, None, (1,), **options, finished=one > 1)
    whole = Attribution("rise", one, "score", one, None, (1,), **options, finished=one > 0)
    assert [passes_run(21, stopped), passes_run(21, whole), passes_run(21, None)] == [9, 21, 21]


@pytest.mark.parametrize(
    ("as_python", "code"),
    [(True, "explain.methods.RISE(samples=500)"), (False, "rise(samples=500)")],
)
def test_a_method_is_spelled_as_code_or_as_it_is_typed(as_python: bool, code: str) -> None:
    assert spelled_out(RISE(samples=500), as_python=as_python) == code


def test_no_text_of_an_answer_becomes_markup() -> None:
    page = page_of_words(HOSTILE, ask=HOSTILE, sentence=[], words=[], meanings={})
    assert HOSTILE not in page
