"""One forward pass as a list of operations: what a network computes, asked below its names."""

from explain.recording.record import record
from explain.recording.recording import Recording, layer_names_of
from explain.recording.values import Step, Value

__all__ = ["Recording", "Step", "Value", "layer_names_of", "record"]
