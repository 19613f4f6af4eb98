"""Run files that are damaged at random: each either gives what was stored, or says that it is damaged.

    python -m tests.fuzz.damage [--count 1000] [--seed 0]

>>> damaged(bytes(8), 0) == damaged(bytes(8), 0) != bytes(8)
True
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import explain
from explain import ExplainError

PAGE = 4096


def damaged(content: bytes, seed: int) -> bytes:
    """Return a file with a few bytes or bits changed, a piece overwritten, swapped or cut off; never the same."""
    draw = random.Random(seed)
    found = bytearray(content)
    for _ in range(100):
        KINDS[seed % len(KINDS)](draw, found)
        if bytes(found) != content:
            return bytes(found)
    raise AssertionError("no damage was done")


def _bit(draw: random.Random, content: bytearray) -> None:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def _bytes(draw: random.Random, content: bytearray) -> None:
    for _ in range(draw.randint(1, 20)):
        content[draw.randrange(len(content))] = draw.randrange(256)


def _zeros(draw: random.Random, content: bytearray) -> None:
    start, length = draw.randrange(len(content)), draw.randint(1, 600)
    content[start : start + length] = bytes(len(content[start : start + length]))


def _noise(draw: random.Random, content: bytearray) -> None:
    start, length = draw.randrange(len(content)), draw.randint(1, 600)
    content[start : start + length] = draw.randbytes(len(content[start : start + length]))


def _pages(draw: random.Random, content: bytearray) -> None:
    """Put one page in the place of another, as a disk does that loses a write."""
    one, other = (PAGE * draw.randrange(max(1, len(content) // PAGE)) for _ in range(2))
    content[one : one + PAGE] = content[other : other + PAGE]


def _cut(draw: random.Random, content: bytearray) -> None:
    del content[draw.randrange(len(content)) :]


KINDS: list[Callable[[random.Random, bytearray], None]] = [_bit, _bytes, _zeros, _noise, _pages, _cut]


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


def main() -> None:
    from tests.runs.networks import explainer, picture

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "run.sqlite")
        photos = [(picture(number), number % 5) for number in range(8)]
        made = explainer(categories=list("abcde"))
        explain.run(photos, made, ["gradcam", "saliency"], output=whole, metrics=["sparseness"], workers=0)
        seeds = range(options.seed, options.seed + options.count)
        print(dict(Counter(check(whole, Path(folder, "damaged.sqlite"), seed) for seed in seeds)))


if __name__ == "__main__":
    main()
