"""A forward pass of the engine that is recorded: its steps, and which values are its inputs,
layers and results."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from explain._utils import nested
from explain.data.inputs import Path
from explain.hooks import HookGroup
from explain.hooks.capturing import LayerCall, read_outputs
from explain.hooks.graph import differentiate
from explain.recording import PassRecorder, Recording, Value
from explain.recording.attention import attentions_in
from explain.recording.gradients import Gradients, reached_from
from explain.recording.record import finished, record_until
from explain.recording.rows import images_elsewhere


@dataclass(eq=False)
class RecordedPass:
    """The recording of one pass of the engine.

    ``sources`` are the explained inputs, ``layers`` the first tensors that calls of layers
    returned.
    """

    count: int
    """The number of images."""
    sources: dict[Path, Value]
    layers: Mapping[str, Sequence[Value]]
    _recorder: PassRecorder
    _outputs: list[tuple[GradientEdge, Value]] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        stack: ExitStack,
        group: HookGroup,
        model: nn.Module,
        count: int,
        explained: Mapping[Path, Tensor],
        other_inputs: Iterable[Tensor],
        layers: Iterable[str],
    ) -> "RecordedPass":
        """Record what runs until ``stack`` closes.

        ``other_inputs`` are further inputs, on which values may depend; of ``layers``, the outputs
        are noted.
        """
        recorder = PassRecorder(model)
        sources = {path: recorder.add_input(tensor) for path, tensor in explained.items()}
        for tensor in other_inputs:
            recorder.add_input(tensor)
        values = read_outputs(group, layers, recorder.value_of)
        record_until(stack, recorder)
        return cls(count, sources, values, recorder)

    def finish(self, output: Any, explained: Mapping[Path, Tensor], *, with_graph: bool) -> None:
        """End the recording with the model's output.

        ``with_graph`` makes the values of the recording again, with gradients that lead to the
        inputs and parameters.
        """
        self.recording: Recording = finished(self._recorder, output)
        if with_graph:
            tensors = dict(zip(self.sources.values(), explained.values(), strict=True))
            self.recording.run_with_graph(tensors)

    def begin_at(self, output: Any) -> Any:
        """The model's output, in which each tensor is a copy that walks back begin at.

        One output may be computed from another: the gradient in a copy is what a score takes from
        this output alone.
        """
        copies: list[tuple[GradientEdge, Value]] = []

        def copied(path: nested.Path, tensor: Tensor) -> Tensor:
            """A copy of a tensor of the output."""
            if not tensor.requires_grad:
                return tensor
            copy = tensor.clone()
            copies.append((get_gradient_edge(copy), self.recording.outputs[path]))
            return copy

        replaced = nested.replace(output, copied)
        self._outputs = copies
        return replaced

    def of_layer(self, call: LayerCall) -> Value:
        """The value of the first tensor that a call of a layer returned."""
        return self.layers[call.layer][call.call]

    @cached_property
    def attention_weights(self) -> list[Value]:
        """The weights of the attentions of the pass, in their order."""
        return [attention.weights for attention in attentions_in(self.recording.steps)]

    @cached_property
    def rows(self) -> Mapping[Value, Tensor]:
        """Which image each value belongs to, where the images do not come first."""
        if self.count == 1:
            return {}
        return images_elsewhere(self.recording.steps, self.sources.values(), self.count)

    @cached_property
    def signals(self) -> set[Value]:
        """The values that a gradient leads from back to an explained input."""
        return reached_from(self.recording.steps, self.sources.values())

    def close(self) -> None:
        """Let go of the recording, which has answered all needs."""
        self._recorder.release()

    def gradients_of(self, total: Tensor, *, create_graph: bool) -> Gradients:
        """The gradients of a score in the values of the output that it is picked from."""
        edges = [edge for edge, _ in self._outputs]
        of_outputs = differentiate(total, edges, retain_graph=True, create_graph=create_graph)
        gradients: Gradients = {}
        for (_, value), gradient in zip(self._outputs, of_outputs, strict=True):
            if gradient is not None:
                earlier = gradients.get(value)
                gradients[value] = gradient if earlier is None else earlier + gradient
        return gradients
