"""What a network adds that does not depend on the input: biases, shifts, constants, read from the
steps of a pass."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils.weak import WeakIdKeyDictionary

from explain._utils.modules import modules_of
from explain.relevance.calls import Call, along, storage_of
from explain.relevance.steps import Dependence, Step
from explain.relevance.table import SCORE_NODES

_NAMED = (
    nn.modules.conv._ConvNd,
    nn.Linear,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
)
"""Modules that do one thing: what their output is laid out as, the bias is too."""
_SCORE_STEPS = 12


@dataclass(frozen=True, eq=False)
class AddedConstant:
    """A constant, and where it is added: the Node, by its output; the module, by name and call if
    it does no more.

    ``lies_on_input`` is False for numbers, and for what is added to scores of attention: they are
    no maps. The channels of linear functions come last. ``storage`` is that of the tensor as the
    network has it. ``images`` says which image each value of the sum belongs to; None where the
    images come first. ``attention`` names the `torch.nn.MultiheadAttention` that adds it, whose
    last layer has a row for each token and image, token by token.
    """

    value: Tensor | float
    edge: GradientEdge
    module: str | None = None
    call: int = 0
    lies_on_input: bool = True
    channels_last: bool = False
    storage: int = 0
    images: Tensor | None = None
    attention: str | None = None


class Influence(Dependence):
    """Tells what is computed from inputs, with or without a gradient, from what is made of
    parameters and numbers.

    It has to see all calls of a pass.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        """Start with the inputs of a forward pass: what is computed from them is no constant for
        FullGrad.

        `see` then follows every call of the pass.
        """
        super().__init__(inputs)
        self._influenced: Any = WeakIdKeyDictionary()
        for tensor in inputs:
            self._influenced[tensor] = True

    def of(self, tensor: Tensor) -> bool:
        """Whether a tensor of the pass is computed from the inputs, also where no gradient leads
        back to them."""
        return tensor in self._influenced or super().of(tensor)

    def see(self, call: Call, result: Any) -> None:
        """Mark the results of a call as computed from the inputs, if a value that it reads is.

        Shapes do not count: ``zeros_like(x)`` is a constant.
        """
        read = call.tensors
        if call.info.has("fills"):
            read = read[1:]
        elif call.info.has("fits second"):
            read = read[:1]
        if any(map(self.of, read)):
            for tensor in call.results(call.flat[0] if call.name == "setitem" else result):
                self._influenced[tensor] = True


def added_constants(model: nn.Module, steps: Sequence[Step]) -> list[AddedConstant]:
    """The biases, shifts and constants that the steps of a forward pass add to signals, in the
    order of the pass.

    For FullGrad. ``steps`` are those that a `StepRecorder` without kinds has noted. Each constant
    has the Node at which the gradient of the score is its weight.
    """
    modules = {name: module for module, name in modules_of(model).items()}
    calls_of_modules = Counter[str]()
    nodes_before_softmax = {
        node for step in steps if step.kind == "softmax" for node in _score_nodes(step)
    }
    constants = []
    for step in steps:
        row = step.call.info
        constant = None
        name = step.module or ""
        if row.has("biased") and 0 in step.dependent:
            constant = _bias(step)
            if isinstance(modules.get(name), _NAMED):
                if constant is not None:
                    constant = replace(constant, module=name, call=calls_of_modules[name])
                calls_of_modules[name] += 1
        elif row.has("adds") or row.has("adds to first"):
            constant = _term(step)
        elif step.kind in ("join", "choice"):
            part = constant_part(step)
            if part is not None:  # tokens that are constant, such as a class token, lie on no place
                edge = GradientEdge(step.node, step.output)
                constant = AddedConstant(part, edge, lies_on_input=part.ndim > 3)
        if constant is not None:
            on_input = constant.lies_on_input and step.node not in nodes_before_softmax
            storage = _storage_of_constant(step)
            constant = replace(
                constant,
                lies_on_input=on_input,
                storage=storage,
                images=step.images,
                attention=name if isinstance(modules.get(name), nn.MultiheadAttention) else None,
            )
            constants.append(constant)
    return constants


def _storage_of_constant(step: Step) -> int:
    """The memory of the last constant tensor among a step's arguments, as `storage_of` numbers it;
    0 without one.

    By it, a constant that FullGrad finds is the parameter or buffer of the model.
    """
    places = [place for place in step.call.tensor_places if place not in step.dependent]
    return storage_of(step.call.flat[places[-1]]) if places else 0


def _score_nodes(softmax: Step) -> list[Node]:
    """The Nodes before a softmax that may compute its scores of attention, up to `_SCORE_STEPS`
    back.

    Constants that are added there are no maps of the photo, for FullGrad.
    """
    nodes = list[Node]()
    node = softmax.node.next_functions[0][0]
    while node is not None and node.name().startswith(SCORE_NODES) and len(nodes) < _SCORE_STEPS:
        nodes.append(node)
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    return nodes


def _term(step: Step) -> AddedConstant | None:
    """The constant that a sum adds to a signal, for FullGrad; None unless exactly one of its terms
    is constant."""
    terms = constant_terms(step)
    if len(terms) != 1:
        return None
    (term,) = terms
    # Complex numbers belong to frequencies, not to places of the photo.
    is_complex = step.node._input_metadata[step.output].dtype.is_complex
    is_map = isinstance(term, Tensor) and term.numel() > 1 and not is_complex
    return AddedConstant(term, GradientEdge(step.node, step.output), lies_on_input=is_map)


def constant_part(step: Step) -> Tensor | None:
    """What a step "join" or "choice" gives for its constants alone, such as a class token, in the
    shape of its result: signals count as zero. None without constants.

    The step's result is the sum of this and of what it gives for its signals alone. Also used by
    LRP's rule for constants.
    """
    # the numbers of a join say along which dimension, and masks say what is chosen
    types = Tensor if step.kind == "join" else (int, float, Tensor)
    constants = [value for value in step.constants.values() if isinstance(value, types)]
    if all(isinstance(value, Tensor) and value.dtype == torch.bool for value in constants):
        return None
    no_signals = {place: torch.zeros_like(step.call.flat[place]) for place in step.dependent}
    with torch.no_grad():
        part: Tensor = step.call.make(no_signals)
    return part


def constant_terms(step: Step) -> list[Any]:
    """The constant terms of a step "sum", with their sign and factor: for ``a - 2 b`` with constant
    b, ``[-2 b]``.

    Also used by LRP's rule for sums.
    """
    options = step.call.kwargs
    if step.call.info.has("adds to first"):  # the other arguments are factors, not terms
        return [options.get("beta", 1) * step.constants[0]] if 0 in step.constants else []
    place_of_alpha = 0 if step.function == "rsub" else 1
    terms = []
    for place, value in step.constants.items():
        alpha = options.get("alpha", 1) if place == place_of_alpha else 1
        sign = -1 if place == place_of_alpha and "sub" in step.function else 1
        if place < 2:
            terms.append(sign * alpha * value)
    return terms


def _bias(step: Step) -> AddedConstant | None:
    """The constant that a convolution, linear layer or normalisation adds to its linear part, for
    FullGrad; None without one.

    It is ``(C,)`` with as many dimensions behind as broadcast to the result. For a normalisation by
    running statistics it is ``beta - gamma mean / sqrt(var + eps)``: the shift by the running mean
    counts, which the bias alone leaves out.
    """
    options = step.options
    bias = options.get("bias")
    mean = options.get("running_mean")
    variance = options.get("running_var")
    # the recorder notes an instance normalisation by running statistics as a batch normalisation
    is_batch_norm = step.function == "batch_norm" and not options.get("training", False)
    if is_batch_norm and mean is not None and variance is not None:
        weight = options.get("weight")
        shift = mean * (variance + options.get("eps", 1e-5)).rsqrt()
        shift = shift if weight is None else shift * weight
        bias = -shift if bias is None else bias - shift
    if bias is None:
        return None
    channels = step.call.info.channels
    is_channels_last = channels is None and bias.ndim == 1
    # the bias of a single channel is one number, but lies where the channel does
    if channels is not None:
        ndim = options["input"].ndim
        bias = along(bias, ndim - channels % ndim)
    return AddedConstant(bias, GradientEdge(step.node, step.output), channels_last=is_channels_last)
