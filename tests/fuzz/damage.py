"""Run files that are damaged at random: each either gives what was stored, or says that it is
damaged.

>>> damaged(bytes(8), 0) == damaged(bytes(8), 0) != bytes(8)
True
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import explain
from explain import ExplainError
from tests.fuzz.files import ON_THE_WAY

KINDS = [
    "flip_bits",
    "overwrite_with_noise",
    "zero_a_range",
    "swap_the_halves",
    "cut_short",
    "delete_a_range",
]


def damaged(content: bytes, seed: int) -> bytes:
    """Return a file with bits flipped, or a piece overwritten, swapped or cut off; never the
    same."""
    draw = random.Random(seed)
    while (found := ON_THE_WAY[KINDS[seed % len(KINDS)]](draw, content)) == content:
        pass
    return found


def contents(file: Path) -> list[Any]:
    """All that a run gives of its rows, also by method, and how many there are."""
    run = explain.open_run(file)
    found: list[Any] = []
    for which in (None, *run.methods):
        for row in run.rows(which):
            plain = {name: value for name, value in vars(row).items() if not name.startswith("_")}
            found.append((repr(plain), row.values.numpy().tobytes(), tuple(row.values.shape)))
    return [len(run), run.photos, run.methods, *found]


def check(whole: Path, file: Path, seed: int) -> str:
    """Damage a copy of a run; return whether it gave the same or said in one line that it cannot.

    Raises:
        AssertionError: it gave something else, or another error came out.
    """
    expected = contents(whole)
    file.write_bytes(damaged(whole.read_bytes(), seed))
    try:
        found = contents(file)
    except ExplainError:
        return "refused"
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    finally:
        for beside in (file, *file.parent.glob(f"{file.name}-*")):
            beside.unlink(missing_ok=True)
    assert found == expected, f"seed {seed}: other rows came out unseen"
    return "same"
