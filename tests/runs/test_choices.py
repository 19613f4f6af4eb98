"""How many photos are run at once, which are drawn, and how long the others take."""

from __future__ import annotations

import torch

from explain.runs.preparing import at_once
from explain.runs.result import choice
from explain.runs.runner import State


def test_large_inputs_make_small_batches() -> None:
    cpu = torch.device("cpu")
    assert at_once(torch.empty(3, 224, 224), cpu) == 8
    assert at_once(torch.empty(3, 64, 64), cpu) == 16


def test_choices_of_photos() -> None:
    assert choice("worst:50") == ("worst", 50)
    assert choice("source") == ("source", None)


def test_the_time_that_is_left() -> None:
    # 10 done of 100, 50 were there: 40 are left, at two a second
    state = State(10, 0, 50, 100, 5.0)
    assert state.rate == 2.0
    assert state.left == 20.0
