"""Every hook handle in the program is owned here; this room knows nothing of images, methods or pictures.

select     which modules a caller means
group      handles and their lifetime; module, tensor and Node hooks; the tap
graph      the autograd Nodes behind a tensor
capture    activations and gradients of layers
preserve   a model and its caller left as they were found
"""

from explain.hooks.capture import Capture, Record, first_tensor, replace_first
from explain.hooks.graph import graph
from explain.hooks.group import HookGroup, Tap
from explain.hooks.preserve import evaluating, untouched
from explain.hooks.select import Where, select

__all__ = [
    "Capture",
    "HookGroup",
    "Record",
    "Tap",
    "Where",
    "evaluating",
    "first_tensor",
    "graph",
    "replace_first",
    "select",
    "untouched",
]
