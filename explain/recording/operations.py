"""The table of operations: what is known of the operators of a recording by their names, for all
who read it.

What the table does not list is an operation without a kind and without traits.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Trait = Literal[
    "adds",
    "adds to first",
    "biased",
    "cheap",
    "copies",
    "elementwise",
    "fills",
    "gates",
    "linear",
    "mixes",
    "monotone",
    "moves",
    "overwrites",
    "permutes",
    "pools",
    "rectifies",
    "reduces",
    "reshapes",
    "resizes",
    "samples",
    "selects",
    "stays",
]
"""What an operation does:

* adds: may add a constant; adds to first: adds a product to its first argument
* biased: adds a bias to what is linear in the input, or normalised
* cheap: costs less to run again than the memory of its result
* copies: gives what it is given
* elementwise: treats each value by itself, besides the operations that PyTorch calls pointwise
* fills: overwrites a tensor with a constant
* gates: makes of its argument a factor that is no signal itself: a gate, or an inverse deviation
* linear: linear in what it is given, as what moves, permutes and resizes too
* mixes: combines values along a dimension, and keeps it
* monotone: of single values: rises or falls with each argument, on either side of 0
* moves: moves, repeats or selects values; permutes: does the same at any size of a dimension
* overwrites: gives nothing of the tensor that it writes into
* pools: combines the values of windows of a map; resizes: gives it another size; samples: reads it
  where another argument says
* rectifies: lets positive values pass, as a ReLU and its relatives
* reduces: combines the values along dimensions
* reshapes: gives the same values in another shape
* selects: gives nothing outside of the range of what it is given, as what moves and permutes too
* stays: leaves values where they are, besides the operations that PyTorch calls pointwise
"""


@dataclass(frozen=True)
class KnownOperation:
    """One entry of the table: the kind of operation in the words of composites, the traits, and the
    range."""

    name: str
    kind: str | None = None
    traits: frozenset[Trait] = frozenset()
    range: tuple[float, float] | None = None
    """Of the results, whatever the arguments; given where the function is not cut off at its
    ends."""

    def has(self, trait: Trait) -> bool:
        """Whether the operation has a trait, such as "moves"."""
        return trait in self.traits


def _read_table() -> Iterator[KnownOperation]:
    """The rows of the table, one for each operation; a line of ``operations.csv`` may name
    several."""
    with Path(__file__).with_name("operations.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            traits: Any = frozenset(filter(None, row["traits"].split(", ")))
            assert traits <= set(get_args(Trait)), row
            ends: Any = tuple(map(float, row["range"].split())) or None
            for name in row["names"].split():
                yield KnownOperation(name, row["kind"] or None, traits, ends)


TABLE: dict[str, KnownOperation] = {row.name: row for row in _read_table()}
_UNKNOWN = KnownOperation("")


def known_operation(name: str) -> KnownOperation:
    """The entry of an operation by its name, `Step.name`; one without kind and traits if it is not
    listed."""
    return TABLE.get(name, _UNKNOWN)
