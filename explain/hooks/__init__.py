"""All hooks of the package: this room knows nothing of images, methods or pictures.

    group          `HookGroup`: every kind of hook, for as long as a block lasts
    capturing      `capture`: activations and gradients of layers, call by call
    extractor      `FeatureExtractor`: a model cut off after the last layer of interest
    inspection     `inspect` and `timeline`: a model as a table, and the order in which its hooks fire

The kinds of hooks, and what they are made of:

    module_hooks, state_hooks, graph_hooks
                   on modules, on state dicts and optimizers, on the graph
    full_backward  full-backward hooks that survive in-place operations
    handles        handles of hooks, and warnings about hooks that never fired
    registration   hooks as PyTorch stores them: for one thread and model, absent from copies
    guard          the checks around every hook: arity, shapes, in-place edits, errors with names

Models and graphs:

    layer_names    names, patterns and modules to layers, their calls and inputs
    unwrap         the module inside DataParallel and the like, its modules and their hooks
    modes          a model in evaluation mode, and copies with modes of their own
    preserve       a model, its caller and the settings of torch, left as they were
    graph          Nodes, entrances where gradients are replaced, histories given to tensors
    graph_start    where the graph begins in a pass that autograd does not record
    records        what is recorded of a layer's call
    attention      attention weights and their gradients, read from the graph
"""

from typing import TYPE_CHECKING

from explain._utils.errors import getattr_of
from explain.hooks.capturing import Capture, capture
from explain.hooks.extractor import FeatureExtractor
from explain.hooks.graph import accumulator, graph
from explain.hooks.group import HookGroup
from explain.hooks.handles import Handle
from explain.hooks.inspection import Inspection, Timeline, inspect, timeline
from explain.hooks.layer_names import select
from explain.hooks.modes import copied, evaluating
from explain.hooks.preserve import untouched
from explain.hooks.records import Record

__all__ = [
    "Capture",
    "FeatureExtractor",
    "Handle",
    "HookGroup",
    "Inspection",
    "Record",
    "Timeline",
    "accumulator",
    "capture",
    "copied",
    "evaluating",
    "graph",
    "inspect",
    "select",
    "timeline",
    "untouched",
]

if not TYPE_CHECKING:
    __getattr__ = getattr_of("hooks")
