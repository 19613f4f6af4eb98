"""The steps of a recorded pass that relevance rules act on: of which kind each is, which of its
inputs are signals, and the linear map that it is."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from torch import Tensor

from explain.recording import Step as RecordedStep
from explain.recording import Value
from explain.recording.gradients import is_by_batch
from explain.recording.moves import is_move, values_moved
from explain.relevance.linear_maps import LinearMap, linear_map, weighted_sum

LINEAR = ("convolution", "dense", "matrixproduct", "batchnorm")
"""The kinds of steps that are linear maps."""
_LINEAR_TRAITS = frozenset(["linear", "moves", "permutes", "resizes"])
_SCALE_OF_OPTION = {"offset": "position", "rois": "position", "grid": "position", "mask": "gate"}
"""What the inputs of deformed convolutions and sampling are that are no signal, by their names."""


@dataclass(eq=False)
class Step:
    """One step: its kind in the words of the table, and what a relevance rule needs of it.

    ``signals`` are the positions, among the ``inputs`` of the recorded step, that depend on the
    explained inputs. ``scales`` are those of them that are no signal after all: a "gate", a
    "denominator", the "weights" of a softmax, or a "position" where something is read. ``map`` is
    the linear map, where it is one.
    """

    kind: str
    recorded: RecordedStep
    signals: Sequence[int]
    scales: Mapping[int, str] = field(default_factory=dict)
    map: LinearMap | None = None
    shape: tuple[int, ...] = ()
    """The shape of a map's result."""
    last: RecordedStep = None  # type: ignore[assignment]
    """The recorded step that gives the result: the last of those that are merged into this one."""
    images: Tensor | None = None
    """Which image each value of the result belongs to; None where the images come first."""
    input_images: Sequence[Tensor | None] = ()
    """The same for the inputs."""
    nearest: bool = False
    """Of a map, whether no other, but for normalisations, lies between it and the input."""
    rectified: Value | None = None
    """Of a map, the result of the rectifier that alone is given its result, so that a gradient
    arrives only where it is positive."""

    def __post_init__(self) -> None:
        """Without steps that are merged into it, the recorded step gives the result."""
        self.last = self.last or self.recorded
        self.shape = self.output.shape

    @property
    def name(self) -> str:
        """The name of the operation: ``"softmax"``, ``"add"``."""
        return self.recorded.name.lstrip("_")

    @property
    def inputs(self) -> Sequence[Value]:
        """The tensors among its arguments."""
        return self.recorded.inputs

    @property
    def linear(self) -> LinearMap:
        """The linear map z = W x + b that this step computes; only for steps that have a
        ``map``."""
        assert self.map is not None
        return self.map

    @property
    def x(self) -> Value:
        """The signal that entered the step: a linear map's input, else its first signal."""
        return self.inputs[self.signals[0]] if self.map is None else self.map.x

    @property
    def output(self) -> Value:
        """The value that the step, or the last of those that are merged into it, gives."""
        return self.last.output

    @property
    def map_output(self) -> Value:
        """The value that the step gives before what is merged into it changes its shape."""
        if self.output.shape == self.shape:
            return self.output
        return self.recorded.output

    @property
    def result(self) -> Value:
        """The result as it was computed, in the shape of the map; behind a rectifier what that
        gives, since no gradient arrives elsewhere."""
        value = self.rectified or self.output
        if value.shape == self.shape:
            return value
        return replace(value, shape=self.shape, kept=value.tensor.reshape(self.shape))

    @property
    def first(self) -> bool:
        """Whether this is the first map that the input meets: a convolution, a linear layer or a
        product, no normalisation."""
        return self.nearest and self.kind != "batchnorm"

    @property
    def constants(self) -> list[Value]:
        """The inputs that do not depend on the explained inputs."""
        return [value for position, value in enumerate(self.inputs) if position not in self.signals]


class Readers:
    """Which of some steps of a recording read each value."""

    def __init__(self, steps: Iterable[RecordedStep]) -> None:
        """Note the readers among ``steps``."""
        self._readers: dict[Value, list[RecordedStep]] = {}
        for step in steps:
            for value in dict.fromkeys(step.inputs):
                self._readers.setdefault(value, []).append(step)

    def only(self, value: Value) -> RecordedStep | None:
        """The step that alone reads a value; None if there are several, or none."""
        readers = self._readers.get(value, [])
        return readers[0] if len(readers) == 1 else None

    def reshaped(self, value: Value) -> Value:
        """A value as it is read, if it is only reshaped, with the same channels last, and then
        read."""
        while True:
            reader = self.only(value)
            if reader is None or not reader.operation.has("reshapes"):
                return value
            if not value.shape or reader.output.shape[-1:] != value.shape[-1:]:
                return value
            value = reader.output


def relevance_steps(
    recorded: Sequence[RecordedStep],
    signals: AbstractSet[Value],
    leading: AbstractSet[Value],
    unmerged: AbstractSet[Value] = frozenset(),
) -> list[Step]:
    """The steps of a pass that relevance rules may act on, in order. ``signals`` depend on the
    explained inputs; a gradient of the score comes to the values ``leading``."""
    # values in ``unmerged`` are asked for: no step that reads one becomes part of the step before
    on_the_way = [step for step in recorded if not leading.isdisjoint(step.results)]
    on_the_way = [step for step in on_the_way if not signals.isdisjoint(step.inputs)]
    readers = Readers(on_the_way)
    # what is computed from the results of linear maps; a normalisation does not count as one
    behind_map: set[Value] = set()
    merged: set[RecordedStep] = set()
    steps: list[Step] = []
    for recorded_step in on_the_way:
        if recorded_step in merged:
            continue
        step = step_of(recorded_step, signals)
        if step is not None and step.kind == "product":
            step = _weighted_sum(step, readers, unmerged) or step
            merged.add(step.last)  # the sum, or the product itself
        results = recorded_step.outputs
        if step is not None and step.map is not None:
            merged.update(_merge(step, readers, signals, unmerged))
            step.nearest = step.map.x not in behind_map
            step.rectified = _rectified(step, readers)
            results = [*results, *step.last.outputs]
            if step.kind != "batchnorm":
                behind_map.update(results)
        if not behind_map.isdisjoint(recorded_step.inputs):
            behind_map.update(results)
        if step is not None:
            steps.append(step)
    return steps


def step_of(
    step: RecordedStep, signals: AbstractSet[Value], *, of_complex: bool = False
) -> Step | None:
    """A recorded step as rules see it; None if it is linear, without a rule of its own. Complex
    numbers have no rules, unless ``of_complex``."""
    positions = [position for position, value in enumerate(step.inputs) if value in signals]
    kind = _kind_of(step)
    is_complex = any(value.dtype.is_complex for value in step.inputs)
    if kind is None or (is_complex and not of_complex):
        is_linear = not _LINEAR_TRAITS.isdisjoint(step.operation.traits)
        return None if is_linear else Step("other", step, positions)
    if kind == "activation" and positions != [0]:
        return Step("other", step, positions)  # for example, a number to the power of a signal
    if kind == "batchnorm" and is_by_batch(step):
        kind = "deviation"  # it divides by that of its signal, as layer normalisations do
    if step.name == "addcmul" and {1, 2} <= set(positions):
        return Step("other", step, positions)  # adds a product of two signals
    if step.name == "constant_pad_nd" and not any(step.args[2:]):
        return None  # zeros add nothing
    scales = _scales(kind, step, positions)
    if kind == "quotient" and len(scales) == len(positions):
        return Step("other", step, positions)  # a constant divided by a signal
    if kind not in LINEAR:
        return Step(kind, step, positions, scales)
    mapped = {step.inputs[position] for position in positions}
    if kind == "convolution":  # of products, rules decide which factors are held constant
        mapped = {step.inputs[position] for position in positions if position not in scales}
    linear = linear_map(step, mapped)
    if kind == "matrixproduct" and linear is not None:
        kind = "dense"
    if linear is None and _adds_constant(step):
        # rules for a product of two signals do not take out what belongs to the added constant
        return Step("other", step, positions)
    return Step(kind, step, positions, scales, map=linear)


def _kind_of(step: RecordedStep) -> str | None:
    """The kind of a step for rules: the relevance of a softmax's logarithm is not that of
    weights."""
    return None if step.name == "_log_softmax" else step.operation.kind


def _adds_constant(step: RecordedStep) -> bool:
    """Whether a step adds something to a product or convolution."""
    if step.operation.has("adds to first"):
        return True
    return step.options.get("bias") is not None


def _scales(kind: str, step: RecordedStep, positions: Sequence[int]) -> dict[int, str]:
    """The signals of a step that are none, by position: "denominator", "gate", "weights" of an
    attention, or "position"; none of them where all factors of a product are such."""
    if kind == "quotient":  # the second tensor divides; of a number over a tensor, the only one
        return {
            position: "denominator"
            for position in positions
            if position == 1 or len(step.inputs) == 1
        }
    if kind in ("product", "matrixproduct"):
        by_position = {position: _scale(step.inputs[position]) for position in positions}
        scales = {position: scale for position, scale in by_position.items() if scale is not None}
        # relevance must go on to one of the factors
        return scales if len(scales) < len(positions) else {}
    if kind not in ("sampling", "convolution"):
        return {}
    options = step.options
    of_inputs = {
        options[name]: scale for name, scale in _SCALE_OF_OPTION.items() if name in options
    }
    inputs = step.inputs
    return {
        position: of_inputs[inputs[position]]
        for position in positions
        if inputs[position] in of_inputs
    }


def _scale(value: Value) -> str | None:
    """What kind of scale a factor of a product is: "weights" behind a softmax, "gate" behind a
    sigmoid or an inverse root, None for a signal."""
    step = value.step
    while step is not None and is_move(step) and step.operation.kind is None:
        step = values_moved(step)[-1].step
    if step is None:
        return None
    if _kind_of(step) == "softmax":
        return "weights"
    return "gate" if step.operation.has("gates") else None


def _merge(
    step: Step, readers: Readers, signals: AbstractSet[Value], unmerged: AbstractSet[Value]
) -> list[RecordedStep]:
    """Merge what alone reads a linear map's result into the map: normalisations by known
    statistics, and added constants of one number for each channel. Returns the merged steps."""
    merged: list[RecordedStep] = []
    since_map: list[RecordedStep] = []
    value = step.recorded.output
    while value not in unmerged:
        reader = readers.only(value)
        if reader is None:
            break
        since_map.append(reader)
        # reshapes are merged only with something behind them
        if not reader.operation.has("reshapes"):
            longer_map = _followed_by(step, reader, value, signals)
            if longer_map is None:
                break
            step.map = longer_map
            step.last = reader
            merged = list(since_map)
        value = reader.output
    return merged


def _weighted_sum(step: Step, readers: Readers, unmerged: AbstractSet[Value]) -> Step | None:
    """A product with constants whose result is only summed up: a linear map, ``last`` being the
    sum; None if it is not."""
    reader = None if step.output in unmerged else readers.only(step.output)
    if len(step.signals) != 1 or len(step.inputs) != 2 or reader is None or reader.name != "sum":
        return None
    linear = weighted_sum(step.recorded, step.x, reader)
    if linear is None:
        return None
    return Step("dense", step.recorded, step.signals, map=linear, last=reader)


def _followed_by(
    step: Step, reader: RecordedStep, value: Value, signals: AbstractSet[Value]
) -> LinearMap | None:
    """The map of a step, and then of a normalisation or sum that reads its result; None if they
    are not one map."""
    shape = step.shape
    if reader.operation.kind == "batchnorm" and value.shape == shape:
        norm = linear_map(reader, {value})
        if norm is None or norm.bias is None:
            return None
        # the weight of a normalisation's map is one factor for each channel
        return step.linear.then(norm.step_weight, norm.bias)
    if reader.name != "add" or len(reader.inputs) != 2 or step.kind == "batchnorm":
        return None
    added = [other for other in reader.inputs if other is not value]
    if len(added) != 1 or added[0] in signals or reader.kwargs.get("alpha", 1) != 1:
        return None
    channels = step.linear.channels
    count = shape[channels]
    # A bias has one number for each of several channels. Reshapes since the map may have moved
    # these, unless they are last.
    are_last = channels == -1 and value.shape[-1:] == shape[-1:]
    if count == 1 or not (are_last or value.shape == shape):
        return None
    bias = added[0]
    sizes = [1] * max(0, len(value.shape) - len(bias.shape)) + list(bias.shape)
    by_channel = [1] * len(sizes)
    by_channel[channels] = count
    if sizes != by_channel:
        return None
    return step.linear.then(None, shift=bias.tensor.reshape([count] + [1] * (-channels - 1)))


def _rectified(step: Step, readers: Readers) -> Value | None:
    """The result of the ReLU that alone is given a map's result; None if something else is."""
    reader = readers.only(step.output)
    if reader is None or reader.name != "relu":
        return None
    return reader.output
