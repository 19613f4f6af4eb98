"""A recorded forward pass: what a network computed, step by step."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from explain._utils import nested
from explain._utils.errors import ArgumentError
from explain._utils.html import aligned, table_html
from explain.recording.values import Step, Value, last_uses

_HEADER = ("value", "operation", "shape", "layer")


@dataclass(eq=False, repr=False)
class Recording:
    """The operations of one forward pass in their order, with what they computed.

    No step writes in place. Views, and tensors that were written through others, are values of
    their own.
    """

    inputs: tuple[Value, ...]
    steps: tuple[Step, ...]
    outputs: dict[nested.Path, Value]
    """The values in the model's output, by the path to them."""
    output: Any = field(repr=False)
    """The model's output."""
    unseen: tuple[str, ...] = ()
    """What left the record, and may have come back as a constant."""
    scripted: frozenset[str] = frozenset()
    """The paths of scripted modules, whose parts are not seen."""

    def replay(self, *inputs: Tensor) -> Any:
        """Compute the steps on other inputs, and return the output.

        ``inputs`` are as many as were recorded, of the same shapes and types. What was random is as
        it was recorded. The gradient leads to inputs and parameters, where it is recorded.

        Raises:
            ArgumentError: an input is missing, or has another shape or type.
        """
        self._check(inputs)
        tensors: dict[Value, Tensor] = dict(zip(self.inputs, inputs, strict=True))

        def tensor_of(value: Value) -> Tensor:
            """The tensor of a value in this replay; parameters and constants are as recorded."""
            computed = tensors.get(value)
            return value.tensor if computed is None else computed

        last = last_uses(self.steps)
        outputs = set(self.outputs.values())
        for step in self.steps:
            with torch.set_grad_enabled(torch.is_grad_enabled() and step.has_gradient):
                results = step.run(tensor_of)
            tensors |= results
            for value in {*step.inputs, *results}:
                is_done = last.get(value) in (None, step)  # no later step reads it
                if is_done and value not in outputs:
                    tensors.pop(value, None)
        return nested.replace(self.output, lambda path, _: tensor_of(self.outputs[path]))

    def run_with_graph(self, inputs: Mapping[Value, Tensor]) -> None:
        """Compute the values of the recording again, with gradients that lead to ``inputs`` and to
        the parameters; `Value.tensor` gives these from now on."""
        for value, tensor in inputs.items():
            value.kept = tensor
        for step in self.steps:
            with torch.set_grad_enabled(step.has_gradient):
                results = step.run(lambda value: value.tensor)
            for value, tensor in results.items():
                value.kept = tensor

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        """How many operations and inputs there are, and what left the record."""
        words = [f"{len(self.steps)} operations", f"{len(self.inputs)} inputs"]
        return f"Recording({', '.join([*words, *self.unseen])})"

    def __str__(self) -> str:
        """A table of the operations: number, operation, shapes of its results, and layer."""
        return "\n".join(aligned([_HEADER, *self._rows()]))

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        return table_html(_HEADER, list(self._rows()))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """The rows of the table: the steps that lead to the output."""
        used = set(self.outputs.values())
        leading: list[Step] = []
        names = layer_names_of(self)
        for step in reversed(self.steps):
            if not used.isdisjoint(step.results):
                leading.append(step)
                used.update(step.inputs)
        for step in reversed(leading):
            results, _, call = str(step).partition(" = ")
            shapes = [value.shape for value in step.outputs if value in used]
            sizes = [" x ".join(map(str, shape)) or "number" for shape in shapes]
            yield results, call, ", ".join(sizes), names[step]

    def _check(self, inputs: Sequence[Tensor]) -> None:
        """Check that inputs are as those that were recorded."""
        recorded = [(value.shape, value.dtype) for value in self.inputs]
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]
        if shapes != recorded:
            raise ArgumentError(
                f"inputs of replay must have the shapes and types of the record, {recorded}, got "
                f"{shapes}; record a pass with these"
            )


def layer_names_of(recording: Recording) -> dict[Step, str]:
    """The name of the layer that each step belongs to.

    This is the path of its module, followed by ``@1`` in the second call, and so on. What no module
    ran, or a scripted one, whose parts are not seen, is named by what it is: ``convolution_12`` is
    the convolution before which the recording has 12 others.

    >>> import torch
    >>> from explain.recording import record
    >>> recording = record(torch.nn.Tanh(), torch.ones(2))
    >>> list(layer_names_of(recording).values())
    ['tanh_0']
    """
    names = {}
    counts = Counter[str]()
    for step in recording.steps:
        name = step.module
        if not name or name in recording.scripted:
            name = ".".join(filter(None, [name, f"{step.name}_{counts[step.name]}"]))
        elif step.call:
            name = f"{name}@{step.call}"
        names[step] = name
        counts[step.name] += 1
    return names
