"""The table of operations: what is known of PyTorch's functions by their names, for all who read a
forward pass.

A function, a method, an operator and an in-place method that compute the same have one name,
`operation_name`. What the table does not list is an operation without a kind and without traits.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch._ops import OpOverload, OpOverloadPacket

Trait = Literal[
    "rectifies",
    "linear",
    "effect",
    "query",
    "adds",
    "adds to first",
    "biased",
    "fills",
    "fits second",
    "reshapes",
    "moves",
    "joins",
    "reduces",
    "greater",
    "less",
    "casts",
    "negates",
    "masks",
]
"""What an operation does:

* rectifies: lets positive values pass, by its name alone
* linear: linear in its first argument, and no rule is needed
* effect: does something besides computing, or cannot be repeated
* query: tells something about a tensor
* adds: a + b or a - b; adds to first: adds a product to its first argument
* biased: adds a bias to what is linear in the input, or normalised
* fills: takes nothing but the shape of its first argument; fits second: but the shape or type of
  its second
* reshapes: keeps the order of its first argument's values; moves: moves, repeats or selects them
* joins: concatenates or stacks tensors; reduces: combines the values along dimensions
* greater: compares a > b; less: compares a < b
* casts: keeps the sign, in another type; negates: inverts a mask; masks: may keep what a mask says
"""


ADDS = frozenset(["adds", "adds to first", "biased"])
"""What operations do that may add a constant."""


@dataclass(frozen=True)
class OperationInfo:
    """One row: the kind of step in the words of composites, the arguments in order, and the traits.

    The bias of a ``biased`` operation runs along dimension ``channels``; None means the last
    dimensions.
    """

    name: str
    kind: str | None = None
    arguments: tuple[str, ...] = ()
    traits: frozenset[Trait] = frozenset()
    channels: int | None = None

    def has(self, trait: Trait) -> bool:
        """Whether the operation has a trait, such as "rectifies"."""
        return trait in self.traits


def _read_table() -> Iterator[OperationInfo]:
    """The rows of the table of PyTorch's operations, one for each operation; a line of
    ``operations.csv`` may name several."""
    with Path(__file__).with_name("operations.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            traits: Any = frozenset(filter(None, row["traits"].split(", ")))
            assert traits <= set(get_args(Trait)), row
            channels = int(row["channels"]) if row["channels"] else None
            for name in row["names"].split():
                yield OperationInfo(
                    name, row["kind"] or None, tuple(row["arguments"].split()), traits, channels
                )


TABLE: dict[str, OperationInfo] = {row.name: row for row in _read_table()}
LINEAR = ("convolution", "dense", "matrixproduct", "batchnorm")
"""The kinds of steps that are linear maps."""
KINDS = tuple(sorted({row.kind for row in TABLE.values() if row.kind is not None} | {"other"}))
"""The kinds of steps, as conditions of composites name them; operations without a kind are
"other"."""
ALIASES = {
    "clip": "clamp",
    "clamp_min": "clamp",
    "max": "maximum",
    "fmax": "maximum",
    "min": "minimum",
    "fmin": "minimum",
    "multiply": "mul",
    "rmul": "mul",
    "imul": "mul",
}
RECTIFIER_NODES = {
    "PreluKernelBackward": "prelu",
    "RreluWithNoiseBackward": "rrelu",
    **{
        f"{n.title().replace('_', '')}Backward": n
        for n, row in TABLE.items()
        if row.has("rectifies")
    },
}
"""Rectifiers by the Nodes that they leave in the graph, whose names end in a number besides."""
SCALE_NODES = ("Sigmoid", "SignBackward", "Hardsigmoid", "Rsqrt", "Reciprocal", "Softmax")
"""Nodes whose results are gates, inverse deviations or weights of attention when something is
multiplied by them."""
LAYOUT_NODES = (
    "View",
    "UnsafeView",
    "Unsqueeze",
    "Squeeze",
    "Expand",
    "Transpose",
    "Permute",
    "Clone",
    "Reshape",
    "Split",
    "Select",
    "Slice",
    "Unbind",
    "ToCopy",
    "T",
)
"""Nodes of operations that give the values of their input in another layout."""
SCORE_NODES = (
    "_Entrance",
    "View",
    "UnsafeView",
    "Add",
    "Sub",
    "Mul",
    "Div",
    "MaskedFill",
    "Where",
    "Reshape",
    "Unsqueeze",
    "Squeeze",
)
"""Nodes of what is done to scores of attention before their softmax, and the entrances of other
recorders."""
_UNKNOWN = OperationInfo("")
_names: dict[Any, str] = {}


def info(name: str) -> OperationInfo:
    """The table's row of an operation, by its `operation_name`; a row without kind and traits if it
    is not listed."""
    return TABLE.get(name, _UNKNOWN)


def operation_name(func: Any) -> str:
    """The table's name of the operation that a function computes, the same for all spellings of it.

    The name of a library's operator has its namespace. Names are cached by function.

    >>> import torch, torch.nn.functional as F
    >>> operation_name(F.relu), operation_name(torch.Tensor.relu_), operation_name(torch.clip)
    ('relu', 'relu', 'clamp')
    >>> operation_name(torch.Tensor.__mul__), info("mul").kind
    ('mul', 'product')
    >>> operation_name(torch.ops.aten.relu.default)
    'relu'
    """
    name = _names.get(func)
    if name is None:
        # exported code calls "add.Tensor"
        name = str(getattr(func, "__name__", "")).split(".")[0].strip("_")
        name = _registered_name(func) or ALIASES.get(name, name)
        if getattr(func, "__module__", None) != "__main__" and len(_names) < 4096:
            _names[func] = name
    return name


def is_library_operator(name: str) -> bool:
    """Whether an operation's name is that of an operator that a library registered:
    ``library::operator``."""
    return "::" in name


def is_opaque(name: str) -> bool:
    """Whether nobody can look into an operation: an operator of a library that the table does not
    know, or a gradient that the model itself takes."""
    return name == "grad" or (is_library_operator(name) and name not in TABLE)


def _registered_name(func: Any) -> str | None:
    """The name ``library::operator`` of an operator that a library registered with PyTorch; None
    for other functions and PyTorch's own operators."""
    if isinstance(func, OpOverload):
        name = func._schema.name
    elif isinstance(func, OpOverloadPacket):
        name = func._qualified_op_name
    else:
        return None
    return None if name.startswith("aten::") else name


def operator_of_node(node_name: str) -> str | None:
    """The operator, registered by a library with its derivative, that left an autograd Node of this
    name; None for other Nodes.

    >>> operator_of_node("GeneratedBackwardFor_some_library_some_operator_defaultBackward")
    'some_library_some_operator'
    """
    if node_name.startswith(_OF_PYTHON):
        name = node_name.removeprefix(_OF_PYTHON).rpartition("_")[0]  # without "defaultBackward"
        splits = (f"{name[:i]}::{name[i + 1 :]}" for i, letter in enumerate(name) if letter == "_")
        return next(
            (split for split in splits if torch._C._jit_get_schemas_for_operator(split)), name
        )
    if _OF_CPP not in node_name:
        return None
    name = (
        node_name.partition(_OF_CPP)[2]
        .rpartition(">")[0]
        .rpartition("::")[2]
        .removesuffix("Function")
    )
    return next(
        (row for row in TABLE if row.rpartition("::")[2].replace("_", "") == name.lower()), name
    )


_OF_PYTHON = "GeneratedBackwardFor_"
_OF_CPP = "CppNode<"
"""How the Nodes are called of operators whose derivatives are registered in Python and in C++."""
