"""Saved explanations that are wrong in every way there is: a seeded generator, without end, and
what must come of it.

>>> from itertools import islice
>>> files = b'{"a": [1]}', b"values"
>>> list(islice(damaged(files, seed=0), 5)) == list(islice(damaged(files, seed=0), 5))
True
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import explain
from explain import ExplainError
from tests.fuzz.damage import CHANGES

Files = tuple[bytes, bytes]  # a record and its values
SAME = "read as it was saved"
REFUSED = "refused"

WAYS = sorted(CHANGES)
DEEP = 400  # containers inside each other, which JSON reads
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        2**31,
        2**63,
        2**70,
        -(2**70),
        10**400,
        1e308,
        float("nan"),
        float("inf"),
        1e-320,
    ),
    *(
        "",
        "\n",
        "\x1b[2J",
        "x" * 100_000,
        [],
        {},
        [[1]],
        [2**40, 2**40],
        [None] * 3,
        {"mapping": [[1]]},
        {"": {}},
    ),
    {"tensor": "", "dtype": "float32", "shape": [2**20, 2**20]},
    {"tensor": "!", "dtype": "nothing", "shape": ["a"]},
    {"tensor": "", "dtype": "float32", "shape": [2**62] * 60},
    {"category": 2**70, "label": "b"},
    {"class": "GradCAM", "options": {"nonsense": 1}},
    json.loads("[" * DEEP + "]" * DEEP),
    json.loads('{"tuple": [' * DEEP + "]}" * DEEP),
)


def damaged(saved: Files, seed: int) -> Iterator[tuple[str, Files]]:
    """Yield for ever what was done, and the files then; each depends on the seed and its own number
    alone."""
    record, values = saved
    number = 0
    while True:
        draw = random.Random(f"{seed} {number}")
        kind = number % 4
        if kind == 0:
            what, record_then = _odd_field(draw, record)
            yield f"{number}: {what}", (record_then, values)
        elif kind == 1:
            what, values_then = _odd_header(draw, values)
            yield f"{number}: {what}", (record, values_then)
        else:
            name = draw.choice(WAYS)
            change = CHANGES[name]
            both = (change(draw, record), values) if kind == 2 else (record, change(draw, values))
            yield f"{number}: {name} of the {'record' if kind == 2 else 'values'}", both
        number += 1


def _odd_field(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """Replace a field, however deep, by what it never holds."""
    record = json.loads(content)
    *outer, last = draw.choice(list(places(record)))
    inside = record
    for key in outer:
        inside = inside[key]
    odd = draw.randrange(len(ODD))
    inside[last] = ODD[odd]
    return f"{'.'.join(map(str, (*outer, last)))} = {ODD[odd]!r:.60}", json.dumps(record).encode()


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inside:
        yield (*before, key)
        yield from places(each, (*before, key))


def _odd_header(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """Give an array of NumPy a header that says something else of the same bytes."""
    shape = draw.choice(
        [(10**12,), (2**62, 2**62), (-1,), (0,), (), ("x",), (2**31, 1), (3, -3), (True,)]
    )
    kind = draw.choice(["<f4", "<f8", "|O", "|V1000000000", "nothing", "<U9"])
    header = f"{{'descr': {kind!r}, 'fortran_order': {draw.choice((True, False))}, 'shape': {shape!r}, }}".encode()
    version = draw.choice(((1, 0), (1, 0), (2, 0), (3, 0), (9, 9)))
    length = struct.pack(
        "<H" if version[0] == 1 else "<I", draw.choice((len(header), len(header), 0, 60_000))
    )
    return f"a header {header.decode()}", b"\x93NUMPY" + bytes(version) + length + header + content[
        -64:
    ]


def outcome(record: Path, contents: Files, first: Tensor) -> str:
    """Write the files, read them, and say what came of it; ``first`` is the array that was
    saved."""
    record.write_bytes(contents[0])
    record.with_suffix(".npy").write_bytes(contents[1])
    try:
        saved = explain.load(record)
        heatmap = saved.attribution.heatmap
    except ExplainError as error:
        return (
            REFUSED
            if "\n" not in str(error) and len(str(error)) < 2000
            else f"said {str(error)[:200]!r}"
        )
    except Exception as error:
        return f"raised {type(error).__name__}: {error!s:.200}"
    if not torch.equal(saved.values, first):
        return "gave other values"
    return SAME if heatmap.isfinite().all() else "gave a heatmap that is not finite"
