"""All hooks of the package: this subpackage knows nothing of images, methods or pictures.

    group          `HookGroup`: hooks on modules, tensors and Nodes, for as long as a block lasts
    interventions  `Patch`, `Ablate`, `Steer`, `Project`, `Replace`: what a layer gives instead
    intervening    how they are applied; `intervene` itself stands in `explain.layers.intervening`,
                   which knows where layers look in the image
    capturing      `capture`: activations and gradients of layers, call by call, and where the graph
                   begins for them
    extraction     `FeatureExtractor`: a model cut off after the last layer of interest
    recorded       `record`: the operations of a pass, below Python's names
    inspection     `inspect` and `timeline`: a model as a table, and the order in which its hooks
                   fire

The kinds of hooks, and what they are made of:

    handles        their handles, and hooks as PyTorch stores them: for one thread, absent from
                   copies
    full_backward  full-backward hooks that survive in-place operations
    guard          the checks around every hook: arity, shapes, in-place edits, errors with names

Models and graphs:

    layer_names    names, patterns and modules to layers, their calls and inputs
    units          channels, tokens, heads and places of a layer, and where they are in its values
    unwrap         the module inside DataParallel and the like, its modules and their hooks
    preserve       a model, its caller and the settings of torch, left as they were; copies with
                   modes of their own
    graph          Nodes, and histories given to tensors
    attention, attention_parts
                   attention weights and their gradients, read from the graph; queries, keys,
                   values, weights and heads, while they are computed
"""

from typing import TYPE_CHECKING, Any

from explain.hooks.capturing import capture
from explain.hooks.extraction import FeatureExtractor
from explain.hooks.graph import graph
from explain.hooks.group import HookGroup
from explain.hooks.inspection import inspect, timeline
from explain.hooks.interventions import Ablate, Intervention, Patch, Project, Replace, Steer
from explain.hooks.preserve import copied
from explain.hooks.recorded import record

__all__ = [
    "Ablate",
    "FeatureExtractor",
    "HookGroup",
    "Intervention",
    "Patch",
    "Project",
    "Replace",
    "Steer",
    "capture",
    "copied",
    "graph",
    "inspect",
    "intervene",
    "record",
    "timeline",
]


def __getattr__(name: str) -> Any:
    if name == "intervene":
        from explain.layers.intervening import intervene

        return intervene
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if TYPE_CHECKING:
    from explain.layers.intervening import intervene
