"""Finds out how an output comes about: whether a softmax or sigmoid made it, and where in it the
scores are."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Token
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from explain._utils import nested
from explain._utils.errors import warn
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs
from explain.engine.ranges import Range, ranges_of
from explain.hooks.preserve import untouched
from explain.layers.stitched import Stitched
from explain.recording import Step, Value
from explain.recording.modes import Watcher
from explain.recording.recorder import PassRecorder
from explain.targets.base import READER, find_scores, summary_of_output
from explain.targets.outputs import (
    ROUNDING,
    Activation,
    FinalActivation,
    Outputs,
    adds_up,
    configured_activation,
    is_fractional,
    may_be_probabilities,
    outputs_like,
)

Read: TypeAlias = Callable[[Any, int], Tensor | None]
"""Takes a tensor from a model's output for so many images."""


class Origin(NamedTuple):
    """What a tensor came from: the range of its values, if it is known, and the steps with weights
    that lead to it."""

    range: Range | None
    weighted: int
    """One bit for each such step, so that sets of them are joined fast."""


def record_output(model: nn.Module, inputs: Inputs) -> tuple[Any, dict[int, Origin]]:
    """Run a model once, without gradients; return its output, and the origins of the tensors in it,
    by their ids. Those that were made past the record have none."""
    recorder = PassRecorder(model)
    for _, tensor in nested.paths((inputs.args, inputs.kwargs)):
        recorder.add_input(tensor)
    with untouched(model), torch.no_grad(), Watcher(recorder.watched), recorder:
        output = inputs.call(model)
    # also those that an object has as attributes
    tensors = nested.paths((output, getattr(output, "__dict__", None)))
    values = {id(tensor): recorder.value_of(tensor) for _, tensor in tensors}
    # what left the record may have come back as a constant
    blind = bool(recorder.unseen) or not any(value.depends for value in values.values())
    ranges = ranges_of(recorder.steps, blind=blind)
    weighted = _weighted_steps(recorder.steps, blind=blind)
    origins = {
        key: Origin(ranges.get(value), weighted.get(value, 0))
        for key, value in values.items()
        if not (blind and value.kind == "constant")
    }
    recorder.close()
    recorder.release()
    return output, origins


def _weighted_steps(steps: Sequence[Step], *, blind: bool) -> dict[Value, int]:
    """The steps with weights that lead to each value, as numbers with one bit for each. To the
    constants of a ``blind`` recording, all steps before may."""
    leading: dict[Value, int] = {}
    so_far = 0
    for number, step in enumerate(steps):
        of_step = 1 << number if _has_weights(step) else 0
        for value in step.inputs:
            of_step |= so_far if blind and value.kind == "constant" else leading.get(value, 0)
        so_far |= of_step
        leading |= dict.fromkeys(step.outputs, of_step)
    return leading


def _has_weights(step: Step) -> bool:
    """Whether a step has weights, or may have some that are not seen, as in compiled programs and
    operators of libraries."""
    if step.operation.kind in ("convolution", "matrixproduct") or "::" in step.name:
        return True
    return any(value.kind == "parameter" for value in step.inputs)


class OutputReader:
    """Says what the outputs of a model are, from a pass whose operations are watched. That pass is
    run when it is first needed: not for scores that cannot be probabilities."""

    def __init__(
        self, model: nn.Module, inputs: Inputs, activation: Activation | None, classes: int | None
    ) -> None:
        """Take what the caller says of the outputs (``activation``) and the number of ``classes``,
        if known; nothing is run. Of a `Stitched` model, the segmenter's first window is read."""
        self.model = model
        self.classes = classes
        self.given_activation = activation
        self._tokens: list[Token[Any]] = []
        """What puts back the readers of before, one for each block that is open."""
        self._key: list[Any] | None = None
        """The key of the tensor that has the scores, in a list; None until it is chosen."""
        self._ambiguous_output: str | None = None
        """What the model returned, where no operations were seen that tell features from
        scores."""
        self._network = model
        self._inputs = inputs
        # the averages of the windows' class maps come from the segmenter
        if isinstance(model, Stitched):
            self._network = model.model
            self._inputs = model.first(inputs)

    def __enter__(self) -> "OutputReader":
        """Make this the reader of model outputs within the block, for targets and `find_logits`.
        Readers may be nested; the innermost one counts."""
        self._tokens.append(READER.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        """Put back the reader of before, also after an error."""
        READER.reset(self._tokens.pop())

    @cached_property
    def activation(self) -> Activation | None:
        """What makes probabilities of the model's outputs, such as "softmax": what the caller gave,
        or else what the model's configuration says; None where neither does."""
        return self.given_activation or configured_activation(self.model)

    def outputs(self, values: Tensor, read: Read) -> Outputs:
        """Say whether scores ``values`` ``(N, K, ...)`` are logits or probabilities, and of which
        kind. ``read`` takes the same tensor from an output of the model."""
        return outputs_like(values, self.activation, partial(self._final_activation, values, read))

    def scores_key(self, candidates: Callable[[Any, int], Mapping[Any, Tensor]]) -> Any:
        """Choose which of the tensors in a model's output has the class scores; return its key in
        ``candidates``. The choice is kept for all outputs of this reader."""
        if self._key is None:
            output, origins = self._recorded
            tensors = candidates(output, len(self._inputs))
            steps = {
                key: origins[id(tensor)].weighted
                for key, tensor in tensors.items()
                if id(tensor) in origins
            }
            are_all_known = len(steps) == len(tensors)
            # tensors that others are computed from, by more steps with weights, are features
            if are_all_known:
                tensors = {
                    key: tensor
                    for key, tensor in tensors.items()
                    if not any(_is_part(steps[key], more_steps) for more_steps in steps.values())
                }
            widths = {
                key: tensor.shape[1] if tensor.ndim > 1 else 1 for key, tensor in tensors.items()
            }
            # as many columns as there are classes, or else the first
            fitting = [key for key, width in widths.items() if width == self.classes]
            self._key = (fitting if len(fitting) == 1 else list(tensors))[:1]
            if len(steps) < len(tensors) and len(fitting) != 1:
                self._ambiguous_output = summary_of_output(output)
        return self._key[0]

    def say_if_unsure(self) -> None:
        """Warn, once, if the class scores were chosen among several tensors of an output without a
        reason, as no operations were seen that tell features from scores."""
        if self._ambiguous_output is not None:
            must = (
                "model must say which of its outputs are class scores, as 'logits' in a dictionary"
            )
            warn(
                f"{must}, got {self._ambiguous_output}; the first is taken, "
                "give a callable target for another"
            )
        self._ambiguous_output = None

    @cached_property
    def _recorded(self) -> tuple[Any, dict[int, Origin]]:
        """The model's output in a recorded pass, and what its tensors came from; made once."""
        return record_output(self._network, self._inputs)

    def _final_activation(self, values: Tensor, read: Read) -> FinalActivation | None:
        """What made the scores ``values`` (a softmax, a sigmoid, their logarithm), or None: by the
        recorded operations, or by whether outputs for noise add up to one too."""
        output, origins = self._recorded
        tensor = read(output, len(self._inputs))
        # that of the tensor, or of what it is a view of
        origin = origins.get(id(tensor)) or origins.get(id(getattr(tensor, "_base", None)))
        final = (
            None if origin is None or origin.range is None else _final_activation_in(origin.range)
        )
        # the record shows no softmax; but scores that add up to one for noise too come from one
        may_be_softmax = final is None or not (final.classes or self.activation == "sigmoid")
        if may_be_softmax and adds_up(values):
            on_noise = self._on_noise(read)
            sums_to_one = all(map(adds_up, on_noise))
            if sums_to_one and any(map(is_fractional, on_noise)):
                return FinalActivation(values.shape[1])
        # the caller says that there is none, and the record does not know the scores
        is_in_doubt = origin is None and self.activation == "none"
        if is_in_doubt and all(map(may_be_probabilities, self._on_noise(read))):
            return FinalActivation()
        return final

    def _on_noise(self, read: Read) -> Sequence[Tensor]:
        """The scores for two inputs of noise, always the same, as ``read`` takes them; NaN if the
        network fails on noise or gives none."""
        x = self._inputs.x
        nothing = torch.full((1, 2), math.nan)  # neither adds up to one, nor may be probabilities
        results = list[Tensor]()
        for seed in range(2):
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)
            try:
                with untouched(self._network), torch.no_grad():
                    output = self._inputs.replaced(noise).call(self._network)
            except Exception as error:  # a network may fail on noise in any way
                if came_by_signal(error):
                    raise
                return [nothing]
            tensor = read(output, len(self._inputs))
            results.append(nothing if tensor is None else tensor)
        return results


def _final_activation_in(values: Range) -> FinalActivation | None:
    """What made values that are probabilities, or their logarithms, by their range; None for other
    values, and if they take up less than half of it."""
    for logs in (False, True):
        low, high, _ = values
        if logs:  # above 1 they are none, and their exponentials might overflow
            low, high = math.exp(min(low, 1.0)), math.exp(min(high, 1.0))
        if low >= -ROUNDING and high <= 1 + ROUNDING and high - low >= 0.5:
            return FinalActivation(values.classes, logs)
    return None


def _is_part(steps: int, more_steps: int) -> bool:
    """Whether ``steps`` are a proper part of ``more_steps``, both with one bit for each step."""
    return steps != more_steps and steps & more_steps == steps


def outputs_of(
    model: nn.Module,
    inputs: Inputs,
    scores: Tensor,
    activation: Activation | None,
    categories: Any = None,
) -> Outputs:
    """Say what the scores ``(N, K)`` of a model are, logits or probabilities. ``categories``, the
    labels of the classes, help to find the scores among several outputs."""
    with reading(model, inputs, activation, categories) as reader:
        return reader.outputs(scores, find_scores)


def reading(
    model: nn.Module, inputs: Inputs, activation: Activation | None = None, categories: Any = None
) -> AbstractContextManager[OutputReader]:
    """Return a block in which outputs of a model are read by what is known of it. Nested blocks
    share a reader, so that this is found out once for a call."""
    reader = READER.get()
    if (
        isinstance(reader, OutputReader)
        and reader.model is model
        and reader.given_activation == activation
    ):
        return nullcontext(reader)
    return OutputReader(model, inputs, activation, None if categories is None else len(categories))
