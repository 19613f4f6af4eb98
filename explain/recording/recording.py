"""A recorded forward pass: what a network computed, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from explain._utils import nested
from explain._utils.errors import ArgumentError
from explain.recording.values import Step, Value, last_uses


@dataclass(eq=False)
class Recording:
    """The operations of one forward pass in their order, with what they computed.

    No step writes in place. Views, and tensors that were written through others, are values of
    their own.
    """

    inputs: tuple[Value, ...]
    steps: tuple[Step, ...]
    outputs: dict[nested.Path, Value]
    """The values in the model's output, by the way to them."""
    output: Any = field(repr=False)
    """The model's output."""
    unseen: tuple[str, ...] = ()
    """What left the record, and may have come back as a constant."""

    def replay(self, *inputs: Tensor) -> Any:
        """Compute the steps on other inputs, and return the output.

        ``inputs`` are as many as were recorded, of the same shapes and types. What was random is as
        it was recorded. The gradient leads to inputs and parameters, where it is recorded.

        Raises:
            ArgumentError: an input is missing, or has another shape or type.
        """
        self._check(inputs)
        tensors: dict[Value, Tensor] = dict(zip(self.inputs, inputs, strict=True))
        last = last_uses(self.steps)
        for step in self.steps:
            with torch.set_grad_enabled(torch.is_grad_enabled() and step.has_gradient):
                results = step.run(lambda value: tensors.get(value, value.kept))
            tensors |= results
            for value in {*step.inputs, *results}:
                is_done = last.get(value) in (None, step)
                if is_done and value not in self._kept_values:
                    tensors.pop(value, None)
        return nested.replace(
            self.output, lambda path, _: tensors.get(self.outputs[path], self.outputs[path].kept)
        )

    @property
    def _kept_values(self) -> set[Value]:
        return set(self.outputs.values())

    def _check(self, inputs: Sequence[Tensor]) -> None:
        """Check that inputs are as those that were recorded."""
        wanted = [(value.shape, value.dtype) for value in self.inputs]
        given = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]
        if given != wanted:
            raise ArgumentError(
                f"inputs of replay must have the recorded shapes and types {wanted}, got {given}; "
                "record the pass again for others"
            )
