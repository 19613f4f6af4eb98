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
from explain.data.inputs import Inputs, Path
from explain.hooks import HookGroup
from explain.hooks.attention import AttentionRecord
from explain.hooks.capturing import LayerCall, read_outputs
from explain.hooks.graph import differentiate
from explain.recording import Recording, Value
from explain.recording.attention import attentions_in
from explain.recording.gradients import Gradients, reached_from
from explain.recording.images import image_numbers, images_elsewhere
from explain.recording.record import finished, record_until
from explain.recording.recorder import PassRecorder


@dataclass(eq=False)
class RecordedPass:
    """The recording of one pass of the engine."""

    count: int
    """The number of images."""
    images: Sequence[Value]
    """All values that have the images first."""
    sources: dict[Path, Value]
    """The explained inputs."""
    layers: Mapping[str, Sequence[Value]]
    """The first tensors that calls of layers returned."""
    _recorder: PassRecorder
    attention: Sequence[AttentionRecord] = ()
    """The attentions of the pass, if they were asked for, and their weights."""
    attention_weights: Sequence[Value] = ()
    _outputs: list[tuple[GradientEdge, Value]] = field(default_factory=list)
    """Where walks back begin: the copies in the model's output, each with its value."""

    @classmethod
    def begin(
        cls,
        stack: ExitStack,
        group: HookGroup,
        model: nn.Module,
        inputs: Inputs,
        explained: Mapping[Path, Tensor],
        layers: Iterable[str] = (),
    ) -> "RecordedPass":
        """Record what runs on ``inputs``, with the ``explained`` ones in the place of their own,
        until ``stack`` closes; of ``layers``, the outputs are noted."""
        recorder = PassRecorder(model)
        with_images, shared = inputs.split(explained)
        images = [recorder.add_input(tensor) for tensor in with_images]
        for tensor in shared:
            recorder.add_input(tensor)
        sources = {path: recorder.value_of(tensor) for path, tensor in explained.items()}
        values = read_outputs(group, layers, recorder.value_of)
        record_until(stack, recorder)
        return cls(
            count=len(inputs), images=images, sources=sources, layers=values, _recorder=recorder
        )

    def finish(self, output: Any, *, attention: bool = False) -> None:
        """End the recording with the model's output; with ``attention``, find its attentions."""
        # read first, since the recorder lets go of them at the end
        tensors = self._recorder.tensors if attention else {}
        self.recording: Recording = finished(self._recorder, output)
        if not attention:
            return
        attentions = attentions_in(self.recording.steps)
        images = self._image_numbers if attentions else {}
        self.attention_weights = [recorded.weights.value for recorded in attentions]
        records = []
        for recorded, weights in zip(attentions, self.attention_weights, strict=True):
            tensor = tensors.get(weights)  # in its graph, if it still holds the weights
            tensor = weights.tensor if tensor is None else tensor
            records.append(AttentionRecord(recorded, tensor, images))
        self.attention = records

    def keep_graph(self, explained: Mapping[Path, Tensor]) -> None:
        """Make the values of the recording again, with gradients that lead to the inputs and
        parameters."""
        tensors = dict(zip(self.sources.values(), explained.values(), strict=True))
        self.recording.run_with_graph(tensors)

    def begin_at(self, output: Any) -> Any:
        """The model's output, in which each tensor is a copy that walks back begin at."""
        # One output may be computed from another: the gradient in a copy is what a score takes from
        # this output alone.
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
    def _image_numbers(self) -> Mapping[Value, Tensor | None]:
        """Which image each value belongs to."""
        return image_numbers(self.recording.steps, self.images, self.count)

    @cached_property
    def image_labels(self) -> Mapping[Value, Tensor]:
        """Which image each value belongs to, where the images do not come first."""
        return {} if self.count == 1 else images_elsewhere(self._image_numbers, self.count)

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
