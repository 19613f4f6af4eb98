"""Finds out how an output comes about: whether a softmax or sigmoid made it, and where in it the
scores are."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Token
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from explain._utils import nested
from explain._utils.errors import warn
from explain._utils.modules import parameters_of
from explain._utils.signals import came_by_signal
from explain.data.inputs import Inputs
from explain.hooks.preserve import untouched
from explain.hooks.tracer import Tracer
from explain.layers.stitched import Stitched
from explain.relevance.table import info, operation_name
from explain.targets.base import READER, find_scores, summary_of_output
from explain.targets.outputs import (
    ROUNDING,
    Activation,
    End,
    Outputs,
    adds_up,
    configured_activation,
    is_fractional,
    may_be_probabilities,
    outputs_like,
)

Read: TypeAlias = Callable[[Any, int], Tensor | None]
"""Takes a tensor from a model's output for so many images."""

_PROBABILITIES = ("softmax", "sigmoid", "expit", "hardsigmoid")
_LOGARITHMS = ("log_softmax", "log_sigmoid")
_SIGNS_TURNED = ("sub", "rsub", "isub", "neg")
_MONOTONE = frozenset(
    [
        *_SIGNS_TURNED,
        "add",
        "radd",
        "iadd",
        "mul",
        "div",
        "divide",
        "true_divide",
        "truediv",
        "exp",
        "log",
        "clamp",
    ]
)
"""Operations on single values, whose extremes are at the extremes of what they are given."""
_SELECTING = frozenset(
    ["mean", "amax", "amin", "maximum", "minimum", "gather", "interpolate", "upsample"]
)
"""Operations that give nothing outside of the bounds of what they are given."""
_KEEPING = frozenset(["reshapes", "moves", "joins", "casts"])
"""The traits of other operations that give nothing but what they are given."""


class Bounds(NamedTuple):
    """The least and the largest value of a tensor that came from softmaxes and sigmoids alone.

    ``classes`` is the size of the dimension along which a softmax made them add up to one; 0 for a
    sigmoid.
    """

    low: float
    high: float
    classes: int = 0


class Origin(NamedTuple):
    """What a tensor came from: the bounds of its values, if any, and the weights it depends on.

    The weights are a number with one bit for each parameter of the model, so that sets of them are
    joined fast.
    """

    bounds: Bounds | None
    weights: int


class OriginTracer(Tracer):
    """Follows what becomes of softmaxes and sigmoids, and which weights tensors depend on.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.Sigmoid())
    >>> with torch.no_grad(), OriginTracer(model) as tracer:
    ...     result = 100 * model(torch.rand(1, 3)).mean(1)
    >>> tracer.origins[result]
    Origin(bounds=Bounds(low=0.0, high=100.0, classes=0), weights=3)
    """

    opens = False

    def __init__(self, model: nn.Module) -> None:
        """Begin to follow, through a pass of the model, which weights and softmaxes each tensor
        came from.

        ``origins`` has the weights of a tensor as a number with one bit for each parameter, in the
        order of ``model.parameters()``, so that sets of weights are joined fast; buffers depend on
        none. This tells probabilities from class scores, and scores from features. ``coarse`` says
        whether something was computed in half precision.
        """
        self.coarse = False
        self.origins: Any = WeakIdKeyDictionary()
        for number, parameter in enumerate(parameters_of(model)):
            self.origins[parameter] = Origin(None, 1 << number)
        for buffer in model.buffers():
            self.origins[buffer] = Origin(None, 0)
        self._weights_so_far = 0
        """All weights that operations have used so far."""

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation of the model, and note what each tensor that it returns came from:
        bounds and weights.

        Called by the tracer for every operation. Bounds are the least and largest value of what
        softmaxes and sigmoids made; `_bounds` gives those of a sum's terms, which are multiplied
        here by their number. It tells whether a model's outputs are probabilities.
        """
        name = operation_name(func).removeprefix("special_")
        tensors = [tensor for _, tensor in nested.paths((args, kwargs))]
        weights = self._weights_of(tensors)
        bounds = self._bounds(name, func, args, kwargs)
        result = func(*args, **kwargs)
        results = (
            tensors[:1]
            if name == "setitem"
            else [tensor_in_result for _, tensor_in_result in nested.paths(result)]
        )
        for tensor in results:
            self.coarse |= tensor.dtype in (torch.float16, torch.bfloat16)
            result_bounds = bounds
            if bounds is not None and name == "sum":
                terms = tensors[0].numel() / max(tensor.numel(), 1)
                result_bounds = Bounds(bounds.low * terms, bounds.high * terms, bounds.classes)
            self.origins[tensor] = Origin(result_bounds, weights)
        return result

    def _weights_of(self, tensors: Sequence[Tensor]) -> int:
        """Return the weights of the model that some tensors depend on, as a number with one bit for
        each parameter, and note these weights as used.

        A tensor of unknown origin, made past the tracer, may depend on all weights that were used
        so far. By its weights, `OutputReader` tells class scores from features, which fewer weights
        made.
        """
        weights = 0
        for tensor in tensors:
            origin = self.origins.get(tensor)
            weights |= self._weights_so_far if origin is None else origin.weights
        self._weights_so_far |= weights
        return weights

    def _bounds(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Bounds | None:
        """The bounds of the values that an operation returns, if they came from softmaxes and
        sigmoids alone; else None.

        For a sum, those of its terms. Scalars among the arguments do not matter. Outputs between 0
        and 1 are probabilities by this.
        """
        if name in _PROBABILITIES or name in _LOGARITHMS:
            classes = _softmax_size(args, kwargs) if "softmax" in name else 0
            low, high = (-math.inf, 0.0) if name in _LOGARITHMS else (0.0, 1.0)
            return Bounds(low, high, classes)
        values = [
            tensor for _, tensor in nested.paths((args, kwargs)) if tensor.is_floating_point()
        ]
        bounds = [bound for bound in map(self._bounds_of, values) if bound is not None]
        unbounded_count = len(values) - len(bounds) - sum(tensor.ndim == 0 for tensor in values)
        if not bounds or unbounded_count > 0:
            return None
        class_counts = {bound.classes for bound in bounds}
        classes = class_counts.pop() if len(class_counts) == 1 and name not in _SIGNS_TURNED else 0
        if name in _MONOTONE:
            extremes = self._extremes(func, args, kwargs)
            return Bounds(min(extremes), max(extremes), classes) if extremes else None
        if name in _SELECTING or name == "sum" or info(name).traits & _KEEPING:
            return Bounds(
                min(bound.low for bound in bounds), max(bound.high for bound in bounds), classes
            )
        return None

    def _bounds_of(self, tensor: Tensor) -> Bounds | None:
        """The least and largest value that a tensor can have, if it came from softmaxes and
        sigmoids alone; else None.

        By them, `OutputReader` tells whether a model's outputs are probabilities; unknown tensors
        have none.
        """
        origin = self.origins.get(tensor)
        return None if origin is None else origin.bounds

    def _extremes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[float]:
        """The values of a monotone operation with each bounded argument at its low or high bound,
        in all combinations.

        Their extremes are the bounds of the result. Empty if the operation gives no single number
        there. Operations in `_MONOTONE` alone: of others, the extremes may lie between the bounds.
        """
        results = []
        tensors = [tensor for _, tensor in nested.paths((args, kwargs))]
        bounds = [bound for bound in map(self._bounds_of, tensors) if bound is not None]
        for ends in itertools.product(*[(bound.low, bound.high) for bound in bounds]):
            next_bounds = list(ends)

            def at_bound(
                path: nested.Path, tensor: Tensor, next_bounds: list[float] = next_bounds
            ) -> Tensor:
                if self._bounds_of(tensor) is None:
                    return tensor
                return torch.tensor(next_bounds.pop(0), dtype=torch.float64)

            arguments, options = nested.replace((args, dict(kwargs)), at_bound)
            result = func(*arguments, **options)
            if result.numel() != 1 or bool(result.isnan()):
                return []
            results.append(float(result))
        return results


def _softmax_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The number of classes of a softmax: the size of the dimension along which it is taken.

    Without ``dim``, the second dimension is taken. By it, `OutputReader` knows how many classes the
    probabilities are of.
    """
    first = nested.first_tensor((args, kwargs))
    assert first is not None
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return first.shape[dim if isinstance(dim, int) else min(1, first.ndim - 1)]


class OutputReader:
    """Says what the outputs of a model are, from a pass whose operations are watched.

    That pass is run when it is first needed: not for scores that cannot be probabilities.

    Args:
        model: the network.
        inputs: what it is called with.
        activation: what the caller says of its outputs.
        classes: how many classes there are, where that is known.
    """

    def __init__(
        self, model: nn.Module, inputs: Inputs, activation: Activation | None, classes: int | None
    ) -> None:
        """Begin without running the model; of a `Stitched` model, the segmenter on its first window
        is read."""
        self.model = model
        self.classes = classes
        self.said = activation
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

        Readers may be nested; the innermost one counts.
        """
        self._tokens.append(READER.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        """Put back the reader of before, also after an error."""
        READER.reset(self._tokens.pop())

    @cached_property
    def activation(self) -> Activation | None:
        """What makes probabilities of the model's outputs: as the caller says, or else the model's
        configuration; or None."""
        return self.said or configured_activation(self.model)

    def outputs(self, values: Tensor, read: Read) -> Outputs:
        """Say whether scores ``values`` ``(N, K, ...)`` are logits or probabilities, and of which
        kind.

        ``read`` takes the same tensor from an output of the model, for when a traced pass is
        needed.
        """
        return outputs_like(values, self.activation, partial(self._end, values, read))

    def scores_key(self, candidates: Callable[[Any, int], Mapping[Any, Tensor]]) -> Any:
        """Choose which of the tensors in a model's output has the class scores; return its key in
        ``candidates``.

        Tensors that others are computed from, with further weights, are features and left out. Of
        the rest it is the one that has as many columns as there are classes, or else the first. The
        choice is kept for all outputs of this reader.
        """
        if self._key is None:
            output, origins, _ = self._traced
            tensors = candidates(output, len(self._inputs))
            weights = {
                key: origins[tensor].weights for key, tensor in tensors.items() if tensor in origins
            }
            if len(weights) == len(tensors):
                tensors = {
                    key: tensor
                    for key, tensor in tensors.items()
                    if not any(_is_part(weights[key], whole) for whole in weights.values())
                }
            widths = {
                key: tensor.shape[1] if tensor.ndim > 1 else 1 for key, tensor in tensors.items()
            }
            fitting = [key for key, width in widths.items() if width == self.classes]
            self._key = (fitting if len(fitting) == 1 else list(tensors))[:1]
            if len(weights) < len(tensors) and len(fitting) != 1:
                self._ambiguous_output = summary_of_output(output)
        return self._key[0]

    def say_if_unsure(self) -> None:
        """Warn, once, if the class scores were chosen among several tensors of an output without a
        reason.

        Called when the scores are read; it is so where no operations were seen that tell features
        from scores.
        """
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
    def _traced(self) -> tuple[Any, Any, bool]:
        """The model's output in a traced pass without gradients, the origins of its tensors, and
        whether half precision was used; made once.

        The origins are looked up by the very tensors of this output, so both are kept together. By
        them, it is told what a softmax or sigmoid made.
        """
        with untouched(self._network), torch.no_grad(), OriginTracer(self._network) as tracer:
            output = self._inputs.call(self._network)
        return output, tracer.origins, tracer.coarse

    def _end(self, values: Tensor, read: Read) -> End | None:
        """What made the scores ``values``: a softmax, a sigmoid, their logarithm, or None for plain
        scores.

        By the traced operations, or, where these do not show it, by whether outputs for noise add
        up to one too. Its answer decides how scores are made probabilities, in all results of the
        call.
        """
        output, origins, coarse = self._traced
        tensor = read(output, len(self._inputs))
        origin = None if tensor is None else origins.get(tensor)
        bounds = None if origin is None else origin.bounds
        if bounds is not None and bounds.high <= ROUNDING:
            return End(bounds.classes, logs=True)
        if bounds is not None and bounds.low >= -ROUNDING and bounds.high <= 1 + ROUNDING:
            return End(bounds.classes)
        if bounds is None and adds_up(values, coarse=coarse):
            on_noise = self._on_noise(read)
            sums_to_one = all(adds_up(scores, coarse=coarse) for scores in on_noise)
            if sums_to_one and any(map(is_fractional, on_noise)):
                return End(values.shape[1])
        is_in_doubt = origin is None and self.activation == "none"
        if is_in_doubt and all(map(may_be_probabilities, self._on_noise(read))):
            return End()
        return None

    def _on_noise(self, read: Read) -> Sequence[Tensor]:
        """The scores for two inputs of noise, as ``read`` takes them; NaN if the network fails on
        noise or gives none.

        The seeds are fixed, so that the same model is always read in the same way.
        """
        x = self._inputs.x
        nothing = torch.full((1, 2), math.nan)
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


def _is_part(weights: int, more_weights: int) -> bool:
    """Whether ``weights`` are a proper part of ``more_weights``, both with one bit for each
    parameter.

    A tensor that needs fewer weights of the same is an earlier one.
    """
    return weights != more_weights and weights & more_weights == weights


def outputs_of(
    model: nn.Module,
    inputs: Inputs,
    scores: Tensor,
    activation: Activation | None,
    categories: Any = None,
) -> Outputs:
    """Say what the scores ``(N, K)`` of a model are, logits or probabilities, and how to make
    probabilities of them.

    ``categories``, the labels of the classes, help to find the scores among several outputs.
    """
    with reading(model, inputs, activation, categories) as reader:
        return reader.outputs(scores, find_scores)


def reading(
    model: nn.Module, inputs: Inputs, activation: Activation | None = None, categories: Any = None
) -> AbstractContextManager[OutputReader]:
    """Return a block in which outputs of a model are read by what is known of it; nested blocks
    share a reader.

    What is found out, such as which tensor has the scores, is so found out once for a call.
    """
    reader = READER.get()
    if isinstance(reader, OutputReader) and reader.model is model and reader.said == activation:
        return nullcontext(reader)
    return OutputReader(model, inputs, activation, None if categories is None else len(categories))
