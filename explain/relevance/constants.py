"""What a network adds that does not depend on the input: biases, shifts, constants, read from the
steps of a pass."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from explain._utils.modules import modules_of
from explain.recording import Step as RecordedStep
from explain.recording import Value
from explain.relevance.gradient_rules import Coverage
from explain.relevance.linear_maps import along, linear_map
from explain.relevance.steps import Readers, Step, step_of

_NAMED = (
    nn.modules.conv._ConvNd,
    nn.Linear,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
)
"""Modules that do one thing: what their output is laid out as, the bias is too."""
_SCORE_STEPS = 12
"""How many steps before its softmax the scores of an attention are followed."""


@dataclass(frozen=True, eq=False)
class AddedConstant:
    """A constant, and the ``result`` that it is added in; the module, by name and call, if it does
    no more."""

    value: Tensor
    result: Value
    module: str | None = None
    call: int = 0
    lies_on_input: bool = True
    """False for numbers, and for what is added to scores of attention: they are no maps."""
    channels_last: bool = False
    """As those of linear functions are."""
    storage: int = 0
    """The address of the memory of the tensor as the network has it."""
    attention: str | None = None
    """The `torch.nn.MultiheadAttention` that adds it. Its last layer has a row for each token and
    image, token by token."""


def added_constants(model: nn.Module, steps: Sequence[RecordedStep]) -> list[AddedConstant]:
    """The biases, shifts and constants that the steps of a pass add to what depends on its inputs.
    The gradient of the score in its result is a constant's weight in FullGrad."""
    modules = {name: module for module, name in modules_of(model).items()}
    before_softmax = _scores_of_attention(steps)
    readers = Readers(steps)
    constants: list[AddedConstant] = []
    for recorded in steps:
        if not recorded.outputs or not recorded.output.depends:
            continue
        result = recorded.output
        module = modules.get(recorded.module)
        for value, channels_last, on_input in _constants_of(recorded):
            does_no_more = isinstance(module, _NAMED) and recorded.operation.has("biased")
            on_map = on_input and result not in before_softmax
            attention = recorded.module if isinstance(module, nn.MultiheadAttention) else None
            constants.append(
                AddedConstant(
                    value,
                    _laid_out(result, value, readers),
                    module=recorded.module if does_no_more else None,
                    call=recorded.call,
                    lies_on_input=on_map,
                    channels_last=channels_last,
                    storage=_storage_of_constant(recorded),
                    attention=attention,
                )
            )
    return constants


def has_constant_part(step: Step) -> bool:
    """Whether a step "join" or "choice" gives more than its signals, and masks that choose among
    them."""
    if step.kind == "choice":
        count = sum(value.dtype != torch.bool for value in step.inputs)
        return count > len(step.signals) or step.name == "masked_fill"
    return bool(step.constants) or step.name == "constant_pad_nd"


def constant_part(step: Step) -> Tensor:
    """What a step "sum", "join" or "choice" gives for its constants alone, such as a class token,
    with zero for signals; of a sum in the shape of the constants. Its result is the sum of this and
    of the same for its signals."""
    signals = {step.inputs[position] for position in step.signals}
    constant_shapes = [value.shape for value in step.inputs if value not in signals]

    def constant_or_zeros(value: Value) -> Tensor:
        """A constant itself; zeros in the place of a signal."""
        if value not in signals:
            return value.tensor
        # zeros in the signal's shape would spread a bias over all positions; in a sum in place
        # (`add_`), the constants are written into them, so that they cannot be a single one either
        if step.kind == "sum":
            shape: Any = torch.broadcast_shapes(*constant_shapes)  # type: ignore[no-untyped-call]
            return value.tensor.new_zeros(shape)
        return torch.zeros_like(value.tensor)

    return step.recorded.run(constant_or_zeros)[step.output]


def uninspected(steps: Iterable[RecordedStep], leading: AbstractSet[Value]) -> Coverage:
    """The operations on the path to a score that cannot be looked into, as ``missed``: functions
    with their own derivative, and unknown operators of libraries."""
    missed = Counter[str]()
    for step in steps:
        if step.is_opaque and not leading.isdisjoint(step.results):
            missed[step.name] += 1
    return Coverage(missed=dict(missed))


def _laid_out(result: Value, constant: Tensor, readers: Readers) -> Value:
    """The result that a constant is added in, in the shape that it is read in: linear layers make
    one dimension of all but the channels."""
    is_by_channel = constant.ndim == 1 and len(result.shape) == 2
    return readers.reshaped(result) if is_by_channel else result


def _constants_of(recorded: RecordedStep) -> Iterator[tuple[Tensor, bool, bool]]:
    """Yield the constants that a step adds, each with whether its channels come last, and whether
    it is a map."""
    signals = {value for value in recorded.inputs if value.depends}
    adds_to_first = recorded.operation.has("adds to first")
    if adds_to_first or recorded.operation.has("biased"):
        bias = _bias(recorded, signals)
        if bias is not None:
            channels_last = adds_to_first or recorded.name == "native_layer_norm"
            yield bias, channels_last, True  # it is added at each position of a map
        return
    step = step_of(recorded, signals, of_complex=True)
    if step is None:
        return
    if step.kind == "sum" and len(step.signals) == 1:
        term = constant_part(step)
        # complex numbers belong to frequencies, not to places of the image
        is_map = term.numel() > 1 and not step.output.dtype.is_complex
        yield term, term.ndim == 1, is_map
    elif step.kind in ("join", "choice") and has_constant_part(step):
        # tokens that are constant, such as a class token, lie on no place
        part = constant_part(step)
        yield part, False, part.ndim > 3


def _bias(step: RecordedStep, signals: AbstractSet[Value]) -> Tensor | None:
    """The constant ``(C, ...)`` that a convolution, linear layer or normalisation adds to its
    linear part, the shift by a running mean too; None without one."""
    x = step.inputs[0]
    if step.operation.has("adds to first"):  # of `addmm` and the like, this one is the bias
        return None if x in signals else x.tensor * step.kwargs.get("beta", 1)
    if x not in signals:
        return None
    if step.operation.kind == "batchnorm":
        norm = linear_map(step, {x})
        if norm is not None:  # else by the statistics of the batch, without a running mean
            return norm.bias
    bias: Value | None = step.options.get("bias")
    if bias is None:
        return None
    if step.name == "native_layer_norm":  # in the shape of what is normalised
        return bias.tensor
    return along(bias.tensor, len(x.shape) - 1)


def storage_of(tensor: Tensor) -> int:
    """A number for a tensor's memory, the same for all views of it: its address, or an identity
    where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    # sparse tensors, and those within a transform, have no storage
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _storage_of_constant(step: RecordedStep) -> int:
    """The memory of the last constant among a step's inputs, as `storage_of` numbers it; 0 without
    one."""
    constants = [value for value in step.inputs if not value.depends]
    return storage_of(constants[-1].tensor) if constants else 0


def _scores_of_attention(steps: Sequence[RecordedStep]) -> set[Value]:
    """The values from which scores of attention are made, before a softmax: what is added there is
    no map of the image."""
    scores: set[Value] = set()
    for softmax in steps:
        if softmax.operation.kind != "softmax":
            continue
        value = softmax.inputs[0]
        for _ in range(_SCORE_STEPS):
            scores.add(value)
            step = value.step
            if step is None or not step.inputs:
                break
            # the product of queries and keys is of another kind: before it lie no scores
            if step.operation.kind not in (None, "sum", "product"):
                break
            value = step.inputs[0]
    return scores
