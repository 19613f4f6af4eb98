"""Where in the photo the values of tensors lie: followed from the pixels on, from call to call.

The shape of a tensor does not tell which of its tokens are the photo's patches: there may be others
before, behind and among them, the patches may be in any order, and a sequence of something else may
be as long. What a network does with the pixels tells it.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from explain._utils.signals import came_by_signal
from explain.hooks.tracer import Tracer
from explain.relevance.batch_layout import (
    compact,
    einsum_formula,
    einsum_labels,
    fits,
    moved_labels,
)
from explain.relevance.calls import Call, along, storage_of
from explain.relevance.table import ADDS, operation_name

Positions: TypeAlias = tuple[Tensor, ...]
"""For each dimension of the photo, where along it the values of a tensor lie: from 0 to 1, the
centre of a pixel or patch, and 0 for values that lie nowhere. Each has the dimensions of the
tensor, of size 1 where it does not change."""


class Lost(Enum):
    """Why it is not said where the values of a tensor lie."""

    NOWHERE = "they do not come from the photo, or belong to something else, as queries do"
    EVERYWHERE = "they are made of the whole photo"
    UNKNOWN = "they were made in a way that is not seen or not known"


NOWHERE, EVERYWHERE, UNKNOWN = Lost
State: TypeAlias = Positions | Lost

_MOVES = frozenset(
    [
        "unfold",
        "im2col",
        "pad",
        "pixel_shuffle",
        "pixel_unshuffle",
        "channel_shuffle",
        "native_channel_shuffle",
        "gather",
        "take_along_dim",
        "masked_scatter",
        "diagonal",
        "as_strided",
        "broadcast_to",
        "split_with_sizes",
        "hsplit",
        "vsplit",
        "dsplit",
        "unsafe_chunk",
        "unsafe_split",
        "setitem",
    ]
)
"""What moves or selects values, besides the operations that the table says it of."""
_PERMUTES = frozenset(
    ["permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "mT", "T"]
)
"""What does the same to dimensions of any size."""
_RESAMPLES = (
    "conv",
    "max_pool",
    "avg_pool",
    "adaptive_max_pool",
    "adaptive_avg_pool",
    "interpolate",
    "upsample",
)
_FUSED = ("attention", "encoder_layer")
_PRODUCTS = frozenset(["matmul", "rmatmul", "mm", "bmm", "mv", "baddbmm", "linear", "addmm"])
_FOURIER = re.compile("(?:fft_)?(?:(?P<inverse>i[rh]?)|[rh])?fft[2n]?|stft")
"""Fourier transforms, and those back."""
MOST = 2**25  # the most values of a tensor whose positions are moved, for the sake of memory


class PositionTracer(Tracer):
    """Follows where in a photo ``x`` ``(N, C, H, W)`` the values of tensors lie, for as long as its
    block lasts.

    What moves values moves their positions. What combines values has the mean of their positions: a
    convolution that of the window that it sees, a linear layer that of its inputs. Rows of an
    attention lie where their queries do. Everything else leaves positions as they are.
    ``constants`` are tensors that do not come from the photo, such as parameters.

    >>> x, token = torch.rand(1, 3, 4, 4), torch.zeros(1, 1, 6)
    >>> with PositionTracer(x, [token]) as tracer:
    ...     patches = torch.conv2d(x, torch.rand(6, 3, 2, 2), stride=2).flatten(2).transpose(1, 2)
    ...     tokens = torch.cat([patches, token], 1)
    >>> [position.flatten().tolist() for position in tracer.of(tokens)]
    [[0.25, 0.25, 0.75, 0.75, 0.0], [0.25, 0.75, 0.25, 0.75, 0.0]]
    """

    def __init__(self, x: Tensor, constants: Iterable[Tensor] = ()) -> None:
        """Start at the photo's pixels; ``constants`` lie nowhere."""
        self._states: Any = WeakIdKeyDictionary()
        for constant in constants:
            self._states[constant] = NOWHERE
        self._states[x] = tuple(_pixels(x, dim) for dim in range(2, x.ndim))
        self.sequences: dict[tuple[int, ...], list[Positions]] = {}
        """The positions of tensors ``(N, T, C)``, by their shape."""
        self.added: dict[int, list[tuple[tuple[int, ...], Positions]]] = {}
        """The shapes and positions of such tensors that a constant was added to, by its storage."""

    def of(self, tensor: Tensor) -> State:
        """Where in the photo the values of a tensor lie; UNKNOWN for a tensor that was not seen."""
        return self._states.get(tensor, UNKNOWN)  # type: ignore[no-any-return]

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of the forward pass, and follow the positions of its results.

        `Tracer` calls this in place of every PyTorch function. An error in following only makes
        positions unknown.
        """
        name = operation_name(func)
        result = func(*args, **kwargs)
        if name == "get":
            name = str(getattr(func.__self__, "__name__", ""))
        call = Call(func, name, args, kwargs)
        result_is = call.flat[0] if name == "setitem" else result
        results = list(result_is) if isinstance(result_is, (tuple, list)) else [result_is]
        tensors = [result_part for result_part in results if isinstance(result_part, Tensor)]
        if tensors:
            for tensor, state in zip(tensors, self._states_of(call, tensors), strict=True):
                self._set_state(tensor, state)
                if isinstance(state, tuple) and tensor.ndim == 3 and call.info.traits & ADDS:
                    self._add_constants(call, tuple(tensor.shape), state)
        return result

    def _add_constants(self, call: Call, shape: tuple[int, ...], state: Positions) -> None:
        """Note the shape and positions of a sum ``(N, T, C)`` under each constant among its
        arguments, by the constant's memory.

        This tells what a position embedding was added to.
        """
        for tensor in call.tensors:
            if self.of(tensor) is NOWHERE:
                self.added.setdefault(storage_of(tensor), []).append((shape, state))

    def _set_state(self, tensor: Tensor, state: State) -> None:
        """Note where a tensor's values lie; tokens ``(N, T, C)`` are also listed in ``sequences``
        by shape."""
        self._states[tensor] = state
        if isinstance(state, tuple) and tensor.ndim == 3:
            positions_of_shape = self.sequences.setdefault(tuple(tensor.shape), [])
            if not any(all(map(torch.equal, state, other)) for other in positions_of_shape):
                positions_of_shape.append(state)

    def _states_of(self, call: Call, results: Sequence[Tensor]) -> Sequence[State]:
        """Where the values of each result of a call lie.

        Errors in following become UNKNOWN; signals such as Ctrl-C are raised.
        """
        transform = _FOURIER.fullmatch(call.name)
        if transform is not None:  # coefficients belong to no place, what they make up may
            return [UNKNOWN if transform["inverse"] else NOWHERE] * len(results)
        if call.info.has("fills") or all(self.of(tensor) is NOWHERE for tensor in call.tensors):
            return [NOWHERE] * len(results)
        try:
            if _moves(call, results):
                return self._moved(call, results)
            return [self._computed(call, result) for result in results]
        except Exception as error:  # functions may be called in unknown ways
            if came_by_signal(error):
                raise
            return [UNKNOWN] * len(results)

    def _moved(self, call: Call, results: Sequence[Tensor]) -> Sequence[State]:
        """The positions of each result of a call that moves values: the call is made again, with
        positions in place of values, once for each dimension of the photo.

        UNKNOWN if those of an argument are, or if it has more than `MOST` values.
        """
        is_join = call.info.has("joins")
        sources = call.tensor_places if is_join else [0]
        if call.name in ("setitem", "masked_scatter") and isinstance(call.flat[-1], Tensor):
            sources = [0, len(call.flat) - 1]
        states = {i: self.of(call.flat[i]) for i in sources}
        if any(state is UNKNOWN or call.flat[i].numel() > MOST for i, state in states.items()):
            return [UNKNOWN] * len(results)
        if call.name == "pad":  # the padding lies nowhere (0), whatever its value
            call = Call(call.function, call.name, call.args[:3], {**call.kwargs, "value": 0})
        call_to_make = call.out_of_place() if call.in_place else call
        assert call_to_make is not None
        positions = [state for state in states.values() if isinstance(state, tuple)]
        if not positions:
            return [EVERYWHERE if EVERYWHERE in states.values() else NOWHERE] * len(results)
        positions_of_results: list[list[Tensor]] = [[] for _ in results]
        for axis in range(len(positions[0])):
            positions_by_place = {
                i: _written_out(state, axis, call.flat[i], call.name) for i, state in states.items()
            }
            if call.info.has("reshapes"):
                moved = [compact(positions_by_place[0].reshape(results[0].shape))]
            else:
                moved = moved_labels(call_to_make, positions_by_place)
            for of_result, position in zip(positions_of_results, moved, strict=True):
                of_result.append(position)
        return [
            tuple(of_result) if any(bool(position.any()) for position in of_result) else NOWHERE
            for of_result in positions_of_results
        ]

    def _computed(self, call: Call, result: Tensor) -> State:
        """Where the values of a result lie that a call computes from others, by the kind of
        operation.

        Convolutions and pooling have the mean of their windows; matrix products the mean of a row;
        attention the positions of its queries; other calls those of the first argument that fits.
        """
        states = [self.of(tensor) for tensor in call.tensors]
        name = call.name
        if name == "einsum":
            return _first(_of_einsum(call, states), result)
        if name in _PRODUCTS:
            added = call.info.has("adds to first")
            first_state = states[added]
            second_state = states[added + 1]
            if first_state in (UNKNOWN, EVERYWHERE):
                return first_state
            rows = _mean(first_state, [-1])
            columns = NOWHERE if name == "linear" else _mean(second_state, [-2])
            of_product = _first([rows, columns], result)
            of_constants = NOWHERE in (first_state, second_state)
            # each row mixes the whole photo, and belongs to a row of the first factor (a query)
            return NOWHERE if of_product is EVERYWHERE and not of_constants else of_product
        if any(part in name for part in _FUSED):
            return _first([_mean(states[0], [-1])], result)
        if call.info.has("reduces"):
            reduced_dims = call.named.get("dim")
            return (
                EVERYWHERE
                if reduced_dims is None
                else _first([_reduced(states[0], reduced_dims, result)], result)
            )
        if name.startswith(_RESAMPLES):
            return _resampled(call, states[0], result)
        return _first(states, result)


def _of_einsum(call: Call, states: Sequence[State]) -> list[State]:
    """Where the values of a result of `torch.einsum` lie in the photo: one state for each factor,
    for `_first` to choose from."""
    formula = einsum_formula(call)
    if formula is None:
        return [UNKNOWN]
    terms, kept = formula
    states_of_terms: list[State] = []
    for term, state in zip(terms, states, strict=True):
        mean = _mean(state, [i for i, letter in enumerate(term) if letter not in kept])
        if isinstance(mean, Lost):
            states_of_terms.append(NOWHERE if mean is EVERYWHERE else mean)
        else:
            states_of_terms.append(tuple(einsum_labels(axis, term, kept) for axis in mean))
    return states_of_terms


def _pixels(x: Tensor, dim: int) -> Tensor:
    """The centres of a photo's pixels along dimension ``dim``, from 0 to 1, in the shape that
    broadcasts to ``x``."""
    count = x.shape[dim]
    centres = (torch.arange(count, device=x.device) + 0.5) / count
    return along(centres, x.ndim, dim)


def _moves(call: Call, results: Sequence[Tensor]) -> bool:
    """Whether a call moves, repeats or selects values, rather than computing new ones, so that
    positions in the photo move alike."""
    if call.info.has("reshapes"):
        return bool(results[0].shape != call.flat[0].shape)
    return (
        call.name in _MOVES
        or call.name in _PERMUTES
        or call.info.has("moves")
        or call.info.has("joins")
    )


def _written_out(state: State, axis: int, tensor: Tensor, name: str) -> Tensor:
    """The positions of a tensor's values along one dimension of the photo, as a tensor that the
    call ``name`` can be made with.

    They are expanded to the tensor's shape, but for permutations, which do the same at size 1.
    Values that lie nowhere have 0.
    """
    position = (
        state[axis]
        if isinstance(state, tuple)
        else torch.zeros([1] * tensor.ndim, device=tensor.device)
    )
    return position if name in _PERMUTES else position.expand(tensor.shape)


def _first(states: Iterable[State], result: Tensor) -> State:
    """The first of some positions in the photo that broadcasts to ``result``; if none does, the
    reason, UNKNOWN before others."""
    reasons = {NOWHERE}
    for state in states:
        if isinstance(state, tuple) and (fitting := _spread(state, result)) is not None:
            return fitting
        reasons.add(UNKNOWN if isinstance(state, tuple) else state)
    return next(reason for reason in (UNKNOWN, EVERYWHERE, NOWHERE) if reason in reasons)


def _spread(state: Positions, result: Tensor) -> Positions | None:
    """The positions in the photo with leading dimensions added, to broadcast to ``result``; None if
    they do not fit."""
    fitting = []
    for position in state:
        missing_dims = result.ndim - position.ndim
        if missing_dims < 0:
            return None
        fitting.append(position.reshape([1] * missing_dims + [*position.shape]))
    return tuple(fitting) if all(fits(position, result.shape) for position in fitting) else None


def averaged(position: Tensor, dims: Iterable[int]) -> Tensor:
    """The mean position along some dimensions (kept at size 1), over the values that lie somewhere
    (> 0).

    >>> averaged(torch.tensor([[0.25, 0.0], [0.5, 1.0]]), [1])
    tensor([[0.2500],
            [0.7500]])
    """
    averaged_dims = [dim for dim in dims if position.shape[dim] > 1]
    if not averaged_dims:
        return position
    return _quotient(
        position.double().sum(averaged_dims, keepdim=True),
        (position > 0).sum(averaged_dims, keepdim=True),
    )


def _mean(state: State, dims: Sequence[int]) -> State:
    """The mean positions in the photo along some dimensions, kept at size 1; EVERYWHERE if all
    values then share one."""
    if isinstance(state, Lost):
        return state
    means = tuple(averaged(position, dims) for position in state)
    return means if any(position.numel() > 1 for position in means) else EVERYWHERE


def _reduced(state: State, dims: int | Sequence[int], result: Tensor) -> State:
    """Where the values of a sum or mean over ``dims`` lie in the photo: the mean of what is added
    up.

    Those dimensions are dropped if ``result`` lacks them.
    """
    reduced_dims = [dims] if isinstance(dims, int) else list(dims)
    mean = _mean(state, reduced_dims)
    if isinstance(mean, Lost) or mean[0].ndim == result.ndim:
        return mean
    return tuple(position.squeeze(reduced_dims) for position in mean)


def _resampled(call: Call, state: State, result: Tensor) -> State:
    """Where the values of the result of a convolution, pooling or interpolation lie in the photo:
    at the mean of each window.

    ``state`` is that of its input map ``(N, C, H, W)``. Values that lie nowhere are left out of the
    mean.
    """
    mean = _mean(state, [1])
    if isinstance(mean, Lost):
        return mean
    resample = _by_ones(call) if call.name.startswith("conv") else partial(_with_first, call)
    resampled = []
    for position in mean:
        values = position.double().expand((len(position), 1, *call.flat[0].shape[2:]))
        sums = resample(values)
        counts = resample((values > 0).double())
        resampled.append(_quotient(sums, counts))
    return _first([tuple(resampled)], result)


def _with_first(call: Call, values: Tensor) -> Tensor:
    """The first result of a call that is made with ``values`` in place of its first argument, to
    average positions with a pooling."""
    results = call.make({0: values})
    first_result: Tensor = results if isinstance(results, Tensor) else results[0]
    return first_result


def _by_ones(call: Call) -> Callable[[Tensor], Tensor]:
    """A function that sums positions over each window of a convolution: the same call with one
    channel and weights of 1."""
    options = {
        name: value
        for name, value in call.named.items()
        if name not in ("input", "weight", "bias", "groups")
    }
    weight: Tensor = call.named["weight"]
    ones = torch.ones((1, 1, *weight.shape[2:]), device=weight.device, dtype=torch.float64)
    return lambda values: call.function(values, ones, None, **options)


def _quotient(sums: Tensor, counts: Tensor) -> Tensor:
    """Mean positions in the photo from sums and counts, rounded to single precision so that equal
    positions stay equal."""
    return compact((sums / torch.where(counts == 0, 1, counts)).float())
