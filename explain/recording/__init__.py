"""One forward pass as a list of operations: what a network computes, asked below its names."""

from explain.recording.modes import OperatorCalls, Watcher
from explain.recording.operations import KnownOperation
from explain.recording.record import record
from explain.recording.recorder import PassRecorder
from explain.recording.recording import Recording, layer_names_of
from explain.recording.values import Step, Value

__all__ = [
    "KnownOperation",
    "OperatorCalls",
    "PassRecorder",
    "Recording",
    "Step",
    "Value",
    "Watcher",
    "layer_names_of",
    "record",
]
