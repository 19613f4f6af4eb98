"""Changes of a file's bytes, as they happen on the way; and what may come of a run file that is
damaged so: what was stored, or that it is damaged.

>>> damaged(bytes(8), 0) == damaged(bytes(8), 0) != bytes(8)
True
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import explain
from explain import ExplainError

Change = Callable[[random.Random, bytes], bytes]


def _flipped(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 2, 5, 200))):
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _of_range(change: Change) -> Change:
    def changed(draw: random.Random, content: bytes) -> bytes:
        start = draw.randrange(len(content))
        end = min(len(content), start + draw.choice((1, 4, 30, 500, 10_000)))
        return content[:start] + change(draw, content[start:end]) + content[end:]

    return changed


def _halves(draw: random.Random, content: bytes) -> bytes:
    middle = draw.randrange(len(content))
    return content[middle:] + content[:middle]


CHANGES: dict[str, Change] = {
    "flip_bits": _flipped,
    "overwrite_with_noise": _of_range(lambda draw, part: draw.randbytes(len(part))),
    "zero_a_range": _of_range(lambda draw, part: bytes(len(part))),
    "swap_the_halves": _halves,
    "cut_short": lambda draw, content: content[: draw.randrange(1, len(content))],
    "delete_a_range": _of_range(lambda draw, part: b""),
    "insert_noise": _of_range(lambda draw, part: draw.randbytes(len(part)) + part),
    "cut_at_the_start": lambda draw, content: content[draw.randint(1, 64) :],
    "append_garbage": lambda draw, content: content + draw.choice((b"\0", b"<html>", content)),
}
KINDS = [*CHANGES][:6]


def damaged(content: bytes, seed: int) -> bytes:
    """Return a file with bits flipped, or a piece overwritten, swapped or cut off; never the
    same."""
    draw = random.Random(seed)
    changed = content
    while changed == content:
        changed = CHANGES[KINDS[seed % len(KINDS)]](draw, content)
    return changed


def contents(file: Path) -> list[Any]:
    """All that a run gives of its rows, also by method, and how many there are."""
    run = explain.open_run(file)
    rows: list[Any] = []
    for which in (None, *run.methods):
        for row in run.rows(which):
            plain = {name: value for name, value in vars(row).items() if not name.startswith("_")}
            rows.append((repr(plain), row.values.numpy().tobytes(), tuple(row.values.shape)))
    return [len(run), run.photos, run.methods, *rows]


def check(whole: Path, file: Path, seed: int) -> str:
    """Damage a copy of a run; return whether it gave the same or said in one line that it cannot.

    Raises:
        AssertionError: it gave something else, or another error came out.
    """
    expected = contents(whole)
    file.write_bytes(damaged(whole.read_bytes(), seed))
    try:
        rows = contents(file)
    except ExplainError:
        return "refused"
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    finally:
        for beside in (file, *file.parent.glob(f"{file.name}-*")):
            beside.unlink(missing_ok=True)
    assert rows == expected, f"seed {seed}: other rows came out unseen"
    return "same"
