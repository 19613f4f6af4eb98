"""All hook handles of the program are owned here; this room knows nothing of images, methods or pictures.

    unwrap         the module inside what is wrapped around it
    select         which modules a caller means
    structure      tensors in what modules take and return
    edits          whether a hook has edited a gradient in place
    guard          what surrounds every hook: arity, shapes, in-place edits, errors with names
    full_backward  full-backward hooks that survive in-place operations
    registered     hooks as PyTorch is given them: whose calls they act for; absent from copies
    gates          full-backward hooks on one module or on every one
    saved          hooks on saved tensors, in any order
    silence        hooks that never fired
    handles        handles of hooks, and the list that a group keeps
    on_modules, on_every_module, on_graph, on_state
                   the kinds of hooks
    group          every kind of hook, for as long as a block lasts
    graph          the autograd Nodes behind a tensor
    entrances      where a gradient leaves an operation that autograd does not differentiate
    places         what names of layers, their calls and their inputs stand for
    histories      what autograd knows of where a tensor came from, given to tensors that exist
    beginning      where the graph begins in a pass that autograd does not record
    records        what is recorded of a call; the tap
    capturing      activations and gradients of layers, call by call
    modes          a model in evaluation mode, and its own modes back
    ambient        the settings of torch, noted and given back
    preserve       a model and its caller left as they were found
    copies         a model without the modes and hooks of another
    present        whether a model has hooks, and whose

and the tools made of them:

    extractor a model cut off after the last layer of interest
    timeline       which hook fires when
    inspection     a model as a table
    attention      attention weights and their gradients, read from the graph

Names of two rooms below are offered here too, and load with their first use:

    GradientClipper, GradientFlow, Flow, DeadUnits    of `explain.training`
    distributed, packaging                            of `explain.distributed`
"""

from explain.hooks.capturing import Capture, capture
from explain.hooks.eager import behind_proxy, is_transforming
from explain.hooks.extractor import FeatureExtractor
from explain.hooks.graph import Answer, Entrance, accumulator, graph
from explain.hooks.group import HookGroup
from explain.hooks.handles import Handle
from explain.hooks.inspection import Inspection, Row, inspect
from explain.hooks.layer_names import LayerPlace, Where, name_of, place_of, select, select_places
from explain.hooks.modes import copied, evaluating
from explain.hooks.preserve import calculating, recording, untouched
from explain.hooks.records import Overwriting, Record, Source, Tap, TensorRecord, cut_where_allowed
from explain.hooks.registration import acting
from explain.hooks.timeline import Event, Timeline, timeline
from explain.hooks.unwrap import (
    callers_hooks,
    has_hooks,
    hookable,
    leaves,
    modules_of,
    parameters_of,
    scripted,
    unwrapped,
)

__all__ = [
    "Answer",
    "Capture",
    "Entrance",
    "Event",
    "FeatureExtractor",
    "Handle",
    "HookGroup",
    "Inspection",
    "LayerPlace",
    "Overwriting",
    "Record",
    "Row",
    "Source",
    "Tap",
    "TensorRecord",
    "Timeline",
    "Where",
    "accumulator",
    "acting",
    "behind_proxy",
    "calculating",
    "callers_hooks",
    "capture",
    "copied",
    "cut_where_allowed",
    "evaluating",
    "graph",
    "has_hooks",
    "hookable",
    "inspect",
    "is_transforming",
    "leaves",
    "modules_of",
    "name_of",
    "parameters_of",
    "place_of",
    "recording",
    "scripted",
    "select",
    "select_places",
    "timeline",
    "untouched",
    "unwrapped",
]
